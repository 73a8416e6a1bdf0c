# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run inside an image, without GPU: every ``test_*.py`` of a directory, each in a process of its own."""

from __future__ import annotations

import glob
import os
import subprocess
import sys


def main(folder: str) -> int:
    tests = sorted(glob.glob(os.path.join(folder, "test_*.py")))
    failed = []
    for test in tests:
        code = subprocess.run([sys.executable, test], stdin=subprocess.DEVNULL, check=False).returncode
        sys.stdout.write(f"{os.path.basename(test)}: {'ok' if code == 0 else f'ended with {code}'}\n")
        sys.stdout.flush()
        if code != 0:
            failed.append(os.path.basename(test))
    sys.stdout.write(f"{len(tests)} tests in {folder}, {len(failed)} failed: {', '.join(failed) or 'none'}\n")
    return 1 if failed or not tests else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
