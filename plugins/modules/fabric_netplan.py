#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_netplan
short_description: Keep the netplan file of the fabric rails
version_added: 0.1.0
description:
  - Writes one netplan file for the fabric rails, with addresses and MTU and without IPv6, and applies it.
  - Where the file is right and a rail runs with another MTU or without an address, it is applied again.
  - A change is validated before it is applied, and is taken back by a timer on the node unless it is confirmed. A change on top of an
    unconfirmed one is taken back together with it, to what was confirmed last.
  - Files of others are never touched. If one configures the same interfaces, nothing is done and it is named.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Can run in check mode and return changed status prediction without modifying target.
  diff_mode:
    support: full
    description: Shows the file before and after.
  idempotent:
    support: full
    description: When run twice in a row outside check mode, with the same arguments, the second invocation indicates no change.
options:
  state:
    description:
      - V(present) writes and applies the file and sets the timer.
      - V(confirmed) takes the timer away after the new state was seen to work. It is refused if the change was taken back meanwhile.
      - V(absent) removes the file and applies.
    type: str
    choices: [present, confirmed, absent]
    default: present
  node:
    description: Inventory name of this node, for messages.
    type: str
    required: true
  rails:
    description: Interfaces, each with a list of addresses with prefix length.
    type: dict
    default: {}
  mtu:
    description: MTU of every rail.
    type: int
    default: 9000
  file:
    description: Name of the file.
    type: str
    default: 90-sparkops-fabric.yaml
  folder:
    description: Where netplan files lie.
    type: path
    default: /etc/netplan
  route_file:
    description: The kernel's IPv4 routes, for tests.
    type: path
    default: /proc/net/route
  backup_folder:
    description: Where the state before a change is kept, a folder per change.
    type: path
    default: /var/lib/sparkops/netplan
  return_seconds:
    description: Time after which an unconfirmed change is taken back.
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Configure the rails of a node
  sparkops.inference.fabric_netplan:
    node: spark-1
    rails:
      enp1s0f1np1: [198.51.100.11/24]
      enP2p1s0f1np1: [203.0.113.11/24]
  become: true

- name: Keep the new configuration
  sparkops.inference.fabric_netplan:
    node: spark-1
    state: confirmed
    rails:
      enp1s0f1np1: [198.51.100.11/24]
      enP2p1s0f1np1: [203.0.113.11/24]
  become: true
"""

RETURN = r"""
path:
  description: Path of the file.
  returned: always
  type: str
pending:
  description: Whether the state that runs waits for its confirmation, be it made now or by a run that ended early.
  returned: with O(state=present)
  type: bool
backup:
  description: Folder with all netplan files as they were confirmed last.
  returned: when a change was made
  type: str
"""

import json
import os
import shutil
import tempfile
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._netplan import (
    NetplanError,
    default_route_interfaces,
    drift,
    foreign_files,
    join_changes,
    missing_interfaces,
    render,
    return_program,
)
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import read_json, write_json
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

UNIT = "sparkops-fabric-return"
RETURN_PROGRAM = "return.sh"
CHANGE = "change.json"  # addresses that were given, and the links before
UNCONFIRMED = "unconfirmed"  # a link to the backup of the change that waits for its confirmation
RENDERER_SECONDS = 10


class RailFile:
    """The file of the rails on one node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.folder = module.params["folder"]
        self.name = module.params["file"]
        self.path = os.path.join(self.folder, self.name)
        self.backups = module.params["backup_folder"]
        self.mark = os.path.join(self.backups, UNCONFIRMED)

    def refuse(self, kind: str, found: str, wanted: str, next_step: str) -> t.NoReturn:
        refusal = Refusal(kind, self.module.params["node"], self.path, found, wanted, next_step)
        fail(self.module, [refusal])

    def run(self, *command: str) -> None:
        code, out, err = self.module.run_command(list(command))
        if code != 0:
            self.refuse(
                "fabric.netplan_failed", f"{' '.join(command)}: exit code {code}, {(err or out).strip()[-300:]}", "success",
                f"see the journal of the node; what was written is taken back within {self.module.params['return_seconds']} s",
            )

    def diff(self, before: str, after: str) -> dict[str, str]:
        return {"before": before, "after": after, "before_header": self.path, "after_header": self.path}

    def texts(self) -> dict[str, str]:
        """All netplan files. They are 0600, so this needs root."""
        found = {}
        try:
            for name in sorted(os.listdir(self.folder)):
                if name.endswith(".yaml"):
                    with open(os.path.join(self.folder, name), encoding="utf-8") as stream:
                        found[name] = stream.read()
        except FileNotFoundError:
            self.refuse("fabric.netplan_missing", f"no {self.folder}", "a system that netplan configures", "configure the rails by hand")
        except OSError as exc:
            self.refuse("fabric.netplan_unreadable", f"{name}: {exc.strerror}", "files that can be read", "run with root rights (become)")
        return found

    def wanted(self) -> str:
        try:
            return render(self.module.params["rails"], self.module.params["mtu"])
        except NetplanError as exc:
            self.refuse("fabric.netplan_rail", str(exc), "interfaces with IPv4 addresses and prefix lengths", "correct fabric_rail_addresses of this node")

    def links(self) -> list[dict[str, t.Any]]:
        code, out, err = self.module.run_command(["ip", "-json", "address", "show"])
        try:
            return json.loads(out) if code == 0 else self.refuse("fabric.netplan_failed", (err or out).strip(), "the output of ip", "install iproute2")
        except ValueError:
            self.refuse("fabric.netplan_failed", f"ip -json address show: {out[:100]!r}", "a JSON list", "install a newer iproute2")

    def present(self) -> dict[str, t.Any]:
        params = self.module.params
        wanted = self.wanted()
        self.spare_default_route()
        texts, links = self.texts(), self.links()
        foreign = foreign_files(texts, self.name, params["rails"], links)
        if foreign:
            self.refuse(
                "fabric.netplan_foreign", f"also configured by {'; '.join(foreign)}", "one file for each interface",
                "leave fabric_configure off and edit that file, or remove its part for these interfaces",
            )
        absent = missing_interfaces(params["rails"], links)
        if absent:
            self.refuse("fabric.netplan_rail", f"no interface {', '.join(absent)}", "interfaces of this node", "correct fabric_rail_addresses of this node")
        current = texts.get(self.name, "")
        running = drift(params["rails"], params["mtu"], links)
        # What runs otherwise than a file that is right shows in the diff as remarks that go away.
        before = current + "".join(f"# {line}\n" for line in running if current == wanted)
        result = {"changed": before != wanted, "path": self.path, "pending": os.path.isdir(self.mark), "diff": self.diff(before, wanted)}
        if result["changed"]:
            self.validate(wanted)
        if result["changed"] and not self.module.check_mode:
            result["pending"] = True
            result["backup"] = self.backup()
            self.arm(self.write_return_program(result["backup"], links))
            self.mark_unconfirmed(result["backup"])
            self.write(wanted)
            self.run("netplan", "apply")
            self.set_right()
        return result

    def set_right(self) -> None:
        """Give the renderer a moment; what it then still leaves as it was (it may see no change in its own files) is set by hand."""
        rails, mtu = self.module.params["rails"], self.module.params["mtu"]
        end = time.monotonic() + RENDERER_SECONDS
        while drift(rails, mtu, self.links()):
            if time.monotonic() > end:
                for name, addresses in rails.items():
                    self.run("ip", "link", "set", "dev", name, "mtu", str(mtu), "up")
                    for address in addresses:
                        self.run("ip", "address", "replace", address, "dev", name)
                return
            time.sleep(0.5)

    def spare_default_route(self) -> None:
        """A rail file has no gateway: written for the way to the outside, it would cut the node off for good."""
        with open(self.module.params["route_file"], encoding="utf-8") as stream:
            taken = sorted(default_route_interfaces(stream.read()) & set(self.module.params["rails"]))
        if taken:
            self.refuse(
                "fabric.netplan_default_route", f"{', '.join(taken)} carries the default route", "interfaces that only lead to other ranks",
                "take it out of fabric_rail_addresses, or configure it by hand",
            )

    def validate(self, wanted: str) -> None:
        """Let netplan read everything as it will be, in a root of its own."""
        with tempfile.TemporaryDirectory() as root:
            folder = os.path.join(root, "etc/netplan")
            shutil.copytree(self.folder, folder)
            with open(os.open(os.path.join(folder, self.name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
                stream.write(wanted)
            code, out, err = self.module.run_command(["netplan", "generate", "--root-dir", root])
        if code != 0:
            self.refuse("fabric.netplan_invalid", (err or out).strip()[-300:], "a configuration that netplan accepts", "correct the netplan file that it names")

    def backup(self) -> str:
        """All files as they were confirmed last: as they are, unless a change waits for its confirmation."""
        if os.path.isdir(self.mark):
            return os.path.realpath(self.mark)
        os.makedirs(self.backups, mode=0o700, exist_ok=True)
        target = tempfile.mkdtemp(prefix=time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()), dir=self.backups)
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target

    def write_return_program(self, backup: str, links: t.Sequence[t.Mapping[str, t.Any]]) -> str:
        program, path = os.path.join(backup, RETURN_PROGRAM), os.path.join(backup, CHANGE)
        change = join_changes(read_json(path, {"rails": {}, "links": []}), self.module.params["rails"], links)
        write_json(path, change)
        with open(os.open(program, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700), "w", encoding="utf-8") as stream:
            stream.write(return_program(self.path, os.path.join(backup, self.name), change["rails"], change["links"], self.mark))
        return program

    def arm(self, program: str) -> None:
        """The timer is set before the change: from here on the node comes back by itself."""
        self.disarm()
        self.run("systemd-run", f"--unit={UNIT}", f"--on-active={self.module.params['return_seconds']}s", "--collect", "/bin/sh", program)

    def mark_unconfirmed(self, backup: str) -> None:
        """A run that ends before its confirmation leaves the mark behind, with a file that is right. The return program takes it away."""
        self.unmark()
        os.symlink(backup, self.mark)

    def unmark(self) -> None:
        if os.path.islink(self.mark):
            os.unlink(self.mark)

    def disarm(self) -> None:
        # Fails when no timer is set, which is as good.
        self.module.run_command(["systemctl", "stop", f"{UNIT}.timer"])

    def write(self, text: str) -> None:
        handle, name = tempfile.mkstemp(dir=self.module.tmpdir)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o600)
        self.module.atomic_move(name, self.path)
        os.chmod(self.path, 0o600)

    def confirmed(self) -> dict[str, t.Any]:
        """The timer goes first: only then what is there stays there, and can be looked at."""
        if not self.module.check_mode:
            self.disarm()
            if self.texts().get(self.name, "") != self.wanted():
                self.refuse(
                    "fabric.netplan_returned", "the change was taken back, since it was not confirmed in time", "the file as it was written",
                    f"see what took longer than fabric_return_seconds ({self.module.params['return_seconds']} s), raise it, and run again",
                )
            self.unmark()
        return {"changed": False, "path": self.path}

    def absent(self) -> dict[str, t.Any]:
        current = self.texts().get(self.name, "")
        result = {"changed": bool(current), "path": self.path, "diff": self.diff(current, "")}
        if current and not self.module.check_mode:
            self.disarm()
            result["backup"] = self.backup()
            os.unlink(self.path)
            self.unmark()
            self.run("netplan", "apply")
        return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "confirmed", "absent"], "default": "present"},
            "node": {"type": "str", "required": True},
            "rails": {"type": "dict", "default": {}},
            "mtu": {"type": "int", "default": 9000},
            "file": {"type": "str", "default": "90-sparkops-fabric.yaml"},
            "folder": {"type": "path", "default": "/etc/netplan"},
            "route_file": {"type": "path", "default": "/proc/net/route"},
            "backup_folder": {"type": "path", "default": "/var/lib/sparkops/netplan"},
            "return_seconds": {"type": "int", "default": 120},
        },
        required_if=[("state", "present", ["rails"]), ("state", "confirmed", ["rails"])],
        supports_check_mode=True,
    )
    rail_file = RailFile(module)
    actions = {"present": rail_file.present, "confirmed": rail_file.confirmed, "absent": rail_file.absent}
    module.exit_json(**actions[module.params["state"]]())


if __name__ == "__main__":
    main()
