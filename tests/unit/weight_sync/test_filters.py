# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Addresses of the rails, on both ends, and what is said of a group's mounts."""

from __future__ import annotations

import pytest
from ansible_collections.sparkops.inference.plugins.filter import bootstrap, weight_sync
from ansible_collections.sparkops.inference.plugins.modules.weight_sync import place_problems

NODES = ["spark-1", "spark-2", "spark-3"]
RAILS = {"spark-1": ["198.51.100.11", "203.0.113.11"], "spark-2": ["198.51.100.12", "203.0.113.12"]}


def plan(rails=None, **settings):
    return {
        "nodes": NODES, "head": "spark-1", "deployment": "d", "addresses": {name: f"198.51.100.1{number}" for number, name in enumerate(NODES, 1)},
        "settings": {"weight_sync_space_margin": 0, **settings},
        "node_settings": {name: {"weight_sync_rails": found} for name, found in (rails or RAILS).items()},
        "artefacts": [{"directory": "acme--tiny/c"}],
    }  # fmt: skip


def facts(name):
    return {
        "user": {"name": "alice", "home": "/home/alice"}, "weights_root": "/w", "state_root": "/s", "libexec": "/l",
        "python": {"executable": "/usr/bin/python3"},
        "key": {"public": f"ssh-ed25519 AAAA {name}"}, "sudo": "passwordless",
    }  # fmt: skip


HOSTVARS = {name: {"spark_node": facts(name)} for name in NODES}


def test_a_peer_may_use_its_key_from_each_of_its_rails_and_from_nowhere_else():
    lines = bootstrap.gate_lines(HOSTVARS, plan(), "spark-1")
    assert [line.split('from="')[1].split('"')[0] for line in lines] == ["198.51.100.12,203.0.113.12", "198.51.100.13"]


@pytest.mark.parametrize(
    ("host", "sources"),
    [
        ("spark-2", [("spark-1", RAILS["spark-1"], RAILS["spark-2"])]),
        ("spark-3", [("spark-2", RAILS["spark-2"], ["198.51.100.13"]), ("spark-1", RAILS["spark-1"], ["198.51.100.13"])]),
    ],
)
def test_a_worker_is_told_all_rails_of_its_sources_and_says_all_of_its_own(host, sources):
    found = weight_sync.sync_sources(HOSTVARS, plan(), host)
    assert [(source["node"], source["rails"], source["clients"]) for source in found] == sources


def test_only_the_workers_are_clients_of_the_export():
    assert weight_sync.sync_clients(plan()) == ["198.51.100.12", "203.0.113.12", "198.51.100.13"]


def test_the_problems_of_all_mounts_are_one_text():
    found = {**HOSTVARS, "spark-2": {"__weight_sync_probe": {"message": "spark-2: dead"}}, "spark-3": {"__weight_sync_probe": {"skipped": True}}}
    assert weight_sync.sync_unreachable(found, plan()) == "spark-2: dead"
    assert weight_sync.sync_unreachable(HOSTVARS, plan()) == ""


def test_trees_and_manifests_are_watched():
    assert weight_sync.zfs_watched(plan(), "/w") == ["/w/acme--tiny/c", "/w/acme--tiny/c.manifest.json"]


def ranks(token="", **guids):
    """Ranks with a dataset each, and what snapshots they have."""
    return {
        name.replace("_", "-"): {
            "__weight_sync_look": {"info": {"zfs": {"exists": True, **({"receive_resume_token": token} if name == "spark_3" and token else {})}}},
            "__weight_sync_snapshots": {"snapshots": [{"name": f"sparkops-{guid}", "guid": guid, "created": int(guid)} for guid in found]},
        }
        for name, found in guids.items()
    }


@pytest.mark.parametrize(
    ("hostvars", "needed"),
    [
        (ranks(spark_1=["1", "2", "3", "4"], spark_2=["1", "2"], spark_3=["3"]), ["2", "3"]),
        (ranks(spark_1=["1", "2", "3"], spark_2=[], spark_3=["9"]), []),  # full streams come next
        (ranks("1-token", spark_1=["1", "2", "3"], spark_2=["3"], spark_3=["1", "0"]), ["0", "1", "2", "3"]),
        ({**ranks(spark_1=["1", "2"], spark_2=["2"]), "spark-3": {}}, ["1", "2"]),
        ({**ranks(spark_1=["1", "2"], spark_2=["2"]), "spark-3": {"__weight_sync_snapshots": {"skipped": True}}}, ["1", "2"]),
    ],
)
def test_what_a_next_stream_may_begin_with_is_needed(hostvars, needed):
    assert weight_sync.zfs_needed(hostvars, plan()) == needed


def reported(**reports):
    return {name: {"spark_node": facts(name), "__weight_sync_result": {"done": reports.get(name.replace("-", "_"), {})}} for name in NODES}


def sent(hostvars, **settings):
    more = {**plan(**settings), "artefacts": [{"name": "model", "directory": "acme--tiny/c"}, {"name": "drafter", "directory": "acme--draft/d"}]}
    trees = {name: weight_sync.sync_read(hostvars, more, name) for name in NODES if hostvars[name]}
    return {name: found for name, found in trees.items() if found}


SSH, FABRIC, NFS, ZFS = ({"bytes": size, "transport": name} for name, size in (("ssh", 9), ("fabric", 9), ("nfs", 0), ("zfs", 0)))


@pytest.mark.parametrize(
    ("reports", "settings", "trees"),
    [
        ({}, {}, {}),
        ({"spark_2": {"model": {**SSH, "bytes": 0}}}, {}, {}),  # its manifest alone was published
        ({"spark_2": {"model": SSH}}, {}, {"spark-1": ["/w/acme--tiny/c"]}),
        ({"spark_3": {"drafter": SSH}}, {}, {"spark-1": ["/w/acme--draft/d"], "spark-2": ["/w/acme--draft/d"]}),
        ({"spark_3": {"drafter": SSH}}, {"weight_sync_topology": "star"}, {"spark-1": ["/w/acme--draft/d"]}),
        ({"spark_3": {"model": NFS}}, {}, {"spark-1": ["/w/acme--tiny/c"]}),
        ({"spark_2": {"model": FABRIC}, "spark_3": {"model": ZFS}}, {}, {"spark-3": ["/w/acme--tiny/c"]}),
    ],
)
def test_a_node_gives_up_the_trees_that_were_read_there_and_no_others(reports, settings, trees):
    assert sent(reported(**reports), **settings) == trees


@pytest.mark.parametrize("size", [0, 9])
def test_a_head_gives_up_what_a_stream_has_read(size):
    found = reported()
    found["spark-2"]["__weight_sync_received"] = {"done": {"replica": {"bytes": size, "transport": "zfs"}}}
    assert sent(found) == ({"spark-1": ["/w/acme--tiny/c", "/w/acme--draft/d"]} if size else {})


def test_a_worker_that_is_not_in_this_run_has_read_nothing():
    assert sent({**reported(spark_2={"model": SSH}), "spark-3": {}}) == {"spark-1": ["/w/acme--tiny/c"]}


@pytest.mark.parametrize(
    ("method", "linked", "fine"),
    [("rsync", False, True), ("rsync", True, False), ("zfs", True, True), ("zfs", False, False), ("nfs", False, True)],
)
def test_what_another_method_left_is_not_what_is_wanted(tmp_path, method, linked, fine):
    (tmp_path / ".replica").mkdir()
    tree = tmp_path / "tree"
    if linked:
        tree.symlink_to(".replica")
    else:
        tree.mkdir()
    assert (not place_problems(str(tree), method)) == fine


def look(name, **more):
    return {
        "node": name, "weights_root": "/s/weights", "there": False, "user": 1000, "owner": 0, "filesystem": "ext4", "free": 10**9, "writable": False,
        "tools": {"rsync": False}, "modules": {}, "zfs": {}, "exported": False, "replica": False, **more,
        "artefacts": [{"name": "model", "tree": "/s/weights/t", "complete": False, "way": "rsync", "files": {}, "staged": 0, "manifest": None}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("predicting", "items", "where", "method"),
    [
        (True, True, "/s/weights", "rsync"),
        (False, True, "/s/weights", ""),       # a real run has done its bootstrap by then, or was not asked to
        (True, False, "/s/weights", ""),
        (True, True, "/data/weights", ""),     # bootstrap gives the account its state directory, nothing else
    ],
)  # fmt: skip
def test_a_prediction_counts_on_what_bootstrap_would_mend(predicting, items, where, method):
    hostvars = {name: {"spark_node": facts(name), "__weight_sync_look": {"info": look(name, weights_root=where)}} for name in NODES}
    wishes = plan(bootstrap_state_dir=items, bootstrap_packages=items, weight_sync_method="rsync")
    assert weight_sync.sync_choice(hostvars, wishes, predicting)["method"] == method


def test_the_method_is_chosen_for_the_workers_of_this_run():
    """A limit may leave one out; nothing is known about it then."""
    there = {"tools": {"rsync": True}, "writable": True}
    hostvars = {name: {"spark_node": facts(name), "__weight_sync_look": {"info": look(name, **there)}} for name in NODES[:2]}
    choice = weight_sync.sync_choice({**hostvars, "spark-3": {}}, plan(weight_sync_method="rsync"))
    assert choice["method"] == "rsync" and "spark-2" in choice["lines"][0] and "spark-3" not in choice["lines"][0]
