# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Manifests, selection, indexes, space: tables and properties without a network."""

from __future__ import annotations

import json
import os
import pwd
import re
import tempfile

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils import _unit
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest, ManifestError, Need
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../up", "a/../b", "a//b", "./a", "a/.", "a\0b", "a\nb"])
def test_a_path_out_of_the_tree_is_refused(path):
    with pytest.raises(ManifestError):
        manifests.safe_path(path)


@pytest.mark.parametrize(
    ("path", "include", "exclude", "taken"),
    [
        ("config.json", [], [], True),
        ("config.json", ["*.json"], [], True),
        ("sub/config.json", ["*.json"], [], True),
        ("model.bin", ["*.json"], [], False),
        ("original/x.pth", [], ["original/"], False),
        ("originals.txt", [], ["original/"], True),
        ("model-00047-of-00048.safetensors", ["model-0004[78]-*"], [], True),
        ("model-00046-of-00048.safetensors", ["model-0004[78]-*"], [], False),
        ("README.md", ["*"], ["*.md"], False),
        ("Config.json", ["config.json"], [], False),
    ],
)
def test_selection(path, include, exclude, taken):
    assert manifests.selected(path, include, exclude) is taken


def tree_with(tmp_path, files):
    for path, content in files.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return str(tmp_path)


def test_each_fault_is_named_by_file(tmp_path):
    tree = tree_with(tmp_path, {"good": b"1234", "short": b"12", "empty": b"", "extra": b"x"})
    os.symlink("nowhere", tmp_path / "dangling")
    os.symlink("good", tmp_path / "link")
    (tmp_path / "folder").mkdir()
    files = [File(name, 4) for name in ("good", "short", "empty", "absent", "dangling", "link", "folder")]
    found = {problem.path: problem.text for problem in manifests.check_sizes(tree, files)}
    assert found == {
        "short": "2 bytes, wanted 4",
        "empty": "0 bytes, wanted 4",
        "absent": "missing",
        "dangling": "a dangling link, not a real file",
        "link": "a link, not a real file",
        "folder": "not a regular file",
    }


def test_a_flipped_byte_with_the_old_size_and_time_is_found(tmp_path):
    tree = tree_with(tmp_path, {"a": b"A" * 100_000, "b": b"B" * 100_000})
    files = [File(path, 100_000, digest) for path, digest in manifests.hash_files(tree, [File("a", 0), File("b", 0)]).items()]
    status = os.stat(tmp_path / "b")
    with open(tmp_path / "b", "r+b") as stream:
        stream.seek(50_000)
        stream.write(b"x")
    os.utime(tmp_path / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert manifests.check_sizes(tree, files) == []
    assert [(problem.path, problem.kind) for problem in manifests.check_hashes(tree, files, drop=True)] == [("b", "hash")]


@pytest.mark.parametrize("blocks", [1, 4, 5.5])
def test_hashing_gives_every_folio_back_however_large_it_is(tmp_path, monkeypatch, blocks):
    """The kernel gives a folio back only when a call covers all of it: with 8 MiB of read-ahead, a call for each block left most of a file."""
    path, folio = tmp_path / "a", 4 * manifests.HASH_BLOCK
    path.write_bytes(b"x" * int(blocks * manifests.HASH_BLOCK))
    resident = set(range(0, path.stat().st_size, folio))

    def give_back(_handle, start, length, advice):
        if advice == os.POSIX_FADV_DONTNEED:
            resident.difference_update({place for place in resident if start <= place and (not length or place + folio <= start + length)})

    monkeypatch.setattr(manifests.os, "posix_fadvise", give_back)
    manifests.sha256_of(str(path), drop=True)
    assert not resident


def test_progress_counts_every_byte(tmp_path):
    tree = tree_with(tmp_path, {str(number): b"x" * (number * 1000) for number in range(1, 8)})
    counted = []
    manifests.hash_files(tree, [File(str(number), number * 1000) for number in range(1, 8)], threads=3, progress=counted.append)
    assert sum(counted) == sum(number * 1000 for number in range(1, 8))


def test_a_manifest_survives_its_file(tmp_path):
    manifest = Manifest("acme/tiny", "a" * 40, (File("config.json", 3, "0" * 64),), {"name": "MIT"}, {"tensors": ["x"]})
    manifests.save(str(tmp_path / "tree"), manifest)
    assert manifests.load(str(tmp_path / "tree")) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["tree.manifest.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "repository": "a", "revision": "b", "files": [{"path": "../x", "size": 1, "sha256": ""}]}']
)
def test_a_bad_manifest_proves_nothing(tmp_path, text):
    (tmp_path / "tree.manifest.json").write_text(text)
    assert manifests.load(str(tmp_path / "tree")) is None


def test_the_index_counts_and_nothing_else(tmp_path):
    index = {"weight_map": {f"t{number}": f"model-{number % 3 + 1:05}-of-00206.safetensors" for number in range(10)}}
    tree_with(tmp_path, {"model.safetensors.index.json": json.dumps(index).encode(), "unrelated.safetensors": b""})
    wanted = manifests.wanted_by_index(str(tmp_path), ["model.safetensors.index.json"], [], [])
    assert wanted == {f"model-{number:05}-of-00206.safetensors" for number in (1, 2, 3)}
    assert manifests.wanted_by_index(str(tmp_path), ["model.safetensors.index.json"], ["*00001*"], []) == {"model-00001-of-00206.safetensors"}


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": {"t": "../x"}}', b'{"weight_map": []}'])
def test_a_broken_index_asks_for_nothing(tmp_path, index):
    tree_with(tmp_path, {"model.safetensors.index.json": index})
    assert manifests.wanted_by_index(str(tmp_path), ["model.safetensors.index.json"], [], []) == set()


def test_required_files_are_patterns():
    manifest = Manifest("r", "c", (File("config.json", 1), File("model-00001-of-00002.safetensors", 1)))
    assert manifests.lacking(manifest, ["config.json", "model-*.safetensors"]) == []
    assert [problem.path for problem in manifests.lacking(manifest, ["tokenizer.json", "config.json"])] == ["tokenizer.json"]


INDEX = json.dumps(
    {
        "metadata": {"total_size": 476},
        "weight_map": {
            "layers.1.engram.embed.weight": "model-00047-of-00048.safetensors",
            "layers.1.engram.embed.scale": "model-00047-of-00048.safetensors",
            "layers.1.engram.q_weight": "model-00047-of-00048.safetensors",
            "layers.14.engram.embed.weight": "model-00048-of-00048.safetensors",
            "layers.0.attn.weight": "model-00001-of-00048.safetensors",
        },
    }
)


def test_a_slim_index_keeps_only_the_tensors_asked_for():
    text, shards = manifests.slim_index(INDEX, ["*.engram.embed.weight", "*.engram.embed.scale"])
    assert set(json.loads(text)["weight_map"]) == {"layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "layers.14.engram.embed.weight"}
    assert json.loads(text)["metadata"]["total_size"] == 476
    assert shards == {"model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors"}
    assert manifests.slim_index(INDEX, ["*.engram.embed.weight", "*.engram.embed.scale"])[0] == text


def test_a_slim_index_of_nothing_is_refused():
    with pytest.raises(ManifestError, match="no tensor"):
        manifests.slim_index(INDEX, ["*.nothing"])


MIB = 2**20


@pytest.mark.parametrize(
    ("needs", "free", "short"),
    [
        ([("model", 120)], 200, False),
        ([("model", 0)], 0, False),
        ([("model", 60)], 80, False),
        ([("model", 120), ("image archive", 80)], 190, True),
        ([("model", 120), ("image archive", 80)], 250, False),
        ([("model", -5), ("image archive", 80)], 100, False),
        ([], 0, False),
    ],
    ids=["empty target", "already complete", "half there", "sum of two stages", "both fit", "more staged than lacks", "nothing to write"],
)
def test_space_is_counted_per_filesystem(monkeypatch, tmp_path, needs, free, short):
    monkeypatch.setattr(manifests, "space", lambda path: manifests.Space("/", 1, free * MIB))
    found = manifests.shortages([Need(str(tmp_path), size * MIB, what) for what, size in needs], 10 * MIB)
    assert bool(found) is short
    if short:
        assert found[0].needed == 210 * MIB and [part.what for part in found[0].parts] == ["model", "image archive"]


def test_space_of_a_virgin_host_is_that_of_the_nearest_folder(tmp_path):
    assert manifests.space(str(tmp_path / "not" / "there")).path == str(tmp_path)


segments = st.text(st.characters(blacklist_characters="/\0\n", blacklist_categories=("Cs",)), min_size=1, max_size=8).filter(
    lambda text: text not in (".", "..")
)


@given(st.lists(segments, min_size=1, max_size=4).map("/".join))
def test_safe_paths_stay_below_the_tree(path):
    assert os.path.normpath(os.path.join("/tree", manifests.safe_path(path))).startswith("/tree/")


@given(st.text(max_size=30))
def test_whatever_safe_path_accepts_stays_below_the_tree(path):
    try:
        accepted = manifests.safe_path(path)
    except ManifestError:
        return
    assert os.path.normpath(os.path.join("/tree", accepted)).startswith("/tree/")


@given(st.integers(min_value=0, max_value=10**15))
def test_sizes_for_people_are_right_to_a_tenth(size):
    text = manifests.gib(size)
    value, unit = re.fullmatch(r"([\d.]+) (GiB|MiB|KiB|bytes)", text).groups()
    factor = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}[unit]
    assert abs(float(value) * factor - size) <= 0.06 * factor


def test_a_folder_of_another_account_is_told_with_the_command_that_gives_it_away(tmp_path):
    assert manifests.unwritable(str(tmp_path / "a/b"), "weights_root") is None
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lie below one that others may not enter
        os.chmod(folder, 0o555)
        with _unit.identity("nobody"):
            lack = manifests.unwritable(f"{folder}/a/b", "weights_root")
    account = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    assert lack["thing"] == folder and lack["next_step"].startswith(f"sudo chown {account} {folder}, or set weights_root;")
