#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: weight_sync
short_description: Keep a worker's model files equal to the head's, and prove it
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Pulls the files that are missing or different from a peer's gate over the fabric, several streams at once.
  - Every file is hashed before it gets its final name. The manifest is written last, so a tree with a manifest is complete.
  - The pages of the copied files are given back, because on unified memory they are memory that the GPU lacks.
  - The work runs in a transient systemd unit that survives a lost connection. A second run attaches to it.
extends_documentation_fragment:
  - sparkops.inference.weights.from_peers
  - sparkops.inference.weights.written
  - sparkops.inference.node.job
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Predicts whether files would be copied, from sizes and manifests.
  diff_mode:
    support: none
    description: There is nothing useful to show as a difference.
  idempotent:
    support: full
    description: Nothing is copied twice.
options:
  artefacts:
    description:
      - The artefacts of the plan, each with C(name), C(repository), C(revision) and C(directory), and C(manifest), which is that of the head.
      - Without a manifest the head has no complete tree yet. In check mode the copy is then predicted; otherwise it is refused.
    type: list
    elements: dict
    required: true
  sources:
    description:
      - Nodes to read from, each with C(node), C(address), C(rails), C(user) and C(root). The last one is the head, which has everything.
      - Those before it are read from while they get files themselves.
    type: list
    elements: dict
    required: true
  method:
    description:
      - V(rsync) copies the files.
      - With V(nfs) and V(zfs) they are mounted already; they are proven, and nothing is copied.
    type: str
    choices: [rsync, nfs, zfs]
    default: rsync
  policy:
    description:
      - V(auto) copies what is missing or different.
      - V(verify_only) only checks and refuses when something is missing.
      - V(force) compares every file by hash and copies what differs.
    type: str
    choices: [auto, verify_only, force]
    default: auto
  verify:
    description: Read all files again on all cores and compare their hashes. Damaged files are named; the next run brings only them.
    type: bool
    default: false
  transport:
    description:
      - V(ssh) uses rsync over ssh with AES-GCM.
      - V(fabric) uses plain connections to the fabric addresses of the peer, for the time of the copy, with a one-time secret.
    type: str
    choices: [ssh, fabric]
    default: ssh
  streams:
    description: Streams at the same time, balanced by size and spread over all rails.
    type: int
    default: 4
  stall_seconds:
    description: Seconds without a byte on the disk after which an attempt is given up.
    type: int
    default: 120
  user:
    description: User that owns the files. Used when the module runs as root.
    type: str
    default: ''
  state:
    description:
      - V(present) brings the files.
      - V(cancelled) stops a running copy. What has arrived is kept.
    type: str
    choices: [present, cancelled]
    default: present
seealso:
  - module: sparkops.inference.hub_snapshot
  - module: sparkops.inference.manifest_info
"""

EXAMPLES = r"""
- name: Bring the head's files to this worker
  sparkops.inference.weight_sync:
    artefacts: "{{ weight_sync_artefacts }}"
    weights_root: "{{ spark_node.weights_root }}"
    sources:
      - node: spark-1
        address: 198.51.100.11
        user: alice
        root: /var/lib/sparkops/weights
    key: "{{ spark_node.key.path }}"
    known_hosts: "{{ spark_node.known_hosts.path }}"
    state_dir: "{{ spark_node.state_dir }}"
    state_root: "{{ spark_node.state_root }}"
    deployment: "{{ spark_plan.deployment }}"
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
artefacts:
  description: One entry per artefact.
  returned: always
  type: list
  elements: dict
  sample:
    - name: model
      tree: /var/lib/sparkops/weights/acme--tiny/0123456789012345678901234567890123456789
      complete: true
      problems: []
done:
  description: What the run copied, per artefact.
  returned: always
  type: dict
  sample:
    model: {files: 7, bytes: 1048576, seconds: 0.5, transport: ssh}
method:
  description: The method that was used.
  returned: always
  type: str
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
known_after:
  description: Stages that this prediction depends on.
  returned: always
  type: list
  elements: str
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import os
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _manifest, _sync_job, _unit, _weights_state
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

# Passed on to the job as they are.
JOB_OPTIONS = (
    "weights_root",
    "state_dir",
    "node",
    "sources",
    "key",
    "known_hosts",
    "method",
    "policy",
    "verify",
    "transport",
    "streams",
    "stall_seconds",
    "space_margin",
    "reserve",
)


def place_problems(tree: str, method: str) -> list[str]:
    """A replica's tree is a link into it, and no other tree is: what another method left is complete, but not what is wanted."""
    linked = os.path.islink(tree)
    if method == "zfs" and not linked:
        return ["not a link into the replica"]
    return ["a link into a replica, not a copy"] if linked and method == "rsync" else []


class Sync(_unit.LongModule):
    """State of this worker's copies, and the job that mends it."""

    area = work = "sync"
    program = _sync_job

    def look(self) -> list[dict[str, t.Any]]:
        with _unit.identity(self.user):
            return [self.look_at(item) for item in self.params["artefacts"]]

    def look_at(self, item: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        """Complete means: this node's manifest is the head's, and every file of it is there. Without the head's manifest
        this node's own is the best guess, because a pinned revision never changes."""
        wanted = _manifest.from_dict(item["manifest"]) if item.get("manifest") else None
        state = _weights_state.look(self.params["weights_root"], _weights_state.Artefact.from_dict(item))
        problems = state.problems
        if wanted and state.manifest and set(wanted.files) != set(state.manifest.files):
            problems = [*problems, "its manifest differs from the head's"]
        problems = [*problems, *place_problems(state.tree, self.params["method"])]
        return {"name": item["name"], "tree": state.tree, "complete": not problems, "problems": problems}

    def refusals(self, lacking: t.Sequence[dict[str, t.Any]]) -> list[Refusal]:
        found = []
        if lacking:
            found += [self.head_refusal(item["name"]) for item in self.params["artefacts"] if not item.get("manifest") and not self.module.check_mode]
            found += self.incomplete_refusals(lacking)
            # In check mode the folder may be one that the bootstrap play is going to make.
            found += [] if self.module.check_mode else self.folder_refusals()
        return found

    def head_refusal(self, name: str) -> Refusal:
        head = self.params["sources"][-1]["node"] if self.params["sources"] else "the head"
        return Refusal("sync.head_incomplete", head, f"artefact {name}", "no complete tree", "the full manifest on the head", "run the weights play first")

    def incomplete_refusals(self, lacking: t.Sequence[dict[str, t.Any]]) -> list[Refusal]:
        if self.params["policy"] != "verify_only":
            return []
        return [
            self.refusal(
                "incomplete",
                f"{item['name']} in {item['tree']}",
                "; ".join(item["problems"][:5]),
                "the full manifest",
                "set weight_sync_policy to auto, which copies what lacks",
            )
            for item in lacking
        ]

    def folder_refusals(self) -> list[Refusal]:
        """The user must be able to write where the copies will be."""
        with _unit.identity(self.user):
            lack = _manifest.unwritable(self.params["weights_root"], "weights_root")
        return [self.refusal("not_writable", **lack)] if lack else []

    def request(self) -> dict[str, t.Any]:
        request = {name: self.params[name] for name in JOB_OPTIONS}
        request["artefacts"] = [{key: item[key] for key in ("name", "directory", "manifest")} for item in self.params["artefacts"]]
        with _unit.identity(self.user):
            os.makedirs(self.params["weights_root"], exist_ok=True)
        return request

    def present(self) -> dict[str, t.Any]:
        # Even a look at a tree would hang on a mount whose server is gone.
        dead = _limited.refuse_dead(self.node, self.params["weights_root"], [item["directory"] for item in self.params["artefacts"]])
        if dead:
            self.fail(dead)
        outcome = self.earlier()
        state = self.look()
        lacking = [item for item in state if not item["complete"]]
        reread = (self.params["verify"] and not (outcome or {}).get("verified")) or (
            self.params["policy"] == "force" and (outcome or {}).get("policy") != "force"
        )
        refusals = self.refusals(lacking)
        if refusals:
            self.fail(refusals)
        self.note_staged()
        if not lacking and not reread:
            return self.answer(state, outcome)
        if self.module.check_mode:
            unknown = [item["name"] for item in self.params["artefacts"] if not item.get("manifest")]
            return self.answer(state, {"changed": bool(lacking)}, known_after=["weights"] if unknown else [])
        outcome = self.end_of(self.begin(self.request()))
        return self.answer(self.look(), outcome)

    def answer(self, state: t.Sequence[dict[str, t.Any]], outcome: t.Mapping[str, t.Any] | None, **more: t.Any) -> dict[str, t.Any]:
        return self.result(state, outcome, method=self.params["method"], **more)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **_unit.long_options(),
            "artefacts": {"type": "list", "elements": "dict", "required": True},
            "weights_root": {"type": "path", "required": True},
            "sources": {"type": "list", "elements": "dict", "required": True},
            "key": {"type": "path", "required": True, "no_log": False},
            "known_hosts": {"type": "path", "required": True},
            "method": {"type": "str", "choices": ["rsync", "nfs", "zfs"], "default": "rsync"},
            "policy": {"type": "str", "choices": ["auto", "verify_only", "force"], "default": "auto"},
            "verify": {"type": "bool", "default": False},
            "transport": {"type": "str", "choices": ["ssh", "fabric"], "default": "ssh"},
            "streams": {"type": "int", "default": 4},
            "stall_seconds": {"type": "int", "default": 120},
            "space_margin": {"type": "int", "default": 2147483648},
            "reserve": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    sync = Sync(module)
    sync.main(sync.present)


if __name__ == "__main__":
    main()
