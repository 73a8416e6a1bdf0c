# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Facts of one node from real captures: what we read from sysfs is what the machine's own tools print."""

from __future__ import annotations

import re

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _fabric_facts as fabric_facts
from ansible_collections.sparkops.inference.plugins.module_utils._sysfs import Tree

from fabric_trees import V1, V2, Machine, link_json, links_from_brief, mapped, put, read, routes_from_text, spark


@pytest.fixture
def head(tmp_path):
    """P1 head: one cable in port 0, both halves addressed."""
    machine = Machine(tmp_path).capture("p1_head_rdma.sysfs", "p1_head_net.sysfs", "a1_gpu.sysfs")
    machine.links = links_from_brief(read("p1_head_ip_br_addr.txt"))
    machine.routes = routes_from_text(read("p1_head_ip_route.txt"))
    machine.ibv_devinfo = read("p1_head_ibv_devinfo.txt")
    put(tmp_path / "etc/dgx-release", read("dgx_release.txt"))
    put(tmp_path / "proc/driver/nvidia/version", read("nvrm_version.txt"))
    return machine


def test_ports_and_interfaces_are_those_of_ibdev2netdev(head):
    printed = re.findall(r"^(\S+) port (\d+) ==> (\S+) \((\w+)\)", read("p1_head_ibdev2netdev.txt"), re.MULTILINE)
    found = {(port["hca"], str(port["port"]), port["interface"], {"ACTIVE": "Up", "DOWN": "Down"}[port["state"]]) for port in head.facts()["ports"]}
    assert found == set(printed)


def test_halves_of_a_qsfp_port_share_a_link_and_the_first_half_comes_first(head):
    ports = head.facts()["ports"]
    assert [port["hca"] for port in ports] == ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"]
    links = {port["hca"]: port["link"] for port in ports}
    assert links["rocep1s0f0"] == links["roceP2p1s0f0"] != links["rocep1s0f1"] == links["roceP2p1s0f1"]


def test_values_of_a_port(head):
    port = head.facts()["ports"][0]
    assert (port["firmware"], port["board"], port["rate"]) == ("28.45.4028", "NVD0000000087", "200 Gb/sec (2X NDR)")
    assert (port["width"], port["width_speed"], port["pci"]) == (4, "32.0 GT/s PCIe", "0000:01:00.0")
    assert (port["physical_state"], port["link_layer"]) == ("LinkUp", "Ethernet")
    assert port["usable"] == [3]
    assert [slot["index"] for slot in port["gids"]] == [0, 1, 2, 3]


def test_active_rdma_mtu_comes_from_ibv_devinfo(head):
    assert [(port["rdma_mtu"], port["rdma_mtu_measured"]) for port in head.facts()["ports"]] == [(4096, True), (1024, True), (4096, True), (1024, True)]
    assert fabric_facts.parse_active_mtu(read("n2_ibv_devinfo.txt")) == {("rocep1s0f0", 1): 1024, ("rocep1s0f1", 1): 1024}


@pytest.mark.parametrize(("mtu", "wanted"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (1400, 1024), (300, None), (None, None)])
def test_without_it_the_interface_mtu_tells(mtu, wanted):
    assert fabric_facts.rdma_mtu_for(mtu) == wanted


def test_interfaces_are_classified(head):
    kinds = {entry["name"]: entry["kind"] for entry in head.facts()["interfaces"]}
    assert kinds == {
        "lo": "loopback",
        "enP7s7": "ethernet",
        "enp1s0f0np0": "ethernet",
        "enp1s0f1np1": "ethernet",
        "enP2p1s0f0np0": "ethernet",
        "enP2p1s0f1np1": "ethernet",
        "wlP9s9": "wifi",
        "tailscale0": "vpn",
        "docker0": "bridge",
        "br-000000000000": "bridge",
    }


def test_unreadable_attributes_of_interfaces_are_unknown(head):
    by_name = {entry["name"]: entry for entry in head.facts()["interfaces"]}
    assert (by_name["wlP9s9"]["speed"], by_name["wlP9s9"]["carrier"]) == (None, False)
    assert (by_name["enp1s0f1np1"]["speed"], by_name["enp1s0f1np1"]["carrier"]) == (None, False)
    assert (by_name["enp1s0f0np0"]["speed"], by_name["enp1s0f0np0"]["driver"], by_name["enp1s0f0np0"]["port"]) == (200000, "mlx5_core", "p0")


def test_addresses_and_routes(head):
    facts = head.facts()
    assert {entry["name"]: [one["address"] for one in entry["addresses"]] for entry in facts["interfaces"] if entry["addresses"]}["enP2p1s0f0np0"] == [
        "192.168.101.10"
    ]
    assert facts["default_interface"] == "enP7s7"
    assert "172.17.0.0/16" not in [route["destination"] for route in facts["routes"]]  # linkdown
    assert facts["routes"][0] == {"destination": "0.0.0.0/0", "interface": "enP7s7", "gateway": "10.0.5.1", "metric": 104}


def test_versions(head):
    facts = head.facts()
    assert (facts["driver"], facts["dgx_release"], facts["kernel"]) == ("580.142", "7.5.0", "6.17.0-1032-nvidia")


def test_the_serial_number_is_read_nowhere(head):
    assert "1900000000042" not in str(head.facts())


def test_four_active_ports_with_and_without_addresses(tmp_path):
    machine = Machine(tmp_path).capture("n2_rdma.sysfs")
    for name, address in (("enp1s0f0np0", ["192.168.100.11/24"]), ("enp1s0f1np1", ["192.168.200.11/24"]), ("enP2p1s0f0np0", []), ("enP2p1s0f1np1", [])):
        machine.links.append(link_json(name, address, mtu=1500))
    ports = machine.facts()["ports"]
    assert [(port["hca"], port["usable"], port["rdma_mtu"]) for port in ports] == [
        ("rocep1s0f0", [3], 1024),
        ("rocep1s0f1", [3], 1024),
        ("roceP2p1s0f0", [], 1024),
        ("roceP2p1s0f1", [], 1024),
    ]


def test_gid_table_is_that_of_show_gids(tmp_path):
    """G1: the table as printed is laid out as a tree, and read back as the same rows."""
    machine, printed = Machine(tmp_path), []
    tables: dict[str, list] = {}
    for line in read("g1_show_gids.txt").splitlines()[2:-1]:
        columns = re.split(r"\t", line)
        hca, index, gid, address, version, interface = columns[0], int(columns[2]), columns[3], columns[4].strip(), columns[-2], columns[-1]
        printed.append((hca, index, gid, address, {"v1": V1, "v2": V2}[version], interface))
        tables.setdefault(hca, []).append((gid, {"v1": V1, "v2": V2}[version], interface))
    for hca, rows in tables.items():
        address = {"rocep1s0f0": ["192.168.100.10/24"], "roceP2p1s0f0": ["192.168.100.14/24"]}.get(hca, [])
        machine.interface(rows[0][2], *address, up=bool(address))
        machine.hca(hca, rows[0][2], [(gid, kind) for gid, kind, dummy in rows] + [None], "4: ACTIVE" if address else "1: DOWN")
    ports = machine.facts()["ports"]
    found = [(port["hca"], slot["index"], slot["gid"], slot["ipv4"], slot["kind"], slot["interface"]) for port in ports for slot in port["gids"]]
    assert sorted(found) == sorted(printed)
    assert {port["hca"]: port["usable"] for port in ports} == {"rocep1s0f0": [3], "roceP2p1s0f0": [3], "rocep1s0f1": [], "roceP2p1s0f1": []}
    states = re.findall(r"^link (\S+)/1 state (\S+) .* netdev (\S+)", read("g1_rdma_link.txt"), re.MULTILINE)
    assert {(port["hca"], port["state"], port["interface"]) for port in ports} == set(states)


def test_soft_roce_has_no_pci_function_and_no_twin(tmp_path):
    machine = Machine(tmp_path).interface("ens4", "198.51.100.11/24", mtu=1500).hca("rxe0", "ens4", [("fe80::1", V2), (mapped("198.51.100.11"), V2), None])
    port = machine.facts()["ports"][0]
    assert (port["interface"], port["link"], port["usable"]) == ("ens4", "", [1])


def test_soft_roce_with_an_empty_table_is_known_by_its_parent(tmp_path):
    machine = Machine(tmp_path).interface("ens4", "198.51.100.11/24").hca("rxe0", "ens4", [])
    put(tmp_path / "sys/class/infiniband/rxe0/parent", "ens4")
    assert machine.facts()["ports"][0]["interface"] == "ens4"


def test_a_vlan_on_a_port_counts_as_its_interface(tmp_path):
    machine = Machine(tmp_path).interface("enp1s0f0np0").interface("fabric.100", "198.51.100.11/24", kind="vlan")
    machine.hca("rocep1s0f0", "fabric.100", [(mapped("198.51.100.11"), V1), (mapped("198.51.100.11"), V2)])
    port = machine.facts()["ports"][0]
    assert port["interfaces"] == ["enp1s0f0np0", "fabric.100"]
    assert port["usable"] == [1]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("0002:01:00.1",), (2, "1.0.1")),
        (("000f:01:00.0",), (15, "1.0.0")),
        ((None, "roceP2p1s0f1"), (2, "1.0.1")),
        (("enp1s0f1np1",), (0, "1.0.1")),
        (("enP7s7",), None),
        (("mlx5_0", "eth0"), None),
        (("virtio2", "enp0s3"), (0, "0.3.0")),
    ],
)
def test_place_on_the_pci_bus(names, wanted):
    assert fabric_facts.pci_place(*names) == wanted


def test_gb10_is_known_by_product_or_by_gpu(tmp_path):
    tree = Tree(str(tmp_path))
    assert not fabric_facts.is_gb10(tree)
    put(tmp_path / "bus/pci/devices/000f:01:00.0/vendor", "0x10de")
    put(tmp_path / "bus/pci/devices/000f:01:00.0/device", "0x2e12")
    assert fabric_facts.is_gb10(tree)
    put(tmp_path / "two/class/dmi/id/product_name", "NVIDIA_DGX_Spark")
    assert fabric_facts.is_gb10(Tree(str(tmp_path / "two")))


def test_pcie_error_counters_are_read_where_the_kernel_has_them(tmp_path):
    machine = spark(tmp_path, {1: ["198.51.100.11/24"]})
    put(tmp_path / "sys/class/infiniband/rocep1s0f1/device/aer_dev_fatal", "Undefined 0\nSDES 1\nTOTAL_ERR_FATAL 1")
    assert {port["hca"]: port["aer"] for port in machine.facts()["ports"]}["rocep1s0f1"] == {"fatal": 1}


def test_configuration_files_that_name_an_address(tmp_path):
    machine = Machine(tmp_path).interface("enp1s0f1np1", "198.51.100.11/24").interface("enP2p1s0f1np1", "198.51.100.1/24")
    put(tmp_path / "etc/netplan/40-cx7.yaml", "network: {ethernets: {enp1s0f1np1: {addresses: [198.51.100.11/24]}}}")
    found = machine.facts()["configuration"]
    assert found["named"] == {"198.51.100.11": ["netplan/40-cx7.yaml"], "198.51.100.1": []}
    assert found["unreadable"] == []


def test_configuration_files_that_cannot_be_read_are_listed(tmp_path):
    machine = Machine(tmp_path).interface("enp1s0f1np1", "198.51.100.11/24")
    (tmp_path / "etc/netplan/40-cx7.yaml").mkdir(parents=True)
    assert machine.facts()["configuration"]["unreadable"] == ["netplan/40-cx7.yaml"]


def test_an_empty_machine_is_a_machine(tmp_path):
    facts = Machine(tmp_path / "none").facts()
    assert facts["ports"] == [] and facts["default_interface"] == "" and facts["driver"] == ""
