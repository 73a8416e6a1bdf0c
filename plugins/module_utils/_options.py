# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The one table of options, and the one way a raw value becomes a typed one.

Inventories, surveys and C(-e) bring text as often as typed values. Every value is either converted to the kind
that the table names, or refused with the form that is wanted. Nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import fractions
import json
import math
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._option_table import TABLE

KINDS = ("str", "int", "float", "bool", "list", "dict", "size", "path")

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(B|[KMGT]iB|[KMGT]B)?")
# One more than the engines and kernels that get a size can hold.
_SIZE_LIMIT = 2**63

_SIZE_UNITS = {
    "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip

FORMS = {
    "str": "a text",
    "int": "a whole number such as 2",
    "float": "a number such as 0.85",
    "bool": "true or false",
    "list": "a list",
    "dict": 'a mapping, or its JSON text such as {"name": "value"}',
    "size": "a number of bytes, or a number with a unit such as 2.5 GiB",
    "path": "an absolute path, or one that begins with ~/",
}


class ConversionError(ValueError):
    """A raw value that is not what its option wants."""

    def __init__(self, found: str, wanted: str, hint: str = "") -> None:
        super().__init__(f"found {found}; wanted {wanted}")
        self.found = found
        self.wanted = wanted
        self.hint = hint


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting that a user may give."""

    name: str
    kind: str
    description: str
    default: t.Any = None
    choices: tuple[t.Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    scope: str = "group"
    secret: bool = False
    role: str = "plan"
    pattern: str = ""
    form: str = ""
    # Text of a list is split at commas only where no item can hold one. Arguments can: they need JSON.
    comma: bool = True
    # Words or a whole number: digits alone become a number. In a list every item is one.
    digits: bool = False
    # The word none is a value: it takes away what would be there otherwise.
    none: bool = False
    upstream: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, name: str, data: t.Mapping[str, t.Any]) -> Option:
        fields = dict(data)
        for key in ("choices", "upstream"):
            value = fields.get(key) or ()
            fields[key] = (value,) if isinstance(value, str) else tuple(value)
        return cls(name=name, **fields)

    @property
    def wanted(self) -> str:
        """The expected form in words, for messages and documents."""
        if self.choices:
            return "one of " + ", ".join(_show(choice) for choice in self.choices)
        words = self.form or FORMS[self.kind]
        if self.kind == "list" and not self.form:
            words += ", or its text: " + ("items with commas between, or JSON" if self.comma else 'JSON such as ["a", "b c"]')
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {_plain_number(self.minimum)} to {_plain_number(self.maximum)}"
        if self.minimum is not None:
            return f"{words}, at least {_plain_number(self.minimum)}"
        if self.maximum is not None:
            return f"{words}, at most {_plain_number(self.maximum)}"
        return words


def options() -> dict[str, Option]:
    """All options of the collection that do not depend on a profile, by name."""
    return {name: Option.from_dict(name, data) for name, data in TABLE.items()}


def is_unset(raw: t.Any) -> bool:
    """An unanswered survey question, an empty text and null all mean: use the default."""
    return raw is None or (isinstance(raw, str) and raw.strip() == "")


def convert(option: Option, raw: t.Any) -> t.Any:
    """The typed value of a raw one; None when it is unset. Raises ConversionError."""
    if is_unset(raw):
        return None
    value = _CONVERTERS[option.kind](option, raw)
    _check_choices(option, value)
    _check_range(option, value)
    _check_pattern(option, value)
    if option.digits and isinstance(value, list):
        return [int(item) for item in value]
    return int(value) if option.digits and value.isdecimal() else value


def _refuse(option: Option, raw: t.Any, hint: str = "") -> ConversionError:
    return ConversionError("a value that is not shown" if option.secret else _show(raw), option.wanted, hint)


def _show(value: t.Any) -> str:
    """A value as a reader of an inventory would write it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError):
        return repr(value)


def _plain_number(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def _to_str(option: Option, raw: t.Any) -> str:
    if option.digits and isinstance(raw, int) and not isinstance(raw, bool):
        return str(raw)
    if not isinstance(raw, str):
        raise _refuse(option, raw, "write it in quotes: without them YAML turns it into another kind of value")
    if option.secret and raw != raw.strip():
        # Stripping would make a key that differs from the one the user hands to clients.
        raise _refuse(option, raw, "remove the blanks around it")
    text = raw.strip()
    if text.lower() in ("none", "null") and text not in option.choices and not (option.none and text == "none"):
        raise _refuse(option, raw, "leave it empty to get the default")
    return text


def _to_path(option: Option, raw: t.Any) -> str:
    text = _to_str(option, raw)
    if not (text.startswith(("/", "~/")) or text == "~"):
        raise _refuse(option, raw)
    if "\n" in text or "\0" in text:
        raise _refuse(option, raw, "a path is one line")
    return text


def _to_bool(option: Option, raw: t.Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower() if isinstance(raw, (str, int)) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise _refuse(option, raw)


def _to_int(option: Option, raw: t.Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and _INTEGER.fullmatch(raw.strip()):
        return int(raw)
    raise _refuse(option, raw, "write digits only")


def _to_float(option: Option, raw: t.Any) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        number = float(raw)
    elif isinstance(raw, str) and _NUMBER.fullmatch(raw.strip()):
        number = float(raw)
    else:
        raise _refuse(option, raw)
    if not math.isfinite(number):
        raise _refuse(option, raw)
    return number


def _to_size(option: Option, raw: t.Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        count = exact = raw
    else:
        match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
        if match is None:
            raise _refuse(option, raw)
        # A float would hold whole numbers only up to 2**53.
        exact = fractions.Fraction(match[1]) * _SIZE_UNITS[match[2] or "B"]
        count = math.floor(exact)
        if exact != count and match[2] in (None, "B"):
            raise _refuse(option, raw, "it is not a whole number of bytes")
    if not 0 <= count < _SIZE_LIMIT or (exact and not count):
        raise _refuse(option, raw, "no size is negative, less than a byte, or more than 8 EiB")
    return count


def _to_list(option: Option, raw: t.Any) -> list[t.Any]:
    items = _list_from_text(option, raw) if isinstance(raw, str) else raw
    if not isinstance(items, (list, tuple)):
        raise _refuse(option, raw)
    return [_list_item(option, raw, item) for item in items]


def _list_from_text(option: Option, text: str) -> t.Any:
    if text.strip().startswith("["):
        return _from_json(option, text)
    if not option.comma:
        raise _refuse(option, text, "one text is not split into arguments: give a list, or its JSON text")
    if text.strip().lower() in ("none", "null"):
        raise _refuse(option, text, "leave it empty to get the default")
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        raise _refuse(option, text, "an item between two commas is empty")
    return items


def _list_item(option: Option, raw: t.Any, item: t.Any) -> t.Any:
    if isinstance(item, str):
        return item
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return str(item) if option.digits else item
    if isinstance(item, (dict, list)) and not option.comma:
        # A mapping as an argument becomes its JSON text, so that nobody has to quote by hand.
        return item
    raise _refuse(option, raw, f"the item {_show(item)} is not a text or a number")


def _to_dict(option: Option, raw: t.Any) -> dict[str, t.Any]:
    value = _from_json(option, raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _refuse(option, raw)
    return dict(value)


def _from_json(option: Option, text: str) -> t.Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise _refuse(option, text, f"it is not JSON: {error}") from error


def _no_constant(word: str) -> t.Any:
    raise ValueError(f"{word} is not a JSON value")


_CONVERTERS: dict[str, t.Callable[[Option, t.Any], t.Any]] = {
    "str": _to_str,
    "path": _to_path,
    "bool": _to_bool,
    "int": _to_int,
    "float": _to_float,
    "size": _to_size,
    "list": _to_list,
    "dict": _to_dict,
}


def _check_choices(option: Option, value: t.Any) -> None:
    values = value if option.kind == "list" else [value]
    if option.choices and not all(item in option.choices for item in values):
        raise _refuse(option, value)


def _check_range(option: Option, value: t.Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if option.minimum is not None and value < option.minimum:
        raise _refuse(option, value)
    if option.maximum is not None and value > option.maximum:
        raise _refuse(option, value)


def _check_pattern(option: Option, value: t.Any) -> None:
    values = value if isinstance(value, list) else [value]
    if option.pattern and not all(isinstance(item, str) and re.fullmatch(option.pattern, item) for item in values):
        raise _refuse(option, value)
