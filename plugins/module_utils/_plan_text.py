# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Plans and rank specs as texts for people."""

from __future__ import annotations

import shlex
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._profile_language import as_text, shown

Data = t.Mapping[str, t.Any]

_ORIGINS = ("extra vars", "play vars", "inventory", "profile", "default")


def docker_run(spec: Data) -> list[str]:
    """The docker command that would make a rank's container; for reading, the collection itself calls the engine's API."""
    command = ["docker", "run", "--detach", "--name", spec["name"], "--restart", spec["restart_policy"]]
    pairs = [
        ("--gpus", spec["gpus"]),
        ("--network", spec["network_mode"]),
        ("--ipc", spec["ipc_mode"]),
        ("--shm-size", spec["shm_size"]),
        ("--stop-timeout", spec["stop_timeout"]),
        ("--oom-score-adj", spec["oom_score_adj"]),
        ("--log-driver", spec["log"]["driver"]),
    ]
    for flag, value in pairs:
        command += [flag, str(value)] if value is not None else []
    command += _repeated("--log-opt", (f"{name}={value}" for name, value in sorted(spec["log"].get("options", {}).items())))
    command += _repeated("--device", spec["devices"])
    command += _repeated("--cap-add", spec["capabilities"])
    command += _repeated("--ulimit", (f"{name}={value}" for name, value in sorted(spec["ulimits"].items())))
    command += _repeated("--label", (f"{name}={value}" for name, value in sorted(spec["labels"].items())))
    command += _repeated("--volume", (_volume(mount) for mount in spec["mounts"]))
    command += _repeated("--env", (f"{name}={value}" for name, value in sorted(spec["env"].items())))
    command += ["--entrypoint", spec["entrypoint"][0], spec["image"], *spec["entrypoint"][1:], *spec["command"]]
    return command


def _repeated(flag: str, values: t.Iterable[str]) -> list[str]:
    return [item for value in values for item in (flag, str(value))]


def _volume(mount: Data) -> str:
    return f"{mount['source']}:{mount['target']}" + (":ro" if mount["read_only"] else "")


def command_text(command: t.Sequence[str]) -> str:
    """A command for a shell, one option in a line."""
    lines: list[list[str]] = [[]]
    for item in command:
        if item.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(item))
    return " \\\n  ".join(" ".join(line) for line in lines) + "\n"


def settings_table(plan: Data) -> dict[str, dict[str, t.Any]]:
    """Each effective setting as data: C(origin), and C(value) or, where nodes differ, C(values) of each node. Secrets are not in it."""
    table = {}
    for name, origin in plan["origins"].items():
        values = {host: own[name] for host, own in plan["node_settings"].items() if name in own}
        if name in plan["secrets"]:
            table[name] = {"origin": origin, "value": "given, not shown" if plan["secrets"][name] else "not given"}
        elif len({as_text(value) for value in values.values()}) > 1:
            table[name] = {"origin": origin, "values": values}
        else:
            table[name] = {"origin": origin, "value": plan["settings"][name]}
    return table


def settings_lines(plan: Data) -> list[str]:
    """The same for a person, those first that somebody has set."""
    table = settings_table(plan)
    width = max(len(name) for name in table)
    lines = [f"{plan['deployment']}: profile {plan['profile']} on {', '.join(plan['nodes'])}"]
    for origin in _ORIGINS:
        names = sorted(name for name, entry in table.items() if entry["origin"] == origin)
        lines += [f"  {name.ljust(width)}  {origin.ljust(10)}  {_value_text(table[name])}" for name in names]
    return lines


def _value_text(entry: Data) -> str:
    if "values" in entry:
        return ", ".join(f"{host}: {shown(value)}" for host, value in entry["values"].items())
    return shown(entry["value"])


def spec_changes(spec: Data, container: Data, template: Data, image_id: str | None = None) -> list[str]:
    """What a start would change in a running container, of what the engine's inspection tells.

    ``image_id`` is the engine's own id of the image that a start would take, empty where it has none yet, None where it was not asked.
    """
    config = container.get("Config") or {}
    changes = []
    if image_id is not None and container.get("Image") != image_id:
        changes.append(f"image: {container.get('Image')} -> {image_id or 'not on this node yet'} ({spec['image']})")
    changes += _changes(_groups(config.get("Cmd") or []), _groups(spec["command"]), "argument ")
    old = dict(pair.split("=", 1) for pair in config.get("Env") or [] if "=" in pair)
    # A variable that the image brings is not ours to miss.
    ours = {name: value for name, value in old.items() if name in spec["env"] or name in template.get("environment", {})}
    changes += _changes(ours, spec["env"], "variable ")
    old_mounts = {mount["Destination"]: mount["Source"] for mount in container.get("Mounts") or []}
    changes += _changes(old_mounts, {mount["target"]: mount["source"] for mount in spec["mounts"]}, "mount ")
    return changes + _changes(_limits_of(container), _limits(spec), "")


def _limits(spec: Data) -> dict[str, str]:
    """Rights and limits of a spec as texts; shm_size is left out, which the host's own memory namespace makes void."""
    values = {
        "capabilities": " ".join(sorted(spec["capabilities"])),
        "devices": " ".join(sorted(spec["devices"])),
        "ulimits": " ".join(f"{name}={value}" for name, value in sorted(spec["ulimits"].items())),
        "gpus": spec["gpus"],
        "network": spec["network_mode"],
        "ipc": spec["ipc_mode"],
        "oom score": spec["oom_score_adj"],
        "stop timeout": spec["stop_timeout"],
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def _limits_of(container: Data) -> dict[str, str]:
    """The same of a container's inspection."""
    host = container.get("HostConfig") or {}
    values = {
        "capabilities": " ".join(sorted(name.removeprefix("CAP_") for name in host.get("CapAdd") or [])),
        "devices": " ".join(sorted(device["PathOnHost"] for device in host.get("Devices") or [])),
        "ulimits": " ".join(f"{limit['Name']}={limit['Hard']}" for limit in sorted(host.get("Ulimits") or [], key=lambda limit: limit["Name"])),
        "gpus": "all" if host.get("DeviceRequests") else None,
        "network": host.get("NetworkMode"),
        # An engine's own default is no choice of anybody's.
        "ipc": None if host.get("IpcMode") in ("private", "shareable") else host.get("IpcMode"),
        "oom score": host.get("OomScoreAdj") or None,
        "stop timeout": (container.get("Config") or {}).get("StopTimeout"),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def _groups(command: t.Sequence[str]) -> dict[str, str]:
    """Options with what stands after them."""
    groups: dict[str, list[str]] = {"command": []}
    name = "command"
    for item in command:
        if item.startswith("--"):
            name = item
            groups[name] = []
        else:
            groups[name].append(item)
    return {name: shlex.join(items) for name, items in groups.items()}


def _changes(old: Data, new: Data, kind: str) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before != after:
            lines.append(f"{kind}{name}: {_side(before)} -> {_side(after)}")
    return lines


def _side(value: str | None) -> str:
    return "absent" if value is None else value or "set"
