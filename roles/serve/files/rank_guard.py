# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Watches the memory of a node and ends the group before the machine is lost.

On unified memory nothing else does: the GPU driver's share is in no cgroup, so limits do not see it, and the kernel's own
killer comes too late. A thread of its own, since the loop of the service may wait for a Docker Engine that is starved.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import resource
import sys
import threading
import time

import _memory

# What a report wants to look back on; at the usual interval this is a minute.
KEPT_SAMPLES = 120
# Reading all processes costs some milliseconds. Near the floor it is done each second, so that the report can say who grew.
SNAPSHOT_SECONDS, SNAPSHOT_SECONDS_NEAR = 5.0, 1.0
NEAR = 4 << 30
# A report compares with a snapshot of about this age: long enough to see growth, short enough to be about now.
LOOK_BACK_SECONDS = 10.0
MCL_CURRENT, MCL_FUTURE = 1, 2
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


def lock_memory():
    """Keep this process in memory: when the guard is needed, nothing can be read back from disk. Whether that was allowed."""
    soft, dummy = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = int((re.search(r"^CapEff:\s*([0-9a-f]+)", _memory.read_text("/proc/self/status"), re.MULTILINE) or [0, "0"])[1], 16)
    # Under a limit a lock of the future would make later allocations fail, which is worse than no lock.
    if not capabilities & (1 << 14) and soft != resource.RLIM_INFINITY:
        return False
    return ctypes.CDLL(None, use_errno=True).mlockall(MCL_CURRENT | MCL_FUTURE) == 0


def in_thread(act, *arguments):
    """Start an act beside this one, or carry it out here when there is no memory for a thread. Returns the thread."""
    thread = threading.Thread(target=act, args=arguments, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        act(*arguments)
        return None
    return thread


class Meminfo:
    """MemAvailable from one descriptor that stays open: a sample opens nothing and allocates next to nothing."""

    def __init__(self, path="/proc/meminfo"):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def available(self):
        """Bytes; None when the text is not that of meminfo: nothing may be decided on it."""
        match = _AVAILABLE.search(os.pread(self.descriptor, 8192, 0))
        return int(match.group(1)) * 1024 if match else None


class Guard:
    """``mode`` is asked at each sample: "loading", "serving", or "" while the rank does not run.
    ``on_trip`` is called once for each start, with the report's beginning; it must not take long."""

    def __init__(self, mode, on_trip, on_report, meminfo=None, proc_root="/proc"):
        self.mode, self.on_trip, self.on_report = mode, on_trip, on_report
        self.meminfo, self.proc_root = meminfo or Meminfo(os.path.join(proc_root, "meminfo")), proc_root
        self.options = {}
        self.samples = collections.deque(maxlen=KEPT_SAMPLES)  # (Unix time, bytes)
        self.judged = collections.deque(maxlen=KEPT_SAMPLES)  # the samples of the present mode
        self.judged_mode = ""
        self.snapshots = collections.deque(maxlen=4)  # (monotonic time, processes)
        self.tripped = None

    def floor(self, mode):
        """The floor in bytes; None where the guard is off."""
        return (self.options.get(mode) or {}).get("floor") if mode else None

    def sample(self):
        """One look. Returns the report when the guard acts."""
        available = self.meminfo.available()
        if available is None:
            return None
        self.samples.append((time.time(), available))
        mode = self.mode()
        floor = self.floor(mode)
        if mode != self.judged_mode:
            self.judged_mode = mode
            self.judged.clear()
        if floor is None or self.tripped:
            self.snapshots.clear()
            return None
        self.judged.append(available)
        self.snapshot(available - floor < NEAR)
        reason = _memory.guard_verdict(self.judged, floor, self.options.get("samples", 2))
        return self.act(mode, floor, reason) if reason else None

    def snapshot(self, near):
        now = time.monotonic()
        if not self.snapshots or now - self.snapshots[-1][0] >= (SNAPSHOT_SECONDS_NEAR if near else SNAPSHOT_SECONDS):
            self.snapshots.append((now, self.processes()))

    def processes(self):
        return _memory.read_processes(self.proc_root)

    def act(self, mode, floor, reason):
        """First end the ranks, then say why: the words can wait, the memory cannot."""
        report = {"by": "guard", "mode": mode, "floor": floor, "reason": f"memory guard while {mode}: {reason}", "at": time.time()}
        self.tripped = report
        acting = in_thread(self.on_trip, report)
        now = self.processes()  # in the moment between the two signals, else the ranks' own growth would be gone with them
        if acting:
            acting.join()
        begun, before = next(((when, seen) for when, seen in self.snapshots if time.monotonic() - when <= LOOK_BACK_SECONDS), (time.monotonic(), {}))
        growing = _memory.fastest_growing(before, now) if before else []
        report["seconds"] = round(time.monotonic() - begun, 1)
        report["growing"] = [
            {"name": process.name, "pid": process.pid, "grown": grown, "rss": process.rss, "container": process.container} for process, grown in growing
        ]
        report["samples"] = [[round(when, 2), value] for when, value in self.samples]
        self.on_report(report)
        return report

    def lowest(self, seconds):
        """The lowest sample of the last seconds; 0 when there is none."""
        since = time.time() - seconds
        return min((value for when, value in list(self.samples) if when >= since), default=0)

    def run(self, ended):
        while not ended.is_set():
            begun = time.monotonic()
            try:
                self.sample()
            except (OSError, ValueError) as exc:  # such as a full disk under the report: the watch goes on
                print(f"memory guard: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
            ended.wait(max(0.05, self.options.get("interval", 0.5) - (time.monotonic() - begun)))

    def start(self, ended):
        threading.Thread(target=self.run, args=(ended,), daemon=True, name="guard").start()


def report_line(report):
    """The report for the journal: the reason, and who grew."""
    grown = "; ".join(f"{one['name']} ({one['pid']}) grew by {_memory.gib(one['grown'])} to {_memory.gib(one['rss'])}" for one in report.get("growing", []))
    return f"{report['reason']}; all ranks are stopped. Fastest growing in {report.get('seconds', 0):.0f} s: {grown or 'no process, so it is the GPU driver'}"
