# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""NFS and ZFS on real kernels; in the order of the file, since each test starts where the last one ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time

import plays
import pytest
from conftest import INVENTORY, VMLAB, lab, on, play, until

HEAD, WORKER = "spark-1", "spark-2"
SERVER, CLIENT = "198.51.100.11", "198.51.100.12"
ROOT = "/var/lib/sparkops/weights"
NFS = {"weight_sync_method": "nfs"}
POOL_ROOT = "/srv/spark-weights"
ZFS = {
    "weight_sync_method": "zfs", "weights_root": POOL_ROOT, "weight_sync_zfs_dataset": "tank/weights", "weight_sync_zfs_device": "/dev/vdc",
    # The disk of a machine is small.
    "weight_sync_space_margin": "64 MiB",
}  # fmt: skip
REPLICA = f"{POOL_ROOT}/.replica"
RSYNC = {"weight_sync_method": "rsync"}
with open(os.path.join(plays.ROOT, "tests/lab/tiny_model.json"), encoding="utf-8") as stream:
    OLDER = json.load(stream)["revisions"]["older"]["revision"]


def tree(machine=HEAD, root=ROOT):
    return on(machine, f"ls -d {root}/*/*/config.json").split()[0].rpartition("/")[0]


def hashes(machine, folder):
    return on(machine, f"cd {folder} && timeout 60 sha256sum $(find . -type f | sort)")


@contextlib.contextmanager
def slow_rail(rate, burst):
    """What the head sends over its first rail comes slowly."""
    on(HEAD, f"tc qdisc replace dev enp1s0f1np1 root tbf rate {rate} burst {burst} latency 50ms")
    try:
        yield
    finally:
        on(HEAD, "tc qdisc del dev enp1s0f1np1 root")


@contextlib.contextmanager
def copying(**variables):
    """A play that copies the model's 2 MB for 40 s, as soon as it has brought something."""
    on(WORKER, f"rm -rf {tree()} {tree()}.manifest.json")
    with slow_rail("400kbit", "16k"):
        going = plays.Playing("sync", inventory=INVENTORY, variables={**RSYNC, **variables})
        try:
            until("bytes in the staging folder", lambda: staged() or going.process.poll() is not None, 300)
            assert going.process.poll() is None, going.end(1).text[-3000:]
            yield going
        finally:
            if going.process.poll() is None:
                going.kill()


def staged():
    """Whether the staging folder of the worker holds something."""
    return on(WORKER, f"find {ROOT}/.sparkops-incoming -type f -size +30k 2>/dev/null || true").strip() != ""


def short_files():
    """Files of the worker that have their final name and not their size."""
    sizes = {item["path"]: item["size"] for item in json.loads(on(HEAD, f"cat {tree()}.manifest.json"))["files"]}
    there = on(WORKER, f"cd {tree()} 2>/dev/null && find . -type f -printf '%P %s\\n' || true").splitlines()
    return [line for line in there if sizes[line.rsplit(" ", 1)[0]] != int(line.rsplit(" ", 1)[1])]


def completed():
    """The next run brings what lacks, and leaves nothing beside it."""
    fine(play("sync", variables=RSYNC))
    assert hashes(WORKER, tree()) == hashes(HEAD, tree()) and on(WORKER, f"find {ROOT}/.sparkops-incoming -type f 2>/dev/null || true") == ""


def changed(done):
    return sum(done.changed.values())


def flat(done):
    """What was printed, as one line: long texts of a result are folded."""
    return " ".join(done.text.split())


def refused(done, *words):
    assert done.code != 0, done.text[-3000:]
    for word in words:
        assert word in flat(done), done.text[-3000:]


def fine(done):
    assert done.code == 0, done.text[-5000:]
    return done


@pytest.fixture(name="model", scope="module")
def fixture_model():
    """Keys, gates, the image, and the model on the head."""
    for name in ("bootstrap", "weights"):
        fine(play(name))


# --- NFS -------------------------------------------------------------------------------------------------------


def test_auto_says_what_fits_and_copies(model):
    done = fine(play("sync", "--check"))
    for word in ("rsync fits", "nfs fits", "zfs does not fit", "taken: rsync"):
        assert word in flat(done), done.text[-3000:]


def test_a_worker_without_the_client_is_refused_by_the_packages_name(model):
    on(WORKER, "mv /sbin/mount.nfs /sbin/mount.nfs.away")
    try:
        refused(play("sync", variables=NFS), "sync.method", "nfs-common", "rsync would work")
        assert on(HEAD, "ls /etc/exports.d 2>/dev/null || true").strip() == ""
    finally:
        on(WORKER, "mv /sbin/mount.nfs.away /sbin/mount.nfs")


def test_shared_read_back_mounted_and_proven(model):
    on(HEAD, f"echo hf_secret > {ROOT}/token; chmod 600 {ROOT}/token")
    fine(play("sync", variables=NFS))
    table = on(HEAD, "exportfs -v")
    assert table.count(f"{CLIENT}(") == 1 and table.count("(") == 1 and tree() in table
    for word in ("ro,", "root_squash", "fsid="):
        assert word in table
    assert "no_root_squash" not in table and "rw," not in table and "*" not in table
    line = next(line for line in on(WORKER, "cat /proc/mounts").splitlines() if " nfs4 " in line)
    source, place, _type, options = line.split()[:4]
    assert source == f"{SERVER}:{tree()}" and place == tree()
    for option in ("ro", "vers=4.2", "nconnect=8", "hard", "timeo=600", f"addr={SERVER}"):
        assert option in options.split(",")
    assert hashes(WORKER, tree()) == hashes(HEAD, tree())
    assert json.loads(on(WORKER, f"cat {tree()}.manifest.json")) == json.loads(on(HEAD, f"cat {tree()}.manifest.json"))
    assert "x-sparkops" in on(WORKER, "grep nfs4 /etc/fstab") and on(WORKER, "systemctl is-enabled sparkops-mounts").strip() == "enabled"


def test_nothing_but_the_tree_can_be_reached(model):
    for path in (ROOT, "/var/lib/sparkops", "/"):
        mounted = f"mkdir -p /mnt/x; timeout 30 mount -t nfs4 -o ro,retry=0 {SERVER}:{path} /mnt/x && timeout 10 ls -laR /mnt/x"
        found = on(WORKER, f"{mounted}; cat /mnt/x/token /mnt/x/weights/token /mnt/x{ROOT}/token; umount -l /mnt/x; true", check=False)
        assert "hf_secret" not in found
    assert on(WORKER, f"touch {tree()}/x 2>&1 || true").strip().endswith("Read-only file system")


def test_a_second_run_changes_nothing(model):
    containers = [on(machine, "docker ps -a --no-trunc --format '{{.ID}} {{.State}}'") for machine in (HEAD, WORKER)]
    for name in ("sync", "share"):
        assert changed(fine(play(name, variables=NFS))) == 0, name
    assert [on(machine, "docker ps -a --no-trunc --format '{{.ID}} {{.State}}'") for machine in (HEAD, WORKER)] == containers


def test_the_rank_reads_through_the_mount(model):
    fine(play("image", variables=NFS))
    fine(play("serve", variables=NFS))
    pid = on(WORKER, "docker inspect -f '{{.State.Pid}}' lab_tiny-rank1").strip()
    assert " /model ro" in on(WORKER, f"grep nfs4 /proc/{pid}/mountinfo")
    assert " nfs" not in on(WORKER, f"grep -E ' /(root|home|var/cache|cache)' /proc/{pid}/mountinfo || true")


def test_a_new_revision_leaves_the_mount_of_the_old_one_and_the_recovery_takes_it_when_it_is_stale(model):
    """Beside a group that runs, which nothing of it stops. At the end all is as before."""
    ranks = "docker ps --no-trunc --format '{{.ID}} {{.Names}}'"
    running = [on(machine, ranks) for machine in (HEAD, WORKER)]
    first = tree()
    second = f"{first.rpartition('/')[0]}/{OLDER}"
    other = {**NFS, "serve_model_revision": OLDER}
    for name in ("weights", "sync"):
        fine(play(name, variables=other))
    mounted = on(WORKER, "cat /proc/mounts")
    for path in (first, second):
        assert f" {path} nfs4 " in mounted and f"{path} " in on(HEAD, "cat /etc/exports.d/sparkops-*.exports")
        assert hashes(WORKER, path) == hashes(HEAD, path)
    # Back to the first, and the other one is removed as play prune would do it.
    fine(play("sync", variables=NFS))
    on(HEAD, f"rm -rf {second} {second}.manifest.json && exportfs -f")
    until("a stale handle", lambda: "Stale file handle" in on(WORKER, f"timeout 10 stat -f {second} 2>&1 || true"), 150)
    fine(play("sync", variables=NFS))
    assert second not in on(HEAD, "exportfs -v") and f" {second} nfs4 " in on(WORKER, "cat /proc/mounts")
    fine(play("share", "--tags", "recover", variables=NFS))
    for table in ("/proc/mounts", "/etc/fstab"):
        found = on(WORKER, f"cat {table}")
        assert second not in found and f" {first} nfs4 " in found, table
    assert hashes(WORKER, first) == hashes(HEAD, first)
    assert running == [on(machine, ranks) for machine in (HEAD, WORKER)] and "lab_tiny-rank1" in running[1]
    on(WORKER, f"rm -r {second}*")


def timed(name, seconds=60, **variables):
    """A play that must end by itself, with an error that has the server's address."""
    done = play(name, variables={**NFS, **variables}, timeout=240)
    assert done.code != 0 and SERVER in done.text and "sync.nfs_dead" in done.text, done.text[-4000:]
    assert done.ended - done.begun < seconds, f"{name} took {done.ended - done.begun:.0f} s"


def test_a_dead_server_holds_no_play_and_readers_go_on(model):
    wanted = on(HEAD, f"sha256sum {tree()}/config.json").split()[0]
    # A rank that reads all the time, past every cache.
    read = "f = os.open('/model/config.json', os.O_RDONLY); os.posix_fadvise(f, 0, 0, 4); os.read(f, 9); os.close(f); time.sleep(0.2)"
    loop = f"import os, time\nwhile True:\n {read}"
    on(WORKER, f"docker exec -d lab_tiny-rank1 python3 -c \"{loop}\"")
    hashed = f"timeout 10 dd if={tree()}/config.json iflag=direct bs=1M status=none | sha256sum"
    try:
        time.sleep(3)
        on(HEAD, "systemctl stop nfs-server")
        for name in ("status", "sync", "stop"):
            timed(name)
        on(HEAD, "systemctl start nfs-server")
        begun = time.monotonic()
        until("the file reads again", lambda: on(WORKER, hashed, check=False).split()[:1] == [wanted], 60)
        print(f"read again {time.monotonic() - begun:.0f} s after the server was back")
    finally:
        on(HEAD, "systemctl start nfs-server")
    assert "lab_tiny-rank1" not in on(WORKER, "docker ps --format '{{.Names}}'")


def test_other_options_are_refused_in_use_and_mounted_anew_when_unused(model):
    path = tree()
    on(WORKER, f"umount {path} && mount -t nfs4 -o ro,nfsvers=4.1,soft {SERVER}:{path} {path}")
    container = on(WORKER, f"docker run -d -v {path}:/x:ro --entrypoint sleep 198.18.0.1:5000/sparklab/stub:1 600").strip()
    refused(play("sync", variables=NFS), "sync.nfs_used", f"container {container[:12]}", "vers 4.1, wanted 4.2")
    on(WORKER, f"docker rm -f {container}")
    assert changed(fine(play("sync", variables=NFS))) >= 1
    options = on(WORKER, f"findmnt -n -o OPTIONS {path}")
    assert "vers=4.2" in options and "hard" in options and "nconnect=8" in options


def test_the_play_share_starts_a_stopped_server(model):
    on(HEAD, "systemctl stop nfs-server")
    fine(play("share", variables=NFS))
    assert hashes(WORKER, tree()) == hashes(HEAD, tree())


def test_a_stale_handle_is_told_in_seconds_and_mended_by_the_recovery(model):
    path = tree()
    on(HEAD, f"mv {path} {path}.old && cp -a {path}.old {path} && rm -r {path}.old && exportfs -f")
    # The client asks for the folder's number again only when what it remembers is old (acdirmax, 60 s); until then all reads are right.
    until("a stale handle", lambda: "Stale file handle" in on(WORKER, f"timeout 10 stat {path} 2>&1 || true"), 150)
    refused(play("sync", variables=NFS, timeout=120), "sync.nfs_stale", SERVER, "recover")
    fine(play("share", "--tags", "recover", variables=NFS))
    assert hashes(WORKER, path) == hashes(HEAD, path)


def test_the_mount_is_there_again_after_both_reboot(model):
    """The worker is up first, and waits for the head."""
    lab("power-off", HEAD, WORKER)
    lab("power-on", WORKER)
    time.sleep(20)
    lab("power-on", HEAD)
    until("mounted", lambda: " nfs4 " in on(WORKER, "cat /proc/mounts"), 300)
    assert hashes(WORKER, tree()) == hashes(HEAD, tree())


def test_from_shared_folders_back_to_copies(model):
    fine(play("sync", variables=RSYNC))
    assert " nfs4 " not in on(WORKER, "cat /proc/mounts") and "nfs4" not in on(WORKER, "cat /etc/fstab")
    assert "sparkops-mounts" not in on(WORKER, "systemctl list-unit-files --no-pager")
    assert on(HEAD, "exportfs -v").strip() == "" and hashes(WORKER, tree()) == hashes(HEAD, tree())


def test_a_power_cut_during_a_copy_leaves_no_short_file_and_the_next_run_completes(model):
    with copying() as going:
        lab("power-off", WORKER)
        lab("power-on", WORKER)
        done = going.end(1200)
    # A play whose node is away for longer than its patience has nobody to ask what became of the copy.
    assert done.code != 0 and ("sync.job_died" in done.text or "UNREACHABLE" in done.text), done.text[-3000:]
    assert short_files() == [] and on(WORKER, f"ls {tree()}.manifest.json 2>/dev/null || true") == ""
    completed()


def test_a_killed_sender_of_the_fabric_is_asked_again(model):
    """The gate dies with its sockets; the worker asks a new one for the rest, and the play ends well by itself."""
    with copying(weight_sync_transport="fabric") as going:
        on(HEAD, "pkill -KILL -f source_gate.py")
        fine(going.end(900))
    assert hashes(WORKER, tree()) == hashes(HEAD, tree()) and not staged()


def test_a_link_that_drops_during_a_copy_is_told_and_the_next_run_goes_on(model):
    # A machine without KVM needs ten seconds for three logins.
    with copying(weight_sync_stall_timeout=30) as going:
        lab("link", HEAD, "1", "down")
        try:
            done = going.end(900)
        finally:
            lab("link", HEAD, "1", "up")
    assert "[sync.link]" in done.text or "[sync.stalled]" in done.text, done.text[-3000:]
    refused(done, WORKER, SERVER, "what arrived is kept")
    assert short_files() == [] and staged() and on(WORKER, f"ls {tree()}.manifest.json 2>/dev/null || true") == ""
    # networkd takes the addresses of a rail without carrier away, and gives them back with it.
    until("the rail is back", lambda: SERVER in on(HEAD, "ip -4 address show dev enp1s0f1np1"), 60)
    completed()


# --- ZFS -------------------------------------------------------------------------------------------------------


def snapshots(machine):
    """Name and GUID of each, the oldest first."""
    return [line.split("\t") for line in on(machine, "zfs list -Hp -d 1 -t snapshot -s createtxg -o name,guid tank/weights 2>/dev/null || true").splitlines()]


@pytest.fixture(name="imported", scope="module")
def fixture_imported(model):
    """Pools are imported at boot, as Debian has it; the machines' disk has these units off, for boots without pools."""
    for machine in (HEAD, WORKER):
        on(machine, "systemctl enable zfs-load-module.service zfs-import-cache.service zfs-import.target zfs-mount.service zfs.target")
    fine(play("bootstrap", variables=ZFS))  # the gates hand out this folder


def test_a_disk_that_is_not_empty_is_refused(imported):
    on(HEAD, "printf x | dd of=/dev/vdc bs=1 seek=70000 conv=notrunc status=none")
    refused(play("weights", variables=ZFS), "sync.zfs_device", "byte 70000 is not zero")
    on(HEAD, "printf '\\0' | dd of=/dev/vdc bs=1 seek=70000 conv=notrunc status=none; ! zpool list -H tank")


def test_a_replica_is_made_mounted_and_proven(imported):
    for name in ("weights", "sync"):
        fine(play(name, "--check", variables=ZFS))
        assert on(WORKER, "zfs list -H tank/weights 2>/dev/null || true") == ""
        fine(play(name, variables=ZFS))
    found = on(HEAD, "zfs get -Hp -o property,value recordsize,atime,compression,mountpoint tank/weights")
    assert dict(line.split("\t") for line in found.splitlines()) == {"recordsize": "1048576", "atime": "off", "compression": "lz4", "mountpoint": POOL_ROOT}
    assert on(WORKER, f"findmnt -n -o FSTYPE,OPTIONS {REPLICA}").split()[0] == "zfs" and on(WORKER, "zfs get -H -o value readonly tank/weights").strip() == "on"
    path = tree(HEAD, POOL_ROOT)
    assert on(WORKER, f"readlink {path}").strip() == f"../.replica/{path.removeprefix(POOL_ROOT + '/')}"
    assert hashes(WORKER, path + "/") == hashes(HEAD, path)
    assert snapshots(HEAD) == snapshots(WORKER) and len(snapshots(HEAD)) == 1
    assert "alice" in on(HEAD, "zfs allow tank/weights") and "bob" in on(WORKER, "zfs allow tank")


def test_a_second_run_takes_no_snapshot_and_sends_nothing(imported):
    before = snapshots(HEAD)
    assert changed(fine(play("sync", variables=ZFS))) == 0
    assert snapshots(HEAD) == before


def test_a_change_is_sent_as_a_difference_and_a_cut_one_goes_on_with_its_token(imported):
    path = tree(HEAD, POOL_ROOT)
    on(HEAD, f"head -c 120000000 /dev/urandom > {path}/extra.bin")
    with slow_rail("30mbit", "64k"):
        going = plays.Playing("sync", inventory=INVENTORY, variables=ZFS)
        until("a receive", lambda: "zfs receive" in on(WORKER, "pgrep -af 'zfs receive' || true"), 300)
        # What a token counts is on the disk, which is written every five seconds.
        time.sleep(15)
        lab("power-off", WORKER)
        lab("power-on", WORKER)
        assert going.end(1200).code != 0
    assert on(WORKER, "zfs get -H -o value receive_resume_token tank/weights").strip() != "-"
    # What is mounted is still the old content: no short file anywhere.
    assert "extra.bin" not in on(WORKER, f"ls {path}/")
    done = fine(play("sync", variables=ZFS))
    assert "resume to sparkops-" in done.text
    sent = json.loads(on(WORKER, "cat /var/lib/sparkops/lab_tiny/jobs/zfs/result.json"))["artefacts"]["replica"]["bytes"]
    assert 0 < sent < 118_000_000, f"{sent} bytes of 120 MB were sent again"
    assert hashes(WORKER, path + "/") == hashes(HEAD, path)
    assert snapshots(HEAD)[-1] == snapshots(WORKER)[-1] and on(WORKER, "zfs get -H -o value receive_resume_token tank/weights").strip() == "-"


def test_a_killed_sender_of_a_stream_is_asked_again(imported):
    """The play goes on with the token, and ends well by itself."""
    path = tree(HEAD, POOL_ROOT)
    on(HEAD, f"head -c 90000000 /dev/urandom > {path}/extra.bin")
    with slow_rail("30mbit", "64k"):
        going = plays.Playing("sync", inventory=INVENTORY, variables=ZFS)
        until("a receive", lambda: "zfs receive" in on(WORKER, "pgrep -af 'zfs receive' || true"), 300)
        time.sleep(10)
        on(HEAD, "pkill -KILL -f 'zfs send'")
        done = fine(going.end(900))
    assert "resume to sparkops-" in done.text and hashes(WORKER, path + "/") == hashes(HEAD, path)


def test_a_token_that_leads_nowhere_is_given_up_and_said(imported):
    """A cut receive whose source snapshot was destroyed since."""
    path = tree(HEAD, POOL_ROOT)
    on(HEAD, f"head -c 30000000 /dev/urandom > {path}/extra.bin; zfs snapshot tank/weights@sparkops-gone")
    base = snapshots(WORKER)[-1][0]
    on(HEAD, f"zfs send -L -e -c -i {base} tank/weights@sparkops-gone | head -c 9000000 > /tmp/cut; chmod 644 /tmp/cut; zfs destroy tank/weights@sparkops-gone")
    copied = subprocess.run([VMLAB, "ssh", HEAD, "cat /tmp/cut"], capture_output=True, check=True).stdout
    subprocess.run([VMLAB, "ssh", WORKER, "sudo zfs receive -s -u tank/weights; true"], input=copied, check=True)
    assert on(WORKER, "zfs get -H -o value receive_resume_token tank/weights").strip() != "-"
    done = fine(play("sync", variables=ZFS))
    assert "gave up a cut receive" in done.text and hashes(WORKER, path + "/") == hashes(HEAD, path)


def test_a_replica_that_differs_is_refused_and_what_would_be_lost_is_named(imported):
    path = tree(HEAD, POOL_ROOT)
    on(WORKER, "zfs snapshot tank/weights@by-hand")
    on(HEAD, f"date > {path}/extra.txt")
    refused(play("sync", variables=ZFS), "sync.zfs_diverged", "tank/weights@by-hand")
    assert "by-hand" in on(WORKER, "zfs list -H -t snapshot -o name")
    done = fine(play("sync", variables={**ZFS, "weight_sync_zfs_discard": True}))
    assert "giving up, as set" in done.text and "by-hand" not in on(WORKER, "zfs list -H -t snapshot -o name")


def test_a_mounted_replica_of_another_dataset_is_replaced_where_that_is_set(imported):
    """The head's snapshots are gone, so no stream has a base; only root may unmount, and a reader keeps the replica."""
    path = tree(HEAD, POOL_ROOT)
    before = snapshots(WORKER)
    on(HEAD, f"date > {path}/extra.txt; zfs destroy tank/weights@%")
    discard = {**ZFS, "weight_sync_zfs_discard": True}
    refused(play("sync", variables=ZFS), "sync.zfs_diverged", "all content of tank/weights")
    on(WORKER, f"nohup tail -f {path}/config.json >/dev/null 2>&1 & echo $! >/tmp/reader")
    refused(play("sync", variables=discard), "sync.zfs_used", "mounted: tank/weights")
    assert snapshots(WORKER) == before and hashes(WORKER, path + "/")
    on(WORKER, "kill $(cat /tmp/reader)")
    fine(play("sync", variables=discard))
    assert hashes(WORKER, path + "/") == hashes(HEAD, path) and snapshots(WORKER)[-1] == snapshots(HEAD)[-1]
    assert changed(fine(play("sync", variables=ZFS))) == 0


def test_snapshots_are_pruned(imported):
    assert len(snapshots(HEAD)) <= 2 and len(snapshots(WORKER)) <= 2


def test_a_rollback_takes_every_node_back(imported):
    path = tree(HEAD, POOL_ROOT)
    name = snapshots(HEAD)[-1][0].partition("@")[2]
    wanted = hashes(HEAD, path)
    on(HEAD, f"rm {path}/tokenizer.json; echo broken > {path}/config.json")
    variables = {**ZFS, "weight_sync_zfs_snapshot": name}
    # What one node lacks holds all back.
    on(HEAD, f"zfs snapshot tank/weights@head-alone; echo broken again > {path}/config.json")
    refused(play("zfs_rollback", variables={**variables, "weight_sync_zfs_snapshot": "head-alone", "weight_sync_zfs_discard": True}), "sync.zfs_no_snapshot")
    assert on(HEAD, f"cat {path}/config.json").strip() == "broken again"
    refused(play("zfs_rollback", variables=variables), "sync.zfs_rollback", "bytes written since")
    fine(play("zfs_rollback", variables={**variables, "weight_sync_zfs_discard": True}))
    assert hashes(HEAD, path) == wanted and hashes(WORKER, path + "/") == wanted
    assert changed(fine(play("sync", variables=ZFS))) == 0
