# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Headers of safetensors files: enough to know a file's true size and the place of each tensor."""

from __future__ import annotations

import json
import os
import struct
import typing as t

# The format's own limit; a length field above it is damage, and reading it would eat the memory.
MAX_HEADER_BYTES = 100_000_000


class BadSafetensors(ValueError):
    """The file can't be what its name says; the text says why."""


class Header(t.NamedTuple):
    """What the first bytes of a file promise."""

    tensors: dict[str, dict[str, t.Any]]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def header_length(prefix: bytes) -> int:
    """Length of the JSON part from the first eight bytes."""
    if len(prefix) < 8:
        raise BadSafetensors(f"only {len(prefix)} bytes, too short for a header")
    length = struct.unpack("<Q", prefix[:8])[0]
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise BadSafetensors(f"header length {length} is out of range")
    return length


def parse_header(raw: bytes) -> Header:
    """Parse the JSON part (without the length field). Offsets are checked against each other."""
    try:
        content = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError) as exc:
        raise BadSafetensors(f"header is not JSON ({exc})") from exc
    if not isinstance(content, dict):
        raise BadSafetensors("header is not a JSON object")
    metadata = content.pop("__metadata__", {}) or {}
    end = 0
    for name, tensor in content.items():
        end = max(end, _tensor_end(name, tensor))
    data_start = 8 + len(raw)
    return Header(tensors=content, metadata=metadata, data_start=data_start, file_size=data_start + end)


def _tensor_end(name: str, tensor: t.Any) -> int:
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    valid = isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(value, int) and not isinstance(value, bool) for value in offsets)
    if not valid or not 0 <= offsets[0] <= offsets[1]:
        raise BadSafetensors(f"tensor {name} has no valid data_offsets")
    return offsets[1]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read only the header of a file."""
    with open(path, "rb") as stream:
        length = header_length(stream.read(8))
        raw = stream.read(length)
    if len(raw) < length:
        raise BadSafetensors(f"header of {length} bytes is cut after {len(raw)}")
    return parse_header(raw)


def check_file(path: str | os.PathLike[str]) -> str | None:
    """Say what is wrong with a file, or None. Reads the header only, so it is cheap even for 100 GB."""
    try:
        size = os.stat(path).st_size
        header = read_header(path)
    except BadSafetensors as exc:
        return str(exc)
    except OSError as exc:
        return exc.strerror or str(exc)
    if size != header.file_size:
        return f"{size} bytes, but its header promises {header.file_size}"
    return None
