# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Survey questions of AWX from the planner's option table.

``python tests/unit/awx/awx_survey.py --write`` writes the questions into playbooks/vars/awx.yml; a test fails when they are stale.
"""

from __future__ import annotations

import json
import os
import re
import sys
import typing as t

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
if __name__ == "__main__":
    sys.path.insert(0, os.path.join(ROOT, ".collections"))

from ansible_collections.sparkops.inference.plugins.module_utils._options import Option, options

DATA = os.path.join(ROOT, "playbooks/vars/awx.yml")
BLOCK = re.compile(r"(?<=do not edit -{53}\n)awx_questions:.*?(?=# --- end of what is made)", re.DOTALL)
MARKUP = re.compile(r"\b[COVI]\(([^)]*)\)")

# Only what belongs to one run: a setting of the group that a survey changed would be undone by the next run from the inventory.
ASKED = (
    "engram_priority", "engram_rate_limit", "image_pull_policy", "image_ship_mode", "logs_of", "logs_tail", "rollback_to", "serve_drain_timeout",
    "serve_stop_grace", "settings_compare", "weight_sync_policy", "weight_sync_verify", "weights_download", "weights_verify",
)  # fmt: skip

# A variable of the plays and no option: the inventory's own names cannot stand in a table.
GROUP_QUESTION = {
    "question_name": "spark_hosts",
    "question_description": "The inventory group to work on. One run is one group.",
    "variable": "spark_hosts",
    "required": False,
    "type": "text",
    "default": "sparks",
    # AWX leaves a shorter answer out, as it does with none.
    "min": 1,
}


def question(option: Option) -> dict[str, t.Any]:
    """The survey question of an option: a default is never required, for one does not count as an answer to AWX's API."""
    if option.secret:
        raise ValueError(f"{option.name} is secret: it belongs into a credential, not into a survey")
    answer = _answer(option)
    # Of a choice or a number AWX itself shows what is wanted.
    wanted = f" Wanted is {option.wanted}." if answer["type"].startswith("text") else ""
    return {
        "question_name": option.name,
        "question_description": MARKUP.sub(r"\1", option.description) + wanted,
        "variable": option.name,
        "required": False,
        **answer,
    }


def _answer(option: Option) -> dict[str, t.Any]:
    """Type, default, and limits. AWX's own types where they mean the same; else text, which the planner converts or refuses."""
    if option.kind == "bool":
        return {"type": "multiplechoice", "choices": ["true", "false"], "default": _text(option.default)}
    if option.choices and option.kind == "str":
        return {"type": "multiplechoice", "choices": list(option.choices), "default": _text(option.default)}
    if option.kind in ("int", "float"):
        limits = {name: int(value) for name, value in (("min", option.minimum), ("max", option.maximum)) if value is not None and float(value).is_integer()}
        return {"type": {"int": "integer"}.get(option.kind, "float"), "default": "" if option.default is None else option.default, **limits}
    return {"type": "textarea" if option.kind in ("list", "dict") else "text", "default": _text(option.default)}


def _text(value: t.Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)


def questions() -> dict[str, dict[str, t.Any]]:
    table = options()
    return {"spark_hosts": GROUP_QUESTION, **{name: question(table[name]) for name in ASKED}}


def block() -> str:
    """The questions as YAML, each with an anchor of its own name."""
    lines = ["awx_questions:"]
    for name, content in questions().items():
        lines.append(f"  {name}: &{name}")
        dumped = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=150, default_flow_style=False, indent=2)
        lines.extend(f"    {line}" for line in _indented(dumped).splitlines())
    return "\n".join(lines) + "\n"


def _indented(dumped: str) -> str:
    """Lists as the linter wants them."""
    return re.sub(r"^- ", "  - ", dumped, flags=re.MULTILINE)


def written() -> str:
    with open(DATA, encoding="utf-8") as stream:
        return stream.read()


def main() -> int:
    text = written()
    fresh, count = BLOCK.subn(lambda dummy: block(), text)
    if count != 1:
        print(f"{DATA} has no block of questions")
        return 1
    if "--write" in sys.argv:
        with open(DATA, "w", encoding="utf-8") as stream:
            stream.write(fresh)
        return 0
    return int(fresh != text)


if __name__ == "__main__":
    sys.exit(main())
