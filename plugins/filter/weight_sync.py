# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a worker is told about its sources."""

from __future__ import annotations

import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _sync_method, _zfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import format_refusals

HostVars = t.Mapping[str, t.Any]
Plan = t.Mapping[str, t.Any]


def sync_sources(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], host: str) -> list[dict[str, t.Any]]:
    """Nodes that ``host`` reads from: in a chain the rank before it, and at last always the head.

    A node that is not in this run has no facts, and is left out of the chain.
    """
    nodes = list(plan["nodes"])
    rank = nodes.index(host)
    chain = plan["settings"].get("weight_sync_topology", "chain") == "chain"
    names = [nodes[rank - 1]] if chain and rank > 1 and "spark_node" in hostvars[nodes[rank - 1]] else []
    return [source(hostvars[name], plan, name, host) for name in [*names, plan["head"]]]


def rails(plan: Plan, name: str) -> list[str]:
    """The fabric addresses of a node, one per rail."""
    return plan.get("node_settings", {}).get(name, {}).get("weight_sync_rails") or [plan["addresses"][name]]


def source(facts: t.Mapping[str, t.Any], plan: Plan, name: str, reader: str) -> dict[str, t.Any]:
    node = facts["spark_node"]
    return {
        "node": name,
        "address": plan["addresses"][name],
        "rails": rails(plan, name),
        "clients": list(dict.fromkeys([plan["addresses"][reader], *rails(plan, reader)])),
        "user": node["user"]["name"],
        "root": node["weights_root"],
    }


def sync_looks(hostvars: HostVars, plan: Plan, predicting: bool = False) -> dict[str, dict[str, t.Any]]:
    """What module sync_info said on each rank of this run, with the rights that become gives there.

    In check mode bootstrap has changed nothing yet: what it would mend by then counts as mended.
    """
    found = {}
    for name in plan["nodes"]:
        info = (hostvars[name].get("__weight_sync_look") or {}).get("info")
        if not info:
            continue
        node = hostvars[name]["spark_node"]
        found[name] = {**info, "root": node["sudo"] != "none"}
        if predicting and node["sudo"] != "none":
            if plan["settings"]["bootstrap_state_dir"] and f"{info['weights_root']}/".startswith(f"{node['state_root']}/"):
                found[name]["writable"] = True
            if plan["settings"]["bootstrap_packages"]:
                found[name]["tools"] = {**info["tools"], "rsync": True}
    return found


def sync_choice(hostvars: HostVars, plan: Plan, predicting: bool = False) -> dict[str, t.Any]:
    """The method for this run, with the words for it."""
    settings = plan["settings"]
    looks = sync_looks(hostvars, plan, predicting)
    wishes = _sync_method.Wishes(
        method=settings.get("weight_sync_method") or "auto",
        transport=settings.get("weight_sync_transport") or "ssh",
        margin=int(settings["weight_sync_space_margin"]),
        packages=bool(settings.get("weight_sync_packages")),
    )
    choice = _sync_method.choose(looks[plan["head"]], [looks[name] for name in plan["nodes"][1:] if name in looks], wishes)
    return {**choice.as_dict(), "message": format_refusals(choice.refusals) if choice.refusals else ""}


def sync_clients(plan: Plan) -> list[str]:
    """Addresses that the head's export is for: the workers', and nobody else's."""
    return list(dict.fromkeys(address for name in plan["nodes"][1:] for address in [plan["addresses"][name], *rails(plan, name)] if address))


def sync_unreachable(hostvars: HostVars, plan: Plan) -> str:
    """The problems of all NFS mounts of the group as one text, empty when all servers answer."""
    return "\n".join(filter(None, ((hostvars[name].get("__weight_sync_probe") or {}).get("message", "") for name in plan["nodes"])))


def zfs_watched(plan: Plan, weights_root: str) -> list[str]:
    """What makes a new snapshot of the head's dataset worthwhile: trees and manifests, not locks and staging."""
    return [f"{weights_root}/{artefact['directory']}{end}" for artefact in plan["artefacts"] for end in ("", ".manifest.json")]


def zfs_needed(hostvars: HostVars, plan: Plan) -> list[str]:
    """GUIDs of the snapshots that the workers' next streams may begin with: of each the newest one that the head has, too.

    Whatever a rank has that was not seen, or that goes on with a cut receive, may begin with any: then all stay.
    """
    there = {name: _snapshots(hostvars[name]) for name in plan["nodes"]}
    cut = [name for name in plan["nodes"] if _zfs_of(hostvars[name]).get("receive_resume_token")]
    if cut or None in there.values():
        return sorted({snapshot.guid for found in there.values() for snapshot in found or ()})
    source = _zfs_plan.Source("", there[plan["head"]])
    bases = [_zfs_plan.common_base(source, _zfs_plan.Replica("", True, there[name])) for name in plan["nodes"][1:]]
    return sorted({base.guid for base in bases if base})


def _zfs_of(facts: t.Mapping[str, t.Any]) -> t.Mapping[str, t.Any]:
    return ((facts.get("__weight_sync_look") or {}).get("info") or {}).get("zfs") or {}


def _snapshots(facts: t.Mapping[str, t.Any]) -> tuple[_zfs_plan.Snapshot, ...] | None:
    found = (facts.get("__weight_sync_snapshots") or {}).get("snapshots")
    return None if found is None else tuple(_zfs_plan.Snapshot(item["name"], item["guid"], int(item["created"])) for item in found)


def sync_read(hostvars: HostVars, plan: Plan, host: str) -> list[str]:
    """The trees of ``host`` that were read in this run and may still fill its memory: what others copied from it, and replicas, which the worker has proven.

    Transport fabric gives pages back while it sends.
    """
    read = set()
    for reader in plan["nodes"][1:]:
        facts = hostvars[reader]
        done = (facts.get("__weight_sync_result") or {}).get("done") or {}
        copied = {name for name, report in done.items() if report["bytes"] and report["transport"] == "ssh"}
        if copied and host in [node["node"] for node in sync_sources(hostvars, plan, reader)]:
            read |= copied
        if host == reader:
            read |= {name for name, report in done.items() if report["transport"] == "zfs"}
        if host == plan["head"]:
            # What is mounted is proven through the mount: the head has read all of it.
            read |= {name for name, report in done.items() if report["transport"] == "nfs"}
            # A stream is of the whole dataset.
            streams = (facts.get("__weight_sync_received") or {}).get("done") or {}
            if any(stream["bytes"] for stream in streams.values()):
                read |= {artefact["name"] for artefact in plan["artefacts"]}
    root = hostvars[host]["spark_node"]["weights_root"]
    return [f"{root}/{artefact['directory']}" for artefact in plan["artefacts"] if artefact["name"] in read]


def sync_artefacts(artefacts: t.Sequence[t.Mapping[str, t.Any]], found: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """The plan's artefacts, each with the head's manifest when its tree is complete."""
    manifests = {item["name"]: item["manifest"] for item in found if item["complete"]}
    return [{**artefact, "manifest": manifests.get(artefact["name"])} for artefact in artefacts]


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "sync_sources": sync_sources,
            "sync_artefacts": sync_artefacts,
            "sync_choice": sync_choice,
            "sync_clients": sync_clients,
            "sync_read": sync_read,
            "sync_unreachable": sync_unreachable,
            "zfs_needed": zfs_needed,
            "zfs_watched": zfs_watched,
        }
