#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_warmup
short_description: Send a fresh group the requests that compile what its users will need
version_added: 0.1.0
description:
  - Sends the profile's shapes to rank 0's API, greedy and sampled, so that the first users do not wait for compilers.
  - A shape that this deployment cannot have is left out by name. A request that ends in no answer or in an error of the server fails the task.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.engine
options:
  shapes:
    description: The profile's data, with C(completions), C(prefill), C(chats), C(bursts), C(kernels), C(thinking_off), and C(request_timeout).
    type: dict
    required: true
  max_model_len:
    description: Longest context of the deployment.
    type: int
    required: true
  max_num_seqs:
    description: Most sequences at once.
    type: int
    required: true
  kernel_cache:
    description: Directory of compiled kernels on this node, in which C(kernels) are counted.
    type: path
  lease_run_id:
    description: Run whose lease is renewed, since the shapes may outlive it.
    type: str
"""

EXAMPLES = r"""
- name: Warm up
  sparkops.inference.serve_warmup:
    state_dir: /var/lib/sparkops/lab_tiny
    api_port: 8888
    model: tiny
    max_model_len: 256
    max_num_seqs: 2
    shapes:
      chats: [{words: 8, temperature: 0, max_tokens: 4}]
"""

RETURN = r"""
sent:
  description: Number of requests.
  returned: always
  type: int
skipped:
  description: Shapes that were left out, and why, and kernels that were not compiled.
  returned: always
  type: list
  elements: str
kernels:
  description: How many variants of the profile's kernel are in the cache; null when nobody asked.
  returned: always
  type: int
seconds:
  description: Time that it took.
  returned: always
  type: float
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import api_address, keep_lease, read_api_key
from ansible_collections.sparkops.inference.plugins.module_utils._warmup import Engine, warm_up


def count_kernels(cache: str, name: str) -> int:
    """Triton keeps each variant of a kernel in a folder of its own, beside a description of this name."""
    return sum(f"{name}.json" in files for dummy, dummy2, files in os.walk(cache))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "api_port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "shapes": {"type": "dict", "required": True},
            "max_model_len": {"type": "int", "required": True},
            "max_num_seqs": {"type": "int", "required": True},
            "kernel_cache": {"type": "path"},
            "lease_run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    params, shapes = module.params, module.params["shapes"]
    keep_lease(params["state_dir"], params["lease_run_id"])
    key, address = read_api_key(params["state_dir"]), api_address(params["state_dir"])
    engine = Engine(params["api_port"], params["model"], key, shapes.get("request_timeout") or 120, address)
    begun = time.monotonic()
    report = warm_up(engine, shapes, params["max_model_len"], params["max_num_seqs"])
    kernels = None
    wanted = shapes.get("kernels")
    if wanted and params["kernel_cache"]:
        kernels = count_kernels(params["kernel_cache"], wanted["name"])
        if kernels < wanted["at_least"]:
            report.skipped.append(f"{kernels} variants of {wanted['name']} were compiled, {wanted['at_least']} were expected: some first request will wait")
    result = {"changed": False, "sent": report.sent, "skipped": report.skipped, "kernels": kernels, "seconds": round(time.monotonic() - begun, 1)}
    if report.failed:
        module.fail_json(msg="The group is up and does not get through its warm-up: " + "; ".join(report.failed), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
