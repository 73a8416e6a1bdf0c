# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every refusal of the code is in the catalogue, and the catalogue has no other."""

from __future__ import annotations

import glob
import os
import re

import yaml

from ansible_collections.sparkops.inference.plugins.module_utils import _registry, _zfs_job

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Refusal("area.name", …), Refusal(id="area.name", …) and "… [area.name]" at the end of a role's message.
IN_PYTHON = re.compile(r"""(?:Refusal\(\s*(?:id=)?|refusal_id=|\bid=)["']([a-z_]+\.[a-z0-9_]+)["']""")
# An id as a whole, whatever method takes it; the areas are those of the catalogue.
WHOLE = re.compile(r"""["'](([a-z_]+)\.[a-z0-9_]*[a-z0-9])["']""")
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
    found, known = set(), {entry["id"].partition(".")[0] for entry in catalogue()}
    for dummy, text in texts("plugins/**/*.py"):
        found |= set(IN_PYTHON.findall(text))
        found |= {one for one, area in WHOLE.findall(text) if area in known and not one.endswith(".json")}
        found |= {name for line in text.splitlines() if "Next:" in line for name in IN_MESSAGES.findall(line)}
    for dummy, text in texts("roles/*/tasks/*.yml"):
        found |= set(IN_MESSAGES.findall(text))
    return found


def areas(text):
    """The first part of ids that a file completes by a name: of its long work, or of a method of its own."""
    found = re.findall(r"""^\s+area(?: = work|, work, program)? = ["']([a-z_]+)["']""", text, re.MULTILINE)
    found += re.findall(r"""Refusal\(\s*f["']([a-z_]+)\.\{(?:name|id)\}""", text)
    return set(found)


def completed_ids():
    """Ids whose name alone is written where they are raised: self.refuse("NAME", …) and self.refusal("NAME", …)."""
    sources = dict(texts("plugins/**/*.py"))
    known = {path: areas(text) for path, text in sources.items()}
    # Long work of every kind has the refusals of its base, and what speaks to zfs those of its own base.
    bases = {os.path.basename(path): found for path, found in known.items()}
    long_work = {area for text in sources.values() if "LongModule)" in text for area in areas(text)}
    found = set()
    for path, text in sources.items():
        own = long_work if path.endswith("_unit.py") else known[path] | (bases["_zfs_command.py"] if "import Zfs" in text else set())
        names = re.findall(r"""\.(?:refuse|refusal)\(\s*["']([a-z_0-9]+)["']""", text)
        if os.path.basename(path).startswith(("_engram", "engram")):  # a function of their own, whose area is theirs
            names += re.findall(r"""(?<!\.)\brefusal\(\s*["']([a-z_0-9]+)["']""", text)
            own = own | {"engram"}
        assert own or not names, f"{path}: of which area are {names}?"
        found |= {f"{area}.{name}" for area in own for name in names}
    return found


def told_kinds():
    """Ids that end in the kind of an error."""
    code = "".join(text for dummy, text in texts("plugins/**/*.py"))
    hub = set(re.findall(r"""HubError\(\s*["']([a-z_]+)["']""", code))
    copies = set(re.findall(r"""CopyError\(\s*["']([a-z_]+)["']""", code)) | {kind for dummy, kind in _zfs_job.WORDS}
    pulls = {kind for kind, dummy in _registry._KINDS} | set(re.findall(r"""RegistryError\(\s*["']([a-z_]+)["']""", code))
    return {f"weights.hub_{kind}" for kind in hub} | {f"sync.{kind}" for kind in copies} | {f"image.{kind}" for kind in pulls}


def test_no_refusal_is_missing_from_the_catalogue():
    listed = {entry["id"] for entry in catalogue()}
    completed, told = completed_ids(), told_kinds()
    # Of each way to make an id at least one that is known to be there, so that a renamed method does not hide them all.
    assert {"weights.incomplete", "image.space", "sync.zfs_busy", "engram.job_died", "sync.nfs_used"} <= completed
    assert {"weights.hub_forbidden", "sync.disk_full", "sync.zfs_space", "image.denied"} <= told
    assert (ids_in_code() | completed | told) - listed == set()


def test_the_catalogue_has_no_refusal_that_nothing_raises():
    raised = ids_in_code() | completed_ids() | told_kinds()
    # Those of rules are made from the profiles' own names (tests/unit/plan/test_planner_facts.py).
    assert {entry["id"] for entry in catalogue() if not entry["id"].startswith("rule.")} - raised == set()


def test_each_entry_is_complete_and_listed_once():
    entries = catalogue()
    assert len({entry["id"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) == {"id", "means", "do"} and all(entry.values()), entry
