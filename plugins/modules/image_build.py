#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_build
short_description: Compare an image with its recipe, and build it when that is allowed
version_added: 0.1.0
description:
  - Makes the stamp of a recipe's checkout and compares it with the label of the image on this node. A difference is reported.
  - Builds the image only as far as O(mode) allows. The build is a unit of its own that outlives the session; its log is kept.
  - The image gets its name only after the build has succeeded and its layers are few enough for other nodes to load.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Nothing is built, and the result is predicted.
  diff_mode:
    support: none
    description: An image has no difference to show.
  facts:
    support: full
    description: Sets the fact C(spark_image) to RV(image) when the image is built or was built from this recipe before.
  idempotent:
    support: partial
    description: Can be run again without change.
    details: With O(mode=always) every run builds.
options:
  reference:
    description: Image with its tag.
    type: str
    required: true
  recipe:
    description: Checkout of the recipe on this node, with a C(Dockerfile) in it.
    type: path
    required: true
  fetched:
    description: Whether the recipe has just been fetched. In check mode its files are then not there, and a build is predicted without its stamp.
    type: bool
    default: false
  platform:
    description:
      - Platform such as V(linux/arm64) that the image must have. The engine's own by default.
      - An image of another platform counts as none, and a build of another one is refused.
    type: str
  label:
    description: Label of the image that holds the stamp.
    type: str
    default: sparkops.recipe.stamp
  rule:
    description: Which files belong to the stamp - C(files), C(folders), C(exclude). Known for the labels of the published recipes.
    type: dict
  mode:
    description:
      - V(never) only reports.
      - V(when_unavailable) builds when O(unavailable=true).
      - V(on_stamp_change) builds when the image is missing or has another stamp.
      - V(always) builds.
    type: str
    choices: [never, when_unavailable, on_stamp_change, always]
    default: never
  unavailable:
    description: Whether the wanted image is neither here nor at its registry.
    type: bool
    default: false
  build_args:
    description: Further build arguments.
    type: dict
    default: {}
  base:
    description: Local image for the first C(FROM), for a builder that can't reach the registry.
    type: str
  inputs:
    description: Files of this node by their path in the build context.
    type: dict
    default: {}
  size:
    description: About how many bytes the unpacked image has, for the check of disk space.
    type: int
  shared:
    description: Whether the peers of this node may fetch the image from it.
    type: bool
    default: false
  staging:
    description: Directory of this node for image parts on their way to peers.
    type: path
  node:
    description: Name of this node, for messages.
    type: str
    required: true
  deployment:
    description: Name of the deployment; part of the unit's name.
    type: str
    required: true
  state_dir:
    description: Directory of the deployment's state, where the log is kept.
    type: path
    required: true
  state_root:
    description: Directory where this node notes what it knows about its images.
    type: path
    required: true
  user:
    description: Account of this node that runs the build, when the module runs as root. It must have the right to use Docker.
    type: str
    default: ""
  socket:
    description: Socket of the Docker Engine.
    type: path
    default: /var/run/docker.sock
  state:
    description: V(cancelled) stops a build that is going on.
    type: str
    choices: [present, cancelled]
    default: present
  wait_slice:
    description: Seconds to wait for the end in this call; V(0) waits until the end.
    type: int
    default: 0
  run_id:
    description: The run to go on waiting for.
    type: str
"""

EXAMPLES = r"""
- name: Say whether the image is of this checkout
  sparkops.inference.image_build:
    reference: registry.example/team/engine:2.9
    recipe: /home/me/recipe
    label: dsv41.recipe.stamp
    node: "{{ inventory_hostname }}"
    deployment: engine
    state_dir: /var/lib/sparkops/engine
    state_root: /var/lib/sparkops
"""

RETURN = r"""
stamp:
  description: Stamp of the checkout.
  returned: always
  type: str
image_stamp:
  description: Stamp that the image has as its label; empty without image or label.
  returned: always
  type: str
differs:
  description: Whether the two are different.
  returned: always
  type: bool
log:
  description: Log of the build on the node.
  returned: when something was built
  type: str
image:
  description: The image on this node, as M(sparkops.inference.image_pull) describes it.
  returned: when it is there
  type: dict
notices:
  description: What the user should know although the work went well.
  returned: always
  type: list
  elements: str
running:
  description: Whether the build still goes on.
  returned: always
  type: bool
run_id:
  description: The run to wait for.
  returned: when RV(running=true)
  type: str
progress:
  description: How far the build is.
  returned: when RV(running=true)
  type: dict
known_after:
  description: What has to run before the result is known; in check mode only.
  returned: always
  type: list
  elements: str
"""

import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _image_build
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._image_build import floating_bases
from ansible_collections.sparkops.inference.plugins.module_utils._image_export import image_root, lack_of_space
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import Image, from_inspect, own_platform
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._image_stamp import Rule, stamps
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import KEPT_LOGS, keep_newest
from ansible_collections.sparkops.inference.plugins.module_utils._unit import LongModule, identity_at, long_options

# Layers of a build lie on the disk beside the image until they are part of it.
MARGIN = 2 << 30


def must_build(mode: str, unavailable: bool, differs: bool) -> bool:
    """Whether ``mode`` asks for a build. An image that was built from this very recipe is available, whatever the registry says."""
    return mode == "always" or differs and (mode == "on_stamp_change" or mode == "when_unavailable" and unavailable)


class ImageBuild(LongModule):
    """The image of a recipe on this node."""

    area, work, program = "image", "build", _image_build

    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module)
        self.recipe: str = self.params["recipe"]
        self.api = DockerApi(self.params["socket"])
        self.platform: str = self.params["platform"] or ""
        self.forms: list[str] = []
        self.notices: list[str] = []

    def present(self) -> dict[str, t.Any]:
        if self.module.check_mode and self.params["fetched"]:
            return self.unknown("recipe")
        self.require_recipe()
        self.forms = stamps(self.recipe, Rule.of(self.params["label"], self.params["rule"]))
        try:
            return self.built_or_not()
        except DockerError:
            if not self.module.check_mode:
                raise
            # Bootstrap may still install Docker, or give the right to use it.
            return self.unknown("bootstrap")

    def unknown(self, after: str) -> dict[str, t.Any]:
        """A prediction without a look at recipe and image."""
        changed = must_build(self.params["mode"], self.params["unavailable"], differs=True)
        return self.described(None, changed, known_after=[after] if changed else [])

    def built_or_not(self) -> dict[str, t.Any]:
        self.platform = self.platform or own_platform(self.api.version())
        # One that was going on may be the build of another image for this deployment.
        outcome = self.earlier(reference=self.params["reference"])
        if outcome is None:
            image = self.find()
            differs = self.differs(image)
            if not must_build(self.params["mode"], self.params["unavailable"], differs):
                return self.as_it_is(image, differs)
            self.require_space()
            if self.module.check_mode:
                return self.described(image, changed=True, known_after=["image"])
            outcome = self.end_of(self.begin(self.request()))
        self.notices = list(outcome.get("notices", []))
        image = self.find()
        if image is not None:
            self.note_staged(image.id)
        self.share(image)
        return self.described(image, changed=True, log=outcome["log"])

    def as_it_is(self, image: Image | None, differs: bool) -> dict[str, t.Any]:
        """Nothing is built. An image of this recipe stands for one that could not be pulled."""
        if differs:
            self.report(image)
        stands_in = self.params["unavailable"] and not differs
        if stands_in and image is not None:
            self.note_staged(image.id)
        return self.described(image, changed=self.share(image) if stands_in else False)

    def find(self) -> Image | None:
        document = self.api.inspect_image(self.params["reference"])
        image = from_inspect(document, Record(self.params["state_root"]).digests(document["Id"])) if document else None
        # The published image of another platform may lie here under this name, and has the same stamp.
        return image if image and image.platform == self.platform else None

    def differs(self, image: Image | None) -> bool:
        return image is None or image.labels.get(self.params["label"]) not in self.forms

    def report(self, image: Image | None) -> None:
        found = f"the stamp {image.labels.get(self.params['label'], 'nothing')}" if image else "no image"
        self.notices.append(
            f"{self.params['reference']}: the recipe in {self.recipe} has the stamp {self.forms[0]}, the image {found}. "
            "Nothing is built; image_build=on_stamp_change would build it."
        )

    def require_recipe(self) -> None:
        """All that lacks, before anything is built."""
        wanted = {os.path.join(self.recipe, "Dockerfile"): "image_recipe", **{path: "image_build_inputs" for path in self.params["inputs"].values()}}
        lacking = [(path, option) for path, option in wanted.items() if not os.path.isfile(path)]
        if lacking:
            self.fail([self.refusal("recipe", path, "no such file", "a file on this node", f"correct {option}") for path, option in lacking])

    def require_space(self) -> None:
        lack = lack_of_space((image_root(self.api.info()), (self.params["size"] or 0) + MARGIN))
        if lack:
            place, size, free = lack
            self.fail([self.refusal("space", place, f"{free} bytes free", f"{size} bytes for a build", "free disk space where Docker keeps its images")])

    def request(self) -> dict[str, t.Any]:
        params = self.params
        with open(os.path.join(self.recipe, "Dockerfile"), encoding="utf-8") as stream:
            floating = [] if params["base"] else floating_bases(stream.read())
        if floating:
            self.notices.append(f"the recipe starts from {', '.join(floating)} without a digest: another build may give another image")
        log = os.path.join(params["state_dir"], "logs", time.strftime("image-build-%Y%m%dT%H%M%SZ.log", time.gmtime()))
        with identity_at(self.user, params["state_dir"]):
            os.makedirs(os.path.dirname(log), exist_ok=True)
            keep_newest(os.path.dirname(log), "image-build-*.log", KEPT_LOGS - 1)
        wanted = {name: params[name] for name in ("reference", "recipe", "label", "build_args", "base", "inputs", "node", "socket")}
        # The notices are for the call that sees the end, which is seldom this one.
        return {**wanted, "platform": self.platform, "stamp": self.forms[0], "log": log, "notices": self.notices}

    def share(self, image: Image | None) -> bool:
        """Let the peers have it. Says whether that is new."""
        record = Record(self.params["state_root"])
        source = {"staging": self.params["staging"], "socket": self.api.socket_path}
        if image is None or not self.params["shared"] or record.shares(image.id, image.digests, source):
            return False
        if not self.module.check_mode:
            record.share(image.id, image.digests, source, reference=self.params["reference"], identity=image.identity)
        return True

    def described(self, image: Image | None, changed: bool, known_after: t.Sequence[str] = (), **more: t.Any) -> dict[str, t.Any]:
        image_stamp = image.labels.get(self.params["label"], "") if image else ""
        about = {"stamp": self.forms[0] if self.forms else "", "image_stamp": image_stamp, "differs": self.differs(image)}
        found: dict[str, t.Any] = {"present": image is not None, "reference": self.params["reference"]}
        if known_after:
            found.update(present=True, digest=None, built=about["differs"])
        elif image is not None:
            found.update(image.as_dict(), digest=min(image.digests, default=None))
        # Where nothing was built the image that was pulled is the one.
        stands_in = self.params["unavailable"] and not about["differs"]
        facts = {"spark_image": found} if changed or known_after or stands_in else {}
        return self.result([], changed=changed, image=found, ansible_facts=facts, notices=self.notices, known_after=list(known_after), **about, **more)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "recipe": {"type": "path", "required": True},
            "fetched": {"type": "bool", "default": False},
            "platform": {"type": "str"},
            "label": {"type": "str", "default": "sparkops.recipe.stamp"},
            "rule": {"type": "dict"},
            "mode": {"type": "str", "choices": ["never", "when_unavailable", "on_stamp_change", "always"], "default": "never"},
            "unavailable": {"type": "bool", "default": False},
            "build_args": {"type": "dict", "default": {}},
            "base": {"type": "str"},
            "inputs": {"type": "dict", "default": {}},
            "size": {"type": "int"},
            "shared": {"type": "bool", "default": False},
            "staging": {"type": "path"},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
            **long_options(),
        },
        supports_check_mode=True,
    )
    build = ImageBuild(module)
    try:
        build.main(build.present)
    except (DockerError, OSError) as exc:
        thing = f"build of {module.params['reference']}"
        build.fail([build.refusal("engine", thing, str(exc), "an engine that answers", "see what preflight says of Docker on this node")])


if __name__ == "__main__":
    main()
