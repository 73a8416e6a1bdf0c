# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Moving Engram rows at the speed of the disk, with the standard library alone and without the page cache.

On unified memory the page cache is GPU memory, so files are read and written around it (O_DIRECT). Weights and scales
are then copied into alternating slots of a row buffer by one system call for a thousand rows: no Python per row, and
no interpreter lock held.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._engram import ROW_BYTES, SCALE_BYTES, WEIGHT_BYTES

# O_DIRECT wants offsets, lengths and addresses in whole blocks of the disk; none is larger than a page.
ALIGNMENT = 4096
# The fewest rows that are whole pages: 512 rows are 33 pages.
ALIGNED_ROWS = 512
# Linux takes at most this many buffers in one call. It is also a good size for the processor's caches.
BLOCK_ROWS = 1024


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def buffer(size: int) -> mmap.mmap:
    """Page-aligned memory for ``size`` bytes at any offset of a file."""
    memory = mmap.mmap(-1, aligned(size) + ALIGNMENT)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class EndOfFile(OSError):
    """A file is shorter than its header promises."""


class DirectFile:
    """A file that is read and written around the page cache.

    Where the filesystem can't do that, pages that this work brought into the cache are given up again, and those
    that were there before are left.
    """

    def __init__(self, path: str, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.direct = True
        try:
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
            self._use_cache()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def _use_cache(self) -> None:
        self.direct = False
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        # Without read-ahead only the pages that are asked for come into the cache.
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _leave_direct(self, exc: OSError, was_direct: bool) -> None:
        """Some filesystems take the flag and refuse the first transfer. Several workers may find that out at once."""
        if exc.errno != errno.EINVAL or not was_direct:
            raise OSError(exc.errno, exc.strerror, self.path) from exc
        self._use_cache()

    def read(self, memory: mmap.mmap, offset: int, length: int) -> memoryview:
        """Read into the start of ``memory``; the view has exactly the bytes asked for."""
        start = offset // ALIGNMENT * ALIGNMENT
        end = aligned(offset + length)
        cached = not self.direct and self._is_cached(memory, start, end)
        position = start
        while position < offset + length:
            got = self._read_some(memoryview(memory)[position - start : end - start], position)
            # A part of a page is only given at the end of a file.
            if got == 0 or (got % ALIGNMENT and position + got < offset + length):
                raise EndOfFile(errno.EIO, f"ends at byte {position + got}, {offset + length - position - got} bytes too early", self.path)
            position += got
        if not self.direct and not cached:
            os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_DONTNEED)
        return memoryview(memory)[offset - start : offset - start + length]

    def _read_some(self, view: memoryview, position: int) -> int:
        was_direct = self.direct
        try:
            return os.preadv(self.fd, [view], position)
        except OSError as exc:
            self._leave_direct(exc, was_direct)
            return os.preadv(self.fd, [view], position)

    def _is_cached(self, memory: mmap.mmap, start: int, end: int) -> bool:
        """Whether all these bytes can be had without the disk. Unknown counts as not."""
        try:
            return os.preadv(self.fd, [memoryview(memory)[: end - start]], start, os.RWF_NOWAIT) >= min(end, self.size) - start
        except OSError:
            return False

    def write(self, view: memoryview, offset: int) -> None:
        """Write whole pages at a page's start."""
        while view:
            was_direct = self.direct
            try:
                done = os.pwrite(self.fd, view, offset)
            except OSError as exc:
                self._leave_direct(exc, was_direct)
                continue
            view = view[done:]
            offset += done

    def settle(self, offset: int, length: int) -> None:
        """Make a finished part durable, and leave none of it in the cache."""
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)


# Weights and scales into rows

_PAIR = 16  # bytes of one struct iovec: address and length
_WORD = 8
_ROW_WORDS = ROW_BYTES // _WORD
_WEIGHT_WORDS = WEIGHT_BYTES // _WORD


def _slots(first: int, count: int) -> array.array[int]:
    """An array of struct iovec: the places for weights in ``count`` rows from an address on."""
    table = array.array("Q", bytes(_PAIR * count))
    words = memoryview(table)
    words[0::2] = array.array("Q", range(first, first + count * ROW_BYTES, ROW_BYTES))
    words[1::2] = array.array("Q", [WEIGHT_BYTES]) * count
    return table


class RowBuffer:
    """Memory for some rows, and the way to fill its slots."""

    def __init__(self, rows: int) -> None:
        self.memory = buffer(rows * ROW_BYTES)
        self.view = memoryview(self.memory)
        self._slots = _slots(ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), rows)
        try:
            self._scatter = _scatter_call()
            self._copy_weights = self._by_system_call
        except (AttributeError, OSError):
            self._copy_weights = self._by_words

    def fill(self, row: int, weights: memoryview, scales: memoryview) -> memoryview:
        """Put weights and scales of at most BLOCK_ROWS rows at ``row``; the view is those rows."""
        rows = self.view[row * ROW_BYTES :][: len(scales) // SCALE_BYTES * ROW_BYTES]
        self._copy_weights(rows, row, weights)
        # A scale is one word, and a slice of words with a step is copied in C.
        rows.cast("Q")[_WEIGHT_WORDS::_ROW_WORDS] = scales.cast("Q")
        return rows

    def _by_system_call(self, rows: memoryview, row: int, weights: memoryview) -> None:
        self._scatter(self._slots, row, weights)

    def _by_words(self, rows: memoryview, row: int, weights: memoryview) -> None:
        target, source = rows.cast("Q"), weights.cast("Q")
        for word in range(_WEIGHT_WORDS):
            target[word::_ROW_WORDS] = source[word::_WEIGHT_WORDS]


def _scatter_call() -> t.Callable[[array.array[int], int, memoryview], None]:
    """process_vm_readv on this process itself: one source, many slots. Raises OSError where it is not allowed."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    process = os.getpid()

    def scatter(slots: array.array[int], row: int, source: memoryview) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(source))
        whole = array.array("Q", (start, len(source)))
        done = read(process, slots.buffer_info()[0] + _PAIR * row, len(source) // WEIGHT_BYTES, whole.buffer_info()[0], 1, 0)
        if done != len(source):
            code = ctypes.get_errno() if done < 0 else errno.EIO
            raise OSError(code, os.strerror(code))

    probe = bytearray(ROW_BYTES)
    scatter(_slots(ctypes.addressof(ctypes.c_char.from_buffer(probe)), 1), 0, memoryview(bytearray(WEIGHT_BYTES)))
    return scatter


# Considerate work


class Stopped(Exception):
    """Another worker has failed; this one ends too."""


class Gate:
    """What each worker passes before each piece of work: the rate limit, a pause, the end."""

    def __init__(self, bytes_per_second: int = 0) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._stopped = threading.Event()
        self.done_bytes = 0

    def wait(self, size: int) -> None:
        self._open.wait()
        if self._rate:
            with self._lock:
                now = time.monotonic()
                begin = max(now, self._free_at)
                self._free_at = begin + size / self._rate
            self._stopped.wait(begin - now)
        if self._stopped.is_set():
            raise Stopped

    def note(self, size: int) -> None:
        with self._lock:
            self.done_bytes += size

    def pause(self, wanted: bool) -> None:
        if wanted and not self._stopped.is_set():
            self._open.clear()
        else:
            self._open.set()

    def stop(self) -> None:
        self._stopped.set()
        self._open.set()


def be_idle() -> None:
    """Give way to everything else on the node: processor, disk, and memory in need. Inherited by all threads."""
    os.nice(19)
    _disk_idle()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
        stream.write("1000")


def _disk_idle() -> None:
    """ioprio_set has no wrapper in libc; its number differs by machine. An unknown machine keeps its disk priority."""
    number = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)
    idle_class = 3 << 13
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, idle_class)
