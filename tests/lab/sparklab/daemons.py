# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Processes that outlive the command that started them.

Each is recorded with its pid, its start time and the machine's boot id, so that the lab ends exactly what it started,
even if the number has meanwhile been given to another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparklab.run import LabError, listening, say, tail, wait_for


def boot_id() -> str:
    """Identify this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks, or None when there is no such (living) process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Daemons:
    """The record of running processes, kept in one JSON file."""

    def __init__(self, record: Path, logs: Path) -> None:
        self.record = record
        self._recording = threading.Lock()
        self.logs = logs

    def _read(self) -> dict[str, dict]:
        try:
            return json.loads(self.record.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def _write(self, entries: Mapping[str, dict]) -> None:
        self.record.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.record.with_suffix(".new")
        fresh.write_text(json.dumps(entries, indent=2) + "\n")
        fresh.replace(self.record)

    def pid(self, name: str) -> int | None:
        """Return the pid of a recorded process that is still the one that was started."""
        entry = self._read().get(name)
        if not entry or entry["boot"] != boot_id() or start_ticks(entry["pid"]) != entry["start"]:
            return None
        return entry["pid"]

    def running(self) -> dict[str, int]:
        """Return name and pid of every recorded process that lives."""
        return {name: pid for name in self._read() if (pid := self.pid(name)) is not None}

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def current(self, name: str, argv: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> bool:
        """Tell whether the process lives and was started with just these words."""
        entry = self._read().get(name, {})
        return self.pid(name) is not None and entry.get("argv") == [str(word) for word in argv] and entry.get("environment") == dict(environment or {})

    def start(self, name: str, argv: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> int:
        """Start a process in a session of its own and record it."""
        command = [str(word) for word in argv]
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as sink:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd="/", start_new_session=True,
                                           env={**os.environ, **(environment or {})})
            except FileNotFoundError as error:
                raise LabError(f"{command[0]} is not installed (tests/setup.sh installs what the lab needs)") from error
        entry = {"pid": process.pid, "start": start_ticks(process.pid), "boot": boot_id(), "argv": command, "environment": dict(environment or {})}
        with self._recording:
            self._write({**self._read(), name: entry})
        return process.pid

    def ensure_listening(self, name: str, address: tuple[str, int], argv: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        """Start a service unless just this one runs already, and wait until it takes connections."""
        place = f"{address[0]}:{address[1]}"
        if not self.current(name, argv, environment):
            self.stop(name)
            say(f"starting {name} on {place}")
            self.start(name, argv, environment)
        wait_for(f"{name} listens on {place}", lambda: listening(*address), 15, explain=lambda: tail(self.log(name)))

    def stop(self, name: str, seconds: float = 10) -> None:
        """End a process that this lab started: first politely, then for good."""
        pid = self.pid(name)
        if pid is not None:
            say(f"stopping {name} (pid {pid})")
            for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
                end = time.monotonic() + patience
                while self.pid(name) is not None and time.monotonic() < end:
                    reap(pid)
                    time.sleep(0.05)
                if self.pid(name) is None:
                    break
            if self.pid(name) is not None:
                raise LabError(f"{name} (pid {pid}) cannot be ended\n{tail(self.log(name))}")
        with self._recording:
            entries = self._read()
            if entries.pop(name, None) is not None:
                self._write(entries)


def reap(pid: int) -> None:
    """Collect an ended child, if it is one of ours, so that it is no zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
