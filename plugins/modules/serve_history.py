#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_history
short_description: Keep a proven deployment on this node, or bring files into place for a start
version_added: 0.1.0
description:
  - Each rank keeps the plan, its own spec, and the small files of its container of the deployments that were proven last.
  - The newest of them is also C(last_good.json). A deployment that was not proven never gets here, so a failed upgrade leaves it as it is.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Predicts a change and writes nothing.
  diff_mode:
    support: none
    description: There is no text to compare.
  idempotent:
    support: partial
    details: Each proof is recorded with its time.
    description: A second call with the same record changes nothing but the time.
options:
  state:
    description:
      - V(recorded) keeps O(record) and makes it the last good one.
      - V(restored) stages the files of the record O(id) in C(next), for the next start of the rank.
      - V(installed) puts what is staged in C(next) in the place of what the container of this rank has mounted and its rank service goes by. The
        container must not run.
    type: str
    choices: [recorded, restored, installed]
    default: recorded
  state_dir:
    description: Directory of the deployment on this node.
    type: path
    required: true
  record:
    description: Deployment, profile, time of the proof, plan, image, and spec. Its id is made from the spec's label of the group.
    type: dict
  id:
    description: The record to bring back.
    type: str
  keep:
    description: How many records are kept.
    type: int
    default: 10
"""

EXAMPLES = r"""
- name: Stage the files of an earlier deployment
  sparkops.inference.serve_history:
    state: restored
    state_dir: /var/lib/sparkops/lab_tiny
    id: 0123456789ab
"""

RETURN = r"""
id:
  description: The record; empty with O(state=installed).
  returned: always
  type: str
forgotten:
  description: Records that went because they were the oldest.
  returned: always
  type: list
  elements: str
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _history


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["recorded", "restored", "installed"], "default": "recorded"},
            "state_dir": {"type": "path", "required": True},
            "record": {"type": "dict"},
            "id": {"type": "str"},
            "keep": {"type": "int", "default": 10},
        },
        required_if=[("state", "recorded", ("record",)), ("state", "restored", ("id",))],
        supports_check_mode=True,
    )
    params = module.params
    forgotten: list[str] = []
    record: dict[str, t.Any] | None = None
    try:
        if params["state"] == "recorded":
            record = {**params["record"], "id": _history.record_id(params["record"]["spec"]["labels"]["sparkops.group"])}
            if not module.check_mode:
                forgotten = _history.keep(params["state_dir"], record, params["keep"])
        elif params["state"] == "restored":
            record = _history.read(params["state_dir"], params["id"])
            if record is None:
                module.fail_json(msg=f"There is no record {params['id']} in {_history.history_dir(params['state_dir'])}")
            if not module.check_mode:
                _history.stage(params["state_dir"], record["id"])
        elif not module.check_mode:
            _history.install(params["state_dir"])
    except OSError as exc:
        module.fail_json(msg=f"The records and files in {params['state_dir']} cannot be used: {exc}")
    module.exit_json(changed=True, id=record["id"] if record else "", forgotten=forgotten)


if __name__ == "__main__":
    main()
