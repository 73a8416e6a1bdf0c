# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the source's end refuses. What it gives is tested together with the receiver."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import shutil
import sys

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from image_engine import Engine, EngineImage, archive_of

ROOT = pathlib.Path(__file__).parents[3]
IMAGE = EngineImage([b"one" * 100, b"two" * 100])


@pytest.fixture
def source(monkeypatch):
    """The program as a module, with what bootstrap installs beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "plugins/module_utils"))
    for name in ("_docker_api", "_image_export"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    specification = importlib.util.spec_from_file_location("image_source", ROOT / "roles/image/files/image_source.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKOPS_STATE_ROOT", str(tmp_path))
    with Engine(IMAGE) as engine:
        Record(str(tmp_path)).share("sha256:" + "0" * 64, [], {"staging": str(tmp_path / "ship"), "socket": engine.socket_path})
        yield tmp_path


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "not one of"),
        (["docker"], "not one of"),
        (["image-inspect", "latest"], "not the id of an image"),
        (["image-inspect", "../containers/json"], "not the id of an image"),
        (["image-inspect", "sha256:" + "1" * 64], "no image"),
        (["image-inspect", IMAGE.id], "not one that role image has recorded"),
        (["image-layers", IMAGE.id], "not one that role image has recorded"),
        (["image-stream", IMAGE.id], "not one that role image has recorded"),
        (["image-archive", IMAGE.id], "not one that role image has recorded"),
        (["image-inspect"], "refused"),
        (["image-layers", IMAGE.id, "x"], "not a layer"),
        (["image-rsync", "--server", "-e.LsfxCIvu", ".", "/etc"], "only rsync --server --sender"),
        (["image-rsync", "--server", "--sender", "-e.LsfxCIvu", ".", "/etc/passwd"], "not an archive"),
        (["image-rsync", "--server", "--sender", "-e.LsfxCIvu", ".", "../" + "0" * 64 + ".tar"], "not an archive"),
        (["image-rsync", "--server", "--sender", "--remove-source-files", ".", "0" * 64 + ".tar"], "rsync option"),
        (["image-rsync", "--server", "--sender", "-e", "sh", ".", "0" * 64 + ".tar"], "rsync option"),
    ],
)
def test_refusals(source, state, capsys, words, text):
    assert source.main(words) in (1, 126)
    assert text in capsys.readouterr().err
    assert not os.path.exists(state / "ship")


def test_nothing_is_given_before_the_role_has_run(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARKOPS_STATE_ROOT", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source.main(["image-inspect", IMAGE.id]) == 1
    assert "recorded no image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({"manifest.json": b'[{"Config": "c.json", "Layers": ["a/layer.tar"]}]', "c.json": b"", "a/layer.tar": b""}, []),
        ({"manifest.json": b'[{"Config": "c.json", "Layers": ["a/layer.tar", "b/layer.tar"]}]', "c.json": b"", "a/layer.tar": b""}, ["b/layer.tar"]),
        ({"manifest.json": b'[{"Config": "c.json", "Layers": []}]'}, ["c.json"]),
        ({"index.json": b"{}"}, ["manifest.json"]),
    ],
)
def test_an_archive_with_a_missing_blob_is_noticed(source, files, missing):
    assert source.missing_blobs(io.BytesIO(archive_of(files))) == missing


def containerd_files():
    """An image that was pulled as an index of two platforms, of which the store has one: the index is there as it came. Then its parts by name."""
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}

    def blob(content, kind):
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    def place(entry):
        return f"blobs/sha256/{entry['digest'][7:]}"

    config, *layers = blob(b"{}", "config.v1+json"), blob(b"one", "layer.v1.tar+gzip"), blob(b"two", "layer.v1.tar+gzip")
    manifest = blob(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode(), "manifest.v1+json")
    absent = {**manifest, "digest": "sha256:" + "9" * 64, "platform": {"os": "linux", "architecture": "arm64"}}
    index = blob(json.dumps({"schemaVersion": 2, "manifests": [absent, manifest]}).encode(), "index.v1+json")
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [index]}).encode()
    files["manifest.json"] = json.dumps([{"Config": place(config), "RepoTags": None, "Layers": [place(layer) for layer in layers]}]).encode()
    return files, {"config": place(config), "layer": place(layers[1])}


@pytest.mark.parametrize("lacking", [None, "config", "layer"])
def test_an_archive_of_a_containerd_store_is_judged_by_the_platform_that_it_is_for(source, lacking):
    files, parts = containerd_files()
    missing = [parts[lacking]] if lacking else []
    assert source.missing_blobs(io.BytesIO(archive_of({name: content for name, content in files.items() if name not in missing}))) == missing


@pytest.mark.parametrize("verb", ["image-stream", "image-archive"])
@pytest.mark.parametrize("lacking", [None, "layer"])
def test_an_archive_that_no_engine_could_load_is_told_by_its_source(source, state, monkeypatch, capsysbinary, verb, lacking):
    """A containerd store has unpacked a layer from another image, and never fetched this image's blob of it."""
    files, parts = containerd_files()
    given = archive_of({name: content for name, content in files.items() if name != parts.get(lacking)})
    Record(str(state)).note(IMAGE.id)
    monkeypatch.setattr(source, "saved", lambda api, document: iter([given[:700], given[700:]]))
    assert source.main([verb, IMAGE.id]) == (1 if lacking else 0)
    told = capsysbinary.readouterr()
    assert (parts["layer"] in told.err.decode() and "pull it again" in told.err.decode()) == bool(lacking)
    if verb == "image-stream":
        assert told.out == given
    else:
        assert [path.read_bytes() for path in (state / "ship").glob("*.tar")] == ([] if lacking else [given])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("anything")])
def test_half_an_archive_does_not_stay_on_the_disk_of_a_head_that_serves(source, state, monkeypatch, error):
    Record(str(state)).note(IMAGE.id)

    def pieces():
        yield archive_of({"manifest.json": b"[]"})[:600]
        raise error

    monkeypatch.setattr(source, "saved", lambda api, document: pieces())
    with contextlib.suppress(RuntimeError):
        assert source.main(["image-archive", IMAGE.id]) == 1
    assert os.listdir(state / "ship") == []


@pytest.mark.parametrize(("factor", "refused"), [(1.5, True), (2.5, False)])
def test_an_archive_needs_room_for_what_docker_save_holds_beside_it(source, state, monkeypatch, capsys, factor, refused):
    """Both lie on one filesystem here: a classic store keeps its own copy until the last byte has come out."""
    Record(str(state)).note(IMAGE.id)
    free = int(IMAGE.document()["Size"] * factor)
    engine_root = state / "docker"
    engine_root.mkdir()
    monkeypatch.setattr(source.DockerApi, "info", lambda self: {"DriverStatus": [], "DockerRootDir": str(engine_root)})
    monkeypatch.setattr(source.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, free))
    assert source.main(["image-archive", IMAGE.id]) == (1 if refused else 0)
    assert (f"{free} bytes free" in capsys.readouterr().err) is refused


def test_one_archive_for_several_receivers_and_none_forgotten(source, state, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.12 4 198.51.100.11 22")
    Record(str(state)).note(IMAGE.id)
    old = state / "ship" / ("0" * 64 + ".tar")
    old.parent.mkdir()
    old.write_bytes(b"old")
    killed = state / "ship" / f"{source.PUSHED}1"
    killed.mkdir()
    for path in (old, killed):
        os.utime(path, (0, 0))

    class Out:
        lines: list = []

        def write(self, data):
            self.lines.append(data)

    api = source.DockerApi(source.source()["socket"])
    source.image_archive(api, Out(), IMAGE.id)
    made = os.stat(state / "ship" / (IMAGE.id[7:] + ".tar")).st_mtime_ns
    source.image_archive(api, Out(), IMAGE.id)
    assert os.stat(state / "ship" / (IMAGE.id[7:] + ".tar")).st_mtime_ns == made and len(Out.lines) == 2 and Out.lines[0] == Out.lines[1]
    assert not old.exists() and not killed.exists()
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.13 4 198.51.100.11 22")
    source.image_archive(api, Out(), IMAGE.id)
    source.image_done(api, Out(), IMAGE.id)
    assert os.path.exists(state / "ship" / (IMAGE.id[7:] + ".tar")), "the other receiver is not done"
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.12 4 198.51.100.11 22")
    source.image_done(api, Out(), IMAGE.id)
    assert os.listdir(state / "ship") == []


def test_what_the_gate_makes_through_sudo_does_not_keep_out_the_account(source, state, monkeypatch, capsysbinary):
    Record(str(state)).note(IMAGE.id)
    given = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda made, uid, gid: given.append(os.readlink(f"/proc/self/fd/{made}") if isinstance(made, int) else made))
    assert source.main(["image-archive", IMAGE.id]) == 0
    archive = str(state / "ship" / f"{IMAGE.id[7:]}.tar")
    assert given == [str(state / "ship"), archive, f"{archive}.json"]
    given.clear()
    monkeypatch.setattr(source.Exporter, "sizes", lambda self: {})
    assert source.main(["image-layers", IMAGE.id, IMAGE.layers[1]]) == 0
    assert len(given) == 1 and given[0].startswith(str(state / "ship" / source.PUSHED)), "the folder of a push, and not the one that was there"


def test_without_docker_rights_it_runs_itself_through_sudo(source, state, monkeypatch):
    asked = []
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.12 4 198.51.100.11 22")
    monkeypatch.setattr(source, "usable", lambda api: False)
    monkeypatch.setattr(source.os, "getuid", lambda: 1000)
    monkeypatch.setattr(source.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(source.os, "execvp", lambda program, words: asked.append(words))
    source.main(["image-inspect", IMAGE.id])
    assert asked[0][:3] == ["sudo", "-n", "env"] and asked[0][-2:] == ["image-inspect", IMAGE.id] and f"SPARKOPS_STATE_ROOT={state}" in asked[0]
    assert "SSH_CONNECTION=198.51.100.12 4 198.51.100.11 22" in asked[0], "sudo forgets it, and receivers are told apart by it"
