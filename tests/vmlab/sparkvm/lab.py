# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lab as a whole: brings the machines up, takes them down, tells how they are."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from sparklab import hub_content, tiny_model
from sparklab import settings as container_lab
from sparklab.daemons import Daemons
from sparklab.lock import Lock
from sparklab.run import LabError, say
from sparkvm import image, network, qemu
from sparkvm.machines import Machines
from sparkvm.settings import GATEWAY, HUB_PORT, HUB_URL, RUN, Machine, Paths, machine_by_name, machines

LOCK = Lock(RUN, "tests/vmlab/vmlab", "SPARKVM_CACHE")


class Lab:
    """Everything together."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.daemons = Daemons(paths.state / "processes.json", paths.logs)
        self.machines = Machines(paths, self.daemons)

    def build(self) -> None:
        """Make the disk from which the machines start."""
        self.paths.make()
        qemu.prove_accelerator(self.paths, image.ensure_system(self.paths))
        image.remove_outdated(self.paths)

    def up(self, *, fresh: bool) -> None:
        """Bring all machines up; on a running lab this only checks."""
        self.build()
        network.ensure()
        for machine in machines():
            if fresh:
                self.machines.make_virgin(machine)
            elif not self.machines.running(machine):
                self.machines.prepare(machine)
        self.machines.write_known_hosts()
        self._ensure_hub()
        self._each(machines(), self.machines.power_on)
        self._each(machines(), self.machines.wait_ready)
        say("ready: " + ", ".join(f"{machine.name} {machine.node.user}@{machine.management}" for machine in machines()))

    def _ensure_hub(self) -> None:
        """Serve both revisions of the tiny model, so that a whole bring-up has weights to fetch."""
        model = hub_content.description()
        folder = self.paths.hub / tiny_model.REPOSITORY
        for name, entry in model["revisions"].items():
            if not (folder / entry["revision"]).is_dir():
                hub_content.write_revision(folder / entry["revision"], name, entry)
        (folder / "hub.json").write_text(json.dumps({"main": model["revision"]}) + "\n")
        self.daemons.ensure_listening("hub", (GATEWAY, HUB_PORT), [
            sys.executable, "-B", container_lab.HERE / "hub.py", "--root", self.paths.hub, "--bind", GATEWAY, "--port", str(HUB_PORT), "--admin-port", "0"])

    @staticmethod
    def _each(chosen: Iterable[Machine], act: Callable[[Machine], None]) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(act, chosen))

    @staticmethod
    def named(names: list[str]) -> list[Machine]:
        return [machine_by_name(name) for name in names] or machines()

    def reset(self, names: list[str]) -> None:
        """Make machines virgin again: empty disks, the account and host key that they had."""
        for machine in self.named(names):
            self.machines.make_virgin(machine)
        self._each(self.named(names), self.machines.power_on)

    def power_off(self, names: list[str]) -> None:
        for machine in self.named(names):
            self.machines.power_off(machine)

    def power_on(self, names: list[str]) -> None:
        for machine in self.named(names):
            if not self.machines.paths.machine(machine).joinpath("root.qcow2").exists():
                raise LabError(f"{machine.name} has no disk yet (`vmlab up` makes one)")
        self._each(self.named(names), self.machines.power_on)

    def reboot(self, names: list[str]) -> None:
        self._each(self.named(names), self.machines.reboot)

    def down(self) -> None:
        """Power off and take the network away; disks stay."""
        self.paths.make()
        for machine in machines():
            self.machines.power_off(machine)
        self.daemons.stop("hub")
        network.remove()
        for path in RUN.glob("spark-*"):
            path.unlink()

    def clean(self) -> None:
        """Take the lab down and remove its disks and its cache."""
        self.down()
        say(f"removing {self.paths.cache}")
        for folder in (self.paths.images, self.paths.hub, self.paths.state):
            shutil.rmtree(folder, ignore_errors=True)
        if self.paths.cache.is_dir() and not any(self.paths.cache.iterdir()):
            self.paths.cache.rmdir()

    def status(self) -> dict:
        """Tell everything that a test or a person may want to know; changes nothing."""
        owner = LOCK.read_owner()
        built = image.system_folder(self.paths).exists()
        found = []
        for machine in machines():
            running = self.machines.running(machine)
            found.append({
                "name": machine.name, "user": machine.node.user, "home": machine.node.home, "management": machine.management,
                "rails": [asdict(rail) for rail in machine.rails], "running": running, "pid": self.daemons.pid(machine.name),
                "ssh": running and self.machines.answers(machine), "console": str(self.machines.console(machine)),
            })
        return {
            "healthy": all(entry["ssh"] for entry in found),
            "owner": asdict(owner) | {"live": owner.live} if owner else None,
            "cache": str(self.paths.cache),
            "disk": {"built": built, "accelerator": qemu.accelerator(self.paths), "program": qemu.PROGRAM},
            "hub": {"url": HUB_URL, "pid": self.daemons.pid("hub")},
            "machines": found,
            "ssh": {"key": str(self.paths.ssh_key), "known_hosts": str(self.paths.known_hosts)},
        }
