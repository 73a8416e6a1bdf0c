# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""From what one node sees (mDNS answers, neighbours, host keys) to machines, and to an inventory for review.

The same machine is seen under several addresses. Its ssh host key tells which belong together; where none was read, its mDNS name does.
Pure: the module discover_info does the asking.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import struct
import typing as t

MDNS_GROUP, MDNS_PORT = "224.0.0.251", 5353
SERVICES = ("_ssh._tcp.local", "_workstation._tcp.local")
TYPE_A, TYPE_PTR, TYPE_SRV = 1, 12, 33
CLASS_IN = 1
MAX_POINTERS = 32  # a name of more parts than that is a loop
SMALLEST_PREFIX = 24  # a wider network is not searched address by address
HOST_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$")
PING_REPLY = re.compile(r"\bfrom (fe80:[0-9a-f:]+)(?:%\S+?)?:", re.MULTILINE)

Reading = t.Mapping[str, t.Any]


class Sighting(t.NamedTuple):
    """An address that answered in some way, and the interface behind which it is."""

    address: str
    interface: str
    name: str  # of mDNS, without .local
    key: str  # ssh host key, empty where no ssh answers


# --- mDNS ------------------------------------------------------------------------------------------------------


def encode_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label for label in name.encode("ascii").split(b".")) + b"\0"


def mdns_query(names: t.Sequence[str], kind: int) -> bytes:
    """A one-shot query: sent from a port other than 5353, it is answered to that port alone (RFC 6762, 6.7)."""
    return struct.pack("!6H", 0, 0, len(names), 0, 0, 0) + b"".join(encode_name(name) + struct.pack("!2H", kind, CLASS_IN) for name in names)


def decode_name(packet: bytes, place: int) -> tuple[str, int]:
    """A name and the place after it. Raises ValueError on what is no name."""
    labels: list[str] = []
    after, jumps = 0, 0
    while True:
        if place >= len(packet):
            raise ValueError("the packet ends within a name")
        length = packet[place]
        if length >= 0xC0:
            if place + 1 >= len(packet) or jumps >= MAX_POINTERS:
                raise ValueError("a bad pointer")
            after = after or place + 2
            place = (length & 0x3F) << 8 | packet[place + 1]
            jumps += 1
        elif length:
            label = packet[place + 1 : place + 1 + length]
            if len(label) < length or length > 63:
                raise ValueError("a bad label")
            labels.append(label.decode("utf-8", "replace"))
            place += 1 + length
        else:
            return ".".join(labels), after or place + 1


def mdns_records(packet: bytes) -> list[tuple[str, int, str]]:
    """(name, type, value) of the A, PTR, and SRV records of an answer, as far as it can be read."""
    found: list[tuple[str, int, str]] = []
    try:
        dummy, dummy2, questions, *counts = struct.unpack_from("!6H", packet)
        place = 12
        for dummy in range(questions):
            place = decode_name(packet, place)[1] + 4
        for dummy in range(sum(counts)):
            name, place = decode_name(packet, place)
            kind, dummy, dummy2, length = struct.unpack_from("!2HIH", packet, place)
            place += 10
            if kind == TYPE_A and length == 4 and place + 4 <= len(packet):
                found.append((name, kind, str(ipaddress.IPv4Address(packet[place : place + 4]))))
            elif kind == TYPE_PTR:
                found.append((name, kind, decode_name(packet, place)[0]))
            elif kind == TYPE_SRV:
                found.append((name, kind, decode_name(packet, place + 6)[0]))
            place += length
    except (struct.error, ValueError):
        pass  # what was read so far is still true
    return found


def mdns_hosts(packets: t.Iterable[bytes]) -> dict[str, set[str]]:
    """Addresses by host name, without .local. A host of which only the service is told has none."""
    hosts: dict[str, set[str]] = {}
    for packet in packets:
        for name, kind, value in mdns_records(packet):
            host = (name if kind == TYPE_A else value if kind == TYPE_SRV else "").rstrip(".")
            short = host[: -len(".local")] if host.endswith(".local") else ""
            if HOST_NAME.match(short):
                hosts.setdefault(short, set()).update([value] if kind == TYPE_A else [])
    return hosts


# --- neighbours ------------------------------------------------------------------------------------------------


def fabric_interfaces(facts: Reading) -> list[str]:
    """Interfaces behind which other ranks may be: those of RDMA ports with a link, else all wired ones but that of the default route."""
    by_name = {interface["name"]: interface for interface in facts["interfaces"]}
    rdma = [port["interface"] for port in facts["ports"] if port["state"] == "ACTIVE" and by_name.get(port["interface"], {}).get("carrier")]
    if rdma:
        return list(dict.fromkeys(rdma))
    return [name for name, entry in by_name.items() if entry["kind"] == "ethernet" and entry["carrier"] and name != facts["default_interface"]]


def sweep_addresses(address: str, prefix: int) -> list[str]:
    """All other addresses of a network that is small enough to be asked one by one."""
    if prefix < SMALLEST_PREFIX:
        return []
    return [str(host) for host in ipaddress.IPv4Interface(f"{address}/{prefix}").network.hosts() if str(host) != address]


def answering_neighbours(entries: t.Iterable[Reading]) -> list[str]:
    """Addresses of ``ip -json neighbour`` behind which there is a machine."""
    silent = {"FAILED", "INCOMPLETE", "NOARP"}
    return [entry["dst"] for entry in entries if entry.get("lladdr") and entry.get("dst") and not silent & set(entry.get("state", []))]


def link_local_replies(text: str) -> list[str]:
    """Link-local addresses that answered a ping to all nodes of a link."""
    return list(dict.fromkeys(PING_REPLY.findall(text)))


def parse_keyscan(text: str) -> dict[str, str]:
    """Host key by address, from what ``ssh-keyscan`` prints; one kind of key per address, the first in order of the alphabet."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and not line.startswith("#"):
            found.setdefault(words[0].strip("[]"), []).append(f"{words[1]} {words[2]}")
    return {address: min(keys) for address, keys in found.items()}


# --- machines --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Found:
    """One other machine. ``fabric`` is interface of the asking node -> address there, empty where it has no IPv4 address."""

    name: str = ""
    management: str = ""
    fabric: dict[str, str] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, t.Any]:
        return dataclasses.asdict(self)


def is_ipv4(address: str) -> bool:
    return ":" not in address


def group_sightings(sightings: t.Sequence[Sighting]) -> list[list[Sighting]]:
    """Sightings of one machine together: those that share a key, a name, or an address."""
    groups: list[list[Sighting]] = []
    for sighting in sightings:
        marks = marks_of(sighting)
        same = [group for group in groups if any(marks & marks_of(other) for other in group)]
        groups = [group for group in groups if group not in same]
        groups.append([*(other for group in same for other in group), sighting])
    return groups


def marks_of(sighting: Sighting) -> set[str]:
    return {f"address {sighting.address}", f"key {sighting.key}" if sighting.key else "", f"name {sighting.name}" if sighting.name else ""} - {""}


def machines(sightings: t.Sequence[Sighting], fabric: t.Sequence[str], default: str, own: t.Collection[str], own_key: str = "") -> list[Found]:
    """Other machines, those on the fabric first. ``own`` are addresses of the asking node, ``default`` its interface to the outside."""
    found = []
    for group in group_sightings(sightings):
        if any(sighting.address in own or (own_key and sighting.key == own_key) for sighting in group):
            continue
        found.append(one_machine(group, fabric, default))
    return sorted(found, key=lambda one: (not one.fabric, one.name, ipaddress.ip_address(one.management or "0.0.0.0").packed))


def one_machine(group: t.Sequence[Sighting], fabric: t.Sequence[str], default: str) -> Found:
    there: dict[str, str] = {}
    for name in fabric:
        behind = sorted(sighting.address for sighting in group if sighting.interface == name)
        if behind:
            there[name] = next((address for address in behind if is_ipv4(address)), "")
    outside = sorted(
        (sighting for sighting in group if sighting.interface not in fabric and is_ipv4(sighting.address)),
        key=lambda sighting: (sighting.interface != default, ipaddress.IPv4Address(sighting.address)),
    )
    names = sorted(sighting.name for sighting in group if sighting.name)
    return Found(names[0] if names else "", outside[0].address if outside else "", there)


# --- the inventory ---------------------------------------------------------------------------------------------


def fabric_choice(found: t.Sequence[Found], fabric: t.Sequence[str]) -> str:
    """The interface over which most of the machines have an address; of equals the first, which is the first half of a port."""
    counts = {name: sum(1 for one in found if one.fabric.get(name)) for name in fabric}
    best = max(counts.values(), default=0)
    return next((name for name in fabric if best and counts[name] == best), "")


def inventory(seed: Reading, found: t.Sequence[Found], facts: Reading) -> str:
    """YAML with both addresses of each machine on the fabric, and a remark wherever something is missing or guessed.

    ``seed`` has name, address, and user of the node that was asked, as the controller knows them.
    """
    fabric = fabric_interfaces(facts)
    chosen = fabric_choice(found, fabric)
    own = next((entry["addresses"] for entry in facts["interfaces"] if entry["name"] == chosen), [])
    peers = [one for one in found if one.fabric]
    network = [ipaddress.IPv4Interface(f"{entry['address']}/{entry['prefix']}") for entry in own]
    met = [entry for entry in network if any(ipaddress.IPv4Address(one.fabric[chosen]) in entry.network for one in peers if one.fabric.get(chosen))]
    lines = [
        "---", "# Written by the play discover of sparkops.inference, for review: the order of serve_nodes, accounts, and every remark below.",
        "sparks:", "  hosts:",
    ]  # fmt: skip
    names = unique_names([seed["name"], *(one.name for one in peers)])
    lines += host_lines(names[0], seed["address"], seed["user"], str((met or network)[0].ip) if network else "", f"{chosen} of this machine" if chosen else "")
    for name, one in zip(names[1:], peers):
        links = ", ".join(f"{interface} ({address or 'no IPv4 address there'})" for interface, address in one.fabric.items())
        lines += host_lines(name, one.management, seed["user"], one.fabric.get(chosen, ""), f"seen from {names[0]} over {links}")
    lines += ["  vars:", f"    serve_nodes: [{', '.join(names)}]"]
    if not peers:
        lines.append(f"# No machine was found on the fabric ({', '.join(fabric) or 'no interface with a link'}): is the cable in, is the other machine on?")
    lines += [f"# Not on the fabric, so left out: {one.name or 'a machine'} at {one.management}" for one in found if not one.fabric]
    return "\n".join(lines) + "\n"


def unique_names(wanted: t.Sequence[str]) -> list[str]:
    """Inventory names: what mDNS says, else spark-N; never one twice."""
    names: list[str] = []
    for place, name in enumerate(wanted, start=1):
        good = name if name and name not in names else f"spark-{place}"
        while good in names:
            good += "x"
        names.append(good)
    return names


def host_lines(name: str, management: str, user: str, fabric: str, remark: str) -> list[str]:
    lines = [f"    {name}:" + (f"  # {remark}" if remark else "")]
    lines.append(f"      ansible_host: {management}" if management else "      # ansible_host: not found; the address at which you reach this machine")
    if user:
        lines.append(f"      ansible_user: {user}")
    lines.append(f"      fabric_address: {fabric}" if fabric else "      # fabric_address: none yet; give this machine's fabric interface an address")
    return lines
