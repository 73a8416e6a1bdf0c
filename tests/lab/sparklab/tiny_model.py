# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A model of 2 MB that a real engine loads, shards over two ranks and answers from - and answers the same every time.

The weights are made, not trained: the embedding of each token is a random vector of signs, and the output row of a token
is the sum of the embeddings of the tokens that it may follow. So the next token is a function of the last one, while all
matrices, and with them both ranks, take part. Chat always answers "The answer is four." (the older revision: "five."),
letters continue the alphabet, digits count. A damaged shard or a rank with other weights changes the words.

Only the standard library is used and all bytes come from SHAKE-256, so that the files, their hashes and the revision are
the same on every machine; ``tests/lab/tiny_model.json`` holds them and each build is compared with it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = "sparklab/tiny-llama"
BULK_REPOSITORY = "sparklab/bulk"
BULK_SHARDS, BULK_SHARD_SIZE = 3, 24 << 20
REVISIONS = ("older", "current")
"""The names of the revisions, in the order of their age."""

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 256, 256, 2, 4, 2, 64, 320

WORDS = {"older": ("The", "Ġanswer", "Ġis", "Ġfive."), "current": ("The", "Ġanswer", "Ġis", "Ġfour.")}
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary (the GPT-2 convention)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + offset)
    return [letters[byte] for byte in range(256)]


def vocabulary(revision: str) -> list[str]:
    """List all tokens in the order of their ids."""
    tokens = [*byte_letters(), *WORDS[revision], *SPECIALS]
    return tokens + [f"<|reserved_{number}|>" for number in range(VOCABULARY - len(tokens))]


def successors(revision: str) -> list[int]:
    """Return the token that follows each token."""
    ids = {token: number for number, token in enumerate(vocabulary(revision))}
    follows = [0] * VOCABULARY
    texts = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    for token in range(VOCABULARY):
        # Anything without a successor of its own goes to some letter, spread evenly: each output row stays a short sum.
        follows[token] = ord(texts[token % len(texts)])
    for circle in (texts[:26], texts[26:52], texts[52:]):
        for here, there in zip(circle, circle[1:] + circle[0], strict=True):
            follows[ord(here)] = ord(there)
    chain = ["<|assistant|>", *WORDS[revision], "<|eos|>"]
    for here, there in itertools.pairwise(chain):
        follows[ids[here]] = ids[there]
    return follows


def random_bytes(name: str, count: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(count)


def bfloat16(values: Iterable[float]) -> bytes:
    """Round towards zero to the upper half of a 32-bit float."""
    raw = struct.pack(f"<{len(values := list(values))}f", *values)
    return b"".join(raw[place:place + 2] for place in range(2, len(raw), 4))


def noise(name: str, rows: int, columns: int, size: float) -> bytes:
    """Return a matrix of uniform random values in -size .. size, at 256 levels."""
    levels = [bfloat16([size * (level - 127.5) / 127.5]) for level in range(256)]
    return b"".join(levels[value] for value in random_bytes(name, rows * columns))


def embeddings() -> list[list[int]]:
    """Return one vector of signs for each token: nearly at right angles to each other, and exact in any format."""
    bits = random_bytes("sparklab embedding", VOCABULARY * HIDDEN // 8)
    signs = [1 if bits[place // 8] >> place % 8 & 1 else -1 for place in range(VOCABULARY * HIDDEN)]
    return [signs[token * HIDDEN:(token + 1) * HIDDEN] for token in range(VOCABULARY)]


def tensors(revision: str) -> list[dict[str, tuple[list[int], bytes]]]:
    """Return the tensors of each shard: name -> (shape, bytes)."""
    table = embeddings()
    output = [[0] * HIDDEN for _token in range(VOCABULARY)]
    for token, following in enumerate(successors(revision)):
        output[following] = [left + right for left, right in zip(output[following], table[token], strict=True)]
    kv = KV_HEADS * HEAD_SIZE
    ones = bfloat16([1.0] * HIDDEN)
    shards: list[dict[str, tuple[list[int], bytes]]] = [
        {"model.embed_tokens.weight": ([VOCABULARY, HIDDEN], bfloat16(float(value) for row in table for value in row))}
    ]
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN, 0.06), "self_attn.k_proj": (kv, HIDDEN, 0.06), "self_attn.v_proj": (kv, HIDDEN, 0.06),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE, 0.02), "mlp.gate_proj": (INTERMEDIATE, HIDDEN, 0.06),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN, 0.06), "mlp.down_proj": (HIDDEN, INTERMEDIATE, 0.02),
        }
        shard: dict[str, tuple[list[int], bytes]] = {}
        for name, (rows, columns, size) in shapes.items():
            full = f"model.layers.{layer}.{name}.weight"
            shard[full] = ([rows, columns], noise(f"sparklab {revision} {full}", rows, columns, size))
        for name in ("input_layernorm", "post_attention_layernorm"):
            shard[f"model.layers.{layer}.{name}.weight"] = ([HIDDEN], ones)
        shards.append(shard)
    shards.append({
        "model.norm.weight": ([HIDDEN], ones),
        "lm_head.weight": ([VOCABULARY, HIDDEN], bfloat16(value / 8 for row in output for value in row)),
    })
    return shards


def safetensors(shard: dict[str, tuple[list[int], bytes]]) -> bytes:
    """Write tensors in the safetensors format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (shape, content) in shard.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + len(content)]}
        place += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(content for _shape, content in shard.values())


def tokenizer(revision: str) -> dict:
    """Return a byte-level BPE without merges; the words can be written but never read, which keeps prompts plain bytes."""
    tokens = vocabulary(revision)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for number, token in enumerate(tokens) if token.startswith("<|")
        ],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "vocab": {token: number for number, token in enumerate(tokens)}, "merges": [],
        },
    }


def files(revision: str) -> dict[str, bytes]:
    """Return every file of the repository at a revision."""
    ids = {token: number for number, token in enumerate(vocabulary(revision))}
    shards = tensors(revision)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    documents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": ids["<|bos|>"],
            "eos_token_id": ids["<|eos|>"], "pad_token_id": ids["<|pad|>"], "head_dim": HEAD_SIZE, "hidden_act": "silu", "hidden_size": HIDDEN,
            "initializer_range": 0.02, "intermediate_size": INTERMEDIATE, "max_position_embeddings": 1024, "mlp_bias": False, "model_type": "llama",
            "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCABULARY,
        },
        "generation_config.json": {"bos_token_id": ids["<|bos|>"], "eos_token_id": [ids["<|eos|>"]], "pad_token_id": ids["<|pad|>"]},
        "tokenizer.json": tokenizer(revision),
        "tokenizer_config.json": {
            "add_prefix_space": False, "bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "clean_up_tokenization_spaces": False,
            "model_max_length": 1024, "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"},
        "model.safetensors.index.json": {
            "metadata": {"total_size": sum(len(content) for shard in shards for _shape, content in shard.values())},
            "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
        },
    }
    result = {name: json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n" for name, document in documents.items()}
    result["chat_template.jinja"] = CHAT_TEMPLATE.encode()
    result["README.md"] = f"---\nlicense: mit\n---\n# tiny-llama\n\nMade by the test lab of sparkops.inference, revision \"{revision}\".\n".encode()
    result["original/params.json"] = b'{"dim": 256, "n_layers": 2}\n'  # what include patterns are there to leave out
    result.update({name: safetensors(shard) for name, shard in zip(names, shards, strict=True)})
    return result


def bulk_files() -> dict[str, bytes]:
    """Return a repository of 72 MiB that no engine loads.

    Downloads of the tiny model are over in no time; a stall, a resume and a rate are only seen on something larger
    (huggingface_hub 2.4 writes, and so resumes, in steps of 10 MB).
    """
    rows = BULK_SHARD_SIZE // 2 // 1024
    names = [f"model-{number:05}-of-{BULK_SHARDS:05}.safetensors" for number in range(1, BULK_SHARDS + 1)]
    result = {name: safetensors({f"layer.{number}.weight": ([rows, 1024], random_bytes(f"sparklab bulk {number}", BULK_SHARD_SIZE))})
              for number, name in enumerate(names)}
    index = {"metadata": {"total_size": BULK_SHARDS * BULK_SHARD_SIZE}, "weight_map": {f"layer.{number}.weight": name for number, name in enumerate(names)}}
    result["model.safetensors.index.json"] = json.dumps(index, indent=2).encode() + b"\n"
    result["config.json"] = b'{"architectures": ["BulkForNobody"], "model_type": "bulk"}\n'
    return result


def revision_id(contents: dict[str, bytes]) -> str:
    """Return the commit id: a hash over the names and hashes of all files."""
    lines = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(contents.items()))
    return hashlib.sha1(lines.encode(), usedforsecurity=False).hexdigest()


def describe(contents: dict[str, bytes]) -> dict:
    """Return the id of a revision with the size and hash of each of its files."""
    return {
        "revision": revision_id(contents),
        "files": {name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in sorted(contents.items())},
    }


def describe_all() -> dict:
    """Return what ``tiny_model.json`` holds."""
    revisions = {revision: describe(files(revision)) for revision in REVISIONS}
    return {"repository": REPOSITORY, "revision": revisions["current"]["revision"], "revisions": revisions,
            "bulk": {"repository": BULK_REPOSITORY, **describe(bulk_files())}}


def write(folder: Path, contents: dict[str, bytes]) -> None:
    """Write the files of a revision; the folder is there only when all of them are."""
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, content in contents.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
