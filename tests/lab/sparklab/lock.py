# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One lab of a kind at a time on a machine, and one command at a time on a lab.

Two things: a ``flock`` that is held while a command runs, and an owner record that lasts as long as the lab. The record
counts only while something that it names is alive, so one left by a crash or a reboot is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sparklab.daemons import Daemons
from sparklab.run import LabError, say
from sparklab.settings import CHECKOUT


@dataclass(frozen=True)
class Owner:
    """Who has the lab."""

    pid: int
    checkout: str
    cache: str
    since: str

    @classmethod
    def ourselves(cls, cache: Path) -> Owner:
        return cls(os.getpid(), str(CHECKOUT), str(cache), time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def live(self) -> bool:
        """Whether any process that this owner's lab started is still there."""
        state = Path(self.cache) / "state"
        return bool(Daemons(state / "processes.json", state / "logs").running())

    def same_lab(self, cache: Path) -> bool:
        return self.checkout == str(CHECKOUT) and self.cache == str(cache)


@dataclass(frozen=True)
class Lock:
    """The lock of one kind of lab. ``program`` and ``variable`` (which names the cache) are for messages."""

    folder: Path
    program: str
    variable: str

    @property
    def owner_file(self) -> Path:
        return self.folder / "owner.json"

    def read_owner(self) -> Owner | None:
        """Return who has the lab, alive or not."""
        try:
            return Owner(**json.loads(self.owner_file.read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None

    def claim(self, cache: Path) -> None:
        """Make the lab ours, or refuse and name who has it."""
        owner = self.read_owner()
        if owner is not None and not owner.same_lab(cache):
            if owner.live:
                raise LabError(
                    f"another checkout has a live lab: {owner.checkout} (cache {owner.cache}, pid {owner.pid}, since {owner.since}).\n"
                    f"End it with: {self.variable}={owner.cache} {owner.checkout}/{self.program} down"
                )
            say(f"taking over the stale lab of {owner.checkout} (since {owner.since})")
        elif owner is not None and owner.live:
            return
        self.owner_file.write_text(json.dumps(asdict(Owner.ourselves(cache)), indent=2) + "\n")

    def release_if_gone(self) -> None:
        """Forget who has the lab when nothing of it runs any more."""
        owner = self.read_owner()
        if owner is not None and not owner.live:
            self.owner_file.unlink(missing_ok=True)

    @contextmanager
    def exclusive(self, command: str, seconds: float = 1800) -> Iterator[None]:
        """Hold the command lock, waiting for another command to end."""
        self.folder.mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "lock").open("a+") as handle:
            end = time.monotonic() + seconds
            told = False
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    handle.seek(0)
                    holder = handle.read().strip() or "an unknown process"
                    if time.monotonic() > end:
                        raise LabError(f"the lab is still busy after {seconds:.0f} s: {holder}") from None
                    if not told:
                        say(f"waiting for another lab command: {holder}")
                        told = True
                    time.sleep(0.2)
            handle.truncate(0)
            handle.write(f"pid {os.getpid()}, `{Path(self.program).name} {command}` of {CHECKOUT}, since {time.strftime('%H:%M:%S')}")
            handle.flush()
            yield
            handle.truncate(0)
