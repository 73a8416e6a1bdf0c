#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_facts
short_description: Read once what the roles need to know of a node
version_added: 0.1.0
description:
  - Account and rights, Docker, addresses, listeners, memory, clock, tools, and the files of this collection, in one call.
  - Touches no mount and never reads settings from the remote user's environment.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
attributes:
  facts:
    support: full
    description: Returns nothing but facts.
options:
  deployment:
    description: Name of the deployment, a directory below the state root.
    type: str
    required: true
  state_root:
    description:
      - Where the state of all deployments lies when root rights exist or the directory is there already.
      - Otherwise C(.local/state/sparkops) in the home of the account is used.
    type: path
    default: /var/lib/sparkops
  weights_root:
    description: Where weights lie. Default is C(weights) below the state root. C(~) is the home on this node.
    type: path
  libexec:
    description: Where programs of this collection are installed when root rights exist.
    type: path
    default: /usr/local/lib/sparkops
  ports:
    description: TCP ports of which the listeners are wanted.
    type: list
    elements: int
    default: []
  only_containers:
    description: Return only O(ignore:spark_containers); for a second call with root rights where the account may not use Docker.
    type: bool
    default: false
  proc_root:
    description: Root of the proc tree, for tests.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Read the node
  sparkops.inference.node_facts:
    deployment: lab_tiny
    ports: [8888, 29521]
"""

RETURN = r"""
ansible_facts:
  description: The facts.
  returned: always
  type: dict
  contains:
    spark_node:
      description: What the node says about itself.
      returned: unless O(only_containers=true)
      type: dict
    spark_containers:
      description: Name, status, labels, and image of all containers; empty when Docker cannot be used.
      returned: always
      type: list
      elements: dict
"""

import grp
import hashlib
import importlib.util
import json
import os
import platform
import pwd
import sys
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _mounts, _sockets
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import (
    DockerApi,
    DockerError,
)
from ansible_collections.sparkops.inference.plugins.module_utils._memory import read_text
from ansible_collections.sparkops.inference.plugins.module_utils._node import (
    ambient_settings,
    parse_ip_addresses,
    parse_meminfo,
    parse_os_release,
    parse_process_status,
)

PROBE_SECONDS = 5
COMMANDS = ("rsync", "docker", "ip", "ssh", "ssh-keygen", "systemctl", "nvidia-smi")
GATE_MARK = "node_gate.py"


def account() -> dict[str, t.Any]:
    entry = pwd.getpwuid(os.getuid())
    names = []
    for gid in os.getgroups():
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            names.append(str(gid))
    return {"name": entry.pw_name, "uid": entry.pw_uid, "gid": entry.pw_gid, "home": entry.pw_dir, "groups": sorted(set(names))}


def passwordless_sudo(module: AnsibleModule) -> str:
    """Only a probe of rights: all real work goes through Ansible's become."""
    if os.getuid() == 0:
        return "root"
    sudo = module.get_bin_path("sudo")
    if sudo is None:
        return "none"
    return "passwordless" if module.run_command([sudo, "-n", "true"])[0] == 0 else "none"


def service_manager(user: dict[str, t.Any], socket: str, proc_root: str) -> dict[str, t.Any]:
    """The account's own service manager. Its groups are those of its own start: a group that came later opens nothing to its services."""
    found = {"lingers": os.path.exists(f"/var/lib/systemd/linger/{user['name']}"), "may_use_docker": None}
    for pid in filter(str.isdecimal, os.listdir(proc_root)):
        status = parse_process_status(read_text(os.path.join(proc_root, pid, "status")))
        if status["name"] == "systemd" and status["uid"] == user["uid"]:
            try:
                found["may_use_docker"] = os.stat(socket).st_gid in status["gids"]
            except OSError:
                continue  # no socket: told as an engine that is not there
    return found


def docker_state(api: DockerApi, root_possible: bool) -> dict[str, t.Any]:
    """Tell not installed, not running, and no permission apart: each wants another cure."""
    try:
        version = api.version()
    except DockerError as exc:
        state = "become" if exc.state == "no_permission" and root_possible else exc.state
        return {"state": state, "version": "", "architecture": ""}
    return {"state": "usable", "version": version.get("Version", ""), "architecture": version.get("Arch", "")}


def containers(api: DockerApi) -> list[dict[str, t.Any]]:
    try:
        status, found = api.request("GET", "/containers/json", query={"all": "1"})
    except DockerError:
        return []
    if status != 200:
        return []
    return [
        {
            "name": (entry.get("Names") or ["/"])[0].lstrip("/"),
            "id": entry.get("Id", ""),
            "status": entry.get("State", ""),
            "image": entry.get("Image", ""),
            "labels": {name: value for name, value in (entry.get("Labels") or {}).items() if name.startswith("sparkops.")},
        }
        for entry in found
    ]


def listeners(ports: t.Collection[int], proc_root: str) -> list[dict[str, t.Any]]:
    """Which of the ports are taken, and by whom, as far as this account may see."""
    found = []
    for port, inodes in sorted(_sockets.listening(ports, proc_root).items()):
        pids = _sockets.holders(inodes, proc_root)
        found.append({"port": port, "owners": sorted(f"{read_text(os.path.join(proc_root, pid, 'comm')).strip()} (pid {pid})" for pid in pids)})
    return found


def choose_state_root(wanted: str, home: str, root_possible: bool) -> dict[str, t.Any]:
    """The wanted directory when it is ours already or can be made with root rights, else one in the home."""
    exists = os.path.isdir(wanted)
    if (exists and os.access(wanted, os.W_OK)) or root_possible:
        return {"path": wanted, "exists": exists, "writable": exists and os.access(wanted, os.W_OK)}
    fallback = os.path.join(home, ".local/state/sparkops")
    exists = os.path.isdir(fallback)
    return {"path": fallback, "exists": exists, "writable": exists and os.access(fallback, os.W_OK)}


def sha256_of_files(folder: str) -> dict[str, str]:
    found = {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        try:
            with open(os.path.join(folder, name), "rb") as stream:
                found[name] = hashlib.sha256(stream.read()).hexdigest()
        except OSError:
            continue
    return found


def host_keys(module: AnsibleModule) -> list[str]:
    """Public host keys of sshd as "type base64", for strict known_hosts on the peers: from the files, else from sshd itself."""
    found = []
    for name in ("ed25519", "ecdsa", "rsa"):
        words = read_text(f"/etc/ssh/ssh_host_{name}_key.pub").split()
        if len(words) >= 2:
            found.append(" ".join(words[:2]))
    scan = module.get_bin_path("ssh-keyscan")
    if not found and scan:
        lines = module.run_command([scan, "-T", str(PROBE_SECONDS), "127.0.0.1"])[1].splitlines()
        found = sorted(line.split(" ", 1)[1] for line in lines if line.count(" ") >= 2 and not line.startswith("#"))
    return found


def node(module: AnsibleModule, api: DockerApi) -> dict[str, t.Any]:
    params = module.params
    user = account()
    sudo = passwordless_sudo(module)
    root_possible = sudo != "none"
    state = choose_state_root(params["state_root"], user["home"], root_possible)
    mounts = _mounts.read(params["proc_root"])
    # By the name that the mount table has for it: everything that looks for a mount there compares paths.
    weights_root = _mounts.resolve(mounts, params["weights_root"] or os.path.join(state["path"], "weights"))
    libexec = params["libexec"] if root_possible or os.path.isdir(params["libexec"]) else os.path.join(state["path"], "bin")
    commands = {name: module.get_bin_path(name) for name in COMMANDS}
    keys = os.path.join(state["path"], "keys")
    addresses = json.loads(module.run_command([commands["ip"], "-json", "address", "show"])[1] or "[]") if commands["ip"] else []
    meminfo = parse_meminfo(read_text(os.path.join(params["proc_root"], "meminfo")))
    release = parse_os_release(read_text("/etc/os-release"))
    return {
        "user": user,
        "sudo": sudo,
        "hostname": platform.node(),
        "arch": platform.machine(),
        "kernel": platform.release(),
        "os": {"id": release.get("ID", ""), "version": release.get("VERSION_ID", ""), "name": release.get("PRETTY_NAME", "")},
        "time": time.time(),
        "boot_id": read_text(os.path.join(params["proc_root"], "sys/kernel/random/boot_id")).strip(),
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "requests": importlib.util.find_spec("requests") is not None,
        },
        "systemd": os.path.isdir("/run/systemd/system"),
        # Only without root do services run below the account's own manager.
        "manager": None if root_possible else service_manager(user, api.socket_path, params["proc_root"]),
        "commands": commands,
        "addresses": parse_ip_addresses(addresses),
        "listeners": listeners(params["ports"], params["proc_root"]),
        "memory": {"total_kib": meminfo.get("MemTotal"), "available_kib": meminfo.get("MemAvailable"), "swap_kib": meminfo.get("SwapTotal")},
        "docker": {"socket": api.socket_path, **docker_state(api, root_possible)},
        "ambient": ambient_settings(os.environ),
        "state_root": state["path"],
        "state_root_exists": state["exists"],
        "state_root_writable": state["writable"],
        "state_dir": os.path.join(state["path"], params["deployment"]),
        "state_dir_exists": os.path.isdir(os.path.join(state["path"], params["deployment"])),
        "weights_root": weights_root,
        # From the mount table alone: a look at such a mount may never come back.
        "network_mounts": [mount.path for mount in _mounts.network_mounts(mounts, weights_root)],
        "libexec": libexec,
        "libexec_sha256": sha256_of_files(libexec),
        "host_keys": host_keys(module),
        "key": {"path": os.path.join(keys, "id_ed25519"), "public": read_text(os.path.join(keys, "id_ed25519.pub")).strip()},
        "known_hosts": {"path": os.path.join(keys, "known_hosts"), "text": read_text(os.path.join(keys, "known_hosts"))},
        "authorized": [
            line for line in read_text(os.path.join(user["home"], ".ssh/authorized_keys")).splitlines() if GATE_MARK in line
        ],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deployment": {"type": "str", "required": True},
            "state_root": {"type": "path", "default": "/var/lib/sparkops"},
            "weights_root": {"type": "path"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "libexec": {"type": "path", "default": "/usr/local/lib/sparkops"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "only_containers": {"type": "bool", "default": False},
            "proc_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    api = DockerApi(module.params["docker_socket"], timeout=PROBE_SECONDS)
    facts: dict[str, t.Any] = {"spark_containers": containers(api)}
    if not module.params["only_containers"]:
        facts["spark_node"] = node(module, api)
    module.exit_json(changed=False, ansible_facts=facts)


if __name__ == "__main__":
    main()
