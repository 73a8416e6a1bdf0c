# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a run did, from the results of its tasks, and the report of a bring-up that is made of it. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.plugin_utils._pages import gib
from ansible_collections.sparkops.inference.plugins.plugin_utils._plots import timeline

COLLECTION = "sparkops.inference."
# A run is told of when it did one of these; the others (status, logs, ...) leave nothing behind.
REPORTED_STAGES = frozenset({"image", "weights", "weight_sync", "engram_pack", "serve"})
MESSAGE_LENGTH = 4000

Result = t.Mapping[str, t.Any]


class Recorder:
    """Takes the results of tasks as they come. ``moment``: seconds since the run began."""

    def __init__(self) -> None:
        self.plan: dict[str, t.Any] = {}
        self.spans: list[dict[str, t.Any]] = []
        self.transfers: list[dict[str, t.Any]] = []
        self.memory: dict[str, dict[str, t.Any]] = {}
        self.nodes: dict[str, dict[str, t.Any]] = {}
        self.image: dict[str, str] = {}
        self.failures: list[dict[str, str]] = []
        self.proof: dict[str, t.Any] | None = None
        self.last_good: dict[str, t.Any] = {}
        self._open: dict[str, dict[str, t.Any]] = {}

    @property
    def worth_a_report(self) -> bool:
        done = {span["stage"] for span in self.spans if span["status"] in ("changed", "failed")}
        return bool(self.plan) and bool(self.failures or done) and bool(REPORTED_STAGES & {span["stage"] for span in self.spans})

    def task(self, stage: str, host: str, name: str, action: str, begun: float, ended: float, status: str, result: Result) -> None:
        """One task of one host. ``status``: ok, changed, failed or unreachable."""
        self._span(stage, host, begun, ended, "failed" if status == "unreachable" else status)
        if status in ("failed", "unreachable"):
            message = str(result.get("msg") or "no message")
            self.failures.append({"node": host, "stage": stage, "task": name, "message": message[:MESSAGE_LENGTH]})
        reader = READERS.get(action.removeprefix(COLLECTION))
        if reader and not result.get("censored"):
            reader(self, stage, host, ended - begun, result)

    def _span(self, stage: str, host: str, begun: float, ended: float, status: str) -> None:
        span = self._open.get(host)
        if span is None or span["stage"] != stage:
            span = {"stage": stage, "node": host, "begun": round(begun, 1), "ended": round(ended, 1), "status": "ok"}
            self._open[host] = span
            self.spans.append(span)
        span["ended"] = round(ended, 1)
        if span["status"] != "failed" and status != "ok":
            span["status"] = status

    def saw_memory(self, node: str, available: float | None, during: str) -> None:
        if available and (node not in self.memory or available < self.memory[node]["available_bytes"]):
            self.memory[node] = {"node": node, "available_bytes": int(available), "during": during}

    def moved(self, node: str, what: str, size: int, seconds: float, how: str) -> None:
        if size:
            rate = round(size / seconds) if seconds else None
            self.transfers.append({"node": node, "what": what, "bytes": size, "seconds": round(seconds, 1), "bytes_per_second": rate, "how": how})

    # --- readers of results, by module ---------------------------------------------------------------------------------

    def _read_plan(self, stage: str, host: str, seconds: float, result: Result) -> None:
        self.plan = dict(result.get("spark_plan") or self.plan)

    def _read_node(self, stage: str, host: str, seconds: float, result: Result) -> None:
        node = (result.get("ansible_facts") or {}).get("spark_node")
        if node:
            docker = node["docker"].get("version") or "unknown"
            self.nodes[host] = {"os": node["os"]["name"], "kernel": node["kernel"], "docker": docker, "python": node["python"]["version"]}
            self.saw_memory(host, 1024 * (node["memory"]["available_kib"] or 0), "the first look")

    def _read_done(self, stage: str, host: str, seconds: float, result: Result) -> None:
        for name, done in (result.get("done") or {}).items():
            how = done.get("transport") or done.get("repository") or ""
            self.moved(host, f"{stage}: {name}", done.get("bytes", 0), done.get("seconds") or seconds, how)

    def _read_ship(self, stage: str, host: str, seconds: float, result: Result) -> None:
        ship = result.get("ship") or {}
        self.moved(host, "image", ship.get("bytes", 0), ship.get("seconds") or seconds, ship.get("mode", ""))
        self._read_image(stage, host, seconds, result)

    def _read_image(self, stage: str, host: str, seconds: float, result: Result) -> None:
        identity = (result.get("image") or {}).get("identity")
        if identity:
            self.image[host] = identity

    def _read_engram(self, stage: str, host: str, seconds: float, result: Result) -> None:
        files = {layer["file"]: layer["size"] for layer in ((result.get("engram") or {}).get("layers") or {}).values()}
        self.moved(host, "Engram rows", sum(files.get(name, 0) for name in result.get("packed") or []), seconds, "packed")

    def _read_headroom(self, stage: str, host: str, seconds: float, result: Result) -> None:
        self.saw_memory(host, (result.get("memory") or {}).get("available"), stage)

    def _read_health(self, stage: str, host: str, seconds: float, result: Result) -> None:
        for rank, available in (result.get("least_available_kib") or {}).items():
            if int(rank) < len(self.plan.get("nodes", [])):
                self.saw_memory(self.plan["nodes"][int(rank)], 1024 * available, "the start of the group")

    def _read_rank(self, stage: str, host: str, seconds: float, result: Result) -> None:
        rank = result.get("rank") or {}
        self.saw_memory(host, 1024 * ((rank.get("memory") or {}).get("available_kib") or 0), stage)
        if not self.last_good and host == self.plan.get("head"):
            good = rank.get("last_good") or {}
            self.last_good = {name: good[name] for name in ("proven_at", "profile") if good.get(name)}

    def _read_proof(self, stage: str, host: str, seconds: float, result: Result) -> None:
        self.proof = dict(result.get("proof") or {}) or None


READERS: dict[str, t.Callable[[Recorder, str, str, float, Result], None]] = {
    "plan": Recorder._read_plan,
    "node_facts": Recorder._read_node,
    "hub_snapshot": Recorder._read_done,
    "weight_sync": Recorder._read_done,
    "zfs_receive": Recorder._read_done,
    "image_ship": Recorder._read_ship,
    "image_pull": Recorder._read_image,
    "engram_pack": Recorder._read_engram,
    "memory_headroom": Recorder._read_headroom,
    "serve_health": Recorder._read_health,
    "rank_info": Recorder._read_rank,
    "serve_proof": Recorder._read_proof,
}


def verdict(recorder: Recorder, said: str) -> str:
    """What the run came to: the report role's own word, unless something failed after it or before it could say one."""
    if recorder.failures:
        return "failed"
    if recorder.proof and recorder.proof.get("ok"):
        return "proven"
    return said or "staged"


def run_document(recorder: Recorder, about: Result) -> dict[str, t.Any]:
    """The report as data. ``about``: id, begun_at, seconds, plays, verdict and versions."""
    plan = recorder.plan
    return {
        "format": 1,
        **about,
        "deployment": plan["deployment"],
        "profile": plan["profile"],
        "model": plan["served_model_name"],
        "endpoint": {"node": plan["head"], "port": plan["api"]["port"], "key": plan["api"]["key"]},
        "nodes": [{"node": name, "rank": rank, **recorder.nodes.get(name, {})} for rank, name in enumerate(plan["nodes"])],
        "image": {"reference": plan["image"]["reference"], "digest": plan["image"].get("digest") or "", "identities": recorder.image},
        "weights": [{"name": one["name"], "repository": one["repository"], "revision": one["revision"]} for one in plan["artefacts"]],
        "spans": recorder.spans,
        "transfers": recorder.transfers,
        "memory": [recorder.memory[name] for name in plan["nodes"] if name in recorder.memory],
        "failures": recorder.failures,
        "proof": recorder.proof,
        "last_good": recorder.last_good,
        "notices": plan["notices"],
    }


def run_view(run: dict[str, t.Any]) -> dict[str, t.Any]:
    """What the template shows."""
    rows = list(dict.fromkeys(f"{span['stage']} on {span['node']}" for span in run["spans"]))
    colours = {"ok": "ok", "changed": "now", "failed": "bad"}
    spans = [
        {
            "row": f"{span['stage']} on {span['node']}", "begun": span["begun"], "ended": span["ended"], "style": colours[span["status"]],
            "title": f"{span['stage']} on {span['node']}: {span['ended'] - span['begun']:.1f} s, {span['status']}",
        }
        for span in run["spans"]
    ]  # fmt: skip
    return {
        "run": run,
        "timeline": timeline(rows, spans, run["seconds"]),
        "stages": stage_rows(run["spans"]),
        "transfers": [{**row, "gib": gib(row["bytes"]), "rate": gib(row["bytes_per_second"]) if row["bytes_per_second"] else ""} for row in run["transfers"]],
        "memory": [{**row, "gib": gib(row["available_bytes"])} for row in run["memory"]],
    }


def stage_rows(spans: t.Sequence[Result]) -> list[dict[str, t.Any]]:
    """Seconds of each stage on each node, in the order in which they began."""
    rows: dict[tuple[str, str], dict[str, t.Any]] = {}
    for span in spans:
        row = rows.setdefault((span["stage"], span["node"]), {"stage": span["stage"], "node": span["node"], "seconds": 0.0, "status": "ok"})
        row["seconds"] = round(row["seconds"] + span["ended"] - span["begun"], 1)
        if row["status"] != "failed" and span["status"] != "ok":
            row["status"] = span["status"]
    return list(rows.values())
