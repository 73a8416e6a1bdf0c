# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Tests of the fabric between nodes: R3 (MTU), R13 (ports), A13, A29. On loopback, and as root between two network namespaces."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.module_utils import _probe
from ansible_collections.sparkops.inference.plugins.modules import fabric_probe

RAIL = {"interface": "enp1s0f0np0", "mtu": 9000, "peer": "spark-1", "peer_interface": "enp1s0f1np1", "peer_address": "198.51.100.11"}


# --- what is said ----------------------------------------------------------------------------------------------


def test_ping_commands_to_the_letter():
    whole = "ping -n -q -c 2 -i 0.2 -W 1 -M do -s 8972 -I enp1s0f0np0 198.51.100.11"
    small = "ping -n -q -c 2 -i 0.2 -W 1 -s 56 -I enp1s0f0np0 198.51.100.11"
    assert _probe.ping_command("enp1s0f0np0", "198.51.100.11", 9000) == whole.split()
    assert _probe.ping_command("enp1s0f0np0", "198.51.100.11", None) == small.split()


@pytest.mark.parametrize(("large", "small", "wanted"), [(True, True, None), (False, True, "fabric.rail_mtu"), (False, False, "fabric.rail_silent")])
def test_rail_verdicts(large, small, wanted):
    refusal = _probe.judge_rail("spark-2", RAIL, large, small, "message too long, mtu=1500")
    assert (refusal.id if refusal else None) == wanted
    if refusal:
        assert "rail enp1s0f0np0 to enp1s0f1np1 of spark-1 (198.51.100.11)" in refusal.text and "mtu=1500" in refusal.text


@pytest.mark.parametrize(("small", "wanted"), [(True, None), (False, "fabric.rail_silent")])
def test_a_rail_of_unknown_mtu_is_only_tested_for_an_answer(small, wanted):
    refusal = _probe.judge_rail("spark-2", {**RAIL, "mtu": None}, False, small, "MTU unknown")
    assert (refusal.id if refusal else None) == wanted


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (errno.ECONNREFUSED, "refused"),
        (errno.ETIMEDOUT, "filtered"),
        (errno.EHOSTUNREACH, "no_route"),
        (errno.ENETUNREACH, "no_route"),
        (errno.EPERM, "filtered"),
        (errno.EADDRNOTAVAIL, "local"),
    ],
)
def test_errors_are_told_apart(number, state):
    assert _probe.classify(OSError(number, "x")).state == state
    assert _probe.classify(socket.timeout("timed out")).state == "filtered"


@pytest.mark.parametrize(
    ("state", "pings", "part"),
    [
        ("filtered", True, "allow TCP"),
        ("refused", True, "a filter on spark-1 rejects it"),
        ("no_route", True, "since ping does pass"),
        ("no_route", False, "check fabric addresses"),
        ("foreign", True, "serve_rendezvous_port"),
        ("local", True, "check the fabric address of spark-2"),
    ],
)
def test_each_state_has_its_next_step(state, pings, part):
    (refusal,) = _probe.judge_meeting("spark-2", "spark-1", "198.51.100.11", 29521, _probe.Answer(state, "detail"), pings)
    assert refusal.id == f"fabric.meeting_{state}" and part in refusal.next_step and refusal.node == "spark-2"


@pytest.mark.parametrize(("clock", "refusals", "notices"), [(0.0, 0, 0), (1.9, 0, 0), (-5.0, 0, 1), (400.0, 1, 0), (-400.0, 1, 0)])
def test_clock_difference_seen_by_the_probe(clock, refusals, notices):
    answer = _probe.Answer("open", "", clock)
    assert len(_probe.judge_meeting("spark-2", "spark-1", "198.51.100.11", 29521, answer, True)) == refusals
    assert len(_probe.meeting_notices("spark-1", answer)) == notices


@pytest.mark.parametrize(("theirs", "wanted"), [(100.5, 0.0), (100.0, 0.0), (101.0, 0.0), (98.0, -2.0), (104.0, 3.0)])
def test_only_the_certain_part_of_a_difference_counts(theirs, wanted):
    assert _probe.certain_offset(theirs, 100.0, 101.0) == wanted


# --- on loopback -----------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    """The real listener in a thread; ends with the test."""
    bound = _probe.open_listener("127.0.0.1", 0)
    port = bound.getsockname()[1]
    thread = threading.Thread(target=_probe.serve, args=(bound, 20))
    thread.start()
    yield port
    _probe.ask("127.0.0.1", port, "stop")
    thread.join(10)
    assert not thread.is_alive()


def test_the_listener_answers_several_and_tells_its_time(listener):
    for dummy in range(3):
        answer = _probe.ask("127.0.0.1", listener, source="127.0.0.1")
        assert (answer.state, answer.clock) == ("open", 0.0)


def test_strangers_get_nothing_and_do_no_harm(listener):
    with socket.create_connection(("127.0.0.1", listener)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(10) == b""
    assert _probe.ask("127.0.0.1", listener).state == "open"


def test_a_closed_port_is_refused_and_stop_frees_it():
    bound = _probe.open_listener("127.0.0.1", 0)
    port = bound.getsockname()[1]
    thread = threading.Thread(target=_probe.serve, args=(bound, 20))
    thread.start()
    _probe.ask("127.0.0.1", port, "stop")
    thread.join(10)
    assert _probe.ask("127.0.0.1", port).state == "refused"
    _probe.open_listener("127.0.0.1", port).close()


def test_the_listener_ends_by_itself():
    bound = _probe.open_listener("127.0.0.1", 0)
    started = time.monotonic()
    _probe.serve(bound, 0.3)
    assert 0.25 < time.monotonic() - started < 5


def test_a_listener_of_an_earlier_run_is_replaced(listener):
    _probe.open_listener("127.0.0.1", listener).close()


def test_another_service_is_foreign():
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()

        def reply():
            connection = foreign.accept()[0]
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=reply)
        thread.start()
        assert _probe.ask("127.0.0.1", foreign.getsockname()[1]).state == "foreign"
        thread.join()


def run(capsys, **args):
    with patch_module_args(args), pytest.raises(SystemExit):
        fabric_probe.main()
    return json.loads(capsys.readouterr().out)


def test_a_port_that_something_else_holds_is_refused_with_a_way_to_find_it(capsys):
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))  # bound, not listening: a stop is refused at once
        port = foreign.getsockname()[1]
        found = run(capsys, state="listening", node="spark-1", address="127.0.0.1", port=port)
    assert found["refusals"][0]["id"] == "fabric.meeting_held" and f"sport = :{port}" in found["msg"]


@pytest.mark.parametrize("check", [False, True])
def test_the_module_leaves_a_listener_and_takes_it_away(capsys, check):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"node": "spark-1", "address": "127.0.0.1", "port": port, "_ansible_check_mode": check}
    child = os.fork()
    if child == 0:  # the module forks, and must not do so from the test runner itself
        try:
            with patch_module_args({"state": "listening", "seconds": 20, **common}):
                fabric_probe.main()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    meeting = {"name": "spark-1", "address": "127.0.0.1", "port": port}
    found = run(capsys, state="probed", node="spark-2", address="127.0.0.1", meeting=meeting, _ansible_check_mode=check)
    assert found["meeting"] == {"state": "open", "detail": "", "clock": 0.0} and found["changed"] is False
    assert run(capsys, state="stopped", **common)["changed"] is False
    until = time.monotonic() + 30  # it closes after its answer
    while not (message := run(capsys, state="probed", node="spark-2", address="127.0.0.1", meeting=meeting).get("msg", "")) and time.monotonic() < until:
        time.sleep(0.05)
    assert "fabric.meeting_refused" in message


def test_pings_run_to_the_letter_and_all_faults_are_one_failure(capsys, monkeypatch):
    calls = []

    def run_command(module, command, **dummy):
        calls.append(" ".join(command))
        return (1, "", "ping: local error: message too long, mtu=1500") if "8972" in command else (0, "2 received", "")

    monkeypatch.setattr(fabric_probe.AnsibleModule, "run_command", run_command)
    monkeypatch.setattr(fabric_probe.AnsibleModule, "get_bin_path", lambda *dummy: "/bin/ping")
    second = {**RAIL, "interface": "enP2p1s0f0np0", "peer_interface": "enP2p1s0f1np1", "peer_address": "203.0.113.11"}
    found = run(capsys, state="probed", node="spark-2", address="198.51.100.12", rails=[RAIL, second])
    assert len(calls) == 4 and "-I enP2p1s0f0np0 203.0.113.11" in calls[2]
    assert [refusal["id"] for refusal in found["refusals"]] == ["fabric.rail_mtu", "fabric.rail_mtu"]
    assert "message too long, mtu=1500" in found["msg"] and [rail["small"] for rail in found["rails"]] == [True, True]


def test_without_ping_nothing_is_claimed(capsys, monkeypatch):
    monkeypatch.setattr(fabric_probe.AnsibleModule, "get_bin_path", lambda *dummy: None)
    found = run(capsys, state="probed", node="spark-2", address="198.51.100.12", rails=[RAIL])
    assert "ping is not installed" in found["notices"][0] and found["rails"] == []


# --- between two network namespaces ----------------------------------------------------------------------------

NEEDS = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "ping", "iptables"))
HEAD, WORKER = "198.51.100.11", "198.51.100.12"


def sh(text: str) -> None:
    subprocess.run(text.split(), check=True, capture_output=True)


def inside(namespace: str, function, *args):
    """Call a function in a namespace, in a process of its own, and bring back what it returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with open(f"/var/run/netns/{namespace}", "rb") as handle:
                if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0):
                    os._exit(1)
            os.write(writer, json.dumps(function(*args)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return json.loads(found)


@pytest.fixture
def wire():
    """Two namespaces with a veth between them, MTU 9000. Yields their names, head first."""
    if not NEEDS:
        pytest.skip("needs root, ip, ping, and iptables")
    mark = uuid.uuid4().hex[:6]
    names = [f"fab-{mark}-a", f"fab-{mark}-b"]
    try:
        for name in names:
            sh(f"ip netns add {name}")
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces cannot be made here")
    try:
        sh(f"ip link add eth1 mtu 9000 netns {names[0]} type veth peer name eth1 mtu 9000 netns {names[1]}")
        for name, address in zip(names, (HEAD, WORKER)):
            sh(f"ip -n {name} address add {address}/24 dev eth1")
            sh(f"ip -n {name} link set eth1 up")
            sh(f"ip -n {name} link set lo up")
        yield names
    finally:
        for name in names:
            sh(f"ip netns del {name}")


def pings(namespace: str, target: str, mtu: int) -> bool:
    return inside(namespace, lambda: subprocess.run(_probe.ping_command("eth1", target, mtu), capture_output=True, check=False).returncode) == 0


def ask_head(namespace: str) -> _probe.Answer:
    return _probe.Answer(*inside(namespace, lambda: list(_probe.ask(HEAD, 29521, source=WORKER))))


@pytest.fixture
def meeting(wire):
    """A listener on the head that lives as long as the test."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open(f"/var/run/netns/{wire[0]}", "rb") as handle:
            ctypes.CDLL(None).setns(handle.fileno(), 0)
        listener = _probe.open_listener(HEAD, 29521)
        os.write(writer, b".")
        _probe.serve(listener, 60)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read(1)
    yield wire
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_full_size_packets_pass_both_ways(wire):
    assert pings(wire[0], WORKER, 9000) and pings(wire[1], HEAD, 9000)


def test_one_end_at_1500_is_seen_from_both_and_repaired(wire):
    sh(f"ip -n {wire[1]} link set eth1 mtu 1500")
    assert not pings(wire[0], WORKER, 9000)  # too large for the other end
    assert not pings(wire[1], HEAD, 9000)  # too large for its own
    assert pings(wire[0], WORKER, 1500)
    sh(f"ip -n {wire[1]} link set eth1 mtu 9000")
    assert pings(wire[0], WORKER, 9000) and pings(wire[1], HEAD, 9000)


def test_open(meeting):
    assert ask_head(meeting[1]).state == "open"


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        ("-j DROP", "filtered"),
        ("-j REJECT --reject-with tcp-reset", "refused"),
        ("-j REJECT --reject-with icmp-host-prohibited", "no_route"),
    ],
)
def test_filters_are_told_apart(meeting, rule, state):
    command = f"iptables -w -A INPUT -p tcp --dport 29521 {rule}".split()
    if inside(meeting[0], lambda: subprocess.run(command, capture_output=True, check=False).returncode):
        pytest.skip("this kernel has no such filter")
    assert ask_head(meeting[1]).state == state


def test_nothing_listening_is_refused(wire):
    assert ask_head(wire[1]).state == "refused"


def test_no_route(meeting):
    sh(f"ip -n {meeting[1]} route del 198.51.100.0/24 dev eth1")
    assert ask_head(meeting[1]).state == "no_route"


def test_a_cable_that_is_out_is_no_route_or_silence(meeting):
    sh(f"ip -n {meeting[0]} link set eth1 down")
    assert ask_head(meeting[1]).state in ("no_route", "filtered")
