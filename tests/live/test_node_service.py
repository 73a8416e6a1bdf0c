# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the rank services do without a play: the memory guard, the way back after a reboot, and the watch.

A stage of its own (``tests/run faults``): nodes are started again, and memory is filled for some seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time

import plays
import pytest
from conftest import STUB, inspect, on, play, running, unix_time

NODES = ("spark-1", "spark-2")
STUB_PORT = 8899
# What the hog takes; the real engine takes 5 GiB while it loads.
HOG_GIB = 7


def variables(deployment="lab_faults", more=None, **environment):
    return {
        "serve_deployment": deployment, "image_reference": STUB, "serve_ready_timeout": 120, "serve_port": STUB_PORT, "serve_rendezvous_port": 29599,
        "serve_environment": {f"STUB_{name}": str(value) for name, value in environment.items()},
        "memory_tolerance": "12 GiB", **(more or {}),
    }


def serve(**more):
    done = play("serve", variables=variables(**more))
    assert done.code == 0, done.text[-4000:]
    return done


@pytest.fixture(scope="module", autouse=True)
def fixture_staged():
    """The small image and the weights on both nodes."""
    done = play("site", variables=variables())
    assert done.code == 0, done.text[-4000:]


def available_gib() -> float:
    return int(on("spark-1", "awk '/^MemAvailable/ {print $2}' /proc/meminfo")) / 1048576


def beat(node, deployment="lab_faults"):
    return json.loads(on(node, f"cat /run/sparkops/{deployment}/heartbeat.json"))


def events(node, deployment="lab_faults"):
    """The evidence that the service left, the oldest first."""
    out = on(node, f"cd /var/lib/sparkops/{deployment}/events 2>/dev/null && for one in $(ls); do cat $one; echo; echo ---; done || true")
    return [json.loads(text) for text in out.split("---\n") if text.strip()]


def completion(deployment="lab_faults", port=STUB_PORT, timeout=20) -> str:
    return plays.completion(on, deployment, port, timeout)


def outside(*command):
    """The outer engine, which is the power supply of the nodes."""
    subprocess.run(["docker", *command], check=True, capture_output=True, timeout=120)


def wait_for(what, seconds, pause=1.0):
    """Seconds until a condition is true."""
    begun = time.time()
    while time.time() - begun < seconds:
        try:
            if what():
                return time.time() - begun
        except (AssertionError, ValueError, TypeError):
            pass  # a node that boots does not answer, or its engine has no containers yet
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s")


def forget_events(deployment):
    for node in NODES:
        on(node, f"rm -rf /var/lib/sparkops/{deployment}/events")


class Hog(threading.Thread):
    """Fills memory on a node once its rank runs, under a name that a person would find."""

    def __init__(self, node, container, after):
        super().__init__(daemon=True)
        self.node, self.container, self.after = node, container, after
        self.begun = 0.0

    def run(self):
        on(self.node, "cp $(readlink -f /usr/bin/python3) /usr/local/bin/memory-hog")
        wait_for(lambda: self.container in running(self.node), 120, 0.2)
        time.sleep(self.after)
        self.begun = time.time()
        on(self.node, f"timeout 20 /usr/local/bin/memory-hog -c 'import time; held = b\"x\" * ({HOG_GIB} << 30); time.sleep(15)' || true")


def test_a_hog_trips_the_guard_while_the_real_engine_loads():
    assert play("stop").code == 0
    # Below what a load alone leaves (it takes up to 5 GiB), above what it leaves beside the hog.
    floor = available_gib() - HOG_GIB + 1
    assert floor > 4, "too little memory on this machine"
    forget_events("lab_tiny")
    hog = Hog("spark-2", "lab_tiny-rank1", 8)
    hog.start()
    done = play("serve", variables={"memory_guard_loading_floor": int(floor * 2**30), "memory_tolerance": "12 GiB"})
    hog.join()
    assert done.code != 0
    report = events("spark-2", "lab_tiny")[0]
    ends = {node: unix_time(inspect(node, f"lab_tiny-rank{rank}")["State"]["FinishedAt"]) for rank, node in enumerate(NODES)}
    print({node: f"ended {when - report['at']:.2f} s after the trip" for node, when in ends.items()}, f"hog since {report['at'] - hog.begun:.1f} s")
    assert report["by"] == "guard" and report["mode"] == "loading" and report["growing"][0]["name"] == "memory-hog"
    assert all(when - report["at"] <= 3 for when in ends.values())
    # The lab's nodes share one memory, so the head's guard may be the one that is told; only its node knows the hog's name.
    assert "memory guard while loading" in " ".join(done.text.split()), done.text[-3000:]
    journal = on("spark-2", "journalctl -u sparkops-rank@lab_tiny --no-pager | grep 'memory guard'")
    assert "memory-hog" in journal
    assert not any(f"lab_tiny-rank{rank}" in running(node) for rank, node in enumerate(NODES))


def test_with_the_guard_off_nothing_is_killed():
    off = {"memory_guard_loading": False, "memory_guard_loading_floor": "900 GiB"}
    serve(LOAD_SECONDS=5, more=off)
    assert [beat(node)["guard"]["floor"] for node in NODES] == [None, None]
    assert all(events(node) == [] for node in NODES)
    assert completion()


def test_an_option_of_the_guard_is_followed_without_a_restart():
    before = inspect("spark-1", "lab_faults-rank0")["State"]["StartedAt"]
    serve(LOAD_SECONDS=5, more={"memory_guard_serving": True, "memory_guard_serving_floor": "900 GiB"})
    took = wait_for(lambda: running("spark-1") == [] and running("spark-2") == [], 30, 0.3)
    print(f"a serving floor above all memory ended both ranks within {took:.1f} s")
    assert inspect("spark-1", "lab_faults-rank0")["State"]["StartedAt"] == before
    assert beat("spark-1")["guard"]["tripped"]["mode"] == "serving"
    # A group that the guard ended stays down, also after a reboot.
    outside("restart", "spark-1")
    wait_for(lambda: "memory guard" in on("spark-1", "systemctl status --no-pager sparkops-rank@lab_faults || true"), 90)
    assert running("spark-1") == [] and running("spark-2") == []


@pytest.fixture(name="faults", scope="module")
def fixture_faults():
    serve(LOAD_SECONDS=2)
    yield
    assert play("stop", variables=variables()).code == 0


def power(order):
    """Start nodes again, as after a loss of power; the time of the last one."""
    if order == "worker late":
        outside("kill", "spark-2")
        outside("restart", "-t", "2", "spark-1")
        time.sleep(60)
        outside("start", "spark-2")
    else:
        for node in {"head": ["spark-1"], "worker": ["spark-2"], "both": ["spark-1", "spark-2"]}[order]:
            outside("restart", "-t", "2", node)
    return time.time()


@pytest.mark.parametrize("order", ["head", "worker", "both", "worker late"])
def test_after_a_reboot_the_group_comes_back_by_itself(faults, order):
    on("spark-1", "rm -f /var/lib/sparkops/lab_faults/restarts.json")  # four reboots within an hour are the test's own doing
    before = {node: inspect(node, f"lab_faults-rank{rank}")["State"]["StartedAt"] for rank, node in enumerate(NODES)}
    booted = power(order)
    wait_for(lambda: all(inspect(node, f"lab_faults-rank{rank}")["State"]["StartedAt"] > before[node] for rank, node in enumerate(NODES)), 280)
    wait_for(completion, 60)
    print(f"{order}: a completion {time.time() - booted:.0f} s after the last boot")
    assert time.time() - booted < 300
    wait_for(lambda: all(beat(node)["ready"] for node in NODES), 30)
    assert len(json.loads(on("spark-1", "cat /var/lib/sparkops/lab_faults/restarts.json"))["attempts"]) == 1


def test_without_the_weights_mount_no_rank_runs_and_the_status_names_it(faults):
    on("spark-2", "mkdir -p /srv/weights && cp -a /var/lib/sparkops/weights/. /srv/weights && mount --bind /srv/weights /var/lib/sparkops/weights")
    done = play("restart", variables=variables(LOAD_SECONDS=2))
    assert done.code == 0, done.text[-3000:]
    outside("restart", "-t", "2", "spark-2")
    wanted = "/var/lib/sparkops/weights is not mounted"
    wait_for(lambda: wanted in on("spark-2", "systemctl status --no-pager sparkops-rank@lab_faults"), 90)
    wait_for(lambda: wanted in on("spark-1", "systemctl status --no-pager sparkops-rank@lab_faults"), 90)
    time.sleep(10)
    assert running("spark-1") == [] and running("spark-2") == []
    on("spark-2", "mount --bind /srv/weights /var/lib/sparkops/weights")
    took = wait_for(completion, 120)
    print(f"a completion {took:.0f} s after the mount")
    on("spark-2", "umount -l /var/lib/sparkops/weights && rm -rf /srv/weights")


WATCH = {"serve_watch": True, "serve_watch_interval": 1, "serve_watch_samples": 8, "serve_watch_canary": 0, "serve_restart_limit": 2, "serve_restart_delay": 2}


def test_watch_ends_a_stuck_engine_and_no_slow_one(faults):
    serve(FROZEN=5, more=WATCH)
    forget_events("lab_faults")
    before = inspect("spark-1", "lab_faults-rank0")["State"]["StartedAt"]
    assert completion() and events("spark-1") == [], "no token for 5 s, then one, is no reason"
    on("spark-1", f"curl -s -d '{{\"COMPLETION\": \"hang\"}}' http://127.0.0.1:{STUB_PORT}/debug/set")
    hanging = threading.Thread(target=completion, kwargs={"timeout": 60}, daemon=True)
    hanging.start()
    took = wait_for(lambda: inspect("spark-1", "lab_faults-rank0")["State"]["StartedAt"] > before, 90)
    print(f"stuck: started again {took:.0f} s after the request")
    assert wait_for(completion, 60) < 60
    event = events("spark-1")[0]
    assert event["by"] == "watch" and "no token in 8 samples" in event["reason"] and event["ranks"]["1"]["tail"]


def test_restarts_never_exceed_the_cap(faults):
    """An engine that dies some seconds after it was proven: the watch starts the group twice, then gives up."""
    serve(EXIT_READY_AFTER=20, more=WATCH)
    wait_for(lambda: "gave up" in on("spark-1", "systemctl status --no-pager sparkops-rank@lab_faults"), 240)
    time.sleep(15)
    assert running("spark-1") == [] and running("spark-2") == []
    journal = on("spark-1", "journalctl -u sparkops-rank@lab_faults --no-pager -n 200")
    last = journal[journal.rindex("attempt 1 of 2"):]
    assert last.count("starts the group, attempt") == 1 and "attempt 2 of 2" in last and "gave up after 2 starts" in last
    serve(LOAD_SECONDS=2)  # a play starts it again, and the count begins anew
    assert completion() and on("spark-1", "ls /var/lib/sparkops/lab_faults").split().count("restarts.json") == 0


def test_a_stop_stays_a_stop_across_reboots(faults):
    assert play("stop", variables=variables()).code == 0
    for node in NODES:
        outside("restart", "-t", "2", node)
    wait_for(lambda: "stopped, as ordered" in on("spark-1", "systemctl status --no-pager sparkops-rank@lab_faults"), 90)
    time.sleep(10)
    assert running("spark-1") == [] and running("spark-2") == []


def test_both_nodes_boot_and_the_real_engine_answers():
    done = play("serve", variables={"memory_tolerance": "12 GiB"})
    assert done.code == 0, done.text[-4000:]
    booted = power("both")
    wait_for(lambda: completion("lab_tiny", 8888), 300, 3)
    print(f"real engine: a completion {time.time() - booted:.0f} s after the last boot")
    assert time.time() - booted < 300


def test_a_long_prompt_is_judged_by_the_memory_of_every_rank():
    """On the pair that has just come back; 180 tokens are long for a model of 256."""
    done = play("memory_prompt", variables={"memory_prompt_tokens": 180, "memory_prompt_floor": "128 MiB"})
    assert done.code == 0, done.text[-3000:]
    assert "tokens of prompt" in done.text and all(f"{node}: " in done.text for node in NODES)
    done = play("memory_prompt", variables={"memory_prompt_tokens": 180, "memory_prompt_floor": "900 GiB"})
    assert done.code != 0 and done.text.count("memory.prompt_low") >= 2 and "that alone, and run this again" in done.text


def test_a_copied_tree_is_evicted_without_root():
    """2 GB, by the account that owns them; the module asks mincore before and after."""
    on("spark-1", "su alice -c 'mkdir -p ~/tree && head -c 2000000000 /dev/urandom > ~/tree/one && cp -r ~/tree ~/copy'")
    try:
        done = subprocess.run(["ansible", "spark-1", "-m", "sparkops.inference.page_cache", "-a", "paths=/home/alice/copy"], capture_output=True, text=True,
                              check=False, env={**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"})
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout[done.stdout.index("{"):])
        print({name: found[name] for name in ("size_bytes", "cached_bytes", "left_bytes")})
        assert found["size_bytes"] == 2_000_000_000 and found["cached_bytes"] > 1_000_000_000 and found["left_bytes"] < 10_000_000
    finally:
        on("spark-1", "rm -rf /home/alice/tree /home/alice/copy")
