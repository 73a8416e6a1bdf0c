#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_drain
short_description: Wait until a group that is about to stop has no running requests
version_added: 0.1.0
description:
  - Reads the engine's own counters on rank 0 until nothing runs or waits, at most O(timeout) seconds, and says how many requests are left.
  - The API goes on taking requests meanwhile, because the engine has no switch for that; keep clients away for a complete drain.
  - A group that does not run, or has no such counters, is not waited for.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
options:
  container:
    description: Name of rank 0's container.
    type: str
    required: true
  state_dir:
    description: Directory of the deployment on rank 0.
    type: path
    required: true
  timeout:
    description: Seconds to wait; 0 does not wait.
    type: int
    default: 60
  lease_run_id:
    description: Run whose lease is renewed, since the wait may outlive it.
    type: str
"""

EXAMPLES = r"""
- name: Let running requests end
  sparkops.inference.serve_drain:
    container: lab_tiny-rank0
    state_dir: /var/lib/sparkops/lab_tiny
    timeout: 300
"""

RETURN = r"""
left:
  description: Requests that still ran or waited at the end; null when there was nothing to ask.
  returned: always
  type: int
waited:
  description: Seconds that were waited.
  returned: always
  type: float
says:
  description: The same in words; empty when there was nothing to wait for.
  returned: always
  type: str
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import RUNNING, WAITING, call, metrics, option_of, own_address
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import renew_lease

MISSED_ANSWERS = 3


def place_of(document: t.Mapping[str, t.Any] | None) -> tuple[str, int] | None:
    """Address and port of the API of a running container."""
    if not document or not document["State"]["Running"]:
        return None
    port = option_of(document, "--port")
    return (own_address(option_of(document, "--host")), int(port)) if port.isdecimal() else None


def unfinished(place: tuple[str, int]) -> int | None:
    values = metrics(call(*place, "GET", "/metrics", timeout=5))
    return int(values[RUNNING] + values.get(WAITING, 0)) if RUNNING in values else None


def drain(place: tuple[str, int], timeout: float, renew: t.Callable[[], None], pause: float = 0.5) -> tuple[int | None, float]:
    """How many requests are left, and the seconds waited."""
    begun, missed = time.monotonic(), 0
    left = unfinished(place)
    while left and missed < MISSED_ANSWERS and time.monotonic() - begun < timeout:
        renew()
        time.sleep(pause)
        now = unfinished(place)
        # An engine that is busy may miss an answer; one that is gone has nothing left.
        left, missed = (left, missed + 1) if now is None else (now, 0)
    return None if missed >= MISSED_ANSWERS else left, time.monotonic() - begun


def words(left: int | None, waited: float) -> str:
    if left:
        return f"{left} requests still ran after {waited:.0f} s and were cut"
    return f"running requests ended within {waited:.0f} s" if left == 0 and waited >= 0.5 else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 60},
            "lease_run_id": {"type": "str"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        place = place_of(DockerApi(params["docker_socket"], timeout=10).inspect_container(params["container"]))
    except DockerError:
        place = None  # no engine, no container that could serve
    if place is None:
        module.exit_json(changed=False, left=None, waited=0.0, says="")
    run_id = params["lease_run_id"]
    left, waited = drain(place, 0 if module.check_mode else params["timeout"], lambda: renew_lease(params["state_dir"], run_id) if run_id else None)
    module.exit_json(changed=False, left=left, waited=round(waited, 1), says=words(left, waited))


if __name__ == "__main__":
    main()
