# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The mount table, who holds a mount, and looks that may hang."""

from __future__ import annotations

import errno
import os
import subprocess
import time

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _mounts
from ansible_collections.sparkops.inference.plugins.module_utils._mounts import Mount

TREE = "/srv/weights/acme--tiny/c"
TABLE = rf"""29 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 29 254:1 / /srv rw,relatime shared:2 - ext4 /dev/vdb rw
31 30 0:57 / {TREE} ro,relatime shared:3 - nfs4 198.51.100.11:{TREE} rw,vers=4.2,hard,addr=198.51.100.11
32 30 0:58 / /srv/with\040space rw - tmpfs tmpfs rw
33 29 0:59 / /mnt/home rw,relatime - nfs nas:/home rw,vers=3,addr=192.0.2.9
a line that is none
34 30 0:60 / {TREE} ro - nfs4 198.51.100.99:{TREE} ro,vers=4.2,soft,addr=198.51.100.99
"""


def test_the_last_of_two_mounts_at_one_place_is_the_visible_one():
    assert _mounts.at(_mounts.parse(TABLE), TREE).server == "198.51.100.99"


@pytest.mark.parametrize(
    ("path", "source"),
    [("/etc", "/dev/vda"), ("/srv/x", "/dev/vdb"), ("/srvx", "/dev/vda"), (f"{TREE}/config.json", f"198.51.100.99:{TREE}"), ("/srv/with space/x", "tmpfs")],
)
def test_the_deepest_mount_holds_a_path(path, source):
    assert _mounts.holding(_mounts.parse(TABLE), path).source == source


def test_a_read_only_mount_of_a_writable_filesystem_is_read_only():
    first = next(mount for mount in _mounts.parse(TABLE) if mount.type == "nfs4")
    assert first.option("ro") == "" and first.option("rw") is None


@pytest.mark.parametrize(("root", "count"), [("/srv/weights", 1), ("/srv", 1), ("/mnt/home/alice", 1), ("/etc", 0), ("/", 2), ("/srv/weight", 0)])
def test_network_mounts_at_below_and_above_a_folder(root, count):
    assert len(_mounts.network_mounts(_mounts.parse(TABLE), root)) == count


def test_a_container_that_holds_a_mount_is_named(tmp_path):
    own, container, other = "4026531841", "4026532001", "4026532002"
    ours = f"34 30 0:60 / {TREE} ro shared:126 - nfs4 198.51.100.99:{TREE} ro,vers=4.2\n"
    # What systemd's own services see of it, and what a container holds for itself.
    passed_on, held = ours.replace("shared:126", "master:126"), ours.replace(" shared:126", "")
    for pid, space, lines in (("1", own, ours), ("self", own, ours), ("40", container, held), ("41", container, held), ("50", other, passed_on)):
        folder = tmp_path / pid
        (folder / "ns").mkdir(parents=True)
        (folder / "ns/mnt").symlink_to(f"mnt:[{space}]")
        (folder / "mountinfo").write_text(lines)
        (folder / "comm").write_text("python3\n")
        (folder / "cgroup").write_text(f"0::/system.slice/docker-{'0123456789ab' + 'c' * 52}.scope\n")
    mount = _mounts.at(_mounts.parse(ours), TREE)
    assert _mounts.users(mount, str(tmp_path)) == [_mounts.User(40, "python3", "0123456789ab")]
    # Without root the names of the others' namespaces are hidden, and their tables are not.
    for pid in ("1", "40", "41", "50"):
        (tmp_path / pid / "ns/mnt").unlink()
    assert [user.pid for user in _mounts.users(mount, str(tmp_path))] == [40, 41]


@pytest.mark.parametrize(
    ("state", "trees", "used", "hinders"),
    [
        ("live", [TREE], True, False),
        ("stale", [TREE], False, True),
        ("stale", [f"{TREE}/below"], False, True),
        ("stale", ["/srv/weights/acme--tiny/d"], False, False),
        ("stale", ["/srv/weights/acme--tiny/d"], True, True),
        ("dead", ["/srv/weights/acme--tiny/d"], False, True),
        ("broken", ["/srv/weights/acme--tiny/d"], False, True),
    ],
)
def test_a_stale_mount_of_an_earlier_tree_hinders_only_who_reads_there(monkeypatch, state, trees, used, hinders):
    monkeypatch.setattr(_mounts, "users", lambda _mount: [_mounts.User(40, "python3", "0123456789ab")] if used else [])
    mount = _mounts.at(_mounts.parse(TABLE), TREE)
    assert bool(_limited.refusals("spark-2", [(mount, _limited.Look(state, ""))], trees)) == hinders


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        (f"0::/system.slice/docker-{'a' * 64}.scope", "a" * 12),
        (f"12:memory:/docker/{'b' * 64}", "b" * 12),
        ("0::/system.slice/nfs-mountd.service", ""),
    ],
)
def test_the_container_of_a_cgroup(cgroup, container):
    assert _mounts.container_of(cgroup) == container


def hang():
    time.sleep(600)


def stale():
    raise OSError(errno.ESTALE, "Stale file handle")


def test_looks_run_side_by_side_and_end_in_time():
    began = time.monotonic()
    answers = _limited.limited([lambda: 1, hang, stale, hang], 1.0)
    assert time.monotonic() - began < 5
    assert answers[0] == 1 and answers[2].errno == errno.ESTALE
    assert all(isinstance(answers[number], _limited.TooLong) for number in (1, 3))


def test_a_command_that_does_not_even_end_when_it_is_killed_is_left(monkeypatch):
    began, made = time.monotonic(), []

    def kill(process):
        made.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    with pytest.raises(_limited.TooLong, match="sleep"):
        _limited.command(["sleep", "600"], 0.2)
    assert time.monotonic() - began < 60
    monkeypatch.undo()
    made[0].kill()
    made[0].wait()
    done = _limited.command(["sh", "-c", "echo out; echo err >&2; exit 3"], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_no_child_stays_behind(monkeypatch):
    """Asks for these children only: the process that runs the tests may have others."""
    pids: list[int] = []
    fork = os.fork

    def noted() -> int:
        pid = fork()
        if pid:
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noted)
    _limited.limited([hang, lambda: 1], 0.2)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_child_that_hangs_holds_no_output(tmp_path):
    """The controller waits for the end of the output: a child that keeps it open would hold the play."""
    held = []

    def look():
        held.extend(os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2))
        return held

    assert _limited.limited([look])[0] == [os.devnull] * 3


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (True, "live"),
        (_limited.TooLong(), "dead"),
        (OSError(errno.ESTALE, ""), "stale"),
        (OSError(errno.EIO, ""), "broken"),
        (OSError(errno.EACCES, ""), "denied"),
    ],
)
def test_the_state_of_a_mount(answer, state, monkeypatch):
    monkeypatch.setattr(_limited, "limited", lambda looks, seconds: [answer])
    mount = Mount(TREE, "nfs4", f"198.51.100.11:{TREE}", ("addr=198.51.100.11",), "0:57")
    look = _limited.look_at([mount], 10)[0]
    assert look.state == state
    if state != "live":
        refusal = _limited.refusal("spark-2", mount, look)
        known = {"stale": "sync.nfs_stale", "denied": "sync.nfs_denied"}
        assert "198.51.100.11" in refusal.text and refusal.id == known.get(state, "sync.nfs_dead")
        assert ("back" in refusal.next_step) == (state in ("dead", "broken"))


def test_a_folder_without_such_mounts_is_not_asked(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("nothing is to be asked"))
    assert _limited.not_live("/etc") == []


def test_a_line_of_the_table_of_filesystems_counts_whatever_is_mounted():
    lines = [f"# {TREE} x-sparkops", "/dev/vda / ext4 defaults 0 1", "", f"198.51.100.11:{TREE} {TREE} nfs4 ro,nofail,x-sparkops 0 0", "short line"]
    lines += ["head:/a /srv/with\\040space nfs x-sparkops,ro 0 0", "nas:/b /srv/weights/b nfs ro,x-sparkops-not 0 0"]
    assert _mounts.fstab_lines("\n".join(lines), "x-sparkops") == {TREE: f"198.51.100.11:{TREE}", "/srv/with space": "head:/a"}


def test_our_lines_below_a_folder(tmp_path):
    (tmp_path / "fstab").write_text("h:/a /srv/weights/a nfs4 ro,x-sparkops 0 0\nh:/b /srv/other/b nfs4 ro,x-sparkops 0 0\n")
    assert _mounts.read_fstab("x-sparkops", "/srv/weights", str(tmp_path / "fstab")) == {"/srv/weights/a": "h:/a"}
    assert _mounts.read_fstab("x-sparkops", "/srv/weights", str(tmp_path / "none")) == {}


def test_a_path_is_resolved_but_for_what_lies_on_a_network_mount(tmp_path, monkeypatch):
    (tmp_path / "disk/weights").mkdir(parents=True)
    nas = str(tmp_path / "nas")
    for name, target in (
        ("data", "disk"), ("absolute", str(tmp_path / "disk")), ("twice", "./absolute"), ("up", "disk/../disk"), ("shared", "nas/w"), ("loop", "loop"),
    ):  # fmt: skip
        (tmp_path / name).symlink_to(target)
    mounts = [Mount("/", "ext4", "/dev/vda", (), "254:0"), Mount(nas, "nfs", "nas:/x", (), "0:57")]
    asked, readlink = [], os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: asked.append(path) or readlink(path))
    real = {
        "disk/weights": "disk/weights", "data/weights": "disk/weights", "absolute/weights": "disk/weights", "twice/weights": "disk/weights", "up": "disk",
        "data/./not/../there/": "disk/there", "shared/a/../b": "nas/w/b", "nas": "nas", "loop/a": "loop/a",
    }  # fmt: skip
    assert {path: _mounts.resolve(mounts, f"{tmp_path}/{path}") for path in real} == {path: f"{tmp_path}/{wanted}" for path, wanted in real.items()}
    assert asked and not any(_mounts.below(path, nas) for path in asked)
