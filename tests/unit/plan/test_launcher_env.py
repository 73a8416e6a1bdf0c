# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pathlib
import typing as t

import generate
import pytest
import yaml
from planner_request import NODES, planned

from ansible_collections.sparkops.inference.plugins.filter import plan as filters
from ansible_collections.sparkops.inference.plugins.module_utils import _launcher_env
from ansible_collections.sparkops.inference.plugins.module_utils._options import convert


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1", {"A": "1"}),
        ("export A=1", {"A": "1"}),
        ("  A=1  ", {"A": "1"}),
        ("# A=1\n\nB=2", {"B": "2"}),
        ("A=1 # why", {"A": "1"}),
        ("A=a#b", {"A": "a#b"}),
        ("A='a # b'", {"A": "a # b"}),
        ("A='{\"image\":4}'", {"A": '{"image":4}'}),
        ('A="a \\" b"', {"A": 'a " b'}),
        ("A=", {"A": ""}),
        ("A=''", {"A": ""}),
        ("A=1\nA=2", {"A": "2"}),
        ("A=a=b", {"A": "a=b"}),
        ("A='$HOME'", {"A": "$HOME"}),
        ("A=^LL128", {"A": "^LL128"}),
    ],
    ids=repr,
)
def test_assignments_are_read_as_the_shell_reads_them(text: str, expected: dict[str, str]) -> None:
    assert _launcher_env.parse(text)[0] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("if true; then", "line 1 is no assignment"),
        ("A='x", "line 1: the quotes of A do not end on the line"),
        ("A=$HOME/x", "line 1: A has shell in it"),
        ('A="${B:-c}"', "line 1: A has shell in it"),
        ("A=`id`", "line 1: A has shell in it"),
        ("A=1\nA=2", "line 2: A is set twice"),
    ],
    ids=repr,
)
def test_what_cannot_be_taken_as_it_stands_is_named(text: str, words: str) -> None:
    assert any(note.startswith(words) for note in _launcher_env.parse(text)[1])


def test_nothing_is_executed(tmp_path: pathlib.Path) -> None:
    trap = tmp_path / "trap"
    values, notes = _launcher_env.parse(f'A=$(touch {trap})\nB=`touch {trap}`\ntouch {trap}\nC="$(touch {trap})"')
    assert not trap.exists() and values["A"] == f"$(touch {trap})" and len(notes) == 4


@pytest.mark.parametrize(
    ("names", "recipe"),
    [
        (["DSV41_CACHE_GIB", "PORT"], "deepseek"),
        (["DFLASH_TOKENS"], "glm"),
        (["MTP_TOKENS", "GLM53_SPINWAIT_MS"], "glm"),
        (["PORT"], None),
        (["DSV41_CACHE_GIB", "DFLASH_TOKENS"], None),
        (["DSV41_A", "DSV41_B", "GLM53_DENSE_FP8"], "deepseek"),
    ],
)
def test_which_recipe(names: list[str], recipe: str | None) -> None:
    assert _launcher_env.recipe_of(dict.fromkeys(names, "1")) == recipe


def translated(text: str, recipe: str | None = None) -> dict[str, t.Any]:
    return filters.launcher_env(text, ["a", "b"], recipe)


@pytest.mark.parametrize(
    ("recipe", "line", "expected"),
    [
        ("deepseek", "MAX_MODEL_LEN=500000", {"serve_max_model_len": 500000}),
        ("deepseek", "MAX_MODEL_LEN=0600000", {}),
        ("deepseek", "MAX_MODEL_LEN=", {}),
        ("deepseek", "ENFORCE_EAGER=1", {"serve_enforce_eager": True}),
        ("deepseek", "ENFORCE_EAGER=0", {}),
        ("deepseek", "AUTO_DOWNLOAD=0", {"weights_download": "never"}),
        ("deepseek", "AUTO_DOWNLOAD=1", {}),
        ("deepseek", "WEIGHT_SYNC=zfs", {"weight_sync_method": "zfs"}),
        ("deepseek", "IMAGE_SHIP=rsync", {"image_ship_mode": "archive"}),
        ("deepseek", "DSV41_MEM_GUARD_GIB=1.0", {"memory_guard_serving_floor": 2**30}),
        ("deepseek", "DSV41_EXL3_MOE_X=2,12,8", {"serve_exl3_moe_shape": "2,12,8"}),
        ("deepseek", "GLM53_SPINWAIT_MS=16", {"serve_spinwait_ms": 16}),
        ("deepseek", "PYTORCH_CUDA_ALLOC_CONF=", {"serve_cuda_allocator": "none"}),
        ("deepseek", "NCCL_IB_GID_INDEX=3", {"fabric_gid_policy": "auto"}),
        ("deepseek", "MODEL_HOST=/data/model", {"weights_adopt_from": ["/data/model"]}),
        ("glm", "HF_HOME=/data/hf/", {"weights_adopt_from": ["/data/hf/hub"]}),
        ("glm", "REFRESH_WEIGHTS=1", {"weights_download": "refresh"}),
        ("glm", "SKIP_DOWNLOAD=1", {"weights_download": "never"}),
        ("glm", "SKIP_SYNC=1", {"weight_sync_policy": "verify_only"}),
        ("glm", "FORCE_SYNC=1", {"weight_sync_policy": "force"}),
        ("glm", "PULL=1", {"image_pull_policy": "always"}),
        ("glm", "SKIP_SHIP=1", {"image_ship_mode": "never"}),
        ("glm", "SKIP_OVERLAY_VERIFY=1", {"image_self_check": False}),
        ("glm", "LIMIT_MM='{\"image\":9,\"video\":0}'", {"serve_multimodal_limits": {"image": 9, "video": 0}}),
        ("glm", "EXTRA_ARGS='--a 1 --b'", {"serve_extra_arguments": ["--a", "1", "--b"]}),
        ("glm", "EXTRA_ARGS='--kv-cache-memory-bytes 15032385536'", {"serve_kv_cache_memory_bytes": 15032385536}),
        ("glm", "EXTRA_ARGS='--x --kv-cache-memory-bytes=15032385536 y'", {"serve_kv_cache_memory_bytes": 15032385536, "serve_extra_arguments": ["--x", "y"]}),
        ("glm", "GLM53_DENSE_FP8=off", {"serve_dense_fp8": []}),
        ("glm", "GLM53_DENSE_FP8=kda,mla", {"serve_dense_fp8": ["kda", "mla"]}),
        ("glm", "GLM53_DENSE_FP8=all", {}),
        ("glm", "GLM53_ADAPTIVE_K=ema", {"serve_adaptive_k": True}),
        ("glm", "GLM53_MIXED_PREFILL_CHUNK=-1", {}),
        ("glm", "GLM53_MIXED_PREFILL_CHUNK=off", {"serve_mixed_prefill": 0}),
        ("glm", "ABLIT_LAYERS=20-30", {"serve_ablit_first_layer": 20, "serve_ablit_last_layer": 30}),
        ("glm", "ABLIT_DIRECTION=/x/dir.pt", {"serve_ablit_direction_file": "/x/dir.pt"}),
        ("glm", "ABLIT_DIRECTION=bf_oproj", {"serve_ablit_direction": "bf_oproj"}),
        ("glm", "ABLIT=1", {}),
        ("glm", "GLM53_EXTRA_ENV='A=1 B=x=y'", {"serve_environment": {"A": "1", "B": "x=y"}}),
        ("glm", "MODEL_FALLBACK=a/b", {"serve_model_fallbacks": ["a/b"]}),
        ("glm", "TP=2", {}),
        ("glm", "VIDEO_PATCH_HOST=/x", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_group_variables(recipe: str, line: str, expected: dict[str, t.Any]) -> None:
    assert translated(line, recipe)["group"] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("HEAD_IP=10.0.0.1", {"0": {"fabric_address": "10.0.0.1"}}),
        ("WORKER_IP=10.0.0.2", {"1": {"fabric_address": "10.0.0.2"}}),
        ("WORKER3_IP=10.0.0.4", {"3": {"fabric_address": "10.0.0.4"}}),
        ("HEAD_CX7_IB='=rocep1s0f0,rocep1s0f1'", {"0": {"fabric_hcas": ["rocep1s0f0", "rocep1s0f1"]}}),
        ("WORKER_SSH=bob@spark2", {"1": {"ansible_user": "bob", "ansible_host": "spark2"}}),
        ("WORKER_USER=bob", {"1": {"ansible_user": "bob"}}),
        ("NCCL_HOST_DIR=/nccl", {"0": {}}),
        (
            "USE_HOST_NCCL=1\nNCCL_HOST_DIR=/nccl\nWORKER_NCCL_HOST_DIR=/n2",
            {"0": {"serve_host_nccl_dir": "/nccl"}, "1": {"serve_host_nccl_dir": "/n2"}},
        ),
    ],
    ids=repr,
)
def test_host_variables(line: str, expected: dict[str, t.Any]) -> None:
    assert translated(line, "glm")["hosts"] == expected


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "GHCR_TOKEN"])
def test_secrets_are_named_and_not_shown(name: str) -> None:
    found = translated(f"{name}=hunter2\nGLM53_EXTRA_ENV='MY_TOKEN=hunter3'", "glm")
    assert "hunter" not in str(found) and len(found["secrets"]) == 1 and name in " ".join(found["notes"])


def test_the_unknown_is_listed_with_what_was_meant() -> None:
    assert translated("MAX_NUM_SEQ=3\nFOO=1", "glm")["unknown"] == ["MAX_NUM_SEQ (did you mean MAX_NUM_SEQS?)", "FOO"]


def test_a_value_that_cannot_be_is_left_out_and_named() -> None:
    found = translated("MAX_MODEL_LEN=lots", "glm")
    assert found["group"] == {} and any(note.startswith("serve_max_model_len: found") for note in found["notes"])


def test_newer_names_choose_the_newer_profile() -> None:
    assert translated("MAX_MODEL_LEN=500000", "glm")["profile"] == "glm_53_flash_exl3"
    assert translated("GLM53_ADAPTIVE_K=ema", "glm")["profile"] == "glm_53_flash_exl3_latest"
    assert translated("PREFIX_CACHE_RETENTION_INTERVAL=8192", "deepseek")["profile"] == "deepseek_v41_flash_exl3_latest"


def test_a_file_that_says_nothing_asks() -> None:
    assert "adopt_recipe" in translated("PORT=1")["notes"][0]
    assert filters.launcher_env_lines("PORT=1", ["a", "b"]) == translated("PORT=1")["notes"]


ENV = """
HEAD_IP=10.9.0.1
WORKER_IP=10.9.0.2
HEAD_CX7_IB=rocep1s0f1
WORKER_CX7_IB=rocep1s0f0
PORT=9000
MAX_MODEL_LEN=500000
MAX_NUM_SEQS=1
DSPARK_TOKENS=3
DSV41_DROP_PAGE_CACHE=0
VLLM_API_KEY=hunter2
"""


def test_the_inventory_can_be_used() -> None:
    found = translated(ENV)
    inventory = yaml.safe_load(found["inventory"])["sparks"]
    assert list(inventory["hosts"]) == ["a", "b"] and "hunter2" not in found["inventory"]
    hosts = {name: inventory["hosts"][other] for name, other in zip(NODES, "ab")}
    values = {name: value for name, value in inventory["vars"].items() if name not in ("serve_nodes", "serve_profile")}
    plan = planned(inventory["vars"]["serve_profile"], hosts=hosts, **values)
    assert plan["api"]["port"] == 9000 and plan["settings"]["serve_drop_page_cache"] is False
    assert plan["addresses"] == {"spark-1": "10.9.0.1", "spark-2": "10.9.0.2"}
    assert plan["notices"] == []


@pytest.mark.parametrize("recipe", ["deepseek", "glm"])
def test_every_knob_of_a_recipe_can_be_read(recipe: str) -> None:
    """No row of the table makes the reader stumble, whatever its value is."""
    rows = [row["upstream"] for row in generate.knobs() if recipe in row["recipes"]]
    for value in ("1", "x", "a,b", "off", "2 3=4", "{", ""):
        found = translated("\n".join(f"{name}='{value}'" for name in rows), recipe)
        assert found["unknown"] == []


def test_what_is_said_is_what_an_option_takes() -> None:
    known = generate.catalogues()
    found = translated(ENV)
    for name, value in found["group"].items():
        assert convert(known[found["profile"]][name], value) == value


def test_names_of_an_environment_that_have_no_effect() -> None:
    text = "HOME=/root\nHF_HOME=/x\nMAX_MODEL_LEN=5\nBASH_FUNC=() {\n}\nPORTS=1"
    assert filters.ignored_environment(text) == ["HF_HOME", "MAX_MODEL_LEN"]
