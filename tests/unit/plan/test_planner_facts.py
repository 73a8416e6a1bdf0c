# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the recipes' documents say about the containers, written down apart from the profiles and their golden files."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from planner_request import ROOT, THREE_NODES, planned, specs

DEEPSEEK_ENVIRONMENT = """
NCCL_IB_DISABLE=0 NCCL_IB_ROCE_VERSION_NUM=2 NCCL_NET=IB NCCL_NET_PLUGIN=none NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_IB_MERGE_NICS=0
NCCL_CROSS_NIC=0 NCCL_IGNORE_CPU_AFFINITY=1 NCCL_DEBUG=WARN NCCL_BUFFSIZE=1048576 NCCL_LL128_BUFFSIZE=262144 NCCL_PROTO=^LL128
NCCL_MAX_NCHANNELS=8 VLLM_DISABLE_SHARED_EXPERTS_STREAM=1 CUDA_LAUNCH_BLOCKING=0 DSV41_EXL3_SERIAL_STREAMS=1 DSV41_ENGRAM_DISABLE=0
DSV41_INDEXER_PREFILL_FACTOR=1 VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=256 DSV41_PREFILL_EMPTY_CACHE_TOKENS=8192
DSV41_PREFILL_EMPTY_CACHE_MEMAVAIL_GIB=2.5 DSV41_PREFILL_END_EMPTY_CACHE=0 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
VLLM_CACHE_ROOT=/root/.cache/vllm GLM53_SUPPRESS_STOPS_IN_REASONING=1 GLM53_MIXED_PREFILL_CHUNK=0 GLM53_INDEXER_WORKSPACE=stock
GLM53_SPINWAIT_MS=stock TRITON_CACHE_DIR=/root/.triton/cache TILELANG_CACHE_DIR=/root/.tilelang/cache VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800
TORCH_CUDA_ARCH_LIST=12.1a FLASHINFER_CUDA_ARCH_LIST=12.1a FLASHINFER_DISABLE_VERSION_CHECK=1
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True VLLM_ENGINE_READY_TIMEOUT_S=1500 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 DSV41_EXL3_K_MAP=/opt/dsv41/exl3_k_map.json GLM53_DENSE_FP8=off EXL3_FUSED_MOE=1
EXL3_MOE_ROW_TILE=0 EXL3_TEMP_ROWS_FUSED=16 EXL3_FAT_GROUPED=1 EXL3_FAT_KERNEL=0 EXL3_FAT_SORTED=0 EXL3_FAT_BATCHED=0
DSV41_SOURCE=/engram-src DSV41_CACHE_GIB=0 DSV41_RESIDENT_SCALES=0 DSV41_IO_THREADS=32 DSV41_CACHE_WAYS=4 DSV41_STATS_SECONDS=60
DSV41_SKIP_MIXED_WARMUP=0 DSV41_DROP_PAGE_CACHE=1
"""

DEEPSEEK_ARGUMENTS: dict[str, str] = {
    "--served-model-name": "DeepSeek-v4.1-Flash-EXL3",
    "--tensor-parallel-size": "2",
    "--nnodes": "2",
    "--distributed-executor-backend": "mp",
    "--tokenizer-mode": "deepseek_v41",
    "--tool-call-parser": "deepseek_v41",
    "--reasoning-parser": "deepseek_v41",
    "--enable-auto-tool-choice": "",
    "--enable-prefix-caching": "",
    "--enable-prompt-tokens-details": "",
    "--no-enable-flashinfer-autotune": "",
    "--quantization": "exl3",
    "--hf-overrides": '{"engram_table_dir":"/engram-src"}',
    "--max-model-len": "600000",
    "--gpu-memory-utilization": "0.88",
    "--max-num-seqs": "2",
    "--max-num-batched-tokens": "1024",
    "--kv-cache-memory-bytes": "2684354560",
    "--block-size": "64",
    "--speculative-config": '{"method":"dspark","num_speculative_tokens":3}',
    "--chat-template": "/opt/dsv41/chat_template.jinja",
    "--language-model-only": "",
    "--cudagraph-capture-sizes": "1 2 3 4 6 8 12 18 24",
}

GLM_ENVIRONMENT = """
NCCL_IB_DISABLE=0 NCCL_IB_ROCE_VERSION_NUM=2 NCCL_NET=IB NCCL_NET_PLUGIN=none NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_IB_MERGE_NICS=0
NCCL_CROSS_NIC=0 NCCL_IGNORE_CPU_AFFINITY=1 NCCL_DEBUG=WARN HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_CACHE_ROOT=/root/.cache/vllm
GLM53_SUPPRESS_STOPS_IN_REASONING=1 GLM53_MIXED_PREFILL_CHUNK=skip TRITON_CACHE_DIR=/root/.triton/cache
TILELANG_CACHE_DIR=/root/.tilelang/cache VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800 TORCH_CUDA_ARCH_LIST=12.1a FLASHINFER_CUDA_ARCH_LIST=12.1a
FLASHINFER_DISABLE_VERSION_CHECK=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True VLLM_ENGINE_READY_TIMEOUT_S=3600 VLLM_NO_USAGE_STATS=1
DO_NOT_TRACK=1 VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 EXL3_FUSED_MOE=1 EXL3_MOE_ROW_TILE=0 EXL3_TEMP_ROWS_FUSED=128 ABLIT=0
ABLIT_METHOD=auto ABLIT_DIRECTION=dealign ABLIT_LAYERS=15-45 ABLIT_ALPHA=3 ABLIT_INCLUDE_MTP=1
"""

GLM_ARGUMENTS: dict[str, str] = {
    "--served-model-name": "GLM-5.3-Flash-EXL3",
    "--tensor-parallel-size": "2",
    "--nnodes": "2",
    "--distributed-executor-backend": "mp",
    "--tool-call-parser": "glm47",
    "--enable-auto-tool-choice": "",
    "--reasoning-parser": "glm45",
    "--enable-prefix-caching": "",
    "--no-enable-flashinfer-autotune": "",
    "--quantization": "exl3",
    "--max-model-len": "900000",
    "--gpu-memory-utilization": "0.87",
    "--max-num-seqs": "4",
    "--max-num-batched-tokens": "1024",
    "--kv-cache-dtype": "fp8",
    "--chat-template": "/opt/glm53/chat_template.jinja",
    "--limit-mm-per-prompt": '{"image":4,"video":1}',
    "--skip-mm-profiling": "",
    "--cudagraph-capture-sizes": "1 2 4 8 16 24 32",
}

GLM_LATEST_ENVIRONMENT = """
GLM53_MIXED_PREFILL_CHUNK=fair GLM53_APC_NO_STORE=1 GLM53_KV_CAPACITY_LOG=1 GLM53_FAIR_PREFILL_CHUNK=256 GLM53_FAIR_PREFILL_SHARE=0.3
GLM53_FAIR_PREFILL_MAX_INTERVAL_MS=2000 GLM53_FAIR_PREFILL_MAX_STEP_MS=2000 GLM53_FAIR_PREFILL_MAX_CHUNKS=1 GLM53_EXPOSE_CACHE_RESET=0
GLM53_INDEXER_WORKSPACE=rightsize GLM53_DRAFT_KV_COMPACT=1 GLM53_SPINWAIT_MS=stock GLM53_LOAD_CLONE=1 GLM53_LOAD_PREFETCH=0
EXL3_TEMP_ROWS_FUSED=32 EXL3_FAT_SORTED=0 EXL3_FAT_BATCHED=0 EXL3_FAT_KERNEL=1 EXL3_FAT_GROUPED=1 DEFAULT_MAX_NEW_TOKENS=65536
GLM53_ADAPTIVE_K=off GLM53_ADAPTIVE_K_SET=2,4,7 GLM53_ADAPTIVE_K_ALPHA=0.25 GLM53_ADAPTIVE_K_MARGIN=1 GLM53_ADAPTIVE_K_MIN_STEPS=4
GLM53_ADAPTIVE_K_SATURATE=max GLM53_ADAPTIVE_K_HIST=200 GLM53_DENSE_FP8=all GLM53_EXL3_MOE_FAST=0 GLM53_KDA_BF16_LARGE_M=1
GLM53_DENSE_EXL3=0 GLM53_DENSE_EXL3_PREFILL_BF16=off
"""

GLM_LATEST_ARGUMENTS: dict[str, str] = {
    "--enable-prompt-tokens-details": "",
    "--load-format": "instanttensor",
    "--max-model-len": "850000",
    "--gpu-memory-utilization": "0.85",
    "--max-num-batched-tokens": "7168",
    "--kv-cache-memory-bytes": "11811160064",
    "--limit-mm-per-prompt": '{"image":48,"video":1}',
    "--mm-processor-kwargs": '{"max_image_tokens":2048}',
    "--mm-processor-cache-gb": "1",
}

PER_RANK = {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"}
PER_RANK_ARGUMENTS = {"--node-rank", "--master-addr", "--master-port", "--host", "--port", "--headless"}


def environment(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def arguments(command: list[str]) -> dict[str, str]:
    groups: dict[str, list[str]] = {}
    for item in command:
        if item.startswith("--"):
            groups[item] = []
        elif groups:
            groups[list(groups)[-1]].append(item)
    return {name: " ".join(items) for name, items in groups.items()}


@pytest.mark.parametrize(
    ("profile", "variables", "flags"),
    [("deepseek_v41_flash_exl3", DEEPSEEK_ENVIRONMENT, DEEPSEEK_ARGUMENTS), ("glm_53_flash_exl3", GLM_ENVIRONMENT, GLM_ARGUMENTS)],
)
def test_the_whole_container_of_the_documents(profile: str, variables: str, flags: dict[str, str]) -> None:
    """Nothing is missing and nothing is added."""
    for spec in specs(planned(profile)):
        assert {name: value for name, value in spec["env"].items() if name not in PER_RANK} == environment(variables)
        found = {name: value for name, value in arguments(spec["command"]).items() if name not in PER_RANK_ARGUMENTS}
        if profile.startswith("glm"):
            assert json.loads(found.pop("--speculative-config")) == {
                "method": "dflash", "model": "/drafter", "num_speculative_tokens": 7, "kv_cache_dtype": "auto", "draft_sample_method": "probabilistic",
                "rejection_sample_method": "standard", "draft_tensor_parallel_size": 1,
            }  # fmt: skip
        assert found == flags


def test_what_moved_later() -> None:
    (spec, _worker) = specs(planned("glm_53_flash_exl3_latest"))
    wanted = {**environment(GLM_ENVIRONMENT), **environment(GLM_LATEST_ENVIRONMENT)}
    assert {name: value for name, value in spec["env"].items() if name not in PER_RANK} == wanted
    found = arguments(spec["command"])
    assert {name: found[name] for name in GLM_LATEST_ARGUMENTS} == GLM_LATEST_ARGUMENTS
    assert json.loads(found["--speculative-config"])["draft_tensor_parallel_size"] == 2
    (spec, _worker) = specs(planned("deepseek_v41_flash_exl3_latest"))
    found = arguments(spec["command"])
    assert (found["--max-num-batched-tokens"], found["--prefix-cache-retention-interval"]) == ("1536", "4096")
    assert found["--limit-mm-per-prompt"] == '{"image":100}' and found["--mm-encoder-tp-mode"] == "data" and "--skip-mm-profiling" in found
    assert "--language-model-only" not in found and spec["env"]["DSV41_IO_THREADS"] == "96"


def test_three_and_four_nodes() -> None:
    three = specs(planned("glm_53_flash_exl3_latest", 3, serve_files=THREE_NODES))[1]
    found = arguments(three["command"])
    overrides = json.loads(found["--hf-overrides"])
    assert overrides["num_attention_heads"] == overrides["text_config"]["num_key_value_heads"] == 66
    assert "--enable-expert-parallel" in found and found["--mm-encoder-tp-mode"] == "data" and found["--max-model-len"] == "1000000"
    assert json.loads(found["--speculative-config"])["draft_tensor_parallel_size"] == 1
    assert (three["env"]["NCCL_CROSS_NIC"], three["env"]["NCCL_IB_SUBNET_AWARE_ROUTING"], three["env"]["NCCL_MAX_NCHANNELS"]) == ("1", "1", "8")
    four = specs(planned("glm_53_flash_exl3_latest", 4))[3]
    found = arguments(four["command"])
    assert (found["--gpu-memory-utilization"], found["--max-num-seqs"], found["--max-num-batched-tokens"]) == ("0.75", "8", "2048")
    speculation = json.loads(found["--speculative-config"])
    assert (speculation["num_speculative_tokens"], speculation["draft_tensor_parallel_size"]) == (3, 4)
    # What is pinned on two nodes is not inherited by more.
    assert "--kv-cache-memory-bytes" not in found and "--hf-overrides" not in found


def test_the_switchless_ring() -> None:
    values = {"serve_nccl_ring": True, "serve_speculation_method": "none", "serve_nccl_ring_library": "/opt/nccl/libnccl.so.2"}
    spec = specs(planned("glm_53_flash_exl3_latest", 4, **values))[0]
    wanted = {
        "NCCL_SWITCHLESS_RING_ONLY": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_IB_SUBNET_PREFIX_LEN": "24",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_MAX_NCHANNELS": "4",
    }
    assert {name: spec["env"][name] for name in wanted} == wanted and "LD_PRELOAD" not in spec["env"]
    assert "/opt/nccl/libnccl.so.2" in [mount["source"] for mount in spec["mounts"]]


@pytest.mark.parametrize(
    ("profile", "capabilities"),
    [("deepseek_v41_flash_exl3", ["SYS_PTRACE", "IPC_LOCK"]), ("glm_53_flash_exl3", ["IPC_LOCK"])],
)
def test_limits_of_the_container(profile: str, capabilities: list[str]) -> None:
    for spec in specs(planned(profile)):
        assert spec["capabilities"] == capabilities
        assert (spec["gpus"], spec["network_mode"], spec["ipc_mode"], spec["shm_size"]) == ("all", "host", "host", "32g")
        assert (spec["devices"], spec["ulimits"]) == (["/dev/infiniband"], {"memlock": -1, "stack": 67108864})
        assert (spec["stop_timeout"], spec["oom_score_adj"], spec["restart_policy"]) == (60, 1000, "no")


def test_the_lab_asks_for_no_gpu() -> None:
    for spec in specs(planned("lab_tiny")):
        assert spec["gpus"] is None and not spec["devices"] and not spec["ulimits"] and spec["shm_size"] is None


def test_only_four_files_of_the_native_checkpoint() -> None:
    artefact = planned("deepseek_v41_flash_exl3")["artefacts"][1]
    names = ["model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors", "model.safetensors.index.json", "config.json"]
    assert artefact["include"] == artefact["required"] == names and artefact["mount"] == "/engram-src"
    assert artefact["size_bytes"] == 101535150936 + 101537926640


def test_no_draft_model_without_dflash() -> None:
    assert [artefact["name"] for artefact in planned("glm_53_flash_exl3")["artefacts"]] == ["model", "drafter"]
    for method in ("mtp", "none"):
        assert [artefact["name"] for artefact in planned("glm_53_flash_exl3", serve_speculation_method=method)["artefacts"]] == ["model"]


@pytest.mark.parametrize(
    ("profile", "mode"), [("deepseek_v41_flash_exl3", "log"), ("glm_53_flash_exl3", "fail"), ("glm_53_flash_exl3_latest", "fail")]
)
def test_patch_scripts_run_in_the_documents_order(profile: str, mode: str) -> None:
    counts = {"deepseek_v41_flash_exl3": 12, "glm_53_flash_exl3": 8, "glm_53_flash_exl3_latest": 26}
    for spec in specs(planned(profile)):
        assert len(spec["entry"]["hooks"]) == counts[profile]
        assert {hook["on_failure"] for hook in spec["entry"]["hooks"]} == {mode}
    assert specs(planned(profile, serve_run_hooks=False))[0]["entry"]["hooks"] == []


@pytest.mark.parametrize("profile", ["deepseek_v41_flash_exl3", "glm_53_flash_exl3"])
def test_smoke_question(profile: str) -> None:
    proof = planned(profile)["proof"]
    assert proof["messages"] == [{"role": "user", "content": "What is 17*19? Reply with the integer only."}]
    assert proof["parameters"] == {"max_tokens": 32, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    assert proof["answer"] == {"any_text": True, "equals": "323"} or proof["answer"] == {"equals": "323"}


def test_published_figures_decide_nothing() -> None:
    """They are carried along to be compared with, and no rule or condition reads them."""
    for profile in ("deepseek_v41_flash_exl3", "glm_53_flash_exl3"):
        plan = planned(profile)
        assert plan["expected"]["decode"] and "expected" not in json.dumps(plan["template"])


# -- refusals --------------------------------------------------------------------------------------------------------


def refusal_ids() -> set[str]:
    """All ids in the planner's sources."""
    ids: set[str] = set()
    for path in ("plugins/module_utils/_plan.py", "plugins/action/rank_spec.py"):
        text = (ROOT / path).read_text(encoding="utf-8")
        ids.update(re.findall(r'"((?:nodes|fabric|profile|settings|plan|api)\.[a-z_]+)"', text))
    return ids


def test_every_refusal_is_documented() -> None:
    own = [entry for name in ("plan", "plan_rules") for entry in yaml.safe_load((ROOT / f"docs/refusals/{name}.yml").read_text(encoding="utf-8"))]
    every = {entry["id"] for path in (ROOT / "docs" / "refusals").glob("*.yml") for entry in yaml.safe_load(path.read_text(encoding="utf-8"))}
    ids = [entry["id"] for entry in own]
    assert len(set(ids)) == len(ids) and refusal_ids() <= every
    # None is documented that cannot happen; those of rules are made from the profiles.
    assert {id for id in ids if not id.startswith("rule.")} <= refusal_ids()
    assert all(entry["means"].endswith(".") and entry["do"].endswith(".") for entry in own)
