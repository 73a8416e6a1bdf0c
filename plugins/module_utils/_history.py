# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Proven deployments of a node, kept so that a group can go back: the plan, this rank's spec, and the small files of its container.

``history/<id>/record.json`` holds everything but the API key; ``container`` and ``files`` beside it are what the rank had mounted.
The id is the beginning of the group's hash, so the ranks of one start have the same one, and a deployment that is proven again keeps it.
"""

from __future__ import annotations

import os
import re
import shutil
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import read_json, write_json

ID = re.compile(r"[0-9a-f]{12}")
FOLDERS = ("container", "files")
# What a list of records shows; plan and spec are for who goes back.
BRIEF = ("id", "deployment", "profile", "proven_at", "image", "artefacts", "nodes")
NEXT = "next"  # what the rank gets at its next start: a run may end before the old group is stopped, and that one must boot as it was
KEPT_IMAGES = "sparkops-kept"  # our own tag on each recorded image, so that a prune of untagged ones spares it


def record_id(group: str) -> str:
    return group[:12]


def history_dir(state_dir: str) -> str:
    return os.path.join(state_dir, "history")


def read(state_dir: str, name: str) -> dict[str, t.Any] | None:
    """One record, None when there is none of this name or it is damaged."""
    record = read_json(os.path.join(history_dir(state_dir), name, "record.json")) if ID.fullmatch(name) else None
    return record if isinstance(record, dict) and record.get("id") == name else None


def records(state_dir: str) -> list[dict[str, t.Any]]:
    """All records, the one that was proven last first."""
    try:
        names = os.listdir(history_dir(state_dir))
    except OSError:
        return []
    found = [record for record in (read(state_dir, name) for name in names) if record]
    return sorted(found, key=lambda record: record.get("proven_at", ""), reverse=True)


def brief(record: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {name: record.get(name) for name in BRIEF}


def keep(state_dir: str, record: t.Mapping[str, t.Any], limit: int) -> list[str]:
    """Write a record with the files of the rank, make it the last good one, and let go of the oldest. Returns the ids that went."""
    folder = os.path.join(history_dir(state_dir), record["id"])
    if read(state_dir, record["id"]):
        # The hash covers the files: only the words are new. What last_good.json names is there at every moment.
        write_json(os.path.join(folder, "record.json"), record)
    else:
        partial = f"{folder}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial, mode=0o750)
        for name in FOLDERS:
            if os.path.isdir(os.path.join(state_dir, name)):
                shutil.copytree(os.path.join(state_dir, name), os.path.join(partial, name))
        write_json(os.path.join(partial, "record.json"), record)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        os.rename(partial, folder)
    write_json(os.path.join(state_dir, "last_good.json"), record)
    gone = [old["id"] for old in records(state_dir)[limit:] if old["id"] != record["id"]]
    for name in gone:
        forget(state_dir, name)
    return gone


def forget(state_dir: str, name: str) -> None:
    shutil.rmtree(os.path.join(history_dir(state_dir), name))


def stage(state_dir: str, name: str) -> None:
    """The files of the rank as they were with this record, for its next start."""
    for folder in FOLDERS:
        source, target = os.path.join(history_dir(state_dir), name, folder), os.path.join(state_dir, NEXT, folder)
        if os.path.isdir(source):
            shutil.copytree(source, target, dirs_exist_ok=True)


def install(state_dir: str) -> None:
    """What is staged takes the place of what the rank had, without room on the disk. Its container must not run: it has the old files mounted."""
    staged = os.path.join(state_dir, NEXT)
    os.stat(os.path.join(staged, "rank.json"))  # before anything goes
    for folder in FOLDERS:
        target = os.path.join(state_dir, folder)
        if os.path.isdir(target):
            shutil.rmtree(target)
        if os.path.isdir(os.path.join(staged, folder)):
            os.rename(os.path.join(staged, folder), target)
    os.replace(os.path.join(staged, "rank.json"), os.path.join(state_dir, "rank.json"))
    os.rmdir(staged)
