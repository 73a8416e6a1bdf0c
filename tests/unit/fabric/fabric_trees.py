# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Machines made of folders: sysfs trees and what ``ip`` would say, for tests of the fabric code."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._fabric_facts import read_facts

DATA = pathlib.Path(__file__).parent / "data"
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:3e6d:66ff:fe0a:1b12"
V1, V2 = "IB/RoCE v1", "RoCE v2"
UNREADABLE = object()


def read(name: str) -> str:
    """A capture of a real machine."""
    return (DATA / name).read_text(encoding="utf-8")


def mapped(address: str) -> str:
    return f"0000:0000:0000:0000:0000:ffff:{int(ipaddress.IPv4Address(address)) >> 16:04x}:{int(ipaddress.IPv4Address(address)) & 0xFFFF:04x}"


def put(path: pathlib.Path, content: t.Any) -> None:
    """Write one attribute. An unreadable one is a folder: reading it fails for root too, as a real EINVAL does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is UNREADABLE:
        path.mkdir()
    elif content is not None:
        path.write_text(f"{content}\n", encoding="utf-8")


def unpack(text: str, root: pathlib.Path) -> None:
    """Lay out a capture in flat form: PATH<TAB>CONTENT, with !EINVAL and -> for files that fail and links."""
    rows = [line.split("\t", 1) for line in text.splitlines() if line.strip()]
    rows.sort(key=lambda row: not (row[1].startswith("-> ") and row[0].endswith("/device")))  # folders that others lie in first
    for name, content in rows:
        path = root / name.removeprefix("/sys/")
        if content.startswith("-> ") and name.endswith("/device"):
            target = root / "devices" / content.rsplit("/", 1)[1]
            target.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        elif content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        else:
            put(path, UNREADABLE if content == "!EINVAL" else content.replace("\\n", "\n"))


def link_json(name: str, addresses: t.Sequence[str] = (), up: bool = True, mtu: int = 9000, kind: str = "", loopback: bool = False) -> dict[str, t.Any]:
    """One entry of ``ip -json -details address show``."""
    flags = ["LOOPBACK", "UP", "LOWER_UP"] if loopback else ["BROADCAST", "MULTICAST", "UP", *(["LOWER_UP"] if up else [])]
    entry: dict[str, t.Any] = {
        "ifname": name,
        "flags": flags,
        "mtu": mtu,
        "operstate": "UP" if up else "DOWN",
        "link_type": "loopback" if loopback else "none" if kind == "tun" else "ether",
        "address": "3c:6d:66:0a:1b:11",
        "addr_info": [
            {"family": "inet", "local": text.split("/")[0], "prefixlen": int(text.split("/")[1]), "scope": "global", "label": name} for text in addresses
        ],
    }
    if kind:
        entry["linkinfo"] = {"info_kind": kind}
    return entry


def links_from_brief(text: str) -> list[dict[str, t.Any]]:
    """Entries as of ``ip -json`` from a captured ``ip -br addr``."""
    found = []
    for line in text.splitlines():
        name, state, *addresses = line.split()
        kind = {"docker0": "bridge", "tailscale0": "tun"}.get(name, "bridge" if name.startswith("br-") else "veth" if name.startswith("veth") else "")
        entry = link_json(name.split("@")[0], [text for text in addresses if "." in text], state != "DOWN", kind=kind, loopback=name == "lo")
        if kind == "veth":
            entry["master"] = "br-000000000000"
        found.append(entry)
    return found


def routes_from_text(text: str) -> list[dict[str, t.Any]]:
    """Entries as of ``ip -json route`` from a captured ``ip route``."""
    found = []
    for line in text.splitlines():
        words = line.split()
        pairs = dict(zip(words[1::2], words[2::2]))
        entry: dict[str, t.Any] = {"dst": words[0], "dev": pairs["dev"], "flags": ["linkdown"] if "linkdown" in words else []}
        entry.update({"gateway": pairs["via"]} if "via" in pairs else {})
        entry.update({"metric": int(pairs["metric"])} if "metric" in pairs else {})
        found.append(entry)
    return found


@dataclasses.dataclass
class Machine:
    """A node under construction. Methods return the machine, so that calls chain."""

    root: pathlib.Path
    links: list[dict[str, t.Any]] = dataclasses.field(default_factory=list)
    routes: list[dict[str, t.Any]] = dataclasses.field(default_factory=list)
    ibv_devinfo: str = ""

    def __post_init__(self) -> None:
        for name in ("sys", "proc", "etc"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.links.append(link_json("lo", ["127.0.0.1/8"], mtu=65536, loopback=True))
        put(self.root / "proc/sys/kernel/osrelease", "6.17.0-1032-nvidia")

    def capture(self, *names: str) -> Machine:
        for name in names:
            unpack((DATA / name).read_text(encoding="utf-8"), self.root / "sys")
        return self

    def interface(
        self, name: str, *addresses: str, up: bool = True, mtu: int = 9000, speed: int = 200000, kind: str = "", width: int = 4, driver: str = ""
    ) -> Machine:
        base = self.root / "sys/class/net" / name
        put(base / "operstate", "up" if up else "down")
        put(base / "carrier", int(up))
        put(base / "speed", speed if up else -1)
        put(base / "mtu", mtu)
        put(base / "device/current_link_width", width)
        if driver and not (base / "device/driver").is_symlink():
            (base / "device/driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        self.links = [entry for entry in self.links if entry["ifname"] != name]
        self.links.append(link_json(name, addresses, up, mtu, kind, loopback=name == "lo"))
        return self

    def default_route(self, name: str, gateway: str = "10.0.5.1") -> Machine:
        self.routes.append({"dst": "default", "gateway": gateway, "dev": name, "protocol": "dhcp", "metric": 600, "flags": []})
        return self

    def hca(self, name: str, interface: str, slots: t.Sequence[t.Any] = (), state: str = "4: ACTIVE", port: int = 1) -> Machine:
        """``slots`` holds (GID, type) or None for an empty slot whose type cannot be read."""
        base = self.root / "sys/class/infiniband" / name / "ports" / str(port)
        put(base / "state", state)
        put(base / "link_layer", "Ethernet")
        (base / "gids").mkdir(exist_ok=True)
        for index, slot in enumerate(slots):
            gid, kind = slot or (EMPTY_GID, UNREADABLE)
            put(base / "gids" / str(index), gid)
            put(base / "gid_attrs/types" / str(index), kind)
            put(base / "gid_attrs/ndevs" / str(index), UNREADABLE if slot is None else interface)
        return self

    def facts(self, **more: t.Any) -> dict[str, t.Any]:
        roots = {name: str(self.root / name) for name in ("sys", "proc", "etc")}
        return {**read_facts(roots, self.links, self.routes, self.ibv_devinfo), **more}


def table_of(*addresses: str) -> list[t.Tuple[str, str]]:
    """The usual GID table: link-local and each address, v1 and v2."""
    return [(gid, kind) for gid in (LINK_LOCAL, *(mapped(address) for address in addresses)) for kind in (V1, V2)]


def spark(root: pathlib.Path, cable: t.Mapping[int, t.Sequence[str]], mtu: int = 9000) -> Machine:
    """A Spark. ``cable`` maps a QSFP port (0, 1) to the addresses of its two halves; a port without cable is down."""
    machine = Machine(root)
    machine.interface("enP7s7", "192.0.2.21/24", speed=10000, mtu=1500, width=1, driver="r8127").default_route("enP7s7", "192.0.2.1")
    for half, prefix in enumerate(("p1", "P2p1")):
        for port in (0, 1):
            name, up = f"en{prefix}s0f{port}np{port}", port in cable
            address = (list(cable.get(port, ())) + ["", ""])[half]
            machine.interface(name, *([address] if address else []), up=up, mtu=mtu if up else 1500, driver="mlx5_core")
            machine.hca(
                f"roce{prefix}s0f{port}",
                name,
                table_of(*([address.split("/")[0]] if address else [])) + [None, None],
                "4: ACTIVE" if up else "1: DOWN",
            )
    return machine


def seed_pair(tmp_path: pathlib.Path, mtu: int = 9000) -> dict[str, Machine]:
    """The pair of both documents: the head is cabled at port 1, the worker at port 0."""
    return {
        "spark-1": spark(tmp_path / "spark-1", {1: ("198.51.100.11/24", "203.0.113.11/24")}, mtu),
        "spark-2": spark(tmp_path / "spark-2", {0: ("198.51.100.12/24", "203.0.113.12/24")}, mtu),
    }


SEED_ADDRESSES = {"spark-1": "198.51.100.11", "spark-2": "198.51.100.12"}
