# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""GID tables that differ, have holes, and lie: R1, A1 to A4, L11."""

from __future__ import annotations

import pathlib
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.sparkops.inference.plugins.module_utils import _gid
from ansible_collections.sparkops.inference.plugins.module_utils._fabric import Choice, plan_fabric

from fabric_trees import LINK_LOCAL, UNREADABLE, V1, V2, Machine, mapped, put

HCA, INTERFACE = "rocep1s0f1", "enp1s0f1np1"
ADDRESSES = {"sparkA": "198.51.100.11", "sparkB": "198.51.100.12"}
OWN = {name: mapped(address) for name, address in ADDRESSES.items()}
LOCAL = [(LINK_LOCAL, V1), (LINK_LOCAL, V2)]
TABLES = {
    "sparkA": [*LOCAL, (OWN["sparkA"], V1), None, (OWN["sparkA"], V2)],
    "sparkB": [*LOCAL, (OWN["sparkB"], V1), (OWN["sparkB"], V2), (mapped("203.0.113.12"), V2)],
}


def group(tmp_path: pathlib.Path, tables=None):
    found = {}
    for name, table in {**TABLES, **(tables or {})}.items():
        machine = Machine(tmp_path / name)
        machine.interface(INTERFACE, f"{ADDRESSES[name]}/24", *(["203.0.113.12/24"] if name == "sparkB" else []))
        found[name] = machine.hca(HCA, INTERFACE, table)
    return found


def plan(machines, policy="unpinned", index=None, **kwargs):
    choices = {name: Choice(gid_policy=policy, gid_index=index) for name in machines}
    return plan_fabric(list(machines), {name: machine.facts() for name, machine in machines.items()}, ADDRESSES, choices, **kwargs)


def test_by_default_nothing_is_pinned_and_each_node_reports_its_own_index(tmp_path):
    found = plan(group(tmp_path))
    assert found.refusals == []
    assert {name: entry["gid"]["now"] for name, entry in found.nodes.items()} == {"sparkA": 4, "sparkB": 3}
    for entry in found.nodes.values():
        assert (entry["gid"]["policy"], entry["gid"]["index"]) == ("unpinned", None)


def test_pinning_is_a_policy_per_rank_not_a_number(tmp_path):
    found = plan(group(tmp_path), "auto")
    assert found.refusals == []
    assert {name: (entry["gid"]["policy"], entry["gid"]["index"], entry["gid"]["now"]) for name, entry in found.nodes.items()} == {
        "sparkA": ("auto", None, 4),
        "sparkB": ("auto", None, 3),
    }


def test_one_number_for_both_is_refused_where_it_is_a_hole(tmp_path):
    found = plan(group(tmp_path), "index", 3)
    assert [(refusal.id, refusal.node) for refusal in found.refusals] == [("fabric.gid_index", "sparkA")]
    text = found.refusals[0].text
    assert f"GID slot 3 of {HCA}: found empty" in text and "4 would work" in text


def test_a_number_that_is_right_is_handed_on(tmp_path):
    machines = group(tmp_path)
    facts = {name: machine.facts() for name, machine in machines.items()}
    found = plan_fabric(
        list(machines), facts, ADDRESSES, {"sparkA": Choice(gid_policy="index", gid_index=4), "sparkB": Choice(gid_policy="index", gid_index=3)}
    )
    assert found.refusals == []
    assert {name: entry["gid"]["index"] for name, entry in found.nodes.items()} == {"sparkA": 4, "sparkB": 3}


@pytest.mark.parametrize("index", [0, 2, 4])  # link-local v1, own v1, v2 of another network
def test_slots_that_look_used_but_are_not_ours_are_refused(tmp_path, index):
    found = plan(group(tmp_path), "index", index)
    refusal = next(refusal for refusal in found.refusals if refusal.node == "sparkB")
    assert "3 would work" in refusal.next_step


def test_slots_that_move_between_two_runs_are_followed(tmp_path):
    first = group(tmp_path / "1")
    moved = group(tmp_path / "2", {"sparkA": [*LOCAL, (OWN["sparkA"], V1), (OWN["sparkA"], V2), None]})
    assert plan(first, "auto").nodes["sparkA"]["gid"]["now"] == 4
    assert plan(moved, "auto").nodes["sparkA"]["gid"]["now"] == 3


def test_link_local_only_is_refused_when_pinned(tmp_path):
    found = plan(group(tmp_path, {"sparkA": LOCAL}), "auto")
    assert [refusal.id for refusal in found.refusals] == ["fabric.gid_none"]
    assert "has the interface an address?" in found.refusals[0].next_step


def test_link_local_only_is_a_notice_when_nothing_is_pinned(tmp_path):
    found = plan(group(tmp_path, {"sparkA": LOCAL}))
    assert found.refusals == []
    assert any("no RoCE v2 GID of 198.51.100.11" in text for text in found.nodes["sparkA"]["notices"])


@pytest.mark.parametrize("table", [[*LOCAL, (mapped("198.51.100.99"), V2)], [*LOCAL, (OWN["sparkA"], V1)], [(OWN["sparkA"], UNREADABLE)], []])
def test_no_slot_with_the_own_address_as_v2_is_refused_when_pinned(tmp_path, table):
    found = plan(group(tmp_path, {"sparkA": table}), "auto")
    assert [(refusal.id, refusal.node) for refusal in found.refusals] == [("fabric.gid_none", "sparkA")]


def test_one_index_must_hold_on_every_listed_port(tmp_path):
    machines = group(tmp_path)
    twin = mapped("192.0.2.11")
    machines["sparkA"].interface("enP2p1s0f1np1", "192.0.2.11/24").hca("roceP2p1s0f1", "enP2p1s0f1np1", [*LOCAL, (twin, V1), (twin, V2)])
    machines["sparkB"].interface("enP2p1s0f1np1", "192.0.2.12/24").hca(
        "roceP2p1s0f1", "enP2p1s0f1np1", [*LOCAL, (mapped("192.0.2.12"), V1), (mapped("192.0.2.12"), V2)]
    )
    assert plan(machines).refusals == []
    found = plan(machines, "auto")
    assert [(refusal.id, refusal.node) for refusal in found.refusals] == [("fabric.gid_differs", "sparkA")]
    assert "rocep1s0f1: 0 = IB/RoCE v1" in found.refusals[0].found and "roceP2p1s0f1: 0 =" in found.refusals[0].found


def test_policy_index_without_an_index_is_refused_with_the_one_that_would_work(tmp_path):
    found = plan(group(tmp_path), "index")
    assert [refusal.id for refusal in found.refusals] == ["fabric.gid_index_missing", "fabric.gid_index_missing"]
    assert "4 would work on this node" in found.refusals[0].next_step


def test_the_entry_script_finds_the_index_again_from_sysfs_alone(tmp_path):
    root = group(tmp_path)["sparkA"].root / "sys"
    assert _gid.resolve(str(root), {HCA: ["198.51.100.11"]})[0] == 4
    put(root / "class/infiniband" / HCA / "ports/1/gids/4", mapped("198.51.100.99"))
    index, table = _gid.resolve(str(root), {HCA: ["198.51.100.11"]})
    assert index is None and "4 = RoCE v2 198.51.100.99" in table
    assert _gid.resolve(str(root), {"absent:2": ["198.51.100.11"]}) == (None, "absent:2: no GID at all")


# --- any tree at all -------------------------------------------------------------------------------------------

OWN_A, PEER, FOREIGN = "198.51.100.11", "198.51.100.12", "203.0.113.12"
GIDS = st.sampled_from([mapped(OWN_A), mapped(PEER), mapped(FOREIGN), LINK_LOCAL, "garbage", ""]) | st.just(UNREADABLE)
KINDS = st.sampled_from([V1, V2, "RoCE v2 ", "roce V2", ""]) | st.just(UNREADABLE)
SLOTS = st.lists(st.none() | st.tuples(GIDS, KINDS), max_size=5)
STATES = st.sampled_from(["4: ACTIVE", "1: DOWN", "", "nonsense"]) | st.just(UNREADABLE)
NAMES = ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"]
NETDEVS = {"rocep1s0f0": "enp1s0f0np0", "rocep1s0f1": "enp1s0f1np1", "roceP2p1s0f0": "enP2p1s0f0np0", "roceP2p1s0f1": "enP2p1s0f1np1"}
TREES = st.dictionaries(st.sampled_from(NAMES), st.tuples(SLOTS, STATES, st.sampled_from([(), (f"{OWN_A}/24",), (f"{FOREIGN}/24",)])))


@settings(max_examples=150)
@given(
    TREES,
    st.sampled_from([("unpinned", None), ("auto", None), ("index", 0), ("index", 3), ("index", None)]),
    st.sampled_from(["", "roce", "^=rocep1s0f0", "=rocep1s0f1"]),
)
def test_no_tree_crashes_or_yields_a_foreign_gid(tree, gid, hcas):
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(pathlib.Path(folder) / "a")
        peer = Machine(pathlib.Path(folder) / "b").interface(INTERFACE, f"{PEER}/24").hca(HCA, INTERFACE, [*LOCAL, (mapped(PEER), V2)])
        for name, (slots, state, addresses) in tree.items():
            machine.interface(NETDEVS[name], *addresses).hca(name, NETDEVS[name], slots, state)
        facts = {"a": machine.facts(), "b": peer.facts()}
        for port in facts["a"]["ports"]:
            own = {entry["address"] for entry in facts["a"]["interfaces"] if entry["name"] in port["interfaces"] for entry in entry["addresses"]}
            for slot in port["gids"]:
                assert (slot["index"] in port["usable"]) == (slot["kind"] == V2 and slot["ipv4"] in own)
        found = plan_fabric(["a", "b"], facts, {"a": OWN_A, "b": PEER}, {"a": Choice("", hcas, *gid)})
        pinned = found.nodes["a"]["gid"]["now"]
        if pinned is not None:
            for name in found.nodes["a"]["hcas"]:
                slot = {slot["index"]: slot for port in facts["a"]["ports"] if port["hca"] == name for slot in port["gids"]}[pinned]
                assert slot["kind"] == V2 and slot["ipv4"] == OWN_A
