# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a node holds of an artefact: its tree, its manifest, what is wrong with them, who may write there, and what could be adopted."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils._hub import LocalTree, local_manifest, local_trees, pinned
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import Manifest


@dataclasses.dataclass(frozen=True)
class Artefact:
    """One entry of ``spark_plan.artefacts``."""

    name: str
    repository: str
    revision: str
    directory: str
    fallback_repositories: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    licence: dict[str, t.Any] | None = None
    size_bytes: int | None = None
    slim: dict[str, t.Any] | None = None

    @classmethod
    def from_dict(cls, content: t.Mapping[str, t.Any]) -> Artefact:
        values = {field.name: content[field.name] for field in dataclasses.fields(cls) if content.get(field.name) not in (None, {})}
        for name in ("fallback_repositories", "include", "exclude", "required"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    def sources(self) -> list[tuple[str, str]]:
        """(repository, commit) in the order to try. ``org/name@commit`` names a fallback's own commit."""
        result = [(self.repository, self.revision)]
        for item in self.fallback_repositories:
            repository, _at, revision = item.partition("@")
            result.append((repository, revision or self.revision))
        return result

    @property
    def licence_line(self) -> str:
        """What is shown before the first byte; empty without a licence."""
        return f"licence of {self.name} ({self.repository}): {self.licence['name']} {self.licence.get('url') or ''}".rstrip() if self.licence else ""

    @property
    def is_pinned(self) -> bool:
        return pinned(self.revision)

    def wants(self, manifest: Manifest) -> bool:
        """Whether a manifest is of what was asked for. A branch stays at the commit that it was at the first download."""
        asked = {revision for _repository, revision in self.sources()}
        return bool({manifest.revision, manifest.requested} & asked)


def candidates(artefact: Artefact, folders: t.Iterable[str]) -> t.Iterator[tuple[LocalTree, str, str]]:
    """Folders of this node that hold something of an artefact at exactly one of its pins."""
    for folder in folders:
        for repository, revision in artefact.sources():
            for tree in local_trees(folder, repository, revision):
                yield tree, repository, revision


def adoptable(artefact: Artefact, folders: t.Iterable[str]) -> tuple[LocalTree, Manifest] | None:
    """A folder that is complete by itself. Then the hub need not be asked, and its library is not needed."""
    for tree, repository, revision in candidates(artefact, folders):
        found = local_manifest(tree, repository, revision, artefact.include, artefact.exclude, artefact.required)
        if found:
            return tree, found
    return None


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


def look(root: str, artefact: Artefact) -> TreeState:
    """Compare a tree with its manifest without reading content. Hundreds of files take milliseconds."""
    tree = os.path.join(root, artefact.directory)
    manifest = manifests.load(tree)
    if manifest is None or not artefact.wants(manifest):
        return TreeState(tree, None, ["no complete tree of this revision"])
    if (manifest.slim or {}).get("tensors") != (artefact.slim or {}).get("tensors"):
        return TreeState(tree, None, ["its index is of another selection of tensors"])
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
