# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""How much of a file lies in the page cache, and giving that up.

On unified memory the cache of a file that was just copied is memory that the GPU cannot get without reclaim. Dropping
all caches needs root; dropping the pages of one's own files does not. Standard library only: it also runs on the nodes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import typing as t

Path = t.Union[str, "os.PathLike[str]"]

# mincore wants one byte for each page: a window keeps that small, whatever the size of the file.
WINDOW_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def files_of(paths: t.Iterable[Path]) -> t.Iterator[str]:
    """Each regular file at or below the given paths, once, with links to files followed."""
    seen: set[tuple[int, int]] = set()
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        for name in _walk(os.fspath(path)):
            try:
                status = os.stat(name)
            except FileNotFoundError:
                continue  # a dangling link, or a partial file that got its final name meanwhile
            identity = (status.st_dev, status.st_ino)
            if stat.S_ISREG(status.st_mode) and identity not in seen:
                seen.add(identity)
                yield name


def _walk(path: str) -> t.Iterator[str]:
    if not os.path.isdir(path):
        os.stat(path)  # a path that is not there at all is a mistake of the caller, and raises
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))


def evict(paths: t.Iterable[Path]) -> int:
    """Ask the kernel to give up the cached pages of all files at or below ``paths``; the number of bytes asked for.

    Needs no root. What a process has mapped stays; ``resident_bytes`` tells what is left. Raises OSError.
    """
    asked = 0
    for name in files_of(paths):
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)  # a page that is not yet written cannot be given up
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            asked += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return asked


def may_measure(path: Path) -> bool:
    """Whether the kernel tells this account the truth: to others it says that every page is resident."""
    return os.geteuid() in (0, os.stat(path).st_uid) or os.access(path, os.W_OK)


def resident_bytes(path: Path) -> int:
    """How many bytes of one file are in the page cache. Raises OSError, PermissionError for another account's file."""
    if not may_measure(path):
        raise PermissionError(f"only the owner of {os.fspath(path)} is told which of its pages are in memory")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return sum(_resident_in_window(descriptor, start, min(WINDOW_BYTES, size - start)) for start in range(0, size, WINDOW_BYTES))
    finally:
        os.close(descriptor)


def _resident_in_window(descriptor: int, start: int, length: int) -> int:
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address == _MAP_FAILED:
        raise _last_error()
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, pages) != 0:
            raise _last_error()
    finally:
        _libc.munmap(address, length)
    # Only the lowest bit of each byte is defined; mincore leaves the others zero today.
    resident = len(pages.raw) - pages.raw.count(b"\0")
    return min(resident * mmap.PAGESIZE, length)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def resident_in(paths: t.Iterable[Path]) -> int:
    """How many bytes of all files at or below ``paths`` are in the page cache."""
    return sum(resident_bytes(name) for name in files_of(paths))
