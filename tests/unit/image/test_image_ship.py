# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Both ends of a ship with engines that behave like real ones; instead of ssh a script runs the source's program."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
import random
import shutil
import stat
import sys
import tarfile

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _image_ship as image_ship
from ansible_collections.sparkops.inference.plugins.module_utils import _image_source as image_source
from ansible_collections.sparkops.inference.plugins.module_utils._image_export import ExportError
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import from_inspect
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._image_archive import canonical
from ansible_collections.sparkops.inference.plugins.module_utils._image_ship import Dropped, Lack, Ship
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused
from ansible_collections.sparkops.inference.plugins.modules import image_pull
from ansible_collections.sparkops.inference.plugins.modules import image_ship as ship_module
from image_engine import Engine, EngineImage, archive_of
from module_call import call

ROOT = pathlib.Path(__file__).parents[3]
BIG = random.Random(2).randbytes(3_000_000)
BASE = [BIG, b"middle" * 1000]
OLD = EngineImage([*BASE, b"old" * 1000], "registry.example/team/app:1", ["sha256:" + "a" * 64])
NEW = EngineImage([*BASE, b"new" * 1000], "registry.example/team/app:2", ["sha256:" + "b" * 64], Env=["A=2"])

SHARED = EngineImage([b"bottom", BIG], "registry.example/team/shared:1")

# Stands for ssh: runs the source's program with the last argument, and can cut what it says.
SSH = """#!/bin/sh
for words in "$@"; do :; done
echo "$words" >>{calls}
limit=$(cat {limit} 2>/dev/null)
rm -f {limit}
export SPARKOPS_STATE_ROOT={state}
if [ -n "$limit" ]; then
    {python} {libexec}/image_source.py $words | head -c "$limit"
    exit 255
fi
exec {python} {libexec}/image_source.py $words
"""


class Pair:
    """A source and a receiver, each with a state root and an engine."""

    def __init__(self, folder: pathlib.Path, source: Engine, target: Engine) -> None:
        self.folder = folder
        self.source, self.target = source, target
        self.limit = folder / "limit"
        self.calls = folder / "calls"
        for name in ("source", "target", "libexec", "bin", "docker"):
            (folder / name).mkdir()
        for path in (ROOT / "roles/image/files/image_source.py", *(ROOT / f"plugins/module_utils/{name}.py" for name in ("_docker_api", "_image_export"))):
            shutil.copy(path, folder / "libexec")
        target.root = str(folder / "docker")
        ssh = folder / "bin/ssh"
        ssh.write_text(SSH.format(calls=self.calls, limit=self.limit, state=folder / "source", libexec=folder / "libexec", python=sys.executable))
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        self.source_record = Record(str(folder / "source"))
        self.target_record = Record(str(folder / "target"))

    def allow(self, image: EngineImage) -> None:
        self.source_record.share(image.id, image.digests, {"staging": str(self.folder / "source/ship"), "socket": self.source.socket_path})

    def ship(self, image: EngineImage, mode: str = "auto", **changes: str) -> dict:
        request = {
            "reference": image.tag,
            "source_id": image.id,
            "identity": from_inspect(image.document()).identity,
            "origin": "spark-1",
            "node": "spark-2",
            "mode": mode,
            "staging": str(self.folder / "target/ship"),
            "socket": self.target.socket_path,
            "address": "198.51.100.11",
            "user": "me",
            "key": "/key",
            "known_hosts": "/known",
            "state_root": str(self.folder / "target"),
            **changes,
        }
        return Ship(request, Progress(str(self.folder / "progress.json"))).run()

    def verbs(self) -> list[str]:
        return [line.split()[0] for line in self.calls.read_text().splitlines()]


@pytest.fixture
def pair(tmp_path, monkeypatch):
    made = []

    def make(*images, source_containerd=False, target_containerd=False, source_images=(OLD, NEW)):
        source = Engine(*source_images, containerd=source_containerd).__enter__()
        target = Engine(*images, containerd=target_containerd).__enter__()
        made.extend((source, target))
        new = Pair(tmp_path, source, target)
        for image in source_images:
            new.allow(image)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(image_ship, "MARGIN", 0)
        monkeypatch.setattr(image_ship, "PAUSES", (0, 0, 0, 0))
        return new

    yield make
    for engine in made:
        engine.__exit__()


@pytest.mark.parametrize("source_containerd", [False, True], ids=["from-classic", "from-containerd"])
@pytest.mark.parametrize("target_containerd", [False, True], ids=["to-classic", "to-containerd"])
def test_a_first_ship_and_one_of_a_small_change(pair, source_containerd, target_containerd):
    nodes = pair(source_containerd=source_containerd, target_containerd=target_containerd)
    first = nodes.ship(OLD)
    assert first["ship"]["mode"] == "layers" and first["ship"]["bytes"] > len(BIG) * 0.9
    second = nodes.ship(NEW)
    assert second["image"]["identity"] == from_inspect(NEW.document()).identity
    assert second["image"]["digests"] == NEW.digests, "the source's digest is remembered, so that nothing is shipped twice"
    assert second["ship"]["bytes"] <= 1.1 * 3000
    assert len(nodes.target.loaded[1]) < 40_000, "the engine did not get what it has"
    assert nodes.target_record.digests(second["image"]["id"]) == NEW.digests
    assert not os.path.exists(nodes.folder / "target/ship") or not os.listdir(nodes.folder / "target/ship")


def test_a_worker_that_pulled_its_base_itself_gets_a_manifest_of_its_own_blobs(pair):
    """Its blobs are compressed, those of a classic source are not: the layers that are here count all the same."""
    nodes = pair(OLD, target_containerd=True)
    result = nodes.ship(NEW)
    assert result["image"]["identity"] == from_inspect(NEW.document()).identity
    assert result["ship"]["bytes"] < 10_000


@pytest.mark.parametrize("percent", [25, 50, 75])
@pytest.mark.parametrize("containerd", [False, True])
def test_layers_go_on_after_a_cut(pair, percent, containerd):
    nodes = pair(source_containerd=containerd)
    original = image_source.Source.ask
    cuts = []

    def cut_once(self, *words):
        if words[0] == "image-layers" and not cuts:
            cuts.append(words)
            nodes.limit.write_text(str(len(BIG) * percent // 100))
        return original(self, *words)

    image_source.Source.ask = cut_once
    try:
        result = nodes.ship(NEW, "layers")
    finally:
        image_source.Source.ask = original
    total = sum(len(layer) for layer in NEW.content.values())
    assert cuts and nodes.verbs().count("image-layers") == 2
    assert result["ship"]["bytes"] <= 1.01 * total, "what had come was not sent again"
    assert "@" in nodes.calls.read_text().splitlines()[-1], "the second request names what is there"


def test_a_run_that_was_ended_leaves_what_the_next_one_uses(pair, monkeypatch):
    nodes = pair()
    monkeypatch.setattr(image_ship, "PAUSES", ())
    inspect = image_source.Source.ask_line

    def then_cut(self, *words):
        answer = inspect(self, *words)
        nodes.limit.write_text("2000000")
        return answer

    monkeypatch.setattr(image_source.Source, "ask_line", then_cut)
    with pytest.raises(Refused, match="image.ship"):
        nodes.ship(NEW)
    assert NEW.tag not in [image.tag for image in nodes.target.images.values()]
    monkeypatch.setattr(image_source.Source, "ask_line", inspect)
    assert nodes.ship(NEW)["ship"]["bytes"] < 1_200_000


def test_only_forgotten_parts_of_images_are_removed_from_a_directory_that_has_other_things_too(pair):
    nodes = pair()
    folder = nodes.folder / "target/ship"
    ours, theirs = ["0" * 16, "1" * 64 + ".tar"], ["models", "backup.tar", "0" * 16 + "-mine"]
    for name in (*ours, *theirs):
        (folder / name).mkdir(parents=True)
        (folder / name / "content").write_text("x")
        os.utime(folder / name, (0, 0))
    nodes.ship(NEW)
    assert sorted(os.listdir(folder)) == sorted(theirs)


def test_a_disk_that_is_full_is_not_taken_for_an_engine_that_does_not_answer(pair, monkeypatch):
    nodes = pair()

    def full(self, blob, offset, stream):
        yield from ()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path(blob))

    monkeypatch.setattr(image_source.Staging, "receive", full)
    with pytest.raises(Refused, match="No space left on device") as refused:
        nodes.ship(NEW, "layers")
    assert "Docker Engine" not in str(refused.value)
    assert nodes.ship(NEW)["ship"]["mode"] == "stream"
    assert os.listdir(nodes.folder / "target/ship") == [], "what the first way has left is of no use any more"


def test_a_base_that_this_nodes_own_engine_cannot_push_is_a_reason_to_try_another_way(pair, monkeypatch):
    nodes = pair(OLD, target_containerd=True)

    def index(self, api, image_id, platform=None):
        raise ExportError("the engine pushes an index of several platforms")

    monkeypatch.setattr(image_ship.Receiver, "push", index)
    tried = []
    monkeypatch.setattr(Ship, "by_stream", lambda self, lack: tried.append(lack))
    with pytest.raises(Refused, match="is not there after the load"):
        nodes.ship(NEW)
    assert len(tried) == 1


def test_a_layer_with_other_content_is_thrown_away_and_fetched_again(pair):
    nodes = pair()
    staging = image_source.Staging(str(nodes.folder / "target/ship" / from_inspect(NEW.document()).identity[7:23]), str(nodes.folder / "target"))
    part = image_source.Blob(NEW.layers[0], NEW.layers[0], 0, "")
    with open(staging.path(part) + ".part", "wb") as stream:
        stream.write(b"x" * 1000)
    assert nodes.ship(NEW)["image"]["present"]


@pytest.mark.parametrize("content", [b"", b"x" * 1000])
def test_a_staged_layer_that_was_damaged_is_thrown_away_and_fetched_again(pair, content):
    """A power cut may leave a file with its final name and without its bytes: no run would ever get past it."""
    nodes = pair()
    staging = image_source.Staging(str(nodes.folder / "target/ship" / from_inspect(NEW.document()).identity[7:23]), str(nodes.folder / "target"))
    with open(staging.path(image_source.Blob(NEW.layers[0], NEW.layers[0], 0, "")), "wb") as stream:
        stream.write(content)
    result = nodes.ship(NEW, "layers")
    assert result["image"]["present"] and result["ship"]["bytes"] >= len(BIG)


@pytest.mark.parametrize("mode", ["archive", "stream"])
def test_whole_archives(pair, mode, tmp_path):
    if mode == "archive" and shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    nodes = pair()
    rsync_through_the_script(nodes)
    result = nodes.ship(NEW, mode)
    assert result["ship"]["mode"] == mode
    assert result["image"]["identity"] == from_inspect(NEW.document()).identity
    assert result["image"]["tags"] == [NEW.tag], "an archive made by id has no name in it"
    assert not list(tmp_path.glob("*/ship/*.tar")), "nothing is left on either end"


def test_a_stream_that_the_source_refuses_says_why_and_not_what_the_engine_makes_of_nothing(pair):
    nodes = pair()
    ssh = nodes.folder / "bin/ssh"
    no = 'case "$words" in image-stream*) echo "sparkops: refused: no room there" >&2; exit 1 ;; esac'
    ssh.write_text(ssh.read_text().replace("limit=$(cat", f"{no}\nlimit=$(cat"))
    with pytest.raises(Refused, match="no room there"):
        nodes.ship(NEW, "stream")
    assert nodes.target.loaded == []


@pytest.fixture
def given_away(monkeypatch):
    """Root: where it gives something to the account of the state root."""
    paths = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda made, uid, gid: paths.append(os.readlink(f"/proc/self/fd/{made}") if isinstance(made, int) else made))
    return paths


@pytest.mark.parametrize("mode", ["layers", "archive"])
@pytest.mark.parametrize("named", [False, True], ids=["made", "of-the-user"])
def test_what_root_makes_does_not_keep_out_the_ships_of_the_account(pair, given_away, mode, named):
    """An account that gets Docker rights later ships by itself. A directory that the user named may have other things in it, and stays as it is."""
    if mode == "archive" and shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    nodes = pair()
    rsync_through_the_script(nodes)
    staging = nodes.folder / "target/disk/ship"
    if named:
        staging.mkdir(parents=True)
    nodes.ship(NEW, mode, staging=str(staging))
    folder = str(staging / from_inspect(NEW.document()).identity[7:23])
    parts = [f"{folder}/{layer[7:]}-{layer[7:]}.part" for layer in NEW.layers]
    made = [*([] if named else [str(staging), str(staging.parent)]), *([folder, *parts] if mode == "layers" else [str(staging / f"{NEW.id[7:]}.tar")])]
    assert sorted(path for path in given_away if str(staging.parent) in path) == sorted(made)


def rsync_through_the_script(nodes):
    """rsync gives each word of the far end's command as an argument of its own."""
    ssh = nodes.folder / "bin/ssh"
    text = ssh.read_text().replace(
        'for words in "$@"; do :; done', 'for words in "$@"; do :; done\ncase "$*" in *image-rsync*) words="image-rsync ${*##* image-rsync }" ;; esac'
    )
    ssh.write_text(text)


def test_an_archive_that_lacks_a_blob_is_noticed_before_it_is_sent_and_layers_are_tried(pair, monkeypatch):
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    nodes = pair()
    complete = nodes.source.save
    damage = iter([without_largest])
    monkeypatch.setattr(nodes.source, "save", lambda image: next(damage, bytes)(complete(image)))
    result = nodes.ship(NEW, "archive")
    assert result["ship"]["mode"] == "layers"
    assert "names blobs that it has not" in result["notices"][0]
    assert len(nodes.target.loaded) == 1


def without_largest(data):
    kept = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if member.isreg():
                kept[member.name] = archive.extractfile(member).read()
    del kept[max(kept, key=lambda name: len(kept[name]))]
    return archive_of(kept)


@pytest.mark.parametrize(
    ("mode", "kept", "room", "modes"),
    [
        ("auto", 0, True, ["layers", "stream"]),
        ("auto", 0, False, ["stream", "layers"]),
        ("auto", 2, False, ["layers", "stream"]),
        ("layers", 0, False, ["layers"]),
        ("archive", 0, True, ["archive", "layers"]),
        ("stream", 2, True, ["stream"]),
    ],
)
def test_modes(pair, monkeypatch, mode, kept, room, modes):
    monkeypatch.setattr(Ship, "lack_of_space", lambda self, staged, sent, added: None if room else ("/", 2, 1))
    ship = Ship.__new__(Ship)
    ship.mode, ship.staged = mode, "/none"
    assert ship.choose(Lack(from_inspect(NEW.document()), None, kept, [], 100)) == modes


def test_one_layer_that_is_here_does_not_forbid_the_stream_that_a_small_disk_has_room_for(pair, monkeypatch):
    """Most images share their lowest layers: the rest staged and loaded needs three times its size, a stream needs the image twice."""
    nodes = pair(EngineImage([b"bottom"], "registry.example/team/other:1"), source_images=(SHARED,))
    monkeypatch.setattr(image_ship.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, len(BIG) * 5 // 2))
    assert nodes.ship(SHARED)["ship"]["mode"] == "stream"


def test_what_is_staged_already_needs_no_room_a_second_time(pair, monkeypatch):
    """After a cut the disk is as full as the staged layers are large: they are used, and not thrown away for a stream of everything."""
    nodes = pair()
    staging = image_source.Staging(str(nodes.folder / "target/ship" / from_inspect(NEW.document()).identity[7:23]), str(nodes.folder / "target"))
    pathlib.Path(staging.path(image_source.Blob(NEW.layers[0], NEW.layers[0], 0, ""))).write_bytes(BIG)
    monkeypatch.setattr(image_ship.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, len(BIG) * 5 // 2))
    result = nodes.ship(NEW)
    assert result["ship"]["mode"] == "layers" and result["ship"]["bytes"] < 50_000


def test_no_room_is_refused_before_the_first_byte(pair, monkeypatch):
    nodes = pair()
    monkeypatch.setattr(image_ship.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(Refused, match=r"1000 bytes free .* image_staging .*\[image\.space\]"):
        nodes.ship(NEW, "layers")
    assert nodes.verbs() == ["image-inspect"]


def test_room_is_counted_for_both_directories_of_one_filesystem(pair, monkeypatch):
    nodes = pair()
    ship = Ship.__new__(Ship)
    ship.staging_root, ship.api = str(nodes.folder / "target/ship"), image_ship.DockerApi(nodes.target.socket_path)
    monkeypatch.setattr(image_ship.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    assert ship.lack_of_space(500, 400, 100) is None
    assert ship.lack_of_space(500, 400, 101)[1:] == (1001, 1000)
    assert ship.lack_of_space(0, 0, 0) is None


@pytest.mark.parametrize(("mode", "times"), [("layers", 3), ("archive", 3), ("stream", 2)])
def test_the_engine_needs_room_for_what_it_is_sent_beside_what_it_makes_of_it(pair, monkeypatch, mode, times):
    """moby unpacks all of an archive below its root before it registers the first layer; a containerd store keeps blobs and snapshots."""
    if mode == "archive" and shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    nodes = pair()
    rsync_through_the_script(nodes)
    for free, refused in ((times - 0.5, True), (times + 0.5, False)):
        monkeypatch.setattr(image_ship.shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(10, 9, int(len(BIG) * free)))
        if refused:
            with pytest.raises(Refused, match=r"\[image\.space\]"):
                nodes.ship(NEW, mode)
            assert not nodes.target.loaded
        else:
            assert nodes.ship(NEW, mode)["ship"]["mode"] == mode


def test_an_archive_that_the_engine_does_not_take_is_removed_once_layers_have_come(pair):
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    nodes = pair()
    rsync_through_the_script(nodes)
    load, answers = nodes.target.load, [b'{"error": "no"}']
    nodes.target.routes[("POST", "/images/load")] = lambda request: answers.pop() if answers else load(request)
    assert nodes.ship(NEW, "archive")["ship"]["mode"] == "layers"
    assert os.listdir(nodes.folder / "target/ship") == [] and os.listdir(nodes.folder / "source/ship") == []


def test_the_source_gives_only_what_the_role_has_recorded(pair):
    nodes = pair(source_images=(OLD,))
    nodes.source.add(NEW)
    with pytest.raises(Refused, match="not one that role image has recorded"):
        nodes.ship(NEW)


def test_an_image_that_is_another_one_at_the_source_is_refused(pair):
    nodes = pair()
    with pytest.raises(Refused, match="wanted sha256:0"):
        nodes.ship(NEW, identity="sha256:0")


def test_an_engine_that_refuses_a_load_says_why(pair):
    nodes = pair()
    nodes.target.routes[("POST", "/images/load")] = json.dumps({"error": "max depth exceeded"}).encode()
    with pytest.raises(Refused, match="max depth exceeded"):
        nodes.ship(NEW, "layers")


def test_whose_the_image_is_is_noted_by_the_module(pair):
    nodes = pair(NEW)
    state = nodes.folder / "target/test"
    wanted = {
        "reference": NEW.tag, "image": from_inspect(NEW.document()).as_dict(), "address": "198.51.100.11", "source_user": "me", "origin": "spark-1",
        "key": "/key", "known_hosts": "/known", "node": "spark-2", "deployment": "test", "state_dir": str(state),
        "state_root": str(nodes.folder / "target"), "staging": str(nodes.folder / "target/ship"), "socket": nodes.target.socket_path,
    }  # fmt: skip
    call(ship_module, check=True, **wanted)
    assert not state.exists()
    assert call(ship_module, **wanted)["changed"] is False
    assert json.loads((state / "staged.json").read_text())["image"] == NEW.id


@pytest.mark.parametrize(
    ("key", "follows", "check", "after"),
    [("", False, True, None), ("", True, True, "bootstrap"), ("key", False, True, "image"), ("", True, False, None)],
    ids=["no-key", "bootstrap-makes-it", "key", "no-prediction"],
)
def test_a_ship_without_a_key_is_predicted_only_where_bootstrap_makes_it(pair, key, follows, check, after):
    nodes = pair()
    if key:
        (nodes.folder / key).write_text("")
    wanted = {
        "reference": NEW.tag, "image": from_inspect(NEW.document()).as_dict(), "address": "198.51.100.11", "source_user": "me", "origin": "spark-1",
        "key": str(nodes.folder / "key"), "key_follows": follows, "known_hosts": "/known", "node": "spark-2", "deployment": "test",
        "state_dir": str(nodes.folder / "target/test"), "state_root": str(nodes.folder / "target"), "staging": str(nodes.folder / "target/ship"),
        "socket": nodes.target.socket_path,
    }  # fmt: skip
    told = call(ship_module, check=check, **wanted)
    if after:
        assert told["changed"] and told["known_after"] == [after]
    else:
        assert told["failed"] and "[image.key]" in told["msg"]


def test_an_image_that_somebody_else_loaded_here_gets_the_digest_of_the_source(pair):
    """Without it a restart, which looks for the pinned digest and ships nothing, would refuse this node for ever."""
    loaded = EngineImage(list(NEW.content.values()), NEW.tag, **NEW.settings)
    nodes = pair(loaded)
    common = {
        "node": "spark-2", "deployment": "test", "state_dir": str(nodes.folder / "target/test"), "state_root": str(nodes.folder / "target"),
        "socket": nodes.target.socket_path,
    }  # fmt: skip
    wanted = {
        "reference": NEW.tag, "image": from_inspect(NEW.document()).as_dict(), "address": "198.51.100.11", "source_user": "me", "origin": "spark-1",
        "key": "/key", "known_hosts": "/known", "staging": str(nodes.folder / "target/ship"), **common,
    }  # fmt: skip
    predicted = call(ship_module, check=True, **wanted)
    assert predicted["changed"] and predicted["image"]["digests"] == NEW.digests and not nodes.target_record.read()["images"]
    restart = {"reference": NEW.tag, "digest": NEW.digests[0], "policy": "never", **common}
    assert "image.policy" in call(image_pull, **restart)["msg"]
    assert call(ship_module, **wanted)["changed"] and not nodes.target.loaded and not nodes.calls.exists()
    assert call(image_pull, **restart)["image"]["id"] == loaded.id
    assert not call(ship_module, **wanted)["changed"]


def test_a_ship_of_another_image_that_was_going_on_is_not_taken_for_the_wanted_one(pair, monkeypatch):
    nodes = pair(OLD)
    begun = []
    described = {image.tag: {**from_inspect(image.document()).as_dict()} for image in (OLD, NEW)}
    outcome = {"ship": {"mode": "layers", "bytes": 1, "seconds": 1}, "notices": []}
    job = nodes.folder / "target/test/jobs/ship"
    job.mkdir(parents=True)
    (job / "request.json").write_text(json.dumps({"run_id": "1", "identity": described[OLD.tag]["identity"]}))
    monkeypatch.setattr(ship_module.ImageShip, "has_key", lambda self: True)
    monkeypatch.setattr(ship_module.ImageShip, "begin", lambda self, request: begun.append(request["reference"]))
    monkeypatch.setattr(ship_module.ImageShip, "end_of", lambda self, run: {**outcome, "image": described[OLD.tag if run == "1" else NEW.tag]})
    wanted = {
        "reference": NEW.tag, "image": described[NEW.tag], "address": "198.51.100.11", "source_user": "me", "origin": "spark-1",
        "key": "/key", "known_hosts": "/known", "node": "spark-2", "deployment": "test", "state_dir": str(nodes.folder / "target/test"),
        "state_root": str(nodes.folder / "target"), "staging": str(nodes.folder / "target/ship"), "socket": nodes.target.socket_path, "run_id": "1",
    }  # fmt: skip
    assert call(ship_module, **wanted)["image"]["id"] == NEW.id and begun == [NEW.tag]
    begun.clear()
    wanted.update(reference=OLD.tag, image=described[OLD.tag])
    assert call(ship_module, **wanted)["image"]["id"] == OLD.id and begun == [], "one of the wanted image is waited for"


def test_the_same_layer_twice_in_an_image(pair):
    image = EngineImage([BIG, b"same", b"b", b"same", b"c"], "registry.example/team/app:3")
    nodes = pair(EngineImage([BIG, b"same"], "registry.example/team/base:1"), source_images=(image,))
    assert nodes.ship(image)["image"]["present"]


@pytest.mark.parametrize("verb", ["image-inspect", "image-layers", "image-archive", "image-rsync"])
@pytest.mark.parametrize(
    ("words", "mended"),
    [
        ("ssh: connect to host 198.51.100.11 port 22: No route to host", True),
        ("kex_exchange_identification: Connection closed by remote host", True),
        ("me@198.51.100.11: Permission denied (publickey).", False),
        ("Host key verification failed.", False),
        ("ssh: Could not resolve hostname spark-1: Name or service not known", False),
    ],
)
def test_a_link_that_is_away_for_a_minute_is_waited_for_and_what_waiting_does_not_mend_is_told_at_once(pair, monkeypatch, verb, words, mended):
    if verb == "image-rsync" and shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    nodes, pauses = pair(), []
    rsync_through_the_script(nodes)
    ssh, away = nodes.folder / "bin/ssh", nodes.folder / "away"
    away.write_text("")
    cut = f'case "$*" in *{verb}*) [ -e {away} ] && echo "{words}" >&2 && exit 255 ;; esac'
    ssh.write_text(ssh.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{cut}\n", 1))

    def wait(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            away.unlink()

    monkeypatch.setattr(image_ship, "PAUSES", (5, 15, 30, 60))
    monkeypatch.setattr(image_ship.time, "sleep", wait)
    mode = "layers" if verb in ("image-inspect", "image-layers") else "archive"
    if mended:
        assert nodes.ship(NEW, mode)["ship"]["mode"] == mode and pauses == [5, 15, 30]
    elif mode == "archive":
        assert words in nodes.ship(NEW, mode)["notices"][0] and not pauses
    else:
        with pytest.raises(Refused) as refused:
            nodes.ship(NEW, mode)
        assert words in str(refused.value) and not pauses


def test_the_patience_with_a_link_begins_anew_whenever_bytes_came_and_ends_when_none_come(pair, monkeypatch):
    nodes, pauses, held = pair(), [], [0]
    answers = iter([0, 0, 7, 0, 0, 0, 0, 0])
    ship = Ship.__new__(Ship)
    ship.progress = Progress(str(nodes.folder / "progress.json"))
    monkeypatch.setattr(image_ship, "PAUSES", (5, 15, 30, 60))
    monkeypatch.setattr(image_ship.time, "sleep", pauses.append)

    def attempt():
        held[0] += next(answers)
        raise Dropped("the link was cut")

    with pytest.raises(Dropped):
        ship.persistently(attempt, lambda: held[0])
    assert pauses == [5, 15, 5, 15, 30, 60]


def test_a_lost_link_is_told_apart_from_a_refusal(pair):
    nodes = pair()
    source = image_source.Source("198.51.100.11", "me", "/key", "/known")
    nodes.limit.write_text("10")
    with pytest.raises(Dropped):
        source.ask_line("image-inspect", NEW.id)
    with pytest.raises(image_source.TransferError, match="not the id of an image"):
        source.ask_line("image-inspect", "latest")


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("app:1", "docker.io/library/app:1"),
        ("team/app:1", "docker.io/team/app:1"),
        ("registry.example:5000/app:1", "registry.example:5000/app:1"),
        ("localhost/app:1", "localhost/app:1"),
    ],
)
def test_names_in_containerd(reference, name):
    assert canonical(reference) == name
