# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparkops.inference.plugins.filter import memory

GIB = 1 << 30
PLAN = {
    "tensor_parallel": 2,
    "pipeline_parallel": 1,
    "memory": {"values": {"pool": 2684354560, "speculation": "dspark"}},
    "artefacts": [{"name": "model", "directory": "acme--tiny/abc"}, {"name": "drafter", "directory": "acme--draft/def"}],
    "settings": {"serve_api_key": "secret"},
}


def report(level=100 * GIB, lacks=(), **more):
    return {
        "memory": {"total": 120 * GIB, "level": level, "basis": "measured"},
        "lacks": list(lacks),
        "notices": [],
        "needs": {"weights": 80 * GIB, "kv": 4 * GIB},
        "largest": {"utilisation": 0.8, "pool": 10 * GIB, "length": 500_000},
        "tokens": 774_400,
        "growing": [],
        "known_after": [],
        **more,
    }


def lack(node, identifier="memory.headroom"):
    return {"id": identifier, "node": node, "thing": "memory", "found": "1", "wanted": "2", "next_step": "free it", "text": "…"}


def verdict(**reports):
    hostvars = {name.replace("_", "-"): {"__memory_report": one} if one else {} for name, one in reports.items()}
    return memory.memory_verdict(hostvars, list(hostvars))


def test_serving_has_no_secret():
    assert memory.memory_serving(PLAN) == {"pool": 2684354560, "speculation": "dspark", "tensor_parallel": 2, "pipeline_parallel": 1}
    assert memory.memory_serving({**PLAN, "memory": {}}) == {"speculation": "none", "tensor_parallel": 2, "pipeline_parallel": 1}


def test_trees():
    assert memory.memory_trees(PLAN, "/w") == {"model": "/w/acme--tiny/abc", "drafter": "/w/acme--draft/def"}


def test_guards():
    settings = {"memory_guard_loading": True, "memory_guard_loading_floor": 2 * GIB, "memory_guard_serving": False, "memory_guard_serving_floor": GIB}
    assert memory.memory_guards(settings) == [{"name": "the memory guard while loading", "floor": 2 * GIB, "loading_only": True}]


def test_the_smallest_node_decides():
    """Case R12 (3)."""
    found = verdict(spark_1=report(104 * GIB), spark_2=report(99 * GIB, largest={"utilisation": 0.75, "pool": 12 * GIB, "length": 400_000}))
    assert found["ok"] and found["smallest"] == "spark-2"
    assert found["largest"] == {"length": 400_000, "pool": 10 * GIB, "utilisation": 0.75}
    assert found["lines"] == [
        "spark-1: 104.0 GiB available (measured) of 120.0 GiB; needs 84.0 GiB: weights 80.0 GiB, kv 4.0 GiB; the KV pool holds 774,400 tokens",
        "spark-2: 99.0 GiB available (measured) of 120.0 GiB; needs 84.0 GiB: weights 80.0 GiB, kv 4.0 GiB; the KV pool holds 774,400 tokens",
        "Largest safe values, decided by spark-2: utilisation 0.75, KV pool 10.0 GiB, context 400,000 tokens.",
    ]


def test_all_that_is_wrong_is_said_at_once():
    found = verdict(spark_1=report(lacks=[lack("spark-1")]), spark_2=report(lacks=[lack("spark-2"), lack("spark-2", "memory.gpu_tenant")]))
    assert not found["ok"] and [refusal["node"] for refusal in found["refusals"]] == ["spark-1", "spark-2", "spark-2"]
    assert found["message"].startswith("3 problems, nothing was changed:")


def test_a_node_that_was_not_seen_refuses():
    found = verdict(spark_1=report(), spark_2=None)
    assert [refusal["id"] for refusal in found["refusals"]] == ["memory.unseen"] and found["message"].startswith("spark-2: memory: found no report")
    assert not verdict(spark_1=None)["ok"]
    assert [refusal["id"] for refusal in verdict(spark_1={"msg": "failed"})["refusals"]] == ["memory.unseen"]


def test_what_is_not_known_yet():
    found = verdict(spark_1=report(None, needs={}, largest={}, tokens=None, known_after=["weights"], notices=["A notice."]))
    assert found["ok"] and found["known_after"] == ["weights"]
    assert found["lines"] == ["spark-1: not known yet of 120.0 GiB; the verdict is known after: weights", "spark-1: A notice."]


def test_growing_processes_are_named():
    growing = [{"name": "hog", "pid": 7, "rss": 9 * GIB, "grown": 2 * GIB}, {"name": "small", "pid": 8, "rss": GIB, "grown": 4096}]
    assert "spark-1: hog (7) grew by 2.0 GiB" in verdict(spark_1=report(growing=growing))["lines"]
    assert not any("small" in line for line in verdict(spark_1=report(growing=growing))["lines"])


def test_every_filter_is_registered():
    assert set(memory.FilterModule().filters()) == {"memory_serving", "memory_trees", "memory_guards", "memory_verdict", "memory_prompt"}


HOSTS = {node: {"spark_node": {"memory": {"total_kib": 127_600_000}}} for node in ("spark-1", "spark-2")}


def prompted(low, error="", tokens=600_000, values=None):
    plan = {**PLAN, "nodes": ["spark-1", "spark-2"], "head": "spark-1", "settings": {"memory_prompt_floor": 2 * GIB}}
    if values is not None:
        plan["memory"] = {"values": values}
    measured = {"wanted_tokens": 600_000, "tokens": tokens, "first_token_s": 312.5, "error": error}
    return memory.memory_prompt(plan, HOSTS, {"measured": measured, "memory": low})


def test_a_long_prompt_that_leaves_enough():
    found = prompted({"0": int(2.1 * GIB), "1": 4 * GIB})
    assert found["ok"] and found["lines"] == [
        "600,000 tokens of prompt, 312.5 s to the first token",
        "spark-1: 2.1 GiB available at the lowest, floor 2.0 GiB",
        "spark-2: 4.0 GiB available at the lowest, floor 2.0 GiB",
        "0.1 GiB above the floor on spark-1. To use some of it change one value, and run this again before the next.",
    ]


@pytest.mark.parametrize(("values", "step"), [
    ({"pool": 3 * GIB}, "lower serve_kv_cache_memory_bytes from 3.0 GiB to 2.0 GiB, that alone"),
    ({"utilisation": 0.85}, "lower serve_gpu_memory_utilization from 0.85 to 0.84, that alone"),
    ({"batched_tokens": 2048}, "halve serve_max_num_batched_tokens to 1024, that alone"),
    ({}, "lower serve_max_model_len or serve_max_num_seqs, that alone"),
])
def test_a_long_prompt_that_goes_below_names_the_node_and_one_value(values, step):
    found = prompted({"0": 3 * GIB, "1": GIB}, values=values)
    assert not found["ok"] and found["message"].startswith("spark-2: memory during the long prompt: found 1.0 GiB at the lowest")
    assert step in found["message"] and "memory.prompt_low" in found["message"]


def test_a_long_prompt_that_failed_or_was_not_seen_proves_nothing():
    found = prompted({"0": 3 * GIB}, error="HTTP 500", tokens=None)
    assert "memory.prompt_failed" in found["message"] and "HTTP 500" in found["message"] and "memory.prompt_unseen" in found["message"]
    assert not prompted({"0": 3 * GIB, "1": 3 * GIB}, tokens=None)["ok"]
