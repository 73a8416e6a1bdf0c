# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What NCCL's log says about the way that the ranks took. Some faults show nowhere else: sockets instead of RDMA work, slowly.

Standard library only: the rank service reads its container's log by it.
"""

from __future__ import annotations

import re
import typing as t

USING = re.compile(r"NET/(IB|Socket) ?: Using (.*)")
DEVICE = re.compile(r"\[\d+\]([^:\s]+):(\d+)")
OUT_OF_BAND = re.compile(r"(?:OOB|Bootstrap ?: Using) (\S+?):")
MODIFY_QP = re.compile(r"ibv_modify_qp failed with (\d+)[^,]*, on dev ([^:,\s]+).*?local GID index (\d+), local GID (\S+), remote GID (\S+)")
# NCCL compares the versions itself, at each start, and gives up where they differ.
VERSIONS = re.compile(r"Mismatched NCCL version detected : rank (\d+) version (\d+) rank (\d+) version (\d+)")
EMPTY_GID = "::"


def queue_pair_finding(code: str, device: str, index: str, local: str, remote: str) -> str:
    """A failed connection of two RDMA ports; the empty GID tells on which side the fault is."""
    if local == EMPTY_GID:
        return f"GID slot {index} of {device} is empty on this node: set fabric_gid_policy to unpinned or auto"
    if remote == EMPTY_GID:
        return f"the peer's GID slot is empty ({device} here is right): its own log names the slot"
    if code == "110":
        return f"{device} got no answer from {remote}: GIDs of different networks, a filter, or the cable"
    return f"{device} could not connect to {remote} (error {code}, local GID {local} at index {index})"


def version_finding(one: str, its: str, other: str, that: str) -> str:
    """The image is the same on all ranks, so another version is one that a host has lent."""
    return (
        f"the ranks load different NCCL, {readable_version(its)} on rank {one} and {readable_version(that)} on rank {other}: "
        "serve_host_nccl_dir needs the same library on every rank, or none on any"
    )


def readable_version(code: str) -> str:
    """``23007`` is 2.30.7."""
    return f"{int(code) // 10000}.{int(code) // 100 % 100}.{int(code) % 100}"


def given_way(environment: t.Iterable[str]) -> tuple[str, list[str]]:
    """Interface and RDMA ports that a container was given, from its NAME=value lines. Only the exact form names them."""
    values = dict(line.partition("=")[::2] for line in environment)

    def exact(name: str) -> list[str]:
        value = values.get(name, "")
        return [one.removesuffix(":1") for one in value[1:].split(",")] if value.startswith("=") else []

    interfaces = exact("NCCL_SOCKET_IFNAME")
    return interfaces[0] if len(interfaces) == 1 else "", exact("NCCL_IB_HCA")


def read_nccl_log(text: str, interface: str = "", hcas: t.Collection[str] = ()) -> list[str]:
    """Findings, each once, in the order of the log. ``interface`` and ``hcas`` are what the rank was given."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        for finding in line_findings(line, interface, hcas):
            found[finding] = None
    return list(found)


def line_findings(line: str, interface: str, hcas: t.Collection[str]) -> list[str]:
    if "NET/IB : No device found" in line:
        return ["NCCL found no RDMA device: /dev/infiniband is not in the container, or no port is ACTIVE; it goes on over sockets at a tenth of the speed"]
    if "no socket interface found" in line:
        return ["NCCL_SOCKET_IFNAME names no interface of this node"]
    failed = MODIFY_QP.search(line)
    if failed:
        return [queue_pair_finding(*failed.groups())]
    differing = VERSIONS.search(line)
    if differing:
        return [version_finding(*differing.groups())]
    findings = []
    using = USING.search(line)
    if using:
        kind, rest = using.groups()
        used = {device if port == "1" else f"{device}:{port}" for device, port in DEVICE.findall(rest)}
        missing, strange = sorted(set(hcas) - used), sorted(used - set(hcas)) if hcas else []
        if kind == "Socket" and hcas:
            findings.append("NCCL uses sockets although RDMA ports were given")
        if kind == "Socket" and interface and interface not in (names := [device for device, dummy in DEVICE.findall(rest)]):
            findings.append(f"NCCL's data goes over {', '.join(names)} instead of {interface}")
        if kind == "IB" and missing:
            findings.append(f"NCCL does not use {', '.join(missing)}")
        if kind == "IB" and strange:
            findings.append(f"NCCL uses {', '.join(strange)}, which was not chosen")
    out_of_band = OUT_OF_BAND.search(line)
    if interface and out_of_band and out_of_band.group(1) != interface:
        findings.append(f"NCCL's control connection is on {out_of_band.group(1)} instead of {interface}")
    return findings
