# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the pair shows while it serves with the real engine, and when a rank is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess

from conftest import ROOT, fingerprint, inspect, on, play, running, status


def test_a_second_run_changes_nothing(serving):
    before = {node: inspect(node, f"lab_tiny-rank{rank}")["Id"] for rank, node in enumerate(("spark-1", "spark-2"))}
    done = play("site")
    assert done.code == 0
    assert re.findall(r"changed=(\d+)", done.text) == ["0", "0"]
    print(f"second site.yml: {done.ended - done.begun:.1f} s")
    assert before == {node: inspect(node, f"lab_tiny-rank{rank}")["Id"] for rank, node in enumerate(("spark-1", "spark-2"))}


def test_the_installed_archive_is_enough(serving):
    """Nothing but meta, plugins, roles and playbooks of the built archive, in an environment without this checkout's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTHONPATH"))}
    done = subprocess.run(["tests/installed", "inventories/lab"], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and re.findall(r" changed=(\d+)", done.stdout)[-2:] == ["0", "0"], done.stdout[-4000:] + done.stderr


def test_check_on_a_live_pair_predicts_nothing_and_touches_nothing(serving):
    done = subprocess.run(["tests/predict", "--expect-unchanged", "playbooks/site.yml"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_status_says_serving(serving):
    code, document = status()
    assert code == 0 and document["state"] == "serving"
    assert [entry["says"] for entry in document["ranks"]] == ["running", "running"]
    assert document["last_good"]["profile"] == "lab_tiny"
    # The real engine's own answer: the key guards less than one thinks.
    assert "/metrics" in document["api"]["open_paths"] and "/v1/models" not in document["api"]["open_paths"]


def test_the_api_key_is_nowhere_but_in_its_file(serving):
    key = on("spark-1", "cat /var/lib/sparkops/lab_tiny/key/api_key").strip()
    assert len(key) >= 32
    assert on("spark-1", "stat -c '%a %U' /var/lib/sparkops/lab_tiny/key/api_key").split() == ["600", "alice"]
    assert key not in json.dumps(inspect("spark-1", "lab_tiny-rank0"))
    assert key not in on("spark-1", "ps auxww")
    assert key not in on("spark-2", "ps auxww; grep -r . /var/lib/sparkops/lab_tiny --include=*.json; docker inspect lab_tiny-rank1")
    done = play("site", "-vvv", "--diff")
    assert done.code == 0 and key not in done.text
    assert key not in on("spark-1", "docker logs lab_tiny-rank0 2>&1; journalctl --no-pager | tail -n 5000")


def test_a_node_key_opens_nothing_but_the_gate(serving):
    """From the worker to the head: reading weights is allowed, a shell, another path, and control are not."""
    ssh = ("ssh -o BatchMode=yes -o ConnectTimeout=5 -o StrictHostKeyChecking=yes -o UserKnownHostsFile=/var/lib/sparkops/keys/known_hosts"
           " -o IdentitiesOnly=yes -i /var/lib/sparkops/keys/id_ed25519 -l alice 198.51.100.11")
    # What is allowed works, so that a missing key or a wrong host key cannot pass for a refusal.
    image = inspect("spark-1", "lab_tiny-rank0")["Image"]
    allowed = on("spark-2", f"su bob -c \"{ssh} 'image-inspect {image}'\" 2>&1; echo code=$?")
    assert "code=0" in allowed, allowed
    for command in ("id", "cat /etc/passwd", "stop lab_tiny", "rsync --server --sender -logDtpre.iLsfxCIvu . /etc/", "bash -c 'id'", "state ../etc"):
        out = on("spark-2", f"su bob -c \"{ssh} '{command}'\" 2>&1; echo code=$?", check=False)
        assert "code=0" not in out, f"{command}: {out}"
        assert "root:" not in out and "uid=" not in out
        assert "refused" in out, f"{command}: {out}"
    assert "lab_tiny-rank0" in running("spark-1")


def test_the_head_may_ask_for_the_state_of_a_worker(serving):
    ssh = ("ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile=/var/lib/sparkops/keys/known_hosts"
           " -o IdentitiesOnly=yes -i /var/lib/sparkops/keys/id_ed25519 -l bob 198.51.100.12 state lab_tiny")
    answer = json.loads(on("spark-1", f'su alice -c "{ssh}"'))
    assert answer["service"] == "alive" and answer["container"]["running"] and answer["rank"] == 1


def test_a_killed_worker_is_told_and_the_whole_group_replaced(serving):
    before = {node: inspect(node, f"lab_tiny-rank{rank}")["Id"] for rank, node in enumerate(("spark-1", "spark-2"))}
    on("spark-2", "docker kill lab_tiny-rank1")
    code, document = status()
    assert code != 0 and document["state"] == "half"
    assert document["api"]["health"] == 200, "rank 0 should still claim to be healthy"
    assert any("rank 1 (spark-2)" in reason and "137" in reason for reason in document["reasons"])
    done = play("site")
    assert done.code == 0, done.text[-4000:]
    after = {node: inspect(node, f"lab_tiny-rank{rank}") for rank, node in enumerate(("spark-1", "spark-2"))}
    assert all(after[node]["State"]["Running"] and after[node]["Id"] != before[node] for node in after)
    assert "proof in" in done.text
    assert int(on("spark-2", "ls /var/lib/sparkops/lab_tiny/logs/*.log | wc -l")) >= 1


def test_sync_alone_touches_no_container(serving):
    before = [fingerprint(node) for node in ("spark-1", "spark-2")]
    done = play("site", "--tags", "sync")
    assert done.code == 0, done.text[-3000:]
    assert before == [fingerprint(node) for node in ("spark-1", "spark-2")]


def test_every_documented_tag_runs_alone(serving):
    for tag in ("preflight", "bootstrap", "fabric", "image", "weights", "pack", "serve"):
        done = play("site", "--tags", tag)
        assert done.code == 0, f"{tag}: {done.text[-3000:]}"
        assert re.findall(r"changed=(\d+)", done.text) == ["0", "0"], tag


def test_a_limit_that_hides_a_rank_is_refused_where_all_are_needed(serving):
    before = [fingerprint(node) for node in ("spark-1", "spark-2")]
    done = play("serve", "--limit", "spark-1")
    assert done.code != 0 and "spark-2" in done.text and "all ranks" in done.text
    assert play("weights", "--limit", "spark-1").code == 0
    assert before == [fingerprint(node) for node in ("spark-1", "spark-2")]


def test_a_live_lease_keeps_another_run_away(serving):
    lease = '{"run_id": "elsewhere:1:1", "owner": "carla@elsewhere", "since": 1, "expires": 99999999999}'
    on("spark-1", f"echo '{lease}' > /var/lib/sparkops/lab_tiny/lease.json; chown alice: /var/lib/sparkops/lab_tiny/lease.json")
    try:
        done = play("restart")
        assert done.code != 0 and "carla@elsewhere" in done.text and "lease.held" in done.text
        on("spark-1", "sed -i 's/99999999999/1/' /var/lib/sparkops/lab_tiny/lease.json")
        done = play("serve")
        assert done.code == 0 and "taken over from carla@elsewhere" in done.text
    finally:
        on("spark-1", "rm -f /var/lib/sparkops/lab_tiny/lease.json")


def test_logs_shows_the_ranks_that_were_asked_for(serving):
    done = play("logs", variables={"logs_of": "worker", "logs_tail": 5})
    assert done.code == 0 and "ok: [spark-2]" in done.text
    assert "ok: [spark-1] => (item" not in done.text


def test_stop_needs_all_ranks_and_the_lease(serving):
    done = play("stop", "--limit", "spark-2")
    assert done.code != 0 and "all ranks" in done.text and running("spark-2") == ["lab_tiny-rank1"]
    lease = '{"run_id": "elsewhere:1:1", "owner": "carla@elsewhere", "since": 1, "expires": 99999999999}'
    on("spark-1", f"echo '{lease}' > /var/lib/sparkops/lab_tiny/lease.json; chown alice: /var/lib/sparkops/lab_tiny/lease.json")
    try:
        done = play("stop")
        assert done.code != 0 and "carla@elsewhere" in done.text
        assert running("spark-1") == ["lab_tiny-rank0"] and running("spark-2") == ["lab_tiny-rank1"]
    finally:
        on("spark-1", "rm -f /var/lib/sparkops/lab_tiny/lease.json")


def test_a_refused_swap_leaves_the_old_group_serving(serving):
    done = play("serve", variables={"serve_max_num_seqs": 3, "memory_floor": "900 GiB"})
    assert done.code != 0 and "memory.floor" in done.text
    assert running("spark-1") == ["lab_tiny-rank0"] and running("spark-2") == ["lab_tiny-rank1"]
    assert status()[0] == 0 or "other spec" in str(status()[1]["reasons"]) or "another spec" in str(status()[1]["reasons"])


def test_stop_stops_all(serving):
    done = play("stop")
    assert done.code == 0, done.text[-3000:]
    assert running("spark-1") == [] and running("spark-2") == []
    code, document = status()
    assert code != 0 and document["state"] == "absent"
    assert re.findall(r"changed=(\d+)", play("stop").text) == ["0", "0"]


def test_one_host_with_tp_1_answers(serving):
    """After the pair was stopped: the same node, one rank, no fabric."""
    variables = {"spark_hosts": "spark-1", "serve_nodes": ["spark-1"], "serve_tensor_parallel": 1, "serve_deployment": "lab_solo"}
    done = play("site", variables=variables)
    assert done.code == 0, done.text[-4000:]
    assert "proof in" in done.text
    arguments = inspect("spark-1", "lab_solo-rank0")["Args"]
    assert "--nnodes" not in arguments and "--headless" not in arguments
    assert play("stop", variables=variables).code == 0
