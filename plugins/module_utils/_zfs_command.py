# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The commands zfs and zpool: each has a limit, and in a module its failure is a refusal with its own words."""

from __future__ import annotations

import subprocess
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

if t.TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

# Nothing here moves data, but a change waits until the pool has written what it holds.
SECONDS = 120.0


class Silent(Exception):
    """A command did not end in its time."""

    def __init__(self, argv: t.Sequence[str], seconds: float) -> None:
        self.command, self.seconds = " ".join(argv), seconds
        super().__init__(f"{self.command}: no answer in {seconds:.0f} s")

    def refusal(self, node: str) -> Refusal:
        return Refusal(
            "sync.zfs_silent", node, self.command, f"no answer in {self.seconds:.0f} s: the pool may be suspended", "an answer",
            "zpool status on the node tells; when its disks are back, zpool clear lets it go on",
        )  # fmt: skip


def answer(argv: t.Sequence[str]) -> tuple[int, str, str]:
    """Code, output and error of a command that asks a pool or changes what describes it; Silent when it does not end."""
    # pylint: disable-next=ansible-bad-function,consider-using-with
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="surrogateescape"
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        # Of a suspended pool it waits in the kernel, where no signal ends it, so nobody waits for its end.
        process.kill()
        raise Silent(argv, SECONDS) from None
    return process.returncode, out, err


def ask(module: AnsibleModule, node: str, argv: t.Sequence[str]) -> tuple[int, str, str]:
    """The same in a module, which ends with a refusal when there is no answer."""
    try:
        return answer(argv)
    except Silent as exc:
        fail(module, [exc.refusal(node)])


class Zfs:
    """One dataset of this node, which the module's option ``dataset`` names."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.params = module, module.params
        self.node, self.name = module.params["node"], module.params["dataset"]
        # In check mode the package may be one that a real run installs.
        self.zfs = module.get_bin_path("zfs", required=not module.check_mode, opt_dirs=["/usr/sbin", "/sbin"])

    def fail(self, *refusals: Refusal) -> t.NoReturn:
        fail(self.module, refusals)

    def refuse(self, name: str, thing: str, found: str, wanted: str, next_step: str) -> t.NoReturn:
        self.fail(Refusal(f"sync.{name}", self.node, thing, found, wanted, next_step))

    def ask(self, *argv: str) -> tuple[int, str, str]:
        return ask(self.module, self.node, [self.zfs, *argv]) if self.zfs else (1, "", "zfs is not installed")

    def run(self, *argv: str) -> str:
        rc, out, err = self.ask(*argv)
        if rc:
            self.refuse("zfs", f"zfs {' '.join(argv)}", (err or out).strip(), "success", "zpool status and zfs list on the node tell more")
        return out
