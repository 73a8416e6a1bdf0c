# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Packing small checkpoints for real: bytes, resume, damage, space, page cache."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import engram_source as oracle
import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _engram as engram
from ansible_collections.sparkops.inference.plugins.module_utils import _engram_files as files
from ansible_collections.sparkops.inference.plugins.module_utils import _engram_io as io
from ansible_collections.sparkops.inference.plugins.module_utils import _engram_job as job
from ansible_collections.sparkops.inference.plugins.module_utils import _page_cache
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused
from hypothesis import given, settings
from hypothesis import strategies as st

VECTORS = json.loads((pathlib.Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))["synthetic"]
SMALL = {"segment_rows": 1024, "chunk_rows": 512, "workers": 3}


def request(source, directory, rank=0, ranks=2, **more):
    return {
        "source": str(source), "directory": str(directory), "rank": rank, "tensor_parallel": ranks, "layers": [], "repository": "acme/big",
        "revision": "0" * 40, "state": "present", "rate_limit": 0, "memory_floor": 0, "priority": "normal", "tuning": SMALL, **more,
    }  # fmt: skip


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def look(source, directory, rank=0, ranks=2):
    return files.look(str(source), str(directory), rank, ranks)


# The published vectors


def test_generator_makes_the_published_inputs(source):
    assert {path.name: [path.stat().st_size, sha256(path)] for path in source.iterdir()} == VECTORS["inputs"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_vectors_byte_for_byte(source, tmp_path, ranks):
    for rank in range(ranks):
        job.work(request(source, tmp_path / "out", rank, ranks))
    found = {path.name: (path.stat().st_size, sha256(path)) for path in (tmp_path / "out").glob("*.bin")}
    assert found == {name: (size, digest) for name, _first, _end, _low, _high, size, digest in VECTORS["tp"][str(ranks)]}
    assert all(look(source, tmp_path / "out", rank, ranks).report()["valid"] for rank in range(ranks))


def test_tail_of_the_last_vector(source, tmp_path):
    job.work(request(source, tmp_path / "out", 1))
    tail = (tmp_path / "out" / "engram-l1-r1of2.bin").read_bytes()[-264:]
    assert hashlib.sha256(tail).hexdigest() == "1e68232892877e925b337f7d179743fc7a0213666c5850413817cbcaab0608af"


# The slow packer agrees

ORDERS = st.permutations(["q_weight", "weight", "scale"])


@st.composite
def checkpoints(draw):
    layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=2, unique=True))
    heads, longest_ngram = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return {
        "layers": layers,
        "vocabulary": draw(st.integers(2, 220)),
        "heads": heads,
        "longest_ngram": longest_ngram,
        "orders": {layer: draw(ORDERS) for layer in layers},
        "nested": draw(st.booleans()),
        "extra_padding": draw(st.integers(0, 9)),
    }


@settings(max_examples=40)
@given(
    checkpoint=checkpoints(),
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 4),
    segment=st.integers(1, 4),
    workers=st.integers(1, 4),
    way=st.sampled_from(["system call", "words", "page cache"]),
)
def test_agrees_with_the_oracle(checkpoint, ranks, chunk, segment, workers, way):
    buckets = oracle.oracle_buckets(checkpoint["layers"], checkpoint["vocabulary"], checkpoint["heads"], checkpoint["longest_ngram"])
    columns = checkpoint["heads"] * (checkpoint["longest_ngram"] - 1)
    tuning = {"segment_rows": 512 * chunk * segment, "chunk_rows": 512 * chunk, "workers": workers}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        use(way, patch)
        folder = pathlib.Path(name)
        oracle.write_checkpoint(folder / "source", rows=[sum(buckets[layer]) for layer in checkpoint["layers"]], **checkpoint)
        for rank in range(ranks):
            if (ranks - 1) * -(-columns // ranks) >= columns:
                with pytest.raises(Refused, match="without rows"):
                    job.work(request(folder / "source", folder / "out", rank, ranks, tuning=tuning))
                continue
            job.work(request(folder / "source", folder / "out", rank, ranks, tuning=tuning))
            for layer in checkpoint["layers"]:
                tensors = {tensor.rsplit(".", 1)[1]: data for tensor, _dtype, _shape, data in oracle.layer_tensors(layer, sum(buckets[layer]))}
                wanted = oracle.oracle_file(tensors["weight"], tensors["scale"], layer, buckets[layer], rank, ranks)
                assert (folder / "out" / f"engram-l{layer}-r{rank}of{ranks}.bin").read_bytes() == wanted


def use(way, patch):
    """Nodes without the system call, and filesystems without direct access, take other paths to the same bytes."""
    if way == "words":
        patch.setattr(io, "_scatter_call", refuse_call)
    if way == "page cache":
        patch.setattr(os, "O_DIRECT", 0)
        original = io.DirectFile.__init__

        def opened(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self._use_cache()

        patch.setattr(io.DirectFile, "__init__", opened)


def refuse_call():
    raise OSError(errno.EPERM, "not allowed here")


# A finished file counts only if all of it is true


@pytest.fixture(name="packed")
def fixture_packed(source, tmp_path):
    job.work(request(source, tmp_path / "out"))
    return tmp_path / "out"


NAME = "engram-l1-r0of2.bin"


def overwrite(path, offset, data):
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 264), "cut short"),
        (lambda path: os.truncate(path, 100), "cut short"),
        (lambda path: path.open("ab").write(b"x"), "439697 bytes, wanted 439696"),
        (lambda path: overwrite(path, 0, b"DSV41EN1"), "magic 'DSV41EN1', the spelling of the comments"),
        (lambda path: overwrite(path, 24, (1698).to_bytes(8, "little")), "the even split of older packers"),
        (lambda path: overwrite(path, 8, b"\x0e"), "layer 14, wanted 1"),
        (lambda path: path.unlink(), "not packed yet"),
    ],
    ids=["truncated", "stub", "longer", "magic", "even split", "layer", "missing"],
)
def test_broken_file_is_named_and_packed_again(source, packed, break_it, said):
    good = sha256(packed / NAME)
    break_it(packed / NAME)
    report = look(source, packed).report()
    assert not report["valid"]
    assert said in report["layers"]["1"]["reason"]
    assert report["layers"]["14"]["valid"]
    assert job.work(request(source, packed))["packed"] == [NAME]
    assert sha256(packed / NAME) == good


def test_second_run_packs_nothing(source, packed):
    before = {path: path.stat().st_mtime_ns for path in packed.glob("engram-*")}
    assert job.work(request(source, packed))["packed"] == []
    assert {path: path.stat().st_mtime_ns for path in packed.glob("engram-*")} == before


def test_changed_source_makes_the_file_stale(source, packed):
    shard = source / oracle.SHARDS[1]
    overwrite(shard, shard.stat().st_size - 1, b"\0")
    assert "made from another" in look(source, packed).problems[NAME]
    assert job.work(request(source, packed))["packed"] == [NAME]


def test_manifest_hash_decides_where_both_sides_know_it(source, tmp_path):
    shards = [{"path": name, "size": size, "sha256": digest} for name, (size, digest) in VECTORS["inputs"].items()]
    manifest = {"format": 1, "repository": "acme/big", "revision": "0" * 40, "files": shards, "licence": None}
    pathlib.Path(f"{source}.manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    job.work(request(source, tmp_path / "out"))
    os.utime(source / oracle.SHARDS[1])  # a copy has another time, and the same content
    assert look(source, tmp_path / "out").report()["valid"]
    manifest["files"][1]["sha256"] = "f" * 64
    pathlib.Path(f"{source}.manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert not look(source, tmp_path / "out").report()["valid"]


def test_unfinished_file_does_not_count(source, packed):
    (packed / f"{NAME}.journal").write_text("", encoding="utf-8")
    assert look(source, packed).problems[NAME] == "packing has begun and is not finished"


# Others' files are left alone


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw, "a right header"),
        (lambda raw: raw[:24] + (1698).to_bytes(8, "little") + raw[32:], "the even split of older packers"),
        (lambda raw: b"DSV41EN1" + raw[8:], "the spelling of the comments"),
    ],
    ids=["right", "even split", "magic"],
)
def test_file_of_another_packer_is_refused_and_kept(source, packed, tmp_path, change, said):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    raw = change((packed / NAME).read_bytes())
    (foreign / NAME).write_bytes(raw)
    with pytest.raises(Refused) as caught:
        job.work(request(source, foreign))
    assert [item.id for item in caught.value.refusals] == ["engram.foreign_file"]
    assert said in caught.value.refusals[0].found
    assert [path.name for path in foreign.iterdir()] == [NAME]
    assert (foreign / NAME).read_bytes() == raw


@pytest.mark.parametrize("other", [{"ranks": 3, "rank": 2}, {"revision": "1" * 40}, {"repository": "acme/other"}], ids=str)
def test_directory_of_another_layout_is_refused(source, packed, other):
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    with pytest.raises(Refused) as caught:
        job.work({**request(source, packed, other.pop("rank", 0), other.pop("ranks", 2)), **other})
    assert caught.value.refusals[0].id == "engram.foreign_layout"
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_unreadable_layout_is_foreign(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "layout.json").write_text('{"engine": "page15"}', encoding="utf-8")
    with pytest.raises(Refused, match="another layout"):
        job.work(request(source, tmp_path / "out"))


def test_files_of_another_rank_are_reported_and_kept(source, packed):
    assert job.work(request(source, packed, 1))["packed"]
    assert look(source, packed, 1).report()["others"] == ["engram-l1-r0of2.bin", "engram-l14-r0of2.bin"]


def test_two_packers_do_not_share_a_directory(source, packed):
    with job.only_one(str(packed)), pytest.raises(Refused) as caught:
        job.work(request(source, packed))
    assert caught.value.refusals[0].id == "engram.busy"


# Sources that can't be right


def edit_json(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def split_tables(source):
    edit_json(source / "model.safetensors.index.json", lambda index: index["weight_map"].update({"layers.1.engram.embed.scale": oracle.SHARDS[14]}))


def edit_header(source, change):
    path = source / oracle.SHARDS[1]
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header["layers.1.engram.embed.weight"], header["layers.1.engram.embed.scale"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("break_it", "name", "said"),
    [
        (lambda source: (source / "config.json").unlink(), "source_missing", "config.json"),
        (lambda source: (source / oracle.SHARDS[1]).unlink(), "source_missing", oracle.SHARDS[1]),
        (lambda source: (source / "config.json").write_text("{"), "source_damaged", "not JSON"),
        (lambda source: (source / "model.safetensors.index.json").write_text("[]"), "source_damaged", "no Engram tables"),
        (split_tables, "split_tables", "both in one file"),
        (lambda source: os.truncate(source / oracle.SHARDS[1], 800_000), "source_damaged", "800000 bytes"),
        (lambda source: os.truncate(source / oracle.SHARDS[1], 4), "source_damaged", "ends at byte 4"),
        (lambda source: edit_header(source, lambda weight, scale: weight.update(dtype="I8")), "source_damaged", "I8"),
        (lambda source: edit_header(source, lambda weight, scale: scale.update(shape=[3396, 4])), "source_damaged", "[3396, 4]"),
        (lambda source: edit_header(source, lambda weight, scale: weight.update(shape=[3395, 256])), "source_damaged", "as its shape promises"),
        (lambda source: edit_json(source / "config.json", lambda config: config["text_config"].update(engram_n_heads=5)), "rows_disagree", "3396 in the file"),
        (
            lambda source: edit_json(source / "config.json", lambda config: config["text_config"].update(engram_num_embeddings=[3397, 3754])),
            "rows_disagree",
            "3397 in config.json",
        ),
    ],
    ids=["no config", "no shard", "config", "index", "split", "truncated", "stub", "dtype", "scale shape", "weight shape", "heads", "num_embeddings"],
)
def test_bad_source_is_refused_before_anything_is_made(source, tmp_path, break_it, name, said):
    break_it(source)
    with pytest.raises(Refused) as caught:
        job.work(request(source, tmp_path / "out"))
    assert f"engram.{name}" in [item.id for item in caught.value.refusals]
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_all_bad_layers_are_named_at_once(source):
    for shard in oracle.SHARDS.values():
        (source / shard).unlink()
    with pytest.raises(Refused) as caught:
        files.read_source(str(source))
    assert len(caught.value.refusals) == 2


def test_layers_can_be_chosen(source, tmp_path):
    assert job.work(request(source, tmp_path / "out", layers=[14]))["packed"] == ["engram-l14-r0of2.bin"]
    with pytest.raises(Refused, match=r"\[2\]"):
        job.work(request(source, tmp_path / "out", layers=[2]))


# Killed and gone on


KILLER = textwrap.dedent(
    """
    import json, os, signal, sys
    from ansible_collections.sparkops.inference.plugins.module_utils import _engram_files as files, _engram_job as job

    moment, request = sys.argv[1], json.loads(sys.argv[2])

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def after(owner, name, act, before=False):
        original = getattr(owner, name)
        def wrapped(*args, **kwargs):
            if before and act(*args):
                die()
            result = original(*args, **kwargs)
            if act(*args):
                die()
            return result
        setattr(owner, name, wrapped)

    noted, SEGMENTS = [], 8  # 1650 and 1830 rows in fours of 512
    if moment.isdigit():
        after(files.Journal, "note", lambda *args: noted.append(1) or len(noted) * 100 >= int(moment) * SEGMENTS)
    elif moment == "data":
        after(job.DirectFile, "settle", lambda *args: True)
    elif moment == "before rename":
        after(os, "replace", lambda old, new: new.endswith(".bin"), before=True)
    elif moment == "after rename":
        after(os, "replace", lambda old, new: new.endswith(".bin"))
    elif moment == "before record":
        after(job, "publish", lambda *args: True, before=True)
    elif moment == "after record":
        after(job, "write_json", lambda path, content: path.endswith(".bin.json"))
    job.work(request)
    """
)

ONE_BY_ONE = {"segment_rows": 512, "chunk_rows": 512, "workers": 1}
MOMENTS = ["1", "30", "60", "99", "data", "before rename", "after rename", "before record", "after record"]


def run_and_die(moment, asked):
    result = subprocess.run([sys.executable, "-c", KILLER, moment, json.dumps(asked)], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, check=False)
    assert result.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed(source, packed, tmp_path, moment):
    """The result is the same, and what was noted is not made again."""
    asked = request(source, tmp_path / "killed", tuning=ONE_BY_ONE)
    run_and_die(moment, asked)
    report = look(source, tmp_path / "killed").report()
    assert not report["valid"]
    job.work(asked)
    assert look(source, tmp_path / "killed").report()["valid"]
    for path in packed.glob("*.bin"):
        assert sha256(tmp_path / "killed" / path.name) == sha256(path)
    assert not list((tmp_path / "killed").glob("*.journal*")) + list((tmp_path / "killed").glob("*.partial"))


def test_resume_makes_only_what_is_missing(source, tmp_path, monkeypatch):
    asked = request(source, tmp_path / "out", tuning=ONE_BY_ONE)
    run_and_die("60", asked)
    made = []
    original = job.Packing.pack
    monkeypatch.setattr(job.Packing, "pack", lambda self, number, buffers, gate: made.append(number) or original(self, number, buffers, gate))
    job.work(asked)
    assert len(made) == 8 - 5


def test_journal_of_another_source_is_not_believed(source, tmp_path, packed):
    asked = request(source, tmp_path / "killed", tuning=ONE_BY_ONE)
    run_and_die("60", asked)
    os.utime(source / oracle.SHARDS[1])
    os.utime(source / oracle.SHARDS[14])
    job.work(asked)
    assert sha256(tmp_path / "killed" / NAME) == sha256(packed / NAME)


def test_journal_without_its_partial_file_is_not_believed(source, tmp_path, packed):
    asked = request(source, tmp_path / "killed", tuning=ONE_BY_ONE)
    run_and_die("60", asked)
    for partial in (tmp_path / "killed").glob("*.partial"):
        partial.unlink()
    job.work(asked)
    assert sha256(tmp_path / "killed" / NAME) == sha256(packed / NAME)


def test_torn_journal_is_believed_up_to_the_tear(source, tmp_path, packed):
    asked = request(source, tmp_path / "killed", tuning=ONE_BY_ONE)
    run_and_die("60", asked)
    for journal in (tmp_path / "killed").glob("*.journal"):
        os.truncate(journal, journal.stat().st_size - 20)
    job.work(asked)
    assert sha256(tmp_path / "killed" / NAME) == sha256(packed / NAME)


def test_old_file_stays_until_the_new_one_is_complete(source, packed, tmp_path):
    old = sha256(packed / NAME)
    os.utime(source / oracle.SHARDS[1])
    run_and_die("before rename", request(source, packed))
    assert sha256(packed / NAME) == old
    assert not look(source, packed).report()["valid"]


# Full disks


@pytest.fixture(name="small_disk")
def fixture_small_disk(tmp_path):
    """A filesystem of its own: ext4 in a file, which knows direct access like a real disk."""
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 24 * 2**20)
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=False, capture_output=True).returncode:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def fill(mount, leave):
    with (mount / "filler").open("wb") as stream:
        free = os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize
        stream.write(bytes(max(0, free - leave)))


def test_too_little_space_is_refused_before_anything_is_made(source, small_disk):
    fill(small_disk, 600_000)
    with pytest.raises(Refused) as caught:
        job.work(request(source, small_disk / "out"))
    assert caught.value.refusals[0].id == "engram.space"
    assert not list((small_disk / "out").glob("engram-*"))


def test_disk_that_fills_up_keeps_the_old_file(source, small_disk, monkeypatch):
    job.work(request(source, small_disk / "out"))
    old = sha256(small_disk / "out" / NAME)
    for shard in oracle.SHARDS.values():
        os.utime(source / shard)
    monkeypatch.setattr(files, "SPACE_MARGIN", -(2**30))  # another program takes the space after the check
    fill(small_disk, 300_000)
    with pytest.raises(Refused) as caught:
        job.work(request(source, small_disk / "out"))
    assert caught.value.refusals[0].id == "engram.space"
    assert "No space left" in caught.value.refusals[0].found
    assert sha256(small_disk / "out" / NAME) == old
    assert not list((small_disk / "out").glob("*.partial"))
    (small_disk / "filler").unlink()
    assert job.work(request(source, small_disk / "out"))["packed"]
    assert sha256(small_disk / "out" / NAME) == old


def test_works_without_direct_access(source, packed, tmp_path):
    """tmpfs has no disk to go to directly."""
    mount = tmp_path / "memory"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mount)], check=False, capture_output=True).returncode:
        pytest.skip("needs root")
    try:
        job.work(request(source, mount / "out"))
        assert sha256(mount / "out" / NAME) == sha256(packed / NAME)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_errors_of_the_disk_are_named(source, tmp_path, monkeypatch, number):
    def fail(fd, view, offset):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(Refused) as caught:
        job.work(request(source, tmp_path / "out"))
    assert caught.value.refusals[0].id == "engram.io"
    assert os.strerror(number) in caught.value.refusals[0].found
    assert caught.value.refusals[0].thing.endswith(".partial")


# Verification


def test_verify_finds_a_flipped_byte_and_the_next_run_mends_it(source, packed):
    good = sha256(packed / NAME)
    overwrite(packed / NAME, 4096 + 1030 * 264 + 17, b"\xff\x00")
    assert look(source, packed).report()["valid"]
    assert job.work(request(source, packed, state="verified"))["damaged"] == [NAME]
    assert "found damaged by the last verification in rows [1024,1650)" in look(source, packed).problems[NAME]
    assert job.work(request(source, packed))["packed"] == [NAME]
    assert sha256(packed / NAME) == good
    assert job.work(request(source, packed, state="verified"))["damaged"] == []


def test_verify_uses_the_cut_of_pack_time(source, packed):
    assert job.work(request(source, packed, state="verified", tuning={"segment_rows": 512, "chunk_rows": 512, "workers": 2}))["damaged"] == []


def test_verify_does_not_believe_an_edited_record(source, packed):
    edit_json(packed / f"{NAME}.json", lambda record: record["segments"].__setitem__(0, "0" * 64))
    assert job.work(request(source, packed, state="verified"))["damaged"] == [NAME]


def test_recorded_hash_can_be_made_by_hand(source, packed):
    raw, record = (packed / NAME).read_bytes(), json.loads((packed / f"{NAME}.json").read_text(encoding="utf-8"))
    step = record["segment_rows"] * 264
    parts = [hashlib.sha256(raw[start : start + step]).digest() for start in range(4096, len(raw), step)]
    assert record["segments"] == [part.hex() for part in parts]
    assert record["sha256"] == hashlib.sha256(raw[:4096] + b"".join(parts)).hexdigest()


# The page cache is left as it was found


def resident(path):
    return _page_cache.resident_bytes(path)


@pytest.mark.parametrize("way", ["system call", "page cache"])
def test_page_cache_is_left_as_found(tmp_path, monkeypatch, way):
    use(way, monkeypatch)
    sizes = engram.bucket_sizes(engram.Config((1,), 5000, 4, 3))
    oracle.write_checkpoint(tmp_path / "source", [1], [sum(sizes[1])], 5000, 4, 3, {1: ("q_weight", "weight", "scale")})
    shard = tmp_path / "source" / oracle.SHARDS[1]
    _page_cache.evict([shard])
    if resident(shard):
        pytest.skip("this filesystem keeps its pages")
    asked = request(tmp_path / "source", tmp_path / "out", 0, 1, tuning={"segment_rows": 4096, "chunk_rows": 4096, "workers": 2})
    job.work(asked)
    job.work({**asked, "state": "verified"})
    assert resident(shard) == 0
    assert resident(tmp_path / "out" / "engram-l1-r0of1.bin") == 0


@pytest.mark.parametrize("way", ["system call", "page cache"])
def test_what_others_have_cached_stays(tmp_path, monkeypatch, way):
    use(way, monkeypatch)
    sizes = engram.bucket_sizes(engram.Config((1,), 5000, 4, 3))
    oracle.write_checkpoint(tmp_path / "source", [1], [sum(sizes[1])], 5000, 4, 3, {1: ("q_weight", "weight", "scale")})
    shard = tmp_path / "source" / oracle.SHARDS[1]
    shard.read_bytes()
    before = resident(shard)
    job.work(request(tmp_path / "source", tmp_path / "out", 0, 1, tuning={"segment_rows": 4096, "chunk_rows": 4096, "workers": 2}))
    assert resident(shard) == before


# Considerate


def test_rate_limit(source, tmp_path):
    begin = time.monotonic()
    job.work(request(source, tmp_path / "out", rate_limit=1_000_000))  # 0.9 MB, of which the first chunk is free
    assert 0.5 < time.monotonic() - begin < 10


PRIORITY = textwrap.dedent(
    """
    import ctypes, json, os, sys
    from ansible_collections.sparkops.inference.plugins.module_utils import _engram_job as job

    seen = set()
    original = job.Packing.pack

    def pack(*args):
        # Of this very worker: 0 is the calling thread.
        number = {"x86_64": 252, "aarch64": 31}[os.uname().machine]
        disk = ctypes.CDLL(None).syscall(number, 1, 0) >> 13
        seen.add((os.getpriority(os.PRIO_PROCESS, 0), disk, int(open("/proc/self/oom_score_adj").read())))
        original(*args)

    job.Packing.pack = pack
    job.work(json.loads(sys.argv[1]))
    print(json.dumps(sorted(seen)))
    """
)


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the numbers of the system calls differ")
@pytest.mark.parametrize(("priority", "gives_way"), [("idle", True), ("normal", False)])
def test_every_worker_gives_way_to_a_serving_model(source, tmp_path, priority, gives_way):
    """Processor, disk, and memory in need: the kernel's own numbers of each worker."""
    argv = [sys.executable, "-c", PRIORITY, json.dumps(request(source, tmp_path / "out", priority=priority))]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, check=True, stdout=subprocess.PIPE, text=True)
    assert (json.loads(done.stdout.splitlines()[-1]) == [[19, 3, 1000]]) is gives_way


def test_too_little_memory_is_refused(source, tmp_path):
    with pytest.raises(Refused) as caught:
        job.work(request(source, tmp_path / "out", memory_floor=2**60))
    assert caught.value.refusals[0].id == "engram.memory"
    assert not list((tmp_path / "out").glob("engram-*"))


def test_pauses_below_the_floor_and_goes_on(source, tmp_path, monkeypatch):
    figures = [2**40, 0, 2**40]  # enough at the start, too little, enough again
    monkeypatch.setattr(files, "available_memory", lambda: figures.pop(0) if len(figures) > 1 else figures[0])
    progress = job.Progress(str(tmp_path / "progress.json"))
    paused = []
    original = io.Gate.pause
    monkeypatch.setattr(io.Gate, "pause", lambda self, wanted: paused.append((wanted, progress.message)) or original(self, wanted))
    assert job.work(request(source, tmp_path / "out", memory_floor=2**30, rate_limit=250_000), progress)["packed"]
    assert [wanted for wanted, _message in paused][:2] == [True, False]
    assert "below the floor of 1.0 GiB" in paused[1][1]  # said while it paused


def test_gives_up_after_a_long_pause_and_resumes_later(source, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "LONGEST_PAUSE", 0.5)
    figures = [2**40, 0]
    monkeypatch.setattr(files, "available_memory", lambda: figures.pop(0) if len(figures) > 1 else figures[0])
    with pytest.raises(Refused) as caught:
        job.work(request(source, tmp_path / "out", memory_floor=2**30, rate_limit=200_000))
    assert caught.value.refusals[0].id == "engram.memory"
    monkeypatch.undo()
    assert job.work(request(source, tmp_path / "out"))["packed"]


def test_progress_counts_all_bytes(source, tmp_path):
    progress = job.Progress(str(tmp_path / "progress.json"))
    job.work(request(source, tmp_path / "out"), progress)
    assert progress.phase == "packing"
    assert progress.total == (1650 + 1830) * 264
    assert progress.done == progress.total


def test_crash_of_a_worker_is_not_swallowed(source, tmp_path, monkeypatch):
    monkeypatch.setattr(job.Packing, "pack", lambda self, number, buffers, gate: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.work(request(source, tmp_path / "out"))


def test_row_file_knows_its_segments(source, tmp_path):
    file = dataclasses.replace(files.plan_files(str(source), str(tmp_path), 1, 2)[0], segment_rows=1024)
    assert file.segments == [(1650, 2674), (2674, 3396)]
    assert file.offset(1650) == 4096


def test_filesystem_that_refuses_direct_transfers(source, packed, tmp_path, monkeypatch):
    """The flag is taken and the transfers fail, for all workers at once."""
    reads, writes = os.preadv, os.pwrite

    def refuse(act):
        def transfer(fd, *arguments):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                time.sleep(0.01)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return act(fd, *arguments)

        return transfer

    monkeypatch.setattr(os, "preadv", refuse(reads))
    monkeypatch.setattr(os, "pwrite", refuse(writes))
    job.work(request(source, tmp_path / "other", tuning={"segment_rows": 512, "chunk_rows": 512, "workers": 8}))
    assert sha256(tmp_path / "other" / NAME) == sha256(packed / NAME)


def test_cancel_leaves_no_worker_behind(source, tmp_path, monkeypatch):
    """A signal interrupts the main thread; the next run resumes."""

    def interrupt(self, threads):
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(job.Crew, "_supervise", interrupt)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        job.work(request(source, tmp_path / "out", rate_limit=100_000))
    assert set(threading.enumerate()) <= before
    monkeypatch.undo()
    assert job.work(request(source, tmp_path / "out"))["packed"]
