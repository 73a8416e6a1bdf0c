# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What ranks should have in common: R3 (clock, kernel, persistence), A14, A21, A27, G15, G16, J1."""

from __future__ import annotations

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _parity

from fabric_trees import DATA, Machine, put, seed_pair

OWN = {"spark-1": ["198.51.100.11"], "spark-2": ["198.51.100.12"]}


def parity(machines, ahead=None):
    return _parity.check_parity({name: machine.facts() for name, machine in machines.items()}, OWN, ahead or {})


def kernels(machines, *releases):
    for machine, release in zip(machines.values(), releases):
        put(machine.root / "proc/sys/kernel/osrelease", release)
    return machines


def test_equal_nodes_have_nothing_to_say(tmp_path):
    found = parity(seed_pair(tmp_path))
    assert found.notices == {"spark-1": [], "spark-2": []} and found.refusals == []
    assert {row["item"]: row["same"] for row in found.table} == {"kernel": True, "driver": True, "DGX OS": True, "RDMA firmware": True}


@pytest.mark.parametrize(
    ("seconds", "notice", "refused"),
    [(0, False, False), (1.9, False, False), (-1.9, False, False), (5, True, False), (60, True, False), (400, False, True), (-400, False, True)],
)
def test_clock(tmp_path, seconds, notice, refused):
    found = parity(seed_pair(tmp_path), {"spark-1": 0.0, "spark-2": seconds})
    assert bool(found.notices["spark-2"]) == notice
    assert [(refusal.node, refusal.id) for refusal in found.refusals] == ([("spark-2", "fabric.clock")] if refused else [])


def test_kernel_gets_a_notice_for_the_difference_and_one_for_the_bad_release(tmp_path):
    found = parity(kernels(seed_pair(tmp_path), "6.17.0-1032-nvidia", "7.0.0-1019-nvidia"))
    texts = found.notices["spark-2"]
    assert "kernel 7.0.0-1019-nvidia differs from 6.17.0-1032-nvidia on spark-1" in texts
    assert any(text.startswith("kernel 7.0.0-1019-nvidia is known to be bad: RDMA memory registration") for text in texts)
    assert found.refusals == []


@pytest.mark.parametrize(
    ("kernel", "bad"),
    [
        ("7.0.0-1019-nvidia", True),
        ("7.0.0-1019", True),
        ("7.0.0-31-generic", True),
        ("7.0.0-10190-nvidia", False),
        ("7.0.0-310-generic", False),
        ("6.17.0-1032-nvidia", False),
        ("", False),
    ],
)
def test_known_bad_kernels(kernel, bad):
    assert bool(_parity.bad_kernel(kernel)) == bad


def test_the_cure_on_the_kernel_command_line_silences_it(tmp_path):
    machines = kernels(seed_pair(tmp_path), "7.0.0-1019-nvidia", "7.0.0-1019-nvidia")
    put(machines["spark-1"].root / "proc/cmdline", "BOOT_IMAGE=/vmlinuz ro kho=off quiet")
    found = parity(machines)
    assert found.notices["spark-1"] == [] and len(found.notices["spark-2"]) == 1


def test_lost_contiguous_memory_is_named(tmp_path):
    machines = seed_pair(tmp_path)
    put(machines["spark-1"].root / "proc/meminfo", "MemTotal: 127600000 kB\nCmaTotal:              0 kB\nCmaFree:          131072 kB")
    assert parity(machines).notices["spark-1"] == ["CmaTotal 0 with CmaFree 131072 kB: about 26 GiB of memory are lost; boot with kho=off, or a 6.17 kernel"]


def test_an_address_in_no_file_will_be_gone_after_a_reboot(tmp_path):
    machines = seed_pair(tmp_path)
    put(machines["spark-1"].root / "etc/netplan/40-cx7.yaml", "network: {version: 2}")
    put(machines["spark-2"].root / "etc/netplan/40-cx7.yaml", "addresses: [198.51.100.12/24]")
    found = parity(machines)
    assert found.notices["spark-1"] == ["198.51.100.11 stands in no network configuration file: it will be gone after a reboot"]
    assert found.notices["spark-2"] == []


@pytest.mark.parametrize("unreadable", [True, False])
def test_without_readable_files_nothing_is_claimed(tmp_path, unreadable):
    machines = seed_pair(tmp_path)
    if unreadable:
        (machines["spark-1"].root / "etc/netplan/40-cx7.yaml").mkdir(parents=True)
    assert parity(machines).notices["spark-1"] == []


def test_the_netplan_file_of_nvidia_sync_is_named(tmp_path):
    machines = seed_pair(tmp_path)
    put(machines["spark-1"].root / "etc/netplan/99-nvidia-sync-cluster.yaml", "addresses: [198.51.100.11/24]")
    assert "belongs to NVIDIA Sync" in parity(machines).notices["spark-1"][0]


def test_pcie_errors_are_reported(tmp_path):
    machines = seed_pair(tmp_path)
    put(machines["spark-1"].root / "sys/class/infiniband/rocep1s0f1/device/aer_dev_fatal", "TOTAL_ERR_FATAL 2")
    assert parity(machines).notices["spark-1"] == ["rocep1s0f1 counts PCIe errors (fatal 2, nonfatal 0)"]


def test_driver_and_release_that_differ_are_rows_and_notices(tmp_path):
    machines = seed_pair(tmp_path)
    put(machines["spark-1"].root / "proc/driver/nvidia/version", (DATA / "nvrm_version.txt").read_text())
    put(machines["spark-2"].root / "proc/driver/nvidia/version", (DATA / "nvrm_version.txt").read_text().replace("580.142", "580.159.03"))
    found = parity(machines)
    assert "driver 580.159.03 differs from 580.142 on spark-1" in found.notices["spark-2"]
    assert {row["item"]: row["same"] for row in found.table}["driver"] is False


def test_unknown_is_no_difference(tmp_path):
    machines = seed_pair(tmp_path)
    put(machines["spark-1"].root / "proc/driver/nvidia/version", (DATA / "nvrm_version.txt").read_text())
    assert parity(machines).notices["spark-2"] == []


def test_a_group_of_one_has_nobody_to_differ_from(tmp_path):
    machine = Machine(tmp_path).interface("eth0", "192.0.2.9/24")
    found = _parity.check_parity({"solo": machine.facts()}, {"solo": ["192.0.2.9"]}, {"solo": 900.0})
    assert found.notices == {"solo": []} and found.refusals == []
