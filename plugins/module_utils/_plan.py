# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""From inventory values and a profile to the effective deployment, or to everything that is wrong with them.

Pure: no I/O and no Ansible. Files are reached through functions that the caller hands in.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import ipaddress
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _engine_vllm as engine
from ansible_collections.sparkops.inference.plugins.module_utils import _profile_language as language
from ansible_collections.sparkops.inference.plugins.module_utils import _rank_spec
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import normal_platform
from ansible_collections.sparkops.inference.plugins.module_utils._options import ConversionError, Option, convert, is_unset, options
from ansible_collections.sparkops.inference.plugins.module_utils._profile import ProfileError, catalogue, faults, with_parents
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._rules import shown_condition, violation

PREFIXES = ("serve_", "weights_", "weight_sync_", "image_", "bootstrap_", "fabric_", "memory_", "engram_", "preflight_")

OPEN_API = "api.open"
TWO_WAYS = "settings.two_ways"
# What an expert may accept besides the rules of a profile.
ACCEPTABLE = (OPEN_API, TWO_WAYS, "memory.headroom", "memory.floor", "memory.gpu_tenant", "memory.guard_floor")

_RESERVED_NAMES = ("serve_nodes", "serve_profile", "serve_profile_paths")


@dataclasses.dataclass
class Request:
    """All that the planner looks at."""

    # The raw values of our variables, by inventory host; at least the asking host, and each host of serve_nodes that exists.
    hosts: dict[str, dict[str, t.Any]]
    # The host that asks; it may stand outside the group.
    host: str
    inventory: t.Collection[str]
    # Values of the play (its vars, a role's vars): they belong to all hosts and stand over the inventory.
    play_vars: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    # Names given on the command line or by a survey.
    extra_vars: t.Collection[str] = ()
    play_hosts: t.Sequence[str] = ()
    # Connection of each host, to tell that two names are one machine.
    connections: dict[str, str] = dataclasses.field(default_factory=dict)
    find_profile: t.Callable[[str], t.Mapping[str, t.Any] | None] = lambda name: None
    profile_names: t.Callable[[], t.Sequence[str]] = lambda: ()
    schema: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    # Size and sha256 of a file on the controller, None when it is not there.
    read_file: t.Callable[[str], dict[str, t.Any] | None] = lambda path: None
    # Names of variables that were set but could not be read, with the reason.
    broken: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


def plan(request: Request) -> tuple[dict[str, t.Any] | None, list[Refusal]]:
    """The effective deployment, or None and every reason why there is none."""
    return _Planner(request).run()


def group_nodes(raw: t.Any) -> list[str]:
    """The hosts that serve_nodes names, as far as it can be read; for the caller that has to fetch their variables."""
    try:
        return [str(item) for item in convert(options()["serve_nodes"], raw) or []]
    except ConversionError:
        return []


class _Settings(collections.abc.Mapping[str, t.Any]):
    """Typed values by option name. A default that depends on other options is worked out when it is asked for."""

    def __init__(self, known: t.Mapping[str, Option], given: t.Mapping[str, t.Any], extra: t.Mapping[str, t.Any]) -> None:
        self._known = known
        self._values = {**extra, **{name: value for name, value in given.items() if value is not None}}
        self._extra = set(extra)
        self._open: list[str] = []

    def __getitem__(self, name: str) -> t.Any:
        if name not in self._values:
            if name in self._open:
                raise language.LanguageError(f"the default of {name} depends on itself by way of {' > '.join(self._open)}")
            option = self._known[name]
            self._open.append(name)
            try:
                self._values[name] = convert(option, language.resolve(option.default, self))
            finally:
                self._open.pop()
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._values

    def __iter__(self) -> t.Iterator[str]:
        return iter([*self._known, *self._extra])

    def __len__(self) -> int:
        return len(self._known) + len(self._extra)


class _Planner:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.refusals: list[Refusal] = []
        self.notices: list[str] = []
        self.known = options()
        self.profile: dict[str, t.Any] = {}
        self.nodes: list[str] = []

    def refuse(self, id: str, thing: str, found: str, wanted: str, next_step: str, node: str = "") -> None:
        refusal = Refusal(id=id, node=node, thing=thing, found=found, wanted=wanted, next_step=next_step)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    # -- the steps ---------------------------------------------------------------------------------------------

    def run(self) -> tuple[dict[str, t.Any] | None, list[Refusal]]:
        self._refuse_broken()
        self.nodes = self._nodes()
        self._read_profile()
        given = self._given()
        if not self.profile:
            return None, self.refusals
        settings = self._settings(given)
        if settings is None:
            return None, self.refusals
        self._check_shape(settings)
        addresses = self._addresses(given)
        self._check_api(given, settings)
        self._check_ports(settings)
        self._check_environment(settings)
        self._notice_strangers(given)
        result = self._result(given, settings, addresses)
        if result is not None:
            self._check_arguments(settings, result)
            self._check_rules(settings, result)
        if self.refusals:
            return None, self.refusals
        return result, []

    def _refuse_broken(self) -> None:
        hosts: dict[tuple[str, str], list[str]] = {}
        for host, names in self.request.broken.items():
            for name, reason in names.items():
                hosts.setdefault((name, reason), []).append(host)
        for (name, reason), where in hosts.items():
            # A group variable is broken on all hosts alike: that is one fault, not one for each.
            node = where[0] if len(where) == 1 and len(self.request.hosts) > 1 else ""
            self.refuse("settings.template", name, f"a value that cannot be worked out: {reason}", "a value", f"mend {name} in the inventory", node)

    # -- hosts -------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[str]:
        raw = self._raw("serve_nodes").get(self.request.host)
        if is_unset(raw):
            members = ", ".join(self.request.play_hosts) or self.request.host
            self.refuse(
                "nodes.undefined",
                "serve_nodes",
                "nothing",
                self.known["serve_nodes"].wanted,
                f"set serve_nodes for the group, in rank order (this play has {members})",
            )
            return []
        nodes = group_nodes(raw)
        for name in sorted({name for name in nodes if nodes.count(name) > 1}):
            self.refuse(
                "nodes.twice", "serve_nodes", f"{name} {nodes.count(name)} times", "each host once", "name each host once in serve_nodes", name
            )
        for name in nodes:
            if name not in self.request.inventory:
                hint = language.near(name, self.request.inventory)
                self.refuse(
                    "nodes.not_in_inventory",
                    "serve_nodes",
                    f"{name}, which the inventory does not have{hint}",
                    "hosts of the inventory",
                    "correct serve_nodes or add the host",
                    name,
                )
        self._refuse_same_machine(nodes)
        for name in self.request.play_hosts:
            if nodes and name not in nodes:
                self.notices.append(f"{name} is in the play but not in serve_nodes: nothing is done there.")
        return nodes

    def _refuse_same_machine(self, nodes: list[str]) -> None:
        seen: dict[str, str] = {}
        for name in dict.fromkeys(nodes):
            connection = self.request.connections.get(name)
            if connection and connection in seen:
                self.refuse(
                    "nodes.same_machine",
                    "connection",
                    f"{connection}, as {seen[connection]} has",
                    "another machine for each rank",
                    f"correct ansible_host of {name} or {seen[connection]}",
                    name,
                )
            elif connection:
                seen[connection] = name

    def _addresses(self, given: _Given) -> dict[str, str]:
        addresses: dict[str, str] = {}
        for name in dict.fromkeys(self.nodes):
            text = given.node.get(name, {}).get("fabric_address")
            if text is None:
                if len(self.nodes) > 1 and name in self.request.inventory and "fabric_address" not in given.refused.get(name, ()):
                    self.refuse(
                        "fabric.address_missing",
                        "fabric_address",
                        "nothing",
                        self.known["fabric_address"].wanted,
                        f"set fabric_address of {name}",
                        name,
                    )
                continue
            address = _usable_address(text)
            if address is None:
                self.refuse(
                    "fabric.address_invalid", "fabric_address", text, self.known["fabric_address"].wanted, f"correct fabric_address of {name}", name
                )
            elif address in addresses.values():
                other = next(other for other, value in addresses.items() if value == address)
                self.refuse(
                    "fabric.address_twice",
                    "fabric_address",
                    f"{address}, as {other} has",
                    "an address of its own for each host",
                    f"correct fabric_address of {name} or {other}",
                    name,
                )
            else:
                addresses[name] = address
        if len(self.nodes) == 1 and not addresses:
            # One rank meets nobody; it still needs an address of its own in the plan.
            addresses = {self.nodes[0]: "127.0.0.1"}
        self._check_rails(given, addresses)
        return addresses

    def _check_rails(self, given: _Given, addresses: t.Mapping[str, str]) -> None:
        """Else a typo is seen by the copy only, as a peer that lets nobody in."""
        owners = {address: name for name, address in addresses.items()}
        for name in dict.fromkeys(self.nodes):
            for text in given.node.get(name, {}).get("weight_sync_rails") or ():
                address = _usable_address(text)
                wanted = self.known["fabric_address"].wanted
                if address is None:
                    self.refuse("fabric.address_invalid", "weight_sync_rails", text, wanted, f"correct weight_sync_rails of {name}", name)
                elif owners.setdefault(address, name) != name:
                    found, next_step = f"{address}, as {owners[address]} has", f"correct weight_sync_rails of {name} or the addresses of {owners[address]}"
                    self.refuse("fabric.address_twice", "weight_sync_rails", found, "addresses of its own for each host", next_step, name)

    # -- profile -----------------------------------------------------------------------------------------------

    def _read_profile(self) -> None:
        raw = self._raw("serve_profile").get(self.request.host)
        try:
            name = convert(self.known["serve_profile"], raw)
        except ConversionError:
            return
        if name is None:
            served = ", ".join(self.request.profile_names())
            self.refuse("profile.undefined", "serve_profile", "nothing", "the name of a profile", f"set serve_profile to one of {served}")
            return
        try:
            if (self.request.find_profile(name) or {"abstract": True}).get("abstract"):
                self._refuse_unknown_profile(name)
                return
            profile = with_parents(name, self.request.find_profile)
            found = faults(profile, self.request.schema) if self.request.schema else []
            found = found or unknown_names(profile)
            if found:
                raise ProfileError(name, found)
        except ProfileError as error:
            for fault in error.faults:
                self.refuse("profile.invalid", f"profile {name}", fault, "a profile as docs/profiles.md describes it", "correct the profile's file")
            return
        self.profile = profile
        self.known = catalogue(profile)

    def _refuse_unknown_profile(self, name: str) -> None:
        served = self.request.profile_names()
        self.refuse(
            "profile.unknown",
            "serve_profile",
            f"{name}{language.near(name, served)}",
            "a profile that exists",
            f"set serve_profile to one of {', '.join(served)}, or add its directory to serve_profile_paths",
        )

    # -- values ------------------------------------------------------------------------------------------------

    def _raw(self, name: str) -> dict[str, t.Any]:
        """The raw values of a variable by host, for all hosts that we look at."""
        hosts = list(dict.fromkeys([*self.nodes, self.request.host]))
        if name in self.request.play_vars:
            return dict.fromkeys(hosts, self.request.play_vars[name])
        return {host: self.request.hosts[host][name] for host in hosts if name in self.request.hosts.get(host, {})}

    def _given(self) -> _Given:
        given = _Given()
        members = [name for name in dict.fromkeys(self.nodes) if name in self.request.inventory] or [self.request.host]
        for option in self.known.values():
            values = self._convert_all(option, members, given)
            if option.scope == "node":
                for host, value in values.items():
                    given.node.setdefault(host, {})[option.name] = value
            elif values:
                self._one_value(option, values, given)
        return given

    def _convert_all(self, option: Option, members: list[str], given: _Given) -> dict[str, t.Any]:
        raw = self._raw(option.name)
        if option.name in _RESERVED_NAMES and self.request.host in raw:
            # These decide who the members are, so they are read where the question was asked.
            members = [self.request.host]
        values: dict[str, t.Any] = {}
        for host in members:
            try:
                values[host] = convert(option, raw.get(host))
            except ConversionError as error:
                given.refused.setdefault(host, set()).add(option.name)
                node = host if option.scope == "node" else ""
                hint = f" ({error.hint})" if error.hint else ""
                self.refuse(
                    "settings.value", option.name, error.found + hint, error.wanted, f"correct {option.name}, or leave it out for the default", node
                )
        return values

    def _one_value(self, option: Option, values: dict[str, t.Any], given: _Given) -> None:
        distinct = []
        for value in values.values():
            if value not in distinct:
                distinct.append(value)
        if len(distinct) > 1:
            found = ", ".join(
                f"{host}: {'a value that is not shown' if option.secret else 'nothing' if value is None else value}" for host, value in values.items()
            )
            self.refuse(
                "settings.differs", option.name, found, "one value for the whole group", f"set {option.name} for the group and not for single hosts"
            )
        given.group[option.name] = distinct[0]

    def _settings(self, given: _Given) -> _Settings | None:
        values = {name: value for name, value in given.group.items() if not self.known[name].secret}
        ranks = max(len(self.nodes), 1)
        pipeline = values.get("serve_pipeline_parallel") or 1
        extra = {"ranks": ranks, **_sizes(self.profile)}
        if values.get("serve_tensor_parallel") is None and self.known["serve_tensor_parallel"].default is None:
            values["serve_tensor_parallel"] = max(ranks // pipeline, 1)
        if values.get("serve_deployment") is None and self.known["serve_deployment"].default is None:
            values["serve_deployment"] = values.get("serve_profile")
        settings = _Settings({name: option for name, option in self.known.items() if not option.secret}, values, extra)
        for name in self.known:
            try:
                settings.get(name)
            except (language.LanguageError, ConversionError) as error:
                self.refuse(
                    "profile.invalid",
                    f"profile {values.get('serve_profile')}",
                    f"the default of {name}: {error}",
                    "a default of the option's own kind",
                    "correct the profile's file",
                )
                return None
        return settings

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_shape(self, settings: _Settings) -> None:
        if not self.nodes:
            return
        tensor, pipeline = settings["serve_tensor_parallel"], settings["serve_pipeline_parallel"]
        ranks = len(self.nodes)
        if tensor * pipeline != ranks:
            others = [name for name in self.request.play_hosts if name not in self.nodes]
            outside = f"; {', '.join(others)} of this play not in serve_nodes" if others else ""
            self.refuse(
                "plan.ranks",
                "serve_nodes",
                f"{ranks} rank{'s' if ranks != 1 else ''} ({', '.join(self.nodes)}) with TP {tensor} and PP {pipeline}{outside}",
                f"{tensor * pipeline} rank{'s' if tensor * pipeline != 1 else ''}, as TP x PP says",
                "make serve_nodes, serve_tensor_parallel and serve_pipeline_parallel agree",
            )

    def _check_api(self, given: _Given, settings: _Settings) -> None:
        bind = settings["serve_bind"]
        try:
            wildcard = ipaddress.ip_address(bind).is_unspecified
        except ValueError:
            self.refuse("settings.value", "serve_bind", bind, self.known["serve_bind"].wanted, "correct serve_bind")
            return
        keyless = settings["serve_api_key_mode"] == "none" and given.group.get("serve_api_key") is None
        if settings["serve_api_key_mode"] == "none" and not keyless:
            self.refuse("settings.two_ways", "serve_api_key_mode", "none, and a serve_api_key", "one of the two", "leave one of them out")
        if wildcard and keyless and not self._accepted(OPEN_API, settings, "the API listens on all addresses without a key"):
            self.refuse(
                OPEN_API,
                "serve_api_key_mode",
                f"none, with serve_bind {bind}",
                "a key when the API listens on all addresses",
                f"leave serve_api_key_mode out, set serve_bind to one address, or accept it with serve_accept_rules: [{OPEN_API}]",
            )

    def _accepted(self, id: str, settings: _Settings, what: str) -> bool:
        if id not in settings["serve_accept_rules"]:
            return False
        self.notices.append(f"Rule {id} is accepted by serve_accept_rules: {what}.")
        return True

    def _check_ports(self, settings: _Settings) -> None:
        owners: dict[int, str] = {}
        for name in self.known:
            if not name.endswith("_port") or settings.get(name) is None:
                continue
            port = settings[name]
            if port in owners:
                self.refuse(
                    "settings.same_port", name, f"{port}, as {owners[port]} has", "a port of its own for each", f"change {name} or {owners[port]}"
                )
            owners.setdefault(port, name)

    def _check_environment(self, settings: _Settings) -> None:
        template = self.profile.get("environment") or {}
        for name, value in settings["serve_environment"].items():
            if isinstance(value, (bool, list, dict)):
                self.refuse(
                    "settings.value",
                    f"serve_environment.{name}",
                    str(value),
                    "a text or a number",
                    "write it in quotes, exactly as the engine wants it",
                )
            if value == "":
                self.refuse(
                    "settings.value",
                    f"serve_environment.{name}",
                    "an empty text",
                    "a value, or null to take the variable away",
                    "an empty variable is not an absent one: NCCL reads it as 0",
                )
            if not name or "=" in name or "\0" in name:
                self.refuse("settings.value", "serve_environment", repr(name), "names of environment variables", "correct the name")
            if name in engine.RESERVED_ENVIRONMENT:
                self.refuse(
                    "settings.reserved",
                    f"serve_environment.{name}",
                    "a value",
                    "nothing: it is set for each rank by the collection",
                    f"use {engine.RESERVED_ENVIRONMENT[name]} instead",
                )
            owners = sorted(language.placeholders(template.get(name)) & set(self.known))
            if owners and not self._accepted(TWO_WAYS, settings, f"serve_environment.{name} stands over {owners[0]}"):
                self.refuse(
                    TWO_WAYS,
                    f"serve_environment.{name}",
                    "a value",
                    "one place for each setting",
                    f"use {owners[0]} instead, or accept it with serve_accept_rules: [{TWO_WAYS}]",
                )

    def _check_arguments(self, settings: _Settings, result: dict[str, t.Any]) -> None:
        owned = self._argument_owners(result)
        for item in settings["serve_extra_arguments"]:
            flag = str(item).split("=", 1)[0] if isinstance(item, str) else ""
            if flag in engine.RESERVED_ARGUMENTS:
                self.refuse(
                    "settings.reserved",
                    "serve_extra_arguments",
                    flag,
                    "nothing that the collection sets itself",
                    f"use {engine.RESERVED_ARGUMENTS[flag]} instead",
                )
            elif flag in owned and not self._accepted(TWO_WAYS, settings, f"{flag} in serve_extra_arguments stands over the profile's"):
                instead = f"use {owned[flag]} instead" if owned[flag] else "leave it out, the profile sets it"
                self.refuse(
                    TWO_WAYS,
                    "serve_extra_arguments",
                    flag,
                    "one place for each setting",
                    f"{instead}, or accept it with serve_accept_rules: [{TWO_WAYS}]",
                )

    def _argument_owners(self, result: dict[str, t.Any]) -> dict[str, str]:
        """The flags that the profile can emit, with the option that decides each, as far as one does."""
        owned: dict[str, str] = {}
        for group in result["template"]["arguments"].values():
            names = sorted(language.placeholders(group) & set(self.known))
            items = group["items"] if isinstance(group, dict) else group
            for item in items if isinstance(items, list) else [items]:
                if isinstance(item, str) and item.startswith("--"):
                    owned[item.split("=", 1)[0]] = names[0] if names else ""
        return owned

    def _notice_strangers(self, given: _Given) -> None:
        """Variables that look like ours and are not: most often a slip of the pen."""
        seen: set[str] = set(self.request.play_vars)
        for host in dict.fromkeys([*self.nodes, self.request.host]):
            seen.update(self.request.hosts.get(host, {}))
        for name in sorted(seen - set(self.known)):
            if name.startswith(PREFIXES):
                self.notices.append(f"{name} has no effect with profile {given.group.get('serve_profile')}{language.near(name, self.known)}.")

    # -- rules -------------------------------------------------------------------------------------------------

    def _check_rules(self, settings: _Settings, result: dict[str, t.Any]) -> None:
        rules = self.profile.get("rules") or {}
        for id in settings["serve_accept_rules"]:
            if id not in rules and id not in ACCEPTABLE:
                known = sorted([*rules, *ACCEPTABLE])
                self.refuse(
                    "settings.accept_rules",
                    "serve_accept_rules",
                    f"{id}{language.near(id, known)}",
                    "ids of rules: " + ", ".join(known),
                    "correct or remove the id",
                )
        spec = _preview(result)
        for id, rule in rules.items():
            wanted = f"{rule['says']} ({rule['reason'].rstrip('.')})"
            if "notice_when" in rule and language.holds(rule["notice_when"], settings):
                self.notices.append(f"{shown_condition(rule['notice_when'], settings)}: {wanted} [rule {id}].")
            next_step = rule.get("next", "leave it at the profile's default")
            for node, names in self._views(rule, settings, result):
                found = violation(rule, names, spec)
                if found is not None and not self._accepted(id, settings, found):
                    self.refuse(f"rule.{id}", f"rule {id}", found, wanted, f"{next_step}, or accept it with serve_accept_rules: [{id}]", node)

    def _views(self, rule: t.Mapping[str, t.Any], settings: _Settings, result: dict[str, t.Any]) -> list[tuple[str, t.Mapping[str, t.Any]]]:
        """The settings that a rule looks at: once for the group, or once for each host when it is about options of single hosts."""
        asked = {name for name in language.placeholders(rule) if name in self.known}
        if not any(self.known[name].scope == "node" for name in asked):
            return [("", settings)]
        return [(name, collections.ChainMap(result["node_settings"][name], settings)) for name in result["nodes"]]

    # -- result ------------------------------------------------------------------------------------------------

    def _result(self, given: _Given, settings: _Settings, addresses: dict[str, str]) -> dict[str, t.Any] | None:
        nodes = self.nodes
        values = {name: settings[name] for name in self.known if not self.known[name].secret and self.known[name].scope == "group"}
        node_settings = {name: self._node_settings(name, given, settings) for name in nodes}
        for name in (name for name, option in self.known.items() if option.scope == "node"):
            # Roles that know no ranks read these here; where nodes differ they read node_settings.
            values[name] = node_settings[nodes[0]][name] if nodes else settings[name]
        try:
            template = {
                "container": language.resolve(self.profile.get("container") or {}, settings),
                "environment": self.profile.get("environment") or {},
                "arguments": self.profile.get("arguments") or {},
                "mounts": self.profile.get("mounts") or {},
                "hooks": self.profile.get("hooks") or {},
            }
            passed_on = {
                part: language.resolve(self.profile.get(part) or {}, settings)
                for part in ("proof", "warmup", "sampling", "memory", "expected", "engram")
            }
            artefacts = self._artefacts(settings)
            files = self._files(settings)
            image = self._image(settings)
        except language.LanguageError as error:
            self.refuse("profile.invalid", f"profile {values['serve_profile']}", str(error), "names that exist", "correct the profile's file")
            return None
        key = "given" if given.group.get("serve_api_key") is not None else settings["serve_api_key_mode"]
        return {
            "deployment": settings["serve_deployment"],
            "profile": settings["serve_profile"],
            "nodes": nodes,
            "head": nodes[0] if nodes else "",
            "ranks": len(nodes),
            "tensor_parallel": settings["serve_tensor_parallel"],
            "pipeline_parallel": settings["serve_pipeline_parallel"],
            "addresses": addresses,
            "served_model_name": settings["serve_served_model_name"],
            "api": {"port": settings["serve_port"], "bind": settings["serve_bind"], "key": key},
            "rendezvous_port": settings["serve_rendezvous_port"],
            "artefacts": artefacts,
            "files": files,
            "image": image,
            "settings": values,
            "node_settings": node_settings,
            "secrets": {name: given.group.get(name) is not None for name, option in self.known.items() if option.secret},
            "origins": {name: self._origin(option, given) for name, option in self.known.items()},
            "timeouts": {word: settings[f"serve_{word}_timeout"] for word in ("ready", "stall", "completion")},
            "template": template,
            "rules": {id: rule["says"] for id, rule in (self.profile.get("rules") or {}).items()},
            "notices": self.notices,
            **passed_on,
        }

    def _node_settings(self, host: str, given: _Given, settings: _Settings) -> dict[str, t.Any]:
        own = given.node.get(host, {})
        return {name: own.get(name) if own.get(name) is not None else settings[name] for name, option in self.known.items() if option.scope == "node"}

    def _origin(self, option: Option, given: _Given) -> str:
        values = [given.group.get(option.name), *(own.get(option.name) for own in given.node.values())]
        if any(value is not None for value in values):
            if option.name in self.request.extra_vars:
                return "extra vars"
            return "play vars" if option.name in self.request.play_vars else "inventory"
        return "profile" if "default" in (self.profile.get("options") or {}).get(option.name, {}) else "default"

    def _artefacts(self, settings: _Settings) -> list[dict[str, t.Any]]:
        result = []
        for name, data in (self.profile.get("artefacts") or {}).items():
            if not language.holds(data.get("when"), settings):
                continue
            artefact = language.resolve({key: value for key, value in data.items() if key != "when"}, settings)
            artefact = {**_ARTEFACT, **artefact, "name": name}
            if not artefact["repository"] or not artefact["revision"]:
                missing = "repository" if not artefact["repository"] else "revision"
                wanted = sorted(language.placeholders(data.get(missing)))
                self.refuse("plan.artefact", f"artefact {name}", f"no {missing}", f"a {missing} to serve", f"set {' or '.join(wanted) or missing}")
                continue
            artefact["directory"] = f"{artefact['repository'].replace('/', '--')}/{artefact['revision']}"
            result.append(artefact)
        return result

    def _files(self, settings: _Settings) -> list[dict[str, t.Any]]:
        """Files of the controller that the ranks get: each must be there before anything is changed."""
        wanted = [(path, target, "serve_files", None) for target, path in settings["serve_files"].items()]
        for name, data in (self.profile.get("files") or {}).items():
            path = language.resolve(data["source"], settings)
            if path is not None and language.holds(data.get("when"), settings):
                owner = next(iter(sorted(language.placeholders(data["source"]))), name)
                wanted.append((path, data["target"], owner, language.number(data.get("vector_length"), settings)))
        result = []
        for path, target, owner, vector_length in wanted:
            facts = self.request.read_file(str(path))
            if facts is None:
                self.refuse("settings.file", owner, str(path), "a file on the controller that can be read", f"correct {owner}")
            elif not target.startswith("/"):
                self.refuse("settings.value", owner, target, "absolute paths in the container as names", f"correct {owner}")
            elif vector_length is not None and facts["vector_length"] != vector_length:
                length = facts["vector_length"] or "no readable number of"
                self.refuse(
                    "settings.vector",
                    owner,
                    f"{length} elements in {path}",
                    f"a vector of {vector_length:g} elements, the model's hidden size",
                    f"correct {owner}",
                )
            else:
                name = target.strip("/").replace("/", "_")
                result.append({"name": name, "source": facts["source"], "target": target, "sha256": facts["sha256"], "size": facts["size"]})
        return result

    def _image(self, settings: _Settings) -> dict[str, t.Any]:
        image = {**_IMAGE, **language.resolve(self.profile.get("image") or {}, settings)}
        image["reference"] = settings["image_reference"]
        image["pull"] = settings["image_pull_policy"]
        image["digest"] = settings["image_digest"]
        if image["platform"]:
            image["platform"] = normal_platform(image["platform"])
        own = (self.profile.get("options") or {}).get("image_reference", {}).get("default")
        if not image["reference"]:
            self.refuse("plan.image", "image_reference", "nothing", "an image to run", "set image_reference")
        elif own != image["reference"] and image["digest"] == self.known["image_digest"].default:
            # The profile's pin is that of the profile's image, not of another one.
            image["digest"] = None
        elif settings["image_build"] in ("always", "on_stamp_change") and image["digest"]:
            # A registry's digest is never that of a build: the next run would go back to the published image.
            if image["digest"] != self.known["image_digest"].default:
                wanted = "never or when_unavailable beside image_digest"
                self.refuse("plan.image_pinned", "image_build", settings["image_build"], wanted, "drop image_digest, or do not build")
            image["digest"] = None
        if settings["image_build"] in ("always", "on_stamp_change") and settings["image_pull_policy"] == "always":
            # Each run would pull the published image over the one that was built, and build for an hour again.
            wanted = f"missing or never beside image_build={settings['image_build']}"
            self.refuse("plan.image_replaced", "image_pull_policy", "always", wanted, "set image_pull_policy=missing, or image_build=when_unavailable")
        self._check_recipe(settings)
        return image

    def _check_recipe(self, settings: _Settings) -> None:
        repository, commit = settings["image_recipe_repository"], settings["image_recipe_commit"]
        if repository and re.search(r"://[^/@]*:[^/@]*@", repository):
            # git would keep it on the head, in the configuration of the checkout.
            self.refuse(
                "plan.recipe", "image_recipe_repository", "an address with a password", "one without", "let git on the head ask an agent or a credential helper"
            )
        if repository and not re.fullmatch("[0-9a-f]{40}", commit or ""):
            self.refuse("plan.recipe", "image_recipe_commit", commit or "nothing", self.known["image_recipe_commit"].wanted, "set image_recipe_commit")


_ARTEFACT: dict[str, t.Any] = {
    "repository": None, "revision": None, "fallback_repositories": [], "include": [], "exclude": [], "required": [],
    "licence": {}, "size_bytes": None,
}  # fmt: skip
_IMAGE: dict[str, t.Any] = {"platform": None, "stamp_label": None}


@dataclasses.dataclass
class _Given:
    """What the user gave, converted."""

    group: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    node: dict[str, dict[str, t.Any]] = dataclasses.field(default_factory=dict)
    # Options whose value was refused, by host: what follows from them is not a second fault.
    refused: dict[str, set[str]] = dataclasses.field(default_factory=dict)


def _usable_address(text: str) -> str | None:
    try:
        # RoCE finds a node by the GID that holds its IPv4 address.
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return None
    if address.is_loopback or address.is_unspecified or address.is_multicast or address.is_link_local:
        return None
    return str(address)


def _preview(result: t.Mapping[str, t.Any]) -> dict[str, t.Any] | None:
    """Rank 0 as far as the inventory alone decides it."""
    if not result["nodes"] or set(result["addresses"]) != set(result["nodes"]) or not result["artefacts"]:
        return None
    return _rank_spec.rank_spec(result, 0, {name: placeholder_node(result, name) for name in result["nodes"]})


def placeholder_node(plan: t.Mapping[str, t.Any], name: str) -> dict[str, t.Any]:
    """A node of which only the inventory is known, for review without reaching it."""
    own = plan["node_settings"][name]
    state_root = plan["settings"]["serve_state_root"] or "/var/lib/sparkops"
    return {
        "state_dir": f"{state_root}/{plan['deployment']}",
        "weights_root": own["weights_root"] or f"{state_root}/weights",
        "fabric": {
            "address": plan["addresses"].get(name),
            "interface": own["fabric_interface"],
            "hcas": [name.lstrip("=") for name in own["fabric_hcas"] or []],
        },
    }


# What the container of a rank may read besides options; the values come from the node and the artefacts.
_RANK_NAMES = ("ranks", "node.state_dir", "node.cache_root", "node.weights_root", "node.home", "node.engram_packed_dir")


def _sizes(profile: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {f"model.{name}": size for name, size in (profile.get("model") or {}).items()}


def unknown_names(profile: t.Mapping[str, t.Any]) -> list[str]:
    """Placeholders and conditions of a profile that name nothing."""
    known = set(catalogue(profile)) | {"ranks"} | set(_sizes(profile))
    at_start = known | set(_RANK_NAMES) | {f"artefact.{name}" for name in profile.get("artefacts") or {}}
    found = []
    for part, value in profile.items():
        if part == "memory":
            # Its conditions are those of the memory budget, which knows names of its own.
            continue
        allowed = at_start if part in ("environment", "mounts", "arguments", "hooks") else known
        for name in sorted(language.placeholders(value) - allowed):
            found.append(f"{part} names {name}, which does not exist{language.near(name, allowed)}")
    return found
