#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: zfs_replica
short_description: Mount a received dataset read-only, and prove that it can be read
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Sets what a replica must have, mounts it, and reads from it. A mount that was there before a receive and no longer reads is made anew.
  - Needs root.
extends_documentation_fragment:
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Says which properties and mounts would change.
  diff_mode:
    support: none
    description: RV(set) says it.
  idempotent:
    support: full
    description: A mounted replica with its properties is left alone.
options:
  dataset:
    description: The replica.
    type: str
    required: true
  mountpoint:
    description: Where it belongs.
    type: path
    required: true
  seconds:
    description: Time for the look at the mount.
    type: int
    default: 10
"""

EXAMPLES = r"""
- name: Mount the replica
  sparkops.inference.zfs_replica:
    dataset: tank/weights
    mountpoint: /var/lib/sparkops/weights/.replica
    node: spark-2
  become: true
"""

RETURN = r"""
set:
  description: Properties that were set, or would be.
  returned: always
  type: dict
  sample: {readonly: "on"}
mounted:
  description: Whether it was mounted by this call, or would be.
  returned: always
  type: bool
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _mounts, _zfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._zfs_command import Zfs


class Replica(Zfs):
    """The received dataset of this node."""

    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module)
        self.place = module.params["mountpoint"]
        # atime would change the replica with every read.
        self.wanted = {"readonly": "on", "atime": "off", "canmount": "on", "mountpoint": self.place}

    def properties(self) -> dict[str, str] | None:
        rc, out, _err = self.ask("get", "-Hp", "-o", "property,value", ",".join([*self.wanted, "mounted"]), self.name)
        return _zfs_plan.parse_properties(out) if rc == 0 else None

    def mount(self) -> _mounts.Mount | None:
        found = _mounts.at(_mounts.read(), self.place)
        return found if found and found.type == "zfs" and found.source == self.name else None

    def work(self) -> dict[str, t.Any]:
        found = self.properties()
        if found is None:
            if self.module.check_mode:
                return {"changed": True, "set": self.wanted, "mounted": True}
            self.refuse("zfs", f"dataset {self.name}", "none", "a received replica", "run the sync play")
        different = {name: value for name, value in self.wanted.items() if found.get(name) != value}
        mounting = found.get("mounted") != "yes" or "mountpoint" in different
        if not self.module.check_mode:
            for name, value in different.items():
                self.run("set", f"{name}={value}", self.name)
            if not self.mount():
                self.run("mount", self.name)
            mounting = self.prove() or mounting
        return {"changed": bool(different) or mounting, "set": different, "mounted": mounting}

    def prove(self) -> bool:
        """Read from the mount; once it may be made anew. Says whether it was."""
        look = self.look()
        if look.state == "live":
            return False
        self.run("unmount", self.name)
        self.run("mount", self.name)
        again = self.look()
        if again.state != "live":
            thing = f"mount {self.place} of {self.name}"
            self.refuse("zfs_mount", thing, again.detail, "a filesystem that can be read", "see zpool status on the node")
        return True

    def look(self) -> _limited.Look:
        mount = self.mount()
        if mount is None:
            return _limited.Look("broken", "not in the mount table")
        return _limited.look_at([mount], self.module.params["seconds"])[0]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "dataset": {"type": "str", "required": True},
            "mountpoint": {"type": "path", "required": True},
            "node": {"type": "str", "required": True},
            "seconds": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Replica(module).work())


if __name__ == "__main__":
    main()
