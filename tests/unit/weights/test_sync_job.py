# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The sync job as a process, with the real gate behind a stand-in for ssh."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils import _node_copy, _sync_job, _unit, _weights_state
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest
from hypothesis import given
from hypothesis import strategies as st
from weights_lab import COMMIT, ROOT, write_model

HERE = pathlib.Path(__file__).parent
DIRECTORY = f"acme--tiny/{COMMIT}"
SIZES = [200_000, 300_000, 3_000_000, 1_000_000]
SHARD = "model-00003-of-00004.safetensors"
PEER = _node_copy.Peer("head", "198.51.100.11", ("198.51.100.11",), "alice", "/w", "/k", "/h")


class Group:
    """Folders of several nodes on this machine, and their sync jobs. The head's tree is complete."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.code = _unit.install_code(_unit.loaded_code(), str(root / "lib"))
        self.bin = root / "bin"
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_ssh.py"} "$@"\n')
        (self.bin / "ssh").chmod(0o755)
        self.log, self.fault = root / "ssh.log", root / "fault"
        write_model(self.tree("head"), SIZES)
        self.publish("head")

    def tree(self, node: str) -> pathlib.Path:
        return self.root / node / "weights" / DIRECTORY

    def publish(self, node: str) -> Manifest:
        tree = self.tree(node)
        files = [File(path.name, path.stat().st_size) for path in sorted(tree.iterdir())]
        hashes = manifests.hash_files(str(tree), files)
        self.manifest = Manifest("acme/tiny", COMMIT, tuple(File(file.path, file.size, hashes[file.path]) for file in files))
        manifests.save(str(tree), self.manifest)
        return self.manifest

    def source(self, node: str, rails: tuple[str, ...] = ("127.0.0.1",)) -> dict:
        return {"node": node, "address": "127.0.0.1", "rails": list(rails), "user": "alice", "root": str(self.root / node / "weights")}

    def request(self, node: str = "worker", sources: tuple[str, ...] = ("head",), rails: tuple[str, ...] = ("127.0.0.1",), **options: object) -> dict:
        folder = self.root / node / "state"
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "artefacts": [{"name": "model", "directory": DIRECTORY, "manifest": self.manifest.as_dict()}], "weights_root": str(self.root / node / "weights"),
            "state_dir": str(folder), "node": node, "sources": [self.source(name, rails) for name in sources], "key": "/dev/null", "known_hosts": "/dev/null",
            "method": "rsync", "policy": "auto", "verify": False, "transport": "ssh", "streams": 3, "stall_seconds": 5, "space_margin": 0,
            "reserve": [], "run_id": "test",
            "result": str(folder / "result.json"), "progress": str(folder / "progress.json"), **options,
        }  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE_SSH_FAULT": str(self.fault), "FAKE_SSH_LOG": str(self.log),
            "FAKE_SSH_GATE": str(ROOT / "roles/bootstrap/files/source_gate.py"), "FAKE_SSH_ROOTS": str(self.root),
        }  # fmt: skip

    def start(self, node: str = "worker", **options: object) -> subprocess.Popen:
        content, path = self.request(node, **options), self.root / node / "state/request.json"
        path.write_text(json.dumps(content))
        pathlib.Path(content["result"]).unlink(missing_ok=True)
        argv = _unit.python_argv(self.code, _sync_job.__name__.rpartition(".")[2], str(path))
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment())

    def finish(self, process: subprocess.Popen, node: str = "worker") -> dict:
        output = process.communicate(timeout=90)[0].decode()
        result = _unit.read_json(str(self.root / node / "state" / "result.json"))
        assert result is not None, output
        return {**result, "output": output}

    def run(self, node: str = "worker", **options: object) -> dict:
        return self.finish(self.start(node, **options), node)

    def refused(self, **options: object) -> dict:
        result = self.run(**options)
        assert not result["ok"] and len(result["refusals"]) == 1, result
        return result["refusals"][0]

    def same(self, node: str = "worker") -> bool:
        names = sorted(path.name for path in self.tree("head").iterdir())
        tree = self.tree(node)
        real = all(path.is_file() and not path.is_symlink() for path in tree.iterdir())
        return (
            real
            and sorted(os.listdir(tree)) == names
            and all((tree / name).read_bytes() == (self.tree("head") / name).read_bytes() for name in names)
            and manifests.load(str(tree)) == self.manifest
        )


@pytest.fixture
def group(tmp_path):
    return Group(tmp_path)


@pytest.fixture(params=["ssh", "fabric"])
def transport(request):
    if request.param == "ssh" and not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    return request.param


def test_a_first_copy(group, transport):
    result = group.run(transport=transport)
    assert result["ok"] and result["changed"] and group.same()
    assert result["artefacts"]["model"]["bytes"] == group.manifest.size
    assert not (group.root / "worker/weights/.sparkops-incoming" / DIRECTORY).exists()


def test_a_second_copy_asks_nobody(group, transport):
    group.run(transport=transport)
    group.log.unlink()
    result = group.run(transport=transport)
    assert result["ok"] and not result["changed"] and not group.log.exists()


def test_the_line_is_strict_and_never_asks(group, transport):
    group.run(transport=transport)
    for line in group.log.read_text().splitlines():
        for option in (
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "ConnectTimeout=10",
            "IdentitiesOnly=yes",
            "UserKnownHostsFile=/dev/null",
            "Ciphers=aes128-gcm@openssh.com",
            "-F /dev/null",
            "-l alice",
        ):
            assert option in line


def damage(path: pathlib.Path) -> None:
    """Flip a byte; size and times stay."""
    status = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(150_000)
        byte = stream.read(1)
        stream.seek(150_000)
        stream.write(bytes([byte[0] ^ 0x55]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("always", [False, True])
def test_a_flipped_byte_is_found_by_verify_and_only_that_file_is_sent_again(group, transport, always):
    """Also where the inventory asks for a verification in every run."""
    group.run(transport=transport)
    damage(group.tree("worker") / SHARD)
    assert not group.run(transport=transport)["changed"]
    refusal = group.refused(transport=transport, verify=True)
    assert refusal["id"] == "sync.damaged" and SHARD in refusal["thing"]
    result = group.run(transport=transport, verify=always)
    assert result["artefacts"]["model"]["files"] == 1 and group.same()
    assert not group.run(transport=transport, verify=True)["changed"]


@pytest.mark.parametrize("verify", [False, True])
def test_force_compares_by_hash(group, transport, verify):
    group.run(transport=transport)
    damage(group.tree("worker") / SHARD)
    result = group.run(transport=transport, policy="force", verify=verify)
    assert result["artefacts"]["model"]["files"] == 1 and group.same()


def test_verify_only_copies_nothing(group, transport):
    refusal = group.refused(transport=transport, policy="verify_only")
    assert refusal["id"] == "sync.incomplete" and "5 files" not in refusal["found"] and not group.log.exists()


@pytest.mark.parametrize("state", ["dangling links", "right files without a manifest", "newer short file"])
def test_what_earlier_runs_left_is_mended(group, transport, state):
    tree = group.tree("worker")
    shutil.copytree(group.tree("head"), tree)
    if state == "dangling links":
        (tree / SHARD).unlink()
        (tree / SHARD).symlink_to("../../blobs/gone")
    if state == "newer short file":
        os.truncate(tree / SHARD, 1000)
        os.utime(tree / SHARD, (2**31, 2**31))
    result = group.run(transport=transport)
    assert result["ok"] and group.same()
    assert result["artefacts"]["model"]["files"] == (0 if state == "right files without a manifest" else 1)


def test_one_changed_side_file_is_one_file(group, transport):
    group.run(transport=transport)
    (group.tree("head") / "config.json").write_text('{"model_type": "newer"}\n')
    group.publish("head")
    result = group.run(transport=transport)
    assert result["artefacts"]["model"]["files"] == 1 and group.same()


@pytest.mark.parametrize(
    ("fault", "identifier", "next_step"),
    [("denied", "sync.key", "bootstrap_node_keys"), ("host-key", "sync.host_key", "bootstrap_node_keys")],
)
def test_a_peer_that_does_not_let_us_in(group, transport, fault, identifier, next_step):
    group.fault.write_text(fault)
    began = time.monotonic()
    refusal = group.refused(transport=transport)
    assert refusal["id"] == identifier and "alice@127.0.0.1" in refusal["thing"] and next_step in refusal["next_step"]
    assert time.monotonic() - began < 15


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_cut_line_is_taken_up_again(group):
    group.fault.write_text("2 cut 700000")
    result = group.run(streams=1)
    assert result["ok"] and group.same()


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_line_that_stays_cut_is_given_up_and_leaves_no_short_file(group):
    group.fault.write_text("cut 1000")
    refusal = group.refused(streams=1)
    assert refusal["id"] == "sync.link" and not short_files(group)
    group.fault.unlink()
    assert group.run()["ok"] and group.same()


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_stall_is_cut_off(group):
    group.fault.write_text("1 stall 700000")
    result = group.run(streams=1, stall_seconds=2)
    assert result["ok"] and group.same()


def test_a_peer_that_opens_no_fabric_connection_is_given_up(group):
    group.fault.write_text("stall 0")
    refusal = group.refused(transport="fabric", stall_seconds=1)
    assert refusal["id"] == "sync.stalled" and not short_files(group)


def short_files(group: Group) -> list[str]:
    """Files under their final names that are not whole."""
    sizes = {file.path: file.size for file in group.manifest.files}
    tree = group.tree("worker")
    return [path.name for path in (tree.iterdir() if tree.exists() else []) if path.stat().st_size != sizes[path.name]]


def test_a_killed_receiver_leaves_no_short_file_and_goes_on(group, transport):
    write_model(group.tree("head"), [40_000_000] * 4)
    group.publish("head")
    process = group.start(transport=transport, streams=2)
    staging = group.root / "worker/weights/.sparkops-incoming" / DIRECTORY
    while manifests.bytes_below(str(staging)) < 10_000_000 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not short_files(group) and manifests.load(str(group.tree("worker"))) is None
    time.sleep(0.5)  # streams of the killed job notice its end by themselves; in a unit systemd ends them
    assert group.run(transport=transport)["ok"] and group.same()


def test_what_a_cut_line_left_is_counted_once(group, monkeypatch):
    """Else a copy that goes on shows more than all there is, and an end in the past."""
    write_model(group.tree("head"), [20_000_000] * 2)
    group.publish("head")
    for name, value in group.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_sync_job, "LINK_PAUSE", 0.0)
    real, cuts, shown = _node_copy._write_all, [1, 2], []

    def write_all(target, view):
        if cuts and os.fstat(target.fileno()).st_size > 15_000_000:
            cuts.pop()
            raise ConnectionResetError
        time.sleep(0.01)
        real(target, view)

    class Shown(_unit.Progress):
        def begin(self, *words, **more):
            shown.append((self.phase, self.done, self.total))
            super().begin(*words, **more)

    monkeypatch.setattr(_node_copy, "_write_all", write_all)
    request = group.request(transport="fabric", streams=1)
    assert _sync_job.SyncJob(request, Shown(request["progress"])).run()["changed"] and not cuts and group.same()
    ((done, total),) = [(done, total) for phase, done, total in shown if phase == "copy"]
    assert total / 2 < done <= total


def test_a_cancel_waits_for_no_hash(group, monkeypatch):
    """systemd kills after 20 s what has not ended by then, and a shard of 50 GB takes longer: no result would say that it was cancelled."""
    ended = threading.Event()

    def transport(_peer, source, files, _streams, sink, _control):
        shutil.copy(os.path.join(source, files[0].path), sink.staged(files[0].path))
        sink.arrived(files[0], None)
        raise _unit.Cancelled

    monkeypatch.setattr(_node_copy, "rsync_copy", transport)
    monkeypatch.setattr(manifests, "sha256_of", lambda *_words, **_more: str(ended.wait(10)))
    request = group.request()
    began = time.monotonic()
    with pytest.raises(_unit.Cancelled):
        _sync_job.SyncJob(request, _unit.Progress(request["progress"])).run()
    ended.set()
    assert time.monotonic() - began < 5


def test_a_file_has_its_name_when_every_byte_is_on_the_disk(group, monkeypatch):
    """A loss of power between the two would leave a short file under a final name, and a manifest that vouches for it."""
    on_disk, tree, final = set(), group.tree("worker"), []

    def transport(_peer, source, files, _streams, sink, _control):
        for file in files:
            shutil.copy(os.path.join(source, file.path), sink.staged(file.path))
            sink.arrived(file, file.sha256)

    def evict(paths):
        assert manifests.load(str(tree)) is None
        on_disk.update(paths)

    def replace(source, target, _replace=os.replace):
        if str(target).startswith(f"{tree}/"):
            assert source in on_disk
            final.append(target)
        _replace(source, target)

    monkeypatch.setattr(_node_copy, "rsync_copy", transport)
    monkeypatch.setattr(_sync_job, "evict", evict)
    monkeypatch.setattr(os, "replace", replace)
    state = group.root / "worker/state"
    state.mkdir(parents=True)
    request = {
        "artefacts": [{"name": "model", "directory": DIRECTORY, "manifest": group.manifest.as_dict()}], "weights_root": str(group.root / "worker/weights"),
        "state_dir": str(state), "node": "worker", "sources": [group.source("head")], "key": "", "known_hosts": "", "method": "rsync", "policy": "auto",
        "verify": False, "transport": "ssh", "streams": 1, "stall_seconds": 5, "space_margin": 0, "reserve": [],
    }  # fmt: skip
    assert _sync_job.SyncJob(request, _unit.Progress(str(state / "progress.json"))).run()["changed"]
    assert sorted(final) == sorted(str(tree / file.path) for file in group.manifest.files) and group.same()


def test_a_damaged_source_is_named(group, transport):
    damage(group.tree("head") / SHARD)
    refusal = group.refused(transport=transport)
    assert refusal["id"] == "sync.hash" and SHARD in refusal["found"] and "verify" in refusal["next_step"]
    assert not (group.tree("worker") / SHARD).exists()


def test_a_source_that_lost_a_file_is_named(group, transport):
    """Neither the line nor the gate is to blame, and no second try mends it."""
    (group.tree("head") / SHARD).unlink()
    refusal = group.refused(transport=transport)
    assert refusal["id"] == "sync.source" and SHARD in refusal["found"] and "weights play" in refusal["next_step"]


@pytest.mark.parametrize("way", [SHARD, ""])
def test_what_is_in_a_files_way_is_named_and_left_alone(group, transport, way):
    place = group.tree("worker") / way
    if way:
        place.mkdir(parents=True)
    else:
        place.parent.mkdir(parents=True)
        place.write_text("notes")
    refusal = group.refused(transport=transport)
    assert refusal["id"] == "sync.not_writable" and str(place) in refusal["found"] and "remove it" in refusal["next_step"] and place.exists()


def test_no_room_is_said_before_the_first_byte(group, transport):
    refusal = group.refused(transport=transport, space_margin=2**60, reserve=[{"path": str(group.root), "size": 80, "what": "image archive"}])
    assert refusal["id"] == "sync.space" and "image archive" in refusal["wanted"] and not group.log.exists()


def test_only_one_writer(group, transport):
    with _weights_state.tree_lock(str(group.tree("worker"))):
        assert group.refused(transport=transport)["id"] == "sync.busy"


def test_all_rails_are_used(group, transport):
    assert group.run(transport=transport, rails=("127.0.0.1", "127.0.0.2"))["ok"] and group.same()
    if transport == "ssh":
        rails = {line.split(" rsync ")[0].split()[-1] for line in group.log.read_text().splitlines()}
        assert rails == {"127.0.0.1", "127.0.0.2"} and "HostKeyAlias=127.0.0.1" in group.log.read_text()


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
@pytest.mark.parametrize("dead", ["127.0.0.2", "127.0.0.1"])
def test_a_rail_without_an_answer_is_left_to_the_others(group, dead):
    group.fault.write_text(f"dead {dead}")
    result = group.run(rails=("127.0.0.1", "127.0.0.2"))
    other = "127.0.0.1" if dead == "127.0.0.2" else "127.0.0.2"
    assert result["ok"] and group.same(), result
    assert f"head: no answer on rail {dead}; the copy goes on over {other}" in "\n".join(result["notices"])


def test_a_chain_reads_from_the_worker_before(group, transport):
    processes = {
        node: group.start(node, sources=sources, transport=transport) for node, sources in (("w1", ("head",)), ("w2", ("w1", "head")), ("w3", ("w2", "head")))
    }
    assert all(group.finish(process, node)["ok"] for node, process in processes.items())
    assert all(group.same(node) for node in processes)


def test_a_chain_with_a_broken_link_ends_at_the_head(group, transport):
    result = group.run("w2", sources=("w1", "head"), transport=transport)
    assert result["ok"] and group.same("w2")


def test_a_damaged_file_of_the_worker_before_is_named_and_taken_from_the_head(group, transport):
    """It has its name and its size there, so it would be read again and again."""
    assert group.run("w1", transport=transport)["ok"]
    damage(group.tree("w1") / SHARD)
    result = group.run("w2", sources=("w1", "head"), transport=transport)
    assert result["ok"] and group.same("w2")
    (notice,) = [notice for notice in result["notices"] if SHARD in notice]
    assert notice.startswith("w1: ") and "sha256" in notice


@pytest.mark.parametrize(
    ("streams", "cores", "rails", "count"),
    [(4, 20, 1, 4), (4, 2, 1, 2), (4, 1, 1, 1), (1, 20, 1, 1), (1, 2, 2, 2), (4, 2, 3, 3), (4, None, 1, 4)],
)
def test_over_ssh_no_more_streams_than_cores_and_one_for_each_rail(monkeypatch, streams, cores, rails, count):
    seen = []
    monkeypatch.setattr(_node_copy.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(_node_copy, "_rsync_stream", lambda peer, rail, tree, files, sink, control: seen.append((rail, len(files))))
    addresses = tuple(f"198.51.100.{number}" for number in range(rails))
    peer = _node_copy.Peer("head", addresses[0], addresses, "alice", "/w", "/dev/null", "/dev/null")
    _node_copy.rsync_copy(peer, "/w/t", [File(f"{number}", 10, "0") for number in range(12)], streams, None, _node_copy.Streams())
    assert len(seen) == count and sum(files for _rail, files in seen) == 12 and {rail for rail, _files in seen} == set(addresses)


@pytest.mark.parametrize(("step", "taken"), [(100_000, {"w1"}), (0, {"w1", "head"})])
def test_a_large_file_that_comes_slowly_is_waited_for_and_one_that_does_not_move_is_not(group, monkeypatch, step, taken):
    """Else every worker of a chain takes the shards of a large model from the head."""
    shutil.copytree(group.tree("head"), group.tree("w1"))
    late, incoming = group.tree("w1") / SHARD, group.root / "w1/weights/.sparkops-incoming" / DIRECTORY
    incoming.mkdir(parents=True)
    late.rename(incoming / SHARD)
    size, there = 400_000, (incoming / SHARD).stat().st_size
    read = set()

    def complete_files(_peer, folder):
        nonlocal size
        size = min(there, size + step)
        if size == there and (incoming / SHARD).exists():
            (incoming / SHARD).rename(late)
        found = {path.name: path.stat().st_size for path in pathlib.Path(folder).iterdir()}
        return {**found, SHARD: size} if folder == str(incoming) and SHARD in found else found

    def transport(peer, source, files, _streams, sink, _control):
        for file in files:
            read.add(peer.node)
            shutil.copy(os.path.join(source, file.path), sink.staged(file.path))
            sink.arrived(file, file.sha256)

    monkeypatch.setattr(_node_copy, "complete_files", complete_files)
    monkeypatch.setattr(_node_copy, "rsync_copy", transport)
    monkeypatch.setattr(_sync_job, "PEER_WAIT", 0.1)
    monkeypatch.setattr(_sync_job, "PEER_PATIENCE", 0.3)
    state = group.root / "w2/state"
    state.mkdir(parents=True)
    request = {
        "artefacts": [{"name": "model", "directory": DIRECTORY, "manifest": group.manifest.as_dict()}], "weights_root": str(group.root / "w2/weights"),
        "state_dir": str(state), "node": "w2", "sources": [group.source("w1"), group.source("head")], "key": "", "known_hosts": "", "method": "rsync",
        "policy": "auto", "verify": False, "transport": "ssh", "streams": 1, "stall_seconds": 0.5, "space_margin": 0, "reserve": [],
    }  # fmt: skip
    assert _sync_job.SyncJob(request, _unit.Progress(str(state / "progress.json"))).run()["changed"]
    assert read == taken and group.same("w2")


@given(st.lists(st.integers(0, 10**11), max_size=40), st.integers(1, 8))
def test_streams_are_balanced(sizes, streams):
    files = [File(str(number), size) for number, size in enumerate(sizes)]
    parts = _node_copy.balance(files, streams)
    assert sorted(file.path for part in parts for file in part) == sorted(file.path for file in files)
    loads = [sum(file.size for file in part) for part in parts]
    if loads:
        assert len(parts) <= streams and max(loads) <= sum(sizes) / streams + max(sizes)


@pytest.mark.parametrize(
    ("stderr", "code", "kind"),
    [
        ("Host key verification failed.", 255, "host_key"),
        ("bob@x: Permission denied (publickey).", 255, "key"),
        # rsync's own end comes before that of its ssh.
        ("bob@x: Permission denied (publickey).", 12, "key"),
        ("sparkops: refused: command id", 126, "gate"),
        ("sh: 1: rsync: command not found", 127, "rsync"),
        ("rsync: write failed: No space left on device (28)", 11, "disk_full"),
        ("ssh: connect to host x port 22: Connection timed out", 255, "link"),
        ("", 255, "link"),
        # Words of rsync for files.
        ('rsync: [sender] send_files failed to open "/w/a": Permission denied (13)', 23, "source"),
        ('rsync: [sender] link_stat "/w/a" failed: No such file or directory (2)', 23, "source"),
        ('rsync: [receiver] open "/v/a" failed: Permission denied (13)', 23, "not_writable"),
    ],
)
def test_failures_are_told_apart(stderr, code, kind):
    error = PEER.explain(stderr, code)
    assert error.kind == kind and error.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device"), "disk_full"),
        (PermissionError(13, "Permission denied", "/w/a"), "not_writable"),
        # What a local filter says to a connection.
        (PermissionError(1, "Operation not permitted"), "link"),
        (ConnectionRefusedError(111, "Connection refused"), "link"),
    ],
)
def test_a_line_and_a_disk_are_told_apart(monkeypatch, error, kind):
    def connect(*_words, **_more):
        raise error

    monkeypatch.setattr(_node_copy.socket, "create_connection", connect)
    with pytest.raises(_node_copy.CopyError) as failure:
        _node_copy._fabric_stream(PEER, ("198.51.100.11", 1), b"", "/w", None, None, None)
    assert failure.value.kind == kind


# --- files behind a mount --------------------------------------------------------------------------------------


def replica_of_the_head(group) -> pathlib.Path:
    """Where a received dataset would be mounted."""
    place = group.root / "worker/weights" / manifests.REPLICA
    shutil.copytree(group.root / "head/weights", place)
    return place


def mounted_tree(group) -> pathlib.Path:
    """Stands for the mounted folder of the head: the same files at the tree's own place."""
    shutil.copytree(group.tree("head"), group.tree("worker"))
    return group.tree("worker")


def test_a_mounted_folder_is_proven_and_nothing_is_copied(group):
    mounted_tree(group)
    result = group.run(method="nfs")
    assert result["ok"] and result["changed"] and group.same() and not group.log.exists()
    assert not group.run(method="nfs")["changed"]


def test_a_replica_is_linked_and_proven(group):
    replica_of_the_head(group)
    result = group.run(method="zfs")
    assert result["ok"] and group.same() and group.tree("worker").is_symlink() and not group.log.exists()
    assert not os.path.isabs(os.readlink(group.tree("worker")))
    assert not group.run(method="zfs")["changed"]


def test_a_mount_that_shows_less_than_the_manifest_is_no_success(group):
    (mounted_tree(group) / SHARD).unlink()
    refusal = group.refused(method="nfs")
    assert refusal["id"] == "sync.incomplete" and SHARD in refusal["found"]
    assert manifests.load(str(group.tree("worker"))) is None


def test_a_mount_with_another_byte_is_found_and_the_heads_repair_is_seen(group):
    tree = mounted_tree(group)
    group.run(method="nfs")
    good = (tree / SHARD).read_bytes()
    damage(tree / SHARD)
    refusal = group.refused(method="nfs", verify=True)
    assert refusal["id"] == "sync.damaged" and "weights play" in refusal["next_step"]
    # Still damaged: the next run reads that file again, although its manifest is there.
    assert group.refused(method="nfs")["id"] == "sync.incomplete"
    (tree / SHARD).write_bytes(good)
    assert group.run(method="nfs")["ok"]
    # Proven, so nothing holds the rank back, and the next run reads nothing.
    assert not _weights_state.damaged(str(tree))


def test_a_copy_in_the_links_place_is_never_removed(group):
    group.run()
    replica_of_the_head(group)
    assert group.refused(method="zfs")["id"] == "sync.zfs_local_copy" and group.same()


@pytest.mark.parametrize("more", [{"verify": True}, {"policy": "force"}])
def test_what_is_read_through_a_mount_is_told_where_nothing_changes(group, more):
    """The head has read it, too."""
    mounted_tree(group)
    group.run(method="nfs")
    assert group.run(method="nfs")["artefacts"] == {}
    result = group.run(method="nfs", **more)
    assert not result["changed"] and result["artefacts"]["model"]["transport"] == "nfs"


def test_from_a_replica_back_to_copies(group):
    replica_of_the_head(group)
    group.run(method="zfs")
    # Not before there is room: a refusal leaves what is there.
    assert group.refused(space_margin=2**60)["id"] == "sync.space"
    assert group.refused(policy="verify_only")["id"] == "sync.incomplete"
    assert group.same() and group.tree("worker").is_symlink()
    result = group.run()
    assert result["ok"] and group.same() and not group.tree("worker").is_symlink()


def test_room_for_copies_is_asked_of_their_own_filesystem_and_not_of_the_replicas(group, monkeypatch):
    """The pool is full of the replica, and its link is still where the copy will be."""
    replica_of_the_head(group)
    group.run(method="zfs")
    real, asked = manifests.space, []
    monkeypatch.setattr(manifests, "space", lambda path: asked.append(os.path.realpath(path)) or real(path))
    request = group.request()
    monkeypatch.setattr(_sync_job.SyncJob, "bring", lambda *_words: None)
    _sync_job.SyncJob(request, _unit.Progress(request["progress"])).run()
    assert asked and not [path for path in asked if manifests.REPLICA in path]


@pytest.mark.parametrize("slow", ["manifests.check_sizes", "_safetensors.check_file", "evict"])
def test_a_slow_server_that_answers_for_each_file_is_not_dead(group, slow):
    """Every look takes less than the time, and all of them take more."""
    mounted_tree(group)
    request = group.root / "worker/state/request.json"
    group.start(method="nfs", stall_seconds=2).communicate(timeout=60)
    os.unlink(manifests.manifest_path(str(group.tree("worker"))))
    code = (
        f"import sys, time; sys.path.insert(0, {group.code!r}); from {_unit.PACKAGE} import _sync_job; from {_unit.PACKAGE} import _manifest as manifests\n"
        "real = _sync_job.SLOW\n"
        "def slow(*words):\n    files = next((word for word in words if isinstance(word, (list, tuple))), [0])\n"
        "    time.sleep(len(files))\n    return real(*words)\n"
        "_sync_job.SLOW = slow; sys.exit(_sync_job.main(sys.argv[1:]))"
    ).replace("SLOW", slow)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(request)], timeout=60, check=False)
    assert done.returncode == 0, _unit.read_json(str(group.root / "worker/state/result.json"))


def test_a_read_that_never_returns_ends_with_the_servers_address(group):
    """What a hard mount does when its server is gone."""
    mounted_tree(group)
    group.start(method="nfs", stall_seconds=1).communicate(timeout=60)
    os.unlink(manifests.manifest_path(str(group.tree("worker"))))
    code = (
        f"import sys, time; sys.path.insert(0, {group.code!r}); from {_unit.PACKAGE} import _sync_job; "
        "_sync_job.manifests.hash_files = lambda *_a, **_k: time.sleep(600); sys.exit(_sync_job.main(sys.argv[1:]))"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(group.root / "worker/state/request.json")], timeout=60, check=False)
    assert done.returncode == 1 and time.monotonic() - began < 20
    refusal = _unit.read_json(str(group.root / "worker/state/result.json"))["refusals"][0]
    assert refusal["id"] == "sync.nfs_dead" and "127.0.0.1" in refusal["thing"]


# --- room, counted honestly ------------------------------------------------------------------------------------

MB = 10**6


@pytest.mark.parametrize(
    ("there", "reserve", "fits"),
    [
        # 200 MB of room, 120 MB to copy: empty, complete, half there, an archive of 80 MB beside it, the same where the copy is there.
        ((), 0, True),
        ((0, 1), 80, True),
        ((0,), 80, True),
        ((), 80, False),
        ((), 60, True),
        ((0, 1), 200, False),
    ],
)
def test_room_is_asked_for_what_lacks_and_for_what_is_staged_beside_it(group, monkeypatch, there, reserve, fits):
    names = [f"shard-{number}" for number in range(2)]
    manifest = Manifest("acme/tiny", COMMIT, tuple(File(name, 60 * MB, "0" * 64) for name in names))
    request = {
        "node": "worker", "weights_root": str(group.root / "worker/weights"), "state_dir": str(group.root), "sources": [group.source("head")],
        "key": "", "known_hosts": "",
        "method": "rsync", "policy": "auto", "space_margin": 20 * MB,
        "reserve": [{"path": str(group.root), "size": reserve * MB, "what": "image archive"}] if reserve else [],
        "artefacts": [{"name": "model", "directory": DIRECTORY, "manifest": manifest.as_dict()}],
    }  # fmt: skip
    job = _sync_job.SyncJob(request, _unit.Progress(str(group.root / "progress.json")))
    tree = group.tree("worker")
    tree.mkdir(parents=True)
    for number in there:
        with open(tree / names[number], "wb") as stream:
            stream.truncate(60 * MB)
    manifests.save(str(tree), manifest)
    # Outside of the manifest, and no part of the sum.
    with open(tree / "unwanted", "wb") as stream:
        stream.truncate(10**9)
    monkeypatch.setattr(manifests, "space", lambda path: manifests.Space(path, 1, 200 * MB))
    work = _sync_job.Copy(job, request["artefacts"][0])
    job.plan(work)
    assert sum(file.size for file in work.todo) == (2 - len(there)) * 60 * MB
    if fits:
        job.check_space([work] if work.todo else [])
        return
    with pytest.raises(_unit.Refused) as refused:
        job.check_space([work])
    text = str(refused.value)
    assert refused.value.refusals[0].id == "sync.space" and "190.7 MiB free" in text and "image archive" in text and "weights_root" in text
