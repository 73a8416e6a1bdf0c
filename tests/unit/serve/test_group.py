# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The state of a group, the watch over a start, and what the API's answers mean."""

from __future__ import annotations

import copy
import dataclasses
import http.server
import json
import os
import threading
from types import SimpleNamespace

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from ansible_collections.sparkops.inference.plugins.action import serve_health
from ansible_collections.sparkops.inference.plugins.filter import serve as filters
from ansible_collections.sparkops.inference.plugins.module_utils import _engine_api, _group_channel, _group_state, _option_table, _rank_state
from ansible_collections.sparkops.inference.plugins.modules import rank_info
from ansible_collections.sparkops.inference.plugins.modules import serve_health as serve_health_module
from ansible_collections.sparkops.inference.plugins.modules import serve_proof

ROLE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))), "roles/serve")
NODES = ["a", "b"]
WANTED = {"a": "sa", "b": "sb"}
SERVING_API = {"health": 200, "proof": {"ok": True, "verdict": "ok"}}


def rank(spec, running=True, status="running", code=0, group="g", oom=False):
    return {"container": {"running": running, "status": status, "exit_code": code, "spec": spec, "group": group, "oom_killed": oom}}


def infos(**changes):
    return {**{"a": rank("sa"), "b": rank("sb")}, **changes}


@pytest.mark.parametrize(
    "found, api, state",
    [
        ({"a": {"container": None}, "b": {"container": None}}, None, "absent"),
        ({"a": {"container": None}, "b": None}, None, "half"),
        (infos(b={"container": None}), SERVING_API, "half"),
        (infos(a={"container": None}), None, "half"),
        (infos(b=rank("sb", running=False, status="exited", code=0)), SERVING_API, "half"),
        (infos(b=None), SERVING_API, "half"),
        (infos(b=rank("other")), SERVING_API, "stale"),
        (infos(b=rank("sb", group="older")), SERVING_API, "stale"),
        (infos(), {"health": 503}, "loading"),
        (infos(), None, "loading"),
        (infos(), {"health": 200, "proof": {"ok": False, "verdict": "no_answer", "detail": "timed out"}}, "wedged"),
        (infos(), SERVING_API, "serving"),
        ({"a": rank("sa", False, "exited", 1), "b": rank("sb", False, "exited", 0)}, None, "absent"),
    ],
)
def test_group_state(found, api, state):
    result = _group_state.group_state(NODES, found, WANTED, api)
    assert result["state"] == state
    assert bool(result["reasons"]) == (state != "serving")
    assert [entry["node"] for entry in result["ranks"]] == NODES


def test_a_dead_worker_is_told_although_health_says_200():
    result = _group_state.group_state(NODES, infos(b=rank("sb", False, "exited", 137)), WANTED, SERVING_API)
    assert "rank 1 (b): exited with code 137" in result["reasons"]
    assert any("200" in reason for reason in result["reasons"][1:])


def test_unknown_wanted_spec_is_not_stale():
    assert _group_state.group_state(NODES, infos(), {"a": "", "b": ""}, SERVING_API)["state"] == "serving"


def answer(running=True, wanted="1", started="1", last_progress=100.0, service="alive", code=0, now=100.0, **more):
    return {
        "service": service, "time": now, "age": 0, "wanted": {"id": wanted, "action": "run"}, "started_id": started,
        "container": {"running": running, "status": "running" if running else "exited", "exit_code": code, "oom_killed": False},
        "progress": {"last_progress": last_progress, "last_line": "x"}, "memory": {"available_kib": 1048576}, "tail": ["last"], **more,
    }


@pytest.mark.parametrize("code", [0, 1, 137])
def test_an_ended_rank_is_dead_whatever_its_code(code):
    verdict = _group_channel.StartWatch(420).judge({"0": answer(), "1": answer(running=False, code=code)}, 200, 100.0)
    assert (verdict["verdict"], verdict["rank"]) == ("dead", "1")
    assert str(code) in verdict["reason"]


def test_a_rank_that_is_about_to_start_is_not_dead():
    assert _group_channel.StartWatch(420).judge({"0": answer(running=False, started="0")}, 0, 100.0)["verdict"] == "waiting"


def test_one_lost_answer_is_no_verdict_four_are():
    watch = _group_channel.StartWatch(420)
    lost = {"service": "unreachable", "error": "No route to host", "container": None, "tail": []}
    verdicts = [watch.judge({"0": answer(), "1": lost}, 0, 100.0)["verdict"] for dummy in range(4)]
    assert verdicts == ["waiting", "waiting", "waiting", "unreachable"]
    assert _group_channel.StartWatch(420).judge({"0": answer(), "1": lost}, 0, 100.0)["verdict"] == "waiting"


def test_a_slice_does_not_end_before_a_silent_rank_is_judged(monkeypatch):
    """As of a node whose kernel takes connections and whose sshd says nothing any more: each poll costs the connect timeout."""
    clock = [0.0]

    def ask(*dummy):
        clock[0] += 5
        return {"ranks": {"0": answer(), "1": {"service": "unreachable", "error": "timed out"}}, "error": "rank 1: timed out"}

    monkeypatch.setattr(serve_health_module, "ask_group", ask)
    monkeypatch.setattr(serve_health_module, "call", lambda *dummy, **more: _engine_api.Answer(0, None, 0.0))
    monkeypatch.setattr(serve_health_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(serve_health_module.time, "sleep", lambda seconds: None)
    params = {"state_dir": "/nowhere", "program": "p", "api_port": 1, "slice": 10, "stall_timeout": 420, "tail": 40}
    found = serve_health_module.wait(SimpleNamespace(params=params, run_command=None))
    assert found["verdict"] == "unreachable" and found["rank"] == "1" and clock[0] == 20


def ended_by_guard(node_time=100.0, report=None, **more):
    """A rank that has ended, as its own heartbeat of this moment tells it."""
    return {**answer(running=False, code=137, now=node_time), "guard": {"tripped": report}, **more}


def guard_report(at, rank, name="", low="2.00", **more):
    growing = [{"name": name, "pid": 7, "grown": 5 << 30}] if name else []
    return {"at": at, "rank": rank, "reason": f"memory guard while loading: MemAvailable below {low} GiB", "growing": growing, **more}


def test_the_guards_verdict_stands_before_the_ends_that_it_caused():
    tripped = guard_report(99.0, 1, "hog")
    repeated = {name: value for name, value in {**tripped, "reason": "rank 1: " + tripped["reason"]}.items() if name != "growing"}
    head, worker = ended_by_guard(report=repeated), ended_by_guard(report=tripped)
    verdict = _group_channel.StartWatch(420).judge({"0": head, "1": worker}, 0, 100.0)
    assert verdict["verdict"] == "guard" and verdict["rank"] == "1"
    assert verdict["reason"] == "rank 1: memory guard while loading: MemAvailable below 2.00 GiB; fastest growing: hog (7) by 5.0 GiB"
    assert _group_channel.phase_of(worker) == "stopped by the memory guard"


def test_what_rank_0_was_told_counts_when_the_worker_says_nothing_any_more():
    head = ended_by_guard(report={**guard_report(99.0, 1), "reason": "rank 1: memory guard while loading: low"})
    lost = {"service": "unreachable", "error": "No route to host", "container": None, "tail": []}
    watch = _group_channel.StartWatch(420)
    verdicts = [watch.judge({"0": {**head, "time": now}, "1": lost}, 0, now) for now in (100.0, 101.0, 102.0, 103.0)]
    assert [verdict["verdict"] for verdict in verdicts] == ["waiting", "waiting", "waiting", "guard"]
    assert verdicts[-1]["rank"] == "1" and verdicts[-1]["reason"] == "rank 1: memory guard while loading: low"


@pytest.mark.parametrize(
    ("ahead", "moments", "first"),
    [
        ((0.0, 0.0), (98.5, 98.0), "1"),
        ((0.0, 0.0), (98.0, 98.5), "0"),
        # The worker's clock is 40 s ahead, or behind: its moment is that of its own clock.
        ((0.0, 40.0), (98.5, 138.0), "1"),
        ((0.0, -40.0), (98.0, 58.5), "0"),
    ],
)
def test_of_two_guards_the_one_that_acted_first_is_named_first(ahead, moments, first):
    names = ["engine", "hog"]
    ranks = {str(rank): ended_by_guard(100.0 + ahead[rank], guard_report(moments[rank], rank, names[rank])) for rank in (0, 1)}
    verdict = _group_channel.StartWatch(420).judge(ranks, 0, 100.0)
    assert (verdict["verdict"], verdict["rank"]) == ("guard", first)
    one, other = int(first), 1 - int(first)
    assert verdict["reason"].startswith(f"rank {one}: memory guard") and verdict["reason"].count("rank ") == 2
    assert verdict["reason"].index(names[one]) < verdict["reason"].index(f"after that rank {other}: ") < verdict["reason"].index(names[other])


def test_the_first_guard_is_named_only_when_every_rank_has_had_its_say():
    """The worker's guard was first, but its heartbeat of that second is older; rank 0's tells at once."""
    watch = _group_channel.StartWatch(420)
    head = guard_report(100.3, 0, "engine")
    early = {**answer(now=99.9), "age": 0.6, "guard": {"tripped": None}}
    assert watch.judge({"0": ended_by_guard(100.5, head), "1": early}, 0, 100.5)["verdict"] == "waiting"
    # The report comes in two parts: who grew is found out last.
    half = {name: value for name, value in guard_report(100.0, 1).items() if name != "growing"}
    assert watch.judge({"0": ended_by_guard(101.5, head), "1": ended_by_guard(101.5, half)}, 0, 101.5)["verdict"] == "waiting"
    verdict = watch.judge({"0": ended_by_guard(102.5, head), "1": ended_by_guard(102.5, guard_report(100.0, 1, "hog"))}, 0, 102.5)
    assert verdict["rank"] == "1" and "hog" in verdict["reason"].partition(";")[2].partition(";")[0]


def test_progress_on_any_rank_is_no_stall():
    watch = _group_channel.StartWatch(420)
    old, fresh = answer(last_progress=0.0, now=1000.0), answer(last_progress=990.0, now=1000.0)
    assert watch.judge({"0": old, "1": fresh}, 0, 1000.0)["verdict"] == "waiting"
    assert watch.judge({"0": old, "1": old}, 0, 1000.0)["verdict"] == "stalled"


def test_clocks_that_differ_between_nodes_do_not_look_like_a_stall():
    behind = answer(last_progress=10.0, now=20.0)
    assert _group_channel.StartWatch(420).judge({"0": behind}, 0, 10000.0)["verdict"] == "waiting"


def test_healthy():
    assert _group_channel.StartWatch(420).judge({"0": answer(), "1": answer()}, 200, 100.0)["verdict"] == "healthy"


def test_ask_group_survives_a_broken_program():
    result = _group_channel.ask_group(lambda command: (1, "", "Traceback: boom"), "python3", "p.py", "group-state", "/d")
    assert result["ranks"] == {} and "boom" in result["error"]


def test_failure_text_has_the_tail_of_every_rank():
    verdict = {"reason": "rank 1 ended", "ranks": {"0": {"phase": "loading", "tail": ["zero"]}, "1": {"phase": "exited", "tail": ["one"], "error": "x"}}}
    text = serve_health.failure_text(verdict, 12, NODES)
    assert "zero" in text and "one" in text and "rank 1 (b): exited: x" in text and "rank 1 ended" in text


def test_progress_line():
    assert serve_health.progress_line({"1": {"phase": "loading", "available_kib": 1048576}, "0": {"phase": "loading"}}, 12.3) == (
        "serve 12 s | rank 0 loading | rank 1 loading, 1.0 GiB available"
    )


OK = {"choices": [{"message": {"content": "323"}, "finish_reason": "stop"}], "id": "17323"}


@pytest.mark.parametrize(
    "status, document, key, expected, verdict",
    [
        (200, OK, False, "", "ok"),
        (200, OK, False, "323", "ok"),
        (200, OK, False, "324", "wrong_answer"),
        (200, {"choices": [{"message": {"content": "", "reasoning": "hm"}}]}, False, "", "ok"),
        (200, {"choices": [{"text": "hm"}]}, False, "", "ok"),
        (200, {"choices": [{"message": {"content": "  "}}], "id": "323"}, False, "323", "empty"),
        (200, {"error": "boom"}, False, "", "empty"),
        (200, "<html>", False, "", "empty"),
        (200, None, False, "", "empty"),
        (401, {}, True, "", "key_wrong"),
        (401, {}, False, "", "key_wanted"),
        (404, {}, False, "", "wrong_model"),
        (500, {"error": {"message": "EngineDeadError"}}, False, "", "error"),
        (0, None, False, "", "no_answer"),
    ],
)
def test_only_text_counts(status, document, key, expected, verdict):
    proof = _engine_api.judge_completion(_engine_api.Answer(status, document, 0.1, "refused"), key, expected)
    assert proof.verdict == verdict and proof.ok == (verdict == "ok")
    assert proof.ok or proof.detail


class Engine(http.server.BaseHTTPRequestHandler):
    models = ["tiny"]
    seen: list = []

    def log_message(self, *dummy):
        return

    def reply(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({"data": [{"id": name} for name in self.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        self.reply(OK)


@pytest.fixture(name="engine_port")
def fixture_engine_port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Engine.seen.clear()
    yield server.server_port
    server.shutdown()


def test_prove_asks_the_right_model_with_the_key(engine_port):
    proof = _engine_api.prove("127.0.0.1", engine_port, "tiny", {"max_tokens": 3}, key="k")
    assert proof.ok and Engine.seen == [("/v1/chat/completions", "Bearer k", {"model": "tiny", "max_tokens": 3})]


def test_prove_notices_a_foreign_service_on_the_port(engine_port):
    proof = _engine_api.prove("127.0.0.1", engine_port, "mine", {})
    assert proof.verdict == "wrong_model" and "tiny" in proof.detail and Engine.seen == []


@pytest.mark.parametrize(
    "tokens, running, asked, verdict",
    [(400, 3, 32, "busy"), (32, 3, 32, "no_answer"), (0, 3, 32, "no_answer"), (400, 0, 32, "no_answer"), (400, 3, 0, "no_answer")],
    ids=["busy", "our own tokens", "frozen", "nobody asks", "unbounded"],
)
def test_a_long_queue_is_no_wedged_group(tokens, running, asked, verdict):
    missed = _engine_api.Proof(False, "no_answer", "", 120.0, "timed out")
    found = rank_info.judged(missed, {rank_info.GENERATED: 1000}, {rank_info.GENERATED: 1000 + tokens, _engine_api.RUNNING: running}, asked)
    assert (found.verdict, found.ok) == (verdict, verdict == "busy")
    state = _group_state.group_state(NODES, infos(), WANTED, {"health": 200, "proof": dataclasses.asdict(found)})
    assert state["state"] == ("serving" if found.ok else "wedged") and state["reasons"]
    empty = _engine_api.Proof(False, "empty", "", 1.0)
    assert rank_info.judged(empty, {}, {rank_info.GENERATED: 900, _engine_api.RUNNING: 1}, 32) is empty


def test_the_look_at_a_rank_counts_the_tokens_of_others(tmp_path, monkeypatch):
    values = [1000, 1500]

    def call(address, port, method, path, **more):
        text = f"{rank_info.GENERATED} {values.pop(0)}\n{_engine_api.RUNNING} 2\n" if path == "/metrics" else None
        return _engine_api.Answer(200, text, 0.0)

    monkeypatch.setattr(rank_info, "call", call)
    monkeypatch.setattr(rank_info, "prove", lambda *dummy, **more: _engine_api.Proof(False, "no_answer", "", 120.0))
    params = {"state_dir": str(tmp_path), "api_port": 1, "model": "m", "request": {"max_tokens": 32}, "completion_timeout": 120, "open_paths": False}
    assert rank_info.ask_api(params, "127.0.0.1")["proof"]["verdict"] == "busy" and not values


def test_prove_says_when_nobody_answers():
    assert _engine_api.prove("127.0.0.1", 1, "tiny", {}, timeout=2).verdict == "no_answer"


PLAN = {"deployment": "lab_tiny", "profile": "lab_tiny", "nodes": NODES, "head": "a", "ranks": 2, "addresses": {"a": "1.1.1.1", "b": "1.1.1.2"},
        "api": {"port": 8888, "key": "generated"}, "served_model_name": "tiny",
        "artefacts": [{"name": "model", "directory": "o--m/r", "required": ["config.json"]}],
        "timeouts": {"ready": 600, "stall": 300, "completion": 120}, "proof": {"messages": [], "parameters": {"max_tokens": 8}},
        "settings": {name: option.get("default") for name, option in _option_table.TABLE.items()}}
PLAN["settings"]["status_settings"] = False
SPEC = {"name": "lab_tiny-rank0", "labels": {"sparkops.spec": "sa", "sparkops.group": "g"}, "stop_timeout": 60,
        "mounts": [{"source": "/w/o--m/r", "target": "/model"}, {"source": "/s/container", "target": "/sparkops"}]}


def hostvars():
    node = {
        "user": {"name": "alice"}, "docker": {"socket": "/s"}, "key": {"path": "/k"}, "known_hosts": {"path": "/h"},
        "state_dir": "/var/lib/sparkops/lab_tiny", "weights_root": "/w",
    }
    head = {**rank("sa"), "api": SERVING_API, "recorded": {"spec": "sa"}, "heartbeat_age": 0.5}
    return {
        "a": {"spark_plan": PLAN, "__serve_rank_info": {"rank": head}, "spark_node": node, "__serve_spec": {"spec": SPEC}},
        "b": {"spark_plan": PLAN, "__serve_rank_info": {"rank": {**rank("sb"), "recorded": {"spec": "sb"}, "heartbeat_age": 0.5}},
              "spark_node": {**node, "user": {"name": "bob"}}},
    }


def test_decision_leaves_a_serving_group_alone_unless_told():
    assert filters.serve_decision(hostvars(), PLAN)["replace"] is False
    assert filters.serve_decision(hostvars(), PLAN, restart=True)["replace"] is True
    broken = copy.deepcopy(hostvars())
    broken["a"]["__serve_spec"]["spec"]["labels"]["sparkops.spec"] = "new"
    assert filters.serve_decision(broken, PLAN) == {**filters.serve_state(broken, PLAN), "replace": True}


def mends_the_service(**more):
    """Whether a run that leaves the group alone goes to the task file of the rank service."""
    with open(os.path.join(ROLE, "tasks/main.yml"), encoding="utf-8") as stream:
        (block,) = [task["block"] for task in yaml.safe_load(stream) if "block" in task]
    (task,) = [task for task in block if task.get("ansible.builtin.include_tasks") == "service.yml"]
    with open(os.path.join(ROLE, "vars/main.yml"), encoding="utf-8") as stream:
        gone = yaml.safe_load(stream)["__serve_service_gone"]
    variables = {"__serve_decision": {"replace": False}, "spark_rank": 1, "__serve_program_stale": [], "__serve_service_gone": trust_as_template(gone),
                 "__serve_rank_info": {"rank": {"heartbeat_age": 0.4}}, **more}
    templar = Templar(DataLoader(), variables=variables)
    return all(templar.evaluate_conditional(trust_as_template(str(one))) for one in task["when"])


def test_a_run_that_leaves_the_group_alone_mends_its_rank_service():
    assert not mends_the_service()
    assert mends_the_service(__serve_rank_info={"rank": {"heartbeat_age": 60.0}}) and mends_the_service(__serve_rank_info={"rank": {"heartbeat_age": None}})
    assert mends_the_service(__serve_program_stale=["rank_node.py"])
    assert not mends_the_service(__serve_program_stale=["rank_node.py"], __serve_decision={"replace": True})
    assert not mends_the_service(spark_rank=-1, __serve_rank_info={"skipped": True})


@pytest.mark.parametrize("stale, unit, changed", [([], False, False), (["rank_node.py"], False, True), ([], True, True)])
def test_new_code_runs_for_every_deployment_of_the_node(stale, unit, changed):
    with open(os.path.join(ROLE, "tasks/service.yml"), encoding="utf-8") as stream:
        tasks = {task.get("register") or task["name"]: task for task in yaml.safe_load(stream)}
    with open(os.path.join(ROLE, "vars/main.yml"), encoding="utf-8") as stream:
        decided = yaml.safe_load(stream)["__serve_service_changed"]
    listed = ["sparkops-rank@lab_a.service loaded active running Rank of the sparkops deployment lab_a on this node",
              "sparkops-rank@lab-b.service loaded active running Rank of the sparkops deployment lab-b on this node"]
    variables = {"__serve_unit": "sparkops-rank@lab_a.service", "__serve_program_stale": stale, "__serve_unit_installed": {"changed": unit}}
    templar = Templar(DataLoader(), variables=variables)
    variables["__serve_service_changed"] = templar.template(trust_as_template(decided))
    templar.available_variables = variables
    asked = tasks["__serve_others"]
    assert templar.evaluate_conditional(trust_as_template(asked["when"])) is changed
    assert asked["ansible.builtin.command"]["argv"][-1] == "sparkops-rank@*.service" and asked["check_mode"] is False
    templar.available_variables = {**variables, "__serve_others": {"stdout_lines": listed} if changed else {"skipped": True}}
    own, others = tasks["service | Run it, now and at boot"], tasks["service | Run the new code for other deployments too"]
    assert templar.template(trust_as_template(own["ansible.builtin.systemd_service"]["state"])) == ("restarted" if changed else "started")
    assert templar.template(trust_as_template(others["loop"])) == (["sparkops-rank@lab-b.service"] if changed else [])
    assert others["ansible.builtin.systemd_service"]["state"] == "restarted"


def test_status_names_a_rank_whose_service_is_silent():
    found = hostvars()
    found["b"]["__serve_rank_info"]["rank"]["heartbeat_age"] = 75.0
    lines = filters.status_text(found, PLAN).splitlines()
    assert [number for number, line in enumerate(lines) if "service is silent" in line] == [3] and lines[2].startswith("  rank 1 (b)")


def test_rank_record_names_all_peers_with_their_accounts():
    record = filters.rank_record(hostvars(), PLAN, "a")
    assert record["peers"] == [{"rank": 0, "address": "1.1.1.1", "user": "alice"}, {"rank": 1, "address": "1.1.1.2", "user": "bob"}]
    assert record["rank"] == 0 and record["head_address"] == "1.1.1.1" and record["spec"] == "sa"


def test_rank_record_has_the_options_of_the_service():
    record = filters.rank_record(hostvars(), PLAN, "a")
    assert record["mounts"] == ["/s/container", "/w/o--m/r"]
    assert record["artefacts"] == [{"name": "model", "path": "/w/o--m/r", "required": ["config.json"]}]
    assert record["boot"] is True and record["watch"] is None and record["restart"] == {"limit": 5, "window": 3600, "delay": 10}
    assert record["guard"] == {"loading": {"floor": "2 GiB"}, "serving": None, "samples": 2, "interval": 0.5}
    plan = {**PLAN, "settings": {**PLAN["settings"], "serve_watch": True, "memory_guard_loading": False, "memory_guard_serving": True}}
    record = filters.rank_record(hostvars(), plan, "a")
    assert record["watch"] == {"interval": 10, "samples": 60, "canary": 300, "idle_watts": 35}
    assert record["guard"]["loading"] is None and record["guard"]["serving"] == {"floor": "1.5 GiB"}


def test_status_tells_what_the_rank_services_say():
    found = hostvars()
    for name in ("a", "b"):
        found[name]["__serve_rank_info"]["rank"]["container"] = rank("s", running=False, status="exited", code=137)["container"]
    found["b"]["__serve_rank_info"]["rank"]["service"] = {"guard": "memory guard while loading: low", "lacking": ["/w is not mounted"]}
    found["a"]["__serve_rank_info"]["rank"]["service"] = {"guard": "", "lacking": [], "keeper": "not started: rank 1: /w is not mounted"}
    text = filters.status_text(found, PLAN)
    assert "rank 1 (b): exited with code 137, memory guard while loading: low, /w is not mounted" in text
    assert "rank service of rank 0: not started: rank 1: /w is not mounted" in text
    found["b"]["__serve_rank_info"]["rank"]["service"] = {"guard": "", "orphan": "rank 0 asked nothing for 180 s", "lacking": []}
    assert "rank 1 (b): exited with code 137, rank 0 asked nothing for 180 s" in filters.status_text(found, PLAN)


def test_status_document_and_text_agree():
    document = filters.status_document(hostvars(), PLAN)
    assert document["state"] == "serving" and [entry["rank"] for entry in document["ranks"]] == [0, 1]
    assert filters.status_text(hostvars(), PLAN).startswith("lab_tiny: serving")
    missing = hostvars()
    missing["b"] = {"spark_plan": PLAN}
    assert filters.status_document(missing, PLAN)["state"] == "half"
    assert "may still run" in filters.status_text(missing, PLAN)
    missing["b"] = {}
    assert "rank 1 (b): was not read (--limit)" in filters.status_text(missing, PLAN) and "may still run" not in filters.status_text(missing, PLAN)


@pytest.mark.parametrize("waited", [None, {"skipped": True}, {"ranks": {"0": {"nccl": []}, "1": {"nccl": ["sockets"]}}}], ids=["found", "skipped", "started"])
def test_report_and_status_name_a_rank_with_a_wrong_way(waited):
    found = hostvars()
    for name in NODES:
        found[name]["__serve_decision"] = filters.serve_decision(found, PLAN)
    assert "NOTICE" not in filters.status_text(found, PLAN) + "".join(filters.serve_report(found, PLAN, name) for name in NODES)
    if waited:
        found["a"]["__serve_waited"] = waited
    # What was found before a start of this run is no news of what runs now.
    found["b"]["__serve_rank_info"]["rank"]["progress"] = {"nccl": ["found before" if (waited or {}).get("ranks") else "sockets"]}
    assert filters.serve_report(found, PLAN, "b").splitlines() == ["rank 1 of lab_tiny", "NOTICE b: sockets (docs/fabric.md)"]
    assert "NOTICE" not in filters.serve_report(found, PLAN, "a")
    status = filters.status_text(found, PLAN).splitlines()
    rank_line = next(number for number, line in enumerate(status) if line.startswith("  rank 1"))
    assert status[rank_line + 1].startswith("    NOTICE ") and "".join(status).count("NOTICE") == 1
    assert filters.status_document(found, PLAN)["state"] == "serving"


def test_status_tells_settings_and_what_a_start_would_change_when_asked():
    assert "settings" not in filters.status_document(hostvars(), PLAN)
    plan = {
        **PLAN, "settings": {"status_settings": True, "serve_port": 8888, "serve_api_key": "hunter2", "weights_root": None},
        "origins": {"status_settings": "extra vars", "serve_port": "profile", "serve_api_key": "inventory", "weights_root": "inventory"},
        "secrets": {"serve_api_key": True}, "node_settings": {"a": {"weights_root": "/one"}, "b": {"weights_root": "/two"}},
    }
    found = hostvars()
    found["a"]["settings_found"] = {"changes": ["argument --max-num-seqs: 4 -> 3"], "reason": ""}
    document = filters.status_document(found, plan)
    assert document["settings"]["serve_port"] == {"origin": "profile", "value": 8888}
    assert document["settings"]["weights_root"] == {"origin": "inventory", "values": {"a": "/one", "b": "/two"}}
    assert document["would_change"]["a"]["changes"] == ["argument --max-num-seqs: 4 -> 3"]
    lines = filters.status_text(found, plan, settings=True).splitlines()
    assert len(filters.status_text(found, plan).splitlines()) == 4
    assert lines[lines.index("a start would change on rank 0 (a):") + 1] == "  argument --max-num-seqs: 4 -> 3"
    # A node that was not read is told as one, never as one without changes.
    assert "a start would change on rank 1 (b): cannot be compared: the node was not read" in lines
    words = [line.split() for line in lines[lines.index("effective settings") + 1:]]
    assert ["status_settings", "extra", "vars", "true"] in words and ["serve_port", "profile", "8888"] in words
    assert "hunter2" not in str(document) + str(lines)
    found["b"]["settings_found"] = {"changes": [], "reason": ""}
    assert "a start would change on rank 1 (b): nothing" in filters.status_text(found, plan, settings=True)


def test_failure_names_hosts_that_did_not_answer():
    found = hostvars()
    found["a"]["__serve_stopped"] = {"tail": ["last words"], "log": "/var/lib/x.log"}
    text = filters.serve_failure(found, PLAN, "a")
    assert "last words" in text and "/var/lib/x.log" in text and "rank 1 (b): does not answer" in text
    found["b"]["__serve_stopped"] = {"msg": "The rank cannot be stopped: no space left on device"}
    assert "rank 1 (b): The rank cannot be stopped: no space left on device: it may still run" in filters.serve_failure(found, PLAN, "a")
    assert filters.unstopped_ranks({"a": {"stop_result": {"tail": []}}, "b": {"stop_result": {"unreachable": True}}}, PLAN) == ["b"]


def test_docker_options():
    spec = {"mounts": [{"source": "/a", "target": "/b", "read_only": True}], "ulimits": {"memlock": -1, "stack": 67108864}, "gpus": "all"}
    assert filters.docker_mounts(spec) == [{"type": "bind", "source": "/a", "target": "/b", "read_only": True}]
    assert filters.docker_ulimits(spec) == ["memlock:-1:-1", "stack:67108864:67108864"]
    assert filters.docker_device_requests(spec) == [{"count": -1, "capabilities": [["gpu"]]}]
    assert filters.docker_device_requests({**spec, "gpus": None}) == []


@pytest.mark.parametrize(
    "bind, address",
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.21", "192.0.2.21"), ("2001:db8::21", "2001:db8::21"), ("127.0.0.1", "127.0.0.1"), ("", "127.0.0.1")],
)
def test_an_api_is_asked_where_it_listens(bind, address):
    assert _engine_api.own_address(bind) == address
    record = filters.rank_record(hostvars(), {**PLAN, "api": {**PLAN["api"], "bind": bind}}, "a")
    assert record["api"]["address"] == address


def test_every_probe_takes_the_recorded_address(tmp_path):
    assert _rank_state.api_address(str(tmp_path)) == "127.0.0.1"
    (tmp_path / "rank.json").write_text(json.dumps({"api": {"port": 1, "address": "192.0.2.21"}}))
    assert _rank_state.api_address(str(tmp_path)) == "192.0.2.21"


def test_a_proof_reaches_an_engine_that_listens_on_one_address(tmp_path, capsys):
    server = http.server.ThreadingHTTPServer(("127.0.0.9", 0), Engine)  # and nobody on 127.0.0.1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        (tmp_path / "rank.json").write_text(json.dumps({"api": {"port": port, "address": "127.0.0.9"}}))
        arguments = {"state_dir": str(tmp_path), "api_port": port, "model": "tiny", "request": {"max_tokens": 3}, "timeout": 5}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            serve_proof.main()
        assert json.loads(capsys.readouterr().out)["proof"]["ok"]
    finally:
        server.shutdown()
        server.server_close()
