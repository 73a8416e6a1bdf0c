# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.fabric_plan); its documentation is in plugins/modules/fabric_plan.py."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals
from ansible_collections.sparkops.inference.plugins.plugin_utils._fabric_group import judge_group, registered, unread
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

display = Display()

ARGUMENTS = {
    "others": {"type": "list", "elements": "dict", "default": []},
    "accept": {"type": "list", "elements": "str", "default": []},
    "quiet": {"type": "bool", "default": False},
}


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)[1]
        variables = task_vars or {}
        plan, hostvars = plain(variables["spark_plan"]), variables["hostvars"]
        facts = registered(hostvars, plan["nodes"], "__fabric_read", "fabric")
        facts.update({entry["item"]: plain(entry["fabric"]) for entry in arguments["others"] if "fabric" in entry})
        missing = unread(plan["nodes"], facts, hostvars)
        if missing:
            return refused(result, missing, variables)
        found, parity = judge_group(plan, hostvars, facts)
        result.update(changed=False, topology=found.topology, parity=parity.table, refusals=[])
        refusals = [refusal for refusal in [*found.refusals, *parity.refusals] if refusal.id not in arguments["accept"]]
        if refusals:
            return refused(result, refusals, variables)
        name = variables["inventory_hostname"]
        own = found.nodes.get(name)
        if own is None:
            return {**result, "fabric": {}}
        own["notices"] = [*own["notices"], *parity.notices[name]]
        for notice in [] if arguments["quiet"] else own["notices"]:
            display.display(f"{name}: {notice}")
        return {**result, "fabric": own}


def refused(result: dict[str, t.Any], refusals: list[Refusal], variables: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Every host of the group fails, but only the first one says why: the list is the same for all."""
    name, first = variables["inventory_hostname"], (variables.get("ansible_play_hosts") or [""])[0]
    text = format_refusals(refusals) if name == first else f"the fabric of the group is refused; the reasons are with {first}"
    return {**result, "failed": True, "msg": text, "refusals": [refusal.as_dict() for refusal in refusals]}
