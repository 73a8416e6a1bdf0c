# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""A benchmark's document from what was measured, and its page beside the published figures and earlier runs. Pure."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.plugin_utils._pages import gib
from ansible_collections.sparkops.inference.plugins.plugin_utils._plots import Series, chart

Document = dict[str, t.Any]
EARLIER_RUNS = 5
# A rung of the ladder and a published prompt are the same length up to this part of it.
SAME_LENGTH = 0.03


def bench_document(
    plan: t.Mapping[str, t.Any],
    survey: t.Mapping[str, t.Any],
    results: t.Sequence[t.Mapping[str, t.Any]],
    skipped: t.Sequence[t.Mapping[str, t.Any]],
    about: t.Mapping[str, t.Any],
) -> Document:
    """``results``: one {"case", "measured", "memory", "acceptance", "seconds"} for each case; ``about``: id, times and versions."""
    by_kind: dict[str, list[Document]] = {"decode": [], "prefill": [], "probe": [], "warmup": []}
    for entry in results:
        case = entry["case"]
        row = {"label": case["label"], **entry["measured"], "seconds": entry["seconds"], "memory": memory_of(plan, entry["memory"])}
        if case["kind"] == "decode":
            row["acceptance"] = entry["acceptance"]
        by_kind[case["kind"]].append(row)
    settings = plan["settings"]
    notes = []
    if survey["others_running"]:
        notes.append(f"when it began, requests of others were running ({survey['others_running']}): they share the speed that is shown here")
    sequences = settings.get("serve_max_num_seqs")
    if sequences and any(row["streams"] > sequences for row in by_kind["decode"]):
        notes.append(f"the group works on {sequences} requests at once: with more streams the others wait, which the time to the first token shows")
    return {
        "format": 1,
        **about,
        "deployment": plan["deployment"],
        "profile": plan["profile"],
        "model": plan["served_model_name"],
        "nodes": plan["nodes"],
        "engine": survey["version"],
        "max_model_len": survey["max_model_len"],
        "settings": {name: value for name, value in settings.items() if name.startswith("serve_") and value is not None},
        "decode": by_kind["decode"],
        "prefill": by_kind["prefill"],
        "probes": by_kind["probe"],
        "skipped": list(skipped),
        "notes": notes,
        "expected": plan.get("expected") or {},
    }


def memory_of(plan: t.Mapping[str, t.Any], lows: t.Mapping[str, int]) -> list[Document]:
    """The low-water mark of each rank; a rank that was not seen has none."""
    return [{"rank": rank, "node": name, "available_bytes": lows.get(str(rank))} for rank, name in enumerate(plan["nodes"])]


def published_decode(run: Document, what: str, streams: int) -> Document | None:
    if run["settings"].get("serve_speculation_method") == "none":
        what = f"{what} without speculation"
    entries = (run["expected"] or {}).get("decode", [])
    return next((entry for entry in entries if entry["what"] == what and entry["streams"] == streams), None)


def published_prefill(run: Document, tokens: int | None) -> Document | None:
    entries = (run["expected"] or {}).get("prefill", [])
    near = [entry for entry in entries if tokens and abs(entry["tokens"] - tokens) <= SAME_LENGTH * tokens]
    return min(near, key=lambda entry: abs(entry["tokens"] - tokens)) if near else None


def middle(value: t.Any) -> float | None:
    """The median of a summary, the middle of a published range, or the number itself."""
    if isinstance(value, dict):
        return value["median"]
    if isinstance(value, list):
        return sum(value) / len(value)
    return value


def comparable(run: Document, other: Document) -> bool:
    """Runs of the same deployment and model; whatever else differs is what one wants to see."""
    return other["deployment"] == run["deployment"] and other["model"] == run["model"] and other["id"] < run["id"]


def bench_view(run: Document, others: t.Sequence[Document]) -> Document:
    """What the template shows."""
    earlier = [other for other in others if comparable(run, other)][-EARLIER_RUNS:]
    return {
        "run": run,
        "earlier": list(reversed(earlier)),
        "decode": [decode_row(run, row, earlier) for row in run["decode"]],
        "prefill": [prefill_row(run, row, earlier) for row in run["prefill"]],
        "memory": memory_rows(run),
        "plots": [plot for plot in (decode_plot(run, earlier), prefill_plot(run, earlier), memory_plot(run), acceptance_plot(run)) if plot],
    }


def decode_row(run: Document, row: Document, earlier: t.Sequence[Document]) -> Document:
    before = same_decode(earlier[-1], row) if earlier else None
    return {**row, "published": published_decode(run, row["what"], row["streams"]), "before": before}


def same_decode(run: Document, row: Document) -> Document | None:
    return next((one for one in run["decode"] if (one["what"], one["streams"]) == (row["what"], row["streams"]) and one["tokens_per_second"]), None)


def prefill_row(run: Document, row: Document, earlier: t.Sequence[Document]) -> Document:
    before = same_prefill(earlier[-1], row) if earlier else None
    return {**row, "published": published_prefill(run, row["tokens"]), "before": before}


def same_prefill(run: Document, row: Document) -> Document | None:
    return next((one for one in run["prefill"] if one["wanted_tokens"] == row["wanted_tokens"] and one["tokens_per_second"]), None)


def memory_rows(run: Document) -> list[Document]:
    """The least of each rank over the whole run, and during what."""
    rows = []
    for rank, node in enumerate(run["nodes"]):
        seen = [(entry["memory"][rank]["available_bytes"], entry["label"]) for entry in cases(run) if entry["memory"][rank]["available_bytes"]]
        least = min(seen, default=(None, ""))
        rows.append({"rank": rank, "node": node, "available_bytes": least[0], "gib": gib(least[0]) if least[0] else "", "during": least[1]})
    return rows


def cases(run: Document) -> list[Document]:
    return [*run["decode"], *run["prefill"], *run["probes"]]


# --- plots ---------------------------------------------------------------------------------------------------------------


def flat(x: float, y: float) -> tuple[float, float, float, float]:
    return (x, y, y, y)


def decode_plot(run: Document, earlier: t.Sequence[Document]) -> Document | None:
    rows = [row for row in run["decode"] if row["tokens_per_second"]]
    here = tuple((index, *(row["tokens_per_second"][name] for name in ("median", "min", "max"))) for index, row in enumerate(rows))
    published = [(index, published_decode(run, row["what"], row["streams"])) for index, row in enumerate(rows)]
    before = [(index, one) for other in earlier for index, row in enumerate(rows) if (one := same_decode(other, row))]
    series = [
        Series("this run, median with least and greatest", "bar", "now", here),
        Series("published", "mark", "published", tuple(flat(index, middle(entry["tokens_per_second"])) for index, entry in published if entry)),
        Series("earlier runs, medians", "dot", "before", tuple(flat(index, one["tokens_per_second"]["median"]) for index, one in before)),
    ]
    return chart("Decode", "tokens/s, all streams together", series, {index: row["label"] for index, row in enumerate(rows)})


def prefill_plot(run: Document, earlier: t.Sequence[Document]) -> Document | None:
    rows = [row for row in run["prefill"] if row["tokens_per_second"]]
    published = [(row, published_prefill(run, row["tokens"])) for row in rows]
    known = [(row, entry) for row, entry in published if entry and entry.get("tokens_per_second")]
    before = [(row, one) for other in earlier for row in rows if (one := same_prefill(other, row))]
    series = [
        Series("this run", "line", "now", tuple(flat(row["tokens"], row["tokens_per_second"]) for row in rows)),
        Series("published", "line", "published", tuple(flat(row["tokens"], entry["tokens_per_second"]) for row, entry in known)),
        Series("earlier runs", "dot", "before", tuple(flat(row["tokens"], one["tokens_per_second"]) for row, one in before)),
    ]
    return chart("Prefill", "tokens/s until the first token", series, {row["tokens"]: f"{row['tokens']:,}" for row in rows}, logarithmic=True)


def memory_plot(run: Document) -> Document | None:
    entries = cases(run)
    series = [
        Series(
            f"rank {rank} ({node})", "line", f"rank{rank % 4}",
            tuple(flat(index, low / 2**30) for index, entry in enumerate(entries) if (low := entry["memory"][rank]["available_bytes"])),
        )
        for rank, node in enumerate(run["nodes"])
    ]  # fmt: skip
    return chart("Least available memory", "GiB, in each case in the order of the tables", series, {index: str(index + 1) for index in range(len(entries))})


def acceptance_plot(run: Document) -> Document | None:
    """Of one stream: what the drafts are worth at each position."""
    rows = [row for row in run["decode"] if row["streams"] == 1 and row.get("acceptance")]
    positions = max((len(row["acceptance"]["per_position"]) for row in rows), default=0)
    series = [
        Series(row["what"], "bar", f"rank{index % 4}", tuple(flat(place, ratio) for place, ratio in enumerate(row["acceptance"]["per_position"])))
        for index, row in enumerate(rows)
    ]
    return chart("Accepted drafts by position", "of one stream", series, {place: str(place + 1) for place in range(positions)}) if positions else None
