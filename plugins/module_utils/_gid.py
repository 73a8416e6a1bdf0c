# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""GID tables of RoCE ports: what each slot holds, and which slots a rank may use.

A slot is usable when its type is RoCE v2 and its GID is the IPv4-mapped form of an address that the node itself
has on that port. Slots move with link events and reboots and differ between nodes, so an index is a finding of
the moment, never a setting to keep. This file imports only the standard library and nothing of the collection:
the entry script of a rank may carry it to find the index again at each start.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import typing as t

ROCE_V2 = "RoCE v2"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One filled entry of a GID table. ``kind`` or ``interface`` is empty where the kernel would not say."""

    index: int
    gid: str
    ipv4: str
    kind: str
    interface: str

    def as_dict(self) -> dict[str, t.Any]:
        return dataclasses.asdict(self)


def read_attribute(*parts: str) -> str:
    """A sysfs attribute; empty when reading fails, as it does for each empty slot of a real card."""
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def mapped_ipv4(gid: str) -> str:
    """The IPv4 address inside an IPv4-mapped GID, else an empty string."""
    try:
        mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    except ValueError:
        return ""
    return str(mapped) if mapped else ""


def is_empty(gid: str) -> bool:
    return not gid.strip("0:")


def read_table(sys_root: str, hca: str, port: int = 1) -> list[Slot]:
    """The filled slots of one port, by index. Empty, unreadable, and foreign entries are skipped."""
    folder = os.path.join(sys_root, "class/infiniband", hca, "ports", str(port))
    try:
        indexes = sorted(int(name) for name in os.listdir(os.path.join(folder, "gids")) if name.isdecimal())
    except OSError:
        return []
    slots = []
    for index in indexes:
        gid = read_attribute(folder, "gids", str(index))
        if is_empty(gid):
            continue
        kind = read_attribute(folder, "gid_attrs/types", str(index))
        interface = read_attribute(folder, "gid_attrs/ndevs", str(index))
        slots.append(Slot(index, gid, mapped_ipv4(gid), kind, interface))
    return slots


def usable_indexes(slots: t.Iterable[Slot], addresses: t.Collection[str]) -> list[int]:
    """Indexes of the slots that hold one of ``addresses`` as RoCE v2."""
    return [slot.index for slot in slots if slot.kind == ROCE_V2 and slot.ipv4 and slot.ipv4 in addresses]


def common_index(usable: t.Mapping[str, t.Sequence[int]]) -> int | None:
    """The lowest index that is usable on every HCA: NCCL takes one number for all of them."""
    if not usable:
        return None
    shared = set.intersection(*(set(indexes) for indexes in usable.values()))
    return min(shared) if shared else None


def describe_slot(slots: t.Iterable[Slot], index: int) -> str:
    for slot in slots:
        if slot.index == index:
            return f"{slot.kind or 'unknown type'} {slot.ipv4 or slot.gid}"
    return "empty"


def describe_table(tables: t.Mapping[str, t.Sequence[Slot]]) -> str:
    """All filled slots of several HCAs on one line, for a refusal."""
    rows = []
    for hca, slots in tables.items():
        entries = ", ".join(f"{slot.index} = {slot.kind or 'unknown type'} {slot.ipv4 or slot.gid}" for slot in slots)
        rows.append(f"{hca}: {entries or 'no GID at all'}")
    return "; ".join(rows)


def resolve(sys_root: str, addresses: t.Mapping[str, t.Collection[str]]) -> tuple[int | None, str]:
    """The index to pin right now for HCAs with the given own addresses, and the tables as text.

    A key may carry a port (``mlx5_0:2``); without one it is port 1.
    """
    tables, usable = {}, {}
    for name, own in addresses.items():
        hca, dummy, port = name.partition(":")
        tables[name] = read_table(sys_root, hca, int(port or 1))
        usable[name] = usable_indexes(tables[name], own)
    return common_index(usable), describe_table(tables)
