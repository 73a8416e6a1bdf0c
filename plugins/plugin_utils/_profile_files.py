# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Where profiles lie, and how they are read. Runs on the controller only."""

from __future__ import annotations

import json
import os
import typing as t

import yaml

from ansible_collections.sparkops.inference.plugins.module_utils._profile import ProfileError

_ROLE_FILES = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), "roles", "plan", "files")
_SUFFIXES = (".yml", ".yaml")
# The C loader is ten times faster, and there are several hundred lines to read in every run.
_Loader: t.Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ProfileFiles:
    """The profiles of a search path. The collection's own are found first, so that a user's file cannot change what they mean."""

    def __init__(self, paths: t.Sequence[str] = (), inventory_directories: t.Sequence[str] = ()) -> None:
        base = inventory_directories[0] if inventory_directories else os.getcwd()
        own = [os.path.join(base, os.path.expanduser(path)) for path in paths]
        beside = [os.path.join(directory, "profiles") for directory in inventory_directories]
        self.directories = [os.path.join(_ROLE_FILES, "profiles"), *own, *beside]
        self._read: dict[str, dict[str, t.Any] | None] = {}

    def find(self, name: str) -> dict[str, t.Any] | None:
        """The data of a profile's file, None when there is none."""
        if name not in self._read:
            self._read[name] = self._find(name)
        return self._read[name]

    def _find(self, name: str) -> dict[str, t.Any] | None:
        for directory in self.directories:
            for suffix in _SUFFIXES:
                path = os.path.join(directory, name + suffix)
                if os.path.isfile(path):
                    return _read(name, path)
        return None

    def names(self) -> list[str]:
        """The profiles that can be served."""
        found = set()
        for directory in self.directories:
            if os.path.isdir(directory):
                found.update(os.path.splitext(entry)[0] for entry in os.listdir(directory) if entry.endswith(_SUFFIXES))
        return sorted(name for name in found if self._can_be_served(name))

    def _can_be_served(self, name: str) -> bool:
        try:
            return not (self.find(name) or {}).get("abstract")
        except ProfileError:
            # It is named, so that asking for it tells what is wrong with it.
            return True


def schema() -> dict[str, t.Any]:
    """The JSON Schema of profiles."""
    with open(os.path.join(_ROLE_FILES, "profile.schema.json"), encoding="utf-8") as file:
        return json.load(file)


def _read(name: str, path: str) -> dict[str, t.Any]:
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.load(file, Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError(name, [f"{path} cannot be read: {error}"]) from error
    if not isinstance(data, dict):
        raise ProfileError(name, [f"{path} is not a mapping"])
    return data
