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
    """The ssh programs of the unit. Looked for among the processes: a walk through all control groups is slower than the ship."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == "ssh" and f"/{unit}.service" in (process / "cgroup").read_text():
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


def main(unit: str, percent: int, total: int) -> int:
    deadline = time.monotonic() + 300
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
