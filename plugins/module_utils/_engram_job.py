# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The long work of the Engram packer: make the row files of one rank, or read them again and compare.

Several workers take segments of all layers from one queue. Each reads, interleaves, hashes and writes its own
segment, so that while one waits for the disk another one computes. A segment that is on the disk is noted in the
journal of its file and is never made twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
import itertools
import os
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _engram_files as disk
from ansible_collections.sparkops.inference.plugins.module_utils._engram import HEADER_BYTES, ROW_BYTES, SCALE_BYTES, WEIGHT_BYTES, Rows, refusal
from ansible_collections.sparkops.inference.plugins.module_utils._engram_files import Journal, RowFile
from ansible_collections.sparkops.inference.plugins.module_utils._engram_io import (
    BLOCK_ROWS,
    DirectFile,
    EndOfFile,
    Gate,
    RowBuffer,
    Stopped,
    aligned,
    be_idle,
    buffer,
)
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import gib, write_json
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, run_job

# Seconds below the memory floor after which the work ends; the next run resumes it.
LONGEST_PAUSE = 900


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut. None of it changes a byte of the result."""

    segment_rows: int = disk.SEGMENT_ROWS
    # Rows of one read and one write.
    chunk_rows: int = 16384
    # Some wait for the disk while the others compute.
    workers: int = min(8, max(4, os.cpu_count() or 1))


class Buffers:
    """Memory of one worker, made once."""

    def __init__(self, tuning: Tuning) -> None:
        self.weights = buffer(tuning.chunk_rows * WEIGHT_BYTES)
        self.scales = buffer(tuning.segment_rows * SCALE_BYTES)
        self.rows = RowBuffer(tuning.chunk_rows)


class Packing:
    """One row file in the making."""

    def __init__(self, file: RowFile, chunk_rows: int) -> None:
        self.file = file
        self.chunk_rows = chunk_rows
        self.lock = threading.Lock()
        self.source = DirectFile(file.table.path)
        begun = os.path.exists(file.partial)
        self.target = DirectFile(file.partial, os.O_RDWR | os.O_CREAT)
        inode = os.fstat(self.target.fd).st_ino
        self.journal = Journal(file)
        # A new file may get the number of a removed one, so the number alone proves nothing.
        if not begun or self.target.size != aligned(file.size) or not self.journal.load(inode):
            os.ftruncate(self.target.fd, 0)
        # The full length at once: writes beyond the end of a file wait for each other.
        os.ftruncate(self.target.fd, aligned(file.size))
        self._write_header()
        self.journal.begin(inode)

    def _write_header(self) -> None:
        page = buffer(HEADER_BYTES)
        page[:HEADER_BYTES] = self.file.header.pack()
        self.target.write(memoryview(page)[:HEADER_BYTES], 0)

    def missing(self) -> list[int]:
        return [number for number in range(len(self.file.segments)) if number not in self.journal.hashes]

    def done_bytes(self) -> int:
        return sum(self.file.segments[number].length for number in self.journal.hashes) * ROW_BYTES

    def pack(self, number: int, buffers: Buffers, gate: Gate) -> None:
        """Make one segment."""
        segment, table = self.file.segments[number], self.file.table
        scales = self.source.read(buffers.scales, table.scales + segment.low * SCALE_BYTES, segment.length * SCALE_BYTES)
        digest = hashlib.sha256()
        for chunk in chunks(segment, self.chunk_rows):
            gate.wait(chunk.length * ROW_BYTES)
            weights = self.source.read(buffers.weights, table.weights + chunk.low * WEIGHT_BYTES, chunk.length * WEIGHT_BYTES)
            first = (chunk.low - segment.low) * SCALE_BYTES
            self._interleave(buffers.rows, weights, scales[first : first + chunk.length * SCALE_BYTES], digest)
            # The last page of a file is written whole, and cut when the file is finished.
            self.target.write(buffers.rows.view[: aligned(chunk.length * ROW_BYTES)], self.file.offset(chunk.low))
            gate.note(chunk.length * ROW_BYTES)
        self.target.settle(self.file.offset(segment.low), segment.length * ROW_BYTES)
        with self.lock:
            self.journal.note(number, digest.hexdigest())

    @staticmethod
    def _interleave(rows: RowBuffer, weights: memoryview, scales: memoryview, digest: t.Any) -> None:
        """In blocks, so that each is still in the processor's cache when it is hashed."""
        for block in chunks(Rows(0, len(scales) // SCALE_BYTES), BLOCK_ROWS):
            digest.update(
                rows.fill(
                    block.low,
                    weights[block.low * WEIGHT_BYTES : block.high * WEIGHT_BYTES],
                    scales[block.low * SCALE_BYTES : block.high * SCALE_BYTES],
                )
            )

    def finish(self) -> None:
        """Every segment is on the disk: give the file its name, durably, and only then say that it counts."""
        os.ftruncate(self.target.fd, self.file.size)
        os.fsync(self.target.fd)
        os.posix_fadvise(self.target.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.replace(self.file.partial, self.file.path)
        disk.sync_directory(self.file.directory)
        publish(self.journal)

    def close(self) -> None:
        self.source.close()
        self.target.close()
        self.journal.close()

    def discard(self) -> None:
        """Give the space of an unfinished file back: a full disk harms what is running on the node."""
        if not os.path.exists(self.file.partial):
            return
        self.close()
        for path in (self.file.partial, self.file.journal):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def publish(journal: Journal) -> None:
    """Write the record of a file that has its final name, and remove the journal: from now on the file counts."""
    file = journal.file
    hashes = [journal.hashes[number] for number in range(len(file.segments))]
    record = {
        "format": disk.FORMAT,
        "file": file.name,
        "layer": file.table.layer,
        "rows": [file.rows.low, file.rows.high],
        "size": file.size,
        "source": file.table.fingerprint,
        "sha256": disk.total_hash(file, hashes),
        "segment_rows": file.segment_rows,
        "segments": hashes,
        "packed": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(file.record, record)
    disk.sync_directory(file.directory)
    os.unlink(file.journal)
    disk.sync_directory(file.directory)


def publish_renamed(file: RowFile) -> bool:
    """End what a run could not that was killed between the rename and the record."""
    if os.path.exists(file.partial):
        return False
    try:
        inode = os.stat(file.path).st_ino
    except FileNotFoundError:
        return False
    journal = Journal(file)
    if not journal.load(inode) or not journal.complete:
        return False
    publish(journal)
    return True


def chunks(rows: Rows, size: int) -> t.Iterator[Rows]:
    for low in range(rows.low, rows.high, size):
        yield Rows(low, min(low + size, rows.high))


def in_turn(lists: t.Iterable[t.Sequence[t.Any]]) -> list[t.Any]:
    """One of each layer in turn: two files are written faster than one."""
    return [item for group in itertools.zip_longest(*lists) for item in group if item is not None]


class Crew:
    """Workers that empty a queue, and what they must respect."""

    def __init__(self, tuning: Tuning, gate: Gate, memory_floor: int, progress: Progress | None) -> None:
        self.tuning = tuning
        self.gate = gate
        self.memory_floor = memory_floor
        self.progress = progress
        self.errors: list[BaseException] = []

    def run(self, pieces: t.Iterable[t.Any], work: t.Callable[[t.Any, Buffers], None]) -> None:
        """Do all pieces. The first error ends every worker, and is raised."""
        queue = collections.deque(pieces)
        threads = [threading.Thread(target=self._work, args=(queue, work), daemon=True) for _number in range(min(self.tuning.workers, len(queue)))]
        for thread in threads:
            thread.start()
        try:
            self._supervise(threads)
        finally:
            # A cancel comes as an exception here; no file may be closed under a worker.
            self.gate.stop()
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]

    def _work(self, queue: collections.deque[t.Any], work: t.Callable[[t.Any, Buffers], None]) -> None:
        try:
            buffers = Buffers(self.tuning)
            while True:
                try:
                    piece = queue.popleft()
                except IndexError:
                    return
                work(piece, buffers)
        except Stopped:
            pass
        except BaseException as exc:  # whatever it is, the main thread raises it
            self.errors.append(exc)
            self.gate.stop()

    def _supervise(self, threads: t.Sequence[threading.Thread]) -> None:
        start = self.progress.done if self.progress else 0
        paused_since: float | None = None
        looked = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(0.1)
            if self.progress:
                self.progress.done = start + self.gate.done_bytes
            if time.monotonic() - looked >= 1:
                looked = time.monotonic()
                paused_since = self._respect_floor(paused_since, looked)
        if self.progress:
            self.progress.done = start + self.gate.done_bytes

    def _respect_floor(self, paused_since: float | None, now: float) -> float | None:
        """Pause while the model needs the memory; give up when that does not end."""
        free = disk.available_memory()
        low = free < self.memory_floor
        self.gate.pause(low)
        if self.progress:
            self.progress.message = f"paused: MemAvailable {gib(free)} is below the floor of {gib(self.memory_floor)}" if low else ""
        if not low:
            return None
        if paused_since is not None and now - paused_since > LONGEST_PAUSE:
            self.errors.append(Refused(disk.memory_refusal(free, self.memory_floor)))
            self.gate.stop()
        return now if paused_since is None else paused_since


@contextlib.contextmanager
def only_one(directory: str) -> t.Iterator[None]:
    """Two packers in one directory would write the same files."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            next_step = "wait for it, or stop its unit (systemctl list-units 'sparkops-engram-*')"
            raise Refused(refusal("busy", directory, "another packer at work", "one at a time", next_step)) from exc
        yield
    finally:
        os.close(handle)


def pack(files: t.Sequence[RowFile], layout: dict[str, t.Any], crew: Crew) -> list[str]:
    """Make those of the files that do not count yet. Names of what was made."""
    directory = files[0].directory
    os.makedirs(directory, exist_ok=True)
    with only_one(directory):
        problems = disk.check_directory(directory, layout, files)
        if problems:
            raise Refused(*problems)
        write_json(os.path.join(directory, disk.LAYOUT_FILE), layout)
        lacking = [file for file in files if disk.problem(file)]
        renamed = [file for file in lacking if publish_renamed(file)]
        missing = [file for file in lacking if file not in renamed]
        problems = disk.space_refusals(directory, missing) + disk.memory_refusals(crew.memory_floor)
        if missing and problems:
            raise Refused(*problems)
        _pack_missing(missing, crew)
    return [file.name for file in lacking]


def _pack_missing(files: t.Sequence[RowFile], crew: Crew) -> None:
    packings: list[Packing] = []
    try:
        for file in files:
            packings.append(Packing(file, crew.tuning.chunk_rows))
        if crew.progress:
            crew.progress.phase = "packing"
            crew.progress.total = sum(file.rows.length * ROW_BYTES for file in files)
            crew.progress.done = sum(packing.done_bytes() for packing in packings)
            crew.progress.write()
        pieces = in_turn([[(packing, number) for number in packing.missing()] for packing in packings])
        try:
            crew.run(pieces, lambda piece, buffers: piece[0].pack(piece[1], buffers, crew.gate))
        finally:
            # What is complete counts, whatever happened to the others.
            for packing in packings:
                if packing.journal.complete:
                    packing.finish()
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            for packing in packings:
                packing.discard()
        raise explain(exc, files[0].directory) from exc
    finally:
        for packing in packings:
            packing.close()


def explain(exc: OSError, directory: str) -> Refused:
    """An error of the system, as a reason that a user can act on."""
    where = str(exc.filename or directory)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        found = f"{exc.strerror}; the unfinished files were removed, {gib(disk.free_space(directory))} are free now"
        next_step = "see what else filled the disk, then run the pack tag again"
        return Refused(refusal("space", where, found, "space for the row files of this rank", next_step))
    if isinstance(exc, EndOfFile):
        next_step = "run the weights and sync tags, then the pack tag again"
        return Refused(refusal("source_damaged", where, str(exc.strerror), "a whole safetensors file", next_step))
    next_step = "look at the kernel's log (dmesg), then run the pack tag again: it resumes"
    return Refused(refusal("io", where, exc.strerror or str(exc), "reading and writing without errors", next_step))


def verify(files: t.Sequence[RowFile], crew: Crew) -> dict[str, list[Rows]]:
    """Read every file again and compare with the hashes of its record. Damaged rows by file; they are noted in the record."""
    damaged: dict[str, list[Rows]] = {}
    sources: dict[str, DirectFile] = {}
    records = {file.name: disk.read_record(file.record) or {} for file in files}
    cut = [dataclasses.replace(file, segment_rows=records[file.name]["segment_rows"]) for file in files]

    def check(piece: tuple[RowFile, int], buffers: Buffers) -> None:
        file, number = piece
        segment = file.segments[number]
        digest = hashlib.sha256()
        for chunk in chunks(segment, crew.tuning.chunk_rows):
            size = chunk.length * ROW_BYTES
            crew.gate.wait(size)
            digest.update(sources[file.name].read(buffers.rows.memory, file.offset(chunk.low), size))
            crew.gate.note(size)
        if digest.hexdigest() != records[file.name]["segments"][number]:
            damaged.setdefault(file.name, []).append(segment)

    with contextlib.ExitStack() as stack:
        for file in cut:
            sources[file.name] = stack.enter_context(DirectFile(file.path))
            if disk.total_hash(file, records[file.name]["segments"]) != records[file.name]["sha256"]:
                damaged[file.name] = [file.rows]
        if crew.progress:
            crew.progress.begin("verifying", sum(file.rows.length * ROW_BYTES for file in cut))
        crew.run(in_turn([[(file, number) for number in range(len(file.segments))] for file in cut if file.name not in damaged]), check)
    for file in files:
        if file.name in damaged:
            text = ", ".join(f"[{rows.low},{rows.high})" for rows in sorted(damaged[file.name]))
            write_json(file.record, {**records[file.name], "damaged": text})
    return damaged


# The job of the unit


def work(request: t.Mapping[str, t.Any], progress: Progress | None = None) -> dict[str, t.Any]:
    """Do what a request asks for. Raises Refused."""
    if request["priority"] == "idle":
        be_idle()
    tuning = Tuning(**request.get("tuning") or {})
    planned = disk.plan_files(request["source"], request["directory"], request["rank"], request["tensor_parallel"], request["layers"] or ())
    files = [dataclasses.replace(file, segment_rows=tuning.segment_rows) for file in planned]
    crew = Crew(tuning, Gate(request["rate_limit"]), request["memory_floor"], progress)
    try:
        if request["state"] == "verified":
            damaged = verify([file for file in files if not disk.problem(file)], crew)
            return {"state": "verified", "packed": [], "damaged": sorted(damaged)}
        layout = disk.layout(request["tensor_parallel"], request["repository"], request["revision"])
        return {"state": "present", "packed": pack(files, layout, crew), "damaged": []}
    except OSError as exc:
        raise explain(exc, request["directory"]) from exc


def main(arguments: t.Sequence[str]) -> int:
    """Entry of the unit."""
    return run_job(arguments[0], work)
