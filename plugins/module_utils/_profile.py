# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Profiles: data about one model on one engine. Reading files is done elsewhere; here is what a profile means."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._options import Option, options
from ansible_collections.sparkops.inference.plugins.module_utils._profile_language import near

# These are values, not structure: the heir's stands instead of the parent's, key by key mixing would make no sense.
_ATOMIC = ("default", "when", "choose", "value", "items")


class ProfileError(ValueError):
    """A profile that cannot be used, with one line per fault."""

    def __init__(self, name: str, faults: t.Sequence[str]) -> None:
        super().__init__(f"profile {name}: " + "; ".join(faults))
        self.name = name
        self.faults = list(faults)


def merge(base: t.Mapping[str, t.Any], over: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The heir's values over the parent's. null takes an entry away; the parent's order of entries stays."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if value is None:
            result.pop(key, None)
        elif key not in _ATOMIC and _is_structure(value) and _is_structure(old):
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def _is_structure(value: t.Any) -> bool:
    return isinstance(value, dict) and not (len(value) == 1 and set(value) & {"choose", "join", "capture_sizes"})


def with_parents(name: str, find: t.Callable[[str], t.Mapping[str, t.Any] | None]) -> dict[str, t.Any]:
    """The profile with all that it extends put under it. ``find`` returns the data of a file, None if there is none."""
    return _with_parents(name, find, ())


def _with_parents(name: str, find: t.Callable[[str], t.Mapping[str, t.Any] | None], heirs: tuple[str, ...]) -> dict[str, t.Any]:
    if name in heirs:
        raise ProfileError(heirs[0], [f"it extends itself by way of {' > '.join(heirs)}"])
    data = find(name)
    if data is None:
        raise ProfileError(heirs[0] if heirs else name, [f"it extends {name}, which does not exist"])
    parents = data.get("extends") or []
    result: dict[str, t.Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        result = merge(result, _with_parents(parent, find, (*heirs, name)))
    result = merge({key: value for key, value in result.items() if key != "abstract"}, data)
    result.pop("extends", None)
    return result


def catalogue(profile: t.Mapping[str, t.Any]) -> dict[str, Option]:
    """All options that a user of this profile has: the collection's, as the profile narrows them, and its own."""
    result = options()
    for name, data in (profile.get("options") or {}).items():
        if name in result:
            result[name] = dataclasses.replace(result[name], **_tuples(data))
        else:
            result[name] = Option.from_dict(name, data)
    return result


def _tuples(data: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {key: tuple(value) if isinstance(value, list) and key != "default" else value for key, value in data.items()}


_TYPES: dict[str, t.Callable[[t.Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "null": lambda value: value is None,
}


def faults(value: t.Any, schema: t.Mapping[str, t.Any], root: t.Mapping[str, t.Any] | None = None, where: str = "") -> list[str]:
    """What is wrong with a value under the part of JSON Schema that profile.schema.json uses, in words."""
    root = schema if root is None else root
    if "$ref" in schema:
        return faults(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root, where)
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    place = where or "the profile"
    if types and not any(_TYPES[name](value) for name in types):
        return [f"{place} is {_type_name(value)}, wanted {' or '.join(types)}"]
    found = _value_faults(value, schema, place)
    if isinstance(value, dict):
        found += _object_faults(value, schema, root, where)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            found += faults(item, schema["items"], root, f"{where}[{number}]")
    return found


def _value_faults(value: t.Any, schema: t.Mapping[str, t.Any], place: str) -> list[str]:
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place} is {value!r}, wanted one of {', '.join(map(str, schema['enum']))}")
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        found.append(f"{place} is {value!r}, wanted a text like {schema['pattern']}")
    if "minimum" in schema and _TYPES["number"](value) and value < schema["minimum"]:
        found.append(f"{place} is {value}, wanted at least {schema['minimum']}")
    if "minItems" in schema and isinstance(value, list) and len(value) < schema["minItems"]:
        found.append(f"{place} has {len(value)} items, wanted at least {schema['minItems']}")
    return found


def _object_faults(value: t.Mapping[str, t.Any], schema: t.Mapping[str, t.Any], root: t.Mapping[str, t.Any], where: str) -> list[str]:
    found = [f"{where or 'the profile'} lacks {name}" for name in schema.get("required", []) if name not in value]
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    names = schema.get("propertyNames", {})
    for key, item in value.items():
        place = f"{where}.{key}" if where else str(key)
        if not isinstance(key, str):
            found.append(f"{place}: the name {key!r} is not a text")
        elif key in known:
            found += faults(item, known[key], root, place)
        elif others is False:
            found.append(f"{place} is not known{near(key, known)}")
        else:
            found += _value_faults(key, names, f"the name {place}")
            found += faults(item, others, root, place) if isinstance(others, dict) else []
    return found


def _type_name(value: t.Any) -> str:
    return next((name for name in ("null", "boolean", "integer", "number", "string", "array", "object") if _TYPES[name](value)), "something else")
