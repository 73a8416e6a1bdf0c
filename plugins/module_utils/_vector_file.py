# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""How long the vector in a file is. Nothing in the file is executed: a pickle is read as a list of its opcodes."""

from __future__ import annotations

import ast
import io
import json
import math
import pickletools
import struct
import typing as t
import zipfile

_NPY_MAGIC = b"\x93NUMPY"


def vector_length(content: bytes) -> int | None:
    """The number of elements of the one tensor in a safetensors, NumPy or PyTorch file; None when it is none of these."""
    for read in (_numpy, _torch, _safetensors):
        try:
            length = read(content)
        except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, StopIteration, struct.error, zipfile.BadZipFile):
            length = None
        if length is not None:
            return length
    return None


def _numpy(content: bytes) -> int | None:
    if not content.startswith(_NPY_MAGIC):
        return None
    wide = content[6] >= 2
    size = struct.unpack_from("<I" if wide else "<H", content, 8)[0]
    start = 12 if wide else 10
    return _count([ast.literal_eval(content[start : start + size].decode())["shape"]])


def _torch(content: bytes) -> int | None:
    if not content.startswith(b"PK"):
        return None
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return _count(_pickled_shapes(archive.read(name)))


def _pickled_shapes(pickle: bytes) -> list[t.Any]:
    """The sizes of the tensors: after a storage's persistent id come the offset, the size and the stride."""
    shapes: list[t.Any] = []
    numbers: list[int] = []
    after_storage = False
    for opcode, argument, _position in pickletools.genops(pickle):
        if opcode.name == "BINPERSID":
            after_storage, numbers = True, []
        elif after_storage and opcode.name in ("BININT", "BININT1", "BININT2", "LONG1"):
            numbers.append(argument)
        elif after_storage and opcode.name in ("TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"):
            # The first number is the storage's offset.
            shapes.append(tuple(numbers[1:]))
            after_storage = False
    return shapes


def _safetensors(content: bytes) -> int | None:
    (size,) = struct.unpack_from("<Q", content)
    if size > len(content) - 8:
        return None
    header = json.loads(content[8 : 8 + size])
    return _count([entry["shape"] for name, entry in header.items() if name != "__metadata__"])


def _count(shapes: t.Sequence[t.Any]) -> int | None:
    """Several tensors are no vector: which one is meant cannot be told."""
    return math.prod(shapes[0]) if len(shapes) == 1 else None
