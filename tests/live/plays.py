# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plays run and watched from outside, and the nodes of a lab looked at past our own messages; for the container lab and the virtual machines."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
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

    @property
    def changed(self) -> dict[str, int]:
        """By host, how many tasks changed something, as the recap has it."""
        return {host: int(count) for host, count in re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+)", self.text, re.MULTILINE)}

    def time_of(self, part: str) -> float:
        """When the first line with ``part`` was printed."""
        return next(when for when, text in self.lines if part in text)


class Playing:
    """ansible-playbook while it runs, its lines read as they come."""

    def __init__(self, name: str, *arguments: str, variables: dict[str, t.Any] | None = None, inventory: str | None = None, **environment: str) -> None:
        command = ["ansible-playbook", f"playbooks/{name}.yml", *arguments]
        if inventory:
            command += ["-i", inventory]
        if variables:
            command += ["-e", json.dumps(variables)]
        settings = {**os.environ, "PYTHONUNBUFFERED": "1", "ANSIBLE_FORCE_COLOR": "0", **environment}
        self.begun, self.lines = time.time(), []
        # A group of its own: what is killed for a test is Ansible with all its workers.
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    def until(self, part: str, timeout: float = 120) -> None:
        """Wait for a line with ``part``."""
        deadline = time.time() + timeout
        while not any(part in text for dummy, text in self.lines):
            assert self.process.poll() is None and time.time() < deadline, f"no {part!r} in {self.lines}"
            time.sleep(0.05)

    def kill(self) -> None:
        """The controller dies without a word to anybody."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self, timeout: float = 600) -> Played:
        try:
            code = self.process.wait(max(0.0, self.begun + timeout - time.time()))
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.returncode
        except KeyboardInterrupt:
            self.kill()  # a keyboard reaches no other group than ours
            raise
        # A connection that ssh keeps open holds the pipe, too; all lines are there by then.
        self.reader.join(10)
        return Played(code, self.lines, self.begun, time.time())


def play(name: str, *arguments: str, timeout: float = 600, **more: t.Any) -> Played:
    return Playing(name, *arguments, **more).end(timeout)


def root_shell(lab: str, node: str, command: str, check: bool = True) -> str:
    """Run a shell command as root on a node of a lab, whose program is given."""
    done = subprocess.run([lab, "ssh", node, "sudo bash -s"], input=command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{node}: {command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def completion(on: t.Callable[..., str], deployment: str, port: int, timeout: float = 20) -> str:
    """What rank 0 answers to a request made on its own node, the first one, empty when it does not. ``on`` is the shell of the lab."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
    key = f"$(cat /var/lib/sparkops/{deployment}/key/api_key)"
    headers = f"-H \"Authorization: Bearer {key}\" -H 'Content-Type: application/json'"
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    return on("spark-1", f"curl -s -m {timeout} {headers} -d '{body}' {address} | grep -o '\"content\": *\"[^\"]*\"' || true", check=False)
