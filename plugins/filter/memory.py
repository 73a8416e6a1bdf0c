# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of role memory: the plan in, arguments of its modules out; the nodes' reports in, the group's verdict out."""

from __future__ import annotations

import math
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._memory import gib
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals

Plan = t.Mapping[str, t.Any]
Report = t.Mapping[str, t.Any]


def memory_serving(plan: Plan) -> dict[str, t.Any]:
    """The values that the profile's memory data speaks of. Only these go to the nodes: settings are not their business."""
    values = (plan.get("memory") or {}).get("values") or {}
    shape = {"tensor_parallel": plan["tensor_parallel"], "pipeline_parallel": plan["pipeline_parallel"]}
    return {"speculation": "none", **values, **shape}


def memory_trees(plan: Plan, weights_root: str) -> dict[str, str]:
    """The directory of each artefact on a node."""
    return {artefact["name"]: f"{weights_root}/{artefact['directory']}" for artefact in plan["artefacts"]}


def memory_guards(settings: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """Our own guards that will be armed."""
    found = []
    for phase in ("loading", "serving"):
        if settings[f"memory_guard_{phase}"]:
            name = f"the memory guard while {phase}"
            found.append({"name": name, "floor": settings[f"memory_guard_{phase}_floor"], "loading_only": phase == "loading"})
    return found


def memory_verdict(hostvars: t.Mapping[str, t.Any], nodes: t.Sequence[str]) -> dict[str, t.Any]:
    """What all nodes together allow: every refusal, and the smallest node's values. A node without a report refuses."""
    reports = {node: hostvars[node].get("__memory_report") or {} for node in nodes}
    seen = {node: report for node, report in reports.items() if "lacks" in report}
    refusals = [_refusal(lack) for report in seen.values() for lack in report["lacks"]] + [_unseen(node) for node in nodes if node not in seen]
    smallest = min(seen, key=lambda node: _level(seen[node]), default="")
    return {
        "ok": not refusals,
        "message": format_refusals(refusals) if refusals else "",
        "refusals": [refusal.as_dict() for refusal in refusals],
        "smallest": smallest,
        "largest": _smallest_of(seen),
        "known_after": sorted({stage for report in seen.values() for stage in report["known_after"]}),
        "lines": [line for node in seen for line in _lines(node, seen[node])] + _group_lines(seen, smallest),
    }


def _level(report: Report) -> int:
    level = report["memory"]["level"]
    return report["memory"]["total"] if level is None else level


def _unseen(node: str) -> Refusal:
    return Refusal(
        id="memory.unseen",
        node=node,
        thing="memory",
        found="no report: the node is outside of this run or did not answer",
        wanted="the memory of every rank",
        next_step="run without --limit, or mend the node",
    )


def _refusal(lack: t.Mapping[str, str]) -> Refusal:
    return Refusal(**{name: lack[name] for name in ("id", "node", "thing", "found", "wanted", "next_step")})


def _smallest_of(seen: t.Mapping[str, Report]) -> dict[str, t.Any]:
    """For each value the one that every node can take."""
    names = {name for report in seen.values() for name in report["largest"]}
    return {name: min(report["largest"][name] for report in seen.values() if name in report["largest"]) for name in sorted(names)}


def _lines(node: str, report: Report) -> list[str]:
    memory = report["memory"]
    level = "not known yet" if memory["level"] is None else f"{gib(memory['level'])} available ({memory['basis']})"
    parts = ", ".join(f"{name} {gib(number)}" for name, number in report["needs"].items())
    needs = f"; needs {gib(sum(report['needs'].values()))}: {parts}" if parts else ""
    tokens = f"; the KV pool holds {report['tokens']:,} tokens" if report["tokens"] else ""
    after = f"; the verdict is known after: {', '.join(report['known_after'])}" if report["known_after"] else ""
    first = f"{node}: {level} of {gib(memory['total'])}{needs}{tokens}{after}"
    growing = [f"{node}: {one['name']} ({one['pid']}) grew by {gib(one['grown'])}" for one in report["growing"] if one["grown"] >= 1 << 26]
    return [first, *growing, *(f"{node}: {notice}" for notice in report["notices"])]


def _group_lines(seen: t.Mapping[str, Report], smallest: str) -> list[str]:
    largest = _smallest_of(seen)
    if "utilisation" not in largest:
        return []
    length = f", context {largest['length']:,} tokens" if "length" in largest else ""
    return [f"Largest safe values, decided by {smallest}: utilisation {largest['utilisation']:.2f}, KV pool {gib(largest['pool'])}{length}."]


def memory_prompt(plan: Plan, hostvars: t.Mapping[str, t.Any], result: Report) -> dict[str, t.Any]:
    """The verdict on a long prompt: the lowest memory of every rank against the floor. ``result`` is that of serve_bench."""
    floor, measured = int(plan["settings"]["memory_prompt_floor"]), result["measured"]
    low = {node: result["memory"].get(str(rank)) for rank, node in enumerate(plan["nodes"])}
    refusals = []
    if measured["error"] or not measured["tokens"]:
        found = measured["error"] or "no count of tokens in the answer"
        step = "run play status; if the engine died, its log and the lowest levels above say where"
        refusals.append(Refusal("memory.prompt_failed", plan["head"], "long prompt", found, f"an answer to {measured['wanted_tokens']} tokens", step))
    for node, level in low.items():
        if level is None:
            step = "bring the node's rank service back and run it again"
            refusals.append(Refusal("memory.prompt_unseen", node, "memory during the long prompt", "no reading of this rank", "readings of every rank", step))
        elif level < floor:
            total = int(hostvars[node]["spark_node"]["memory"]["total_kib"]) * 1024
            step = _one_knob(memory_serving(plan), floor - level, total)
            refusals.append(Refusal("memory.prompt_low", node, "memory during the long prompt", f"{gib(level)} at the lowest", f"at least {gib(floor)}", step))
    seen = {node: level for node, level in low.items() if level is not None}
    lines = [f"{node}: {gib(level)} available at the lowest, floor {gib(floor)}" for node, level in seen.items()]
    if measured["tokens"] and not measured["error"]:
        lines.insert(0, f"{measured['tokens']:,} tokens of prompt, {measured['first_token_s']} s to the first token")
    if not refusals:
        smallest = min(seen, key=lambda node: seen[node])
        lines.append(f"{gib(seen[smallest] - floor)} above the floor on {smallest}. To use some of it change one value, and run this again before the next.")
    return {"ok": not refusals, "message": format_refusals(refusals) if refusals else "", "lines": lines}


def _one_knob(serving: t.Mapping[str, t.Any], lack: int, total: int) -> str:
    """The one value to change first, by how much lacks. Two at once would not tell which of them helped."""
    again = "that alone, and run this again"
    if serving.get("pool"):
        # A smaller pool saves at least itself; the recipes saw up to twice of it in a long prefill.
        return f"lower serve_kv_cache_memory_bytes from {gib(serving['pool'])} to {gib(max(0, serving['pool'] - lack))}, {again}"
    if serving.get("utilisation"):
        wanted = max(0.0, serving["utilisation"] - math.ceil(lack / total * 100) / 100)
        return f"lower serve_gpu_memory_utilization from {serving['utilisation']:g} to {wanted:.2f}, {again}"
    if serving.get("batched_tokens"):
        return f"halve serve_max_num_batched_tokens to {serving['batched_tokens'] // 2}, {again}"
    return f"lower serve_max_model_len or serve_max_num_seqs, {again}"


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "memory_serving": memory_serving,
            "memory_trees": memory_trees,
            "memory_guards": memory_guards,
            "memory_verdict": memory_verdict,
            "memory_prompt": memory_prompt,
        }
