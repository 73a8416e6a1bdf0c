#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_info
short_description: Tell what the rank on this node is and, on rank 0, whether the API really answers
version_added: 0.1.0
description:
  - Reads the rank's container through the Docker Engine API, the files of the deployment, and the heartbeat of its service.
  - With O(api_port) it also asks rank 0's API for its health and for one bounded completion.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
options:
  state_dir:
    description: Directory of the deployment on this node.
    type: path
    required: true
  container:
    description: Name of the rank's container.
    type: str
    required: true
  api_port:
    description: Port of the API; give it on rank 0 only.
    type: int
  model:
    description: Name under which the model is served.
    type: str
    default: ""
  request:
    description: Body of the completion that proves the API, without the model.
    type: dict
    default: {}
  completion_timeout:
    description: Seconds that the completion may take.
    type: int
    default: 60
  open_paths:
    description: Whether an API with a key is asked which of its paths answer without it.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: See the rank
  sparkops.inference.rank_info:
    state_dir: /var/lib/sparkops/lab_tiny
    container: lab_tiny-rank0
"""

RETURN = r"""
rank:
  description: The rank.
  returned: always
  type: dict
  contains:
    container:
      description: Id, status, exit code, times, and the labels V(spec) and V(group) of the container; null when there is none.
      type: dict
    image_id:
      description: Id of the container's image.
      type: str
    recorded:
      description: What rank.json says of deployment, rank, spec, group, and address of the head; empty when there is none.
      type: dict
    heartbeat_age:
      description: Seconds since the service's last heartbeat; null when there was none.
      type: float
    progress:
      description: The service's view of the container's log; V(nccl) is what is wrong with the way that NCCL took.
      type: dict
    service:
      description:
        - What the rank service says. V(lacking) is what keeps it from a start, V(guard) the verdict of a memory guard that has acted.
        - V(keeper) is what rank 0's service does for the group, V(orphan) why a watched worker ended its rank when rank 0 was gone.
      type: dict
    memory:
      description: MemTotal and MemAvailable in KiB.
      type: dict
    last_good:
      description: What last_good.json says, without spec and plan; empty when nothing was proven yet.
      type: dict
    api:
      description: Health status, proof, and open paths of the API, null when it was not asked.
      type: dict
"""

import dataclasses
import os
import socket
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import RUNNING, Proof, call, metrics, open_paths, option_of, own_address, prove
from ansible_collections.sparkops.inference.plugins.module_utils._node import parse_meminfo
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import heartbeat_path, read_api_key, read_json, summary

ENGINE_SECONDS = 10
GENERATED = "vllm:generation_tokens_total"


def inspect(module: AnsibleModule) -> dict[str, t.Any] | None:
    """The container's document; None when there is none, or no engine to ask (then nothing can run). An engine that is too busy to answer,
    or that answers with an error, says nothing: a group that serves must not be taken for one that is absent."""
    api = DockerApi(module.params["docker_socket"], timeout=ENGINE_SECONDS)
    try:
        return api.inspect_container(module.params["container"])
    except DockerError as exc:
        if exc.state in ("not_installed", "not_running") and not isinstance(exc.__cause__, socket.timeout):
            return None
        return module.fail_json(msg=f"The containers of this node cannot be seen: {exc}")


def judged(proof: Proof, before: t.Mapping[str, float], after: t.Mapping[str, float], asked: int) -> Proof:
    """The proof; of an engine that had no time for it while it wrote more tokens than we asked for, that it is busy: its queue is long, and a
    group that works for others is none to replace."""
    came = after.get(GENERATED, 0.0) - before.get(GENERATED, 0.0)
    if proof.verdict != "no_answer" or not asked or came <= asked or not after.get(RUNNING):
        return proof
    detail = f"no answer to ours within {proof.seconds:.0f} s, while {came:.0f} tokens came for {after[RUNNING]:.0f} running requests"
    return dataclasses.replace(proof, ok=True, verdict="busy", detail=detail)


def ask_api(params: t.Mapping[str, t.Any], address: str) -> dict[str, t.Any]:
    key = read_api_key(params["state_dir"])
    health = call(address, params["api_port"], "GET", "/health", timeout=5)
    if health.status != 200:
        return {"health": health.status, "proof": None}
    before = metrics(call(address, params["api_port"], "GET", "/metrics", timeout=5))
    proof = prove(address, params["api_port"], params["model"], params["request"], key=key, timeout=params["completion_timeout"])
    if not proof.ok:
        after = metrics(call(address, params["api_port"], "GET", "/metrics", timeout=5))
        proof = judged(proof, before, after, int(params["request"].get("max_tokens") or 0))
    unguarded = open_paths(address, params["api_port"]) if key and params["open_paths"] else []
    return {"health": health.status, "proof": dataclasses.asdict(proof), "open_paths": unguarded}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "container": {"type": "str", "required": True},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "api_port": {"type": "int"},
            "model": {"type": "str", "default": ""},
            "request": {"type": "dict", "default": {}},
            "completion_timeout": {"type": "int", "default": 60},
            "open_paths": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    state_dir = module.params["state_dir"]
    document = inspect(module)
    recorded = read_json(os.path.join(state_dir, "rank.json"), {})
    last_good = read_json(os.path.join(state_dir, "last_good.json"), {})
    beat = read_json(heartbeat_path(state_dir), {})
    with open("/proc/meminfo", encoding="utf-8") as stream:
        meminfo = parse_meminfo(stream.read())
    module.exit_json(
        changed=False,
        rank={
            "container": summary(document),
            "image_id": (document or {}).get("Image", ""),
            "recorded": {name: recorded.get(name) for name in ("deployment", "rank", "spec", "group", "head_address") if name in recorded},
            "heartbeat_age": round(time.time() - beat["time"], 1) if "time" in beat else None,
            "progress": beat.get("progress", {}),
            "service": {
                "lacking": beat.get("lacking", []),
                "guard": ((beat.get("guard") or {}).get("tripped") or {}).get("reason", ""),
                "keeper": beat.get("keeper", ""),
                "orphan": beat.get("orphan", ""),
            },
            "memory": {"total_kib": meminfo.get("MemTotal"), "available_kib": meminfo.get("MemAvailable")},
            "last_good": {name: value for name, value in last_good.items() if name not in ("spec", "plan")},
            # A dead head has no API; whoever holds the port then is not ours to ask.
            "api": ask_api(module.params, own_address(option_of(document, "--host")))
            if module.params["api_port"] and document and document["State"]["Running"]
            else None,
        },
    )


if __name__ == "__main__":
    main()
