# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Every rule of the shipped profiles: what breaks it, and that an expert can accept it."""

from __future__ import annotations

import typing as t

import generate
import pytest
from planner_request import THREE_NODES, planned, refused

from ansible_collections.sparkops.inference.plugins.module_utils._rules import argument_values

DS, DSL = "deepseek_v41_flash_exl3", "deepseek_v41_flash_exl3_latest"
GLM, GLML = "glm_53_flash_exl3", "glm_53_flash_exl3_latest"
RING = {"serve_nccl_ring": True}

# Profile, rule, ranks, settings that break it, and a part of what the refusal says was found.
BROKEN: list[tuple[str, str, int, dict[str, t.Any], str]] = [
    (DS, "D1", 2, {"serve_kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    (DS, "D2", 2, {"serve_extra_arguments": ["--moe-backend", "marlin"]}, "--moe-backend marlin"),
    (DS, "D2", 2, {"serve_extra_arguments": ["--moe-backend=marlin"]}, "--moe-backend marlin"),
    (DS, "D3", 2, {"serve_quantization": "awq"}, "serve_quantization is awq"),
    (DS, "D3", 2, {"serve_environment": {"DSV41_EXL3_K_MAP": "/other"}}, "DSV41_EXL3_K_MAP is /other"),
    (DS, "D4", 2, {"serve_language_model_only": "false"}, "serve_language_model_only is false"),
    (DS, "D5", 2, {"serve_environment": {"DSV41_EXL3_SERIAL_STREAMS": "0"}}, "DSV41_EXL3_SERIAL_STREAMS is 0"),
    (DS, "D5", 2, {"serve_environment": {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": None}}, "VLLM_DISABLE_SHARED_EXPERTS_STREAM is absent"),
    (DS, "D6", 2, {"serve_speculation_tokens": 6, "serve_exl3_temp_rows": 64}, "the largest that fits is 5"),
    (DS, "D11", 2, {"serve_kv_cache_memory_bytes": "3 GiB"}, "the largest that fits is 2684354560"),
    (DS, "D11", 2, {"serve_kv_cache_memory_bytes": 2684354561}, "the largest that fits is 2684354560"),
    (DS, "D14", 4, {"serve_tensor_parallel": 4}, "serve_tensor_parallel is 4"),
    (DS, "D14", 2, {"serve_tensor_parallel": 1, "serve_pipeline_parallel": 2}, "serve_tensor_parallel is 1"),
    (DS, "D.context", 2, {"serve_max_model_len": 1048576}, "the largest that fits is 774400"),
    (DS, "D.context", 2, {"serve_max_model_len": 774401}, "the largest that fits is 774400"),
    (DS, "D.temp_rows", 2, {"serve_max_num_seqs": 5}, "serve_exl3_temp_rows is 16; the least is 20"),
    (DS, "D.long_prefill", 2, {"serve_long_prefill_token_threshold": 1792}, "the largest that fits is 1024"),
    (DSL, "D4", 2, {"serve_max_num_batched_tokens": 1024}, "serve_max_num_batched_tokens is 1024; the least is 1025"),
    (DSL, "D.retention", 2, {"serve_prefix_retention": 100}, "serve_prefix_retention is 100"),
    (GLM, "G1", 2, {"serve_quantization": "none"}, "serve_quantization is none"),
    (GLM, "G1", 2, {"image_reference": "glm53-flash-sm121:v8"}, "image_reference is glm53-flash-sm121:v8"),
    (GLM, "G1", 2, {"serve_extra_arguments": ["--moe-backend", "marlin"]}, "--moe-backend marlin"),
    (GLM, "G2", 2, {"serve_kv_cache_dtype": "bfloat16"}, "serve_kv_cache_dtype is bfloat16"),
    (GLM, "G2", 2, {"serve_kv_cache_dtype": "nvfp4"}, "serve_kv_cache_dtype is nvfp4"),
    (GLM, "G3", 2, {"serve_extra_arguments": ["--attention-config", {"backend": "TRITON_ATTN"}]}, "TRITON_ATTN"),
    (GLM, "G3", 2, {"serve_environment": {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}}, "TRITON_ATTN"),
    (GLM, "G4", 4, {"serve_tensor_parallel": 4}, "serve_tensor_parallel is 4"),
    (GLM, "G5", 2, {"hosts": {"spark-1": {"serve_host_nccl_dir": "/n"}}}, "serve_host_nccl_dir is /n"),
    (GLM, "G5", 2, {"hosts": {"spark-2": {"serve_host_nccl_dir": "/n"}}}, "serve_host_nccl_dir is /n"),
    (GLM, "G6", 2, {"serve_skip_multimodal_profiling": False}, "serve_skip_multimodal_profiling is false"),
    (GLM, "G7", 2, {"serve_max_num_batched_tokens": 8192}, "the largest that fits is 8191"),
    (GLM, "G9", 2, {"serve_gpu_memory_utilization": 0.88}, "the largest that fits is 0.87"),
    (GLM, "G11", 2, {"serve_ablit_first_layer": 40, "serve_ablit_last_layer": 20}, "serve_ablit_first_layer is 40; the largest that fits is 20"),
    (GLM, "G18", 2, {"serve_environment": {"VLLM_SERVER_DEV_MODE": "1"}}, "VLLM_SERVER_DEV_MODE in the environment"),
    (GLM, "G.context", 2, {"serve_max_model_len": 1000000}, "the largest that fits is 982612"),
    (GLM, "G.context", 2, {"serve_gpu_memory_utilization": 0.85}, "serve_max_model_len is 900000; the largest that fits is 829998"),
    (GLM, "G.context", 2, {"serve_kv_cache_memory_bytes": "14 GiB"}, "serve_max_model_len is 900000; the largest that fits is 877888"),
    (GLM, "G.temp_rows", 2, {"serve_exl3_temp_rows": 31}, "serve_exl3_temp_rows is 31; the least is 32"),
    (GLM, "G.long_prefill", 2, {"serve_long_prefill_token_threshold": 1025}, "the largest that fits is 1024"),
    (GLM, "G.draft_shape", 2, {"serve_draft_tensor_parallel": 4}, "serve_draft_tensor_parallel is 4; the largest that fits is 2"),
    (GLML, "G.draft_shape", 3, {"serve_draft_tensor_parallel": 3, "serve_files": THREE_NODES}, "KV heads 8 do not divide by serve_draft_tensor_parallel 3"),
    (GLML, "G4", 1, {}, "serve_tensor_parallel is 1"),
    (GLML, "G9", 2, {"serve_gpu_memory_utilization": 0.86}, "the largest that fits is 0.85"),
    (GLML, "G14", 4, {**RING, "hosts": {"spark-3": {"serve_host_nccl_dir": "/n"}}}, "serve_nccl_ring is true"),
    (GLML, "G15", 4, RING, "serve_max_model_len is 850000"),
    (GLML, "G18", 2, {"serve_expose_cache_reset": True}, "serve_expose_cache_reset is true"),
    (GLML, "G.context", 2, {"serve_kv_cache_memory_bytes": "7 GiB"}, "the largest that fits is 782728"),
    (GLML, "G.context", 2, {"serve_draft_kv_compact": False, "serve_kv_cache_memory_bytes": "13 GiB"}, "serve_max_model_len is 850000"),
    (GLML, "G.instanttensor", 2, {"serve_kv_cache_memory_bytes": None, "image_reference": "x:1", "serve_load_format": "instanttensor", "_no_pool": True}, ""),
    (GLML, "G.image_tokens", 2, {"serve_multimodal_image_tokens": 8000}, "the largest that fits is 7168"),
    (GLML, "G.fair_prefill", 2, {"serve_fair_prefill_chunk": 8000}, "the largest that fits is 7168"),
    (GLML, "G.fair_step", 2, {"serve_fair_prefill_max_step_ms": 1000}, "the least is 1001"),
    (GLML, "G.draft_compact", 2, {"serve_speculation_method": "mtp", "serve_draft_kv_compact": True}, "serve_draft_kv_compact is true"),
    (GLML, "G.draft_retention", 2, {"serve_speculation_method": "mtp", "serve_prefix_retention_draft": 0}, "serve_prefix_retention_draft is 0"),
    (GLML, "G.retention", 2, {"serve_prefix_retention": 4096}, "serve_prefix_retention is 4096"),
    (GLML, "G.retention", 2, {"serve_prefix_retention_draft": 100}, "serve_prefix_retention_draft is 100"),
    (GLML, "G.prefix_match_unit", 2, {"serve_prefix_match_unit": 512}, "serve_prefix_match_unit is 512"),
    (GLML, "G.adaptive_k", 2, {"serve_adaptive_k": True, "serve_adaptive_k_set": [2, 8]}, "serve_adaptive_k_set is [2,8]"),
    (GLML, "G.dense_exl3", 2, {"serve_dense_exl3": True}, "serve_dense_exl3 is true"),
    (GLML, "G.dense_exl3", 4, {"serve_dense_exl3": True, "serve_dense_fp8": [], "serve_kda_bf16_large_m": False}, "serve_tensor_parallel is 4"),
    (GLML, "G.dense_exl3", 2, {"serve_dense_exl3_prefill_bf16": ["all"]}, "serve_dense_exl3_prefill_bf16 is [\"all\"]"),
    (GLML, "G.kda", 2, {"serve_dense_fp8": ["mla"]}, "serve_kda_bf16_large_m is true"),
    (GLML, "G.shape", 3, {"serve_files": THREE_NODES, "serve_expert_parallel": False}, "columns of an expert 2048 do not divide by serve_tensor_parallel 3"),
    (GLML, "G.three_nodes", 3, {}, "serve_tensor_parallel is 3"),
]  # fmt: skip


def cases() -> list[t.Any]:
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-{number}") for number, case in enumerate(BROKEN) if not case[3].get("_no_pool")]


def of_rule(found: list[t.Any], rule: str) -> list[t.Any]:
    return [refusal for refusal in found if refusal.id == f"rule.{rule}"]


@pytest.mark.parametrize(("profile", "rule", "ranks", "values", "words"), cases())
def test_a_broken_rule_is_refused(profile: str, rule: str, ranks: int, values: dict[str, t.Any], words: str) -> None:
    (refusal,) = of_rule(refused(profile, ranks, **values), rule)
    assert words in refusal.found
    assert f"serve_accept_rules: [{rule}]" in refusal.next_step


@pytest.mark.parametrize(("profile", "rule", "ranks", "values", "words"), cases())
def test_an_expert_accepts_it(profile: str, rule: str, ranks: int, values: dict[str, t.Any], words: str) -> None:
    others = sorted({refusal.id.removeprefix("rule.") for refusal in refused(profile, ranks, **values)})
    plan = planned(profile, ranks, **values, serve_accept_rules=others)
    assert any(notice.startswith(f"Rule {rule} is accepted by serve_accept_rules: ") for notice in plan["notices"])


def test_a_rule_about_hosts_names_the_host() -> None:
    assert [refusal.node for refusal in refused(GLM, hosts={"spark-2": {"serve_host_nccl_dir": "/n"}})] == ["spark-2"]
    assert [refusal.node for refusal in refused(GLM, serve_host_nccl_dir="/n")] == ["spark-1", "spark-2"]


def test_instanttensor_without_a_pool() -> None:
    """The profile always gives a pool on two nodes, so only a user's heir can lose it."""
    from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles

    files = ProfileFiles()
    heir = {
        "format": 1,
        "description": "x",
        "extends": GLML,
        "options": {"serve_kv_cache_memory_bytes": {"default": {"choose": [{"when": {"ranks": 9}, "value": 1}]}}},
    }
    found = refused("heir", 2, _find_profile=lambda name: heir if name == "heir" else files.find(name))
    assert [refusal.id for refusal in found] == ["rule.G.instanttensor"]


CHECKS = {"refuse_when", "limit", "divisible", "forbid_arguments", "forbid_text", "forbid_environment", "require_environment"}


@pytest.mark.parametrize("profile", [DS, DSL, GLM, GLML])
def test_every_rule_is_checked_here_or_says_how_it_is_kept(profile: str) -> None:
    tested = {rule for name, rule, *_rest in BROKEN if name == profile or profile.startswith(name)}
    for id, rule in generate.profiles()[profile]["rules"].items():
        if set(rule) & CHECKS:
            assert id in tested, id
        else:
            assert rule.get("kept_by") or "notice_when" in rule, id


@pytest.mark.parametrize(("profile", "ids"), [(DS, [f"D{number}" for number in range(1, 16)]), (GLM, [f"G{number}" for number in range(1, 21)])])
def test_every_do_not_of_the_documents_is_a_rule(profile: str, ids: list[str]) -> None:
    rules = generate.profiles()[profile]["rules"]
    assert [id for id in rules if "." not in id] == ids
    assert all(rule["says"] and rule["reason"] for rule in rules.values())


@pytest.mark.parametrize(
    ("profile", "values", "rule"),
    [
        (DS, {"serve_max_num_seqs": 3}, "D.streams"),
        (DS, {"memory_guard_serving": True}, "D12"),
        (GLM, {"serve_max_model_len": 100000}, "G8"),
        (GLM, {"weights_download": "refresh"}, "G10"),
        (GLM, {"serve_ablit": True}, "G11"),
    ],
)
def test_what_is_only_worth_knowing_is_a_notice(profile: str, values: dict[str, t.Any], rule: str) -> None:
    (notice,) = planned(profile, **values)["notices"]
    assert notice.endswith(f"[rule {rule}].")


@pytest.mark.parametrize(
    ("profile", "values"),
    [
        (DS, {"serve_speculation_method": "none", "serve_max_num_seqs": 4}),
        (DS, {"serve_speculation_tokens": 5, "serve_exl3_temp_rows": 16}),
        (DS, {"serve_max_model_len": 774400}),
        (DSL, {"serve_language_model_only": True, "serve_max_num_batched_tokens": 512}),
        (DSL, {"serve_prefix_retention": 0}),
        (GLM, {"serve_speculation_method": "mtp"}),
        (GLM, {"serve_speculation_method": "none", "serve_exl3_temp_rows": 1}),
        (GLM, {"serve_max_model_len": 982612}),
        (GLM, {"serve_draft_tensor_parallel": 2}),
        (GLM, {"serve_language_model_only": True, "serve_skip_multimodal_profiling": False}),
        (GLML, {"serve_adaptive_k": True}),
        (GLML, {"serve_prefix_retention": 3584, "serve_prefix_retention_draft": 0}),
        (GLML, {"serve_prefix_match_unit": 64}),
        (GLML, {"serve_dense_fp8": [], "serve_kda_bf16_large_m": False}),
        (GLML, {"serve_dense_fp8": ["kda", "mla"]}),
        (GLML, {"serve_speculation_method": "mtp"}),
    ],
    ids=str,
)
def test_what_the_documents_allow_is_served(profile: str, values: dict[str, t.Any]) -> None:
    planned(profile, **values)


def test_a_direction_file_must_fit_the_model() -> None:
    def read(length: int | None) -> t.Callable[[str], dict[str, t.Any]]:
        return lambda path: {"source": path, "sha256": "0" * 64, "size": 1, "vector_length": length}

    values = {"serve_ablit": True, "serve_ablit_direction_file": "dir.pt"}
    for length, words in ((5120, "5120 elements in dir.pt"), (None, "no readable number of elements in dir.pt")):
        (refusal,) = refused(GLM, **values, _read_file=read(length))
        assert refusal.id == "settings.vector" and refusal.found == words and "4096" in refusal.wanted
    plan = planned(GLM, **values, _read_file=read(4096))
    assert plan["files"][0]["target"] == "/sparkops-files/ablit_direction"
    # Without the switch nobody looks for the file.
    planned(GLM, serve_ablit_direction_file="dir.pt", _read_file=lambda path: None)


@pytest.mark.parametrize("layer", [0, 14, 46])
def test_layers_that_stay_as_they_are(layer: int) -> None:
    assert [refusal.id for refusal in refused(GLM, serve_ablit_first_layer=layer)] == ["settings.value"]


@pytest.mark.parametrize(
    ("profile", "name", "value"),
    [
        (DS, "serve_gpu_memory_utilization", 0),
        (DS, "serve_gpu_memory_utilization", 1.01),
        (DS, "serve_max_model_len", 0),
        (DS, "serve_max_model_len", 1048577),
        (DS, "serve_max_num_seqs", 0),
        (DS, "serve_max_num_seqs", 4097),
        (DS, "serve_max_num_batched_tokens", 8388609),
        (DS, "serve_indexer_workspace", "big"),
        (DS, "serve_spinwait_ms", 0),
        (DS, "serve_spinwait_ms", 1001),
        (DS, "serve_reasoning_effort", 0),
        (DS, "serve_reasoning_effort", 101),
        (DS, "serve_reasoning_effort", "medium"),
        (DS, "serve_speculation_method", "dflash"),
        (GLM, "serve_max_model_len", 1000001),
        (GLM, "serve_mixed_prefill", "fair"),
        (GLML, "serve_reasoning_effort", "medium"),
        (GLML, "serve_load_prefetch", 17),
        (GLML, "serve_attention_slice_tokens", 32),
        (GLML, "serve_dense_fp8", "everything"),
        (GLML, "serve_fair_prefill_share", 1.1),
        (GLML, "serve_fair_prefill_max_chunks", 17),
    ],
)
def test_ranges_of_the_documents(profile: str, name: str, value: t.Any) -> None:
    assert [(refusal.id, refusal.thing) for refusal in refused(profile, **{name: value})] == [("settings.value", name)]


@pytest.mark.parametrize(
    ("profile", "values", "expected"),
    [
        (DS, {}, [1, 2, 3, 4, 6, 8, 12, 18, 24]),
        (DS, {"serve_max_num_seqs": 8, "serve_exl3_temp_rows": 64}, [1, 2, 3, 4, 6, 8, 12, 16, 18, 20, 24, 28, 32]),
        (DS, {"serve_speculation_method": "none", "serve_max_num_seqs": 8}, [1, 2, 3, 4, 6, 8, 12, 18, 24]),
        (GLM, {}, [1, 2, 4, 8, 16, 24, 32]),
        (GLM, {"serve_speculation_method": "mtp"}, [1, 2, 3, 4, 6, 8, 12]),
        (GLM, {"serve_speculation_method": "none"}, [1, 2, 3, 4, 6, 8, 12]),
        (GLML, {"serve_adaptive_k": True}, [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 20, 24, 32]),
        (GLM, {"serve_capture_sizes": "1,2"}, ["1", "2"]),
    ],
    ids=str,
)
def test_capture_sizes_follow_speculation_and_sequences(profile: str, values: dict[str, t.Any], expected: list[t.Any]) -> None:
    assert planned(profile, **values)["settings"]["serve_capture_sizes"] == expected


def test_eager_mode_captures_nothing() -> None:
    from planner_request import specs

    command = specs(planned(DS, serve_enforce_eager=True))[0]["command"]
    assert "--enforce-eager" in command and "--cudagraph-capture-sizes" not in command


@pytest.mark.parametrize(
    ("command", "flag", "expected"),
    [
        (["--a", "1", "--b"], "--a", ["1"]),
        (["--a=1", "--a", "2"], "--a", ["1", "2"]),
        (["--a", "--b"], "--a", [""]),
        (["--a"], "--a", [""]),
        (["--ab", "1", "--ab=2"], "--a", []),
        (["--a="], "--a", [""]),
    ],
    ids=str,
)
def test_values_of_an_argument(command: list[str], flag: str, expected: list[str]) -> None:
    assert argument_values(command, flag) == expected
