# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What is free on unified memory, what holds the rest, and whether an engine fits. Readers of texts, and pure functions.

MemAvailable is the only measure that is right on these machines: MemFree leaves out the page cache, which the kernel
gives back, and NVML has no number at all. Standard library only and no import of the collection, so that the node
service can carry this file as it is.
"""

from __future__ import annotations

import os
import re
import typing as t

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# A change below this is noise of an idle machine, not a tenant.
NOISE_BYTES = 64 * MIB
# What the kernel keeps for /dev/shm when the mount names no size: half of the memory (tmpfs.rst).
SHM_DEFAULT_SHARE = 0.5
# earlyoom's own defaults (its manual): 10 % of memory, and 10 % of swap.
EARLYOOM_DEFAULT_PERCENT = 10.0
MEMORY_DAEMONS = ("earlyoom", "systemd-oomd", "nohang")

_UNITS = {
    "": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "b": 1, "k": KIB, "m": MIB, "g": GIB,  # Docker's own words
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_CONTAINER = re.compile(r"docker[-/]([0-9a-f]{64})")


class Lack(t.NamedTuple):
    """A reason not to start; a refusal without its node."""

    id: str
    thing: str
    found: str
    wanted: str
    next_step: str


class Meminfo(t.NamedTuple):
    """/proc/meminfo in bytes."""

    total: int
    free: int
    available: int
    cached: int
    swap_total: int
    swap_free: int
    hugepages: int
    cma_total: int
    cma_free: int

    @property
    def swap_used(self) -> int:
        return self.swap_total - self.swap_free


class Process(t.NamedTuple):
    """A process with memory of its own. Never its arguments: they may hold a secret."""

    pid: int
    name: str
    started: int
    rss: int
    container: str


class GpuUse(t.NamedTuple):
    """One line of nvidia-smi's compute processes. ``bytes`` is None where it prints [N/A]."""

    pid: int
    name: str
    bytes: int | None


class Tenant(t.NamedTuple):
    """Who else uses the memory of this node."""

    key: str
    bytes: int
    gpu: bool


class Guard(t.NamedTuple):
    """Something that kills when memory is low. One that acts only while the group loads sees no long prompt."""

    name: str
    floor: int
    detail: str
    loading_only: bool = False


# Numbers and their words


def gib(number: float) -> str:
    return f"{number / GIB:.1f} GiB"


def to_bytes(value: t.Any) -> int:
    """A size of profile data: a number of bytes, or a text such as "12 GiB" or Docker's "64g"."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"{value!r} is no size; write a number of bytes or a text such as 12 GiB")
    return round(float(match.group(1)) * _UNITS[match.group(2)])


def holds(condition: t.Mapping[str, t.Any] | None, serving: t.Mapping[str, t.Any]) -> bool:
    """Whether a ``when`` of profile data is true: a list names the values wanted, ``NAME_above`` a number to exceed."""
    for name, wanted in (condition or {}).items():
        if name.endswith("_above"):
            if not (serving.get(name[: -len("_above")]) or 0) > wanted:
                return False
        elif serving.get(name) not in (wanted if isinstance(wanted, (list, tuple)) else [wanted]):
            return False
    return True


# Readers


def read_text(path: str) -> str:
    """The text of a small file, empty when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def read_meminfo(text: str) -> Meminfo:
    """Raises ValueError when the text is not that of /proc/meminfo: nothing may be decided on zeros."""
    found = {name: int(value) for name, value in re.findall(r"^([A-Za-z_()]+):\s+(\d+)", text, re.MULTILINE)}
    lacking = [name for name in ("MemTotal", "MemFree", "MemAvailable") if name not in found]
    if lacking:
        raise ValueError(f"no {' and no '.join(lacking)} in meminfo")
    in_bytes = {name: value * KIB for name, value in found.items()}
    cached = sum(in_bytes.get(name, 0) for name in ("Buffers", "Cached", "SReclaimable")) - in_bytes.get("Shmem", 0)
    return Meminfo(
        total=in_bytes["MemTotal"],
        free=in_bytes["MemFree"],
        available=in_bytes["MemAvailable"],
        cached=max(cached, 0),
        swap_total=in_bytes.get("SwapTotal", 0),
        swap_free=in_bytes.get("SwapFree", 0),
        hugepages=found.get("HugePages_Total", 0) * in_bytes.get("Hugepagesize", 0),
        cma_total=in_bytes.get("CmaTotal", 0),
        cma_free=in_bytes.get("CmaFree", 0),
    )


def read_processes(proc_root: str = "/proc") -> dict[int, Process]:
    """All processes with resident memory. One that ends meanwhile is left out."""
    found = {}
    for entry in os.listdir(proc_root):
        process = _read_process(proc_root, int(entry)) if entry.isdecimal() else None
        if process is not None and process.rss > 0:
            found[process.pid] = process
    return found


def _read_process(proc_root: str, pid: int) -> Process | None:
    folder = os.path.join(proc_root, str(pid))
    # The name stands in brackets and may itself hold blanks and brackets: the last one ends it.
    before, bracket, after = read_text(os.path.join(folder, "stat")).rpartition(")")
    statm = read_text(os.path.join(folder, "statm")).split()
    fields = after.split()
    if not bracket or len(fields) < 20 or len(statm) < 2:
        return None
    container = _CONTAINER.search(read_text(os.path.join(folder, "cgroup")))
    return Process(
        pid=pid,
        name=before.partition("(")[2],
        started=int(fields[19]),
        rss=int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
        container=container.group(1) if container else "",
    )


def read_compute_apps(text: str) -> list[GpuUse]:
    """Lines of ``nvidia-smi --query-compute-apps=pid,process_name,used_gpu_memory --format=csv``, with or without head and unit."""
    found = []
    for line in text.splitlines():
        pid, separator, rest = line.strip().partition(",")
        name, comma, memory = rest.rpartition(",")
        if separator and comma and pid.strip().isdecimal():
            number = re.match(r"\s*(\d+)", memory)
            found.append(GpuUse(int(pid), name.strip(), int(number.group(1)) * MIB if number else None))
    return found


def uses_gpu(document: t.Mapping[str, t.Any]) -> bool:
    """Whether a container, by its inspect document, was given a GPU in one of the ways that Docker has."""
    host = document.get("HostConfig") or {}
    requested = any(
        request.get("Driver") in ("nvidia", "cdi") or any("gpu" in names for names in request.get("Capabilities") or [])
        for request in host.get("DeviceRequests") or []
    )
    devices = any("/dev/nvidia" in (device.get("PathOnHost") or "") for device in host.get("Devices") or [])
    return requested or devices or host.get("Runtime") == "nvidia"


def read_shm_limit(mounts: str, total: int) -> int:
    """What /dev/shm may take from the memory, by /proc/mounts. Containers of the host's IPC namespace share it."""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[1] == "/dev/shm":
            size = re.search(r"(?:^|,)size=(\d+)([kmgKMG%]?)", fields[3])
            if size is None:
                break
            if size.group(2) == "%":
                return total * int(size.group(1)) // 100
            return int(size.group(1)) * {"": 1, "k": KIB, "m": MIB, "g": GIB}[size.group(2).lower()]
    return int(total * SHM_DEFAULT_SHARE)


def read_earlyoom(text: str, total: int) -> Guard | None:
    """The floor of earlyoom from its defaults file; None when the file does not configure it."""
    match = re.search(r"^\s*EARLYOOM_ARGS=(.*)$", text, re.MULTILINE)
    if match is None:
        return None
    arguments = match.group(1).strip().strip("\"'")
    percent = re.search(r"(?:^|\s)-m\s*(\d+(?:\.\d+)?)", arguments)
    kib = re.search(r"(?:^|\s)-M\s*(\d+)", arguments)
    floor = int(total * float(percent.group(1) if percent else EARLYOOM_DEFAULT_PERCENT) / 100)
    # With both given the lower one counts (its manual).
    if kib:
        floor = min(int(kib.group(1)) * KIB, floor) if percent else int(kib.group(1)) * KIB
    return Guard("earlyoom", floor, arguments or "its defaults")


def read_arc(text: str) -> int:
    """Bytes of ZFS's own cache, from its arcstats. The kernel does not count them into MemAvailable."""
    match = re.search(r"^size\s+\d+\s+(\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


# Tenants


def usage(
    processes: t.Mapping[int, Process],
    gpu: t.Sequence[GpuUse],
    containers: t.Mapping[str, str],
    own: t.Collection[str],
) -> dict[str, int]:
    """Bytes by who uses them, without our own containers. ``containers`` has names by id, ``own`` has ids.

    On unified memory what a process holds through the GPU driver stands in no process's RSS: both are added.
    """
    found: dict[str, int] = {}
    gpu_bytes = {use.pid: use.bytes or 0 for use in gpu}
    for process in processes.values():
        if process.container not in own:
            key = _who(process, containers)
            found[key] = found.get(key, 0) + process.rss + gpu_bytes.get(process.pid, 0)
    return found


def _who(process: Process, containers: t.Mapping[str, str]) -> str:
    if process.container:
        return f"container {containers.get(process.container, process.container[:12])}"
    return f"process {process.name}"


def gpu_keys(processes: t.Mapping[int, Process], gpu: t.Sequence[GpuUse], containers: t.Mapping[str, str]) -> set[str]:
    """Who uses the GPU, by the keys of ``usage``."""
    return {_who(processes[use.pid], containers) for use in gpu if use.pid in processes}


def tenants(used: t.Mapping[str, int], gpu_users: t.Collection[str], threshold: int) -> list[Tenant]:
    """The large ones, and all that use the GPU, largest first."""
    found = [Tenant(key, used.get(key, 0), key in gpu_users) for key in {*used, *gpu_users} if used.get(key, 0) >= threshold or key in gpu_users]
    return sorted(found, key=lambda tenant: (-tenant.bytes, tenant.key))


def grown_since(before: t.Mapping[str, int], now: t.Mapping[str, int]) -> dict[str, int]:
    """Who uses more than before, and by how much; noise left out, largest first."""
    more = {key: number - before.get(key, 0) for key, number in now.items() if number - before.get(key, 0) >= NOISE_BYTES}
    return dict(sorted(more.items(), key=lambda item: -item[1]))


def fastest_growing(before: t.Mapping[int, Process], now: t.Mapping[int, Process], count: int = 5) -> list[tuple[Process, int]]:
    """The processes that grew most between two readings. One that came in between, also under a pid of old, grew by all that it has."""
    growth = [
        (process, process.rss - (before[pid].rss if pid in before and before[pid].started == process.started else 0)) for pid, process in now.items()
    ]
    return sorted((pair for pair in growth if pair[1] > 0), key=lambda pair: -pair[1])[:count]


# The idle level


def projected_available(idle: t.Mapping[str, t.Any], used: t.Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """What will be available when our own containers have ended, and the tenants that came since the idle level was recorded."""
    newcomers = grown_since(idle.get("used") or {}, used)
    return int(idle["available"]) - sum(newcomers.values()), newcomers


def better_idle(recorded: t.Mapping[str, t.Any] | None, now: t.Mapping[str, t.Any]) -> bool:
    """Whether a reading while nothing of ours runs shall replace the recorded one.

    Within one boot only a higher level does: a lower one may be memory that the driver did not give back.
    """
    return not recorded or recorded.get("boot") != now["boot"] or now["available"] > recorded["available"] + NOISE_BYTES


def memory_back(available: int, expected: int, tolerance: int) -> bool:
    return available >= expected - tolerance


def steady(series: t.Sequence[int], readings: int = 5) -> bool:
    """Whether memory has stopped coming back: the way out when no idle level is known."""
    last = series[-readings:]
    return len(last) == readings and max(last) - min(last) < NOISE_BYTES


def not_back(available: int, expected: int, waited: float, holders: t.Mapping[str, int]) -> Lack:
    """Memory that a stopped engine still holds. ``holders`` are what is left of it, and others on the GPU."""
    known = ", ".join(f"{key} {gib(number)}" for key, number in list(holders.items())[:5])
    return Lack(
        id="memory.not_back",
        thing="memory after the stop",
        found=f"about {(expected - available) / GIB:.0f} GiB still held since the last stop, waited {waited:.0f} s"
        + (f"; held by {known}" if known else "; no process holds it, so it is the GPU driver"),
        wanted=f"MemAvailable near {gib(expected)}, now {gib(available)}",
        next_step="end what is named, or reboot this node: memory that the driver lost comes back only then",
    )


# The guard of the node service


def guard_verdict(samples: t.Sequence[int], floor_bytes: int, consecutive: int = 2) -> str:
    """Why the group must be stopped now, by the newest samples of MemAvailable (the last is the newest); empty while all is well.

    One low sample proves nothing: a prefill dips and comes back. Needs nothing of this file.
    """
    last = list(samples)[-consecutive:]
    if consecutive < 1 or len(last) < consecutive or max(last) >= floor_bytes:
        return ""
    series = ", ".join(f"{sample / (1 << 30):.2f}" for sample in list(samples)[-10:])
    return f"MemAvailable below {floor_bytes / (1 << 30):.2f} GiB in {consecutive} samples in a row; the last samples in GiB: {series}"
