# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of the role bench: what to measure, and a result in one line."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _bench_plan
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain


def bench_cases(plan: t.Mapping[str, t.Any], survey: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return _bench_plan.bench_cases(plain(plan["settings"]), plain(survey))


def bench_lines(run: t.Mapping[str, t.Any]) -> list[str]:
    """The run as lines for a terminal."""
    lines = []
    for row in run["decode"]:
        rate, first = row["tokens_per_second"], row["first_token_ms"]
        if rate is None:
            lines.append(f"{row['label']}: {row['runs'][0]['error'] or 'no rate: the engine does not count its tokens'}")
            continue
        accepted = f", {100 * row['acceptance']['ratio']:.1f} % of drafts accepted" if row["acceptance"] else ""
        lines.append(
            f"{row['label']}: {rate['median']:.1f} tokens/s ({rate['min']:.1f} to {rate['max']:.1f}), first token {first['median']:.0f} ms{accepted}"
        )
    for row in run["prefill"]:
        said = row["error"] or f"{row['tokens_per_second']:.1f} tokens/s, first token {row['first_token_s']:.2f} s"
        lines.append(f"{row['label']} ({row['tokens'] or 'not sent'}): {said}")
    lines += [f"{row['question']} {row['answer'] or row['error']}" for row in run["probes"]]
    lines += [f"left out: {row['case']}: {row['reason']}" for row in run["skipped"]]
    return lines + [f"note: {note}" for note in run["notes"]]


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"bench_cases": bench_cases, "bench_lines": bench_lines}
