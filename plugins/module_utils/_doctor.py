# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What the doctor makes of a node beyond its fabric: driver, GPU clocks, package holds, kernel log, metrics. And its report."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._nccl_log import read_nccl_log
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

GPU_FIELDS = ("name", "driver_version", "clocks.current.sm", "power.draw", "temperature.gpu", "utilization.gpu")
MISMATCH = "Driver/library version mismatch"
LIBRARY = re.compile(r"^lib(?:nvidia-ml|cuda)\.so\.(\d+\.\d[\d.]*)$")
HOLDABLE = re.compile(r"^(?:linux-(?:image|headers|modules|nvidia)|nvidia-|libnvidia-)")
BUSY_PERCENT, SLOW_MHZ, HOT_CELSIUS = 50.0, 900.0, 85.0

# Kernel lines worth a look. NV_ERR_NO_MEMORY is none: it occurs on healthy starts.
KERNEL_LINES = {
    re.compile(r"NVRM: Xid \([^)]*\): (\d+)"): "GPU error Xid {0}",
    re.compile(r"(\S+): AER: Uncorrectable \(Fatal\)"): "fatal PCIe error at {0}",
    re.compile(r"mlx5_core (\S+): mlx5_pci_err_detected"): "the ConnectX-7 function {0} was lost to a PCIe error",
    re.compile(r"soft lockup - CPU#\d+ stuck .*\[([^\]:]+)"): "soft lockup in {0}",
    re.compile(r"Out of memory: Killed process \d+ \(([^)]+)\)"): "the kernel killed {0} for want of memory",
    re.compile(r"(mt7925\w*).*(?:BUG|Oops|reset failed)"): "the Wi-Fi driver {0} failed",
}

Reading = t.Mapping[str, t.Any]


def library_versions(names: t.Iterable[str]) -> list[str]:
    """Versions of the user-space driver, from the names of its library files."""
    return sorted({match.group(1) for match in map(LIBRARY.match, names) if match})


def parse_gpu(text: str) -> list[dict[str, t.Any]]:
    """Rows of ``nvidia-smi --query-gpu`` in CSV without header and units; [N/A] is None."""
    rows = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(GPU_FIELDS):
            rows.append({name: number_or_text(value) for name, value in zip(GPU_FIELDS, values)})
    return rows


def number_or_text(value: str) -> t.Any:
    if value.startswith("[") or value == "N/A":
        return None
    try:
        return float(value) if re.match(r"^-?\d+(\.\d+)?$", value) else value
    except ValueError:
        return value


def parse_ethtool(text: str) -> dict[str, t.Any]:
    """Speed in Mb/s, link, the reason of a missing link, and the medium, from what ``ethtool`` prints to an ordinary user."""
    values = dict(re.findall(r"^\s*(Speed|Link detected|Port): (.*)$", text, re.MULTILINE))
    speed = re.match(r"(\d+)Mb/s", values.get("Speed", ""))
    link = re.match(r"(yes|no)(?: \((.*)\))?", values.get("Link detected", ""))
    return {
        "speed": int(speed.group(1)) if speed else None,
        "link": link.group(1) == "yes" if link else None,
        "reason": (link.group(2) or "") if link else "",
        "medium": values.get("Port", ""),
    }


def kernel_findings(text: str) -> list[str]:
    """What stands out in the kernel's log, each kind once with its count."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        for pattern, words in KERNEL_LINES.items():
            match = pattern.search(line)
            if match:
                finding = words.format(*match.groups())
                counts[finding] = counts.get(finding, 0) + 1
    return [finding if count == 1 else f"{finding} ({count} times)" for finding, count in counts.items()]


def check_driver(name: str, reading: Reading, loaded: str) -> list[Refusal]:
    installed = library_versions(reading["libraries"])
    differs = loaded and installed and loaded not in installed
    if not differs and MISMATCH not in reading["gpu_error"]:
        return []
    return [
        Refusal(
            "doctor.driver_mismatch", name, "NVIDIA driver", f"kernel module {loaded or 'unknown'}, libraries {', '.join(installed) or 'unknown'}",
            "one version: containers lose the GPU otherwise", "reboot the node",
        )
    ]


def gpu_notices(reading: Reading) -> list[str]:
    notices = []
    for row in parse_gpu(reading["gpu"]):
        clock, busy, heat = (row[field] for field in ("clocks.current.sm", "utilization.gpu", "temperature.gpu"))
        if isinstance(clock, float) and isinstance(busy, float) and busy >= BUSY_PERCENT and clock < SLOW_MHZ:
            power = row["power.draw"]
            notices.append(
                f"{row['name']} runs at {clock:.0f} MHz ({power} W) at {busy:.0f} % load: stuck in a low-power state; "
                "shut the machine down, unplug its power supply for a minute, and start again"
            )
        if isinstance(heat, float) and heat >= HOT_CELSIUS:
            notices.append(f"{row['name']} is at {heat:.0f} degrees: machines have shut down by heat; check the cooling, or cap the GPU clock")
    return notices


def upkeep_notices(reading: Reading, gb10: bool) -> list[str]:
    notices = []
    if gb10 and reading["automatic_upgrades"] and not any(HOLDABLE.match(package) for package in reading["held"]):
        notices.append(
            "packages are upgraded unattended, and no kernel or NVIDIA package is held: a routine upgrade may bring another kernel or driver "
            "(apt-mark hold linux-image-... nvidia-...)"
        )
    if not reading["journal_kept"]:
        notices.append("the journal is not kept over a reboot (no /var/log/journal): the reason of an unasked reboot will be lost")
    if reading["metrics"] == "off":
        notices.append("the API answers but shows no vLLM metrics at /metrics: is --disable-log-stats among the arguments?")
    return notices


def node_notices(reading: Reading, facts: Reading, choice: Reading) -> list[str]:
    """Everything about one node that is worth saying and stops nothing."""
    log = read_nccl_log(reading["rank_log"], choice.get("interface", ""), choice.get("hcas", ()))
    return [
        *gpu_notices(reading),
        *upkeep_notices(reading, facts["gb10"]),
        *(f"kernel log: {finding}" for finding in kernel_findings(reading["kernel_log"])),
        *(f"log of the rank: {finding}" for finding in log),
    ]


# --- the report ------------------------------------------------------------------------------------------------


def table_lines(table: t.Sequence[Reading]) -> list[str]:
    """The parity table as text: one row per item, one column per node."""
    if not table:
        return []
    names = list(table[0]["values"])
    rows = [["", *names, ""], *([row["item"], *(row["values"][name] for name in names), "" if row["same"] else "differs"] for row in table)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def link_line(port: Reading, ethtool: Reading) -> str:
    words = [port["state"] or "unreadable"]
    if port["state"] == "ACTIVE":
        words += [port["rate"], f"RDMA MTU {port['rdma_mtu']}", f"usable GIDs {port['usable'] or 'none'}"]
    else:
        words.append(ethtool.get("reason") or "no link")
    return f"  {port['hca']} ({port['interface'] or 'no interface'}): {', '.join(word for word in words if word)}"


def report_lines(
    names: t.Sequence[str],
    facts: t.Mapping[str, Reading],
    readings: t.Mapping[str, Reading],
    choices: t.Mapping[str, Reading],
    notices: t.Mapping[str, t.Sequence[str]],
    refusals: t.Sequence[Refusal],
    table: t.Sequence[Reading],
) -> list[str]:
    lines = []
    for name in names:
        choice = choices.get(name) or {}
        used = f"{choice['interface']} {choice['address']}, {choice['selector'] or 'no RDMA'}, {choice['topology']}" if choice else "not planned"
        lines.append(f"{name}: {used}")
        links = (readings.get(name) or {}).get("links", {})
        lines += [link_line(port, links.get(port["interface"], {})) for port in (facts.get(name) or {"ports": []})["ports"]]
        lines += [f"  WRONG   {refusal.text}" for refusal in refusals if refusal.node == name]
        lines += [f"  notice  {notice}" for notice in notices.get(name, ())]
    lines += [f"WRONG   {refusal.text}" for refusal in refusals if refusal.node not in names]
    return [*lines, *table_lines(table)]
