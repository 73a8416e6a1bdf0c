# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _profile_language as language

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

NAMES: dict[str, t.Any] = {
    "n": 3,
    "f": 0.85,
    "whole": 3.0,
    "yes": True,
    "no": False,
    "text": "a ${n} $HOME %",
    "nothing": None,
    "items": ["a", 1],
    "empty": [],
    "map": {"b": 1, "a": None},
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ("$HOME", "$HOME"),
        ("%d {{ x }} $$ ${", "%d {{ x }} $$ ${"),
        ("$${n}", "${n}"),
        ("a $${n} b", "a ${n} b"),
        ("${n}", 3),
        ("${yes}", True),
        ("${nothing}", None),
        ("${items}", ["a", 1]),
        ("${map}", {"b": 1, "a": None}),
        ("${text}", "a ${n} $HOME %"),
        ("x${n}y${f}", "x3y0.85"),
        ("x${whole}", "x3"),
        ("x${yes}${no}", "x10"),
        ("x${text}", "xa ${n} $HOME %"),
        ("x${nothing}", None),
        ("x${map}", 'x{"a":null,"b":1}'),
        ({"a": "${n}", "b": "${nothing}"}, {"a": 3}),
        (["${n}", {"a": "${f}"}], [3, {"a": 0.85}]),
        ({"choose": [{"when": {"n": 4}, "value": 1}, {"value": "${n}"}]}, 3),
        ({"choose": [{"when": {"n": 4}, "value": 1}]}, None),
        ({"join": "${items}"}, "a,1"),
        ({"join": "${empty}"}, None),
        ({"join": "${nothing}"}, None),
        ({"capture_sizes": {"base": [1, 2], "sequences": 3, "draft_tokens": "${n}"}}, [1, 2, 4, 8, 12]),
        ({"capture_sizes": {"base": [1], "sequences": 2, "draft_tokens": [1, 2]}}, [1, 2, 3, 4, 6]),
        ({"capture_sizes": {"base": [], "sequences": 2}}, [1, 2]),
        (None, None),
        (1.5, 1.5),
    ],
    ids=repr,
)
def test_resolve(value: t.Any, expected: t.Any) -> None:
    found = language.resolve(value, NAMES)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("value", ["${nn}", "a${nn}", ["${nn}"], {"choose": [{"when": {"nn": 1}, "value": 1}]}], ids=repr)
def test_unknown_names_are_named_with_what_was_meant(value: t.Any) -> None:
    with pytest.raises(language.LanguageError, match="nn"):
        language.resolve(value, NAMES)


def test_near_misses() -> None:
    assert language.near("serve_prot", ["serve_port", "serve_bind"]) == " (did you mean serve_port?)"
    assert language.near("xyz", ["serve_port"]) == ""


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (None, True),
        ({}, True),
        ([], False),
        ({"n": 3}, True),
        ({"n": 4}, False),
        ({"n": [1, 3]}, True),
        ({"n": {"not": 3}}, False),
        ({"n": {"not": [1, 2]}}, True),
        ({"yes": 1}, False),
        ({"yes": True}, True),
        ({"n": True}, False),
        ({"nothing": None}, True),
        ({"nothing": {"given": False}}, True),
        ({"n": {"given": True}}, True),
        ({"n": {"above": 2}}, True),
        ({"n": {"above": 3}}, False),
        ({"n": {"below": 4}}, True),
        ({"n": {"below": 3}}, False),
        ({"n": {"above": "${f}"}}, True),
        ({"n": {"above": {"product": ["${n}", 2]}}}, False),
        ({"n": {"above": {"sum": ["${n}", -1]}}}, True),
        ({"nothing": {"above": 0}}, False),
        ({"n": {"above": "${nothing}"}}, False),
        ({"yes": {"above": 0}}, False),
        ({"items": {"above": 0}}, True),
        ({"items": {"above": 1}}, False),
        ({"n": {"multiple_of": 3}}, True),
        ({"n": {"multiple_of": 2}}, False),
        ({"n": {"not": {"multiple_of": 2}}}, True),
        ({"n": {"above": 1, "below": 4}}, True),
        ({"n": {"above": 1, "below": 3}}, False),
        ({"empty": []}, True),
        ({"items": []}, False),
        ({"empty": {"not": []}}, False),
        ({"map": {"is": {"a": None, "b": 1}}}, False),
        ({"map": {"is": {"b": 1}}}, False),
        ({"map": {}}, False),
        ({"items": {"has": ["z", "a"]}}, True),
        ({"items": {"has": ["z"]}}, False),
        ({"nothing": {"has": ["z"]}}, False),
        ({"n": 3, "f": 1}, False),
        ([{"n": 4}, {"f": 0.85}], True),
        ([{"n": 4}, {"f": 1}], False),
        ({"text": "a $${n} $HOME %"}, True),
    ],
    ids=repr,
)
def test_conditions(condition: t.Any, expected: bool) -> None:
    assert language.holds(condition, NAMES) is expected


def test_an_unknown_test_is_a_fault() -> None:
    with pytest.raises(language.LanguageError, match="abowe"):
        language.holds({"n": {"abowe": 1}}, NAMES)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("--flag", ["--flag"]),
        (["--n", "${n}"], ["--n", "3"]),
        (["--n", "${nothing}"], []),
        (["--a", "b", "--n", "x${nothing}"], []),
        (["--items", "${items}"], ["--items", "a", "1"]),
        (["--items", "${empty}"], ["--items"]),
        (["--json", {"b": "${n}", "a": "${nothing}"}], ["--json", '{"b":3}']),
        (["--json", {"a": "${nothing}"}], []),
        (["--json", {}], ["--json", "{}"]),
        (["--json", "${map}"], ["--json", '{"a":null,"b":1}']),
        (["--list", [1, "b"]], ["--list", '[1,"b"]']),
        (["--yes", "${yes}"], ["--yes", "1"]),
        ({"when": {"n": 3}, "items": ["--x"]}, ["--x"]),
        ({"when": {"n": 4}, "items": ["--x"]}, []),
        (["--e", ""], ["--e", ""]),
        ([1, 2.5, 3.0], ["1", "2.5", "3"]),
    ],
    ids=repr,
)
def test_argument_groups(group: t.Any, expected: list[str]) -> None:
    assert language.items_of(group, NAMES) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", "1"),
        ("${n}", "3"),
        ("${whole}", "3"),
        ("${f}", "0.85"),
        ("${yes}", "1"),
        ("${no}", "0"),
        ("${nothing}", None),
        ({"when": {"n": 3}, "value": "x"}, "x"),
        ({"when": {"n": 4}, "value": "x"}, None),
        ({"choose": [{"value": "${nothing}"}]}, None),
        ({"join": "${items}"}, "a,1"),
        (5, "5"),
    ],
    ids=repr,
)
def test_variables(value: t.Any, expected: str | None) -> None:
    assert language.variable(value, NAMES) == expected


def test_placeholders_are_found_everywhere() -> None:
    value = {"a": "${b}x${c}", "d": [{"when": {"e": 1}, "value": "$${no}"}], "refuse_when": [{"f": 1}, {"g": {"above": "${h}"}}]}
    assert language.placeholders(value) == {"b", "c", "e", "f", "g", "h"}


@hypothesis.given(st.text())
def test_a_users_text_is_never_looked_at_again(text: str) -> None:
    assert language.resolve("${x}", {"x": text}) == text
    assert language.items_of(["--x", "${x}"], {"x": [text, text]}) == ["--x", text, text]
    assert language.variable("${x}", {"x": text}) == text


@hypothesis.given(st.text())
def test_any_text_can_be_written_in_a_profile(text: str) -> None:
    # Doubling the dollar before a brace is all that is ever needed.
    assert language.resolve(text.replace("${", "$${"), {}) == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@hypothesis.given(st.dictionaries(st.text(), JSON_VALUES, min_size=1))
def test_mappings_survive_as_json(value: dict[str, t.Any]) -> None:
    (text,) = language.items_of(["${x}"], {"x": value})
    assert json.loads(text) == value


@hypothesis.given(st.dictionaries(st.text(), st.integers()))
def test_json_does_not_depend_on_the_order(value: dict[str, int]) -> None:
    assert language.as_text(value) == language.as_text(dict(reversed(value.items())))
