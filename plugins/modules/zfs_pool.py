#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: zfs_pool
short_description: Make a pool on a disk that is proven empty
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - A pool that exists is left as it is. Otherwise one is made on the named disk, and never by force.
  - Empty means that nothing holds the disk, that it has no partition, no signature of any filesystem, and only zeros at both ends.
  - Needs root.
extends_documentation_fragment:
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Proves the disk, and says that the pool would be made.
  diff_mode:
    support: none
    description: There is nothing useful to show as a difference.
  idempotent:
    support: full
    description: A pool is made once.
options:
  pool:
    description: Name of the pool.
    type: str
    required: true
  device:
    description: The disk. Without it a pool that does not exist is refused.
    type: path
"""

EXAMPLES = r"""
- name: Make the pool
  sparkops.inference.zfs_pool:
    pool: tank
    device: /dev/nvme1n1
    node: spark-1
  become: true
"""

RETURN = r"""
found:
  description: What lay on the disk.
  returned: always
  type: list
  elements: str
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import json
import os
import stat
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _zfs_command
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

SBIN = ["/usr/sbin", "/sbin"]
# Partition tables, and the labels of ZFS and of RAID, lie within this much of either end.
ENDS = 4 * 1024 * 1024


def used(nodes: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """What lsblk shows on a disk that is not empty."""
    found = []
    for node in nodes:
        name = node.get("name", "?")
        found += [f"{name} has {word} {node[word]}" for word in ("fstype", "pttype", "label") if node.get(word)]
        found += [f"{name} is mounted at {place}" for place in node.get("mountpoints") or [] if place]
        found += [f"{name} holds {child.get('name', '?')}" for child in node.get("children") or []]
    return found


def not_zero(path: str) -> list[str]:
    """Where the ends of a disk hold something."""
    found = []
    with open(path, "rb", buffering=0) as disk:
        size = disk.seek(0, os.SEEK_END)
        for offset in sorted({0, max(0, size - ENDS)}):
            disk.seek(offset)
            data = disk.read(min(ENDS, size)) or b""
            place = next((number for number, byte in enumerate(data) if byte), None) if data.strip(b"\0") else None
            found += [f"byte {offset + place} is not zero"] if place is not None else []
    return found


def on_disk(module: AnsibleModule, device: str) -> list[str]:
    """Everything that speaks against the disk being empty."""
    try:
        if not stat.S_ISBLK(os.stat(device).st_mode):
            return ["it is not a disk"]
    except OSError as exc:
        return [exc.strerror or str(exc)]
    rc, out, err = module.run_command(["lsblk", "--json", "--output", "NAME,FSTYPE,PTTYPE,LABEL,MOUNTPOINTS", device])
    if rc:
        return [err.strip() or "lsblk cannot tell"]
    found = used(json.loads(out)["blockdevices"])
    holders = f"/sys/class/block/{os.path.basename(os.path.realpath(device))}/holders"
    found += [f"held by {name}" for name in (os.listdir(holders) if os.path.isdir(holders) else [])]
    rc, out, err = module.run_command([module.get_bin_path("wipefs", required=True, opt_dirs=SBIN), "--no-act", "--noheadings", "--output", "TYPE", device])
    found += [f"signature {line.strip()}" for line in out.splitlines() if line.strip()] if rc == 0 else [err.strip() or "wipefs cannot tell"]
    return found or not_zero(device)


def main() -> None:
    module = AnsibleModule(
        argument_spec={"pool": {"type": "str", "required": True}, "device": {"type": "path"}, "node": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    pool, device, node = module.params["pool"], module.params["device"], module.params["node"]
    if not module.check_mode and not os.path.exists("/dev/zfs"):
        module.run_command(["modprobe", "zfs"])
    zpool = module.get_bin_path("zpool", required=not module.check_mode, opt_dirs=SBIN)
    if zpool and _zfs_command.ask(module, node, [zpool, "list", "-H", "-o", "name", pool])[0] == 0:
        module.exit_json(changed=False, found=[])
    found = on_disk(module, device) if device else ["no disk named"]
    if found:
        refusal = Refusal(
            "sync.zfs_device", node, f"disk {device or '(weight_sync_zfs_device)'} for pool {pool}", "; ".join(found), "a whole disk that is empty",
            "name another disk, or empty this one yourself (blkdiscard); nothing here ever erases a disk",
        )  # fmt: skip
        fail(module, [refusal])
    if not module.check_mode:
        # 4 KiB sectors whatever the disk says; the pool itself is mounted nowhere.
        rc, out, err = _zfs_command.ask(
            module, node, [zpool, "create", "-o", "ashift=12", "-O", "canmount=off", "-O", "mountpoint=none", pool, device]
        )
        if rc:
            refusal = Refusal("sync.zfs", node, f"zpool create {pool} {device}", (err or out).strip(), "success", "see the words of zpool")
            fail(module, [refusal])
    module.exit_json(changed=True, found=[])


if __name__ == "__main__":
    main()
