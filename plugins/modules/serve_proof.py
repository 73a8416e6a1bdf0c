#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_proof
short_description: Prove a serving group by a real completion
version_added: 0.1.0
description:
  - Asks rank 0's API for one completion within O(timeout) and accepts content or reasoning text, never a status alone.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.engine
options:
  request:
    description: Body of the request to C(/v1/chat/completions), without the model.
    type: dict
    required: true
  expected:
    description: The exact answer; empty accepts any text.
    type: str
    default: ""
  timeout:
    description: Seconds that the completion may take.
    type: int
    default: 120
  lease_run_id:
    description: Run whose lease is renewed, since the requests may outlive it.
    type: str
"""

EXAMPLES = r"""
- name: Ask what 17 times 19 is
  sparkops.inference.serve_proof:
    state_dir: /var/lib/sparkops/lab_tiny
    api_port: 8888
    model: tiny
    request:
      messages: [{role: user, content: "What is 17*19? Reply with the integer only."}]
      max_tokens: 32
      temperature: 0
    expected: "323"
"""

RETURN = r"""
proof:
  description: V(ok), V(verdict), V(text), V(seconds) and V(detail) of the completion.
  returned: always
  type: dict
"""

import dataclasses

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import prove
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import api_address, keep_lease, read_api_key


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "api_port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "request": {"type": "dict", "required": True},
            "expected": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 120},
            "lease_run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    params = module.params
    keep_lease(params["state_dir"], params["lease_run_id"])
    key, address = read_api_key(params["state_dir"]), api_address(params["state_dir"])
    proof = prove(address, params["api_port"], params["model"], params["request"], key=key, expected=params["expected"], timeout=params["timeout"])
    document = dataclasses.asdict(proof)
    if not proof.ok:
        module.fail_json(msg=f"The group is up and gives no proof: {proof.verdict}: {proof.detail}", proof=document)
    module.exit_json(changed=False, proof=document)


if __name__ == "__main__":
    main()
