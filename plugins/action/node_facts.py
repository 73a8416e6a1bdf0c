# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Read a node, and compare its clock with the controller's while the call's own duration is known."""

from __future__ import annotations

import time
import typing as t

from ansible.plugins.action import ActionBase

MODULE = "sparkops.inference.node_facts"


def clock_skew(node_time: float, before: float, after: float) -> float:
    """Seconds that the node is ahead of the controller; 0 where its time lies within the call."""
    if node_time < before:
        return node_time - before
    return max(0.0, node_time - after)


class ActionModule(ActionBase):
    """Calls the module of the same name once."""

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        before = time.time()
        result.update(self._execute_module(module_name=MODULE, module_args=self._task.args, task_vars=task_vars))
        node = (result.get("ansible_facts") or {}).get("spark_node")
        if node:
            node["clock_skew"] = clock_skew(node["time"], before, time.time())
        return result
