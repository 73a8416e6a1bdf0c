# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plays against the running container lab, watched from outside: exit codes, times of the lines, and the nodes themselves."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
import typing as t

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAB = os.path.join(ROOT, "tests/lab/lab")
STUB = "198.18.0.1:5000/sparklab/stub:1"


@dataclasses.dataclass
class Played:
    """One run of ansible-playbook. ``lines``: (Unix time, text) as they were printed."""

    code: int
    lines: list[tuple[float, str]]
    begun: float
    ended: float

    @property
    def text(self) -> str:
        return "\n".join(text for dummy, text in self.lines)

    def time_of(self, part: str) -> float:
        """When the first line with ``part`` was printed."""
        return next(when for when, text in self.lines if part in text)


def play(name: str, *arguments: str, variables: dict[str, t.Any] | None = None, inventory: str | None = None, timeout: float = 600) -> Played:
    command = ["ansible-playbook", f"playbooks/{name}.yml", *arguments]
    if inventory:
        command += ["-i", inventory]
    if variables:
        command += ["-e", json.dumps(variables)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "ANSIBLE_FORCE_COLOR": "0"}
    begun, lines = time.time(), []
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        lines.append((time.time(), line.rstrip("\n")))
        if time.time() - begun > timeout:
            process.kill()
    code = process.wait()
    return Played(code, lines, begun, time.time())


def on(node: str, command: str, check: bool = True) -> str:
    """Run a shell command as root on a lab node."""
    done = subprocess.run([LAB, "ssh", node, "sudo bash -s"], input=command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{node}: {command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def inspect(node: str, container: str) -> dict[str, t.Any] | None:
    out = on(node, f"docker inspect {container} 2>/dev/null || true").strip()
    found = json.loads(out or "[]")
    return found[0] if found else None


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
