# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The rank service against an engine that answers over a real unix socket, and the programs around it."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import socketserver
import struct
import subprocess
import sys
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
UTILS = os.path.join(ROOT, "plugins/module_utils")
GATE = os.path.join(ROOT, "roles/bootstrap/files/node_gate.py")
ENTRY = os.path.join(ROOT, "roles/serve/files/entry.py")


def load(path):
    sys.path.insert(0, UTILS)
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


service = load(os.path.join(ROOT, "roles/serve/files/rank_service.py"))


class Engine:
    """One container of a Docker Engine."""

    def __init__(self):
        self.exists, self.running, self.code, self.calls, self.log = True, False, 0, [], []
        self.started_at = "0001-01-01T00:00:00Z"

    def document(self):
        return {
            "Id": "c" * 64, "Image": "sha256:1", "Config": {"Labels": {"sparkops.spec": "s", "sparkops.group": "g"}, "Tty": False},
            "State": {"Status": "running" if self.running else "exited", "Running": self.running, "ExitCode": self.code, "OOMKilled": False,
                      "StartedAt": self.started_at, "FinishedAt": "2026-01-01T00:00:00Z"},
        }


class Handler(http.server.BaseHTTPRequestHandler):
    engine: Engine

    def log_message(self, *dummy):
        return

    def address_string(self):
        return "unix"

    def reply(self, status, document=None):
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if "/logs" in self.path:
            self.send_response(200)
            self.end_headers()
            for line in self.engine.log:
                data = line.encode()
                self.wfile.write(b"\1\0\0\0" + struct.pack(">I", len(data)) + data)
            return
        if "/stats" in self.path:
            self.reply(200, {"cpu_stats": {"cpu_usage": {"total_usage": int(time.time() * 1e9)}}})
            return
        self.reply(200, self.engine.document()) if self.engine.exists else self.reply(404, {"message": "no such container"})

    def do_POST(self):
        act = self.path.partition("?")[0].rsplit("/", 1)[1]
        self.engine.calls.append(act)
        self.engine.running = act == "start"
        if act == "start":
            self.engine.started_at = "2026-01-01T00:00:00Z"
        self.reply(204)


@pytest.fixture(name="engine")
def fixture_engine(tmp_path):
    engine = Engine()
    handler = type("Bound", (Handler,), {"engine": engine})
    path = str(tmp_path / "docker.sock")
    server = socketserver.ThreadingUnixStreamServer(path, handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.socket = path
    yield engine
    server.shutdown()
    server.server_close()


@pytest.fixture(name="state_dir")
def fixture_state_dir(tmp_path, engine):
    folder = tmp_path / "dep"
    folder.mkdir()
    (folder / "rank.json").write_text(json.dumps({
        "deployment": "dep", "rank": 0, "container": "dep-rank0", "spec": "s", "group": "g", "head_address": "198.51.100.11",
        "docker_socket": engine.socket, "stop_timeout": 1, "peers": [{"rank": 0, "address": "198.51.100.11", "user": "alice"}],
        "key": "/k", "known_hosts": "/h",
    }))
    return str(folder)


def beat(state_dir):
    return json.loads(open(os.path.join(state_dir, "heartbeat.json"), encoding="utf-8").read())


def order(state_dir, action, number="1"):
    service.write_json(os.path.join(state_dir, "wanted.json"), {"action": action, "id": number, "at": time.time()})


def test_a_wanted_rank_is_started_once_and_a_dead_one_stays_dead(state_dir, engine):
    one = service.Service(state_dir)
    one.step()
    assert engine.calls == [] and beat(state_dir)["container"]["running"] is False
    order(state_dir, "run")
    one.step()
    assert engine.calls == ["start"] and beat(state_dir)["container"]["running"] and beat(state_dir)["started_id"] == "1"
    engine.running, engine.code = False, 0
    one.step()
    one.step()
    assert engine.calls == ["start"], "one rank must never come back alone"
    assert beat(state_dir)["container"]["exit_code"] == 0
    order(state_dir, "run", "2")
    one.step()
    assert engine.calls == ["start", "start"]


def test_an_unwanted_rank_is_stopped(state_dir, engine):
    engine.running = True
    order(state_dir, "stop")
    one = service.Service(state_dir)
    one.step()
    until = time.time() + 5
    while engine.running and time.time() < until:
        time.sleep(0.02)
    assert engine.calls == ["stop"] and not engine.running


def test_a_start_without_a_container_says_so(state_dir, engine):
    engine.exists = False
    order(state_dir, "run")
    service.Service(state_dir).step()
    assert "no container dep-rank0" in beat(state_dir)["error"]
    assert service.local_state(service.Paths(state_dir))["container"] is None


def test_an_engine_that_is_gone_is_told_in_the_heartbeat(state_dir, engine):
    path = os.path.join(state_dir, "rank.json")
    rank = json.loads(open(path, encoding="utf-8").read())
    service.write_json(path, {**rank, "docker_socket": "/nowhere/docker.sock"})
    service.Service(state_dir).step()
    assert beat(state_dir)["error"] and beat(state_dir)["container"] is None


def test_log_lines_are_progress_and_noise_is_not(state_dir, engine):
    engine.running, engine.started_at = True, "2026-01-01T00:00:00Z"
    engine.log = ["loading shard 1\n", "No available shared memory broadcast block found\n", "half a"]
    one = service.Service(state_dir)
    one.step()
    for dummy in range(50):
        if one.watcher.lines:
            break
        time.sleep(0.05)
    time.sleep(0.2)
    one.step()
    assert beat(state_dir)["progress"]["lines"] == 1
    assert beat(state_dir)["progress"]["last_line"] == "loading shard 1"
    assert len(beat(state_dir)["tail"]) == 2


def test_cpu_time_is_progress():
    watcher = service.Watcher.__new__(service.Watcher)
    watcher.cpu, watcher.last_progress = (time.time() - 10, 100.0), 0.0
    watcher.note_cpu(109.0)
    assert watcher.last_progress > 0
    watcher.cpu, watcher.last_progress = (time.time() - 10, 100.0), 0.0
    watcher.note_cpu(100.1)
    assert watcher.last_progress == 0.0


def test_an_order_that_came_before_the_service_is_carried_out(state_dir, engine):
    order(state_dir, "run")
    service.Service(state_dir).step()
    assert engine.calls == ["start"]


def test_a_restarted_service_does_not_start_a_dead_rank(state_dir, engine):
    engine.started_at = "2099-01-01T00:00:00.5Z"
    order(state_dir, "run")
    one = service.Service(state_dir)
    thread = threading.Thread(target=one.run, daemon=True)
    original = service.signal.signal
    service.signal.signal = lambda *dummy: None
    try:
        thread.start()
        time.sleep(0.5)
    finally:
        service.signal.signal = original
    assert engine.calls == []


def test_local_order_waits_for_the_service(state_dir, engine):
    one, ended = service.Service(state_dir), threading.Event()

    def loop():
        while not ended.is_set():
            one.step()
            time.sleep(0.05)

    threading.Thread(target=loop, daemon=True).start()
    paths = service.Paths(state_dir)
    started = service.local_order(paths, "run", 5)
    stopped = service.local_order(paths, "stop", 5)
    ended.set()
    assert started["container"]["running"] and not started.get("error")
    assert not stopped["container"]["running"] and engine.calls == ["start", "stop"]


def test_local_order_without_a_service_ends_in_time_with_a_reason(state_dir):
    answer = service.local_order(service.Paths(state_dir), "run", 0.3)
    assert answer["error"]


def test_silence_is_told(state_dir):
    service.Service(state_dir).step()
    path = os.path.join(state_dir, "heartbeat.json")
    service.write_json(path, {**beat(state_dir), "time": time.time() - 60})
    assert service.local_state(service.Paths(state_dir))["service"] == "silent"


def test_an_unreachable_peer_is_an_answer_not_a_crash(state_dir, monkeypatch):
    group = service.Group(service.Paths(state_dir))
    monkeypatch.setattr(service.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 255, b"", b"ssh: No route to host"))
    answer = group.ask({"rank": 1, "address": "198.51.100.12", "user": "bob"}, "state", 1)
    assert answer["service"] == "unreachable" and "No route" in answer["error"]


def test_workers_start_first_and_a_refusal_keeps_the_head_down(state_dir, monkeypatch):
    group = service.Group(service.Paths(state_dir))
    group.rank["peers"].append({"rank": 1, "address": "198.51.100.12", "user": "bob"})
    asked = []
    monkeypatch.setattr(group, "ask", lambda peer, verb, seconds: asked.append((peer["rank"], verb)) or ({"error": "x"} if peer["rank"] else {}))
    assert group.start()["1"]["error"] == "x"
    assert asked == [(1, "start")]


def test_the_program_says_when_there_is_no_rank(tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    for path in (os.path.join(ROOT, "roles/serve/files/rank_service.py"), f"{UTILS}/_docker_api.py", f"{UTILS}/_rank_state.py"):
        (folder / os.path.basename(path)).write_bytes(open(path, "rb").read())
    done = subprocess.run([sys.executable, str(folder / "rank_service.py"), "state", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and json.loads(done.stdout)["service"] == "absent"


def gate(tmp_path, command, client="198.51.100.11 5 6 7", head="198.51.100.11"):
    folder = tmp_path / "libexec"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "node_gate.py").write_bytes(open(GATE, "rb").read())
    for name in ("rank_service", "source_gate"):
        (folder / f"{name}.py").write_text(f"import sys; print('{name}', sys.argv[1:])")
    deployment = tmp_path / "state/dep"
    deployment.mkdir(parents=True, exist_ok=True)
    if head:
        (deployment / "rank.json").write_text(json.dumps({"head_address": head}))
    environment = {"PATH": os.environ["PATH"], "SSH_ORIGINAL_COMMAND": command, "SSH_CONNECTION": client}
    return subprocess.run([sys.executable, str(folder / "node_gate.py"), str(tmp_path / "state"), "/weights"], env=environment,
                          capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", ["state", "start", "stop"])
def test_the_gate_lets_the_head_say_three_words(tmp_path, verb):
    done = gate(tmp_path, f"{verb} dep")
    assert done.returncode == 0 and "rank_service" in done.stdout and verb in done.stdout


@pytest.mark.parametrize("command", ["state dep; id", "state ../dep", "start dep extra", "STATE dep", "restart dep", "state dep\nid", "state dep\n", "", "id"])
def test_anything_else_goes_to_the_source_gate_which_knows_no_control(tmp_path, command):
    done = gate(tmp_path, command)
    assert "rank_service" not in done.stdout and "source_gate ['/weights']" in done.stdout


def test_only_the_recorded_head_may_control(tmp_path):
    done = gate(tmp_path, "stop dep", client="198.51.100.13 1 2 3")
    assert done.returncode == 126 and "198.51.100.13" in done.stderr and done.stdout == ""
    assert gate(tmp_path / "other", "start dep", head=None).returncode == 126


def test_state_of_a_deployment_that_never_was_is_an_answer(tmp_path):
    done = gate(tmp_path, "state dep", head=None)
    assert json.loads(done.stdout)["service"] == "absent"


def entry(tmp_path, document, command=("env",), environment=None):
    folder = tmp_path / "container"
    folder.mkdir(exist_ok=True)
    for path in (ENTRY, f"{UTILS}/_gid.py"):
        (folder / os.path.basename(path)).write_bytes(open(path, "rb").read())
    base = {"format": 1, "rank": 0, "gid": {"policy": "unpinned", "index": None, "address": "", "hcas": []}, "key": None, "package_paths": {}, "hooks": []}
    (folder / "entry.json").write_text(json.dumps({**base, **document}))
    return subprocess.run([sys.executable, str(folder / "entry.py"), *command], capture_output=True, text=True, check=False,
                          env={"PATH": os.environ["PATH"], **(environment or {})})


def test_the_entry_exports_the_key_and_becomes_the_command(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    done = entry(tmp_path, {"key": {"file": str(tmp_path / "key"), "variable": "VLLM_API_KEY"}})
    assert "VLLM_API_KEY=secret" in done.stdout.splitlines() and "secret" not in done.stderr
    assert "NCCL_IB_GID_INDEX" not in done.stdout


def test_arguments_arrive_byte_for_byte(tmp_path):
    odd = ["a b", "it's", 'say "x"', "$HOME", "50%", "größer", "", "{{ braces }}"]
    done = entry(tmp_path, {}, [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *odd])
    assert json.loads(done.stdout) == odd


def test_hooks_run_in_order_and_only_a_strict_one_stops_the_start(tmp_path):
    for name, code in (("one", 0), ("two", 3)):
        (tmp_path / f"{name}.py").write_text(f"print('{name}'); raise SystemExit({code})")
    hooks = [{"path": str(tmp_path / f"{name}.py"), "on_failure": "log"} for name in ("one", "absent", "two")]
    done = entry(tmp_path, {"hooks": hooks}, ["echo", "engine"])
    assert done.stdout.split() == ["one", "two", "engine"] and "two.py ended with 3" in done.stderr
    hooks[2]["on_failure"] = "fail"
    assert entry(tmp_path, {"hooks": hooks}, ["echo", "engine"]).returncode == 78


def test_a_hook_may_replace_a_file_of_a_package(tmp_path):
    package = tmp_path / "lib/pack/sub"
    package.mkdir(parents=True)
    (tmp_path / "lib/pack/__init__.py").write_text("raise SystemExit('must not be imported')")
    (package / "kernel.py").write_text("old")
    (tmp_path / "new.py").write_text("new")
    hook = {"path": str(tmp_path / "new.py"), "copy_to": {"package": "pack", "path": "sub/kernel.py"}, "on_failure": "fail"}
    paths = {"PACK_KERNEL": {"package": "pack", "path": "sub/kernel.py"}, "NONE": {"package": "no_such_package", "path": "x"}}
    done = entry(tmp_path, {"hooks": [hook], "package_paths": paths}, environment={"PYTHONPATH": str(tmp_path / "lib")})
    assert (package / "kernel.py").read_text() == "new"
    assert f"PACK_KERNEL={package}/kernel.py" in done.stdout.splitlines() and "NONE=" not in done.stdout
    hook["copy_to"]["package"] = "no_such_package"
    assert entry(tmp_path, {"hooks": [hook]}).returncode == 78


def test_a_missing_engine_is_told(tmp_path):
    done = entry(tmp_path, {}, ["no-such-engine"])
    assert done.returncode == 78 and "no-such-engine" in done.stderr


def sysfs(root, slots):
    port = root / "class/infiniband/rocep1s0f1/ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for index, (gid, kind) in enumerate(slots):
        (port / "gids" / str(index)).write_text(gid)
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind)
    return str(root)


OWN = "0000:0000:0000:0000:0000:ffff:c633:640b"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def test_the_gid_is_found_again_at_each_start(tmp_path):
    module = load(ENTRY)
    module.HERE = UTILS
    gid = {"policy": "auto", "index": None, "address": "198.51.100.11", "hcas": ["rocep1s0f1"]}
    first = sysfs(tmp_path / "first", [("fe80::1", "RoCE v2"), (OWN, "IB/RoCE v1"), (EMPTY, ""), (OWN, "RoCE v2")])
    moved = sysfs(tmp_path / "moved", [("fe80::1", "RoCE v2"), (OWN, "RoCE v2")])
    assert module.gid_index(gid, first) == 3
    assert module.gid_index(gid, moved) == 1
    assert module.gid_index({**gid, "policy": "unpinned"}, first) is None
    assert module.gid_index({**gid, "policy": "index", "index": 3}, first) == 3
    with pytest.raises(SystemExit):
        module.gid_index({**gid, "policy": "index", "index": 2}, first)
    with pytest.raises(SystemExit):
        module.gid_index({**gid, "address": "203.0.113.1"}, first)
