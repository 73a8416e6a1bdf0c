# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: stages
type: aggregate
short_description: Say at the end of a run how long each stage took and where it changed something
version_added: 0.1.0
description:
  - A stage is a role. One line each, in the order in which they began, plain enough for the log of a job in a browser.
  - In check mode the lines say what would change.
  - A run that brought something up, or failed to, is also kept as a page on the controller, in the planner's C(report_directory). It stands alone;
    its data lies beside it as JSON.
requirements:
  - C(callbacks_enabled = sparkops.inference.stages) in C(ansible.cfg)
author:
  - The sparkops.inference authors (@sparkops)
"""

import json
import os
import time
import typing as t

from ansible import context
from ansible.module_utils.ansible_release import __version__ as ansible_version
from ansible.plugins.callback import CallbackBase
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain
from ansible_collections.sparkops.inference.plugins.plugin_utils._pages import collection_version, render, report_directory, write
from ansible_collections.sparkops.inference.plugins.plugin_utils._run_record import Recorder, run_document, run_view, verdict

COLLECTION = "sparkops.inference."
REPORTS_KEPT = 20


class Stage:
    """What one role did in this run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.changed: set[str] = set()
        self.failed: set[str] = set()

    def words(self, check: bool) -> str:
        parts = []
        if self.changed:
            parts.append(f"{'would change' if check else 'changed'} {', '.join(sorted(self.changed))}")
        if self.failed:
            parts.append(f"failed on {', '.join(sorted(self.failed))}")
        return "; ".join(parts) or "ok"


class Clock:
    """Stages by name. The time from the start of a task to the start of the next one belongs to the task's role."""

    def __init__(self, now: t.Callable[[], float] = time.monotonic) -> None:
        self.stages: dict[str, Stage] = {}
        self._now = now
        self._current: Stage | None = None
        self._begun = 0.0

    def begin(self, role: str | None) -> None:
        self.end()
        if role and role.startswith(COLLECTION):
            self._current = self.stages.setdefault(role.removeprefix(COLLECTION), Stage())
            self._begun = self._now()

    def end(self) -> None:
        if self._current:
            self._current.seconds += self._now() - self._begun
        self._current = None

    def stage(self, role: str | None) -> Stage:
        """The stage that a result belongs to; one that nobody prints for tasks of others."""
        return self.stages.get((role or "").removeprefix(COLLECTION), Stage())

    def lines(self, check: bool) -> list[str]:
        width = max((len(name) for name in self.stages), default=0)
        return [f"{name:{width}} {stage.seconds:8.1f} s  {stage.words(check)}" for name, stage in self.stages.items()]


def keep_report(recorder: Recorder, said: str, plays: t.Sequence[str], begun: float, ended: float) -> str:
    """Write the report of a run and give up the oldest; returns the path of its page."""
    about = {
        "id": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(ended)),
        "begun_at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun)),
        "seconds": round(ended - begun, 1),
        "plays": list(plays),
        "verdict": verdict(recorder, said),
        "ansible": ansible_version,
        "collection": collection_version(),
    }
    run = run_document(recorder, about)
    directory = report_directory(recorder.plan["settings"]["report_directory"], recorder.plan["deployment"])
    path = os.path.join(directory, f"bringup-{run['id']}.html")
    write(path, render("bringup", view=run_view(run), data=run, version=about["collection"]))
    write(path.removesuffix("html") + "json", json.dumps(run, indent=1, sort_keys=True) + "\n")
    kept = sorted(name for name in os.listdir(directory) if name.startswith("bringup-") and name.endswith((".html", ".json")))
    for name in kept[: -2 * REPORTS_KEPT]:
        os.unlink(os.path.join(directory, name))
    return path


class CallbackModule(CallbackBase):
    """Collects, and prints once at the end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sparkops.inference.stages"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.recorder = Recorder()
        self.plays: list[str] = []
        self.begun = time.time()
        self._started: dict[tuple[str, str], float] = {}

    def v2_playbook_on_play_start(self, play: t.Any) -> None:
        self.plays.append(play.get_name())

    def v2_playbook_on_task_start(self, task: t.Any, is_conditional: bool) -> None:
        self.clock.begin(role_of(task))

    def v2_playbook_on_handler_task_start(self, task: t.Any) -> None:
        self.clock.begin(role_of(task))

    def v2_runner_on_start(self, host: t.Any, task: t.Any) -> None:
        self._started[(host.get_name(), task._uuid)] = time.time()

    def v2_runner_on_ok(self, result: t.Any) -> None:
        changed = bool(result._result.get("changed"))
        if changed:
            self.clock.stage(role_of(result._task)).changed.add(result._host.get_name())
        self._record(result, "changed" if changed else "ok")

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            self.clock.stage(role_of(result._task)).failed.add(result._host.get_name())
        self._record(result, "ok" if ignore_errors else "failed")

    def v2_runner_on_unreachable(self, result: t.Any) -> None:
        self.clock.stage(role_of(result._task)).failed.add(result._host.get_name())
        self._record(result, "unreachable")

    def _record(self, result: t.Any, status: str) -> None:
        role, host, now = role_of(result._task), result._host.get_name(), time.time()
        started = self._started.pop((host, result._task._uuid), now)
        if role and role.startswith(COLLECTION):
            name, stage = result._task.get_name().removeprefix(f"{role} : "), role.removeprefix(COLLECTION)
            self.recorder.task(stage, host, name, result._task.action, started - self.begun, now - self.begun, status, result._result)

    def v2_playbook_on_stats(self, stats: t.Any) -> None:
        self.clock.end()
        check = bool(context.CLIARGS.get("check"))
        lines = self.clock.lines(check)
        if lines:
            self._display.banner("STAGES")
            for line in lines:
                self._display.display(line)
        if self.recorder.worth_a_report and not check:
            self._keep_report(str((stats.custom.get("_run") or {}).get("sparkops_verdict", "")))

    def _keep_report(self, said: str) -> None:
        self.recorder.plan = plain(self.recorder.plan)
        try:
            self._display.display(f"report {keep_report(self.recorder, said, self.plays, self.begun, time.time())}")
        except OSError as error:
            self._display.warning(f"The report of this run could not be kept: {error}")


def role_of(task: t.Any) -> str | None:
    """The full name of the role that a task belongs to."""
    return task._role.get_name() if task._role else None
