# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""How many tokens a KV pool holds, as the engine itself counts them.

The engine cuts the pool into blocks of one size. A block holds one page of each layer of the group with the largest
pages, and every group of layers draws its blocks from the same pool: layers that keep everything need more with each
token, layers with a window or a state need a fixed number for each request. What the engine prints as "GPU KV cache
size" is the number of requests of the maximum length that fit, times that length. The geometry is profile data
(docs/memory.md), here is only the arithmetic.
"""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._memory import holds

# Two steps are in flight where scheduling is asynchronous, which is the engine's default.
STEPS_IN_FLIGHT = 2

KvData = t.Mapping[str, t.Any]
Serving = t.Mapping[str, t.Any]


class KvUnknown(ValueError):
    """The pool cannot be computed from the data; the text says why."""


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def block_bytes(kv: KvData) -> int:
    """The size of one block: for each part its layers, times a page of entries, rounded up to the kernel's alignment."""
    total = 0
    for part in kv["block"]:
        page = part["entries"] * part["entry_bytes"]
        align = part.get("align", 1)
        total += part["layers"] * _ceil_div(page, align) * align
    return total


def blocks_per_request(kv: KvData, serving: Serving, length: int) -> int:
    """How many blocks one request of ``length`` tokens may hold at most."""
    return sum(_blocks_of_group(group, serving, length) for group in kv["groups"] if holds(group.get("when"), serving))


def _blocks_of_group(group: t.Mapping[str, t.Any], serving: Serving, length: int) -> int:
    # Layers beyond those that share one block are laid out in further groups with blocks of their own.
    copies = _ceil_div(group.get("layers", 1), group.get("layers_per_block", group.get("layers", 1)))
    kind = group["kind"]
    if kind == "full":
        return copies * _ceil_div(length, group["tokens"])
    if kind == "window":
        in_flight = STEPS_IN_FLIGHT * serving["batched_tokens"]
        span = min(group["window"] - 1 + in_flight, length)
        return copies * (_ceil_div(span, group["tokens"]) + 1)
    if kind == "state":
        return copies * (group["blocks"] + (_draft_tokens(serving) if group.get("and_draft_tokens") else 0))
    raise KvUnknown(f"a group of kind {kind!r}; known are full, window, state")


def _draft_tokens(serving: Serving) -> int:
    # A number may stand there although nothing is drafted.
    return 0 if serving.get("speculation", "none") == "none" else serving.get("draft_tokens") or 0


def check(kv: KvData | None, serving: Serving) -> None:
    """Raises KvUnknown when the geometry is not known for these settings."""
    if not kv:
        raise KvUnknown("the profile has no KV geometry")
    sizes = kv.get("tensor_parallel")
    if sizes and serving.get("tensor_parallel") not in sizes:
        raise KvUnknown(f"the block size is only known for tensor parallel {', '.join(map(str, sizes))}, not {serving.get('tensor_parallel')}")
    for name in ("batched_tokens", "length"):
        if not serving.get(name):
            raise KvUnknown(f"the setting for {name} has no value")


def tokens(pool_bytes: int, kv: KvData | None, serving: Serving) -> int:
    """The tokens of a pool, for requests of the maximum length. Raises KvUnknown."""
    check(kv, serving)
    length = serving["length"]
    blocks = pool_bytes // block_bytes(kv)
    return int(blocks / blocks_per_request(kv, serving, length) * length)


def smallest_pool(kv: KvData | None, serving: Serving) -> int:
    """The bytes without which the engine refuses its own maximum length. Raises KvUnknown."""
    check(kv, serving)
    return blocks_per_request(kv, serving, serving["length"]) * block_bytes(kv)


def largest_length(pool_bytes: int, kv: KvData | None, serving: Serving, limit: int = 1 << 20) -> int:
    """The longest request that a pool can hold; 0 when it holds none. Raises KvUnknown."""
    check(kv, serving)
    blocks = pool_bytes // block_bytes(kv)
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_per_request(kv, serving, middle) <= blocks else (low, middle - 1)
    return low
