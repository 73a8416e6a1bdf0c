# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Reads what the planner needs out of Ansible's variables. Runs on the controller only."""

from __future__ import annotations

import collections.abc
import hashlib
import os
import typing as t

from ansible.errors import AnsibleError
from ansible.utils.vars import load_extra_vars

from ansible_collections.sparkops.inference.plugins.module_utils import _plan
from ansible_collections.sparkops.inference.plugins.module_utils._option_table import TABLE
from ansible_collections.sparkops.inference.plugins.module_utils._vector_file import vector_length
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles, schema


def plain(value: t.Any) -> t.Any:
    """A value without Ansible's own string and container types; vaulted texts are opened."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, collections.abc.Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def request(task_vars: t.Mapping[str, t.Any], loader: t.Any, template: t.Callable[[t.Any], t.Any]) -> _plan.Request:
    """Everything that the planner looks at, for the host of ``task_vars``. ``template`` works a task's variable out."""
    host = task_vars["inventory_hostname"]
    hostvars = task_vars["hostvars"]
    broken: dict[str, dict[str, str]] = {}
    asking = _ours(hostvars[host], host, broken)
    play_vars = _play_vars(task_vars, asking, host, broken, template)
    nodes = _plan.group_nodes(play_vars.get("serve_nodes", asking.get("serve_nodes")))
    members = [name for name in dict.fromkeys(nodes) if name in hostvars and name != host]
    hosts = {host: asking, **{name: _ours(hostvars[name], name, broken) for name in members}}
    directories = inventory_directories(task_vars, loader.get_basedir())
    profiles = ProfileFiles(_profile_paths(play_vars.get("serve_profile_paths", asking.get("serve_profile_paths"))), directories)
    return _plan.Request(
        hosts=hosts,
        host=host,
        inventory=set(hostvars),
        play_vars=play_vars,
        extra_vars=set(load_extra_vars(loader)),
        play_hosts=[str(name) for name in task_vars.get("ansible_play_hosts_all", [])],
        connections={name: found for name in nodes if name in hostvars and (found := _connection(hostvars[name]))},
        find_profile=profiles.find,
        profile_names=profiles.names,
        schema=schema(),
        read_file=lambda path: _file_facts(os.path.join(directories[0], os.path.expanduser(path))),
        broken=broken,
    )


def _ours(variables: t.Mapping[str, t.Any], host: str, broken: dict[str, dict[str, str]]) -> dict[str, t.Any]:
    """A host's variables that begin like our options. A value is worked out only when it is read, so it can fail here."""
    return _read(variables, [name for name in variables if _is_ours(name)], host, broken)


def _is_ours(name: t.Any) -> bool:
    return isinstance(name, str) and (name.startswith(_plan.PREFIXES) or name in TABLE)


def _read(
    variables: t.Mapping[str, t.Any],
    names: t.Iterable[str],
    host: str,
    broken: dict[str, dict[str, str]],
    template: t.Callable[[t.Any], t.Any] = lambda value: value,
) -> dict[str, t.Any]:
    values = {}
    for name in names:
        try:
            values[str(name)] = plain(template(variables[name]))
        except AnsibleError as error:
            broken.setdefault(host, {})[str(name)] = " ".join(str(error).split())
    return values


def _play_vars(
    task_vars: t.Mapping[str, t.Any],
    asking: t.Mapping[str, t.Any],
    host: str,
    broken: dict[str, dict[str, str]],
    template: t.Callable[[t.Any], t.Any],
) -> dict[str, t.Any]:
    """Variables of the play: the host's own variables do not have them, or have another value."""
    known = broken.get(host, {})
    # Other than those of hostvars, these are not worked out when they are read.
    values = _read(task_vars, [name for name in task_vars if _is_ours(name) and name not in known], host, broken, template)
    return {name: value for name, value in values.items() if name not in asking or asking[name] != value}


def _profile_paths(raw: t.Any) -> list[str]:
    try:
        return _plan.convert(_plan.options()["serve_profile_paths"], raw) or []
    except _plan.ConversionError:
        return []


def inventory_directories(task_vars: t.Mapping[str, t.Any], basedir: str) -> list[str]:
    directories = []
    for source in task_vars.get("ansible_inventory_sources") or []:
        if os.path.exists(str(source)):
            directories.append(os.path.abspath(str(source) if os.path.isdir(str(source)) else os.path.dirname(str(source)) or "."))
    return list(dict.fromkeys(directories)) or [basedir]


def _connection(variables: t.Mapping[str, t.Any]) -> str | None:
    """Where ssh goes for a host; None for connections that do not go by address."""
    try:
        if variables.get("ansible_connection", "ssh") not in ("ssh", "smart", "ansible.builtin.ssh", "paramiko_ssh"):
            return None
        address = variables.get("ansible_host")
        return f"{address}:{variables.get('ansible_port', 22)}" if address else None
    except AnsibleError:
        return None


def _file_facts(path: str) -> dict[str, t.Any] | None:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    return {"source": path, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "vector_length": vector_length(content)}
