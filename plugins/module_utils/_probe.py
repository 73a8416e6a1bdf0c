# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Tests of the fabric between nodes: packets of full size on each rail, and the port where the ranks will meet.

The meeting port is tested with a listener of our own on the head: it answers each line with the head's time, so that one round trip
tells reachability and clock difference. It ends by itself, and at the first "stop".
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._parity import CLOCK_REFUSE_SECONDS, CLOCK_WARN_SECONDS, clock_notice, clock_refusal
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

IP_AND_ICMP_HEADERS = 28
SMALL_PAYLOAD = 56
GREETING = b"sparkops-fabric-probe "
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 3.0
MAX_LINE = 256
MEETING_REFUSALS = {
    "refused": ("fabric.meeting_refused", "refused"),
    "filtered": ("fabric.meeting_filtered", "filtered"),
    "no_route": ("fabric.meeting_no_route", "no route"),
    "foreign": ("fabric.meeting_foreign", "not ours"),
    "local": ("fabric.meeting_local", "not tried"),
}


class Answer(t.NamedTuple):
    """Outcome of a connection: ``state`` is open, refused, filtered, no_route, local, or foreign."""

    state: str
    detail: str
    clock: float | None = None  # seconds that the other node is certainly ahead of this one


# --- full-size packets -----------------------------------------------------------------------------------------


def ping_command(interface: str, address: str, mtu: int | None) -> list[str]:
    """A ping out of one interface that may not be cut into fragments; without MTU a small one."""
    whole = ["-M", "do", "-s", str(mtu - IP_AND_ICMP_HEADERS)] if mtu else ["-s", str(SMALL_PAYLOAD)]
    return ["ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "1", *whole, "-I", interface, address]


def judge_rail(node: str, rail: t.Mapping[str, t.Any], large: bool, small: bool, detail: str) -> Refusal | None:
    """What two pings say about a rail. Without a known MTU there is no full size to ask for."""
    if large or (small and not rail.get("mtu")):
        return None
    way = f"rail {rail['interface']} to {rail['peer_interface']} of {rail['peer']} ({rail['peer_address']})"
    if small:
        return Refusal(
            "fabric.rail_mtu", node, way, f"small packets pass, unfragmented ones of {rail['mtu']} bytes do not ({detail})", f"MTU {rail['mtu']} all the way",
            "set the same MTU on both ends and on the switch between them",
        )
    return Refusal(
        "fabric.rail_silent", node, way, f"no answer to ping ({detail})", "an answer within a second",
        "check that this cable joins these two ports (the play doctor shows them), and that no filter drops ICMP; to skip this test set fabric_probe to never",
    )


# --- the meeting port ------------------------------------------------------------------------------------------


def open_listener(address: str, port: int) -> socket.socket:
    """Bind, in place of a listener of an earlier run if one is left. Raises OSError when something else holds the port."""
    try:
        return bound_socket(address, port)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE or ask(address, port, "stop").state != "open":
            raise
        time.sleep(0.2)
        return bound_socket(address, port)


def bound_socket(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def serve(listener: socket.socket, seconds: float) -> None:
    """Answer until told to stop or until the time is over."""
    end = time.monotonic() + seconds
    stopped = False
    while not stopped and time.monotonic() < end:
        listener.settimeout(max(0.05, end - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except OSError:
            continue
        with connection:
            stopped = answer_one(connection)
    listener.close()


def answer_one(connection: socket.socket) -> bool:
    """Answer one line with our time; true when the line is a stop."""
    connection.settimeout(ANSWER_SECONDS)
    try:
        line = connection.recv(MAX_LINE)
        if not line.startswith(GREETING):
            return False
        connection.sendall(json.dumps({"probe": 1, "time": time.time()}).encode() + b"\n")
        # The client closes first: the side that does keeps the port in TIME_WAIT, and here the engine will want it.
        connection.recv(1)
    except OSError:
        return False
    return line[len(GREETING) :].strip() == b"stop"


def ask(address: str, port: int, verb: str = "hello", source: str = "") -> Answer:
    """Connect, say one line, and tell what came of it."""
    client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    client.settimeout(CONNECT_SECONDS)
    try:
        if source:
            client.bind((source, 0))
        client.connect((address, port))
    except OSError as exc:
        client.close()
        return classify(exc)
    with client:
        try:
            client.settimeout(ANSWER_SECONDS)
            before = time.time()
            client.sendall(GREETING + verb.encode() + b"\n")
            reply = json.loads(client.recv(MAX_LINE) or b"null")
            after = time.time()
        except (OSError, ValueError):
            return Answer("foreign", "another service answers there")
    if not isinstance(reply, dict) or reply.get("probe") != 1:
        return Answer("foreign", "another service answers there")
    return Answer("open", "", certain_offset(float(reply["time"]), before, after))


def certain_offset(theirs: float, before: float, after: float) -> float:
    """Seconds that the other clock is ahead; 0 where its time lies within the round trip."""
    return theirs - before if theirs < before else max(0.0, theirs - after)


def classify(error: OSError) -> Answer:
    """Which of the ways not to reach a port this is."""
    detail = os.strerror(error.errno) if error.errno else str(error)
    if isinstance(error, socket.timeout):
        return Answer("filtered", f"no reaction within {CONNECT_SECONDS:.0f} s")
    if error.errno == errno.ECONNREFUSED:
        return Answer("refused", detail)
    if error.errno == errno.ETIMEDOUT:
        return Answer("filtered", detail)
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETDOWN):
        return Answer("no_route", detail)
    if error.errno in (errno.EPERM, errno.EACCES):
        return Answer("filtered", f"{detail}, from this node's own filter")
    return Answer("local", detail)


def judge_meeting(node: str, head: str, address: str, port: int, answer: Answer, pings: bool) -> list[Refusal]:
    """What a worker's connection to the head says; ``pings`` is whether the head answers to ping on that rail."""
    thing = f"port {port} of {head} ({address})"
    filtered = f"allow TCP from the fabric network on {head}, on the fabric interface only, for all ports: the ranks open further ones"
    next_steps = {
        "refused": f"a filter on {head} rejects it, or another machine has this address: {filtered}",
        "filtered": filtered,
        # Many filters reject with "host unreachable", which reads as a missing route although ping passes.
        "no_route": f"a filter rejects it, since ping does pass: {filtered}" if pings else "check fabric addresses, prefix lengths, and the cable",
        "foreign": f"find what listens there (ss -ltnp on {head}), or choose another serve_rendezvous_port",
        "local": f"check the fabric address of {node}",
    }
    if answer.state != "open":
        id, word = MEETING_REFUSALS[answer.state]
        return [Refusal(id, node, thing, f"{word} ({answer.detail})", "a connection over the fabric", next_steps[answer.state])]
    if answer.clock is not None and abs(answer.clock) > CLOCK_REFUSE_SECONDS:
        return [clock_refusal(node, head, abs(answer.clock))]
    return []


def meeting_notices(head: str, answer: Answer) -> list[str]:
    skew = abs(answer.clock or 0.0)
    return [clock_notice(head, skew)] if CLOCK_WARN_SECONDS < skew <= CLOCK_REFUSE_SECONDS else []
