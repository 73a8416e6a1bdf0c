# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import pathlib
import struct

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkops.inference.plugins.module_utils import _weight_budget
from ansible_collections.sparkops.inference.plugins.module_utils._weight_budget import BudgetError, budget, count, scan, table
from ansible_collections.sparkops.inference.plugins.modules import weight_budget
from checkpoints import DRAFTER_BYTES, DeepSeek, write, write_file
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_data import memory_of

GIB = 1 << 30
DEEPSEEK, GLM = (memory_of(name)["weights"] for name in ("deepseek_v41_flash_exl3", "glm_53_flash_exl3"))
RULES = [
    {"bucket": "experts", "match": r"layers\.\d+\.experts\.", "sharding": "split"},
    {"bucket": "rest", "match": "", "sharding": "replicated"},
]


def serving(ranks=2, speculation="none", **more):
    return {"tensor_parallel": ranks, "pipeline_parallel": 1, "speculation": speculation, **more}


# Both recipes, against counts that share nothing with the rules: they add up shapes, not names.


def packed_bytes(out, inn, bits):
    """trellis, suh, svh and the marker of one EXL3 matrix."""
    return [out * inn * bits // 8, 2 * inn, 2 * out, 4]


def halves(sizes, ranks):
    return sum(-(-size // ranks) for size in sizes)


def deepseek_count(ranks, draft):
    model = DeepSeek()
    hidden, inner = model.hidden, model.intermediate
    split, whole = [], []

    def expert(bits):
        return [*packed_bytes(inner, hidden, bits), *packed_bytes(hidden, inner, bits), *packed_bytes(inner, hidden, bits)]

    blocks = [(384, model.expert_bits(layer), model.shared_bits(layer), 5) for layer in range(40)]
    blocks += [(128, 4, 4, 4)] * 3 if draft else []
    for experts, bits, shared, attention in blocks:
        split += expert(bits) * experts + expert(shared)
        split += packed_bytes(32768, 1280, attention) + packed_bytes(1024, 4096, attention) * 8 + [64 * 4]
        whole += packed_bytes(1280, hidden, attention) + packed_bytes(512, hidden, attention) + packed_bytes(hidden, 8192, attention) + [2560, 1024]
        whole += [experts * hidden * 2, experts * 4]
        whole += [24 * 4 * hidden * 4, 24 * 4, 3 * 4, 2 * hidden] * 2
    # The indexer's query side on eight layers, its key side and the compressor on four, a gate where two tokens become one.
    whole += (packed_bytes(4096, 1280, 5) + [32 * hidden * 2]) * 8
    whole += (packed_bytes(128, 512, 8) + [256] + packed_bytes(512, hidden, 5) + [1024]) * 4 + packed_bytes(512, hidden, 5) * 3
    whole += packed_bytes(5 * hidden, 6144, 5) + packed_bytes(5 * hidden, 6144, 4) + [4 * hidden * 2] * 4
    split += [129280 * hidden * 2] + packed_bytes(129280, hidden, 6)
    whole += [hidden * 2] * 4
    if draft:
        whole += [hidden * 2] * 2 + packed_bytes(hidden, 3 * hidden, 4) + [129280 * 256 * 2] * 2 + [(hidden + 256) * 2]
    # Vision: 32 blocks, patches, and the two layers of the aligner.
    whole += [3 * 1024**2 * 2, 3 * 1024 * 2, 1024**2 * 2, 1024 * 2, 2 * 2816 * 1024 * 2, 1024 * 2816 * 2, 2048, 2048] * 32
    whole += [1024 * 588 * 2, 2048, 2048, hidden * 9216 * 2, hidden * 2, hidden**2 * 2, hidden * 2]
    return halves(split, ranks) + sum(whole)


def glm_count(ranks, mtp):
    hidden, inner = 4096, 2048
    split, whole = [], []
    moe_layers = 43 if mtp else 42
    side = {"column": (4 * inner * hidden // 8, 2 * hidden, 2 * inner), "row": (4 * inner * hidden // 8, 2 * hidden, 2 * inner)}
    for trellis, whole_vector, split_vector in (side["column"], side["column"], side["row"]):
        split += [trellis, split_vector, 4] * 288 * moe_layers
        whole += [whole_vector] * 288 * moe_layers
    split += [inner * hidden * 2] * 3 * moe_layers
    whole += [288 * hidden * 2, 288 * 4] * moe_layers
    split += [12288 * hidden * 2] * 3 * 3
    mla, linear = (12 if mtp else 11), 34
    split += [16384 * 1536 * 2, 64 * 512 * 512 * 2, hidden * 16384 * 2] * mla
    whole += [1536 * hidden * 2, 1536 * 2, 512 * hidden * 2, 512 * 2] * mla
    whole += [4096 * 1536 * 2, 128 * hidden * 2, 32 * hidden * 2, 128 * 2, 128 * hidden * 2, 4 * 128 * 4] * mla
    split += ([8192 * hidden * 2, 8192 * 4 * 2] * 3 + [8192 * 128 * 2] * 2 + [64 * hidden * 2, 64 * 4, 8192 * 4, hidden * 8192 * 2]) * linear
    whole += ([128 * hidden * 2] * 2 + [128 * 2]) * linear
    layers = 46 if mtp else 45
    whole += ([24 * 4 * hidden * 4, 24 * 4, 12] * 2 + [hidden * 2] * 2) * layers + [hidden * 2]
    whole += [hidden * 2 * hidden * 2, hidden * 2, hidden * 2] if mtp else []
    split += [154880 * hidden * 2] * 2
    split += ([3 * 1024**2 * 2, 3 * 1024 * 2, 1024**2 * 2, 1024 * 2] + [4096 * 1024 * 2] * 3) * 24
    whole += [2048, 2048] * 24 + [1024 * 1176 * 2, 2048, hidden * 1024 * 4 * 2]
    split += [hidden**2 * 2] + [10240 * hidden * 2] * 3
    return halves(split, ranks) + sum(whole)


def per_rank(buckets, ranks):
    return [sum(bucket.per_rank[rank] for bucket in buckets) for rank in range(ranks)]


def test_the_synthetic_packs_are_those_of_the_cards(deepseek_tensors, glm_tensors):
    packed = sum(name.endswith(".trellis") for name, dummy in deepseek_tensors)
    assert (packed, len(deepseek_tensors) - 4 * packed) == (47_900, 852)  # the numbers of the pack's card
    assert sum(size for dummy, size in deepseek_tensors) / GIB == pytest.approx(196.5, rel=0.005)
    assert sum(size for dummy, size in glm_tensors) / GIB == pytest.approx(163.65, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("speculation", ["dspark", "none"])
def test_deepseek(deepseek_tensors, ranks, speculation):
    buckets = count(deepseek_tensors, DEEPSEEK["trees"][0]["rules"], serving(ranks, speculation))
    assert per_rank(buckets, ranks) == [deepseek_count(ranks, draft=speculation == "dspark")] * ranks


def test_deepseek_published(deepseek_tree):
    found = budget(DEEPSEEK, {"model": deepseek_tree}, serving(2, "dspark"))
    with_draft = found.per_rank[0]
    assert found.files == 39
    without = budget(DEEPSEEK, {"model": deepseek_tree}, serving(2, "none")).per_rank[0]
    assert round(with_draft / GIB, 1) == 99.5
    assert round((with_draft - without) / GIB, 1) == 3.5


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("speculation", ["dflash", "mtp", "none"])
def test_glm(glm_tensors, ranks, speculation):
    buckets = count(glm_tensors, GLM["trees"][0]["rules"], serving(ranks, speculation))
    assert per_rank(buckets, ranks) == [glm_count(ranks, mtp=speculation == "mtp")] * ranks


def test_glm_published(glm_trees):
    """79.7 to 82 GiB: the model alone, and the engine's own 82.06 GiB for rank 0 with the draft model."""
    found = budget(GLM, glm_trees, serving(2, "dflash"))
    assert 79.7 <= found.per_rank[1] / GIB <= 82
    assert found.per_rank[0] / GIB == pytest.approx(82.06, rel=0.01)
    assert found.per_rank[0] - found.per_rank[1] == DRAFTER_BYTES
    experts = sum(bucket.per_rank[0] for bucket in found.buckets if bucket.name in ("routed experts", "expert vectors"))
    assert round(experts / GIB, 2) == 71.22  # upstream's own count of the packed experts on one rank


def test_scan_of_120_shards_reads_every_header_once(glm_trees):
    """About half a second of work on two cores; the time is not asserted, since test machines are noisy."""
    tensors, files = scan(glm_trees["model"])
    assert (len(tensors), files) == (150_095, 120)


# Rules


def test_first_rule_decides_and_conditions_count():
    rules = [{"bucket": "draft", "match": r"mtp\.", "sharding": "dropped", "when": {"speculation": ["none"]}}, *RULES]
    tensors = [("mtp.0.w", 10), ("layers.1.experts.2.w", 7), ("norm", 3)]
    assert [(one.name, one.per_rank) for one in count(tensors, rules, serving(2))] == [("draft", (0, 0)), ("experts", (4, 4)), ("rest", (3, 3))]
    assert [one.name for one in count(tensors, rules, serving(2, "mtp"))] == ["experts", "rest"]


def test_ways_spread_over_the_first_ranks():
    rules = [{"bucket": "drafter", "match": "", "sharding": "split", "ways": 2}]
    assert count([("a", 10)], rules, serving(3))[0].per_rank == (5, 5, 0)
    assert count([("a", 10)], rules, serving(1))[0].per_rank == (10,)


def test_a_pattern_may_have_groups_of_its_own():
    rules = [{"bucket": "a", "match": r"(x|y)(\.\d+)?\.(w)", "sharding": "split"}, {"bucket": "b", "match": "(z)?", "sharding": "replicated"}]
    assert [(one.name, one.tensors) for one in count([("x.1.w", 1), ("y.w", 1), ("z", 1), ("other", 1)], rules, serving())] == [("a", 2), ("b", 2)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.from_regex(r"(layers\.[0-9]\.experts\.[0-9]\.w|norm\.[0-9])", fullmatch=True), st.integers(0, 1 << 40)), max_size=50),
    st.integers(1, 8),
)
def test_no_byte_is_lost(tensors, ranks):
    buckets = count(tensors, RULES, serving(ranks))
    assert sum(bucket.total for bucket in buckets) == sum(size for dummy, size in tensors)
    for bucket in buckets:
        copies = ranks if bucket.sharding == "replicated" else 1
        assert bucket.total * copies <= sum(bucket.per_rank) <= bucket.total * copies + bucket.tensors * (ranks - 1)


# What can't be computed is refused


def tree(tmp_path, tensors=(("layers.0.experts.0.w", 8), ("norm", 2)), shards=2):
    write(tmp_path, list(tensors), shards)
    return str(tmp_path)


def weights(rules=None, **more):
    return {"trees": [{"artefact": "model", "rules": RULES if rules is None else rules, **more}]}


@pytest.mark.parametrize(
    ("rules", "values", "message"),
    [
        ([RULES[0]], serving(), "no rule of the profile says how tensor norm is sharded"),
        ([], serving(), "no rules of sharding"),
        ([{"bucket": "a", "match": "", "sharding": "halved"}], serving(), "sharding 'halved'; known are split, replicated, dropped"),
        ([{"bucket": "a", "match": "(", "sharding": "split"}], serving(), "is not valid"),
        ([{"match": "", "sharding": "split"}], serving(), "no bucket, no match or no sharding"),
        (RULES, {**serving(), "pipeline_parallel": 2}, "pipeline parallel"),
        (RULES, {**serving(), "tensor_parallel": None}, "not a number of ranks"),
        (RULES, {**serving(), "tensor_parallel": 0}, "not a number of ranks"),
    ],
)
def test_refused_rules(tmp_path, rules, values, message):
    with pytest.raises(BudgetError, match=message) as error:
        budget(weights(rules), {"model": tree(tmp_path)}, values)
    assert not error.value.missing


def test_refused_trees(tmp_path):
    path = pathlib.Path(tree(tmp_path))
    with pytest.raises(BudgetError, match="no artefact 'model'"):
        budget(weights(), {}, serving())
    with pytest.raises(BudgetError, match="names no tree"):
        budget({}, {"model": str(path)}, serving())
    with pytest.raises(BudgetError, match="names no tree"):
        budget(weights(when={"speculation": ["dspark"]}), {"model": str(path)}, serving())
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BudgetError, match="model-00002-of-00002.safetensors is not in") as error:
        budget(weights(), {"model": str(path)}, serving())
    assert error.value.missing
    for absent in (path / "absent", path / "empty"):
        (path / "empty").mkdir(exist_ok=True)
        with pytest.raises(BudgetError) as error:
            budget(weights(), {"model": str(absent)}, serving())
        assert error.value.missing


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"short"), "header of model-00001-of-00002.safetensors cannot be read"),
        (lambda path: path.write_bytes(struct.pack("<Q", 40) + b"{}"), "is cut after 2"),
        (lambda path: write_file(str(path), [("other", 1)]), "1 tensors of the index are in no file, such as layers.0.experts.0.w"),
    ],
)
def test_damaged_shard(tmp_path, damage, message):
    path = pathlib.Path(tree(tmp_path))
    damage(path / "model-00001-of-00002.safetensors")
    with pytest.raises(BudgetError, match=message):
        scan(str(path))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_damaged_index(tmp_path, content):
    (tmp_path / _weight_budget.INDEX).write_text(content)
    with pytest.raises(BudgetError):
        scan(str(tmp_path))


def test_a_tree_without_index(tmp_path):
    write_file(os.path.join(tmp_path, "model.safetensors"), [("norm", 2)])
    assert scan(str(tmp_path)) == ([("norm", 2)], 1)


# Module and table


def test_table_is_for_reading(tmp_path):
    lines = table(budget(weights(), {"model": tree(tmp_path, [("layers.0.experts.0.w", 8 * GIB), ("norm", GIB)])}, serving()))
    assert lines == [
        "bucket   sharding    tensors  checkpoint  rank 0  rank 1",
        "experts  split             1        8.00    4.00    4.00",
        "rest     replicated        1        1.00    1.00    1.00",
        "all                        2        9.00    5.00    5.00",
    ]


def run(capsys, **args):
    with patch_module_args(args), pytest.raises(SystemExit) as stop:
        weight_budget.main()
    return stop.value.code, json.loads(capsys.readouterr().out)


def test_module(tmp_path, capsys):
    code, result = run(capsys, weights=weights(), trees={"model": tree(tmp_path)}, serving=serving())
    assert code == 0 and not result["changed"]
    assert result["per_rank"] == [6, 6] and result["total_bytes"] == 10 and result["files"] == 2
    assert result["buckets"][0] == {"name": "experts", "sharding": "split", "tensors": 1, "total": 8, "per_rank": [4, 4]}


def test_module_refuses_and_predicts(tmp_path, capsys):
    args = {"node": "spark-1", "weights": weights(), "trees": {"model": str(tmp_path / "absent")}, "serving": serving()}
    code, result = run(capsys, **args)
    assert code == 1 and result["refusals"][0]["id"] == "memory.budget"
    assert result["msg"].startswith("spark-1: budget of weights: found ") and "wanted complete weights" in result["msg"]
    code, result = run(capsys, _ansible_check_mode=True, **args)
    assert code == 0 and result["known_after"] == ["weights"]
