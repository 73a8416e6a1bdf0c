# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The look at a rank, above all that it never touches a mount whose server is gone."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _manifest, _mounts
from ansible_collections.sparkops.inference.plugins.modules import sync_info

ARTEFACT = {"name": "model", "repository": "acme/tiny", "revision": "a" * 40, "directory": f"acme--tiny/{'a' * 40}"}


@pytest.fixture(name="look")
def fixture_look(tmp_path, monkeypatch):
    """``dead``: where a mount lies whose server does not answer. Whoever looks there is caught; a real one would never come back."""
    (tmp_path / "nas/weights").mkdir(parents=True)
    root = str(tmp_path / "nas/weights")

    def look(dead, state="dead"):
        mounts = [_mounts.Mount("/", "ext4", "/dev/vda", ("rw",), "254:0"), _mounts.Mount(dead, "nfs4", "198.51.100.11:/x", ("ro",), "0:57")]
        monkeypatch.setattr(_mounts, "read", lambda *dummy: mounts)
        monkeypatch.setattr(_mounts, "users", lambda mount: [])
        monkeypatch.setattr(_limited, "look_at", lambda asked, seconds: [_limited.Look(state, "no answer") for dummy in asked])

        def guarded(name, real):
            def one(path, *more, **options):
                assert state == "live" or not _mounts.below(os.fspath(path), dead), f"{name} {path} would hang"
                return real(path, *more, **options)

            return one

        names = ("stat", "access", "statvfs", "walk", "scandir")
        for place, name in ((os.path, "exists"), (os.path, "isdir"), (os.path, "islink"), *((os, name) for name in names)):
            monkeypatch.setattr(place, name, guarded(name, getattr(place, name)))
        monkeypatch.setattr(_manifest, "load", guarded("load", _manifest.load))
        module = SimpleNamespace(
            params={
                "weights_root": root, "node": "spark-2", "probe_seconds": 10, "artefacts": [ARTEFACT], "exports_file": None, "dataset": None, "device": None,
            },  # fmt: skip
            get_bin_path=lambda name, **dummy: None,
            run_command=lambda *dummy, **more: (1, "", ""),
        )
        return sync_info.read(module)

    return SimpleNamespace(root=root, at=look)


@pytest.mark.parametrize("place", ["root", "above", "tree"])
def test_nothing_below_a_dead_mount_is_looked_at(look, place):
    dead = {"root": look.root, "above": os.path.dirname(look.root), "tree": f"{look.root}/{ARTEFACT['directory']}"}[place]
    info = look.at(dead)
    assert "sync.nfs_dead" in info["message"] and [mount["state"] for mount in info["mounts"]] == ["dead"]
    assert info["artefacts"][0]["complete"] is False and info["artefacts"][0]["problems"] == ["no answer"]
    assert (info["free"] == 0 and not info["writable"] and info["owner"] is None) == (place != "tree")


def test_a_live_share_of_the_users_is_a_place_like_any_other(look):
    info = look.at(os.path.dirname(look.root), "live")
    assert info["message"] == "" and info["free"] > 0 and info["writable"] and info["owner"] == os.getuid()


def test_a_tree_that_is_mounted_at_boot_only_is_told(look, monkeypatch):
    """The mount failed, or was undone by hand: another method must still take its line away, also that of an earlier tree."""
    assert look.at(os.path.dirname(look.root), "live")["fstab"] == []
    monkeypatch.setattr(_mounts, "read_fstab", lambda mark, root: {f"{root}/acme--tiny/before {mark}": "h:/w"})
    assert look.at(os.path.dirname(look.root), "live")["fstab"] == [f"{look.root}/acme--tiny/before x-sparkops"]


def test_what_our_file_exports_is_told(tmp_path):
    (tmp_path / "d.exports").write_text("# ours\n/w/a 198.51.100.12(ro)\n/w/a 198.51.100.13(ro)\n/w/b 198.51.100.12(ro)\n")
    assert sync_info.exported(str(tmp_path / "d.exports")) == ["/w/a", "/w/b"]
    assert sync_info.exported(str(tmp_path / "none")) == sync_info.exported(None) == []


def test_what_lies_in_a_live_share_of_the_users_is_a_copy(look):
    assert look.at(os.path.dirname(look.root), "live")["artefacts"][0]["way"] == "rsync"
    assert look.at(f"{look.root}/{ARTEFACT['directory']}", "live")["artefacts"][0]["way"] == "nfs"


def test_a_replica_is_in_use_when_another_revision_is_a_link_into_it(look):
    place = os.path.dirname(look.root)
    assert look.at(place, "live")["replica"] is False
    os.makedirs(f"{look.root}/acme--tiny/own-copy")
    os.symlink("/mnt/elsewhere", f"{look.root}/acme--tiny/of-the-user")
    assert look.at(place, "live")["replica"] is False
    os.symlink("../.replica/acme--tiny/before", f"{look.root}/acme--tiny/before")
    assert look.at(place, "live")["replica"] is True


def test_the_links_of_a_replica_that_was_given_up_are_history(look):
    os.makedirs(f"{look.root}/acme--tiny/own-copy")
    os.symlink("../.replica/acme--tiny/before", f"{look.root}/acme--tiny/before")
    os.utime(f"{look.root}/acme--tiny/before", (1, 1), follow_symlinks=False)
    assert look.at(os.path.dirname(look.root), "live")["replica"] is False
    # A mount point is not looked at, and is no copy.
    assert look.at(f"{look.root}/acme--tiny/own-copy", "live")["replica"] is True


def test_what_a_replica_has_counts_while_its_link_is_missing(look):
    os.makedirs(f"{look.root}/.replica/{ARTEFACT['directory']}")
    with open(f"{look.root}/.replica/{ARTEFACT['directory']}/a.bin", "wb") as stream:
        stream.write(b"1234567")
    found = look.at(os.path.dirname(look.root), "live")["artefacts"][0]
    assert (found["way"], found["complete"], found["files"]) == ("zfs", False, {"a.bin": 7})
    os.makedirs(f"{look.root}/{ARTEFACT['directory']}")
    assert look.at(os.path.dirname(look.root), "live")["artefacts"][0]["way"] == "rsync"


@pytest.mark.parametrize("dead", ["", "/acme--tiny"])
def test_no_replica_is_looked_for_on_a_share_that_does_not_answer(look, dead):
    assert look.at(look.root + dead)["replica"] is False


def test_the_stale_mount_of_an_earlier_tree_is_no_reason_to_refuse(look):
    assert look.at(f"{look.root}/acme--tiny/before", "stale")["message"] == ""
    assert "sync.nfs_stale" in look.at(f"{look.root}/{ARTEFACT['directory']}", "stale")["message"]


@pytest.mark.parametrize(
    ("mounted", "mountpoint", "refused"), [("no", "/srv/weights", True), ("yes", "/srv/weights", False), ("no", "/srv/weights/.replica", False)]
)
def test_a_dataset_that_is_not_mounted_hides_what_would_come(mounted, mountpoint, refused):
    info = {"node": "spark-1", "weights_root": "/srv/weights", "zfs": {"dataset": "tank/weights", "mounted": mounted, "mountpoint": mountpoint}}
    found = sync_info.unmounted(info)
    assert bool(found) == refused
    assert not found or (found[0].id, "zfs mount tank/weights on spark-1" in found[0].text) == ("sync.zfs_unmounted", True)
    assert not sync_info.unmounted({**info, "zfs": {"dataset": None}})
