# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Fetching one large file by ranges: in parallel, resumable after any death, never restarted from zero."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._hub import TRANSIENT, HubError, Patience

# Bytes that a kill can cost per stream.
BLOCK = 128 * 1024
MIB = 1024 * 1024
HEADER_BYTES = 4096
# Top bit of a counter: the part was flushed to the disk, so it is there after a power cut too.
_SYNCED = 1 << 63
# Failures of one part in a row, without one byte between them, before the whole attempt is given up.
PART_RETRIES = 5


class Stalled(Exception):
    """No byte reached the disk for too long."""


class Source(t.Protocol):
    """Where bytes come from. A new address is asked for when a signed one has expired."""

    def renew(self) -> None: ...

    def stream(self, start: int, end: int, block: int) -> t.Iterator[bytes]: ...


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def part_size(size: int, streams: int, smallest: int) -> int:
    """Few, large parts: hubs answer "too many requests" to many small ranges. Four rounds keep all streams busy to the end."""
    return max(smallest, -(-size // (streams * 4)), 1)


class Journal:
    """How many bytes of each part are on disk. One counter per part, written after the data.

    The page cache outlives a killed process, so a plain write is enough there; after a reboot only parts that were
    flushed count. A wrong counter can't harm: the file's hash decides in the end.
    """

    def __init__(self, path: str, identity: str, size: int, part: int) -> None:
        self.size = size
        self.part = part
        self.count = max(1, -(-size // part))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.done = self._load(identity)

    def _load(self, identity: str) -> list[int]:
        raw = os.pread(self._fd, HEADER_BYTES + 8 * self.count, 0)
        header = {"identity": identity, "size": self.size}
        try:
            found = json.loads(raw[:HEADER_BYTES].rstrip(b"\0"))
            if {key: found[key] for key in header} != header:
                raise ValueError("another file")
            # The part size of the first attempt stays: other settings must not void what is there.
            self.part, same_boot = int(found["part"]), found["boot"] == boot_id()
            self.count = max(1, -(-self.size // self.part))
            raw = os.pread(self._fd, HEADER_BYTES + 8 * self.count, 0)
            counters = struct.unpack_from(f"<{self.count}Q", raw, HEADER_BYTES)
            done = [value & ~_SYNCED if same_boot or value & _SYNCED else 0 for value in counters]
            if any(value > self.length(number) for number, value in enumerate(done)):
                raise ValueError("counter out of range")
        except (ValueError, KeyError, TypeError, ZeroDivisionError, struct.error):
            done = [0] * self.count
        self._write_all(identity, done)
        return done

    def _write_all(self, identity: str, done: t.Sequence[int]) -> None:
        header = json.dumps({"identity": identity, "size": self.size, "part": self.part, "boot": boot_id()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, header.ljust(HEADER_BYTES, b"\0") + struct.pack(f"<{self.count}Q", *done), 0)

    def length(self, number: int) -> int:
        return min(self.part, self.size - number * self.part)

    def note(self, number: int, done: int, synced: bool = False) -> None:
        self.done[number] = done
        os.pwrite(self._fd, struct.pack("<Q", done | (_SYNCED if synced else 0)), HEADER_BYTES + 8 * number)

    def open_parts(self) -> list[int]:
        return [number for number in range(self.count) if self.done[number] < self.length(number)]

    def close(self) -> None:
        os.close(self._fd)


class RangeFetcher:
    """Fill one partial file from a source with several streams."""

    def __init__(
        self,
        source: Source,
        path: str,
        size: int,
        identity: str,
        patience: Patience,
        streams: int = 8,
        smallest_part: int = 64 * MIB,
        stall_seconds: float = 120,
        progress: t.Callable[[int], None] | None = None,
    ) -> None:
        self.source = source
        self.path = path
        self.size = size
        self.streams = streams
        self.stall_seconds = stall_seconds
        self.patience = patience
        self.progress = progress or (lambda count: None)
        self.journal = Journal(path + ".journal", identity, size, part_size(size, streams, smallest_part))
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Fetch what is missing. Raises HubError or Stalled; what arrived stays and counts next time."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(handle).st_size < self.size:
                # A file shorter than its journal says lost its tail: trust only what is inside.
                self._forget_beyond(os.fstat(handle).st_size)
                os.ftruncate(handle, self.size)
            self._work(handle)
        finally:
            os.close(handle)
            self.journal.close()

    def _forget_beyond(self, end: int) -> None:
        for number, done in enumerate(self.journal.done):
            start = number * self.journal.part
            if start + done > end:
                self.journal.note(number, max(0, end - start))

    def _work(self, handle: int) -> None:
        parts: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in self.journal.open_parts():
            parts.put(number)
        threads = [threading.Thread(target=self._drain, args=(handle, parts), daemon=True) for _unused in range(self.streams)]
        for thread in threads:
            thread.start()
        try:
            self._watch(threads)
        finally:
            # A thread that hangs in a read ends by the source's own time limit; the file stays open until then.
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._error:
            raise self._error

    def _watch(self, threads: t.Sequence[threading.Thread]) -> None:
        """Bytes on disk are the only sign of life that counts. Waiting as the server asked is not a stall."""
        last, moved = -1, time.monotonic()
        while any(thread.is_alive() for thread in threads) and not self._error:
            total = sum(self.journal.done)
            now = time.monotonic()
            if total != last or self._waiting:
                last, moved = total, now
            elif now - moved > self.stall_seconds:
                self._error = Stalled(f"no byte arrived for {self.stall_seconds:.0f} s at {total} of {self.size} bytes")
                return
            time.sleep(0.2)

    def _drain(self, handle: int, parts: queue.SimpleQueue[int]) -> None:
        while not self._stop.is_set():
            try:
                number = parts.get_nowait()
            except queue.Empty:
                return
            try:
                self._fetch_part(handle, number)
            except BaseException as exc:  # a thread must hand its failure over, whatever it is
                with self._lock:
                    self._error = self._error or exc
                self._stop.set()
                return

    def _fetch_part(self, handle: int, number: int) -> None:
        failures = 0
        while self.journal.done[number] < self.journal.length(number) and not self._stop.is_set():
            before = self.journal.done[number]
            try:
                self._read(handle, number)
            except HubError as exc:
                failures = 1 if self.journal.done[number] > before else failures + 1
                self._recover(exc, failures)
        if self.journal.done[number] == self.journal.length(number):
            os.fdatasync(handle)
            self.journal.note(number, self.journal.done[number], synced=True)
            # Flushed pages can be dropped: on unified memory page cache is GPU memory.
            os.posix_fadvise(handle, number * self.journal.part, self.journal.length(number), os.POSIX_FADV_DONTNEED)

    def _read(self, handle: int, number: int) -> None:
        base, end = number * self.journal.part, number * self.journal.part + self.journal.length(number)
        position = base + self.journal.done[number]
        with contextlib.closing(self.source.stream(position, end, BLOCK)) as blocks:
            for block in blocks:
                if position + len(block) > end:
                    raise HubError("protocol", "the server sent more than was asked for")
                _write(handle, block, position)
                position += len(block)
                self.journal.note(number, position - base)
                self.progress(len(block))
                if self._stop.is_set():
                    return
        if position < end:
            raise HubError("cut", f"the connection ended at byte {position} of {end}")

    def _recover(self, error: HubError, failures: int) -> None:
        """Wait, renew, or give up."""
        if error.kind not in TRANSIENT:
            raise error
        if error.kind == "rate_limited":
            with self._lock:
                self._waiting += 1
            try:
                self.patience.wait(error)
            finally:
                with self._lock:
                    self._waiting -= 1
            return
        if failures > PART_RETRIES:
            raise error
        if error.kind == "expired":
            self.source.renew()
            return
        self._stop.wait(min(2.0 ** (failures - 1) * 0.5, 15.0))


def _write(handle: int, block: bytes, position: int) -> None:
    view = memoryview(block)
    while view:
        count = os.pwrite(handle, view, position)
        view, position = view[count:], position + count
