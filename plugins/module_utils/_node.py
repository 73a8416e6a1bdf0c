# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Pure readers of what a node tells about itself. Texts in, plain values out; no I/O."""

from __future__ import annotations

import re
import typing as t

TCP_LISTEN = "0A"  # state column of /proc/net/tcp, include/net/tcp_states.h

# Variables that upstream launchers and libraries honour. We read none of them, and say so.
AMBIENT_NAMES = re.compile(
    r"^(DOCKER_HOST|HF_.*|HUGGING_FACE_HUB_TOKEN|TRANSFORMERS_.*|VLLM_.*|NCCL_.*|GLOO_.*|MAX_MODEL_LEN|MAX_NUM_.*"
    r"|GPU_MEM_UTIL|KV_CACHE_.*|MODEL|IMAGE|TP|NNODES|MASTER_PORT|HEAD_IP|WORKER_.*|GLM53_.*|DSV41_.*|EXL3_.*)$"
)


def parse_meminfo(text: str) -> dict[str, int]:
    """Numbers of /proc/meminfo by name, in KiB (page counts such as HugePages_Total as they are)."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, separator, rest = line.partition(":")
        words = rest.split()
        if separator and words and words[0].isdecimal():
            found[name.strip()] = int(words[0])
    return found


def parse_process_status(text: str) -> dict[str, t.Any]:
    """Name, effective uid, and all gids of /proc/PID/status. A process that is gone has none."""
    fields = {name: words.split() for name, _separator, words in (line.partition(":") for line in text.splitlines())}
    uids, gids = fields.get("Uid", []), [*fields.get("Gid", [])[1:2], *fields.get("Groups", [])]
    return {"name": " ".join(fields.get("Name", [])), "uid": int(uids[1]) if len(uids) > 1 else None, "gids": {int(gid) for gid in gids}}


def parse_os_release(text: str) -> dict[str, str]:
    """The keys of os-release; values with or without quotes."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().partition("=")
        if separator and not name.startswith("#"):
            found[name] = value.strip().strip("\"'")
    return found


def parse_ip_addresses(links: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """IPv4 and global IPv6 addresses of ``ip -json address show``: interface, address, prefix."""
    found = []
    for link in links:
        for entry in link.get("addr_info", []):
            if entry.get("family") == "inet" or entry.get("scope") == "global":
                found.append({"interface": link.get("ifname", ""), "address": entry.get("local", ""), "prefix": entry.get("prefixlen")})
    return found


def parse_listening_inodes(text: str, ports: t.Collection[int]) -> dict[int, list[str]]:
    """Socket inodes that listen on the given ports, from /proc/net/tcp or tcp6."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines()[1:]:
        columns = line.split()
        if len(columns) < 10 or columns[3] != TCP_LISTEN:
            continue
        port = int(columns[1].rsplit(":", 1)[1], 16)
        if port in ports:
            found.setdefault(port, []).append(columns[9])
    return found


def ambient_settings(environ: t.Iterable[str]) -> list[str]:
    """Names in the login environment that look like settings. They have no effect here."""
    return sorted(name for name in environ if AMBIENT_NAMES.match(name))
