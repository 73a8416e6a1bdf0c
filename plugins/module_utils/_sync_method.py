# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Which of the methods fits a group, and why. Facts of module sync_info in, a choice out; no I/O."""

from __future__ import annotations

import dataclasses
import fnmatch
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._manifest import gib
from ansible_collections.sparkops.inference.plugins.module_utils._nfs_plan import NOT_EXPORTABLE
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

# In the order in which auto takes them. A copy of its own lets a worker serve without the head's disks.
METHODS = ("rsync", "zfs", "nfs")
WHY = {
    "rsync": "each worker keeps its own copy, and needs no other node's disk while it serves",
    "zfs": "each worker keeps its own copy as a replica of the head's dataset",
    "nfs": "no worker needs room for a copy of its own",
}
PACKAGES = {"rsync": "rsync", "exportfs": "nfs-kernel-server", "mount.nfs": "nfs-common", "zfs": "zfsutils-linux"}

Node = t.Mapping[str, t.Any]


class Lack(t.NamedTuple):
    """Why a method does not fit on one node."""

    node: str
    thing: str
    found: str
    wanted: str

    @property
    def text(self) -> str:
        return f"{self.node}: {self.thing}: found {self.found}; wanted {self.wanted}"


@dataclasses.dataclass(frozen=True)
class Wishes:
    """Settings that decide what may be done."""

    method: str = "auto"
    transport: str = "ssh"
    margin: int = 2 * 2**30
    packages: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """``method`` is empty when none fits. ``lines`` say what fits and why the choice fell."""

    method: str
    lines: tuple[str, ...]
    refusals: tuple[Refusal, ...] = ()

    def as_dict(self) -> dict[str, t.Any]:
        return {"method": self.method, "lines": list(self.lines), "refusals": [refusal.as_dict() for refusal in self.refusals]}


def choose(head: Node, workers: t.Sequence[Node], wishes: Wishes) -> Choice:
    """An explicit method is taken or refused; only auto looks for another."""
    lacks = {"rsync": rsync_lacks(head, workers, wishes), "zfs": zfs_lacks(head, workers, wishes), "nfs": nfs_lacks(head, workers, wishes)}
    lines = [_line(method, lacks[method], head, workers) for method in METHODS]
    fitting = [method for method in METHODS if not lacks[method]]
    if wishes.method != "auto":
        if wishes.method in fitting:
            return Choice(wishes.method, (*lines, f"taken: {wishes.method}, as set"))
        return Choice("", tuple(lines), tuple(_refusal(wishes.method, lack, fitting) for lack in lacks[wishes.method]))
    present = in_place(head, workers)
    if present in fitting:
        return Choice(present, (*lines, f"taken: {present}, because the workers see the files that way already"))
    # To leave it is to take mounts away that somebody may want: a change that has to be set.
    if present in ("nfs", "zfs"):
        return Choice("", tuple(lines), tuple(_refusal("auto", lack, fitting, present) for lack in lacks[present]))
    if fitting:
        return Choice(fitting[0], (*lines, f"taken: {fitting[0]}: {WHY[fitting[0]]}"))
    return Choice("", tuple(lines), tuple(_refusal("auto", lack, fitting) for method in METHODS for lack in lacks[method]))


def _line(method: str, lacks: t.Sequence[Lack], head: Node, workers: t.Sequence[Node]) -> str:
    if lacks:
        return f"{method} does not fit: {'; '.join(lack.text for lack in lacks)}"
    if method == "nfs":
        return f"nfs fits: {head['node']} can export, and each worker can mount"
    known = all(item["manifest"] for item in head["artefacts"])
    figures = []
    for worker in workers:
        size = f"{gib(missing_bytes(head, worker, method))} to copy" if known else "size known after the weights play"
        figures.append(f"{worker['node']} {size}, {gib(_room(method, worker))} free")
    return f"{method} fits: {', '.join(figures)}"


def _room(method: str, worker: Node) -> int:
    return worker["zfs"].get("available") or 0 if method == "zfs" else worker["free"]


def _refusal(method: str, lack: Lack, fitting: t.Sequence[str], present: str = "") -> Refusal:
    """``present``: what auto keeps because it is in use."""
    other = f"{fitting[0]}, to give {present} up" if present and fitting else f"{fitting[0]} or auto" if fitting else ""
    would = f"set weight_sync_method to {other}: {', '.join(fitting)} would work" if fitting else "mend this; no other method would work"
    return Refusal("sync.method", lack.node, f"weight_sync_method {method}, {lack.thing}", lack.found, lack.wanted, would)


def in_place(head: Node, workers: t.Sequence[Node]) -> str:
    """The method that is in use, empty when none is. A share or a replica is, also while its server is away and before it has a new revision."""
    trees = [tree for worker in workers for tree in worker["artefacts"]]
    if head["exported"] or any(tree["way"] == "nfs" for tree in trees):
        return "nfs"
    ways = {tree["way"] if tree["complete"] else "" for tree in trees}
    if len(ways) == 1 and "" not in ways:
        return ways.pop()
    return "zfs" if any(worker["replica"] for worker in workers) else ""


def missing_bytes(head: Node, worker: Node, method: str) -> int:
    """What a worker lacks of the head's files, less what an earlier attempt left; nothing when it has them.

    What is seen through a mount is not there. A replica's files are none for rsync, which never writes into it.
    """
    total = 0
    for tree in worker["artefacts"]:
        wanted = next((item for item in head["artefacts"] if item["name"] == tree["name"]), None)
        manifest = (wanted or {}).get("manifest")
        own = tree["way"] == "rsync" or tree["way"] == method == "zfs"
        if not manifest or (tree["complete"] and own):
            continue
        have = tree["files"] if own else {}
        lacking = sum(file["size"] for file in manifest["files"] if have.get(file["path"]) != file["size"])
        total += max(0, lacking - tree["staged"])
    return total


def _tool_lacks(node: Node, tool: str, wishes: Wishes) -> list[Lack]:
    if node["tools"].get(tool) or (wishes.packages and node["root"] and tool != "rsync"):
        return []
    way = "the bootstrap play" if tool == "rsync" else "weight_sync_packages"
    return [Lack(node["node"], f"program {tool}", "none", f"package {PACKAGES[tool]} ({way} installs it)")]


def _module_lacks(node: Node, name: str) -> list[Lack]:
    return [] if node["modules"].get(name) else [Lack(node["node"], f"kernel module {name}", "none for the running kernel", "a kernel that has it")]


def _root_lacks(node: Node) -> list[Lack]:
    return [] if node["root"] else [Lack(node["node"], "rights", "no root through become", "root, to change exports, mounts, and datasets")]


def _copy_lacks(head: Node, worker: Node, method: str, where: str, margin: int) -> list[Lack]:
    missing, free = missing_bytes(head, worker, method), _room(method, worker)
    if not missing or missing + margin <= free:
        return []
    return [Lack(worker["node"], where, f"{gib(free)} free", f"{gib(missing + margin)} ({gib(missing)} to copy, and a margin)")]


def rsync_lacks(head: Node, workers: t.Sequence[Node], wishes: Wishes) -> list[Lack]:
    found = []
    if wishes.transport == "ssh" and any(missing_bytes(head, worker, "rsync") for worker in workers):
        found += [lack for node in (head, *workers) for lack in _tool_lacks(node, "rsync", wishes)]
    for worker in workers:
        # Where all is there, nothing is written: a share of the user's may be read-only on the workers.
        if not worker["writable"] and not all(tree["complete"] and tree["way"] == "rsync" for tree in worker["artefacts"]):
            owner = f"owned by uid {worker['owner']}, not writable for uid {worker['user']}"
            found.append(Lack(worker["node"], worker["weights_root"], owner, "a folder that the account may write"))
        found += _copy_lacks(head, worker, "rsync", f"filesystem of {worker['weights_root']}", wishes.margin)
    return found


def nfs_lacks(head: Node, workers: t.Sequence[Node], wishes: Wishes) -> list[Lack]:
    found = [*_root_lacks(head), *_tool_lacks(head, "exportfs", wishes), *_module_lacks(head, "nfsd")]
    reason = next((text for pattern, text in NOT_EXPORTABLE.items() if fnmatch.fnmatchcase(head["filesystem"], pattern)), None)
    if reason:
        found.append(Lack(head["node"], f"filesystem of {head['weights_root']}", f"{head['filesystem']}: {reason}", "a disk filesystem"))
    for worker in workers:
        found += [*_root_lacks(worker), *_tool_lacks(worker, "mount.nfs", wishes), *_module_lacks(worker, "nfsv4")]
    return found


def zfs_lacks(head: Node, workers: t.Sequence[Node], wishes: Wishes) -> list[Lack]:
    found = []
    for node in (head, *workers):
        own = node["zfs"]
        if not own.get("dataset"):
            found.append(Lack(node["node"], "weight_sync_zfs_dataset", "not set", "the dataset that holds the model files"))
            continue
        found += [*_root_lacks(node), *_tool_lacks(node, "zfs", wishes), *_module_lacks(node, "zfs")]
        if not own.get("pool") and not own.get("device") and node["tools"].get("zfs"):
            pool = own["dataset"].partition("/")[0]
            found.append(Lack(node["node"], f"pool {pool}", "none", "a pool, or weight_sync_zfs_device with an empty disk to make one on"))
    if head["zfs"].get("exists") and head["zfs"].get("mountpoint") != head["weights_root"]:
        found.append(
            Lack(head["node"], f"mount point of {head['zfs']['dataset']}", str(head["zfs"].get("mountpoint")), f"weights_root, {head['weights_root']}")
        )
    if not head["zfs"].get("exists") and any(item["complete"] or item["files"] for item in head["artefacts"]):
        wanted = "a dataset: move the files into it, or begin with an empty weights_root"
        found.append(Lack(head["node"], head["weights_root"], f"files on a {head['filesystem']} filesystem", wanted))
    for worker in workers:
        for tree in worker["artefacts"]:
            if tree["way"] == "rsync" and (tree["complete"] or tree["files"]):
                wanted = "an empty place for the link into the replica: remove that copy"
                found.append(Lack(worker["node"], tree["tree"], "a copy of its own", wanted))
        # A cut receive has taken its room already, and its tree shows nothing of it: the receive asks for what is still to come.
        if worker["zfs"].get("pool") and not worker["zfs"].get("receive_resume_token"):
            found += _copy_lacks(head, worker, "zfs", f"pool of {worker['zfs'].get('dataset')}", wishes.margin)
    return found
