# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lease and the API key, as decisions and as whole modules."""

from __future__ import annotations

import json
import os
import stat
import time

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from ansible_collections.sparkops.inference.plugins.action import lease as lease_action
from ansible_collections.sparkops.inference.plugins.modules import api_key, lease
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
        module = yaml.safe_load(stream)[0]["sparkops.inference.lease"]
    seconds = Templar(DataLoader(), variables={"__lease_seconds": given, "omit": ""}).template(trust_as_template(module["seconds"]))
    assert int(seconds) == int(given)
