# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lines of the exporter: from heartbeats, and on a head from its group and from the engine itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest
from bench_samples import ROOT

from ansible_collections.sparkops.inference.plugins.filter.report import scrape_targets
from ansible_collections.sparkops.inference.plugins.module_utils._bench_stats import parse_metrics
from ansible_collections.sparkops.inference.plugins.module_utils._metrics_text import counters, exposition, next_look, rank_samples, unix_time

CONTAINER = {
    "running": True, "exit_code": 0, "oom_killed": False, "started_at": "2026-11-29T22:00:00.123456789Z", "group": "g", "spec": "s", "status": "running",
}  # fmt: skip
RECORD = {"deployment": "d", "rank": 1}


def beat(age=0.0, container=..., action="run", by="", floor=None, tripped=None):
    container = CONTAINER if container is ... else container
    wanted, guard = {"action": action, "by": by}, {"mode": "serving", "floor": floor, "tripped": tripped}
    return {"time": 1000 - age, "wanted": wanted, "container": container, "guard": guard, "progress": {"last_progress": 990.0}}


def told(samples):
    return {name.removeprefix("sparkops_"): value for name, dummy, value in samples}


def test_a_running_rank():
    assert told(rank_samples(RECORD, beat(), 1000, 5)) == {
        "rank_service_up": 1, "rank_wanted": 1, "rank_running": 1, "rank_oom_killed": 0, "rank_started_timestamp_seconds": 1795989600,
        "rank_last_progress_timestamp_seconds": 990, "memory_guard_tripped": 0,
    }  # fmt: skip


def test_a_dead_rank_and_none():
    dead = {**CONTAINER, "running": False, "exit_code": 137, "oom_killed": True}
    found = told(rank_samples(RECORD, beat(container=dead), 1000, 5))
    assert (found["rank_running"], found["rank_exit_code"], found["rank_oom_killed"], found["rank_wanted"]) == (0, 137, 1, 1)
    stopped = told(rank_samples(RECORD, beat(container=None, action="stop"), 1000, 5))
    assert stopped == {"rank_service_up": 1, "rank_wanted": 0, "rank_running": 0, "memory_guard_tripped": 0}


def test_a_guard_that_acted_and_a_group_that_is_brought_back():
    found = told(rank_samples(RECORD, beat(action="stop", by="guard", floor=2**31, tripped={"reason": "memory"}), 1000, 5))
    assert (found["rank_wanted"], found["memory_guard_tripped"], found["memory_guard_floor_bytes"]) == (0, 1, 2**31)
    assert told(rank_samples(RECORD, beat(action="stop", by="watch"), 1000, 5))["rank_wanted"] == 1


def test_a_silent_service_tells_no_state():
    assert told(rank_samples(RECORD, beat(age=6), 1000, 5)) == {"rank_service_up": 0}
    assert told(rank_samples(RECORD, None, 1000, 5)) == {"rank_service_up": 0}


def test_lines_have_help_and_type_once_and_escaped_labels():
    text = exposition([("sparkops_rank_running", {"deployment": 'a"b\\c\nd', "rank": str(rank)}, 1.0) for rank in (0, 1)])
    assert text.splitlines() == [
        "# HELP sparkops_rank_running Whether the rank's container runs.",
        "# TYPE sparkops_rank_running gauge",
        'sparkops_rank_running{deployment="a\\"b\\\\c\\nd",rank="0"} 1',
        'sparkops_rank_running{deployment="a\\"b\\\\c\\nd",rank="1"} 1',
    ]


@pytest.mark.parametrize("text, wanted", [("0001-01-01T00:00:00Z", None), ("", None), (None, None), ("1970-01-01T00:01:00+00:00", 60.0)])
def test_times(text, wanted):
    assert unix_time(text) == wanted


def test_steps_are_tokens_and_passes():
    text = 'vllm:generation_tokens_total{engine="0"} 7.0\nvllm:iteration_tokens_total_count{engine="0"} 3\nvllm:num_requests_running{a="b c"} 2\n# vllm:x 1\n'
    assert counters(text) == {"running": 2, "steps": 10}
    assert counters("") == {"running": 0, "steps": 0}


def look(memory, steps, running, now, interval=60, start="s"):
    return next_look(memory, {"steps": steps, "running": running}, start, now, interval, 300)


def test_an_idle_engine_is_asked_once_in_an_interval():
    known, ask = look({}, 5, 0, 1000)
    assert ask and known["ok"] is None
    known.update(asked_at=1000, ok=True)
    assert look(known, 5, 0, 1059)[1] is False and look(known, 5, 0, 1061)[1] is True


def test_work_that_goes_on_is_proof_and_nobody_is_asked():
    known = look({}, 5, 0, 1000)[0]
    known, ask = look(known, 9, 2, 1015)
    assert known["ok"] is True and known["token_at"] == 1015 and not ask
    # A long prompt: no token for minutes, but steps.
    for now in range(1030, 2000, 15):
        known, ask = look(known, known["steps"] + 1, 1, now)
        assert known["ok"] is True and not ask


def test_work_without_a_step_is_proof_of_the_contrary_after_a_while():
    known = look({}, 5, 0, 1000)[0]
    known = look(known, 6, 1, 1015)[0]
    assert look(known, 6, 1, 1300)[0]["ok"] is True
    assert look(known, 6, 1, 1316)[0]["ok"] is False


def test_a_failed_engine_is_asked_at_every_look_and_a_new_start_begins_anew():
    known = {**look({}, 5, 0, 1000)[0], "ok": False, "asked_at": 1000}
    assert look(known, 5, 0, 1015)[1] is True
    assert look(known, 5, 0, 1015, start="t")[0]["ok"] is None


def test_interval_0_asks_never():
    assert look({}, 5, 0, 1000, interval=0)[1] is False
    assert look({"start": "s", "steps": 5, "moved_at": 0, "asked_at": 0, "ok": False}, 5, 0, 1000, interval=0)[1] is False


# --- the program, with the stand-in engine and a group as its service would tell it -------------------------------------------


@pytest.fixture(name="head")
def fixture_head(engine, tmp_path):
    """The state root of a head whose group has two ranks, and the program installed as on a node."""
    root, programs = tmp_path / "state", tmp_path / "programs"
    state = root / "d"
    (state / "key").mkdir(parents=True)
    programs.mkdir()
    helpers = (f"plugins/module_utils/_{name}.py" for name in ("engine_api", "group_state", "metrics_text", "rank_state"))
    for source in ("roles/metrics/files/node_metrics.py", *helpers):
        target = programs / os.path.basename(source)
        with open(os.path.join(ROOT, source), encoding="utf-8") as stream:
            target.write_text(stream.read(), encoding="utf-8")
    (state / "key/api_key").write_text((tmp_path / "key/api_key").read_text(encoding="utf-8"), encoding="utf-8")
    record = {"deployment": "d", "rank": 0, "peers": [{"rank": 0}, {"rank": 1}], "api": {"port": engine.port, "model": "tiny"}}
    (state / "rank.json").write_text(json.dumps(record), encoding="utf-8")
    (state / "last_good.json").write_text(json.dumps({"proven_at": "2026-11-29T22:00:00+00:00"}), encoding="utf-8")

    def run(worker=..., container=..., service="alive", interval=60.0):
        worker, container = (CONTAINER if one is ... else one for one in (worker, container))
        (state / "heartbeat.json").write_text(json.dumps({**beat(container=container), "time": time.time()}), encoding="utf-8")
        answer = {"0": {"service": "alive", "container": container}, "1": {"service": service, "container": worker}}
        (tmp_path / "group.py").write_text(f"import json\nprint(json.dumps({{'ranks': json.loads({json.dumps(json.dumps(answer))})}}))\n", encoding="utf-8")
        command = [sys.executable, programs / "node_metrics.py", "--state-root", root, "--program", tmp_path / "group.py", "--output", tmp_path / "out.prom"]
        # Without the collection on its path: on a node there is none.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([*map(str, command), "--memory", str(tmp_path / "seen.json"), "--probe-interval", str(interval)], check=True, env=environment)
        text = (tmp_path / "out.prom").read_text(encoding="utf-8")
        assert (tmp_path / "key/api_key").read_text(encoding="utf-8").strip() not in text + (tmp_path / "seen.json").read_text(encoding="utf-8")
        return parse_metrics(text)

    return run


def state_of(metrics):
    return [labels["state"] for labels, value in metrics["sparkops_group_state"] if value == 1]


def requests_of(engine):
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/debug/requests", timeout=5) as answer:
        return json.loads(answer.read())


def test_a_serving_group_is_asked_for_one_token_and_then_left_alone(engine, head):
    metrics = head()
    assert state_of(metrics) == ["serving"] and metrics["sparkops_group_ranks_running"][0][1] == 2
    assert metrics["sparkops_group_proven_timestamp_seconds"][0][1] == 1795989600
    assert abs(metrics["sparkops_group_last_token_timestamp_seconds"][0][1] - time.time()) < 60
    assert metrics["sparkops_node_memory_available_bytes"][0][1] > 2**20
    assert state_of(head()) == ["serving"]
    asked = requests_of(engine)
    assert len(asked) == 1 and asked[0]["max_tokens"] == 1


@pytest.mark.parametrize("engine", [{"STUB_COMPLETION": "500"}, {"STUB_COMPLETION": "empty"}, {"STUB_COMPLETION": "error-body"}], indirect=True)
def test_healthy_without_a_token_is_wedged(engine, head):
    assert state_of(head()) == ["wedged"]
    assert state_of(head()) == ["wedged"]


def test_the_token_that_was_asked_for_is_no_news(engine, head):
    assert state_of(head(interval=0.01)) == ["serving"]
    urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/debug/set", data=json.dumps({"COMPLETION": "500"}).encode(), timeout=5).close()
    assert state_of(head(interval=0.01)) == ["wedged"]


@pytest.mark.parametrize("engine", [{"STUB_HEALTH": "503"}], indirect=True)
def test_not_healthy_yet_is_loading(engine, head):
    assert state_of(head()) == ["loading"]


def test_a_dead_or_unreachable_worker_is_half_a_group(engine, head):
    dead = {**CONTAINER, "running": False, "exit_code": 137, "status": "exited"}
    assert state_of(head(worker=dead)) == ["half"]
    assert state_of(head(service="unreachable")) == ["half"]
    assert state_of(head(worker=dead, container=dead)) == ["absent"]
    assert requests_of(engine) == [], "a request would wait for the rank that is gone"


def test_targets_are_what_a_prometheus_reaches():
    hostvars = {"a": {"ansible_host": "192.0.2.21"}, "b": {"ansible_host": "2001:db8::1"}, "c": {}}
    plan = {"deployment": "d", "nodes": ["a", "b", "c"], "head": "a", "api": {"port": 8888}, "settings": {"metrics_node_port": 9100}}
    found = scrape_targets(hostvars, plan)
    assert found["vllm"] == [{"targets": ["192.0.2.21:8888"], "labels": {"deployment": "d", "node": "a"}}]
    assert [entry["targets"][0] for entry in found["node"]] == ["192.0.2.21:9100", "[2001:db8::1]:9100", "c:9100"]
