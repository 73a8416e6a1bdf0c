# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The doctor: rows J1, J2, J7 to J11, A2, A12, A27, A28, R17 (exit code), and NCCL's log. Texts are captures of real machines."""

from __future__ import annotations

import json
import types

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.action.doctor_report import ActionModule
from ansible_collections.sparkops.inference.plugins.module_utils import _doctor
from ansible_collections.sparkops.inference.plugins.module_utils._nccl_log import given_way, read_nccl_log
from ansible_collections.sparkops.inference.plugins.modules import doctor_info

from fabric_trees import SEED_ADDRESSES, put, read, seed_pair

HCAS = ["rocep1s0f1", "roceP2p1s0f1"]
WELL = {
    "libraries": [],
    "gpu": "",
    "gpu_error": "",
    "links": {},
    "held": [],
    "automatic_upgrades": False,
    "journal_kept": True,
    "kernel_log": "",
    "rank_log": "",
    "metrics": "unknown",
}
FACTS = {"gb10": True}


# --- NCCL's log ------------------------------------------------------------------------------------------------


def test_a_good_log_has_no_findings():
    assert read_nccl_log(read("nccl_good.log"), "enp1s0f1np1", HCAS) == []


@pytest.mark.parametrize(
    ("name", "interface", "hcas", "parts"),
    [
        ("nccl_no_device.log", "enp1s0f0np0", ["rocep1s0f0"], ["NCCL found no RDMA device: /dev/infiniband", "NCCL uses sockets although"]),
        ("nccl_no_device.log", "enp1s0f0np0", [], ["NCCL found no RDMA device"]),
        ("nccl_hole.log", "", [], ["GID slot 5 of roceP2p1s0f0 is empty on this node"]),
        ("nccl_hole_peer.log", "", [], ["the peer's GID slot is empty (rocep1s0f0 here is right)"]),
        ("nccl_lan_oob.log", "enp1s0f0np0", ["rocep1s0f0", "roceP2p1s0f0"], ["NCCL's control connection is on enP7s7 instead of enp1s0f0np0"]),
        ("nccl_docker_bridge.log", "enp1s0f0np0", ["rocep1s0f0"], [
            "NCCL's control connection is on docker0", "NCCL uses sockets", "NCCL's data goes over docker0",
        ]),
        ("nccl_docker_bridge.log", "enp1s0f0np0", [], ["NCCL's control connection is on docker0", "NCCL's data goes over docker0 instead of enp1s0f0np0"]),
        ("nccl_good.log", "enp1s0f1np1", HCAS[:1], ["NCCL uses roceP2p1s0f1, which was not chosen"]),
        ("nccl_no_interface.log", "", [], ["NCCL_SOCKET_IFNAME names no interface"]),
        ("nccl_good.log", "enp1s0f1np1", [*HCAS, "rocep1s0f0"], ["NCCL does not use rocep1s0f0"]),
    ],
)
def test_each_fault_is_named(name, interface, hcas, parts):
    found = read_nccl_log(read(name), interface, hcas)
    assert len(found) == len(parts)
    assert all(text.startswith(part) for text, part in zip(found, parts)), found


@pytest.mark.parametrize(("code", "part"), [("110", "got no answer from ::ffff:198.51.100.12"), ("22", "could not connect to ::ffff:198.51.100.12 (error 22")])
def test_other_connection_faults(code, part):
    line = read("nccl_hole.log").splitlines()[0]
    line = line.replace("with 61 No data available", f"with {code} X").replace("local GID ::,", "local GID ::ffff:198.51.100.11,")
    assert part in read_nccl_log(line.replace("::ffff:192.168.101.11", "::ffff:198.51.100.12"))[0]


def test_ranks_that_load_different_versions():
    """A library that one host lends, serve_host_nccl_dir: the image is compared before the start."""
    line = "spark-1a2b:812:812 [0] init.cc:1043 NCCL WARN Mismatched NCCL version detected : rank 1 version 22809 rank 0 version 23007"
    (found,) = read_nccl_log(line, "enp1s0f1np1", HCAS)
    assert found.startswith("the ranks load different NCCL, 2.28.9 on rank 1 and 2.30.7 on rank 0: serve_host_nccl_dir")


@pytest.mark.parametrize(
    ("environment", "interface", "hcas"),
    [
        (["A=b", "NCCL_SOCKET_IFNAME==enp1s0f1np1", "NCCL_IB_HCA==rocep1s0f1:1,roceP2p1s0f1"], "enp1s0f1np1", HCAS),
        (["NCCL_SOCKET_IFNAME==eth0", "NCCL_IB_DISABLE=1"], "eth0", []),
        (["NCCL_SOCKET_IFNAME=enp,eth", "NCCL_IB_HCA=^=rocep1s0f0"], "", []),
        (["NCCL_SOCKET_IFNAME==a,b"], "", []),
        ([], "", []),
    ],
    ids=["exact", "sockets", "beginnings and exclusions", "several", "nothing"],
)
def test_the_way_that_a_container_was_given(environment, interface, hcas):
    assert given_way(environment) == (interface, hcas)


# --- a node ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaded", "libraries", "error", "wrong"),
    [
        ("580.142", ["libnvidia-ml.so.1", "libnvidia-ml.so.580.142", "libcuda.so.580.142"], "", False),
        ("580.142", ["libnvidia-ml.so.580.159.03"], "", True),
        ("580.142", ["libnvidia-ml.so.580.159.03", "libcuda.so.580.142"], "", False),
        ("", ["libnvidia-ml.so.580.159.03"], "", False),
        ("580.142", [], "Failed to initialize NVML: Driver/library version mismatch", True),
        ("580.142", [], "", False),
    ],
)
def test_driver_and_libraries_of_different_versions_want_a_reboot(loaded, libraries, error, wrong):
    found = _doctor.check_driver("spark-1", {**WELL, "libraries": libraries, "gpu_error": error}, loaded)
    assert [refusal.id for refusal in found] == (["doctor.driver_mismatch"] if wrong else [])
    assert not wrong or found[0].next_step == "reboot the node"


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("NVIDIA GB10, 580.142, 2418, 31.20, 61, 96", ""),
        ("NVIDIA GB10, 580.142, 208, 3.74, 39, 0", ""),
        ("NVIDIA GB10, 580.142, 507, 12.00, 45, 96", "runs at 507 MHz (12.0 W) at 96 % load"),
        ("NVIDIA GB10, 580.142, 2418, 60.00, 88, 96", "is at 88 degrees"),
        ("NVIDIA GB10, 580.142, [N/A], [N/A], [N/A], [N/A]", ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
    ],
)
def test_gpu_clocks_and_heat(row, part):
    found = _doctor.gpu_notices({**WELL, "gpu": f"{row}\n"})
    assert (part in found[0]) if part else found == []


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ethtool_connected.txt", {"speed": 200000, "link": True, "reason": "", "medium": "Direct Attach Copper"}),
        ("ethtool_no_cable.txt", {"speed": None, "link": False, "reason": "No cable", "medium": "Other"}),
        ("ethtool_10gbe.txt", {"speed": 10000, "link": True, "reason": "", "medium": "Twisted Pair"}),
    ],
)
def test_ethtool_as_an_ordinary_user(name, wanted):
    assert _doctor.parse_ethtool(read(name)) == wanted


def test_ethtool_that_says_nothing():
    assert _doctor.parse_ethtool("") == {"speed": None, "link": None, "reason": "", "medium": ""}


def test_kernel_log():
    assert _doctor.kernel_findings(read("kernel.log")) == [
        "GPU error Xid 13",
        "GPU error Xid 31",
        "GPU error Xid 43",
        "GPU error Xid 119",
        "the kernel killed VLLM::Worker_TP for want of memory",
        "fatal PCIe error at 0000:00:00.0",
        "the ConnectX-7 function 0000:01:00.0 was lost to a PCIe error",
        "soft lockup in irq/109-aerdrv",
    ]


def test_out_of_memory_lines_of_healthy_starts_are_no_finding():
    line = read("kernel.log").splitlines()[0]
    assert "NV_ERR_NO_MEMORY" in line
    assert _doctor.kernel_findings(line) == []


@pytest.mark.parametrize(
    ("change", "gb10", "part"),
    [
        ({}, True, ""),
        ({"automatic_upgrades": True}, True, "no kernel or NVIDIA package is held"),
        ({"automatic_upgrades": True}, False, ""),
        ({"automatic_upgrades": True, "held": ["linux-image-nvidia-hwe-24.04"]}, True, ""),
        ({"automatic_upgrades": True, "held": ["vim"]}, True, "no kernel or NVIDIA package is held"),
        ({"journal_kept": False}, True, "the journal is not kept"),
        ({"metrics": "off"}, True, "no vLLM metrics"),
        ({"metrics": "on"}, True, ""),
    ],
)
def test_upkeep(change, gb10, part):
    found = _doctor.upkeep_notices({**WELL, **change}, gb10)
    assert (part in found[0]) if part else found == []


def run_module(monkeypatch, capsys, outputs, **args):
    calls = []

    def run_command(module, command, **dummy):
        calls.append(" ".join(command))
        return outputs.get(command[3], (127, "", ""))

    monkeypatch.setattr(doctor_info.AnsibleModule, "run_command", run_command)
    monkeypatch.setattr(doctor_info.AnsibleModule, "get_bin_path", lambda module, name: name if name in outputs else None)
    with patch_module_args(args), pytest.raises(SystemExit):
        doctor_info.main()
    return calls, json.loads(capsys.readouterr().out)["health"]


def test_readings_with_exactly_these_commands(monkeypatch, capsys, tmp_path):
    put(tmp_path / "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.580.142", "")
    put(tmp_path / "usr/lib/aarch64-linux-gnu/libc.so.6", "")
    put(tmp_path / "etc/apt/apt.conf.d/20auto-upgrades", 'APT::Periodic::Unattended-Upgrade "1";')
    (tmp_path / "var/log/journal").mkdir(parents=True)
    outputs = {
        "nvidia-smi": (0, "NVIDIA GB10, 580.142, 208, 3.74, 39, 0\n", ""),
        "ethtool": (0, read("ethtool_no_cable.txt"), "netlink error: Operation not permitted\n"),
        "apt-mark": (0, "linux-image-nvidia\n", ""),
        "journalctl": (0, read("kernel.log"), ""),
        "docker": (0, "out", "err"),
    }
    calls, health = run_module(monkeypatch, capsys, outputs, root=str(tmp_path), interfaces=["enp1s0f1np1"], container="tiny-rank0")
    assert calls == [
        "timeout --signal=KILL 15 nvidia-smi --query-gpu=name,driver_version,clocks.current.sm,power.draw,temperature.gpu,utilization.gpu"
        " --format=csv,noheader,nounits",
        "timeout --signal=KILL 15 ethtool enp1s0f1np1",
        "timeout --signal=KILL 15 apt-mark showhold",
        "timeout --signal=KILL 15 journalctl --dmesg --quiet --no-pager --output=cat --lines=5000",
        "timeout --signal=KILL 15 docker --host unix:///var/run/docker.sock logs --tail 5000 tiny-rank0",
    ]
    assert (health["libraries"], health["held"], health["automatic_upgrades"], health["journal_kept"]) == (
        ["libnvidia-ml.so.580.142"],
        ["linux-image-nvidia"],
        True,
        True,
    )
    assert (health["links"]["enp1s0f1np1"]["reason"], health["rank_log"], health["metrics"]) == ("No cable", "out\nerr", "unknown")


def test_a_bare_machine_reads_empty(monkeypatch, capsys, tmp_path):
    calls, health = run_module(monkeypatch, capsys, {}, root=str(tmp_path), interfaces=["eth0"])
    assert calls == []
    assert health == {**WELL, "journal_kept": False, "links": {"eth0": {"speed": None, "link": None, "reason": "", "medium": ""}}}


def test_upgrades_switched_off_later_are_off(tmp_path):
    put(tmp_path / "etc/apt/apt.conf.d/20auto-upgrades", 'APT::Periodic::Unattended-Upgrade "1";')
    assert doctor_info.automatic_upgrades(str(tmp_path))
    put(tmp_path / "etc/apt/apt.conf.d/99-off", 'APT::Periodic::Unattended-Upgrade "0";')
    assert not doctor_info.automatic_upgrades(str(tmp_path))


# --- the report ------------------------------------------------------------------------------------------------


def report(hostvars):
    settings = {"fabric_gid_policy": "unpinned", "fabric_rdma": "auto", "fabric_topology": "auto"}
    plan = {"nodes": list(SEED_ADDRESSES), "addresses": SEED_ADDRESSES, "settings": settings, "node_settings": {name: {} for name in SEED_ADDRESSES}}
    task = types.SimpleNamespace(args={}, async_val=0, action="doctor_report", diff=False, check_mode=False)
    shell = types.SimpleNamespace(tmpdir=None, _IS_WINDOWS=False)
    action = ActionModule(task, types.SimpleNamespace(_shell=shell), types.SimpleNamespace(), None, None, None)
    return action.run(None, {"spark_plan": plan, "hostvars": hostvars, "inventory_hostname": "spark-1"})


@pytest.fixture
def hostvars(tmp_path):
    return {
        name: {"__fabric_read": {"fabric": machine.facts()}, "__doctor_read": {"health": dict(WELL)}, "spark_node": {"clock_skew": 0.0}}
        for name, machine in seed_pair(tmp_path).items()
    }


def test_a_healthy_pair_is_a_success(hostvars):
    found = report(hostvars)
    assert "failed" not in found and found["refusals"] == [] and found["notices"] == {"spark-1": [], "spark-2": []}
    assert found["report"][0] == "spark-1: enp1s0f1np1 198.51.100.11, =rocep1s0f1,roceP2p1s0f1, pair"
    assert "  rocep1s0f0 (enp1s0f0np0): DOWN, no link" in found["report"]
    assert found["report"][-4].split() == ["kernel", "6.17.0-1032-nvidia", "6.17.0-1032-nvidia"]


def test_everything_wrong_is_in_one_report_and_fails(hostvars):
    hostvars["spark-1"]["__fabric_read"]["fabric"]["driver"] = "580.142"
    hostvars["spark-1"]["__doctor_read"]["health"]["libraries"] = ["libcuda.so.580.159.03"]
    hostvars["spark-2"]["__fabric_read"]["fabric"]["kernel"] = "7.0.0-1019-nvidia"
    hostvars["spark-2"]["__doctor_read"]["health"]["rank_log"] = read("nccl_no_device.log")
    hostvars["spark-2"]["spark_node"]["clock_skew"] = 400.0
    silent = {"id": "fabric.rail_silent", "node": "spark-2", "thing": "rail", "found": "no answer", "wanted": "one", "next_step": "check"}
    hostvars["spark-2"]["__doctor_probed"] = {"refusals": [silent]}
    found = report(hostvars)
    assert found["failed"] and found["msg"].startswith("3 things are wrong")
    assert {refusal["id"] for refusal in found["refusals"]} == {"fabric.rail_silent", "fabric.clock", "doctor.driver_mismatch"}
    text = "\n".join(found["report"])
    assert "WRONG   spark-2: rail" in text and "notice  kernel 7.0.0-1019-nvidia is known to be bad" in text
    assert "notice  log of the rank: NCCL found no RDMA device" in text
    assert "kernel         6.17.0-1032-nvidia  7.0.0-1019-nvidia  differs" in text


def test_a_node_that_was_not_read_is_wrong_and_the_other_is_still_judged(hostvars):
    hostvars["spark-2"] = {"__fabric_read": {"unreachable": True, "msg": "no route to host"}}
    hostvars["spark-1"]["__doctor_read"]["health"]["journal_kept"] = False
    found = report(hostvars)
    assert [(refusal["id"], refusal["node"]) for refusal in found["refusals"]] == [("fabric.unread", "spark-2")]
    assert "found no route to host" in "\n".join(found["report"])
    assert "the journal is not kept" in found["notices"]["spark-1"][0]


@pytest.mark.parametrize(
    ("variable", "found", "wrong"),
    [
        ("__doctor_read", {"failed": False, "msg": "Missing sudo password"}, True),
        ("__doctor_read", {"unreachable": True, "msg": "timed out"}, True),
        ("__doctor_probed", {"failed": False, "msg": "MODULE FAILURE", "exception": "(traceback unavailable)"}, True),
        ("__doctor_opened", {"skipped": True, "msg": "no"}, False),
        ("__doctor_probed", {"rails": [], "notices": []}, False),
    ],
)
def test_a_look_without_an_answer_is_wrong(hostvars, variable, found, wrong):
    hostvars["spark-2"][variable] = {"changed": False, **found}
    done = report(hostvars)
    assert [(refusal["id"], refusal["node"]) for refusal in done["refusals"]] == ([("doctor.unread", "spark-2")] if wrong else [])
    assert done.get("failed", False) is wrong and (not wrong or found["msg"] in "\n".join(done["report"]))
