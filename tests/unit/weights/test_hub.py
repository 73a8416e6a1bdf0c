# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the hub says, and the folders it leaves on disk. No network."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _hub
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File
from hypothesis import given
from hypothesis import strategies as st
from weights_lab import COMMIT, OTHER, write_model

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({}, None),
        ({"RateLimit": '"x";r=0;t=3'}, 3.0),
        ({"ratelimit": '"api"; r=0; t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}, 55.0),
        ({"RateLimit": '"x";r=7;t=3'}, None),
        ({"RateLimit": '"x";r=7;t=3', "Retry-After": "12"}, 12.0),
        ({"RateLimit": "nonsense", "Retry-After": "12"}, 12.0),
        ({"Retry-After": "Fri, 15 Jan 2027 08:00:10 GMT"}, 10.0),
        ({"Retry-After": "Fri, 15 Jan 2027 07:00:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "²"}, None),  # a digit, but no number
        ({"Retry-After": ""}, None),
    ],
)
def test_the_wait_that_a_server_asks_for(headers, wait):
    assert _hub.told_wait(headers, NOW) == wait


@given(st.dictionaries(st.sampled_from(["RateLimit", "Retry-After", "retry-after"]), st.text(max_size=30)))
def test_no_header_crashes(headers):
    wait = _hub.told_wait(headers, NOW)
    assert wait is None or wait >= 0


@pytest.mark.parametrize(
    ("status", "token", "kind", "text"),
    [
        (401, False, "unauthorized", "no token was sent"),
        (401, True, "unauthorized", "the token was not accepted"),
        (403, False, "forbidden", "no token was sent"),
        (403, True, "forbidden", "the token is valid but has no access"),
        (404, True, "not_found", "404"),
        (429, False, "rate_limited", "too many requests"),
        (500, False, "server", "500"),
        (503, False, "server", "503"),
        (418, False, "protocol", "418"),
    ],
)
def test_answers_are_told_apart(status, token, kind, text):
    error = _hub.classify(status, {}, "config.json", token)
    assert error.kind == kind and text in error.text and "config.json" in error.text


def patience(cap):
    said, slept = [], []
    return _hub.Patience(cap, said.append, slept.append), said, slept


def test_waiting_is_as_told_and_said():
    waiter, said, slept = patience(100)
    waiter.wait(_hub.HubError("rate_limited", "the hub answered 429", 3))
    assert 2.5 < slept[0] <= 3 and said == ["the hub answered 429; waiting 3 s as it asks"]


def test_waiting_has_a_cap_in_total():
    waiter, _said, _slept = patience(10)
    waiter.wait(_hub.HubError("rate_limited", "429", 8))
    waiter._until = 0.0  # the first wait is over
    with pytest.raises(_hub.HubError, match="8 s of the 10 s allowed were already waited") as caught:
        waiter.wait(_hub.HubError("rate_limited", "429", 8))
    assert caught.value.kind == "rate_limit_cap"


def test_threads_that_are_refused_together_wait_once():
    waiter, _said, _slept = patience(10)
    for _unused in range(5):
        waiter.wait(_hub.HubError("rate_limited", "429", 8))
    assert waiter.spent < 9


# Folders


def hub_cache(root, layout, repository="acme/tiny", commit=COMMIT, sizes=(3000, 4000)):
    """A hub cache as the library leaves it: links into the repository's blobs, in the newer layout on into a cache-wide store."""
    plain = root / "plain"
    write_model(plain, list(sizes))
    folder = root / "cache" / ("models--" + repository.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text("c" * 40)
    for path in sorted(plain.iterdir()):
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        etag = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        blob = folder / "blobs" / etag
        if large and layout == "shared":
            xet = hashlib.sha256(b"xet" + content).hexdigest()
            store = root / "cache" / "blobs" / xet[:2] / xet
            store.parent.mkdir(parents=True, exist_ok=True)
            store.write_bytes(content)
            blob.symlink_to(os.path.relpath(store, blob.parent))
        else:
            blob.write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{etag}")
    return root / "cache"


@pytest.mark.parametrize("layout", ["classic", "shared"])
def test_a_cache_of_either_layout_is_complete_by_its_pin(tmp_path, layout):
    cache = hub_cache(tmp_path, layout)
    (tree,) = _hub.local_trees(str(cache), "acme/tiny", COMMIT)
    manifest = _hub.local_manifest(tree, "acme/tiny", COMMIT, [], ["README.md"], ["config.json", "tokenizer.json"])
    assert {file.path for file in manifest.files} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for file in manifest.files:
        real = tree.files[file.path].real
        assert not os.path.islink(real) and os.path.getsize(real) == file.size
        assert _hub.matches(real, file, hashlib.sha256(open(real, "rb").read()).hexdigest())


def test_refs_are_not_asked(tmp_path):
    cache = hub_cache(tmp_path, "classic")
    assert _hub.local_trees(str(cache), "acme/tiny", "c" * 40) == []
    assert (cache / "models--acme--tiny" / "refs" / "main").read_text() == "c" * 40


def test_a_cache_above_the_hub_folder_is_found_too(tmp_path):
    hub_cache(tmp_path, "classic")
    (tmp_path / "home").mkdir()
    (tmp_path / "cache").rename(tmp_path / "home" / "hub")
    assert len(_hub.local_trees(str(tmp_path / "home"), "acme/tiny", COMMIT)) == 1


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"])
def test_a_snapshot_that_lacks_a_file_is_not_complete(tmp_path, lost):
    cache = hub_cache(tmp_path, "classic")
    (cache / "models--acme--tiny" / "snapshots" / COMMIT / lost).unlink()
    (tree,) = _hub.local_trees(str(cache), "acme/tiny", COMMIT)
    required = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    assert _hub.local_manifest(tree, "acme/tiny", COMMIT, [], [], required) is None


def test_a_dangling_link_is_named(tmp_path):
    cache = hub_cache(tmp_path, "shared")
    for blob in (cache / "blobs").rglob("*"):
        if blob.is_file():
            blob.unlink()
    (tree,) = _hub.local_trees(str(cache), "acme/tiny", COMMIT)
    assert tree.broken == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert _hub.local_manifest(tree, "acme/tiny", COMMIT, [], [], ["config.json"]) is None


def test_the_kept_listing_knows_files_that_a_snapshot_lacks(tmp_path):
    cache = hub_cache(tmp_path, "classic")
    folder = cache / "models--acme--tiny" / "trees"
    folder.mkdir()
    (tree,) = _hub.local_trees(str(cache), "acme/tiny", COMMIT)
    files = {path: {"size": item.size, "blob_id": "0" * 40} for path, item in tree.files.items()}
    (folder / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": {**files, "chat_template.jinja": {"size": 5, "blob_id": "1" * 40}}}))
    (tree,) = _hub.local_trees(str(cache), "acme/tiny", COMMIT)
    assert _hub.local_manifest(tree, "acme/tiny", COMMIT, [], [], ["config.json"]) is None
    assert _hub.local_manifest(tree, "acme/tiny", COMMIT, [], ["*.jinja"], ["config.json"]) is not None


def test_a_full_checkout_counts_for_the_files_that_are_read(tmp_path):
    cache = hub_cache(tmp_path, "classic", sizes=(1000, 2000, 3000))
    (cache / "models--acme--tiny" / "snapshots" / COMMIT / "model-00001-of-00003.safetensors").unlink()
    (tree,) = _hub.local_trees(str(cache), "acme/tiny", COMMIT)
    include = ["model-0000[23]-*", "*.index.json", "config.json"]
    manifest = _hub.local_manifest(tree, "acme/tiny", COMMIT, include, [], ["config.json"])
    assert len(manifest.files) == 4


def plain_download(folder, commit=COMMIT):
    write_model(folder, [3000, 4000])
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file():
            etag = hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".safetensors" else "0" * 40
            (notes / f"{path.name}.metadata").write_text(f"{commit}\n{etag}\n1712656091.123\n")
    return folder


def test_a_plain_download_tells_its_commit_by_file(tmp_path):
    folder = plain_download(tmp_path / "plain")
    assert len(_hub.local_trees(str(folder), "acme/tiny", COMMIT)[0].files) == 6
    assert _hub.local_trees(str(folder), "acme/tiny", OTHER) == []


def test_a_folder_without_a_word_about_its_commit_is_not_adopted(tmp_path):
    write_model(tmp_path / "plain", [3000])
    assert _hub.local_trees(str(tmp_path / "plain"), "acme/tiny", COMMIT) == []


def test_small_files_are_proven_by_their_git_id(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"hello\n")
    assert _hub.git_blob(str(path)) == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert _hub.matches(str(path), File("x", 6, "", "ce013625030ba8dba906f756967f9e9ca394464a"), "")
    assert not _hub.matches(str(path), File("x", 6, "", "0" * 40), "")
    assert not _hub.matches(str(path), File("x", 6, "0" * 64), "1" * 64)


@pytest.mark.parametrize(("revision", "good"), [("a" * 40, True), ("main", False), ("a" * 39, False), ("A" * 40, False), ("", False), ("a" * 64, False)])
def test_only_a_full_commit_is_a_pin(revision, good):
    assert _hub.pinned(revision) is good
