# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Taking over from a launch script: containers with its names, options and folders, run on the nodes with the stand-in engine."""

from __future__ import annotations

import re

import pytest
from conftest import STUB, inspect, on, play, running

DEPLOYMENT, PORT = "lab_adopt", 8897
REVISION = "fb9f34fa5a2daef6ae61ee8019695e0e508e8593"
HOMES = {"spark-1": "/home/alice", "spark-2": "/data/home/bob"}
OLD = {"spark-1": ["dsv41-exl3-head", "dsv41-exl3-nfs"], "spark-2": ["dsv41-exl3-worker"]}
STATE = f"/var/lib/sparkops/{DEPLOYMENT}"


def variables(**more):
    return {
        "serve_deployment": DEPLOYMENT, "image_reference": STUB, "serve_ready_timeout": 120, "serve_port": PORT, "serve_rendezvous_port": 29597,
        "serve_completion_timeout": 20, **more,
    }


def launch(node: str, rank: int) -> None:
    """What a launch script does on a node: its folders, its start script as an entry point, no restart policy, no label."""
    home = HOMES[node]
    name = OLD[node][0]
    on(node, f"""
        set -e
        docker rm -f {name} >/dev/null 2>&1 || true
        old={home}/.cache/vllm-dsv41-flash-exl3
        rm -rf $old {STATE}/cache
        mkdir -p $old/triton/k1 $old/tilelang/k2 $old/torch_compile_cache
        echo cubin > $old/triton/k1/kernel.cubin; echo so > $old/tilelang/k2/kernel.so; echo graph > $old/torch_compile_cache/graph
        printf '%s\\n' '#!/bin/bash' 'exec vllm serve /model --served-model-name tiny --nnodes 2 --node-rank {rank} --master-addr 198.51.100.11 \\' \\
            ' --master-port 29597 --port {PORT} {"--headless" if rank else ""}' > {home}/dsv41-start.sh
        docker run --detach --name {name} --network host --ipc host --oom-score-adj 1000 --cap-add SYS_PTRACE --cap-add IPC_LOCK \\
            --entrypoint bash --volume {home}/dsv41-start.sh:/start.sh:ro \\
            --volume {home}/.cache/huggingface/hub/models--sparklab--tiny-llama/snapshots/{REVISION}:/model:ro \\
            --volume $old:/root/.cache/vllm --volume $old/triton:/root/.triton/cache --volume $old/tilelang:/root/.tilelang/cache \\
            --env NCCL_NET=IB --env HF_HUB_OFFLINE=1 --env STUB_ANSWER='The old one.' {STUB} /start.sh >/dev/null
    """)


def answer() -> str:
    """What whoever holds the port says to a client."""
    key = on("spark-1", f"cat {STATE}/key/api_key 2>/dev/null || true").strip()
    return on("spark-1", f"""python3 - <<'END'
import json, time, urllib.request as u
body = json.dumps({{"model": "tiny", "messages": [{{"role": "user", "content": "hello"}}], "max_tokens": 16}}).encode()
for _ in range(40):
    try:
        request = u.Request("http://127.0.0.1:{PORT}/v1/chat/completions", body,
                            {{"Content-Type": "application/json", "Authorization": "Bearer {key}"}})
        print(json.load(u.urlopen(request, timeout=5))["choices"][0]["message"]["content"])
        break
    except OSError:
        time.sleep(0.5)
END""").strip()


def states() -> dict[str, str]:
    return {name: inspect(node, name)["State"]["Status"] for node, names in OLD.items() for name in names}


@pytest.fixture(name="launched", scope="module")
def fixture_launched():
    """Both nodes as an owner of the launch scripts has them: the hub's own cache, compiled kernels of root, three containers."""
    staged = play("site", "--tags", "bootstrap,image,weights,sync", variables=variables())
    assert staged.code == 0, staged.text[-4000:]
    for node, home in HOMES.items():
        on(node, f"""
            set -e
            rm -rf {home}/.cache/huggingface
            tree={home}/.cache/huggingface/hub/models--sparklab--tiny-llama
            mkdir -p $tree/snapshots
            cp -r /var/lib/sparkops/weights/sparklab--tiny-llama/{REVISION} $tree/snapshots/{REVISION}
            chown -R $(stat -c %U {home}) {home}/.cache
            # No tree of an earlier test: what is served here was taken over.
            rm -rf /var/lib/sparkops/weights/sparklab--tiny-llama
        """)
    for rank, node in ((1, "spark-2"), (0, "spark-1")):
        launch(node, rank)
    on("spark-1", f"docker rm -f dsv41-exl3-nfs >/dev/null 2>&1; docker run --detach --name dsv41-exl3-nfs --network host --restart unless-stopped"
                  f" --entrypoint sleep {STUB} infinity")
    yield
    for node, names in OLD.items():
        on(node, f"docker rm -f {' '.join(names)}; rm -rf {HOMES[node]}/.cache/huggingface {HOMES[node]}/.cache/vllm-dsv41-flash-exl3")


def test_trees_of_the_launch_script_are_taken_over_while_it_serves(launched):
    done = play("site", "--tags", "image,weights,sync", variables=variables())
    assert done.code == 0, done.text[-4000:]
    name = "model-00002-of-00004.safetensors"
    old = f"{HOMES['spark-1']}/.cache/huggingface/hub/models--sparklab--tiny-llama/snapshots/{REVISION}/{name}"
    new = f"/var/lib/sparkops/weights/sparklab--tiny-llama/{REVISION}/{name}"
    # The same file, neither fetched nor copied.
    assert len(set(on("spark-1", f"stat -c %i {old} {new}").split())) == 1
    assert set(states().values()) == {"running"} and answer() == "The old one."


def test_without_consent_it_only_names_them(launched):
    before = {name: inspect(node, name)["State"]["StartedAt"] for node, names in OLD.items() for name in names}
    done = play("adopt", "--tags", "adopt", variables=variables())
    assert done.code == 0 and re.findall(r"changed=(\d+)", done.text) == ["0", "0"], done.text[-3000:]
    assert all(name in done.text for name in before)
    assert before == {name: inspect(node, name)["State"]["StartedAt"] for node, names in OLD.items() for name in names}


def test_a_group_that_cannot_be_proven_gives_the_place_back(launched):
    done = play("adopt", "--tags", "adopt", variables=variables(adopt_stop=True, serve_environment={"STUB_COMPLETION": "empty"}, serve_completion_timeout=5))
    assert done.code != 0 and "gives no proof" in done.text, done.text[-4000:]
    for node, name in (("spark-1", "dsv41-exl3-head, dsv41-exl3-nfs was started again"), ("spark-2", "dsv41-exl3-worker was started again")):
        # One line: long messages are broken where it pleases Ansible.
        words = " ".join(done.text.split())
        assert f"{node}: the new group of {DEPLOYMENT}: found no proof" in words and name in words
    assert set(states().values()) == {"running"} and answer() == "The old one."
    started = [inspect(node, name)["State"]["StartedAt"]
               for node, name in (("spark-1", "dsv41-exl3-nfs"), ("spark-2", "dsv41-exl3-worker"), ("spark-1", "dsv41-exl3-head"))]
    # The nodes of the lab share one clock: what serves files, the worker, the head.
    assert started == sorted(started)
    for rank, node in enumerate(HOMES):
        assert f"{DEPLOYMENT}-rank{rank}" not in running(node)
        assert on(node, "cat /var/lib/sparkops/adopted.json 2>/dev/null || true") == ""


def test_a_proven_group_takes_the_place(launched):
    predicted = play("adopt", "--tags", "adopt", "--check", variables=variables(adopt_stop=True))
    assert predicted.code == 0 and set(states().values()) == {"running"}, predicted.text[-3000:]
    done = play("adopt", "--tags", "adopt", variables=variables(adopt_stop=True))
    assert done.code == 0, done.text[-4000:]
    assert set(states().values()) == {"exited"} and answer() == "The answer is four."
    for node, home in HOMES.items():
        user = home.rsplit("/", 1)[1]
        pairs = [("triton/k1/kernel.cubin", "triton/k1/kernel.cubin"), ("torch_compile_cache/graph", "vllm/torch_compile_cache/graph")]
        for old, new in pairs:
            assert len(set(on(node, f"stat -c %i {home}/.cache/vllm-dsv41-flash-exl3/{old} {STATE}/cache/{new}").split())) == 1
        assert set(on(node, f"find {STATE}/cache -type d -printf '%u\\n'").split()) == {user}
    again = play("adopt", "--tags", "adopt", variables=variables(adopt_stop=True))
    assert again.code == 0 and re.findall(r"changed=(\d+)", again.text) == ["0", "0"], again.text[-3000:]


def test_the_way_back_on_request(launched):
    assert play("stop", variables=variables()).code == 0
    done = play("adopt", "--tags", "adopt", variables=variables(adopt_restore=True))
    assert done.code == 0, done.text[-3000:]
    assert set(states().values()) == {"running"} and answer() == "The old one."
