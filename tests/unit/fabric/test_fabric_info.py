# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The module as a whole: which commands it runs, to the letter, and what it makes of their failures."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.modules import fabric_info

from fabric_trees import DATA, seed_pair

ADDRESSES = "ip -json -details address show"
ROUTES = "ip -json -4 route show"


def run(monkeypatch, capsys, root, outputs, tools=("ibv_devinfo",), **args):
    """Run main() with canned outputs: command line -> (code, out, err), or an error to raise. Any other command fails the test."""
    calls = []

    def run_command(module, command, **dummy):
        calls.append(" ".join(command))
        output = outputs[calls[-1]]
        if isinstance(output, Exception):
            raise output
        return output

    monkeypatch.setattr(fabric_info.AnsibleModule, "run_command", run_command)
    monkeypatch.setattr(fabric_info.AnsibleModule, "get_bin_path", lambda module, name: f"/usr/bin/{name}" if name in tools else None)
    roots = {f"{name}_root": str(root / name) for name in ("sys", "proc", "etc")}
    with patch_module_args({**roots, **args}), pytest.raises(SystemExit):
        fabric_info.main()
    return calls, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("check", [False, True])
def test_reads_with_exactly_these_commands(monkeypatch, capsys, tmp_path, check):
    machine = seed_pair(tmp_path)["spark-1"]
    outputs = {
        ADDRESSES: (0, json.dumps(machine.links), ""),
        ROUTES: (0, json.dumps(machine.routes), ""),
        "ibv_devinfo": (0, (DATA / "p1_head_ibv_devinfo.txt").read_text(), ""),
    }
    calls, found = run(monkeypatch, capsys, machine.root, outputs, _ansible_check_mode=check)
    assert calls == list(outputs)
    assert found["changed"] is False
    assert [(port["hca"], port["usable"], port["rdma_mtu_measured"]) for port in found["fabric"]["ports"] if port["state"] == "ACTIVE"] == [
        ("rocep1s0f1", [3], True),
        ("roceP2p1s0f1", [3], True),
    ]


@pytest.mark.parametrize("devices", [(255, "", "No IB devices found"), (0, "", "")])
def test_no_rdma_tools_or_devices_are_fine(monkeypatch, capsys, tmp_path, devices):
    outputs = {ADDRESSES: (0, "[{},{}]", ""), ROUTES: (0, "", ""), "ibv_devinfo": devices}
    dummy, found = run(monkeypatch, capsys, tmp_path, outputs)
    assert found["fabric"]["ports"] == found["fabric"]["routes"] == found["fabric"]["interfaces"] == []
    calls, dummy2 = run(monkeypatch, capsys, tmp_path, outputs, tools=())
    assert calls == [ADDRESSES, ROUTES]


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ((1, "", 'Object "-json" is unknown'), "exit code 1"),
        ((0, "not json", ""), "not json"),
        ((0, "{}", ""), "'{}'"),
        (FileNotFoundError(2, "No such file"), "exit code 127"),
    ],
)
def test_an_ip_that_does_not_answer_is_a_refusal(monkeypatch, capsys, tmp_path, output, part):
    dummy, found = run(monkeypatch, capsys, tmp_path, {ADDRESSES: output})
    assert found["refusals"][0]["id"] == "fabric.ip_command"
    assert part in found["msg"] and "iproute2" in found["msg"]
