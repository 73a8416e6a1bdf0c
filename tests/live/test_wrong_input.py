# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Wrong input: one message with all that is wrong, nothing created, other groups untouched."""

from __future__ import annotations

import os
import time

import pytest
from conftest import ROOT, fingerprint, on, play

NODES = ("spark-1", "spark-2", "spark-3")


@pytest.fixture(autouse=True)
def nothing_changes():
    before = [fingerprint(node) for node in NODES]
    yield
    assert before == [fingerprint(node) for node in NODES]


@pytest.mark.parametrize(
    "variables, parts",
    [
        ({"serve_profile": "lab_tny"}, ["lab_tny", "lab_tiny", "profile.unknown"]),
        ({"serve_nodes": ["spark-1", "spark-2", "spark-3"], "serve_tensor_parallel": 2, "spark_hosts": "all"}, ["3 ranks", "TP 2"]),
        ({"serve_nodes": ["spark-1", "spark-9"]}, ["spark-9"]),
        ({"serve_port": 29521, "serve_rendezvous_port": 29521}, ["29521"]),
        ({"serve_port": "eighty", "serve_max_num_seqs": "-3", "serve_profile": "lab_tiny"}, ["serve_port", "eighty", "serve_max_num_seqs", "-3"]),
    ],
)
def test_wrong_settings_are_refused_before_any_node_is_changed(variables, parts):
    done = play("site", variables=variables)
    assert done.code != 0
    for part in parts:
        assert part in done.text, f"{part!r} is not in {done.text[-3000:]}"


def test_duplicate_fabric_addresses_are_refused_before_any_connection(tmp_path):
    done = play("site", variables={"fabric_address": "198.51.100.11"})
    assert done.code != 0 and "198.51.100.11" in done.text
    assert "node_facts" not in done.text, "a node was contacted"


def test_a_port_in_use_is_told_with_its_owner():
    on("spark-1", "systemd-run --unit sparklab-squatter python3 -m http.server 8877")
    try:
        done = play("site", variables={"serve_port": 8877, "serve_deployment": "lab_port"})
        assert done.code != 0 and "8877" in done.text and "preflight.port" in done.text
        assert on("spark-1", "systemctl is-active sparklab-squatter").strip() == "active"
    finally:
        on("spark-1", "systemctl stop sparklab-squatter")


def test_an_unreachable_worker_is_one_of_the_problems():
    done = play("site", variables={"serve_deployment": "lab_gone"}, inventory=os.path.join(ROOT, "tests/live/unreachable.yml"))
    assert done.code != 0 and "preflight.unreachable" in done.text and "spark-2" in done.text


def test_no_right_to_use_docker_is_told_as_that():
    """carol is in no group docker, and for some seconds she has no sudo either; the node gives it back by itself."""
    away = "mv /etc/sudoers.d /etc/sudoers.d.away; sleep 25; mv /etc/sudoers.d.away /etc/sudoers.d"
    on("spark-3", f"systemd-run --collect --unit sparklab-sudo sh -c '{away}'; sleep 1")
    try:
        variables = {"bootstrap_docker_group": False, "bootstrap_packages": False, "bootstrap_state_dir": False, "serve_tensor_parallel": 1}
        done = play("preflight", variables={"spark_hosts": "solo", **variables})
        assert done.code != 0 and "preflight.docker_permission" in done.text and "usermod -aG docker carol" in done.text
    finally:
        until = time.time() + 60
        while time.time() < until and "root" not in on("spark-3", "id -un", check=False):
            time.sleep(1)


def test_a_failure_in_one_group_leaves_the_other_alone():
    done = play("site", variables={"spark_hosts": "solo", "serve_profile": "nothing_like_that"})
    assert done.code != 0
    assert "spark-1" not in done.text and "spark-2" not in done.text
