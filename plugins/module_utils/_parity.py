# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What the ranks of a group should have in common: kernel, driver, firmware, clock; and what one node alone has wrong."""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

Facts = t.Mapping[str, t.Any]

CLOCK_WARN_SECONDS = 2.0
CLOCK_REFUSE_SECONDS = 60.0

# Kernel releases by prefix, with what they do. 6.17.0-1032-nvidia is known to be good.
KNOWN_BAD_KERNELS = {
    "7.0.0-1019": "RDMA memory registration fails with ENOMEM; boot 6.17, or 7.0 with kho=off, and hold the kernel packages",
    "7.0.0-31": "RDMA memory registration fails with ENOMEM; boot 6.17, or 7.0 with kho=off, and hold the kernel packages",
}
# NVIDIA Sync writes this file and disables other netplan files.
FOREIGN_NETPLAN = re.compile(r"^netplan/\d+-nvidia-sync.*\.yaml$")

ITEMS: dict[str, t.Callable[[Facts], str]] = {
    "kernel": lambda facts: facts["kernel"],
    "driver": lambda facts: facts["driver"],
    "DGX OS": lambda facts: facts["dgx_release"],
    "RDMA firmware": lambda facts: ", ".join(sorted({port["firmware"] for port in facts["ports"] if port["firmware"]})),
}


@dataclasses.dataclass
class Parity:
    """``table`` has one row per item with the value of each node; notices are per node."""

    table: list[dict[str, t.Any]]
    notices: dict[str, list[str]]
    refusals: list[Refusal]


def check_clocks(ahead: t.Mapping[str, float], parity: Parity) -> None:
    """``ahead`` is how far each clock is certainly ahead of the controller's, in seconds."""
    for (one, mine), (other, theirs) in itertools.combinations(ahead.items(), 2):
        skew = abs(mine - theirs)
        if skew > CLOCK_REFUSE_SECONDS:
            parity.refusals.append(clock_refusal(other, one, skew))
        elif skew > CLOCK_WARN_SECONDS:
            parity.notices[other].append(clock_notice(one, skew))


def clock_refusal(node: str, peer: str, skew: float) -> Refusal:
    return Refusal(
        "fabric.clock", node, "clock", f"{skew:.0f} s apart from {peer}", f"at most {CLOCK_REFUSE_SECONDS:.0f} s",
        "set a time source that both nodes reach (chrony or systemd-timesyncd), then run again",
    )


def clock_notice(peer: str, skew: float) -> str:
    return f"the clock is {skew:.0f} s apart from {peer}: set a time source that both nodes reach"


def compare(facts: t.Mapping[str, Facts], parity: Parity) -> None:
    for item, read in ITEMS.items():
        values = {name: read(entry) or "unknown" for name, entry in facts.items()}
        known = {value for value in values.values() if value != "unknown"}
        parity.table.append({"item": item, "values": values, "same": len(known) <= 1})
        first, *others = values
        for name in others:
            if len({values[first], values[name]} - {"unknown"}) == 2:
                parity.notices[name].append(f"{item} {values[name]} differs from {values[first]} on {first}")


def bad_kernel(kernel: str) -> str:
    for prefix, effect in KNOWN_BAD_KERNELS.items():
        if kernel == prefix or re.match(re.escape(prefix) + r"(?!\d)", kernel):
            return effect
    return ""


def check_node(facts: Facts, addresses: t.Collection[str]) -> list[str]:
    """What needs no peer to be seen."""
    notices = []
    effect = bad_kernel(facts["kernel"])
    if effect and not facts["kho_off"]:
        notices.append(f"kernel {facts['kernel']} is known to be bad: {effect}")
    if facts["cma"]["total"] == 0 and facts["cma"]["free"] > 0 and not facts["kho_off"]:
        notices.append(f"CmaTotal 0 with CmaFree {facts['cma']['free']} kB: about 26 GiB of memory are lost; boot with kho=off, or a 6.17 kernel")
    configuration = facts["configuration"]
    for address in sorted(addresses):
        # Unreadable files may name the address, and without any file something else manages the network.
        if configuration["files"] and not configuration["unreadable"] and configuration["named"].get(address) == []:
            notices.append(f"{address} stands in no network configuration file: it will be gone after a reboot")
    for name in configuration["files"]:
        if FOREIGN_NETPLAN.match(name):
            notices.append(f"/etc/{name} belongs to NVIDIA Sync, which disables other netplan files; it is left alone")
    for port in facts["ports"]:
        if port["aer"].get("fatal") or port["aer"].get("nonfatal"):
            notices.append(f"{port['hca']} counts PCIe errors (fatal {port['aer'].get('fatal', 0)}, nonfatal {port['aer'].get('nonfatal', 0)})")
    return notices


def check_parity(facts: t.Mapping[str, Facts], addresses: t.Mapping[str, t.Collection[str]], ahead: t.Mapping[str, float]) -> Parity:
    """Compare the nodes; ``addresses`` are the fabric addresses that each node uses, ``ahead`` is for check_clocks."""
    parity = Parity([], {name: check_node(entry, addresses.get(name, ())) for name, entry in facts.items()}, [])
    compare(facts, parity)
    check_clocks(ahead, parity)
    return parity
