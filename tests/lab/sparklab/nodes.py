# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The stand-in machines: networks, containers, accounts, keys."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from sparklab import settings, ssh
from sparklab.docker import Docker
from sparklab.run import LabError, run, say, succeeds, wait_for
from sparklab.settings import LABEL, Node, Paths

RUN_FLAGS = (
    # Not --privileged: a host without CAP_SYS_RESOURCE refuses that.
    "--cap-add=ALL", "--cap-drop=SYS_RESOURCE",
    "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined", "--security-opt", "systempaths=unconfined",
    # With a private cgroup namespace the inner engine cannot create its groups.
    "--cgroupns=host", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw",
    "--tmpfs", "/run", "--tmpfs", "/tmp:exec", "--env", "container=docker",
    # vLLM wants a gigabyte of shared memory; a real machine has half of its memory there.
    "--shm-size", "8g",
    "--stop-signal", "SIGRTMIN+3", "--stop-timeout", "20",
)


def address_conflicts(networks: Sequence[ipaddress.IPv4Network], ours: Collection[str]) -> list[str]:
    """Name the addresses in a lab's networks that this machine uses otherwise than on the lab's own interfaces.

    Looks at interfaces, routes, fixed host names and name servers: a host may live in a range that no route shows.
    """
    used: list[tuple[str, str]] = []
    for link in json.loads(run(["ip", "-json", "-4", "address"])):
        if link["ifname"] not in ours:
            used += [(f"{address['local']}/{address['prefixlen']}", f"address of {link['ifname']}") for address in link.get("addr_info", [])]
    for route in json.loads(run(["ip", "-json", "-4", "route"])):
        if route["dst"] != "default" and route.get("dev") not in ours:
            used.append((route["dst"], f"route over {route.get('dev', '?')}"))
        if "gateway" in route:
            used.append((route["gateway"], "gateway"))
    for file in (Path("/etc/hosts"), Path("/etc/resolv.conf")):
        if file.exists():
            used += [(word, str(file)) for line in file.read_text().splitlines() for word in line.partition("#")[0].split()]
    found = []
    for text, where in used:
        try:
            network = ipaddress.IPv4Network(text, strict=False)
        except ValueError:
            continue  # a word of a file that is no address
        if any(network.overlaps(one) for one in networks):
            found.append(f"{text} ({where})")
    return sorted(set(found))


class Nodes:
    """Makes, checks and removes the nodes and their networks."""

    def __init__(self, paths: Paths, docker: Docker) -> None:
        self.paths = paths
        self.docker = docker

    # Networks -----------------------------------------------------------------------------------------------------

    def ensure_networks(self) -> None:
        """Make the two networks: management with the machine as gateway, fabric without any address of the machine."""
        wanted = {
            settings.MANAGEMENT_NETWORK: [
                "--subnet", str(settings.MANAGEMENT), "--gateway", settings.GATEWAY,
                "--opt", f"com.docker.network.bridge.name={settings.MANAGEMENT_BRIDGE}",
                "--opt", "com.docker.network.bridge.enable_ip_masquerade=false",
            ],
            settings.FABRIC_NETWORK: [
                "--subnet", str(settings.FABRIC), "--internal",
                "--opt", f"com.docker.network.bridge.name={settings.FABRIC_BRIDGE}",
                "--opt", "com.docker.network.bridge.inhibit_ipv4=true",
                "--opt", f"com.docker.network.driver.mtu={settings.FABRIC_MTU}",
            ],
        }
        missing = {name: words for name, words in wanted.items() if self.docker.inspect("network", name) is None}
        networks = (settings.MANAGEMENT, settings.FABRIC)
        if missing and (conflicts := address_conflicts(networks, {settings.MANAGEMENT_BRIDGE, settings.FABRIC_BRIDGE})):
            raise LabError(f"the lab's networks {' and '.join(map(str, networks))} are in use on this machine: {'; '.join(conflicts)}")
        for name, words in missing.items():
            say(f"network {name}")
            self.docker("network", "create", "--driver", "bridge", "--label", LABEL, *words, name)

    # Keys ---------------------------------------------------------------------------------------------------------

    def ensure_controller_key(self) -> None:
        """Make the key with which the controller logs in to every node."""
        ssh.ensure_key(self.paths.ssh_key, "sparklab controller")

    def _write_settings(self, node: Node) -> None:
        """Write what a node is told at each boot: its account, its host key and who may log in.

        The folder is mounted into the node, so no node exists half told.
        """
        folder = self.paths.node(node)
        folder.mkdir(parents=True, exist_ok=True)
        ssh.ensure_key(folder / ssh.HOST_KEY, f"sparklab {node.name}")
        shutil.copyfile(self.paths.ssh_key.with_suffix(".pub"), folder / "authorized_keys")
        (folder / "authorized_keys").chmod(0o644)
        (folder / "node.env").write_text(
            f"NODE_USER={node.user}\nNODE_HOME={node.home}\nNODE_REACHES_REGISTRY={'yes' if node.reaches_registry else 'no'}\n"
            f"GATEWAY={settings.GATEWAY}\nREGISTRY_PORTS={settings.REGISTRY_PORT},{settings.REGISTRY_AUTH_PORT}\nMANAGEMENT={settings.MANAGEMENT}\n"
        )

    def write_known_hosts(self, wanted: list[Node]) -> None:
        """Write the host keys of all nodes, so that logins can be strict from the first one on."""
        ssh.write_known_hosts(self.paths.known_hosts, {f"{node.management},{node.name}": self.paths.node(node) for node in wanted})

    # Containers ---------------------------------------------------------------------------------------------------

    def _create_words(self, node: Node, image: str, volume: str) -> list[str]:
        return [
            "--name", node.name, "--hostname", node.name, "--label", LABEL, *RUN_FLAGS,
            "--network", settings.MANAGEMENT_NETWORK, "--ip", node.management,
            "--volume", f"{volume}:/var/lib/docker", "--volume", f"{self.paths.node(node)}:/etc/sparklab:ro",
            image,
        ]

    def ensure(self, node: Node, image_id: str, *, fresh: bool = False) -> None:
        """Bring one node to the state "exists as described and runs"; with *fresh* it starts from nothing."""
        self._write_settings(node)
        words = self._create_words(node, image_id, self._volume(node, fresh=fresh))
        spec = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
        found = self.docker.inspect("container", node.name)
        if found and LABEL not in found["Config"]["Labels"]:
            raise LabError(f"there is a container {node.name} that the lab did not make; it is left alone")
        attached = found is not None and set(found["NetworkSettings"]["Networks"]) == {settings.MANAGEMENT_NETWORK, settings.FABRIC_NETWORK}
        if found and (fresh or not attached or found["Config"]["Labels"].get(f"{LABEL}.spec") != spec):
            self.docker("container", "rm", "--force", "--volumes", node.name)
            found = None
        if not found:
            say(f"{node.name}: new container")
            self.docker("container", "create", "--label", f"{LABEL}.spec={spec}", *words)
            # The second network is attached before the start: eth0 is management, eth1 is fabric, at every boot.
            self.docker("network", "connect", "--ip", node.fabric, settings.FABRIC_NETWORK, node.name)
        if not found or not found["State"]["Running"]:
            say(f"{node.name}: booting")
            self.docker("container", "start", node.name)

    def _volume(self, node: Node, *, fresh: bool) -> str:
        """Return the volume of a node's engine, made if need be.

        A fresh node gets another volume: to remove one with a loaded image takes half a minute on a busy disk, and
        that may happen while the new node already works.
        """
        record = self.paths.node(node) / "volume"
        if not fresh and record.exists() and self.docker.inspect("volume", record.read_text()):
            return record.read_text()
        name = f"{LABEL}-{node.name}-{secrets.token_hex(4)}"
        self.docker("volume", "create", "--label", LABEL, name)
        record.write_text(name)
        return name

    def stale_volumes(self) -> list[str]:
        """Name the volumes of the lab that no node uses any more."""
        current = {record.read_text() for record in (self.paths.state / "nodes").glob("*/volume")}
        return [name for name in self.docker.labelled("volume") if name not in current]

    def ssh_words(self, node: Node, *command: str) -> list[str]:
        """Return the ssh command line for a node, strict about its host key."""
        return ssh.words(self.paths.ssh_key, self.paths.known_hosts, f"{node.user}@{node.management}", *command)

    def wait_ready(self, node: Node, seconds: float = 90) -> None:
        """Wait until the node lets its user in and its own Docker Engine answers."""
        def explain() -> str:
            return self.docker("exec", node.name, "journalctl", "--no-pager", "--lines", "30", check=False, timeout=20)

        probe = self.ssh_words(node, "test -e /run/sparklab-node.done && sudo -n docker info")
        wait_for(f"{node.name} answers ssh and runs its engine", lambda: succeeds(probe, timeout=20), seconds, pause=0.2, explain=explain)

    def remove_one(self, node: Node) -> None:
        """Remove a node; its volume is stale from then on."""
        say(f"removing {node.name}")
        self.docker("container", "rm", "--force", "--volumes", node.name)
        shutil.rmtree(self.paths.node(node), ignore_errors=True)

    def remove(self) -> None:
        """Remove all nodes with their volumes, and the networks."""
        for name in self.docker.labelled("container"):
            say(f"removing {name}")
            self.docker("container", "rm", "--force", "--volumes", name)
        shutil.rmtree(self.paths.state / "nodes", ignore_errors=True)
        for name in self.docker.labelled("volume"):
            self.docker("volume", "rm", "--force", name)
        for name in self.docker.labelled("network"):
            self.docker("network", "rm", name)
