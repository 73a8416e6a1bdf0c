# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a node holds of an artefact: its tree, its manifest, what is wrong with them, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import Manifest


class Busy(Exception):
    """Another process writes to the tree; the text says which."""


class TreeState(t.NamedTuple):
    tree: str
    manifest: Manifest | None
    problems: list[str]


def damage_path(tree: str) -> str:
    return tree.rstrip("/") + ".damaged.json"


def damaged(tree: str) -> set[str]:
    """Files that the last verification found broken and nobody has replaced yet."""
    try:
        with open(damage_path(tree), encoding="utf-8") as stream:
            return set(json.load(stream)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def note_damage(tree: str, paths: t.Iterable[str]) -> None:
    names = sorted(paths)
    if names:
        manifests.write_json(damage_path(tree), {"files": names})
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(damage_path(tree))


def look(tree: str, revisions: t.Container[str]) -> TreeState:
    """Compare a tree with its manifest without reading content. Hundreds of files take milliseconds."""
    manifest = manifests.load(tree)
    if manifest is None or manifest.revision not in revisions:
        return TreeState(tree, None, ["no complete tree of this revision"])
    problems = [f"{item.path}: {item.text}" for item in manifests.check_sizes(tree, manifest.files)]
    problems += [f"{path}: found damaged by the last verification" for path in sorted(damaged(tree))]
    return TreeState(tree, manifest, problems)


@contextlib.contextmanager
def tree_lock(tree: str) -> t.Iterator[None]:
    """One writer per tree, whichever deployment or method it works for. A dead writer's lock is free."""
    path = tree.rstrip("/") + ".lock"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            raise Busy(stream.read().strip() or "an unknown process") from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()}")
        stream.flush()
        yield
