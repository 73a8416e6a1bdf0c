# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""RDMA bandwidth of a rail with perftest's ib_write_bw: the command, its output, and a verdict.

Messages of 64 KiB need some MiB in all, so that the test is safe beside anything that fills unified memory.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

SECONDS = 3
LIMIT_SECONDS = 60
BASE_PORT = 18515
PORTS_PER_RANK = 16
# Gb/s of one half of a QSFP port: 92 to 112 is healthy, 50 comes of a x2 PCIe link, 13 of a port that was initialised badly.
HEALTHY, HALF = 80.0, 30.0
ROW = re.compile(r"^\s*\d+\s+\d+\s+\d+\.\d+\s+(\d+\.\d+)\s+\d+\.\d+\s*$", re.MULTILINE)
ADVICE = {
    "half": "look for PCIe width x2 in the report of the play doctor and update the firmware of the machine",
    "degraded": "reboot this node; if that does not help, shut both down and unplug their power for a minute (a cable moved while running does this)",
}


def command(rail: t.Mapping[str, t.Any], gid_index: int, port: int, peer: str = "") -> list[str]:
    """For the serving side, or with the address of a peer for the measuring side."""
    hca, dummy, number = rail["hca"].partition(":")
    options = ["-d", hca, "-i", number or "1", "-x", str(gid_index), "-p", str(port), "-s", "65536", "-q", "4", "-D", str(SECONDS), "-F", "--report_gbits"]
    return ["timeout", "--signal=KILL", str(LIMIT_SECONDS), "ib_write_bw", *options, *([peer] if peer else [])]


def numbered(rails: t.Sequence[t.Mapping[str, t.Any]], head: str, head_side: bool, rank: int) -> list[tuple[int, t.Mapping[str, t.Any]]]:
    """The rails between the head and the worker of a rank with a port for each, in an order that both sides see alike."""
    chosen = [rail for rail in rails if rail["hca"] and (head_side or rail["peer"] == head)]
    chosen.sort(key=lambda rail: rail["address"] if head_side else rail["peer_address"])
    return [(BASE_PORT + rank * PORTS_PER_RANK + place, rail) for place, rail in enumerate(chosen)]


def parse(text: str) -> float | None:
    """Mean of the average bandwidth of all rows, in Gb/s."""
    rows = [float(value) for value in ROW.findall(text)]
    return round(sum(rows) / len(rows), 2) if rows else None


def verdict(gbits: float, hca_type: str) -> str:
    """healthy, half, or degraded for a ConnectX (MT4129 in a Spark); other hardware, such as soft-RoCE, is only measured."""
    if not hca_type.startswith("MT"):
        return "measured"
    return "healthy" if gbits >= HEALTHY else "half" if gbits >= HALF else "degraded"


def judge(node: str, rail: t.Mapping[str, t.Any], gbits: float, word: str, floor: float) -> Refusal | None:
    if not floor or gbits >= floor:
        return None
    return Refusal(
        "fabric.bandwidth", node, f"rail {rail['hca']} to {rail['peer_hca']} of {rail['peer']}", f"{gbits} Gb/s ({word})", f"at least {floor} Gb/s",
        ADVICE.get(word, "look at the report of the play doctor, or lower fabric_bandwidth_floor"),
    )
