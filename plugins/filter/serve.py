# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of the serving roles: what the ranks said in, decisions and texts out."""

from __future__ import annotations

import hashlib
import os
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import own_address
from ansible_collections.sparkops.inference.plugins.module_utils._group_state import SERVING, group_state
from ansible_collections.sparkops.inference.plugins.module_utils._history import record_id
from ansible_collections.sparkops.inference.plugins.module_utils._likely_cause import causes_of
from ansible_collections.sparkops.inference.plugins.module_utils._plan_text import settings_lines, settings_table
from ansible_collections.sparkops.inference.plugins.module_utils._rank_spec import labelled
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

HostVars = t.Mapping[str, t.Any]
Plan = t.Mapping[str, t.Any]
SILENT_SECONDS = 10  # of a heartbeat that comes each second


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
    # Every host of a run has the plan, also one that does not answer.
    left_out = [name for name in plan["nodes"] if "spark_plan" not in hostvars[name]]
    return group_state(plan["nodes"], infos, _wanted_specs(hostvars, plan), (infos[plan["head"]] or {}).get("api"), left_out)


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
            "address": own_address(plan["api"].get("bind", "")),
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
            # A node that answers and cannot stop its rank says why; of the others nothing is known.
            why = "does not answer" if stopped.get("unreachable") else stopped.get("msg") or "does not answer"
            lines.append(f"--- rank {rank} ({name}): {why}: it may still run and is stopped at the next contact")
            continue
        lines.append(f"--- rank {rank} ({name}): log {stopped['log'] or 'none, it never started'}")
        lines.extend(stopped["tail"])
    lines.extend(f"Likely cause: {cause}" for cause in _failure_causes(hostvars, plan))
    bundles = [(hostvars[name].get("__collect_bundle") or {}).get("path") for name in plan["nodes"]]
    lines.extend(f"Evidence of all ranks: {path} on the controller" for path in bundles if path)
    back = _last_good(hostvars, plan)
    if back and back["id"] != _wanted_id(hostvars, plan):
        lines.append(f"To go back: rollback.yml returns to {record_words(back)}.")
    lines.append("Next: read the reason above, mend it, run site.yml again. [serve.failed]")
    return "\n".join(lines)


def _failure_causes(hostvars: HostVars, plan: Plan) -> list[str]:
    """From what was collected, which has more of the log, and else from the last lines."""
    found: dict[str, None] = {}
    for name in plan["nodes"]:
        collected = (hostvars[name].get("__collect_rank") or {}).get("causes")
        tail = (hostvars[name].get("__serve_stopped") or {}).get("tail") or []
        for cause in collected or [f"{name}: {cause}" for cause in causes_of(tail)]:
            found[cause] = None
    return list(found)


def record_words(record: t.Mapping[str, t.Any]) -> str:
    """One record of the history for a person."""
    image = record.get("image") or {}
    revisions = ", ".join(f"{entry['repository']} at {entry['revision'][:12]}" for entry in record.get("artefacts") or [])
    name = image.get("reference") or image.get("identity", "")[:19]
    return f"{record['id']}: profile {record['profile']}, image {name}, {revisions}, proven {record['proven_at']}"


def _last_good(hostvars: HostVars, plan: Plan) -> dict[str, t.Any]:
    """What all ranks proved together last; empty when they do not agree."""
    found = [((infos or {}).get("last_good") or {}) for infos in _rank_infos(hostvars, plan).values()]
    ids = {record.get("id") for record in found}
    return dict(found[0]) if len(ids) == 1 and None not in ids else {}


def _wanted_id(hostvars: HostVars, plan: Plan) -> str:
    spec = (hostvars[plan["head"]].get("__serve_spec") or {}).get("spec") or {}
    return record_id((spec.get("labels") or {}).get("sparkops.group", ""))


def serve_way_back(hostvars: HostVars, plan: Plan, restoring: str = "") -> dict[str, t.Any]:
    """Where a run that did not bring the group up goes by itself; empty when it ends there.

    That is what was proven last, when the option asks for it and it is not what just failed. Nothing is tried on top of a rank that may
    still run, and no way back is tried twice: ``restoring`` names the one that this run is on already.
    """
    stopped = all("tail" in (hostvars[name].get("__serve_stopped") or {}) for name in plan["nodes"])
    back = _last_good(hostvars, plan)
    if restoring or not stopped or plan["settings"]["serve_rollback"] != "auto" or not back or back["id"] == _wanted_id(hostvars, plan):
        return {}
    return {"deployment": plan["deployment"], "id": back["id"], "says": record_words(back)}


# How a run goes about its work, not what it brings up: of these the run's own hold, also on the way back.
OF_THE_RUN = re.compile(
    r"(?:bench|bootstrap|collect|logs|memory|prune|rollback|status|uninstall)_"
    r"|serve_(?:collect_on_failure|drain_timeout|history_keep|rollback|stop_grace)$"
)


def returned_plan(record: t.Mapping[str, t.Any], current: Plan) -> dict[str, t.Any]:
    """The recorded plan for this run. Options that did not exist when it was recorded have this run's values."""
    settings = {**current["settings"], **{name: value for name, value in record["plan"]["settings"].items() if not OF_THE_RUN.match(name)}}
    node_settings = {name: {**current["node_settings"].get(name, {}), **values} for name, values in record["plan"]["node_settings"].items()}
    return {**current, **record["plan"], "settings": settings, "node_settings": node_settings}


def returned_spec(hostvars: HostVars, plan: Plan, host: str) -> dict[str, t.Any]:
    """The recorded container of ``host``. The API key may have changed since: then the labels say so, as in any start."""
    specs = []
    for name in plan["nodes"]:
        spec = dict(hostvars[name]["__serve_recorded"]["record"]["spec"])
        if spec.get("api_key_hmac") is not None:
            spec["api_key_hmac"] = hostvars[plan["head"]]["__serve_key"]["hmac"]
        specs.append(spec)
    return labelled(plan["deployment"], specs)[plan["nodes"].index(host)]


def rollback_choice(hostvars: HostVars, plan: Plan, wanted: str | None = None) -> dict[str, t.Any]:
    """The record to return to and its words, or the refusal."""
    histories = {name: hostvars[name].get("__rollback_history") or {} for name in plan["nodes"]}
    listed = {name: {record["id"]: record for record in histories[name].get("records", ())} for name in plan["nodes"]}
    head = histories[plan["head"]]
    runs = {history.get("running", "") for history in histories.values()}
    running = runs.pop() if len(runs) == 1 else ""
    order = [record["id"] for record in head.get("records", ())]
    # What was proven last, unless that is what runs: then the one before it.
    choice = wanted or next((name for name in [head.get("last_good", ""), *order] if name and name != running), "")

    def refused(node: str, thing: str, found: str, needed: str, next_step: str, name: str = "rollback.none") -> dict[str, t.Any]:
        return {"id": "", "says": "", "refusal": format_refusals([Refusal(name, node, thing, found, needed, next_step)])}

    if not choice or choice not in listed[plan["head"]]:
        found = ", ".join(order) or "none"
        found += f", of which {running} runs" if running else ""
        return refused(plan["head"], "proven deployments", found, f"{choice or 'another one'} to return to",
                       "bring the group up by site.yml; history.yml lists what there is")
    record = listed[plan["head"]][choice]
    if set(record["nodes"]) != set(plan["nodes"]):
        return refused("", f"nodes of record {choice}", ", ".join(record["nodes"]), ", ".join(plan["nodes"]),
                       "set serve_nodes as it was, or choose another record", "rollback.nodes")
    lacking = [name for name in plan["nodes"] if not (listed[name].get(choice) or {}).get("image_present")]
    if lacking:
        found = "; ".join(f"{name}: {'no image' if choice in listed[name] else 'no record'}" for name in lacking)
        return refused("", f"record {choice}", found, "record and image on every rank", "choose another record of history.yml with rollback_to",
                       "rollback.image")
    return {"id": choice, "deployment": plan["deployment"], "says": record_words(record), "refusal": ""}


def rollback_prediction(hostvars: HostVars, plan: Plan, host: str) -> str:
    """What a rollback to the record that was read would do to the rank of ``host``."""
    running, record = (hostvars[host].get("__rollback_history") or {}).get("running", ""), hostvars[host]["__serve_recorded"]["record"]
    now = f"runs {running}" if running else "does not run"
    revisions = ", ".join(f"{artefact['repository']} at {artefact['revision']}" for artefact in record["artefacts"])
    return (
        f"rank {plan['nodes'].index(host)} of {plan['deployment']} {now}; it would be replaced, with the whole group, by that of record {record['id']}: "
        f"profile {record['profile']}, image {record['image'].get('identity', '')}, which is there, {revisions or 'no weights'}"
    )


def switch_source(hostvars: HostVars, plan: Plan) -> dict[str, t.Any]:
    """The deployment that a switch leaves: what runs on these nodes and is not the wanted one. Empty when nothing does, else or a refusal.

    It must be one group, on nodes that are all in this run, and proven, so that there is a way back.
    """
    seen = {name: (hostvars[name].get("__switch_found") or {}).get("deployments") or [] for name in plan["nodes"]}
    running = {name: [one for one in found if one["running"] and one["name"] != plan["deployment"]] for name, found in seen.items()}
    names = sorted({one["name"] for found in running.values() for one in found})
    if not names:
        return {"name": "", "refusal": ""}

    def refused(name: str, found: str, wanted: str, next_step: str) -> dict[str, t.Any]:
        return {"name": "", "refusal": format_refusals([Refusal(name, "", "deployment to switch from", found, wanted, next_step)])}

    if len(names) > 1:
        return refused("switch.several", ", ".join(names), "one", "stop all but one by stop.yml with their serve_deployment")
    records = {(one["last_good"] or {}).get("id") for found in seen.values() for one in found if one["name"] == names[0]}
    record = next((one["last_good"] for found in running.values() for one in found if one["last_good"]), None)
    if record is None or len(records) != 1:
        return refused("switch.unproven", f"{names[0]}, of which not every rank has the same proof", "one that was proven, so that there is a way back",
                       "prove it by its own site.yml, or stop it by stop.yml and run site.yml")
    strangers = sorted(set(record["nodes"]) - set(plan["nodes"]))
    if strangers:
        return refused("switch.nodes", f"{names[0]} also on {', '.join(strangers)}", f"only on {', '.join(plan['nodes'])}", "stop it by its own stop.yml first")
    return {"name": names[0], "refusal": "", "id": record["id"], "deployment": names[0], "says": record_words(record)}


def switch_rank(found: t.Mapping[str, t.Any], name: str) -> dict[str, t.Any]:
    """What one node has of the deployment that a switch leaves."""
    return next((one for one in found.get("deployments") or [] if one["name"] == name), {})


def size_words(size: float) -> str:
    """Bytes for a person."""
    for unit, divisor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= divisor:
            return f"{size / divisor:.1f} {unit}"
    return f"{size:.0f} B"


def removal_lines(answer: t.Mapping[str, t.Any], would: bool) -> list[str]:
    """What prune or uninstall did, or would do, on a node, with sizes."""
    lines = [f"{'would remove' if would else 'removed'} {one['kind']} {one['what']} ({size_words(one['size'])})" for one in answer.get("removed") or []]
    lines += [f"keeps {one['kind']} {one['what']} ({size_words(one['size'])}): {one['kept']}" for one in answer.get("kept") or []]
    total = sum(one["size"] for one in answer.get("removed") or [])
    return [*lines, f"{'would free' if would else 'freed'} {size_words(total)}"]


def checked_lines(hostvars: HostVars, plan: Plan) -> list[str]:
    """What was looked at on every rank before anything of it is stopped."""
    lines = []
    for rank, name in enumerate(plan["nodes"]):
        host = hostvars[name]
        image, fabric = host.get("spark_image") or {}, host.get("spark_fabric") or {}
        artefacts = (host.get("__serve_manifests") or {}).get("artefacts") or []
        files = [file for artefact in artefacts for file in (artefact.get("manifest") or {}).get("files") or []]
        memory = (host.get("__memory_report") or {}).get("memory") or {}
        parts = [
            f"image {(image.get('identity') or 'unknown')[:19]}",
            f"{len(files)} files of {size_words(sum(file.get('size', 0) for file in files))} as in their manifests",
            f"fabric {fabric.get('interface') or 'none'} {fabric.get('address') or ''}".rstrip() if plan["ranks"] > 1 else "no fabric needed",
            f"memory {size_words(memory['level'])} available ({memory['basis']})" if memory.get("level") else "memory not known",
        ]
        lines.append(f"rank {rank} ({name}): {', '.join(parts)}")
    return lines


def history_lines(hostvars: HostVars, plan: Plan) -> list[str]:
    """The records of the head, the newest first, with what each rank lacks of them."""
    histories = {name: hostvars[name].get("__rollback_history") or {} for name in plan["nodes"]}
    lines = []
    for record in histories[plan["head"]].get("records", ()):
        marks = [word for word in ("running", "last_good") if histories[plan["head"]].get(word) == record["id"]]
        for name in plan["nodes"]:
            if "records" not in histories[name]:
                marks.append(f"{name} was not read")
                continue
            own = next((one for one in histories[name]["records"] if one["id"] == record["id"]), None)
            if own is None or not own["image_present"]:
                marks.append(f"{name} has no {'record' if own is None else 'image'}")
        lines.append(record_words(record) + (f" ({', '.join(marks).replace('last_good', 'last good')})" if marks else ""))
    if "records" not in histories[plan["head"]]:
        return [f"{plan['head']} was not read: the list is that of rank 0"]
    return lines or [f"nothing of {plan['deployment']} was proven yet"]


def service_silent(info: t.Mapping[str, t.Any]) -> bool:
    """Whether nobody writes a rank's heartbeat any more."""
    age = info.get("heartbeat_age")
    return age is None or age > SILENT_SECONDS


def _way_notices(hostvars: HostVars, plan: Plan, host: str) -> list[str]:
    """What is wrong with the way that NCCL took on this rank, after the start of this run, else as it was found."""
    waited = (hostvars[plan["head"]].get("__serve_waited") or {}).get("ranks")
    seen = waited.get(str(plan["nodes"].index(host))) if waited else (_rank_infos(hostvars, plan)[host] or {}).get("progress")
    return [f"NOTICE {host}: {finding} (docs/fabric.md)" for finding in (seen or {}).get("nccl", ())]


def serve_report(hostvars: HostVars, plan: Plan, host: str) -> str:
    """One line for this rank, on rank 0 the endpoint, and what is wrong with the way between the ranks."""
    decision = hostvars[host]["__serve_decision"]
    proved = (hostvars[plan["head"]].get("__serve_proved") or {}).get("proof")
    if host not in plan["nodes"]:
        return f"{host} is no rank of {plan['deployment']}"
    if host != plan["head"]:
        return "\n".join([f"rank {plan['nodes'].index(host)} of {plan['deployment']}", *_way_notices(hostvars, plan, host)])
    state = SERVING if proved else decision["state"]
    text = f"{plan['deployment']} is {state}: {plan['served_model_name']} on port {plan['api']['port']} of {host}"
    if plan["api"]["key"] != "none":
        text += f", key in {hostvars[host]['spark_node']['state_dir']}/key/api_key"
    if proved:
        text += f"; proof in {proved['seconds']:.1f} s: {proved['text'][:60]!r}"
    return "\n".join([text, *([] if proved else decision["reasons"]), *_way_notices(hostvars, plan, host)])


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
                "nccl": ((infos[entry["node"]] or {}).get("progress") or {}).get("nccl", []),
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
        lines.extend(f"    NOTICE {finding} (docs/fabric.md)" for finding in entry["nccl"])
        if entry["container"] and service_silent(entry):
            lines.append("    NOTICE its rank service is silent: no memory guard, no watch, no start after a reboot; site.yml mends it")
    keeper = document["ranks"][0]["keeper"]
    if document["state"] != SERVING and keeper:
        lines.append(f"  rank service of rank 0: {keeper}")
    if document["state"] == SERVING:
        endpoint = document["endpoint"]
        lines.append(f"  {endpoint['model']} on port {endpoint['port']} of {endpoint['node']}")
        unguarded = (document["api"] or {}).get("open_paths") or []
        if unguarded:
            lines.append(f"  open without the key, to everybody who reaches this port: {', '.join(unguarded)}")
        elif endpoint["key"] == "none":
            lines.append("  the API has no key: everybody who reaches this port may use it")
    if not settings or "settings" not in document:
        return "\n".join(lines)
    for rank, (name, found) in enumerate(document["would_change"].items()):
        lines.append(f"a start would change on rank {rank} ({name}): {found['reason'] or ('' if found['changes'] else 'nothing')}".rstrip())
        lines.extend(f"  {change}" for change in found["changes"])
    return "\n".join([*lines, "effective settings", *settings_lines(plain(plan))[1:]])


def troubled_nodes(hostvars: HostVars, plan: Plan) -> list[str]:
    """Nodes in this run about which preflight found something that stops the group."""
    return [name for name in plan["nodes"] if (hostvars[name].get("__preflight_found") or {}).get("refusals")]


def unstopped_ranks(hostvars: HostVars, plan: Plan, result: str = "stop_result") -> list[str]:
    """Nodes whose rank was not seen to stop, by what the task registered as ``result`` there.

    Ansible's own list of hosts does not tell: with any_errors_fatal it also leaves out hosts that go on in a rescue.
    """
    return [name for name in plan["nodes"] if "tail" not in (hostvars[name].get(result) or {})]


def bundle_writer(hostvars: HostVars, plan: Plan) -> str:
    """The host whose task joins the bundle: the first that collected something in this run, for a lost one would not come to it."""
    return next((name for name in plan["nodes"] if "path" in (hostvars[name].get("__collect_rank") or {})), plan["head"])


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
            "record_words": record_words,
            "serve_way_back": serve_way_back,
            "returned_plan": returned_plan,
            "returned_spec": returned_spec,
            "rollback_choice": rollback_choice,
            "rollback_prediction": rollback_prediction,
            "history_lines": history_lines,
            "switch_source": switch_source,
            "switch_rank": switch_rank,
            "removal_lines": removal_lines,
            "checked_lines": checked_lines,
            "serve_report": serve_report,
            "service_silent": service_silent,
            "status_document": status_document,
            "status_text": status_text,
            "troubled_nodes": troubled_nodes,
            "unstopped_ranks": unstopped_ranks,
            "bundle_writer": bundle_writer,
        }
