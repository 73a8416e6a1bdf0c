# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Wait for a group in bounded slices on rank 0, with one line of progress for each on the controller."""

from __future__ import annotations

import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkops.inference.plugins.module_utils._group_channel import lowest

display = Display()

MODULE = "sparkops.inference.serve_health"
SLICE_SECONDS = 10
LOST_SLICES = 3  # a lost ssh session is not a lost group


def progress_line(ranks: t.Mapping[str, t.Mapping[str, t.Any]], elapsed: float) -> str:
    """``serve 40 s | rank 0 loading, 85.1 GiB available | rank 1 loading, 84.0 GiB available``."""
    parts = [f"serve {elapsed:.0f} s"]
    for number in sorted(ranks, key=int):
        available = ranks[number].get("available_kib")
        memory = f", {available / 1048576:.1f} GiB available" if available else ""
        parts.append(f"rank {number} {ranks[number]['phase']}{memory}")
    return " | ".join(parts)


def failure_text(verdict: t.Mapping[str, t.Any], elapsed: float, nodes: t.Sequence[str]) -> str:
    """What happened, then the last lines of every rank: the rank that fails last is seldom the one that failed first."""
    lines = [f"The group did not come up: {verdict['reason']} (after {elapsed:.0f} s)."]
    ranks = verdict.get("ranks") or {}
    for number in sorted(ranks, key=int):
        name = f" ({nodes[int(number)]})" if int(number) < len(nodes) else ""
        error = f": {ranks[number]['error']}" if ranks[number].get("error") else ""
        lines.append(f"--- rank {number}{name}: {ranks[number]['phase']}{error}")
        lines.extend(ranks[number].get("tail") or ["(no log line)"])
    return "\n".join(lines)


class ActionModule(ActionBase):
    """Calls the module until it has a verdict or the time is over."""

    _supports_async = False

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        nodes = list((task_vars.get("spark_plan") or {}).get("nodes", []))
        timeout = float(arguments.get("timeout", 1500))
        arguments.setdefault("slice", SLICE_SECONDS)
        begun, lost = time.monotonic(), 0
        least: dict[str, int] = {}
        while True:
            verdict = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
            elapsed = time.monotonic() - begun
            if verdict.get("unreachable") or (verdict.get("failed") and "verdict" not in verdict):
                lost += 1
                if lost >= LOST_SLICES or not verdict.get("unreachable"):
                    return {**result, **verdict}
                continue
            lost = 0
            least = lowest([least, verdict["least_available_kib"]])
            verdict["least_available_kib"] = least
            if self._task.check_mode or verdict["verdict"] == "healthy":
                return {**result, **verdict, "elapsed": round(elapsed, 1)}
            if verdict["verdict"] == "waiting" and elapsed >= timeout:
                verdict = {**verdict, "verdict": "timeout", "reason": f"not healthy within {timeout:.0f} s"}
            if verdict["verdict"] != "waiting":
                return {**result, **verdict, "failed": True, "msg": failure_text(verdict, elapsed, nodes), "elapsed": round(elapsed, 1)}
            display.display(progress_line(verdict["ranks"], elapsed))
