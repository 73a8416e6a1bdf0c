#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nfs_export
short_description: Give model folders to named clients, read-only, and read the server's table back
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Keeps one file of its own in C(/etc/exports.d), with one line for each folder and client. Exports of others are never touched.
  - A folder that was given away before stays so for as long as it is there, because a rank may still read it.
  - A server that is started here gets a lease of 30 seconds, so that readers go on soon after an outage. One that runs is left as it is.
  - Uses the kernel's own server. Another server on the port, or one inside a container, is refused by name.
  - Needs root.
extends_documentation_fragment:
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Says whether the file, the service, or the table would change.
  diff_mode:
    support: full
    description: Shows the file before and after.
  idempotent:
    support: full
    description: A table that is as wanted is left alone.
options:
  deployment:
    description: Name of the deployment. It names the file.
    type: str
    required: true
  trees:
    description: Folders to give away. Nothing else is, but for those of before that are still there.
    type: list
    elements: path
    default: []
  clients:
    description: Address of each client. An empty list is refused, a name or a network too.
    type: list
    elements: str
    default: []
  state:
    description: V(absent) takes the exports of the deployment away.
    type: str
    choices: [present, absent]
    default: present
  exports_dir:
    description: Folder of the exports files.
    type: path
    default: /etc/exports.d
  times_file:
    description: File with the times of a server that is started here.
    type: path
    default: /etc/nfs.conf.d/sparkops.conf
  proc_root:
    description: Where the kernel shows processes.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Give the model folder to the other Spark
  sparkops.inference.nfs_export:
    deployment: sparks
    node: spark-1
    trees: [/var/lib/sparkops/weights/acme--tiny/0123456789012345678901234567890123456789]
    clients: [198.51.100.12]
  become: true
"""

RETURN = r"""
exports:
  description: Lines of the server's table that belong to the folders.
  returned: always
  type: list
  elements: dict
  sample:
    - {path: /var/lib/sparkops/weights/acme--tiny/0123, client: 198.51.100.12, options: [ro, root_squash]}
served:
  description: Folders that this deployment and others of the collection export.
  returned: always
  type: list
  elements: str
  sample: [/var/lib/sparkops/weights/acme--tiny/0123]
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import contextlib
import os
import stat
import tempfile
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _mounts, _nfs_plan, _sockets
from ansible_collections.sparkops.inference.plugins.module_utils._memory import read_text
from ansible_collections.sparkops.inference.plugins.module_utils._nfs_plan import PORT, Export
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

SERVICE = "nfs-server.service"
# A client tries again after at most half a lease (kernel, fs/nfs/nfs4renewd.c). With the usual 90 s and the grace period that follows,
# readers would wait for more than a minute after the server is back.
TIMES = "# Made by sparkops.inference, role weight_sync. Read when the server starts.\n[nfsd]\nlease-time=30\ngrace-time=30\n"
# The program that answers mount requests; where it runs tells whose server the kernel's threads serve.
MOUNT_PROGRAM = "rpc.mountd"
NAMED_FILES = 5


def foreign_servers(proc_root: str) -> list[str]:
    """Servers of NFS that are not this host's: user space programs on the port, and the kernel's server run from a container."""
    own = _mounts.namespace(proc_root, "1")
    serving = _sockets.holders(_sockets.listening({PORT}, proc_root).get(PORT, ()), proc_root)
    found = []
    for pid in sorted((entry for entry in os.listdir(proc_root) if entry.isdecimal()), key=int):
        name = read_text(os.path.join(proc_root, pid, "comm")).strip()
        cgroup = read_text(os.path.join(proc_root, pid, "cgroup"))
        container = _mounts.container_of(cgroup)
        where = f", container {container}" if container else ""
        # A unit of the host may have a mount namespace of its own.
        elsewhere = name == MOUNT_PROGRAM and _mounts.namespace(proc_root, pid) not in (own, None) and (container or ".service" not in cgroup)
        if elsewhere or pid in serving:
            found.append(f"{name} (pid {pid}{where})")
    return found


def unreadable(tree: str) -> list[str]:
    """What a squashed root, which is nobody here, may not read."""
    found = []
    for folder, _folders, names in os.walk(tree):
        if os.lstat(folder).st_mode & 0o005 != 0o005:
            found.append(folder)
        for name in names:
            status = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IROTH:
                found.append(os.path.join(folder, name))
    return found


class Server:
    """The host's table of exports, and our part of it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.node = module.params["node"]
        self.path = os.path.join(module.params["exports_dir"], f"sparkops-{module.params['deployment']}.exports")
        self.before = read_text(self.path)
        self.own = _nfs_plan.parse_exports(self.before)
        trees = module.params["trees"]
        # The model of before: a rank may read it until the new one is started, and a worker that still mounts it would have a stale handle.
        kept = sorted({export.path for export in self.own} - set(trees))
        self.wanted = (
            _nfs_plan.wanted_exports([*trees, *filter(os.path.isdir, kept)], module.params["clients"]) if module.params["state"] == "present" else []
        )
        self.text = _nfs_plan.exports_text(self.wanted) if self.wanted else ""
        self.running = False
        self.exportfs = module.get_bin_path("exportfs", opt_dirs=["/usr/sbin", "/sbin"])

    def fail(self, refusals: t.Sequence[Refusal]) -> t.NoReturn:
        fail(self.module, refusals)

    def run(self, *argv: str) -> str:
        rc, out, err = self.module.run_command(list(argv))
        if rc:
            self.fail(
                [
                    Refusal(
                        "sync.nfs_server", self.node, " ".join(argv), (err or out).strip() or f"code {rc}", "the kernel's NFS server at work",
                        "see journalctl -u nfs-server on the node",
                    )
                ]
            )  # fmt: skip
        return out

    def table(self) -> list[Export]:
        return _nfs_plan.parse_exports(self.run(self.exportfs, "-v")) if self.exportfs else []

    def active(self) -> bool:
        return self.module.run_command(["systemctl", "is-active", "--quiet", SERVICE])[0] == 0

    def enabled(self) -> bool:
        return self.module.run_command(["systemctl", "is-enabled", "--quiet", SERVICE])[0] == 0

    def others(self) -> list[str]:
        """Export files of other deployments of ours on this head: the server's times are theirs too."""
        folder = os.path.dirname(self.path)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return [
            os.path.join(folder, name)
            for name in names
            if name.startswith("sparkops-") and name.endswith(".exports") and name != os.path.basename(self.path)
        ]

    def served(self) -> list[str]:
        """Folders that any deployment of ours exports when this is done."""
        others = [export for path in self.others() for export in _nfs_plan.parse_exports(read_text(path))]
        return sorted({export.path for export in [*self.wanted, *others]})

    def refusals(self) -> list[Refusal]:
        """All that speaks against exporting, before anything is changed."""
        params = self.module.params
        found = _nfs_plan.input_refusals(self.node, params["trees"], params["clients"])
        if not self.exportfs and not self.module.check_mode:
            found.append(
                Refusal(
                    "sync.nfs_server_missing",
                    self.node,
                    "program exportfs",
                    "none",
                    "package nfs-kernel-server",
                    "install it, or set weight_sync_packages",
                )
            )
        mounts = _mounts.read(params["proc_root"])
        found += filter(None, (_nfs_plan.filesystem_refusal(self.node, tree, _mounts.holding(mounts, tree)) for tree in params["trees"]))
        foreign = _nfs_plan.foreign_refusal(self.node, foreign_servers(params["proc_root"]))
        found += [foreign] if foreign else []
        found += _nfs_plan.wide_refusals(self.node, [*self.wanted, *self.own], self.table()) if not found else []
        for tree in params["trees"]:
            closed = unreadable(tree)
            if closed:
                found.append(
                    Refusal(
                        "sync.nfs_mode", self.node, f"tree {tree}",
                        f"{len(closed)} files or folders that only their owner may read ({', '.join(closed[:NAMED_FILES])})",
                        "files that everyone may read: a client's root is nobody here", f"chmod -R o+rX {tree}",
                    )
                )  # fmt: skip
        return found

    def write(self, path: str, text: str) -> None:
        """Make a file what it should be; without a text it goes."""
        if not text:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.module.tmpdir)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        self.module.atomic_move(temporary, path)

    def work(self) -> dict[str, t.Any]:
        if self.module.params["state"] == "present":
            refusals = self.refusals()
            if refusals:
                self.fail(refusals)
        changed = self.before != self.text
        if self.wanted:
            self.running = self.active()
            started = not (self.running and self.enabled())
            changed = changed or started or bool(_nfs_plan.readback_problems(self.wanted, self.table()))
        if changed and not self.module.check_mode:
            self.apply()
        result = {"changed": changed, "exports": [], "served": self.served()}
        if self.wanted and not self.module.check_mode:
            result["exports"] = self.read_back()
        if self.module._diff:
            result["diff"] = {"before_header": self.path, "after_header": self.path, "before": self.before, "after": self.text}
        return result

    def apply(self) -> None:
        if self.before != self.text:
            self.write(self.path, self.text)
        if self.wanted:
            if not self.running:
                self.write(self.module.params["times_file"], TIMES)
            self.run("systemctl", "enable", "--now", SERVICE)
        elif not self.others():
            self.write(self.module.params["times_file"], "")
        old = _nfs_plan.stale_exports(self.own, self.wanted)
        there = {(export.path, export.client) for export in self.table()} if old else set()
        for export in old:
            if (export.path, export.client) in there:
                # Only this line: exportfs -r would also take away what others have exported by hand.
                self.run(self.exportfs, "-u", f"{'[' + export.client + ']' if ':' in export.client else export.client}:{export.path}")
        if self.wanted:
            self.run(self.exportfs, "-a")

    def read_back(self) -> list[dict[str, t.Any]]:
        """What the server really gives, and to whom."""
        table = self.table()
        problems = _nfs_plan.readback_problems(self.wanted, table)
        if problems:
            self.fail(
                [
                    Refusal(
                        "sync.nfs_readback", self.node, "the server's table (exportfs -v)", "; ".join(problems),
                        f"the lines of {self.path}, and no others for these folders",
                        "look for the folders in /etc/exports and in the other files of /etc/exports.d",
                    )
                ]
            )  # fmt: skip
        paths = {export.path for export in self.wanted}
        return [{"path": export.path, "client": export.client, "options": sorted(export.options)} for export in table if export.path in paths]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deployment": {"type": "str", "required": True},
            "node": {"type": "str", "required": True},
            "trees": {"type": "list", "elements": "path", "default": []},
            "clients": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "exports_dir": {"type": "path", "default": "/etc/exports.d"},
            "times_file": {"type": "path", "default": "/etc/nfs.conf.d/sparkops.conf"},
            "proc_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Server(module).work())


if __name__ == "__main__":
    main()
