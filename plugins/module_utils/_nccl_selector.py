# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""NCCL's selector of RDMA devices (``NCCL_IB_HCA``): parsed strictly, expanded to ports, written in exact form.

The grammar is ``[^][=]name[:port],...``. The two marks stand once, in that order, in front of the whole list: ``^``
turns the list into what is left out, ``=`` compares whole names; without ``=`` a name is a prefix. NCCL reads
a port with atoi, so that nonsense becomes "any port" in silence; here it is refused.
"""

from __future__ import annotations

import re
import typing as t

MAX_PORT = 255  # ports of an RDMA device are numbered with eight bits
NAME = re.compile(r"^[A-Za-z0-9_.-]+$")
PORT = re.compile(r"^[0-9]{1,3}$")

Port = t.Tuple[str, int]


class SelectorError(ValueError):
    """The text is no selector, or names what does not exist. The message is for the user."""


class Token(t.NamedTuple):
    name: str
    port: int | None  # None is any port


class Selector(t.NamedTuple):
    exclude: bool
    exact: bool
    tokens: tuple[Token, ...]


class Expansion(t.NamedTuple):
    """What a selector means on one node. ``named`` are the ports that the user asked for by their whole name."""

    ports: tuple[Port, ...]
    named: frozenset[Port]
    notices: tuple[str, ...]


def parse_token(text: str) -> Token:
    name, colon, port = (part.strip() for part in text.partition(":"))
    if not NAME.match(name):
        raise SelectorError(f"{text!r} is not a device name")
    if not colon:
        return Token(name, None)
    if not PORT.match(port) or not 1 <= int(port) <= MAX_PORT:
        raise SelectorError(f"{port!r} in {text!r} is not a port from 1 to {MAX_PORT}")
    return Token(name, int(port))


def parse(text: str) -> Selector:
    """Blanks around names, empty entries, and repeated entries are dropped; anything else that is odd is refused."""
    rest = text.strip()
    exclude = rest.startswith("^")
    rest = rest[1:].lstrip() if exclude else rest
    exact = rest.startswith("=")
    rest = rest[1:] if exact else rest
    tokens = tuple(dict.fromkeys(parse_token(entry) for entry in rest.split(",") if entry.strip()))
    if not tokens:
        raise SelectorError(f"{text!r} names no device")
    return Selector(exclude, exact, tokens)


def matches(token: Token, port: Port, whole: bool) -> bool:
    same = port[0] == token.name if whole else port[0].startswith(token.name)
    return same and token.port in (None, port[1])


def expand(selector: Selector, ports: t.Sequence[Port]) -> Expansion:
    """The ports of a node that are meant, in the node's order.

    A name that is a device of this node means that device alone, even without ``=``: NCCL would also take
    each device whose name begins with it, which is never what someone meant who wrote a whole name.
    """
    devices = {name for name, dummy in ports}
    hit: set[Port] = set()
    named: set[Port] = set()
    notices = []
    for token in selector.tokens:
        whole = selector.exact or token.name in devices
        found = {port for port in ports if matches(token, port, whole)}
        if not found:
            known = ", ".join(sorted(devices)) or "none"
            wanted = token.name if token.port is None else f"{token.name}:{token.port}"
            raise SelectorError(f"{wanted!r} matches no device; the devices are: {known}")
        longer = sorted(name for name in devices if name.startswith(token.name) and name != token.name)
        if whole and not selector.exact and longer:
            notices.append(f"{token.name} is taken as that one device; as a prefix it would also match {', '.join(longer)}")
        hit |= found
        if whole and not selector.exclude:
            named |= found
    kept = tuple(port for port in ports if (port in hit) != selector.exclude)
    return Expansion(kept, frozenset(named), tuple(notices))


def emit(ports: t.Sequence[Port], port_counts: t.Mapping[str, int]) -> str:
    """The exact form for NCCL; a port number stands only where the device has several. Nothing selected is an empty string."""
    names = [name if port_counts.get(name, 1) == 1 else f"{name}:{port}" for name, port in ports]
    return "=" + ",".join(names) if names else ""
