# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.plan); its documentation is in plugins/modules/plan.py."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ansible_collections.sparkops.inference.plugins.module_utils._plan import plan
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import format_refusals
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import request


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec={})
        variables = task_vars or {}
        found, refusals = plan(request(variables, self._loader, self._templar.template))
        if found is None:
            return {**result, "failed": True, "msg": format_refusals(refusals), "refusals": [refusal.as_dict() for refusal in refusals]}
        host = variables["inventory_hostname"]
        rank = found["nodes"].index(host) if host in found["nodes"] else -1
        # Shown once a run, not once a host: Ansible leaves out a warning that it has given already.
        return {**result, "changed": False, "spark_plan": found, "spark_rank": rank, "warnings": found["notices"]}
