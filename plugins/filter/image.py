# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of role image: what the ranks say about their images in, what to do about it out."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import compare
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals


def image_differs(own: t.Mapping[str, t.Any], head: t.Mapping[str, t.Any]) -> bool:
    """Whether a rank has to get the head's image. What check mode only predicts can't be compared: a rank with an image is then taken as
    equal, unless the head is going to build another one, or to follow a tag where the rank could not ask and has what the head had."""
    if not own.get("present") or head.get("built"):
        return True
    if not own.get("identity") or not head.get("identity"):
        return bool(own.get("unasked")) or bool(own.get("identity")) and own["identity"] == head.get("replaces")
    return not compare(head, own).same


def image_refusals(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any]) -> str:
    """Why the group may not start with the images it has; empty when all ranks agree."""
    # Facts may come from a cache and be those of an earlier run; what a task has registered is of this one.
    seen = [name for name in plan["nodes"] if name in hostvars and hostvars[name].get("__image_pull") is not None]
    images = {name: hostvars[name].get("spark_image") if name in seen else None for name in plan["nodes"]}
    unseen = [name for name, image in images.items() if image is None]
    reference = plan["image"]["reference"]
    if unseen:
        found = f"nothing known of {', '.join(unseen)}"
        return format_refusals([Refusal("image.ranks", "", "images of the group", found, "all ranks of the group", "run without --limit")])
    head = images[plan["head"]]
    if not head.get("present"):
        return format_refusals([_head_lacks(plan["head"], reference, hostvars)])
    refusals = [_refusal(name, reference, image, head) for name, image in images.items() if _disagrees(image, head)]
    return format_refusals(refusals) if refusals else ""


def _head_lacks(name: str, reference: str, hostvars: t.Mapping[str, t.Any]) -> Refusal:
    error = (hostvars[name].get("__image_pull") or {}).get("pull_error") or {}
    next_step = "mend the pull, or let it be built: image_build=when_unavailable"
    return Refusal(f"image.{error.get('kind', 'differs')}", name, f"image {reference}", error.get("text", "no image"), "the image on the head", next_step)


def _disagrees(image: t.Mapping[str, t.Any], head: t.Mapping[str, t.Any]) -> bool:
    return not image.get("present") or image.get("identity", head.get("identity")) != head.get("identity", image.get("identity"))


def _refusal(name: str, reference: str, image: t.Mapping[str, t.Any], head: t.Mapping[str, t.Any]) -> Refusal:
    found = image.get("identity", "no image") if image.get("present") else "no image"
    wanted = f"the head's {head.get('identity', 'image')}"
    next_step = "let the role pull or ship it: image_pull_policy=missing, and image_ship_mode=auto"
    return Refusal("image.differs", name, f"image {reference}", found, wanted, next_step)


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"image_differs": image_differs, "image_refusals": image_refusals}
