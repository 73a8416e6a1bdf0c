# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Proven deployments: what is kept, what comes back, and which one a rollback means."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from ansible_collections.sparkops.inference.plugins.filter import serve as filters
from ansible_collections.sparkops.inference.plugins.module_utils import _history
from ansible_collections.sparkops.inference.plugins.module_utils._rank_spec import labelled
from ansible_collections.sparkops.inference.plugins.modules import serve_history, serve_history_info
from run_module import run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
NODES = ["a", "b"]
ARTEFACTS = [{"repository": "acme/tiny", "revision": "0123456789abcdef"}]


def record(number, minute=0, image="sha256:1", nodes=("a", "b")):
    group = f"{number:012x}" + "0" * 52
    return {
        "format": 1, "deployment": "d", "profile": "p", "nodes": list(nodes), "proven_at": f"2026-01-01T00:{minute:02d}:00+00:00",
        "image": {"id": image, "identity": image}, "artefacts": ARTEFACTS, "settings": {}, "plan": {"deployment": "d"},
        "spec": {"name": "d-rank0", "labels": {"sparkops.group": group}},
    }


@pytest.fixture(name="state")
def fixture_state(tmp_path):
    (tmp_path / "container").mkdir()
    (tmp_path / "container" / "entry.py").write_text("old")
    return tmp_path


def tree(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file() and "history" not in path.parts}


def test_a_record_has_the_files_of_its_container_and_brings_them_back(state, capsys):
    kept = run(serve_history, capsys, state_dir=str(state), record=record(1))
    assert kept["id"] == f"{1:012x}"
    (state / "container" / "entry.py").write_text("new")
    (state / "files").mkdir()
    (state / "files" / "template.jinja").write_text("of the new one alone")
    run(serve_history, capsys, state_dir=str(state), record=record(2, 1))
    run(serve_history, capsys, state="restored", state_dir=str(state), id=kept["id"])
    (state / "next" / "rank.json").write_text("old")
    run(serve_history, capsys, state="installed", state_dir=str(state))
    found = tree(state)
    # What was proven last is still the other one: bringing files back proves nothing.
    assert json.loads(found.pop("last_good.json"))["id"] == f"{2:012x}"
    assert found == {"container/entry.py": "old", "rank.json": "old"} and not (state / "next").exists()


def test_what_is_only_staged_changes_nothing_of_what_boots(state, capsys):
    """A run may be killed between the staging and the stop: the old container has the old files mounted, its service the old rank.json."""
    (state / "rank.json").write_text("old")
    run(serve_history, capsys, state_dir=str(state), record=record(1))
    (state / "container" / "entry.py").write_text("newer")
    before = tree(state)
    run(serve_history, capsys, state="restored", state_dir=str(state), id=f"{1:012x}")
    assert {name: text for name, text in tree(state).items() if not name.startswith("next/")} == before
    assert (state / "next/container/entry.py").read_text() == "old"
    # Not whole yet, or asked in check mode: nothing is taken from what the rank has.
    assert run(serve_history, capsys, state="installed", state_dir=str(state))["failed"]
    (state / "next" / "rank.json").write_text("new")
    run(serve_history, capsys, state="installed", state_dir=str(state), _ansible_check_mode=True)
    assert (state / "container/entry.py").read_text() == "newer" and (state / "rank.json").read_text() == "old"


def test_a_play_puts_nothing_in_place_before_the_old_group_has_stopped():
    """What it writes before lies beside what the old group boots with; the rank's container is made of what was put in place."""
    folder = os.path.join(ROOT, "roles/serve/tasks")

    def read(name):
        with open(os.path.join(folder, name), encoding="utf-8") as stream:
            return yaml.safe_load(stream)

    tasks = read("replace.yml")
    (block,) = [task["block"] for task in tasks if "block" in task]
    steps = []
    for task in block:
        steps += [task["ansible.builtin.include_tasks"]] if "ansible.builtin.include_tasks" in task else []
        steps += [(arguments.get("state") or action) for action, arguments in task.items() if action.startswith("sparkops.inference.")]
    assert steps.index("sparkops.inference.serve_rank") < steps.index("installed") < steps.index("container.yml")
    assert [task["ansible.builtin.include_tasks"] for task in tasks if "ansible.builtin.include_tasks" in task] == ["admit.yml", "files.yml", "drain.yml"]
    (recorded,) = [task for task in read("files.yml") if task.get("ansible.builtin.include_tasks") == "record.yml"]
    places = [task.get("ansible.builtin.copy", task.get("ansible.builtin.file", {})) for task in read("own_files.yml")]
    assert recorded["vars"]["__serve_record_dir"] == "{{ __serve_next }}"
    assert all((place.get("dest") or place["path"]).startswith("{{ __serve_next }}/") for place in places) and len(places) == 4
    with open(os.path.join(ROOT, "roles/serve/vars/main.yml"), encoding="utf-8") as stream:
        assert yaml.safe_load(stream)["__serve_next"].endswith(f"/{_history.NEXT}")


def test_the_oldest_records_go_and_a_second_proof_makes_no_second_record(state, capsys):
    for number in range(3):
        run(serve_history, capsys, state_dir=str(state), record=record(number, number), keep=3)
    again = run(serve_history, capsys, state_dir=str(state), record=record(0, 30), keep=3)
    assert again["forgotten"] == []
    assert run(serve_history, capsys, state_dir=str(state), record=record(3, 31), keep=3)["forgotten"] == [f"{1:012x}"]
    assert [one["id"] for one in _history.records(str(state))] == [f"{number:012x}" for number in (3, 0, 2)]


def test_a_loss_of_power_while_a_record_is_renewed_leaves_one(state, capsys, monkeypatch):
    run(serve_history, capsys, state_dir=str(state), record=record(1, 0))

    def lost(*dummy):
        raise KeyboardInterrupt

    for place, name in ((_history.os, "rename"), (_history, "write_json")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lost)
            with contextlib.suppress(KeyboardInterrupt):
                _history.keep(str(state), {**record(1, 30), "id": f"{1:012x}"}, 10)
        named = json.loads((state / "last_good.json").read_text())["id"]
        assert [one["id"] for one in _history.records(str(state))] == [named] and (state / "history" / named / "container/entry.py").exists()


def test_a_damaged_record_is_made_anew(state, capsys):
    run(serve_history, capsys, state_dir=str(state), record=record(1, 0))
    (state / "history" / f"{1:012x}" / "record.json").write_text("{")
    run(serve_history, capsys, state_dir=str(state), record=record(1, 30))
    assert [one["proven_at"] for one in _history.records(str(state))] == [record(1, 30)["proven_at"]]


def test_check_mode_writes_nothing_and_a_strange_id_reads_nothing(state, capsys):
    run(serve_history, capsys, state_dir=str(state), record=record(1), _ansible_check_mode=True)
    assert not (state / "history").exists() and not (state / "last_good.json").exists()
    assert _history.read(str(state), "../../etc") is None
    assert run(serve_history, capsys, state="restored", state_dir=str(state), id="000000000009")["failed"]


def test_a_damaged_record_is_left_out(state, capsys):
    run(serve_history, capsys, state_dir=str(state), record=record(1))
    (state / "history" / f"{1:012x}" / "record.json").write_text("{")
    assert _history.records(str(state)) == []


def test_the_list_says_which_images_are_still_there(state, capsys, monkeypatch):
    class Api:
        def __init__(self, socket, timeout):
            pass

        def inspect_image(self, name):
            return {"Id": name} if name == "sha256:1" else None

        def inspect_container(self, name):
            labels = {"sparkops.group": f"{2:012x}" + "0" * 52}
            state = {"Status": "running", "Running": True, "ExitCode": 0, "OOMKilled": False, "StartedAt": "", "FinishedAt": ""}
            return {"Id": "c", "State": state, "Config": {"Labels": labels}}

    monkeypatch.setattr(serve_history_info, "DockerApi", Api)
    run(serve_history, capsys, state_dir=str(state), record=record(1, 1))
    run(serve_history, capsys, state_dir=str(state), record=record(2, 2, image="sha256:2"))
    found = run(serve_history_info, capsys, state_dir=str(state), container="d-rank0", id=f"{1:012x}")
    assert [(one["id"][-1], one["image_present"]) for one in found["records"]] == [("2", False), ("1", True)]
    assert found["last_good"] == found["running"] == f"{2:012x}"
    assert found["record"]["plan"] == {"deployment": "d"} and "plan" not in found["records"][0]


PLAN = {"deployment": "d", "profile": "p", "nodes": NODES, "head": "a", "settings": {"serve_rollback": "never"}}


def brief(number, minute=0, present=True, nodes=("a", "b")):
    full = {**record(number, minute, nodes=nodes), "id": f"{number:012x}"}
    return {**_history.brief(full), "image_present": present}


def histories(last_good="", running="", **changes):
    both = [brief(2, 2), brief(1, 1)]
    return {name: {"__rollback_history": {"records": changes.get(name, both), "last_good": last_good, "running": running}} for name in NODES}


@pytest.mark.parametrize(
    "last_good, running, wanted, choice",
    [
        (2, 0, None, 2),   # a failed upgrade: what was proven last
        (2, 9, None, 2),   # something unproven runs
        (2, 2, None, 1),   # what was proven last runs: the one before
        (2, 2, 1, 1),
        (2, 0, 1, 1),
    ],
)
def test_which_record_a_rollback_means(last_good, running, wanted, choice):
    names = [f"{number:012x}" if number else "" for number in (last_good, running)]
    found = filters.rollback_choice(histories(*names), PLAN, f"{wanted:012x}" if wanted else None)
    assert found["id"] == f"{choice:012x}" and not found["refusal"]
    assert "acme/tiny at 0123456789ab" in found["says"]


@pytest.mark.parametrize(
    "given, wanted, parts",
    [
        (histories(a=[], b=[]), None, ("rollback.none", "found none")),
        (histories(last_good=f"{2:012x}"), "00000000000f", ("rollback.none", "00000000000f")),
        (histories(running=f"{1:012x}", a=[brief(1)], b=[brief(1)]), None, ("rollback.none", "of which 000000000001 runs")),
        (histories(last_good=f"{2:012x}", b=[brief(1)]), None, ("rollback.image", "b: no record")),
        (histories(last_good=f"{2:012x}", b=[brief(2, present=False)]), None, ("rollback.image", "b: no image")),
        (histories(last_good=f"{2:012x}", a=[brief(2, nodes=("a", "c"))]), None, ("rollback.nodes", "a, c")),
    ],
)
def test_what_not_every_rank_can_return_to_is_refused(given, wanted, parts):
    found = filters.rollback_choice(given, PLAN, wanted)
    assert found["id"] == "" and all(part in found["refusal"] for part in parts), found


def test_a_prediction_names_what_runs_and_what_would_take_its_place():
    kept = {**record(1), "id": f"{1:012x}", "profile": "tiny", "image": {"id": "x", "identity": "sha256:feed", "reference": "acme/vllm:1"}}
    hosts = {name: {**host, "__serve_recorded": {"record": kept}} for name, host in histories(running=f"{2:012x}").items()}
    hosts["b"]["__rollback_history"]["running"] = ""
    first, second = (filters.rollback_prediction(hosts, PLAN, name) for name in NODES)
    assert first.startswith("rank 0 of d runs 000000000002; it would be replaced, with the whole group, by that of record 000000000001:")
    assert "profile tiny, image sha256:feed, which is there, acme/tiny at 0123456789abcdef" in first and "rank 1 of d does not run;" in second


@pytest.mark.parametrize("check, rank, runs", [(True, 0, ["return.yml", "predict.yml"]), (False, "1", ["return.yml", "replace.yml"]), (True, -1, [])])
def test_a_rollback_predicts_in_check_mode_and_else_replaces(check, rank, runs):
    def read(path):
        with open(os.path.join(ROOT, "roles", path), encoding="utf-8") as stream:
            return yaml.safe_load(stream)

    (block,) = [task["block"] for task in read("rollback/tasks/main.yml") if "block" in task]
    templar = Templar(DataLoader(), variables={"ansible_check_mode": check, "spark_rank": rank})
    found = []
    for task in block:
        name = task.get("ansible.builtin.include_tasks") or task.get("ansible.builtin.include_role", {}).get("tasks_from")
        when = [task["when"]] if isinstance(task.get("when"), str) else task.get("when", [])
        if name and all(templar.evaluate_conditional(trust_as_template(str(one))) for one in when):
            found.append(name)
    assert found == runs
    # What a real run refuses before it stops anything is refused in the same words.
    assert read("rollback/tasks/predict.yml")[0]["ansible.builtin.include_role"]["tasks_from"] == "admit.yml"
    assert read("serve/tasks/replace.yml")[0]["ansible.builtin.include_tasks"] == "admit.yml"


def test_the_history_names_what_a_rank_lacks():
    lines = filters.history_lines(histories(last_good=f"{2:012x}", running=f"{1:012x}", b=[brief(2, present=False)]), PLAN)
    assert "(last good, b has no image)" in lines[0] and "(running, b has no record)" in lines[1]
    assert "nothing of d was proven" in filters.history_lines(histories(a=[], b=[]), PLAN)[0]


def test_a_history_under_a_limit_says_what_it_did_not_read():
    seen = histories(last_good=f"{2:012x}")
    assert "b was not read" in filters.history_lines({**seen, "b": {}}, PLAN)[0]
    assert filters.history_lines({**seen, "a": {}}, PLAN) == ["a was not read: the list is that of rank 0"]


def started(last_good=1, wanted=2, stopped=tuple(NODES)):
    spec = {"labels": {"sparkops.group": f"{wanted:012x}" + "0" * 52}}
    hosts = {}
    for name in NODES:
        info = {"last_good": brief(last_good)} if last_good else {"last_good": {}}
        hosts[name] = {"__serve_rank_info": {"rank": info}, "__serve_spec": {"spec": spec}}
        if name in stopped:
            hosts[name]["__serve_stopped"] = {"tail": ["last words"], "log": "/l"}
    return hosts


AUTO = {**PLAN, "settings": {"serve_rollback": "auto"}}


def test_a_failed_upgrade_says_how_to_go_back_and_does_it_when_asked():
    assert "rollback.yml returns to 000000000001" in filters.serve_failure(started(), PLAN, "a")
    assert filters.serve_way_back(started(), PLAN) == {}
    assert filters.serve_way_back(started(), AUTO)["id"] == f"{1:012x}"


@pytest.mark.parametrize(
    "hosts, restoring",
    [
        (started(last_good=2), ""),           # what failed is what was proven last: the same again is no way back
        (started(last_good=0), ""),           # nothing was proven
        (started(stopped=["a"]), ""),         # b may still run
        (started(), f"{1:012x}"),             # the way back failed itself
    ],
)
def test_there_is_no_way_back_onto_itself_or_beside_a_rank_that_may_run(hosts, restoring):
    assert filters.serve_way_back(hosts, AUTO, restoring) == {}


def test_a_returned_plan_is_the_recorded_one_but_for_how_this_run_works():
    settings = {"serve_port": 1, "serve_drain_timeout": 5, "new_option": 2}
    now = {"deployment": "d", "new_part": 1, "settings": settings, "node_settings": {"a": {"new_option": 3}}}
    then = {"deployment": "d", "settings": {"serve_port": 7, "serve_drain_timeout": 60}, "node_settings": {"a": {"weights_root": "/w"}}}
    plan = filters.returned_plan({"plan": then}, now)
    assert plan["settings"] == {"serve_port": 7, "serve_drain_timeout": 5, "new_option": 2}
    assert plan["node_settings"] == {"a": {"new_option": 3, "weights_root": "/w"}} and plan["new_part"] == 1


def test_a_returned_spec_has_its_own_labels_and_with_another_key_others():
    specs = labelled("d", [{"name": "d-rank0", "api_key_hmac": "h"}, {"name": "d-rank1", "api_key_hmac": None}])
    hosts = {name: {"__serve_recorded": {"record": {"spec": spec}}} for name, spec in zip(NODES, specs)}
    hosts["a"]["__serve_key"] = {"hmac": "h"}
    assert [filters.returned_spec(hosts, PLAN, name) for name in NODES] == specs
    hosts["a"]["__serve_key"] = {"hmac": "i"}
    changed = [filters.returned_spec(hosts, PLAN, name) for name in NODES]
    assert changed[0]["labels"]["sparkops.spec"] != specs[0]["labels"]["sparkops.spec"]
    assert changed[1]["labels"]["sparkops.spec"] == specs[1]["labels"]["sparkops.spec"]
    assert changed[0]["labels"]["sparkops.group"] == changed[1]["labels"]["sparkops.group"] != specs[0]["labels"]["sparkops.group"]
