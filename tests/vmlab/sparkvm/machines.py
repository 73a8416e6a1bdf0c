# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The machines: disks, what they are told at boot, power, logins."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from sparklab import settings as container_lab
from sparklab import ssh
from sparklab.daemons import Daemons
from sparklab.debian import stamp
from sparklab.run import LabError, run, say, succeeds, tail, wait_for
from sparkvm import image, qemu
from sparkvm.disks import make_empty, make_overlay, write_seed
from sparkvm.settings import DISKS, FABRIC_MTU, GATEWAY, HERE, MANAGEMENT, Machine, Paths, machines

MANAGEMENT_CARD = "enP7s7"
SNAPSHOT = "first-boot"
READY_SECONDS = 600
"""A boot in emulation takes one to two minutes on idle cores, and was seen to take four beside other work."""
PRIORITY = "-10"
"""Of the scheduling group of a machine: where sessions are scheduled as groups, niceness alone says nothing between them."""


class Machines:
    """Makes, starts, checks and removes the machines."""

    def __init__(self, paths: Paths, daemons: Daemons) -> None:
        self.paths = paths
        self.daemons = daemons

    # What a machine is told -----------------------------------------------------------------------------------------

    def _seed(self, machine: Machine) -> dict[str, bytes | Path]:
        folder = self.paths.machine(machine)
        ssh.ensure_key(folder / ssh.HOST_KEY, f"sparkvm {machine.name}")
        words = {
            "NAME": machine.name, "USER_NAME": machine.node.user, "USER_HOME": machine.node.home, "MANAGEMENT": str(MANAGEMENT),
            "MANAGEMENT_SLOT": f"{qemu.MANAGEMENT_SLOT:x}", "MANAGEMENT_CARD": MANAGEMENT_CARD,
        }
        for rail, slot in zip(machine.rails, qemu.RAIL_SLOTS):
            words |= {f"RAIL{rail.number}_SLOT": f"{slot:x}", f"RAIL{rail.number}_CARD": rail.interface, f"RAIL{rail.number}_HCA": rail.hca}
        engine = {"insecure-registries": [container_lab.REGISTRY, container_lab.REGISTRY_AUTH], "storage-driver": "overlay2"}
        return {
            "setup": HERE / "guest" / "setup",
            "machine.env": "".join(f"{name}={value}\n" for name, value in words.items()).encode(),
            ssh.HOST_KEY: folder / ssh.HOST_KEY,
            f"{ssh.HOST_KEY}.pub": folder / f"{ssh.HOST_KEY}.pub",
            "authorized_keys": self.paths.ssh_key.with_suffix(".pub"),
            "sshd.conf": container_lab.HERE / "node" / "sshd.conf",
            "daemon.json": (json.dumps(engine, indent=2) + "\n").encode(),
            "01-management.yaml": netplan({MANAGEMENT_CARD: {
                "addresses": [f"{machine.management}/{MANAGEMENT.prefixlen}"], "routes": [{"to": "default", "via": GATEWAY}], "dhcp4": False}}),
            # What the recipes' documents let their readers write.
            "40-cx7.yaml": netplan({rail.interface: {"addresses": [rail.address], "mtu": FABRIC_MTU, "dhcp4": False, "optional": True}
                                    for rail in machine.rails}),
        }

    def prepare(self, machine: Machine) -> None:
        """Write keys and seed, and make the disks if they are missing or of another recipe."""
        folder = self.paths.machine(machine)
        folder.mkdir(parents=True, exist_ok=True)
        ssh.ensure_key(self.paths.ssh_key, "sparkvm controller")
        write_seed(folder / "seed.tar", self._seed(machine))
        mark = stamp(self._words(machine), folder / "seed.tar")
        origin = folder / "origin"
        if not origin.exists() or origin.read_text() != mark:
            self._forget_disks(machine)
            make_overlay(folder / "root.qcow2", image.system_folder(self.paths) / "root.img", "raw")
            for serial, size in DISKS:
                make_empty(folder / f"{serial}.qcow2", size)
            origin.write_text(mark)

    def make_virgin(self, machine: Machine) -> None:
        """Power off; the next start is that of a machine nobody has used. Host key and account stay the same."""
        self.power_off(machine)
        if self._snapshot(machine).exists():
            self._snapshot(machine).write_text("wanted")
        else:
            self._forget_disks(machine)
        self.prepare(machine)

    def _forget_disks(self, machine: Machine) -> None:
        for name in ("origin", "snapshot"):
            (self.paths.machine(machine) / name).unlink(missing_ok=True)

    def _snapshot(self, machine: Machine) -> Path:
        """Exists when the disks hold the state of the machine after its first boot; its text says whether the next start takes it."""
        return self.paths.machine(machine) / "snapshot"

    # Power ----------------------------------------------------------------------------------------------------------

    def running(self, machine: Machine) -> bool:
        return self.daemons.pid(machine.name) is not None

    def console(self, machine: Machine) -> Path:
        return self.paths.logs / f"{machine.name}-console.log"

    def _words(self, machine: Machine) -> list[str]:
        folder = self.paths.machine(machine)
        peer = next(other for other in machines() if other != machine)
        return [
            *qemu.base(qemu.accelerator(self.paths), image.system_folder(self.paths), folder / "root.qcow2", folder / "seed.tar", self.console(machine)),
            *qemu.network(machine, peer), *qemu.disks(folder), *qemu.monitor(machine),
        ]

    def power_on(self, machine: Machine) -> None:
        """Boot from the disks as they are; or take up the state after the first boot, which takes seconds instead of minutes."""
        if self.running(machine):
            return
        snapshot = self._snapshot(machine)
        again = snapshot.exists() and snapshot.read_text() == "wanted"
        say(f"{machine.name}: {'as after its first boot' if again else 'power on'}")
        pid = self.daemons.start(machine.name, [*self._words(machine), *(["-loadvm", SNAPSHOT] if again else [])])
        with contextlib.suppress(OSError):  # a kernel without such groups
            Path(f"/proc/{pid}/autogroup").write_text(PRIORITY)
        try:
            self.wait_ready(machine)
        except LabError:
            if again:  # a snapshot that does not come to life is not tried twice
                self._forget_disks(machine)
            raise
        if snapshot.exists() or self._take_snapshot(machine):
            snapshot.write_text("")
        run(self.ssh_words(machine, f"sudo date --set @{time.time():.0f}"), timeout=60)  # a snapshot's clock stands still

    def _take_snapshot(self, machine: Machine) -> bool:
        """Keep the state after the first boot; without it the next virgin machine boots once more."""
        begun = time.monotonic()
        try:
            qemu.human_command(machine, f"savevm {SNAPSHOT}")
        except LabError as error:
            say(f"{machine.name}: its state cannot be kept ({error})")
            return False
        say(f"{machine.name}: its state is kept ({time.monotonic() - begun:.0f} s)")
        return True

    def power_off(self, machine: Machine) -> None:
        """Pull the plug: QEMU ends at once, whatever the machine is doing."""
        self.daemons.stop(machine.name)

    # Logins ---------------------------------------------------------------------------------------------------------

    def ssh_words(self, machine: Machine, *command: str) -> list[str]:
        return ssh.words(self.paths.ssh_key, self.paths.known_hosts, f"{machine.node.user}@{machine.management}", *command)

    def write_known_hosts(self) -> None:
        ssh.write_known_hosts(self.paths.known_hosts, {f"{machine.management},{machine.name}": self.paths.machine(machine) for machine in machines()})

    def answers(self, machine: Machine) -> bool:
        return succeeds(self.ssh_words(machine, "true"), timeout=20)

    def boot_id(self, machine: Machine) -> str:
        return run(self.ssh_words(machine, "cat /proc/sys/kernel/random/boot_id"), check=False, timeout=20).strip()

    def wait_ready(self, machine: Machine, seconds: float = READY_SECONDS) -> None:
        """Wait until the machine lets its user in and its engine answers."""
        def ready() -> bool:
            if not self.running(machine):
                raise LabError(f"{machine.name} ended\n{tail(self.daemons.log(machine.name))}\n{tail(self.console(machine))}")
            return succeeds(self.ssh_words(machine, "sudo -n docker info"), timeout=20)

        wait_for(f"{machine.name} answers ssh and runs its engine", ready, seconds, pause=0.5, explain=lambda: tail(self.console(machine), 30))

    def reboot(self, machine: Machine, seconds: float = READY_SECONDS) -> None:
        """Reboot from inside, as a person would, and wait until the machine is back."""
        before = self.boot_id(machine)
        if not before:
            raise LabError(f"{machine.name} does not answer, so it cannot be told to reboot (power-off and power-on can)")
        run(self.ssh_words(machine, "sudo systemctl reboot"), check=False, timeout=30)
        wait_for(f"{machine.name} has booted again", lambda: self.boot_id(machine) not in ("", before), seconds, pause=1)
        self.wait_ready(machine, seconds)

    def set_link(self, machine: Machine, rail: int, up: bool) -> None:
        """Put the cable of a rail in or out: the machine loses its carrier, as with a real one."""
        qemu.command(machine, "set_link", {"name": f"nic-rail{rail}", "up": up})

    def remove(self) -> None:
        for machine in machines():
            self.power_off(machine)
        shutil.rmtree(self.paths.state / "machines", ignore_errors=True)


def netplan(ethernets: Mapping[str, Mapping[str, object]]) -> bytes:
    """Return a netplan file; JSON is YAML."""
    return (json.dumps({"network": {"version": 2, "renderer": "networkd", "ethernets": ethernets}}, indent=2) + "\n").encode()
