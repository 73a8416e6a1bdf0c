# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Makes small Engram checkpoints, and packs them in a second, slow and obvious way.

Nothing here uses the collection: it is written from the description of the format, so that a mistake must be made
twice to stay unseen.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import typing as t

SHARDS = {1: "model-00047-of-00048.safetensors", 14: "model-00048-of-00048.safetensors"}


def stream(name: str, length: int) -> bytes:
    """Reproducible bytes: SHA-256 of the name and a counter, block after block."""
    blocks = [hashlib.sha256(f"engram-vector-v1|{name}|{number}".encode()).digest() for number in range(-(-length // 32))]
    return b"".join(blocks)[:length]


def safetensors(tensors: t.Sequence[tuple[str, str, list[int], bytes]], extra_padding: int = 0) -> bytes:
    """A file with these tensors in this order of data."""
    header: dict[str, t.Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + extra_padding)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _name, _dtype, _shape, data in tensors)


def layer_tensors(layer: int, rows: int, order: t.Sequence[str] = ("q_weight", "weight", "scale"), data: t.Callable[[str, int], bytes] = stream):
    prefix = f"layers.{layer}.engram."
    kinds = {
        "q_weight": (prefix + "q_weight", "BF16", [4, 16], 128),
        "weight": (prefix + "embed.weight", "F8_E4M3", [rows, 256], rows * 256),
        "scale": (prefix + "embed.scale", "F8_E8M0", [rows, 8], rows * 8),
    }
    return [(name, dtype, shape, data(name, size)) for name, dtype, shape, size in (kinds[part] for part in order)]


def compact(content: t.Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def write_checkpoint(
    folder: pathlib.Path,
    layers: t.Sequence[int],
    rows: t.Sequence[int],
    vocabulary: int,
    heads: int,
    longest_ngram: int,
    orders: t.Mapping[int, t.Sequence[str]],
    nested: bool = True,
    extra_padding: int = 0,
) -> None:
    """A slim Engram source: config.json, the index, and one shard for each layer."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {
        "engram_layer_ids": list(layers),
        "engram_num_embeddings": list(rows),
        "engram_vocab_size": vocabulary,
        "engram_n_heads": heads,
        "engram_max_ngram_size": longest_ngram,
    }
    config = {"model_type": "synthetic", "text_config": keys} if nested else {"model_type": "synthetic", **keys}
    (folder / "config.json").write_bytes(compact(config))
    weight_map = {"vision.decoy.weight": "model-00001-of-00048.safetensors"}
    for layer, count in zip(layers, rows):
        shard = SHARDS.get(layer, f"model-{layer:05d}-of-99999.safetensors")
        tensors = layer_tensors(layer, count, orders[layer])
        (folder / shard).write_bytes(safetensors(tensors, extra_padding))
        weight_map.update({name: shard for name, _dtype, _shape, _data in tensors})
    (folder / "model.safetensors.index.json").write_bytes(compact({"metadata": {}, "weight_map": weight_map}))


def vector_checkpoint(folder: pathlib.Path) -> None:
    """The inputs of the published test vectors."""
    orders = {1: ("q_weight", "weight", "scale"), 14: ("q_weight", "scale", "weight")}
    write_checkpoint(folder, [1, 14], [3396, 3754], 400, 4, 3, orders)


# The oracle


def next_unused_prime(after: int, used: set[int]) -> int:
    candidate = after + 1
    while candidate in used or candidate < 2 or any(candidate % divisor == 0 for divisor in range(2, candidate)):
        candidate += 1
    return candidate


def oracle_buckets(layers: t.Sequence[int], vocabulary: int, heads: int, longest_ngram: int) -> dict[int, list[int]]:
    """Word for word: one set of used primes; the search starts anew below the vocabulary for each n-gram order."""
    used: set[int] = set()
    result: dict[int, list[int]] = {}
    for layer in layers:
        result[layer] = []
        for _order in range(2, longest_ngram + 1):
            current = vocabulary - 1
            for _head in range(heads):
                current = next_unused_prime(current, used)
                used.add(current)
                result[layer].append(current)
    return result


def oracle_file(weights: bytes, scales: bytes, layer: int, buckets: t.Sequence[int], rank: int, ranks: int) -> bytes:
    """One row file, a row at a time."""
    owners = []
    share = -(-len(buckets) // ranks)
    for head, size in enumerate(buckets):
        owners.extend([head // share] * size)
    mine = [row for row, owner in enumerate(owners) if owner == rank]
    low, high = mine[0], mine[-1] + 1
    out = b"DSV1EN41"
    for number in (layer, low, high, len(owners), 264):
        out += bytes((number >> shift) & 255 for shift in range(0, 64, 8))
    out += bytes(4096 - len(out))
    return out + b"".join(weights[row * 256 : row * 256 + 256] + scales[row * 8 : row * 8 + 8] for row in mine)


if __name__ == "__main__":
    vector_checkpoint(pathlib.Path(sys.argv[1]))
