# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import json
import typing as t

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _rank_spec
from ansible_collections.sparkops.inference.plugins.module_utils._plan_text import docker_run

from planner_request import THREE_NODES, node_facts, planned, specs

CASES = [
    ("lab_tiny", 1, {}),
    ("lab_tiny", 2, {}),
    ("lab_tiny", 3, {}),
    ("lab_tiny", 4, {}),
    ("deepseek_v41_flash_exl3", 2, {}),
    ("deepseek_v41_flash_exl3_latest", 2, {}),
    ("glm_53_flash_exl3", 2, {}),
    ("glm_53_flash_exl3_latest", 2, {}),
    ("glm_53_flash_exl3_latest", 3, {"serve_files": THREE_NODES}),
    ("glm_53_flash_exl3_latest", 4, {}),
    ("generic_vllm", 2, {"serve_model_repository": "acme/model", "serve_model_revision": "a" * 40, "image_reference": "vllm/vllm-openai:v1"}),
]


@pytest.mark.parametrize(("profile", "ranks", "values"), CASES, ids=[f"{profile}-tp{ranks}" for profile, ranks, _values in CASES])
def test_golden(profile: str, ranks: int, values: dict[str, t.Any], golden: t.Callable[[str, t.Any], None]) -> None:
    """The full docker run of each rank, what its entry script reads, and what the roles read of the plan."""
    plan = planned(profile, ranks, **values)
    document = {
        "ranks": [{"docker_run": docker_run(spec), "entry": spec["entry"]} for spec in specs(plan)],
        "artefacts": plan["artefacts"],
        "image": plan["image"],
        "files": plan["files"],
        "timeouts": plan["timeouts"],
        "proof": plan["proof"],
        "notices": plan["notices"],
    }
    golden(f"{profile}-tp{ranks}.json", document)


# What may differ between ranks, and nothing else.
RANK_FLAGS = {"--node-rank": 1, "--headless": 0, "--host": 1, "--port": 1}
RANK_ENVIRONMENT = {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "DSV41_PACKED_DIR"}


def without_rank(spec: dict[str, t.Any]) -> dict[str, t.Any]:
    spec = copy.deepcopy(spec)
    for flag, values in RANK_FLAGS.items():
        if flag in spec["command"]:
            position = spec["command"].index(flag)
            del spec["command"][position : position + 1 + values]
    spec["env"] = {name: value for name, value in spec["env"].items() if name not in RANK_ENVIRONMENT}
    spec["mounts"] = sorted(mount["target"] for mount in spec["mounts"] if mount["target"] not in ("/sparkops-key", "/engram-packed"))
    for name in ("rank", "key"):
        spec["entry"].pop(name)
    for name in ("address", "hcas"):
        spec["entry"]["gid"].pop(name)
    for name in ("name", "labels", "api_key_hmac"):
        spec.pop(name)
    return spec


@pytest.mark.parametrize(("profile", "ranks", "values"), [case for case in CASES if case[1] > 1], ids=lambda value: str(value)[:32])
def test_ranks_differ_only_where_they_must(profile: str, ranks: int, values: dict[str, t.Any]) -> None:
    plan = planned(profile, ranks, **values)
    nodes = {name: node_facts(plan, name) for name in plan["nodes"]}
    nodes[plan["nodes"][-1]]["engram_packed_dir"] = "/data/engram"
    head, *workers = [without_rank(spec) for spec in _rank_spec.rank_specs(plan, nodes, None, None, "k")]
    assert workers == [head] * (ranks - 1)


def test_addresses_interfaces_and_devices_come_from_one_fact() -> None:
    plan = planned("lab_tiny", 2)
    nodes = {name: node_facts(plan, name) for name in plan["nodes"]}
    nodes["spark-2"]["fabric"] = {"interface": "enP2p1s0f0np0", "address": "198.51.100.99", "hcas": ["rocep1s0f0", "roceP2p1s0f0"]}
    env = _rank_spec.rank_spec(plan, 1, nodes)["env"]
    assert env["VLLM_HOST_IP"] == "198.51.100.99"
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=enP2p1s0f0np0", "enP2p1s0f0np0")
    # The exact form: a bare name is the beginning of any name for NCCL.
    assert env["NCCL_IB_HCA"] == "=rocep1s0f0,roceP2p1s0f0"


def test_without_devices_nccl_is_kept_to_sockets() -> None:
    """It would take any RDMA port that it finds, and the recipe's NCCL_NET of IB would end the start."""
    plan = planned("deepseek_v41_flash_exl3", 2)
    env = specs(plan, fabric={"interface": "enp1s0f0np0", "address": "198.51.100.12", "hcas": []})[1]["env"]
    assert (env["NCCL_IB_DISABLE"], env["NCCL_NET"]) == ("1", "Socket")
    assert "NCCL_IB_HCA" not in env


def test_unknown_fabric_means_absent_variables() -> None:
    plan = planned("lab_tiny", 2)
    spec = specs(plan, fabric={})[1]
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"} & set(spec["env"])
    assert spec["env"]["VLLM_HOST_IP"] == plan["addresses"]["spark-2"]


def test_no_variable_is_ever_empty() -> None:
    for profile, ranks, values in CASES:
        for spec in specs(planned(profile, ranks, **values)):
            assert all(spec["env"].values()), profile


def test_one_rank_knows_nothing_of_a_group() -> None:
    spec = specs(planned("lab_tiny", 1))[0]
    assert not {"--nnodes", "--node-rank", "--master-addr", "--master-port", "--distributed-executor-backend", "--headless"} & set(spec["command"])
    assert not {name for name in spec["env"] if name.startswith(("NCCL", "GLOO")) or name == "VLLM_HOST_IP"}
    assert spec["entry"]["gid"]["policy"] == "unpinned"


def test_only_the_head_has_the_key() -> None:
    head, worker = specs(planned("lab_tiny", 2))
    assert {"source": "/var/lib/sparkops/lab_tiny/key", "target": "/sparkops-key", "read_only": True} in head["mounts"]
    assert head["entry"]["key"] == {"file": "/sparkops-key/api_key", "variable": "VLLM_API_KEY"} and head["api_key_hmac"]
    assert "/sparkops-key" not in [mount["target"] for mount in worker["mounts"]]
    assert worker["entry"]["key"] is None and worker["api_key_hmac"] is None


def test_no_key_at_all() -> None:
    head = specs(planned("lab_tiny", 2, serve_api_key_mode="none", serve_bind="127.0.0.1"))[0]
    assert head["entry"]["key"] is None and head["api_key_hmac"] is None


@pytest.mark.parametrize(("policy", "index", "expected"), [("unpinned", None, None), ("auto", None, None), ("index", 3, 3)])
def test_gid_policy_reaches_the_entry_script(policy: str, index: int | None, expected: int | None) -> None:
    hosts = {name: {"fabric_gid_index": index} for name in ("spark-1", "spark-2")} if index else {}
    plan = planned("lab_tiny", 2, fabric_gid_policy=policy, hosts=hosts)
    gid = specs(plan)[1]["entry"]["gid"]
    assert (gid["policy"], gid["index"]) == (policy, expected)


def test_each_rank_has_its_own_gid_index() -> None:
    plan = planned("lab_tiny", 2, fabric_gid_policy="index", hosts={"spark-1": {"fabric_gid_index": 4}, "spark-2": {"fabric_gid_index": 3}})
    assert [spec["entry"]["gid"]["index"] for spec in specs(plan)] == [4, 3]


def test_packed_rows_only_where_they_were_checked() -> None:
    plan = planned("deepseek_v41_flash_exl3")
    nodes = {name: node_facts(plan, name) for name in plan["nodes"]}
    nodes["spark-2"]["engram_packed_dir"] = "/nvme/engram"
    head, worker = _rank_spec.rank_specs(plan, nodes, None, None, None)
    assert "DSV41_PACKED_DIR" not in head["env"]
    assert worker["env"]["DSV41_PACKED_DIR"] == "/engram-packed"
    assert {"source": "/nvme/engram", "target": "/engram-packed", "read_only": True} in worker["mounts"]


def sources(spec: dict[str, t.Any]) -> dict[str, str]:
    return {mount["target"]: mount["source"] for mount in spec["mounts"]}


def test_each_node_has_its_own_paths() -> None:
    plan = planned("glm_53_flash_exl3_latest", hosts={"spark-2": {"serve_cache_root": "~/kernels"}})
    head, worker = (sources(spec) for spec in specs(plan))
    assert head["/root/.triton/cache"] == "/var/lib/sparkops/glm_53_flash_exl3_latest/cache/triton"
    assert worker["/root/.triton/cache"] == "/home/user2/kernels/triton"
    assert head["/model"].startswith("/data1/weights/") and worker["/model"].startswith("/data2/weights/")


def test_a_host_nccl_is_each_nodes_own() -> None:
    values = {"serve_accept_rules": ["G5"], "serve_host_nccl_library": "libnccl.so.2"}
    plan = planned(
        "glm_53_flash_exl3", hosts={"spark-1": {"serve_host_nccl_dir": "~/nccl"}, "spark-2": {"serve_host_nccl_dir": "/opt/nccl"}}, **values
    )
    head, worker = specs(plan)
    assert (sources(head)["/nccl"], sources(worker)["/nccl"]) == ("/home/user1/nccl", "/opt/nccl")
    assert head["env"]["LD_PRELOAD"] == worker["env"]["LD_PRELOAD"] == "/nccl/libnccl.so.2"


# -- hashes ----------------------------------------------------------------------------------------------------------


def labels(plan: dict[str, t.Any], **facts: t.Any) -> list[str]:
    return [spec["labels"]["sparkops.spec"] for spec in specs(plan, **facts)]


def test_order_of_variables_changes_nothing() -> None:
    pairs = {"B": "2", "A": "1"}
    one = planned("glm_53_flash_exl3", serve_environment=pairs, serve_multimodal_limits={"image": 1, "video": 2})
    two = planned("glm_53_flash_exl3", serve_environment=dict(reversed(pairs.items())), serve_multimodal_limits={"video": 2, "image": 1})
    assert labels(one) == labels(two)


@pytest.mark.parametrize(
    "values",
    [
        {"serve_max_num_seqs": 3},
        {"serve_environment": {"A": "1"}},
        {"serve_extra_arguments": ["--a"]},
        {"serve_port": 9000},
        {"fabric_gid_policy": "auto"},
    ],
    ids=str,
)
def test_a_changed_setting_is_a_changed_spec(values: dict[str, t.Any]) -> None:
    assert labels(planned("lab_tiny", **values))[0] != labels(planned("lab_tiny"))[0]


@pytest.mark.parametrize("part", ["image", "entry", "key"])
def test_image_entry_script_and_key_are_part_of_the_spec(part: str) -> None:
    plan = planned("lab_tiny")
    nodes = {name: node_facts(plan, name) for name in plan["nodes"]}
    given = {"image": "i", "entry": "e", "key": "k"}
    before = _rank_spec.rank_specs(plan, nodes, *given.values())
    after = _rank_spec.rank_specs(plan, nodes, *{**given, part: "other"}.values())
    assert before[0]["labels"]["sparkops.spec"] != after[0]["labels"]["sparkops.spec"]
    # A changed key concerns the head alone, but the group is another one.
    assert (before[1]["labels"]["sparkops.spec"] == after[1]["labels"]["sparkops.spec"]) == (part == "key")
    assert before[1]["labels"]["sparkops.group"] != after[1]["labels"]["sparkops.group"]


def test_all_ranks_carry_the_same_group_and_their_own_rank() -> None:
    group = specs(planned("lab_tiny", 3))
    assert len({spec["labels"]["sparkops.group"] for spec in group}) == 1
    assert [spec["labels"]["sparkops.rank"] for spec in group] == ["0", "1", "2"]
    assert [spec["name"] for spec in group] == ["lab_tiny-rank0", "lab_tiny-rank1", "lab_tiny-rank2"]


def test_the_content_of_a_mounted_file_is_part_of_the_spec() -> None:
    def read(digit: str) -> t.Callable[[str], dict[str, t.Any]]:
        return lambda path: {"source": path, "sha256": digit * 64, "size": 1, "vector_length": None}

    one, two = (planned("lab_tiny", serve_files={"/opt/x.py": "x.py"}, _read_file=read(digit)) for digit in "12")
    assert labels(one) != labels(two)
    assert {"source": "/var/lib/sparkops/lab_tiny/files/opt_x.py", "target": "/opt/x.py", "read_only": True} in specs(one)[0]["mounts"]


# -- R16: byte for byte ----------------------------------------------------------------------------------------------

AWKWARD = [
    "two words",
    "it's",
    'a "quote"',
    "$HOME",
    "${serve_port}",
    "$${x}",
    "%d %(a)s",
    "{{ x }}",
    "naïve ü 漢",
    "",
    "tab\tand\nline",
    "-",
    "a=b",
    "\\n",
]


def test_arguments_arrive_byte_for_byte_on_both_ranks() -> None:
    for spec in specs(planned("deepseek_v41_flash_exl3", serve_extra_arguments=AWKWARD)):
        assert spec["command"][-len(AWKWARD) :] == AWKWARD


def test_environment_arrives_byte_for_byte_on_both_ranks() -> None:
    pairs = {f"X{number}": text for number, text in enumerate(AWKWARD) if text}
    for spec in specs(planned("deepseek_v41_flash_exl3", serve_environment=pairs)):
        assert {name: spec["env"][name] for name in pairs} == pairs


def test_mappings_become_json_that_reads_back() -> None:
    overrides = {"a": 'it\'s "x"', "b": [1, 2.5, None, True], "c": {"d": "$HOME ${serve_port} 漢"}}
    command = specs(
        planned("generic_vllm", serve_model_repository="a/b", serve_model_revision="c", image_reference="i:1", serve_hf_overrides=overrides)
    )[0]["command"]
    assert json.loads(command[command.index("--hf-overrides") + 1]) == overrides
    extra = {"method": "x", "n": 3}
    assert json.loads(specs(planned("lab_tiny", serve_extra_arguments=["--y", extra]))[0]["command"][-1]) == extra
