#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_health
short_description: Wait for a group that is being started, as seen from rank 0
version_added: 0.1.0
description:
  - Looks at all ranks and at rank 0's C(/health) once a second until the group is healthy, cannot become it, or O(slice) is over.
  - The action plugin of the same name calls it in slices, prints a line of progress for each, and ends with the last log lines of every rank.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Nothing is changed; there is nothing to wait for, so it returns at once.
  diff_mode:
    support: N/A
    description: Nothing is changed.
  action:
    support: full
    description: The slices run on rank 0, the progress is printed on the controller.
options:
  state_dir:
    description: Directory of the deployment on rank 0.
    type: path
    required: true
  program:
    description: Path of rank_service.py on this node.
    type: path
    required: true
  api_port:
    description: Port of the API on rank 0.
    type: int
    required: true
  slice:
    description: Seconds that one call may last.
    type: int
    default: 10
  timeout:
    description: Seconds until the whole wait ends; the action plugin counts them.
    type: int
    default: 1500
  stall_timeout:
    description: Seconds without progress on any rank after which the group counts as stalled.
    type: int
    default: 420
  tail:
    description: How many of the last log lines of each rank are returned when the group fails.
    type: int
    default: 40
  lease_run_id:
    description: Run whose lease is renewed at each call, since a load may outlive it.
    type: str
"""

EXAMPLES = r"""
- name: Wait for the group
  sparkops.inference.serve_health:
    state_dir: /var/lib/sparkops/lab_tiny
    program: /usr/local/lib/sparkops/rank_service.py
    api_port: 8888
"""

RETURN = r"""
verdict:
  description: One of V(waiting), V(healthy), V(guard), V(dead), V(unreachable), V(stalled), V(timeout).
  returned: always
  type: str
reason:
  description: What happened, empty when all is well.
  returned: always
  type: str
ranks:
  description: Phase, memory, and what is wrong with NCCL's way by rank number, with the tail of the log when the group failed.
  returned: always
  type: dict
least_available_kib:
  description: The least available memory that was seen in this call, by rank number.
  returned: always
  type: dict
"""

import sys
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import call
from ansible_collections.sparkops.inference.plugins.module_utils._group_channel import StartWatch, ask_group, lowest, phase_of
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import api_address, renew_lease


def brief(answer: t.Mapping[str, t.Any], tail: int) -> dict[str, t.Any]:
    return {
        "phase": phase_of(answer),
        "available_kib": answer.get("memory", {}).get("available_kib"),
        "last_line": answer.get("progress", {}).get("last_line", ""),
        "error": answer.get("error", ""),
        "nccl": answer.get("progress", {}).get("nccl", []),
        "tail": answer.get("tail", [])[-tail:] if tail else [],
    }


def wait(module: AnsibleModule) -> dict[str, t.Any]:
    params = module.params
    watch = StartWatch(params["stall_timeout"])
    until, address = time.monotonic() + params["slice"], api_address(params["state_dir"])
    least: dict[str, int] = {}
    while True:
        begun = time.monotonic()
        answer = ask_group(module.run_command, sys.executable, params["program"], "group-state", params["state_dir"])
        if not answer["ranks"]:
            return {"verdict": "unreachable", "reason": answer["error"], "ranks": {}, "least_available_kib": least}
        least = lowest([least, {number: one["memory"]["available_kib"] for number, one in answer["ranks"].items() if one.get("memory")}])
        health = call(address, params["api_port"], "GET", "/health", timeout=2).status
        verdict = watch.judge(answer["ranks"], health, time.time())
        # A rank that does not answer costs a poll several seconds: cut off in the middle, slices would never count to a verdict.
        over = time.monotonic() >= until and not watch.undecided()
        if verdict["verdict"] != "waiting" or over:
            failed = verdict["verdict"] not in ("waiting", "healthy")
            tail = params["tail"] if failed else 0
            return {**verdict, "ranks": {number: brief(one, tail) for number, one in answer["ranks"].items()}, "least_available_kib": least}
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "program": {"type": "path", "required": True},
            "api_port": {"type": "int", "required": True},
            "slice": {"type": "int", "default": 10},
            "timeout": {"type": "int", "default": 1500},
            "stall_timeout": {"type": "int", "default": 420},
            "tail": {"type": "int", "default": 40},
            "lease_run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, verdict="waiting", reason="nothing was started in check mode", ranks={}, least_available_kib={})
    if module.params["lease_run_id"]:
        renew_lease(module.params["state_dir"], module.params["lease_run_id"])
    module.exit_json(changed=False, **wait(module))


if __name__ == "__main__":
    main()
