# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""When the role's parts run, by their own conditions."""

from __future__ import annotations

import os

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
CHANGING = {"retire.yml", "nfs.yml", "zfs.yml", "zfs_prune.yml"}
NODES = ["spark-1", "spark-2", "spark-3"]


def parts():
    """Task file and its conditions."""
    with open(os.path.join(ROOT, "roles/weight_sync/tasks/main.yml"), encoding="utf-8") as stream:
        for task in yaml.safe_load(stream):
            name = task.get("ansible.builtin.include_tasks") or task.get("ansible.builtin.import_tasks")
            when = task.get("when", [])
            yield name, [when] if isinstance(when, str) else when


def gives_up_pages(**more):
    """Whether the last part runs on the head of a group whose second rank has just copied the model."""
    with open(os.path.join(ROOT, "roles/weight_sync/tasks/main.yml"), encoding="utf-8") as stream:
        (task,) = [task for task in yaml.safe_load(stream) if task.get("ansible.builtin.include_role", {}).get("tasks_from") == "evict.yml"]
    nodes = NODES[:2]
    variables = {
        "spark_plan": {"ranks": 2, "nodes": nodes, "head": "spark-1", "addresses": dict.fromkeys(nodes, ""), "settings": {},
                       "artefacts": [{"name": "model", "directory": "acme--tiny/c"}]},
        "spark_rank": 0,
        "inventory_hostname": "spark-1",
        "ansible_check_mode": False,
        "hostvars": {
            "spark-1": {"spark_node": {"weights_root": "/w", "user": {"name": "alice"}}},
            "spark-2": {"__weight_sync_result": {"done": {"model": {"bytes": more.pop("copied", 9), "transport": "ssh"}}}},
        },
        **more,
    }  # fmt: skip
    templar = Templar(DataLoader(), variables=variables)
    runs = all(templar.evaluate_conditional(trust_as_template(str(one))) for one in task["when"])
    return templar.template(trust_as_template(task["vars"]["memory_paths"])) if runs else None


def running(policy, method, hosts=tuple(NODES), **look):
    variables = {
        "spark_plan": {"ranks": 3, "nodes": NODES, "settings": {"weight_sync_policy": policy}},
        "spark_rank": 1,
        "ansible_play_hosts": list(hosts),
        "__weight_sync_choice": {"method": method},
        "__weight_sync_look": {"info": {"message": "", "artefacts": [{"tree": "/w/t"}], "mounts": [], "fstab": [], "exported": ["/w/t"], **look}},
    }
    templar = Templar(DataLoader(), variables=variables)
    return {name for name, when in parts() if name and all(templar.evaluate_conditional(trust_as_template(str(one))) for one in when)}


@pytest.mark.parametrize("method, own", [("rsync", {"retire.yml"}), ("nfs", {"nfs.yml"}), ("zfs", {"retire.yml", "zfs.yml", "zfs_prune.yml"})])
def test_verify_only_proves_and_changes_nothing_whatever_the_method(method, own):
    assert running("auto", method) & CHANGING == own
    for_proof = running("verify_only", method)
    assert not for_proof & CHANGING and "worker.yml" in for_proof


@pytest.mark.parametrize(("path", "ours"), [("/w/t", True), ("/w", False), ("/", False), ("/w/u", False)])
def test_only_a_mount_of_ours_is_taken_away(path, ours):
    """A home on a share is somebody else's, and its account may have no root."""
    assert ("retire.yml" in running("auto", "rsync", mounts=[{"path": path}], exported=[])) == ours


def test_a_line_of_an_earlier_tree_is_taken_away():
    assert "retire.yml" in running("auto", "rsync", exported=[], fstab=["/w/before"])
    assert "retire.yml" not in running("auto", "rsync", exported=[])


def test_a_run_without_a_worker_destroys_no_snapshot():
    assert "zfs_prune.yml" not in running("auto", "zfs", NODES[:2])
    assert "zfs.yml" in running("auto", "zfs", NODES[:2])


@pytest.mark.parametrize(("hosts", "goes"), [(NODES, True), (NODES[:2], False), (NODES[:1], False)])
def test_an_export_stays_while_a_worker_that_may_mount_it_is_not_in_the_run(hosts, goes):
    with open(os.path.join(ROOT, "roles/weight_sync/tasks/retire.yml"), encoding="utf-8") as stream:
        (task,) = [task for task in yaml.safe_load(stream) if "sparkops.inference.nfs_export" in task]
    when = [task["when"]] if isinstance(task["when"], str) else task["when"]
    templar = Templar(DataLoader(), variables={"spark_plan": {"nodes": NODES}, "spark_rank": 0, "ansible_play_hosts_all": hosts})
    assert all(templar.evaluate_conditional(trust_as_template(str(one))) for one in when) == goes


@pytest.mark.parametrize(("check", "changed", "enabled"), [(False, True, True), (False, False, True), (True, False, True), (True, True, False)])
def test_a_preview_asks_systemd_for_no_unit_that_a_real_run_installs(check, changed, enabled):
    """The module of a service fails for a unit that is not there, in check mode too."""
    with open(os.path.join(ROOT, "roles/weight_sync/tasks/nfs.yml"), encoding="utf-8") as stream:
        (task,) = [task for task in yaml.safe_load(stream) if "ansible.builtin.systemd_service" in task]
    when = [task["when"]] if isinstance(task["when"], str) else task["when"]
    variables = {"spark_rank": 1, "ansible_check_mode": check, "__weight_sync_mounts_unit": {"changed": changed}}
    templar = Templar(DataLoader(), variables=variables)
    assert all(templar.evaluate_conditional(trust_as_template(str(one))) for one in when) == enabled


def rollback_parts(rank):
    """What the rollback does on a node: of each task the module, or the file that it brings in."""
    with open(os.path.join(ROOT, "roles/weight_sync/tasks/zfs_rollback.yml"), encoding="utf-8") as stream:
        tasks = yaml.safe_load(stream)
    # A node beside the deployment has no dataset.
    info = {"zfs": {"exists": rank >= 0, "dataset": "tank/w" if rank >= 0 else None}}
    settings = {"weight_sync_zfs_snapshot": "sparkops-1"}
    templar = Templar(DataLoader(), variables={"spark_rank": rank, "spark_plan": {"settings": settings}, "__weight_sync_look": {"info": info}})
    for task in tasks:
        when = task.get("when", [])
        if all(templar.evaluate_conditional(trust_as_template(str(one))) for one in ([when] if isinstance(when, str) else when)):
            (module,) = [name for name in task if "." in name]
            yield task[module].get("tasks_from", module) if module.endswith("_role") else task[module] if module.endswith("import_tasks") else module


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rollback_wants_all_ranks_first(rank):
    found = list(rollback_parts(rank))
    assert found[0] == "all_ranks.yml" and found.count("sparkops.inference.zfs_snapshot") == 2 and "ansible.builtin.fail" not in found


def test_a_rollback_goes_past_a_node_beside_the_deployment():
    assert list(rollback_parts(-1)) == ["all_ranks.yml"]


@pytest.mark.parametrize(
    ("more", "asked"),
    [({}, True), ({"method": "auto"}, True), ({"method": "rsync"}, False), ({"dataset": None}, False), ({"sudo": "none"}, False), ({"rank": -1}, False)],
)
def test_prune_asks_for_snapshots_where_zfs_is_in_use(more, asked):
    with open(os.path.join(ROOT, "roles/prune/tasks/main.yml"), encoding="utf-8") as stream:
        (block,) = yaml.safe_load(stream)
    (task,) = [task for task in block["block"] if task.get("ansible.builtin.include_role", {}).get("tasks_from") == "zfs_reclaim.yml"]
    node = {"sudo": more.get("sudo", "passwordless")}
    variables = {
        "spark_plan": {"ranks": 2, "head": "spark-1", "settings": {"weight_sync_method": more.get("method", "zfs")},
                       "node_settings": {"spark-2": {"weight_sync_zfs_dataset": more.get("dataset", "tank/weights")}}},
        "spark_rank": more.get("rank", 1),
        "spark_node": node,
        "inventory_hostname": "spark-2",
        "hostvars": {"spark-1": {"spark_node": node}},
    }  # fmt: skip
    templar = Templar(DataLoader(), variables=variables)
    assert all(templar.evaluate_conditional(trust_as_template(str(one))) for one in task["when"]) == asked


def test_the_sender_gives_up_what_it_sent_and_only_then():
    assert gives_up_pages() == ["/w/acme--tiny/c"]
    assert gives_up_pages(copied=0) is None
    assert gives_up_pages(ansible_check_mode=True) is None
    assert gives_up_pages(spark_rank=-1) is None
