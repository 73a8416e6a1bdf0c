# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A flat apt repository of the few packages that the nodes may install.

The nodes have no internet; what `bootstrap` installs on them has to come from somewhere real, through a real apt.
"""

from __future__ import annotations

import email.utils
import hashlib
from pathlib import Path

from sparklab.run import run


def write_index(folder: Path) -> None:
    """Write ``Packages`` and ``Release`` for the .deb files of a folder."""
    paragraphs = []
    for package in sorted(folder.glob("*.deb")):
        content = package.read_bytes()
        control = run(["dpkg-deb", "--field", package]).strip()
        paragraphs.append(f"{control}\nFilename: ./{package.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n")
    index = "\n".join(paragraphs).encode()
    (folder / "Packages").write_bytes(index)
    fields = {"Origin": "sparklab", "Label": "sparklab", "Suite": "sparklab", "Date": email.utils.formatdate(usegmt=True)}
    checksum = f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    (folder / "Release").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()) + checksum)
