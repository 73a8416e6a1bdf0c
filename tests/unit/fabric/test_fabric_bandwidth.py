# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""RDMA bandwidth: A15, A16, A26. ib_write_bw is a stand-in that prints what real machines printed."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.module_utils import _bandwidth
from ansible_collections.sparkops.inference.plugins.module_utils._fabric import plan_fabric
from ansible_collections.sparkops.inference.plugins.modules import fabric_bandwidth

from fabric_trees import DATA, SEED_ADDRESSES, put, seed_pair, spark

NODES = ["spark-1", "spark-2"]
OUTPUTS = {name: (DATA / f"ib_write_bw_{name}.txt").read_text(encoding="utf-8") for name in ("good", "twin_rows", "degraded")}


@pytest.fixture
def fabric(tmp_path):
    facts = {name: machine.facts() for name, machine in seed_pair(tmp_path).items()}
    return plan_fabric(NODES, facts, SEED_ADDRESSES).nodes


@pytest.mark.parametrize(("name", "wanted"), [("good", 92.57), ("twin_rows", 97.28), ("degraded", 13.23)])
def test_output_parses(name, wanted):
    assert _bandwidth.parse(OUTPUTS[name]) == wanted


def test_no_row_is_no_figure():
    assert _bandwidth.parse("Couldn't connect to 198.51.100.11:18515") is None


@pytest.mark.parametrize(
    ("gbits", "hca_type", "wanted"),
    [(92.57, "MT4129", "healthy"), (53.0, "MT4129", "half"), (13.23, "MT4129", "degraded"), (3.1, "", "measured")],
)
def test_verdicts(gbits, hca_type, wanted):
    assert _bandwidth.verdict(gbits, hca_type) == wanted


def test_latency_parses():
    text = (
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n"
        " 2       1000          1.52           4.13         1.58     \t       1.59        \t0.07   \t\t1.86    \t\t4.13   \n"
    )
    assert _bandwidth.parse_latency(text) == 1.58 and _bandwidth.parse(text) is None
    assert _bandwidth.parse_latency(OUTPUTS["good"]) is None


def test_both_sides_number_the_rails_alike(fabric):
    head = _bandwidth.numbered(fabric["spark-1"]["rails"], "spark-2", True, 1)
    worker = _bandwidth.numbered(fabric["spark-2"]["rails"], "spark-1", False, 1)
    assert [(port, rail["hca"], rail["peer_hca"]) for port, rail in head] == [(port, rail["peer_hca"], rail["hca"]) for port, rail in worker]
    assert [port for port, dummy in head] == [18531, 18532]


@pytest.fixture(name="ring")
def fixture_ring(tmp_path):
    """Three ranks, each cabled to both others; they meet on the LAN."""
    machines = {}
    for rank in range(3):
        before = (rank - 1) % 3
        ports = {0: (f"10.{rank}.0.1/24", f"10.{rank}.1.1/24"), 1: (f"10.{before}.0.2/24", f"10.{before}.1.2/24")}
        machines[f"spark-{rank + 1}"] = spark(tmp_path / str(rank), ports).interface("enP7s7", f"192.0.2.{21 + rank}/24", mtu=1500)
    facts = {name: machine.facts() for name, machine in machines.items()}
    return plan_fabric(list(facts), facts, {name: f"192.0.2.{21 + rank}" for rank, name in enumerate(facts)}).nodes


def test_each_rail_of_a_ring_is_measured_once(monkeypatch, capsys, tmp_path, ring):
    """(host that listens, port) of both sides, for bandwidth: those between two workers, too."""
    served, asked = {}, {}
    holders = {rail["address"]: name for name, entry in ring.items() for rail in entry["rails"]}
    for name in ring:
        calls, dummy = run(monkeypatch, capsys, tmp_path, ring, [], state="serving", node=name, nodes=list(ring))
        served[name] = {command[command.index("-p") + 1] for command in calls if "ib_write_bw" in command}
        calls, dummy = run(monkeypatch, capsys, tmp_path, ring, [(0, OUTPUTS["good"], "")], state="measured", node=name, nodes=list(ring))
        for command in calls:
            asked.setdefault(holders[command[-1]], set()).add(command[command.index("-p") + 1])
        assert all(command[2] == "120" for command in calls)  # six rails take their turns
    assert served == {"spark-1": {"18531", "18532", "18547", "18548"}, "spark-2": {"18547", "18548"}, "spark-3": set()}
    assert asked == {name: ports for name, ports in served.items() if ports}


def test_commands_to_the_letter(fabric):
    rail = fabric["spark-2"]["rails"][1]
    server = "timeout --signal=KILL 80 ib_write_bw -d roceP2p1s0f0 -i 1 -x 3 -p 18532 -F -s 65536 -q 4 -D 3 --report_gbits"
    assert _bandwidth.bandwidth_command(rail, 3, 18532, 65536, 2) == server.split()
    assert _bandwidth.bandwidth_command(rail, 3, 18532, 65536, 2, "203.0.113.11") == [*server.split(), "203.0.113.11"]
    server = "timeout --signal=KILL 80 ib_write_lat -d roceP2p1s0f0 -i 1 -x 3 -p 18540 -F -n 1000"
    assert _bandwidth.latency_command(rail, 3, 18532, 2) == server.split()


@pytest.mark.parametrize(("available", "size"), [
    ([], 65536), ([None, 0], 65536), ([100 * 1024 * 1024, 7 * 1024 * 1024], 65536), ([128 * 1024], 65536), ([100 * 1024 * 1024, 127 * 1024], 32768),
    ([40 * 1024], 16384), ([1], 4096),
])
def test_buffers_take_a_small_part_of_the_memory_that_the_poorest_node_has_left(available, size):
    assert _bandwidth.message_bytes(available) == size


def run(monkeypatch, capsys, tmp_path, fabric, outputs, tool=True, node="spark-2", **args):
    calls = []

    def run_command(module, command, **dummy):
        if "ib_write_lat" in command:
            return 0, "", ""
        calls.append(command)
        return outputs[min(len(calls), len(outputs)) - 1]

    monkeypatch.setattr(fabric_bandwidth.AnsibleModule, "run_command", run_command)
    monkeypatch.setattr(fabric_bandwidth.AnsibleModule, "get_bin_path", lambda *dummy: "x" if tool else None)
    monkeypatch.setattr(fabric_bandwidth.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(fabric_bandwidth, "start", calls.append)
    common = {"node": node, "nodes": NODES, "fabric": fabric[node], "sys_root": str(tmp_path / "sys")}
    with patch_module_args({**common, **args}), pytest.raises(SystemExit):
        fabric_bandwidth.main()
    return calls, json.loads(capsys.readouterr().out)


@pytest.fixture
def spark_types(tmp_path):
    for hca in ("rocep1s0f0", "roceP2p1s0f0"):
        put(tmp_path / "sys/class/infiniband" / hca / "hca_type", "MT4129")


def test_healthy_halves(monkeypatch, capsys, tmp_path, fabric, spark_types):
    dummy, found = run(monkeypatch, capsys, tmp_path, fabric, [(0, OUTPUTS["good"], ""), (0, OUTPUTS["twin_rows"], "")], state="measured", floor=80)
    assert [(rail["hca"], rail["gbits"], rail["verdict"]) for rail in found["rails"]] == [("rocep1s0f0", 92.57, "healthy"), ("roceP2p1s0f0", 97.28, "healthy")]


def test_a_degraded_half_is_refused_below_the_floor_and_warned_of_without(monkeypatch, capsys, tmp_path, fabric, spark_types):
    outputs = [(0, OUTPUTS["good"], ""), (0, OUTPUTS["degraded"], "")]
    dummy, found = run(monkeypatch, capsys, tmp_path, fabric, outputs, state="measured", floor=80)
    assert [refusal["id"] for refusal in found["refusals"]] == ["fabric.bandwidth"]
    assert "rail roceP2p1s0f0 to roceP2p1s0f1 of spark-1: found 13.23 Gb/s (degraded)" in found["msg"] and "reboot this node" in found["msg"]
    dummy, found = run(monkeypatch, capsys, tmp_path, fabric, outputs, state="measured")
    assert "failed" not in found and "13.23 Gb/s to spark-1: degraded; reboot" in found["notices"][0]


def test_a_server_that_is_not_there_yet_is_asked_again(monkeypatch, capsys, tmp_path, fabric):
    outputs = [(1, "", "Couldn't connect to 198.51.100.11:18531"), (0, OUTPUTS["good"], "")]
    calls, found = run(monkeypatch, capsys, tmp_path, fabric, outputs, state="measured")
    assert len(calls) == 3 and len(found["rails"]) == 2


def test_failures_are_all_named(monkeypatch, capsys, tmp_path, fabric):
    dummy, found = run(monkeypatch, capsys, tmp_path, fabric, [(1, "", "Failed to modify QP to RTR")], state="measured")
    assert [refusal["id"] for refusal in found["refusals"]] == ["fabric.bandwidth_failed", "fabric.bandwidth_failed"]
    dummy, found = run(monkeypatch, capsys, tmp_path, fabric, [], tool=False, state="measured")
    assert found["refusals"][0]["id"] == "fabric.bandwidth_tool"
    fabric["spark-2"]["gid"]["usable"] = {}
    dummy, found = run(monkeypatch, capsys, tmp_path, fabric, [], state="measured")
    assert found["refusals"][0]["id"] == "fabric.bandwidth_gid"


def test_the_head_serves_two_ports_per_rail(monkeypatch, capsys, tmp_path, fabric):
    calls, dummy = run(monkeypatch, capsys, tmp_path, fabric, [], state="serving", node="spark-1", available_kib=[127 * 1024])
    assert [(command[3], command[command.index("-d") + 1], command[command.index("-p") + 1]) for command in calls] == [
        ("ib_write_bw", "rocep1s0f1", "18531"), ("ib_write_lat", "rocep1s0f1", "18539"),
        ("ib_write_bw", "roceP2p1s0f1", "18532"), ("ib_write_lat", "roceP2p1s0f1", "18540"),
    ]
    assert calls[0][calls[0].index("-s") + 1] == "32768"
