#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sync_info
short_description: Say what a node holds of the model files, and which ways of bringing them it has
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.weights.trees
  - sparkops.inference.node.named
description:
  - Compares the trees with their manifests by size, and reads free space, kernel support, programs, mounts, and datasets.
  - A tree on an NFS mount is looked at only after its server has answered in time, so that a dead server never holds the play.
options:
  exports_file:
    description: Our own exports file, if the node may have one.
    type: path
  dataset:
    description: ZFS dataset that holds the model files of this node.
    type: str
  device:
    description: Disk on which a pool may be made.
    type: path
  probe_seconds:
    description: Time that an NFS server has to answer.
    type: int
    default: 10
"""

EXAMPLES = r"""
- name: Look at this node
  sparkops.inference.sync_info:
    artefacts: "{{ spark_plan.artefacts }}"
    weights_root: "{{ spark_node.weights_root }}"
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
info:
  description: What the choice of a method needs.
  returned: always
  type: dict
  sample:
    node: spark-2
    weights_root: /var/lib/sparkops/weights
    there: true
    user: 1000
    owner: 1000
    filesystem: ext4
    free: 700000000000
    writable: true
    tools: {rsync: true, exportfs: false, mount.nfs: true, zfs: false}
    modules: {nfsd: true, nfsv4: true, zfs: false}
    mounts: []
    message: ""
    fstab: []
    exported: []
    replica: false
    zfs: {dataset: null, device: null}
    artefacts:
      - name: model
        tree: /var/lib/sparkops/weights/acme--tiny/0123456789012345678901234567890123456789
        complete: true
        problems: []
        way: rsync
        files: {}
        staged: 0
        manifest: {}
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import contextlib
import os
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import (
    _limited,
    _manifest,
    _mounts,
    _nfs_plan,
    _weights_state,
    _zfs_command,
    _zfs_plan,
)
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail, format_refusals

SYSTEM_PATHS = ["/usr/sbin", "/sbin"]
ZFS_PROPERTIES = "type,mounted,mountpoint,available,readonly,recordsize,compression,atime,receive_resume_token"


def way_of(tree: str, mounts: t.Sequence[_mounts.Mount]) -> str:
    """How a tree comes to be where it is."""
    mount = _mounts.holding(mounts, tree)
    # First, because even a look at the mount point itself waits for the server.
    if mount and mount.type in _mounts.NETWORK_TYPES:
        # What lies in a share of the user's is a copy like any other.
        return "nfs" if mount.path == tree else "rsync"
    return "zfs" if os.path.islink(tree) else "rsync"


def has_replica(trees: t.Sequence[str], mounts: t.Sequence[_mounts.Mount], silent: t.Container[str]) -> bool:
    """Whether the newest revision of one of the repositories is a link into a replica: older links stay when a replica is given up.

    A link is known by its entry, and no mount is touched: a look at one may hang.
    """
    mounted = {mount.path for mount in mounts}
    for folder in {os.path.dirname(tree) for tree in trees}:
        holder = _mounts.holding(mounts, folder)
        if holder and holder.path in silent:
            continue
        found = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                linked = entry.is_symlink() and _manifest.REPLICA in os.readlink(entry.path).split("/")
                if linked or entry.is_dir(follow_symlinks=False) and entry.path not in mounted:
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, linked))
        if max(found, default=(0, False))[1]:
            return True
    return False


def files_of(tree: str) -> dict[str, int]:
    """Regular files of a tree with their sizes."""
    found = {}
    for folder, _folders, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                found[os.path.relpath(path, tree)] = os.path.getsize(path)
    return found


def tree_info(item: t.Mapping[str, t.Any], root: str, mounts: t.Sequence[_mounts.Mount], silent: t.Mapping[str, str]) -> dict[str, t.Any]:
    """``silent``: mount points whose server does not answer, with its words. Nothing below them is touched."""
    artefact = _weights_state.Artefact.from_dict(item)
    tree = os.path.join(root, artefact.directory)
    result = {"name": artefact.name, "tree": tree, "way": way_of(tree, mounts), "files": {}, "manifest": None}
    place, holder = _mounts.holding(mounts, root), _mounts.holding(mounts, tree)
    gone = place is not None and place.path in silent
    result["staged"] = 0 if gone else _manifest.bytes_below(os.path.join(root, _manifest.INCOMING, artefact.directory))
    if holder and holder.path in silent:
        return {**result, "complete": False, "problems": [silent[holder.path]]}
    if result["way"] == "rsync" and not os.path.lexists(tree):
        # Its link was removed, or never made: what a replica has is not copied again. A suspended pool does not answer.
        replica = os.path.join(root, _manifest.REPLICA, artefact.directory)
        found = _limited.limited([lambda: files_of(replica)])[0]
        if isinstance(found, dict) and found:
            result.update(way="zfs", files=found)
    state = _weights_state.look(root, artefact)
    result.update(complete=not state.problems, problems=state.problems, manifest=state.manifest.as_dict() if state.manifest else None)
    return result if result["complete"] or result["files"] else {**result, "files": files_of(tree)}


def has_module(module: AnsibleModule, name: str, loaded: t.Collection[str]) -> bool:
    """Whether the running kernel has a module or can load it. Nothing is loaded."""
    if name in loaded:
        return True
    modprobe = module.get_bin_path("modprobe", opt_dirs=SYSTEM_PATHS)
    return bool(modprobe) and module.run_command([modprobe, "--dry-run", "--quiet", name])[0] == 0


def filesystems() -> set[str]:
    with open("/proc/filesystems", encoding="ascii") as stream:
        return {line.split()[-1] for line in stream if line.strip()}


def kernel(module: AnsibleModule) -> dict[str, bool]:
    known = filesystems()
    aliases = {"nfsd": "nfsd", "nfsv4": "nfs4", "zfs": "zfs"}
    return {name: has_module(module, name, {name} if alias in known else ()) for name, alias in aliases.items()}


def zfs_info(module: AnsibleModule, dataset: str | None, device: str | None) -> dict[str, t.Any]:
    result: dict[str, t.Any] = {"dataset": dataset, "device": device, "exists": False, "pool": False}
    zfs, zpool = (module.get_bin_path(name, opt_dirs=SYSTEM_PATHS) for name in ("zfs", "zpool"))
    if not dataset or not zfs or not zpool:
        return result
    rc, out, _err = _zfs_command.ask(module, module.params["node"], [zfs, "get", "-Hp", "-o", "property,value", ZFS_PROPERTIES, dataset])
    if rc == 0:
        found = _zfs_plan.parse_properties(out)
        return {**result, **found, "exists": True, "pool": True, "available": int(found.get("available", 0))}
    # A dataset that does not exist yet gets the room of the nearest one above it.
    parent = dataset
    while "/" in parent:
        parent = parent.rpartition("/")[0]
        rc, out, _err = _zfs_command.ask(module, module.params["node"], [zfs, "get", "-Hp", "-o", "property,value", "available", parent])
        if rc == 0:
            return {**result, "pool": True, "available": int(_zfs_plan.parse_properties(out).get("available", 0))}
    return result


def exported(path: str | None) -> list[str]:
    """What our exports file gives away."""
    with contextlib.suppress(OSError), open(path or "", encoding="utf-8") as stream:
        return sorted({export.path for export in _nfs_plan.parse_exports(stream.read())})
    return []


def read(module: AnsibleModule) -> dict[str, t.Any]:
    params = module.params
    root = params["weights_root"]
    mounts = _mounts.read()
    networks = _mounts.network_mounts(mounts, root)
    looks = _limited.look_at(networks, params["probe_seconds"])
    trees = [os.path.join(root, artefact["directory"]) for artefact in params["artefacts"]]
    broken = _limited.refusals(params["node"], zip(networks, looks), trees)
    silent = {mount.path: look.detail for mount, look in zip(networks, looks) if look.state != "live"}
    holder = _mounts.holding(mounts, root)
    # The user's own folder may lie on a share too, or below one; then not even its parents can be looked at.
    gone = holder is not None and holder.path in silent
    parent = root if gone else _manifest.existing_parent(root)
    artefacts = [tree_info(item, root, mounts, silent) for item in params["artefacts"]]
    return {
        "node": params["node"],
        "weights_root": root,
        "there": gone or os.path.isdir(root),
        "user": os.geteuid(),
        "owner": None if gone else os.stat(parent).st_uid,
        "filesystem": holder.type if holder else "",
        "free": _manifest.space(root).free if not gone else 0,
        "writable": not gone and os.access(parent, os.W_OK | os.X_OK),
        "tools": {name: bool(module.get_bin_path(name, opt_dirs=SYSTEM_PATHS)) for name in ("rsync", "exportfs", "mount.nfs", "zfs")},
        "modules": kernel(module),
        "mounts": [
            {"path": mount.path, "source": mount.source, "server": mount.server, "state": look.state, "detail": look.detail}
            for mount, look in zip(networks, looks)
        ],
        "message": format_refusals(broken) if broken else "",
        "fstab": list(_mounts.read_fstab(_nfs_plan.BOOT_MARK, root)),
        "replica": has_replica(trees, mounts, silent),
        "exported": exported(params["exports_file"]),
        "zfs": zfs_info(module, params["dataset"], params["device"]),
        "artefacts": artefacts,
    }


def unmounted(info: t.Mapping[str, t.Any]) -> list[Refusal]:
    """A dataset that waits for its key, or whose mount failed at boot: files would come into the folder below it, and be hidden later."""
    zfs = info["zfs"]
    if zfs.get("mounted") != "no" or zfs.get("mountpoint") != info["weights_root"]:
        return []
    next_step = f"run zfs mount {zfs['dataset']} on {info['node']} (zfs load-key first where it is encrypted), then run this again"
    return [Refusal("sync.zfs_unmounted", info["node"], f"dataset {zfs['dataset']}", "not mounted", f"mounted at {info['weights_root']}", next_step)]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "artefacts": {"type": "list", "elements": "dict", "required": True},
            "weights_root": {"type": "path", "required": True},
            "node": {"type": "str", "required": True},
            "exports_file": {"type": "path"},
            "dataset": {"type": "str"},
            "device": {"type": "path"},
            "required": {"type": "bool", "default": False},
            "probe_seconds": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    info = read(module)
    refusals = unmounted(info)
    lacking = [item for item in info["artefacts"] if not item["complete"]] if module.params["required"] and not refusals else []
    refusals += [
        Refusal(
            "weights.incomplete",
            info["node"],
            f"{item['name']} in {item['tree']}",
            "; ".join(item["problems"][:5]),
            "the full manifest",
            "run the weights play",
        )
        for item in lacking
    ]
    if refusals:
        fail(module, refusals, info=info)
    module.exit_json(changed=False, info=info)


if __name__ == "__main__":
    main()
