# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plays run and watched from outside, and the nodes of a lab looked at past our own messages; for the container lab and the virtual machines."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
import typing as t

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


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


def root_shell(lab: str, node: str, command: str, check: bool = True) -> str:
    """Run a shell command as root on a node of a lab, whose program is given."""
    done = subprocess.run([lab, "ssh", node, "sudo bash -s"], input=command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{node}: {command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout
