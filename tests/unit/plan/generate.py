#!/usr/bin/env python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Makes the files that follow from the option table and the profiles. Run it after a change of either; a test compares."""

from __future__ import annotations

import functools
import json
import pathlib
import typing as t

import yaml

from ansible_collections.sparkops.inference.plugins.module_utils._options import Option, options
from ansible_collections.sparkops.inference.plugins.module_utils._profile import catalogue, with_parents
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles

ROOT = pathlib.Path(__file__).resolve().parents[3]
SPECS = ROOT / "roles" / "plan" / "meta" / "argument_specs.yml"
# The reader of .env files works by these rows, so they lie in the role; docs/ is not there in an installed collection.
KNOBS_SOURCE = ROOT / "roles" / "adopt" / "files" / "knobs.yml"
KNOBS_DATA = ROOT / "docs" / "knobs.yml"
KNOBS_PAGE = ROOT / "docs" / "knobs.md"
RULES = ROOT / "docs" / "refusals" / "plan_rules.yml"

RECIPES = {
    "deepseek": ("deepseek_v41_flash_exl3", "deepseek_v41_flash_exl3_latest"),
    "glm": ("glm_53_flash_exl3", "glm_53_flash_exl3_latest"),
}


@functools.cache
def profiles() -> dict[str, dict[str, t.Any]]:
    """All shipped profiles that can be served, with what they extend."""
    files = ProfileFiles()
    return {name: with_parents(name, files.find) for name in files.names()}


@functools.cache
def catalogues() -> dict[str, dict[str, Option]]:
    return {name: catalogue(profile) for name, profile in profiles().items()}


# -- roles/plan/meta/argument_specs.yml ------------------------------------------------------------------------------


def argument_specs() -> str:
    known = catalogues()
    common = options()
    entries = {name: _spec(option, []) for name, option in common.items()}
    for its_options in known.values():
        for name, option in its_options.items():
            if name not in common:
                owners = [other for other, theirs in known.items() if name in theirs]
                entries.setdefault(name, _spec(option, owners))
    # Not the entry point main: Ansible would check it in every play, a tenth of a second for each host, and raw options have nothing to check.
    entry_point = {
        "short_description": "Work out the effective deployment of a serving group",
        "version_added": "0.1.0",
        "description": [
            "Reads the options of all hosts in C(serve_nodes) and the profile, and works out what will run where.",
            "Everything that is wrong is said at once, before any node is changed.",
            "Options are taken as text or as typed values; an unanswered one is the default.",
        ],
        "options": entries,
    }
    head = "---\n# Made by tests/unit/plan/generate.py from the option table and the profiles. Do not edit.\n"
    return head + yaml.dump({"argument_specs": {"options": entry_point}}, Dumper=_Dumper, sort_keys=False, width=150, allow_unicode=True)


def _spec(option: Option, owners: list[str]) -> dict[str, t.Any]:
    text = [option.description, f"Wanted is {option.wanted}."]
    if owners:
        text.append(f"Profiles {', '.join(owners)}." if len(owners) > 1 else f"Profile {owners[0]}.")
    elif option.default is not None:
        text.append(f"The default is {json.dumps(option.default)}.")
    if option.scope == "node":
        text.append("Each host may have its own.")
    return {"type": "raw", "no_log": True, "description": text} if option.secret else {"type": "raw", "description": text}


class _Dumper(yaml.SafeDumper):
    """Indents lists as yamllint wants them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> t.Any:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: t.Any) -> bool:
        return True


# -- docs/refusals/plan_rules.yml ------------------------------------------------------------------------------------


def rule_refusals() -> str:
    entries: dict[str, dict[str, t.Any]] = {}
    for name, profile in profiles().items():
        for id, rule in (profile.get("rules") or {}).items():
            if set(rule) & {"refuse_when", "limit", "divisible", "forbid_arguments", "forbid_text", "forbid_environment", "require_environment"}:
                means = f"Profile {name}: {rule['says']}, because {rule['reason'].rstrip('.')}."
                do = f"{rule.get('next', 'Leave it at the profile default')}. An expert accepts the rule with serve_accept_rules: [{id}]."
                entries.setdefault(f"rule.{id}", {"id": f"rule.{id}", "means": means, "do": do[0].upper() + do[1:]})
    head = "---\n# Made by tests/unit/plan/generate.py from the profiles. Do not edit.\n"
    return head + yaml.dump(list(entries.values()), Dumper=_Dumper, sort_keys=False, width=150, allow_unicode=True)


# -- docs/knobs.md ---------------------------------------------------------------------------------------------------


def knobs() -> list[dict[str, t.Any]]:
    """Every name of the launch scripts, with the defaults of each recipe's first profile that has the variable."""
    rows = yaml.safe_load(KNOBS_SOURCE.read_text(encoding="utf-8"))["knobs"]
    for row in rows:
        row["defaults"] = {recipe: {name: _default(name, recipe) for name in row["variables"]} for recipe in row["recipes"]}
    return rows


def knobs_data() -> str:
    rows = [{key: value for key, value in row.items() if key not in ("reader", "values")} for row in knobs()]
    head = "---\n# Made by tests/unit/plan/generate.py from roles/adopt/files/knobs.yml, the option table and the profiles. Do not edit.\n"
    return head + yaml.dump({"knobs": rows}, Dumper=_Dumper, sort_keys=False, width=150, allow_unicode=True)


def knobs_page() -> str:
    rows = knobs()
    lines = [
        "# Knobs of the two recipes",
        "",
        "Made by `tests/unit/plan/generate.py` from [knobs.yml](knobs.yml). Every name that the launch scripts of the two recipes know, what it is here,",
        "and where it ends up. Ranks: B both (all) ranks alike, H the head, P each rank its own value, L not in the container.",
        "`playbooks/adopt.yml` reads a launcher's `.env` with this table.",
        "",
    ]
    for recipe, title in (("deepseek", "DeepSeek-V4.1-Flash EXL3"), ("glm", "GLM-5.3-Flash EXL3")):
        mine = [row for row in rows if recipe in row["recipes"]]
        lines += [
            f"## {title}",
            "",
            f"{len(mine)} knobs.",
            "",
            "| upstream | variable | default | ranks | ends up in | note |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(row, recipe) for row in mine]
        lines.append("")
    return "\n".join(lines)


def _row(row: dict[str, t.Any], recipe: str) -> str:
    names = ", ".join(f"`{name}`" for name in row["variables"]) or "none"
    default = ", ".join(f"`{value}`" for value in row["defaults"][recipe].values())
    cells = [f"`{row['upstream']}`", names, default, row["ranks"], row["where"], row.get("note", "")]
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _default(name: str, recipe: str) -> str:
    for profile in RECIPES[recipe]:
        if name in catalogues()[profile]:
            value = catalogues()[profile][name].default
            return (
                "by condition"
                if isinstance(value, dict) and "choose" in value
                else "not set"
                if value is None
                else json.dumps(value, ensure_ascii=False)
            )
    return "not in this recipe"


FILES: dict[pathlib.Path, t.Callable[[], str]] = {SPECS: argument_specs, RULES: rule_refusals, KNOBS_DATA: knobs_data, KNOBS_PAGE: knobs_page}


def main() -> None:
    for path, make in FILES.items():
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
