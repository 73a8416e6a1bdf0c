# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lease and the API key, as decisions and as whole modules."""

from __future__ import annotations

import errno
import json
import os
import stat
import time

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from ansible_collections.sparkops.inference.plugins.action import lease as lease_action
from ansible_collections.sparkops.inference.plugins.module_utils import _rank_state
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import LEASE_SECONDS
from ansible_collections.sparkops.inference.plugins.modules import api_key, image_check, lease, serve_canary, serve_proof, serve_warmup
from run_module import run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
OTHER = {"run_id": "host:1:1", "owner": "carla@host", "since": 0, "expires": 100}


@pytest.mark.parametrize(
    "present, ended, now, held, notice",
    [
        ({}, "", 50, True, ""),
        ({**OTHER, "run_id": "me"}, "", 50, True, ""),
        (OTHER, "", 50, False, ""),
        (OTHER, "", 100, True, "expired"),
        (OTHER, "host:1:1", 50, True, "has ended"),
        (OTHER, "host:2:2", 50, False, ""),
    ],
)
def test_who_may_have_the_lease(present, ended, now, held, notice):
    allowed, said = lease.decide(present, "me", ended, now)
    assert allowed == held and notice in said
    assert bool(said) == bool(notice)


def test_a_run_of_this_machine_whose_process_is_gone_has_ended():
    alive = lease_action.run_id()
    host, pid, start = alive.split(":")
    assert not lease_action.has_ended(alive)
    assert lease_action.has_ended(f"{host}:{pid}:{int(start) + 1}")
    assert lease_action.has_ended(f"{host}:999999999:1")
    assert not lease_action.has_ended("elsewhere:999999999:1")
    name = lease_action.socket.gethostname()
    assert not lease_action.has_ended(f"{name}:999999999:1") and not lease_action.has_ended(f"{name}/0badcafe/1:999999999:1")
    assert not lease_action.has_ended("nonsense")


def test_the_lease_is_taken_kept_refused_and_released(tmp_path, capsys):
    mine = {"state_dir": str(tmp_path / "dep"), "run_id": "me", "owner": "alice"}
    assert run(lease, capsys, **mine, _ansible_check_mode=True)["held"] and not (tmp_path / "dep").exists()
    first = run(lease, capsys, **mine)
    assert first["held"] and not first["changed"]
    assert run(lease, capsys, **mine)["lease"]["since"] == first["lease"]["since"]
    refused = run(lease, capsys, **{**mine, "run_id": "you", "owner": "bob"})
    assert not refused["held"] and refused["lease"]["owner"] == "alice"
    run(lease, capsys, **{**mine, "run_id": "you"}, state="released")
    assert (tmp_path / "dep/lease.json").exists(), "nobody else may release it"
    run(lease, capsys, **mine, state="released")
    assert not (tmp_path / "dep/lease.json").exists()


def test_a_head_that_was_never_set_up_is_named(tmp_path, capsys, monkeypatch):
    mine = {"state_dir": str(tmp_path / "dep"), "run_id": "me", "owner": "alice", "node": "spark-1"}
    released = run(lease, capsys, **mine, state="released")
    assert released["held"] is False and not (tmp_path / "dep").exists()

    def denied(path, **_unused):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(lease.os, "makedirs", denied)
    refused = run(lease, capsys, **mine)
    assert "held" not in refused and refused["msg"].startswith(f"spark-1: state of dep: found {tmp_path / 'dep'}: not writable for ")
    assert "bootstrap" in refused["msg"] and "[lease.state]" in refused["msg"]


def test_an_expired_lease_is_taken_over_with_a_notice(tmp_path, capsys):
    folder = tmp_path / "dep"
    folder.mkdir()
    (folder / "lease.json").write_text(json.dumps({**OTHER, "expires": time.time() - 5}))
    assert "carla@host" in run(lease, capsys, state_dir=str(folder), run_id="me", owner="alice")["notice"]


def test_a_key_is_made_once_kept_and_readable_by_its_owner_only(tmp_path, capsys):
    predicted = run(api_key, capsys, state_dir=str(tmp_path), _ansible_check_mode=True)
    assert predicted["changed"] and os.listdir(tmp_path) == []
    made = run(api_key, capsys, state_dir=str(tmp_path))
    path = tmp_path / "key/api_key"
    key = path.read_text()
    assert made["changed"] and len(key) >= 32 and key not in json.dumps(made)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = run(api_key, capsys, state_dir=str(tmp_path))
    assert not again["changed"] and again["hmac"] == made["hmac"] and path.read_text() == key
    checked = run(api_key, capsys, state_dir=str(tmp_path), _ansible_check_mode=True)
    assert not checked["changed"] and checked["hmac"] == made["hmac"]


def test_a_given_key_changes_the_hmac_and_nothing_else(tmp_path, capsys):
    first = run(api_key, capsys, state_dir=str(tmp_path), mode="given", key="one-long-secret")
    second = run(api_key, capsys, state_dir=str(tmp_path), mode="given", key="another-secret")
    same = run(api_key, capsys, state_dir=str(tmp_path), mode="given", key="another-secret")
    assert first["hmac"] != second["hmac"] and second["changed"] and not same["changed"]
    assert "secret" not in json.dumps({**second, "invocation": None})


def test_a_key_that_others_can_read_is_mended(tmp_path, capsys):
    run(api_key, capsys, state_dir=str(tmp_path))
    (tmp_path / "key/api_key").chmod(0o644)
    assert run(api_key, capsys, state_dir=str(tmp_path))["changed"]
    assert stat.S_IMODE((tmp_path / "key/api_key").stat().st_mode) == 0o600


def test_no_key_at_all(tmp_path, capsys):
    run(api_key, capsys, state_dir=str(tmp_path))
    gone = run(api_key, capsys, state_dir=str(tmp_path), mode="none")
    assert gone["changed"] and gone["hmac"] == "" and not (tmp_path / "key/api_key").exists()


def test_the_lease_outlives_the_time_in_which_nothing_runs():
    """Between stop and start nobody renews it: the run holds it for the engine's grace, the wait for memory, and some more."""
    with open(os.path.join(ROOT, "roles/serve/tasks/replace.yml"), encoding="utf-8") as stream:
        tasks = yaml.safe_load(stream)
    (block,) = [number for number, task in enumerate(tasks) if "block" in task]
    held = tasks[block - 1]
    assert held["ansible.builtin.include_role"]["name"] == "sparkops.inference.lease"
    variables = {"__serve_spec": {"spec": {"stop_timeout": 60}}, "spark_plan": {"settings": {"memory_wait": 300}}}
    given = Templar(DataLoader(), variables=variables).template(trust_as_template(held["vars"]["__lease_seconds"]))
    assert int(given) > 60 + 300 + 120
    with open(os.path.join(ROOT, "roles/lease/tasks/main.yml"), encoding="utf-8") as stream:
        (module,) = [task["sparkops.inference.lease"] for task in yaml.safe_load(stream) if "sparkops.inference.lease" in task]
    seconds = Templar(DataLoader(), variables={"__lease_seconds": given, "omit": ""}).template(trust_as_template(module["seconds"]))
    assert int(seconds) == int(given)


def replace_tasks():
    with open(os.path.join(ROOT, "roles/serve/tasks/replace.yml"), encoding="utf-8") as stream:
        (block,) = [task for task in yaml.safe_load(stream) if "block" in task]
    return block


@pytest.mark.parametrize("checks", [None, {}, {"commands": [["a"]]}, {"commands": [["a"], ["b"]]}])
def test_the_lease_outlives_the_check_of_an_image(checks):
    """The limit is that of one command, and a profile may have several."""
    tasks = replace_tasks()["block"]
    (check,) = [number for number, task in enumerate(tasks) if (task.get("ansible.builtin.include_role") or {}).get("tasks_from") == "self_check.yml"]
    assert tasks[check - 1]["ansible.builtin.include_role"]["name"] == "sparkops.inference.lease"
    limit = yaml.safe_load(image_check.DOCUMENTATION)["options"]["timeout"]["default"]
    variables = {"spark_plan": {"image": {"self_check": checks}}}
    given = Templar(DataLoader(), variables=variables).template(trust_as_template(str(tasks[check - 1]["vars"]["__lease_seconds"])))
    assert int(given) == limit * len((checks or {}).get("commands", [])) + LEASE_SECONDS


@pytest.mark.parametrize("answer, fails", [({"held": True}, False), ({"held": False, "lease": {"owner": "carla@host"}}, True), ({"unreachable": True}, False),
                                           (None, False)])
def test_a_failed_run_stops_nothing_of_another_that_took_over(answer, fails):
    """Containers go by name. A head that does not answer keeps nobody from stopping."""
    rescue = replace_tasks()["rescue"]
    stop = next(number for number, task in enumerate(rescue) if "sparkops.inference.serve_rank" in task)
    asked, judged = rescue[0], rescue[1]
    assert "sparkops.inference.lease" in asked and asked["register"] == "__serve_still_held" and stop > 1
    # Without the last one the other hosts' rescue would end with it (seen with ansible-core 2.19).
    assert asked["failed_when"] is False and asked["ignore_unreachable"] and asked["any_errors_fatal"] is False
    head = {"__serve_still_held": answer} if answer else {}
    variables = {"spark_plan": {"head": "a", "deployment": "d"}, "hostvars": {"a": head}}
    templar = Templar(DataLoader(), variables=variables)
    templar.available_variables = {**variables, "__serve_holder": templar.template(trust_as_template(judged["vars"]["__serve_holder"]))}
    held = templar.template(trust_as_template("{{ " + judged["ansible.builtin.assert"]["that"] + " }}"))
    assert held is not fails
    if fails:
        assert "carla@host" in templar.template(trust_as_template(judged["ansible.builtin.assert"]["fail_msg"]))


@pytest.mark.parametrize("module, more", [
    (serve_proof, {"request": {}}), (serve_canary, {"canary": {"contains": "OK"}, "node": "a"}),
    (serve_warmup, {"shapes": {}, "max_model_len": 1, "max_num_seqs": 1}),
], ids=["proof", "canary", "warm-up"])
def test_the_requests_of_a_proof_keep_the_lease(module, more, tmp_path, capsys, monkeypatch):
    (tmp_path / "lease.json").write_text(json.dumps({**OTHER, "run_id": "me", "expires": time.time() + 1}))

    def slow(*dummy, **dummy2):
        until = time.monotonic() + 10
        while json.loads((tmp_path / "lease.json").read_text())["expires"] < time.time() + 60 and time.monotonic() < until:
            time.sleep(0.02)
        return ["late"] if module is serve_canary else real(*dummy, **dummy2)

    name = {serve_proof: "prove", serve_canary: "check_words", serve_warmup: "warm_up"}[module]
    real = getattr(module, name)
    monkeypatch.setattr(module, name, slow)
    run(module, capsys, state_dir=str(tmp_path), api_port=9, model="m", lease_run_id="me", **more)
    assert json.loads((tmp_path / "lease.json").read_text())["expires"] > time.time() + 60


def test_the_play_gives_each_of_these_its_run():
    found = []
    for name in ("proof", "canary"):
        with open(os.path.join(ROOT, f"roles/serve/tasks/{name}.yml"), encoding="utf-8") as stream:
            tasks = yaml.safe_load(stream)
        found += [arguments["lease_run_id"] for task in tasks for action, arguments in task.items() if action.startswith("sparkops.inference.serve_")]
    assert found == ["{{ __serve_lease_run_id }}"] * 4


def test_a_node_that_is_lost_while_evidence_is_collected_ends_no_other_hosts_rescue():
    """Ignored as unreachable, it still counts for any_errors_fatal (seen with ansible-core 2.19)."""
    with open(os.path.join(ROOT, "roles/collect/tasks/bundle.yml"), encoding="utf-8") as stream:
        task = yaml.safe_load(stream)[0]
    assert task["ignore_unreachable"] and task["any_errors_fatal"] is False


@pytest.mark.parametrize("hosts, check, refused", [(["a", "b"], False, False), (["a"], False, False), (["b"], False, True), (["b"], True, False)])
def test_no_play_acts_without_the_node_that_keeps_the_lease(hosts, check, refused):
    with open(os.path.join(ROOT, "roles/lease/tasks/main.yml"), encoding="utf-8") as stream:
        task = yaml.safe_load(stream)[0]
    templar = Templar(DataLoader(), variables={"spark_plan": {"head": "a"}, "ansible_play_hosts_all": hosts, "ansible_check_mode": check})
    asked, fine = (templar.template(trust_as_template("{{ " + text + " }}")) for text in (task["when"], task["ansible.builtin.assert"]["that"]))
    assert (asked and not fine) is refused


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_nobody_from_a_stop(tmp_path, capsys, monkeypatch, number):
    def full(*dummy):
        raise OSError(number, os.strerror(number))

    (tmp_path / "lease.json").write_text(json.dumps({**OTHER, "run_id": "me"}))
    monkeypatch.setattr(lease, "write_json", full)
    monkeypatch.setattr(_rank_state, "write_json", full)
    done = run(lease, capsys, state_dir=str(tmp_path), run_id="me", owner="alice")
    assert done["held"] and os.strerror(number) in done["notice"]
    _rank_state.renew_lease(str(tmp_path), "me")  # as a drain does
    # One that another run holds still stands.
    (tmp_path / "lease.json").write_text(json.dumps({**OTHER, "expires": time.time() + 60}))
    assert run(lease, capsys, state_dir=str(tmp_path), run_id="me", owner="alice")["held"] is False


def switch_tasks(name):
    with open(os.path.join(ROOT, f"roles/switch/tasks/{name}.yml"), encoding="utf-8") as stream:
        return yaml.safe_load(stream)


@pytest.mark.parametrize(
    "host, old_rank, leases",
    [("a", 0, ["/s/new", "/s/old"]), ("a", 1, ["/s/new"]), ("b", 0, ["/s/old"]), ("b", 1, []), ("a", None, ["/s/new"])],
)
def test_a_switch_holds_the_lease_of_each_deployment_on_its_own_head(host, old_rank, leases):
    (task,) = [task for task in switch_tasks("main") if "__switch_leases" in task.get("ansible.builtin.set_fact", {})]
    old = {"state_dir": "/s/old"} if old_rank is None else {"state_dir": "/s/old", "rank": old_rank}
    variables = {"inventory_hostname": host, "spark_plan": {"head": "a"}, "spark_node": {"state_dir": "/s/new"}, "__switch_old": old}
    templar = Templar(DataLoader(), variables=variables)
    templar.available_variables = {**variables, "__switch_heads_old": templar.template(trust_as_template(task["vars"]["__switch_heads_old"]))}
    assert templar.template(trust_as_template(task["ansible.builtin.set_fact"]["__switch_leases"])) == leases


def test_a_switch_holds_both_leases_before_it_stops_anything():
    """And a lease that is refused is no failed start: what answers that would stop a group of another run."""
    (outer,) = [task for task in switch_tasks("main") if "block" in task]
    first, second = outer["block"]
    assert first["ansible.builtin.include_tasks"] == "hold.yml" and "rescue" not in outer
    assert outer["always"][0]["sparkops.inference.lease"]["state"] == "released"
    assert second["block"][0]["ansible.builtin.include_tasks"] == "leave.yml" and second["rescue"][0]["ansible.builtin.include_tasks"] == "return.yml"
    held = switch_tasks("hold")[0]
    settings = {"serve_drain_timeout": 300, "serve_stop_grace": 60}
    seconds = Templar(DataLoader(), variables={"spark_plan": {"settings": settings}}).template(trust_as_template(held["sparkops.inference.lease"]["seconds"]))
    assert held["loop"].startswith("{{ __switch_leases") and int(seconds) >= 300 + 60 + LEASE_SECONDS
