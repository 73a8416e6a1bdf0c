# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Reading of /sys and /proc below a root that tests can move, where any single file may refuse to be read."""

from __future__ import annotations

import os


class Tree:
    """A sysfs or procfs tree. Nothing here raises: what cannot be read is None or empty.

    The kernel answers reads of many attributes with an error as a matter of course (``speed`` of a port
    without link, ``gid_attrs/types/N`` of an empty slot), so "unreadable" is a value like any other.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def text(self, *parts: str) -> str | None:
        try:
            with open(self.path(*parts), encoding="utf-8", errors="replace") as stream:
                return stream.read().strip()
        except OSError:
            return None

    def number(self, *parts: str) -> int | None:
        text = self.text(*parts)
        try:
            return int(text) if text else None
        except ValueError:
            return None

    def names(self, *parts: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(*parts)))
        except OSError:
            return []

    def exists(self, *parts: str) -> bool:
        return os.path.lexists(self.path(*parts))

    def link_name(self, *parts: str) -> str | None:
        """The last part of a link's target, which is how sysfs names a driver or a PCI function."""
        try:
            return os.path.basename(os.readlink(self.path(*parts)))
        except OSError:
            return None


def labelled_state(text: str | None) -> str:
    """``4: ACTIVE`` is ``ACTIVE``; an unreadable state is empty."""
    return (text or "").rpartition(":")[2].strip()
