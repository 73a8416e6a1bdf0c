#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engram_pack
short_description: Keep the Engram row files of one rank complete on a node
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Writes one row file for each Engram layer, C(engram-l<layer>-r<rank>of<ranks>.bin), with exactly the rows that this rank
    serves. Local row files save the engine a read over the network for each row it misses.
  - A row file counts when its size and header are right, it has a record of what it was made from, and that source is still
    the same. Everything else is packed again, and replaces the old file only when it is complete.
  - Files that this module did not make, and directories of another layout, are named and left alone.
  - The work runs in a transient systemd unit that survives a lost connection. A second run attaches to it, and a run after a
    kill goes on where the last one stopped.
  - Needs nothing but Python on the node. Reads and writes around the page cache, which is GPU memory on these machines.
  - Never touches a container, so it may run while the old deployment serves.
attributes:
  check_mode:
    support: full
    description: Predicts whether row files would be packed. A source that is not there yet is a prediction, see RV(known_after).
  diff_mode:
    support: none
    description: There is nothing useful to show as a difference.
  idempotent:
    support: full
    description: A row file that counts is not made again.
options:
  source:
    description: Folder with C(config.json), the safetensors index, and the shards that hold the Engram tables. Local or a network mount.
    type: path
    required: true
  directory:
    description:
      - Folder for the row files, on a local disk.
      - One folder is for one layout only, that is one repository, one revision, and one O(tensor_parallel).
    type: path
    required: true
  rank:
    description: Rank of this node.
    type: int
    required: true
  tensor_parallel:
    description: Number of ranks that share the rows.
    type: int
    required: true
  repository:
    description: Repository of O(source). It becomes part of the layout.
    type: str
    required: true
  revision:
    description: Pinned commit of O(source). It becomes part of the layout.
    type: str
    required: true
  layers:
    description: Layers to pack. The default is all Engram layers of C(config.json).
    type: list
    elements: int
    default: []
  state:
    description:
      - V(present) packs what is missing.
      - V(verified) packs nothing. It reads every row file again and compares it with the hash recorded when it was packed.
        Damage is named and noted, so that the next V(present) packs that file again.
      - V(cancelled) stops running work. What is done is kept.
    type: str
    choices: [present, verified, cancelled]
    default: present
  rate_limit:
    description: Bytes per second that may be written. V(0) means no limit.
    type: int
    default: 0
  memory_floor:
    description:
      - Bytes of MemAvailable that must stay for others. Below it the work is refused, or pauses if it has begun.
      - V(0) means no floor.
    type: int
    default: 2147483648
  priority:
    description: V(idle) gives way to everything else that wants the processor or the disk, V(normal) does not.
    type: str
    choices: [idle, normal]
    default: idle
  deployment:
    description: Name of the deployment. It names the unit.
    type: str
    required: true
  state_dir:
    description: State folder of the deployment on the node.
    type: path
    required: true
  state_root:
    description: State folder of the collection on the node, for the code of the unit.
    type: path
    required: true
  node:
    description: Inventory name of the node, for messages.
    type: str
    required: true
  user:
    description: User that owns the files. Used when the module runs as root.
    type: str
    default: ''
  wait_slice:
    description: Return after this many seconds even if the work goes on, with RV(running) set. Zero waits for the end.
    type: int
    default: 0
  run_id:
    description: The RV(run_id) of an earlier call, to get the outcome of that run.
    type: str
seealso:
  - module: sparkops.inference.engram_info
  - module: sparkops.inference.hub_snapshot
"""

EXAMPLES = r"""
- name: Pack the rows of this rank
  sparkops.inference.engram_pack:
    source: /var/lib/sparkops/weights/acme--big/0123456789012345678901234567890123456789
    directory: /var/lib/sparkops/engram/acme--big/0123456789012345678901234567890123456789/tp2
    rank: 0
    tensor_parallel: 2
    repository: acme/big
    revision: '0123456789012345678901234567890123456789'
    deployment: big
    state_dir: /var/lib/sparkops/big
    state_root: /var/lib/sparkops
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
engram:
  description:
    - What the node has. C(valid) is true when every layer of this rank has a row file that counts; only then may an engine
      be given the C(directory).
  returned: always
  type: dict
  sample:
    directory: /var/lib/sparkops/engram/acme--big/0123456789012345678901234567890123456789/tp2
    valid: false
    reason: engram-l14-r0of2.bin is not packed yet
    layers:
      '1': {file: engram-l1-r0of2.bin, valid: true, reason: '', rows: [0, 192001740], size: 50688463456}
      '14': {file: engram-l14-r0of2.bin, valid: false, reason: not packed yet, rows: [0, 192007016], size: 50689856320}
    others: []
packed:
  description: Names of the row files that were made, or would be made in check mode.
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

import dataclasses
import os
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import (
    _engram,
    _engram_files,
    _engram_io,
    _engram_job,
    _manifest,
    _refusal,
    _safetensors,
    _unit,
)
from ansible_collections.sparkops.inference.plugins.module_utils._engram import Refused, refusal
from ansible_collections.sparkops.inference.plugins.module_utils._engram_files import Look, RowFile
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals

CODE = (_refusal, _manifest, _safetensors, _unit, _engram, _engram_io, _engram_files, _engram_job)
# Passed on to the job as they are.
JOB_OPTIONS = ("source", "directory", "rank", "tensor_parallel", "repository", "revision", "layers", "state", "rate_limit", "memory_floor", "priority")


class Packer:
    """State of one rank's row files, and the job that mends it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.job = _unit.Job(module, "engram", module.params["deployment"], module.params["state_dir"], module.params["user"])

    def fail(self, refusals: t.Sequence[Refusal]) -> t.NoReturn:
        named = [dataclasses.replace(item, node=self.params["node"]) for item in refusals]
        self.module.fail_json(msg=format_refusals(named), refusals=[item.as_dict() for item in named])

    # What is there

    def look(self) -> Look:
        """A few reads of one page: cheap for 100 GB. Raises Refused."""
        with _unit.identity(self.params["user"]):
            return _engram_files.look(self.params["source"], self.params["directory"], self.params["rank"], self.params["tensor_parallel"], self.params["layers"])

    def refusals(self, look: Look) -> list[Refusal]:
        """All that is in the way, before anything is made."""
        directory = self.params["directory"]
        layout = _engram_files.layout(self.params["tensor_parallel"], self.params["repository"], self.params["revision"])
        with _unit.identity(self.params["user"]):
            found = _engram_files.check_directory(directory, layout, look.files)
            found += self.folder_refusals() + _engram_files.space_refusals(directory, look.lacking)
        return found + _engram_files.memory_refusals(self.params["memory_floor"])

    def folder_refusals(self) -> list[Refusal]:
        if self.module.check_mode and not os.path.isdir(self.params["state_root"]):
            return []  # role bootstrap makes it
        parent = _manifest.existing_parent(self.params["directory"])
        if os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
            return []
        found = f"owned by uid {os.stat(parent).st_uid}, not writable for uid {os.geteuid()}"
        return [refusal("not_writable", parent, found, "a folder that the account may write", "run the bootstrap play, change the owner, or set engram_root")]

    # Running

    def begin(self) -> str:
        with _unit.identity(self.params["user"]):
            code = _unit.install_code(CODE, os.path.join(self.params["state_root"], "lib"))
        return self.job.begin(_unit.python_argv(code, "_engram_job"), {name: self.params[name] for name in JOB_OPTIONS})

    def wait_or_return(self, run_id: str | None) -> None:
        if not self.job.wait(self.params["wait_slice"] or float("inf")):
            self.module.exit_json(changed=True, running=True, run_id=run_id, progress=self.job.current(), packed=[], known_after=[])

    def finish(self, run_id: str | None) -> dict[str, t.Any]:
        """The outcome of a run that has ended."""
        self.wait_or_return(run_id)
        outcome = self.job.outcome(run_id)
        if outcome is None:
            said = _unit.last_lines(self.module, self.job.name) or "none"
            self.fail([refusal("job_died", f"unit {self.job.name}", f"ended without a result; its last lines: {said}", "a finished run", "run the pack tag again: it goes on where this run stopped")])
        if not outcome["ok"]:
            self.fail([Refusal(**item) for item in outcome["refusals"]])
        if outcome["damaged"]:
            self.fail([self.damage(name, rows) for name, rows in outcome["damaged"].items()])
        return outcome

    def damage(self, name: str, rows: t.Sequence[t.Sequence[int]]) -> Refusal:
        where = ", ".join(f"[{low},{high})" for low, high in rows)
        path = os.path.join(self.params["directory"], name)
        return refusal("damaged", path, f"another content than was packed, in rows {where}", "the hash recorded at pack time", "run the pack tag: it packs this file again; look at the disk's health")

    def earlier_run(self) -> dict[str, t.Any] | None:
        """The outcome of the run that is asked for, or of one that is found at work."""
        if self.params["run_id"]:
            return self.finish(self.params["run_id"])
        if not self.module.check_mode and self.job.running():
            return self.finish(self.job.current_run())
        return None

    def run(self) -> dict[str, t.Any]:
        wanted = self.params["state"]
        outcome = self.earlier_run()
        if not outcome or outcome["state"] != wanted:
            try:
                look = self.look()
            except Refused as exc:
                if self.module.check_mode and {item.id for item in exc.refusals} == {"engram.source_missing"}:
                    return self.result(None, changed=wanted == "present", known_after=["weights", "sync"])
                raise
            if wanted == "present" and not look.lacking:
                return self.result(look)
            problems = self.refusals(look) if wanted == "present" else []
            if problems:
                raise Refused(*problems)
            if self.module.check_mode:
                return self.result(look, packed=[file.name for file in look.lacking] if wanted == "present" else [])
            outcome = self.finish(self.begin())
        look = self.look()
        if wanted == "present" and look.lacking:
            raise Refused(*(self.unstable(file, look.problems[file.name]) for file in look.lacking))
        return self.result(look, packed=outcome["packed"])

    def unstable(self, file: RowFile, problem: str) -> Refusal:
        return refusal("unstable", file.path, problem, "a row file that counts, just after packing", "find out what changes the source or the file at the same time, then run the pack tag again")

    def result(self, look: Look | None, packed: t.Sequence[str] = (), changed: bool = False, known_after: t.Sequence[str] = ()) -> dict[str, t.Any]:
        return {
            "changed": changed or bool(packed),
            "engram": look.report() if look else _engram_files.nothing(self.params["directory"], "the Engram source is not on this node yet"),
            "packed": list(packed),
            "running": False,
            "known_after": list(known_after),
        }

    def cancel(self) -> dict[str, t.Any]:
        running = self.job.running()
        if running and not self.module.check_mode:
            _unit.stop(self.module, self.job.name)
        return {"changed": running, "packed": [], "running": False, "known_after": []}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "directory": {"type": "path", "required": True},
            "rank": {"type": "int", "required": True},
            "tensor_parallel": {"type": "int", "required": True},
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "layers": {"type": "list", "elements": "int", "default": []},
            "state": {"type": "str", "choices": ["present", "verified", "cancelled"], "default": "present"},
            "rate_limit": {"type": "int", "default": 0},
            "memory_floor": {"type": "int", "default": 2147483648},
            "priority": {"type": "str", "choices": ["idle", "normal"], "default": "idle"},
            "deployment": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "state_root": {"type": "path", "required": True},
            "node": {"type": "str", "required": True},
            "user": {"type": "str", "default": ""},
            "wait_slice": {"type": "int", "default": 0},
            "run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    packer = Packer(module)
    try:
        result = packer.cancel() if module.params["state"] == "cancelled" else packer.run()
    except Refused as exc:
        packer.fail(exc.refusals)
    except _unit.UnitError as exc:
        packer.fail([refusal("unit", f"unit {packer.job.name}", str(exc), "a transient systemd unit", "check systemd on the node")])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
