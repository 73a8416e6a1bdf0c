# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From selector and cabling to devices: R2, A5, A7 to A12, A16, A18, A19, A23 to A25, A28, K6, and the shapes of issue 4."""

from __future__ import annotations

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils._fabric import Choice, plan_fabric

from fabric_trees import DATA, SEED_ADDRESSES, Machine, links_from_brief, put, seed_pair, spark, table_of

PEER_PAIR = ["rocep1s0f1", "roceP2p1s0f1"]


def plan(machines, addresses=None, choices=None, **kwargs):
    facts = {name: machine.facts() for name, machine in machines.items()}
    return plan_fabric(list(machines), facts, addresses or SEED_ADDRESSES, choices, **kwargs)


def ids(found):
    return [(refusal.node, refusal.id) for refusal in found.refusals]


def texts(found, name):
    return "\n".join(found.nodes[name]["notices"])


# --- R2 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path):
    """The machine of R2 as spark-1: port 1 cabled to the peer, a PC at port 0 of half one, the default route on Wi-Fi."""
    node = spark(tmp_path / "spark-1", {1: ("198.51.100.11/24", "203.0.113.11/24")})
    node.interface("enp1s0f0np0", "192.0.2.40/24", driver="mlx5_core")
    put(node.root / "sys/class/infiniband/rocep1s0f0/ports/1/state", "4: ACTIVE")
    node.routes.clear()
    node.interface("wlP9s9", "192.0.2.77/24", mtu=1500).default_route("wlP9s9", "192.0.2.1")
    node.interface("lo", "127.0.0.1/8")
    peer = spark(tmp_path / "spark-2", {1: ("198.51.100.12/24", "203.0.113.12/24")})
    return {"spark-1": node, "spark-2": peer}


BOTH = "=rocep1s0f1,roceP2p1s0f1"
ONE = "=rocep1s0f1"


@pytest.mark.parametrize(
    ("hcas", "wanted", "half"),
    [
        ("", BOTH, False),
        ("rocep1s0f1", ONE, True),
        ("=rocep1s0f1,roceP2p1s0f1", BOTH, False),
        ("^=rocep1s0f0", BOTH, False),
        ("rocep1s0f1:1", ONE, True),
        ("rocep1s0f1,", ONE, True),
        ("rocep1s0f1,rocep1s0f1,roceP2p1s0f1", BOTH, False),
        ("roce", BOTH, False),
    ],
    ids=["a", "b", "c", "d", "e", "f-trailing", "f-twice", "prefix"],
)
def test_selector_rows(case, hcas, wanted, half):
    found = plan(case, choices={"spark-1": Choice(hcas=hcas)})
    assert found.refusals == []
    entry = found.nodes["spark-1"]
    assert (entry["selector"], entry["interface"], entry["address"]) == (wanted, "enp1s0f1np1", "198.51.100.11")
    assert "wlP9s9" not in str(entry["rails"])
    assert ("its twin roceP2p1s0f1" in texts(found, "spark-1")) == half
    assert ("12.8 instead of 20.9 GB/s" in texts(found, "spark-1")) == half


def test_a_port_with_a_pc_is_dropped_with_the_reason(case):
    assert "rocep1s0f0 is left out: enp1s0f0np0 has 192.0.2.40, which reaches no RDMA port" in texts(plan(case), "spark-1")


def test_a_down_port_in_a_wide_selector_is_dropped_with_the_reason(case):
    found = plan(case, choices={"spark-1": Choice(hcas="^=rocep1s0f0")})
    assert "roceP2p1s0f0 is left out: port state DOWN" in texts(found, "spark-1")


def test_an_absent_device_is_refused_with_the_devices_there_are(case):
    found = plan(case, choices={"spark-1": Choice(hcas="rocep1s0f9")})
    assert ids(found) == [("spark-1", "fabric.selector")]
    assert "the devices are: roceP2p1s0f0, roceP2p1s0f1, rocep1s0f0, rocep1s0f1" in found.refusals[0].found


@pytest.mark.parametrize("hcas", ["rocep1s0f0", "=rocep1s0f1,rocep1s0f0", "roceP2p1s0f0"])
def test_a_named_port_that_does_not_reach_the_peer_is_refused(case, hcas):
    found = plan(case, choices={"spark-1": Choice(hcas=hcas)})
    assert ids(found) == [("spark-1", "fabric.hca")]
    assert "rocep1s0f1, roceP2p1s0f1" in found.refusals[0].next_step


@pytest.mark.parametrize(
    ("interface", "part"),
    [("enP2p1s0f0np0", "no carrier"), ("enp1s0f0np0", "up, with 192.0.2.40"), ("eth0", "no such interface"), ("enP2p1s0f1np1", "up, with 203.0.113.11")],
)
def test_a_chosen_interface_that_is_not_the_fabric_is_refused_naming_the_one_that_is(case, interface, part):
    found = plan(case, choices={"spark-1": Choice(interface=interface)})
    assert ids(found) == [("spark-1", "fabric.interface")]
    assert part in found.refusals[0].found
    assert "enp1s0f1np1" in found.refusals[0].wanted and "enp1s0f1np1 (rocep1s0f1)" in found.refusals[0].next_step


def test_a_fabric_address_behind_which_a_pc_sits_is_refused_naming_the_interface_that_reaches(case):
    found = plan(case, {"spark-1": "192.0.2.40", "spark-2": "198.51.100.12"}, {"spark-1": Choice(interface="enp1s0f0np0")})
    refusal = next(refusal for refusal in found.refusals if refusal.node == "spark-1")
    assert refusal.id == "fabric.reach"
    assert "enp1s0f1np1 (rocep1s0f1)" in refusal.next_step


@pytest.mark.parametrize(
    ("name", "kind", "part"), [("lo", "", "the loopback interface"), ("br-7", "bridge", "a bridge"), ("tailscale0", "tun", "a VPN"), ("wlP9s9", "", "Wi-Fi")]
)
def test_an_address_on_an_unfit_interface_is_refused(case, name, kind, part):
    case["spark-1"].interface(name, "10.0.0.1/24", kind=kind)
    found = plan(case, {"spark-1": "10.0.0.1", "spark-2": "198.51.100.12"})
    assert ("spark-1", "fabric.address_unfit") in ids(found)
    assert part in found.refusals[0].found


def test_twins_in_one_network_are_both_used(tmp_path):
    machines = {
        "spark-1": spark(tmp_path / "1", {1: ("198.51.100.11/24", "198.51.100.21/24")}),
        "spark-2": spark(tmp_path / "2", {0: ("198.51.100.12/24", "198.51.100.22/24")}),
    }
    found = plan(machines)
    assert found.refusals == []
    assert found.nodes["spark-1"]["selector"] == "=rocep1s0f1,roceP2p1s0f1"
    assert [(rail["address"], rail["peer_address"]) for rail in found.nodes["spark-1"]["rails"]] == [
        ("198.51.100.11", "198.51.100.12"),
        ("198.51.100.21", "198.51.100.22"),
    ]
    assert plan(machines, choices={name: Choice(gid_policy="auto") for name in machines}).refusals == []


@pytest.mark.parametrize("both", [True, False])
def test_a_half_without_address_is_kept_with_advice_while_nothing_is_pinned(tmp_path, both):
    """spark-outputs section 8, rule 3: NCCL uses it by its link-local GID."""
    machines = {
        "spark-1": spark(tmp_path / "1", {1: ("198.51.100.11/24", "")}),
        "spark-2": spark(tmp_path / "2", {1: ("198.51.100.12/24", "" if both else "203.0.113.12/24")}),
    }
    found = plan(machines)
    assert found.refusals == []
    assert found.nodes["spark-1"]["hcas"] == PEER_PAIR
    assert "half bandwidth is likely: roceP2p1s0f1 (enP2p1s0f1np1), the twin" in texts(found, "spark-1")
    pinned = plan(machines, choices={"spark-1": Choice(gid_policy="auto")})
    assert ids(pinned) == [("spark-1", "fabric.gid_none")]
    assert "roceP2p1s0f1" in pinned.refusals[0].thing


def test_a_narrow_pcie_link_is_a_firmware_notice(case):
    case["spark-1"].interface("enP2p1s0f1np1", "203.0.113.11/24", width=2)
    found = plan(case)
    assert found.refusals == []
    assert "roceP2p1s0f1 has PCIe width x2 instead of x4: half speed; update the firmware" in texts(found, "spark-1")


def test_default_route_over_wifi_is_a_notice(case):
    assert "the default route is over Wi-Fi (wlP9s9)" in texts(plan(case), "spark-1")


# --- the seed pair ---------------------------------------------------------------------------------------------


def test_the_documents_pins_given_as_a_choice_are_exactly_those_pins(tmp_path):
    found = plan(
        seed_pair(tmp_path),
        choices={"spark-1": Choice("enp1s0f1np1", "rocep1s0f1", "index", 3), "spark-2": Choice("enp1s0f0np0", "rocep1s0f0", "index", 3)},
    )
    assert found.refusals == []
    entry = found.nodes["spark-1"]
    assert (entry["interface"], entry["address"], entry["hcas"], entry["selector"]) == ("enp1s0f1np1", "198.51.100.11", ["rocep1s0f1"], "=rocep1s0f1")
    assert (entry["gid"]["policy"], entry["gid"]["index"], entry["gid"]["addresses"]) == ("index", 3, {"rocep1s0f1": ["198.51.100.11"]})
    assert found.nodes["spark-2"]["selector"] == "=rocep1s0f0"
    assert "its twin roceP2p1s0f0 (up but not selected); expect about half the bandwidth" in texts(found, "spark-2")


def test_without_a_choice_the_seed_pair_uses_both_halves(tmp_path):
    found = plan(seed_pair(tmp_path))
    assert found.refusals == []
    assert (found.nodes["spark-1"]["interface"], found.nodes["spark-1"]["hcas"]) == ("enp1s0f1np1", ["rocep1s0f1", "roceP2p1s0f1"])
    assert (found.nodes["spark-2"]["interface"], found.nodes["spark-2"]["hcas"]) == ("enp1s0f0np0", ["rocep1s0f0", "roceP2p1s0f0"])
    assert found.nodes["spark-1"]["notices"] == found.nodes["spark-2"]["notices"] == []
    assert found.topology == {"name": "pair", "links": [{"nodes": ["spark-1", "spark-2"], "cables": 1}]}
    assert found.nodes["spark-2"]["rails"][1] == {
        "interface": "enP2p1s0f0np0",
        "address": "203.0.113.12",
        "prefix": 24,
        "mtu": 9000,
        "hca": "roceP2p1s0f0",
        "peer": "spark-1",
        "peer_interface": "enP2p1s0f1np1",
        "peer_address": "203.0.113.11",
        "peer_mtu": 9000,
        "peer_hca": "roceP2p1s0f1",
    }


def test_the_template_port_on_the_other_kit_is_refused_naming_the_port_with_the_cable(tmp_path):
    found = plan(seed_pair(tmp_path), choices={"spark-2": Choice("enp1s0f1np1", "rocep1s0f1")})
    assert ids(found) == [("spark-2", "fabric.interface"), ("spark-2", "fabric.hca")]
    assert "no carrier" in found.refusals[0].found and "enp1s0f0np0 (rocep1s0f0)" in found.refusals[0].next_step
    assert "rocep1s0f0, roceP2p1s0f0" in found.refusals[1].next_step


def test_ports_of_different_halves_have_no_common_rail(tmp_path):
    found = plan(seed_pair(tmp_path), choices={"spark-1": Choice(hcas="rocep1s0f1"), "spark-2": Choice(hcas="roceP2p1s0f0")})
    assert ids(found) == [("spark-1", "fabric.rails")]


def test_a_captured_pair_plans_both_halves(tmp_path):
    """P1 of the captures: one cable in port 0 of both machines, a network per half, Docker and a VPN beside."""
    machines = {}
    for name in ("head", "worker"):
        machine = Machine(tmp_path / name).capture(f"p1_{name}_rdma.sysfs")
        machine.links = links_from_brief((DATA / f"p1_{name}_ip_br_addr.txt").read_text(encoding="utf-8"))
        machines[name] = machine
    addresses = {"head": "192.168.100.10", "worker": "192.168.100.11"}
    found = plan(machines, addresses, {name: Choice(gid_policy="auto") for name in machines}, topology="pair")
    assert found.refusals == []
    for name in machines:
        assert found.nodes[name]["selector"] == "=rocep1s0f0,roceP2p1s0f0" and found.nodes[name]["interface"] == "enp1s0f0np0"
        assert found.nodes[name]["gid"]["now"] == 3


# --- addresses -------------------------------------------------------------------------------------------------


def test_address_faults_of_all_nodes_are_said_at_once(tmp_path):
    found = plan(seed_pair(tmp_path), {"spark-1": "spark-1.local", "spark-2": "198.51.100.99"})
    assert ids(found) == [("spark-1", "fabric.address_invalid"), ("spark-2", "fabric.address_absent")]
    assert "enp1s0f0np0 198.51.100.12" in found.refusals[1].found


def test_one_address_typed_twice_is_refused(tmp_path):
    assert ("spark-2", "fabric.address_twice") in ids(plan(seed_pair(tmp_path), {"spark-1": "198.51.100.11", "spark-2": "198.51.100.11"}))


@pytest.mark.parametrize(("choice", "wanted"), [("", "eth1"), ("eth2", "eth2")])
def test_one_address_on_two_interfaces_is_not_chosen_silently(tmp_path, choice, wanted):
    machines = {name: Machine(tmp_path / name).interface("eth1", f"{address}/24") for name, address in SEED_ADDRESSES.items()}
    machines["spark-1"].interface("eth2", "198.51.100.11/24")
    found = plan(machines, choices={"spark-1": Choice(interface=choice)})
    assert found.refusals == [] and found.nodes["spark-1"]["interface"] == wanted
    assert f"198.51.100.11 is on eth1, eth2; {wanted} is taken" in texts(found, "spark-1")


def test_a_fabric_interface_without_link_is_refused_naming_those_with_one(tmp_path):
    machines = seed_pair(tmp_path)
    machines["spark-1"].interface("enp1s0f0np0", "198.51.100.111/24", up=False)
    found = plan(machines, {"spark-1": "198.51.100.111", "spark-2": "198.51.100.12"})
    assert ("spark-1", "fabric.link_down") in ids(found)
    assert "up now: enp1s0f1np1 (rocep1s0f1)" in found.refusals[0].next_step


def test_prefixes_too_narrow_to_see_each_other_are_refused(tmp_path):
    machines = {
        "spark-1": spark(tmp_path / "1", {1: ("198.51.100.11/32", "")}),
        "spark-2": spark(tmp_path / "2", {1: ("198.51.100.12/32", "")}),
    }
    found = plan(machines)
    assert ids(found) == [("spark-1", "fabric.reach"), ("spark-2", "fabric.reach")]
    assert "the way there is enP7s7" in found.refusals[0].found


def test_a_management_network_that_looks_like_the_port_of_a_pc_makes_no_rail(tmp_path, case):
    """192.0.2.40 at the PC's port and the peer's management address 192.0.2.21 are in one network, yet no rail."""
    assert plan(case).nodes["spark-1"]["hcas"] == PEER_PAIR


def test_lan_as_fabric_is_a_notice(tmp_path):
    machines = {name: Machine(tmp_path / name).interface("eth0", f"{address}/24", mtu=1500).default_route("eth0") for name, address in SEED_ADDRESSES.items()}
    assert "the fabric interface eth0 is also the way to the outside" in texts(plan(machines), "spark-1")


# --- without RDMA, alone ---------------------------------------------------------------------------------------


def test_plain_ethernet_is_the_same_path_with_no_hcas(tmp_path):
    machines = {name: Machine(tmp_path / name).interface("eth1", f"{address}/24", mtu=1500) for name, address in SEED_ADDRESSES.items()}
    found = plan(machines)
    assert found.refusals == []
    entry = found.nodes["spark-1"]
    assert (entry["interface"], entry["address"], entry["hcas"], entry["selector"], entry["notices"]) == ("eth1", "198.51.100.11", [], "", [])
    assert [(rail["interface"], rail["peer"], rail["peer_address"]) for rail in entry["rails"]] == [("eth1", "spark-2", "198.51.100.12")]
    assert found.topology["name"] == "plain"


def test_a_group_of_one_needs_no_fabric(tmp_path):
    machine = Machine(tmp_path).interface("eth0", "192.0.2.9/24").default_route("eth0")
    for address in ("", "192.0.2.9", "127.0.0.1"):
        found = plan({"solo": machine}, {"solo": address})
        assert found.refusals == [] and found.nodes["solo"]["rails"] == [] and found.nodes["solo"]["hcas"] == []
        assert found.nodes["solo"]["address"] == (address or "192.0.2.9")
    assert found.topology["name"] == "solo"


def gb10(machine):
    put(machine.root / "sys/class/dmi/id/product_name", "NVIDIA_DGX_Spark")
    return machine


def test_gb10_without_cable_gets_a_notice_not_a_refusal(tmp_path):
    machines = {name: gb10(Machine(tmp_path / name).interface("enP7s7", f"{address}/24", mtu=1500)) for name, address in SEED_ADDRESSES.items()}
    found = plan(machines)
    assert found.refusals == []
    assert "without a QSFP cable DGX OS removes all four" in texts(found, "spark-1") and "do not rescan the PCI bus" in texts(found, "spark-1")


def test_gb10_with_ports_but_no_link(tmp_path):
    machines = {name: gb10(spark(tmp_path / name, {})) for name in SEED_ADDRESSES}
    machines["spark-1"].interface("enP7s7", "192.0.2.21/24")
    machines["spark-2"].interface("enP7s7", "192.0.2.22/24")
    found = plan(machines, {"spark-1": "192.0.2.21", "spark-2": "192.0.2.22"})
    assert found.refusals == [] and "no QSFP port has a link" in texts(found, "spark-1")


def test_rdma_on_one_node_only_is_rdma_on_none(tmp_path):
    machines = {
        "spark-1": gb10(spark(tmp_path / "1", {1: ("198.51.100.11/24", "")})),
        "spark-2": Machine(tmp_path / "2").interface("eth1", "198.51.100.12/24"),
    }
    found = plan(machines)
    assert found.refusals == [] and found.nodes["spark-1"]["hcas"] == []
    assert "no RDMA port reaches the other nodes" in texts(found, "spark-1")
    assert ids(plan(machines, rdma="require")) == [("spark-1", "fabric.rdma_required"), ("spark-2", "fabric.rdma_required")]


# --- quality ---------------------------------------------------------------------------------------------------


def test_mtu_that_differs_is_refused_with_both_numbers_on_every_rail(tmp_path):
    machines = seed_pair(tmp_path)
    machines["spark-2"].interface("enP2p1s0f0np0", "203.0.113.12/24", mtu=1500)
    found = plan(machines)
    assert ids(found) == [("spark-1", "fabric.mtu")]
    assert found.refusals[0].found == "9000, but 1500 on enP2p1s0f0np0 of spark-2"
    assert "fabric_configure" in found.refusals[0].next_step
    machines["spark-2"].interface("enp1s0f0np0", "198.51.100.12/24", mtu=1500)
    assert len(plan(machines).refusals) == 2


def test_mtu_of_plain_rails_is_compared_too(tmp_path):
    machines = {
        "spark-1": Machine(tmp_path / "1").interface("eth1", "198.51.100.11/24", mtu=9000),
        "spark-2": Machine(tmp_path / "2").interface("eth1", "198.51.100.12/24", mtu=1500),
    }
    assert ids(plan(machines)) == [("spark-1", "fabric.mtu")]


def test_small_mtu_everywhere_is_a_notice_on_rdma_mtu(tmp_path):
    found = plan(seed_pair(tmp_path, mtu=1500))
    assert found.refusals == []
    assert "rocep1s0f1 has RDMA MTU 1024 (interface MTU 1500)" in texts(found, "spark-1")


def test_a_switch_port_at_100g_is_a_notice(case):
    case["spark-1"].interface("enp1s0f1np1", "198.51.100.11/24", speed=100000)
    assert "rocep1s0f1 links at 100 Gb/s instead of 200" in texts(plan(case), "spark-1")


# --- shapes ----------------------------------------------------------------------------------------------------


def test_dual_rail_uses_four_ports(tmp_path):
    machines = {
        f"spark-{number}": spark(tmp_path / str(number), {0: (f"10.1.0.{number}/24", f"10.1.1.{number}/24"), 1: (f"10.1.2.{number}/24", f"10.1.3.{number}/24")})
        for number in (1, 2)
    }
    found = plan(machines, {"spark-1": "10.1.0.1", "spark-2": "10.1.0.2"})
    assert found.refusals == []
    assert found.topology == {"name": "dual_rail", "links": [{"nodes": ["spark-1", "spark-2"], "cables": 2}]}
    assert found.nodes["spark-1"]["selector"] == "=rocep1s0f0,rocep1s0f1,roceP2p1s0f0,roceP2p1s0f1"
    assert len(found.nodes["spark-1"]["rails"]) == 4


@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_a_switch_carries_any_number_of_ranks(tmp_path, ranks):
    names = [f"spark-{number}" for number in range(1, ranks + 1)]
    machines = {name: spark(tmp_path / name, {0: (f"10.1.0.{number}/24", f"10.1.1.{number}/24")}) for number, name in enumerate(names, 1)}
    found = plan(machines, {name: f"10.1.0.{number}" for number, name in enumerate(names, 1)})
    assert found.refusals == [] and found.topology["name"] == "switch"
    assert len(found.nodes["spark-1"]["rails"]) == 2 * (ranks - 1)
    assert {rail["peer"] for rail in found.nodes["spark-1"]["rails"]} == set(names[1:])


def ring(tmp_path, ranks, mirrored=False):
    """Rank i's port 0 goes to port 1 of rank i+1 over networks 10.<i>.0 and 10.<i>.1; ranks meet on the LAN."""
    machines = {}
    for rank in range(ranks):
        before = (rank - 1) % ranks
        ports = {0: (f"10.{rank}.0.1/24", f"10.{rank}.1.1/24"), 1: (f"10.{before}.0.2/24", f"10.{before}.1.2/24")}
        if mirrored and rank == ranks - 1:
            ports = {0: ports[1], 1: ports[0]}
        machine = spark(tmp_path / f"spark-{rank + 1}", ports)
        machine.interface("enP7s7", f"192.0.2.{21 + rank}/24", mtu=1500)
        machines[f"spark-{rank + 1}"] = machine
    return machines, {name: f"192.0.2.{21 + rank}" for rank, name in enumerate(machines)}


def test_a_ring_of_three_meets_on_the_lan_and_uses_all_ports(tmp_path):
    machines, addresses = ring(tmp_path, 3)
    found = plan(machines, addresses)
    assert found.refusals == []
    assert found.topology["name"] == "ring" and len(found.topology["links"]) == 3
    assert found.nodes["spark-1"]["interface"] == "enP7s7" and len(found.nodes["spark-1"]["hcas"]) == 4
    assert "mirrored" not in texts(found, "spark-1")


def test_a_mirrored_ring_is_named(tmp_path):
    found = plan(*ring(tmp_path, 3, mirrored=True))
    assert "mirrored ring cable: enp1s0f1np1 and enp1s0f1np1 of spark-3 are the same port" in texts(found, "spark-1")


def test_a_ring_of_four_has_no_path_between_opposite_ranks(tmp_path):
    machines, addresses = ring(tmp_path, 4)
    found = plan(machines, addresses)
    assert ids(found) == [("spark-1", "fabric.ranks_unlinked")]
    assert "no path for spark-1 - spark-3, spark-2 - spark-4" in found.refusals[0].found
    assert plan(machines, addresses, topology="open_ring").refusals == []


def test_a_cable_that_is_missing_in_a_ring_is_named(tmp_path):
    machines, addresses = ring(tmp_path, 3)
    machines["spark-3"].interface("enp1s0f0np0", up=False).interface("enP2p1s0f0np0", up=False)
    found = plan(machines, addresses)
    assert ids(found) == [("spark-1", "fabric.ranks_unlinked")]
    assert "no path for spark-1 - spark-3" in found.refusals[0].found


def test_a_pair_behind_a_switch_is_one_where_its_owner_says_so(tmp_path):
    found = plan(seed_pair(tmp_path), topology="switch")
    assert found.refusals == [] and found.topology["name"] == "switch"


def test_a_declared_topology_is_compared_with_what_is_there(tmp_path):
    found = plan(seed_pair(tmp_path), topology="dual_rail")
    assert ids(found) == [("spark-1", "fabric.topology")]
    assert "pair (spark-1 - spark-2)" in found.refusals[0].found


@pytest.mark.parametrize(("topology", "refused"), [("auto", False), ("pair", True), ("switch", False)])
def test_crossed_halves_are_named_and_refused_where_the_cable_is_direct(tmp_path, topology, refused):
    machines = {
        "spark-1": spark(tmp_path / "1", {1: ("198.51.100.11/24", "203.0.113.11/24")}),
        "spark-2": spark(tmp_path / "2", {1: ("203.0.113.12/24", "198.51.100.12/24")}),
    }
    found = plan(machines, topology=topology)
    assert ids(found) == ([("spark-1", "fabric.cabling")] if refused else [])
    text = found.refusals[0].found if refused else texts(found, "spark-1")
    assert "rocep1s0f1 is in the network of roceP2p1s0f1 of spark-2" in text


def test_halves_of_one_port_that_lead_to_two_ports_are_named(tmp_path):
    machines = {
        "spark-1": spark(tmp_path / "1", {0: ("10.1.0.1/24", "10.1.1.1/24"), 1: ("10.1.2.1/24", "10.1.3.1/24")}),
        "spark-2": spark(tmp_path / "2", {0: ("10.1.0.2/24", "10.1.3.2/24"), 1: ("10.1.2.2/24", "10.1.1.2/24")}),
    }
    found = plan(machines, {"spark-1": "10.1.0.1", "spark-2": "10.1.0.2"})
    assert "rocep1s0f0 leads to rocep1s0f0 of spark-2, its twin roceP2p1s0f0 to roceP2p1s0f1 of spark-2" in texts(found, "spark-1")


def test_a_rank_outside_the_rdma_island_is_named(tmp_path):
    machines = {f"spark-{number}": spark(tmp_path / str(number), {0: (f"10.1.0.{number}/24", f"10.1.1.{number}/24")}) for number in (1, 2)}
    machines["spark-3"] = Machine(tmp_path / "3").interface("eth1", "10.1.0.3/24")
    found = plan(machines, {name: f"10.1.0.{number}" for number, name in enumerate(machines, 1)})
    assert ids(found) == [("spark-1", "fabric.ranks_unlinked")]


def test_ports_of_soft_roce_make_rails_without_twins(tmp_path):
    machines = {}
    for number in (1, 2):
        machine = Machine(tmp_path / str(number)).interface("ens4", f"10.1.0.{number}/24", mtu=1500).interface("ens5", f"10.1.1.{number}/24", mtu=1500)
        machine.hca("rxe0", "ens4", table_of(f"10.1.0.{number}")).hca("rxe1", "ens5", table_of(f"10.1.1.{number}"))
        machines[f"spark-{number}"] = machine
    found = plan(machines, {"spark-1": "10.1.0.1", "spark-2": "10.1.0.2"}, {name: Choice(gid_policy="auto") for name in machines})
    assert found.refusals == []
    assert found.nodes["spark-1"]["selector"] == "=rxe0,rxe1" and len(found.nodes["spark-1"]["rails"]) == 2
    assert "twin" not in texts(found, "spark-1")
