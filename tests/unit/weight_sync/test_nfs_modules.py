# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Modules of the NFS side, with the programs by a table."""

from __future__ import annotations

import os
import shutil

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _mounts, _nfs_plan
from ansible_collections.sparkops.inference.plugins.modules import nfs_export, nfs_mount, nfs_mount_info
from commands import Commands, call, ids

HEAD, WORKER = "198.51.100.11", "198.51.100.12"
ACTIVE = ("systemctl is-active --quiet nfs-server.service", 0)
ENABLED = ("systemctl is-enabled --quiet nfs-server.service", 0)


@pytest.fixture(name="head")
def fixture_head(tmp_path):
    """A head with one tree, an empty exports.d, and processes of our own making."""
    tree = tmp_path / "weights/acme--tiny/c"
    tree.mkdir(parents=True)
    (tree / "config.json").write_text("{}")
    (tmp_path / "exports.d").mkdir()
    proc = tmp_path / "proc"
    process(proc, "1", "systemd", "1")
    process(proc, "self", "python3", "1")
    (proc / "self/mountinfo").write_text("29 1 254:0 / / rw - ext4 /dev/vda rw\n")
    (proc / "net").mkdir()
    listening(proc, "0")
    return tmp_path


def process(proc, pid, name, space, cgroup="0::/system.slice/x.service\n"):
    folder = proc / pid
    (folder / "ns").mkdir(parents=True)
    (folder / "ns/mnt").symlink_to(f"mnt:[{space}]")
    (folder / "fd").mkdir()
    (folder / "comm").write_text(name + "\n")
    (folder / "cgroup").write_text(cgroup)


def listening(proc, inode):
    line = f"   0: 00000000:0801 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0 100 0 0 10 0\n"
    (proc / "net/tcp").write_text("  sl  local_address rem_address\n" + line)


def tree_of(head):
    return str(head / "weights/acme--tiny/c")


def table(head, client=WORKER, options="ro,wdelay,root_squash,sync,no_subtree_check,sec=sys"):
    return f"{tree_of(head)}\n\t\t{client}({options},fsid={_nfs_plan.fsid(tree_of(head))})\n"


def export(head, monkeypatch, capsys, *rows, check=False, **more):
    arguments = {
        "deployment": "sparks", "node": "spark-1", "trees": [tree_of(head)], "clients": [WORKER], "exports_dir": str(head / "exports.d"),
        "proc_root": str(head / "proc"), "times_file": str(head / "nfs.conf.d/sparkops.conf"), **more,
    }  # fmt: skip
    return call(monkeypatch, capsys, nfs_export, Commands(*rows), check, **arguments)


SHOW = "exportfs -v"


def first(head):
    """The commands of a first export."""
    return (
        (SHOW, 0, ""), ("systemctl is-active --quiet nfs-server.service", 3),
        ("systemctl enable --now nfs-server.service", 0), ("exportfs -a", 0), (SHOW, 0, table(head)),
    )  # fmt: skip


def own_file(head):
    return head / "exports.d/sparkops-sparks.exports"


def test_a_first_export_is_written_started_and_read_back(head, monkeypatch, capsys):
    result = export(head, monkeypatch, capsys, *first(head))
    assert result["changed"] and result["exports"][0]["client"] == WORKER
    assert tree_of(head) in result["diff"]["after"]
    assert own_file(head).read_text() == result["diff"]["after"] and own_file(head).stat().st_mode & 0o777 == 0o644
    assert "lease-time=30" in (head / "nfs.conf.d/sparkops.conf").read_text()


def test_the_times_of_a_server_that_runs_are_its_own(head, monkeypatch, capsys):
    rows = [(SHOW, 0, ""), ACTIVE, ENABLED, ("systemctl enable --now nfs-server.service", 0), ("exportfs -a", 0), (SHOW, 0, table(head))]
    assert export(head, monkeypatch, capsys, *rows)["changed"] and not (head / "nfs.conf.d").exists()


def test_check_mode_says_the_same_and_writes_nothing(head, monkeypatch, capsys):
    result = export(head, monkeypatch, capsys, *first(head)[:2], check=True)
    assert result["changed"] and os.listdir(head / "exports.d") == []


def test_a_second_run_only_looks(head, monkeypatch, capsys):
    export(head, monkeypatch, capsys, *first(head))
    result = export(head, monkeypatch, capsys, (SHOW, 0, table(head)), ACTIVE, ENABLED, (SHOW, 0, table(head)), (SHOW, 0, table(head)))
    assert not result["changed"] and result["exports"]


def test_a_client_that_left_loses_only_its_own_line(head, monkeypatch, capsys):
    export(head, monkeypatch, capsys, *first(head))
    both = table(head) + table(head, "198.51.100.13")
    result = export(
        head, monkeypatch, capsys,
        (SHOW, 0, table(head)), ACTIVE, ENABLED, ("systemctl enable --now nfs-server.service", 0), (SHOW, 0, table(head)),
        (f"exportfs -u {WORKER}:{tree_of(head)}", 0), ("exportfs -a", 0), (SHOW, 0, both.replace(table(head), "")),
        clients=["198.51.100.13"],
    )  # fmt: skip
    assert result["changed"] and [item["client"] for item in result["exports"]] == ["198.51.100.13"]


def test_the_model_of_before_stays_exported_until_it_is_removed(head, monkeypatch, capsys):
    """A rank reads it until the new one is started; without its line the worker's mount is stale, and every play refuses it."""
    export(head, monkeypatch, capsys, *first(head))
    new = head / "weights/acme--tiny/d"
    new.mkdir()
    line = f"{new}\n\t\t{WORKER}(ro,wdelay,root_squash,sync,no_subtree_check,sec=sys,fsid={_nfs_plan.fsid(str(new))})\n"
    start = ("systemctl enable --now nfs-server.service", 0)
    both = export(
        head, monkeypatch, capsys, (SHOW, 0, table(head)), ACTIVE, ENABLED, start, ("exportfs -a", 0), (SHOW, 0, table(head) + line),
        trees=[str(new)],
    )  # fmt: skip
    assert [item["path"] for item in both["exports"]] == [tree_of(head), str(new)]
    (head / "exports.d/sparkops-other.exports").write_text("/srv/other 198.51.100.13(ro)\n")
    shutil.rmtree(tree_of(head))
    one = export(
        head, monkeypatch, capsys, (SHOW, 0, table(head) + line), ACTIVE, ENABLED, start, (SHOW, 0, table(head) + line),
        (f"exportfs -u {WORKER}:{tree_of(head)}", 0), ("exportfs -a", 0), (SHOW, 0, line), trees=[str(new)],
    )  # fmt: skip
    assert one["changed"] and [item["path"] for item in one["exports"]] == [str(new)] and tree_of(head) not in own_file(head).read_text()
    assert one["served"] == sorted([str(new), "/srv/other"])


def test_a_line_of_somebody_else_for_the_same_folder_is_refused(head, monkeypatch, capsys):
    result = export(head, monkeypatch, capsys, (SHOW, 0, table(head, "192.0.2.9")))
    assert ids(result) == ["sync.nfs_wide"] and "192.0.2.9" in result["msg"] and os.listdir(head / "exports.d") == []


def test_what_the_server_really_gives_decides(head, monkeypatch, capsys):
    rows = [*first(head)[:-1], (SHOW, 0, table(head, options="rw,root_squash,sync,no_subtree_check,sec=sys"))]
    assert ids(export(head, monkeypatch, capsys, *rows)) == ["sync.nfs_readback"]


@pytest.mark.parametrize("clients", [[], ["*"], ["198.51.100.0/24"]])
def test_nobody_and_everybody_are_refused(head, monkeypatch, capsys, clients):
    result = export(head, monkeypatch, capsys, clients=clients)
    assert ids(result) == ["sync.nfs_clients"] and os.listdir(head / "exports.d") == []


def test_an_overlay_is_refused_with_the_reason(head, monkeypatch, capsys):
    (head / "proc/self/mountinfo").write_text("29 1 0:40 / / rw - overlay overlay rw,lowerdir=/a\n")
    result = export(head, monkeypatch, capsys)
    assert ids(result) == ["sync.nfs_filesystem"] and "overlay" in result["msg"]


@pytest.mark.parametrize("kind", ["user space", "container"])
def test_another_server_is_refused_by_its_process(head, monkeypatch, capsys, kind):
    proc = head / "proc"
    if kind == "container":
        process(proc, "77", "rpc.mountd", "9", f"0::/system.slice/docker-{'ab' * 32}.scope\n")
    else:
        process(proc, "77", "ganesha.nfsd", "1")
        (proc / "77/fd/5").symlink_to("socket:[4242]")
        listening(proc, "4242")
    result = export(head, monkeypatch, capsys)
    assert ids(result) == ["sync.nfs_foreign"] and "pid 77" in result["msg"]
    assert kind != "container" or "container abababababab" in result["msg"]


def test_the_hosts_own_server_in_a_sandbox_is_not_foreign(head):
    process(head / "proc", "78", "rpc.mountd", "9", "0::/system.slice/nfs-mountd.service\n")
    assert nfs_export.foreign_servers(str(head / "proc")) == []


def test_files_that_a_squashed_root_cannot_read_are_named(head, monkeypatch, capsys):
    os.chmod(head / "weights/acme--tiny/c/config.json", 0o600)
    result = export(head, monkeypatch, capsys, (SHOW, 0, ""))
    assert ids(result) == ["sync.nfs_mode"] and "config.json" in result["msg"]


def test_the_exports_go_with_the_method(head, monkeypatch, capsys):
    export(head, monkeypatch, capsys, *first(head))
    result = export(head, monkeypatch, capsys, (SHOW, 0, table(head)), (f"exportfs -u {WORKER}:{tree_of(head)}", 0), state="absent", trees=[], clients=[])
    assert result["changed"] and not own_file(head).exists() and not (head / "nfs.conf.d/sparkops.conf").exists()
    assert not export(head, monkeypatch, capsys, state="absent", trees=[], clients=[])["changed"]


def test_the_times_stay_for_another_deployment(head, monkeypatch, capsys):
    export(head, monkeypatch, capsys, *first(head))
    (head / "exports.d/sparkops-other.exports").write_text("/srv/other 198.51.100.13(ro)\n")
    rows = ((SHOW, 0, table(head)), (f"exportfs -u {WORKER}:{tree_of(head)}", 0))
    assert export(head, monkeypatch, capsys, *rows, state="absent", trees=[], clients=[])["changed"]
    assert not own_file(head).exists() and (head / "nfs.conf.d/sparkops.conf").exists()


# --- the client ------------------------------------------------------------------------------------------------

DIRECTORY = "acme--tiny/c"
SERVER_ROOT = "/srv/weights"


@pytest.fixture(name="node")
def fixture_node(tmp_path, monkeypatch):
    """A worker whose server answers; ``mounts`` are what the kernel would show."""
    node = Worker(tmp_path / "weights")
    monkeypatch.setattr(_mounts, "read", lambda *_more: list(node.mounts))
    monkeypatch.setattr(_mounts, "read_fstab", lambda *_more: {})
    monkeypatch.setattr(_mounts, "users", lambda _mount: node.users)
    monkeypatch.setattr(_limited, "look_at", lambda mounts, _seconds: [_limited.Look(node.state, f"server {HEAD}") for _mount in mounts])
    monkeypatch.setattr(nfs_mount, "reachable", lambda _server: node.unreachable)
    return node


class Worker:
    def __init__(self, root):
        self.root, self.mounts, self.users, self.state, self.unreachable = root, [], [], "live", ""

    @property
    def path(self):
        return str(self.root / DIRECTORY)

    def mount(self, options="ro,vers=4.2,hard,nconnect=8,timeo=600,rsize=1048576", server=HEAD):
        return _mounts.Mount(self.path, "nfs4", f"{server}:{SERVER_ROOT}/{DIRECTORY}", (*options.split(","), f"addr={server}"), "0:57")

    def call(self, monkeypatch, capsys, *rows, check=False, **more):
        arguments = {"node": "spark-2", "server": HEAD, "root": str(self.root), "server_root": SERVER_ROOT, "directories": [DIRECTORY], **more}
        commands = Commands(*rows)
        run = commands.run

        def effect(argv, **kept):
            answer = run(argv, **kept)
            if "mount" in argv:
                self.mounts = [self.mount()]
            elif "umount" in argv:
                self.mounts = []
            return answer

        commands.run = effect
        return call(monkeypatch, capsys, nfs_mount, commands, check, **arguments)

    def mounting(self):
        options = f"{_nfs_plan.mount_options()},retry=0"
        return (["timeout", "--kill-after=5", "40", "mount", "-t", "nfs4", "-o", options, f"{HEAD}:{SERVER_ROOT}/{DIRECTORY}", self.path], 0)

    def unmounting(self, *force):
        return (["timeout", "--kill-after=5", "40", "umount", *force, self.path], 0)


def test_a_first_mount_has_a_time_limit_and_the_options(node, monkeypatch, capsys):
    result = node.call(monkeypatch, capsys, node.mounting())
    assert result["changed"] and result["steps"][0]["action"] == "mount"
    assert not node.call(monkeypatch, capsys)["changed"]


def test_check_mode_mounts_nothing(node, monkeypatch, capsys):
    assert node.call(monkeypatch, capsys, check=True)["changed"] and not node.mounts


def test_other_options_are_mounted_anew_when_unused(node, monkeypatch, capsys):
    node.mounts = [node.mount("ro,vers=4.2,hard,nconnect=1,timeo=600")]
    result = node.call(monkeypatch, capsys, node.unmounting(), node.mounting())
    assert result["steps"][0]["action"] == "remount" and "nconnect 1" in result["steps"][0]["reason"]


def test_an_old_address_is_left_for_the_new_one(node, monkeypatch, capsys):
    node.mounts, node.state = [node.mount(server="198.51.100.99")], "dead"
    monkeypatch.setattr(nfs_mount.Client, "prove", lambda _self: [])
    assert node.call(monkeypatch, capsys, node.unmounting("--lazy", "--force"), node.mounting())["changed"]


def test_a_mount_in_use_is_refused_by_the_containers_name(node, monkeypatch, capsys):
    node.mounts, node.users = [node.mount("ro,vers=4.2,hard,nconnect=1,timeo=600")], [_mounts.User(7, "python3", "0123456789ab")]
    result = node.call(monkeypatch, capsys)
    assert ids(result) == ["sync.nfs_used"] and "container 0123456789ab" in result["msg"] and node.mounts


def test_a_stale_handle_is_mended_by_recovery_only(node, monkeypatch, capsys):
    node.mounts, node.state = [node.mount()], "stale"
    assert ids(node.call(monkeypatch, capsys)) == ["sync.nfs_stale"]
    monkeypatch.setattr(nfs_mount.Client, "prove", lambda _self: [])
    assert node.call(monkeypatch, capsys, node.unmounting("--lazy", "--force"), node.mounting(), recover=True)["changed"]


def test_the_stale_mount_of_a_removed_tree_goes_with_the_recovery_unless_somebody_reads_there(node, monkeypatch, capsys):
    old = node.mount()._replace(path=str(node.root / "acme--tiny/b"))
    elsewhere = old._replace(path="/srv/other")
    looks = {node.path: "live", old.path: "stale"}
    monkeypatch.setattr(_limited, "look_at", lambda mounts, _seconds: [_limited.Look(looks[mount.path], "") for mount in mounts])
    node.mounts = [node.mount(), old, elsewhere]
    assert not node.call(monkeypatch, capsys)["changed"]
    monkeypatch.setattr(_mounts, "users", lambda mount: [_mounts.User(7, "python3", "0123456789ab")] if mount == old else [])
    assert ids(node.call(monkeypatch, capsys, recover=True)) == ["sync.nfs_used"]
    monkeypatch.setattr(_mounts, "users", lambda _mount: [])
    monkeypatch.setattr(nfs_mount.Client, "prove", lambda _self: [])
    unmounting = (["timeout", "--kill-after=5", "40", "umount", "--lazy", "--force", old.path], 0)
    result = node.call(monkeypatch, capsys, unmounting, recover=True)
    assert [(step["path"], step["action"]) for step in result["steps"]] == [(node.path, "keep"), (old.path, "unmount")]


def test_a_dead_server_is_said_before_any_mount_is_touched(node, monkeypatch, capsys):
    node.mounts, node.unreachable = [node.mount()], "timed out"
    monkeypatch.setattr(_limited, "look_at", lambda *_more: pytest.fail("a look at a dead mount costs its whole time"))
    result = node.call(monkeypatch, capsys)
    assert ids(result) == ["sync.nfs_dead"] and HEAD in result["msg"]


def test_a_rank_that_reads_keeps_its_mount_while_the_server_comes_back(node, monkeypatch, capsys):
    """The port answers at once; the kernel's own connection takes two looks more."""
    node.mounts, node.users = [node.mount()], [_mounts.User(7, "python3", "0123456789ab")]
    states = ["dead", "dead", "live", "live"]
    monkeypatch.setattr(_limited, "look_at", lambda mounts, _seconds: [_limited.Look(states.pop(0), "") for _mount in mounts])
    result = node.call(monkeypatch, capsys)
    assert not result["changed"] and result["steps"][0]["action"] == "keep" and states == []


def test_a_server_that_stays_silent_behind_its_port_is_waited_for_only_so_long(node, monkeypatch, capsys):
    node.mounts, node.users, looks = [node.mount()], [_mounts.User(7, "python3", "0123456789ab")], []
    monkeypatch.setattr(_limited, "look_at", lambda mounts, _seconds: [looks.append(mount) or _limited.Look("dead", "") for mount in mounts])
    assert ids(node.call(monkeypatch, capsys)) == ["sync.nfs_used"] and len(looks) == 1 + nfs_mount.LOOKS_AGAIN


def test_a_copy_below_the_mount_is_told(node, monkeypatch, capsys):
    os.makedirs(node.path)
    with open(os.path.join(node.path, "shard"), "wb") as stream:
        stream.write(b"x" * 100_000)
    assert "lie hidden" in node.call(monkeypatch, capsys, node.mounting())["notices"][0]


def test_a_link_into_a_replica_gives_its_place_up(node, monkeypatch, capsys):
    """mount would follow it, and the tree would not be where it is wanted."""
    (node.root / ".replica" / DIRECTORY).mkdir(parents=True)
    (node.root / ".replica" / DIRECTORY / "shard").write_bytes(b"x" * 100_000)
    os.makedirs(os.path.dirname(node.path))
    os.symlink(f"../.replica/{DIRECTORY}", node.path)
    result = node.call(monkeypatch, capsys, node.mounting())
    assert result["changed"] and not result["notices"] and not os.path.islink(node.path) and os.path.isdir(node.path)


def test_another_method_unmounts(node, monkeypatch, capsys):
    node.mounts = [node.mount()]
    assert node.call(monkeypatch, capsys, node.unmounting(), state="unmounted")["changed"]
    assert not node.call(monkeypatch, capsys, state="unmounted")["changed"]


def test_the_line_of_a_tree_that_the_head_gives_up_is_forgotten(node, monkeypatch, capsys):
    """After a boot it is not mounted, and what mounts at boot would try it for ever."""
    gone, other, foreign, stale = (str(node.root / "acme--tiny" / name) for name in ("gone", "other", "foreign", "stale"))
    lines = {place: f"{HEAD}:{SERVER_ROOT}/{place.rpartition('/')[2]}" for place in (gone, other, stale)}
    monkeypatch.setattr(_mounts, "read_fstab", lambda _mark, _root: {node.path: f"{HEAD}:{SERVER_ROOT}/{DIRECTORY}", **lines, foreign: "nas:/x"})
    node.mounts = [node.mount(), node.mount()._replace(path=stale, source=lines[stale])]
    served = [f"{SERVER_ROOT}/{DIRECTORY}", f"{SERVER_ROOT}/other"]
    for check in (True, False):
        result = node.call(monkeypatch, capsys, check=check, served=served)
        assert result["changed"] and [(step["path"], step["action"]) for step in result["steps"]] == [(node.path, "keep"), (gone, "forget")]
    assert not node.call(monkeypatch, capsys)["changed"]


def test_another_method_takes_the_mounts_of_earlier_trees_too(node, monkeypatch, capsys):
    before, gone, other, line = (str(node.root / "acme--tiny" / name) for name in ("before", "gone", "other", "line"))
    monkeypatch.setattr(_mounts, "read_fstab", lambda _mark, _root: dict.fromkeys([node.path, before, gone, other, line]))
    mounts = {name: node.mount()._replace(path=name, source=f"{HEAD}:{SERVER_ROOT}/{name.rpartition('/')[2]}") for name in (before, gone, other)}
    node.mounts = [node.mount(), *mounts.values()]
    monkeypatch.setattr(_limited, "look_at", lambda asked, _seconds: [_limited.Look("stale" if mount.path == gone else "live", "") for mount in asked])
    shared = [f"{SERVER_ROOT}/{DIRECTORY}", f"{SERVER_ROOT}/before"]
    taken = node.call(monkeypatch, capsys, check=True, state="unmounted", shared=shared)["steps"]
    # ``other`` is live, and another deployment's; ``line`` is mounted at the next boot only.
    assert [(step["path"], step["action"]) for step in taken] == [(node.path, "unmount"), (before, "unmount"), (gone, "unmount"), (line, "keep")]
    monkeypatch.setattr(_mounts, "users", lambda mount: [_mounts.User(7, "python3", "0123456789ab")] if mount.path == before else [])
    refused = node.call(monkeypatch, capsys, state="unmounted", shared=shared)
    assert ids(refused) == ["sync.nfs_used"] and "container 0123456789ab" in refused["msg"] and before in refused["msg"]


def test_a_failed_mount_gives_the_programs_words(node, monkeypatch, capsys):
    row = (node.mounting()[0], 32, "", "mount.nfs4: access denied by server")
    monkeypatch.setattr(Worker, "mount", lambda *_more: None)
    result = node.call(monkeypatch, capsys, row)
    assert ids(result) == ["sync.nfs_mount"] and "access denied" in result["msg"]


@pytest.mark.parametrize(("state", "id"), [("dead", "sync.nfs_dead"), ("stale", "sync.nfs_stale"), ("broken", "sync.nfs_dead")])
def test_the_look_tells_what_is_wrong_and_where(node, monkeypatch, capsys, state, id):
    node.mounts, node.state = [node.mount()], state
    result = call(monkeypatch, capsys, nfs_mount_info, Commands(), root=str(node.root), node="spark-2", directories=[DIRECTORY])
    assert [item["id"] for item in result["problems"]] == [id] and HEAD in result["message"] and not result["changed"]


def test_the_stale_mount_of_an_earlier_tree_stops_no_group(node, monkeypatch, capsys):
    """What sync_unreachable reads, by which share.yml stops a group, and status and stop fail."""
    node.mounts, node.state = [node.mount()], "stale"
    more = {"root": str(node.root), "node": "spark-2", "directories": ["acme--tiny/d"]}
    result = call(monkeypatch, capsys, nfs_mount_info, Commands(), **more)
    assert result["message"] == "" and [mount["state"] for mount in result["mounts"]] == ["stale"]
    node.users = [_mounts.User(7, "python3", "0123456789ab")]
    assert "sync.nfs_stale" in call(monkeypatch, capsys, nfs_mount_info, Commands(), **more)["message"]
