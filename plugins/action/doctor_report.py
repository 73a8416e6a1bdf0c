# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.doctor_report); its documentation is in plugins/modules/doctor_report.py."""

from __future__ import annotations

import itertools
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkops.inference.plugins.module_utils._doctor import check_driver, node_notices, report_lines
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.plugin_utils._fabric_group import judge_group, registered, unread
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

display = Display()

# What the role's tasks register, none of which may fail before the report.
LOOKS = {"__doctor_opened": "the meeting port", "__doctor_probed": "the rails", "__doctor_read": "the health of the machine"}
MESSAGE_LENGTH = 300


def unanswered(hostvars: t.Mapping[str, t.Mapping[str, t.Any]], names: t.Iterable[str]) -> list[Refusal]:
    """A refusal for each look that ended without an answer: what was not seen is not well."""
    refusals = []
    for name, (variable, thing) in itertools.product(names, LOOKS.items()):
        found = (hostvars[name].get(variable) or {}) if name in hostvars else {}
        if found.get("msg") and not found.get("refusals") and not found.get("skipped"):
            step = "mend the connection" if found.get("unreachable") else "run the play with -vvv to see why"
            refusals.append(Refusal("doctor.unread", name, thing, str(found["msg"]).strip()[:MESSAGE_LENGTH], "an answer", step))
    return refusals


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec={})
        variables = task_vars or {}
        plan, hostvars = plain(variables["spark_plan"]), variables["hostvars"]
        names = plan["nodes"]
        facts = registered(hostvars, names, "__fabric_read", "fabric")
        readings = registered(hostvars, names, "__doctor_read", "health")
        tests = [registered(hostvars, names, result, "refusals") for result in ("__doctor_opened", "__doctor_probed")]
        refusals = [*unread(names, facts, hostvars), *(Refusal(**entry) for test in tests for entries in test.values() for entry in entries)]
        refusals += unanswered(hostvars, facts)
        notices: dict[str, list[str]] = {name: [] for name in names}
        chosen: dict[str, t.Any] = {}
        table: list[dict[str, t.Any]] = []
        if len(facts) == len(names):
            found, parity = judge_group(plan, hostvars, facts)
            refusals += [*found.refusals, *parity.refusals]
            chosen, table = found.nodes, parity.table
            notices = {name: [*found.nodes[name]["notices"], *parity.notices[name]] for name in names}
        for name in (name for name in names if name in readings and name in facts):
            refusals += check_driver(name, readings[name], facts[name]["driver"])
            notices[name] += node_notices(readings[name], facts[name], chosen.get(name, {}))
        lines = report_lines(names, facts, readings, chosen, notices, refusals, table)
        for line in lines:
            display.display(line)
        result.update(changed=False, report=lines, notices=notices, parity=table, refusals=[refusal.as_dict() for refusal in refusals])
        if refusals:
            count = "1 thing is" if len(refusals) == 1 else f"{len(refusals)} things are"
            result.update(failed=True, msg=f"{count} wrong; the report above names each with its next step")
        return result
