# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Synthetic checkpoints with the tensor names and shapes of both recipes: real headers, and no data (sparse files).

The shapes follow the models' public config values. Assumed, because no header of the packs was at hand:
EXL3 stores a matrix [out, in] of K bits as ``trellis`` (out * in * K / 8 bytes), ``suh`` (in, 2 bytes each), ``svh``
(out, 2 bytes each) and a marker of 4 bytes; DeepSeek's grouped ``wo_a`` is one matrix for each of its 8 groups, which
with all other packed matrices makes exactly the 47,900 that the pack's card names.
"""

from __future__ import annotations

import json
import os
import struct
import typing as t

Tensor = tuple[str, int]

# GLM's draft model; its shapes do not matter here, it is one file that one rule covers.
DRAFTER_BYTES = round(2.3 * 2**30)


def packed(name: str, out: int, inn: int, bits: int, marker: str) -> list[Tensor]:
    return [(f"{name}.trellis", out * inn * bits // 8), (f"{name}.suh", 2 * inn), (f"{name}.svh", 2 * out), (f"{name}.{marker}", 4)]


def native(name: str, *shape: int, width: int = 2) -> list[Tensor]:
    size = width
    for number in shape:
        size *= number
    return [(name, size)]


class DeepSeek:
    """DeepSeek-V4.1-Flash, EXL3 2.9 bits: config values, and K by kind of tensor as the pack's card gives it."""

    hidden, vocab, layers, draft_layers = 5120, 129280, 40, 3
    heads, head_dim, q_lora, o_lora, o_groups = 64, 512, 1280, 1024, 8
    experts, draft_experts, intermediate, streams = 384, 128, 2304, 4
    index_heads, index_dim, kv_sources, index_sources = 32, 128, (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)
    engram = {1: 5, 14: 4}
    shards = 39
    marker = "mul1"

    @staticmethod
    def expert_bits(layer: int) -> int:
        return 2 if 18 <= layer <= 22 else 3

    @staticmethod
    def shared_bits(layer: int) -> int:
        return 5 if layer <= 10 or layer >= 30 else 4

    def matrix(self, name: str, out: int, inn: int, bits: int) -> list[Tensor]:
        return packed(name, out, inn, bits, self.marker)

    def mlp(self, name: str, bits: int) -> list[Tensor]:
        found = []
        for part, out, inn in (("w1", self.intermediate, self.hidden), ("w2", self.hidden, self.intermediate), ("w3", self.intermediate, self.hidden)):
            found += self.matrix(f"{name}.{part}", out, inn, bits)
        return found

    def attention(self, name: str, bits: int) -> list[Tensor]:
        group_in = self.heads * self.head_dim // self.o_groups
        found = self.matrix(f"{name}.wq_a", self.q_lora, self.hidden, bits)
        found += self.matrix(f"{name}.wq_b", self.heads * self.head_dim, self.q_lora, bits)
        found += self.matrix(f"{name}.wkv", self.head_dim, self.hidden, bits)
        for group in range(self.o_groups):
            found += self.matrix(f"{name}.wo_a.{group}", self.o_lora, group_in, bits)
        found += self.matrix(f"{name}.wo_b", self.hidden, self.o_lora * self.o_groups, bits)
        found += native(f"{name}.q_norm.weight", self.q_lora) + native(f"{name}.kv_norm.weight", self.head_dim)
        return found + native(f"{name}.attn_sink", self.heads, width=4)

    def indexer(self, name: str, layer: int) -> list[Tensor]:
        found: list[Tensor] = []
        if layer in self.index_sources:
            found += self.matrix(f"{name}.indexer.wq_b", self.index_heads * self.index_dim, self.q_lora, 5)
            found += native(f"{name}.indexer.weights_proj.weight", self.index_heads, self.hidden)
        if layer in self.kv_sources:
            found += self.matrix(f"{name}.indexer.wk", self.index_dim, self.head_dim, 8)
            found += native(f"{name}.indexer.k_norm.weight", self.index_dim)
            found += self.matrix(f"{name}.compressor.wkv", self.head_dim, self.hidden, 5)
            found += native(f"{name}.compressor.norm.weight", self.head_dim)
            if layer != 20:
                found += self.matrix(f"{name}.compressor.wgate", self.head_dim, self.hidden, 5)
        return found

    def block(self, name: str, experts: int, layer: int, draft: bool) -> list[Tensor]:
        found = self.attention(f"{name}.attn", 4 if draft else 5)
        for expert in range(experts):
            found += self.mlp(f"{name}.ffn.experts.{expert}", 4 if draft else self.expert_bits(layer))
        found += self.mlp(f"{name}.ffn.shared_experts", 4 if draft else self.shared_bits(layer))
        found += native(f"{name}.ffn.gate.weight", experts, self.hidden) + native(f"{name}.ffn.gate.bias", experts, width=4)
        coefficients = self.streams * (2 + self.streams)
        for part in ("attn", "ffn"):
            found += native(f"{name}.hc_{part}_fn", coefficients, self.streams * self.hidden, width=4)
            found += native(f"{name}.hc_{part}_base", coefficients, width=4) + native(f"{name}.hc_{part}_scale", 3, width=4)
            found += native(f"{name}.{part}_norm.weight", self.hidden)
        return found

    def draft_ends(self) -> list[Tensor]:
        last = f"mtp.{self.draft_layers - 1}"
        return [
            *native("mtp.0.main_norm.weight", self.hidden),
            *self.matrix("mtp.0.main_proj", self.hidden, 3 * self.hidden, 4),
            *native(f"{last}.norm.weight", self.hidden),
            *native(f"{last}.markov_head.embed.weight", self.vocab, 256),
            *native(f"{last}.markov_head.head.weight", self.vocab, 256),
            *native(f"{last}.confidence_head.proj.weight", 1, self.hidden + 256),
        ]

    def vision(self) -> list[Tensor]:
        width, inner = 1024, 2816
        found = native("vision.patch_embed.proj.weight", width, 588) + native("vision.patch_embed.proj.bias", width)
        for number in range(32):
            name = f"vision.blocks.{number}"
            found += native(f"{name}.attn.wqkv.weight", 3 * width, width) + native(f"{name}.attn.wqkv.bias", 3 * width)
            found += native(f"{name}.attn.wo.weight", width, width) + native(f"{name}.attn.wo.bias", width)
            found += native(f"{name}.mlp.w1.weight", 2 * inner, width) + native(f"{name}.mlp.w2.weight", width, inner)
            found += native(f"{name}.norm1.weight", width) + native(f"{name}.norm2.weight", width)
        found += native("vision.norm.weight", width)
        found += native("aligner.w1.weight", self.hidden, 9 * width) + native("aligner.w1.bias", self.hidden)
        return found + native("aligner.w2.weight", self.hidden, self.hidden) + native("aligner.w2.bias", self.hidden)

    def tensors(self) -> list[Tensor]:
        found = native("embed.weight", self.vocab, self.hidden) + self.matrix("head", self.vocab, self.hidden, 6) + native("norm.weight", self.hidden)
        for name in ("image_start", "image_end", "image_newline"):
            found += native(name, self.hidden)
        for layer in range(self.layers):
            name = f"layers.{layer}"
            found += self.block(name, self.experts, layer, draft=False) + self.indexer(f"{name}.attn", layer)
            if layer in self.engram:
                found += self.matrix(f"{name}.engram.wkv", 5 * self.hidden, 6144, self.engram[layer])
                found += native(f"{name}.engram.q_weight", 4, self.hidden) + native(f"{name}.engram.k_weight", 4, self.hidden)
        for layer in range(self.draft_layers):
            found += self.block(f"mtp.{layer}", self.draft_experts, layer, draft=True)
        return found + self.draft_ends() + self.vision()


class Glm:
    """GLM-5.3-Flash, EXL3 4 bits for the routed experts and BF16 for all else."""

    hidden, vocab, layers, dense_layers = 4096, 154880, 45, 3
    heads, q_lora, kv_lora, qk_dim, v_dim = 64, 1536, 512, 256, 256
    linear_heads, linear_dim, conv = 64, 128, 4
    experts, intermediate, dense_intermediate, streams = 288, 2048, 12288, 4
    index_heads, index_dim, pooled = 32, 128, 4
    shards = 120
    marker = "mcg"

    @staticmethod
    def is_mla(layer: int) -> bool:
        return layer % 4 == 3 or layer == 45

    def mla(self, name: str) -> list[Tensor]:
        return [
            *native(f"{name}.q_a_proj.weight", self.q_lora, self.hidden),
            *native(f"{name}.q_a_layernorm.weight", self.q_lora),
            *native(f"{name}.q_b_proj.weight", self.heads * self.qk_dim, self.q_lora),
            *native(f"{name}.kv_a_proj_with_mqa.weight", self.kv_lora, self.hidden),
            *native(f"{name}.kv_a_layernorm.weight", self.kv_lora),
            *native(f"{name}.kv_b_proj.weight", self.heads * (self.qk_dim + self.v_dim), self.kv_lora),
            *native(f"{name}.o_proj.weight", self.hidden, self.heads * self.v_dim),
            *native(f"{name}.indexer.wq_b.weight", self.index_heads * self.index_dim, self.q_lora),
            *native(f"{name}.indexer.wk.weight", self.index_dim, self.hidden),
            *native(f"{name}.indexer.weights_proj.weight", self.index_heads, self.hidden),
            *native(f"{name}.indexer.k_norm.weight", self.index_dim),
            *native(f"{name}.indexer.index_kpool_compress_gate", self.index_dim, self.hidden),
            *native(f"{name}.indexer.index_kpool_compress_ape", self.pooled, self.index_dim, width=4),
        ]

    def linear(self, name: str) -> list[Tensor]:
        width = self.linear_heads * self.linear_dim
        found: list[Tensor] = []
        for part in ("q", "k", "v"):
            found += native(f"{name}.{part}_proj.weight", width, self.hidden) + native(f"{name}.{part}_conv1d.weight", width, self.conv)
        for part in ("f", "g"):
            found += native(f"{name}.{part}_a_proj.weight", self.linear_dim, self.hidden) + native(f"{name}.{part}_b_proj.weight", width, self.linear_dim)
        found += native(f"{name}.b_proj.weight", self.linear_heads, self.hidden) + native(f"{name}.A_log", self.linear_heads, width=4)
        found += native(f"{name}.dt_bias", width, width=4) + native(f"{name}.o_norm.weight", self.linear_dim)
        return found + native(f"{name}.o_proj.weight", self.hidden, width)

    def mlp(self, name: str, inner: int) -> list[Tensor]:
        shapes = (("gate_proj", inner, self.hidden), ("up_proj", inner, self.hidden), ("down_proj", self.hidden, inner))
        return [tensor for part, out, inn in shapes for tensor in native(f"{name}.{part}.weight", out, inn)]

    def moe(self, name: str) -> list[Tensor]:
        found = native(f"{name}.gate.weight", self.experts, self.hidden) + native(f"{name}.gate.e_score_correction_bias", self.experts, width=4)
        for expert in range(self.experts):
            for part, out, inn in (
                ("gate_proj", self.intermediate, self.hidden),
                ("up_proj", self.intermediate, self.hidden),
                ("down_proj", self.hidden, self.intermediate),
            ):
                found += packed(f"{name}.experts.{expert}.{part}", out, inn, 4, self.marker)
        return found + self.mlp(f"{name}.shared_experts", self.intermediate)

    def vision(self) -> list[Tensor]:
        width, inner, projection = 1024, 4096, 10240
        found = native("model.visual.patch_embed.proj.weight", width, 3 * 2 * 14 * 14) + native("model.visual.patch_embed.proj.bias", width)
        for number in range(24):
            name = f"model.visual.blocks.{number}"
            found += native(f"{name}.attn.qkv.weight", 3 * width, width) + native(f"{name}.attn.qkv.bias", 3 * width)
            found += native(f"{name}.attn.proj.weight", width, width) + native(f"{name}.attn.proj.bias", width)
            for part, out, inn in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
                found += native(f"{name}.mlp.{part}.weight", out, inn)
            found += native(f"{name}.norm1.weight", width) + native(f"{name}.norm2.weight", width)
        found += native("model.visual.downsample.weight", self.hidden, width, 2, 2)
        found += native("model.visual.merger.proj.weight", self.hidden, self.hidden)
        for part, out, inn in (("gate_proj", projection, self.hidden), ("up_proj", projection, self.hidden), ("down_proj", self.hidden, projection)):
            found += native(f"model.visual.merger.{part}.weight", out, inn)
        return found

    def tensors(self) -> list[Tensor]:
        found = native("model.language_model.embed_tokens.weight", self.vocab, self.hidden) + native("lm_head.weight", self.vocab, self.hidden)
        found += native("model.language_model.norm.weight", self.hidden)
        for layer in range(self.layers + 1):
            name = f"model.language_model.layers.{layer}"
            found += self.mla(f"{name}.self_attn") if self.is_mla(layer) else self.linear(f"{name}.self_attn")
            found += self.mlp(f"{name}.mlp", self.dense_intermediate) if layer < self.dense_layers else self.moe(f"{name}.mlp")
            coefficients = self.streams * (2 + self.streams)
            for part in ("attn", "ffn"):
                found += native(f"{name}.hc_{part}_fn", coefficients, self.streams * self.hidden, width=4)
                found += native(f"{name}.hc_{part}_base", coefficients, width=4) + native(f"{name}.hc_{part}_scale", 3, width=4)
            found += native(f"{name}.input_layernorm.weight", self.hidden) + native(f"{name}.post_attention_layernorm.weight", self.hidden)
        draft = f"model.language_model.layers.{self.layers}"
        found += native(f"{draft}.eh_proj.weight", self.hidden, 2 * self.hidden)
        found += native(f"{draft}.enorm.weight", self.hidden) + native(f"{draft}.hnorm.weight", self.hidden)
        return found + self.vision()


def write(folder: str | os.PathLike[str], tensors: t.Sequence[Tensor], shards: int) -> None:
    """The tensors as that many files of one tree, with an index. Each file has its true size, and almost no blocks."""
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        # Shards of real packs hold whole layers; for headers only the number of tensors in each counts.
        part = tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards]
        write_file(os.path.join(folder, name), part)
        weight_map.update({tensor: name for tensor, dummy in part})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as stream:
        json.dump({"metadata": {"total_size": sum(size for dummy, size in tensors)}, "weight_map": weight_map}, stream)


def write_file(path: str, tensors: t.Iterable[Tensor]) -> None:
    header: dict[str, t.Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors:
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
