# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rank 0's care for the whole group when no play runs: it brings the group back after a reboot, and watches it when asked to.

The group is always replaced as a whole. One look a second, and each look decides anew from what is on disk and what the
ranks say, so that the keeper itself may be ended and started at any moment.
"""

from __future__ import annotations

import collections
import fcntl
import os
import re
import socket
import subprocess
import time

from _engine_api import call, prove
from _group_channel import StartWatch
from _rank_state import has_ended, keep_newest, process_run_id, read_api_key, read_json, write_json
from rank_group import ANSWER_SECONDS, KEEPERS, START_SECONDS, Poller, is_ready, local_state

# The longest act is a start: the workers' part and then rank 0's, each to its limit. No play may come in between the two.
LEASE_SECONDS = 2 * (START_SECONDS + ANSWER_SECONDS) + 10
KEPT_EVENTS = 10
# While nothing needs a quick answer it is enough to learn of a worker's reboot within this time.
IDLE_POLL_SECONDS = 10.0
GONE_SAMPLES = 3
LOST_SECONDS = 30
CANARY_FAILURES = 3
PROOF_PAUSE_SECONDS = 10
TOKENS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
RUNNING = "vllm:num_requests_running"


# Decisions, without I/O


def rebooted(recorded, now):
    """Ranks whose node has booted since the group was started. An unknown boot is no reboot."""
    return sorted((number for number, boot in now.items() if boot and recorded.get(number) and recorded[number] != boot), key=int)


def pause_before(attempt, first):
    """Seconds before an attempt, counted from 0: none, then the first pause, then three times the last, at most half an hour."""
    return 0 if attempt == 0 else min(1800, first * 3 ** (attempt - 1))


def metric_sums(text):
    """Sums over all labels of the metrics that tell whether an engine is stuck; None for one that is not there."""
    found = {}
    for name in (*TOKENS, RUNNING):
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})?\s+(\S+)", text, re.MULTILINE)
        found[name] = sum(float(value) for value in values) if values else None
    return found


class Frozen:
    """Requests run, no token comes, and the GPU is at rest: each for so many samples in a row. A long prefill fails the last, an idle
    server the first."""

    def __init__(self, samples, idle_watts):
        self.samples, self.idle_watts = samples, idle_watts
        self.seen = collections.deque(maxlen=samples)

    def add(self, sums, watts):
        """The reason to end the group; empty while all is well."""
        tokens = tuple(sums[name] for name in TOKENS)
        if sums[RUNNING] is None or tokens[0] is None or sums[RUNNING] <= 0 or (watts is not None and watts > self.idle_watts):
            self.seen.clear()
            return ""
        if self.seen and self.seen[-1] != tokens:
            self.seen.clear()
        self.seen.append(tokens)
        if len(self.seen) < self.samples:
            return ""
        power = f", the GPU at {watts:.0f} W" if watts is not None else ""
        return f"no token in {self.samples} samples in a row while {sums[RUNNING]:.0f} requests run{power}"


# Readings


def gpu_watts():
    """What the GPU draws; None where nothing gives a number."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=5, check=False)
        return float(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def place_of(api):
    """Address and port at which this node reaches its own API. A record of an older collection has no address."""
    return api.get("address", "127.0.0.1"), api["port"]


def read_metrics(api):
    """The engine's metrics as text; empty when it does not answer."""
    answer = call(*place_of(api), "GET", "/metrics", timeout=5)
    return answer.document if answer.status == 200 and isinstance(answer.document, str) else ""


class Lease:
    """The same lease that plays hold, for the moments in which the keeper gives orders."""

    def __init__(self, paths):
        self.path = paths.lease
        self.run_id = process_run_id(os.getpid())
        self.owner = f"rank service@{socket.gethostname()}"

    def holder(self):
        """Who else holds it now; empty when nobody does."""
        present = read_json(self.path, {})
        run_id = str(present.get("run_id", ""))
        # One keeper writes here: what has our name is of ourselves before a reboot.
        ours = run_id == self.run_id or present.get("owner") == self.owner
        if present.get("expires", 0) <= time.time() or ours or has_ended(run_id):
            return ""
        return str(present.get("owner") or run_id)

    def take(self):
        with self._locked():
            if self.holder():
                return False
            now = time.time()
            write_json(self.path, {"run_id": self.run_id, "owner": self.owner, "since": now, "expires": now + LEASE_SECONDS})
            return True

    def give(self):
        with self._locked():
            if read_json(self.path, {}).get("run_id") == self.run_id:
                os.unlink(self.path)

    def _locked(self):
        new = not os.path.exists(f"{self.path}.lock")
        lock = open(f"{self.path}.lock", "a", encoding="utf-8")  # closing it, by with, gives the lock back
        if new:
            give_to_owner(lock.name)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


def give_to_owner(path):
    """A service with root rights must leave nothing in the state directory that its account cannot write."""
    if os.geteuid() == 0:
        owner = os.stat(os.path.dirname(path))
        os.chown(path, owner.st_uid, owner.st_gid)


def write_event(paths, event):
    """Evidence for a person: one file for each act, the newest ten. Returns its path."""
    if not os.path.isdir(paths.events):
        os.mkdir(paths.events, 0o750)
        give_to_owner(paths.events)
    path = os.path.join(paths.events, f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(event['at']))}-{event['by']}.json")
    write_json(path, event)
    give_to_owner(path)
    keep_newest(paths.events, "*.json", KEPT_EVENTS)
    return path


class Keeper:
    """Lives in rank 0's service. ``group_of`` makes the group from the rank's record, ``say`` takes a line for the journal,
    ``on_trip`` a verdict of a worker's memory guard."""

    def __init__(self, paths, group_of, say, on_trip):
        self.paths, self.group_of, self.say, self.on_trip = paths, group_of, say, on_trip
        self.lease = Lease(paths)
        self.rank = {}
        self.group = None
        self.pollers = {}
        self.status = ""
        self.watch = None  # judges a start; a new one for each
        self.watched_start = ""
        self.proof_at = 0.0
        self.frozen = None
        self.sampled_at = self.canary_at = 0.0
        self.canary_failures = 0
        self.gone = 0

    # One look

    def look(self, rank):
        """What rank 0 has to do now. Returns a line for ``systemctl status``."""
        wanted = read_json(self.paths.wanted, {"action": "stop", "id": ""})
        pending = wanted["action"] == "stop" and wanted.get("by") in KEEPERS
        if wanted["action"] == "stop" and not pending:
            self.stop_polling()
            reason = (wanted.get("report") or {}).get("reason")
            return f"stopped by the {reason}" if reason else "stopped, as ordered"
        self.use(rank, wanted)
        holder = self.lease.holder()
        if holder:
            return f"{holder} holds the lease"
        if pending:
            return self.bring_back(wanted["by"], wanted.get("reason", ""))
        by, reason = self.why_to_end(wanted)
        if reason:
            return self.end(by, reason)
        return self.serve(wanted)

    def use(self, rank, wanted):
        """Follow the rank's record, and poll the workers as often as somebody waits for the news."""
        if rank != self.rank:
            self.stop_polling()
            self.rank, self.group = rank, self.group_of(rank)
        ready = is_ready(self.paths, wanted)
        quick = not ready or bool((rank.get("guard") or {}).get("serving")) or bool(rank.get("watch"))
        for peer in self.group.workers:
            poller = self.pollers.get(str(peer["rank"]))
            if poller is None:
                poller = self.pollers[str(peer["rank"])] = Poller(self.group, peer, self.on_answer)
            poller.seconds = 1.0 if quick else IDLE_POLL_SECONDS
        if wanted["id"] != self.watched_start:
            self.watched_start = wanted["id"]
            self.watch = StartWatch(rank["timeouts"]["stall"])
            self.proof_at, self.frozen, self.gone, self.canary_failures = 0.0, None, 0, 0
            self.canary_at = time.monotonic()

    def stop_polling(self):
        for poller in self.pollers.values():
            poller.ended.set()
        self.pollers = {}

    def on_answer(self, peer, answer):
        """In a poller's thread: a worker whose guard has acted takes all others with it, at once."""
        report = (answer.get("guard") or {}).get("tripped")
        if not report:
            return
        started = read_json(self.paths.group, {}).get("ids", {}).get(str(peer["rank"]))
        if started and started == report.get("start_id") and read_json(self.paths.wanted, {}).get("action") == "run":
            self.on_trip({**report, "rank": report.get("rank", peer["rank"]), "reason": f"rank {peer['rank']}: {report['reason']}"})

    def answers(self):
        found = {number: poller.answer for number, poller in self.pollers.items()}
        found[str(self.rank["rank"])] = local_state(self.paths)
        return found

    # Reasons

    def why_to_end(self, wanted):
        """By which of the keeper's two offices the group must be ended now, and why; two empty texts while it may go on."""
        answers, group = self.answers(), read_json(self.paths.group, {})
        if self.rank.get("boot"):
            boots = {number: answer.get("boot_id", "") for number, answer in answers.items() if answer.get("service") == "alive"}
            found = rebooted(group.get("boots", {}), boots)
            if found:
                return "boot", f"rank {' and '.join(found)} booted since the group was started"
        if not is_ready(self.paths, wanted):
            return self.why_not_ready(answers, group)
        if self.rank.get("watch"):
            reason = self.rank_gone(answers) or self.engine_stuck()
            return ("watch", reason) if reason else ("", "")
        return "", ""

    def why_not_ready(self, answers, group):
        """A start of the keeper's own that failed. One of a play that has ended is the watch's business, if there is a watch."""
        by = group.get("by") if group.get("by") in KEEPERS else "watch" if self.rank.get("watch") else ""
        if not by or any("container" not in answer or answer.get("service") == "unknown" for answer in answers.values()):
            return "", ""
        # A poll from before the start has seen the end of an earlier run.
        ids = group.get("ids", {})
        early = any(answer.get("service") == "alive" and answer.get("started_id") != ids.get(number) for number, answer in answers.items())
        verdict = {"verdict": "waiting"} if early else self.watch.judge(answers, 0, time.time())
        # What a memory guard ended stays down; its own way to the other ranks is faster than this.
        if verdict["verdict"] not in ("waiting", "guard"):
            return by, verdict["reason"]
        if time.time() - group.get("at", time.time()) > self.rank["timeouts"]["ready"]:
            return by, f"not proven within {self.rank['timeouts']['ready']:.0f} s"
        return "", ""

    def rank_gone(self, answers):
        lost = [number for number, poller in self.pollers.items() if poller.lost_for() > LOST_SECONDS]
        if lost:
            return f"rank {' and '.join(lost)} did not answer for {LOST_SECONDS} s"
        dead = [number for number, answer in answers.items() if answer.get("service") == "alive" and not (answer.get("container") or {}).get("running")]
        self.gone = self.gone + 1 if dead else 0
        return f"rank {' and '.join(sorted(dead))} ended while it was wanted" if self.gone >= GONE_SAMPLES else ""

    def engine_stuck(self):
        options, now = self.rank["watch"], time.monotonic()
        if now - self.sampled_at < options["interval"]:
            return ""
        self.sampled_at = now
        if self.frozen is None:
            self.frozen = Frozen(options["samples"], options["idle_watts"])
        sums = metric_sums(read_metrics(self.rank["api"]))
        reason = self.frozen.add(sums, gpu_watts())
        if reason or not options["canary"] or sums[RUNNING] or now - self.canary_at < options["canary"]:
            return reason
        self.canary_at = now
        proof = self.prove()
        self.canary_failures = 0 if proof.ok else self.canary_failures + 1
        if self.canary_failures >= CANARY_FAILURES:
            return f"{self.canary_failures} canaries failed in a row, the last with {proof.verdict}: {proof.detail}"
        if not proof.ok:
            self.canary_at = now - options["canary"] + options["interval"]  # ask again soon
        return ""

    # Acts

    def serve(self, wanted):
        """A group that runs: when nobody has proven this start, do it, and tell all ranks that they serve."""
        if is_ready(self.paths, wanted):
            self.tell_again()
            return "the group serves"
        api = self.rank["api"]
        if call(*place_of(api), "GET", "/health", timeout=2).status != 200:
            return "the group loads"
        if time.monotonic() < self.proof_at:
            return "the group is up and not yet proven"
        proof = self.prove()
        self.proof_at = time.monotonic() + PROOF_PAUSE_SECONDS
        if not proof.ok:
            return f"the group is up and gives no proof: {proof.verdict}"
        if read_json(self.paths.wanted, {}).get("id") == wanted["id"]:
            self.group.ready()
            self.say(f"the group serves: a completion in {proof.seconds:.1f} s")
        return "the group serves"

    def tell_again(self):
        """A worker that did not hear that the group serves would go on guarding its memory as of one that loads."""
        said = {peer["rank"]: self.pollers[str(peer["rank"])].answer for peer in self.group.workers}
        deaf = [peer for peer in self.group.workers if said[peer["rank"]].get("ready") is False and (said[peer["rank"]]["container"] or {}).get("running")]
        if deaf:
            self.group.ask_all(deaf, "ready", 5)

    def prove(self):
        api = self.rank["api"]
        return prove(*place_of(api), api["model"], api["request"], key=read_api_key(self.paths.state_dir), expected=api["expected"],
                     timeout=api["timeout"])

    def end(self, by, reason):
        """End what runs of the group, with evidence. That it shall come back stands in rank 0's own order."""
        if not self.lease.take():
            return "somebody else took the lease"
        try:
            if read_json(self.paths.wanted, {}).get("by") == "guard":
                return "a memory guard came first"
            event = {"by": by, "at": time.time(), "reason": reason, "ranks": self.answers()}
            write_json(self.paths.wanted, {"action": "stop", "by": by, "reason": reason, "id": f"{time.time():.6f}", "at": time.time()})
            self.say(f"{by}: {reason}; the whole group is ended; evidence in {write_event(self.paths, event)}")
            self.end_others()
        finally:
            self.lease.give()
        return f"ended: {reason}"

    def end_others(self):
        """Stop every worker that says it runs. One that does not answer is stopped when it does."""
        peers = [peer for peer in self.group.workers if (self.pollers[str(peer["rank"])].answer.get("container") or {}).get("running")]
        if peers:
            self.group.ask_all(peers, "stop", self.rank["stop_timeout"] + 15)

    def bring_back(self, by, reason):
        """Start the group again once every rank can, not too often, and not for ever."""
        restarts = read_json(self.paths.restarts, {"attempts": [], "gave_up": ""})
        if restarts["gave_up"]:
            return f"gave up: {restarts['gave_up']}; play serve tries again"
        answers = self.answers()
        running = [number for number, answer in sorted(answers.items()) if (answer.get("container") or {}).get("running")]
        if running:
            self.end_others()
            return f"waits for the end of rank {' and '.join(running)}"
        options, now = self.rank["restart"], time.time()
        recent = [one for one in restarts["attempts"] if now - one["at"] < options["window"]]
        if len(recent) >= options["limit"]:
            restarts["gave_up"] = f"{len(recent)} starts within {options['window']} s, the last because {reason}"
            write_json(self.paths.restarts, restarts)
            self.say(f"{by}: gave up after {restarts['gave_up']}")
            return f"gave up: {restarts['gave_up']}; play serve tries again"
        # A node whose service is there before its Docker Engine shows no container either.
        absent = {number: answer for number, answer in sorted(answers.items()) if answer.get("service") != "alive" or not answer.get("container")}
        if absent:
            why = {number: answer.get("error") or ("no container" if answer["service"] == "alive" else answer["service"]) for number, answer in absent.items()}
            return "waits for " + "; ".join(f"rank {number}: {error}" for number, error in why.items())
        lacking = [f"rank {number}: {text}" for number, answer in sorted(answers.items()) for text in answer.get("lacking", [])]
        if lacking:
            return "not started: " + "; ".join(lacking)
        left = pause_before(len(recent), options["delay"]) - (now - recent[-1]["at"] if recent else 0)
        if left > 0:
            return f"starts again in {left:.0f} s, after: {reason}"
        return self.start(by, reason, {**restarts, "attempts": [*recent, {"at": now, "by": by, "reason": reason}]})

    def start(self, by, reason, restarts):
        if not self.lease.take():
            return "somebody else took the lease"
        try:
            # Counted before it is tried: a start that takes the machine down must not be free.
            write_json(self.paths.restarts, restarts)
            give_to_owner(self.paths.restarts)
            self.say(f"{by}: starts the group, attempt {len(restarts['attempts'])} of {self.rank['restart']['limit']}, because {reason}")
            answers = self.group.start(by)
        finally:
            self.lease.give()
        errors = "; ".join(f"rank {number}: {answer['error']}" for number, answer in sorted(answers.items()) if answer.get("error"))
        return self.end(by, f"a start failed: {errors}") if errors else "the group loads"


def run(keeper, service, ended):
    """The keeper's thread. What goes wrong in one look is told and does not end the keeper."""
    while not ended.is_set():
        begun = time.monotonic()
        rank = service.rank
        if rank.get("rank") == 0 and "restart" in rank:
            try:
                keeper.status = keeper.look(rank)
            except (OSError, ValueError, KeyError) as exc:
                keeper.status = f"the keeper failed: {type(exc).__name__}: {exc}"
                keeper.say(keeper.status)
        ended.wait(max(0.1, 1.0 - (time.monotonic() - begun)))
