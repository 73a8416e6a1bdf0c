# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Debian trees, made from recipes and known by the hash of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparklab.run import run, unmount_below


def stamp(*parts: object) -> str:
    """Hash a recipe: its words and the content of its files."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else json.dumps(part, sort_keys=True).encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """Give a folder that is gone afterwards; leftovers of interrupted builds go first."""
    for old in folder.glob("work-*"):
        unmount_below(old)
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder) as name:
        yield Path(name)


def debian_tree(target: Path, suite: str, packages: tuple[str, ...], hooks: tuple[str, ...], *, work: Path, variant: str = "minbase",
                components: str = "main", log: Path | None = None) -> Path:
    """Make a Debian tree: a tar file when the name says so, else a folder. Hooks get the tree as $1 and *work* as WORK."""
    if variant == "extract":  # knows only this kind of hook, and leaves the layout of /usr to its caller
        words = ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", *(f"--extract-hook={hook}" for hook in hooks)]
    else:
        words = [f"--customize-hook={hook}" for hook in hooks]
    environment = {**os.environ, "TMPDIR": str(work), "WORK": str(work)}
    # Nobody needs these trees after a power cut, so packages need not be flushed to the disk one by one.
    run(["mmdebstrap", "--quiet", "--mode=root", "--dpkgopt=force-unsafe-io", f"--variant={variant}", f"--components={components}",
         f"--include={','.join(packages)}", *words, suite, target], environment=environment, log=log)
    return target
