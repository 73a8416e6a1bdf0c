# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import generate
import pytest

from ansible_collections.sparkops.inference.plugins.module_utils._options import KINDS, ConversionError, Option, convert, options

# What surveys and command lines bring.
TEXTS = ["false", "no", "0", "", None, "None", "2", "0.85", "1e3", "1_000", "inf", "a,b", "a=b", '["a", "b c"]', '{"a": 1}', "2 ", "  ", " true "]

REFUSED = "refused"
DEFAULT = "default"

# Cells stand in the order of TEXTS.
BY_KIND: dict[str, list[t.Any]] = {
    "bool": [
        False,
        False,
        False,
        DEFAULT,
        DEFAULT,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        DEFAULT,
        True,
    ],
    "int": [
        REFUSED,
        REFUSED,
        0,
        DEFAULT,
        DEFAULT,
        REFUSED,
        2,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        2,
        DEFAULT,
        REFUSED,
    ],
    "float": [
        REFUSED,
        REFUSED,
        0.0,
        DEFAULT,
        DEFAULT,
        REFUSED,
        2.0,
        0.85,
        1000.0,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        2.0,
        DEFAULT,
        REFUSED,
    ],
    "size": [
        REFUSED,
        REFUSED,
        0,
        DEFAULT,
        DEFAULT,
        REFUSED,
        2,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        REFUSED,
        2,
        DEFAULT,
        REFUSED,
    ],
    "str": [
        "false",
        "no",
        "0",
        DEFAULT,
        DEFAULT,
        REFUSED,
        "2",
        "0.85",
        "1e3",
        "1_000",
        "inf",
        "a,b",
        "a=b",
        '["a", "b c"]',
        '{"a": 1}',
        "2",
        DEFAULT,
        "true",
    ],
    "path": [REFUSED] * 3 + [DEFAULT] * 2 + [REFUSED] * 11 + [DEFAULT, REFUSED],
    "list": [
        ["false"],
        ["no"],
        ["0"],
        DEFAULT,
        DEFAULT,
        REFUSED,
        ["2"],
        ["0.85"],
        ["1e3"],
        ["1_000"],
        ["inf"],
        ["a", "b"],
        ["a=b"],
        ["a", "b c"],
        ['{"a": 1}'],
        ["2"],
        DEFAULT,
        ["true"],
    ],
    "dict": [REFUSED] * 3 + [DEFAULT] * 2 + [REFUSED] * 9 + [{"a": 1}, REFUSED, DEFAULT, REFUSED],
}


def outcome(option: Option, raw: t.Any) -> t.Any:
    try:
        value = convert(option, raw)
    except ConversionError:
        return REFUSED
    return DEFAULT if value is None else value


def test_table_has_no_empty_cell() -> None:
    assert set(BY_KIND) == set(KINDS)
    assert all(len(row) == len(TEXTS) for row in BY_KIND.values())


@pytest.mark.parametrize(
    ("kind", "text", "expected"), [(kind, text, cell) for kind, row in BY_KIND.items() for text, cell in zip(TEXTS, row)], ids=repr
)
def test_texts_by_kind(kind: str, text: t.Any, expected: t.Any) -> None:
    found = outcome(Option(name="x", kind=kind, description="X."), text)
    assert found == expected and type(found) is type(expected)


def test_texts_for_every_option(golden: t.Callable[[str, t.Any], None]) -> None:
    """Every option of every profile with every text: a typed value, the default, or the refusal's words."""
    rows: dict[str, list[str]] = {}
    for profile, known in {"": options(), **generate.catalogues()}.items():
        for name, option in known.items():
            if not profile or option != options().get(name):
                rows.setdefault(json.dumps({repr(text): cell(option, text) for text in TEXTS}), []).append(f"{profile}:{name}" if profile else name)
    table = [{"options": sorted(names), "texts": json.loads(row)} for row, names in rows.items()]
    assert all(len(row["texts"]) == len(TEXTS) for row in table)
    golden("conversions.json", sorted(table, key=lambda row: row["options"]))


def cell(option: Option, text: t.Any) -> t.Any:
    try:
        value = convert(option, text)
    except ConversionError as error:
        return f"{REFUSED}: wanted {error.wanted}"
    return DEFAULT if value is None else [option.kind, value]


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        ("bool", True, True),
        ("bool", "YES", True),
        ("bool", "on", True),
        ("bool", 1, True),
        ("bool", 0, False),
        ("bool", 2, REFUSED),
        ("bool", 1.0, REFUSED),
        ("bool", [], REFUSED),
        ("int", 7, 7),
        ("int", "-7", -7),
        ("int", "+7", 7),
        ("int", True, REFUSED),
        ("int", 7.0, REFUSED),
        ("int", "٣", REFUSED),
        ("float", 1, 1.0),
        ("float", "-.5", -0.5),
        ("float", "5.", 5.0),
        ("float", False, REFUSED),
        ("float", float("nan"), REFUSED),
        ("float", float("inf"), REFUSED),
        ("float", "1e999", REFUSED),
        ("float", "nan", REFUSED),
        ("size", "2.5 GiB", 2684354560),
        ("size", "2.5GiB", 2684354560),
        ("size", "1 GB", 10**9),
        ("size", "9007199254740993", 9007199254740993),
        ("size", "9007199254740.993 KB", 9007199254740993),
        ("size", "0.1 GiB", 107374182),
        ("size", "1.5 GiB", 1610612736),
        ("size", "0.7 TB", 700000000000),
        ("size", "1.0000000001 KB", 1000),
        ("size", "0.0001 KiB", REFUSED),
        ("size", "0 GiB", 0),
        ("size", "2.0", 2),
        ("size", "2.5", REFUSED),
        ("size", "0.3 B", REFUSED),
        ("size", "-0.1 GiB", REFUSED),
        ("size", "nan GiB", REFUSED),
        ("size", "1e3 GiB", REFUSED),
        ("size", "1,5 GiB", REFUSED),
        ("size", "8388607.9 TiB", 9223371926903613030),
        ("size", "8388608 TiB", REFUSED),
        ("size", "9" * 40, REFUSED),
        ("size", -1, REFUSED),
        ("size", 10**30, REFUSED),
        ("size", float("nan"), REFUSED),
        ("size", "1 gib", REFUSED),
        ("size", "-1", REFUSED),
        ("size", True, REFUSED),
        ("size", 1.5, REFUSED),
        ("str", 123, REFUSED),
        ("str", True, REFUSED),
        ("str", 1.1, REFUSED),
        ("str", "null", REFUSED),
        ("str", " a b ", "a b"),
        ("path", "~/x", "~/x"),
        ("path", "~", "~"),
        ("path", "/a b", "/a b"),
        ("path", "~bob/x", REFUSED),
        ("path", "relative", REFUSED),
        ("path", "$HOME/x", REFUSED),
        ("path", "/a\nb", REFUSED),
        ("list", ["a", 1, 2.5], ["a", 1, 2.5]),
        ("list", ("a",), ["a"]),
        ("list", ["a", None], REFUSED),
        ("list", ["a", True], REFUSED),
        ("list", [{"a": 1}], REFUSED),
        ("list", "a,,b", REFUSED),
        ("list", "[1, NaN]", REFUSED),
        ("list", "[1", REFUSED),
        ("list", {"a": 1}, REFUSED),
        ("list", 3, REFUSED),
        ("list", [], []),
        ("dict", {"a": None}, {"a": None}),
        ("dict", {1: 2}, REFUSED),
        ("dict", [1], REFUSED),
        ("dict", '{"a": Infinity}', REFUSED),
        ("dict", {}, {}),
    ],
    ids=repr,
)
def test_native_values(kind: str, raw: t.Any, expected: t.Any) -> None:
    found = outcome(Option(name="x", kind=kind, description="X."), raw)
    assert found == expected and type(found) is type(expected)


def test_arguments_are_never_split() -> None:
    option = options()["serve_extra_arguments"]
    assert outcome(option, "--a b") == REFUSED
    assert outcome(option, "--a,--b") == REFUSED
    assert outcome(option, '["--a b", "", {"x": 1}]') == ["--a b", "", {"x": 1}]


@pytest.mark.parametrize(
    ("fields", "raw", "expected"),
    [
        ({"kind": "int", "minimum": 1, "maximum": 5}, "1", 1),
        ({"kind": "int", "minimum": 1, "maximum": 5}, 5, 5),
        ({"kind": "int", "minimum": 1, "maximum": 5}, 0, REFUSED),
        ({"kind": "int", "minimum": 1, "maximum": 5}, 6, REFUSED),
        ({"kind": "float", "maximum": 1}, "1.0000001", REFUSED),
        ({"kind": "str", "choices": ("a", "none")}, "none", "none"),
        ({"kind": "str", "choices": ("a", "none")}, "None", REFUSED),
        ({"kind": "str", "choices": ("a", "none")}, "A", REFUSED),
        ({"kind": "list", "choices": ("a", "b")}, "a,b", ["a", "b"]),
        ({"kind": "list", "choices": ("a", "b")}, "a,c", REFUSED),
        ({"kind": "str", "pattern": "[a-z]+"}, "abc", "abc"),
        ({"kind": "str", "pattern": "[a-z]+"}, "abc1", REFUSED),
        ({"kind": "list", "pattern": "[a-z]+"}, ["a", "1"], REFUSED),
        ({"kind": "list", "pattern": "[a-z]+"}, [1], REFUSED),
        ({"kind": "str", "digits": True, "pattern": "low|[0-9]+"}, "low", "low"),
        ({"kind": "str", "digits": True, "pattern": "low|[0-9]+"}, "75", 75),
        ({"kind": "str", "digits": True, "pattern": "low|[0-9]+"}, 75, 75),
        ({"kind": "str", "digits": True, "pattern": "low|[0-9]+"}, True, REFUSED),
        ({"kind": "str", "none": True}, "none", "none"),
        ({"kind": "str", "none": True}, "None", REFUSED),
        ({"kind": "str", "secret": True}, "key", "key"),
        ({"kind": "str", "secret": True}, "key\n", REFUSED),
    ],
    ids=repr,
)
def test_ranges_choices_and_patterns(fields: dict[str, t.Any], raw: t.Any, expected: t.Any) -> None:
    found = outcome(Option(name="x", description="X.", **fields), raw)
    assert found == expected and type(found) is type(expected)


def test_a_refused_secret_is_not_shown() -> None:
    with pytest.raises(ConversionError) as error:
        convert(Option(name="x", kind="str", description="X.", secret=True), " hunter2 ")
    assert "hunter2" not in str(error.value) + error.value.hint + error.value.found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "int"}, "a whole number such as 2"),
        ({"kind": "int", "minimum": 1}, "a whole number such as 2, at least 1"),
        ({"kind": "float", "maximum": 0.5}, "a number such as 0.85, at most 0.5"),
        ({"kind": "int", "minimum": 1, "maximum": 5}, "a whole number such as 2 from 1 to 5"),
        ({"kind": "str", "choices": ("a", "b")}, 'one of "a", "b"'),
        ({"kind": "list"}, "a list, or its text: items with commas between, or JSON"),
        ({"kind": "list", "comma": False}, 'a list, or its text: JSON such as ["a", "b c"]'),
        ({"kind": "str", "form": "a colour"}, "a colour"),
    ],
    ids=repr,
)
def test_wanted_is_said_in_words(fields: dict[str, t.Any], words: str) -> None:
    assert Option(name="x", description="X.", **fields).wanted == words


def test_table_is_well_formed() -> None:
    for known in [options(), *generate.catalogues().values()]:
        for name, option in known.items():
            assert option.kind in KINDS and option.scope in ("group", "node"), name
            assert option.description.endswith("."), name
            assert not (option.secret and option.default is not None), name
            if not isinstance(option.default, (dict, str)) or "choose" not in str(option.default) and "${" not in str(option.default):
                # A default that the option itself would refuse could not be written down by a user.
                convert(option, option.default)
