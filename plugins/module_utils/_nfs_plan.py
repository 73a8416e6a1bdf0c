# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What is exported to whom, and with which options it is mounted. Texts in, plain values out; no I/O."""

from __future__ import annotations

import fnmatch
import re
import typing as t
import uuid

from ansible_collections.sparkops.inference.plugins.module_utils._mounts import Mount, User, below
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

PORT = 2049
EXPORT_OPTIONS = ("ro", "sync", "no_subtree_check", "root_squash", "sec=sys")
# The server adds these by itself; none of them widens what a client may do.
HARMLESS = ("wdelay", "hide", "secure", "no_all_squash", "mountpoint", "acl")
FORBIDDEN = ("rw", "no_root_squash", "insecure", "crossmnt", "nohide")
MOUNT_OPTIONS = ("nfsvers=4.2", "ro", "nconnect=8", "rsize=1048576", "wsize=1048576", "hard", "timeo=600", "nosuid", "nodev", "noexec")
# By this the unit that mounts at boot knows our lines; mount(8) gives options with "x-" to nobody.
BOOT_MARK = "x-sparkops"
# No boot waits for the server, or fails without it.
BOOT_OPTIONS = ("nofail", "_netdev", BOOT_MARK)
# What the kernel's server cannot give a lasting file handle for.
NOT_EXPORTABLE = {
    "overlay": "the kernel's NFS server cannot export an overlay filesystem",
    "aufs": "the kernel's NFS server cannot export it",
    "fuse*": "a FUSE filesystem has no lasting file handles",
    "nfs*": "a mount of another server cannot be exported again",
    "cifs": "a mount of another server cannot be exported again",
    "9p": "a mount of another machine cannot be exported again",
    "tmpfs": "its content is memory that the GPU lacks",
    "ramfs": "its content is memory that the GPU lacks",
}
# One address per client: a name may resolve to another machine, and a network is more than the group.
ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}|[0-9a-f]*:[0-9a-f:]+")
PATH = re.compile(r"/[A-Za-z0-9._/+@=-]+")
NAMESPACE = uuid.UUID("5e1f6f0e-9d1c-5b53-8f4c-6a1f0c1f7b20")


class Export(t.NamedTuple):
    """One line of the server's table: who may see a path, and how."""

    path: str
    client: str
    options: frozenset[str]


def fsid(path: str) -> str:
    """The same path keeps its file handles when it moves to another disk of the same content."""
    return str(uuid.uuid5(NAMESPACE, path))


def wanted_exports(paths: t.Sequence[str], clients: t.Sequence[str]) -> list[Export]:
    return [Export(path, client, frozenset([*EXPORT_OPTIONS, f"fsid={fsid(path)}"])) for path in sorted(paths) for client in sorted(set(clients))]


def exports_text(exports: t.Sequence[Export]) -> str:
    """The content of our file in exports.d."""
    lines = ["# Made by sparkops.inference, role weight_sync. Changes are lost."]
    for export in exports:
        known = [option for option in EXPORT_OPTIONS if option in export.options]
        rest = sorted(export.options - set(known))
        lines.append(f"{export.path} {export.client}({','.join([*known, *rest])})")
    return "\n".join(lines) + "\n"


def parse_exports(text: str) -> list[Export]:
    """Lines of ``exportfs -v`` or of an exports file. A long path stands on a line of its own."""
    found, path = [], ""
    for line in text.splitlines():
        line = line.partition("#")[0]
        if not line.strip():
            continue
        words = line.split()
        if not line[0].isspace():
            path, words = words[0].strip('"'), words[1:]
        for word in words:
            client, _bracket, options = word.partition("(")
            name = "*" if client in ("<world>", "") else client
            found.append(Export(path, name, frozenset(filter(None, options.rstrip(")").split(",")))))
    return found


def input_refusals(node: str, paths: t.Sequence[str], clients: t.Sequence[str]) -> list[Refusal]:
    """An export without a named client would be for everyone."""
    found = []
    wrong = [client for client in clients if not ADDRESS.fullmatch(client)]
    if not clients or wrong:
        found.append(
            Refusal(
                "sync.nfs_clients", node, "clients of the export", ", ".join(wrong) or "none", "the fabric address of each worker, and nothing wider",
                "set fabric_address for each worker",
            )
        )  # fmt: skip
    for path in paths:
        if not PATH.fullmatch(path) or ".." in path.split("/"):
            found.append(
                Refusal(
                    "sync.nfs_path",
                    node,
                    f"path {path!r}",
                    "characters that an exports file cannot hold",
                    "a plain absolute path",
                    "set weights_root to one",
                )
            )
    return found


def filesystem_refusal(node: str, path: str, mount: Mount | None) -> Refusal | None:
    """Whether the kernel can export what a path lies on."""
    if mount is None:
        return None
    reason = next((text for pattern, text in NOT_EXPORTABLE.items() if fnmatch.fnmatchcase(mount.type, pattern)), None)
    if reason is None:
        return None
    return Refusal(
        "sync.nfs_filesystem", node, f"filesystem of {path} ({mount.path})", f"{mount.type}: {reason}", "a disk filesystem such as ext4, xfs, or zfs",
        "set weights_root to a folder on a disk, or weight_sync_method to rsync",
    )  # fmt: skip


def foreign_refusal(node: str, owners: t.Sequence[str]) -> Refusal | None:
    """Another server of NFS than the host's own: the kernel has one table, and theirs would be mixed with ours."""
    if not owners:
        return None
    return Refusal(
        "sync.nfs_foreign", node, f"port {PORT}", f"another NFS server: {', '.join(owners)}", "the host's own kernel server",
        "stop it if nobody needs it, or set weight_sync_method to rsync",
    )  # fmt: skip


def wide_refusals(node: str, mine: t.Sequence[Export], found: t.Sequence[Export]) -> list[Refusal]:
    """Exports of others that already give away what we guard. ``mine`` are the lines of our file, of before and of now."""
    ours = {(export.path, export.client) for export in mine}
    paths = {export.path for export in mine}
    others = {(export.path, export.client) for export in found} - ours
    wide = sorted((place, client) for place, client in others if any(below(path, place) for path in paths))
    return [
        Refusal(
            "sync.nfs_wide", node, f"export {path}", f"given to {client}, and a tree of this deployment lies in it", "trees that only the workers can read",
            "take that export away (exportfs -v shows all), or move weights_root out of it",
        )
        for path, client in wide
    ]  # fmt: skip


def readback_problems(wanted: t.Sequence[Export], found: t.Sequence[Export]) -> list[str]:
    """How the server's table differs from what was asked for; only our own paths count."""
    paths = {export.path for export in wanted}
    table = {(export.path, export.client): export.options for export in found if export.path in paths}
    problems = [f"{path} is given to {client}" for path, client in sorted(set(table) - {(export.path, export.client) for export in wanted})]
    for export in wanted:
        options = table.get((export.path, export.client))
        if options is None:
            problems.append(f"{export.path} is not given to {export.client}")
            continue
        lacking = sorted(export.options - options)
        wrong = sorted(options & set(FORBIDDEN))
        problems += [f"{export.path} for {export.client} lacks {', '.join(lacking)}"] if lacking else []
        problems += [f"{export.path} for {export.client} has {', '.join(wrong)}"] if wrong else []
    return problems


def stale_exports(own: t.Sequence[Export], wanted: t.Sequence[Export]) -> list[Export]:
    """What our file named before and no longer does."""
    kept = {(export.path, export.client) for export in wanted}
    return [export for export in own if (export.path, export.client) not in kept]


# --- the client ------------------------------------------------------------------------------------------------


class Wanted(t.NamedTuple):
    """A tree as it is to be mounted."""

    path: str
    server: str
    export: str

    @property
    def source(self) -> str:
        return f"[{self.server}]:{self.export}" if ":" in self.server else f"{self.server}:{self.export}"


class Step(t.NamedTuple):
    """What to do about one tree: keep, mount, remount, or refuse, with the reason."""

    action: str
    reason: str


def mount_options() -> str:
    return ",".join(MOUNT_OPTIONS)


def fstab_options() -> str:
    return ",".join([*MOUNT_OPTIONS, *BOOT_OPTIONS])


def differences(mount: Mount, wanted: Wanted, others: t.Sequence[Mount] = ()) -> list[str]:
    """How a mount differs from what is wanted. The server may agree to smaller transfers, and the kernel shares its connections
    among all mounts of one server, so these two count only when they are ours to decide."""
    found = []
    if mount.type not in ("nfs4", "nfs"):
        return [f"a {mount.type} filesystem of {mount.source}"]
    if mount.source != wanted.source:
        found.append(f"source {mount.source}, wanted {wanted.source}")
    elif mount.server != wanted.server:
        found.append(f"server {mount.server}, wanted {wanted.server}")
    wants = {"vers": "4.2", "ro": "", "hard": "", "timeo": "600"}
    if all(other.option("nconnect") == "8" for other in others if other.server == mount.server and other.path != mount.path):
        wants["nconnect"] = "8"
    for name, value in wants.items():
        seen = mount.option(name)
        if seen != value:
            found.append(f"{name} {seen if seen else 'not set'}, wanted {value or 'set'}")
    return found


def named(users: t.Sequence[User]) -> str:
    return ", ".join(f"container {user.container}" if user.container else f"{user.name} (pid {user.pid})" for user in users)


def plan_mount(wanted: Wanted, mount: Mount | None, state: str, users: t.Sequence[User], others: t.Sequence[Mount] = (), recover: bool = False) -> Step:
    """A mount is never changed under somebody's hands, and a stale one only where that was asked for."""
    if mount is None:
        return Step("mount", "not mounted")
    different = differences(mount, wanted, others)
    used = named(users)
    if not different and state == "live":
        return Step("keep", "")
    why = "; ".join(different) or f"its handle is {state}"
    if mount.type not in ("nfs4", "nfs"):
        return Step("refuse_foreign", why)
    if used:
        return Step("refuse_used", f"{why}; used by {used}")
    if state == "stale" and not recover:
        return Step("refuse_stale", why)
    return Step("remount", why)
