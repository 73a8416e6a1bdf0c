# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which method fits a group, and what a user is told."""

from __future__ import annotations

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _sync_method
from ansible_collections.sparkops.inference.plugins.module_utils._sync_method import Wishes

MB = 10**6
ROOT = "/var/lib/sparkops/weights"
FILES = [{"path": "a", "size": 60 * MB, "sha256": "1"}, {"path": "b", "size": 60 * MB, "sha256": "2"}]
EVERYTHING = {"nfsd": True, "nfsv4": True, "zfs": True}
TOOLS = {"rsync": True, "exportfs": True, "mount.nfs": True, "zfs": True}


def tree(**more):
    found = {"name": "model", "tree": f"{ROOT}/acme--tiny/c", "complete": False, "problems": [], "way": "rsync", "files": {}, "staged": 0, "manifest": None}
    return {**found, **more}


def node(name, **more):
    found = {
        "node": name, "root": True, "weights_root": ROOT, "user": 1000, "owner": 65534, "filesystem": "ext4", "free": 200 * MB, "writable": True,
        "tools": TOOLS, "exported": False, "replica": False,
        "modules": EVERYTHING, "mounts": [], "zfs": {"dataset": None, "device": None, "exists": False, "pool": False}, "artefacts": [tree()],
    }  # fmt: skip
    return {**found, **more}


HEAD = node("spark-1", artefacts=[tree(complete=True, manifest={"files": FILES})])


def choose(worker, method="auto", head=None, **wishes):
    return _sync_method.choose(head or HEAD, [worker], Wishes(method=method, margin=wishes.pop("margin", 10 * MB), **wishes))


COMPLETE = tree(complete=True, files={})
HALF = tree(files={"a": 60 * MB})


@pytest.mark.parametrize(
    ("have", "free", "missing", "fits"),
    [
        # An empty target, one that is complete on a full disk, and one that is half there.
        (tree(), 200 * MB, 120 * MB, True),
        (tree(), 125 * MB, 120 * MB, False),
        (COMPLETE, 0, 0, True),
        # A replica is not a copy.
        ({**COMPLETE, "way": "zfs"}, 129 * MB, 120 * MB, False),
        (HALF, 70 * MB, 60 * MB, True),
        (HALF, 69 * MB, 60 * MB, False),
        (tree(files={"a": 60 * MB - 7}), 129 * MB, 120 * MB, False),
        # What an interrupted copy left is not asked for twice.
        (tree(staged=50 * MB), 80 * MB, 70 * MB, True),
        # Files outside of the manifest take no part.
        (tree(files={"big": 10**9}), 130 * MB, 120 * MB, True),
    ],
)
def test_room_is_counted_for_what_lacks(have, free, missing, fits):
    worker = node("spark-2", free=free, artefacts=[have])
    assert _sync_method.missing_bytes(HEAD, worker, "rsync") == missing
    lacks = _sync_method.rsync_lacks(HEAD, [worker], Wishes(margin=10 * MB))
    assert (not lacks) == fits
    if not fits:
        assert "MiB free" in lacks[0].found and "MiB to copy" in lacks[0].wanted and "margin" in lacks[0].wanted


SMALL = node("spark-2", free=20 * MB)
BARE = {"tools": {"rsync": True}, "modules": {}}


def test_auto_takes_a_copy_where_it_fits_and_says_what_else_would():
    choice = choose(node("spark-2"))
    assert choice.method == "rsync"
    assert [line.split(" ")[0] for line in choice.lines] == ["rsync", "zfs", "nfs", "taken:"]
    assert "114.4 MiB to copy, 190.7 MiB free" in choice.lines[0]
    assert "weight_sync_zfs_dataset" in choice.lines[1]


def test_auto_shares_where_no_copy_has_room():
    choice = choose(SMALL)
    assert choice.method == "nfs" and "does not fit" in choice.lines[0]


def test_auto_keeps_what_is_there_already():
    worker = node("spark-2", artefacts=[tree(complete=True, way="nfs")])
    assert choose(worker).method == "nfs"


SHARING = {**HEAD, "exported": True}
REPLICATING = {"dataset": "tank/w", "pool": True, "exists": True, "mountpoint": ROOT, "available": 500 * MB}


@pytest.mark.parametrize(
    ("head", "worker", "method"),
    [
        # Its server is away; a new revision that nobody has mounted; one worker is new.
        (HEAD, {"artefacts": [tree(way="nfs")]}, "nfs"),
        (SHARING, {}, "nfs"),
        ({**HEAD, "zfs": REPLICATING}, {"replica": True, "zfs": REPLICATING}, "zfs"),
        # Back to a revision of which old copies are there, while another one is shared.
        (SHARING, {"artefacts": [tree(complete=True)]}, "nfs"),
        # All have copies of their own: the replica that is left is not in use.
        ({**HEAD, "zfs": REPLICATING}, {"replica": True, "zfs": REPLICATING, "artefacts": [tree(complete=True)]}, "rsync"),
    ],
)
def test_auto_stays_with_what_is_in_use(head, worker, method):
    assert choose(node("spark-2", **worker), head=head).method == method


def test_only_an_explicit_method_gives_up_what_is_in_use():
    choice = choose(node("spark-2", modules={}), head=SHARING)
    assert choice.method == "" and [refusal.id for refusal in choice.refusals] == ["sync.method"]
    assert "rsync, to give nfs up" in choice.refusals[0].next_step
    assert choose(node("spark-2", modules={}), "rsync", head=SHARING).method == "rsync"


def test_a_folder_that_only_the_head_may_write_will_do_when_all_is_there():
    """Such as a share of the user's that workers mount read-only. With one file to bring it is refused as before."""
    there = node("spark-2", writable=False, artefacts=[COMPLETE])
    assert choose(there).method == choose(there, "rsync").method == "rsync"
    for lacking in (HALF, {**COMPLETE, "way": "zfs"}):
        assert choose(node("spark-2", writable=False, artefacts=[COMPLETE, lacking]), "rsync").method == ""


def test_a_mounted_tree_is_no_copy():
    """From NFS to copies, the whole of it has to fit."""
    worker = node("spark-2", free=100 * MB, artefacts=[tree(complete=True, way="nfs")])
    assert choose(worker, "rsync").method == ""


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("rsync", {"free": 20 * MB}, "filesystem of"),
        ("rsync", {"writable": False}, "owned by uid 65534, not writable for uid 1000"),
        ("nfs", {"modules": {}}, "kernel module nfsv4"),
        ("nfs", {"tools": {"rsync": True}}, "package nfs-common"),
        ("nfs", {"root": False}, "no root"),
        ("zfs", {}, "weight_sync_zfs_dataset"),
        ("zfs", {"zfs": {"dataset": "tank/w"}}, "pool tank"),
        ("zfs", {"zfs": {"dataset": "tank/w", "pool": True, "available": 20 * MB}}, "pool of tank/w"),
    ],
)
def test_a_method_that_cannot_work_is_refused_with_what_would(method, change, words):
    choice = choose(node("spark-2", **change), method)
    assert choice.method == ""
    found = [refusal for refusal in choice.refusals if words in refusal.text and refusal.node == "spark-2"]
    assert found and all(refusal.id == "sync.method" for refusal in choice.refusals)
    assert all("would work" in refusal.next_step and ("rsync" in refusal.next_step or "nfs" in refusal.next_step) for refusal in found)


@pytest.mark.parametrize("filesystem", ["overlay", "fuse.sshfs", "nfs4"])
def test_a_head_that_cannot_export_is_named(filesystem):
    choice = choose(node("spark-2"), "nfs", head={**HEAD, "filesystem": filesystem})
    assert [refusal.node for refusal in choice.refusals] == ["spark-1"] and filesystem in choice.refusals[0].found


def test_a_container_without_kernel_modules_copies_and_refuses_the_rest():
    worker, head = node("spark-2", **BARE), {**HEAD, **BARE, "filesystem": "overlay"}
    assert choose(worker, head=head).method == "rsync"
    assert len(choose(worker, "nfs", head=head).refusals) == 5
    assert not choose(worker, "zfs", head=head).method


def test_packages_that_may_be_installed_are_no_lack_but_a_kernel_is():
    worker, head = node("spark-2", tools={"rsync": True}), {**HEAD, "tools": {"rsync": True}}
    assert choose(worker, "nfs", head=head).method == ""
    assert choose(worker, "nfs", head=head, packages=True).method == "nfs"
    assert choose(node("spark-2", **BARE), "nfs", head=head, packages=True).method == ""


def test_when_nothing_fits_everything_is_said():
    choice = choose(node("spark-2", free=20 * MB, **BARE))
    things = {refusal.thing.split(", ")[1].split(" ")[0] for refusal in choice.refusals}
    assert choice.method == "" and {"filesystem", "kernel", "program", "weight_sync_zfs_dataset"} <= things
    assert all("no other method would work" in refusal.next_step for refusal in choice.refusals)


def test_a_full_pool_that_has_the_replica_already_fits():
    worker = node("spark-2", zfs={**REPLICATING, "available": 0}, artefacts=[tree(way="zfs", files={"a": 60 * MB, "b": 60 * MB})])
    assert _sync_method.zfs_lacks({**HEAD, "zfs": REPLICATING}, [worker], Wishes(method="zfs")) == []
    assert _sync_method.missing_bytes(HEAD, worker, "rsync") == 120 * MB


def test_datasets_on_both_nodes_make_a_replica_possible():
    worker = node("spark-2", zfs={"dataset": "tank/w", "pool": True, "available": 500 * MB})
    head = {**HEAD, "filesystem": "zfs", "zfs": {"dataset": "tank/w", "pool": True, "exists": True, "mountpoint": ROOT, "available": 1}}
    assert choose(worker, "zfs", head=head).method == "zfs"
    elsewhere = {**head, "zfs": {**head["zfs"], "mountpoint": "/tank/w"}}
    assert "mount point" in choose(worker, "zfs", head=elsewhere).refusals[0].thing
    plain = {**HEAD, "zfs": {"dataset": "tank/w", "pool": True}}
    assert "move the files into it" in choose(worker, "zfs", head=plain).refusals[0].wanted


@pytest.mark.parametrize("own", [COMPLETE, HALF])
def test_a_copy_in_the_place_of_a_replicas_link_is_said_before_anything_is_received(own):
    """Nothing here removes model files, so the replica would be there and could not be used."""
    head = {**HEAD, "filesystem": "zfs", "zfs": REPLICATING}
    worker = node("spark-2", free=20 * MB, zfs={**REPLICATING, "mountpoint": f"{ROOT}/.replica"}, artefacts=[own])
    choice = choose(worker, "zfs", head=head)
    assert choice.method == "" and "a copy of its own" in choice.refusals[0].found and own["tree"] in choice.refusals[0].thing
    assert choose(node("spark-2", zfs=REPLICATING, artefacts=[tree()]), "zfs", head=head).method == "zfs"


def test_a_cut_receive_is_not_asked_for_its_room_twice():
    half = {"dataset": "tank/w", "pool": True, "exists": True, "available": 70 * MB}
    head = {**HEAD, "filesystem": "zfs", "zfs": {**half, "mountpoint": ROOT}}
    assert choose(node("spark-2", zfs=half), "zfs", head=head).method == ""
    assert choose(node("spark-2", zfs={**half, "receive_resume_token": "1-ab-cd"}), "zfs", head=head).method == "zfs"


def test_a_pool_that_may_be_made_is_no_lack():
    worker = node("spark-2", zfs={"dataset": "tank/w", "device": "/dev/vdb", "pool": False})
    head = {**HEAD, "filesystem": "zfs", "zfs": {"dataset": "tank/w", "pool": True, "exists": True, "mountpoint": ROOT}}
    assert choose(worker, "zfs", head=head).method == "zfs"


def test_rsync_is_not_asked_for_when_nothing_is_to_be_copied_or_the_fabric_copies():
    bare = node("spark-2", tools={})
    assert choose(bare, "rsync").method == ""
    assert choose(bare, "rsync", transport="fabric").method == "rsync"
    assert choose(node("spark-2", tools={}, artefacts=[COMPLETE]), "rsync").method == "rsync"
