# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters around the plan: texts for people, and the reader of launch scripts' .env files."""

from __future__ import annotations

import functools
import os
import typing as t

import yaml

from ansible_collections.sparkops.inference.plugins.module_utils import _launcher_env, _plan_text
from ansible_collections.sparkops.inference.plugins.module_utils._options import Option
from ansible_collections.sparkops.inference.plugins.module_utils._profile import catalogue, with_parents
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles

_KNOBS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), "roles", "adopt", "files", "knobs.yml")

# The profiles of each recipe's documents; the newest state knows some names more.
_PROFILES = {
    "deepseek": ("deepseek_v41_flash_exl3", "deepseek_v41_flash_exl3_latest"),
    "glm": ("glm_53_flash_exl3", "glm_53_flash_exl3_latest"),
}


def settings_lines(plan: t.Mapping[str, t.Any]) -> list[str]:
    """Each effective setting of a plan with the class of its origin."""
    return _plan_text.settings_lines(plain(plan))


def spec_changes(
    spec: t.Mapping[str, t.Any], container: t.Mapping[str, t.Any] | None, plan: t.Mapping[str, t.Any], image_id: str | None = None
) -> list[str]:
    """What a start would change in a running container."""
    return _plan_text.spec_changes(plain(spec), plain(container), plain(plan["template"]), image_id) if container else []


def launcher_env(content: str, nodes: t.Sequence[str], recipe: str | None = None) -> dict[str, t.Any]:
    """A launch script's .env file in inventory variables. Nothing in it is executed."""
    values, notes = _launcher_env.parse(str(content))
    recipe = recipe or _launcher_env.recipe_of(values)
    if recipe not in _PROFILES:
        return {"recipe": None, "notes": [*notes, "the file does not say which recipe it belongs to: set adopt_recipe to deepseek or glm"]}
    profile, translation = _best(values, recipe)
    translation.notes = [*notes, *translation.notes]
    return {"recipe": recipe, "profile": profile, **translation.as_dict(), "inventory": _launcher_env.inventory(translation, list(nodes), profile)}


def launcher_env_lines(content: str, nodes: t.Sequence[str], recipe: str | None = None) -> list[str]:
    """The same as lines to print: the inventory, then what needs a person."""
    found = launcher_env(content, nodes, recipe)
    return [
        *found.get("inventory", "").splitlines(),
        *found["notes"],
        *(f"not known, and left out: {name}" for name in found.get("unknown", [])),
        *(f"{name} is left out: {why}" for name, why in found.get("dropped", {}).items()),
    ]


@functools.cache
def _knobs() -> list[dict[str, t.Any]]:
    with open(_KNOBS, encoding="utf-8") as file:
        return yaml.safe_load(file)["knobs"]


@functools.cache
def _options(profile: str) -> dict[str, Option]:
    return catalogue(with_parents(profile, ProfileFiles().find))


def _best(values: t.Mapping[str, str], recipe: str) -> tuple[str, _launcher_env.Translation]:
    """The first profile of the recipe that has all that the file sets, else the newest."""
    for profile in _PROFILES[recipe]:
        translation = _launcher_env.translate(values, recipe, _knobs(), _options(profile))
        if not any("another state" in note for note in translation.notes):
            break
    return profile, translation


def ignored_environment(text: str) -> list[str]:
    """The names in a printed environment that a launch script would have listened to."""
    known = {row["upstream"] for row in _knobs()}
    return sorted({line.partition("=")[0] for line in str(text).splitlines()} & known)


def adopt_hindrance(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any]) -> str:
    """Why a launch script's containers cannot be brought back after a new group failed; empty when they can.

    Two groups at once are more than a Spark's memory holds, and one old rank without its peers is of no use.
    """
    silent = [name for name in plan["nodes"] if "recorded" not in (hostvars[name].get("__adopt_again") or {})]
    held = [name for name in plan["nodes"] if hostvars[name].get("__serve_stopped") and "tail" not in hostvars[name]["__serve_stopped"]]
    reasons = [f"{', '.join(silent)} did not answer"] if silent else []
    return "; ".join([*reasons, *([f"the new rank of {', '.join(held)} was not seen to stop"] if held else [])])


def adopt_failure(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], host: str) -> str:
    """What became of a launch script's containers on a node when the new group could not be proven."""
    stopped = ", ".join((hostvars[host].get("__adopt_again") or {}).get("recorded") or []) or "no container"
    hindrance = adopt_hindrance(hostvars, plan)
    if hindrance:
        outcome = f"{stopped} stays stopped, because {hindrance}"
        step = "once every node answers, run stop.yml, then adopt.yml with adopt_restore=true"
    else:
        outcome, step = f"{stopped} was started again", "mend the reason above, then run adopt.yml again"
    return f"{host}: the new group of {plan['deployment']}: found no proof, see above; wanted one that answers; {outcome}. Next: {step}. [adopt.not_proven]"


class FilterModule:
    """The filters of this file by name."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "settings_lines": settings_lines,
            "spec_changes": spec_changes,
            "launcher_env": launcher_env,
            "launcher_env_lines": launcher_env_lines,
            "ignored_environment": ignored_environment,
            "adopt_hindrance": adopt_hindrance,
            "adopt_failure": adopt_failure,
        }
