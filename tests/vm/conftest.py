# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plays against the two virtual machines of tests/vmlab, and the machines themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import typing as t

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "live"))
import plays  # noqa: E402

VMLAB = os.path.join(plays.ROOT, "tests/vmlab/vmlab")
INVENTORY = "inventories/vm/hosts.yml"
MACHINES = ("spark-1", "spark-2")
RAILS = {"spark-1": ("enp1s0f1np1", "enP2p1s0f1np1"), "spark-2": ("enp1s0f0np0", "enP2p1s0f0np0")}
HCAS = {"spark-1": ("rocep1s0f1", "roceP2p1s0f1"), "spark-2": ("rocep1s0f0", "roceP2p1s0f0")}
PINNED = {"fabric_gid_policy": "auto"}
ADDRESSES = {"spark-1": ("198.51.100.11/24", "203.0.113.11/24"), "spark-2": ("198.51.100.12/24", "203.0.113.12/24")}


def play(name: str, *arguments: str, variables: dict[str, t.Any] | None = None, timeout: float = 900) -> plays.Played:
    done = plays.play(name, *arguments, variables=variables, inventory=INVENTORY, timeout=timeout)
    print(f"{name}: exit code {done.code} in {done.ended - done.begun:.0f} s")
    return done


def on(machine: str, command: str, check: bool = True) -> str:
    """Run a shell command as root on a machine."""
    return plays.root_shell(VMLAB, machine, command, check)


def lab(*words: str) -> None:
    done = subprocess.run([VMLAB, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def link(machine: str, interface: str) -> dict[str, t.Any]:
    """MTU and IPv4 addresses of an interface as the kernel has them."""
    found = json.loads(on(machine, f"ip -json -4 address show dev {interface}"))
    shown = next(entry for entry in found if entry)
    return {"mtu": shown["mtu"], "addresses": [f"{entry['local']}/{entry['prefixlen']}" for entry in shown["addr_info"]]}


def until(what: str, ready: t.Callable[[], bool], seconds: float) -> float:
    """Seconds until something is so."""
    begun = time.monotonic()
    while not ready():
        assert time.monotonic() - begun < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(1)
    return time.monotonic() - begun


@pytest.fixture(name="machines", scope="session", autouse=True)
def fixture_machines() -> None:
    """Both machines answer; `tests/run vm` has made them virgin."""
    lab("up")


@pytest.fixture(name="serving", scope="session")
def fixture_serving() -> plays.Played:
    """A whole bring-up with the stand-in engine, each rank's GID index found by its entry script."""
    done = play("site", variables=PINNED, timeout=1500)
    assert done.code == 0, done.text[-6000:]
    return done
