#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: zfs_snapshot
short_description: Take, prune, and roll back the snapshots of the model files' dataset
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Knows only snapshots whose names begin with C(sparkops-); those of others are never destroyed without O(discard).
  - Needs root.
extends_documentation_fragment:
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Says what would be taken, destroyed, or lost.
  diff_mode:
    support: none
    description: There is nothing useful to show as a difference.
  idempotent:
    support: full
    description: A snapshot is taken only when a watched path changed since the last one.
options:
  dataset:
    description: The dataset.
    type: str
    required: true
  state:
    description:
      - V(present) makes sure that a snapshot holds the content as it is.
      - V(pruned) destroys the oldest snapshots of ours.
      - V(rolled_back) makes the content what O(snapshot) holds.
    type: str
    choices: [present, pruned, rolled_back]
    default: present
  watched:
    description: Files and folders whose change makes a new snapshot worthwhile. Locks and staging folders are not.
    type: list
    elements: path
    default: []
  keep:
    description: How many snapshots of ours stay.
    type: int
    default: 2
  needed:
    description: GUIDs of snapshots that stay whatever their age, because a worker may need them as a base.
    type: list
    elements: str
    default: []
  snapshot:
    description: Name of the snapshot to roll back to, without the dataset.
    type: str
  discard:
    description: Whether a rollback may destroy newer snapshots and what was written since. Without it they are named and the rollback is refused.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Hold the content as it is
  sparkops.inference.zfs_snapshot:
    dataset: tank/weights
    node: spark-1
    watched:
      - /var/lib/sparkops/weights/acme--tiny
  become: true
"""

RETURN = r"""
snapshot:
  description: The newest snapshot of ours, or the one that was rolled back to. In check mode none where a new one would be taken.
  returned: when there is one
  type: dict
  sample: {name: sparkops-20261129T120000Z, guid: "1234", created: 42}
reason:
  description: Why a snapshot was taken or not.
  returned: always
  type: str
destroyed:
  description: Snapshots that went.
  returned: always
  type: list
  elements: str
bytes:
  description: Room that comes back with the pruned snapshots.
  returned: with O(state=pruned)
  type: int
snapshots:
  description: All snapshots that were there, whoever made them, the oldest first.
  returned: with O(state=pruned)
  type: list
  elements: dict
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _mounts, _zfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._zfs_command import Zfs
from ansible_collections.sparkops.inference.plugins.module_utils._zfs_plan import Snapshot


class Dataset(Zfs):
    """The dataset and its snapshots."""

    def snapshots(self) -> tuple[Snapshot, ...]:
        return _zfs_plan.parse_snapshots(self.run("list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid,createtxg", self.name))

    def result(self, changed: bool, reason: str, snapshot: Snapshot | None, destroyed: t.Sequence[Snapshot] = ()) -> dict[str, t.Any]:
        found = {"snapshot": snapshot._asdict()} if snapshot else {}
        return {"changed": changed, "reason": reason, "destroyed": [item.name for item in destroyed], **found}

    # Taking

    def present(self) -> dict[str, t.Any]:
        last = _zfs_plan.newest(self.snapshots())
        reason = self.why(last)
        if not reason:
            return self.result(False, "nothing changed since the last one", last)
        if self.module.check_mode:
            return self.result(True, reason, None)
        name = f"{_zfs_plan.PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        self.run("snapshot", f"{self.name}@{name}")
        return self.result(True, reason, _zfs_plan.newest(self.snapshots()))

    def why(self, last: Snapshot | None) -> str:
        """An empty text when the last snapshot holds all that counts."""
        if last is None:
            return "the first one"
        if self.run("get", "-Hp", "-o", "value", f"written@{last.name}", self.name).strip() == "0":
            return ""
        changed = _zfs_plan.changed_paths(self.run("diff", "-H", f"{self.name}@{last.name}", self.name), self.params["watched"])
        return f"{len(changed)} changes, such as {changed[0]}" if changed else ""

    # Pruning

    def pruned(self) -> dict[str, t.Any]:
        there = self.snapshots()
        gone = _zfs_plan.to_prune(there, self.params["keep"], self.params["needed"])
        names = ",".join(item.name for item in gone)
        size = _zfs_plan.parse_size(self.run("destroy", "-nvp", f"{self.name}@{names}"), "reclaim") if gone else 0
        for item in gone if not self.module.check_mode else ():
            self.run("destroy", f"{self.name}@{item.name}")
        answer = self.result(bool(gone), f"{len(gone)} of {len(there)} too old", _zfs_plan.newest(there), gone)
        return {**answer, "bytes": size or 0, "snapshots": [item._asdict() for item in there]}

    # Going back

    def rolled_back(self) -> dict[str, t.Any]:
        there = self.snapshots()
        wanted = self.params["snapshot"] or ""
        discarded = _zfs_plan.to_discard(there, wanted)
        if discarded is None:
            names = ", ".join(item.name for item in _zfs_plan.ours(there)) or "none"
            self.refuse("zfs_no_snapshot", f"snapshot {self.name}@{wanted}", f"not there; there are {names}", "one of them", "set weight_sync_zfs_snapshot")
        target = next(item for item in there if item.name == wanted)
        written = int(self.run("get", "-Hp", "-o", "value", f"written@{wanted}", self.name).strip() or 0)
        if not discarded and not written:
            return self.result(False, "the content is that of the snapshot", target)
        self.refuse_use()
        lost = [f"snapshot {self.name}@{item.name}" for item in discarded]
        lost += [f"{written} bytes written since that snapshot"] if written else []
        if lost and not self.params["discard"]:
            thing = f"rollback of {self.name} to {wanted}"
            self.refuse("zfs_rollback", thing, f"it would destroy {', '.join(lost)}", "consent", "set weight_sync_zfs_discard to true")
        if not self.module.check_mode:
            self.run("rollback", *(["-r"] if discarded else []), f"{self.name}@{wanted}")
        return self.result(True, f"{written} bytes were written since", target, discarded)

    def refuse_use(self) -> None:
        """A rollback under a running rank would change its files in its hands."""
        place = self.run("get", "-Hp", "-o", "value", "mountpoint", self.name).strip()
        mount = _mounts.at(_mounts.read(), place)
        users = _mounts.users(mount) if mount else []
        if users:
            names = ", ".join(f"container {user.container}" if user.container else f"{user.name} (pid {user.pid})" for user in users)
            self.refuse("zfs_used", f"dataset {self.name}", f"used by {names}", "files that nobody reads", "stop the group first")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "dataset": {"type": "str", "required": True},
            "node": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "pruned", "rolled_back"], "default": "present"},
            "watched": {"type": "list", "elements": "path", "default": []},
            "keep": {"type": "int", "default": 2},
            "needed": {"type": "list", "elements": "str", "default": []},
            "snapshot": {"type": "str"},
            "discard": {"type": "bool", "default": False},
        },
        required_if=[("state", "rolled_back", ["snapshot"])],
        supports_check_mode=True,
    )
    dataset = Dataset(module)
    module.exit_json(**{"present": dataset.present, "pruned": dataset.pruned, "rolled_back": dataset.rolled_back}[module.params["state"]]())


if __name__ == "__main__":
    main()
