# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a worker is told about its sources."""

from __future__ import annotations

import typing as t


def sync_sources(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], host: str) -> list[dict[str, t.Any]]:
    """Nodes that ``host`` reads from: in a chain the rank before it, and at last always the head.

    A node that is not in this run has no facts, and is left out of the chain.
    """
    nodes = list(plan["nodes"])
    rank = nodes.index(host)
    chain = plan["settings"].get("weight_sync_topology", "chain") == "chain"
    names = [nodes[rank - 1]] if chain and rank > 1 and "spark_node" in hostvars[nodes[rank - 1]] else []
    return [source(hostvars[name], plan, name) for name in [*names, plan["head"]]]


def source(facts: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], name: str) -> dict[str, t.Any]:
    rails = plan.get("node_settings", {}).get(name, {}).get("weight_sync_rails")
    node = facts["spark_node"]
    return {
        "node": name,
        "address": plan["addresses"][name],
        "rails": rails or [plan["addresses"][name]],
        "user": node["user"]["name"],
        "root": node["weights_root"],
    }


def sync_artefacts(artefacts: t.Sequence[t.Mapping[str, t.Any]], found: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """The plan's artefacts, each with the head's manifest when its tree is complete."""
    manifests = {item["name"]: item["manifest"] for item in found if item["complete"]}
    return [{**artefact, "manifest": manifests.get(artefact["name"])} for artefact in artefacts]


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"sync_sources": sync_sources, "sync_artefacts": sync_artefacts}
