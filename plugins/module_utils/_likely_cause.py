# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What the words of a rank that failed usually mean. Known patterns only: no match says nothing, and a match is told as likely."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._nccl_log import read_nccl_log

# (what the log says, what it usually means, what to do). The first match of a line counts, so the special stands before the general.
PATTERNS: tuple[tuple[str, str, str], ...] = (
    (r"Free memory on device.*less than desired|No available memory for the cache blocks|larger than the available KV cache",
     "the engine finds too little memory for its settings", "lower serve_gpu_memory_utilization or the context, or free what memory.yml lists"),
    (r"CUDA out of memory|NV_ERR_NO_MEMORY|OutOfMemoryError|Cannot allocate memory", "memory ran out",
     "look at memory.yml; the page cache and other tenants count too"),
    (r"no kernel image is available|no such kernel image|sm_1[0-9]+.*not compatible", "the image has no kernels for this GPU",
     "take the image that the profile names"),
    (r"exec format error", "the image is for another kind of processor", "take the image for this platform"),
    (r"EADDRINUSE|[Aa]ddress already in use", "a port is taken by another process", "stop it, or change serve_port or serve_rendezvous_port"),
    (r"ncclUnhandledCudaError|CUDA driver version is insufficient|Driver/library version mismatch|nvidia-container-cli",
     "the container does not get a working GPU", "run doctor.yml: after a driver upgrade the machine must be rebooted"),
    (r"ibv_reg_mr.*failed|ibv_create_qp.*failed|memlock", "RDMA memory cannot be registered",
     "look at the kernel (some have a bug here), at memlock, and at /dev/infiniband in the container"),
    (r"Watchdog caught collective operation timeout|NCCL.*[Tt]imeout|ncclRemoteError|ncclSystemError|Connection closed by (?:remote )?peer",
     "a rank was lost, or its link", "read the log of the other rank first; then fabric.yml and doctor.yml"),
    (r"rendezvous.*timed out|DistStoreError|TCPStore.*timed? ?out|timed out.*waiting for (?:clients|ranks)|no rank 0 at", "the ranks did not find each other",
     "a rank did not start, or the rendezvous port is filtered: doctor.yml tests it"),
    (r"(?:FileNotFoundError|No such file or directory|does not appear to have a file named).*(?:model|safetensors|config\.json|tokenizer)"
     r"|safetensors_rust\.SafetensorError|Error while deserializing header",
     "model files are missing or damaged on this rank", "run weights.yml and sync.yml with --tags verify"),
    (r"Stale file handle|Transport endpoint is not connected", "the mount with the weights is dead", "run sync.yml; it mounts them again"),
    (r"unrecognized arguments|error: argument |ValidationError.*(?:Config|Args)|Unknown (?:attention|quantization|speculative)",
     "the engine does not take its arguments", "compare settings.yml with what this image knows; was the image changed?"),
    (r"No space left on device", "a disk is full", "run prune.yml in check mode: it lists what can go"),
    (r"sparkops entry: refused", "the entry script refused the start", "its line says what to mend"),
    (r"(?:trust_remote_code|chat.?template).*(?:not|no such)", "a file that the settings name is not in the container", "give it in serve_files"),
    (r"EngineCore encountered an issue|EngineDeadError", "the engine's core died", "the reason stands above this line in the log"),
)
COMPILED = tuple((re.compile(pattern), means, do) for pattern, means, do in PATTERNS)


def causes_of(lines: t.Iterable[str]) -> list[str]:
    """Likely causes in the order of the lines, each once."""
    found: dict[str, None] = {}
    for line in lines:
        for finding in read_nccl_log(line):
            found[finding] = None
        match = next(((means, do) for pattern, means, do in COMPILED if pattern.search(line)), None)
        if match:
            found[f"{match[0]}: {match[1]}"] = None
    return list(found)


def likely_causes(logs: t.Mapping[str, t.Sequence[str]], containers: t.Mapping[str, t.Mapping[str, t.Any] | None]) -> list[str]:
    """One line for each cause, with the rank that told it. The engine's own verdict on memory stands before any words."""
    lines = []
    for name, container in containers.items():
        if (container or {}).get("oom_killed"):
            lines.append(f"{name}: the kernel killed it for want of memory: look at memory.yml")
    return lines + [f"{name}: {cause}" for name, log in logs.items() for cause in causes_of(log)]
