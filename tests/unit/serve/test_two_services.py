# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Two rank services as real processes that talk through the real gate; only the engine and the line of ssh between them stand in."""

from __future__ import annotations

import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from test_rank_service import GATE, PROGRAM, UTILS, Engine, Handler, wait_for

PYTHON_FILES = [os.path.join(PROGRAM, name) for name in os.listdir(PROGRAM) if name.startswith("rank_")]
SHARED = [f"{UTILS}/{name}.py" for name in ("_docker_api", "_engine_api", "_group_channel", "_memory", "_nccl_log", "_rank_state")]
# As sshd does: the peer's address and the words, to the gate of the node with that address.
SSH = """#!/bin/sh
for word; do last=$word; done
address=$(echo "$@" | grep -o '192.0.2.[0-9]*' | tail -n 1)
SSH_ORIGINAL_COMMAND="$last" SSH_CONNECTION="192.0.2.1 5 $address 22" exec {python} {lib}/node_gate.py {root}/$address /weights
"""


class Node:
    """One node: an engine behind a socket, a state directory, a service."""

    def __init__(self, root, lib, rank):
        self.address = f"192.0.2.{rank + 1}"
        self.state_dir = root / self.address / "two_services"
        self.state_dir.mkdir(parents=True)
        self.engine = Engine()
        self.server = socketserver.ThreadingUnixStreamServer(str(root / f"{rank}.sock"), type("Bound", (Handler,), {"engine": self.engine}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.lib, self.root, self.process = lib, root, None
        self.record = {
            "deployment": "two_services", "rank": rank, "container": f"two-rank{rank}", "spec": "s", "group": "g", "head_address": "192.0.2.1",
            "docker_socket": str(root / f"{rank}.sock"), "stop_timeout": 1, "key": "/k/key", "known_hosts": "/k/known", "mounts": [str(root)], "artefacts": [],
            "peers": [{"rank": 0, "address": "192.0.2.1", "user": "alice"}, {"rank": 1, "address": "192.0.2.2", "user": "bob"}],
            "guard": {"loading": None, "serving": None, "samples": 2, "interval": 0.2}, "boot": True, "watch": None,
            "restart": {"limit": 2, "window": 600, "delay": 1}, "timeouts": {"ready": 60, "stall": 60},
            "api": {"port": 9, "model": "m", "request": {}, "expected": "", "timeout": 1},
        }
        self.write()

    def write(self, **changes):
        self.record.update(changes)
        partial = self.state_dir / "rank.partial"
        partial.write_text(json.dumps(self.record))
        partial.replace(self.state_dir / "rank.json")

    def environment(self):
        return {"PATH": f"{self.root}/bin:{os.environ['PATH']}"}

    def run(self):
        self.process = subprocess.Popen([sys.executable, str(self.lib / "rank_service.py"), "run", str(self.state_dir)], env=self.environment())
        wait_for((self.state_dir / "heartbeat.json").exists)

    def end(self):
        if self.process:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def say(self, verb):
        done = subprocess.run([sys.executable, str(self.lib / "rank_service.py"), verb, str(self.state_dir)], env=self.environment(), capture_output=True,
                              check=False, timeout=60)
        return json.loads(done.stdout)

    def beat(self):
        return json.loads((self.state_dir / "heartbeat.json").read_text())


@pytest.fixture(name="pair")
def fixture_pair(tmp_path):
    lib = tmp_path / "lib"
    lib.mkdir()
    for path in [*PYTHON_FILES, *SHARED, GATE]:
        (lib / os.path.basename(path)).write_bytes(open(path, "rb").read())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH.format(python=sys.executable, lib=lib, root=tmp_path))
    (tmp_path / "bin/ssh").chmod(0o755)
    nodes = [Node(tmp_path, lib, rank) for rank in (0, 1)]
    for one in nodes:
        one.run()
    yield nodes
    for one in nodes:
        one.end()
        one.server.shutdown()
        one.server.server_close()


@pytest.mark.parametrize("trips", [0, 1])
def test_a_guard_on_either_node_ends_both_ranks(pair, trips):
    assert pair[0].say("group-start")["error"] == ""
    assert pair[0].engine.running and pair[1].engine.running
    pair[trips].write(guard={"loading": {"floor": 1 << 60}, "serving": None, "samples": 2, "interval": 0.2})
    wait_for(lambda: not pair[trips].engine.running)
    wait_for(lambda: not pair[1 - trips].engine.running)
    wait_for(lambda: all(one.beat()["container"]["running"] is False for one in pair))
    state = pair[0].say("group-state")["ranks"]
    assert "memory guard while loading" in state["0"]["guard"]["tripped"]["reason"] and state["0"]["guard"]["tripped"]["rank"] == trips
    wait_for(lambda: list((pair[trips].state_dir / "events").glob("*-guard.json")))
    # It stays down until a new start, which then is judged anew.
    pair[trips].write(guard={"loading": None, "serving": None, "samples": 2, "interval": 0.2})
    time.sleep(2)
    assert [one.engine.calls.count("start") for one in pair] == [1, 1]
    pair[0].say("group-start")
    assert pair[0].engine.running and pair[1].engine.running and pair[1].beat()["guard"]["tripped"] is None


@pytest.mark.parametrize("lost, late", [((0,), 0), ((1,), 0), ((0, 1), 0), ((0, 1), 4)])
def test_the_group_comes_back_after_a_loss_of_power(pair, lost, late):
    """Head, worker, both, both with the worker late: what the keeper decides on is real but for the boots' names."""
    pair[0].say("group-start")
    path = pair[0].state_dir / "group.json"
    group = json.loads(path.read_text())
    assert sorted(group["boots"]) == ["0", "1"] and group["ids"]["1"]
    for rank in lost:
        pair[rank].process.kill()
        pair[rank].process.wait(10)
        pair[rank].engine.running = False
        (pair[rank].state_dir / "heartbeat.json").unlink()  # on a node it lies on a tmpfs
        group["boots"][str(rank)] = "an earlier boot"
    path.write_text(json.dumps(group))
    for rank in lost:
        if rank == 1 and late:
            time.sleep(late)
            assert pair[0].engine.calls.count("start") == 1 and not pair[0].engine.running, "no rank runs without its peer"
            wait_for(lambda: "waits for rank 1" in pair[0].beat()["keeper"])
        pair[rank].run()
    # A call is counted as it arrives, before the engine has done it.
    wait_for(lambda: [one.engine.calls.count("start") for one in pair] == [2, 2] and all(one.engine.running for one in pair), 60)
    if lost == (1,):
        assert pair[0].engine.calls == ["start", "stop", "start"], "the rank with the dead peer is replaced too"
    if lost == (0,):
        assert pair[1].engine.calls == ["start", "stop", "start"]
    restarts = json.loads((pair[0].state_dir / "restarts.json").read_text())
    assert len(restarts["attempts"]) == 1 and "booted since the group was started" in restarts["attempts"][0]["reason"]
    assert pair[0].say("stop")["container"]["running"] is False
    wait_for(lambda: pair[0].beat()["keeper"] == "stopped, as ordered")
    assert pair[0].engine.calls.count("start") == 2


def hurry(lib, **constants):
    """Shorter times in the installed programs."""
    for name, (file, seconds) in constants.items():
        path = lib / file
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {seconds}", path.read_text(), flags=re.MULTILINE)
        assert count == 1
        path.write_text(text)


def test_a_watched_worker_does_not_outlive_the_node_of_rank_0(pair):
    head, worker = pair
    for one in pair:
        one.end()
    hurry(head.lib, ORPHAN_SECONDS=("rank_node.py", 9), NOTE_SECONDS=("rank_group.py", 0.5))
    for one in pair:
        one.write(watch={"interval": 1, "samples": 3, "canary": 0, "idle_watts": 35})
        one.run()
    head.say("group-start")
    head.say("group-ready")
    wait_for(lambda: all(one.beat()["ready"] for one in pair))
    # A short absence, and an ordinary life that is longer than the patience.
    head.end()
    time.sleep(2)
    head.run()
    time.sleep(12)
    assert worker.engine.calls == ["start"] and worker.beat()["orphan"] == ""
    head.process.kill()
    head.process.wait(10)
    head.engine.running = False
    wait_for(lambda: not worker.engine.running)
    wait_for(lambda: worker.beat()["orphan"] == "rank 0 asked nothing for 10 s")
    assert worker.engine.calls == ["start", "stop"]
    event = json.loads(next((worker.state_dir / "events").glob("*-watch.json")).read_text())
    assert event["reason"] == "rank 0 asked nothing for 10 s" and event["ranks"]["1"]["container"]["running"]
    # With its node rank 0 comes back, and the keeper there starts the whole group.
    head.run()
    wait_for(lambda: [one.engine.calls.count("start") for one in pair] == [2, 2] and all(one.engine.running for one in pair), 60)
    wait_for(lambda: worker.beat()["orphan"] == "")


@pytest.mark.parametrize("watch, ready", [(None, True), ({"interval": 1, "samples": 3, "canary": 0, "idle_watts": 35}, False)])
def test_without_a_watch_or_a_proof_a_worker_waits_for_its_head(pair, watch, ready):
    """A group that is not proven yet is the play's that starts it."""
    head, worker = pair
    worker.end()
    hurry(head.lib, ORPHAN_SECONDS=("rank_node.py", 0), NOTE_SECONDS=("rank_group.py", 0))
    for one in pair:
        one.write(watch=watch)
    worker.run()
    head.say("group-start")
    if ready:
        head.say("group-ready")
    wait_for(lambda: worker.beat()["ready"] is ready and worker.beat()["container"]["running"])
    head.end()
    time.sleep(3)
    assert worker.engine.calls == ["start"] and (worker.state_dir / "asked").exists() is not ready
