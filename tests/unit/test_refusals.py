# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every refusal of the code is in the catalogue, and the catalogue has no other."""

from __future__ import annotations

import glob
import os
import re

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Refusal("area.name", …), Refusal(id="area.name", …) and "… [area.name]" at the end of a role's message.
IN_PYTHON = re.compile(r"""(?:Refusal\(\s*(?:id=)?|refusal_id=|\bid=)["']([a-z_]+\.[a-z0-9_]+)["']""")
IN_MESSAGES = re.compile(r"""\S \[([a-z_]+\.[a-z0-9_]+)\]["')]*,?$""", re.MULTILINE)


def texts(*patterns):
    for pattern in patterns:
        for path in glob.glob(os.path.join(ROOT, pattern), recursive=True):
            with open(path, encoding="utf-8") as stream:
                yield path, stream.read()


def catalogue():
    found = []
    for dummy, text in texts("docs/refusals/*.yml"):
        found += yaml.safe_load(text)
    return found


def ids_in_code():
    found = set()
    for dummy, text in texts("plugins/**/*.py"):
        found |= set(IN_PYTHON.findall(text))
        found |= {name for line in text.splitlines() if "Next:" in line for name in IN_MESSAGES.findall(line)}
    for dummy, text in texts("roles/*/tasks/*.yml"):
        found |= set(IN_MESSAGES.findall(text))
    return found


def test_no_refusal_is_missing_from_the_catalogue():
    listed = {entry["id"] for entry in catalogue()}
    assert ids_in_code() - listed == set()


def test_each_entry_is_complete_and_listed_once():
    entries = catalogue()
    assert len({entry["id"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) == {"id", "means", "do"} and all(entry.values()), entry
