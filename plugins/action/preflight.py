# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Judge the facts of this host and say everything that is wrong with it in one message."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkops.inference.plugins.filter.bootstrap import gate_lines
from ansible_collections.sparkops.inference.plugins.module_utils._preflight import examine
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import format_refusals

display = Display()


def strangers(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], name: str) -> list[str]:
    """Peers of ``name`` that were read in this run, and that its authorized keys or known hosts lack."""
    node = hostvars[name].get("spark_node")
    if not node:
        return []
    known = set(node["known_hosts"]["text"].splitlines())
    found = []
    for peer in plan["nodes"]:
        facts = hostvars[peer].get("spark_node")
        if peer == name or not facts:
            continue
        pair = {**plan, "nodes": [name, peer]}
        lets_in = bool(facts["key"]["public"]) and set(gate_lines(hostvars, pair, name)) <= set(node["authorized"])
        if not lets_in or not {f"{plan['addresses'][peer]} {key}" for key in facts["host_keys"]} <= known:
            found.append(peer)
    return found


class ActionModule(ActionBase):
    """Runs on the controller alone; the node was read by M(sparkops.inference.node_facts)."""

    _requires_connection = False

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        name = task_vars["inventory_hostname"]
        findings = examine(
            task_vars["spark_plan"],
            name,
            task_vars.get("spark_node"),
            task_vars.get("spark_containers") or [],
            strangers(task_vars["hostvars"], task_vars["spark_plan"], name),
        )
        for line in [*findings.predictions, *findings.notices]:
            display.display(line)
        result.update(changed=False, predictions=findings.predictions, notices=findings.notices,
                      refusals=[refusal.as_dict() for refusal in findings.refusals])
        if findings.refusals:
            result.update(failed=True, msg=format_refusals(findings.refusals))
        return result
