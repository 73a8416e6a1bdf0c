# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps one rank of a serving group, and on rank 0 speaks for the group.

``run`` is the service sparkops-rank@DEPLOYMENT: once a second it looks at the rank's container, starts or stops it as
wanted.json says, and writes a heartbeat. ``state``, ``start`` and ``stop`` are what the head may ask of a node through the
forced-command ssh key. ``group-state``, ``group-start`` and ``group-stop`` do the same for all ranks, from rank 0.

A single file of the standard library: it must run on a node before anything else of ours is there.
Every subcommand prints one JSON document; exit code 0 means done, 1 means that the document has an "error".
"""

from __future__ import annotations

import argparse
import calendar
import collections
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

# Installed beside this file: the collection's own readers, so that node and modules agree.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from _docker_api import DockerApi, DockerError  # noqa: E402
from _rank_state import FrameReader, heartbeat_path, read_json, summary, write_json  # noqa: E402

POLL_SECONDS = 1.0
HEARTBEAT_STALE_SECONDS = 5.0
TAIL_LINES = 60
# The head says this every minute while it waits for anything; it is not progress (vLLM, distributed/device_communicators).
NOISE = re.compile(r"shm_broadcast|No available shared memory broadcast block")


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


class Docker:
    """The few Engine API calls that a rank needs."""

    def __init__(self, socket_path):
        self.socket_path = socket_path
        self.api = DockerApi(socket_path, timeout=10)

    def inspect(self, name):
        return self.api.inspect_container(name)

    def start(self, name):
        """An empty text, or what the engine said against it."""
        return self._post(self.api, f"/containers/{name}/start", None)

    def stop(self, name, seconds):
        return self._post(DockerApi(self.socket_path, timeout=seconds + 60), f"/containers/{name}/stop", {"t": int(seconds)})

    @staticmethod
    def _post(api, path, query):
        try:
            api.call("POST", path, query=query)
        except DockerError as exc:
            return str(exc)
        return ""

    def cpu_seconds(self, name):
        """CPU time of all processes of the container: work without a log line is progress too."""
        status, document = self.api.request("GET", f"/containers/{name}/stats", query={"stream": "false", "one-shot": "true"})
        if status != 200:
            return None
        return document.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0) / 1e9

    def follow_logs(self, name):
        """Every line of the container's log, until it ends."""
        frames = FrameReader()
        for piece in self.api.stream("GET", f"/containers/{name}/logs", query={"follow": 1, "stdout": 1, "stderr": 1}):
            yield from frames.lines(piece)


class Paths:
    """Where a deployment keeps what on this node."""

    def __init__(self, state_dir):
        self.state_dir = state_dir
        self.rank = os.path.join(state_dir, "rank.json")
        self.wanted = os.path.join(state_dir, "wanted.json")
        # On a tmpfs where the service manager gives one: a heartbeat a second is no write for a disk.
        self.heartbeat = heartbeat_path(state_dir)


class Watcher:
    """Reads one run of the container's log in a thread; remembers its tail and when something last moved."""

    def __init__(self, docker, name, run):
        self.docker, self.name, self.run = docker, name, run
        self.tail = collections.deque(maxlen=TAIL_LINES)
        self.lines = 0
        self.last_line = ""
        self.last_progress = time.time()
        self.cpu = None
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self):
        try:
            for line in self.docker.follow_logs(self.name):
                self._on_line(line)
        except DockerError:
            return  # the engine went away: the next heartbeat says so

    def _on_line(self, line):
        self.tail.append(line[:2000])
        if line.strip() and not NOISE.search(line):
            self.lines += 1
            self.last_line = line[:300]
            self.last_progress = time.time()

    def note_cpu(self, seconds):
        """A rank that burns half a core since the last look is at work (compile, load); a blocked one is not."""
        now = time.time()
        if seconds is not None and self.cpu is not None and seconds - self.cpu[1] > 0.5 * (now - self.cpu[0]):
            self.last_progress = now
        if seconds is not None:
            self.cpu = (now, seconds)


class Service:
    """The loop of ``run``."""

    def __init__(self, state_dir):
        self.paths = Paths(state_dir)
        self.rank = {}
        self.docker = None
        self.watcher = None
        self.done_start_id = None
        self.stopping = None
        self.error = ""
        self.cpu_at = 0.0

    def step(self):
        """One look at the container and one heartbeat."""
        self.rank = read_json(self.paths.rank, {})
        wanted = read_json(self.paths.wanted, {"action": "stop", "id": ""})
        container = None
        if self.rank:
            self.docker = Docker(self.rank["docker_socket"])
            try:
                container = self.docker.inspect(self.rank["container"])
                container = self.act(wanted, container)
                self.error = self.error if wanted["action"] == "run" else ""
            except DockerError as exc:
                self.error = str(exc)
        self.watch(container)
        self.beat(wanted, container)

    def act(self, wanted, container):
        """Start a wanted rank once per request, and stop an unwanted one. A rank that died stays dead: the group decides."""
        name = self.rank["container"]
        running = bool(container) and container["State"]["Running"]
        if wanted["action"] == "run" and wanted["id"] != self.done_start_id:
            self.done_start_id = wanted["id"]
            if container and started_since(container, wanted.get("at", 0)):
                return container  # carried out before this service was restarted; if the rank has died since, it stays dead
            self.error = self.docker.start(name) if container else f"there is no container {name}"
            return self.docker.inspect(name)
        if wanted["action"] == "stop" and running and self.stopping is None:
            self.stopping = threading.Thread(target=self._stop, args=(name, self.rank["stop_timeout"]), daemon=True)
            self.stopping.start()
        return container

    def _stop(self, name, seconds):
        error = self.docker.stop(name, seconds)
        if error:
            self.error = error
        self.stopping = None

    def watch(self, container):
        if container is None:
            self.watcher = None
            return
        run = (container["Id"], container["State"]["StartedAt"])
        if self.watcher is None or self.watcher.run != run:
            self.watcher = Watcher(self.docker, container["Id"], run)
        if container["State"]["Running"] and time.time() - self.cpu_at >= 5:
            self.cpu_at = time.time()
            try:
                self.watcher.note_cpu(self.docker.cpu_seconds(container["Id"]))
            except DockerError as exc:
                self.error = str(exc)

    def beat(self, wanted, container):
        write_json(self.paths.heartbeat, {
            "format": 1,
            "time": time.time(),
            "deployment": self.rank.get("deployment", ""),
            "rank": self.rank.get("rank"),
            "boot_id": read_text("/proc/sys/kernel/random/boot_id").strip(),
            "wanted": wanted,
            "started_id": self.done_start_id,
            "error": self.error,
            "container": summary(container),
            "memory": memory(),
            "progress": {
                "lines": self.watcher.lines if self.watcher else 0,
                "last_line": self.watcher.last_line if self.watcher else "",
                "last_progress": self.watcher.last_progress if self.watcher else time.time(),
            },
            "tail": list(self.watcher.tail) if self.watcher else [],
        })

    def run(self):
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *dummy: ended.set())
        signal.signal(signal.SIGINT, lambda *dummy: ended.set())
        while not ended.is_set():
            begun = time.monotonic()
            self.step()
            ended.wait(max(0.0, POLL_SECONDS - (time.monotonic() - begun)))


def started_since(container, moment):
    """Whether the container was started at or after a Unix time; the engine's times are cut to whole seconds here."""
    started = container["State"]["StartedAt"]
    if started.startswith("0001"):
        return False
    return calendar.timegm(time.strptime(started[:19], "%Y-%m-%dT%H:%M:%S")) >= int(moment)


def memory():
    values = dict(re.findall(r"^(MemTotal|MemAvailable|SwapFree):\s+(\d+)", read_text("/proc/meminfo"), re.MULTILINE))
    return {"total_kib": int(values.get("MemTotal", 0)), "available_kib": int(values.get("MemAvailable", 0))}


def local_state(paths, tail=TAIL_LINES):
    """This rank's heartbeat with its age; "service" says whether anybody is at home."""
    beat = read_json(paths.heartbeat)
    if beat is None:
        return {"service": "never", "error": "the service has written no heartbeat", "container": None, "tail": []}
    age = time.time() - beat["time"]
    beat["age"] = round(age, 1)
    beat["service"] = "alive" if age < HEARTBEAT_STALE_SECONDS else "silent"
    beat["tail"] = beat["tail"][-tail:] if tail else []
    return beat


def local_order(paths, action, seconds):
    """Write what is wanted and wait until the service has done it."""
    order = {"action": action, "id": f"{time.time():.6f}", "at": time.time()}
    write_json(paths.wanted, order)
    until = time.monotonic() + seconds
    state = local_state(paths)
    while time.monotonic() < until:
        state = local_state(paths)
        running = bool(state["container"]) and state["container"]["running"]
        if state["service"] == "alive" and state.get("wanted", {}).get("id") == order["id"]:
            if action == "run" and state["started_id"] == order["id"]:
                return state
            if action == "stop" and not running:
                return state
        time.sleep(0.1)
    state["error"] = state.get("error") or f"the service did not {action} the rank within {seconds:.0f} s"
    return state


def multiplexing(folder):
    """ssh options by which one login serves all polls of a wait. The socket lies beside the key: in a directory of the calling
    account, and short enough (sun_path holds 107 characters, ssh's own name takes 60 of them)."""
    if len(folder) > 45:
        return []
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/c-%C", "-o", "ControlPersist=60"]


class Group:
    """All ranks, seen from rank 0. The workers are asked over the fabric with the node key, which may say nothing else."""

    def __init__(self, paths):
        self.paths = paths
        self.rank = read_json(paths.rank, {})

    def ask(self, peer, verb, seconds):
        if peer["rank"] == self.rank["rank"]:
            if verb == "state":
                return local_state(self.paths)
            return local_order(self.paths, "run" if verb == "start" else "stop", seconds)
        command = [
            "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=yes",
            "-o", f"UserKnownHostsFile={self.rank['known_hosts']}", "-o", "IdentitiesOnly=yes", "-i", self.rank["key"],
            *multiplexing(os.path.dirname(self.rank["key"])),
            "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2",
            "-l", peer["user"], peer["address"], f"{verb} {self.rank['deployment']}",
        ]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds + 10, check=False)
        except subprocess.TimeoutExpired:
            return {"service": "unreachable", "error": f"no answer to {verb!r} within {seconds + 10:.0f} s", "container": None, "tail": []}
        try:
            return json.loads(done.stdout)
        except ValueError:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return {"service": "unreachable", "error": said[-1] if said else f"ssh ended with {done.returncode}", "container": None, "tail": []}

    def ask_all(self, peers, verb, seconds):
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(peers))) as pool:
            answers = pool.map(lambda peer: self.ask(peer, verb, seconds), peers)
            return {str(peer["rank"]): answer for peer, answer in zip(peers, answers)}

    def state(self):
        return self.ask_all(self.rank["peers"], "state", 5)

    def stop(self):
        return self.ask_all(self.rank["peers"], "stop", self.rank["stop_timeout"] + 15)

    def start(self):
        """Workers first: rank 0 opens the rendezvous only once everyone it waits for is there."""
        workers = [peer for peer in self.rank["peers"] if peer["rank"] != 0]
        answers = self.ask_all(workers, "start", 60)
        if any(answer.get("error") for answer in answers.values()):
            return answers
        answers.update(self.ask_all([peer for peer in self.rank["peers"] if peer["rank"] == 0], "start", 60))
        return answers


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["run", "state", "start", "stop", "group-state", "group-start", "group-stop"])
    parser.add_argument("state_dir")
    parser.add_argument("--tail", type=int, default=TAIL_LINES)
    options = parser.parse_args(arguments)
    paths = Paths(options.state_dir)
    if options.verb == "run":
        Service(options.state_dir).run()
        return 0
    rank = read_json(paths.rank)
    if rank is None:
        answer = {"service": "absent", "error": f"{options.state_dir} holds no rank", "container": None, "tail": []}
    elif options.verb == "state":
        answer = local_state(paths, options.tail)
    elif options.verb == "start":
        answer = local_order(paths, "run", 60)
    elif options.verb == "stop":
        answer = local_order(paths, "stop", rank["stop_timeout"] + 15)
    else:
        ranks = getattr(Group(paths), options.verb[len("group-"):])()
        answer = {"ranks": ranks, "error": "; ".join(f"rank {rank}: {one['error']}" for rank, one in sorted(ranks.items()) if one.get("error"))}
    json.dump(answer, sys.stdout)
    sys.stdout.write("\n")
    return 1 if answer.get("error") else 0


if __name__ == "__main__":
    sys.exit(main())
