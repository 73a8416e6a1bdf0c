# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Names, addresses and folders of the virtual-machine lab."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from sparklab.settings import Folders, Node

HERE = Path(__file__).resolve().parent.parent
RUN = Path("/run/sparkvm")
"""Sockets and the lock: a path to a socket has to be short."""

# Beside the container lab's network, so that both labs can be up.
MANAGEMENT = ipaddress.ip_network("198.18.1.0/24")
GATEWAY = str(MANAGEMENT[1])
"""The machine that runs the lab. The rails lead from machine to machine and have no end here."""
BRIDGE = "sparkvm"
HUB_PORT = 8900
HUB_URL = f"http://{GATEWAY}:{HUB_PORT}"

MACHINES = 2
"""Two, because the rails are cables: each has two ends."""
MEMORY_MB = 3072
PROCESSORS = 1
"""Emulated on two cores, two machines of one are faster than two of two."""
DISKS = (("data1", "6G"), ("data2", "2G"))
"""Empty disks, for ZFS pools and file systems of tests: serial number and size."""

FABRIC_MTU = 9000


@dataclass(frozen=True)
class Rail:
    """One of the two halves of a QSFP port, with the names that a GB10 gives them."""

    number: int
    interface: str
    hca: str
    address: str


@dataclass(frozen=True)
class Machine:
    """One stand-in machine: account and name as in the container lab."""

    number: int

    @property
    def node(self) -> Node:
        return Node(self.number)

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def management(self) -> str:
        return str(MANAGEMENT[20 + self.number])

    @property
    def tap(self) -> str:
        return f"{BRIDGE}-{self.number}"

    @property
    def rails(self) -> tuple[Rail, Rail]:
        """The cable is in another port on each machine, as on real pairs."""
        function = 1 if self.number == 1 else 0
        return (
            Rail(1, f"enp1s0f{function}np{function}", f"rocep1s0f{function}", f"198.51.100.{10 + self.number}/24"),
            Rail(2, f"enP2p1s0f{function}np{function}", f"roceP2p1s0f{function}", f"203.0.113.{10 + self.number}/24"),
        )


def machines() -> list[Machine]:
    return [Machine(number) for number in range(1, MACHINES + 1)]


def machine_by_name(name: str) -> Machine:
    for machine in machines():
        if machine.name == name:
            return machine
    raise ValueError(f"no such machine: {name} (there are: {', '.join(machine.name for machine in machines())})")


class Paths(Folders):
    """Folders of this lab."""

    VARIABLE, DEFAULT = "SPARKVM_CACHE", "/var/cache/sparkops-vmlab"

    def machine(self, machine: Machine) -> Path:
        return self.state / "machines" / machine.name
