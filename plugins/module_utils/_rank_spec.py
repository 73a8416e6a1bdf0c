# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""From a plan and what the nodes say about themselves to the exact container of each rank. Pure: no I/O, no Ansible."""

from __future__ import annotations

import collections
import hashlib
import json
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _engine_vllm as engine
from ansible_collections.sparkops.inference.plugins.module_utils import _profile_language as language

STATE_MOUNT = "/sparkops"
KEY_MOUNT = "/sparkops-key"

Node = t.Mapping[str, t.Any]


def rank_specs(
    plan: Node, nodes: t.Mapping[str, Node], image_id: str | None, entry_sha256: str | None, key_hmac: str | None
) -> list[dict[str, t.Any]]:
    """The specs of all ranks, labelled. ``nodes`` holds each node's own facts by inventory name."""
    return labelled(
        plan["deployment"], [_bare_spec(plan, rank, nodes[name], image_id, entry_sha256, key_hmac) for rank, name in enumerate(plan["nodes"])]
    )


def labelled(deployment: str, specs: t.Sequence[Node]) -> list[dict[str, t.Any]]:
    """The specs with labels that follow from their content; what labels they had does not count."""
    bare = [{name: value for name, value in spec.items() if name != "labels"} for spec in specs]
    hashes = [digest(spec) for spec in bare]
    group = digest(hashes)
    return [
        {**spec, "labels": {"sparkops.deployment": deployment, "sparkops.rank": str(rank), "sparkops.spec": hashes[rank], "sparkops.group": group}}
        for rank, spec in enumerate(bare)
    ]


def rank_spec(
    plan: Node, rank: int, nodes: t.Mapping[str, Node], image_id: str | None = None, entry_sha256: str | None = None, key_hmac: str | None = None
) -> dict[str, t.Any]:
    """The spec of one rank. All nodes are needed: the group label tells whether the ranks belong to the same start."""
    return rank_specs(plan, nodes, image_id, entry_sha256, key_hmac)[rank]


def digest(value: t.Any) -> str:
    """A hash that depends on the content alone, not on the order in which mappings were written."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _bare_spec(plan: Node, rank: int, node: Node, image_id: str | None, entry_sha256: str | None, key_hmac: str | None) -> dict[str, t.Any]:
    place = _place(plan, rank, node)
    names = names_for(plan, place, node)
    template = plan["template"]
    container = template["container"]
    has_key = rank == 0 and plan["api"]["key"] != "none"
    return {
        "name": f"{plan['deployment']}-rank{rank}",
        "image": image_id or plan["image"]["reference"],
        "entrypoint": [container.get("interpreter", "python3"), f"{STATE_MOUNT}/entry.py"],
        "command": command(plan, place, names),
        "env": environment(plan, place, names),
        "mounts": _mounts(plan, names, has_key),
        "devices": list(container.get("devices", [])),
        "capabilities": list(container.get("capabilities", [])),
        "ulimits": dict(container.get("ulimits", {})),
        "shm_size": container.get("shm_size"),
        "ipc_mode": container.get("ipc_mode"),
        "network_mode": container.get("network_mode", "host"),
        "oom_score_adj": container.get("oom_score_adj"),
        "stop_timeout": container.get("stop_timeout", 60),
        "gpus": container.get("gpus"),
        "log": dict(container.get("log", {"driver": "json-file", "options": {"max-size": "100m", "max-file": "5"}})),
        "restart_policy": "no",
        "entry": _entry(plan, place, node, names, has_key),
        "entry_sha256": entry_sha256,
        "api_key_hmac": key_hmac if has_key else None,
        "files": {file["target"]: file["sha256"] for file in plan["files"]},
    }


def _place(plan: Node, rank: int, node: Node) -> engine.Place:
    fabric = node.get("fabric") or {}
    name = plan["nodes"][rank]
    return engine.Place(
        rank=rank,
        ranks=plan["ranks"],
        head_address=plan["addresses"][plan["head"]],
        # One fact decides address, interface and devices together; the inventory's address only stands in before it is known.
        address=fabric.get("address") or plan["addresses"][name],
        interface=fabric.get("interface"),
        hcas=tuple(fabric.get("hcas") or ()),
    )


def names_for(plan: Node, place: engine.Place, node: Node) -> collections.ChainMap[str, t.Any]:
    """All names that a profile's container may read."""
    state_dir = node["state_dir"]
    settings = {**plan["settings"], **plan["node_settings"].get(plan["nodes"][place.rank], {})}
    own = {
        "ranks": place.ranks,
        "node.state_dir": state_dir,
        "node.cache_root": settings["serve_cache_root"] or f"{state_dir}/cache",
        "node.weights_root": node["weights_root"],
        "node.home": (node.get("user") or {}).get("home"),
        # Only a node whose packed rows were checked says where they are.
        "node.engram_packed_dir": node.get("engram_packed_dir"),
    }
    own.update({f"artefact.{artefact['name']}": artefact["mount"] for artefact in plan["artefacts"]})
    return collections.ChainMap(own, settings)


def command(plan: Node, place: engine.Place, names: t.Mapping[str, t.Any]) -> list[str]:
    """The engine's argument list. No shell ever sees it."""
    result = engine.head_of_command(plan["artefacts"][0]["mount"], plan["settings"], place)
    for group in plan["template"]["arguments"].values():
        result += language.items_of(group, names)
    result += [language.as_text(item) for item in plan["settings"]["serve_extra_arguments"]]
    return result


def environment(plan: Node, place: engine.Place, names: t.Mapping[str, t.Any]) -> dict[str, str]:
    """The variables of a rank. The user's stand over the profile's; null takes one away."""
    pairs = {name: language.variable(value, names) for name, value in plan["template"]["environment"].items()}
    pairs.update({name: None if value is None else language.as_text(value) for name, value in plan["settings"]["serve_environment"].items()})
    pairs.update(engine.rank_environment(place))
    return {name: value for name, value in sorted(pairs.items()) if value is not None}


def _mounts(plan: Node, names: t.Mapping[str, t.Any], has_key: bool) -> list[dict[str, t.Any]]:
    state_dir = names["node.state_dir"]
    mounts = [_mount(f"{state_dir}/container", STATE_MOUNT)]
    if has_key:
        mounts.append(_mount(f"{state_dir}/key", KEY_MOUNT))
    mounts += [_mount(f"{state_dir}/files/{file['name']}", file["target"]) for file in plan["files"]]
    mounts += [_mount(f"{names['node.weights_root']}/{artefact['directory']}", artefact["mount"]) for artefact in plan["artefacts"]]
    for mount in plan["template"]["mounts"].values():
        if not language.holds(mount.get("when"), names):
            continue
        source = language.resolve(mount["source"], names)
        if source is not None:
            mounts.append(_mount(_at_home(source, names["node.home"]), mount["target"], mount.get("read_only", True)))
    return mounts


def _at_home(path: str, home: str | None) -> str:
    """A path of the user's with the home that it has on this node; no other node's home is ever meant."""
    return f"{home}{path[1:]}" if home and path.startswith("~/") else path


def _mount(source: str, target: str, read_only: bool = True) -> dict[str, t.Any]:
    return {"source": source, "target": target, "read_only": read_only}


def _entry(plan: Node, place: engine.Place, node: Node, names: t.Mapping[str, t.Any], has_key: bool) -> dict[str, t.Any]:
    """What the entry script reads: everything that is decided at each start and not once and for all."""
    hooks = plan["template"]["hooks"]
    wanted = hooks and language.holds(hooks.get("when"), names)
    policy = plan["settings"]["fabric_gid_policy"]
    own_addresses = ((node.get("fabric") or {}).get("gid") or {}).get("addresses") or {}
    return {
        "format": 1,
        "rank": place.rank,
        "gid": {
            "policy": policy if place.ranks > 1 and place.hcas else "unpinned",
            "index": names["fabric_gid_index"] if policy == "index" else None,
            "address": place.address,
            # Each half of a port has an address of its own; the rank's is only that of the first.
            **({"addresses": own_addresses} if own_addresses else {}),
            "hcas": list(place.hcas),
        },
        "key": {"file": f"{KEY_MOUNT}/api_key", "variable": engine.API_KEY_VARIABLE} if has_key else None,
        "package_paths": dict(hooks.get("package_paths", {})) if wanted else {},
        "hooks": [dict(hook) for hook in hooks["scripts"]] if wanted else [],
    }
