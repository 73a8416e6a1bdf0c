#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: discover_info
short_description: Find the other machines of a group from one of them
version_added: 0.1.0
description:
  - Asks by mDNS on every interface and looks for neighbours behind the fabric interfaces, then tells by their ssh host keys which addresses are one machine.
  - Sends a small packet to each address of the fabric's networks (of at most 254 addresses); changes nothing.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
options:
  fabric:
    description: What M(sparkops.inference.fabric_info) returned for this node.
    type: dict
    required: true
  name:
    description: Inventory name of this node.
    type: str
    required: true
  address:
    description: Address at which the controller reaches this node.
    type: str
    required: true
  user:
    description: Account for the inventory. Empty leaves it out.
    type: str
    default: ""
  seconds:
    description: How long answers are waited for.
    type: float
    default: 2.0
seealso:
  - module: sparkops.inference.fabric_info
"""

EXAMPLES = r"""
- name: Read the links of this node
  sparkops.inference.fabric_info:
  register: links

- name: Find the others
  sparkops.inference.discover_info:
    fabric: "{{ links.fabric }}"
    name: spark-1
    address: 192.0.2.21
  register: found
"""

RETURN = r"""
machines:
  description: The other machines, those on the fabric first.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Name in mDNS; empty when it says none.
      returned: always
      type: str
    management:
      description: Address outside the fabric; empty when none was seen.
      returned: always
      type: str
    fabric:
      description: Address behind each fabric interface of this node; empty where the machine answers without IPv4 address.
      returned: always
      type: dict
inventory:
  description: An inventory of this node and the machines on its fabric, for review.
  returned: always
  type: str
notices:
  description: What could not be asked.
  returned: always
  type: list
  elements: str
"""

import contextlib
import json
import select
import socket
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _discover
from ansible_collections.sparkops.inference.plugins.module_utils._discover import Sighting

DISCARD_PORT = 9
KEYSCAN_SECONDS = 3
ADDRESSES_PER_SCAN = 64

Addresses = t.Sequence[t.Tuple[str, str, int]]  # interface, address, prefix


def multicast_socket(address: str) -> socket.socket:
    asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
    asker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    asker.bind((address, 0))
    return asker


def ask_mdns(own: Addresses, seconds: float) -> list[Sighting]:
    """Hosts that say by mDNS that they have ssh, on each interface with an address."""
    query = _discover.mdns_query(_discover.SERVICES, _discover.TYPE_PTR)
    packets: dict[str, list[bytes]] = {}
    with contextlib.ExitStack() as stack:
        askers: dict[socket.socket, str] = {}
        for interface, address, dummy in own:
            with contextlib.suppress(OSError):  # no multicast there
                asker = stack.enter_context(multicast_socket(address))
                asker.sendto(query, (_discover.MDNS_GROUP, _discover.MDNS_PORT))
                askers[asker] = interface
        end = time.monotonic() + seconds
        while askers and time.monotonic() < end:
            for asker in select.select(list(askers), [], [], max(0.0, end - time.monotonic()))[0]:
                with contextlib.suppress(OSError):
                    packets.setdefault(askers[asker], []).append(asker.recv(65535))
    return [
        Sighting(address, interface, name, "")
        for interface, answers in packets.items()
        for name, addresses in sorted(_discover.mdns_hosts(answers).items())
        for address in sorted(addresses)
    ]


def stir(own: Addresses) -> None:
    """Let the kernel ask for the hardware address of everyone: a packet to a port where nobody listens is enough."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for dummy, address, prefix in own:
            for other in _discover.sweep_addresses(address, prefix):
                with contextlib.suppress(OSError):
                    sender.sendto(b"\0", (other, DISCARD_PORT))


def neighbours(module: AnsibleModule, interface: str) -> list[str]:
    code, out, dummy = module.run_command(["ip", "-json", "-4", "neighbour", "show", "dev", interface])
    try:
        return _discover.answering_neighbours(json.loads(out or "[]")) if code == 0 else []
    except ValueError:
        return []


def link_local_neighbours(module: AnsibleModule, interface: str) -> list[str]:
    """Machines on a link that has no IPv4 address yet, as out of the box."""
    if module.get_bin_path("ping") is None:
        return []
    command = ["ping", "-6", "-n", "-c", "2", "-i", "0.3", "-W", "1", "-I", interface, "ff02::1"]
    return _discover.link_local_replies(module.run_command(command, environ_update={"LC_ALL": "C"})[1])


def own_link_locals() -> list[str]:
    """Own IPv6 addresses with their interface: a ping to all nodes of a link is answered by the asking one, too."""
    found = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as stream:
        for line in stream:
            words = line.split()
            found.append(f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))}%{words[-1]}")
    return found


def host_keys(module: AnsibleModule, addresses: t.Sequence[str]) -> dict[str, str]:
    """Host key by address, of one kind so that those of a machine can be compared."""
    found: dict[str, str] = {}
    for place in range(0, len(addresses), ADDRESSES_PER_SCAN):
        some = addresses[place : place + ADDRESSES_PER_SCAN]
        dummy, out, dummy2 = module.run_command(["ssh-keyscan", "-T", str(KEYSCAN_SECONDS), "-t", "ed25519", *some])
        found.update(_discover.parse_keyscan(out))
    return found


def look_around(module: AnsibleModule) -> dict[str, t.Any]:
    facts, notices = module.params["fabric"], []
    fabric = _discover.fabric_interfaces(facts)
    wired = [entry for entry in facts["interfaces"] if entry["kind"] in ("ethernet", "wifi") and entry["carrier"]]
    own = [(entry["name"], address["address"], int(address["prefix"])) for entry in wired for address in entry["addresses"]]
    on_fabric = [entry for entry in own if entry[0] in fabric]
    notices += [
        f"{interface} has the network {address}/{prefix}, too wide to be searched address by address: only mDNS was asked there"
        for interface, address, prefix in on_fabric
        if not _discover.sweep_addresses(address, prefix)
    ]
    stir(on_fabric)
    seen = ask_mdns(own, module.params["seconds"])  # the neighbours answer meanwhile
    for interface in fabric:
        seen += [Sighting(address, interface, "", "") for address in neighbours(module, interface)]
        links = link_local_neighbours(module, interface)
        seen += [Sighting(f"{address}%{interface}", interface, "", "") for address in links]
    own_addresses = [*(address for dummy, address, dummy2 in own), *own_link_locals()]
    keys: dict[str, str] = {}
    if module.get_bin_path("ssh-keyscan") is None:
        notices.append("ssh-keyscan is not installed on this node: addresses of one machine are only put together by its mDNS name (package openssh-client)")
    else:
        keys = host_keys(module, sorted({entry.address for entry in seen} | set(own_addresses[:1])))
    seen = [entry._replace(key=keys.get(entry.address, "")) for entry in seen]
    own_key = next((keys[address] for address in own_addresses if address in keys), "")
    found = _discover.machines(seen, fabric, facts["default_interface"], own_addresses, own_key)
    seed = {name: module.params[name] for name in ("name", "address", "user")}
    return {"machines": [one.as_dict() for one in found], "inventory": _discover.inventory(seed, found, facts), "notices": notices}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "fabric": {"type": "dict", "required": True},
            "name": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "user": {"type": "str", "default": ""},
            "seconds": {"type": "float", "default": 2.0},
        },
        supports_check_mode=True,
    )
    results = look_around(module)
    for notice in results["notices"]:
        module.warn(f"{module.params['name']}: {notice}")
    module.exit_json(changed=False, **results)


if __name__ == "__main__":
    main()
