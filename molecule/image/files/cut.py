# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Cut the link of a running ship once, when PERCENT of TOTAL bytes lie in the staging directory.

Ends only the connection that the unit's own process has opened, by its number.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

STAGING = pathlib.Path("/var/lib/sparkops/image-ship")


def staged() -> int:
    sizes = []
    for path in STAGING.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue  # it got its final name
    return sum(sizes)


def connections(unit: str) -> list[int]:
    """The ssh programs in the control group of the unit."""
    found = []
    for procs in pathlib.Path("/sys/fs/cgroup").rglob(f"{unit}.service/cgroup.procs"):
        for pid in procs.read_text().split():
            if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "ssh":
                found.append(int(pid))
    return found


def main(unit: str, percent: int, total: int) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        size = staged()
        if size * 100 >= total * percent:
            for pid in connections(unit):
                os.kill(pid, signal.SIGKILL)
                sys.stdout.write(f"cut at {size} of {total} bytes\n")
                return 0
        time.sleep(0.01)
    sys.stdout.write("nothing to cut\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
