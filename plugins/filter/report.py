# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters around what is kept on the controller."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.plugin_utils._pages import report_directory


def report_path(plan: t.Mapping[str, t.Any]) -> str:
    """Where the reports of this deployment are kept."""
    return report_directory(plan["settings"]["report_directory"], plan["deployment"])


def scrape_targets(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any]) -> dict[str, list[dict[str, t.Any]]]:
    """Prometheus' lists of targets: the engine's API on the head, and the node exporter of every node."""

    def reached(name: str, port: int) -> str:
        address = hostvars[name].get("ansible_host") or name
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    common = {"deployment": plan["deployment"]}
    engine = {"targets": [reached(plan["head"], plan["api"]["port"])], "labels": {**common, "node": plan["head"]}}
    nodes = [
        {"targets": [reached(name, plan["settings"]["metrics_node_port"])], "labels": {"node": name, "node_rank": str(rank)}}
        for rank, name in enumerate(plan["nodes"])
    ]
    return {"vllm": [engine], "node": nodes}


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"report_path": report_path, "scrape_targets": scrape_targets}
