# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The rules of a profile: what it refuses, looked for in the settings and in the finished container."""

from __future__ import annotations

import math
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _profile_language as language

Names = t.Mapping[str, t.Any]


def violation(rule: Names, settings: Names, spec: Names | None) -> str | None:
    """What breaks a rule, in words; None when it is kept. Without a spec only the settings are looked at."""
    if "refuse_when" in rule and language.holds(rule["refuse_when"], settings):
        return shown_condition(rule["refuse_when"], settings)
    return _beyond(rule.get("limit"), settings) or _indivisible(rule.get("divisible"), settings) or (_forbidden(rule, spec) if spec else None)


def shown_condition(condition: t.Any, settings: Names) -> str:
    """The settings that make a condition true."""
    if isinstance(condition, list):
        condition = next(item for item in condition if language.holds(item, settings))
    return ", ".join(f"{name} is {language.shown(settings[name])}" for name in condition)


def _beyond(limit: t.Any, settings: Names) -> str | None:
    for item in limit or []:
        value = settings[item["option"]]
        if value is None or not language.holds(item.get("when"), settings):
            continue
        at_most, at_least = (language.number(item[word], settings) if word in item else None for word in ("at_most", "at_least"))
        if at_most is not None and value > at_most:
            return f"{item['option']} is {value}; the largest that fits is {math.floor(at_most) if isinstance(value, int) else at_most}"
        if at_least is not None and value < at_least:
            return f"{item['option']} is {value}; the least is {math.ceil(at_least) if isinstance(value, int) else at_least}"
    return None


def _indivisible(checks: t.Any, settings: Names) -> str | None:
    for check in checks or []:
        count, parts = language.number(check["count"], settings), settings[check["by"]]
        if language.holds(check.get("when"), settings) and count is not None and count % parts:
            return f"{check['what']} {count:g} do not divide by {check['by']} {parts}"
    return None


def _forbidden(rule: Names, spec: Names) -> str | None:
    """What a rule forbids in the finished container of rank 0."""
    for flag, values in (rule.get("forbid_arguments") or {}).items():
        for value in argument_values(spec["command"], flag):
            if values is True or value in values:
                return f"{flag} {value}".strip() + " in the arguments"
    for text in rule.get("forbid_text") or []:
        for item in [*spec["command"], *spec["env"].values()]:
            if text in item:
                return item
    for name in rule.get("forbid_environment") or []:
        if name in spec["env"]:
            return f"{name} in the environment"
    for name, value in (rule.get("require_environment") or {}).items():
        if spec["env"].get(name) != value:
            return f"{name} is {spec['env'].get(name, 'absent')}, not {value}"
    return None


def argument_values(command: t.Sequence[str], flag: str) -> list[str]:
    """The values of an option in a command, in either spelling; an empty text for a bare flag."""
    values = []
    for position, item in enumerate(command):
        if item == flag:
            following = command[position + 1] if position + 1 < len(command) else ""
            values.append("" if following.startswith("--") else following)
        elif item.startswith(flag + "="):
            values.append(item[len(flag) + 1 :])
    return values
