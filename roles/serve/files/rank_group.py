# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One rank as its service tells it, and all ranks as rank 0 sees and orders them.

Loaded anew for each word that comes over the fabric, so nothing is imported here that a plain answer does not need.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time

from _rank_state import heartbeat_path, read_json, write_json

HEARTBEAT_STALE_SECONDS = 5.0
TAIL_LINES = 60
# For a rank to be started; and what an answer over the fabric may take longer than the act.
START_SECONDS, ANSWER_SECONDS = 75, 10
# Who may stop a rank and mean it to come back: the keeper of rank 0. Every other stop stays one, also across reboots.
KEEPERS = ("boot", "watch")
# A watched worker hears from rank 0 each second; that it did is written down this often.
NOTE_SECONDS = 10.0


class Paths:
    """Where a deployment keeps what on this node."""

    def __init__(self, state_dir):
        self.state_dir = state_dir
        self.rank = os.path.join(state_dir, "rank.json")  # what the play says
        self.wanted = os.path.join(state_dir, "wanted.json")  # the last order
        self.ready = os.path.join(state_dir, "ready.json")  # the start that was proven
        self.sources = os.path.join(state_dir, "sources.json")  # what was mounted where at the last start
        self.group = os.path.join(state_dir, "group.json")  # rank 0: who started the group, and which boots that was in
        self.restarts = os.path.join(state_dir, "restarts.json")  # rank 0: what the keeper did since the last play
        self.lease = os.path.join(state_dir, "lease.json")
        self.events = os.path.join(state_dir, "events")
        self.asked = os.path.join(state_dir, "asked")  # a worker with a watch: changes when rank 0 asks or orders
        # On a tmpfs where the service manager gives one: a heartbeat a second is no write for a disk.
        self.heartbeat = heartbeat_path(state_dir)


def is_ready(paths, wanted):
    """Whether the start that is wanted now was proven. An id of its own for each start makes an old mark worthless."""
    return wanted["action"] == "run" and read_json(paths.ready, {}).get("id") == wanted["id"]


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


def local_order(paths, action, seconds, **more):
    """Write what is wanted and wait until the service has done it."""
    order = {"action": action, "id": f"{time.time():.6f}", "at": time.time(), **more}
    write_json(paths.wanted, order)
    until = time.monotonic() + seconds
    state = local_state(paths)
    while time.monotonic() < until:
        state = local_state(paths)
        if state["service"] == "alive":
            # A memory guard may have given an order of its own since.
            if action == "run" and state["started_id"] == order["id"] and state["looked"]:
                return state
            running = bool(state["container"]) and state["container"]["running"]
            if action == "stop" and state["wanted"]["id"] == order["id"] and not running:
                return state
        time.sleep(0.1)
    state["error"] = state.get("error") or f"the service did not {action} the rank within {seconds:.0f} s"
    return state


def mark_ready(paths):
    """The group was proven: from here on the rank serves and no longer loads. An engine that is busy just now is no error of this."""
    wanted = read_json(paths.wanted, {})
    if wanted.get("action") != "run":
        reason = (wanted.get("report") or {}).get("reason") or wanted.get("reason") or "ordered to stop"
        return {**local_state(paths, tail=0), "error": f"the rank is not wanted any more: {reason}"}
    if not is_ready(paths, wanted):  # it may be told more than once
        write_json(paths.ready, {"id": wanted["id"], "at": time.time()})
    return {**local_state(paths, tail=0), "error": ""}


def multiplexing(folder):
    """ssh options by which one login serves all polls of a wait. The socket lies beside the key: in a directory of the calling
    account, and short enough (sun_path holds 107 characters, ssh's own name takes 60 of them)."""
    if len(folder) > 45:
        return []
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/c-%C", "-o", "ControlPersist=60"]


def note_question(paths, rank):
    """Rank 0 lives: what its word over the fabric tells the service here. What cannot be written down is no reason to keep back the answer."""
    if not rank.get("watch") or rank.get("rank") == 0:
        return
    with contextlib.suppress(OSError):
        if os.path.exists(paths.asked) and abs(time.time() - os.path.getmtime(paths.asked)) < NOTE_SECONDS:
            return
        with open(paths.asked, "a", encoding="utf-8"):
            os.utime(paths.asked)


class Group:
    """All ranks, seen from rank 0. The workers are asked over the fabric with the node key, which may say nothing else."""

    def __init__(self, paths, rank=None):
        self.paths = paths
        self.rank = read_json(paths.rank, {}) if rank is None else rank

    @property
    def workers(self):
        return [peer for peer in self.rank["peers"] if peer["rank"] != self.rank["rank"]]

    def ask(self, peer, verb, seconds):
        if peer["rank"] == self.rank["rank"]:
            return self._ask_here(verb, seconds)
        command = [
            "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=yes",
            "-o", f"UserKnownHostsFile={self.rank['known_hosts']}", "-o", "IdentitiesOnly=yes", "-i", self.rank["key"],
            *multiplexing(os.path.dirname(self.rank["key"])),
            "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2",
            "-l", peer["user"], peer["address"], f"{verb} {self.rank['deployment']}",
        ]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds + ANSWER_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {"service": "unreachable", "error": f"no answer to {verb!r} within {seconds + ANSWER_SECONDS:.0f} s", "container": None, "tail": []}
        except OSError as exc:  # no ssh, or no memory for it
            return {"service": "unreachable", "error": str(exc), "container": None, "tail": []}
        try:
            return json.loads(done.stdout)
        except ValueError:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return {"service": "unreachable", "error": said[-1] if said else f"ssh ended with {done.returncode}", "container": None, "tail": []}

    def _ask_here(self, verb, seconds):
        if verb == "state":
            return local_state(self.paths)
        if verb == "ready":
            return mark_ready(self.paths)
        return local_order(self.paths, "run" if verb == "start" else "stop", seconds)

    def ask_all(self, peers, verb, seconds):
        """One thread for each: a rank that does not answer must not delay the others."""
        answers = {}

        def one(peer):
            answers[str(peer["rank"])] = self.ask(peer, verb, seconds)

        threads = [threading.Thread(target=one, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def state(self):
        return self.ask_all(self.rank["peers"], "state", 5)

    def stop(self):
        return self.ask_all(self.rank["peers"], "stop", self.rank["stop_timeout"] + 15)

    def ready(self):
        return self.ask_all(self.rank["peers"], "ready", 5)

    def start(self, by="play"):
        """Workers first: rank 0 opens the rendezvous only once everyone it waits for is there."""
        if by == "play" and os.path.exists(self.paths.restarts):
            os.unlink(self.paths.restarts)  # a person looked at it: the keeper may try again
        answers = self.ask_all(self.workers, "start", START_SECONDS)
        if any(answer.get("error") for answer in answers.values()):
            return answers
        self._record(by, answers)  # before rank 0 runs, so that it never takes a verdict on an earlier start for one on this
        answers.update(self.ask_all([peer for peer in self.rank["peers"] if peer["rank"] == self.rank["rank"]], "start", START_SECONDS))
        self._record(by, answers)
        return answers

    def _record(self, by, answers):
        write_json(self.paths.group, {
            "by": by,
            "at": time.time(),
            "boots": {number: answer.get("boot_id", "") for number, answer in answers.items()},
            "ids": {number: answer.get("started_id", "") for number, answer in answers.items()},
        })


class Poller:
    """Asks one worker for its state, again and again, and remembers the last answer.

    Each worker has a poller of its own: one that is off must not delay the news from another.
    """

    def __init__(self, group, peer, on_answer):
        self.group, self.peer, self.on_answer = group, peer, on_answer
        self.seconds = 1.0
        self.answer = {"service": "unknown", "error": "not asked yet", "container": None, "tail": []}
        self.failing_since = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while not self.ended.is_set():
            begun = time.monotonic()
            answer = self.group.ask(self.peer, "state", 5)
            if answer.get("service") == "alive":
                self.failing_since = None
            elif self.failing_since is None:
                self.failing_since = begun
            # Acted on before others see it: who finds a dead rank shall know whether a guard has ended it.
            self.on_answer(self.peer, answer)
            self.answer = answer
            # In slices, since the pause may become shorter meanwhile.
            while not self.ended.wait(0.1) and time.monotonic() - begun < self.seconds:
                pass

    def lost_for(self):
        """Seconds since the worker answered last; 0 while it does."""
        since = self.failing_since
        return 0.0 if since is None else time.monotonic() - since
