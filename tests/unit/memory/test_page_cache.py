# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkops.inference.plugins.module_utils import _page_cache
from ansible_collections.sparkops.inference.plugins.modules import page_cache

MIB = 1 << 20
NOBODY = 65534


@pytest.fixture
def disk_dir():
    """A directory on a filesystem with a page cache: files of a tmpfs are memory and can't be given up."""
    folder = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def write(path: pathlib.Path, size: int) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as stream:
        for _dummy in range(size // MIB):
            stream.write(os.urandom(4096) * 256)
        stream.write(b"x" * (size % MIB))
    return path


def read(path: pathlib.Path) -> None:
    with open(path, "rb") as stream:
        while stream.read(MIB):
            pass


def run(monkeypatch, capsys, **args):
    with patch_module_args(args), pytest.raises(SystemExit) as stop:
        page_cache.main()
    return stop.value.code, json.loads(capsys.readouterr().out)


def in_another_account(work) -> dict:
    """Run ``work`` as an account without any right, and return what it returns. Its own process: rights do not come back."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            answer = work()
        except Exception as exc:  # the parent shows it
            answer = {"error": repr(exc)}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = json.loads(stream.read())
    os.waitpid(child, 0)
    return answer


def test_a_copied_tree_is_evicted_without_root(disk_dir):
    disk_dir.chmod(0o777)

    def work():
        source = write(disk_dir / "source", 64 * MIB)
        for number in range(8):
            target = disk_dir / "tree" / f"shard-{number}"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
        before = _page_cache.resident_in([disk_dir / "tree"])
        asked = _page_cache.evict([disk_dir / "tree"])
        left = _page_cache.resident_in([disk_dir / "tree"])
        return {"uid": os.geteuid(), "before": before, "asked": asked, "left": left, "source": _page_cache.resident_bytes(source)}

    found = in_another_account(work)
    assert found.get("uid") != 0, found
    assert found["asked"] == 512 * MIB
    assert found["before"] > 256 * MIB  # the kernel may have written back and dropped a part by itself
    assert found["left"] == 0
    assert found["source"] > 0  # exactly the given tree, not its source


def test_the_kernel_tells_only_the_owner(disk_dir):
    if os.geteuid() != 0:
        pytest.skip("needs two accounts")
    disk_dir.chmod(0o755)
    path = write(disk_dir / "file", MIB)
    path.chmod(0o644)

    def work():
        may = _page_cache.may_measure(path)
        try:
            _page_cache.resident_bytes(path)
        except PermissionError as exc:
            return {"may": may, "message": str(exc), "asked": _page_cache.evict([path])}
        return {"may": may}

    found = in_another_account(work)
    assert found["may"] is False
    assert "only the owner" in found["message"]
    assert found["asked"] == MIB  # a reader may still give pages up


def test_resident_bytes_counts_pages(disk_dir):
    path = write(disk_dir / "file", 3 * MIB + 5)
    _page_cache.evict([path])
    assert _page_cache.resident_bytes(path) == 0
    read(path)
    assert _page_cache.resident_bytes(path) == 3 * MIB + 5


@pytest.mark.parametrize("window", [4096, 8192, 1 << 30])
def test_windows_do_not_change_the_sum(disk_dir, monkeypatch, window):
    monkeypatch.setattr(_page_cache, "WINDOW_BYTES", window)
    path = write(disk_dir / "file", 40960 + 17)
    read(path)
    assert _page_cache.resident_bytes(path) == 40960 + 17


def test_empty_file_and_missing_path(disk_dir):
    empty = write(disk_dir / "empty", 0)
    assert _page_cache.resident_bytes(empty) == 0
    assert _page_cache.evict([empty]) == 0
    with pytest.raises(FileNotFoundError):
        _page_cache.evict([disk_dir / "absent"])


def test_files_of_counts_each_file_once(disk_dir):
    first = write(disk_dir / "a" / "one", 10)
    write(disk_dir / "a" / "sub" / "two", 10)
    os.link(first, disk_dir / "a" / "hard")
    (disk_dir / "a" / "soft").symlink_to(first)
    (disk_dir / "a" / "dangling").symlink_to(disk_dir / "absent")
    found = list(_page_cache.files_of([disk_dir / "a", first]))
    assert len(found) == 2
    assert list(_page_cache.files_of(str(first))) == [str(first)]  # one path instead of a list of them


def test_module_check_then_apply(disk_dir, monkeypatch, capsys):
    path = write(disk_dir / "file", 2 * MIB)
    read(path)
    code, predicted = run(monkeypatch, capsys, paths=[str(disk_dir)], _ansible_check_mode=True)
    assert code == 0 and not predicted["changed"]
    assert predicted["cached_bytes"] == predicted["left_bytes"] == 2 * MIB
    code, result = run(monkeypatch, capsys, paths=[str(disk_dir)])
    assert code == 0 and not result["changed"]
    assert (result["files"], result["size_bytes"], result["left_bytes"], result["dropped"]) == (1, 2 * MIB, 0, "no")
    assert run(monkeypatch, capsys, paths=[str(disk_dir)])[1]["cached_bytes"] == 0


def test_module_drops_all_caches_through_proc(disk_dir, monkeypatch, capsys):
    control = write(disk_dir / "proc" / "sys" / "vm" / "drop_caches", 1)
    path = write(disk_dir / "file", 10)
    result = run(monkeypatch, capsys, paths=[str(path)], drop_caches=True, proc_root=str(disk_dir / "proc"))[1]
    assert result["dropped"] == "yes" and control.read_text() == "1"


@pytest.mark.parametrize(("kind", "sizes", "left", "asked"), [
    ("zfs", [900 * MIB, 500 * MIB, 64 * MIB, 60 * MIB], 60 * MIB, 3), ("zfs", [70 * MIB, 69 * MIB], 69 * MIB, 1), ("ext4", [900 * MIB], None, 0),
])  # fmt: skip
def test_module_asks_zfs_until_it_gives_nothing_more(disk_dir, monkeypatch, capsys, kind, sizes, left, asked):
    proc, path = disk_dir / "proc", write(disk_dir / "replica" / "file", 10)
    (disk_dir / "link").symlink_to(disk_dir / "replica")
    control, stats = write(proc / "sys/vm/drop_caches", 1), write(proc / "spl/kstat/zfs/arcstats", 1)
    write(proc / "self/mountinfo", 1).write_text(f"29 1 254:0 / / rw - ext4 /dev/vda rw\n30 29 0:50 / {path.parent} rw - {kind} tank rw\n")
    drop, given = page_cache.drop, iter(sizes)
    stats.write_text(f"size 4 {next(given)}\n")

    def dropping(root, what):
        stats.write_text(f"size 4 {next(given)}\n")
        return drop(root, what)

    monkeypatch.setattr(page_cache, "drop", dropping)
    result = run(monkeypatch, capsys, paths=[str(disk_dir / "link")], proc_root=str(proc))[1]
    assert (result["arc_bytes"], result["arc_left_bytes"]) == (sizes[0] if asked else None, left)
    assert len(list(given)) == len(sizes) - 1 - asked and control.read_text() == ("2" if asked else "x")


def test_module_says_when_it_may_not_drop(monkeypatch):
    def refuse(*dummy_args, **dummy_more):
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert page_cache.drop_all("/proc") == "not allowed"


def test_module_fails_for_a_missing_path_but_not_in_check_mode(disk_dir, monkeypatch, capsys):
    absent = str(disk_dir / "absent")
    code, result = run(monkeypatch, capsys, paths=[absent])
    assert code == 1 and absent in result["msg"]
    assert run(monkeypatch, capsys, paths=[absent], _ansible_check_mode=True)[0] == 0


def test_module_goes_on_until_the_time_is_over(disk_dir, monkeypatch):
    """Pages that a process has mapped stay: the module ends all the same, and says what is left."""
    path = write(disk_dir / "file", MIB)
    monkeypatch.setattr(page_cache, "cached", lambda paths: 4096)
    monkeypatch.setattr(page_cache.time, "sleep", lambda seconds: None)
    clock = iter(range(100))
    monkeypatch.setattr(page_cache.time, "monotonic", lambda: next(clock))
    assert page_cache.give_up([str(path)], 3) == 4096
