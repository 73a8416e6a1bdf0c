# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The source's end of a ship: gives images of this node to the peers that may run the gate.

``image_source.py VERB ARGUMENTS`` is started by the forced command of the node key. It gives only images that role
``image`` has recorded here, and writes nothing but its own staging directory:

* ``image-inspect IMAGE``: the inspect document, and what else the receiver has to know before it begins,
* ``image-layers IMAGE LAYER...``: layers, each as a line of JSON and that many bytes; at the end manifest and config,
* ``image-stream IMAGE``: the engine's whole archive,
* ``image-archive IMAGE``: the archive made and checked in the staging directory; its name, size, and digest,
* ``image-rsync --server --sender ...``: that archive through rsync,
* ``image-done IMAGE``: the archive is no longer needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import time
import typing as t

from _docker_api import DEFAULT_SOCKET, DockerApi, DockerError, NoPermission, Pieces
from _image_export import CHUNK, PUSHED, Blob, Exporter, ExportError, api_version, give_to_owner, make_folder, room_to_save

RECORD = "images.json"
IMAGE = re.compile(r"sha256:[0-9a-f]{64}")
LAYER = re.compile(r"(?P<layer>sha256:[0-9a-f]{64})(@(?P<offset>[0-9]{1,15}):(?P<digest>sha256:[0-9a-f]{64}))?")
ARCHIVE = re.compile(r"[0-9a-f]{64}\.tar")
# What an rsync client sends for one file that is only read; the part after "e." are protocol flags.
RSYNC_LETTERS = re.compile(r"-[vltogpDI]*(e[.0-9]*[LsfxCIvui]*)?")
RSYNC_WORDS = ("--append", "--inplace", "--partial")
# An archive that no receiver has finished with is removed by the next one.
FORGOTTEN_SECONDS = 24 * 3600


class Refused(Exception):
    """The peer asks for what it may not have, or what is not here."""


# What may be read


def state_root() -> str:
    """The gate may name it; without that, the two places where it can be."""
    for path in (os.environ.get("SPARKOPS_STATE_ROOT"), "/var/lib/sparkops", os.path.expanduser("~/.local/state/sparkops")):
        if path and os.path.exists(os.path.join(path, RECORD)):
            return path
    raise Refused("role image has recorded no image on this node")


def read_record() -> dict[str, t.Any]:
    with open(os.path.join(state_root(), RECORD), encoding="utf-8") as stream:
        return json.load(stream)


def source() -> dict[str, t.Any]:
    """Where the engine is and where archives go."""
    return {"socket": DEFAULT_SOCKET, "staging": os.path.join(state_root(), "image-ship"), **read_record().get("source", {})}


def allowed_image(api: DockerApi, image_id: str) -> dict[str, t.Any]:
    if not IMAGE.fullmatch(image_id):
        raise Refused(f"{image_id!r} is not the id of an image")
    document = api.inspect_image(image_id)
    if document is None:
        raise Refused(f"no image {image_id} on this node")
    if document["Id"] not in read_record()["images"]:
        raise Refused(f"image {image_id} is not one that role image has recorded")
    return document


# Answers


def frame(out: t.BinaryIO, **head: t.Any) -> None:
    out.write(json.dumps(head, separators=(",", ":")).encode() + b"\n")


def exporter(api: DockerApi, document: dict[str, t.Any]) -> Exporter:
    return Exporter(api, document, Pieces, source()["staging"], state_root())


def image_inspect(api: DockerApi, out: t.BinaryIO, image_id: str) -> None:
    document = allowed_image(api, image_id)
    recorded = read_record()["images"][document["Id"]].get("digests", [])
    frame(out, inspect=document, recorded=recorded, sizes=exporter(api, document).sizes())


def image_layers(api: DockerApi, out: t.BinaryIO, image_id: str, *words: str) -> None:
    """A layer is wanted from the offset that the receiver has of the same blob already."""
    held = dict(parse_layer(word) for word in words)

    def send(blob: Blob, content: t.BinaryIO) -> None:
        offset, digest = held[blob.diff_id]
        offset = min(offset, blob.size) if digest == blob.digest else 0
        frame(out, kind="layer", offset=offset, **blob._asdict())
        read_away(content, offset)
        copy(content, out, blob.size - offset)

    image = exporter(api, allowed_image(api, image_id)).export(held, send)
    frame(out, kind="image", manifest=image.manifest.decode(), size=len(image.config))
    out.write(image.config)


def parse_layer(word: str) -> tuple[str, tuple[int, str]]:
    match = LAYER.fullmatch(word)
    if match is None:
        raise Refused(f"{word!r} is not a layer")
    return match["layer"], (int(match["offset"] or 0), match["digest"] or "")


def read_away(content: t.BinaryIO, count: int) -> None:
    while count:
        piece = content.read(min(count, CHUNK))
        if not piece:
            raise ExportError("the engine's layer ended early")
        count -= len(piece)


def copy(content: t.BinaryIO, out: t.BinaryIO, count: int) -> None:
    while count:
        piece = content.read(min(count, CHUNK))
        if not piece:
            raise ExportError("the engine's layer ended early")
        out.write(piece)
        count -= len(piece)


# Whole archives


def saved(api: DockerApi, document: dict[str, t.Any]) -> t.Iterator[bytes]:
    """The engine's archive of one platform: an index of several would name blobs that are not here."""
    query: dict[str, t.Any] = {}
    if api_version(api) >= (1, 48):
        query["platform"] = json.dumps({"os": document["Os"], "architecture": document["Architecture"]})
    return api.stream("GET", f"/images/{document['Id']}/get", query=query)


class PassedOn:
    """A file whose bytes go on to others while they are read."""

    def __init__(self, pieces: t.Iterator[bytes], *takers: t.Callable[[bytes], t.Any]) -> None:
        self.content = Pieces(pieces)
        self.takers = takers

    def read(self, size: int) -> bytes:
        piece = self.content.read(size)
        for take in self.takers:
            take(piece)
        return piece


def give_whole(archive: PassedOn) -> None:
    """Read an archive to its end; one that no engine could load is told then."""
    lacking = missing_blobs(t.cast(t.BinaryIO, archive))
    while archive.read(CHUNK):
        pass
    if lacking:
        raise Refused(
            f"the engine's archive names blobs that it has not: {', '.join(lacking)}. A containerd store fetches no layer that it has unpacked from "
            "another image, and cannot give what it has not fetched: remove the images here that share layers with this one, then pull it again; or let "
            "the worker pull"
        )


def image_stream(api: DockerApi, out: t.BinaryIO, image_id: str) -> None:
    document = allowed_image(api, image_id)
    with room_to_save(api, document):
        give_whole(PassedOn(saved(api, document), out.write))


def image_archive(api: DockerApi, out: t.BinaryIO, image_id: str) -> None:
    document = allowed_image(api, image_id)
    folder = source()["staging"]
    make_folder(folder, state_root())
    name = document["Id"].partition(":")[2] + ".tar"
    path = os.path.join(folder, name)
    with locked(folder):
        forget_old(folder, name)
        if not os.path.exists(path + ".json"):
            make_archive(api, document, path)
        about = note_receiver(path, wants=True)
    frame(out, name=name, size=about["size"], sha256=about["sha256"])


def make_archive(api: DockerApi, document: dict[str, t.Any], path: str) -> None:
    digest = hashlib.sha256()
    with room_to_save(api, document, os.path.dirname(path)):
        try:
            with open(path, "wb") as target:
                give_to_owner(target.fileno(), state_root())
                give_whole(PassedOn(saved(api, document), target.write, digest.update))
        except BaseException:
            os.unlink(path)
            raise
    with open(path + ".json", "w", encoding="utf-8") as stream:
        give_to_owner(stream.fileno(), state_root())
        json.dump({"size": os.path.getsize(path), "sha256": digest.hexdigest(), "receivers": []}, stream)


def note_receiver(path: str, wants: bool) -> dict[str, t.Any]:
    """Who still wants the archive, by the address of its session."""
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    with open(path + ".json", "r+", encoding="utf-8") as stream:
        about = json.load(stream)
        about["receivers"] = sorted({*about["receivers"], address} if wants else {*about["receivers"]} - {address})
        stream.seek(0)
        stream.truncate()
        json.dump(about, stream)
    return about


def missing_blobs(stream: t.BinaryIO) -> list[str]:
    """What the archive's manifest names and the archive lacks: such an archive fails when it is loaded, after all its bytes were sent.

    Every engine writes manifest.json. A containerd store writes it for the one platform that counts here, and also an index.json whose index
    may name further platforms: those that the store has not are left out rightly, and of an image with a layer missing it writes the names alone.
    """
    names, manifest = set(), None
    with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK) as archive:
        for member in archive:
            names.add(member.name)
            if member.name == "manifest.json":
                manifest = json.load(t.cast(t.IO[bytes], archive.extractfile(member)))
    if manifest is None:
        return ["manifest.json"]
    return sorted({name for entry in manifest for name in (entry["Config"], *entry["Layers"])} - names)


@contextlib.contextmanager
def locked(folder: str) -> t.Iterator[None]:
    """Several receivers at once wait for one archive instead of making one each."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def forget_old(folder: str, current: str) -> None:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name == current or time.time() - os.path.getmtime(path) < FORGOTTEN_SECONDS:
            continue
        if ARCHIVE.fullmatch(name):
            remove_archive(path)
        elif name.startswith(PUSHED):
            shutil.rmtree(path, ignore_errors=True)


def remove_archive(path: str) -> None:
    for name in (path + ".json", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def image_rsync(api: DockerApi, out: t.BinaryIO, *words: str) -> None:
    if words[:2] != ("--server", "--sender") or len(words) < 5 or words[-2] != ".":
        raise Refused("only rsync --server --sender of one archive is allowed")
    for word in words[2:-2]:
        if word not in RSYNC_WORDS and not RSYNC_LETTERS.fullmatch(word):
            raise Refused(f"rsync option {word}")
    if not ARCHIVE.fullmatch(words[-1]):
        raise Refused(f"{words[-1]!r} is not an archive")
    program = shutil.which("rsync")
    if program is None:
        raise Refused("rsync is not installed on this node")
    os.chdir(source()["staging"])
    os.execv(program, [program, *words])


def image_done(api: DockerApi, out: t.BinaryIO, image_id: str) -> None:
    """The last receiver takes the archive with it."""
    document = allowed_image(api, image_id)
    path = os.path.join(source()["staging"], document["Id"].partition(":")[2] + ".tar")
    with locked(os.path.dirname(path)):
        if os.path.exists(path + ".json") and not note_receiver(path, wants=False)["receivers"]:
            remove_archive(path)
    frame(out, done=True)


VERBS: dict[str, t.Callable[..., None]] = {
    "image-inspect": image_inspect,
    "image-layers": image_layers,
    "image-stream": image_stream,
    "image-archive": image_archive,
    "image-rsync": image_rsync,
    "image-done": image_done,
}


def main(words: list[str]) -> int:
    if not words or words[0] not in VERBS:
        sys.stderr.write(f"sparkops: refused: not one of {', '.join(VERBS)}\n")
        return 126
    try:
        api = DockerApi(source()["socket"])
        if not usable(api):
            return as_root(words)
        VERBS[words[0]](api, sys.stdout.buffer, *words[1:])
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The receiver has ended; python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (DockerError, ExportError, OSError, ValueError, KeyError, TypeError, tarfile.TarError, Refused) as exc:
        sys.stderr.write(f"sparkops: refused: {exc}\n")
        return 1
    return 0


def usable(api: DockerApi) -> bool:
    try:
        api.version()
    except NoPermission:
        return False
    return True


def as_root(words: list[str]) -> int:
    """This account may not use Docker: the same program, once, through sudo."""
    if os.getuid() == 0 or shutil.which("sudo") is None:
        raise Refused("this account may not use Docker")
    kept = {"SPARKOPS_STATE_ROOT": state_root(), "SSH_CONNECTION": os.environ.get("SSH_CONNECTION", "")}
    variables = [f"{name}={value}" for name, value in kept.items()]
    os.execvp("sudo", ["sudo", "-n", "env", *variables, sys.executable, os.path.abspath(__file__), *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
