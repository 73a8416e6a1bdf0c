# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The fabric plan of a group: which interface, RDMA ports, and GIDs each rank uses, or why that cannot be.

Pure: the facts of all nodes (module fabric_info), their fabric addresses, and the user's choices go in; per node a choice
with its rails and notices, or refusals, come out. One path for any number of ranks, with and without RDMA.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _gid, _nccl_selector
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

HALF_COST = "expect about half the bandwidth (12.8 instead of 20.9 GB/s was measured between two Sparks)"
FULL_SPEED = 200000  # Mb/s that each half of a GB10's QSFP port reports on a 200G link
FULL_WIDTH = 4
FULL_WIDTH_SPEED = "32.0 GT/s"
FULL_RDMA_MTU = 4096
UNFIT_KINDS = {"loopback": "the loopback interface", "bridge": "a bridge", "vpn": "a VPN", "wifi": "Wi-Fi"}

Facts = t.Mapping[str, t.Any]
Record = t.Dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the user decided for one node. Empty means: decide for me."""

    interface: str = ""
    hcas: str = ""
    gid_policy: str = "unpinned"  # unpinned: NCCL chooses; auto: found again at each start; index: validated, used as it is
    gid_index: int | None = None


class Topology(t.NamedTuple):
    """A shape of cabling. ``direct`` cables tie half to half; a switch does not."""

    name: str
    ranks: t.Tuple[int, int]
    shared: bool  # every rail's network holds all ranks
    cables: t.Tuple[int, int]  # between two linked ranks
    complete: bool  # every two ranks are linked
    direct: bool


# The first row that fits what was found is the topology, or the one that the user names if it fits too: two ranks look alike over cables
# and behind a switch. Ranks beyond 64 are beyond any switch made for these machines.
TOPOLOGIES = (
    Topology("pair", (2, 2), True, (1, 1), True, True),
    Topology("dual_rail", (2, 2), True, (2, 8), True, True),
    Topology("switch", (2, 64), True, (1, 8), True, False),
    Topology("ring", (3, 3), False, (1, 1), True, True),
    Topology("open_ring", (4, 64), False, (1, 1), False, True),
)


class Rail(t.NamedTuple):
    """One path between two ranks, seen from one of them."""

    interface: str
    address: str
    prefix: int
    mtu: int | None
    hca: str
    link: str
    half: int
    peer: str
    peer_interface: str
    peer_address: str
    peer_mtu: int | None
    peer_hca: str
    peer_link: str
    peer_half: int

    def as_dict(self) -> Record:
        names = ("interface", "address", "prefix", "mtu", "hca", "peer", "peer_interface", "peer_address", "peer_mtu", "peer_hca")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass
class Node:
    """One rank while it is planned."""

    name: str
    facts: Facts
    address: str
    choice: Choice
    home: Record | None = None
    ports: list[Record] = dataclasses.field(default_factory=list)
    rails: list[Rail] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)

    def refuse(self, id: str, thing: str, found: str, wanted: str, next_step: str) -> None:
        self.refusals.append(Refusal(id, self.name, thing, found, wanted, next_step))

    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def interface(self, name: str) -> Record | None:
        return next((entry for entry in self.facts["interfaces"] if entry["name"] == name), None)

    @property
    def all_ports(self) -> list[Record]:
        return list(self.facts["ports"])


@dataclasses.dataclass(frozen=True)
class FabricPlan:
    nodes: dict[str, Record]
    topology: Record
    refusals: list[Refusal]


# --- addresses -------------------------------------------------------------------------------------------------


def port_name(port: Facts) -> str:
    return port["hca"] if port["port"] == 1 else f"{port['hca']}:{port['port']}"


def port_addresses(node: Node, port: Facts) -> list[Record]:
    return [entry for name in port["interfaces"] for entry in (node.interface(name) or {"addresses": []})["addresses"]]


def network_of(entry: Facts) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Interface(f"{entry['address']}/{entry['prefix']}").network


def meet(one: Facts, other: Facts) -> bool:
    """Whether two addresses are different ones of a network that both sides know as one."""
    inside = ipaddress.IPv4Address(other["address"]) in network_of(one) and ipaddress.IPv4Address(one["address"]) in network_of(other)
    return inside and one["address"] != other["address"]


def is_live(node: Node, port: Facts) -> bool:
    interface = node.interface(port["interface"])
    return port["state"] == "ACTIVE" and interface is not None and interface["carrier"]


def describe_addresses(node: Node) -> str:
    rows = [
        f"{entry['name']} {address['address']}"
        for entry in node.facts["interfaces"]
        for address in entry["addresses"]
        if entry["kind"] != "loopback"
    ]
    return ", ".join(rows) or "no IPv4 address at all"


def reaching_interfaces(node: Node, peers: t.Sequence[Node]) -> str:
    """Interfaces of RDMA ports that do reach a peer, for the next step of a refusal."""
    names = [f"{port['interface']} ({port_name(port)})" for port in node.all_ports if is_live(node, port) and port_peers(node, port, peers)]
    return ", ".join(names)


def own_address(node: Node) -> str:
    """The address towards the default route, else loopback."""
    interface = node.interface(node.facts["default_interface"])
    return interface["addresses"][0]["address"] if interface and interface["addresses"] else "127.0.0.1"


def find_home(node: Node, solo: bool) -> None:
    """Set the interface that carries the fabric address, or say why it cannot be used."""
    if solo and not node.address:
        node.address = own_address(node)  # a rank alone meets nobody, so any address of its own will do
    try:
        ipaddress.IPv4Address(node.address)
    except ValueError:
        node.refuse(
            "fabric.address_invalid", "fabric_address", repr(node.address), "an IPv4 address in numbers",
            "give the node's own address on the fabric; names may resolve to loopback",
        )
        return
    holders = [entry for entry in node.facts["interfaces"] if any(address["address"] == node.address for address in entry["addresses"])]
    if not holders:
        node.refuse(
            "fabric.address_absent", f"fabric_address {node.address}", describe_addresses(node), "an address that the node has",
            "correct fabric_address of this node, or give the interface this address",
        )
        return
    home = next((entry for entry in holders if entry["name"] == node.choice.interface), holders[0])
    if len(holders) > 1:
        node.notice(f"{node.address} is on {', '.join(entry['name'] for entry in holders)}; {home['name']} is taken, fabric_interface can say otherwise")
    unfit = UNFIT_KINDS.get(home["kind"])
    if unfit and not solo:
        node.refuse(
            "fabric.address_unfit", f"fabric_address {node.address}", f"it lives on {home['name']}, {unfit}", "an interface with a cable to the other nodes",
            "move the address to the fabric interface, or set fabric_address to that interface's address; NCCL cannot use aliases",
        )
        return
    node.home = home


def check_duplicates(nodes: t.Sequence[Node]) -> None:
    for one, other in itertools.combinations(nodes, 2):
        if one.address == other.address:
            other.refuse(
                "fabric.address_twice", "fabric_address", f"{other.address}, which {one.name} has too", "one address per node",
                "correct the inventory",
            )


def check_interface_choice(node: Node, peers: t.Sequence[Node]) -> None:
    wanted = node.choice.interface
    if not wanted or (node.home is not None and wanted == node.home["name"]):
        return
    interface = node.interface(wanted)
    if interface is None:
        found = "no such interface"
    elif not interface["carrier"]:
        found = "no carrier: the cable is not in this port"
    else:
        found = "up, with " + (", ".join(entry["address"] for entry in interface["addresses"]) or "no IPv4 address")
    holder = f"{node.home['name']}, which carries the fabric address {node.address}" if node.home else f"an interface with {node.address}"
    good = reaching_interfaces(node, peers) or (node.home["name"] if node.home else "none yet")
    next_step = f"set fabric_interface to one that reaches the peers ({good}), or leave it out"
    node.refuse("fabric.interface", f"fabric_interface {wanted}", found, holder, next_step)


def check_home_link(node: Node, peers: t.Sequence[Node]) -> None:
    if node.home is None or not peers or node.home["carrier"]:
        return
    live = ", ".join(f"{port['interface']} ({port_name(port)})" for port in node.all_ports if is_live(node, port)) or "none"
    node.refuse(
        "fabric.link_down", node.home["name"], f"{node.home['state'] or 'down'}, no carrier", "a link",
        f"put the cable in this port, or use the port that has one; up now: {live}",
    )


def egress(node: Node, address: str) -> t.Tuple[set[str], str]:
    """Interfaces over which the node may send to an address, by longest prefix, and the gateway if there is one."""
    target = ipaddress.IPv4Address(address)
    rows = [(network_of(entry), interface["name"], "") for interface in node.facts["interfaces"] for entry in interface["addresses"]]
    rows += [(ipaddress.IPv4Network(route["destination"]), route["interface"], route["gateway"]) for route in node.facts["routes"]]
    rows = [row for row in rows if target in row[0]]
    longest = max((row[0].prefixlen for row in rows), default=-1)
    best = [row for row in rows if row[0].prefixlen == longest]
    return {name for dummy, name, dummy2 in best}, next((gateway for dummy, dummy2, gateway in best if gateway), "")


def check_reach(node: Node, peers: t.Sequence[Node]) -> None:
    """Each peer's fabric address must lie behind the interface that carries the own one: ranks meet there first."""
    if node.home is None:
        return
    for peer in peers:
        if peer.home is None or peer.address == node.address:
            continue
        names, gateway = egress(node, peer.address)
        if node.home["name"] not in names:
            way = f"the way there is {', '.join(sorted(names))}" if names else "there is no route"
            good = reaching_interfaces(node, [peer])
            node.refuse(
                "fabric.reach", f"{peer.name} at {peer.address}", f"{node.home['name']} ({node.address}) does not lead there; {way}",
                "both fabric addresses in one network",
                "correct fabric_address" + (f"; these interfaces do reach {peer.name}: {good}" if good else ", the prefix length, or the cabling"),
            )
        elif gateway:
            node.notice(f"{peer.name} is reached through the gateway {gateway}, not directly")


# --- RDMA ports ------------------------------------------------------------------------------------------------


def port_peers(node: Node, port: Facts, peers: t.Sequence[Node]) -> list[str]:
    """Peers that have a live RDMA port in one network with this port. A peer's management address does not count."""
    own = port_addresses(node, port)
    return [
        peer.name
        for peer in peers
        if any(
            is_live(peer, other) and any(meet(one, two) for one in own for two in port_addresses(peer, other)) for other in peer.all_ports
        )
    ]


def twins_of(port: Facts, ports: t.Iterable[Facts]) -> list[Record]:
    """The other half of the same QSFP port."""
    return [dict(other) for other in ports if port["link"] and other["link"] == port["link"] and port_name(other) != port_name(port)]


def why_not(node: Node, port: Facts) -> str:
    """Why a port is of no use for this group."""
    if not is_live(node, port):
        return f"port state {port['state'] or 'unreadable'}, interface {port['interface'] or 'unknown'} without link"
    own = ", ".join(entry["address"] for entry in port_addresses(node, port))
    return f"{port['interface']} has {own or 'no IPv4 address'}, which reaches no RDMA port of the other nodes"


def candidates(node: Node, peers: t.Sequence[Node]) -> list[Record]:
    """Ports that reach a peer, and their other halves that are up but have no address.

    NCCL does use a half without IPv4 when no GID is pinned, so it is kept; advice follows.
    """
    live = [port for port in node.all_ports if is_live(node, port)]
    reaching = [port for port in live if port_peers(node, port, peers)]
    links = {port["link"] for port in reaching if port["link"]}
    return [port for port in live if port in reaching or (port["link"] in links and not port_addresses(node, port))]


def choose_ports(node: Node, peers: t.Sequence[Node]) -> None:
    """The user's ports if they are good, else all that reach a peer."""
    good = candidates(node, peers)
    if not node.choice.hcas or not peers:
        node.ports = good
        for port in node.all_ports:
            if port not in good and is_live(node, port) and peers:
                node.notice(f"{port_name(port)} is left out: {why_not(node, port)}")
        return
    by_key = {(port["hca"], port["port"]): port for port in node.all_ports}
    useful = ", ".join(port_name(port) for port in good) or "none"
    next_step = f"set fabric_hcas to ports that reach the peers ({useful}), or leave it out"
    try:
        expansion = _nccl_selector.expand(_nccl_selector.parse(node.choice.hcas), list(by_key))
    except _nccl_selector.SelectorError as exc:
        node.refuse("fabric.selector", f"fabric_hcas {node.choice.hcas!r}", str(exc), "NCCL's form [^][=]name[:port],...", next_step)
        return
    node.notices.extend(expansion.notices)
    for key in expansion.ports:
        port = by_key[key]
        if port in good:
            node.ports.append(port)
        elif key in expansion.named:
            node.refuse("fabric.hca", f"fabric_hcas names {port_name(port)}", why_not(node, port), "a port that reaches the peers", next_step)
        else:
            node.notice(f"{port_name(port)} is left out: {why_not(node, port)}")
    if not node.ports and not node.refusals:
        node.refuse("fabric.hca", f"fabric_hcas {node.choice.hcas!r}", "it leaves no port that reaches a peer", "at least one port", next_step)


def pair_ports(node: Node, peer: Node) -> list[t.Tuple[Record, Record, Record, Record]]:
    """Ports of two nodes that face each other, with the addresses that meet; halves of the same order first."""
    pairs = []
    free = list(peer.ports)
    for port in node.ports:
        facing = sorted(free, key=lambda other: (other["half"] != port["half"], other["half"], port_name(other)))
        for other in facing:
            meeting = [(one, two) for one in port_addresses(node, port) for two in port_addresses(peer, other) if meet(one, two)]
            if meeting:
                free.remove(other)
                # The fabric address first: a port may have further ones.
                one, two = min(meeting, key=lambda both: (both[0]["address"] != node.address, both[1]["address"] != peer.address))
                pairs.append((port, other, one, two))
                break
    return pairs


def holder_of(node: Node, address: str) -> Record:
    return next(entry for entry in node.facts["interfaces"] if any(own["address"] == address for own in entry["addresses"]))


def prefix_of(interface: Facts, address: str) -> int:
    return next(entry["prefix"] for entry in interface["addresses"] if entry["address"] == address)


def make_rail(node: Node, peer: Node, port: Facts, other: Facts, one: str, two: str) -> Rail:
    mine, theirs = holder_of(node, one), holder_of(peer, two)
    return Rail(
        mine["name"], one, prefix_of(mine, one), mine["mtu"], port_name(port), port["link"], port["half"],
        peer.name, theirs["name"], two, theirs["mtu"], port_name(other), other["link"], other["half"],
    )


def lay_rails(node: Node, peer: Node) -> None:
    """The rails of two nodes, entered on both sides."""
    for port, other, one, two in pair_ports(node, peer):
        node.rails.append(make_rail(node, peer, port, other, one["address"], two["address"]))
        peer.rails.append(make_rail(peer, node, other, port, two["address"], one["address"]))


def lay_plain_rails(node: Node, peers: t.Sequence[Node]) -> None:
    """Where no RDMA rail leads, the interfaces that carry the fabric addresses are the rail."""
    linked = {rail.peer for rail in node.rails}
    for peer in peers:
        if peer.name not in linked and node.home is not None and peer.home is not None:
            node.rails.append(
                Rail(
                    node.home["name"], node.address, prefix_of(node.home, node.address), node.home["mtu"], "", "", 0,
                    peer.name, peer.home["name"], peer.address, peer.home["mtu"], "", "", 0,
                )
            )


def check_common_rails(nodes: t.Sequence[Node]) -> None:
    """Two ranks that could meet over RDMA, but not over the ports that were chosen."""
    for node, peer in itertools.combinations(nodes, 2):
        possible = any(is_live(node, port) and port_peers(node, port, [peer]) for port in node.all_ports)
        if possible and not any(rail.peer == peer.name for rail in node.rails):
            mine, theirs = (", ".join(port_name(port) for port in side.ports) for side in (node, peer))
            node.refuse(
                "fabric.rails", f"the way to {peer.name}", f"{mine} here and {theirs} there have no network in common", "at least one common rail",
                "choose ports of the same cable on both nodes, or cable these two nodes",
            )


# --- quality of the chosen ports -------------------------------------------------------------------------------


def check_halves(node: Node) -> None:
    chosen = {port_name(port) for port in node.ports}
    for port in node.ports:
        for twin in twins_of(port, node.all_ports):
            if port_name(twin) not in chosen:
                reason = "up but not selected" if is_live(node, twin) else why_not(node, twin)
                node.notice(f"half of the QSFP port of {port_name(port)} is not used: its twin {port_name(twin)} ({reason}); {HALF_COST}")
        if not port_addresses(node, port):
            node.notice(
                f"half bandwidth is likely: {port_name(port)} ({port['interface']}), the twin of a used half, has no IPv4 address; "
                "NCCL may use it by its link-local GID while no GID is pinned, but give it an address in a network of its own"
            )


def check_link_quality(node: Node) -> None:
    for port in node.ports:
        interface = node.interface(port["interface"]) or {}
        name, speed = port_name(port), interface.get("speed")
        if port["width"] is not None and port["width"] < FULL_WIDTH:
            node.notice(f"{name} has PCIe width x{port['width']} instead of x{FULL_WIDTH}: half speed; update the firmware of the machine")
        if port["width_speed"] and not port["width_speed"].startswith(FULL_WIDTH_SPEED):
            node.notice(f"{name} has PCIe speed {port['width_speed']} instead of {FULL_WIDTH_SPEED}: update the firmware of the machine")
        if interface.get("driver") == "mlx5_core" and speed and speed < FULL_SPEED:
            node.notice(f"{name} links at {speed // 1000} Gb/s instead of {FULL_SPEED // 1000}: check the cable, or set the switch port to 200G")
        if port["rdma_mtu"] is not None and port["rdma_mtu"] < FULL_RDMA_MTU:
            node.notice(
                f"{name} has RDMA MTU {port['rdma_mtu']} (interface MTU {interface.get('mtu')}): up to 40 % slower prefill; MTU 9000 gives {FULL_RDMA_MTU}"
            )


def check_mtu(nodes: t.Sequence[Node]) -> None:
    """Both ends of every rail, not only of the first one; each rail is looked at from its lower rank."""
    order = {node.name: rank for rank, node in enumerate(nodes)}
    for node in nodes:
        for rail in node.rails:
            if order[node.name] < order[rail.peer] and rail.mtu != rail.peer_mtu:
                node.refuse(
                    "fabric.mtu", f"MTU of {rail.interface}", f"{rail.mtu}, but {rail.peer_mtu} on {rail.peer_interface} of {rail.peer}",
                    "the same MTU on both ends",
                    "set both ends to 9000 in their netplan files, or let the fabric play do it (fabric_configure: true, fabric_mtu: 9000)",
                )


def check_hardware(node: Node, peers: t.Sequence[Node]) -> None:
    """A GB10 group that ends up without RDMA works, slowly: say so, and why."""
    if not peers or node.ports or not node.facts["gb10"]:
        return
    cause = "no RDMA port reaches the other nodes"
    if not node.all_ports:
        cause = "the node shows no ConnectX-7 function; without a QSFP cable DGX OS removes all four: plug the cable, then reboot (do not rescan the PCI bus)"
    elif not any(is_live(node, port) for port in node.all_ports):
        cause = "no QSFP port has a link"
    node.notice(f"no RDMA: NCCL falls back to sockets over {node.home['name'] if node.home else 'the fabric address'} (a tenth of the speed); {cause}")


def check_exposure(node: Node, peers: t.Sequence[Node]) -> None:
    default = node.facts["default_interface"]
    interface = node.interface(default)
    if interface and interface["kind"] == "wifi":
        node.notice(f"the default route is over Wi-Fi ({default}): its driver is known to take the node off the net; prefer the wired port")
    if peers and node.home is not None and default == node.home["name"]:
        node.notice(f"the fabric interface {default} is also the way to the outside: traffic between ranks is not authenticated, use an isolated link")


# --- GID -------------------------------------------------------------------------------------------------------


class Gid(t.NamedTuple):
    """GID tables of the chosen ports of a node, by port name."""

    tables: dict[str, list[_gid.Slot]]
    usable: dict[str, list[int]]
    addresses: dict[str, list[str]]
    common: int | None


def gid_addresses(node: Node) -> dict[str, list[str]]:
    """Own addresses per chosen port that a GID may hold: those in a network shared with a peer."""
    found: dict[str, list[str]] = {}
    for port in node.ports:
        interfaces = set(port["interfaces"])
        found[port_name(port)] = sorted({rail.address for rail in node.rails if rail.interface in interfaces})
        if not found[port_name(port)]:
            # A half whose facing half is taken by its twin (both in one network) still has an address of its own.
            found[port_name(port)] = [entry["address"] for entry in port_addresses(node, port)]
    return found


def plan_gid(node: Node) -> Record:
    """The policy for the rank specification, and under "now" and "usable" what is true at this moment, to report only."""
    addresses = gid_addresses(node)
    tables = {port_name(port): [_gid.Slot(**slot) for slot in port["gids"]] for port in node.ports}
    usable = {name: _gid.usable_indexes(tables[name], addresses[name]) for name in tables}
    policy = node.choice.gid_policy if node.ports else "unpinned"
    gid = Gid(tables, usable, addresses, _gid.common_index(usable))
    checks = {"unpinned": report_unpinned, "auto": check_auto, "index": check_index}
    checks[policy](node, gid)
    index = node.choice.gid_index if policy == "index" else None
    return {"policy": policy, "index": index, "addresses": addresses, "now": gid.common, "usable": usable}


def report_unpinned(node: Node, gid: Gid) -> None:
    for name, indexes in gid.usable.items():
        if not indexes and gid.addresses[name]:
            node.notice(f"{name} has no RoCE v2 GID of {', '.join(gid.addresses[name])} (now: {_gid.describe_table({name: gid.tables[name]})})")


def check_auto(node: Node, gid: Gid) -> None:
    for name, indexes in gid.usable.items():
        if not indexes:
            own = ", ".join(gid.addresses[name])
            node.refuse(
                "fabric.gid_none", f"GID of {name}", _gid.describe_table({name: gid.tables[name]}),
                f"RoCE v2 with the own address {own}" if own else "a RoCE v2 GID of an own IPv4 address",
                "has the interface an address? Give it one, name only other ports in fabric_hcas, or set fabric_gid_policy to unpinned",
            )
    if all(gid.usable.values()) and gid.common is None:
        node.refuse(
            "fabric.gid_differs", "GID index", _gid.describe_table(gid.tables), "one index that is usable on every port, since NCCL takes one number",
            "set fabric_gid_policy to unpinned, or name one port in fabric_hcas",
        )


def check_index(node: Node, gid: Gid) -> None:
    index = node.choice.gid_index
    common = gid.common
    advice = f"{common} would work on this node" if common is not None else f"no index works on all its ports ({_gid.describe_table(gid.tables)})"
    next_step = f"{advice}; indexes differ between nodes and move, so prefer fabric_gid_policy unpinned or auto"
    if index is None:
        node.refuse("fabric.gid_index_missing", "fabric_gid_index", "nothing", "a number, since fabric_gid_policy is index", next_step)
        return
    for name, indexes in gid.usable.items():
        if index not in indexes:
            found = _gid.describe_slot(gid.tables[name], index)
            node.refuse("fabric.gid_index", f"GID slot {index} of {name}", found, "RoCE v2 with the node's own address", next_step)


# --- topology --------------------------------------------------------------------------------------------------


def cables(nodes: t.Sequence[Node]) -> dict[t.Tuple[str, str], set[t.Tuple[str, str]]]:
    """Per linked pair of ranks the QSFP ports that face each other."""
    found: dict[t.Tuple[str, str], set[t.Tuple[str, str]]] = {}
    order = {node.name: rank for rank, node in enumerate(nodes)}
    for node in nodes:
        for rail in node.rails:
            if rail.hca and order[node.name] < order[rail.peer]:
                ends = (rail.link or rail.hca, rail.peer_link or rail.peer_hca)
                found.setdefault((node.name, rail.peer), set()).add(ends)
    return found


def all_share(nodes: t.Sequence[Node]) -> bool:
    """Whether each rail's network holds all ranks, as behind a switch."""
    seen: dict[str, set[str]] = {}
    for node in nodes:
        for rail in node.rails:
            interface = node.interface(rail.interface)
            for entry in interface["addresses"] if interface else []:
                if entry["address"] == rail.address:
                    seen.setdefault(str(network_of(entry)), set()).add(node.name)
    return all(len(names) == len(nodes) for names in seen.values())


def find_topology(nodes: t.Sequence[Node], wanted: str) -> Record:
    """Which row of TOPOLOGIES the rails have the shape of."""
    if len(nodes) == 1:
        return {"name": "solo", "links": []}
    found = cables(nodes)
    if not found:
        return {"name": "plain", "links": []}
    most = max(len(ends) for ends in found.values())
    complete = len(found) == len(nodes) * (len(nodes) - 1) // 2
    shared = all_share(nodes)
    neighbours = {node.name: len({rail.peer for rail in node.rails if rail.hca}) for node in nodes}
    links = [{"nodes": list(pair), "cables": len(ends)} for pair, ends in sorted(found.items())]
    fitting = [
        row.name
        for row in TOPOLOGIES
        if row.ranks[0] <= len(nodes) <= row.ranks[1] and row.cables[0] <= most <= row.cables[1]
        and (row.complete or set(neighbours.values()) == {2}) and row.shared == shared and row.complete == complete
    ]  # fmt: skip
    return {"name": wanted if wanted in fitting else next(iter(fitting), "incomplete"), "links": links}


def check_topology(nodes: t.Sequence[Node], topology: Record, wanted: str) -> None:
    head = nodes[0]
    found = cables(nodes)
    linked = "; ".join(f"{one} - {two}" for one, two in sorted(found)) or "no RDMA link"
    missing = [f"{one.name} - {two.name}" for one, two in itertools.combinations(nodes, 2) if (one.name, two.name) not in found]
    if wanted not in ("auto", topology["name"]):
        head.refuse(
            "fabric.topology", "fabric_topology", f"{topology['name']} ({linked})", wanted,
            "correct the cabling or the addresses, or set fabric_topology to auto",
        )
    elif topology["name"] == "incomplete" or (topology["name"] == "open_ring" and wanted == "auto"):
        head.refuse(
            "fabric.ranks_unlinked", "RDMA links", f"{linked}; no path for {', '.join(missing)}", "a path between every two ranks",
            "use a switch or cable the missing pairs; a ring of four needs a patched NCCL on the hosts: if you have it, set fabric_topology to open_ring",
        )


def cabling_findings(node: Node, later: t.Collection[str]) -> list[t.Tuple[str, str]]:
    """What is odd about the rails of a node to later ranks, as (found, wanted). Judged by whether cables are direct."""
    found = []
    rails = [rail for rail in node.rails if rail.hca and rail.peer in later and rail.link and rail.peer_link]
    for rail in rails:
        for other in rails:
            if rail.link == other.link and rail.half < other.half and (rail.peer, rail.peer_link) != (other.peer, other.peer_link):
                ends = f"{rail.hca} leads to {rail.peer_hca} of {rail.peer}, its twin {other.hca} to {other.peer_hca} of {other.peer}"
                found.append((ends, "both halves of a port at the two halves of one port"))
            elif rail.link == other.link and rail.half < other.half and rail.peer_half > other.peer_half:
                ends = f"{rail.hca} is in the network of {rail.peer_hca} of {rail.peer}, {other.hca} in that of {other.peer_hca}"
                found.append((ends, "first half at first half, second at second (swap the addresses on one node)"))
    return found


def check_cabling(nodes: t.Sequence[Node], topology: Record, wanted: str) -> None:
    """Crossed halves cannot work over a direct cable, and do work behind a switch: refuse only what is known to be direct."""
    rows = {row.name: row for row in TOPOLOGIES}
    row = rows.get(topology["name"])
    certain = wanted != "auto" and row is not None and row.direct
    for rank, node in enumerate(nodes):
        for found, better in cabling_findings(node, [peer.name for peer in nodes[rank + 1 :]]):
            if certain:
                node.refuse("fabric.cabling", "cabling", found, better, "correct the addresses or the cable")
            else:
                node.notice(f"wrong cabling or addresses, if the cable is direct: {found}; wanted: {better}")
    if topology["name"] == "ring":
        check_ring_direction(nodes)


def check_ring_direction(nodes: t.Sequence[Node]) -> None:
    """A ring that everyone documents goes from port 0 to port 1; other ways work, and confuse whoever debugs them."""
    for rank, node in enumerate(nodes):
        later = [peer.name for peer in nodes[rank + 1 :]]
        for rail in node.rails:
            same = rail.link and rail.link.split("/")[1:] == rail.peer_link.split("/")[1:]
            if rail.peer in later and same:
                node.notice(f"mirrored ring cable: {rail.interface} and {rail.peer_interface} of {rail.peer} are the same port on both machines")


# --- the plan --------------------------------------------------------------------------------------------------


def selector(node: Node) -> str:
    counts: dict[str, int] = {}
    for port in node.all_ports:
        counts[port["hca"]] = counts.get(port["hca"], 0) + 1
    return _nccl_selector.emit([(port["hca"], port["port"]) for port in node.ports], counts)


def result(node: Node, gid: Record, topology: Record) -> Record:
    return {
        "interface": node.home["name"] if node.home else "",
        "address": node.address,
        "hcas": [port_name(port) for port in node.ports],
        "selector": selector(node),
        "gid": gid,
        "rails": [rail.as_dict() for rail in node.rails],
        "topology": topology["name"],
        "notices": node.notices,
    }


def check_required(node: Node, peers: t.Sequence[Node], rdma: str) -> None:
    if rdma == "require" and peers and not node.ports:
        node.refuse(
            "fabric.rdma_required", "RDMA", "no port that reaches every peer", "RDMA, since fabric_rdma is require",
            "check cable, addresses, and port states with the doctor play, or set fabric_rdma to auto",
        )


def plan_fabric(
    names: t.Sequence[str],
    facts: t.Mapping[str, Facts],
    addresses: t.Mapping[str, str],
    choices: t.Mapping[str, Choice] | None = None,
    rdma: str = "auto",
    topology: str = "auto",
) -> FabricPlan:
    """Plan the fabric of the ranks ``names`` (index = rank)."""
    choices = choices or {}
    nodes = [Node(name, facts[name], str(addresses.get(name) or ""), choices.get(name, Choice())) for name in names]
    peers_of = {node.name: [peer for peer in nodes if peer is not node] for node in nodes}
    for node in nodes:
        find_home(node, solo=len(nodes) == 1)
    check_duplicates(nodes)
    for node in nodes:
        peers = peers_of[node.name]
        check_interface_choice(node, peers)
        check_home_link(node, peers)
        check_reach(node, peers)
        choose_ports(node, peers)
    for node, peer in itertools.combinations(nodes, 2):
        lay_rails(node, peer)
    shape = find_topology(nodes, topology)
    # The next two compare nodes with each other, and would only repeat in other words what is already refused.
    if not any(node.refusals for node in nodes):
        check_common_rails(nodes)
    if not any(node.refusals for node in nodes):
        check_topology(nodes, shape, topology)
    check_cabling(nodes, shape, topology)
    gids = {}
    for node in nodes:
        peers = peers_of[node.name]
        lay_plain_rails(node, peers)
        check_required(node, peers, rdma)
        check_halves(node)
        check_link_quality(node)
        check_hardware(node, peers)
        check_exposure(node, peers)
        gids[node.name] = plan_gid(node)
    check_mtu(nodes)
    refusals = [refusal for node in nodes for refusal in node.refusals]
    return FabricPlan({node.name: result(node, gids[node.name], shape) for node in nodes}, shape, refusals)
