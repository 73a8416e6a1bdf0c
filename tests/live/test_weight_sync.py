# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The choice of a method, and what a launch asks of every rank, in containers without modules of NFS and ZFS."""

from __future__ import annotations

import pytest
from conftest import fingerprint, on, play

TREE = "/var/lib/sparkops/weights/sparklab--tiny-llama/*/"


@pytest.fixture(name="copied", scope="module")
def fixture_copied():
    for name in ("bootstrap", "weights", "sync"):
        done = play(name)
        assert done.code == 0, done.text[-5000:]
    return done


def test_auto_copies_and_says_why(copied):
    assert "taken: rsync" in copied.text and "rsync fits" in copied.text
    assert "nfs does not fit" in copied.text and "kernel module nfsd" in copied.text
    assert "zfs does not fit" in copied.text


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
        assert word in done.text
    assert fingerprint("spark-1") + fingerprint("spark-2") == before


def test_a_folder_of_somebody_else_is_refused_with_path_and_uid(copied):
    owner = on("spark-2", "stat -c %u /var/lib/sparkops/weights").strip()
    on("spark-2", "chown 65534 /var/lib/sparkops/weights")
    try:
        done = play("sync", variables={"weight_sync_method": "rsync"})
    finally:
        on("spark-2", f"chown {owner} /var/lib/sparkops/weights")
    assert done.code != 0 and "spark-2" in done.text and "/var/lib/sparkops/weights" in done.text and "owned by uid 65534" in done.text, done.text[-3000:]


def test_no_page_of_a_copy_stays_in_memory(copied):
    on("spark-2", f"rm -r {TREE} {TREE.rstrip('/')}.manifest.json")
    done = play("sync")
    assert done.code == 0, done.text[-3000:]
    pages = on("spark-2", f"fincore --bytes --noheadings --output PAGES {TREE}*.safetensors").split()
    assert len(pages) >= 3 and set(pages) == {"0"}


def test_no_launch_while_one_rank_lacks_a_file_and_the_sync_brings_it(copied):
    shard = on("spark-2", f"ls {TREE}*.safetensors").split()[0]
    on("spark-2", f"rm {shard}")
    done = play("serve")
    assert done.code != 0 and "weights.incomplete" in done.text and "spark-2" in done.text, done.text[-3000:]
    assert shard.rpartition("/")[2] in done.text
    assert play("sync").code == 0
    assert on("spark-2", f"ls {shard}").strip() == shard
