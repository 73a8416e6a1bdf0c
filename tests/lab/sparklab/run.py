# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Running programs and talking to the person at the terminal."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

START = time.monotonic()


class LabError(Exception):
    """Something that the user has to know; printed without a traceback."""


def say(message: str) -> None:
    """Print one line of progress with the seconds since the start, on stderr (stdout is for data)."""
    print(f"lab {time.monotonic() - START:6.1f}s  {message}", file=sys.stderr, flush=True)


def run(
    argv: Iterable[str | Path],
    *,
    check: bool = True,
    data: bytes | None = None,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> str:
    """Run a program and return its standard output.

    With *log* all output goes to that file instead, and a failure shows its last lines.
    """
    command = [str(word) for word in argv]
    try:
        if log is not None:
            with log.open("ab") as sink:
                done = subprocess.run(command, input=data, stdout=sink, stderr=sink, timeout=timeout, env=environment, check=False)
            output, errors = "", tail(log)
        else:
            done = subprocess.run(command, input=data, capture_output=True, timeout=timeout, env=environment, check=False)
            output, errors = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed (tests/setup.sh installs what the lab needs)") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"no answer within {timeout:.0f} s: {' '.join(command)}") from error
    if check and done.returncode != 0:
        raise LabError(f"exit code {done.returncode} from: {' '.join(command)}\n{(errors or output).strip()}")
    return output


def succeeds(argv: Iterable[str | Path], timeout: float | None = None) -> bool:
    """Tell whether a program exits with 0; a missing program or a hanging one does not."""
    try:
        return subprocess.run([str(word) for word in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              timeout=timeout, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def listening(address: str, port: int) -> bool:
    """Tell whether something accepts connections."""
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log, or nothing when there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def unmount_below(folder: Path) -> None:
    """Detach what a killed program has left mounted on or below a folder, before anything there is removed."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split()[1]
        if place == str(folder) or place.startswith(f"{folder}/"):
            run(["umount", "--lazy", place], check=False)


def wait_for(what: str, ready: Callable[[], bool], seconds: float, *, pause: float = 0.1, explain: Callable[[], str] = str) -> None:
    """Wait until *ready* says yes; name what was waited for when it does not."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise LabError(f"{what}: not within {seconds:.0f} s\n{explain()}".rstrip())
        time.sleep(pause)
