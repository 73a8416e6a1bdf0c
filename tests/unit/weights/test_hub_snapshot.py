# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The module and its action plugin around the download job: what is said before anything begins, and what stays behind when it does not."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args
from weights_lab import COMMIT

from ansible_collections.sparkops.inference.plugins.action import hub_snapshot as action
from ansible_collections.sparkops.inference.plugins.module_utils import _unit
from ansible_collections.sparkops.inference.plugins.modules import hub_snapshot, weight_sync

LICENCE = {"name": "MIT", "url": "https://example.org/licence", "accept": True}
LINE = "licence of model (acme/tiny): MIT https://example.org/licence"


@pytest.fixture(name="call")
def fixture_call(tmp_path, monkeypatch, capsys):
    """The module on a virgin node without a service manager that starts anything."""
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(False, "", 0))
    monkeypatch.setattr(_unit, "available", lambda module: True)

    def refuse(*dummy, **more):
        raise _unit.UnitError("Failed to start transient service unit")

    monkeypatch.setattr(_unit, "start", refuse)

    def call(**options):
        artefact = {"name": "model", "repository": "acme/tiny", "revision": COMMIT, "directory": f"acme--tiny/{COMMIT}", "licence": LICENCE}
        arguments = {
            "artefacts": [artefact], "weights_root": str(tmp_path / "weights"), "state_dir": str(tmp_path / "state/d"), "state_root": str(tmp_path / "state"),
            "deployment": "d", "node": "spark-1", **options,
        }  # fmt: skip
        with patch_module_args(arguments), pytest.raises(SystemExit):
            hub_snapshot.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_licences_are_told_before_anything_is_begun(call, tmp_path):
    answer = call(tell_licences=True)
    assert answer["licences"] == [LINE] and not answer["running"] and list(tmp_path.iterdir()) == []
    assert "licences" not in call(tell_licences=False)


def test_no_secret_stays_when_its_job_did_not_begin(call, tmp_path):
    (tmp_path / "state/venv-hub" / hub_snapshot.hashlib.sha256(b"").hexdigest()[:16]).mkdir(parents=True)
    answer = call(token="hf_secretsecretsecret")
    assert answer["failed"] and "[weights.unit]" in answer["msg"]
    assert not (tmp_path / "state/d/jobs/weights/secret").exists()
    assert "hf_secretsecretsecret" not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("check", [True, False])
def test_whose_the_trees_are_is_noted_when_the_work_begins(call, tmp_path, check):
    (tmp_path / "state/venv-hub" / hub_snapshot.hashlib.sha256(b"").hexdigest()[:16]).mkdir(parents=True)
    call(_ansible_check_mode=check)
    staged = tmp_path / "state/d/staged.json"
    assert staged.exists() is not check
    if not check:
        assert json.loads(staged.read_text())["directories"] == [f"acme--tiny/{COMMIT}"]


def test_whose_the_trees_are_is_noted_of_complete_ones_and_by_a_worker(call, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub_snapshot.Snapshot, "look", lambda self: [{"name": "model", "complete": True}])
    assert not call()["changed"]
    assert json.loads((tmp_path / "state/d/staged.json").read_text())["directories"] == [f"acme--tiny/{COMMIT}"]
    monkeypatch.setattr(weight_sync.Sync, "look", lambda self: [{"name": "model", "complete": True}])
    arguments = {
        "artefacts": [{"name": "model", "repository": "acme/tiny", "revision": COMMIT, "directory": f"acme--tiny/{COMMIT}", "manifest": {}}],
        "weights_root": str(tmp_path / "weights"), "state_dir": str(tmp_path / "state/w"), "state_root": str(tmp_path / "state"), "deployment": "w",
        "node": "spark-2", "sources": [], "key": "/k", "known_hosts": "/h",
    }
    with patch_module_args(arguments), pytest.raises(SystemExit):
        weight_sync.main()
    assert not json.loads(capsys.readouterr().out)["changed"]
    assert json.loads((tmp_path / "state/w/staged.json").read_text())["directories"] == [f"acme--tiny/{COMMIT}"]


def test_the_controller_shows_them_and_goes_on(monkeypatch):
    shown, calls = [], []
    monkeypatch.setattr(action.display, "display", shown.append)
    plugin = object.__new__(action.ActionModule)
    plugin.call = lambda arguments, task_vars, patience=0: calls.append(dict(arguments)) or {"running": False}
    answer = plugin.prepare({"licences": [LINE]}, {"tell_licences": True, "node": "spark-1"}, {"inventory_hostname": "spark-1"})
    assert answer == {"running": False} and shown == [f"spark-1: {LINE}"]
    assert [one["tell_licences"] for one in calls] == [False]
