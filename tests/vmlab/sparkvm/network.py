# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The management network: a bridge with the lab's machine on it, and a tap for each virtual one."""

from __future__ import annotations

from pathlib import Path

from sparklab.nodes import address_conflicts
from sparklab.run import LabError, run, say, succeeds
from sparkvm.settings import BRIDGE, GATEWAY, MANAGEMENT, machines

# A Docker engine lets the machine drop what it forwards, and with bridge filtering that hits frames between two ports of a bridge too.
FORWARD = ("FORWARD", "--in-interface", BRIDGE, "--out-interface", BRIDGE, "--jump", "ACCEPT")


def exists(interface: str) -> bool:
    return Path("/sys/class/net", interface).exists()


def ensure() -> None:
    """Make what is missing."""
    if not exists(BRIDGE):
        if conflicts := address_conflicts((MANAGEMENT,), {BRIDGE}):
            raise LabError(f"the lab's network {MANAGEMENT} is in use on this machine: {'; '.join(conflicts)}")
        say(f"network {BRIDGE} ({MANAGEMENT})")
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    run(["ip", "address", "replace", f"{GATEWAY}/{MANAGEMENT.prefixlen}", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])
    for machine in machines():
        if not exists(machine.tap):
            run(["ip", "tuntap", "add", "dev", machine.tap, "mode", "tap"])
        run(["ip", "link", "set", machine.tap, "master", BRIDGE, "up"])
    if not succeeds(["iptables", "--check", *FORWARD]):
        run(["iptables", "--insert", *FORWARD])


def remove() -> None:
    while succeeds(["iptables", "--check", *FORWARD]):
        run(["iptables", "--delete", *FORWARD])
    for interface in [*(machine.tap for machine in machines()), BRIDGE]:
        if exists(interface):
            run(["ip", "link", "delete", interface])
