# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The netplan file of the rails: A14, A20, R3 (persistence). netplan and systemd are stand-ins; where netplan is installed it validates for real."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import subprocess

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.filter.fabric import rail_addresses
from ansible_collections.sparkops.inference.plugins.module_utils import _netplan
from ansible_collections.sparkops.inference.plugins.modules import fabric_netplan

from fabric_trees import DATA

RAILS = {"enp1s0f1np1": ["198.51.100.11/24"], "enP2p1s0f1np1": ["203.0.113.11/24"]}
NVIDIA = (DATA / "netplan_nvidia.yaml.txt").read_text(encoding="utf-8")
LAN = "network: {version: 2, ethernets: {enP7s7: {dhcp4: true}}}\n"


# --- the text --------------------------------------------------------------------------------------------------


def test_the_file_says_what_was_asked():
    found = yaml.safe_load(_netplan.render(RAILS, 9000))["network"]
    assert found["version"] == 2 and set(found["ethernets"]) == set(RAILS)
    assert found["ethernets"]["enP2p1s0f1np1"] == {
        "optional": True,
        "dhcp4": False,
        "dhcp6": False,
        "accept-ra": False,
        "link-local": [],
        "mtu": 9000,
        "addresses": ["203.0.113.11/24"],
    }


@pytest.mark.skipif(shutil.which("netplan") is None, reason="netplan is not installed")
@pytest.mark.parametrize("renderer", ["networkd", "NetworkManager"])
def test_netplan_itself_accepts_it(tmp_path, renderer):
    folder = tmp_path / "etc/netplan"
    folder.mkdir(parents=True)
    (folder / "01-renderer.yaml").write_text(f"network: {{version: 2, renderer: {renderer}}}\n")
    (folder / "90-sparkops-fabric.yaml").write_text(_netplan.render(RAILS, 9000))
    subprocess.run(["netplan", "generate", "--root-dir", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("rails", "part"),
    [
        ({}, "no rail"),
        ({"enp1s0f1np1": []}, "has no address"),
        ({"enp1s0f1np1": ["198.51.100.11"]}, "lacks the prefix length"),
        ({"enp1s0f1np1": ["198.51.100.300/24"]}, "enp1s0f1np1"),
        ({"x: {}\n y": ["198.51.100.11/24"]}, "is not an interface name"),
    ],
)
def test_rails_that_cannot_be(rails, part):
    with pytest.raises(_netplan.NetplanError) as caught:
        _netplan.render(rails, 9000)
    assert part in str(caught.value)


def test_files_of_others_are_recognised():
    texts = {"40-cx7.yaml": NVIDIA, "50-lan.yaml": LAN, "99-nvidia-sync-cluster.yaml": LAN, "90-own.yaml": NVIDIA}
    assert _netplan.foreign_files(texts, "90-own.yaml", RAILS) == [
        "40-cx7.yaml (enP2p1s0f1np1, enp1s0f1np1)",
        "99-nvidia-sync-cluster.yaml (NVIDIA Sync, which disables other netplan files)",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        # What NetworkManager writes into /etc/netplan for each connection that was made with nmcli or by mouse.
        ("network:\n  version: 2\n  ethernets:\n    NM-3c1e:\n      renderer: NetworkManager\n      match:\n        name: \"enp1s0f1np1\"\n", True),
        ("network: {version: 2, ethernets: {enp1s0f1np1: {mtu: 1500}}}\n", True),
        ("network:\n  ethernets:\n    cx7:\n      match: {name: 'enp1s0f*'}\n", True),
        ('{"network": {"ethernets": {"cx7": {"match": {"name": "enp1s0f[01]*"}}}}}', True),
        ("network:\n  ethernets:\n    cx7:\n      match:\n        macaddress: 3C:6D:66:0A:1B:13\n", True),
        ("network:\n  bonds:\n    bond0:\n      interfaces: [enp1s0f1np1]\n", True),
        ("network:\n  vlans:\n    enp1s0f1np1.100: {id: 100, link: enp1s0f1np1}\n", False),
        ("network:\n  ethernets:\n    enP7s7: {dhcp4: true}  # not enp1s0f1np1\n", False),
        ("network:\n  ethernets:\n    lan:\n      match: {name: 'enP7*'}\n", False),
    ],
)
def test_whatever_way_a_file_speaks_of_an_interface(text, named):
    links = [{"ifname": "enp1s0f1np1", "address": "3c:6d:66:0a:1b:13"}, {"ifname": "enP7s7", "address": "3c:6d:66:0a:1b:10"}]
    assert _netplan.foreign_files({"50-x.yaml": text}, "90-own.yaml", ["enp1s0f1np1"], links) == (["50-x.yaml (enp1s0f1np1)"] if named else [])


def test_rails_of_a_plan_are_its_rdma_rails():
    rails = [{"interface": "enp1s0f1np1", "address": "198.51.100.11", "prefix": 24, "hca": "rocep1s0f1"}] * 2
    plain = {"interface": "enP7s7", "address": "192.0.2.21", "prefix": 24, "hca": ""}
    assert rail_addresses({"rails": [*rails, plain]}) == {"enp1s0f1np1": ["198.51.100.11/24"]}
    assert rail_addresses({}) == {}


# --- the module ------------------------------------------------------------------------------------------------


class Node:
    """A node's folders, and a netplan and systemd that only write down what they were asked."""

    def __init__(self, root: pathlib.Path, monkeypatch, capsys) -> None:
        self.root, self.capsys, self.calls, self.fail = root, capsys, [], ""
        self.mtu, self.renders = dict.fromkeys(RAILS, 9000), True
        monkeypatch.setattr(fabric_netplan, "RENDERER_SECONDS", 0)
        self.folder = root / "etc/netplan"
        self.folder.mkdir(parents=True)
        self.file = self.folder / "90-sparkops-fabric.yaml"
        (self.folder / "50-lan.yaml").write_text(LAN)
        (root / "route").write_text("Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\nenP7s7\t00000000\t0105000A\t3\t0\t0\t0\t00000000\n")
        monkeypatch.setattr(fabric_netplan.AnsibleModule, "run_command", self.run_command)

    def run_command(self, command, **dummy):
        if command == ["ip", "-json", "address", "show"]:  # reads only, so that it is no call to speak of
            addresses = {name: [{"family": "inet", "local": one.split("/")[0], "prefixlen": int(one.split("/")[1])} for one in RAILS[name]] for name in RAILS}
            return 0, json.dumps([{"ifname": name, "mtu": self.mtu[name], "addr_info": addresses[name]} for name in self.mtu]), ""
        if command == ["netplan", "apply"] and not self.fail and self.renders:
            self.mtu = dict.fromkeys(self.mtu, 9000)
        if command[:3] == ["ip", "link", "set"]:
            self.mtu[command[4]] = int(command[6])
        words = ["ROOT" if word.startswith("/tmp/") and command[:2] == ["netplan", "generate"] else word for word in command]
        self.calls.append(" ".join(words).replace(str(self.root), ""))
        return (1, "", "it is wrong") if self.fail and self.fail in self.calls[-1] else (0, "", "")

    def run(self, **args):
        self.calls.clear()
        common = {"node": "spark-1", "folder": str(self.folder), "backup_folder": str(self.root / "backup"), "route_file": str(self.root / "route")}
        with patch_module_args({**common, **args}), pytest.raises(SystemExit):
            fabric_netplan.main()
        return json.loads(self.capsys.readouterr().out)

    def take_back(self, backup):
        """What the timer does at its end; the commands that it gives."""
        tools, done = self.root / "bin", self.root / "done"
        tools.mkdir(exist_ok=True)
        for name in ("netplan", "ip"):
            (tools / name).write_text(f"#!/bin/sh\necho {name} $@ >> {done}\n")
            (tools / name).chmod(0o755)
        subprocess.run(["/bin/sh", os.path.join(backup, "return.sh")], check=True, env={"PATH": f"{tools}:{os.environ['PATH']}"})
        return done.read_text().splitlines()


@pytest.fixture
def node(tmp_path, monkeypatch, capsys):
    return Node(tmp_path, monkeypatch, capsys)


def test_check_apply_check_apply(node):
    predicted = node.run(rails=RAILS, _ansible_check_mode=True, _ansible_diff=True)
    assert predicted["changed"] and node.calls == ["netplan generate --root-dir ROOT"]
    assert not node.file.exists() and not (node.root / "backup").exists()
    applied = node.run(rails=RAILS, _ansible_diff=True)
    assert applied["changed"] and applied["diff"] == predicted["diff"] and applied["diff"]["after"] == node.file.read_text()
    assert stat.S_IMODE(node.file.stat().st_mode) == 0o600
    assert node.run(rails=RAILS, _ansible_check_mode=True)["changed"] is False
    assert node.run(rails=RAILS)["changed"] is False and node.calls == []


def test_validated_first_then_the_timer_then_the_change(node):
    backup = node.run(rails=RAILS)["backup"].replace(str(node.root), "")
    assert node.calls == [
        "netplan generate --root-dir ROOT",
        "systemctl stop sparkops-fabric-return.timer",
        f"systemd-run --unit=sparkops-fabric-return --on-active=120s --collect /bin/sh {backup}/return.sh",
        "netplan apply",
    ]
    assert node.run(state="confirmed", rails=RAILS)["changed"] is False
    assert node.calls == ["systemctl stop sparkops-fabric-return.timer"]


def test_a_timer_that_an_early_end_left_behind_is_told_until_it_is_confirmed(node):
    assert node.run(rails=RAILS, _ansible_check_mode=True)["pending"] is False
    assert node.run(rails=RAILS)["pending"] is True
    again = node.run(rails=RAILS)  # nothing to change, and yet the timer would take the change back
    assert (again["changed"], again["pending"]) == (False, True)
    node.run(state="confirmed", rails=RAILS)
    assert node.run(rails=RAILS)["pending"] is False


def test_a_change_that_was_taken_back_meanwhile_is_not_confirmed(node):
    node.run(rails=RAILS)
    node.file.unlink()
    found = node.run(state="confirmed", rails=RAILS)
    assert found["refusals"][0]["id"] == "fabric.netplan_returned" and node.calls == ["systemctl stop sparkops-fabric-return.timer"]


def test_a_rail_that_runs_otherwise_than_the_file_says_is_set_right(node):
    node.run(rails=RAILS)
    node.mtu["enP2p1s0f1np1"] = 1500
    predicted = node.run(rails=RAILS, _ansible_check_mode=True, _ansible_diff=True)
    assert predicted["changed"] and "# enP2p1s0f1np1 runs with MTU 1500" in predicted["diff"]["before"] and node.mtu["enP2p1s0f1np1"] == 1500
    assert node.run(rails=RAILS)["changed"] and node.mtu["enP2p1s0f1np1"] == 9000
    assert node.run(rails=RAILS)["changed"] is False


def test_what_the_renderer_leaves_is_set_by_hand(node):
    node.run(rails=RAILS)
    node.mtu["enP2p1s0f1np1"], node.renders = 1500, False
    assert node.run(rails=RAILS)["changed"] and node.mtu["enP2p1s0f1np1"] == 9000
    assert node.calls[-2:] == ["ip link set dev enP2p1s0f1np1 mtu 9000 up", "ip address replace 203.0.113.11/24 dev enP2p1s0f1np1"]


def test_an_address_that_a_rail_lost_is_seen():
    address = {"family": "inet", "local": "203.0.113.11", "prefixlen": 24}
    links = [{"ifname": "enp1s0f1np1", "mtu": 9000, "addr_info": []}, {"ifname": "enP2p1s0f1np1", "mtu": 9000, "addr_info": [address]}]
    assert _netplan.drift(RAILS, 9000, links) == ["enp1s0f1np1 runs without 198.51.100.11/24"]


def test_an_interface_that_the_node_does_not_have_is_refused(node):
    del node.mtu["enP2p1s0f1np1"]
    found = node.run(rails=RAILS)
    assert found["refusals"][0]["id"] == "fabric.netplan_rail" and "no interface enP2p1s0f1np1" in found["msg"] and not node.file.exists()


@pytest.mark.parametrize("before", [None, "an earlier file of ours\n"])
def test_the_return_program_puts_back_what_was_there(node, before):
    if before:
        node.file.write_text(before)
    node.mtu["enP2p1s0f1np1"] = 1500
    wrong = {**RAILS, "enP2p1s0f1np1": ["203.0.113.11/24", "198.18.1.1/32"]}
    done = node.take_back(node.run(rails=wrong)["backup"])
    assert (node.file.read_text() if node.file.exists() else None) == before
    assert (node.folder / "50-lan.yaml").read_text() == LAN
    assert done == [
        "ip address del 198.18.1.1/32 dev enP2p1s0f1np1",  # what may have cut the node off goes first
        "netplan apply",
        "ip link set dev enP2p1s0f1np1 mtu 1500",
        "ip address replace 203.0.113.11/24 dev enP2p1s0f1np1",
        "ip link set dev enp1s0f1np1 mtu 9000",
        "ip address replace 198.51.100.11/24 dev enp1s0f1np1",
    ]


def test_a_change_on_top_of_an_unconfirmed_one_is_taken_back_to_what_was_confirmed(node):
    node.run(rails=RAILS)
    node.run(state="confirmed", rails=RAILS)
    confirmed = node.file.read_text()
    first = node.run(rails={**RAILS, "enP2p1s0f1np1": ["198.18.1.1/32"]}, mtu=1500)
    node.mtu["enP2p1s0f1np1"] = 1500
    second = node.run(rails={"enp1s0f1np1": ["198.18.2.2/32"]})
    assert second["backup"] == first["backup"] and second["pending"]
    assert pathlib.Path(second["backup"], node.file.name).read_text() == confirmed != node.file.read_text()
    done = node.take_back(second["backup"])
    assert node.file.read_text() == confirmed
    # What either of the two gave goes, and every rail runs again as before the first.
    assert done[:done.index("netplan apply")] == ["ip address del 198.18.1.1/32 dev enP2p1s0f1np1", "ip address del 198.18.2.2/32 dev enp1s0f1np1"]
    assert "ip link set dev enP2p1s0f1np1 mtu 9000" in done
    node.mtu["enP2p1s0f1np1"] = 9000
    again = node.run(rails=RAILS)
    assert (again["changed"], again["pending"]) == (False, False)
    assert node.run(rails=RAILS, mtu=1500)["backup"] != first["backup"]


def test_an_interface_that_came_after_an_unconfirmed_change_returns_to_what_it_had_then():
    first = {"rails": {"a": ["192.0.2.1/24"]}, "links": [{"ifname": "a", "mtu": 1500}]}
    links = [{"ifname": "a", "mtu": 9000}, {"ifname": "b", "mtu": 1500}]
    found = _netplan.join_changes(first, {"a": ["192.0.2.2/24"], "b": ["192.0.2.3/24"]}, links)
    assert found == {"rails": {"a": ["192.0.2.1/24", "192.0.2.2/24"], "b": ["192.0.2.3/24"]}, "links": [first["links"][0], links[1]]}


@pytest.mark.parametrize("check", [False, True])
def test_what_netplan_rejects_is_not_written(node, check):
    node.fail = "netplan generate"
    found = node.run(rails=RAILS, _ansible_check_mode=check)
    assert [refusal["id"] for refusal in found["refusals"]] == ["fabric.netplan_invalid"] and "it is wrong" in found["msg"]
    assert not node.file.exists() and not (node.root / "backup").exists()


def test_a_failed_apply_is_said_while_the_timer_runs(node):
    node.fail = "netplan apply"
    found = node.run(rails=RAILS)
    assert found["refusals"][0]["id"] == "fabric.netplan_failed" and "taken back within 120 s" in found["msg"]
    assert any(call.startswith("systemd-run") for call in node.calls)


def test_without_a_timer_nothing_is_changed(node):
    node.fail = "systemd-run"
    assert node.run(rails=RAILS)["refusals"][0]["id"] == "fabric.netplan_failed"
    assert not node.file.exists() and "netplan apply" not in node.calls


@pytest.mark.parametrize("check", [False, True])
def test_a_foreign_file_is_left_alone_and_named(node, check):
    (node.folder / "40-cx7.yaml").write_text(NVIDIA)
    found = node.run(rails=RAILS, _ansible_check_mode=check)
    assert found["refusals"][0]["id"] == "fabric.netplan_foreign" and "40-cx7.yaml (enP2p1s0f1np1, enp1s0f1np1)" in found["msg"]
    assert node.calls == [] and (node.folder / "40-cx7.yaml").read_text() == NVIDIA and not node.file.exists()


def test_the_interface_of_the_default_route_is_spared(node):
    found = node.run(rails={"enP7s7": ["192.0.2.21/24"]})
    assert found["refusals"][0]["id"] == "fabric.netplan_default_route" and not node.file.exists()


def test_a_system_without_netplan_or_rights_is_named(node):
    (node.folder / "60-locked.yaml").mkdir()  # unreadable for root too
    assert node.run(rails=RAILS)["refusals"][0]["id"] == "fabric.netplan_unreadable"
    shutil.rmtree(node.folder)
    assert node.run(rails=RAILS)["refusals"][0]["id"] == "fabric.netplan_missing"


def test_restore_takes_only_our_file_away(node):
    node.run(rails=RAILS)
    assert node.run(state="absent", _ansible_check_mode=True)["changed"] and node.file.exists()
    assert node.run(state="absent")["changed"] and not node.file.exists() and (node.folder / "50-lan.yaml").exists()
    assert node.calls == ["systemctl stop sparkops-fabric-return.timer", "netplan apply"]
    assert node.run(state="absent")["changed"] is False
