# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Keys and logins: every host key is known before the first login, so that checking is strict from the start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparklab.run import run

HOST_KEY = "ssh_host_ed25519_key"


def ensure_key(path: Path, comment: str) -> None:
    if not path.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])


def write_known_hosts(target: Path, folders: Mapping[str, Path]) -> None:
    """Write the host keys that lie in the folders, each under its names (with commas)."""
    lines = []
    for names, folder in folders.items():
        kind, key = (folder / f"{HOST_KEY}.pub").read_text().split()[:2]
        lines.append(f"{names} {kind} {key}\n")
    target.write_text("".join(lines))


def words(key: Path, known_hosts: Path, target: str, *command: str) -> list[str]:
    """Return the ssh command line for user@address, strict about its host key."""
    return [
        "ssh", "-F", "/dev/null", "-i", str(key), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=10",
        "-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={known_hosts}", "-o", "LogLevel=ERROR", target, *command,
    ]
