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
requirements:
  - C(callbacks_enabled = sparkops.inference.stages) in C(ansible.cfg)
author:
  - The sparkops.inference authors (@sparkops)
"""

import time
import typing as t

from ansible import context
from ansible.plugins.callback import CallbackBase

COLLECTION = "sparkops.inference."


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


class CallbackModule(CallbackBase):
    """Collects, and prints once at the end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sparkops.inference.stages"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def v2_playbook_on_task_start(self, task: t.Any, is_conditional: bool) -> None:
        self.clock.begin(role_of(task))

    def v2_playbook_on_handler_task_start(self, task: t.Any) -> None:
        self.clock.begin(role_of(task))

    def v2_runner_on_ok(self, result: t.Any) -> None:
        if result._result.get("changed"):
            self.clock.stage(role_of(result._task)).changed.add(result._host.get_name())

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            self.clock.stage(role_of(result._task)).failed.add(result._host.get_name())

    def v2_runner_on_unreachable(self, result: t.Any) -> None:
        self.clock.stage(role_of(result._task)).failed.add(result._host.get_name())

    def v2_playbook_on_stats(self, stats: t.Any) -> None:
        self.clock.end()
        lines = self.clock.lines(bool(context.CLIARGS.get("check")))
        if lines:
            self._display.banner("STAGES")
            for line in lines:
                self._display.display(line)


def role_of(task: t.Any) -> str | None:
    """The full name of the role that a task belongs to."""
    return task._role.get_name() if task._role else None
