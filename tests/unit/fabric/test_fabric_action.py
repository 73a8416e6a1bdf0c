# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side: facts of all ranks in, one choice per host or one list of refusals out. R1 (L11), R4, R17 (limit)."""

from __future__ import annotations

import types

import pytest

from ansible_collections.sparkops.inference.plugins.action.fabric_plan import ActionModule

from fabric_trees import SEED_ADDRESSES, seed_pair

NODES = list(SEED_ADDRESSES)


def plan_for(addresses=None, **own):
    settings = {"fabric_gid_policy": "unpinned", "fabric_rdma": "auto", "fabric_topology": "auto"}
    empty = {"fabric_interface": None, "fabric_hcas": None, "fabric_gid_index": None}
    return {
        "nodes": NODES,
        "addresses": addresses or SEED_ADDRESSES,
        "settings": settings,
        "node_settings": {name: {**empty, **own.get(name.replace("-", "_"), {})} for name in NODES},
    }


def run(host, plan, hostvars, others=(), play_hosts=None, accept=()):
    task = types.SimpleNamespace(args={"others": list(others), "accept": list(accept)}, async_val=0, action="fabric_plan", diff=False, check_mode=False)
    shell = types.SimpleNamespace(tmpdir=None, _IS_WINDOWS=False)
    action = ActionModule(task, types.SimpleNamespace(_shell=shell), types.SimpleNamespace(), None, None, None)
    variables = {"spark_plan": plan, "hostvars": hostvars, "inventory_hostname": host, "ansible_play_hosts": play_hosts or NODES}
    return action.run(None, variables)


@pytest.fixture
def hostvars(tmp_path):
    return {name: {"__fabric_read": {"fabric": machine.facts()}, "spark_node": {"clock_skew": 0.0}} for name, machine in seed_pair(tmp_path).items()}


def test_each_host_gets_its_own_choice(hostvars):
    found = {name: run(name, plan_for(), hostvars)["fabric"] for name in NODES}
    assert {name: entry["interface"] for name, entry in found.items()} == {"spark-1": "enp1s0f1np1", "spark-2": "enp1s0f0np0"}
    assert found["spark-1"]["selector"] == "=rocep1s0f1,roceP2p1s0f1"


def test_settings_of_a_node_are_its_choice(hostvars):
    own = {"spark_1": {"fabric_hcas": ["=rocep1s0f1"], "fabric_interface": "enp1s0f1np1"}, "spark_2": {"fabric_hcas": ["=rocep1s0f0"]}}
    found = run("spark-1", plan_for(**own), hostvars)
    assert found["fabric"]["hcas"] == ["rocep1s0f1"] and "failed" not in found


def test_notices_of_plan_and_parity_are_in_the_fact(hostvars):
    hostvars["spark-2"]["spark_node"]["clock_skew"] = 5.0
    hostvars["spark-2"]["__fabric_read"]["fabric"]["kernel"] = "7.0.0-1019-nvidia"
    found = run("spark-2", plan_for(spark_1={"fabric_hcas": ["=rocep1s0f1"]}), hostvars)
    text = "\n".join(found["fabric"]["notices"])
    assert "the clock is 5 s apart from spark-1" in text and "known to be bad" in text
    assert {row["item"]: row["same"] for row in found["parity"]}["kernel"] is False


def test_all_refusals_are_said_once_by_the_first_host(hostvars):
    hostvars["spark-2"]["spark_node"]["clock_skew"] = 400.0
    bad = plan_for({"spark-1": "198.51.100.99", "spark-2": "x"})
    first, second = run("spark-1", bad, hostvars), run("spark-2", bad, hostvars)
    assert first["failed"] and second["failed"]
    assert [refusal["id"] for refusal in first["refusals"]] == ["fabric.address_absent", "fabric.address_invalid", "fabric.clock"]
    assert first["msg"].startswith("3 problems") and second["msg"] == "the fabric of the group is refused; the reasons are with spark-1"


def test_a_rank_outside_the_limit_is_read_by_delegation(hostvars):
    other = {"item": "spark-2", **hostvars["spark-2"].pop("__fabric_read")}
    assert run("spark-1", plan_for(), hostvars, [other], ["spark-1"])["fabric"]["rails"][0]["peer"] == "spark-2"


def test_a_rank_that_was_not_read_is_named(hostvars):
    del hostvars["spark-2"]["__fabric_read"]
    found = run("spark-1", plan_for(), hostvars, play_hosts=["spark-1"])
    assert [(refusal["id"], refusal["node"]) for refusal in found["refusals"]] == [("fabric.unread", "spark-2")]


def test_a_host_that_is_no_rank_gets_an_empty_choice(hostvars):
    hostvars["other"] = {}
    assert run("other", plan_for(), hostvars)["fabric"] == {}


def test_what_the_caller_will_mend_is_accepted(hostvars):
    for interface in hostvars["spark-2"]["__fabric_read"]["fabric"]["interfaces"]:
        interface["mtu"] = 1500
    assert {refusal["id"] for refusal in run("spark-1", plan_for(), hostvars)["refusals"]} == {"fabric.mtu"}
    found = run("spark-1", plan_for(), hostvars, accept=["fabric.mtu"])
    assert "failed" not in found and len(found["fabric"]["rails"]) == 2
