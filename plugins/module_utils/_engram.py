# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Engram row files: which rows belong to which rank, and what a row file looks like.

Arithmetic only, no I/O. A row file is 4096 bytes of header and then, for each row of the rank, 256 bytes of weights
and 8 bytes of scales back to back. docs/engram.md describes the layout in full.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import struct
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused

# On disk these are the letters DSV1EN41. Much that is written about the format says DSV41EN1 instead; the reader
# refuses that spelling without a word and reads the checkpoint.
MAGIC = 0x31344E4531565344
MISREAD_MAGIC = 0x314E453134565344

HEADER_BYTES = 4096
WEIGHT_BYTES = 256
SCALE_BYTES = 8
ROW_BYTES = WEIGHT_BYTES + SCALE_BYTES

LAYOUT = "vllm-hash-head"

_FIELDS = struct.Struct("<6Q")


def refusal(name: str, thing: str, found: str, wanted: str, next_step: str) -> Refusal:
    """A reason not to go on. Whoever raises it does not know the node's name; the module adds it."""
    return Refusal(f"engram.{name}", "", thing, found, wanted, next_step)


# The configuration of the model


@dataclasses.dataclass(frozen=True)
class Config:
    """The part of config.json that decides the rows."""

    layers: tuple[int, ...]
    vocabulary: int
    heads: int
    longest_ngram: int
    # Rows of each layer, where the file says so.
    rows: tuple[int, ...] = ()

    @property
    def columns(self) -> int:
        """One bucket for each n-gram order from 2 up and each head."""
        return (self.longest_ngram - 1) * self.heads

    @classmethod
    def from_dict(cls, content: t.Any) -> Config:
        """Some checkpoints keep the keys under ``text_config``, some at the top."""
        content = content if isinstance(content, dict) else {}
        nested = content.get("text_config")
        keys = nested if isinstance(nested, dict) and "engram_layer_ids" in nested else content
        config = cls(
            layers=_whole_numbers(keys, "engram_layer_ids"),
            vocabulary=_whole_number(keys, "engram_vocab_size", 2),
            heads=_whole_number(keys, "engram_n_heads", 1),
            longest_ngram=_whole_number(keys, "engram_max_ngram_size", 2),
            rows=_whole_numbers(keys, "engram_num_embeddings") if "engram_num_embeddings" in keys else (),
        )
        if not config.layers or len(set(config.layers)) != len(config.layers):
            raise _bad_key("engram_layer_ids", config.layers, "different layer numbers")
        if config.rows and len(config.rows) != len(config.layers):
            raise _bad_key("engram_num_embeddings", config.rows, "one number for each layer")
        return config


def _is_count(value: t.Any) -> bool:
    """JSON's true is a Python integer, and no number here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _whole_number(keys: t.Mapping[str, t.Any], name: str, least: int) -> int:
    value: t.Any = keys.get(name)
    if not _is_count(value) or value < least:
        raise _bad_key(name, value, f"a whole number, at least {least}")
    return value


def _whole_numbers(keys: t.Mapping[str, t.Any], name: str) -> tuple[int, ...]:
    value = keys.get(name)
    if not isinstance(value, list) or not all(_is_count(item) for item in value):
        raise _bad_key(name, value, "a list of whole numbers")
    return tuple(value)


def _bad_key(name: str, value: t.Any, wanted: str) -> Refused:
    found = "nothing" if value is None else str(value)
    return Refused(refusal("config", f"{name} in config.json of the Engram source", found, wanted, "fetch the Engram source again with the weights tag"))


# Which rows belong to whom


def _is_prime(number: int) -> bool:
    if number % 2 == 0:
        return number == 2
    return number > 1 and all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


def bucket_sizes(config: Config) -> dict[int, tuple[int, ...]]:
    """Rows of each bucket of each layer.

    Every (layer, n-gram order, head), in that sequence, takes the next prime not below the vocabulary's size. No
    prime is used twice in the whole model.
    """
    primes = filter(_is_prime, itertools.count(config.vocabulary))
    return {layer: tuple(itertools.islice(primes, config.columns)) for layer in config.layers}


class Rows(t.NamedTuple):
    """Half-open range of rows."""

    low: int
    high: int

    @property
    def length(self) -> int:
        return self.high - self.low


def rank_rows(sizes: t.Sequence[int], rank: int, ranks: int) -> Rows:
    """Rows of one rank: whole buckets, the same number for each rank but the last."""
    columns = len(sizes)
    share = -(-columns // ranks)
    if not 0 <= rank < ranks:
        raise Refused(refusal("ranks", "rank", str(rank), f"0 to {ranks - 1}", "check serve_nodes"))
    if (ranks - 1) * share >= columns:
        raise Refused(
            refusal(
                "ranks", "tensor parallel size", f"{ranks} for {columns} hash heads, which leaves a rank without rows",
                "a size that gives every rank at least one hash head", "choose another number of nodes, or pipeline parallelism",
            )
        )  # fmt: skip
    first = rank * share
    return Rows(sum(sizes[:first]), sum(sizes[: first + share]))


def file_name(layer: int, rank: int, ranks: int) -> str:
    return f"engram-l{layer}-r{rank}of{ranks}.bin"


def file_size(rows: Rows) -> int:
    """No padding: not between rows, and not at the end."""
    return HEADER_BYTES + rows.length * ROW_BYTES


# The header


class Header(t.NamedTuple):
    """All that a row file says about itself: no rank, no engine, no source."""

    magic: int
    layer: int
    low: int
    high: int
    total: int
    row_bytes: int

    def pack(self) -> bytes:
        return _FIELDS.pack(*self).ljust(HEADER_BYTES, b"\0")


def header(layer: int, rows: Rows, total: int) -> Header:
    return Header(MAGIC, layer, rows.low, rows.high, total, ROW_BYTES)


def header_problem(raw: bytes, wanted: Header, rank: int, ranks: int) -> str:
    """Say why the first bytes of a file are not the wanted header, or an empty text."""
    if len(raw) < HEADER_BYTES:
        return f"only {len(raw)} bytes, less than a header"
    found = Header(*_FIELDS.unpack_from(raw))
    if found.magic != MAGIC:
        text = raw[:8].decode("ascii", "replace")
        hint = ", the spelling of the comments instead of the reader's" if found.magic == MISREAD_MAGIC else ""
        return f"magic {text!r}{hint}; wanted {MAGIC.to_bytes(8, 'little').decode()!r}"
    if (found.low, found.high) != (wanted.low, wanted.high) and found.total == wanted.total:
        split = _name_of_split(Rows(found.low, found.high), wanted.total, rank, ranks)
        return f"rows [{found.low},{found.high}), which is {split}; wanted [{wanted.low},{wanted.high})"
    differences = [f"{name} {have}, wanted {want}" for name, have, want in zip(Header._fields, found, wanted) if have != want]
    if not differences and raw != wanted.pack():
        differences = ["bytes after the six fields that are not zero"]
    return "; ".join(differences)


def _name_of_split(rows: Rows, total: int, rank: int, ranks: int) -> str:
    """Other packers cut the same rows elsewhere, under the same file name and with the same magic."""
    part = -(-total // ranks)
    if rows == (total * rank // ranks, total * (rank + 1) // ranks):
        return "the even split of older packers"
    if rows == (min(total, rank * part), min(total, (rank + 1) * part)):
        return "the even split in parts rounded up, of the model's own converter"
    return "another split, another rank or another number of ranks"


# What the engine says after a start

_PACKED_LINE = re.compile(r"File-backed Engram layer=(\d+) rank=(\d+)/(\d+) rows=\[(\d+),(\d+)\).*?packed=(True|False)")
_OFFLOAD_LINE = re.compile(r"Engram table offloaded to pinned host memory")


def pins_tables(log: str) -> bool:
    """Whether the engine has no file-backed reader and keeps whole tables in memory, which a Spark has not got."""
    return bool(_OFFLOAD_LINE.search(log))


def log_problems(log: str, rank: int, ranks: int, layers: t.Mapping[int, Rows]) -> list[str]:
    """Compare the log of one rank with the row files that it was given; every difference is one text.

    The reader falls back to the checkpoint without a word, so only its own line proves that the file is in use.
    """
    if pins_tables(log):
        return ["the engine pins whole Engram tables in memory: its file-backed reader is missing, stop it"]
    said = {
        int(layer): (Rows(int(low), int(high)), packed == "True")
        for layer, of_rank, of_ranks, low, high, packed in _PACKED_LINE.findall(log)
        if (int(of_rank), int(of_ranks)) == (rank, ranks)
    }
    problems = []
    for layer, rows in layers.items():
        if layer not in said:
            problems.append(f"layer {layer}: the engine said nothing about Engram rows of rank {rank}")
        elif not said[layer][1]:
            problems.append(f"layer {layer}: packed=False, the engine reads the checkpoint instead of the row file")
        elif said[layer][0] != rows:
            problems.append(f"layer {layer}: the engine serves rows [{said[layer][0].low},{said[layer][0].high}), the file has [{rows.low},{rows.high})")
    return problems
