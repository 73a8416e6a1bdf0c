# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Who listens on a port: sockets of /proc/net, and the processes that hold them, below a root that tests can move."""

from __future__ import annotations

import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._memory import read_text
from ansible_collections.sparkops.inference.plugins.module_utils._node import parse_listening_inodes


def listening(ports: t.Collection[int], proc_root: str) -> dict[int, set[str]]:
    """Inodes of the sockets that listen on the given ports, over IPv4 and IPv6."""
    found: dict[int, set[str]] = {}
    for name in ("tcp", "tcp6"):
        for port, inodes in parse_listening_inodes(read_text(os.path.join(proc_root, "net", name)), ports).items():
            found.setdefault(port, set()).update(inodes)
    return found


def holders(inodes: t.Collection[str], proc_root: str) -> list[str]:
    """Process ids that hold one of the sockets, as far as this account may see. A socket of the kernel's own is held by none."""
    wanted = {f"socket:[{inode}]" for inode in inodes if inode != "0"}
    found = []
    for pid in sorted(filter(str.isdecimal, os.listdir(proc_root)), key=int) if wanted else []:
        folder = os.path.join(proc_root, pid, "fd")
        try:
            if any(os.readlink(os.path.join(folder, entry)) in wanted for entry in os.listdir(folder)):
                found.append(pid)
        except OSError:
            continue  # another account's process, or one that just ended
    return found
