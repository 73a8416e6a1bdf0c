# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Numbers out of streamed answers and out of the engine's metrics. Pure."""

from __future__ import annotations

import re
import statistics
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._engine_stream import Streamed

SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
RUNNING = "vllm:num_requests_running"

Summary = t.Optional[t.Dict[str, float]]


def summary(values: t.Iterable[float | None]) -> Summary:
    """Median, minimum and maximum of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": round(statistics.median(known), 3), "min": round(min(known), 3), "max": round(max(known), 3)}


def decode_rate(streams: t.Sequence[Streamed]) -> float | None:
    """Tokens a second over streams that ran together, without the time before the first token.

    For one stream this is (tokens - 1) / (last token - first token), the recipes' own formula.
    """
    if not streams or any(one.error or one.completion_tokens is None or one.first is None or one.last is None for one in streams):
        return None
    seconds = max(one.last for one in streams) - min(one.first for one in streams)
    tokens = sum(one.completion_tokens - 1 for one in streams)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def run_of(streams: t.Sequence[Streamed]) -> dict[str, t.Any]:
    """One run of a decode case as data."""
    errors = sorted({one.error for one in streams if one.error})
    rate = decode_rate(streams)
    return {
        "tokens_per_second": None if rate is None else round(rate, 3),
        "per_stream": [None if (one_rate := decode_rate([one])) is None else round(one_rate, 3) for one in streams],
        "first_token_ms": [None if one.first_token_seconds is None else round(1000 * one.first_token_seconds, 1) for one in streams],
        "tokens": [one.completion_tokens for one in streams],
        "finish": sorted({one.finish_reason for one in streams}),
        "error": "; ".join(errors),
    }


def decode_case(case: t.Mapping[str, t.Any], runs: t.Sequence[dict[str, t.Any]]) -> dict[str, t.Any]:
    """A decode case over all its runs."""
    return {
        "what": case["what"],
        "streams": case["streams"],
        "max_tokens": case["max_tokens"],
        "tokens_per_second": summary(run["tokens_per_second"] for run in runs),
        "first_token_ms": summary(value for run in runs for value in run["first_token_ms"]),
        "runs": list(runs),
    }


def prefill_case(case: t.Mapping[str, t.Any], streamed: Streamed) -> dict[str, t.Any]:
    """One prompt of the ladder. Its rate counts the time to the first token, queueing included."""
    first, tokens = streamed.first_token_seconds, streamed.prompt_tokens
    rate = decode_rate([streamed])
    return {
        "wanted_tokens": case["tokens"],
        "tokens": tokens,
        "first_token_s": None if first is None else round(first, 3),
        "tokens_per_second": round(tokens / first, 3) if first and tokens and not streamed.error else None,
        "decode_tokens_per_second": None if rate is None else round(rate, 3),
        "error": streamed.error,
    }


def probe_case(case: t.Mapping[str, t.Any], text: str, error: str) -> dict[str, t.Any]:
    """A question of plain sense. ``sound`` is None where there is nothing to compare with."""
    answer = text.strip()
    degenerate = is_degenerate(answer)
    sound = None if error else not degenerate and case["expects"].lower() in answer.lower()
    return {"question": case["question"], "expects": case["expects"], "answer": answer[:400], "degenerate": degenerate, "sound": sound, "error": error}


def is_degenerate(text: str) -> bool:
    """No text, one character over and over, or the word that numbers gone wrong leave."""
    marks = set(text.replace(" ", "").replace("\n", ""))
    return not marks or (len(marks) == 1 and len(text) > 3) or bool(re.fullmatch(r"(?:\s*nan\b[\s,.]*)+", text, re.IGNORECASE))


# --- the engine's metrics ------------------------------------------------------------------------------------------------


def parse_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, each with its labels."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        found.setdefault(match.group(1), []).append((dict(LABEL.findall(match.group(2) or "")), value))
    return found


def total(metrics: t.Mapping[str, list[tuple[dict[str, str], float]]], name: str) -> float | None:
    """The sum over all engines; None when the metric is not there."""
    samples = metrics.get(name)
    return None if not samples else sum(value for dummy, value in samples)


def by_position(metrics: t.Mapping[str, list[tuple[dict[str, str], float]]]) -> dict[int, float]:
    positions: dict[int, float] = {}
    for labels, value in metrics.get(ACCEPTED_AT, []):
        if labels.get("position", "").isdecimal():
            positions[int(labels["position"])] = positions.get(int(labels["position"]), 0.0) + value
    return positions


def acceptance(before: str, after: str) -> dict[str, t.Any] | None:
    """How many drafted tokens were accepted between two readings of /metrics; None without drafting, or when the counters began anew."""
    old, new = parse_metrics(before), parse_metrics(after)
    grown = {name: (total(new, name) or 0.0) - (total(old, name) or 0.0) for name in (DRAFTS, DRAFTED, ACCEPTED)}
    if grown[DRAFTED] <= 0 or grown[DRAFTS] <= 0 or grown[ACCEPTED] < 0:
        return None
    earlier, later = by_position(old), by_position(new)
    return {
        "drafts": int(grown[DRAFTS]),
        "drafted": int(grown[DRAFTED]),
        "accepted": int(grown[ACCEPTED]),
        "ratio": round(grown[ACCEPTED] / grown[DRAFTED], 4),
        "per_step": round(grown[ACCEPTED] / grown[DRAFTS], 3),
        "per_position": [round((later[position] - earlier.get(position, 0.0)) / grown[DRAFTS], 4) for position in sorted(later)],
    }
