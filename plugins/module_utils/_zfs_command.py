# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The command zfs in a module: its failure is a refusal with its own words."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

if t.TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule


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
        return self.module.run_command([self.zfs, *argv]) if self.zfs else (1, "", "zfs is not installed")

    def run(self, *argv: str) -> str:
        rc, out, err = self.ask(*argv)
        if rc:
            self.refuse("zfs", f"zfs {' '.join(argv)}", (err or out).strip(), "success", "zpool status and zfs list on the node tell more")
        return out
