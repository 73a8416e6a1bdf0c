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
extends_documentation_fragment:
  - sparkops.inference.node.job
  - sparkops.inference.node.named
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
  state_root:
    description: State folder of the collection on the node, for the code of the unit.
    type: path
    required: true
  user:
    description: User that owns the files. Used when the module runs as root.
    type: str
    default: ''
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
  returned: when O(state) is V(present) or V(verified)
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
  returned: when O(state) is V(present) or V(verified)
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
from ansible_collections.sparkops.inference.plugins.module_utils import _engram_files, _engram_job, _manifest, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._engram_files import Look, RowFile
from ansible_collections.sparkops.inference.plugins.module_utils._limited import refuse_dead
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused

# Passed on to the job as they are.
JOB_OPTIONS = ("source", "directory", "rank", "tensor_parallel", "repository", "revision", "layers", "state", "rate_limit", "memory_floor", "priority")


class Packer(_unit.LongModule):
    """State of one rank's row files, and the job that mends it."""

    area = work = "engram"
    program = _engram_job

    def fail(self, refusals: t.Sequence[Refusal]) -> t.NoReturn:
        super().fail([dataclasses.replace(item, node=self.node) for item in refusals])

    # What is there

    def look(self) -> Look:
        """A few reads of one page: cheap for 100 GB. Raises Refused."""
        with _unit.identity(self.user):
            return _engram_files.look(
                self.params["source"], self.params["directory"], self.params["rank"], self.params["tensor_parallel"], self.params["layers"]
            )

    def refusals(self, look: Look) -> list[Refusal]:
        """All that is in the way, before anything is made."""
        directory = self.params["directory"]
        layout = _engram_files.layout(self.params["tensor_parallel"], self.params["repository"], self.params["revision"])
        with _unit.identity(self.user):
            found = _engram_files.check_directory(directory, layout, look.files)
            found += self.folder_refusals() + _engram_files.space_refusals(directory, look.lacking)
        return found + _engram_files.memory_refusals(self.params["memory_floor"])

    def folder_refusals(self) -> list[Refusal]:
        if self.module.check_mode and not os.path.isdir(self.params["state_root"]):
            return []  # role bootstrap makes it
        lack = _manifest.unwritable(self.params["directory"], "engram_root")
        return [self.refusal("not_writable", **lack)] if lack else []

    def refuse_damage(self, look: Look) -> None:
        """A file that was once complete and no longer counts. What was never packed is no damage."""
        broken = [file for file in look.lacking if os.path.exists(file.record) and not os.path.exists(file.journal)]
        if broken:
            raise Refused(*(self.damage(file, look.problems[file.name]) for file in broken))

    def damage(self, file: RowFile, problem: str) -> Refusal:
        next_step = "run the pack tag: it packs this file again; look at the disk's health"
        return self.refusal("damaged", file.path, problem, "the content and the source that were recorded at pack time", next_step)

    def unstable(self, file: RowFile, problem: str) -> Refusal:
        next_step = "find out what changes the source or the file at the same time, then run the pack tag again"
        return self.refusal("unstable", file.path, problem, "a row file that counts, just after packing", next_step)

    # What is done

    def present(self) -> dict[str, t.Any]:
        # A look at a source whose server is gone would never come back.
        dead = refuse_dead(self.node, self.params["source"])
        if dead:
            self.fail(dead)
        try:
            return self.mended()
        except Refused as exc:
            self.fail(exc.refusals)

    def mended(self) -> dict[str, t.Any]:
        wanted = self.params["state"]
        outcome = self.earlier()
        if not outcome or outcome["state"] != wanted:
            answer = self.without_work()
            if answer is not None:
                return answer
            outcome = self.end_of(self.begin({name: self.params[name] for name in JOB_OPTIONS}))
        look = self.look()
        if wanted == "present" and look.lacking:
            raise Refused(*(self.unstable(file, look.problems[file.name]) for file in look.lacking))
        if wanted == "verified":
            self.refuse_damage(look)
        return self.answer(look, packed=outcome["packed"])

    def without_work(self) -> dict[str, t.Any] | None:
        """The answer when nothing needs to run, or may. Raises Refused, before anything is made."""
        try:
            look = self.look()
        except Refused as exc:
            if self.module.check_mode and {item.id for item in exc.refusals} == {"engram.source_missing"}:
                return self.answer(None, changed=self.params["state"] == "present", known_after=["weights", "sync"])
            raise
        if self.params["state"] == "verified":
            self.refuse_damage(look)
            nothing = self.module.check_mode or len(look.lacking) == len(look.files)
            return self.answer(look) if nothing else None
        if not look.lacking:
            return self.answer(look)
        problems = self.refusals(look)
        if problems:
            raise Refused(*problems)
        return self.answer(look, packed=[file.name for file in look.lacking]) if self.module.check_mode else None

    def answer(self, look: Look | None, packed: t.Sequence[str] = (), changed: bool = False, known_after: t.Sequence[str] = ()) -> dict[str, t.Any]:
        return {
            "changed": changed or bool(packed),
            "engram": look.report() if look else _engram_files.nothing(self.params["directory"], "the Engram source is not on this node yet"),
            "packed": list(packed),
            "running": False,
            "known_after": list(known_after),
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **_unit.long_options(),
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
        },
        supports_check_mode=True,
    )
    packer = Packer(module)
    packer.main(packer.present)


if __name__ == "__main__":
    main()
