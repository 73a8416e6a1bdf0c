# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Hold or release the lease of a deployment in the name of this run of ansible-playbook."""

from __future__ import annotations

import getpass
import os
import socket
import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import has_ended, process_run_id
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals

display = Display()

MODULE = "sparkops.inference.lease"


def run_id() -> str:
    """Of the ansible-playbook process: action plugins run in its children."""
    return process_run_id(os.getppid())


class ActionModule(ActionBase):
    """Calls the module once, and once more when the holder is known to have ended."""

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        arguments = {**self._task.args, "run_id": run_id(), "owner": f"{getpass.getuser()}@{socket.gethostname()}"}
        arguments.setdefault("node", self._task.delegate_to or task_vars.get("inventory_hostname", ""))
        answer = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        holder = answer.get("lease") or {}
        if answer.get("held") is False and holder and self._task.args.get("state", "held") == "held" and has_ended(holder["run_id"]):
            arguments["ended_run"] = holder["run_id"]
            answer = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
            holder = answer.get("lease") or {}
        result.update(answer)
        if answer.get("notice"):
            display.display(f"lease: {answer['notice']}")
        if answer.get("held") is False and self._task.args.get("state", "held") == "held":
            refusal = Refusal(
                id="lease.held",
                node=arguments["node"],
                thing=f"lease of {os.path.basename(self._task.args['state_dir'])}",
                found=f"held by {holder.get('owner')} (run {holder.get('run_id')}), expires in {max(0.0, holder.get('expires', 0) - time.time()):.0f} s",
                wanted="no other run",
                next_step="wait for that run to end; its lease expires by itself when it is dead",
            )
            result.update(failed=True, msg=format_refusals([refusal]), refusals=[refusal.as_dict()])
        return result
