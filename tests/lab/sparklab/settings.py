# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Names, addresses and folders of the lab: everything that other modules must agree on."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

LABEL = "sparklab"
"""Label on everything that the lab makes in the engine; nothing without it is ever removed."""

# The management network lies in the range for benchmarks (RFC 2544) and not in one of the ranges for documentation,
# because test machines were seen that use those themselves, one for its own gateway and one for its package registries:
# a bridge there would cut the machine off. The fabric has no address on the machine, yet the same check covers both.
MANAGEMENT = ipaddress.ip_network("198.18.0.0/24")
FABRIC = ipaddress.ip_network("198.51.100.0/24")
GATEWAY = str(MANAGEMENT[1])
"""The machine itself, as the nodes see it."""

MANAGEMENT_NETWORK = "sparklab-management"
MANAGEMENT_BRIDGE = "sparklab-mgmt"
FABRIC_NETWORK = "sparklab-fabric"
FABRIC_BRIDGE = "sparklab-fabric"
FABRIC_MTU = 9000

REGISTRY_PORT = 5000
REGISTRY_AUTH_PORT = 5001
HUB_PORT = 8900
HUB_ADMIN_PORT = 8999
APT_PORT = 8901

REGISTRY = f"{GATEWAY}:{REGISTRY_PORT}"
REGISTRY_AUTH = f"{GATEWAY}:{REGISTRY_AUTH_PORT}"
HUB_URL = f"http://{GATEWAY}:{HUB_PORT}"
APT_URL = f"http://{GATEWAY}:{APT_PORT}"

DEFAULT_NODES = 3
MAX_NODES = 32
FIRST_USERS = ("alice", "bob", "carol", "dave", "erin", "frank")
"""Every node has another account, because on real pairs the two seldom agree."""

OTHER_HOMES = {2: "/data/home/bob"}

HERE = Path(__file__).resolve().parent.parent
CHECKOUT = HERE.parent.parent
RUN = Path("/run/sparklab")


@dataclass(frozen=True)
class Node:
    """One stand-in machine."""

    number: int

    @property
    def name(self) -> str:
        return f"spark-{self.number}"

    @property
    def user(self) -> str:
        if self.number <= len(FIRST_USERS):
            return FIRST_USERS[self.number - 1]
        return f"user{self.number}"

    @property
    def home(self) -> str:
        return OTHER_HOMES.get(self.number, f"/home/{self.user}")

    @property
    def management(self) -> str:
        return str(MANAGEMENT[20 + self.number])

    @property
    def fabric(self) -> str:
        return str(FABRIC[10 + self.number])

    @property
    def reaches_registry(self) -> bool:
        """Only the first node does: images have to be shipped to every other one."""
        return self.number == 1


def nodes(count: int) -> list[Node]:
    """Return the first *count* nodes."""
    return [Node(number) for number in range(1, count + 1)]


def node_by_name(name: str) -> Node:
    """Return the node that is called *name*, say ``spark-2``."""
    for node in nodes(MAX_NODES):
        if node.name == name:
            return node
    raise ValueError(f"no such node: {name} (nodes are called spark-1 to spark-{MAX_NODES})")


@dataclass(frozen=True)
class Folders:
    """Folders that labs of all kinds have, below one cache folder outside the checkout."""

    cache: Path

    VARIABLE: ClassVar[str]
    DEFAULT: ClassVar[str]

    @classmethod
    def from_environment(cls) -> Self:
        return cls(Path(os.environ.get(cls.VARIABLE) or cls.DEFAULT).absolute())

    @property
    def images(self) -> Path:
        return self.cache / "images"

    @property
    def hub(self) -> Path:
        return self.cache / "hub"

    @property
    def state(self) -> Path:
        return self.cache / "state"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def ssh_key(self) -> Path:
        return self.state / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.state / "ssh" / "known_hosts"

    def make(self) -> None:
        """Make the folders; only the owner may look into the state, which holds private keys."""
        for folder in (self.cache, self.images, self.hub, self.state, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.state.chmod(0o700)
        (self.state / "ssh").mkdir(mode=0o700, exist_ok=True)


class Paths(Folders):
    """Folders of this lab."""

    VARIABLE, DEFAULT = "SPARKLAB_CACHE", "/var/cache/sparkops-lab"

    @property
    def engine(self) -> Path:
        return self.cache / "engine"

    @property
    def registry(self) -> Path:
        return self.cache / "registry"

    def node(self, node: Node) -> Path:
        return self.state / "nodes" / node.name

    def make(self) -> None:
        super().make()
        for folder in (self.engine, self.registry):
            folder.mkdir(exist_ok=True)
