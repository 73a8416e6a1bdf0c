# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Modules and programs of the ZFS side, with the programs by a table."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _mounts, _unit, _zfs_command, _zfs_job
from ansible_collections.sparkops.inference.plugins.module_utils._node_copy import CopyError
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.modules import sync_info, zfs_pool, zfs_receive, zfs_replica, zfs_snapshot
from commands import Commands, call, ids

ROOT = pathlib.Path(__file__).parents[3]
ROLE = ROOT / "roles/weight_sync"
HEAD = "tank/weights"
WATCHED = ["/w/acme--tiny/c", "/w/acme--tiny/c.manifest.json"]
LIST = "zfs list -Hp -d 1 -t snapshot -o name,guid,createtxg"
TWO = f"{HEAD}@sparkops-1\t11\t10\n{HEAD}@sparkops-2\t22\t20\n"


def snapshot(monkeypatch, capsys, *rows, check=False, **more):
    return call(monkeypatch, capsys, zfs_snapshot, Commands(*rows), check, dataset=HEAD, node="spark-1", watched=WATCHED, **more)


def test_the_first_snapshot_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(zfs_snapshot.time, "strftime", lambda *_more: "20261129T120000Z")
    name = f"{HEAD}@sparkops-20261129T120000Z"
    rows = [(f"{LIST} {HEAD}", 0, ""), (f"zfs snapshot {name}", 0), (f"{LIST} {HEAD}", 0, f"{name}\t1\t5\n")]
    assert snapshot(monkeypatch, capsys, *rows)["snapshot"]["guid"] == "1"
    assert snapshot(monkeypatch, capsys, rows[0], check=True)["changed"]


WRITTEN = f"zfs get -Hp -o value written@sparkops-2 {HEAD}"
DIFF = f"zfs diff -H {HEAD}@sparkops-2 {HEAD}"


@pytest.mark.parametrize(
    ("rows", "changed"),
    [
        ([(WRITTEN, 0, "0\n")], False),
        ([(WRITTEN, 0, "8192\n"), (DIFF, 0, "M\t/w/acme--tiny/c.lock\n")], False),
        ([(WRITTEN, 0, "8192\n"), (DIFF, 0, "M\t/w/acme--tiny/c.lock\nM\t/w/acme--tiny/c/config.json\n")], True),
    ],
)
def test_a_snapshot_is_taken_only_when_something_changed(monkeypatch, capsys, rows, changed):
    result = snapshot(monkeypatch, capsys, (f"{LIST} {HEAD}", 0, TWO), *rows, check=True)
    # One that would be taken has no identity yet, by which the workers' receives would be predicted.
    assert result["changed"] == changed and result.get("snapshot", {}).get("name") == (None if changed else "sparkops-2")


def test_pruning_destroys_one_by_one_by_name(monkeypatch, capsys):
    text = TWO + f"{HEAD}@daily\t33\t30\n{HEAD}@sparkops-3\t44\t40\n"
    rows = [(f"{LIST} {HEAD}", 0, text), (f"zfs destroy -nvp {HEAD}@sparkops-1", 0, f"destroy\t{HEAD}@sparkops-1\nreclaim\t4096\n")]
    result = snapshot(monkeypatch, capsys, *rows, (f"zfs destroy {HEAD}@sparkops-1", 0), state="pruned", keep=1, needed=["22"])
    assert result["destroyed"] == ["sparkops-1"] and result["bytes"] == 4096
    predicted = snapshot(monkeypatch, capsys, *rows, state="pruned", keep=1, needed=["22"], check=True)
    assert {**predicted, "invocation": None} == {**result, "invocation": None}


def test_nothing_too_old_is_no_change(monkeypatch, capsys):
    result = snapshot(monkeypatch, capsys, (f"{LIST} {HEAD}", 0, TWO), state="pruned", keep=2)
    assert not result["changed"] and result["bytes"] == 0
    assert [item["guid"] for item in result["snapshots"]] == ["11", "22"]


BACK = f"zfs get -Hp -o value written@sparkops-1 {HEAD}"


def test_a_rollback_names_its_price_and_waits_for_consent(monkeypatch, capsys):
    monkeypatch.setattr(_mounts, "read", lambda *_more: [])
    rows = [(f"{LIST} {HEAD}", 0, TWO), (BACK, 0, "4096\n"), (f"zfs get -Hp -o value mountpoint {HEAD}", 0, "/w\n")]
    result = snapshot(monkeypatch, capsys, *rows, state="rolled_back", snapshot="sparkops-1")
    assert ids(result) == ["sync.zfs_rollback"] and f"{HEAD}@sparkops-2" in result["msg"] and "4096 bytes" in result["msg"]
    done = snapshot(monkeypatch, capsys, *rows, (f"zfs rollback -r {HEAD}@sparkops-1", 0), state="rolled_back", snapshot="sparkops-1", discard=True)
    assert done["changed"] and done["destroyed"] == ["sparkops-2"]


def test_a_rollback_under_a_running_rank_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(_mounts, "read", lambda *_more: [_mounts.Mount("/w", "zfs", HEAD, (), "0:50")])
    monkeypatch.setattr(_mounts, "users", lambda _mount: [_mounts.User(7, "python3", "0123456789ab")])
    rows = [(f"{LIST} {HEAD}", 0, TWO), (BACK, 0, "0\n"), (f"zfs get -Hp -o value mountpoint {HEAD}", 0, "/w\n")]
    assert ids(snapshot(monkeypatch, capsys, *rows, state="rolled_back", snapshot="sparkops-1", discard=True)) == ["sync.zfs_used"]


def test_a_snapshot_that_is_not_there_is_answered_with_those_that_are(monkeypatch, capsys):
    result = snapshot(monkeypatch, capsys, (f"{LIST} {HEAD}", 0, TWO), state="rolled_back", snapshot="sparkops-9")
    assert ids(result) == ["sync.zfs_no_snapshot"] and "sparkops-1, sparkops-2" in result["msg"]


# --- the replica's mount ---------------------------------------------------------------------------------------

COPY, PLACE = "pool/copy", "/w/.replica"
GET = f"zfs get -Hp -o property,value readonly,atime,canmount,mountpoint,mounted {COPY}"
RIGHT = f"readonly\ton\natime\toff\ncanmount\ton\nmountpoint\t{PLACE}\nmounted\tyes\n"


def replica(monkeypatch, capsys, rows, looks=("live",), check=False, mounted=True):
    states = iter(looks)
    monkeypatch.setattr(_mounts, "read", lambda *_more: [_mounts.Mount(PLACE, "zfs", COPY, (), "0:50")] if mounted else [])
    monkeypatch.setattr(_limited, "look_at", lambda _mounts, _seconds: [_limited.Look(next(states), "Input/output error")])
    return call(monkeypatch, capsys, zfs_replica, Commands(*rows), check, dataset=COPY, mountpoint=PLACE, node="spark-2")


def test_a_replica_as_it_should_be_is_left_alone(monkeypatch, capsys):
    assert not replica(monkeypatch, capsys, [(GET, 0, RIGHT)])["changed"]


def test_a_new_replica_gets_its_properties_and_place(monkeypatch, capsys):
    text = "readonly\toff\natime\toff\ncanmount\ton\nmountpoint\t/pool/copy\nmounted\tno\n"
    rows = [(GET, 0, text), (f"zfs set readonly=on {COPY}", 0), (f"zfs set mountpoint={PLACE} {COPY}", 0)]
    assert replica(monkeypatch, capsys, rows)["set"] == {"readonly": "on", "mountpoint": PLACE}
    assert replica(monkeypatch, capsys, rows[:1], check=True)["changed"]


def test_a_mount_that_no_longer_reads_is_made_anew(monkeypatch, capsys):
    rows = [(GET, 0, RIGHT), (f"zfs unmount {COPY}", 0), (f"zfs mount {COPY}", 0)]
    assert replica(monkeypatch, capsys, rows, ("broken", "live"))["mounted"]
    assert ids(replica(monkeypatch, capsys, rows, ("broken", "broken"))) == ["sync.zfs_mount"]


def test_an_empty_folder_is_no_replica(monkeypatch, capsys):
    """zfs may say "mounted" of another place; only the kernel's table counts."""
    rows = [(GET, 0, RIGHT), (f"zfs mount {COPY}", 0), (f"zfs unmount {COPY}", 0), (f"zfs mount {COPY}", 0)]
    assert ids(replica(monkeypatch, capsys, rows, mounted=False)) == ["sync.zfs_mount"]


def test_a_prediction_needs_no_program_that_a_real_run_installs(monkeypatch, capsys, tmp_path):
    where = {"dataset": COPY, "node": "spark-2", "absent": {"zfs"}, "check": True}
    assert call(monkeypatch, capsys, zfs_replica, Commands(), mountpoint=PLACE, **where)["changed"]
    monkeypatch.setattr(_zfs_job, "zfs_program", lambda: "zfs-that-is-not-installed")
    job = {"source": {}, "target": "1", "key": "/k", "known_hosts": "/h", "state_dir": str(tmp_path), "state_root": str(tmp_path), "deployment": "sparks"}
    assert call(monkeypatch, capsys, zfs_receive, Commands(), **job, **where)["changed"]


@pytest.mark.parametrize(("there", "changed"), [(["11", "22"], False), (["11", "22", "77"], False), (["11", "77"], True), ([], True)])
def test_a_prediction_of_a_receive_asks_for_the_heads_snapshot(monkeypatch, capsys, tmp_path, there, changed):
    """Others may take snapshots of the replica, too: a receive has nothing to bring for those."""
    monkeypatch.setattr(_zfs_job, "zfs_program", lambda: sys.executable)
    listed = "".join(f"{COPY}@{guid}\t{guid}\t{number}\n" for number, guid in enumerate(there))
    rows = Commands(([pathlib.Path(sys.executable).name, *f"list -Hp -d 1 -t snapshot -o name,guid,createtxg {COPY}".split()], 0, listed))
    job = {"source": {}, "target": "22", "key": "/k", "known_hosts": "/h", "state_dir": str(tmp_path), "state_root": str(tmp_path), "deployment": "sparks"}
    assert call(monkeypatch, capsys, zfs_receive, rows, dataset=COPY, node="spark-2", check=True, **job)["changed"] == changed


def test_a_replica_without_the_program_is_an_error(monkeypatch, capsys):
    assert call(monkeypatch, capsys, zfs_replica, Commands(), absent={"zfs"}, dataset=COPY, mountpoint=PLACE, node="spark-2")["failed"]


# --- the pool --------------------------------------------------------------------------------------------------

EMPTY = json.dumps({"blockdevices": [{"name": "vdb", "fstype": None, "pttype": None, "label": None, "mountpoints": [None]}]})
LSBLK = "lsblk --json --output NAME,FSTYPE,PTTYPE,LABEL,MOUNTPOINTS /dev/vdb"
WIPEFS = "wipefs --no-act --noheadings --output TYPE /dev/vdb"
NO_POOL = ("zpool list -H -o name tank", 1)


def pool(monkeypatch, capsys, *rows, zeros=True, check=False, **more):
    real = zfs_pool.os.stat
    monkeypatch.setattr(zfs_pool.os, "stat", lambda path, **kept: _Block() if path == "/dev/vdb" else real(path, **kept))
    monkeypatch.setattr(zfs_pool, "not_zero", lambda _path: [] if zeros else ["byte 512 is not zero"])
    exists = zfs_pool.os.path.exists
    monkeypatch.setattr(zfs_pool.os.path, "exists", lambda path: path != "/dev/zfs" and exists(path))
    loading = [] if check else [("modprobe zfs", 0)]
    return call(monkeypatch, capsys, zfs_pool, Commands(*loading, *rows), check, pool="tank", node="spark-1", **{"device": "/dev/vdb", **more})


class _Block:
    st_mode = 0o060660


def test_a_pool_that_exists_is_left_alone(monkeypatch, capsys):
    assert not pool(monkeypatch, capsys, ("zpool list -H -o name tank", 0, "tank\n"))["changed"]


def test_a_pool_is_made_on_an_empty_disk_and_never_by_force(monkeypatch, capsys):
    create = "zpool create -o ashift=12 -O canmount=off -O mountpoint=none tank /dev/vdb"
    assert pool(monkeypatch, capsys, NO_POOL, (LSBLK, 0, EMPTY), (WIPEFS, 0), (create, 0))["changed"]
    assert pool(monkeypatch, capsys, NO_POOL, (LSBLK, 0, EMPTY), (WIPEFS, 0), check=True)["changed"]


@pytest.mark.parametrize(
    ("lsblk", "wipefs", "zeros", "words"),
    [
        ({"fstype": "ext4"}, "", True, "fstype ext4"),
        ({"pttype": "gpt", "children": [{"name": "vdb1"}]}, "", True, "holds vdb1"),
        ({"mountpoints": ["/data"]}, "", True, "mounted at /data"),
        ({"mountpoints": ["[SWAP]"]}, "", True, "[SWAP]"),
        ({}, "zfs_member\n", True, "signature zfs_member"),
        ({}, "", False, "byte 512"),
    ],
)
def test_a_disk_with_anything_on_it_is_refused(monkeypatch, capsys, lsblk, wipefs, zeros, words):
    found = json.loads(EMPTY)
    found["blockdevices"][0].update(lsblk)
    result = pool(monkeypatch, capsys, NO_POOL, (LSBLK, 0, json.dumps(found)), (WIPEFS, 0, wipefs), zeros=zeros)
    assert ids(result) == ["sync.zfs_device"] and words in result["msg"]


def test_no_disk_is_guessed(monkeypatch, capsys):
    assert ids(pool(monkeypatch, capsys, NO_POOL, device=None)) == ["sync.zfs_device"]


def test_both_ends_are_read(tmp_path):
    disk = tmp_path / "disk"
    with open(disk, "wb") as stream:
        stream.truncate(3 * zfs_pool.ENDS)
    assert zfs_pool.not_zero(str(disk)) == []
    with open(disk, "r+b") as stream:
        stream.seek(-100, 2)
        stream.write(b"\1")
    assert zfs_pool.not_zero(str(disk)) == [f"byte {3 * zfs_pool.ENDS - 100} is not zero"]


# --- the receive -----------------------------------------------------------------------------------------------


@pytest.fixture(name="pauses")
def fixture_pauses(monkeypatch):
    """Between attempts nothing waits."""
    found = []
    monkeypatch.setattr(_zfs_job.time, "sleep", found.append)
    return found


class Receiving(_zfs_job.ReceiveJob):
    """The job, with answers by a table. A stream changes what the replica says next."""

    def __init__(self, tmp_path, head, copies, *, discard=False, sizes="size\t1000\n", free=10**9, faults=(), tokens=None, moves=False):
        request = {
            "node": "spark-2", "dataset": COPY, "source": {"node": "spark-1", "address": "198.51.100.11", "user": "alice", "root": "/w"}, "key": "/k",
            "known_hosts": "/h", "discard": discard, "stall_seconds": 5, "space_margin": 10,
        }  # fmt: skip
        super().__init__(request, _unit.Progress(str(tmp_path / "progress.json")))
        self.head, self.copies, self.sizes, self.free, self.faults, self.tokens = head, list(copies), sizes, free, list(faults), tokens or {}
        self.moves = moves  # whether what came before a fault is kept
        self.asked, self.ran, self.streams = [], [], []
        self.mounts = ""

    def remote(self, *words):
        self.asked.append(words)
        if words[0] == "zfs-list":
            return json.dumps({"dataset": HEAD, "snapshots": self.head})
        if words[0] == "zfs-token":
            if words[1] not in self.tokens:
                raise CopyError("gate", "used in the initial send no longer exists")
            return self.tokens[words[1]]
        return self.sizes

    def local(self, *argv):
        self.ran.append(argv)
        if argv[0] == "get" and argv[-2] in ("available", "used"):
            return 0, f"{self.free[argv[-2:]]}\n" if isinstance(self.free, dict) else f"{self.free}\n", ""
        if argv[0] in ("receive", "destroy"):
            self.copies.pop(0)
            return 0, "", ""
        state = self.copies[0]
        if state is None:
            return 1, "", "dataset does not exist"
        if argv[-2] == "name,mounted":
            return 0, self.mounts, ""
        if "-r" in argv:
            return 0, "".join(f"{name}\n" for name in (COPY, *state["below"])), ""
        return (0, state["get"], "") if argv[0] == "get" else (0, state["list"], "")

    def pump(self, sender, receiver):
        self.streams.append((sender[-1], receiver[1:]))
        if self.faults:
            if self.moves:
                self.copies.pop(0)
            raise self.faults.pop(0)
        self.copies.pop(0)


def copy(*names, written=0, token="-", below=()):
    listed = "".join(f"{COPY}@{name}\t{guid}\t{number}\n" for number, (name, guid) in enumerate(names))
    return {"get": f"type\tfilesystem\nwritten\t{written}\nreceive_resume_token\t{token}\n", "list": listed, "below": below}


ONE_OF, BOTH = (("sparkops-1", "11"),), (("sparkops-1", "11"), ("sparkops-2", "22"))
TOKEN = "1-ab-cd"
CONTENTS = f"\ttoguid = 0x16\n\ttoname = {HEAD}@sparkops-2\n"


def test_a_first_receive_is_a_full_one(tmp_path):
    job = Receiving(tmp_path, TWO, [None, copy(("sparkops-2", "22"))])
    assert job.run()["changed"]
    assert job.streams == [("zfs-send snapshot sparkops-2", ["receive", "-s", "-u", COPY])]


def test_a_later_one_brings_only_what_changed_and_a_third_nothing(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF), copy(*BOTH)])
    assert job.run()["changed"] and job.streams == [("zfs-send snapshot sparkops-2 11", ["receive", "-s", "-u", COPY])]
    again = Receiving(tmp_path, TWO, [copy(*BOTH)])
    assert not again.run()["changed"] and not again.streams


def test_a_token_is_sent_alone(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF, token=TOKEN), copy(*BOTH)], tokens={TOKEN: CONTENTS})
    job.run()
    assert job.streams == [(f"zfs-send token {TOKEN}", ["receive", "-s", "-u", COPY])]


def test_a_token_of_a_first_receive_is_resumed_too(tmp_path):
    """The dataset exists, and has no snapshot yet."""
    job = Receiving(tmp_path, TWO, [copy(token=TOKEN), copy(("sparkops-2", "22"))], tokens={TOKEN: CONTENTS})
    job.run()
    assert job.streams[0][0] == f"zfs-send token {TOKEN}"


def test_a_token_that_leads_nowhere_is_given_up_and_said(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF, token=TOKEN), copy(*ONE_OF), copy(*BOTH)])
    result = job.run()
    assert ("receive", "-A", COPY) in job.ran and job.streams[0][0] == "zfs-send snapshot sparkops-2 11"
    assert any("gave up a cut receive" in notice for notice in result["notices"])


def test_a_cut_line_goes_on_with_the_token_in_the_same_run(tmp_path, pauses):
    job = Receiving(
        tmp_path, TWO, [copy(*ONE_OF, token=TOKEN), copy(*BOTH)], tokens={TOKEN: CONTENTS}, faults=[CopyError("link", "cut"), CopyError("link", "cut")]
    )
    job.run()
    assert len(job.streams) == 3 and pauses == [10.0, 10.0]


def test_a_long_receive_outlives_more_drops_than_attempts_while_it_gets_on(tmp_path, pauses):
    """As with rsync: only drops without progress are counted, and each time the cable gets its time."""
    tokens = [f"1-ab-{number}" for number in range(_zfs_job.ATTEMPTS + _zfs_job.ROUNDS + 1)]
    drops = [CopyError("link", "cut") for _token in tokens]
    copies = [copy(*ONE_OF), *(copy(*ONE_OF, token=token) for token in tokens), copy(*BOTH)]
    job = Receiving(tmp_path, TWO, copies, tokens=dict.fromkeys(tokens, CONTENTS), faults=drops, moves=True)
    assert job.run()["changed"] and len(job.streams) == len(tokens) + 1 and pauses == [10.0] * len(tokens)


def test_a_line_that_stays_down_is_refused_with_its_words(tmp_path, pauses):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF)], faults=[CopyError("link", "no route to host")] * 5)
    with pytest.raises(_unit.Refused) as refused:
        job.run()
    assert refused.value.refusals[0].id == "sync.link" and "no route to host" in str(refused.value) and len(job.streams) == 3


@pytest.mark.parametrize("state", [copy(*ONE_OF, written=4096), copy(*ONE_OF, ("by-hand", "99")), copy(("sparkops-1", "other"))])
def test_a_replica_that_differs_is_refused_with_what_would_be_lost(tmp_path, state):
    job = Receiving(tmp_path, TWO, [state])
    with pytest.raises(_unit.Refused) as refused:
        job.run()
    assert refused.value.refusals[0].id == "sync.zfs_diverged" and not job.streams
    assert any(word in str(refused.value) for word in ("4096 bytes", "@by-hand", "@sparkops-1"))


def test_a_dataset_of_something_else_is_refused_with_the_datasets_in_it(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(("daily", "other"), below=(f"{COPY}/home",))])
    with pytest.raises(_unit.Refused) as refused:
        job.run()
    assert f"all content of {COPY}; snapshot {COPY}@daily; dataset {COPY}/home" in str(refused.value) and job.ran[-1][0] != "destroy"


def test_what_is_given_up_by_consent_is_said(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF, ("by-hand", "99")), copy(*BOTH)], discard=True)
    result = job.run()
    assert job.streams[0][1] == ["receive", "-s", "-u", "-F", COPY]
    assert any("giving up, as set: snapshot pool/copy@by-hand" in notice for notice in result["notices"])


def test_a_replica_of_something_else_goes_by_consent_and_a_full_one_comes(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(("sparkops-1", "other")), None, copy(*BOTH)], discard=True)
    job.run()
    assert ("destroy", "-r", COPY) in job.ran and job.streams[0][1] == ["receive", "-s", "-u", COPY]


@pytest.mark.parametrize(("user", "mounts", "goes"), [
    (1000, f"{COPY}\tyes\n{COPY}/home\tyes\n", False), (1000, f"{COPY}\tno\n", True), (0, f"{COPY}\tyes\n", True),
])  # fmt: skip
def test_what_only_root_may_unmount_loses_nothing(tmp_path, monkeypatch, user, mounts, goes):
    """A destroy by an account takes the snapshots, and then fails at the mount."""
    job = Receiving(tmp_path, TWO, [copy(("sparkops-1", "other")), None, copy(*BOTH)], discard=True)
    job.mounts = mounts
    monkeypatch.setattr(_zfs_job.os, "geteuid", lambda: user)
    if goes:
        assert job.run()["changed"]
    else:
        with pytest.raises(_unit.Refused) as refused:
            job.run()
        assert refused.value.refusals[0].id == "sync.zfs_used" and f"{COPY}/home, {COPY}" in str(refused.value)
    assert (("destroy", "-r", COPY) in job.ran) == goes


@pytest.mark.parametrize(("busy", "discard", "begins"), [(0, True, 2), (1, True, 1), (0, False, 1)])
def test_the_module_unmounts_what_the_job_may_replace(monkeypatch, capsys, tmp_path, busy, discard, begins):
    begun, there = [], Refusal("sync.zfs_used", "spark-2", f"dataset {COPY}", "mounted", "none", "stop")
    monkeypatch.setattr(_zfs_job, "zfs_program", lambda: "/usr/sbin/zfs")
    monkeypatch.setattr(zfs_receive.Replication, "has_target", lambda self: False)
    monkeypatch.setattr(zfs_receive.os, "geteuid", lambda: 0)
    monkeypatch.setattr(_unit.LongModule, "earlier", lambda self: None)
    monkeypatch.setattr(_unit.LongModule, "begin", lambda self, request, secret=None: begun.append(request["dataset"]) or str(len(begun)))
    monkeypatch.setattr(_unit.LongModule, "end_of", lambda self, run_id: {"changed": True} if run_id == "2" else self.fail([there]))
    listed = (f"zfs list -H -r -t filesystem -o name,mounted {COPY}", 0, f"{COPY}\tyes\n{COPY}/home\tyes\n")
    rows = Commands(*([listed, (f"zfs unmount {COPY}/home", 0), (f"zfs unmount {COPY}", busy, "", "busy")] if discard else []))
    job = {"source": {}, "target": "1", "key": "/k", "known_hosts": "/h", "state_dir": str(tmp_path), "state_root": str(tmp_path), "deployment": "sparks"}
    result = call(monkeypatch, capsys, zfs_receive, rows, dataset=COPY, node="spark-2", discard=discard, **job)
    assert begun == [COPY] * begins and ids(result) == ([] if begins == 2 else ["sync.zfs_used"])


def test_room_is_asked_of_the_pool_for_the_stream_that_comes(tmp_path):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF)], free=1000)
    with pytest.raises(_unit.Refused) as refused:
        job.run()
    assert refused.value.refusals[0].id == "sync.zfs_space" and not job.streams
    assert ("zfs-size", "snapshot", "sparkops-2", "11") in job.asked


def test_what_a_replica_that_goes_gives_back_counts_as_room(tmp_path):
    """Its own quota goes with it, so the room is that of its parent."""
    free = {("available", "pool"): 510, ("used", COPY): 500}
    job = Receiving(tmp_path, TWO, [copy(("sparkops-1", "other")), None, copy(*BOTH)], discard=True, free=free)
    assert job.run()["changed"]
    short = Receiving(tmp_path, TWO, [copy(("sparkops-1", "other"))], discard=True, free={**free, ("used", COPY): 499})
    with pytest.raises(_unit.Refused) as refused:
        short.run()
    assert refused.value.refusals[0].id == "sync.zfs_space" and ("destroy", "-r", COPY) not in short.ran


@pytest.mark.parametrize("told", ["", "full\ttank/weights@sparkops-2\n"])
def test_a_size_that_cannot_be_read_is_not_nothing(tmp_path, told):
    job = Receiving(tmp_path, TWO, [copy(*ONE_OF)], sizes=told)
    with pytest.raises(_unit.Refused) as refused:
        job.run()
    assert refused.value.refusals[0].id == "sync.zfs" and "zfs send -nP on spark-1" in str(refused.value) and not job.streams


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ("cannot receive: out of space", "zfs_space"), ("cannot receive new filesystem stream: permission denied", "zfs_rights"),
        ("destination pool/copy has been modified\nsince most recent snapshot", "zfs_diverged"), ("invalid stream (checksum mismatch)", "zfs_stream"),
        ("cannot receive incremental stream: most recent snapshot of pool/copy does not\nmatch incremental source", "zfs_diverged"),
    ],
)  # fmt: skip
def test_the_words_of_zfs_are_told_apart(tmp_path, words, id):
    with pytest.raises(_zfs_job.ReceiveError) as error:
        Receiving(tmp_path, TWO, []).judge(1, words, 255, "")
    assert error.value.kind == id


# What zfs receive -s says of a stream that is damaged, and of one that ends early.
PARTIAL = (
    "cannot receive incremental stream: checksum mismatch or incomplete stream.\nPartially received snapshot is saved.\n"
    "A resuming stream can be generated on the sending system by running:\n    zfs send -t 1-ab-cd"
)


def test_a_stream_whose_sender_ended_is_a_cut_line_and_a_damaged_one_is_not(tmp_path):
    job = Receiving(tmp_path, TWO, [])
    with pytest.raises(CopyError) as cut:
        job.judge(1, PARTIAL, 255, "client_loop: send disconnect: Broken pipe")
    assert cut.value.kind == "link" and "Broken pipe" in cut.value.text
    with pytest.raises(_zfs_job.ReceiveError) as damaged:
        job.judge(1, PARTIAL, -9, "")
    assert damaged.value.kind == "zfs_stream"


def test_a_real_pipe_is_pumped_whole_and_its_ends_are_told_apart(tmp_path):
    job = Receiving(tmp_path, TWO, [])
    target = tmp_path / "stream"
    shell = ["sh", "-c"]
    _zfs_job.ReceiveJob.pump(job, [*shell, "head -c 5000000 /dev/zero"], [*shell, f"cat > {target}"])
    assert target.stat().st_size == job.received == 5_000_000
    with pytest.raises(CopyError) as cut:
        _zfs_job.ReceiveJob.pump(job, [*shell, "head -c 1000 /dev/zero; echo lost >&2; exit 255"], [*shell, "cat > /dev/null; exit 1"])
    assert cut.value.kind == "link" and "lost" in cut.value.text
    with pytest.raises(_zfs_job.ReceiveError) as full:
        _zfs_job.ReceiveJob.pump(job, [*shell, "yes"], [*shell, "head -c 1000 >/dev/null; echo out of space >&2; exit 1"])
    assert full.value.kind == "zfs_space"
    job.request["stall_seconds"] = 1
    with pytest.raises(CopyError) as stalled:
        _zfs_job.ReceiveJob.pump(job, [*shell, "echo x; sleep 600"], [*shell, "cat > /dev/null"])
    assert stalled.value.kind == "stalled"


def test_a_receiver_that_takes_nothing_ends_the_attempt(tmp_path):
    """One that ends with its input was only slow, and its token goes on."""
    job = Receiving(tmp_path, TWO, [])
    job.request["stall_seconds"] = 1
    with pytest.raises(CopyError) as stalled:
        _zfs_job.ReceiveJob.pump(job, ["sh", "-c", "yes"], ["sh", "-c", "sleep 2; cat > /dev/null"])
    assert stalled.value.kind == "stalled" and "taken by zfs receive" in stalled.value.text


@pytest.mark.parametrize("sender", ["yes", "head -c 1000 /dev/zero"])
def test_a_receiver_that_no_signal_ends_holds_nobody(tmp_path, monkeypatch, sender):
    job, left = Receiving(tmp_path, TWO, []), []
    job.request["stall_seconds"] = 1
    real = _zfs_job.kill
    monkeypatch.setattr(_zfs_job, "kill", left.append)
    monkeypatch.setattr(_zfs_command, "SECONDS", 1.0)
    with pytest.raises(_unit.Refused) as refused:
        _zfs_job.ReceiveJob.pump(job, ["sh", "-c", sender], ["sh", "-c", "exec sleep 600"])
    for process in left:
        real(process)
        process.wait()
    assert [item.id for item in refused.value.refusals] == ["sync.zfs_silent"] and "zpool clear" in str(refused.value) and left[-1].args[-1] == "exec sleep 600"


# --- no answer -------------------------------------------------------------------------------------------------


def test_a_command_that_gives_no_answer_is_left_to_itself(monkeypatch):
    """Of a suspended pool it does not end when it is killed."""
    left = []
    real = subprocess.Popen.kill

    def unheard(process):
        left.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", unheard)
    monkeypatch.setattr(_zfs_command, "SECONDS", 0.2)
    with pytest.raises(_zfs_command.Silent, match="sleep 600: no answer in 0 s"):
        _zfs_command.answer(["sleep", "600"])
    assert len(left) == 1
    real(left[0])
    left[0].wait()
    assert _zfs_command.answer(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\n", "err\n")


def silence(argv):
    raise _zfs_command.Silent(argv, 120)


def test_no_answer_is_a_refusal_of_every_module_and_of_the_job(monkeypatch, capsys, tmp_path):
    silent = Commands()
    silent.run = silence
    job = {"source": {}, "target": "1", "key": "/k", "known_hosts": "/h", "state_dir": str(tmp_path), "state_root": str(tmp_path), "deployment": "sparks"}
    look = {"artefacts": [], "weights_root": str(tmp_path)}
    monkeypatch.setattr(sync_info, "kernel", lambda _module: {})
    monkeypatch.setattr(_zfs_job, "zfs_program", lambda: "/bin/true")
    monkeypatch.setattr(_unit.LongModule, "earlier", lambda _self: None)
    for program, arguments in (
        (zfs_snapshot, {"dataset": COPY}), (zfs_replica, {"dataset": COPY, "mountpoint": PLACE}), (zfs_pool, {"pool": "tank"}),
        (zfs_receive, {"dataset": COPY, **job}), (sync_info, {"dataset": COPY, **look}),
    ):  # fmt: skip
        result = call(monkeypatch, capsys, program, silent, True, node="spark-2", **arguments)
        assert ids(result) == ["sync.zfs_silent"] and "spark-2: " in result["msg"] and "no answer in 120 s" in result["msg"], program
    monkeypatch.setattr(_zfs_command, "answer", silence)
    with pytest.raises(_unit.Refused) as refused:
        _zfs_job.ReceiveJob.local(Receiving(tmp_path, TWO, []), "list")
    assert refused.value.refusals[0].id == "sync.zfs_silent" and refused.value.refusals[0].node == "spark-2"


# --- the account's rights --------------------------------------------------------------------------------------


def granted(stdout=None, exists=True, discard=False):
    """What a worker's tasks give to the account: dataset, rights, and scope."""
    found = []
    variables = {
        "spark_rank": 1, "spark_node": {"user": {"name": "bob"}, "weights_root": "/w"}, "spark_plan": {"settings": {"weight_sync_zfs_discard": discard}},
        "__weight_sync_look": {"info": {"zfs": {"exists": exists}}}, "__weight_sync_allowed": {"stdout": stdout or ""},
        **yaml.safe_load((ROLE / "vars/main.yml").read_text()), "ansible_check_mode": False,
    }  # fmt: skip
    variables["__weight_sync_dataset"] = COPY
    templar = Templar(DataLoader(), variables=variables)

    def wanted(task):
        when = task.get("when", [])
        return all(templar.evaluate_conditional(trust_as_template(str(one))) for one in ([when] if isinstance(when, str) else when))

    def value(text):
        return templar.template(trust_as_template(text)) if isinstance(text, str) else text

    def read(name):
        for task in yaml.safe_load((ROLE / "tasks" / name).read_text()):
            rights, argv = task.get("community.general.zfs_delegate_admin"), task.get("ansible.builtin.command", {}).get("argv", [])
            if (rights or "-c" in argv or task.get("ansible.builtin.import_tasks") == "zfs_rights.yml") and wanted(task):
                if rights:
                    found.append((value(rights["name"]), value(rights["permissions"]), "local" if rights.get("local") else "below"))
                elif argv:
                    found.append((value(argv[-1]), value(argv[-2]).split(","), "made"))
                else:
                    read("zfs_rights.yml")

    read("zfs_prepare.yml")
    return found


def test_the_account_can_destroy_nothing_but_the_replica():
    few = ["create", "mount", "receive"]
    assert granted(exists=False) == [("pool", few, "local"), ("pool", few, "made")]
    assert granted() == [("pool", few, "local"), ("pool", few, "made"), (COPY, ["create", "destroy", "mount", "receive"], "below")]
    assert granted(discard=True)[-1] == (COPY, ["create", "destroy", "mount", "receive", "rollback"], "below")


LINE = "---- Permissions on pool ---------------------------------------------\n"
USER = "Local permissions:\n\tuser bob create,mount,receive\n"


@pytest.mark.parametrize(
    ("stdout", "asked"),
    [
        (LINE + USER, True),
        (LINE + "Create time permissions:\n\tcreate,mount\n" + USER, True),
        (LINE + "Permission sets:\n\t@few create,mount,receive\n" + USER, True),
        (LINE + "Create time permissions:\n\tcreate,destroy,mount,receive\n" + USER, False),
        # Some releases have the wrong title.
        (LINE + "Permission sets:\n\tcreate,mount,receive\n" + USER, False),
    ],
)
def test_what_comes_with_a_new_dataset_is_given_once(stdout, asked):
    assert any(scope == "made" for _name, _rights, scope in granted(stdout)) == asked


# --- the gate --------------------------------------------------------------------------------------------------


def load_gate():
    spec = importlib.util.spec_from_file_location("sparkops_zfs_gate", ROOT / "roles/bootstrap/files/source_gate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="gate")
def fixture_gate(monkeypatch):
    gate = load_gate()

    def output(*argv):
        if argv[:2] == ("send", "-nvt"):
            return CONTENTS if argv[2] == TOKEN else "\ttoname = tank/secret@sparkops-1\n"
        assert argv == ("list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid,createtxg", HEAD)
        return TWO

    monkeypatch.setattr(gate, "zfs_output", output)
    return gate


def test_the_flags_are_always_the_same_and_a_token_goes_alone(gate):
    assert gate.zfs_what(["snapshot", "sparkops-2"], HEAD) == ["-L", "-e", "-c", f"{HEAD}@sparkops-2"]
    assert gate.zfs_what(["snapshot", "sparkops-2", "11"], HEAD) == ["-L", "-e", "-c", "-i", f"{HEAD}@sparkops-1", f"{HEAD}@sparkops-2"]
    assert gate.zfs_what(["token", TOKEN], HEAD) == ["-t", TOKEN]


@pytest.mark.parametrize(
    "words",
    [
        [], ["snapshot"], ["snapshot", "daily"], ["snapshot", "sparkops-2", "99"], ["snapshot", "sparkops-2", "11", "-R"], ["snapshot", "-R"],
        ["snapshot", "../tank/secret@sparkops-1"], ["token", "1-ab-ef"], ["token", "-n"], ["token", f"{TOKEN} -v"], ["bookmark", "x"],
    ],
)  # fmt: skip
def test_nothing_else_can_be_sent(gate, words):
    with pytest.raises(gate.Refused):
        gate.zfs_what(words, HEAD)


def test_only_the_dataset_that_is_mounted_at_the_root_counts(gate, tmp_path):
    table = tmp_path / "mountinfo"
    lines = ["29 1 254:0 / / rw - ext4 /dev/vda rw", f"40 29 0:50 / {tmp_path} rw - zfs {HEAD} rw,xattr"]
    lines.append(f"41 29 0:51 / {tmp_path}/sub rw - zfs tank/secret rw")
    table.write_text("\n".join(lines) + "\n")
    assert gate.dataset_of([str(tmp_path)], str(table)) == HEAD
    with pytest.raises(gate.Refused):
        gate.dataset_of(["/srv"], str(table))
