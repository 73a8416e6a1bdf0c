# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What stands in the way on a node, all at once. Pure: plan and facts in, refusals and predictions out.

What a bootstrap item that is switched on will mend is a prediction, no refusal.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

# Kernel names of machines, and what Docker calls them.
DOCKER_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
CLOCK_WARN_SECONDS, CLOCK_REFUSE_SECONDS = 2.0, 60.0
OLDEST_DOCKER = (20, 10)


@dataclasses.dataclass
class Findings:
    """The result for one node: refusals stop the run, predictions will be mended by bootstrap, notices are told."""

    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    predictions: list[str] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)

    def lack(self, mended: bool, refusal: Refusal) -> None:
        """A lack is a prediction when bootstrap will mend it in this run."""
        if mended:
            self.predictions.append(f"{refusal.node}: {refusal.thing}: {refusal.found}; bootstrap will mend it")
        else:
            self.refusals.append(refusal)


def examine(
    plan: t.Mapping[str, t.Any],
    name: str,
    node: t.Mapping[str, t.Any] | None,
    containers: t.Sequence[t.Mapping[str, t.Any]],
    strangers: t.Sequence[str] = (),
) -> Findings:
    """Everything that is wrong with one node.

    ``node`` is None when it did not answer. ``strangers``: peers that it does not let in, or whose host keys it does not know.
    """
    findings = Findings()
    if node is None:
        findings.refusals.append(Refusal(
            "preflight.unreachable", name, "connection", "no answer", "an ssh session of the Ansible account",
            "check that the machine is on, its ansible_host, account, key and known_hosts"))
        return findings
    for check in (_system, _account, _service_manager, _docker, _tools, _addresses, _ports, _clock):
        check(findings, plan, name, node, containers)
    _trust(findings, plan, name, node, strangers)
    if node["ambient"]:
        findings.notices.append(f"{name}: ignored settings in the login environment: {', '.join(node['ambient'])}")
    return findings


def _system(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    machine = DOCKER_ARCHITECTURES.get(node["arch"], node["arch"])
    platform = plan["image"].get("platform") or ""
    if platform and platform.split("/")[1:2] != [machine]:
        findings.refusals.append(Refusal(
            "preflight.platform", name, "machine", f"{node['arch']} (Docker: {machine})", f"the image's platform {platform}",
            "choose a profile or image for this machine"))
    if not node["systemd"]:
        findings.refusals.append(Refusal(
            "preflight.systemd", name, "service manager", "no running systemd", "systemd, which keeps the rank service",
            "use a machine or container that boots with systemd"))


def _account(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    settings = plan["settings"]
    if node["state_root_exists"] and node["state_root_writable"]:
        return
    found = "not writable" if node["state_root_exists"] else "not there"
    findings.lack(settings["bootstrap_state_dir"] and (node["sudo"] != "none" or not node["state_root_exists"]), Refusal(
        "preflight.state_root", name, f"state directory {node['state_root']}", f"{found} for {node['user']['name']}",
        "a directory of that account", "set bootstrap_state_dir: true, or make it and give it to the account"))


def _service_manager(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    manager, user = node["manager"], node["user"]
    if manager is None:
        return
    if not manager["lingers"]:
        findings.lack(plan["settings"]["bootstrap_state_dir"], Refusal(
            "preflight.linger", name, f"services of {user['name']} without a session", "they end with the last login",
            "lingering on, since there is no root for a system service",
            f"set bootstrap_state_dir: true, or as root: loginctl enable-linger {user['name']}"))
    if manager["may_use_docker"] is False and node["docker"]["state"] == "usable":
        findings.refusals.append(Refusal(
            "preflight.stale_manager", name, f"service manager of {user['name']}", "started before the account came into the group of the Docker socket",
            "one that may use Docker", f"as root: systemctl restart user@{user['uid']}.service, or reboot the node"))


def _docker(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    settings, docker = plan["settings"], node["docker"]
    state, user = docker["state"], node["user"]["name"]
    if state == "not_installed":
        findings.lack(settings["bootstrap_packages"] and node["sudo"] != "none", Refusal(
            "preflight.docker_missing", name, "Docker Engine", "not installed", "a running Docker Engine",
            "install it, or set bootstrap_packages: true"))
    elif state == "not_running":
        findings.refusals.append(Refusal(
            "preflight.docker_stopped", name, f"Docker Engine at {docker['socket']}", "installed, does not answer", "a running Docker Engine",
            "start it (systemctl enable --now docker) and read its journal"))
    elif state == "no_permission":
        mended = settings["bootstrap_docker_group"] and node["sudo"] != "none"
        findings.lack(mended, Refusal(
            "preflight.docker_permission", name, f"Docker socket {docker['socket']}", f"{user} may not use it and has no sudo without a password",
            "an account in group docker", f"as root: usermod -aG docker {user}, then log in again"))
    elif state == "become" and settings["bootstrap_docker_group"]:
        findings.predictions.append(f"{name}: {user} is not in group docker; bootstrap will mend it")
    version = tuple(int(part) for part in docker["version"].split(".")[:2] if part.isdecimal())
    if version and version < OLDEST_DOCKER:
        findings.refusals.append(Refusal(
            "preflight.docker_old", name, "Docker Engine", docker["version"], "20.10 or newer", "upgrade the Docker Engine"))


def _tools(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    wanted = {"ip": "iproute2"}
    if plan["ranks"] > 1:
        wanted.update({"rsync": "rsync", "ssh": "openssh-client", "ssh-keygen": "openssh-client"})
    lacking = {command: package for command, package in wanted.items() if not node["commands"].get(command)}
    if not node["python"]["requests"]:
        lacking["Python module requests"] = "python3-requests"
    if lacking:
        can_install = plan["settings"]["bootstrap_packages"] and node["sudo"] != "none"
        findings.lack(can_install, Refusal(
            "preflight.tools", name, "tools", f"without {', '.join(sorted(lacking))}", "all of them",
            f"install {' '.join(sorted(set(lacking.values())))}, or set bootstrap_packages: true (needs sudo without a password)"))


def _addresses(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    wanted = plan["addresses"].get(name)
    if plan["ranks"] == 1 or not wanted:
        return
    holders = [entry["interface"] for entry in node["addresses"] if entry["address"] == wanted]
    if not holders:
        here = ", ".join(f"{entry['address']} on {entry['interface']}" for entry in node["addresses"] if entry["interface"] != "lo") or "none"
        findings.refusals.append(Refusal(
            "preflight.fabric_address", name, f"fabric_address {wanted}", f"not on this node, which has {here}", "an address of this node's CX7 link",
            "correct fabric_address in the inventory, or give the interface this address"))
    elif "lo" in holders:
        findings.refusals.append(Refusal(
            "preflight.fabric_loopback", name, f"fabric_address {wanted}", "an address of the loopback interface", "an address of the link to the peers",
            "NCCL cannot use addresses on lo; use the address of the CX7 interface"))


def _ports(
    findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], containers: t.Sequence[t.Mapping[str, t.Any]]
) -> None:
    if name != plan["head"]:
        return  # only rank 0 listens: the API, and the rendezvous that the others come to
    ours = any(entry["status"] == "running" and entry["labels"].get("sparkops.deployment") == plan["deployment"] for entry in containers)
    for listener in [] if ours else node["listeners"]:
        use = "serve_port" if listener["port"] == plan["api"]["port"] else "serve_rendezvous_port"
        owners = ", ".join(listener["owners"]) or "a process of another account"
        findings.refusals.append(Refusal(
            "preflight.port", name, f"port {listener['port']} ({use})", f"in use by {owners}", "a free port",
            f"stop that process, or set {use} to another port"))


def _clock(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], *dummy: t.Any) -> None:
    skew = node["clock_skew"]
    if abs(skew) > CLOCK_REFUSE_SECONDS:
        findings.refusals.append(Refusal(
            "preflight.clock", name, "clock", f"{skew:+.0f} s from the controller's", f"within {CLOCK_REFUSE_SECONDS:.0f} s",
            "give the nodes one time source (chrony, systemd-timesyncd)"))
    elif abs(skew) > CLOCK_WARN_SECONDS:
        findings.notices.append(f"{name}: its clock is {skew:+.0f} s from the controller's")


def _trust(findings: Findings, plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], strangers: t.Sequence[str]) -> None:
    if plan["ranks"] == 1 or (node["key"]["public"] and not strangers):
        return
    found = f"does not know {', '.join(strangers)}" if node["key"]["public"] else "this node has no key"
    findings.lack(plan["settings"]["bootstrap_node_keys"], Refusal(
        "preflight.node_keys", name, "ssh between the nodes", found, "a key, a way in, and pinned host keys for each peer",
        "set bootstrap_node_keys: true"))
