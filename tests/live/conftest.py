# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plays against the running container lab, watched from outside: exit codes, times of the lines, and the nodes themselves."""

from __future__ import annotations

import json
import os
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
