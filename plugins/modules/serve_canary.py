#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_canary
short_description: Find out whether a healthy group talks nonsense
version_added: 0.1.0
description:
  - A known word in a greedy answer, drafts that the engine accepts itself, and capabilities on request. All problems are told at once.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.engine
options:
  canary:
    description: The profile's data, with C(contains), C(drafts), C(thinking_off), and C(thinking_on).
    type: dict
    required: true
  capabilities:
    description: What else is tried, each by one request.
    type: list
    elements: str
    choices: [image, tool, reasoning]
    default: []
  timeout:
    description: Seconds that one request may take.
    type: int
    default: 120
  lease_run_id:
    description: Run whose lease is renewed, since the requests may outlive it.
    type: str
  node:
    description: Inventory name of rank 0, for messages.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: See whether it talks sense
  sparkops.inference.serve_canary:
    node: spark-1
    state_dir: /var/lib/sparkops/lab_tiny
    api_port: 8888
    model: tiny
    canary:
      contains: OK
"""

RETURN = r"""
unjudged:
  description: What could not be judged, and why.
  returned: always
  type: list
  elements: str
refusals:
  description: What is wrong.
  returned: on refusal
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import api_address, keep_lease, read_api_key
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail
from ansible_collections.sparkops.inference.plugins.module_utils._warmup import Engine, check_capabilities, check_drafts, check_words


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "api_port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "canary": {"type": "dict", "required": True},
            "capabilities": {"type": "list", "elements": "str", "choices": ["image", "tool", "reasoning"], "default": []},
            "timeout": {"type": "int", "default": 120},
            "lease_run_id": {"type": "str"},
            "node": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    params, canary = module.params, module.params["canary"]
    keep_lease(params["state_dir"], params["lease_run_id"])
    engine = Engine(params["api_port"], params["model"], read_api_key(params["state_dir"]), params["timeout"], api_address(params["state_dir"]))
    problems = check_words(engine, canary)
    drafts, unjudged = check_drafts(engine, canary)
    problems += [*drafts, *check_capabilities(engine, canary, params["capabilities"])]
    if problems:
        refusal = Refusal(
            "serve.canary", params["node"], "canary of the group", "; ".join(problems), "sane answers from a group that says that it is healthy",
            "compare image, weights and settings with what was proven last; the logs of all ranks are kept",
        )
        fail(module, [refusal], unjudged=unjudged)
    module.exit_json(changed=False, unjudged=unjudged)


if __name__ == "__main__":
    main()
