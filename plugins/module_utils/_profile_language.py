# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The value language of profiles: placeholders, conditions and choices. There is no Jinja and no shell in it.

* ``${name}`` as a whole item is the native value of that name; inside a text it is the value as text.
  ``$${`` is a literal ``${``. Every other ``$``, ``%`` or brace is itself. What a placeholder brings in is not
  looked at again, so a user's text arrives byte for byte.
* ``{choose: [{when: …, value: …}, {value: …}]}`` is the value of the first entry whose condition holds, else null.
* ``{join: …}`` is the items of a list with commas between, null when there are none.
* ``{capture_sizes: {base: […], sequences: …, draft_tokens: …}}`` is the base and every number of rows that a step can have.
* A condition maps names to what they must be; all entries must hold. A list of conditions holds when one does.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import typing as t

_PLACEHOLDER = re.compile(r"\$?\$\{([^{}]*)\}")


class LanguageError(ValueError):
    """A profile that asks for something that does not exist."""


def near(name: str, known: t.Iterable[str]) -> str:
    """`` (did you mean …?)`` for a misspelt name, or nothing."""
    # Only what one slip of the pen explains: names here share long beginnings.
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.87)
    return f" (did you mean {matches[0]}?)" if matches else ""


def placeholders(value: t.Any) -> set[str]:
    """All names that a value of the language reads, in texts and in conditions."""
    if isinstance(value, str):
        return {match.group(1) for match in _PLACEHOLDER.finditer(value) if not match.group(0).startswith("$$")}
    if isinstance(value, dict):
        names = set().union(*(placeholders(item) for item in value.values())) if value else set()
        return names | condition_names(value.get("when")) | condition_names(value.get("refuse_when"))
    if isinstance(value, (list, tuple)):
        return set().union(*(placeholders(item) for item in value)) if value else set()
    return set()


def condition_names(condition: t.Any) -> set[str]:
    """The names that a condition tests."""
    if isinstance(condition, dict):
        return {name for name in condition if isinstance(name, str)}
    if isinstance(condition, list):
        return set().union(*(condition_names(item) for item in condition)) if condition else set()
    return set()


def resolve(value: t.Any, names: t.Mapping[str, t.Any]) -> t.Any:
    """The value with all placeholders and choices put in. Entries of a mapping that come out as null are left out."""
    if isinstance(value, str):
        return _resolve_text(value, names)
    if isinstance(value, dict):
        if len(value) == 1 and (form := next(iter(value))) in _FORMS:
            return _FORMS[form](value[form], names)
        pairs = ((key, resolve(item, names)) for key, item in value.items())
        return {key: item for key, item in pairs if item is not None}
    if isinstance(value, (list, tuple)):
        return [resolve(item, names) for item in value]
    return value


def _choose(entries: t.Any, names: t.Mapping[str, t.Any]) -> t.Any:
    for entry in entries:
        if holds(entry.get("when"), names):
            return resolve(entry.get("value"), names)
    return None


def _join(items: t.Any, names: t.Mapping[str, t.Any]) -> str | None:
    return ",".join(as_text(item) for item in resolve(items, names) or []) or None


def _capture_sizes(given: t.Mapping[str, t.Any], names: t.Mapping[str, t.Any]) -> list[int]:
    """Each sequence of a step brings its last token and its draft tokens, so a step has a multiple of that many rows."""
    data = resolve(given, names)
    drafts = data.get("draft_tokens", 0)
    rows = [draft + 1 for draft in (drafts if isinstance(drafts, list) else [drafts])]
    return sorted({*data["base"], *(row * sequences for row in rows for sequences in range(1, data["sequences"] + 1))})


_FORMS: dict[str, t.Callable[[t.Any, t.Mapping[str, t.Any]], t.Any]] = {
    "choose": _choose,
    "join": _join,
    "capture_sizes": _capture_sizes,
}


def _resolve_text(text: str, names: t.Mapping[str, t.Any]) -> t.Any:
    whole = _PLACEHOLDER.fullmatch(text)
    if whole and not text.startswith("$$"):
        return _look_up(whole.group(1), names)
    missing = []

    def put_in(match: re.Match[str]) -> str:
        if match.group(0).startswith("$$"):
            return match.group(0)[1:]
        value = _look_up(match.group(1), names)
        if value is None:
            missing.append(match.group(1))
        return as_text(value)

    result = _PLACEHOLDER.sub(put_in, text)
    # A text around a value that is not set would be a half-made argument.
    return None if missing else result


def _look_up(name: str, names: t.Mapping[str, t.Any]) -> t.Any:
    if name not in names:
        raise LanguageError(f"${{{name}}} is not known here{near(name, names)}")
    return names[name]


def as_text(value: t.Any) -> str:
    """A value as it stands in an argument or a variable: booleans as 1 and 0, lists and mappings as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    if isinstance(value, float) and value.is_integer():
        # Some readers of a variable take whole numbers alone, and those of a decimal take both.
        return str(int(value))
    return "" if value is None else str(value)


def shown(value: t.Any) -> str:
    """A value in a message."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else as_text(value)


def holds(condition: t.Any, names: t.Mapping[str, t.Any]) -> bool:
    """Whether a condition is true. No condition is true."""
    if condition is None:
        return True
    if isinstance(condition, list):
        return any(holds(item, names) for item in condition)
    return all(_test(_look_up(name, names), wanted, names) for name, wanted in condition.items())


def _test(value: t.Any, wanted: t.Any, names: t.Mapping[str, t.Any]) -> bool:
    if isinstance(wanted, dict) and wanted:
        unknown = sorted(set(wanted) - set(_OPERATORS))
        if unknown:
            raise LanguageError(f"{unknown[0]} is no test{near(unknown[0], _OPERATORS)}")
        return all(_OPERATORS[word](value, operand, names) for word, operand in wanted.items())
    if isinstance(wanted, list) and wanted:
        return any(_same(value, resolve(item, names)) for item in wanted)
    return _same(value, resolve(wanted, names))


def _same(left: t.Any, right: t.Any) -> bool:
    # 1 and true are different answers to different questions, though Python calls them equal.
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def number(expression: t.Any, names: t.Mapping[str, t.Any]) -> float | None:
    """The value of a small sum or product; None when a part of it is not set."""
    if isinstance(expression, dict):
        ((word, operands),) = expression.items()
        parts = [number(operand, names) for operand in operands]
        if any(part is None for part in parts):
            return None
        return sum(parts) if word == "sum" else math.prod(parts)
    value = resolve(expression, names)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _compare(value: t.Any, operand: t.Any, names: t.Mapping[str, t.Any], test: t.Callable[[float, float], bool]) -> bool:
    bound = number(operand, names)
    values = value if isinstance(value, list) else [value]
    numbers = [item for item in values if isinstance(item, (int, float)) and not isinstance(item, bool)]
    return bound is not None and any(test(item, bound) for item in numbers)


_OPERATORS: dict[str, t.Callable[[t.Any, t.Any, t.Mapping[str, t.Any]], bool]] = {
    "not": lambda value, operand, names: not _test(value, operand, names),
    "given": lambda value, operand, names: (value is not None) == operand,
    "is": lambda value, operand, names: _same(value, resolve(operand, names)),
    "has": lambda value, operand, names: any(item in (value or []) for item in operand),
    "above": lambda value, operand, names: _compare(value, operand, names, lambda item, bound: item > bound),
    "below": lambda value, operand, names: _compare(value, operand, names, lambda item, bound: item < bound),
    "multiple_of": lambda value, operand, names: _compare(value, operand, names, lambda item, bound: item % bound == 0),
}


def items_of(group: t.Any, names: t.Mapping[str, t.Any]) -> list[str]:
    """The argument items of one group, or none when its condition is false or one of its values is not set."""
    if isinstance(group, dict) and "items" in group:
        if not holds(group.get("when"), names):
            return []
        group = group["items"]
    result: list[str] = []
    for item in group if isinstance(group, list) else [group]:
        value = resolve(item, names)
        if value is None or (value == {} and item != {}):
            return []
        # A list that a placeholder brings is several items; one that is written out is JSON.
        several = isinstance(value, list) and isinstance(item, str)
        result.extend(as_text(part) for part in value) if several else result.append(as_text(value))
    return result


def variable(value: t.Any, names: t.Mapping[str, t.Any]) -> str | None:
    """The text of one environment variable; None means that the variable is absent, never that it is empty."""
    if isinstance(value, dict) and "value" in value:
        if not holds(value.get("when"), names):
            return None
        value = value["value"]
    result = resolve(value, names)
    return None if result is None else as_text(result)
