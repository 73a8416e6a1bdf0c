# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Follow the log of a rank in slices, each line on the controller as it comes. See plugins/modules/rank_log_info.py."""

from __future__ import annotations

import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

MODULE = "sparkops.inference.rank_log_info"
PAUSE = 1.0


class ActionModule(ActionBase):
    """Calls the module once, or again and again for C(follow) seconds."""

    _supports_async = False

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        seconds = float(arguments.get("follow") or 0)
        until = time.monotonic() + seconds
        answer = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        printed = self._print(answer) if seconds else 0
        while seconds and not answer.get("failed") and not answer.get("unreachable") and time.monotonic() < until:
            time.sleep(PAUSE)
            # A container that has said nothing yet has no cursor: then its first lines are the new ones.
            since = {"since": answer["cursor"]} if answer.get("cursor") else {"tail": 1000}
            answer = self._execute_module(module_name=MODULE, module_args={**arguments, **since}, task_vars=task_vars)
            printed += self._print(answer)
        if seconds and "lines" in answer:
            answer = {**answer, "lines": [], "printed": printed}
        return {**result, **answer}

    def _print(self, answer: t.Mapping[str, t.Any]) -> int:
        lines = answer.get("lines") or []
        for line in lines:
            display.display(f"{self._task.args['node']} | {line}")
        return len(lines)
