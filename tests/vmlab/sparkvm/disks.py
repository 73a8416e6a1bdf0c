# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Disks of virtual machines."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from sparklab.run import run


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Say nothing of the checkout that a file comes from, so that every checkout writes the same."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = "root"
    return entry


def write_seed(target: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write the tar file that a machine has as its second disk."""
    with tarfile.open(target.with_suffix(".new"), "w") as tar:
        for name, content in files.items():
            if isinstance(content, Path):
                tar.add(content, name, filter=owned_by_root)
            else:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                entry.mode = 0o600
                tar.addfile(entry, io.BytesIO(content))
    target.with_suffix(".new").replace(target)


def make_overlay(target: Path, backing: Path, form: str) -> None:
    """Make a disk that starts as another one and keeps only what is changed."""
    target.unlink(missing_ok=True)
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", form, target])


def make_empty(target: Path, size: str) -> None:
    run(["qemu-img", "create", "-q", "-f", "qcow2", target, size])
