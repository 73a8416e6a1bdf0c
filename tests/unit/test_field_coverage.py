# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every known field problem has a test that shows its behaviour, or a reason why none does."""

from __future__ import annotations

import ast
import functools
import os
import re

import pytest
import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# How many rows each part of the catalogue of field problems has.
PARTS = {"A": 29, "B": 10, "C": 19, "D": 24, "E": 15, "F": 19, "G": 16, "H": 8, "I": 10, "J": 11, "K": 9, "L": 11}
WANTED = {
    "rows": [f"{part}{number}" for part, count in PARTS.items() for number in range(1, count + 1)],
    "cases": [f"R{number}" for number in range(1, 18)],
}
NAME = re.compile(r"tests/[\w/]+\.py::\w+")
LEAST_WORDS = 10


class OneOfEach(yaml.SafeLoader):
    """A key that stands twice is an error here: the last one would win silently."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, dummy in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def coverage():
    with open(os.path.join(ROOT, "tests/field_coverage.yml"), encoding="utf-8") as stream:
        return yaml.load(stream, OneOfEach)


@functools.cache
def functions(path):
    """Names of the test functions of a file; none when there is no such file."""
    try:
        with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
            body = ast.parse(stream.read()).body
    except FileNotFoundError:
        return frozenset()
    return frozenset(node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"))


def fault(entry):
    """What is wrong with an entry, or an empty text."""
    if isinstance(entry, str):
        # Names of tests are no words of a reason, but they have to be true.
        names, words = NAME.findall(entry), NAME.sub("", entry).split()
        if len(words) < LEAST_WORDS:
            return f"a reason of {len(words)} words; wanted at least {LEAST_WORDS}"
    elif isinstance(entry, list) and entry:
        names = entry
    else:
        return f"found {entry!r}; wanted a list of tests or a reason"
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"{name!r} is no name of a test"
        path, function = name.split("::")
        if function not in functions(path):
            return f"{name} does not exist"
    return "" if len(set(names)) == len(names) else "a test is named twice"


def test_the_catalogue_has_181_rows():
    assert len(WANTED["rows"]) == len(set(WANTED["rows"])) == 181


@pytest.mark.parametrize("part", WANTED)
def test_no_row_is_unmapped(part):
    assert list(coverage()[part]) == WANTED[part]


@pytest.mark.parametrize("part", WANTED)
def test_every_entry_names_tests_that_exist_or_a_reason(part):
    faults = {row: fault(entry) for row, entry in coverage()[part].items()}
    assert {row: text for row, text in faults.items() if text} == {}


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("not built yet", "3 words"),
        ("not built yet " + "tests/unit/test_field_coverage.py::test_no_row_is_unmapped " * 9, "3 words"),
        ("Only a part is shown (tests/unit/test_field_coverage.py::test_nothing); the rest of it is not built.", "test_nothing does not exist"),
        ([], "wanted a list"),
        (None, "wanted a list"),
        (["tests/unit/test_field_coverage.py::test_nothing"], "does not exist"),
        (["tests/unit/test_nothing.py::test_no_row_is_unmapped"], "does not exist"),
        (["tests/unit/test_field_coverage.py::coverage"], "does not exist"),
        (["tests/unit/test_field_coverage.py::test_no_row_is_unmapped[rows]"], "no name of a test"),
        (["tests/unit/test_field_coverage.py::test_no_row_is_unmapped"] * 2, "twice"),
        (["tests/unit/test_field_coverage.py::test_no_row_is_unmapped"], ""),
    ],
)
def test_a_wrong_entry_is_noticed(entry, part):
    found = fault(entry)
    assert part in found if part else found == ""
