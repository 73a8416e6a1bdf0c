# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From mDNS answers, neighbours, and host keys to machines and an inventory."""

from __future__ import annotations

import struct

import yaml
from ansible_collections.sparkops.inference.plugins.module_utils import _discover
from ansible_collections.sparkops.inference.plugins.module_utils._discover import Sighting
from hypothesis import given
from hypothesis import strategies as st

FABRIC = ["enp1s0f1np1", "enP2p1s0f1np1"]
SEED = {"name": "spark-1", "address": "192.0.2.21", "user": "alice"}


def facts(rail_one="198.51.100.11", rail_two="203.0.113.11", ports=True):
    def interface(name, address, carrier=True, kind="ethernet"):
        return {"name": name, "kind": kind, "carrier": carrier, "addresses": [{"address": address, "prefix": 24}] if address else []}

    return {
        "interfaces": [
            interface("lo", "127.0.0.1", kind="loopback"), interface("enP7s7", "192.0.2.21"), interface("docker0", "172.17.0.1", kind="bridge"),
            interface(FABRIC[0], rail_one), interface(FABRIC[1], rail_two), interface("enp1s0f0np0", "", carrier=False),
        ],
        "ports": [
            {"interface": FABRIC[0], "state": "ACTIVE"}, {"interface": FABRIC[1], "state": "ACTIVE"}, {"interface": "enp1s0f0np0", "state": "DOWN"},
        ] if ports else [],
        "default_interface": "enP7s7",
    }


def answer(*records):
    """An answer with names in full; (name, type, payload)."""
    body = b"".join(_discover.encode_name(name) + struct.pack("!2HIH", kind, 0x8001, 120, len(data)) + data for name, kind, data in records)
    return struct.pack("!6H", 0, 0x8400, 0, len(records), 0, 0) + body


def service_answer(host, address):
    instance = f"{host}._ssh._tcp.local"
    return answer(
        ("_ssh._tcp.local", _discover.TYPE_PTR, _discover.encode_name(instance)),
        (instance, _discover.TYPE_SRV, struct.pack("!3H", 0, 0, 22) + _discover.encode_name(f"{host}.local")),
        (f"{host}.local", _discover.TYPE_A, bytes(map(int, address.split(".")))),
    )


def test_the_query_is_a_plain_one_shot():
    packet = _discover.mdns_query(("_ssh._tcp.local",), _discover.TYPE_PTR)
    assert packet == b"\0\0\0\0\0\1\0\0\0\0\0\0" + b"\4_ssh\4_tcp\5local\0" + b"\0\x0c\0\1"


def test_answers_are_read_with_names_in_short_form():
    # As avahi packs them: names point back into the packet.
    head = struct.pack("!6H", 0, 0x8400, 0, 1, 0, 2)
    name = b"\4_ssh\4_tcp\5local\0"  # at 12; "local" at 22
    pointer = head + name + struct.pack("!2HIH", 12, 1, 10, 14) + b"\x0bspark-2 [x]\xc0\x0c"
    target = len(pointer)
    host = b"\7spark-2\xc0\x16"
    packet = pointer + b"\xc0\x0c" + struct.pack("!2HIH", 33, 1, 10, 6 + len(host)) + struct.pack("!3H", 0, 0, 22) + host
    packet += struct.pack("!H", 0xC000 | (target + 2 + 10 + 6)) + struct.pack("!2HIH", 1, 1, 10, 4) + bytes([192, 0, 2, 22])
    assert _discover.mdns_hosts([packet]) == {"spark-2": {"192.0.2.22"}}


def test_a_name_that_is_no_host_name_never_gets_into_an_inventory():
    assert _discover.mdns_hosts([service_answer("a b: {{ x }}", "192.0.2.22")]) == {}


@given(st.binary(max_size=200))
def test_any_packet_is_read_or_ignored(packet):
    _discover.mdns_records(packet)
    _discover.mdns_records(b"\0\0\x84\0\0\0\0\2\0\0\0\0" + packet)


def test_a_name_that_points_at_itself_ends():
    packet = struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + b"\xc0\x0c" + struct.pack("!2HIH", 1, 1, 10, 4) + b"\1\2\3\4"
    assert _discover.mdns_records(packet) == []


def test_fabric_interfaces_are_those_of_rdma_ports_with_a_link_else_the_wired_ones_beside_the_outside():
    assert _discover.fabric_interfaces(facts()) == FABRIC
    assert _discover.fabric_interfaces(facts(ports=False)) == FABRIC


def test_a_wide_network_is_not_searched():
    assert len(_discover.sweep_addresses("198.51.100.11", 24)) == 253
    assert _discover.sweep_addresses("10.0.0.1", 16) == []
    assert _discover.sweep_addresses("198.51.100.11", 31) == ["198.51.100.10"]


def test_only_neighbours_that_answered_count():
    entries = [
        {"dst": "198.51.100.12", "lladdr": "52:54:00:00:00:02", "state": ["REACHABLE"]}, {"dst": "198.51.100.13", "state": ["FAILED"]},
        {"dst": "198.51.100.14", "lladdr": "52:54:00:00:00:04", "state": ["FAILED"]}, {"dst": "198.51.100.15", "state": ["INCOMPLETE"]},
    ]
    assert _discover.answering_neighbours(entries) == ["198.51.100.12"]


def test_replies_to_all_nodes_and_host_keys_are_read():
    ping = "PING ff02::1(ff02::1) from fe80::1%eth1: 56 data bytes\n64 bytes from fe80::1%eth1: icmp_seq=1 ttl=64\n"
    ping += "64 bytes from fe80::2%eth1: icmp_seq=1 ttl=64 (DUP!)\n"
    assert _discover.link_local_replies(ping)[-1] == "fe80::2"
    scan = "# 192.0.2.22:22 SSH-2.0\n192.0.2.22 ssh-ed25519 AAAA\n[192.0.2.23] ssh-ed25519 BBBB\nfe80::2%eth1 ssh-ed25519 AAAA\nnonsense\n"
    assert _discover.parse_keyscan(scan) == {"192.0.2.22": "ssh-ed25519 AAAA", "192.0.2.23": "ssh-ed25519 BBBB", "fe80::2%eth1": "ssh-ed25519 AAAA"}


def look(*sightings, own=("192.0.2.21", "198.51.100.11", "203.0.113.11"), own_key="key 1"):
    return _discover.machines(sightings, FABRIC, "enP7s7", own, own_key)


PEER = (
    Sighting("192.0.2.22", "enP7s7", "spark-2", "key 2"), Sighting("198.51.100.12", FABRIC[0], "", "key 2"), Sighting("203.0.113.12", FABRIC[1], "", "key 2"),
)


def test_addresses_with_one_host_key_are_one_machine():
    found = look(*PEER, Sighting("192.0.2.7", "enP7s7", "nas", "key 7"), Sighting("192.0.2.21", "enP7s7", "spark-1", "key 1"))
    assert [(one.name, one.management, one.fabric) for one in found] == [
        ("spark-2", "192.0.2.22", {FABRIC[0]: "198.51.100.12", FABRIC[1]: "203.0.113.12"}), ("nas", "192.0.2.7", {}),
    ]


def test_without_keys_the_name_of_mdns_holds_the_addresses_together():
    found = look(Sighting("192.0.2.22", "enP7s7", "spark-2", ""), Sighting("198.51.100.12", FABRIC[0], "spark-2", ""), own_key="")
    assert [(one.name, one.management, one.fabric) for one in found] == [("spark-2", "192.0.2.22", {FABRIC[0]: "198.51.100.12"})]


def test_the_asking_machine_is_not_found_under_its_own_key():
    assert look(Sighting("fe80::9%enp1s0f1np1", FABRIC[0], "", "key 1")) == []


def test_the_inventory_has_both_addresses_and_the_asked_machine_as_head():
    text = _discover.inventory(SEED, look(*PEER, Sighting("192.0.2.7", "enP7s7", "nas", "key 7")), facts())
    group = yaml.safe_load(text)["sparks"]
    assert group["hosts"] == {
        "spark-1": {"ansible_host": "192.0.2.21", "ansible_user": "alice", "fabric_address": "198.51.100.11"},
        "spark-2": {"ansible_host": "192.0.2.22", "ansible_user": "alice", "fabric_address": "198.51.100.12"},
    }
    assert group["vars"] == {"serve_nodes": ["spark-1", "spark-2"]}
    assert "# Not on the fabric, so left out: nas at 192.0.2.7" in text


def test_a_cable_without_addresses_is_told_and_no_address_is_invented():
    text = _discover.inventory(SEED, look(Sighting("192.0.2.22", "enP7s7", "spark-2", "key 2"), Sighting("fe80::2%enp1s0f1np1", FABRIC[0], "", "key 2")),
                               facts(rail_one="", rail_two=""))
    hosts = yaml.safe_load(text)["sparks"]["hosts"]
    assert hosts["spark-2"] == {"ansible_host": "192.0.2.22", "ansible_user": "alice"}
    assert "no IPv4 address there" in text and text.count("# fabric_address: none yet") == 2


def test_a_machine_that_only_the_fabric_shows_needs_its_address_filled_in():
    text = _discover.inventory(SEED, look(Sighting("198.51.100.12", FABRIC[0], "", "key 2")), facts())
    assert yaml.safe_load(text)["sparks"]["hosts"]["spark-2"] == {"ansible_user": "alice", "fabric_address": "198.51.100.12"}
    assert "# ansible_host: not found" in text


def test_nobody_there_is_said_with_what_to_look_at():
    assert "No machine was found on the fabric (enp1s0f1np1, enP2p1s0f1np1)" in _discover.inventory(SEED, [], facts())


@given(st.lists(st.sampled_from(["", "spark-1", "spark-2", "spark-3", "a"]), min_size=1, max_size=6))
def test_no_two_machines_share_a_name(names):
    found = _discover.unique_names(names)
    assert len(set(found)) == len(names) and all(found)
