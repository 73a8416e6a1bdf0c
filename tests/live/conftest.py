# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plays against the running container lab, watched from outside: exit codes, times of the lines, and the nodes themselves."""

from __future__ import annotations

import json
import os
import subprocess
import time
import typing as t
from datetime import datetime

import pytest
from plays import ROOT, Played, play, root_shell

LAB = os.path.join(ROOT, "tests/lab/lab")
STUB = "198.18.0.1:5000/sparklab/stub:1"


def on(node: str, command: str, check: bool = True) -> str:
    """Run a shell command as root on a lab node."""
    return root_shell(LAB, node, command, check)


def inspect(node: str, container: str) -> dict[str, t.Any] | None:
    out = on(node, f"docker inspect {container} 2>/dev/null || true").strip()
    found = json.loads(out or "[]")
    return found[0] if found else None


def unix_time(text: str) -> float:
    """Docker's times have nanoseconds; Python reads six digits."""
    return datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00").timestamp()


def running(node: str) -> list[str]:
    return on(node, "docker ps --format '{{.Names}}'").split()


def fingerprint(node: str) -> str:
    """What a refused run must leave as it was."""
    return on(node, "docker ps -a --no-trunc --format '{{.ID}} {{.Names}} {{.State}}' 2>/dev/null | sort;"
                    " find /var/lib/sparkops -not -type s -not -name 'heartbeat*' -not -name 'lease*' -printf '%p %s %T@\\n' 2>/dev/null"
                    " | grep -v -e '/var/lib/sparkops/[^/]* ' -e '[.]log ' | sort")


def status(*arguments: str, **more: t.Any) -> tuple[int, dict[str, t.Any]]:
    """Exit code and document of play status."""
    path = os.path.join(ROOT, "tests/output/status.json")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path):
        os.unlink(path)
    variables = {"status_file": path, **more.pop("variables", {})}
    done = play("status", *arguments, variables=variables, **more)
    with open(path, encoding="utf-8") as stream:
        return done.code, json.load(stream)


@pytest.fixture(name="serving", scope="session")
def fixture_serving() -> Played:
    """The pair of the lab, serving with the real engine."""
    done = play("site")
    assert done.code == 0, done.text[-5000:]
    return done


def inventory_with(folder: t.Any, groups: dict[str, t.Any]) -> str:
    """The lab's inventory with settings of groups, or further groups, beside it; a folder of its own for ``-i``."""
    lab = os.path.join(ROOT, "inventories/lab")
    for name in os.listdir(lab):
        os.symlink(os.path.join(lab, name), folder / name)
    (folder / "settings.yml").write_text(json.dumps({"all": {"children": groups}}))
    return str(folder)


class LabHub:
    """The lab's hub: what it has served, and its faults."""

    @staticmethod
    def lab(*words: str) -> t.Any:
        done = subprocess.run([LAB, *words], capture_output=True, text=True, check=True)
        return json.loads(done.stdout or "null")

    def fault(self, kind: str, **settings: t.Any) -> None:
        self.lab("faults", "set", kind, *(word for name, value in settings.items() for word in (f"--{name}", str(value))))

    def quiet(self) -> None:
        """No fault, and all counters at zero."""
        self.lab("faults", "clear")
        self.lab("counters", "--clear")

    def counters(self, part: str = "") -> dict[str, dict[str, int]]:
        """Bytes and requests by path, of those with ``part`` in it."""
        return {path: item for path, item in self.lab("counters").items() if part in path}

    def served(self, part: str = "") -> int:
        return sum(item["bytes"] for item in self.counters(part).values())

    def until(self, size: float, part: str = "", timeout: float = 120) -> None:
        deadline = time.time() + timeout
        while self.served(part) < size:
            assert time.time() < deadline, f"the hub has served {self.served(part)} bytes of {size:.0f}"


@pytest.fixture(name="hub")
def fixture_hub() -> t.Iterator[LabHub]:
    hub = LabHub()
    hub.quiet()
    yield hub
    hub.quiet()
