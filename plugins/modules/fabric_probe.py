#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_probe
short_description: Test the rails of a node and the port where the ranks meet
version_added: 0.1.0
description:
  - On the head, O(state=listening) opens the port where the ranks will meet for a short while, and O(state=stopped) closes it.
  - On every node, O(state=probed) sends full-size unfragmented packets over each rail, and connects to that port if O(meeting) is given.
  - All that is found wrong on a node is one failure.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
options:
  state:
    description: What to do on this node.
    type: str
    choices: [listening, probed, stopped]
    required: true
  node:
    description: Inventory name of this node, for messages.
    type: str
    required: true
  address:
    description: Fabric address of this node.
    type: str
    required: true
  port:
    description: Port to listen on with O(state=listening) and O(state=stopped).
    type: int
  seconds:
    description: After this time the listener ends by itself.
    type: int
    default: 60
  rails:
    description: Rails as in the fact C(spark_fabric) to test with O(state=probed).
    type: list
    elements: dict
    default: []
  meeting:
    description: The head's C(name), C(address), and C(port) to connect to with O(state=probed).
    type: dict
"""

EXAMPLES = r"""
- name: Open the meeting port on the head
  sparkops.inference.fabric_probe:
    state: listening
    node: spark-1
    address: 198.51.100.11
    port: 29521

- name: Test the rail and the port from a worker
  sparkops.inference.fabric_probe:
    state: probed
    node: spark-2
    address: 198.51.100.12
    rails:
      - interface: enp1s0f0np0
        mtu: 9000
        peer: spark-1
        peer_interface: enp1s0f1np1
        peer_address: 198.51.100.11
    meeting:
      name: spark-1
      address: 198.51.100.11
      port: 29521
"""

RETURN = r"""
rails:
  description: Interface and address of each rail, and whether full-size and small packets pass.
  returned: with O(state=probed)
  type: list
  elements: dict
meeting:
  description: State of the connection to the head, and seconds that its clock is certainly ahead of this node's.
  returned: with O(state=probed) and O(meeting)
  type: dict
notices:
  description: What is odd without being a reason to stop.
  returned: with O(state=probed)
  type: list
  elements: str
"""

import os
import socket
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._probe import (
    ask,
    judge_meeting,
    judge_rail,
    meeting_notices,
    open_listener,
    ping_command,
    serve,
)
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail


def serve_in_background(listener: socket.socket, seconds: int) -> None:
    """Leave a process that answers on the socket and holds nothing else of ours, so that the ssh session can end."""
    if os.fork():
        listener.close()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    kept = os.dup2(listener.fileno(), 3)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.closerange(4, 4096)
    try:
        serve(socket.socket(fileno=kept), seconds)
    finally:
        os._exit(0)


def listen(module: AnsibleModule) -> dict[str, t.Any]:
    address, port = module.params["address"], module.params["port"]
    try:
        listener = open_listener(address, port)
    except OSError as exc:
        fail(module, [
            Refusal(
                "fabric.meeting_held", module.params["node"], f"port {port} on {address}", exc.strerror or str(exc), "a port that is free",
                f"find what holds it (ss -ltnp 'sport = :{port}' as root on this node) and stop it, or choose another serve_rendezvous_port",
            )
        ])
    serve_in_background(listener, module.params["seconds"])
    return {}


def probe_rail(module: AnsibleModule, rail: t.Mapping[str, t.Any]) -> tuple[dict[str, t.Any], Refusal | None]:
    """Ping with full-size packets; only if that fails also with small ones, to tell the causes apart."""

    def ping(mtu: int | None) -> tuple[bool, str]:
        code, out, err = module.run_command(ping_command(rail["interface"], rail["peer_address"], mtu), environ_update={"LC_ALL": "C"})
        lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
        return code == 0, lines[-1] if lines else f"exit code {code}"

    large, detail = ping(int(rail["mtu"])) if rail.get("mtu") else (False, "MTU unknown")
    small = large or ping(None)[0]
    found = {"interface": rail["interface"], "peer": rail["peer"], "peer_address": rail["peer_address"], "full_size": large, "small": small}
    return found, judge_rail(module.params["node"], rail, large, small, detail)


def probe_rails(module: AnsibleModule) -> tuple[list[dict[str, t.Any]], list[Refusal], list[str]]:
    if module.params["rails"] and module.get_bin_path("ping") is None:
        return [], [], ["ping is not installed: MTU and rails were not tested (package iputils-ping)"]
    results = [probe_rail(module, rail) for rail in module.params["rails"]]
    return [found for found, dummy in results], [refusal for dummy, refusal in results if refusal], []


def probe(module: AnsibleModule) -> dict[str, t.Any]:
    rails, refusals, notices = probe_rails(module)
    results: dict[str, t.Any] = {"rails": rails, "notices": notices}
    meeting = module.params["meeting"]
    if meeting:
        name, address, port = meeting["name"], meeting["address"], int(meeting["port"])
        answer = ask(address, port, source=module.params["address"])
        pings = any(rail["small"] for rail in rails if rail["peer_address"] == address)
        refusals += judge_meeting(module.params["node"], name, address, port, answer, pings)
        notices += meeting_notices(name, answer)
        results["meeting"] = {"state": answer.state, "detail": answer.detail, "clock": answer.clock}
    for notice in notices:
        module.warn(f"{module.params['node']}: {notice}")
    if refusals:
        fail(module, refusals, **results)
    return results


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listening", "probed", "stopped"], "required": True},
            "node": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int"},
            "seconds": {"type": "int", "default": 60},
            "rails": {"type": "list", "elements": "dict", "default": []},
            "meeting": {"type": "dict"},
        },
        required_if=[("state", "listening", ["port"]), ("state", "stopped", ["port"])],
        supports_check_mode=True,
    )
    results: dict[str, t.Any] = {}
    if module.params["state"] == "listening":
        results = listen(module)
    elif module.params["state"] == "stopped":
        ask(module.params["address"], module.params["port"], "stop")
    else:
        results = probe(module)
    module.exit_json(changed=False, **results)


if __name__ == "__main__":
    main()
