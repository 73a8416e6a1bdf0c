# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run on a node by the scenarios: compare every tree below a folder with its manifest, by nothing but the standard library."""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys


def main() -> int:
    manifests = sorted(pathlib.Path(sys.argv[1]).glob("*.manifest.json"))
    for manifest in manifests:
        tree = manifest.with_name(manifest.name.removesuffix(".manifest.json"))
        for item in json.loads(manifest.read_text())["files"]:
            path = tree / item["path"]
            if path.is_symlink() or hashlib.sha256(path.read_bytes()).hexdigest() != item["sha256"]:
                sys.stderr.write(f"{path} differs from its manifest\n")
                return 1
            sys.stdout.write(f"{item['sha256']} {item['path']}\n")
    return 0 if manifests else 1


if __name__ == "__main__":
    sys.exit(main())
