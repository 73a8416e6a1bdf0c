# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""A process that outlives the session that began it, where no service manager starts units: how it is found again, and ended.

A number alone proves nothing, for it is given again: the start time goes with it, and a word of its command line that no other process has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import typing as t

# As long as a unit gets to stop.
STOP_SECONDS = 20.0


def start(argv: t.Sequence[str], output: t.BinaryIO, environment: t.Mapping[str, str]) -> dict[str, t.Any]:
    """Begin it in a session of its own: no terminal, and nothing of the task's open. Returns the record that finds it again."""
    # It goes on when the module has ended: run_command would wait.
    # pylint: disable-next=ansible-bad-function
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd="/", env=environment, start_new_session=True)
    return {"pid": process.pid, "began": _began(process.pid)}


def is_running(record: t.Mapping[str, t.Any], mark: str) -> bool:
    """Whether the process of a record goes on. ``mark`` is an argument of its command line."""
    if not record.get("began") or _began(record["pid"]) != record["began"]:
        return False
    try:
        with open(f"/proc/{record['pid']}/cmdline", "rb") as stream:
            words = stream.read()
    except OSError:
        return False
    # It is empty while the kernel loads the program, which on a busy machine is seen.
    return not words or os.fsencode(mark) in words.split(b"\0")


def end(record: t.Mapping[str, t.Any], seconds: float = STOP_SECONDS) -> None:
    """What a unit's stop does: all its processes are asked to end, the first one first, and after a while are made to."""
    family = _family(record["pid"])
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            if _began(pid) == family[pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while any(_began(pid) == family[pid] for pid in family):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)


def _stat(pid: int) -> tuple[int, str] | None:
    """Parent and start time of a process that has not ended; one that nobody has waited for has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            words = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else (int(words[1]), words[19])


def _began(pid: int) -> str:
    found = _stat(pid)
    return found[1] if found else ""


def _family(pid: int) -> dict[int, str]:
    """The process and all below it, also those in sessions of their own, with their start times."""
    there = {int(name): found for name in os.listdir("/proc") if name.isdecimal() and (found := _stat(int(name)))}
    family = {pid: there[pid][1]} if pid in there else {}
    grew = True
    while grew:
        more = {child: began for child, (parent, began) in there.items() if parent in family and child not in family}
        family.update(more)
        grew = bool(more)
    return family
