# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.rank_spec); its documentation is in plugins/modules/rank_spec.py."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ansible_collections.sparkops.inference.plugins.module_utils._rank_spec import rank_specs
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

ARGUMENTS: dict[str, dict[str, t.Any]] = {
    "image_id": {"type": "str"},
    "entry_sha256": {"type": "str"},
    # Not the key and not from which it could be found out, but nobody needs to see it either.
    "api_key_hmac": {"type": "str", "no_log": False},
}


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)[1]
        variables = task_vars or {}
        plan = plain(variables["spark_plan"])
        nodes, refusals = _nodes(plan, variables)
        if refusals:
            return {**result, "failed": True, "msg": format_refusals(refusals), "refusals": [refusal.as_dict() for refusal in refusals]}
        specs = rank_specs(plan, nodes, arguments["image_id"], arguments["entry_sha256"], arguments["api_key_hmac"])
        rank = int(variables["spark_rank"])
        own = specs[rank] if rank >= 0 else None
        return {**result, "changed": False, "spec": own}


def _nodes(plan: dict[str, t.Any], variables: t.Mapping[str, t.Any]) -> tuple[dict[str, t.Any], list[Refusal]]:
    nodes, refusals = {}, []
    for name in plan["nodes"]:
        facts = _facts(variables["hostvars"][name])
        if facts:
            nodes[name] = facts
        else:
            refusals.append(
                Refusal(
                    id="plan.node_unread",
                    node=name,
                    thing="facts of the node",
                    found="none in this run",
                    wanted=f"those of all ranks of {plan['deployment']}",
                    next_step=f"run without a --limit that leaves {name} out",
                )
            )
    return nodes, refusals


def _facts(host: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What role node_facts read of a node, with what roles fabric and engram_pack found on it."""
    facts = plain(host.get("spark_node") or {})
    if not facts:
        return {}
    engram = plain(host.get("spark_engram") or {})
    packed = engram.get("directory") if engram.get("valid") else None
    return {**facts, "fabric": plain(host.get("spark_fabric") or {}), "engram_packed_dir": packed}
