# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Show long work of a node while it goes on.

A module that does long work takes ``wait_slice`` and ``run_id`` and returns ``running``, ``run_id`` and ``progress``.
The action plugin calls it in slices, so the controller prints a line now and then, and a lost connection between two
slices costs nothing: the work is a unit of its own on the node.
"""

from __future__ import annotations

import time
import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

SLICE_SECONDS = 5
# The line may be gone for this long before the run is given up; the work itself goes on and the next run attaches.
PATIENCE_SECONDS = 300


def human(size: float) -> str:
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= divisor:
            return f"{size / divisor:.1f} {unit}"
    return f"{int(size)} B"


def progress_line(host: str, progress: t.Mapping[str, t.Any]) -> str:
    """``spark-1: download 43.1 GiB/197.0 GiB 22 % 1.9 GiB/s ETA 81 s``."""
    parts = [f"{host}: {progress.get('phase') or 'starting'}"]
    total, done, rate = progress.get("total_bytes") or 0, progress.get("done_bytes") or 0, progress.get("rate") or 0
    if total:
        parts.append(f"{human(done)}/{human(total)} {100 * done // total} %")
    if rate:
        parts.append(f"{human(rate)}/s")
    if progress.get("eta") is not None:
        parts.append(f"ETA {progress['eta']:.0f} s")
    if progress.get("message"):
        parts.append(f"- {progress['message']}")
    return " ".join(parts)


class LongWork(ActionBase):
    """Base of the action plugins of modules that do long work. ``module`` is the module's full name."""

    module = ""
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = {"wait_slice": SLICE_SECONDS, **self._task.args}
        answer = self.call(arguments, task_vars)
        answer = self.prepare(answer, arguments, task_vars)
        shown = ""
        while answer.get("running"):
            line = progress_line(task_vars["inventory_hostname"], answer["progress"]) if task_vars else ""
            if line != shown:
                display.display(line)
                shown = line
            run_id = answer["run_id"]
            answer = self.call({**arguments, "run_id": run_id}, task_vars, patience=PATIENCE_SECONDS)
        for notice in answer.get("notices") or []:
            display.display(f"{(task_vars or {}).get('inventory_hostname', '')}: {notice}")
        result.update(answer)
        return result

    def prepare(self, answer: dict[str, t.Any], arguments: dict[str, t.Any], task_vars: dict[str, t.Any] | None) -> dict[str, t.Any]:
        """A place for what only the controller can bring; returns the answer of the call that follows."""
        return answer

    def call(self, arguments: dict[str, t.Any], task_vars: dict[str, t.Any] | None, patience: float = 0) -> dict[str, t.Any]:
        """One call of the module. A lost connection is tried again while ``patience`` lasts."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._execute_module(module_name=self.module, module_args=arguments, task_vars=task_vars)
            except AnsibleConnectionFailure:
                if time.monotonic() > deadline:
                    raise
                display.warning(f"lost the connection to {(task_vars or {}).get('inventory_hostname')}; the work goes on there, asking again")
                time.sleep(5)
                self._connection.reset()
