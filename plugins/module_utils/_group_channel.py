# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Ask all ranks through rank_service.py on rank 0, and judge a group that is being started. Pure but for the given runner."""

from __future__ import annotations

import json
import typing as t

UNREACHABLE_SAMPLES = 4  # a second each: one lost packet is no death
# How long the ranks have, once one tells of its memory guard, to say whether theirs was first: a heartbeat is a second apart.
GUARDS_SECONDS = 3.0


def ask_group(run_command: t.Callable[..., tuple[int, str, str]], python: str, program: str, verb: str, state_dir: str) -> dict[str, t.Any]:
    """The document of ``rank_service.py VERB``: {"ranks": {"0": {...}}, "error": "..."}."""
    code, out, err = run_command([python, program, verb, state_dir])
    try:
        answer = json.loads(out)
    except ValueError:
        return {"ranks": {}, "error": f"{program} {verb} ended with {code}: {(err or out).strip()[-500:]}"}
    return {"ranks": answer.get("ranks", {}), "error": answer.get("error", "")}


class StartWatch:
    """Judges a group from one sample a second until it serves or cannot any more.

    A rank that has ended while it is wanted is dead, whatever its exit code: engines that die exit with 0 too.
    Progress is a log line other than known noise, CPU time, or bytes to and from disks, on any rank; the rank services tell.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self.misses: dict[str, int] = {}
        self.guards_since = 0.0

    def undecided(self) -> bool:
        """Whether what was seen last may become a verdict by the next samples; who ends the watch now begins to count anew."""
        return bool(self.guards_since) or any(self.misses.values())

    def judge(self, ranks: t.Mapping[str, t.Mapping[str, t.Any]], health: int, now: float) -> dict[str, t.Any]:
        """One verdict: waiting, healthy, guard, dead, unreachable or stalled, with the rank and the reason."""
        # Before all else: a guard that acted has also ended the ranks, and those ends explain nothing.
        acted = guards_that_acted(ranks, now)
        if acted:
            self.guards_since = self.guards_since or now
            if now - self.guards_since < GUARDS_SECONDS and not all_have_told(ranks, acted, now):
                return {"verdict": "waiting", "rank": "", "reason": ""}
            reasons = [guard_reason(number, report) for dummy, number, report in acted]
            return {"verdict": "guard", "rank": acted[0][1], "reason": "; after that ".join(reasons)}
        for number in sorted(ranks, key=int):
            answer = ranks[number]
            if answer.get("service") != "alive":
                self.misses[number] = self.misses.get(number, 0) + 1
                if self.misses[number] >= UNREACHABLE_SAMPLES:
                    reason = answer.get("error") or f"its service is {answer.get('service')}"
                    return {"verdict": "unreachable", "rank": number, "reason": f"rank {number} does not answer: {reason}"}
                continue
            self.misses[number] = 0
            container = answer.get("container")
            if container is None or (not container["running"] and answer.get("started_id") == answer.get("wanted", {}).get("id")):
                return {"verdict": "dead", "rank": number, "reason": death_of(number, container, answer.get("error"))}
        if health == 200:
            return {"verdict": "healthy", "rank": "0", "reason": ""}
        moved = [answer["progress"]["last_progress"] - skew(answer, now) for answer in ranks.values() if answer.get("progress")]
        if moved and now - max(moved) > self.stall_seconds:
            return {"verdict": "stalled", "rank": "", "reason": f"no rank made progress for {now - max(moved):.0f} s"}
        return {"verdict": "waiting", "rank": "", "reason": ""}


def skew(answer: t.Mapping[str, t.Any], now: float) -> float:
    """How far the clock of the answering node is ahead of ours; its heartbeat carries its own time and age."""
    return answer["time"] + answer.get("age", 0) - now


def death_of(number: str, container: t.Mapping[str, t.Any] | None, error: str | None) -> str:
    if container is None:
        return f"rank {number} has no container any more" + (f": {error}" if error else "")
    memory = ", killed for lack of memory" if container.get("oom_killed") else ""
    return f"rank {number} ended with exit code {container['exit_code']}{memory} while it was wanted"


def guards_that_acted(ranks: t.Mapping[str, t.Mapping[str, t.Any]], now: float) -> list[tuple[float, str, t.Mapping[str, t.Any]]]:
    """(moment by our clock, rank, report) of each memory guard that acted, the first one first.

    Rank 0 repeats what a worker told it. That counts only while the worker does not say it itself: the repetition may be older than
    the part on processes.
    """
    reports: dict[str, t.Mapping[str, t.Any]] = {}
    for number in sorted(ranks, key=int):
        report = (ranks[number].get("guard") or {}).get("tripped")
        origin = str(report.get("rank", number)) if report else ""
        if report and (origin == number or origin not in reports):
            reports[origin] = report
    ahead = {number: skew(answer, now) for number, answer in ranks.items() if "time" in answer}
    return sorted(((report["at"] - ahead.get(number, 0.0), number, report) for number, report in reports.items()), key=lambda one: one[:2])


def all_have_told(ranks: t.Mapping[str, t.Mapping[str, t.Any]], acted: t.Sequence[tuple[float, str, t.Mapping[str, t.Any]]], now: float) -> bool:
    """Whether no rank can still turn out to have been first: each wrote a heartbeat since, and the reports are complete."""
    complete = all("growing" in report for dummy, number, report in acted)
    return complete and all(answer.get("service") == "alive" and now - answer["age"] > acted[0][0] for answer in ranks.values())


def guard_reason(number: str, report: t.Mapping[str, t.Any]) -> str:
    """The memory guard's verdict, with the processes that grew fastest."""
    grown = ", ".join(f"{one['name']} ({one['pid']}) by {one['grown'] / (1 << 30):.1f} GiB" for one in report.get("growing", []))
    text = report["reason"] if report["reason"].startswith("rank ") else f"rank {number}: {report['reason']}"
    return f"{text}; fastest growing: {grown}" if grown else text


def phase_of(answer: t.Mapping[str, t.Any]) -> str:
    """One rank in a word or two, for the progress line."""
    container = answer.get("container")
    if answer.get("service") != "alive":
        return answer.get("service", "silent")
    if container is None:
        return "no container"
    if (answer.get("guard") or {}).get("tripped"):
        return "stopped by the memory guard"
    if not container["running"]:
        return container["status"]
    return "serving" if answer.get("ready") else "loading"


def lowest(samples: t.Iterable[t.Mapping[str, int]]) -> dict[str, int]:
    """The least of each rank over all samples."""
    low: dict[str, int] = {}
    for sample in samples:
        for rank, available in sample.items():
            low[rank] = min(available, low.get(rank, available))
    return low
