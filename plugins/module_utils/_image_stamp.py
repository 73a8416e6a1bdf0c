# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The stamp of an image's recipe: a hash over the files of a checkout that the published image carries as a label.

The published recipes hash the text that C(sha256sum) prints, one line for each file. Whether that text is sorted by line or
by path, and how the paths begin, differs between their versions, and one of them put the publisher's own directory into it.
We make the stamp from relative paths, so that a checkout has the same one wherever it lies, and accept the other forms.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import os
import typing as t

CACHES = ("__pycache__", "*.pyc")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which files of a checkout belong to its stamp. A pattern of ``exclude`` fits a name, or a path below the checkout."""

    files: tuple[str, ...] = ("Dockerfile",)
    folders: tuple[str, ...] = (".",)
    exclude: tuple[str, ...] = (*CACHES, ".git")

    @classmethod
    def of(cls, label: str, given: t.Mapping[str, t.Sequence[str]] | None = None) -> Rule:
        """A rule of the profile, else the one that we know for the label, else all files."""
        if given:
            return cls(**{name: tuple(given[name]) for name in ("files", "folders", "exclude") if name in given})
        return RULES.get(label, cls())


RULES = {
    "dsv41.recipe.stamp": Rule(folders=("overlay", "files", "tests"), exclude=(*CACHES, "*.so")),
    "glm53.recipe.stamp": Rule(
        folders=("overlay", "files", "tests", "ablit"),
        exclude=(*CACHES, "ablit/transplant", "files/nfs-server", "files/nfs-share.sh"),
    ),
}


def recipe_files(recipe: str, rule: Rule) -> list[str]:
    """The files of the stamp, as paths below the checkout, sorted."""
    found = {name for name in rule.files if os.path.isfile(os.path.join(recipe, name))}
    for folder in rule.folders:
        for parent, folders, names in os.walk(os.path.join(recipe, folder)):
            below = os.path.relpath(parent, recipe)
            folders[:] = [name for name in folders if not _excluded(os.path.normpath(os.path.join(below, name)), rule)]
            for name in names:
                path = os.path.normpath(os.path.join(below, name))
                if not _excluded(path, rule) and not os.path.islink(os.path.join(recipe, path)):
                    found.add(path)
    return sorted(found)


def _excluded(path: str, rule: Rule) -> bool:
    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern) for pattern in rule.exclude)


def stamps(recipe: str, rule: Rule) -> list[str]:
    """The stamp, then the other forms that a published label may have."""
    hashes = {path: _sha256_of(os.path.join(recipe, path)) for path in recipe_files(recipe, rule)}
    found = []
    for prefix in ("", "./", os.path.realpath(recipe) + "/"):
        lines = [f"{digest}  {prefix}{path}\n" for path, digest in sorted(hashes.items())]
        found += [_stamp(sorted(lines)), _stamp(lines)]
    return list(dict.fromkeys(found))


def _stamp(lines: t.Sequence[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for piece in iter(lambda: stream.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()
