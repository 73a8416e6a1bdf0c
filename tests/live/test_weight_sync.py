# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The choice of a method, and what a launch asks of every rank, in containers without modules of NFS and ZFS; copies that are cut short."""

from __future__ import annotations

import contextlib
import subprocess
import time

import pytest
from conftest import LAB, STUB, fingerprint, inventory_with, on, play
from plays import Playing
from weights_node import BULK, REPOSITORY, SECOND, SIZES, TOTAL, TREE, WEIGHTS

HEAD, WORKER = "spark-1", "spark-2"
TINY = f"{WEIGHTS}/sparklab--tiny-llama/*/"
DEPLOYMENT = "lab_sync"
UNIT = f"sparkops-sync-{DEPLOYMENT}.service"
STAGING = f"{WEIGHTS}/.sparkops-incoming"
# 72 MiB in three shards, for copies that last.
COPY = {
    "serve_deployment": DEPLOYMENT, "serve_model_repository": REPOSITORY, "serve_model_revision": BULK["revision"], "weight_sync_method": "rsync",
    "weight_sync_space_margin": "1 MiB",
}  # fmt: skip
# The gate takes the first rsync that it finds.
SLOW = "/usr/local/bin/rsync"


def flat(done):
    """What was printed, as one line: long texts of a result are folded."""
    return " ".join(done.text.split())


@pytest.fixture(name="copied", scope="module")
def fixture_copied():
    for name in ("bootstrap", "weights", "sync"):
        done = play(name)
        assert done.code == 0, done.text[-5000:]
    return done


def test_auto_copies_and_says_why(copied):
    for word in ("taken: rsync", "rsync fits", "nfs does not fit", "kernel module nfsd", "zfs does not fit"):
        assert word in flat(copied), copied.text[-3000:]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"weight_sync_method": "nfs"}, ["kernel module nfsv4", "package nfs-common", "rsync would work"]),
        ({"weight_sync_method": "nfs", "weight_sync_packages": True}, ["kernel module nfsd", "rsync would work"]),
        ({"weight_sync_method": "zfs"}, ["weight_sync_zfs_dataset", "rsync would work"]),
        ({"weight_sync_method": "zfs", "weight_sync_zfs_dataset": "tank/w"}, ["kernel module zfs", "rsync would work"]),
    ],
)
def test_a_method_that_cannot_work_is_refused_with_what_would(copied, variables, words):
    before = fingerprint("spark-1") + fingerprint("spark-2")
    done = play("sync", variables=variables)
    assert done.code != 0 and "[sync.method]" in done.text, done.text[-3000:]
    for word in words:
        assert word in flat(done), done.text[-3000:]
    assert fingerprint("spark-1") + fingerprint("spark-2") == before


def test_a_folder_of_somebody_else_is_refused_with_path_and_uid(copied):
    owner = on("spark-2", "stat -c %u /var/lib/sparkops/weights").strip()
    on("spark-2", "chown 65534 /var/lib/sparkops/weights")
    try:
        # Where all is there nothing has to be written: the folder may be a share that is read-only here.
        complete = play("sync", variables={"weight_sync_method": "rsync"})
        on("spark-2", f"rm {TINY}config.json")
        done = play("sync", variables={"weight_sync_method": "rsync"})
    finally:
        on("spark-2", f"chown {owner} /var/lib/sparkops/weights")
    assert complete.code == 0 and sum(complete.changed.values()) == 0, complete.text[-3000:]
    assert done.code != 0 and "spark-2" in done.text and "/var/lib/sparkops/weights" in done.text and "owned by uid 65534" in flat(done), done.text[-3000:]


def test_no_page_of_a_copy_stays_in_memory(copied):
    on("spark-2", f"rm -r {TINY} {TINY.rstrip('/')}.manifest.json")
    done = play("sync")
    assert done.code == 0, done.text[-3000:]
    pages = on("spark-2", f"fincore --bytes --noheadings --output PAGES {TINY}*.safetensors").split()
    assert len(pages) >= 3 and set(pages) == {"0"}


def test_no_launch_while_one_rank_lacks_a_file_and_the_sync_brings_it(copied):
    image = {"image_reference": STUB}  # whose lack would be told first
    assert play("image", variables=image).code == 0
    shard = on("spark-2", f"ls {TINY}*.safetensors").split()[0]
    on("spark-2", f"rm {shard}")
    done = play("serve", variables=image)
    assert done.code != 0 and "weights.incomplete" in done.text and "spark-2" in done.text, done.text[-3000:]
    assert shard.rpartition("/")[2] in done.text
    assert play("sync").code == 0
    assert on("spark-2", f"ls {shard}").strip() == shard


# --- Copies that are cut short ---------------------------------------------------------------------------------


@pytest.fixture(name="bulk", scope="module")
def fixture_bulk(copied):
    """Keys, gates, and the large model on the head."""
    done = play("weights", variables=COPY)
    assert done.code == 0, done.text[-3000:]


def sync():
    done = play("sync", variables=COPY)
    assert done.code == 0, done.text[-4000:]
    return done


def whole(node=WORKER):
    """Every file under its final name, a regular one with the right hash; nothing beside them."""
    lines = on(node, f"cd {TREE} && find . -not -type d -printf '%y %P\\n' && sha256sum *").splitlines()
    found = {name: digest for digest, name in (line.split("  ", 1) for line in lines if "  " in line)}
    kinds = {line for line in lines if "  " not in line}
    return kinds == {f"f {name}" for name in SIZES} and found == {name: item["sha256"] for name, item in BULK["files"].items()}


def arrived(folders=STAGING):
    return int(on(WORKER, f"find {folders} -type f -printf '%s\\n' 2>/dev/null | awk '{{sum += $1}} END {{print sum + 0}}'"))


def unfinished():
    """Nothing short has a final name, and nothing is called complete."""
    lines = on(WORKER, f"find {TREE} -type f -printf '%s %f\\n' 2>/dev/null; ls {TREE}.manifest.json 2>/dev/null || true").splitlines()
    return set(lines) <= {f"{size} {name}" for name, size in SIZES.items()}


def completed():
    """The next run brings what lacks, and one more changes nothing."""
    sync()
    assert whole() and arrived() == 0 and sync().changed[WORKER] == 0


def moved(node, field):
    """Bytes that a node has received (2) or sent (10) over the fabric."""
    return int(on(node, f"awk '/eth1:/ {{print ${field}}}' /proc/net/dev"))


@contextlib.contextmanager
def copying(share=0.2, rate=1500):
    """A play that copies, as soon as a share of the model has come. Each of its three streams gets so many KiB/s."""
    on(WORKER, f"rm -rf {TREE} {TREE}.manifest.json {STAGING}")
    on(HEAD, f"printf '#!/bin/sh\\nexec /usr/bin/rsync --bwlimit={rate} \"$@\"\\n' >{SLOW} && chmod 755 {SLOW}")
    going = Playing("sync", variables=COPY)
    try:
        deadline = time.time() + 120
        while arrived() < share * TOTAL:
            assert going.process.poll() is None and time.time() < deadline, going.lines
        yield going
    finally:
        if going.process.poll() is None:
            going.kill()
        on(WORKER, f"systemctl stop {UNIT} 2>/dev/null || true")
        on(HEAD, f"rm -f {SLOW}")


@contextlib.contextmanager
def small_disk(size):
    """The worker's folder of trees is a filesystem of its own, and its state lies there too, as both lie on one disk where nobody sets another."""
    owner, state = on(WORKER, f"stat -c %u:%g {WEIGHTS}").strip(), f"/var/lib/sparkops/{DEPLOYMENT}"
    on(WORKER, f"""
        set -e
        mount -t tmpfs -o size={size},mode=755 none {WEIGHTS}
        mkdir -p {state}
        chown {owner} {WEIGHTS} {state}
        cp -a {state} {WEIGHTS}/.state
        mount --bind {WEIGHTS}/.state {state}
    """)
    try:
        yield
    finally:
        on(WORKER, f"umount --lazy {state} {WEIGHTS}")


def test_a_killed_receiver_leaves_no_short_file_and_the_next_run_goes_on(bulk):
    with copying(share=0.4) as going:
        on(WORKER, f"systemctl kill --signal=KILL {UNIT}")
        done = going.end()
    assert done.code != 0 and "sync.job_died" in done.text, done.text[-3000:]
    kept = arrived(f"{STAGING} {TREE}")
    assert unfinished() and kept >= 0.4 * TOTAL
    before = moved(WORKER, 2)
    sync()
    assert moved(WORKER, 2) - before < 1.1 * (TOTAL - kept) + 2**20
    completed()


def test_a_killed_sender_is_asked_again(bulk):
    with copying() as going:
        on(HEAD, f"rm {SLOW} && pkill -KILL -f 'rsync.*--server --sender'")
        done = going.end()
    assert done.code == 0 and whole() and arrived() == 0, done.text[-3000:]


def test_a_second_run_joins_the_copy_and_there_is_one_writer(bulk):
    # The second play needs its time to come so far.
    with copying(share=0.05, rate=400) as going:
        pid = on(WORKER, f"systemctl show --property MainPID --value {UNIT}")
        second = Playing("sync", variables=COPY)
        second.until("iB/s")
        assert on(WORKER, f"systemctl show --property MainPID --value {UNIT}") == pid
        assert on(WORKER, "pgrep -fc '_sync_job import main'").strip() == "1"
        first, second = going.end(), second.end()
    assert first.code == second.code == 0 and whole(), second.text[-3000:]


def test_a_worker_that_starts_again_during_the_copy_completes_it_with_the_next_run(bulk):
    with copying() as going:
        # The outer engine is the power supply of the nodes.
        subprocess.run(["docker", "restart", "-t", "2", WORKER], check=True, capture_output=True, timeout=120)
        done = going.end()
        deadline = time.time() + 60
        while subprocess.run([LAB, "ssh", WORKER, "true"], capture_output=True, check=False, timeout=60).returncode:
            assert time.time() < deadline, f"{WORKER} does not come back"
    # The end of a node in good order ends its units, too; the play may see that, or a node that is gone.
    assert done.code != 0 and any(word in done.text for word in ("sync.job_died", "sync.cancelled", "UNREACHABLE")), done.text[-3000:]
    assert unfinished() and arrived() > 0
    completed()


def test_a_disk_that_is_too_small_is_refused_with_numbers_before_the_first_byte(bulk):
    with small_disk("60m"):
        done = play("sync", variables=COPY)
        assert done.code != 0 and "[sync.method]" in done.text, done.text[-3000:]
        assert "60.0 MiB free" in flat(done) and "to copy, and a margin" in flat(done) and WEIGHTS in done.text
        assert arrived(f"{STAGING} {TREE}") == 0
    # Room for what lacks is room enough, and what is there needs none.
    with small_disk("100m"):
        completed()
        on(WORKER, f"rm {TREE}/{SECOND} && mount -o remount,size=76m {WEIGHTS}")
        completed()


def test_a_disk_that_fills_during_the_copy_is_told_and_the_next_run_goes_on(bulk):
    with small_disk("100m"):
        with copying() as going:
            on(WORKER, f"dd if=/dev/zero of={WEIGHTS}/fill bs=1M 2>/dev/null; true")
            done = going.end()
        assert done.code != 0 and "[sync.disk_full]" in done.text and "No space left" in flat(done), done.text[-3000:]
        assert unfinished()
        on(WORKER, f"rm {WEIGHTS}/fill")
        completed()


def flip(name):
    """Another byte in a file of the worker; its size and its time stay."""
    on(WORKER, f"""
        set -e
        cd {TREE}
        touch --reference={name} /tmp/time
        printf '\\x5a\\xa5' | dd of={name} bs=1 seek=30000 conv=notrunc 2>/dev/null
        touch --reference=/tmp/time {name}
    """)


def test_the_tag_verify_names_a_damaged_file_and_the_next_run_brings_it_alone(bulk):
    completed()
    flip(SECOND)
    assert sync().changed[WORKER] == 0
    done = play("sync", "--tags", "verify", variables=COPY)
    assert done.code != 0 and "[sync.damaged]" in done.text and SECOND in flat(done), done.text[-3000:]
    before = moved(WORKER, 2)
    # In every run asked for, it must not be named for ever.
    done = play("sync", variables={**COPY, "weight_sync_verify": True})
    assert done.code == 0 and done.changed[WORKER] and whole(), done.text[-3000:]
    assert moved(WORKER, 2) - before < 1.1 * SIZES[SECOND] + 2**20


def test_the_policy_force_finds_it_by_itself_and_verify_only_copies_nothing(bulk):
    completed()
    flip(SECOND)
    done = play("sync", variables={**COPY, "weight_sync_policy": "force"})
    assert done.code == 0 and whole(), done.text[-3000:]
    on(WORKER, f"rm {TREE}/{SECOND}")
    before = moved(WORKER, 2)
    done = play("sync", variables={**COPY, "weight_sync_policy": "verify_only"})
    assert done.code != 0 and "[sync.incomplete]" in done.text and SECOND in flat(done), done.text[-3000:]
    assert moved(WORKER, 2) - before < 2**20 and on(WORKER, f"ls {TREE}/{SECOND} 2>/dev/null || true") == ""
    completed()


def test_files_of_a_hub_cache_arrive_as_real_files(bulk):
    """The newer layout: links from the snapshot to the model's blobs, and on to a store of the whole cache. The workers get the bytes, once."""
    hub = "/home/alice/.cache/huggingface/hub"
    cache = f"{hub}/models--sparklab--bulk"
    on(HEAD, f"""
        set -e
        mkdir -p {cache}/blobs {cache}/refs {cache}/snapshots/{BULK['revision']}
        printf {'f' * 40} >{cache}/refs/main
        cd {TREE}
        for name in *; do
            blob=$(sha256sum "$name" | cut -d' ' -f1)
            mv "$name" {cache}/blobs/$blob
            case $name in *.safetensors)
                mkdir -p {hub}/blobs/${{blob:0:2}}
                mv {cache}/blobs/$blob {hub}/blobs/${{blob:0:2}}/$blob
                ln -s ../../blobs/${{blob:0:2}}/$blob {cache}/blobs/$blob
            esac
            ln -s ../../blobs/$blob {cache}/snapshots/{BULK['revision']}/$name
        done
        chown -R -h alice: /home/alice/.cache
        rm -rf {TREE} {TREE}.manifest.json
    """)
    try:
        on(WORKER, f"rm -rf {TREE} {TREE}.manifest.json")
        done = play("weights", variables={**COPY, "weights_download": "never"})
        assert done.code == 0 and whole(HEAD), done.text[-3000:]
        completed()
        assert TOTAL <= int(on(WORKER, f"du --summarize --bytes {TREE}").split()[0]) < 1.01 * TOTAL
        # What a copy of links by hand has left.
        on(WORKER, f"ln -sf ../../../blobs/gone {TREE}/{SECOND}")
        completed()
    finally:
        on(HEAD, f"rm -rf {hub}")


def test_several_workers_take_each_byte_from_the_head_once(bulk, hub, tmp_path):
    """Three accounts, three homes; the third node reads from the second while that gets the files, and nobody asks the hub."""
    nodes = [HEAD, WORKER, "spark-3"]
    settings = {
        "serve_profile": "lab_tiny", "serve_nodes": nodes, "bootstrap_docker_group": True, "bootstrap_state_dir": True, "bootstrap_node_keys": True,
        "bootstrap_packages": True,
    }  # fmt: skip
    inventory = inventory_with(tmp_path, {"trio": {"hosts": dict.fromkeys(nodes, {}), "vars": settings}})
    variables = {**COPY, "serve_deployment": "lab_trio", "spark_hosts": "trio"}
    done = play("bootstrap", inventory=inventory, variables=variables)
    assert done.code == 0, done.text[-3000:]
    for node in nodes[1:]:
        on(node, f"rm -rf {TREE} {TREE}.manifest.json")
    before = moved(HEAD, 10)
    done = play("sync", inventory=inventory, variables=variables)
    assert done.code == 0 and whole(WORKER) and whole("spark-3"), done.text[-3000:]
    assert hub.counters(REPOSITORY) == {}
    share = (moved(HEAD, 10) - before) / TOTAL
    print(f"the head has sent {share:.2f} of the model to two workers")
    assert 1 <= share < 1.3


def test_a_method_is_refused_whatever_host_comes_first(bulk, tmp_path):
    """The first host of the play is beside the group, whose head is the second."""
    nodes = [WORKER, "spark-3"]
    settings = {"serve_profile": "lab_tiny", "serve_nodes": nodes, "bootstrap_docker_group": True, "bootstrap_state_dir": True, "bootstrap_node_keys": True}
    inventory = inventory_with(tmp_path, {"beside": {"hosts": dict.fromkeys([HEAD, *nodes], {}), "vars": settings}})
    variables = {**COPY, "serve_deployment": "lab_beside", "spark_hosts": "beside"}
    for name in ("bootstrap", "weights"):
        done = play(name, inventory=inventory, variables=variables)
        assert done.code == 0, done.text[-3000:]
    done = play("sync", inventory=inventory, variables={**variables, "weight_sync_method": "nfs"})
    assert done.code != 0 and "[sync.method]" in done.text and "rsync would work" in flat(done), done.text[-3000:]
    done = play("sync", inventory=inventory, variables=variables)
    assert done.code == 0 and whole("spark-3"), done.text[-3000:]
