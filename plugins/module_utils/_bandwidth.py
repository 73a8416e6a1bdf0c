# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""RDMA bandwidth and latency of a rail with perftest's ib_write_bw and ib_write_lat: the commands, their output, and a verdict.

Messages of 64 KiB need half a MiB in all; where even that is too large a part of what the memory has left, they are smaller. A test of
gigabytes has frozen machines whose memory is shared with the GPU.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

SECONDS = 3
LIMIT_SECONDS, SECONDS_PER_RAIL = 60, 10  # the serving side waits for its turn
QUEUE_PAIRS = 4
LARGEST_MESSAGE, SMALLEST_MESSAGE = 65536, 4096
MEMORY_SHARE = 256  # the buffers take at most this part of MemAvailable
LATENCY_ROUNDS = 1000
BASE_PORT = 18515
PORTS_PER_RANK, LATENCY_PORTS = 16, 8  # the second half of a rank's ports is for latency
# Gb/s of one half of a QSFP port: 92 to 112 is healthy, 50 comes of a x2 PCIe link, 13 of a port that was initialised badly.
HEALTHY, HALF = 80.0, 30.0
ROW = re.compile(r"^\s*\d+\s+\d+\s+\d+\.\d+\s+(\d+\.\d+)\s+\d+\.\d+\s*$", re.MULTILINE)
# bytes, iterations, then min, max, typical, average, ... in microseconds
LATENCY_ROW = re.compile(r"^\s*\d+\s+\d+\s+\d+\.\d+\s+\d+\.\d+\s+(\d+\.\d+)\s+\d+\.\d+", re.MULTILINE)
ADVICE = {
    "half": "look for PCIe width x2 in the report of the play doctor and update the firmware of the machine",
    "degraded": "reboot this node; if that does not help, shut both down and unplug their power for a minute (a cable moved while running does this)",
}


def message_bytes(available_kib: t.Iterable[int | None]) -> int:
    """The size that suits the node with the least memory left; both sides must take the same. perftest has two buffers per queue pair."""
    least = min((kib for kib in available_kib if kib), default=None)
    size = LARGEST_MESSAGE
    while least is not None and size > SMALLEST_MESSAGE and 2 * QUEUE_PAIRS * size > least * 1024 // MEMORY_SHARE:
        size //= 2
    return size


def common_words(tool: str, rail: t.Mapping[str, t.Any], gid_index: int, port: int, rails: int) -> list[str]:
    hca, dummy, number = rail["hca"].partition(":")
    limit = LIMIT_SECONDS + SECONDS_PER_RAIL * rails
    return ["timeout", "--signal=KILL", str(limit), tool, "-d", hca, "-i", number or "1", "-x", str(gid_index), "-p", str(port), "-F"]


def bandwidth_command(rail: t.Mapping[str, t.Any], gid_index: int, port: int, size: int, rails: int, peer: str = "") -> list[str]:
    """For the serving side, or with the address of a peer for the measuring side. ``rails`` is how many take their turn."""
    options = ["-s", str(size), "-q", str(QUEUE_PAIRS), "-D", str(SECONDS), "--report_gbits"]
    return [*common_words("ib_write_bw", rail, gid_index, port, rails), *options, *([peer] if peer else [])]


def latency_command(rail: t.Mapping[str, t.Any], gid_index: int, port: int, rails: int, peer: str = "") -> list[str]:
    return [*common_words("ib_write_lat", rail, gid_index, port + LATENCY_PORTS, rails), "-n", str(LATENCY_ROUNDS), *([peer] if peer else [])]


def turns(rails: int, ranks: int) -> int:
    """How many rails a group has where every rank has as many: they take turns."""
    return -(-rails * ranks // 2)


def numbered(rails: t.Sequence[t.Mapping[str, t.Any]], peer: str, serving: bool, rank: int) -> list[tuple[int, t.Mapping[str, t.Any]]]:
    """The rails to one peer with a port for each, in an order that both sides see alike; ``rank`` is the later one's, which measures."""
    chosen = [rail for rail in rails if rail["hca"] and rail["peer"] == peer]
    chosen.sort(key=lambda rail: rail["address"] if serving else rail["peer_address"])
    return [(BASE_PORT + rank * PORTS_PER_RANK + place, rail) for place, rail in enumerate(chosen)]


def parse(text: str) -> float | None:
    """Mean of the average bandwidth of all rows, in Gb/s."""
    rows = [float(value) for value in ROW.findall(text)]
    return round(sum(rows) / len(rows), 2) if rows else None


def parse_latency(text: str) -> float | None:
    """The typical time of one write, in microseconds."""
    rows = LATENCY_ROW.findall(text)
    return float(rows[-1]) if rows else None


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
