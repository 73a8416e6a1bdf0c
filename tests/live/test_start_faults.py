# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Faults during a start, shown by the scriptable stand-in (the real engine cannot be told to end with code 1)."""

from __future__ import annotations

import json
import time

import pytest
from conftest import STUB, inspect, on, play, running, unix_time

DEPLOYMENT = "lab_faults"


def variables(**environment):
    return {
        "serve_deployment": DEPLOYMENT, "image_reference": STUB, "serve_ready_timeout": 120,
        "serve_port": 8899, "serve_rendezvous_port": 29599,
        "serve_environment": {f"STUB_{name}": str(value) for name, value in environment.items()},
    }


def clock_offset(node: str) -> float:
    return float(on(node, "date +%s.%N")) - time.time()


@pytest.fixture(name="stub_image", scope="module")
def fixture_stub_image():
    """The small image on both nodes, so that the trials take seconds."""
    done = play("site", variables=variables())
    assert done.code == 0, done.text[-4000:]


@pytest.mark.parametrize("rank, code", [(1, 0), (1, 1), (1, 137), (0, 0), (0, 1)])
def test_a_rank_that_ends_while_the_group_loads(stub_image, rank, code):
    wishes = {f"EXIT_AFTER_RANK{rank}": 6, f"EXIT_CODE_RANK{rank}": code, "LOAD_SECONDS": 90}
    done = play("serve", variables=variables(**wishes))
    node = f"spark-{rank + 1}"
    container = inspect(node, f"{DEPLOYMENT}-rank{rank}")
    died = unix_time(container["State"]["FinishedAt"])
    told = done.time_of(f"rank {rank} ended with exit code {code}")
    print(f"rank {rank} code {code}: told {told - died:.1f} s, all hosts ended {done.ended - died:.1f} s after its end")
    assert done.code != 0
    assert container["State"]["ExitCode"] == code
    assert told - died <= 5 and done.ended - died <= 15
    # The last lines of both ranks are in the message, and their logs on disk.
    for number in (0, 1):
        assert f"--- rank {number} (spark-{number + 1})" in done.text
        assert on(f"spark-{number + 1}", f"cat /var/lib/sparkops/{DEPLOYMENT}/logs/$(ls -t /var/lib/sparkops/{DEPLOYMENT}/logs | head -1)").strip()
    assert running("spark-1") == [] and running("spark-2") == []
    assert done.text.count("failed=1") == 2


def test_an_engine_that_refuses_to_start_shows_its_words(stub_image):
    done = play("serve", variables=variables(STARTUP_ERROR_RANK1="no such kernel image"))
    assert done.code != 0 and "no such kernel image" in done.text
    assert running("spark-1") == [] and running("spark-2") == []


def test_the_memory_guard_ends_a_start_and_is_the_reason(stub_image):
    done = play("serve", variables={**variables(LOAD_SECONDS=60), "memory_guard_loading_floor": "900 GiB"})
    assert done.code != 0 and "memory guard while loading: MemAvailable below 900.00 GiB" in done.text, done.text[-3000:]
    # The worker starts first, so it is the first to see; the head has the verdict from it, if not from its own guard.
    tripped = json.loads(on("spark-2", f"cat $(ls -t /var/lib/sparkops/{DEPLOYMENT}/events/*-guard.json | head -1)"))["at"]
    ends = [unix_time(inspect(f"spark-{rank + 1}", f"{DEPLOYMENT}-rank{rank}")["State"]["FinishedAt"]) for rank in (0, 1)]
    assert ends[1] - tripped <= 3 and running("spark-1") == running("spark-2") == [], (tripped, ends)


def test_an_image_that_is_pruned_after_it_was_compared_leaves_the_old_group_serving(stub_image, tmp_path):
    assert play("serve", variables=variables()).code == 0
    before, other = [on(node, "docker ps --quiet --no-trunc") for node in ("spark-1", "spark-2")], "scenario/pruned:1"
    on("spark-1", f"printf 'FROM {STUB}\\nENV PRUNED=1\\n' | docker build --quiet --tag {other} -")
    prune = [{"hosts": "spark-2", "gather_facts": False, "tasks": [{"ansible.builtin.command": f"docker image rm --force {other}", "become": True}]}]
    whole = [{"ansible.builtin.import_playbook": "sparkops.inference.image"}, *prune, {"ansible.builtin.import_playbook": "sparkops.inference.serve"}]
    (tmp_path / "whole.yml").write_text(json.dumps(whole))
    done = play(f"{'../' * 20}{tmp_path}/whole", variables={**variables(), "image_reference": other, "image_pull_policy": "never"})
    assert done.code != 0 and "spark-2: image scenario/pruned:1: found no sha256:" in done.text and "[image.gone]" in done.text, done.text[-3000:]
    assert [on(node, "docker ps --quiet --no-trunc") for node in ("spark-1", "spark-2")] == before and all(before)


def test_healthy_without_a_token_is_no_success(stub_image):
    done = play("serve", variables={**variables(COMPLETION="empty"), "serve_completion_timeout": 10})
    assert done.code != 0 and "gives no proof" in done.text
    assert running("spark-1") == [] and running("spark-2") == []


def test_text_in_the_reasoning_field_is_a_proof_and_arguments_arrive_byte_for_byte(stub_image):
    odd = ["--odd", "a b", " trailing ", "it's", 'say "x"', "$HOME", "${HOME}", "50%", "%s", "größer", "日本", "\\", "*", "", "a=b,c", '{"a": [1, ""]}']
    done = play("serve", variables={**variables(COMPLETION="reasoning"), "serve_extra_arguments": odd})
    assert done.code == 0, done.text[-4000:]
    for rank in (0, 1):
        container = inspect(f"spark-{rank + 1}", f"{DEPLOYMENT}-rank{rank}")
        assert container["Args"][-len(odd):] == odd
        # The engine's process as the kernel knows it.
        own = on(f"spark-{rank + 1}", f"tr '\\0' '\\n' </proc/{container['State']['Pid']}/cmdline").split("\n")[:-1]
        assert own[-len(odd):] == odd
    key = on("spark-1", f"cat /var/lib/sparkops/{DEPLOYMENT}/key/api_key").strip()
    seen = json.loads(on("spark-1", f"curl -s -H 'Authorization: Bearer {key}' http://127.0.0.1:8899/debug/argv || "
                                    f"python3 -c \"import urllib.request as u; print(u.urlopen(u.Request('http://127.0.0.1:8899/debug/argv', "
                                    f"headers={{'Authorization': 'Bearer {key}'}})).read().decode())\""))
    assert seen["argv"][-len(odd):] == odd
    again = play("serve", variables={**variables(COMPLETION="reasoning"), "serve_extra_arguments": odd})
    assert again.code == 0 and "changed=1" not in again.text
    assert play("stop", variables=variables()).code == 0
