# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The fabric on real RoCE devices, a real netplan, and real cables; in the order of the file, since each test starts where the last one ended."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
import yaml
from conftest import ADDRESSES, HCAS, INVENTORY, MACHINES, RAILS, VMLAB, lab, link, on, plays, play, until

SECOND = {machine: rails[1] for machine, rails in RAILS.items()}
FILE = "/etc/netplan/90-sparkops-fabric.yaml"
TABLE = r"""
cd /sys/class/infiniband/{hca}/ports/1
for index in $(ls gids | sort -n | head -64); do
    printf '%s|%s|%s\n' "$index" "$(cat gids/$index 2>/dev/null)" "$(cat gid_attrs/types/$index 2>/dev/null || echo UNREADABLE)"
done
"""


def gid_table(machine, hca):
    """index -> (GID, type), read by the machine's own shell."""
    rows = (line.split("|") for line in on(machine, TABLE.format(hca=hca)).splitlines())
    return {int(index): (gid, kind) for index, gid, kind in rows}


def usable(machine, rail):
    """Slots that hold the rail's address as RoCE v2, found without any code of ours."""
    numbers = [int(part) for part in ADDRESSES[machine][rail].partition("/")[0].split(".")]
    tail = "ffff:{:02x}{:02x}:{:02x}{:02x}".format(*numbers)
    return [index for index, (gid, kind) in gid_table(machine, HCAS[machine][rail]).items() if gid.endswith(tail) and kind == "RoCE v2"]


def facts():
    """What module fabric_info reads, by machine."""
    environment = {**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true"}
    done = subprocess.run(["ansible", "-i", INVENTORY, "sparks", "-m", "sparkops.inference.fabric_info"], cwd=plays.ROOT, env=environment,
                          capture_output=True, text=True, check=True)
    hosts = json.loads(done.stdout[done.stdout.index("{"):])["plays"][0]["tasks"][0]["hosts"]
    return {machine: {port["hca"]: port for port in hosts[machine]["fabric"]["ports"]} for machine in MACHINES}


@pytest.fixture(name="no_files_of_others")
def fixture_no_files_of_others():
    """As on machines whose rails nobody has configured: the documents' file is away, and comes back in the end."""
    for machine in MACHINES:
        on(machine, "if [ -e /etc/netplan/40-cx7.yaml ]; then mv /etc/netplan/40-cx7.yaml /root/; fi")
    yield
    for machine in MACHINES:
        on(machine, f"if [ -e /root/40-cx7.yaml ]; then rm -f {FILE}; mv /root/40-cx7.yaml /etc/netplan/; netplan apply; fi")


def configured(extra=None, **variables):
    """Variables of a run that configures the rails, and what stays away from them."""
    return {"fabric_configure": True, "fabric_probe": "always", **variables, **(extra or {})}


def test_empty_slots_fail_to_read_and_the_own_ones_are_found():
    found = facts()
    for machine in MACHINES:
        for rail, hca in enumerate(HCAS[machine]):
            table = gid_table(machine, hca)
            assert any(kind == "UNREADABLE" for dummy, kind in table.values()), table
            assert found[machine][hca]["usable"] == usable(machine, rail) != []
            assert found[machine][hca]["interface"] == RAILS[machine][rail] and found[machine][hca]["state"] == "ACTIVE"


def test_the_pair_uses_both_halves_and_the_doctor_finds_it_healthy():
    done = play("doctor")
    assert done.code == 0, done.text[-4000:]
    for machine in MACHINES:
        address = ADDRESSES[machine][0].partition("/")[0]
        assert f"{machine}: {RAILS[machine][0]} {address}, ={','.join(HCAS[machine])}, pair" in done.text


def test_a_rail_at_mtu_1500_is_found_with_both_numbers():
    on("spark-2", f"ip link set {SECOND['spark-2']} mtu 1500")
    done = play("fabric", variables={"fabric_probe": "always"})
    assert done.code != 0 and "[fabric.mtu]" in done.text
    assert SECOND["spark-1"] in done.text and "9000, but 1500" in done.text and SECOND["spark-2"] in done.text
    on("spark-2", f"ip link set {SECOND['spark-2']} mtu 9000")


def test_a_foreign_netplan_is_left_alone_and_named():
    before = {machine: on(machine, "sha256sum /etc/netplan/*") for machine in MACHINES}
    done = play("fabric", variables={"fabric_configure": True})
    assert done.code != 0 and "[fabric.netplan_foreign]" in done.text and "40-cx7.yaml" in done.text
    assert before == {machine: on(machine, "sha256sum /etc/netplan/*") for machine in MACHINES}


def test_a_rail_that_drifts_is_told_and_repaired(no_files_of_others):
    """What a first run predicts and leaves is seen in molecule/vm_fabric."""
    done = play("fabric", variables=configured())
    assert done.code == 0, done.text[-4000:]
    on("spark-2", f"ip link set {SECOND['spark-2']} mtu 1500")
    refused = play("fabric", variables={"fabric_probe": "always"})
    assert refused.code != 0 and "9000, but 1500" in refused.text and "fabric_configure: true" in refused.text
    repaired = play("fabric", variables=configured())
    assert repaired.code == 0, repaired.text[-4000:]
    for machine in MACHINES:
        for rail, interface in enumerate(RAILS[machine]):
            assert link(machine, interface) == {"mtu": 9000, "addresses": [ADDRESSES[machine][rail]]}


def test_a_change_that_cuts_the_controller_off_comes_back_by_itself(no_files_of_others):
    """The address of the controller, typed as one of a rail: the machine answers itself from then on."""
    assert play("fabric", variables=configured()).code == 0
    before = on("spark-2", f"sha256sum {FILE}")
    wrong = {machine: {name: [address] for name, address in zip(RAILS[machine], ADDRESSES[machine])} for machine in MACHINES}
    wrong["spark-2"][SECOND["spark-2"]] = [ADDRESSES["spark-2"][1], "198.18.1.1/32"]
    done = play("fabric", variables=configured(
        {"wrong_rails": wrong, "fabric_rail_addresses": "{{ wrong_rails[inventory_hostname] }}"}, fabric_return_seconds=45))
    assert done.code != 0
    seconds = until("spark-2 answers again", lambda: subprocess.run([VMLAB, "ssh", "spark-2", "true"], check=False).returncode == 0, 120)
    print(f"spark-2 answers {seconds:.0f} s after the end of the play, which took {done.ended - done.begun:.0f} s")
    until("the file is back", lambda: on("spark-2", f"sha256sum {FILE}", check=False) == before, 60)
    assert link("spark-2", SECOND["spark-2"]) == {"mtu": 9000, "addresses": [ADDRESSES["spark-2"][1]]}
    assert play("fabric", variables=configured()).code == 0


def test_restore_takes_only_our_file_away(no_files_of_others):
    before = {machine: on(machine, f"sha256sum /etc/netplan/* | grep -v {FILE} || true") for machine in MACHINES}
    assert play("fabric", variables=configured()).code == 0
    done = play("fabric_restore")
    assert done.code == 0, done.text[-4000:]
    assert before == {machine: on(machine, "sha256sum /etc/netplan/*") for machine in MACHINES}


def test_bandwidth_is_measured_over_each_rail_and_a_floor_refuses():
    done = play("fabric", "-v", variables={"fabric_probe": "always", "fabric_bandwidth_floor": 0.001})
    assert done.code == 0, done.text[-4000:]
    figures = {hca: (float(gbits), latency) for gbits, hca, latency in re.findall(r"gbits: ([0-9.]+)\s+hca: (\S+)\s+latency_us: (\S+)", done.text)}
    print(f"Gb/s and microseconds: {figures}")
    assert set(figures) == set(HCAS["spark-2"]) and all(gbits > 0.001 and float(latency) > 0 for gbits, latency in figures.values()), done.text[-4000:]
    refused = play("fabric", variables={"fabric_probe": "always", "fabric_bandwidth_floor": 700})
    assert refused.code != 0 and "at least 700.0 Gb/s" in refused.text and "[fabric.bandwidth]" in refused.text, refused.text[-4000:]
    assert {hca for hca in HCAS["spark-2"] if f"rail {hca} to" in refused.text} == set(HCAS["spark-2"])


def test_a_pulled_cable_leaves_the_other_half_with_a_notice():
    lab("link", "spark-1", "2", "down")
    try:
        done = play("doctor")
        assert f"half of the QSFP port of {HCAS['spark-1'][0]} is not used: its twin {HCAS['spark-1'][1]}" in done.text
    finally:
        lab("link", "spark-1", "2", "up")
    until("the port is active again", lambda: "ACTIVE" in on("spark-1", f"cat /sys/class/infiniband/{HCAS['spark-1'][1]}/ports/1/state"), 30)


@pytest.mark.parametrize(("verdict", "rule"), [
    ("fabric.meeting_filtered", "--jump DROP"),
    ("fabric.meeting_refused", "--jump REJECT --reject-with tcp-reset"),
])
def test_a_filter_before_the_meeting_port_is_told_apart(verdict, rule):
    place = f"INPUT --protocol tcp --in-interface {RAILS['spark-1'][0]} --dport 29521 {rule}"
    on("spark-1", f"iptables --insert {place}")
    try:
        done = play("fabric", variables={"fabric_probe": "always"})
    finally:
        on("spark-1", f"iptables --delete {place}")
    assert done.code != 0 and f"[{verdict}]" in done.text, done.text[-4000:]


SSH_BY_MDNS = """<?xml version="1.0" standalone='no'?>
<!DOCTYPE service-group SYSTEM "avahi-service.dtd">
<service-group><name replace-wildcards="yes">%h</name><service><type>_ssh._tcp</type><port>22</port></service></service-group>
"""


def test_discover_finds_the_peer_and_both_its_addresses(tmp_path):
    # As on a Spark, whose avahi tells of its ssh.
    on("spark-2", f"cat >/etc/avahi/services/ssh.service <<'END'\n{SSH_BY_MDNS}END\nsystemctl restart avahi-daemon")
    until("avahi is up", lambda: "Server startup complete" in on("spark-2", "journalctl --unit avahi-daemon --since -20s --no-pager"), 20)
    target = tmp_path / "found.yml"
    done = play("discover", "--limit", "spark-1", variables={"discover_file": str(target)})
    assert done.code == 0, done.text[-4000:]
    assert yaml.safe_load(target.read_text())["sparks"] == {
        "hosts": {
            "spark-1": {"ansible_host": "198.18.1.21", "ansible_user": "alice", "fabric_address": "198.51.100.11"},
            "spark-2": {"ansible_host": "198.18.1.22", "ansible_user": "alice", "fabric_address": "198.51.100.12"},
        },
        "vars": {"serve_nodes": ["spark-1", "spark-2"]},
    }
    target.write_text("edited: by hand\n")
    refused = play("discover", "--limit", "spark-1", variables={"discover_file": str(target)})
    assert refused.code != 0 and "[discover.file]" in refused.text and target.read_text() == "edited: by hand\n"
