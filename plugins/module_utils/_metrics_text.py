# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a node tells Prometheus, as text. Pure, and of the standard library alone: it is installed on the nodes."""

from __future__ import annotations

import calendar
import time
import typing as t

# The words of _group_state, and one more: healthy, but no token was seen yet and none is asked for.
UNPROVEN = "unproven"
STATES = ("absent", "half", "stale", "loading", UNPROVEN, "wedged", "serving")

FAMILIES = {
    "sparkops_exporter_timestamp_seconds": ("gauge", "When these lines were written."),
    "sparkops_node_memory_total_bytes": ("gauge", "MemTotal of the node; on GB10 it is the GPU's memory too."),
    "sparkops_node_memory_available_bytes": ("gauge", "MemAvailable of the node; on GB10 what the GPU can still get too."),
    "sparkops_rank_service_up": ("gauge", "Whether the rank's service wrote a heartbeat within five seconds."),
    "sparkops_rank_wanted": ("gauge", "Whether the rank is told to run."),
    "sparkops_rank_running": ("gauge", "Whether the rank's container runs."),
    "sparkops_rank_exit_code": ("gauge", "Exit code of the rank's container; engines that die leave 0 too."),
    "sparkops_rank_oom_killed": ("gauge", "Whether the kernel ended the rank for lack of memory."),
    "sparkops_rank_started_timestamp_seconds": ("gauge", "When the rank's container was started last."),
    "sparkops_rank_last_progress_timestamp_seconds": ("gauge", "When the rank last wrote a line or used processor time."),
    "sparkops_memory_guard_floor_bytes": ("gauge", "The MemAvailable at which the rank's memory guard acts, while it is on."),
    "sparkops_memory_guard_tripped": ("gauge", "Whether the memory guard has ended the rank since its last start."),
    "sparkops_group_state": ("gauge", "1 for the state that the group is in, as seen from rank 0."),
    "sparkops_group_ranks": ("gauge", "How many ranks the group has."),
    "sparkops_group_ranks_running": ("gauge", "How many ranks run, as seen from rank 0."),
    "sparkops_group_last_token_timestamp_seconds": ("gauge", "When the group was last seen to generate."),
    "sparkops_group_proven_timestamp_seconds": ("gauge", "When a play last proved the group."),
}

# Orders to stop that the rank service gave itself, to bring the group back: the rank is wanted all the same.
KEEPERS = ("boot", "watch")

Sample = t.Tuple[str, t.Dict[str, str], float]


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def exposition(samples: t.Iterable[Sample]) -> str:
    """Samples as Prometheus reads them, each family once with its help and type."""
    by_name: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, labels, value in samples:
        inside = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
        by_name[name].append(f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}")
    lines = []
    for name, rows in by_name.items():
        if rows:
            kind, text = FAMILIES[name]
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *rows]
    return "\n".join(lines) + "\n"


def unix_time(text: str) -> float | None:
    """A time of the Docker Engine, or of our own records; None for none. Both are in UTC, and whole seconds are enough."""
    try:
        moment = calendar.timegm(time.strptime((text or "")[:19], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
    return float(moment) if moment > 0 else None


def node_samples(meminfo: t.Mapping[str, int], now: float) -> list[Sample]:
    """``meminfo`` is in KiB."""
    return [
        ("sparkops_exporter_timestamp_seconds", {}, now),
        ("sparkops_node_memory_total_bytes", {}, 1024.0 * meminfo["MemTotal"]),
        ("sparkops_node_memory_available_bytes", {}, 1024.0 * meminfo["MemAvailable"]),
    ]


def rank_samples(record: t.Mapping[str, t.Any], beat: t.Mapping[str, t.Any] | None, now: float, stale: float) -> list[Sample]:
    """One rank of this node from its record and its heartbeat. What a silent service said last is no state of today."""
    labels = {"deployment": record["deployment"], "rank": str(record["rank"])}
    alive = beat is not None and now - beat["time"] < stale
    samples: list[Sample] = [("sparkops_rank_service_up", labels, float(alive))]
    if not alive:
        return samples
    wanted, guard = beat["wanted"], beat["guard"]
    samples.append(("sparkops_rank_wanted", labels, float(wanted["action"] == "run" or wanted.get("by") in KEEPERS)))
    samples.append(("sparkops_memory_guard_tripped", labels, float(bool(guard["tripped"]))))
    if guard["floor"]:
        samples.append(("sparkops_memory_guard_floor_bytes", labels, float(guard["floor"])))
    container = beat["container"]
    samples.append(("sparkops_rank_running", labels, float(bool(container and container["running"]))))
    if container:
        if not container["running"]:
            samples.append(("sparkops_rank_exit_code", labels, float(container["exit_code"])))
        samples.append(("sparkops_rank_oom_killed", labels, float(container["oom_killed"])))
        started = unix_time(container["started_at"])
        if started:
            samples.append(("sparkops_rank_started_timestamp_seconds", labels, started))
        samples.append(("sparkops_rank_last_progress_timestamp_seconds", labels, float(beat["progress"]["last_progress"])))
    return samples


def group_samples(deployment: str, state: str, ranks: int, running: int, last_token: float | None, proven: float | None) -> list[Sample]:
    labels = {"deployment": deployment}
    samples: list[Sample] = [("sparkops_group_state", {**labels, "state": name}, float(name == state)) for name in STATES]
    samples += [("sparkops_group_ranks", labels, float(ranks)), ("sparkops_group_ranks_running", labels, float(running))]
    if last_token:
        samples.append(("sparkops_group_last_token_timestamp_seconds", labels, last_token))
    if proven:
        samples.append(("sparkops_group_proven_timestamp_seconds", labels, proven))
    return samples


# --- is it alive? --------------------------------------------------------------------------------------------------------


def counters(text: str) -> dict[str, float]:
    """Of the engine's metrics: requests at work, and a number that grows with every step of the engine."""
    found = {"running": 0.0, "steps": 0.0}
    for line in text.splitlines():
        name, separator, value = line.rpartition(" ")
        metric = name.partition("{")[0]
        if not separator or line.startswith("#"):
            continue
        if metric == "vllm:num_requests_running":
            found["running"] += float(value)
        elif metric in ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"):
            found["steps"] += float(value)
    return found


def next_look(
    memory: t.Mapping[str, t.Any], seen: t.Mapping[str, float], start: str, now: float, interval: float, patience: float
) -> tuple[dict[str, t.Any], bool]:
    """What is known after a look at the counters, and whether a token should be asked for.

    Work that goes on is proof enough. A request at work without a step for ``patience`` seconds is proof of the contrary; a long prompt
    makes steps all the time. An idle engine is asked for one token each ``interval`` seconds, and at every look once it failed.
    """
    if memory.get("start") != start:
        memory = {"start": start, "steps": seen["steps"], "moved_at": now, "asked_at": 0.0, "ok": None}
    known = dict(memory)
    if seen["steps"] != known["steps"]:
        known.update(steps=seen["steps"], moved_at=now, ok=True, token_at=now)
        return known, False
    if seen["running"] > 0:
        if now - known["moved_at"] >= patience:
            known["ok"] = False
        return known, False
    due = now - max(known["asked_at"], known["moved_at"] if known["ok"] else 0.0) >= interval
    return known, bool(interval) and (due or known["ok"] is False)
