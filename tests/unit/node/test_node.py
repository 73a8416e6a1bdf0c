# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Tables over the readers of a node and over what preflight makes of them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.sparkops.inference.plugins.action import preflight
from ansible_collections.sparkops.inference.plugins.action.node_facts import clock_skew
from ansible_collections.sparkops.inference.plugins.filter import bootstrap
from ansible_collections.sparkops.inference.plugins.module_utils import _node, _preflight
from ansible_collections.sparkops.inference.plugins.modules import node_facts


@pytest.mark.parametrize(
    "text, expected",
    [
        ("MemTotal:       127600000 kB\nMemAvailable:   104000000 kB\n", {"MemTotal": 127600000, "MemAvailable": 104000000}),
        ("HugePages_Total:       0\n", {"HugePages_Total": 0}),
        ("garbage\nNo: number\nEmpty:\n", {}),
        ("", {}),
    ],
)
def test_meminfo(text, expected):
    assert _node.parse_meminfo(text) == expected


@given(st.text())
def test_parsers_survive_any_text(text):
    _node.parse_meminfo(text)
    _node.parse_os_release(text)


def test_listening_inodes_only_listeners_of_wanted_ports():
    text = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000\n"
        "   1: 0100007F:22B8 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000\n"
        "   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0000\n"
        "   3: short\n"
    )
    assert _node.parse_listening_inodes(text, {8888}) == {8888: ["4711"]}


def test_a_taken_port_has_the_names_of_those_who_hold_it(tmp_path):
    (tmp_path / "net").mkdir()
    row = "   0: 00000000:{port:04X} 00000000:0000 0A 0:0 00:0 0     0        0 {inode} 1 0000\n"
    (tmp_path / "net/tcp").write_text("head\n" + row.format(port=8888, inode=4711) + row.format(port=2049, inode=0))
    (tmp_path / "net/tcp6").write_text("head\n" + row.format(port=8888, inode=4712) + row.format(port=22, inode=4713))
    processes = ((9, "nginx", ["socket:[4712]"]), (10, "python3", ["/dev/null", "socket:[4711]"]), (11, "sshd", ["socket:[4713]"]), (12, "idle", []))
    for pid, name, links in processes:
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/comm").write_text(name + "\n")
        for number, link in enumerate(links):
            (tmp_path / f"{pid}/fd/{number}").symlink_to(link)
    (tmp_path / "13").mkdir()  # ended while we looked
    assert node_facts.listeners({8888, 2049, 80}, str(tmp_path)) == [
        {"port": 2049, "owners": []},
        {"port": 8888, "owners": ["nginx (pid 9)", "python3 (pid 10)"]},
    ]


def test_ambient_settings_are_named_not_read():
    names = ["PATH", "HOME", "HF_HOME", "DOCKER_HOST", "MAX_MODEL_LEN", "NCCL_IB_HCA", "IMAGEMAGICK", "LANG"]
    assert _node.ambient_settings(names) == ["DOCKER_HOST", "HF_HOME", "MAX_MODEL_LEN", "NCCL_IB_HCA"]


def test_addresses_without_link_local():
    links = [{"ifname": "eth1", "addr_info": [
        {"family": "inet", "local": "198.51.100.11", "prefixlen": 24, "scope": "global"},
        {"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"},
    ]}]
    assert _node.parse_ip_addresses(links) == [{"interface": "eth1", "address": "198.51.100.11", "prefix": 24}]


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "Name:\tsystemd\nUmask:\t0022\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t27 103 1000 \n",
            {"name": "systemd", "uid": 1000, "gids": {27, 103, 1000}},
        ),
        ("Name:\t(sd-pam)\nUid:\t0\t0\t0\t0\nGid:\t0\t7\t0\t0\nGroups:\t\n", {"name": "(sd-pam)", "uid": 0, "gids": {7}}),
        ("", {"name": "", "uid": None, "gids": set()}),
    ],
)
def test_process_status(text, expected):
    assert _node.parse_process_status(text) == expected


@pytest.mark.parametrize(
    "node_time, before, after, expected",
    [(100.5, 100, 101, 0), (95, 100, 101, -5), (161.5, 100, 101, 60.5), (100, 100, 100, 0)],
)
def test_clock_skew_knows_the_duration_of_the_call(node_time, before, after, expected):
    assert clock_skew(node_time, before, after) == expected


PLAN = {
    "deployment": "lab_tiny",
    "nodes": ["a", "b"],
    "head": "a",
    "ranks": 2,
    "addresses": {"a": "198.51.100.11", "b": "198.51.100.12"},
    "image": {"platform": "linux/amd64"},
    "api": {"port": 8888},
    "rendezvous_port": 29521,
    "settings": {"bootstrap_packages": False, "bootstrap_docker_group": False, "bootstrap_state_dir": False, "bootstrap_node_keys": False},
}
GOOD = {
    "user": {"name": "alice", "home": "/home/alice", "uid": 1000},
    "sudo": "passwordless",
    "manager": None,
    "arch": "x86_64",
    "systemd": True,
    "python": {"requests": True, "executable": "/usr/bin/python3"},
    "commands": {"rsync": "/usr/bin/rsync", "ip": "/sbin/ip", "ssh": "/usr/bin/ssh", "ssh-keygen": "/usr/bin/ssh-keygen"},
    "addresses": [{"interface": "lo", "address": "127.0.0.1"}, {"interface": "eth1", "address": "198.51.100.11"}],
    "listeners": [],
    "docker": {"state": "usable", "socket": "/var/run/docker.sock", "version": "20.10.24+dfsg1"},
    "ambient": [],
    "clock_skew": 0.0,
    "state_root": "/var/lib/sparkops",
    "state_root_exists": True,
    "state_root_writable": True,
    "weights_root": "/var/lib/sparkops/weights",
    "libexec": "/usr/local/lib/sparkops",
    "key": {"public": "ssh-ed25519 AAAA sparkops@a"},
    "authorized": ["restrict,… node_gate.py"],
    "known_hosts": {"text": "198.51.100.12 ssh-ed25519 AAAB\n", "path": "/x"},
    "host_keys": ["ssh-ed25519 AAAB"],
}


def examine(change=None, plan=None, name="a", containers=(), strangers=()):
    node = copy.deepcopy(GOOD)
    for path, value in (change or {}).items():
        target = node
        *parents, last = path.split(".")
        for part in parents:
            target = target[part]
        target[last] = value
    return _preflight.examine(plan or PLAN, name, node, list(containers), strangers)


def ids(findings):
    return [refusal.id for refusal in findings.refusals]


def test_a_good_node_has_no_findings():
    findings = examine()
    assert (findings.refusals, findings.predictions, findings.notices) == ([], [], [])


@pytest.mark.parametrize(
    "change, refused",
    [
        ({"arch": "aarch64"}, "preflight.platform"),
        ({"systemd": False}, "preflight.systemd"),
        ({"state_root_writable": False}, "preflight.state_root"),
        ({"docker.state": "not_installed"}, "preflight.docker_missing"),
        ({"docker.state": "not_running"}, "preflight.docker_stopped"),
        ({"docker.state": "no_permission"}, "preflight.docker_permission"),
        ({"docker.version": "19.03.8"}, "preflight.docker_old"),
        ({"commands.rsync": None}, "preflight.tools"),
        ({"python.requests": False}, "preflight.tools"),
        ({"addresses": []}, "preflight.fabric_address"),
        ({"addresses": [{"interface": "lo", "address": "198.51.100.11"}]}, "preflight.fabric_loopback"),
        ({"listeners": [{"port": 8888, "owners": ["nginx (pid 7)"]}]}, "preflight.port"),
        ({"listeners": [{"port": 29521, "owners": []}]}, "preflight.port"),
        ({"clock_skew": -400.0}, "preflight.clock"),
        ({"key.public": ""}, "preflight.node_keys"),
        ({"sudo": "none", "manager": {"lingers": False, "may_use_docker": None}}, "preflight.linger"),
        ({"sudo": "none", "manager": {"lingers": True, "may_use_docker": False}}, "preflight.stale_manager"),
    ],
)
def test_each_lack_is_one_refusal_with_all_its_parts(change, refused):
    findings = examine(change)
    assert ids(findings) == [refused]
    (refusal,) = findings.refusals
    assert refusal.node == "a" and all(refusal.as_dict().values())
    assert refusal.found in refusal.text and refusal.wanted in refusal.text and refusal.next_step in refusal.text


def test_a_peer_that_is_not_let_in_or_not_known_is_named():
    (refusal,) = examine(strangers=["b"]).refusals
    assert refusal.id == "preflight.node_keys" and "b" in refusal.found
    lines = bootstrap.gate_lines(HOSTVARS, PLAN, "a")
    hostvars = copy.deepcopy(HOSTVARS)
    hostvars["a"]["spark_node"]["authorized"] = lines
    hostvars["a"]["spark_node"]["known_hosts"]["text"] = "\n".join(bootstrap.known_host_lines(hostvars, PLAN, "a"))
    assert preflight.strangers(hostvars, PLAN, "a") == []
    hostvars["b"]["spark_node"]["host_keys"] = ["ssh-ed25519 REPLACED"]
    assert preflight.strangers(hostvars, PLAN, "a") == ["b"]
    hostvars["b"]["spark_node"]["host_keys"] = HOSTVARS["b"]["spark_node"]["host_keys"]
    hostvars["b"]["spark_node"]["key"] = {"public": "ssh-ed25519 NEWKEY sparkops@b"}
    assert preflight.strangers(hostvars, PLAN, "a") == ["b"]
    assert preflight.strangers({"a": hostvars["a"], "b": {}}, PLAN, "a") == []


def test_all_problems_come_at_once():
    findings = examine({"docker.state": "no_permission", "commands.rsync": None, "addresses": [], "clock_skew": 61.0})
    assert ids(findings) == ["preflight.docker_permission", "preflight.tools", "preflight.fabric_address", "preflight.clock"]


@pytest.mark.parametrize(
    "item, change",
    [
        ("bootstrap_state_dir", {"state_root_exists": False, "state_root_writable": False}),
        ("bootstrap_state_dir", {"sudo": "none", "manager": {"lingers": False, "may_use_docker": True}}),
        ("bootstrap_packages", {"docker.state": "not_installed"}),
        ("bootstrap_packages", {"commands.rsync": None}),
        ("bootstrap_docker_group", {"docker.state": "no_permission"}),
        ("bootstrap_node_keys", {"key.public": ""}),
    ],
)
def test_what_bootstrap_mends_is_a_prediction(item, change):
    plan = {**PLAN, "settings": {**PLAN["settings"], item: True}}
    findings = examine(change, plan=plan)
    assert findings.refusals == [] and len(findings.predictions) == 1


def test_bootstrap_without_root_mends_no_package():
    plan = {**PLAN, "settings": {**PLAN["settings"], "bootstrap_packages": True}}
    assert ids(examine({"commands.rsync": None, "sudo": "none"}, plan=plan)) == ["preflight.tools"]


def test_an_unreachable_node_is_one_of_the_problems():
    assert ids(_preflight.examine(PLAN, "b", None, [])) == ["preflight.unreachable"]


def test_own_serving_group_may_hold_its_port():
    own = {"name": "lab_tiny-rank0", "status": "running", "labels": {"sparkops.deployment": "lab_tiny"}}
    change = {"listeners": [{"port": 8888, "owners": []}]}
    assert ids(examine(change, containers=[own])) == []
    other = {**own, "labels": {"sparkops.deployment": "other"}}
    assert ids(examine(change, containers=[other])) == ["preflight.port"]


def test_a_worker_listens_on_nothing():
    change = {"listeners": [{"port": 8888, "owners": []}], "addresses": [{"interface": "eth1", "address": "198.51.100.12"}]}
    assert ids(examine(change, name="b")) == []


def test_a_solo_group_needs_no_peers():
    plan = {**PLAN, "nodes": ["a"], "ranks": 1, "addresses": {"a": "198.51.100.11"}}
    change = {"key.public": "", "addresses": [], "commands.rsync": None}
    assert ids(examine(change, plan=plan)) == []


def test_small_skew_and_ambient_settings_are_told():
    findings = examine({"clock_skew": 5.0, "ambient": ["HF_HOME"]})
    assert findings.refusals == [] and len(findings.notices) == 2 and "HF_HOME" in findings.notices[1]


HOSTVARS = {
    "a": {"spark_node": GOOD},
    "b": {"spark_node": {**GOOD, "key": {"public": "ssh-ed25519 BBBB sparkops@b"}, "host_keys": ["ssh-ed25519 HKB", "ecdsa HKB2"]}},
}


def test_gate_lines_allow_each_peer_from_its_address_only():
    (line,) = bootstrap.gate_lines(HOSTVARS, PLAN, "a")
    assert line == (
        'restrict,from="198.51.100.12",command="/usr/bin/python3 /usr/local/lib/sparkops/node_gate.py /var/lib/sparkops '
        '/var/lib/sparkops/weights" ssh-ed25519 BBBB sparkops@b'
    )


def test_known_hosts_replace_old_keys_of_peers_and_keep_the_rest():
    hostvars = copy.deepcopy(HOSTVARS)
    hostvars["a"]["spark_node"]["known_hosts"]["text"] = "198.51.100.12 ssh-ed25519 OLD\n203.0.113.9 ssh-ed25519 OTHER\n"
    assert bootstrap.known_host_lines(hostvars, PLAN, "a") == [
        "203.0.113.9 ssh-ed25519 OTHER", "198.51.100.12 ssh-ed25519 HKB", "198.51.100.12 ecdsa HKB2",
    ]


def test_lacking_packages():
    node = copy.deepcopy(GOOD)
    assert bootstrap.lacking_packages(node) == []
    node["commands"].update({"rsync": None, "ssh": None, "ssh-keygen": None})
    node["python"]["requests"] = False
    node["docker"]["state"] = "not_installed"
    assert bootstrap.lacking_packages(node) == ["docker.io", "openssh-client", "python3-requests", "rsync"]


def test_weights_root_is_the_real_path(tmp_path):
    """A mount below it is found in the kernel's table by no other name."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    (tmp_path / "self").mkdir()
    mounted = f"{tmp_path}/disk/weights/acme--tiny/c"
    (tmp_path / "self/mountinfo").write_text(f"31 30 0:57 / {mounted} ro - nfs4 198.51.100.11:/x ro,vers=4.2\n")
    params = {
        "state_root": str(tmp_path / "state"), "weights_root": f"{tmp_path}/data/weights", "proc_root": str(tmp_path), "libexec": str(tmp_path / "bin"),
        "deployment": "d", "ports": [], "docker_socket": str(tmp_path / "none"),
    }  # fmt: skip
    module = SimpleNamespace(params=params, get_bin_path=lambda name, **dummy: None, run_command=lambda *dummy, **more: (1, "", ""))
    facts = node_facts.node(module, node_facts.DockerApi(params["docker_socket"], timeout=1))
    assert facts["weights_root"] == f"{tmp_path}/disk/weights" and facts["network_mounts"] == [mounted]
