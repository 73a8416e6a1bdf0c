# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The rank service against an engine that answers over a real unix socket, and the programs around it."""

from __future__ import annotations

import datetime
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
from types import SimpleNamespace

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


PROGRAM = os.path.join(ROOT, "roles/serve/files")
service = load(os.path.join(PROGRAM, "rank_service.py"))
node = load(os.path.join(PROGRAM, "rank_node.py"))
keeper = load(os.path.join(PROGRAM, "rank_keeper.py"))
guard = load(os.path.join(PROGRAM, "rank_guard.py"))


class Engine:
    """One container of a Docker Engine."""

    def __init__(self):
        self.exists, self.running, self.code, self.calls, self.log = True, False, 0, [], []
        self.later = []  # what the log has beyond the lines of the start
        self.started_at = "0001-01-01T00:00:00Z"
        self.queries, self.environment = [], None
        self.start_seconds = self.look_seconds = 0.0  # how long an answer takes

    def document(self):
        return {
            "Id": "c" * 64, "Image": "sha256:1", "Config": {"Labels": {"sparkops.spec": "s", "sparkops.group": "g"}, "Tty": False, "Env": self.environment},
            "State": {"Status": "running" if self.running else "exited", "Running": self.running, "ExitCode": self.code, "OOMKilled": False,
                      "StartedAt": self.started_at, "FinishedAt": "2026-01-01T00:00:00Z"},
        }


IO = [{"op": "Read", "value": 1000}, {"op": "write", "value": 2000}, {"op": "Total", "value": 3000}]


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
        self.engine.queries.append(self.path)
        if "/containers/json" in self.path:
            self.reply(200, [])
            return
        if "/logs" in self.path:
            self.send_response(200)
            self.end_headers()
            since = float(self.path.partition("since=")[2].partition("&")[0])
            for line in self.engine.log if since == int(node.started_at(self.engine.started_at)) else self.engine.later:
                data = line.encode()
                self.wfile.write(b"\1\0\0\0" + struct.pack(">I", len(data)) + data)
            return
        if "/stats" in self.path:
            self.reply(200, {"cpu_stats": {"cpu_usage": {"total_usage": int(time.time() * 1e9)}}, "blkio_stats": {"io_service_bytes_recursive": IO}})
            return
        time.sleep(self.engine.look_seconds)
        self.reply(200, self.engine.document()) if self.engine.exists else self.reply(404, {"message": "no such container"})

    def do_POST(self):
        act = self.path.partition("?")[0].rsplit("/", 1)[1]
        self.engine.calls.append(f"{act} {self.path.partition('signal=')[2]}".strip())
        time.sleep(self.engine.start_seconds if act == "start" else 0)
        self.engine.running = act == "start" or "SIGTERM" in self.path
        if act == "start":
            self.engine.started_at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
        self.reply(204)


@pytest.fixture(name="engine")
def fixture_engine(tmp_path):
    engine = Engine()
    handler = type("Bound", (Handler,), {"engine": engine})
    path = str(tmp_path / "docker.sock")
    server = socketserver.ThreadingUnixStreamServer(path, handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
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
    node.write_json(os.path.join(state_dir, "wanted.json"), {"action": action, "id": number, "at": time.time()})


def wait_for(what, seconds=30):
    """Long enough for a busy machine: it only bounds a test that fails."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.02)


def test_a_wanted_rank_is_started_once_and_a_dead_one_stays_dead(state_dir, engine):
    one = node.Service(state_dir)
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
    one = node.Service(state_dir)
    one.step()
    wait_for(lambda: not engine.running)
    assert engine.calls == ["stop"]


def test_a_start_that_takes_long_keeps_the_heartbeat_and_is_done_once(state_dir, engine):
    one = node.Service(state_dir)
    order(state_dir, "run")
    engine.start_seconds = 6.0
    one.step()
    starting = one.starting
    first = beat(state_dir)
    assert first["started_id"] is None and first["error"] == "" and first["container"]["running"] is False
    one.step()
    assert engine.calls == ["start"]
    starting.join(30)
    one.step()
    assert engine.calls == ["start"] and beat(state_dir)["started_id"] == "1" and beat(state_dir)["container"]["running"]


def test_a_start_is_told_with_what_was_seen_after_it(state_dir, engine, monkeypatch):
    """The start ends between the look and the heartbeat: the code of an earlier end is not that of this start."""
    one = node.Service(state_dir)
    engine.code = 1
    order(state_dir, "run")
    engine.start_seconds = 2.5
    lacking = one.lacking

    def slow(container):
        one.starting.join(10)
        return lacking(container)

    monkeypatch.setattr(one, "lacking", slow)
    one.step()
    assert engine.running and beat(state_dir)["container"]["exit_code"] == 1 and beat(state_dir)["started_id"] is None
    monkeypatch.undo()
    one.step()
    assert beat(state_dir)["container"]["running"] and beat(state_dir)["started_id"] == "1"


def test_an_engine_that_is_busy_takes_no_rank_away(state_dir, engine, monkeypatch):
    one = node.Service(state_dir)
    order(state_dir, "run")
    one.step()
    patient = node.LOOK_SECONDS
    monkeypatch.setattr(node, "LOOK_SECONDS", 0.2)
    engine.look_seconds = 0.6
    one.step()
    busy = beat(state_dir)
    assert busy["container"]["running"] and not busy["looked"] and "did not answer" in busy["error"]
    monkeypatch.setattr(node, "ENGINE_PATIENCE_SECONDS", 0.0)
    one.step()
    assert beat(state_dir)["container"] is None
    engine.look_seconds = 0.0
    monkeypatch.setattr(node, "LOOK_SECONDS", patient)
    one.step()
    assert beat(state_dir)["container"]["running"] and beat(state_dir)["looked"] and beat(state_dir)["error"] == ""


def test_a_start_without_a_container_says_so(state_dir, engine):
    engine.exists = False
    order(state_dir, "run")
    node.Service(state_dir).step()
    assert "no container dep-rank0" in beat(state_dir)["error"]
    assert service.local_state(service.Paths(state_dir))["container"] is None


def test_an_engine_that_is_gone_is_told_in_the_heartbeat(state_dir, engine):
    path = os.path.join(state_dir, "rank.json")
    rank = json.loads(open(path, encoding="utf-8").read())
    node.write_json(path, {**rank, "docker_socket": "/nowhere/docker.sock"})
    node.Service(state_dir).step()
    assert beat(state_dir)["error"] and beat(state_dir)["container"] is None


def test_log_lines_are_progress_and_noise_is_not(state_dir, engine):
    engine.running, engine.started_at = True, "2026-01-01T00:00:00Z"
    engine.log = ["loading shard 1\n", "No available shared memory broadcast block found\n", "half a"]
    one = node.Service(state_dir)
    one.step()
    wait_for(lambda: len(one.watcher.tail) == 2)
    one.step()
    assert beat(state_dir)["progress"]["lines"] == 1
    assert beat(state_dir)["progress"]["last_line"] == "loading shard 1"
    assert len(beat(state_dir)["tail"]) == 2


def test_a_log_is_followed_again_when_its_stream_broke(state_dir, engine):
    """As when the Docker daemon is started again and the container lives on: a group at work must not look stalled."""
    engine.log = ["loading shard 1\n"]
    order(state_dir, "run")
    one = node.Service(state_dir)
    one.step()
    watcher = one.watcher
    watcher.thread.join(10)
    assert watcher.lines == 1
    engine.later = ["loading shard 2\n"]
    one.cpu_at = 0.0
    one.step()
    watcher.thread.join(10)
    assert one.watcher is watcher and watcher.lines == 2 and watcher.last_line == "loading shard 2"
    # Not of a run that has ended: its stream is over for good.
    engine.running, one.cpu_at = False, 0.0
    thread = watcher.thread
    one.step()
    assert one.watcher.thread is thread


@pytest.mark.parametrize(
    ("device", "found"),
    [("No device found.", ["NCCL found no RDMA device", "NCCL uses sockets", "NCCL's data goes over wlan0"]), ("silent", [])],
)
def test_the_heartbeat_tells_of_a_wrong_way_of_nccl(state_dir, engine, device, found):
    engine.running, engine.started_at = True, "2026-01-01T00:00:00Z"
    engine.environment = ["NCCL_SOCKET_IFNAME==enp1s0f1np1", "NCCL_IB_HCA==rocep1s0f1"]
    engine.log = [f"n:1:1 [0] NCCL INFO NET/IB : {device}\n", "n:1:1 [0] NCCL INFO NET/Socket : Using [0]wlan0:192.0.2.9<0>\n"] * 2 if found else ["x\n"] * 4
    one = node.Service(state_dir)
    one.step()
    wait_for(lambda: one.watcher.lines >= 4)
    one.step()
    said = beat(state_dir)["progress"]["nccl"]
    assert len(said) == len(found) and all(text.startswith(part) for text, part in zip(said, found)), said


@pytest.mark.parametrize(
    "work, progress",
    [((109.0, 0), True), ((100.1, 0), False), ((100.1, 8 << 20), True), ((100.1, 4096), False), (None, False)],
    ids=["compiles", "is blocked", "reads a slow disk", "writes a line", "no figures"],
)
def test_cpu_time_and_bytes_of_disks_are_progress(work, progress):
    watcher = node.Watcher.__new__(node.Watcher)
    watcher.work, watcher.last_progress = (time.time() - 10, 100.0, 0), 0.0
    watcher.note_work(work)
    assert (watcher.last_progress > 0) == progress


def test_the_engine_tells_of_cpu_time_and_disks(engine):
    engine.running = True
    seconds, moved = node.Docker(engine.socket).work("dep-rank0")
    assert seconds > 1e9 and moved == 3000


def test_an_order_that_came_before_the_service_is_carried_out(state_dir, engine):
    order(state_dir, "run")
    node.Service(state_dir).step()
    assert engine.calls == ["start"]


def test_a_restarted_service_does_not_start_a_dead_rank(state_dir, engine, monkeypatch):
    engine.started_at = "2099-01-01T00:00:00.5Z"
    order(state_dir, "run")
    one, ends = node.Service(state_dir), []
    monkeypatch.setattr(node.signal, "signal", lambda number, act: ends.append(act))
    # Both are for a whole process, which here is that of all tests: with its memory locked, each later mapping of a file is read in full.
    monkeypatch.setattr(node.rank_guard, "lock_memory", lambda: False)
    monkeypatch.setattr(node.threading, "stack_size", lambda size: 0)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    wait_for(lambda: len(ends) == 2 and os.path.exists(one.paths.heartbeat))
    ends[0]()
    thread.join(30)
    assert engine.calls == [] and not thread.is_alive()


def test_local_order_waits_for_the_service(state_dir, engine):
    one, ended = node.Service(state_dir), threading.Event()

    def loop():
        while not ended.is_set():
            one.step()
            time.sleep(0.05)

    threading.Thread(target=loop, daemon=True).start()
    paths = service.Paths(state_dir)
    started = service.local_order(paths, "run", 30)
    stopped = service.local_order(paths, "stop", 30)
    ended.set()
    assert started["container"]["running"] and not started.get("error")
    assert not stopped["container"]["running"] and engine.calls == ["start", "stop"]


def test_local_order_without_a_service_ends_in_time_with_a_reason(state_dir):
    answer = service.local_order(service.Paths(state_dir), "run", 0.3)
    assert answer["error"]


def test_silence_is_told(state_dir):
    node.Service(state_dir).step()
    path = os.path.join(state_dir, "heartbeat.json")
    node.write_json(path, {**beat(state_dir), "time": time.time() - 60})
    assert service.local_state(service.Paths(state_dir))["service"] == "silent"


def test_an_unreachable_peer_is_an_answer_not_a_crash(state_dir, monkeypatch):
    group = service.Group(service.Paths(state_dir))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 255, b"", b"ssh: No route to host"))
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
    for path in (f"{PROGRAM}/rank_service.py", f"{PROGRAM}/rank_group.py", f"{UTILS}/_rank_state.py"):
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


@pytest.mark.parametrize("verb", ["state", "start", "stop", "stop-now", "ready"])
def test_the_gate_lets_the_head_say_five_words(tmp_path, verb):
    done = gate(tmp_path, f"{verb} dep")
    assert done.returncode == 0 and "rank_service" in done.stdout and verb in done.stdout


@pytest.mark.parametrize("command", [
    "state dep; id", "state ../dep", "start dep extra", "STATE dep", "restart dep", "stop-now",
    "run dep", "group-stop dep", "state dep\nid", "state dep\n", "", "id",
])
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


# The memory guard

GIB = 1 << 30


class Memory:
    """MemAvailable as a script; the last value stays."""

    def __init__(self, *gib):
        self.series = [int(one * GIB) for one in gib]

    def available(self):
        return self.series.pop(0) if len(self.series) > 1 else self.series[0]


def proc_tree(root, **rss_gib):
    """Processes by name, with what they hold."""
    for number, (name, held) in enumerate(rss_gib.items(), 10):
        folder = root / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{number} ({name}) S " + " ".join(str(field) for field in range(4, 53)))
        (folder / "statm").write_text(f"9 {int(held * GIB) // os.sysconf('SC_PAGE_SIZE')} 0 0 0 0 0")
        (folder / "cgroup").write_text("0::/user.slice")
    return str(root)


def guarded(memory, tmp_path, mode="loading", **options):
    acts = {"trips": [], "reports": []}
    one = guard.Guard(lambda: mode, acts["trips"].append, acts["reports"].append, meminfo=memory, proc_root=proc_tree(tmp_path / "proc", engine=1, hog=1))
    one.options = {"loading": {"floor": 5 * GIB}, "serving": None, "samples": 2, "interval": 0.5, **options}
    return one, acts


def test_r12_4_a_falling_series_while_loading_trips_at_the_floor_and_names_who_grew(tmp_path):
    one, acts = guarded(Memory(20, 14, 9, 6, 5, 4.9, 4.8), tmp_path)
    for dummy in range(6):
        assert one.sample() is None
    proc_tree(tmp_path / "proc", engine=1.5, hog=9)
    report = one.sample()
    assert acts == {"trips": [report], "reports": [report]} and one.tripped is report
    assert "4.90, 4.80" in report["reason"] and "while loading" in report["reason"]
    assert [(entry["name"], entry["grown"] // GIB) for entry in report["growing"]] == [("hog", 8), ("engine", 0)]
    assert [round(value / GIB, 1) for when, value in report["samples"]] == [20, 14, 9, 6, 5, 4.9, 4.8]
    assert "hog (11) grew by 8.0 GiB to 9.0 GiB" in guard.report_line(report)
    one.sample()
    assert len(acts["trips"]) == 1, "once for each start"


def test_a_hog_that_came_after_the_last_look_is_named(tmp_path):
    one, acts = guarded(Memory(9, 4, 4), tmp_path)
    one.sample()
    one.sample()
    proc_tree(tmp_path / "proc", engine=1, hog=1, newcomer=7)
    assert one.sample()["growing"][0]["name"] == "newcomer"


def test_r12_5_a_dip_is_no_reason_and_memfree_is_not_asked(tmp_path):
    one, acts = guarded(Memory(7, 4, 7, 4, 7, 4, 7), tmp_path)
    for dummy in range(20):
        one.sample()
    assert acts["trips"] == []
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 127600000 kB\nMemFree: 1363148 kB\nMemAvailable: 7340032 kB\nSwapTotal: 16777216 kB\nSwapFree: 0 kB\n")
    one, acts = guarded(guard.Meminfo(str(path)), tmp_path)
    for dummy in range(20):
        one.sample()
    assert acts["trips"] == [] and one.samples[-1][1] == 7 * GIB
    path.write_text("nothing of that kind")
    assert one.sample() is None


@pytest.mark.parametrize("mode, options, trips", [
    ("loading", {}, 1), ("loading", {"loading": None}, 0), ("serving", {}, 0), ("serving", {"serving": {"floor": 3 * GIB}}, 0),
    ("serving", {"serving": {"floor": 5 * GIB}}, 1), ("", {"serving": {"floor": 5 * GIB}}, 0),
])
def test_each_mode_has_its_own_switch_and_floor(tmp_path, mode, options, trips):
    one, acts = guarded(Memory(4), tmp_path, mode, **options)
    for dummy in range(5):
        one.sample()
    assert len(acts["trips"]) == trips


def test_samples_of_another_mode_do_not_count(tmp_path):
    modes = iter(["loading", "serving", "serving"])
    one, acts = guarded(Memory(4), tmp_path, serving={"floor": 5 * GIB})
    one.mode = lambda: next(modes)
    one.sample()
    assert one.sample() is None and one.sample() is not None


def guarded_rank(state_dir, **more):
    path = os.path.join(state_dir, "rank.json")
    node.write_json(path, {**json.loads(open(path, encoding="utf-8").read()), "guard": {"loading": {"floor": 1 << 60}, "samples": 2}, **more})


def test_a_trip_ends_the_rank_at_once_and_stands_in_the_heartbeat(state_dir, engine, monkeypatch):
    guarded_rank(state_dir)
    asked = []
    monkeypatch.setattr(node.Group, "ask", lambda self, peer, verb, seconds: asked.append((peer["rank"], verb)))
    rank = json.loads(open(os.path.join(state_dir, "rank.json"), encoding="utf-8").read())
    rank["peers"].append({"rank": 1, "address": "198.51.100.12", "user": "bob"})
    rank["stop_timeout"] = 600  # what a polite stop may take
    node.write_json(os.path.join(state_dir, "rank.json"), rank)
    one = node.Service(state_dir)
    order(state_dir, "run")
    one.step()
    assert one.mode() == "loading" and beat(state_dir)["guard"]["mode"] == "loading"
    one.guard.sample()
    one.guard.sample()
    # Two signals and no stop with its grace; the other rank is told in a thread of its own.
    wait_for(lambda: not engine.running and asked)
    assert engine.calls == ["start", "kill SIGTERM", "kill SIGKILL"] and node.GUARD_GRACE_SECONDS < 1
    assert asked == [(1, "stop-now")]
    one.step()
    told = beat(state_dir)["guard"]["tripped"]
    assert told["start_id"] == "1" and told["rank"] == 0 and "memory guard while loading" in told["reason"] and "samples" not in told
    assert json.loads(open(os.path.join(state_dir, "wanted.json"), encoding="utf-8").read())["by"] == "guard"
    event = json.loads(open(os.path.join(state_dir, "events", os.listdir(os.path.join(state_dir, "events"))[0]), encoding="utf-8").read())
    assert event["samples"]
    # A service that was started again still tells; a new start begins anew.
    again = node.Service(state_dir)
    again.step()
    assert beat(state_dir)["guard"]["tripped"] and "memory guard" in again.status(None, [])
    order(state_dir, "run", "2")
    again.step()
    assert beat(state_dir)["guard"]["tripped"] is None


def test_a_proven_rank_is_guarded_by_the_serving_floor_only(state_dir, engine):
    guarded_rank(state_dir)
    one = node.Service(state_dir)
    order(state_dir, "run")
    one.step()
    service.main(["ready", state_dir])
    one.step()
    assert one.mode() == "serving" and beat(state_dir)["ready"] is True
    for dummy in range(3):
        one.guard.sample()
    assert engine.calls == ["start"]
    order(state_dir, "run", "2")  # the mark of another start is worth nothing
    one.step()
    assert one.mode() == "loading"


def test_a_busy_engine_does_not_make_the_proof_of_a_group_worthless(state_dir, engine):
    one = node.Service(state_dir)
    order(state_dir, "run")
    one.step()
    path = one.paths.heartbeat
    node.write_json(path, {**beat(state_dir), "error": "the Docker Engine did not answer within 3 s", "looked": False})
    assert service.mark_ready(one.paths)["error"] == "" and node.read_json(one.paths.ready)["id"] == "1"
    marked = node.read_json(one.paths.ready)
    service.mark_ready(one.paths)
    assert node.read_json(one.paths.ready) == marked, "told twice, marked once"


def test_a_rank_that_was_ended_meanwhile_is_not_ready(state_dir, engine):
    report = {"reason": "memory guard while loading: low"}
    node.write_json(os.path.join(state_dir, "wanted.json"), {"action": "stop", "by": "guard", "id": "9", "at": time.time(), "report": report})
    assert "memory guard while loading: low" in service.mark_ready(node.Paths(state_dir))["error"]
    assert not os.path.exists(node.Paths(state_dir).ready)


def test_stop_now_does_not_wait(state_dir, engine):
    engine.running = True
    node.write_json(os.path.join(state_dir, "wanted.json"), {"action": "stop", "id": "9", "at": time.time(), "now": True})
    node.Service(state_dir).step()
    assert engine.calls == ["kill SIGTERM", "kill SIGKILL"]


# What the rank stands on


MOUNTINFO = "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n40 21 0:40 / /srv/two\\040words rw - nfs4 head:/w rw,soft\n41 21 0:41 / /w rw - zfs tank/w rw\n"


def test_mounts_are_read_with_their_odd_names():
    table = node.mount_table(MOUNTINFO)
    assert table["/srv/two words"] == ("nfs4", "head:/w") and node.mount_of("/w/model/rev", table) == "/w" and node.mount_of("/home/x", table) == "/"


def stands_on(state_dir, tmp_path, text):
    (tmp_path / "mountinfo").write_text(text)
    return node.Sources(node.Paths(state_dir), [str(tmp_path / "mountinfo")])


def test_a_mount_that_is_gone_is_named_and_nothing_starts(state_dir, engine, tmp_path, monkeypatch):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    mounted = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:40 / {os.path.realpath(weights)} rw - nfs4 head:/w rw\n"
    guarded_rank(state_dir, mounts=[str(weights)], artefacts=[{"name": "model", "path": str(weights), "required": ["config.json"]}])
    one = node.Service(state_dir)
    one.sources = stands_on(state_dir, tmp_path, mounted)
    order(state_dir, "run")
    one.step()
    assert engine.calls == ["start"]
    engine.running = False
    one.sources = stands_on(state_dir, tmp_path, mounted.splitlines()[0])
    order(state_dir, "run", "2")
    said = []
    monkeypatch.setattr(node, "notify", said.append)
    one.step()
    assert engine.calls == ["start"] and f"{weights} is not mounted (nfs4, head:/w)" in beat(state_dir)["error"]
    assert any(str(weights) in text for text in beat(state_dir)["lacking"])
    assert said[-1].startswith("STATUS=rank 0 exited with code 0; not started:") and str(weights) in said[-1]


def test_a_file_that_is_gone_is_named_and_a_new_container_starts_anew(state_dir, tmp_path):
    sources = stands_on(state_dir, tmp_path, MOUNTINFO)
    rank = {"mounts": [str(tmp_path / "absent")], "artefacts": [{"name": "model", "path": str(tmp_path), "required": ["config.json", "mountinfo"]}]}
    node.write_json(sources.paths.sources, {"container": "old", "sources": {"/gone/x": ["/gone", "nfs4", "h:/"]}})
    assert sources.lacking(rank, "new", fresh=True) == [f"{tmp_path}/absent is not there", f"{tmp_path} of model lacks config.json"]
    assert sources.lacking(rank, "old", fresh=True)[0].startswith("/gone is not mounted")


def test_a_dead_mount_does_not_hang_the_service(state_dir, tmp_path, monkeypatch):
    sources = stands_on(state_dir, tmp_path, MOUNTINFO)
    monkeypatch.setattr(node, "SOURCE_SECONDS", 0.2)
    mended = threading.Event()
    monkeypatch.setattr(node.os.path, "exists", lambda path: mended.wait(60))
    begun = time.monotonic()
    assert "no answer" in sources.lacking({"mounts": ["/dead"]}, "c", fresh=True)[0] and time.monotonic() - begun < 30
    mended.set()


def test_memory_that_is_still_held_keeps_the_group_down():
    idle = {"boot": "b", "available": 113 * GIB, "used": {}}
    assert "about 50.0 GiB of memory are still held" in node.still_held(idle, 63 * GIB, {}, "b", 2 * GIB)
    assert node.still_held(idle, 112 * GIB, {}, "b", 2 * GIB) == ""
    assert node.still_held(idle, 63 * GIB, {"process tenant": 50 * GIB}, "b", 2 * GIB) == ""
    assert node.still_held(idle, 63 * GIB, {}, "another boot", 2 * GIB) == "" == node.still_held({}, 1, {}, "b", 0)


# The keeper of the group


class FakeGroup:
    """Two ranks; the second answers what the test says."""

    workers = [{"rank": 1, "address": "198.51.100.12", "user": "bob"}]

    def __init__(self, state_dir):
        self.paths, self.calls, self.start_error = node.Paths(state_dir), [], ""

    def ask_all(self, peers, verb, seconds):
        self.calls.append((verb, [peer["rank"] for peer in peers]))
        return {}

    def ready(self):
        self.calls.append(("ready",))
        service.mark_ready(self.paths)

    def start(self, by):
        self.calls.append(("start", by))
        order(self.paths.state_dir, "run", f"{time.time():.6f}")
        node.write_json(self.paths.group, {"by": by, "at": time.time(), "boots": {"0": "b0", "1": "b1"}, "ids": {"0": "0", "1": "7"}})
        return {"1": {"error": self.start_error}}


class FakePoller:
    def __init__(self):
        self.answer, self.seconds, self.ended, self.lost = alive("b1"), 1, threading.Event(), 0.0

    def lost_for(self):
        return self.lost


def alive(boot, running=True, **more):
    return {"service": "alive", "boot_id": boot, "container": {"running": running, "exit_code": 0}, "tail": [], "time": time.time(), "age": 0, "lacking": [],
            "progress": {"last_progress": time.time()}, "started_id": "0", "wanted": {"id": "0"}, **more}


class Kept:
    """A keeper with rank 0 and a scripted rank 1."""

    def __init__(self, state_dir, monkeypatch, **rank):
        self.state_dir, self.said, self.trips, self.proofs = state_dir, [], [], []
        self.rank = {"rank": 0, "peers": [], "stop_timeout": 1, "boot": True, "watch": None, "restart": {"limit": 3, "window": 3600, "delay": 10},
                     "timeouts": {"ready": 600, "stall": 300}, "api": {"port": 1, "model": "m", "request": {}, "expected": "", "timeout": 5}, **rank}
        self.group, self.worker = FakeGroup(state_dir), FakePoller()
        self.one = keeper.Keeper(node.Paths(state_dir), lambda dummy: self.group, self.said.append, self.trips.append)
        self.one.rank, self.one.group, self.one.pollers = self.rank, self.group, {"1": self.worker}
        self.head(True)
        order(state_dir, "run", "0")
        node.write_json(self.one.paths.group, {"by": "play", "at": time.time(), "boots": {"0": "b0", "1": "b1"}, "ids": {"1": "w1"}})
        self.health, self.proof = 200, True
        monkeypatch.setattr(keeper, "call", lambda *a, **k: type("A", (), {"status": self.health}))
        monkeypatch.setattr(self.one, "prove", lambda: type("P", (), {"ok": self.proof, "verdict": "empty", "detail": "no text", "seconds": 0.1}))

    def head(self, running, boot="b0"):
        node.write_json(self.one.paths.heartbeat, alive(boot, running))

    def wanted(self):
        return json.loads(open(self.one.paths.wanted, encoding="utf-8").read())

    def look(self, count=1):
        for dummy in range(count):
            self.worker.ended.clear()
            self.one.pollers.setdefault("1", self.worker)
            status = self.one.look(self.rank)
        return status


@pytest.fixture(name="kept")
def fixture_kept(state_dir, monkeypatch):
    return Kept(state_dir, monkeypatch)


def test_the_keeper_proves_a_start_that_nobody_proved(kept):
    kept.health = 0
    assert kept.look() == "the group loads" and kept.group.calls == []
    kept.health, kept.proof = 200, False
    assert "no proof" in kept.look()
    kept.one.proof_at, kept.proof = 0.0, True
    assert kept.look() == "the group serves" and kept.group.calls == [("ready",)]
    assert kept.look() == "the group serves" and kept.group.calls == [("ready",)]
    assert kept.worker.seconds == keeper.IDLE_POLL_SECONDS


def test_a_worker_that_did_not_hear_of_the_proof_is_told_again(kept):
    kept.look()
    kept.worker.answer = alive("b1", ready=False)
    assert kept.look() == "the group serves" and kept.group.calls[1:] == [("ready", [1])]
    kept.worker.answer = alive("b1", ready=True)
    assert kept.look() == "the group serves" and len(kept.group.calls) == 2


def test_while_a_play_holds_the_lease_the_keeper_keeps_its_hands_off(kept):
    lease = {"run_id": "controller:1:1", "owner": "carla@controller", "since": 1, "expires": time.time() + 60}
    node.write_json(kept.one.paths.lease, lease)
    kept.worker.answer = alive("another boot", running=False)
    assert kept.look() == "carla@controller holds the lease" and kept.group.calls == []
    node.write_json(kept.one.paths.lease, {**lease, "expires": time.time() - 1})
    assert kept.look().startswith("ended: rank 1 booted")


def test_the_keepers_lease_outlives_its_longest_start(kept, monkeypatch):
    group, waited = node.Group(kept.one.paths, kept.rank), []
    monkeypatch.setattr(group, "ask_all", lambda peers, verb, seconds: waited.append(seconds) or {})
    group.start("boot")
    assert len(waited) == 2 and keeper.LEASE_SECONDS > sum(waited) + 10


def test_a_lease_of_ours_from_before_a_reboot_is_no_obstacle(kept):
    state = sys.modules[keeper.process_run_id.__module__]
    place = state.run_place()
    node.write_json(kept.one.paths.lease, {"run_id": f"{place}:4000000:1", "owner": "x", "since": 1, "expires": time.time() + 60})
    assert kept.look() == "the group serves"
    node.write_json(kept.one.paths.lease, {"run_id": f"{place}:1:{state.process_start(1)}", "owner": "x", "since": 1, "expires": time.time() + 60})
    assert kept.look() == "x holds the lease"
    # A play in a container with this host's network: it has our name, and its processes have other numbers there than here.
    node.write_json(kept.one.paths.lease, {"run_id": f"{place}1:4000000:1", "owner": "x", "since": 1, "expires": time.time() + 60})
    assert kept.look() == "x holds the lease"
    # Of ourselves, by another view: such as a node that is itself a container and was started again.
    node.write_json(kept.one.paths.lease, {"run_id": f"{place}1:7:1", "owner": kept.one.lease.owner, "since": 1, "expires": time.time() + 60})
    assert kept.look() == "the group serves"


@pytest.mark.parametrize("head, worker, running", [("b0", "new", True), ("new", "b1", True), ("new", "new", False)])
def test_after_a_reboot_of_any_node_the_whole_group_is_replaced(kept, head, worker, running):
    """The rank whose node did not boot still runs, with a dead peer."""
    kept.look()
    kept.group.calls.clear()
    kept.head(head == "b0", head)
    kept.worker.answer = alive(worker, running=worker == "b1")
    assert "booted since the group was started" in kept.look()
    assert kept.wanted()["action"] == "stop" and kept.wanted()["by"] == "boot"
    assert kept.group.calls == ([("stop", [1])] if worker == "b1" else [])
    if running:
        assert kept.look().startswith("waits for the end of rank")
    kept.head(False, head)
    kept.worker.answer = alive(worker, running=False, lacking=["/w is not mounted"])
    assert kept.look() == "not started: rank 1: /w is not mounted"
    kept.worker.answer = {"service": "unreachable", "error": "No route to host", "container": None, "tail": []}
    assert kept.look() == "waits for rank 1: No route to host"
    kept.worker.answer = {**alive(worker), "container": None}
    assert kept.look() == "waits for rank 1: no container"
    assert ("start", "boot") not in kept.group.calls
    kept.worker.answer = alive(worker, running=False)
    assert kept.look() == "the group loads" and kept.group.calls[-1] == ("start", "boot")
    assert not os.path.exists(kept.one.paths.lease)
    assert len(os.listdir(kept.one.paths.events)) == 1


def test_what_a_guard_ended_is_not_brought_back_by_a_keeper_that_saw_it_late(kept):
    node.write_json(kept.one.paths.group, {"by": "boot", "at": time.time(), "boots": {"0": "b0", "1": "b1"}, "ids": {}})
    kept.health = 0
    tripped = {"guard": {"tripped": {"reason": "memory guard while loading: low", "at": time.time()}}, "started_id": "1", "wanted": {"id": "1"}}
    kept.worker.answer = {**alive("b1", running=False), **tripped}
    assert kept.look(3) == "the group loads" and kept.group.calls == []
    node.write_json(kept.one.paths.wanted, {"action": "stop", "by": "guard", "id": "2"})
    assert kept.one.end("boot", "too late") == "a memory guard came first" and kept.wanted()["by"] == "guard"


def test_a_group_that_was_stopped_stays_stopped_across_reboots(kept):
    order(kept.state_dir, "stop", "5")
    kept.head(False, "new")
    kept.worker.answer = alive("new", running=False)
    assert kept.look(3) == "stopped, as ordered" and kept.group.calls == []


def test_without_serve_boot_a_reboot_changes_nothing(kept):
    kept.rank["boot"] = False
    kept.worker.answer = alive("new", running=False)
    kept.look(3)
    assert not [call for call in kept.group.calls if call[0] != "ready"]


def test_the_end_of_an_earlier_run_is_none_of_this_start(kept):
    """The last poll of a worker may be from before the start that the keeper has just ordered."""
    kept.health = 0
    kept.one.group.start("boot")
    kept.head(True)
    kept.worker.answer = alive("b1", running=False, started_id="6", wanted={"id": "6"})
    kept.look(3)
    assert [call for call in kept.group.calls if call[0] != "ready"] == [("start", "boot")]
    kept.worker.answer = alive("b1", running=False, started_id="7", wanted={"id": "7"})
    assert kept.look() == "ended: rank 1 ended with exit code 0 while it was wanted"


def test_starts_are_counted_paused_and_end(kept, monkeypatch):
    """A group that dies in each load: three starts, with pauses of 0, 10 and 30 seconds, then none any more."""
    kept.health = 0
    kept.worker.answer = alive("new", running=False)
    clock, starts = [time.time()], []
    monkeypatch.setattr(keeper.time, "time", lambda: clock[0])
    for second in range(200):
        clock[0] += 1
        kept.head(False, "b0")
        dead = kept.one.watched_start == kept.wanted()["id"] and kept.wanted()["action"] == "run"
        kept.worker.answer = {**alive("new" if not starts else "b1", running=False), "started_id": "7" if dead and starts else "6", "wanted": {"id": "7"}}
        before = len([call for call in kept.group.calls if call[0] == "start"])
        status = kept.look()
        if len([call for call in kept.group.calls if call[0] == "start"]) > before:
            starts.append(clock[0])
    gaps = [round(later - earlier) for earlier, later in zip(starts, starts[1:])]
    assert len(starts) == 3 and 10 <= gaps[0] <= 15 and 30 <= gaps[1] <= 35
    assert status.startswith("gave up: 3 starts within 3600 s") and "play serve" in status
    # It stays so when the window is over; a play's start clears it.
    clock[0] += 100000
    assert kept.look().startswith("gave up")
    real = service.Group(kept.one.paths)
    real.rank["peers"] = []
    real.start()
    assert not os.path.exists(kept.one.paths.restarts)


def test_pauses():
    assert [keeper.pause_before(number, 10) for number in range(7)] == [0, 10, 30, 90, 270, 810, 1800]


def test_a_start_that_fails_is_ended_as_a_whole(kept):
    order(kept.state_dir, "stop", "5")
    node.write_json(kept.one.paths.wanted, {"action": "stop", "id": "5", "by": "watch", "reason": "x"})
    kept.group.start_error = "the service did not run the rank within 60 s"
    kept.head(False)
    kept.worker.answer = alive("b1", running=False)
    assert kept.look().startswith("ended: a start failed: rank 1")
    assert kept.wanted()["action"] == "stop" and kept.wanted()["by"] == "watch"


def test_what_a_play_started_and_lost_is_left_to_people_without_a_watch(kept):
    kept.health = 0
    kept.worker.answer = {**alive("b1", running=False), "started_id": "1", "wanted": {"id": "1"}}
    assert kept.look(5) == "the group loads" and kept.group.calls == []


WATCH = {"interval": 0, "samples": 3, "canary": 0, "idle_watts": 35}


def test_watch_ends_a_group_with_a_rank_that_is_gone(kept):
    kept.rank["watch"] = dict(WATCH)
    kept.one.engine_stuck = lambda: ""
    kept.look()
    kept.worker.answer = alive("b1", running=False)
    assert kept.look(2) == "the group serves"
    assert kept.look() == "ended: rank 1 ended while it was wanted"
    event = json.loads(open(os.path.join(kept.one.paths.events, os.listdir(kept.one.paths.events)[0]), encoding="utf-8").read())
    assert event["by"] == "watch" and event["ranks"]["1"]["container"]["running"] is False


def test_watch_waits_half_a_minute_for_a_rank_that_does_not_answer(kept):
    kept.rank["watch"] = dict(WATCH)
    kept.one.engine_stuck = lambda: ""
    kept.look()
    kept.worker.answer, kept.worker.lost = {"service": "unreachable", "container": None, "tail": []}, 29.0
    assert kept.look(5) == "the group serves"
    kept.worker.lost = 31.0
    assert kept.look().startswith("ended: rank 1 did not answer for 30 s")


def metrics(tokens, running, prompt=5):
    return (f'# TYPE x counter\nvllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}\nvllm:generation_tokens_total{{engine="1"}} 1.0\n'
            f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\nvllm:num_requests_running{{engine="0"}} {running}\n')


@pytest.mark.parametrize("series, watts, stuck", [
    ([(9, 1)] * 3, None, True), ([(9, 1)] * 3, 12.0, True), ([(9, 1)] * 3, 60.0, False), ([(9, 0)] * 9, None, False),
    ([(9, 1), (9, 1), (10, 1), (10, 1)], None, False), ([(9, 1), (9, 1), (9, 0), (9, 1), (9, 1)], None, False), ([(9, 1)] * 2, None, False),
    ([(9, 1), (9, 1), (10, 1), (10, 1), (10, 2)], None, True),
])
def test_stuck_is_frozen_tokens_and_running_requests_and_a_gpu_at_rest(series, watts, stuck):
    """A long prefill is frozen too: it moves at last, or its GPU is at work."""
    one = keeper.Frozen(3, 35)
    said = [one.add(keeper.metric_sums(metrics(*pair)), watts) for pair in series]
    assert bool(said[-1]) is stuck and not any(said[:-1])


def test_an_engine_without_metrics_is_not_called_stuck():
    one = keeper.Frozen(2, 35)
    assert keeper.metric_sums("")[keeper.RUNNING] is None
    assert [one.add(keeper.metric_sums(""), None) for dummy in range(5)] == [""] * 5
    assert keeper.metric_sums(metrics(9, 2))[keeper.TOKENS[0]] == 10.0


def test_prompt_tokens_count_as_movement():
    one = keeper.Frozen(3, 35)
    assert [one.add(keeper.metric_sums(metrics(9, 1, prompt)), None) for prompt in range(6)] == [""] * 6


def test_watch_ends_a_stuck_engine_and_one_that_fails_its_canaries(kept, monkeypatch):
    kept.rank["watch"] = dict(WATCH)
    kept.look()
    monkeypatch.setattr(keeper, "gpu_watts", lambda: None)
    monkeypatch.setattr(keeper, "read_metrics", lambda api: metrics(5, 2))
    assert kept.look(2) == "the group serves"
    assert kept.look().startswith("ended: no token in 3 samples in a row while 2 requests run")


def test_a_keeper_asks_an_api_where_it_listens(monkeypatch):
    asked = []
    monkeypatch.setattr(keeper, "call", lambda *place, **dummy: asked.append(place[:2]) or SimpleNamespace(status=200, document="vllm:x 1"))
    assert keeper.read_metrics({"port": 8888, "address": "192.0.2.21"}) == keeper.read_metrics({"port": 8888}) == "vllm:x 1"
    assert asked == [("192.0.2.21", 8888), ("127.0.0.1", 8888)]


def test_three_canaries_in_a_row(kept, monkeypatch):
    kept.rank["watch"] = {**WATCH, "canary": 0.001}
    kept.look()
    monkeypatch.setattr(keeper, "gpu_watts", lambda: None)
    monkeypatch.setattr(keeper, "read_metrics", lambda api: metrics(5, 0))
    time.sleep(0.01)
    kept.proof = False
    assert kept.look(2) == "the group serves"
    kept.proof = True
    assert kept.look() == "the group serves"
    time.sleep(0.01)
    kept.proof = False
    assert kept.look(2) == "the group serves"
    assert kept.look() == "ended: 3 canaries failed in a row, the last with empty: no text"


def test_a_reading_of_watts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert keeper.gpu_watts() is None
    for said, expected in (("12.31", 12.31), ("[N/A]", None), ("", None)):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert keeper.gpu_watts() == expected


def test_a_workers_trip_reaches_rank_0_and_an_old_one_does_not(kept):
    report = {"reason": "memory guard while loading: low", "start_id": "w1", "rank": 1}
    peer = kept.group.workers[0]
    kept.one.on_answer(peer, {"guard": {"tripped": None}})
    kept.one.on_answer(peer, {"guard": {"tripped": {**report, "start_id": "before"}}})
    assert kept.trips == []
    kept.one.on_answer(peer, {"guard": {"tripped": report}})
    assert kept.trips == [{**report, "reason": "rank 1: memory guard while loading: low"}]
    order(kept.state_dir, "stop", "6")
    kept.one.on_answer(peer, {"guard": {"tripped": report}})
    assert len(kept.trips) == 1


def test_a_poller_follows_its_interval_and_counts_the_silence():
    answers = iter([{"service": "alive"}, {"service": "unreachable"}, {"service": "unreachable"}])

    class Asked:
        def ask(self, peer, verb, seconds):
            return next(answers, {"service": "alive"})

    said, lost, made = [], [], threading.Event()

    def note(dummy, answer):
        if len(said) < 4:
            assert made.wait(30)
            lost.append(poller.lost_for())
            said.append(answer["service"])

    poller = keeper.Poller(Asked(), {"rank": 1}, note)
    poller.seconds = 0.3
    made.set()
    wait_for(lambda: len(said) == 4)
    poller.ended.set()
    assert said == ["alive", "unreachable", "unreachable", "alive"]
    assert lost[0] == lost[3] == 0 and lost[2] >= 0.3


def test_a_boot_has_an_identity_also_in_a_container(tmp_path):
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "1").mkdir()
    (tmp_path / "sys/kernel/random/boot_id").write_text("same\n")
    identities = []
    for started in (100, 200):
        (tmp_path / "1/stat").write_text("1 (systemd (x)) S " + " ".join(["0"] * 18) + f" {started} 0 0")
        identities.append(node.boot_identity(str(tmp_path)))
    assert identities == ["same:100", "same:200"] and node.boot_identity("/nowhere") == ""
    assert node.boot_identity() == node.boot_identity() != ""


def test_the_service_manager_is_told(tmp_path, monkeypatch):
    import socket

    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        node.notify("STATUS=rank 0 runs")
        assert receiver.recv(100) == b"STATUS=rank 0 runs"
    node.notify("nobody listens: no error")
