# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of role bootstrap: facts of the nodes in, what is lacking out."""

from __future__ import annotations

import hashlib
import os
import shlex
import typing as t

# What the roles call on a node, and Debian's package of it.
COMMAND_PACKAGES = {"rsync": "rsync", "ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}


def lacking_packages(node: t.Mapping[str, t.Any]) -> list[str]:
    """Packages for tools that the node lacks. A Docker Engine of any origin is left as it is."""
    lacking = {package for command, package in COMMAND_PACKAGES.items() if not node["commands"].get(command)}
    if not node["python"]["requests"]:
        lacking.add("python3-requests")  # community.docker's modules need it on the node
    if node["docker"]["state"] == "not_installed":
        lacking.add("docker.io")
    return sorted(lacking)


def peer_names(plan: t.Mapping[str, t.Any], host: str) -> list[str]:
    return [name for name in plan["nodes"] if name != host]


def gate_lines(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], host: str) -> list[str]:
    """The authorized_keys lines of ``host``: each peer may run the gate from its fabric addresses, and nothing else."""
    own = hostvars[host]["spark_node"]
    # sshd gives the command to the account's shell.
    words = [own["python"]["executable"], f"{own['libexec']}/node_gate.py", own["state_root"], own["weights_root"]]
    command = " ".join(shlex.quote(word) for word in words)
    return [
        f'restrict,from="{",".join(fabric_addresses(plan, name))}",command="{command}" {hostvars[name]["spark_node"]["key"]["public"]}'
        for name in peer_names(plan, host)
    ]


def fabric_addresses(plan: t.Mapping[str, t.Any], name: str) -> list[str]:
    """Every address that a node may connect from over the fabric: a copy over several rails uses them all."""
    rails = plan.get("node_settings", {}).get(name, {}).get("weight_sync_rails") or []
    return list(dict.fromkeys([plan["addresses"][name], *rails]))


def known_host_lines(hostvars: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], host: str) -> list[str]:
    """The known_hosts lines of ``host``: what it knew, less the peers' old keys, and every host key of each peer."""
    addresses = {plan["addresses"][name] for name in peer_names(plan, host)}
    others = [line for line in hostvars[host]["spark_node"]["known_hosts"]["text"].splitlines() if line.split(" ")[0] not in addresses]
    return others + [
        f"{plan['addresses'][name]} {key}" for name in peer_names(plan, host) for key in hostvars[name]["spark_node"]["host_keys"]
    ]


def stale_programs(paths: t.Sequence[str], installed: t.Mapping[str, str]) -> list[str]:
    """The files on the controller that differ from those on the node, which are given as sha256 by name."""
    stale = []
    for path in paths:
        with open(path, "rb") as stream:
            if hashlib.sha256(stream.read()).hexdigest() != installed.get(os.path.basename(path)):
                stale.append(path)
    return stale


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"lacking_packages": lacking_packages, "gate_lines": gate_lines, "known_host_lines": known_host_lines, "stale_programs": stale_programs}
