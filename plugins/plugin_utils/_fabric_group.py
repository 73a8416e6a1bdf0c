# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""From the variables of all ranks to the fabric plan of their group, for the actions fabric_plan and doctor_report."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._fabric import Choice, FabricPlan, plan_fabric
from ansible_collections.sparkops.inference.plugins.module_utils._parity import Parity, check_parity
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

Variables = t.Mapping[str, t.Any]


def registered(hostvars: t.Mapping[str, Variables], names: t.Sequence[str], result: str, part: str) -> dict[str, t.Any]:
    """A part of a registered result on each host that has it."""
    found = {name: (hostvars[name].get(result) or {}).get(part) for name in names if name in hostvars}
    return {name: plain(value) for name, value in found.items() if value}


def unread(names: t.Sequence[str], facts: Variables, hostvars: t.Mapping[str, Variables]) -> list[Refusal]:
    """A refusal for each rank whose fabric is not known, with what is known of the reason."""
    refusals = []
    for name in (name for name in names if name not in facts):
        found = (hostvars[name].get("__fabric_read") or {}) if name in hostvars else {}
        reason = str(found.get("msg") or "none in this run")
        step = "mend the connection" if found.get("unreachable") else f"see why {name} was not read, or run without a --limit that leaves it out"
        refusals.append(Refusal("fabric.unread", name, "facts of the fabric", reason, "those of every rank", step))
    return refusals


def choices(plan: Variables) -> dict[str, Choice]:
    found = {}
    for name in plan["nodes"]:
        own = plan["node_settings"][name]
        hcas = ",".join(own.get("fabric_hcas") or [])
        found[name] = Choice(own.get("fabric_interface") or "", hcas, plan["settings"]["fabric_gid_policy"], own.get("fabric_gid_index"))
    return found


def judge_group(plan: Variables, hostvars: t.Mapping[str, Variables], facts: t.Mapping[str, Variables]) -> tuple[FabricPlan, Parity]:
    """Plan the fabric and compare the ranks. ``facts`` are those of fabric_info, of every rank."""
    names, settings = plan["nodes"], plan["settings"]
    found = plan_fabric(names, facts, plan["addresses"], choices(plan), settings["fabric_rdma"], settings["fabric_topology"])
    used = {name: {entry["address"], *(rail["address"] for rail in entry["rails"])} for name, entry in found.nodes.items()}
    # How far each clock is certainly ahead of the controller's, as role node_facts saw it.
    ahead = {name: float(node["clock_skew"]) for name in names if name in hostvars and "clock_skew" in (node := hostvars[name].get("spark_node") or {})}
    return found, check_parity(facts, used, ahead)
