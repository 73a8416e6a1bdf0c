# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Resident bytes of a checkpoint per rank, from the headers of its files and the profile's rules of sharding.

A budget that cannot be computed is an error, never a number: the check that it feeds protects a machine which does not
survive a lack of memory.
"""

from __future__ import annotations

import json
import os
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._memory import holds
from ansible_collections.sparkops.inference.plugins.module_utils._safetensors import BadSafetensors, read_header

INDEX = "model.safetensors.index.json"
SHARDINGS = ("split", "replicated", "dropped")

Rule = t.Mapping[str, t.Any]
Serving = t.Mapping[str, t.Any]
Tensors = t.Iterable[tuple[str, int]]


class BudgetError(ValueError):
    """Why there is no budget. ``missing`` is true when files are not there (yet)."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Bucket(t.NamedTuple):
    """Tensors of one kind."""

    name: str
    sharding: str
    tensors: int
    total: int
    per_rank: tuple[int, ...]


class Budget(t.NamedTuple):
    """What each rank will hold."""

    buckets: list[Bucket]
    per_rank: tuple[int, ...]
    total: int
    files: int


# Reading


def scan(tree: str) -> tuple[list[tuple[str, int]], int]:
    """Name and bytes of each tensor of a tree, and the number of files. Reads headers only. Raises BudgetError."""
    wanted = _indexed(tree)
    names = sorted(set(wanted.values())) or _safetensors_in(tree)
    found: dict[str, int] = {}
    for name in names:
        try:
            header = read_header(os.path.join(tree, name))
        except FileNotFoundError as exc:
            raise BudgetError(f"{name} is not in {tree}", missing=True) from exc
        except (BadSafetensors, OSError) as exc:
            raise BudgetError(f"the header of {name} cannot be read: {exc}") from exc
        for tensor, entry in header.tensors.items():
            begin, end = entry["data_offsets"]
            found[tensor] = end - begin
    lacking = [tensor for tensor in wanted if tensor not in found]
    if lacking:
        raise BudgetError(f"{len(lacking)} tensors of the index are in no file, such as {lacking[0]}")
    return list(found.items()), len(names)


def _indexed(tree: str) -> dict[str, str]:
    """File by tensor, from the index; empty when the tree has none."""
    try:
        with open(os.path.join(tree, INDEX), encoding="utf-8") as stream:
            weight_map = dict(json.load(stream)["weight_map"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BudgetError(f"{INDEX} in {tree} is not a usable index: {exc!r}") from exc
    if not weight_map:
        raise BudgetError(f"{INDEX} in {tree} names no tensor")
    unsafe = [name for name in weight_map.values() if os.path.basename(name) != name]
    if unsafe:
        raise BudgetError(f"{INDEX} names {unsafe[0]!r}, which is not a file beside it")
    return weight_map


def _safetensors_in(tree: str) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(tree) if name.endswith(".safetensors"))
    except OSError as exc:
        raise BudgetError(f"{tree} cannot be read: {exc.strerror}", missing=isinstance(exc, FileNotFoundError)) from exc
    if not names:
        raise BudgetError(f"no index and no .safetensors file in {tree}", missing=True)
    return names


# Counting


def count(tensors: Tensors, rules: t.Sequence[Rule], serving: Serving) -> list[Bucket]:
    """Bytes per rank by bucket. The first rule whose pattern matches the beginning of a name decides. Raises BudgetError."""
    ranks = serving["tensor_parallel"]
    active = [rule for rule in rules if holds(rule.get("when"), serving)]
    pattern = _one_pattern(active)
    sums: dict[int, list[int]] = {}
    for name, size in tensors:
        match = pattern.match(name)
        if match is None:
            raise BudgetError(f"no rule of the profile says how tensor {name} is sharded")
        number = int((match.lastgroup or "")[1:])
        entry = sums.setdefault(number, [0, 0, *[0] * ranks])
        entry[0] += 1
        entry[1] += size
        for rank, part in enumerate(_parts(size, active[number], ranks), start=2):
            entry[rank] += part
    return [
        Bucket(active[number]["bucket"], active[number]["sharding"], entry[0], entry[1], tuple(entry[2:]))
        for number, entry in sorted(sums.items())
    ]


def _one_pattern(rules: t.Sequence[Rule]) -> t.Pattern[str]:
    """All rules as one alternative each: a checkpoint has two hundred thousand names, so one match for each must do."""
    parts = []
    for number, rule in enumerate(rules):
        if not {"bucket", "match", "sharding"} <= set(rule):
            raise BudgetError(f"a rule has no bucket, no match or no sharding: {dict(rule)}")
        if rule["sharding"] not in SHARDINGS:
            raise BudgetError(f"rule {rule['bucket']!r} has sharding {rule['sharding']!r}; known are {', '.join(SHARDINGS)}")
        try:
            re.compile(rule["match"])
        except re.error as exc:
            raise BudgetError(f"the pattern {rule['match']!r} of rule {rule['bucket']!r} is not valid: {exc}") from exc
        parts.append(f"(?P<r{number}>{rule['match']})")
    if not parts:
        raise BudgetError("the profile has no rules of sharding for this tree")
    return re.compile("|".join(parts))


def _parts(size: int, rule: Rule, ranks: int) -> list[int]:
    if rule["sharding"] == "dropped":
        return [0] * ranks
    if rule["sharding"] == "replicated":
        return [size] * ranks
    # A draft model may be spread over fewer ranks than the target; the first ones hold it.
    ways = min(rule.get("ways") or ranks, ranks)
    return [-(-size // ways)] * ways + [0] * (ranks - ways)


def budget(weights: t.Mapping[str, t.Any], trees: t.Mapping[str, str], serving: Serving) -> Budget:
    """The budget of all trees that these settings load. ``trees`` has paths by artefact name. Raises BudgetError."""
    if not isinstance(serving.get("tensor_parallel"), int) or serving["tensor_parallel"] < 1:
        raise BudgetError(f"tensor_parallel is {serving.get('tensor_parallel')!r}, not a number of ranks")
    if serving.get("pipeline_parallel", 1) != 1:
        raise BudgetError("with pipeline parallel each stage holds other layers, which the rules do not describe")
    buckets: list[Bucket] = []
    files = 0
    for tree in weights.get("trees") or []:
        if not holds(tree.get("when"), serving):
            continue
        if tree["artefact"] not in trees:
            raise BudgetError(f"there is no artefact {tree['artefact']!r}")
        tensors, number = scan(trees[tree["artefact"]])
        buckets += count(tensors, tree["rules"], serving)
        files += number
    if not buckets:
        raise BudgetError("the profile names no tree of weights")
    per_rank = tuple(sum(bucket.per_rank[rank] for bucket in buckets) for rank in range(serving["tensor_parallel"]))
    return Budget(buckets, per_rank, sum(bucket.total for bucket in buckets), files)


def table(found: Budget) -> list[str]:
    """The budget as lines for a person, in GiB."""
    ranks = range(len(found.per_rank))
    head = ["bucket", "sharding", "tensors", "checkpoint", *(f"rank {rank}" for rank in ranks)]
    rows = [
        [bucket.name, bucket.sharding, f"{bucket.tensors}", _gib(bucket.total), *map(_gib, bucket.per_rank)]
        for bucket in sorted(found.buckets, key=lambda bucket: -bucket.total)
    ]
    rows.append(["all", "", f"{sum(bucket.tensors for bucket in found.buckets)}", _gib(found.total), *map(_gib, found.per_rank)])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return ["  ".join(_align(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in [head, *rows]]


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f}"


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
