# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What one node says about its links: interfaces, addresses, routes, RDMA ports, and what the two have to do with each other.

Everything here reads; nothing judges. The judging is in _fabric.py, which sees all nodes of a group.
"""

from __future__ import annotations

import collections
import ipaddress
import os
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._gid import read_table, usable_indexes
from ansible_collections.sparkops.inference.plugins.module_utils._sysfs import Tree, labelled_state

GB10_PCI_ID = ("0x10de", "0x2e12")
# Kinds of ``ip -details`` that are private tunnels: good for people, useless for NCCL.
VPN_KINDS = ("tun", "wireguard", "ipip", "sit", "gre", "ip6tnl", "ppp", "vti", "xfrm")
PCI_SLOT = re.compile(r"^([0-9a-fA-F]{4,}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$")
# Predictable names of systemd and rdma-core: roceP2p1s0f1, enP2p1s0f1np1, enp1s0f0np0. Numbers are decimal.
PCI_NAME = re.compile(r"^(?:roce|ib|en)(?:P(\d+))?p(\d+)s(\d+)(?:f(\d+))?(?:np?\d+|d\d+)?$")
# Files in which an address must stand to survive a reboot, below the etc root.
PERSISTENT_FILES = ("netplan", "systemd/network", "NetworkManager/system-connections", "network/interfaces.d")
# RDMA path MTUs, and the room that the kernel (iboe_get_mtu) leaves for the headers of RoCE v2.
RDMA_MTUS = (4096, 2048, 1024, 512, 256)
ROCE_HEADERS = 96


class PciPlace(t.NamedTuple):
    """Domain, and the rest of the address. Two halves of one QSFP port differ in the domain only."""

    domain: int
    function: str


def pci_place(*names: str | None) -> PciPlace | None:
    """From the first of the names that tells: a PCI slot, or a predictable device name."""
    for name in names:
        slot = PCI_SLOT.match(name or "")
        if slot:
            domain, bus, device, function = (int(part, 16) for part in slot.groups())
            return PciPlace(domain, f"{bus}.{device}.{function}")
        words = PCI_NAME.match(name or "")
        if words:
            domain, bus, device, function = (int(part or 0) for part in words.groups())
            return PciPlace(domain, f"{bus}.{device}.{function}")
    return None


def interface_kind(tree: Tree, link: t.Mapping[str, t.Any]) -> str:
    """ethernet, wifi, bridge, vpn, or loopback. A veth counts as ethernet: it carries packets like one."""
    name = link.get("ifname", "")
    info = link.get("linkinfo", {}).get("info_kind", "")
    if link.get("link_type") == "loopback" or "LOOPBACK" in link.get("flags", []):
        return "loopback"
    if info == "bridge" or tree.exists("class/net", name, "bridge"):
        return "bridge"
    if info in VPN_KINDS or link.get("link_type") == "none" or tree.exists("class/net", name, "tun_flags"):
        return "vpn"
    if name.startswith("wl") or tree.exists("class/net", name, "phy80211") or tree.exists("class/net", name, "wireless"):
        return "wifi"
    return "ethernet"


def read_interface(tree: Tree, link: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    name = link["ifname"]
    base = ("class/net", name)
    speed = tree.number(*base, "speed")
    carrier = tree.number(*base, "carrier")
    return {
        "name": name,
        "kind": interface_kind(tree, link),
        "state": tree.text(*base, "operstate") or str(link.get("operstate", "")).lower(),
        "carrier": "LOWER_UP" in link.get("flags", []) if carrier is None else bool(carrier),
        "speed": speed if speed and speed > 0 else None,  # -1 on a port without link
        "mtu": tree.number(*base, "mtu") or link.get("mtu"),
        "mac": tree.text(*base, "address") or link.get("address", ""),
        "driver": tree.link_name(*base, "device/driver"),
        "pci": tree.link_name(*base, "device"),
        "port": tree.text(*base, "phys_port_name"),
        "width": tree.number(*base, "device/current_link_width"),
        "addresses": [
            {"address": entry["local"], "prefix": entry.get("prefixlen", 32), "dynamic": bool(entry.get("dynamic"))}
            for entry in link.get("addr_info", [])
            if entry.get("family") == "inet" and entry.get("local")
        ],
    }


def read_interfaces(tree: Tree, links: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """All interfaces but the many ends of container links that hang on a bridge."""
    return [
        read_interface(tree, link)
        for link in links
        if link.get("ifname") and not (link.get("master") and link.get("linkinfo", {}).get("info_kind") == "veth")
    ]


def read_routes(routes: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """Routes that lead somewhere: destination as a network, interface, gateway, metric."""
    found = []
    for route in routes:
        if not route.get("dev") or {"linkdown", "dead"} & set(route.get("flags", [])):
            continue
        destination = "0.0.0.0/0" if route.get("dst") == "default" else str(route.get("dst"))
        try:
            network = ipaddress.IPv4Network(destination, strict=False)
        except ValueError:
            continue
        found.append(
            {"destination": str(network), "interface": route["dev"], "gateway": route.get("gateway", ""), "metric": int(route.get("metric", 0))}
        )
    return found


def default_interface(routes: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    defaults = [route for route in routes if route["destination"] == "0.0.0.0/0"]
    return min(defaults, key=lambda route: route["metric"])["interface"] if defaults else ""


def uevent(tree: Tree, hca: str) -> dict[str, str]:
    text = tree.text("class/infiniband", hca, "device/uevent") or ""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def own_interfaces(tree: Tree, hca: str, pci: str | None, ndevs: t.Sequence[str], interfaces: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """Interfaces of an RDMA port, the physical one first.

    The GID table names them, VLANs too, but is empty while the interface is down: then the PCI function tells. Soft-RoCE
    has no PCI function and names its interface in ``parent``.
    """
    known = [interface["name"] for interface in interfaces]
    place = pci_place(pci, hca)
    same = [interface["name"] for interface in interfaces if place and pci_place(interface["pci"], interface["name"]) == place]
    parent = [tree.text("class/infiniband", hca, "parent") or ""]
    often = [name for name, dummy in collections.Counter(ndevs).most_common()]
    return [name for name in dict.fromkeys([*same, *often, *parent]) if name in known]


def rdma_mtu_for(mtu: int | None) -> int | None:
    """The RDMA path MTU that an interface MTU allows."""
    return next((size for size in RDMA_MTUS if mtu and size + ROCE_HEADERS <= mtu), None)


def parse_active_mtu(text: str) -> dict[tuple[str, int], int]:
    """The active RDMA MTU per device and port, from ``ibv_devinfo``. sysfs does not have it."""
    found: dict[tuple[str, int], int] = {}
    hca, port = "", 0
    for line in text.splitlines():
        name, colon, value = (part.strip() for part in line.partition(":"))
        words = value.split()
        if not colon or not words:
            continue
        if name == "hca_id":
            hca = words[0]
        elif name == "port" and words[0].isdecimal():
            port = int(words[0])
        elif name == "active_mtu" and words[0].isdecimal():
            found[hca, port] = int(words[0])
    return found


def aer_totals(tree: Tree, hca: str) -> dict[str, int]:
    """Totals of the PCIe error counters, where the kernel has them."""
    totals = {}
    for kind in ("correctable", "nonfatal", "fatal"):
        text = tree.text("class/infiniband", hca, "device", f"aer_dev_{kind}") or ""
        last = text.split()[-1:]  # the last line is TOTAL_ERR_...
        if last and last[0].isdecimal():
            totals[kind] = int(last[0])
    return totals


def read_port(
    tree: Tree, hca: str, port: int, interfaces: t.Sequence[t.Mapping[str, t.Any]], active_mtu: t.Mapping[tuple[str, int], int]
) -> dict[str, t.Any]:
    base = ("class/infiniband", hca)
    pci = uevent(tree, hca).get("PCI_SLOT_NAME") or tree.link_name(*base, "device")
    slots = read_table(tree.root, hca, port)
    names = own_interfaces(tree, hca, pci, [slot.interface for slot in slots if slot.interface], interfaces)
    by_name = {interface["name"]: interface for interface in interfaces}
    interface = by_name.get(names[0]) if names else None
    own = [entry["address"] for name in names for entry in by_name[name]["addresses"]]
    place = pci_place(pci, hca, names[0] if names else None)
    measured = active_mtu.get((hca, port))
    return {
        "hca": hca,
        "port": port,
        "state": labelled_state(tree.text(*base, "ports", str(port), "state")),
        "physical_state": labelled_state(tree.text(*base, "ports", str(port), "phys_state")),
        "link_layer": tree.text(*base, "ports", str(port), "link_layer") or "",
        "rate": tree.text(*base, "ports", str(port), "rate") or "",
        "interface": names[0] if names else "",
        "interfaces": names,
        "firmware": tree.text(*base, "fw_ver") or "",
        "board": tree.text(*base, "board_id") or "",
        "pci": pci or "",
        "width": tree.number(*base, "device/current_link_width") or (interface["width"] if interface else None),
        "width_speed": tree.text(*base, "device/current_link_speed") or "",
        "half": place.domain if place else 0,
        # Ports of equal "link" are the two halves of one QSFP port. No place, no twin.
        "link": f"{tree.text(*base, 'sys_image_guid') or ''}/{place.function}/{port}" if place else "",
        "rdma_mtu": measured or rdma_mtu_for(interface["mtu"] if interface else None),
        "rdma_mtu_measured": measured is not None,
        "aer": aer_totals(tree, hca),
        "gids": [slot.as_dict() for slot in slots],
        "usable": usable_indexes(slots, own),
    }


def read_ports(
    tree: Tree, interfaces: t.Sequence[t.Mapping[str, t.Any]], active_mtu: t.Mapping[tuple[str, int], int]
) -> list[dict[str, t.Any]]:
    """All RDMA ports, the first half of each QSFP port before the second."""
    ports = [
        read_port(tree, hca, int(port), interfaces, active_mtu)
        for hca in tree.names("class/infiniband")
        for port in tree.names("class/infiniband", hca, "ports")
        if port.isdecimal()
    ]
    return sorted(ports, key=lambda port: (port["half"], port["hca"], port["port"]))


def is_gb10(tree: Tree) -> bool:
    product = f"{tree.text('class/dmi/id/product_name')} {tree.text('class/dmi/id/board_name')}"
    if "Spark" in product or "GB10" in product:
        return True
    devices = tree.names("bus/pci/devices")
    return any((tree.text("bus/pci/devices", name, "vendor"), tree.text("bus/pci/devices", name, "device")) == GB10_PCI_ID for name in devices)


def driver_version(proc: Tree) -> str:
    """Version of the loaded NVIDIA kernel module."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", proc.text("driver/nvidia/version") or "")
    return found.group(1) if found else ""


def dgx_release(etc: Tree) -> str:
    """The DGX OS release in force: keys repeat after each update and the last one counts."""
    values: dict[str, str] = {}
    for line in (etc.text("dgx-release") or "").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values[name.strip()] = value.strip().strip("\"'")
    return values.get("DGX_OTA_VERSION") or values.get("DGX_SWBUILD_VERSION", "")


def configuration_files(etc: Tree) -> list[str]:
    files = [os.path.join(folder, name) for folder in PERSISTENT_FILES for name in etc.names(folder) if not name.startswith(".")]
    return [name for name in [*files, "network/interfaces"] if etc.exists(name)]


def persistence(etc: Tree, addresses: t.Collection[str]) -> dict[str, t.Any]:
    """Which configuration files name which addresses; unreadable files (netplan's are 0600) are listed, not guessed at."""
    named: dict[str, list[str]] = {address: [] for address in addresses}
    unreadable = []
    files = configuration_files(etc)
    for name in files:
        text = etc.text(name)
        if text is None:
            unreadable.append(name)
            continue
        for address in addresses:
            if re.search(rf"(?<![0-9.]){re.escape(address)}(?![0-9.])", text):
                named[address].append(name)
    return {"files": files, "unreadable": unreadable, "named": named}


def read_facts(
    roots: t.Mapping[str, str], links: t.Sequence[t.Mapping[str, t.Any]], routes: t.Sequence[t.Mapping[str, t.Any]], ibv_devinfo: str = ""
) -> dict[str, t.Any]:
    """Everything that fabric_info returns. ``roots`` has the keys sys, proc, and etc."""
    tree, proc, etc = Tree(roots["sys"]), Tree(roots["proc"]), Tree(roots["etc"])
    interfaces = read_interfaces(tree, links)
    usable_routes = read_routes(routes)
    fixed = [
        entry["address"] for interface in interfaces if interface["kind"] == "ethernet" for entry in interface["addresses"] if not entry["dynamic"]
    ]
    meminfo = dict(re.findall(r"^(Cma\w+):\s+(\d+)", proc.text("meminfo") or "", re.MULTILINE))
    return {
        "interfaces": interfaces,
        "ports": read_ports(tree, interfaces, parse_active_mtu(ibv_devinfo)),
        "routes": usable_routes,
        "default_interface": default_interface(usable_routes),
        "gb10": is_gb10(tree),
        "kernel": proc.text("sys/kernel/osrelease") or "",
        "driver": driver_version(proc),
        "dgx_release": dgx_release(etc),
        "kho_off": "kho=off" in (proc.text("cmdline") or "").split(),
        "cma": {"total": int(meminfo.get("CmaTotal", 0)), "free": int(meminfo.get("CmaFree", 0))},
        "configuration": persistence(etc, fixed),
    }
