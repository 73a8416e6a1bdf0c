# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import tempfile
import threading

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _image_export as image_export
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, Pieces
from ansible_collections.sparkops.inference.plugins.module_utils._image_export import (
    Exporter,
    ExportError,
    TooMuch,
    containerd_store,
    image_root,
    layer_sizes,
    legacy_name,
)
from image_engine import Engine, EngineImage, plain, sha256

LARGE = random.Random(1).randbytes(400_000)
LAYERS = [LARGE, b"middle" * 1000, b"", b"last" * 500]


@pytest.fixture(autouse=True)
def small_is_smaller(monkeypatch):
    """What counts as a layer starts at 4 MiB; the layers here are smaller, to be quick."""
    monkeypatch.setattr(image_export, "SMALL", 5000)


def exported(engine, image, wanted, how="export", **options):
    """What comes out; nothing of it stays in the directory where it waited."""
    found = {}
    with tempfile.TemporaryDirectory() as spool:
        exporter = Exporter(DockerApi(engine.socket_path, timeout=10), image.document(), Pieces, os.path.join(spool, "made"), spool)
        outcome = getattr(exporter, how)(wanted, sink_into(found), **options)
        assert [name for dummy, folders, files in os.walk(spool) for name in folders + files] in ([], ["made"])
    return found, outcome


def sink_into(found):

    def sink(blob, content):
        data = b""
        while len(data) < blob.size:
            data += content.read(min(10_000, blob.size - len(data)))
        assert sha256(data) == blob.digest
        found[blob.diff_id] = data

    return sink


def test_names_of_layers_in_an_old_archive():
    """Recorded from Docker 20.10.24."""
    config = {
        "Hostname": "",
        "Domainname": "",
        "User": "",
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "Tty": False,
        "OpenStdin": False,
        "StdinOnce": False,
        "Env": None,
        "Cmd": None,
        "Image": "",
        "Volumes": None,
        "WorkingDir": "",
        "Entrypoint": None,
        "OnBuild": None,
        "Labels": None,
    }
    first, second = (
        "sha256:1fb10033d2c6dd555ad2996528e818355adc1cd6dc06a5151e74cf0499cbd674",
        "sha256:276878932212aacb885cc7517fa03f88c7d4a42974c8c8cd9f0866b706874b86",
    )
    bottom = {"id": "x", "created": "1970-01-01T00:00:00Z", "container_config": config, "os": "linux"}
    assert legacy_name(bottom, first) == "89bfc61da3f887b846669a33dd75a03d03a710f86b27125f795a10b2f0947e4e"
    above = {**bottom, "parent": "89bfc61da3f887b846669a33dd75a03d03a710f86b27125f795a10b2f0947e4e"}
    assert legacy_name(above, sha256(f"{first} {second}".encode())) == "ba32d00e32ff5ca4b4b652a844e9a2450310a493815033b3182a431e85a637ae"


@pytest.mark.parametrize("legacy", [True, False], ids=["before-25", "from-25"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_save_gives_the_wanted_layers_and_no_others(legacy, count):
    image = EngineImage(LAYERS)
    wanted = image.layers[-count:]
    with Engine(image, legacy_save=legacy) as engine:
        found, pushed = exported(engine, image, wanted, "by_save")
    assert found == {layer: image.content[layer] for layer in wanted}
    assert pushed.config == image.config
    assert [layer["digest"] for layer in json.loads(pushed.manifest)["layers"]] == image.layers


def test_save_of_an_image_that_has_a_layer_twice():
    image = EngineImage([b"a", b"same", b"b", b"same", b"c"])
    with Engine(image) as engine:
        found, dummy = exported(engine, image, set(image.layers), "by_save")
    assert found == image.content


@pytest.mark.parametrize(
    ("saves", "containerd", "waits"),
    [(1.5, False, True), (14.5, False, True), (15.5, False, False), (1.5, True, False)],
    ids=["one", "not-all", "all", "containerd-needs-none"],
)
def test_saves_for_which_there_is_no_room_at_once_come_one_after_the_other(monkeypatch, tmp_path, saves, containerd, waits):
    """What another save has still to write is not missing from the free space yet."""
    image = EngineImage(LAYERS)
    size = image.document()["Size"]
    free = [int(saves * size)]
    monkeypatch.setattr(image_export.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free[0]))
    entered, seen = threading.Event(), []

    def save():
        try:
            with image_export.room_to_save(api, image.document()):
                entered.set()
        except ExportError as exc:
            seen.append(str(exc))

    with Engine(image, containerd=containerd) as engine:
        engine.root, api = str(tmp_path), DockerApi(engine.socket_path, timeout=10)
        with image_export.room_to_save(api, image.document()):
            other = threading.Thread(target=save, daemon=True)
            other.start()
            assert entered.wait(0.3) is not waits
            free[0] = 0 if waits else free[0]
        other.join(10)
    assert len(seen) == int(waits), "the room is looked at once it is the save's own"


def test_save_without_a_wanted_layer_is_an_error():
    image = EngineImage(LAYERS)
    with Engine(image) as engine, pytest.raises(ExportError, match="lacks sha256:0"):
        exported(engine, image, ["sha256:0"], "by_save")


@pytest.mark.parametrize("containerd", [False, True])
def test_push_moves_only_what_is_wanted(containerd):
    image = EngineImage(LAYERS)
    with Engine(image, containerd=containerd) as engine:
        found, pushed = exported(engine, image, image.layers[-1:], "by_push", limit=100_000)
        uploaded = list(engine.uploaded)
        deleted = [path for path in engine.asked("DELETE") if path.endswith(":ship")]
    assert [plain(data) for data in found.values()] == [LAYERS[-1]]
    assert uploaded == [sha256(found[image.layers[-1]]), image.id]
    assert pushed.config == image.config
    assert len(json.loads(pushed.manifest)["layers"]) == 4
    assert len(deleted) == 2, "the name for the push is removed"


def test_a_push_of_too_much_ends_and_save_takes_over(monkeypatch):
    """A store that has never seen a registry compresses all layers before it asks."""
    image = EngineImage(LAYERS)
    with Engine(image) as engine:
        monkeypatch.setattr(image_export.Receiver, "has", lambda self, digest: False)
        with pytest.raises(TooMuch):
            exported(engine, image, image.layers[-1:], "by_push", limit=1000)
        found, dummy = exported(engine, image, image.layers[-1:])
    assert found == {image.layers[-1]: LAYERS[-1]}


@pytest.mark.parametrize("hello", [b"\x16\x03\x01\x02\x00\x01" + b"\x00" * 300, b"\x16\x03\x01\n" + b"\x00" * 300], ids=["no newline", "newline"])
def test_a_client_that_begins_with_tls_is_told_no_in_http(tmp_path, hello):
    """The containerd store of Docker 26 goes over to plain HTTP only when the answer to its handshake begins with "HTTP/"."""
    with image_export.Receiver(str(tmp_path), lambda digest, size, stream: None) as receiver:
        port = int(receiver.name.partition("/")[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(hello)
            assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("count", "containerd", "pushes"),
    [
        pytest.param(1, False, True, id="little"),
        pytest.param(4, False, False, id="all-of-a-classic-store"),
        pytest.param(4, True, True, id="all-of-a-containerd-store"),
    ],
)
def test_the_cheaper_way_is_taken(count, containerd, pushes):
    image = EngineImage(LAYERS)
    with Engine(image, containerd=containerd) as engine:
        found, dummy = exported(engine, image, image.layers[-count:])
        assert any(path.endswith("/push") for path in engine.asked("POST")) is pushes
    assert {layer: plain(data) for layer, data in found.items()} == {layer: image.content[layer] for layer in image.layers[-count:]}


def test_store_kinds():
    assert containerd_store({"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]})
    assert not containerd_store({"DriverStatus": [["Backing Filesystem", "extfs"], ["Supports d_type", "true"]]})
    assert not containerd_store({"DriverStatus": None})


@pytest.mark.parametrize(
    ("settings", "address", "root"),
    [
        (None, "/run/containerd/containerd.sock", "/var/lib/containerd"),
        ('version = 2\n# root = "/no"\nroot = "/data/containerd"\n', "/run/containerd/containerd.sock", "/data/containerd"),
        ("root = '/data/containerd'\n[grpc]\n", None, "/data/containerd"),
        ('version = 3\n[plugins.x]\nroot = "/no"\n', "/run/containerd/containerd.sock", "/var/lib/containerd"),
        ('root = "/data/containerd"', "/var/run/docker/containerd/containerd.sock", "/data/docker"),
        ('root = "/data/containerd"', "/run/snap.docker/containerd/containerd.sock", "/data/docker"),
    ],
)
def test_where_images_lie(tmp_path, settings, address, root):
    path = tmp_path / "config.toml"
    if settings is not None:
        path.write_text(settings)
    info = {"DockerRootDir": "/data/docker", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    if address:
        info["Containerd"] = {"Address": address, "Namespaces": {}}
    assert image_root(info, str(path)) == root
    assert image_root({**info, "DriverStatus": [["Backing Filesystem", "extfs"]]}, str(path)) == "/data/docker"


@pytest.mark.parametrize(
    ("layers", "history", "sizes"),
    [
        (["a", "b"], [5, 100], {"a": 100, "b": 5}),
        (["a", "b"], [0, 5, 0, 100], {"a": 100, "b": 5}),
        (["a", "empty", "b"], [0, 5, 0, 100], {"a": 0, "empty": 100, "b": 5}),
        (["a", "b"], [1, 2, 3], {"a": 6, "b": 0}),
        (["a", "b", "a"], [1, 2, 3], {"a": 3, "b": 2}),
    ],
)
def test_sizes_from_the_history(layers, history, sizes):
    assert layer_sizes(layers, history, 6) == sizes
