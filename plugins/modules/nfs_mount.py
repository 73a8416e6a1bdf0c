#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nfs_mount
short_description: Mount the head's model folders read-only, and never hang on a dead server
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Each folder of the server is mounted at the same place below the node's own O(root), with the options that the collection has for it.
  - A mount whose options changed is made anew when nobody uses it, and refused by the user's name otherwise.
  - A mount whose server has just come back is looked at again for as long as the kernel takes to find it.
  - Everything that touches a mount runs with a time limit.
  - The table of filesystems is not this module's work; M(ansible.posix.mount) keeps it.
  - Needs root.
extends_documentation_fragment:
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Says what would be mounted and unmounted.
  diff_mode:
    support: none
    description: RV(steps) say it.
  idempotent:
    support: full
    description: A live mount with the wanted options is left alone.
options:
  server:
    description: Fabric address of the head. Not needed to unmount.
    type: str
    default: ''
  root:
    description: Folder of this node that holds the trees.
    type: path
    required: true
  server_root:
    description: The head's folder that holds the trees. Not needed to unmount.
    type: path
    default: /
  directories:
    description: The trees, below both roots.
    type: list
    elements: str
    required: true
  state:
    description: V(unmounted) takes NFS mounts of the trees away, and those of earlier trees that the collection has made. A live one that is not in O(shared)
      belongs to another deployment, and stays.
    type: str
    choices: [mounted, unmounted]
    default: mounted
  shared:
    description: Folders that the head exports for this deployment. Only needed to unmount.
    type: list
    elements: path
    default: []
  served:
    description:
      - Folders that the head exports for any deployment. A line of the table of filesystems for another folder of O(server), which the collection has made and
        which is not mounted, is told as RV(steps) with the action V(forget).
      - Without it no line is.
    type: list
    elements: path
  recover:
    description: Whether a mount with a stale or broken handle is given up and made anew. A stale one of a tree that is not in O(directories) only goes.
    type: bool
    default: false
  user:
    description: Account that owns the folders above the mounts. The default is the one that runs the module.
    type: str
    default: ''
  seconds:
    description: Time for each look at a mount. A mount itself may take four times as long.
    type: int
    default: 10
"""

EXAMPLES = r"""
- name: Mount the head's folder
  sparkops.inference.nfs_mount:
    node: spark-2
    server: 198.51.100.11
    root: /var/lib/sparkops/weights
    server_root: /var/lib/sparkops/weights
    directories: [acme--tiny/0123456789012345678901234567890123456789]
  become: true
"""

RETURN = r"""
steps:
  description: What was done, or would be, for each folder.
  returned: always
  type: list
  elements: dict
  sample:
    - {path: /var/lib/sparkops/weights/acme--tiny/0123, action: remount, reason: "nconnect 1, wanted 8"}
notices:
  description: What the user should know.
  returned: always
  type: list
  elements: str
fstab_options:
  description: Options for the line in the table of filesystems.
  returned: always
  type: str
  sample: nfsvers=4.2,ro,hard,nofail,_netdev,x-sparkops
boot_mark:
  description: The one of these options by which these lines are known.
  returned: always
  type: str
  sample: x-sparkops
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import os
import socket
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _manifest, _mounts, _nfs_plan, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._mounts import Mount
from ansible_collections.sparkops.inference.plugins.module_utils._nfs_plan import PORT, Step, Wanted
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

CONNECT_SECONDS = 5.0
# The kernel tries a lost connection again only after up to half a lease, which is 45 s with the usual one, however soon the server is back.
LOOKS_AGAIN = 5


def reachable(server: str) -> str:
    """An empty text, or why the server's port does not answer."""
    try:
        with socket.create_connection((server, PORT), timeout=CONNECT_SECONDS):
            return ""
    except OSError as exc:
        return str(exc)


class Client:
    """The mounts of this node that hold the deployment's trees."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params = module.params
        self.node, self.server, self.seconds = params["node"], params["server"], params["seconds"]
        self.trees = [
            Wanted(os.path.join(params["root"], item), self.server, os.path.join(params["server_root"], item)) for item in params["directories"]
        ]
        self.mounts = _mounts.read()
        self.program = module.get_bin_path("mount.nfs", opt_dirs=["/usr/sbin", "/sbin"])

    def refusal(self, name: str, thing: str, found: str, wanted: str, next_step: str) -> Refusal:
        return Refusal(f"sync.{name}", self.node, thing, found, wanted, next_step)

    def fail(self, refusals: t.Sequence[Refusal]) -> t.NoReturn:
        fail(self.module, refusals)

    def current(self, path: str) -> Mount | None:
        return _mounts.at(self.mounts, path)

    def plans(self) -> list[tuple[Wanted, Mount | None, Step]]:
        """What to do about each tree. All mounts are asked at the same time."""
        present = [(wanted, self.current(wanted.path)) for wanted in self.trees]
        network = [mount for _wanted, mount in present if mount and mount.type in _mounts.NETWORK_TYPES]
        states = {mount.path: look.state for mount, look in self.look_at(network)}
        ours = {wanted.path for wanted in self.trees}
        others = [mount for mount in self.mounts if mount.type in _mounts.NETWORK_TYPES and mount.path not in ours]
        result = []
        for wanted, mount in present:
            users = _mounts.users(mount) if mount else []
            if self.module.params["state"] == "unmounted":
                result.append((wanted, mount, self.retire(mount, users)))
            else:
                state = states.get(wanted.path, "")
                result.append((wanted, mount, _nfs_plan.plan_mount(wanted, mount, state, users, others, self.module.params["recover"])))
        if self.module.params["state"] == "unmounted":
            return [*result, *self.left(ours)]
        return [*result, *self.forgotten(ours), *(self.superseded(others) if self.module.params["recover"] else [])]

    def left(self, ours: t.Container[str]) -> list[tuple[Wanted, Mount | None, Step]]:
        """Mounts and lines of earlier trees. Their exports go with the method, so a mount that stayed would be stale for ever."""
        places = {place: self.current(place) for place in _mounts.read_fstab(_nfs_plan.BOOT_MARK, self.module.params["root"]) if place not in ours}
        looks = self.look_at([mount for mount in places.values() if mount and mount.type in _mounts.NETWORK_TYPES])
        live = {mount.path: mount.export for mount, look in looks if look.state == "live"}
        return [
            (Wanted(place, self.server, ""), mount, self.retire(mount, _mounts.users(mount) if mount else []))
            for place, mount in places.items()
            if place not in live or live[place] in self.module.params["shared"]
        ]

    def forgotten(self, ours: t.Container[str]) -> list[tuple[Wanted, None, Step]]:
        """Lines of earlier trees that the head gives to nobody any more, and that are not mounted. What mounts at boot would try them for ever."""
        if self.module.params["served"] is None:
            return []
        served = {f"{self.server}:{path}" for path in self.module.params["served"]}
        lines = _mounts.read_fstab(_nfs_plan.BOOT_MARK, self.module.params["root"])
        gone = [
            place for place, source in lines.items()
            if place not in ours and source.startswith(f"{self.server}:") and source not in served and self.current(place) is None
        ]  # fmt: skip
        return [(Wanted(place, self.server, ""), None, Step("forget", "the head does not share it any more")) for place in gone]

    def superseded(self, others: t.Sequence[Mount]) -> list[tuple[Wanted, Mount, Step]]:
        """Mounts of earlier trees that the head has removed since. They never come back, and every play would refuse them."""
        theirs = [mount for mount in others if mount.server == self.server and mount.path.startswith(self.module.params["root"].rstrip("/") + "/")]
        stale = [mount for mount, look in self.look_at(theirs) if look.state == "stale"]
        return [(Wanted(mount.path, self.server, ""), mount, self.retire(mount, _mounts.users(mount), "the head has removed it")) for mount in stale]

    def look_at(self, mounts: t.Sequence[Mount]) -> list[tuple[Mount, _limited.Look]]:
        """State of each mount. One of our server, whose port has just answered, is given the time to come back by itself."""
        looks = dict(zip(mounts, _limited.look_at(mounts, self.seconds)))
        patient = self.module.params["state"] == "mounted" and not self.module.check_mode
        for _again in range(LOOKS_AGAIN if patient else 0):
            silent = [mount for mount, look in looks.items() if look.state == "dead" and mount.server == self.server]
            if not silent:
                break
            looks.update(zip(silent, _limited.look_at(silent, self.seconds)))
        return list(looks.items())

    @staticmethod
    def retire(mount: Mount | None, users: t.Sequence[_mounts.User], why: str = "another method is set") -> Step:
        if mount is None or mount.type not in _mounts.NETWORK_TYPES:
            return Step("keep", "")
        if users:
            return Step("refuse_used", f"to be unmounted; used by {_nfs_plan.named(users)}")
        return Step("unmount", why)

    def plan_refusals(self, plans: t.Sequence[tuple[Wanted, Mount | None, Step]]) -> list[Refusal]:
        found = []
        for wanted, mount, step in plans:
            thing = f"mount {wanted.path} of {mount.source if mount else wanted.source}"
            if step.action == "refuse_used":
                found.append(self.refusal("nfs_used", thing, step.reason, "a mount that nobody uses, to make it anew", "stop the group, then run this again"))
            elif step.action == "refuse_foreign":
                found.append(self.refusal("nfs_taken", thing, step.reason, "an empty folder or our own mount", "unmount it, or set weights_root"))
            elif step.action == "refuse_stale":
                found.append(
                    self.refusal("nfs_stale", thing, step.reason, "a handle that the server knows", "run share.yml with the tag recover, which mounts it again")
                )
        return found

    def server_refusals(self) -> list[Refusal]:
        if not self.program and not self.module.check_mode:
            return [
                self.refusal("nfs_client_missing", "program mount.nfs", "none", "package nfs-common", "install it, or set weight_sync_packages"),
            ]
        why = "" if self.module.check_mode else reachable(self.server)
        if not why:
            return []
        return [
            self.refusal(
                "nfs_dead", f"NFS server {self.server} port {PORT}", why, "a server that answers over the fabric",
                "bring it back; systemctl status nfs-server on the head, and its filter for this port, tell more",
            )
        ]  # fmt: skip

    def work(self) -> dict[str, t.Any]:
        mounting = self.module.params["state"] == "mounted"
        # Before any look at a mount: a look at a dead server costs its whole time.
        refusals = self.server_refusals() if mounting else []
        if refusals:
            self.fail(refusals)
        plans = self.plans()
        refusals = self.plan_refusals(plans)
        if refusals:
            self.fail(refusals)
        notices = []
        for wanted, mount, step in plans:
            if self.module.check_mode or step.action == "keep":
                continue
            if step.action in ("remount", "unmount"):
                self.unmount(mount)
            if step.action in ("mount", "remount"):
                self.make_place(wanted.path)
                notices += self.hidden(wanted.path)
                self.mount(wanted)
        changed = any(step.action != "keep" for _wanted, _mount, step in plans)
        if mounting and not self.module.check_mode:
            notices += self.prove()
        steps = [{"path": wanted.path, "action": step.action, "reason": step.reason} for wanted, _mount, step in plans]
        return {"changed": changed, "steps": steps, "notices": notices, "fstab_options": _nfs_plan.fstab_options(), "boot_mark": _nfs_plan.BOOT_MARK}

    def run(self, argv: t.Sequence[str], seconds: int) -> tuple[int, str]:
        """A program that is killed when its time is over."""
        rc, out, err = self.module.run_command(["timeout", "--kill-after=5", str(seconds), *argv])
        return rc, (err or out).strip() or (f"no end within {seconds} s" if rc in (124, 137) else f"code {rc}")

    def unmount(self, mount: Mount) -> None:
        look = _limited.look_at([mount], self.seconds)[0]
        # Without its server a mount can only be taken out of the tree; nobody uses it, so nothing stays behind.
        force = ["--lazy", "--force"] if look.state != "live" else []
        rc, text = self.run(["umount", *force, mount.path], 4 * self.seconds)
        if rc:
            thing = f"mount {mount.path} of {mount.source}"
            self.fail([self.refusal("nfs_used", thing, text, "a mount that nobody uses", "stop what reads there, then run this again")])

    def make_place(self, path: str) -> None:
        """Its parent will hold the manifest, which the account writes. A link there leads into a replica of the method zfs."""
        with _unit.identity(self.module.params["user"]):
            if os.path.islink(path):
                os.unlink(path)
            os.makedirs(path, exist_ok=True)

    def hidden(self, path: str) -> list[str]:
        """What lies in the folder itself cannot be seen below the mount, but takes room."""
        size = _manifest.bytes_below(path)
        return [f"{self.node}: {_manifest.gib(size)} of an own copy lie hidden below the mount {path}; they take room and are not used"] if size else []

    def mount(self, wanted: Wanted) -> None:
        options = f"{_nfs_plan.mount_options()},retry=0"
        rc, text = self.run(["mount", "-t", "nfs4", "-o", options, wanted.source, wanted.path], 4 * self.seconds)
        if rc:
            self.fail(
                [
                    self.refusal(
                        "nfs_mount", f"mount {wanted.path} of {wanted.source}", text, "a mount with NFS 4.2",
                        f"run share.yml; on the head exportfs -v shows what {self.node} may see",
                    )
                ]
            )  # fmt: skip

    def prove(self) -> list[str]:
        """Every mount is there, with its options, and its server answers. Returns what is less than asked for."""
        self.mounts = _mounts.read()
        mounts = [self.current(wanted.path) for wanted in self.trees]
        refusals = [
            self.refusal("nfs_mount", f"mount {wanted.path}", "not in the mount table", wanted.source, "run share.yml")
            for wanted, mount in zip(self.trees, mounts)
            if mount is None
        ]
        there = [mount for mount in mounts if mount]
        refusals += [_limited.refusal(self.node, mount, look) for mount, look in self.look_at(there) if look.state != "live"]
        if refusals:
            self.fail(refusals)
        return [
            f"{self.node}: {mount.path} moves {mount.option('rsize')} bytes at a time, because the server agrees to no more"
            for mount in there
            if mount.option("rsize") not in (None, "1048576")
        ]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "server": {"type": "str", "default": ""},
            "root": {"type": "path", "required": True},
            "server_root": {"type": "path", "default": "/"},
            "directories": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["mounted", "unmounted"], "default": "mounted"},
            "shared": {"type": "list", "elements": "path", "default": []},
            "served": {"type": "list", "elements": "path"},
            "recover": {"type": "bool", "default": False},
            "user": {"type": "str", "default": ""},
            "seconds": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Client(module).work())


if __name__ == "__main__":
    main()
