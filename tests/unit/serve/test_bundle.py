# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Evidence: what is collected, what is taken out of it, what it is taken to mean, and the log that it is read from."""

from __future__ import annotations

import errno
import json
import os
import sys
import tarfile
import threading
import time

import pytest

from ansible_collections.sparkops.inference.plugins.action import rank_bundle as bundle_action
from ansible_collections.sparkops.inference.plugins.action import rank_log_info as log_action
from ansible_collections.sparkops.inference.plugins.module_utils import _likely_cause, _scrub
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi
from ansible_collections.sparkops.inference.plugins.modules import rank_bundle, rank_info, rank_log_info, serve_rank
from run_module import run

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "image"))

from fake_docker import FakeDocker  # noqa: E402

KEY = "s3cr3t-Key-of-the-API-0123456789"
STATE = {"Status": "running", "Running": True, "ExitCode": 0, "OOMKilled": False, "StartedAt": "2026-01-01T00:00:00Z", "FinishedAt": ""}


def frame(text):
    data = text.encode()
    return b"\1\0\0\0" + len(data).to_bytes(4, "big") + data


# --- secrets


@pytest.mark.parametrize(
    "value, gone",
    [
        ("Authorization: Bearer abcdefghijkl", "abcdefghijkl"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"),
        ("token hf_ABCDEFGHIJKLMNOPQRST used", "hf_ABCDEFGHIJKLMNOPQRST"),
        ("VLLM_API_KEY=short", "short"),
        ("pull https://bob:hunter2@registry.example/x", "hunter2"),
        ('--api-key "0123456789abcdef"', "never"),
        ({"password": "hunter2"}, "hunter2"),
        ({"environment": ["AWS_SECRET_ACCESS_KEY=abc"]}, "=abc"),
        (f"said {KEY} loudly", KEY),
    ],
)
def test_secrets_go(value, gone):
    assert gone not in json.dumps(_scrub.scrub(value, [KEY]))


@pytest.mark.parametrize(
    "value",
    [
        {"serve_max_num_batched_tokens": "1024"}, ["--max-num-batched-tokens", "1536"], "TOKENIZERS_PARALLELISM=false", {"key_mode": "generated"},
        {"known_hosts": "/var/lib/sparkops/keys/known_hosts"}, "NCCL_IB_HCA==rocep1s0f1", "prompt_tokens=12",
    ],
)
def test_what_only_sounds_like_a_secret_stays(value):
    assert _scrub.scrub(value, [KEY]) == value


# --- likely causes


@pytest.mark.parametrize(
    "line, part",
    [
        ("ValueError: Free memory on device cuda:0 (90/121 GiB) on startup is less than desired GPU memory utilization", "too little memory"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "memory ran out"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no kernels for this GPU"),
        ("OSError: [Errno 98] Address already in use", "port is taken"),
        ("NET/IB : No device found.", "/dev/infiniband"),
        ("Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 3, "
         "local GID ::ffff:198.51.100.11, remote GID ::", "peer's GID slot is empty"),
        ("ncclCommInitRank failed: ibv_reg_mr_iova2 failed with error Cannot allocate memory", "memory ran out"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "a rank was lost"),
        ("RuntimeError: rendezvous timed out after 600 s waiting for ranks [1]", "did not find each other"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization", "missing or damaged"),
        ("OSError: [Errno 116] Stale file handle: '/model/config.json'", "mount with the weights"),
        ("vllm serve: error: unrecognized arguments: --nope", "arguments"),
        ("sparkops entry: refused: no GID index is RoCE v2", "entry script"),
        ("exec /usr/bin/python3: exec format error", "another kind of processor"),
    ],
)
def test_known_words_have_a_likely_cause(line, part):
    assert any(part in cause for cause in _likely_cause.causes_of(["INFO fine", line])), _likely_cause.causes_of([line])


def test_an_ordinary_log_has_no_cause_and_each_cause_is_told_once():
    assert _likely_cause.causes_of(["INFO Loading weights took 36 s", "WARNING shm_broadcast: no block for 60 s", "Application startup complete."]) == []
    twice = _likely_cause.likely_causes({"a": ["CUDA out of memory"] * 3}, {"a": {"oom_killed": True}})
    assert len(twice) == 2 and "the kernel killed it" in twice[0]


# --- the bundle


@pytest.fixture(name="node")
def fixture_node(tmp_path):
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "api_key").write_text(KEY)
    (tmp_path / "rank.json").write_text(json.dumps({"rank": 0}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "image-check-20260101T000000Z.log").write_text("not of the rank\n")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "20260101T000000-guard.json").write_text(json.dumps({"reason": f"memory, {KEY}"}))
    (tmp_path / "logs" / "20260101T000000-abc.log").write_text(f"older words with {KEY}\n")
    document = {"Id": "c" * 64, "Image": "sha256:1", "State": STATE, "Config": {"Env": ["VLLM_API_KEY=" + KEY, "NCCL_DEBUG=WARN"], "Labels": {}}}

    def started(request):
        words = started.words
        if words[0] == "py-spy":
            return frame("Thread 7 (idle): MainThread\n    serve (vllm/entry.py:1)\n")
        return frame("1\n7\n") if "py-spy" in words[-1] else frame("python3 vllm serve" if "/proc/7/" in words[-1] else "tini")

    def made(request):
        started.words = json.loads(request["body"])["Cmd"]
        return {"Id": "x"}

    routes = {
        ("GET", "/containers/d-rank0/json"): document,
        ("GET", "/images/sha256:1/json"): {"Id": "sha256:1"},
        ("GET", "/containers/d-rank0/logs"): frame(f"2026-01-01T00:00:00.1Z key {KEY}\n") + frame("2026-01-01T00:00:01.2Z CUDA out of memory\n"),
        ("POST", "/containers/d-rank0/exec"): made,
        ("POST", "/exec/x/start"): started,
    }
    with FakeDocker(routes) as docker:
        yield tmp_path, docker


@pytest.fixture(autouse=True)
def fixture_temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_bundle_has_the_evidence_and_no_secret(node, capsys):
    state, docker = node
    done = run(rank_bundle, capsys, node="a", state_dir=str(state), container="d-rank0", docker_socket=docker.socket_path, seconds=20)
    with tarfile.open(done["path"]) as archive:
        contents = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}
    assert {"container.json", "log.txt", "stacks.txt", "meminfo.txt", "state/rank.json", "missing.txt", "logs/20260101T000000-abc.log"} <= set(contents)
    assert "events/20260101T000000-guard.json" in contents and not [name for name in contents if "image-check" in name]
    assert KEY not in "".join(contents.values()) and "NCCL_DEBUG=WARN" in contents["container.json"]
    assert "vllm/entry.py" in contents["stacks.txt"] and "=== 1 " not in contents["stacks.txt"]
    assert "gids.json: no RDMA device" in contents["missing.txt"] or "gids.json" in contents
    assert any("memory ran out" in cause for cause in done["causes"])
    assert os.stat(done["path"]).st_mode & 0o077 == 0


def test_the_newest_ten_runs_of_a_rank_stay_whatever_else_is_logged_there(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    others = [f"image-check-202601{day:02}T000000Z.log" for day in range(1, 13)]
    for name in others:
        (folder / name).write_text("checked\n")
    routes = {("GET", f"/containers/{'c' * 64}/logs"): frame("words\n")}
    with FakeDocker(routes) as docker:
        for day in range(1, 13):
            document = {"Id": "c" * 64, "State": {"StartedAt": f"2026-01-{day:02}T10:20:30.5Z"}}
            kept = serve_rank.archive(DockerApi(docker.socket_path), str(tmp_path), document)
            assert os.path.exists(kept)
    names = sorted(os.listdir(folder))
    assert names == [f"202601{day:02}T102030-{'c' * 12}.log" for day in range(3, 13)] + others


@pytest.mark.parametrize("order", [{"action": "run", "id": "1"}, {"action": "stop", "by": "watch", "id": "2"}], ids=["wanted", "to be brought back"])
def test_a_stop_is_an_order_also_where_the_container_is_gone(order, tmp_path, capsys):
    (tmp_path / "wanted.json").write_text(json.dumps(order))
    with FakeDocker({}) as docker:
        done = run(serve_rank, capsys, state_dir=str(tmp_path), container="d-rank0", docker_socket=docker.socket_path)
    assert done["container"] is None and done["changed"] is False
    wanted = json.loads((tmp_path / "wanted.json").read_text())
    assert wanted["action"] == "stop" and "by" not in wanted


def test_a_full_disk_stops_no_stop(tmp_path, capsys, monkeypatch):
    """Neither the order nor the log can be written: the rank ends, its words are told, and then what lacks."""
    (tmp_path / "wanted.json").write_text(json.dumps({"action": "run", "id": "1"}))
    state = {"Status": "running", "Running": True, "ExitCode": 0, "OOMKilled": False, "StartedAt": "2026-01-01T10:20:30.5Z", "FinishedAt": ""}
    document = {"Id": "c" * 64, "Config": {"Labels": {}}, "State": state}
    routes = {
        ("GET", "/containers/d-rank0/json"): lambda request: document, ("GET", f"/containers/{'c' * 64}/logs"): frame("last words\n"),
        ("POST", "/containers/d-rank0/stop"): lambda request: state.update(Running=False, Status="exited"),
    }

    def full(*dummy):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(serve_rank, "write_json", full)
    monkeypatch.setattr(serve_rank, "archive", full)
    warned = []
    monkeypatch.setattr(serve_rank.AnsibleModule, "warn", lambda self, text: warned.append(text))
    with FakeDocker(routes) as docker:
        done = run(serve_rank, capsys, state_dir=str(tmp_path), container="d-rank0", docker_socket=docker.socket_path)
        assert docker.asked("POST") == ["/containers/d-rank0/stop"]
        assert done["failed"] and "No space left" in done["msg"] and "does not run" in done["msg"] and "stop it again" in done["msg"]
        assert done["changed"] and done["tail"] == ["last words"] and not done["container"]["running"]
        assert "not archived" in warned[0]
        # The order stands already: what is left is a log that was not archived.
        (tmp_path / "wanted.json").write_text(json.dumps({"action": "stop", "id": "2"}))
        done = run(serve_rank, capsys, state_dir=str(tmp_path), container="d-rank0", docker_socket=docker.socket_path)
    assert "failed" not in done and done["log"] == ""


@pytest.mark.parametrize("module", [serve_rank, rank_info], ids=["serve_rank", "rank_info"])
def test_an_error_of_the_engine_is_no_absent_container(module, tmp_path, capsys):
    with FakeDocker({("GET", "/containers/d-rank0/json"): (500, {"message": "layer store is broken"})}) as docker:
        done = run(module, capsys, state_dir=str(tmp_path), container="d-rank0", docker_socket=docker.socket_path)
    assert done["failed"] and "layer store is broken" in done["msg"]


def test_an_engine_that_is_busy_is_no_absent_container_and_one_that_is_not_there_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rank_info, "ENGINE_SECONDS", 0.2)
    with FakeDocker({("GET", "/containers/d-rank0/json"): lambda request: time.sleep(1) or {}}) as docker:
        done = run(rank_info, capsys, state_dir=str(tmp_path), container="d-rank0", docker_socket=docker.socket_path)
    assert done["failed"] and "did not answer" in done["msg"]
    done = run(rank_info, capsys, state_dir=str(tmp_path), container="d-rank0", docker_socket=str(tmp_path / "none"))
    assert done["rank"]["container"] is None


def test_a_node_without_an_engine_gives_what_it_has(tmp_path, capsys):
    done = run(rank_bundle, capsys, node="a", state_dir=str(tmp_path), container="d-rank0", docker_socket=str(tmp_path / "none"), seconds=20)
    assert any(text.startswith("container.json: no ") for text in done["missing"])
    with tarfile.open(done["path"]) as archive:
        assert "meminfo.txt" in archive.getnames()


def test_a_part_that_hangs_costs_its_time_and_no_more():
    ended, begun = threading.Event(), time.monotonic()
    got, missing = rank_bundle.gather({"slow": lambda: ended.wait(60) and b"", "fast": lambda: b"x"}, 2)
    assert time.monotonic() - begun < 30
    assert got == {"fast": b"x"} and missing == ["slow: no answer within 2 s"]
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()), "the module's end would wait for it"
    ended.set()


def test_the_journal_of_a_service_without_root_is_collected_too(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(rank_bundle, "run", lambda words: asked.append(words) or b"")
    state_dir = tmp_path / "lab_tiny"
    wanted = rank_bundle.parts({"container": "c", "state_dir": str(state_dir), "stacks": False, "log_lines": 1, "hcas": []}, None)
    wanted["service.txt"]()
    unit = "sparkops-rank@lab_tiny.service"
    assert asked[0][-4:] == ["--unit", unit, "--user-unit", unit]


def test_the_joined_bundle_names_who_gave_nothing_and_hides_secrets():
    plan = {
        "deployment": "d", "profile": "p", "nodes": ["a", "b"], "addresses": {}, "image": {}, "artefacts": [], "node_settings": {}, "origins": {},
        "notices": [],
        "settings": {"serve_environment": {"MY_TOKEN": "abc"}, "serve_max_model_len": 256},
    }
    contents, lines = bundle_action.members(plan, {"a": {"path": "/x/a.tar.gz", "causes": ["a: memory ran out"], "missing": ["rdma.txt: not installed"]}})
    assert "rank 1 (b): nothing collected: does not answer" in lines and "  likely cause: a: memory ran out" in lines
    assert b"abc" not in contents["settings.json"] and b"256" in contents["settings.json"]


def test_the_newest_ten_bundles_of_a_deployment_stay(tmp_path):
    for number in range(12):
        path = tmp_path / f"d-20260101T0000{number:02d}Z-7.tar"
        path.write_text("x")
        os.utime(path, (number, number))
    (tmp_path / "d-x-20260101T000000Z-7.tar").write_text("of another deployment")
    (tmp_path / "d-notes.tar").write_text("somebody's own")
    bundle_action.forget_old(str(tmp_path), "d")
    assert len(os.listdir(tmp_path)) == 12 and not (tmp_path / "d-20260101T000001Z-7.tar").exists()
    assert (tmp_path / "d-x-20260101T000000Z-7.tar").exists() and (tmp_path / "d-notes.tar").exists()


# --- the log


LINES = "".join(f"2026-01-01T00:00:0{number}.{number}00000000Z line {number}\n" for number in range(3))


def log_info(capsys, log, **arguments):
    routes = {("GET", "/containers/c/json"): {"Id": "c", "State": STATE}, ("GET", "/containers/c/logs"): log}
    with FakeDocker(routes) as docker:
        answer = run(rank_log_info, capsys, node="a", container="c", docker_socket=docker.socket_path, **arguments)
        return answer, [request["query"] for request in docker.requests if request["path"].endswith("logs")]


def test_the_tail_comes_without_times_and_with_a_cursor(capsys):
    answer, queries = log_info(capsys, frame(LINES), tail=3)
    assert answer["lines"] == ["line 0", "line 1", "line 2"] and answer["cursor"] == "2026-01-01T00:00:02.200000000Z"
    assert queries[0]["tail"] == "3"


def test_only_newer_lines_than_the_cursor_come(capsys):
    answer, queries = log_info(capsys, frame(LINES), since="2026-01-01T00:00:01.100000000Z")
    assert answer["lines"] == ["line 2"]
    assert queries[0]["since"] == "1767225601.100000000"


def test_lines_that_a_start_must_write(capsys):
    wanted = [{"text": "line [12]", "at_least": 2, "says": "x"}, {"text": "packed=True", "says": "rows are read from the checkpoint"}]
    answer, dummy = log_info(capsys, frame(LINES), wanted=wanted)
    assert answer["failed"] and answer["found"] == {"line [12]": 2, "packed=True": 0}
    assert len(answer["refusals"]) == 1 and "serve.log_lines" in answer["msg"] and "rows are read from the checkpoint" in answer["msg"]
    assert not log_info(capsys, frame(LINES), wanted=wanted[:1])[0].get("failed")
    assert not log_info(capsys, frame(LINES), wanted=[{**wanted[1], "wanted": False}])[0].get("failed")


@pytest.mark.parametrize("begins, lacks", [("2026-01-01T00:04:59", True), ("2026-01-01T00:05:01", False), ("2025-12-31T00:00:00", True)],
                         ids=["slow start", "rotated", "an earlier run before it"])
def test_a_log_whose_beginning_is_gone_proves_no_lack(capsys, begins, lacks):
    """An engine that serves for days rotates away what its start said."""
    log = frame(f"{begins}.000000000Z a line\n2026-01-02T00:00:00.000000000Z ablit once\n")
    answer, dummy = log_info(capsys, log, wanted=[{"text": "packed=True", "says": "x"}, {"text": "ablit", "says": "y"}])
    assert bool(answer.get("failed")) is lacks
    assert answer["unjudged"] == ([] if lacks else [f"a: 'packed=True' was not judged: the log begins only at {begins}, what the start said is gone"])


def test_a_rank_without_a_container_has_no_lines(capsys):
    with FakeDocker({}) as docker:
        assert run(rank_log_info, capsys, node="a", container="c", docker_socket=docker.socket_path, tail=5)["lines"] == []


def test_follow_prints_each_line_once_with_its_node(monkeypatch):
    shown, answers = [], [{"lines": ["one"], "cursor": "t1"}, {"lines": ["two"], "cursor": "t2"}, {"lines": [], "cursor": "t2"}]
    asked = []
    action = object.__new__(log_action.ActionModule)
    action._task = type("Task", (), {"args": {"node": "a", "container": "c", "follow": 0.05, "tail": 10}, "async_val": 0, "check_mode": False})()
    later = {"lines": [], "cursor": "t2"}
    action._execute_module = lambda module_name, module_args, task_vars: asked.append(module_args) or dict(answers.pop(0) if answers else later)
    monkeypatch.setattr(log_action, "PAUSE", 0.01)
    monkeypatch.setattr(log_action.display, "display", shown.append)
    monkeypatch.setattr(log_action.ActionBase, "run", lambda self, tmp, task_vars: {})
    done = action.run(task_vars={})
    assert shown == ["a | one", "a | two"] and done["printed"] == 2 and done["lines"] == []
    assert asked[1]["since"] == "t1" and asked[2]["since"] == "t2"
