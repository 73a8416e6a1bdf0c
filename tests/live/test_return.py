# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The way back: upgrades that fail, switches, drains, what is collected, and what is left behind. With the scriptable stand-in."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
import threading
import time

import pytest
from conftest import ROOT, STUB, inspect, on, play, running, status
from plays import Playing

DEPLOYMENT, OTHER, PORT = "lab_return", "lab_other", 8899
STATE = f"/var/lib/sparkops/{DEPLOYMENT}"
BUNDLES = os.path.join(ROOT, "tests/output/bundles")
BROKEN = {"image_reference": STUB.replace(":1", ":2"), "STARTUP_ERROR_RANK1": "no kernel image is available for execution on the device"}


def variables(**wishes):
    """Wishes in capitals are the stand-in's, the others are options."""
    environment = {f"STUB_{name}": str(value) for name, value in wishes.items() if name.isupper()}
    return {
        "serve_deployment": DEPLOYMENT, "image_reference": STUB, "serve_ready_timeout": 120, "serve_port": PORT, "serve_rendezvous_port": 29599,
        "serve_environment": environment, "serve_stop_grace": 5, "collect_dir": BUNDLES,
        **{name: value for name, value in wishes.items() if not name.isupper()},
    }


def ids(deployment=DEPLOYMENT):
    return [inspect(f"spark-{rank + 1}", f"{deployment}-rank{rank}")["Id"] for rank in (0, 1)]


def last_good(deployment=DEPLOYMENT):
    return [json.loads(on(node, f"cat /var/lib/sparkops/{deployment}/last_good.json"))["id"] for node in ("spark-1", "spark-2")]


def flat(played):
    """The output without the breaks that YAML makes in long lines."""
    return " ".join(played.text.split())


def ask(path, body, key=""):
    """A request from the head itself. The nodes have no curl."""
    program = (
        "import sys, urllib.request as u, urllib.error as e\n"
        f"request = u.Request('http://127.0.0.1:{PORT}{path}', data={json.dumps(body).encode()!r}, headers={{'Authorization': 'Bearer {key}'}})\n"
        "try: print(u.urlopen(request, timeout=300).read().decode())\n"
        "except (e.URLError, OSError) as exc: print('no answer:', exc)\n"
    )
    return on("spark-1", f"python3 - <<'END'\n{program}END", check=False)


def answers(deployment=DEPLOYMENT):
    """A completion, as a client gets it."""
    key = on("spark-1", f"cat /var/lib/sparkops/{deployment}/key/api_key").strip()
    return ask("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "2+2"}], "max_tokens": 8}, key)


def behave(**wishes):
    ask("/debug/set", wishes)


@pytest.fixture(name="proven", scope="module")
def fixture_proven():
    done = play("site", variables=variables())
    assert done.code == 0, done.text[-5000:]
    return done


def test_a_proven_deployment_is_on_record_on_every_rank(proven):
    first, second = last_good()
    assert first == second
    done = play("history", variables=variables())
    assert done.code == 0 and re.search(f"{first}: profile lab_tiny.*running, last good", flat(done))
    kept = on("spark-2", "docker image ls --format '{{.Repository}}:{{.Tag}}'")
    assert f"sparkops-kept:{DEPLOYMENT}-{first}" in kept
    key = on("spark-1", f"cat {STATE}/key/api_key").strip()
    assert key not in on("spark-1", f"grep -r . {STATE}/history {STATE}/last_good.json")


def counters_asked():
    return int(on("spark-1", f"docker logs {DEPLOYMENT}-rank0 2>&1 | grep -c 'GET /metrics' || true"))


def release_at_drain():
    """Let the request that hangs go on as soon as the drain asks for the engine's counters twice a second, whenever the play gets there; each look
    at a group that does not answer asks for them twice in all."""
    before = counters_asked()
    for dummy in range(300):
        if counters_asked() > before + 6:
            break
        time.sleep(1)
    behave(COMPLETION="")


def test_a_restart_waits_for_running_requests_and_says_what_it_checked(proven):
    behave(COMPLETION="hang")
    got = []
    threads = [threading.Thread(target=lambda: got.append(answers())), threading.Thread(target=release_at_drain)]
    for thread in threads:
        thread.start()
    done = play("restart", variables=variables())
    for thread in threads:
        thread.join()
    assert done.code == 0, done.text[-4000:]
    assert "four" in got[0] and "running requests ended within" in flat(done)
    assert re.search(r"rank 1 \(spark-2\): image sha256:\w+, \d+ files of .* as in their manifests, fabric eth1 198.51.100.12, memory .* available", flat(done))


def test_what_does_not_end_in_time_is_cut_and_counted(proven):
    behave(COMPLETION="hang")
    for dummy in range(2):
        threading.Thread(target=answers, daemon=True).start()
    time.sleep(1.5)
    done = play("stop", variables=variables(serve_drain_timeout=2))
    assert done.code == 0 and "2 requests still ran after 2 s and were cut" in flat(done), done.text[-3000:]
    assert play("serve", variables=variables()).code == 0


def test_a_missing_shard_on_the_worker_refuses_while_the_old_group_serves(proven):
    before = ids()
    shard = on("spark-2", "ls /var/lib/sparkops/weights/sparklab--tiny-llama/*/model-00002*").split()[0]
    on("spark-2", f"mv {shard} /root/shard")
    try:
        done = play("restart", variables=variables())
        assert done.code != 0 and "weights.incomplete" in flat(done) and os.path.basename(shard) in flat(done)
        assert ids() == before and "four" in answers()
    finally:
        on("spark-2", f"mv /root/shard {shard}")


def test_a_run_that_ends_between_staging_and_stop_changes_nothing_of_the_old_group(proven):
    names = ("rank.json", "container/entry.json", "container/entry.py")
    before = ids(), [on(node, f"cd {STATE} && sha256sum {' '.join(names)}") for node in ("spark-1", "spark-2")]
    replacing = Playing("serve", variables=variables(NOTHING=1))
    replacing.until("replace | Let running requests end")
    replacing.kill()
    assert "rank.json" in on("spark-2", f"ls {STATE}/next").split()
    assert (ids(), [on(node, f"cd {STATE} && sha256sum {' '.join(names)}") for node in ("spark-1", "spark-2")]) == before
    code, document = status(variables=variables())
    assert (code, document["state"]) == (0, "serving"), document["reasons"]
    again = play("serve", variables=variables())
    assert again.code == 0 and again.changed == {"spark-1": 0, "spark-2": 0} and ids() == before[0]


def test_a_failed_upgrade_leaves_evidence_and_the_rollback_play_brings_the_old_group_back(proven):
    good, image = last_good(), inspect("spark-2", f"{DEPLOYMENT}-rank1")["Image"]
    key = on("spark-1", f"cat {STATE}/key/api_key").strip()
    done = play("site", "--tags", "image,serve", variables=variables(**BROKEN, SOME_TOKEN="hf_abcdefghijklmnopqrstuvwxyz"))
    assert done.code != 0 and f"rollback.yml returns to {good[0]}" in flat(done)
    assert "the image has no kernels for this GPU" in flat(done)
    assert running("spark-1") == running("spark-2") == [] and last_good() == good
    path = re.search(r"Evidence of all ranks: (\S+)", flat(done)).group(1)
    with tarfile.open(path) as bundle:
        names = [os.path.basename(name) for name in bundle.getnames()]
        texts = {}
        for node in ("spark-1", "spark-2"):
            with tarfile.open(fileobj=bundle.extractfile(next(name for name in bundle.getnames() if name.endswith(f"{node}.tar.gz")))) as one:
                texts.update({f"{node}/{entry.name}": one.extractfile(entry).read().decode() for entry in one})
        texts["settings"] = bundle.extractfile(next(name for name in bundle.getnames() if name.endswith("settings.json"))).read().decode()
    assert {"settings.json", "summary.txt", "spark-1.tar.gz", "spark-2.tar.gz"} <= set(names)
    for part in ("log.txt", "container.json", "meminfo.txt", "links.txt", "dmesg.txt", "state/rank.json"):
        assert texts.get(f"spark-2/{part}"), (part, texts["spark-2/missing.txt"])
    everything = "".join(texts.values())
    assert key not in everything and "hf_abcdefghijklmnop" not in everything and "no kernel image" in texts["spark-2/log.txt"]
    told = play("rollback", "--check", variables=variables(**BROKEN))
    assert told.code == 0 and told.changed == {"spark-1": 1, "spark-2": 1}, told.text[-4000:]
    assert f"Would return {DEPLOYMENT} to {good[0]}" in flat(told) and f"would be replaced, with the whole group, by that of record {good[0]}" in flat(told)
    assert running("spark-1") == running("spark-2") == []
    back = play("rollback", variables=variables(**BROKEN))
    assert back.code == 0, back.text[-4000:]
    assert last_good() == good and inspect("spark-2", f"{DEPLOYMENT}-rank1")["Image"] == image and "four" in answers()
    # The inventory as it was before finds what it wants.
    again = play("serve", variables=variables())
    assert again.code == 0 and re.findall(r"changed=(\d+)", flat(again)) == ["0", "0"]


def test_with_the_option_a_failed_upgrade_goes_back_by_itself(proven):
    good = last_good()
    done = play("serve", variables=variables(**BROKEN, serve_rollback="auto"))
    assert done.code != 0 and "serve.rolled_back" in flat(done), done.text[-4000:]
    assert running("spark-1") == [f"{DEPLOYMENT}-rank0"] and last_good() == good and "four" in answers()
    assert "lease.json" not in on("spark-1", f"ls {STATE}").split()


def test_nonsense_from_a_healthy_group_fails_the_start(proven):
    done = play("serve", variables=variables(ANSWER="!!!! !!!! !!!!"))
    assert done.code != 0 and "serve.canary" in flat(done) and "'answer'" in flat(done)
    assert running("spark-1") == running("spark-2") == []
    assert play("rollback", variables=variables()).code == 0


def test_collect_names_a_rank_that_gives_nothing_and_keeps_the_rest(proven):
    begun = time.time()
    done = play("collect", variables={**variables(), "collect_seconds": 10}, inventory="tests/live/unreachable.yml")
    assert done.code != 0 and "collect.unread" in flat(done) and "rank 1 (spark-2): nothing collected" in flat(done)
    assert time.time() - begun < 60
    newest = max(glob.glob(f"{BUNDLES}/*.tar"), key=os.path.getmtime)
    with tarfile.open(newest) as bundle:
        assert any(name.endswith("spark-1.tar.gz") for name in bundle.getnames())


def test_logs_follow_prints_new_lines_with_their_node(proven):
    following = Playing("logs", variables={**variables(), "logs_of": "head", "logs_tail": 3, "logs_follow": 15})
    following.until("spark-1 | ")
    time.sleep(1)  # the tail is one print
    asked = time.time()
    answers()
    done = following.end()
    new = [text for when, text in done.lines if when > asked and "spark-1 | " in text]
    assert done.code == 0 and any("POST /v1/chat/completions" in text for text in new) and "spark-2 | " not in flat(done), done.lines


def test_a_switch_to_a_busy_deployment_refuses_while_the_old_one_serves(proven):
    folder = f"/var/lib/sparkops/{OTHER}"
    held = {"run_id": "elsewhere:1:1", "owner": "carla@elsewhere", "since": time.time(), "expires": time.time() + 900}
    before = [inspect(f"spark-{rank + 1}", f"{DEPLOYMENT}-rank{rank}")["State"]["StartedAt"] for rank in (0, 1)]
    on("spark-1", f"install -d -o alice {folder} && echo '{json.dumps(held)}' > {folder}/lease.json")
    try:
        done = play("switch", variables=variables(serve_deployment=OTHER))
        assert done.code != 0 and "lease.held" in flat(done) and "carla@elsewhere" in flat(done) and "switch.returned" not in flat(done), done.text[-4000:]
    finally:
        on("spark-1", f"rm -rf {folder}")
    assert [inspect(f"spark-{rank + 1}", f"{DEPLOYMENT}-rank{rank}")["State"]["StartedAt"] for rank in (0, 1)] == before and "four" in answers()
    assert "lease.json" not in on("spark-1", f"ls {STATE}").split()


def test_a_switch_leaves_one_group_and_returns_when_the_other_does_not_come_up(proven):
    other = variables(serve_deployment=OTHER)
    done = play("switch", variables=other)
    assert done.code == 0, done.text[-4000:]
    assert running("spark-1") == [f"{OTHER}-rank0"] and "four" in answers(OTHER)
    before = last_good(OTHER)
    failed = play("switch", variables=variables(**BROKEN))
    assert failed.code != 0 and "switch.returned" in flat(failed), failed.text[-4000:]
    assert running("spark-1") == [f"{OTHER}-rank0"] and running("spark-2") == [f"{OTHER}-rank1"] and "four" in answers(OTHER)
    assert last_good(OTHER) == before
    for name in (OTHER, DEPLOYMENT):
        assert "lease.json" not in on("spark-1", f"ls /var/lib/sparkops/{name}").split()


def test_prune_previews_and_uninstall_takes_the_deployment_alone(proven):
    preview = play("prune", "--check", variables=variables())
    assert preview.code == 0 and "would free" in flat(preview)
    images = on("spark-1", "docker image ls --quiet | sort -u")
    weights = on("spark-1", "find /var/lib/sparkops/weights | sort")
    done = play("uninstall", variables=variables(serve_deployment=OTHER, uninstall_images=False))
    assert done.code == 0, done.text[-4000:]
    # What the deployment that is left needs is still there, the way to the worker among it.
    assert play("serve", variables=variables()).code == 0 and "four" in answers()
    done = play("uninstall", variables=variables(uninstall_images=False))
    assert done.code == 0, done.text[-4000:]
    for node in ("spark-1", "spark-2"):
        left = on(node, "ls /var/lib/sparkops; docker ps -a --format '{{.Names}}'; systemctl list-units --all --plain 'sparkops-rank@*'; docker image ls")
        assert DEPLOYMENT not in left and OTHER not in left, left
    assert on("spark-1", "docker image ls --quiet | sort -u") == images and on("spark-1", "find /var/lib/sparkops/weights | sort") == weights
