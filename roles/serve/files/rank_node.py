# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The service of one rank: looks at its container once a second, starts and stops it as wanted, writes a heartbeat.

Beside the loop run the memory guard and, on rank 0, the keeper of the group.
"""

from __future__ import annotations

import calendar
import collections
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time

import _memory
import rank_guard
import rank_keeper
from _docker_api import DockerApi, DockerError
from _nccl_log import given_way, line_findings
from _rank_state import FrameReader, boot_identity, read_json, summary, write_json
from rank_group import TAIL_LINES, Group, Paths, is_ready, local_state

POLL_SECONDS = 1.0
# Between the polite and the hard signal when memory runs out. It may fall by a GiB in a second.
GUARD_GRACE_SECONDS = 0.3
SOURCE_SECONDS = 5.0
# For an answer of the engine to a look, and until an engine without one counts as gone with its container. A start may take longer.
LOOK_SECONDS, ENGINE_PATIENCE_SECONDS, START_SECONDS = 3.0, 30.0, 60.0
# Bytes to or from disks between two looks that count as work; a little is written by any process that only waits.
LEAST_MOVED = 1 << 20
# Until a watched worker that rank 0 does not ask any more ends its rank. Twelve times the slowest that rank 0 ever asks, and far longer than its service
# takes to start again or than it waits itself before it ends a group over a rank that does not answer.
ORPHAN_SECONDS = 12 * rank_keeper.IDLE_POLL_SECONDS
# With locked memory each thread's stack is held; nothing here recurses.
STACK_BYTES = 512 << 10
# What NCCL's log says of its way stands at its beginning, in a few lines.
NCCL_FINDINGS = 8
# The head says this every minute while it waits for anything; it is not progress (vLLM, distributed/device_communicators).
NOISE = re.compile(r"shm_broadcast|No available shared memory broadcast block")


def say(line):
    """A line for the journal."""
    print(line, file=sys.stderr, flush=True)


def notify(text):
    """Tell the service manager, as sd_notify does: the line that ``systemctl status`` shows."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(text.encode())


class Docker:
    """The few Engine API calls that a rank needs."""

    def __init__(self, socket_path):
        self.socket_path = socket_path
        # Shorter than what makes a heartbeat stale: an engine that is busy is no rank that is gone.
        self.api = DockerApi(socket_path, timeout=LOOK_SECONDS)

    def inspect(self, name):
        return self.api.inspect_container(name)

    def start(self, name):
        """An empty text, or what the engine said against it."""
        return self._post(DockerApi(self.socket_path, timeout=START_SECONDS), f"/containers/{name}/start", None)

    def stop(self, name, seconds):
        return self._post(DockerApi(self.socket_path, timeout=seconds + 60), f"/containers/{name}/stop", {"t": int(seconds)})

    def kill(self, name, signal_name):
        return self._post(DockerApi(self.socket_path, timeout=10), f"/containers/{name}/kill", {"signal": signal_name})

    @staticmethod
    def _post(api, path, query):
        try:
            api.call("POST", path, query=query)
        except DockerError as exc:
            return str(exc)
        return ""

    def names(self):
        """Names of the running containers by id."""
        return {entry["Id"]: (entry.get("Names") or ["/"])[0].lstrip("/") for entry in self.api.containers(everything=False)}

    def work(self, name):
        """CPU seconds, and bytes to and from disks, of all processes of the container: work without a log line is progress too."""
        status, document = self.api.request("GET", f"/containers/{name}/stats", query={"stream": "false", "one-shot": "true"})
        if status != 200:
            return None
        moved = (document.get("blkio_stats") or {}).get("io_service_bytes_recursive") or []
        bytes_moved = sum(entry.get("value", 0) for entry in moved if entry.get("op", "").lower() in ("read", "write"))
        return document.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0) / 1e9, bytes_moved

    def follow_logs(self, name, since):
        """Every line of the container's log from a Unix time on, until it ends."""
        frames = FrameReader()
        for piece in self.api.stream("GET", f"/containers/{name}/logs", query={"follow": 1, "stdout": 1, "stderr": 1, "since": since}):
            yield from frames.lines(piece)


class Watcher:
    """Reads one run of the container's log in a thread; remembers its tail, when something last moved, and what is wrong with NCCL's way."""

    def __init__(self, docker, name, run, environment):
        self.docker, self.name, self.run = docker, name, run
        self.given = given_way(environment)
        self.nccl = []
        self.tail = collections.deque(maxlen=TAIL_LINES)
        self.lines = 0
        self.last_line = ""
        self.last_progress = time.time()
        self.work = None
        # A container that was started again still has the words of its earlier runs.
        self.since = int(started_at(self.run[1]))
        self.thread = None
        self.follow()

    def follow(self):
        """Go on where the stream ended: containers may outlive a Docker daemon that is started again."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._follow, daemon=True)
            self.thread.start()

    def _follow(self):
        try:
            for line in self.docker.follow_logs(self.name, self.since):
                self.since = f"{time.time():.9f}"
                self._on_line(line)
        except DockerError:
            return  # the engine went away: the next heartbeat says so

    def _on_line(self, line):
        self.tail.append(line[:2000])
        for finding in line_findings(line, *self.given):
            if finding not in self.nccl and len(self.nccl) < NCCL_FINDINGS:
                self.nccl.append(finding)
        if line.strip() and not NOISE.search(line):
            self.lines += 1
            self.last_line = line[:300]
            self.last_progress = time.time()

    def note_work(self, work):
        """A rank that burns half a core since the last look is at work (compile, load), and so is one that waits for a slow disk; a blocked
        one is not."""
        now = time.time()
        if work is None:
            return
        if self.work is not None:
            then, seconds, moved = self.work
            if work[0] - seconds > 0.5 * (now - then) or work[1] - moved >= LEAST_MOVED:
                self.last_progress = now
        self.work = (now, *work)


def mount_table(text):
    """Mount point to (type, device) from the text of mountinfo; the last mount on a point is the one that counts."""
    found = {}
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if separator and len(fields) > 4 and len(more) > 1:
            found[re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])] = (more[0], more[1])
    return found


def mount_of(path, table):
    """The mount point on which a path lies."""
    while path not in table and path != "/":
        path = os.path.dirname(path)
    return path


class Sources:
    """What the container binds: the files must be there, and lie on what was mounted at the last start that a play made.

    An empty directory in the place of a mount would start an engine without weights. Each look has a time limit, since a dead
    network mount answers nobody.
    """

    def __init__(self, paths, mountinfo=("/proc/1/mountinfo", "/proc/self/mountinfo")):
        self.paths, self.mountinfo = paths, mountinfo
        self.looking = None
        self.found = []
        self.at = float("-inf")

    def table(self):
        # Process 1's view: this service's own has mounts that only it sees.
        return mount_table(next((text for text in map(_memory.read_text, self.mountinfo) if text), ""))

    def lacking(self, rank, container_id, fresh=False):
        """What lacks, in words; empty when the rank may start."""
        if self.looking and self.looking.is_alive():
            self.looking.join(SOURCE_SECONDS if fresh else 0)
        elif fresh or time.monotonic() - self.at >= SOURCE_SECONDS:
            self.at = time.monotonic()
            self.looking = threading.Thread(target=self._look, args=(rank, container_id), daemon=True)
            self.looking.start()
            self.looking.join(SOURCE_SECONDS)
        if self.looking and self.looking.is_alive():
            return [f"{', '.join(rank.get('mounts', []))}: no answer for {SOURCE_SECONDS:.0f} s, as from a dead network mount"]
        return self.found

    def _look(self, rank, container_id):
        # First the files: a look at them is what makes an automount mount.
        absent = [path for path in rank.get("mounts", []) if not os.path.exists(path)]
        recorded, table, found = read_json(self.paths.sources, {}), self.table(), []
        gone = set()
        if recorded.get("container") == container_id:
            for path, (point, kind, device) in sorted(recorded["sources"].items()):
                if point not in table or table[point][0] != kind:
                    gone.add(path)
                    found.append(f"{point} is not mounted ({kind}, {device}), and {path} lies on it")
        for path in absent:
            if path not in gone:
                gone.add(path)
                found.append(f"{path} is not there")
        for artefact in rank.get("artefacts", []):
            lost = [name for name in artefact["required"] if not os.path.exists(os.path.join(artefact["path"], name))]
            if lost and artefact["path"] not in gone:
                found.append(f"{artefact['path']} of {artefact['name']} lacks {', '.join(lost)}")
        self.found = found

    def record(self, rank, container_id):
        """After a start: remember the mounts, once for each container. A play that makes a new one has checked every file before."""
        if read_json(self.paths.sources, {}).get("container") == container_id:
            return
        table = self.table()
        points = {path: mount_of(os.path.realpath(path), table) for path in rank.get("mounts", [])}
        sources = {path: (point, *table[point]) for path, point in points.items() if point != "/" and point in table}
        write_json(self.paths.sources, {"container": container_id, "sources": sources})


class Hearing:
    """How long rank 0 has asked nothing, by a clock that nobody sets. A mark that was never made says nothing."""

    def __init__(self, paths):
        self.paths = paths
        self.begin()

    def begin(self):
        self.seen, self.at = stamp(self.paths.asked), time.monotonic()

    def silence(self):
        seen = stamp(self.paths.asked)
        if seen is None or seen != self.seen:
            self.begin()
        return time.monotonic() - self.at


def still_held(idle, available, used, boot, tolerance):
    """What a stopped engine still holds of the memory, in words; empty when nothing, or when the idle level is of another boot."""
    if not idle or idle.get("boot") != boot:
        return ""
    level, dummy = _memory.projected_available(idle, used)
    if _memory.memory_back(available, level, tolerance):
        return ""
    return f"about {_memory.gib(level - available)} of memory are still held since the last stop (wanted {_memory.gib(level - tolerance)} available)"


class Service:
    """The loop of ``run``."""

    def __init__(self, state_dir):
        self.paths = Paths(state_dir)
        self.rank = {}
        self.docker = None
        self.container = None
        self.watcher = None
        self.done_start_id = self.seen_start_id = None
        self.starting = self.stopping = None
        self.ending = threading.Lock()
        self.error = ""  # of the last start or stop
        self.look_error, self.looked_at = "", 0.0
        self.cpu_at = self.held_at = 0.0
        self.held = ""
        self.wanted = {"action": "stop", "id": ""}
        self.ready = False
        self.locked = False
        self.sources = Sources(self.paths)
        self.hearing = Hearing(self.paths)
        self.guard = rank_guard.Guard(self.mode, self.on_trip, self.on_report)
        self.guard.tripped = read_json(self.paths.wanted, {}).get("report")
        self.keeper = rank_keeper.Keeper(self.paths, lambda rank: Group(self.paths, rank), say, self.on_trip)

    # The loop

    def step(self):
        """One look at the container and one heartbeat."""
        self.rank = read_json(self.paths.rank, {})
        self.wanted = read_json(self.paths.wanted, {"action": "stop", "id": ""})
        self.guard.options = self.rank.get("guard") or {}
        container = None
        if self.rank:
            self.docker = Docker(self.rank["docker_socket"])
            container = self.look()
            self.error = self.error if self.wanted["action"] == "run" else ""
        self.container = container
        self.ready = is_ready(self.paths, self.wanted)
        self.end_orphan()
        self.watch(container)
        lacking = self.lacking(container)
        self.beat(self.wanted, container, lacking)
        notify(f"STATUS={self.status(container, lacking)}")

    def look(self):
        """The container as the engine has it. An engine that is busy for a while changes nothing of what is known."""
        try:
            container = self.act(self.wanted, self.inspect())
        except DockerError as exc:
            self.look_error = str(exc)
            return self.container if time.monotonic() - self.looked_at < ENGINE_PATIENCE_SECONDS else None
        self.look_error, self.looked_at = "", time.monotonic()
        return container

    def inspect(self):
        """A start may be done in between: it is told only with what was seen after it, else an earlier end would look like one of this start."""
        done = self.done_start_id
        container = self.docker.inspect(self.rank["container"])
        self.seen_start_id = done
        return container

    def act(self, wanted, container):
        """Start a wanted rank once per request, and stop an unwanted one. A rank that died stays dead: the group decides."""
        name = self.rank["container"]
        running = bool(container) and container["State"]["Running"]
        if wanted["action"] == "run" and wanted["id"] != self.done_start_id and self.starting is None:
            if container and started_since(container, wanted.get("at", 0)):
                self.done_start_id = self.seen_start_id = wanted["id"]
                return container  # carried out before this service was restarted; if the rank has died since, it stays dead
            self.guard.tripped = None
            starting = self.starting = threading.Thread(target=self._start, args=(name, container, wanted["id"]), daemon=True)
            starting.start()
            starting.join(2.0)  # mostly it takes no longer; heartbeats go on where it does
            return container if starting.is_alive() else self.inspect()
        if wanted["action"] == "stop" and running:
            if wanted.get("now"):
                self.end_now(container)
            elif self.stopping is None:
                self.stopping = threading.Thread(target=self._stop, args=(name, self.rank["stop_timeout"]), daemon=True)
                self.stopping.start()
        return container

    def start(self, name, container):
        """An empty text, or why it was not started."""
        if not container:
            return f"there is no container {name}"
        lacking = self.sources.lacking(self.rank, container["Id"], fresh=True)
        if lacking:
            return f"not started: {'; '.join(lacking)}"
        error = self.docker.start(name)
        if not error:
            self.sources.record(self.rank, container["Id"])
        return error

    def _start(self, name, container, order):
        self.error = self.start(name, container)
        self.done_start_id = order
        self.starting = None

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
            self.watcher = Watcher(self.docker, container["Id"], run, container["Config"].get("Env") or [])
        if container["State"]["Running"] and time.time() - self.cpu_at >= 5:
            self.cpu_at = time.time()
            self.watcher.follow()
            try:
                self.watcher.note_work(self.docker.work(container["Id"]))
            except DockerError as exc:
                self.look_error = str(exc)

    def lacking(self, container):
        """What this node lacks for a start; never asked while the rank runs."""
        if not container or container["State"]["Running"]:
            return []
        held = self.memory_held()
        return self.sources.lacking(self.rank, container["Id"]) + ([held] if held else [])

    def memory_held(self):
        idle, now = read_json(os.path.join(self.paths.state_dir, "idle.json"), {}), time.monotonic()
        if not idle or "memory" not in self.rank or now - self.held_at < SOURCE_SECONDS:
            return self.held if idle else ""
        self.held_at = now
        try:
            used = _memory.usage(_memory.read_processes(), [], self.docker.names(), ())
            self.held = still_held(idle, self.guard.meminfo.available(), used, boot_identity(), self.rank["memory"]["tolerance"])
        except DockerError:
            self.held = ""
        return self.held

    def beat(self, wanted, container, lacking):
        write_json(self.paths.heartbeat, {
            "format": 1,
            "time": time.time(),
            "deployment": self.rank.get("deployment", ""),
            "rank": self.rank.get("rank"),
            "boot_id": boot_identity(),
            "wanted": {name: wanted[name] for name in ("action", "id", "at", "by") if name in wanted},
            "started_id": self.seen_start_id,
            "ready": self.ready,
            "error": self.error or self.look_error,
            "looked": not self.look_error,
            "lacking": lacking,
            "container": summary(container),
            "memory": memory(self.guard),
            "guard": {"mode": self.mode(), "floor": self.guard.floor(self.mode()), "locked": self.locked, "tripped": brief(self.guard.tripped)},
            "keeper": self.keeper.status,
            "orphan": self.orphan(),
            "progress": {
                "lines": self.watcher.lines if self.watcher else 0,
                "last_line": self.watcher.last_line if self.watcher else "",
                "last_progress": self.watcher.last_progress if self.watcher else time.time(),
                "nccl": list(self.watcher.nccl) if self.watcher else [],
            },
            "tail": list(self.watcher.tail) if self.watcher else [],
        })

    def status(self, container, lacking):
        """The line of ``systemctl status``."""
        if not self.rank:
            return "no rank yet"
        state = (container or {}).get("State")
        own = "no container" if state is None else "runs" if state["Running"] else f"{state['Status']} with code {state['ExitCode']}"
        parts = [f"rank {self.rank['rank']} {own}", self.error, self.look_error, self.orphan(), *lacking]
        if self.guard.tripped:
            parts.append(self.guard.tripped["reason"])
        if self.rank["rank"] == 0:
            parts.append(self.keeper.status)
        return "; ".join(part for part in parts if part).replace("\n", " ")[:2000]

    # The watch of a worker

    def end_orphan(self):
        """With the node of rank 0 gone nobody else ends this rank: its engine waits for ever and holds its memory. When rank 0 is back, its keeper
        starts the group again."""
        if not self.rank.get("watch") or self.rank["rank"] == 0 or self.mode() != "serving":
            self.hearing.begin()
            return
        # A play that stops one node after another may have come to rank 0 first.
        patience = ORPHAN_SECONDS + self.rank["stop_timeout"]
        if self.hearing.silence() < patience or not self.ending.acquire(blocking=False):
            return
        try:
            if read_json(self.paths.wanted, {}).get("id") == self.wanted["id"]:
                self._end_orphan(f"rank 0 asked nothing for {patience:.0f} s")
        finally:
            self.ending.release()

    def _end_orphan(self, reason):
        # Before all that needs the disk: a full one must not keep a rank that serves nobody.
        self.stopping = threading.Thread(target=self._stop, args=(self.rank["container"], self.rank["stop_timeout"]), daemon=True)
        self.stopping.start()
        now = time.time()
        event = {"by": "watch", "at": now, "reason": reason, "ranks": {str(self.rank["rank"]): local_state(self.paths)}}
        self.wanted = {"action": "stop", "by": "watch", "reason": reason, "id": f"{now:.6f}", "at": now}
        self.hearing.begin()
        try:
            write_json(self.paths.wanted, self.wanted)
            say(f"watch: {reason}; this rank is ended; evidence in {rank_keeper.write_event(self.paths, event)}")
        except OSError as exc:
            say(f"watch: {reason}; this rank is ended; no evidence: {exc}")

    def orphan(self):
        """Why this worker ended its rank by itself; empty when it did not."""
        return self.wanted.get("reason", "") if self.wanted.get("by") == "watch" and self.rank.get("rank") != 0 else ""

    # The guard

    def mode(self):
        """What the guard has to watch over now."""
        running = bool(self.container) and self.container["State"]["Running"]
        if not running or self.wanted["action"] != "run":
            return ""
        return "serving" if self.ready else "loading"

    def on_trip(self, report):
        """Memory runs out here, or on a rank of which rank 0 has heard: end this rank at once, and from rank 0 all others."""
        if not self.ending.acquire(blocking=False):
            return
        try:
            if self.wanted["action"] != "run":
                return
            if report.setdefault("rank", self.rank["rank"]) != self.rank["rank"]:
                say(f"{report['reason']}; all ranks are ended")
            self.guard.tripped = report
            report.setdefault("start_id", self.done_start_id)
            rank_guard.in_thread(self.end_now, self.container)
            if self.rank["rank"] == 0:
                group = Group(self.paths, self.rank)
                for peer in group.workers:
                    if peer["rank"] != report["rank"]:
                        rank_guard.in_thread(group.ask, peer, "stop-now", 10)
            # After the signals are on their way: a write may have to wait for memory.
            self.wanted = {"action": "stop", "by": "guard", "id": f"{time.time():.6f}", "at": time.time(), "report": brief(report)}
            write_json(self.paths.wanted, self.wanted)
        finally:
            self.ending.release()

    def end_now(self, container):
        """Polite for a moment, then hard: by the engine, and past it where this service may."""
        if not container or not container["State"]["Running"]:
            return
        name, pid = container["Id"], container["State"].get("Pid", 0)
        self.docker.kill(name, "SIGTERM")
        time.sleep(GUARD_GRACE_SECONDS)
        if pid and name in _memory.read_text(f"/proc/{pid}/cgroup"):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.docker.kill(name, "SIGKILL")

    def on_report(self, report):
        path = rank_keeper.write_event(self.paths, report)
        say(f"{rank_guard.report_line(report)}; samples in {path}")

    # The threads

    def run(self):
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *dummy: ended.set())
        signal.signal(signal.SIGINT, lambda *dummy: ended.set())
        threading.stack_size(STACK_BYTES)
        self.step()
        self.guard.start(ended)
        threading.Thread(target=rank_keeper.run, args=(self.keeper, self, ended), daemon=True, name="keeper").start()
        self.locked = rank_guard.lock_memory()
        notify("READY=1")
        while not ended.is_set():
            begun = time.monotonic()
            self.step()
            self.rest(ended, begun)

    def rest(self, ended, begun):
        """Until the next look; an order that comes meanwhile is carried out at once."""
        seen = stamp(self.paths.wanted)
        while time.monotonic() - begun < POLL_SECONDS and not ended.wait(0.1):
            if stamp(self.paths.wanted) != seen:
                return


def stamp(path):
    """Another value after each replacement of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def started_at(text):
    """The Unix time of one of the engine's times, 2026-01-31T10:20:30.123456789Z; 0 for a container that never ran."""
    if text.startswith("0001"):
        return 0.0
    fraction = re.match(r"\.\d+", text[19:])
    return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")) + (float(fraction.group()) if fraction else 0.0)


def started_since(container, moment):
    """Whether the container was started at or after a Unix time."""
    started = started_at(container["State"]["StartedAt"])
    return started > 0 and started >= moment


def memory(guard):
    """In KiB: what there is, what is available now, and the lowest of the last ten seconds."""
    found = re.search(r"^MemTotal:\s+(\d+)", _memory.read_text("/proc/meminfo"), re.MULTILINE)
    available = guard.meminfo.available() or 0
    lowest = min(available, guard.lowest(10) or available)
    return {"total_kib": int(found.group(1)) if found else 0, "available_kib": available // 1024, "lowest_kib": lowest // 1024}


def brief(report):
    """A guard's report without its samples, which only the event's file keeps."""
    # Of a copy: the guard's thread may be adding to it.
    return {name: value for name, value in dict(report).items() if name != "samples"} if report else None
