#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: zfs_receive
short_description: Bring the head's newest snapshot into a worker's replica
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Pulls a full or an incremental stream from the head's gate over the fabric. The base is chosen by GUID, never by name.
  - A cut receive is resumed with its token; a token that leads nowhere is given up, and the result says which.
  - Runs as the account, with rights that were delegated to it, in a transient systemd unit that survives a lost connection.
  - The replica is not mounted here; M(sparkops.inference.zfs_replica) does that.
extends_documentation_fragment:
  - sparkops.inference.weights.from_peers
  - sparkops.inference.node.job
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Predicts a receive when the head has a snapshot that the replica lacks.
  diff_mode:
    support: none
    description: There is nothing useful to show as a difference.
  idempotent:
    support: full
    description: A replica that has the head's newest snapshot is left alone.
options:
  dataset:
    description: The replica on this node.
    type: str
    required: true
  source:
    description: The head, with C(node), C(address), C(user) and C(root).
    type: dict
    required: true
  target:
    description: GUID of the snapshot that the replica should have. When it is there already no node is asked.
    type: str
    required: true
  discard:
    description: Whether content that the head does not have may be given up. Without it a replica that differs is refused, and what would be lost is named.
    type: bool
    default: false
  stall_seconds:
    description: Seconds without a byte after which an attempt is given up.
    type: int
    default: 120
  space_margin:
    description: Bytes that must stay free in the pool.
    type: int
    default: 2147483648
  user:
    description: Account that receives. Used when the module runs as root.
    type: str
    default: ''
  state:
    description:
      - V(present) brings the snapshot.
      - V(cancelled) stops a running receive. What has arrived is kept.
    type: str
    choices: [present, cancelled]
    default: present
seealso:
  - module: sparkops.inference.zfs_snapshot
  - module: sparkops.inference.zfs_replica
"""

EXAMPLES = r"""
- name: Bring the head's newest snapshot
  sparkops.inference.zfs_receive:
    dataset: tank/weights
    source: {node: spark-1, address: 198.51.100.11, user: alice, root: /var/lib/sparkops/weights}
    target: "{{ head_snapshot.snapshot.guid }}"
    key: "{{ spark_node.key.path }}"
    known_hosts: "{{ spark_node.known_hosts.path }}"
    state_dir: "{{ spark_node.state_dir }}"
    state_root: "{{ spark_node.state_root }}"
    deployment: "{{ spark_plan.deployment }}"
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
done:
  description: What the run received.
  returned: always
  type: dict
  sample:
    replica: {bytes: 1048576, seconds: 0.5, snapshot: sparkops-20261129T120000Z, transport: zfs}
notices:
  description: What the run had to say.
  returned: always
  type: list
  elements: str
running:
  description: Whether the work goes on.
  returned: always
  type: bool
run_id:
  description: Identity of the run that goes on.
  returned: when RV(running) is true
  type: str
progress:
  description: State of the work.
  returned: when RV(running) is true
  type: dict
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import os
import shutil
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _unit, _zfs_command, _zfs_job, _zfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

JOB_OPTIONS = ("dataset", "source", "key", "known_hosts", "discard", "stall_seconds", "space_margin", "state_dir", "node")


class Replication(_unit.LongModule):
    """The replica of this node, and the job that brings it in line."""

    area = "sync"
    work = "zfs"
    program = _zfs_job

    def has_target(self) -> bool:
        if not shutil.which(_zfs_job.zfs_program()):
            return False  # a real run installs it; the job says that it lacks
        rc, out, _err = self.ask("list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid,createtxg", self.params["dataset"])
        snapshots = _zfs_plan.parse_snapshots(out) if rc == 0 else ()
        return any(snapshot.guid == self.params["target"] for snapshot in snapshots)

    def fail(self, refusals: t.Sequence[Refusal]) -> t.NoReturn:
        """Only root may unmount: what the job is allowed to replace, and finds mounted, is unmounted here, and the job begins anew."""
        if self.params["discard"] and [item.id for item in refusals] == ["sync.zfs_used"] and os.geteuid() == 0 and self.unmount():
            self.module.exit_json(**self.result([], self.end_of(self.begin(self.request()))))
        super().fail(refusals)

    def unmount(self) -> bool:
        """Whether there was something to unmount, and all of it is. What somebody reads stays."""
        mounted = _zfs_plan.parse_mounted(self.ask(*_zfs_plan.LIST_MOUNTED, self.params["dataset"])[1])
        answers = [self.ask("unmount", name) for name in mounted]
        return bool(mounted) and not any(rc for rc, _out, _err in answers)

    def ask(self, *words: str) -> tuple[int, str, str]:
        return _zfs_command.ask(self.module, self.node, [_zfs_job.zfs_program(), *words])

    def request(self) -> dict[str, t.Any]:
        return {name: self.params[name] for name in JOB_OPTIONS}

    def present(self) -> dict[str, t.Any]:
        outcome = self.earlier()
        if outcome is None and self.has_target():
            return self.result([])
        if self.module.check_mode:
            return self.result([], {"changed": True})
        return self.result([], outcome or self.end_of(self.begin(self.request())))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **_unit.long_options(),
            "dataset": {"type": "str", "required": True},
            "source": {"type": "dict", "required": True},
            "target": {"type": "str", "required": True},
            "key": {"type": "path", "required": True, "no_log": False},
            "known_hosts": {"type": "path", "required": True},
            "discard": {"type": "bool", "default": False},
            "stall_seconds": {"type": "int", "default": 120},
            "space_margin": {"type": "int", "default": 2147483648},
        },
        supports_check_mode=True,
    )
    replication = Replication(module)
    replication.main(replication.present)


if __name__ == "__main__":
    main()
