# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The netplan file of the fabric rails as text, who else configures the same interfaces, and the program that takes a change back."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
import shlex
import typing as t

HEADER = "# Written by role fabric of sparkops.inference; changes are lost. The play fabric_restore takes it back.\n"
# NVIDIA Sync disables other netplan files, so that a file of ours beside it would be in vain.
NVIDIA_SYNC = re.compile(r"^\d+-nvidia-sync.*\.yaml$")
INTERFACE = re.compile(r"^[A-Za-z0-9_.-]{1,15}$")


class NetplanError(ValueError):
    """A rail that cannot be written. The message is for the user."""


def render(rails: t.Mapping[str, t.Sequence[str]], mtu: int) -> str:
    """The file for interface -> addresses with prefix length.

    No IPv6 at all: a link-local address of the stable-privacy kind pushes the IPv4 GIDs to other slots. Optional: a boot
    must not wait for a cable.
    """
    if not rails:
        raise NetplanError("no rail: none was found, and fabric_rail_addresses names none")
    lines = [HEADER, "network:\n  version: 2\n  ethernets:\n"]
    for name, addresses in sorted(rails.items()):
        check_rail(name, addresses)
        lines.append(f"    {name}:\n      optional: true\n      dhcp4: false\n      dhcp6: false\n      accept-ra: false\n      link-local: []\n")
        lines.append(f"      mtu: {mtu}\n      addresses:\n")
        lines += [f"        - {address}\n" for address in addresses]
    return "".join(lines)


def check_rail(name: str, addresses: t.Sequence[str]) -> None:
    if not INTERFACE.match(name):
        raise NetplanError(f"{name!r} is not an interface name")
    if not addresses:
        raise NetplanError(f"{name} has no address")
    for address in addresses:
        try:
            ipaddress.IPv4Interface(address)
        except ValueError as exc:
            raise NetplanError(f"{name}: {exc}") from exc
        if "/" not in address:
            raise NetplanError(f"{name}: {address} lacks the prefix length (such as /24)")


def missing_interfaces(rails: t.Iterable[str], links: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    return sorted(set(rails) - {link.get("ifname") for link in links})


def addresses_of(link: t.Mapping[str, t.Any]) -> list[str]:
    return [f"{entry['local']}/{entry['prefixlen']}" for entry in link.get("addr_info", []) if entry.get("family") == "inet"]


def drift(rails: t.Mapping[str, t.Sequence[str]], mtu: int, links: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """How the running interfaces (of ``ip -json address``) differ from the file: a driver reset or a hand may have changed them."""
    found = []
    for link in links:
        name = link.get("ifname", "")
        if name not in rails:
            continue
        if link.get("mtu") != mtu:
            found.append(f"{name} runs with MTU {link.get('mtu')}")
        found += [f"{name} runs without {address}" for address in rails[name] if address not in addresses_of(link)]
    return sorted(found)


def default_route_interfaces(text: str) -> set[str]:
    """Interfaces of default routes, from /proc/net/route."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"}


def names_interface(text: str, name: str, mac: str) -> bool:
    """Whether a netplan file speaks of an interface: by its name, as NetworkManager's files do below ``match``, by a pattern, or by its hardware address."""
    code = re.sub(r"(?m)(?:^|\s)#.*$|\blink[\"']?:\s*[^\s,}]+", "", text)  # a VLAN on top leaves the interface itself as it is
    if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", code):
        return True
    patterns = re.findall(r"\bname[\"']?:\s*[\"']?([\w.*?\[\]!-]+)", code)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) or bool(mac) and mac.lower() in code.lower()


def foreign_files(
    texts: t.Mapping[str, str], own: str, interfaces: t.Iterable[str], links: t.Sequence[t.Mapping[str, t.Any]] = ()
) -> list[str]:
    """Files other than ours that configure one of the interfaces, and why. ``links`` (of ``ip -json address``) have the hardware addresses."""
    macs = {link.get("ifname", ""): link.get("address", "") for link in links}
    found = []
    for name, text in sorted(texts.items()):
        if name == own:
            continue
        hit = [interface for interface in sorted(interfaces) if names_interface(text, interface, macs.get(interface, ""))]
        if NVIDIA_SYNC.match(name):
            found.append(f"{name} (NVIDIA Sync, which disables other netplan files)")
        elif hit:
            found.append(f"{name} ({', '.join(hit)})")
    return found


def return_program(
    path: str, previous: str, rails: t.Mapping[str, t.Sequence[str]], links: t.Sequence[t.Mapping[str, t.Any]], mark: str
) -> str:
    """A shell program that puts the earlier state back: the previous file or none, and what the rails ran with (``ip -json address``).

    The new addresses go first and by hand: one of them may be what cuts the node off, and not every renderer takes them away. The mark
    of an unconfirmed change goes last.
    """
    own, before = shlex.quote(path), shlex.quote(previous)
    had = {link["ifname"]: link for link in links if link.get("ifname") in rails}
    lines = ["#!/bin/sh", "# Takes back a change of the fabric's netplan file.", f"rm -f {own}", f"if [ -e {before} ]; then cp -p {before} {own}; fi"]
    for name, link in sorted(had.items()):
        lines += [f"ip address del {address} dev {name}" for address in rails[name] if address not in addresses_of(link)]
    lines.append("netplan apply")
    for name, link in sorted(had.items()):
        lines.append(f"ip link set dev {name} mtu {link['mtu']}")
        lines += [f"ip address replace {address} dev {name}" for address in addresses_of(link)]
    return "\n".join([*lines, f"rm -f {shlex.quote(mark)}"]) + "\n"


def join_changes(first: t.Mapping[str, t.Any], rails: t.Mapping[str, t.Sequence[str]], links: t.Sequence[t.Mapping[str, t.Any]]) -> dict[str, t.Any]:
    """A change on top of an unconfirmed one: every address that was given since, and each link as it was before the first that touched it."""
    known = {link["ifname"] for link in first["links"]}
    return {
        "rails": {name: sorted({*first["rails"].get(name, ()), *rails.get(name, ())}) for name in {**first["rails"], **rails}},
        "links": [*first["links"], *(link for link in links if link["ifname"] not in known)],
    }
