# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import re
import typing as t

import pytest
from planner_request import planned, refused, request

from ansible_collections.sparkops.inference.plugins.module_utils import _plan
from ansible_collections.sparkops.inference.plugins.module_utils._options import options
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import format_refusals


def _no_file(path: str) -> None:
    """No file of the controller is there."""


def ids(*args: t.Any, **values: t.Any) -> list[str]:
    return [refusal.id for refusal in refused(*args, **values)]


# -- what a plan says ------------------------------------------------------------------------------------------------


def test_the_plan_has_what_roles_read() -> None:
    plan = planned("lab_tiny", 2)
    assert plan["deployment"] == plan["profile"] == "lab_tiny"
    assert (plan["nodes"], plan["head"], plan["ranks"]) == (["spark-1", "spark-2"], "spark-1", 2)
    assert (plan["tensor_parallel"], plan["pipeline_parallel"]) == (2, 1)
    assert plan["addresses"] == {"spark-1": "198.51.100.11", "spark-2": "198.51.100.12"}
    assert plan["api"] == {"port": 8888, "bind": "0.0.0.0", "key": "generated"}
    assert plan["rendezvous_port"] == 29521
    assert plan["timeouts"] == {"ready": 600, "stall": 300, "completion": 120}
    (artefact,) = plan["artefacts"]
    assert artefact["directory"] == f"sparklab--tiny-llama/{artefact['revision']}"
    assert {"name", "repository", "fallback_repositories", "revision", "include", "exclude", "required", "licence", "size_bytes", "mount"} <= set(
        artefact
    )
    assert {"reference", "digest", "platform", "stamp_label", "pull"} <= set(plan["image"])


def test_settings_and_origins_name_every_option() -> None:
    plan = planned("glm_53_flash_exl3")
    public = {name for name, option in options().items() if not option.secret}
    assert public <= set(plan["settings"])
    assert set(options()) <= set(plan["origins"])
    assert set(plan["secrets"]) == {name for name, option in options().items() if option.secret}


def test_a_plan_is_json() -> None:
    plan = planned("deepseek_v41_flash_exl3")
    assert json.loads(json.dumps(plan)) == plan


def test_origins() -> None:
    plan = planned(
        "lab_tiny",
        serve_max_num_seqs=3,
        _play_vars={"serve_port": 9000},
        _extra_vars={"serve_stop_grace"},
        serve_stop_grace=5,
        hosts={"spark-1": {"weights_root": "/data"}},
    )
    wanted = {
        "serve_max_num_seqs": "inventory",
        "serve_port": "play vars",
        "serve_stop_grace": "extra vars",
        "weights_root": "inventory",
        "serve_max_model_len": "profile",
        "serve_bind": "default",
        "serve_api_key": "default",
    }
    assert {name: plan["origins"][name] for name in wanted} == wanted
    assert plan["settings"]["serve_port"] == 9000


@pytest.mark.parametrize("unset", [None, "", "  "])
def test_an_unanswered_question_is_the_default(unset: t.Any) -> None:
    plan = planned("lab_tiny", serve_port=unset, serve_max_model_len=unset, serve_deployment=unset, serve_api_key=unset)
    assert plan["settings"]["serve_port"] == 8888 and plan["origins"]["serve_port"] == "default"
    assert plan["settings"]["serve_max_model_len"] == 256 and plan["origins"]["serve_max_model_len"] == "profile"
    assert plan["deployment"] == "lab_tiny" and plan["api"]["key"] == "generated"


def test_values_of_one_host() -> None:
    plan = planned("lab_tiny", hosts={"spark-2": {"weights_root": "/data/weights", "fabric_interface": "eth9"}})
    assert plan["node_settings"]["spark-2"]["weights_root"] == "/data/weights"
    assert plan["node_settings"]["spark-1"]["weights_root"] is None
    # Roles that know no ranks read the head's value.
    assert plan["settings"]["weights_root"] is None


def test_a_hosts_value_stands_over_the_groups() -> None:
    plan = planned("lab_tiny", weights_root="/all", hosts={"spark-2": {"weights_root": "/two"}})
    assert [plan["node_settings"][name]["weights_root"] for name in plan["nodes"]] == ["/all", "/two"]


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_a_secret_is_nowhere_in_the_plan() -> None:
    plan = planned("lab_tiny", serve_api_key="hunter2-hunter2")
    assert "hunter2" not in json.dumps(plan)
    assert plan["secrets"]["serve_api_key"] is True and plan["api"]["key"] == "given"
    assert "serve_api_key" not in plan["settings"]


def test_a_recipes_repository_needs_a_full_commit_and_no_password() -> None:
    for address in ("https://git.example/r", "ssh://git@git.example:22/r", "git@git.example:team/r.git"):
        assert planned("lab_tiny", 2, image_recipe_repository=address, image_recipe_commit="c" * 40)
    assert "hunter" not in format_refusals(refused("lab_tiny", image_recipe_repository="https://me:hunter2@git.example/r"))


def test_a_secret_is_nowhere_in_a_refusal() -> None:
    found = refused("lab_tiny", serve_api_key=" hunter2 ", hosts={"spark-2": {"serve_api_key": "hunter3"}}, serve_port="x")
    assert "hunter" not in format_refusals(found)


# -- hosts and shape -------------------------------------------------------------------------------------------------


def test_three_hosts_with_tp_2() -> None:
    (refusal,) = refused("lab_tiny", 3, serve_tensor_parallel=2)
    assert refusal.id == "plan.ranks"
    assert "3 ranks" in refusal.text and "TP 2" in refusal.text


def test_a_host_left_out_is_named() -> None:
    (refusal,) = refused("lab_tiny", 2, serve_tensor_parallel=3, _play_hosts=["spark-1", "spark-2", "spark-3"])
    assert "spark-3 of this play not in serve_nodes" in refusal.text


def test_tensor_and_pipeline_parallel_make_the_ranks() -> None:
    plan = planned("lab_tiny", 4, serve_pipeline_parallel=2)
    assert (plan["tensor_parallel"], plan["pipeline_parallel"]) == (2, 2)
    assert ids("lab_tiny", 3, serve_pipeline_parallel=2) == ["plan.ranks"]
    assert ids("lab_tiny", 2, serve_pipeline_parallel=4) == ["plan.ranks"]


def test_one_rank_needs_no_fabric() -> None:
    plan = planned("lab_tiny", 1, hosts={"spark-1": {"fabric_address": ""}})
    assert plan["ranks"] == 1 and plan["addresses"] == {"spark-1": "127.0.0.1"}


def test_a_host_outside_of_the_group_gets_the_same_plan() -> None:
    inside = planned("lab_tiny", 2, hosts={"spark-9": {}})
    outside = planned("lab_tiny", 2, hosts={"spark-9": {}}, _host="spark-9")
    assert inside == outside


def test_a_host_of_the_play_outside_of_the_group_is_a_notice() -> None:
    plan = planned("lab_tiny", 2, hosts={"spark-9": {}}, _play_hosts=["spark-1", "spark-2", "spark-9"])
    assert plan["notices"] == ["spark-9 is in the play but not in serve_nodes: nothing is done there."]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"image_recipe_repository": "https://git.example/r", "image_recipe_commit": "main"}, ["plan.recipe"]),
        ({"image_recipe_repository": "https://me:secret@git.example/r"}, ["plan.recipe", "plan.recipe"]),
        ({"image_pull_policy": "always", "image_build": "on_stamp_change"}, ["plan.image_replaced"]),
        ({"serve_nodes": None}, ["nodes.undefined"]),
        ({"serve_nodes": ["spark-1", "spark-1"]}, ["nodes.twice"]),
        ({"serve_nodes": ["spark-1", "spark-x"]}, ["nodes.not_in_inventory"]),
        ({"serve_nodes": {"a": 1}}, ["settings.value"]),
        ({"_connections": {"spark-1": "192.0.2.1:22", "spark-2": "192.0.2.1:22"}}, ["nodes.same_machine"]),
        ({"hosts": {"spark-2": {"fabric_address": "198.51.100.11"}}}, ["fabric.address_twice"]),
        ({"hosts": {"spark-2": {"weight_sync_rails": ["198.51.100.12", "198.51.100.300"]}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"weight_sync_rails": ["spark-2.local", "198.51.100.11"]}}}, ["fabric.address_invalid", "fabric.address_twice"]),
        (
            {"hosts": {"spark-1": {"weight_sync_rails": ["198.51.100.21"]}, "spark-2": {"weight_sync_rails": ["198.51.100.21"]}}},
            ["fabric.address_twice"],
        ),
        ({"hosts": {"spark-2": {"fabric_address": None}}}, ["fabric.address_missing"]),
        ({"hosts": {"spark-2": {"fabric_address": "spark-2.local"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": "127.0.0.2"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": "0.0.0.0"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": "224.0.0.1"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": "fd00::2"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": "169.254.1.1"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": "198.51.100.012"}}}, ["fabric.address_invalid"]),
        ({"hosts": {"spark-2": {"fabric_address": 5}}}, ["settings.value"]),
        ({"serve_bind": "everywhere"}, ["settings.value"]),
        ({"serve_port": 29521}, ["settings.same_port"]),
        ({"serve_port": 70000}, ["settings.value"]),
        ({"serve_api_key_mode": "none"}, ["api.open"]),
        ({"serve_api_key_mode": "none", "serve_bind": "::"}, ["api.open"]),
        ({"serve_api_key_mode": "none", "serve_bind": "127.0.0.1", "serve_api_key": "k"}, ["settings.two_ways"]),
        ({"hosts": {"spark-2": {"serve_max_model_len": 99}}}, ["settings.differs"]),
        ({"hosts": {"spark-2": {"serve_port": "9000"}, "spark-1": {"serve_port": 9001}}}, ["settings.differs"]),
        ({"serve_deployment": "Not Good"}, ["settings.value"]),
        ({"serve_deployment": "../x"}, ["settings.value"]),
        ({"serve_accept_rules": ["nothing"]}, ["settings.accept_rules"]),
        ({"serve_environment": {"A": True}}, ["settings.value"]),
        ({"serve_environment": {"A": ""}}, ["settings.value"]),
        ({"serve_environment": {"A=B": "1"}}, ["settings.value"]),
        ({"serve_environment": {"VLLM_API_KEY": "x"}}, ["settings.reserved"]),
        ({"serve_environment": {"NCCL_IB_GID_INDEX": "3"}}, ["settings.reserved"]),
        ({"serve_extra_arguments": ["--api-key", "x"]}, ["settings.reserved"]),
        ({"serve_extra_arguments": ["--port=1"]}, ["settings.reserved"]),
        ({"serve_extra_arguments": ["--max-model-len=9"]}, ["settings.two_ways"]),
        ({"serve_extra_arguments": ["--max-num-seqs", "9"]}, ["settings.two_ways"]),
        ({"serve_files": {"/x": "missing"}, "_read_file": _no_file}, ["settings.file"]),
        ({"serve_chat_template_file": "missing.jinja", "_read_file": _no_file}, ["settings.file"]),
        ({"serve_files": {"relative": "x"}}, ["settings.value"]),
        ({"_broken": {"spark-1": {"serve_port": "'x' is undefined"}}}, ["settings.template"]),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)),  # the same in every process
)
def test_wrong_values(values: dict[str, t.Any], expected: list[str]) -> None:
    assert ids("lab_tiny", 2, **values) == expected


@pytest.mark.parametrize("address", ["198.51.100.12", "10.0.0.2", " 198.51.100.12 "])
def test_usable_fabric_addresses(address: str) -> None:
    assert planned("lab_tiny", hosts={"spark-2": {"fabric_address": address}})["addresses"]["spark-2"] == address.strip()


def test_equal_values_in_two_spellings_are_no_conflict() -> None:
    plan = planned("lab_tiny", hosts={"spark-1": {"serve_port": "9000"}, "spark-2": {"serve_port": 9000}})
    assert plan["api"]["port"] == 9000


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = ids(
        "labtiny",
        serve_nodes=["spark-1", "spark-2", "spark-x", "spark-1"],
        serve_port="1e3",
        serve_boot="maybe",
        hosts={"spark-2": {"weights_root": "rel"}},
    )
    assert sorted(found) == ["nodes.not_in_inventory", "nodes.twice", "profile.unknown", "settings.value", "settings.value", "settings.value"]


def test_refusals_name_node_thing_found_wanted_and_next_step() -> None:
    (refusal,) = refused("lab_tiny", hosts={"spark-2": {"weights_root": "rel"}})
    assert refusal.node == "spark-2" and refusal.thing == "weights_root"
    assert refusal.text == (
        'spark-2: weights_root: found "rel"; wanted an absolute path, or one that begins with ~/. '
        "Next: correct weights_root, or leave it out for the default [settings.value]"
    )


def test_a_conflict_names_both_hosts() -> None:
    (refusal,) = refused("lab_tiny", hosts={"spark-2": {"serve_max_model_len": 99}})
    assert refusal.found == "spark-1: nothing, spark-2: 99"


# -- profiles --------------------------------------------------------------------------------------------------------


def test_unknown_profile_says_which_there_are() -> None:
    (refusal,) = refused("glm_53_flash_exl")
    assert refusal.id == "profile.unknown" and "did you mean glm_53_flash_exl3" in refusal.found and "lab_tiny" in refusal.next_step


def test_a_part_of_profiles_cannot_be_served() -> None:
    assert ids("vllm_base") == ["profile.unknown"]


def test_no_profile() -> None:
    (refusal,) = refused(None)
    assert refusal.id == "profile.undefined" and "lab_tiny" in refusal.next_step


MINE: dict[str, t.Any] = {
    "format": 1,
    "description": "mine",
    "options": {
        "image_reference": {"default": "i:1"},
        "serve_served_model_name": {"default": "mine"},
        "serve_a": {"kind": "int", "description": "A.", "default": "${serve_b}"},
        "serve_b": {"kind": "int", "description": "B.", "default": 4},
    },
    "artefacts": {"model": {"repository": "a/b", "revision": "c", "mount": "/model"}},
}


def mine(**change: t.Any) -> dict[str, t.Any]:
    data = {**MINE, **change}
    return {"_find_profile": lambda name: data if name == "mine" else None, "_profile_names": lambda: ["mine"]}


def test_a_users_profile() -> None:
    plan = planned("mine", **mine())
    assert plan["settings"]["serve_a"] == 4 and planned("mine", **mine(), serve_b=5)["settings"]["serve_a"] == 5
    assert plan["template"]["arguments"] == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unknown": 1}, "unknown is not known"),
        ({"environment": {"A": "${serve_c}"}}, "environment names serve_c, which does not exist"),
        ({"proof": {"messages": [{}], "parameters": {"x": "${node.state_dir}"}, "answer": {}}}, "proof names node.state_dir"),
        (
            {"options": {**MINE["options"], "serve_b": {"kind": "int", "description": "B.", "default": "${serve_a}"}}},
            "depends on itself by way of serve_a > serve_b",
        ),
        ({"options": {**MINE["options"], "serve_b": {"kind": "int", "description": "B.", "default": "x"}}}, "the default of serve_a"),
        ({"extends": "nothing"}, "it extends nothing, which does not exist"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_profile_is_told_apart(change: dict[str, t.Any], words: str) -> None:
    found = refused("mine", **mine(**change))
    assert {refusal.id for refusal in found} == {"profile.invalid"} and words in format_refusals(found)


@pytest.mark.parametrize(
    ("named", "platform"),
    [
        ("linux/arm64", "linux/arm64"),
        ("linux/aarch64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64"),
        ("linux/amd64/v3", "linux/amd64/v3"),
    ],
)
def test_the_platform_is_named_as_engines_and_registries_name_it(named: str, platform: str) -> None:
    """Another name of the same would refuse the right image, and the right machine."""
    assert planned("mine", **mine(image={**MINE.get("image", {}), "platform": named}))["image"]["platform"] == platform


def test_the_profiles_pin_is_for_its_own_image() -> None:
    digest = "sha256:" + "a" * 64
    pinned = mine(options={**MINE["options"], "image_digest": {"default": digest}})
    assert planned("mine", **pinned)["image"]["digest"] == digest
    assert planned("mine", **pinned, image_reference="other:1")["image"]["digest"] is None
    own = "sha256:" + "b" * 64
    assert planned("mine", **pinned, image_reference="other:1", image_digest=own)["image"]["digest"] == own


def test_a_build_follows_no_pin_of_a_registry() -> None:
    digest, own = ("sha256:" + letter * 64 for letter in "ab")
    pinned = mine(options={**MINE["options"], "image_digest": {"default": digest}})
    assert planned("mine", **pinned, image_build="when_unavailable")["image"]["digest"] == digest
    assert planned("mine", **pinned, image_build="on_stamp_change")["image"]["digest"] is None
    found = refused("mine", **pinned, image_build="always", image_digest=own)
    assert [refusal.id for refusal in found] == ["plan.image_pinned"]


def test_generic_vllm_says_what_it_needs() -> None:
    found = refused("generic_vllm")
    assert {refusal.id for refusal in found} == {"plan.artefact", "plan.image"}
    assert "set serve_model_repository" in format_refusals(found)


# -- rules that every profile has ------------------------------------------------------------------------------------


def test_an_open_api_is_served_on_consent() -> None:
    plan = planned("lab_tiny", serve_api_key_mode="none", serve_accept_rules=["api.open"])
    assert plan["api"]["key"] == "none"
    assert plan["notices"] == ["Rule api.open is accepted by serve_accept_rules: the API listens on all addresses without a key."]
    assert planned("lab_tiny", serve_api_key_mode="none", serve_bind="192.0.2.5")["notices"] == []


def test_two_ways_are_served_on_consent() -> None:
    plan = planned("lab_tiny", serve_extra_arguments=["--max-model-len=9"], serve_accept_rules=["settings.two_ways"])
    assert any("settings.two_ways" in notice for notice in plan["notices"])


def test_a_variable_that_an_option_decides_has_one_place() -> None:
    (refusal,) = refused("deepseek_v41_flash_exl3", serve_environment={"DSV41_IO_THREADS": "96"})
    assert refusal.id == "settings.two_ways" and "serve_engram_io_threads" in refusal.next_step


def test_a_fixed_variable_may_be_changed_or_taken_away() -> None:
    from planner_request import specs

    plan = planned("deepseek_v41_flash_exl3", serve_environment={"DSV41_ENGRAM_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": None})
    env = specs(plan)[0]["env"]
    assert env["DSV41_ENGRAM_DISABLE"] == "1" and "CUDA_LAUNCH_BLOCKING" not in env


def test_misspelt_variables_are_named() -> None:
    notices = planned("lab_tiny", serve_prot=1, weights_rot="/x", other_thing=1, hosts={"spark-2": {"image_x": 1}})["notices"]
    assert notices == [
        "image_x has no effect with profile lab_tiny.",
        "serve_prot has no effect with profile lab_tiny (did you mean serve_port?).",
        "weights_rot has no effect with profile lab_tiny (did you mean weights_root?).",
    ]


def test_an_option_of_another_profile_has_no_effect() -> None:
    assert planned("lab_tiny", serve_ablit=True)["notices"] == ["serve_ablit has no effect with profile lab_tiny."]


def test_files_are_mounted_where_they_belong() -> None:
    plan = planned("lab_tiny", serve_chat_template_file="templates/chat.jinja", serve_files={"/opt/a/b.py": "b.py"})
    assert [(file["name"], file["target"]) for file in plan["files"]] == [
        ("opt_a_b.py", "/opt/a/b.py"),
        ("sparkops-files_chat_template.jinja", "/sparkops-files/chat_template.jinja"),
    ]


def test_the_planner_never_raises(capsys: t.Any) -> None:
    """Whatever an inventory holds, there is a plan or there are refusals."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    junk = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.lists(st.text(max_size=4), max_size=3)
        | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)
    )

    @hypothesis.settings(max_examples=150)
    @hypothesis.given(st.dictionaries(st.sampled_from(sorted([*options(), "serve_max_model_len", "serve_enforce_eager"])), junk, max_size=6))
    def check(values: dict[str, t.Any]) -> None:
        plan, refusals = _plan.plan(request("lab_tiny", 2, **values))
        assert (plan is None) == bool(refusals)

    check()
