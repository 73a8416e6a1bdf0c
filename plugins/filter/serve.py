# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of the serving roles: what the ranks said in, decisions and texts out."""

from __future__ import annotations

import hashlib
import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._group_state import SERVING, group_state
from ansible_collections.sparkops.inference.plugins.module_utils._plan_text import settings_lines, settings_table
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

HostVars = t.Mapping[str, t.Any]
Plan = t.Mapping[str, t.Any]


def _rank_infos(hostvars: HostVars, plan: Plan) -> dict[str, t.Any]:
    return {name: (hostvars[name].get("__serve_rank_info") or {}).get("rank") for name in plan["nodes"]}


def _wanted_specs(hostvars: HostVars, plan: Plan) -> dict[str, str]:
    """The spec hash that was planned in this run, else the one recorded at the last start."""
    infos = _rank_infos(hostvars, plan)
    wanted = {}
    for name in plan["nodes"]:
        spec = (hostvars[name].get("__serve_spec") or {}).get("spec")
        wanted[name] = spec["labels"]["sparkops.spec"] if spec else ((infos[name] or {}).get("recorded") or {}).get("spec", "")
    return wanted


def serve_state(hostvars: HostVars, plan: Plan) -> dict[str, t.Any]:
    """State of the group with its reasons and ranks; see module_utils/_group_state.py."""
    infos = _rank_infos(hostvars, plan)
    return group_state(plan["nodes"], infos, _wanted_specs(hostvars, plan), (infos[plan["head"]] or {}).get("api"))


def serve_decision(hostvars: HostVars, plan: Plan, restart: bool = False) -> dict[str, t.Any]:
    """The state, and whether the whole group is to be replaced. Serving with the wanted spec is left alone unless told otherwise."""
    state = serve_state(hostvars, plan)
    return {**state, "replace": bool(restart) or state["state"] != SERVING}


def rank_record(hostvars: HostVars, plan: Plan, host: str) -> dict[str, t.Any]:
    """rank.json of ``host``: all that its rank service needs to know."""
    node, spec = hostvars[host]["spark_node"], hostvars[host]["__serve_spec"]["spec"]
    return {
        "format": 1,
        "deployment": plan["deployment"],
        "rank": plan["nodes"].index(host),
        "container": spec["name"],
        "spec": spec["labels"]["sparkops.spec"],
        "group": spec["labels"]["sparkops.group"],
        "head_address": plan["addresses"].get(plan["head"], ""),
        "peers": [
            {"rank": rank, "address": plan["addresses"].get(name, ""), "user": hostvars[name]["spark_node"]["user"]["name"]}
            for rank, name in enumerate(plan["nodes"])
        ],
        "stop_timeout": spec["stop_timeout"],
        "docker_socket": node["docker"]["socket"],
        "key": node["key"]["path"],
        "known_hosts": node["known_hosts"]["path"],
        **_service_options(plan, node, spec),
    }


def _service_options(plan: Plan, node: t.Mapping[str, t.Any], spec: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What the rank service does besides starting and stopping: memory guard, boot, and watch."""
    settings = plan["settings"]
    return {
        "mounts": sorted(mount["source"] for mount in spec["mounts"]),
        "artefacts": [
            {"name": artefact["name"], "path": f"{node['weights_root']}/{artefact['directory']}", "required": list(artefact.get("required", []))}
            for artefact in plan["artefacts"]
        ],
        "guard": {
            **{
                phase: {"floor": settings[f"memory_guard_{phase}_floor"]} if settings[f"memory_guard_{phase}"] else None
                for phase in ("loading", "serving")
            },
            "samples": settings["memory_guard_samples"],
            "interval": settings["memory_guard_interval"],
        },
        "memory": {"tolerance": settings["memory_tolerance"]},
        "boot": settings["serve_boot"],
        "watch": {name: settings[f"serve_watch_{name}"] for name in ("interval", "samples", "canary", "idle_watts")} if settings["serve_watch"] else None,
        "restart": {name: settings[f"serve_restart_{name}"] for name in ("limit", "window", "delay")},
        "timeouts": {name: plan["timeouts"][name] for name in ("ready", "stall")},
        "api": {
            "port": plan["api"]["port"],
            "model": plan["served_model_name"],
            "request": {"messages": plan["proof"]["messages"], **plan["proof"]["parameters"]},
            "expected": plan["proof"].get("answer", {}).get("equals", ""),
            "timeout": plan["timeouts"]["completion"],
        },
    }


def docker_mounts(spec: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    return [{"type": "bind", **mount} for mount in spec["mounts"]]


def docker_ulimits(spec: t.Mapping[str, t.Any]) -> list[str]:
    return [f"{name}:{value}:{value}" for name, value in sorted(spec["ulimits"].items())]


def docker_device_requests(spec: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """What ``--gpus all`` asks the engine for."""
    return [{"count": -1, "capabilities": [["gpu"]]}] if spec.get("gpus") == "all" else []


def sha256_of_files(paths: t.Sequence[str]) -> str:
    """One hash over the names and contents of files on the controller."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            content = stream.read()
        digest.update(f"{os.path.basename(path)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def serve_failure(hostvars: HostVars, plan: Plan, host: str) -> str:
    """Why the group is down, with the last lines of every rank and where their logs lie."""
    lines = [f"{plan['deployment']} was not brought up; all its ranks were told to stop."]
    for rank, name in enumerate(plan["nodes"]):
        stopped = hostvars[name].get("__serve_stopped") or {}
        if "tail" not in stopped:
            lines.append(f"--- rank {rank} ({name}): does not answer: it may still run and is stopped at the next contact")
            continue
        lines.append(f"--- rank {rank} ({name}): log {stopped['log'] or 'none, it never started'}")
        lines.extend(stopped["tail"])
    lines.append("Next: read the reason above, mend it, run site.yml again. [serve.failed]")
    return "\n".join(lines)


def serve_report(hostvars: HostVars, plan: Plan, host: str) -> str:
    """One line for this rank, and on rank 0 the endpoint."""
    decision = hostvars[host]["__serve_decision"]
    proved = (hostvars[plan["head"]].get("__serve_proved") or {}).get("proof")
    if host not in plan["nodes"]:
        return f"{host} is no rank of {plan['deployment']}"
    if host != plan["head"]:
        return f"rank {plan['nodes'].index(host)} of {plan['deployment']}"
    state = SERVING if proved else decision["state"]
    text = f"{plan['deployment']} is {state}: {plan['served_model_name']} on port {plan['api']['port']} of {host}"
    if plan["api"]["key"] != "none":
        text += f", key in {hostvars[host]['spark_node']['state_dir']}/key/api_key"
    if proved:
        text += f"; proof in {proved['seconds']:.1f} s: {proved['text'][:60]!r}"
    return "\n".join([text, *([] if proved else decision["reasons"])])


def status_document(hostvars: HostVars, plan: Plan) -> dict[str, t.Any]:
    """The state of the group as data: the form of ``status_format: json``, of the artefact, and of the file."""
    state, infos = serve_state(hostvars, plan), _rank_infos(hostvars, plan)
    head = infos[plan["head"]] or {}
    return {
        "format": 1,
        "deployment": plan["deployment"],
        "profile": plan["profile"],
        "state": state["state"],
        "reasons": state["reasons"],
        "endpoint": {"node": plan["head"], "port": plan["api"]["port"], "model": plan["served_model_name"], "key": plan["api"]["key"]},
        "api": head.get("api"),
        "last_good": {name: (head.get("last_good") or {}).get(name) for name in ("proven_at", "profile", "image")},
        "ranks": [
            {
                **entry,
                "container": (infos[entry["node"]] or {}).get("container"),
                "memory": (infos[entry["node"]] or {}).get("memory"),
                "heartbeat_age": (infos[entry["node"]] or {}).get("heartbeat_age"),
                "keeper": ((infos[entry["node"]] or {}).get("service") or {}).get("keeper", ""),
                "last_line": ((infos[entry["node"]] or {}).get("progress") or {}).get("last_line"),
            }
            for entry in state["ranks"]
        ],
        **(_settings_section(hostvars, plan) if plan["settings"]["status_settings"] else {}),
    }


def _settings_section(hostvars: HostVars, plan: Plan) -> dict[str, t.Any]:
    """Effective settings, and what role settings found that a start would change on each rank."""
    unread = {"changes": [], "reason": "cannot be compared: the node was not read"}
    found = {name: plain(hostvars[name].get("settings_found") or unread) for name in plan["nodes"]}
    return {"settings": settings_table(plain(plan)), "would_change": found}


def status_text(hostvars: HostVars, plan: Plan, settings: bool = False) -> str:
    """The same for a person; the settings only where they are asked for, and not again in each message."""
    document = status_document(hostvars, plan)
    lines = [f"{document['deployment']}: {document['state']}"]
    lines.extend(f"  {reason}" for reason in document["reasons"])
    for entry in document["ranks"]:
        available = (entry["memory"] or {}).get("available_kib")
        memory = f", {available / 1048576:.1f} GiB available" if available else ""
        lines.append(f"  rank {entry['rank']} ({entry['node']}): {entry['says']}{memory}")
    keeper = document["ranks"][0]["keeper"]
    if document["state"] != SERVING and keeper:
        lines.append(f"  rank service of rank 0: {keeper}")
    if document["state"] == SERVING:
        endpoint = document["endpoint"]
        lines.append(f"  {endpoint['model']} on port {endpoint['port']} of {endpoint['node']}")
    if not settings or "settings" not in document:
        return "\n".join(lines)
    for rank, (name, found) in enumerate(document["would_change"].items()):
        lines.append(f"a start would change on rank {rank} ({name}): {found['reason'] or ('' if found['changes'] else 'nothing')}".rstrip())
        lines.extend(f"  {change}" for change in found["changes"])
    return "\n".join([*lines, "effective settings", *settings_lines(plain(plan))[1:]])


def troubled_nodes(hostvars: HostVars, plan: Plan) -> list[str]:
    """Nodes in this run about which preflight found something that stops the group."""
    return [name for name in plan["nodes"] if (hostvars[name].get("__preflight_found") or {}).get("refusals")]


def unstopped_ranks(hostvars: HostVars, plan: Plan) -> list[str]:
    """Nodes whose rank was not seen to stop."""
    return [name for name in plan["nodes"] if "tail" not in (hostvars[name].get("stop_result") or {})]


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "serve_state": serve_state,
            "serve_decision": serve_decision,
            "rank_record": rank_record,
            "docker_mounts": docker_mounts,
            "docker_ulimits": docker_ulimits,
            "docker_device_requests": docker_device_requests,
            "sha256_of_files": sha256_of_files,
            "serve_failure": serve_failure,
            "serve_report": serve_report,
            "status_document": status_document,
            "status_text": status_text,
            "troubled_nodes": troubled_nodes,
            "unstopped_ranks": unstopped_ranks,
        }
