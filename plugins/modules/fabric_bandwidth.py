#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_bandwidth
short_description: Measure the RDMA bandwidth and latency of the rails between ranks
version_added: 0.1.0
description:
  - Runs C(ib_write_bw) of perftest for three seconds and C(ib_write_lat) on each rail, one after the other.
  - Of two ranks the earlier one serves and the later one measures.
  - It needs the package perftest on the nodes, and half a MiB of memory for each rail, less where little is available.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: none
    description: In check mode nothing is measured.
  diff_mode:
    support: N/A
    description: Nothing is changed.
  idempotent:
    support: full
    description: Nothing is changed.
options:
  state:
    description: V(serving) on every rank but the last, V(measured) after that on every rank but the first, one at a time.
    type: str
    choices: [serving, measured]
    required: true
  node:
    description: Inventory name of this node.
    type: str
    required: true
  nodes:
    description: All ranks in order, the head first.
    type: list
    elements: str
    required: true
  fabric:
    description: The fact C(spark_fabric) of this node.
    type: dict
    required: true
  floor:
    description: Gb/s below which a rail is refused. V(0) refuses nothing.
    type: float
    default: 0
  available_kib:
    description: MemAvailable of all ranks. The least of them limits the size of the messages, which must be the same on both sides.
    type: list
    elements: int
    default: []
  sys_root:
    description: Root of the sysfs tree, for tests.
    type: path
    default: /sys
"""

EXAMPLES = r"""
- name: Measure from a worker
  sparkops.inference.fabric_bandwidth:
    state: measured
    node: spark-2
    nodes: [spark-1, spark-2]
    fabric: "{{ spark_fabric }}"
    floor: 80
"""

RETURN = r"""
rails:
  description: Device, peer, Gb/s, verdict (healthy, half, degraded, or measured), and microseconds of one write on each rail.
  returned: with O(state=measured)
  type: list
  elements: dict
notices:
  description: Rails that are slower than they should be, with advice.
  returned: with O(state=measured)
  type: list
  elements: str
"""

import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _bandwidth
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail
from ansible_collections.sparkops.inference.plugins.module_utils._sysfs import Tree


def gid_index(module: AnsibleModule, rail: t.Mapping[str, t.Any]) -> int:
    usable = module.params["fabric"]["gid"]["usable"].get(rail["hca"]) or []
    if not usable:
        fail(module, [
            Refusal(
                "fabric.bandwidth_gid", module.params["node"], f"GID of {rail['hca']}", "no usable one", "a RoCE v2 GID of an own IPv4 address",
                "give its interface an address, or leave the measurement out (fabric_bandwidth_floor: 0)",
            )
        ])
    return int(usable[0])


def start(command: t.Sequence[str]) -> None:
    """Leave a command running that ends by itself, with nothing of ours open."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.closerange(3, 4096)
        os.execvp(command[0], list(command))
    finally:
        os._exit(127)


def serve(module: AnsibleModule) -> dict[str, t.Any]:
    node, nodes, rails = module.params["node"], module.params["nodes"], module.params["fabric"]["rails"]
    size, turns = _bandwidth.message_bytes(module.params["available_kib"]), _bandwidth.turns(len(rails), len(nodes))
    for rank in range(nodes.index(node) + 1, len(nodes)):
        for port, rail in _bandwidth.numbered(rails, nodes[rank], True, rank):
            index = gid_index(module, rail)
            start(_bandwidth.bandwidth_command(rail, index, port, size, turns))
            start(_bandwidth.latency_command(rail, index, port, turns))
    return {}


def run_client(module: AnsibleModule, command: t.Sequence[str]) -> tuple[int, str, str]:
    """The server was started a moment ago and may not listen yet."""
    for dummy in range(3):
        code, out, err = module.run_command(list(command))
        if code == 0 or "connect" not in (out + err).lower():
            break
        time.sleep(1)
    return code, out, err


def measure(module: AnsibleModule) -> dict[str, t.Any]:
    node, nodes, rails = module.params["node"], module.params["nodes"], module.params["fabric"]["rails"]
    found, refusals, notices = [], [], []
    size, turns, rank = _bandwidth.message_bytes(module.params["available_kib"]), _bandwidth.turns(len(rails), len(nodes)), nodes.index(node)
    for port, rail in (entry for earlier in nodes[:rank] for entry in _bandwidth.numbered(rails, earlier, False, rank)):
        index, peer = gid_index(module, rail), rail["peer_address"]
        code, out, err = run_client(module, _bandwidth.bandwidth_command(rail, index, port, size, turns, peer))
        gbits = _bandwidth.parse(out) if code == 0 else None
        if gbits is None:
            thing = f"ib_write_bw over {rail['hca']} to {rail['peer']}"
            end = f"exit code {code}, {(err or out).strip()[-200:]}"
            refusals.append(Refusal("fabric.bandwidth_failed", node, thing, end, "a figure", "see the kernel's log of both nodes"))
            continue
        word = _bandwidth.verdict(gbits, Tree(module.params["sys_root"]).text("class/infiniband", rail["hca"].partition(":")[0], "hca_type") or "")
        # Only a figure to look at: nothing is judged by it, so a failure is none of the rail.
        latency = _bandwidth.parse_latency(run_client(module, _bandwidth.latency_command(rail, index, port, turns, peer))[1])
        found.append({"hca": rail["hca"], "peer": rail["peer"], "gbits": gbits, "verdict": word, "latency_us": latency})
        refusal = _bandwidth.judge(node, rail, gbits, word, module.params["floor"])
        refusals += [refusal] if refusal else []
        if word in _bandwidth.ADVICE:
            notices.append(f"{rail['hca']} moves {gbits} Gb/s to {rail['peer']}: {word}; {_bandwidth.ADVICE[word]}")
    for notice in notices:
        module.warn(f"{node}: {notice}")
    if refusals:
        fail(module, refusals, rails=found, notices=notices)
    return {"rails": found, "notices": notices}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["serving", "measured"], "required": True},
            "node": {"type": "str", "required": True},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "fabric": {"type": "dict", "required": True},
            "floor": {"type": "float", "default": 0},
            "available_kib": {"type": "list", "elements": "int", "default": []},
            "sys_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=False,
    )
    if module.get_bin_path("ib_write_bw") is None:
        node = module.params["node"]
        fail(module, [Refusal("fabric.bandwidth_tool", node, "ib_write_bw", "not installed", "perftest on every node", "install the package perftest")])
    module.exit_json(changed=False, **(serve(module) if module.params["state"] == "serving" else measure(module)))


if __name__ == "__main__":
    main()
