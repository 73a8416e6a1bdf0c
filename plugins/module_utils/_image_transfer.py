# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The receiver's end of a ship: fetch what this node lacks of an image, prove it, load it, remember it.

Layers come as files into a staging directory and stay there until the image is complete, so that a cut costs only what
was not there yet. The engine then gets an archive in which the layers that it has already are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import ApiError, DockerApi, Pieces
from ansible_collections.sparkops.inference.plugins.module_utils._image_export import (
    CHUNK,
    Blob,
    Pushed,
    Receiver,
    containerd_store,
)
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import Image, compare, from_inspect, present_prefix
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, run_job

ATTEMPTS = 5
# A frame is a line; the longest one has a manifest of some hundred layers in it.
LINE = 1 << 20
# What a load needs beside the layers themselves.
MARGIN = 256 << 20
SSH_OPTIONS = (
    "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oStrictHostKeyChecking=yes", "-oIdentitiesOnly=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4",
)  # fmt: skip
# AES has instructions of its own on every Spark and server; the default cipher costs twice the time.
CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,aes128-ctr,chacha20-poly1305@openssh.com"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


class TransferError(Exception):
    """The ship cannot be done this way; the text says why."""


class Dropped(TransferError):
    """The link or the source ended early: what came is kept, and another attempt goes on from there."""


class Source:
    """The peer that has the image, behind the forced command of its gate."""

    def __init__(self, address: str, user: str, key: str, known_hosts: str) -> None:
        self.name = f"{user}@{address}"
        self._options = [*SSH_OPTIONS, f"-oUserKnownHostsFile={known_hosts}", f"-oCiphers={CIPHERS}", "-i", key]

    @contextlib.contextmanager
    def ask(self, *words: str) -> t.Iterator[t.BinaryIO]:
        """The answer to one verb as a file. What the other end had to say is raised when the caller is done reading."""
        argv = ["ssh", *self._options, self.name, " ".join(words)]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            stdout = t.cast(t.BinaryIO, process.stdout)
            early: Dropped | None = None
            try:
                yield stdout
            except Dropped as exc:
                early = exc
            except BaseException:
                process.kill()
                process.wait()
                raise
            stdout.close()
            code = process.wait()
            errors.seek(0)
            self._raise(code, errors.read().decode("utf-8", "replace").strip(), early)

    def _raise(self, code: int, text: str, early: Dropped | None) -> None:
        """Code 255 is ssh's own; a program that was killed says nothing."""
        if code == 255 or (code and not text):
            raise Dropped(f"ssh to {self.name}: {text or 'the connection was lost'}")
        if code:
            raise TransferError(f"{self.name}: {text}")
        if early:
            raise early

    def ask_line(self, *words: str) -> dict[str, t.Any]:
        with self.ask(*words) as answer:
            return read_frame(answer)

    def rsync(self, name: str, target: str) -> None:
        """Fetch a file of the source's staging directory; what is there of it already is proven and kept."""
        shell = " ".join(["ssh", *self._options])
        argv = ["rsync", "--inplace", "--append-verify", "--rsync-path=image-rsync", f"--rsh={shell}", f"{self.name}:{name}", target]
        result = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if result.returncode != 0:
            raise Dropped(f"rsync from {self.name}: {result.stderr.decode('utf-8', 'replace').strip()}")


def read_frame(stream: t.BinaryIO) -> dict[str, t.Any]:
    line = stream.readline(LINE)
    if not line.endswith(b"\n"):
        raise Dropped("the source's answer ended early")
    return json.loads(line)


def read_exactly(stream: t.BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise Dropped("the source's answer ended early")
    return data


class Staging:
    """Layers on their way: C(<diff id>-<digest>) when complete, with C(.part) at the end before that."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def path(self, blob: Blob) -> str:
        return os.path.join(self.folder, f"{blob.diff_id[7:]}-{blob.digest[7:]}")

    @staticmethod
    def blob(path: str) -> Blob:
        """What the name of a complete layer says. The media type is the manifest's affair."""
        diff_id, dummy, digest = os.path.basename(path).partition("-")
        return Blob(f"sha256:{diff_id}", f"sha256:{digest}", os.path.getsize(path), "")

    def complete(self, diff_id: str) -> str | None:
        """The path of a layer that is there."""
        return next((os.path.join(self.folder, name) for name in self._names(diff_id) if not name.endswith(".part")), None)

    def word(self, diff_id: str) -> str:
        """How to ask for the rest of a layer."""
        for name in self._names(diff_id):
            digest = name.partition("-")[2][: -len(".part")]
            return f"{diff_id}@{os.path.getsize(os.path.join(self.folder, name))}:sha256:{digest}"
        return diff_id

    def held_bytes(self, diff_ids: t.Iterable[str]) -> int:
        return sum(os.path.getsize(os.path.join(self.folder, name)) for diff_id in diff_ids for name in self._names(diff_id))

    def receive(self, blob: Blob, offset: int, stream: t.BinaryIO) -> t.Iterator[bytes]:
        """The whole blob: what an earlier attempt left of it, then what comes now. It gets its name once its digest is right."""
        part = self.path(blob) + ".part"
        self._remove_others(blob.diff_id, part)
        hashed = hashlib.sha256()
        with open(part, "r+b" if offset else "wb") as target:
            for piece in exact_pieces(target, offset):
                hashed.update(piece)
                yield piece
            for piece in exact_pieces(stream, blob.size - offset):
                target.write(piece)
                hashed.update(piece)
                yield piece
        if f"sha256:{hashed.hexdigest()}" != blob.digest:
            os.unlink(part)
            raise Dropped(f"layer {blob.digest} came with other content")
        os.rename(part, self.path(blob))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _names(self, diff_id: str) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith(f"{diff_id[7:]}-")]

    def _remove_others(self, diff_id: str, part: str) -> None:
        """A part of the same layer that was compressed in another way is of no use."""
        for name in self._names(diff_id):
            if os.path.join(self.folder, name) != part:
                os.unlink(os.path.join(self.folder, name))


def exact_pieces(stream: t.BinaryIO, count: int) -> t.Iterator[bytes]:
    while count:
        piece = stream.read(min(CHUNK, count))
        if not piece:
            raise Dropped("the link was cut")
        count -= len(piece)
        yield piece


# Archives for docker load


def blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest[7:]}"


def member(name: str, content: bytes) -> bytes:
    return header(name, len(content)) + content + padding(len(content))


def header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    return b"\0" * (-size % tarfile.BLOCKSIZE)


END = b"\0" * (2 * tarfile.BLOCKSIZE)


def classic_tail(reference: str, layers: t.Sequence[str], digests: t.Mapping[str, str], config: bytes) -> bytes:
    """The classic store looks a layer up by its chain before it opens the layer's file, so that file need not be in the archive."""
    names = [blob_name(digests.get(layer, layer)) for layer in layers]
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": names}]
    return member(config_name, config) + member("manifest.json", json.dumps(manifest).encode()) + END


def containerd_tail(reference: str, manifest: bytes, config: bytes) -> bytes:
    """The containerd store finds a blob by its digest, wherever it came from, so it need not be in the archive."""
    digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
    names = {"io.containerd.image.name": canonical(reference), "org.opencontainers.image.ref.name": reference.rpartition(":")[2]}
    media_type = json.loads(manifest).get("mediaType", MANIFEST_TYPE)
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{"mediaType": media_type, "digest": digest, "size": len(manifest), "annotations": names}],
    }
    return (
        member(blob_name("sha256:" + hashlib.sha256(config).hexdigest()), config)
        + member(blob_name(digest), manifest)
        + member("index.json", json.dumps(index).encode())
        + member("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        + END
    )


def canonical(reference: str) -> str:
    """The name with its registry, as containerd keeps it."""
    first, slash, dummy = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


# The work


class Ship:
    """One image from a source to this node."""

    def __init__(self, request: t.Mapping[str, t.Any], progress: Progress) -> None:
        self.reference: str = request["reference"]
        self.source_id: str = request["source_id"]
        self.identity: str = request["identity"]
        self.origin: str = request["origin"]
        self.node: str = request["node"]
        self.mode: str = request["mode"]
        self.staging_root: str = request["staging"]
        self.api = DockerApi(request["socket"], timeout=120)
        self.source = Source(request["address"], request["user"], request["key"], request["known_hosts"])
        self.record = Record(request["state_root"])
        self.progress = progress
        self.bytes = 0
        self.notices: list[str] = []

    def run(self) -> dict[str, t.Any]:
        started = time.monotonic()
        try:
            mode, loaded = self.bring()
        except (TransferError, ApiError) as exc:
            raise Refused(self.refusal("ship", str(exc), "the same image as there", "mend that and run again: what has come already is kept")) from exc
        ship = {"mode": mode, "bytes": self.bytes, "seconds": round(time.monotonic() - started, 1)}
        return {"image": loaded.as_dict(), "ship": ship, "notices": self.notices}

    def bring(self) -> tuple[str, Image]:
        answer = self.source.ask_line("image-inspect", self.source_id)
        image = from_inspect(answer["inspect"], answer["recorded"])
        if image.identity != self.identity:
            raise TransferError(f"{self.source.name} has {image.identity} under this id; wanted {self.identity}")
        held = local_images(self.api)
        kept = present_prefix(image.layers, [other.layers for other in held])
        # A layer is kept by its place in the chain: the same one further up has to come again.
        lacking = list(dict.fromkeys(image.layers[kept:]))
        needed = sum(answer["sizes"].get(layer, 0) for layer in lacking)
        ways: dict[str, t.Callable[[], None]] = {
            "layers": lambda: self.by_layers(image, held, kept, lacking, needed),
            "archive": lambda: self.by_archive(image),
            "stream": lambda: self.by_stream(image),
        }
        modes = self.choose(kept, needed)
        for mode in modes[:-1]:
            try:
                ways[mode]()
                return mode, self.finish(image)
            except Dropped:
                raise
            except TransferError as exc:
                self.notices.append(f"mode {mode} failed, {modes[-1]} is tried: {exc}")
        ways[modes[-1]]()
        return modes[-1], self.finish(image)

    def choose(self, kept: int, needed: int) -> list[str]:
        """Modes in the order to try them. Layers skip what is here and can be resumed, but need room for a second time; a stream needs none."""
        if self.mode == "archive":
            return ["archive", "layers"]
        if self.mode == "auto":
            return ["layers", "stream"] if kept or not self.lack_of_space(needed, needed) else ["stream", "layers"]
        return [self.mode]

    # Layers

    def by_layers(self, image: Image, held: t.Sequence[Image], kept: int, lacking: t.Sequence[str], needed: int) -> None:
        """The engine unpacks while the layers come. After a cut it gets once more what is staged, and then the rest."""
        staging = Staging(os.path.join(self.staging_root, image.identity[7:23]))
        self.require_space(needed - staging.held_bytes(lacking), needed)
        self.progress.begin("ship", needed, f"{len(lacking)} layers from {self.source.name}")
        for attempt in range(1, ATTEMPTS + 1):
            before = staging.held_bytes(lacking)
            try:
                self.load(self.archive(image, held, kept, lacking, staging))
                break
            except Dropped:
                if attempt == ATTEMPTS or staging.held_bytes(lacking) == before:
                    raise
            finally:
                self.bytes += staging.held_bytes(lacking) - before
        staging.remove()

    def archive(self, image: Image, held: t.Sequence[Image], kept: int, lacking: t.Sequence[str], staging: Staging) -> t.Iterator[bytes]:
        self.progress.done = 0
        blobs: dict[str, Blob] = {}
        for layer in lacking:
            path = staging.complete(layer)
            if path:
                blobs[layer] = Staging.blob(path)
                with open(path, "rb") as content:
                    yield from self.blob_member(blobs[layer], exact_pieces(content, blobs[layer].size))
        with self.source.ask("image-layers", self.source_id, *(staging.word(layer) for layer in lacking if layer not in blobs)) as answer:
            head = read_frame(answer)
            while head["kind"] == "layer":
                blob = Blob(head["diff_id"], head["digest"], head["size"], head["media_type"])
                blobs[blob.diff_id] = blob
                yield from self.blob_member(blob, staging.receive(blob, head["offset"], answer))
                head = read_frame(answer)
            pushed = Pushed(head["manifest"].encode(), read_exactly(answer, head["size"]))
        self.progress.begin("load", 0, "the engine registers the layers")
        if containerd_store(self.api.info()):
            yield containerd_tail(self.reference, self.manifest(image, held, kept, pushed, blobs), pushed.config)
        else:
            yield classic_tail(self.reference, image.layers, {layer: blob.digest for layer, blob in blobs.items()}, pushed.config)

    def blob_member(self, blob: Blob, pieces: t.Iterator[bytes]) -> t.Iterator[bytes]:
        yield header(blob_name(blob.digest), blob.size)
        for piece in pieces:
            self.progress.done += len(piece)
            yield piece
        yield padding(blob.size)

    def manifest(self, image: Image, held: t.Sequence[Image], kept: int, pushed: Pushed, blobs: t.Mapping[str, Blob]) -> bytes:
        """The source's manifest where it fits the blobs of this node; else one that names the blobs which are here."""
        content = json.loads(pushed.manifest)
        entries = [dict(entry) for entry in content["layers"]]
        if kept:
            base = next(other for other in held if present_prefix(image.layers, [other.layers]) == kept)
            with Receiver(self.staging_root, lambda digest, size, stream: None) as receiver:
                entries[:kept] = json.loads(receiver.push(self.api, base.id).manifest)["layers"][:kept]
        for entry, layer in zip(entries[kept:], image.layers[kept:]):
            entry.update(digest=blobs[layer].digest, size=blobs[layer].size)
        if entries == content["layers"]:
            return pushed.manifest
        config = {"mediaType": content["config"]["mediaType"], "digest": "sha256:" + hashlib.sha256(pushed.config).hexdigest(), "size": len(pushed.config)}
        return json.dumps({"schemaVersion": 2, "mediaType": content.get("mediaType", MANIFEST_TYPE), "config": config, "layers": entries}).encode()

    # Whole archives

    def by_archive(self, image: Image) -> None:
        """Made and checked at the source, fetched with rsync, loaded from a file: each step can be done again."""
        if shutil.which("rsync") is None:
            raise TransferError("rsync is not installed on this node")
        self.progress.begin("archive", image.size, f"{self.source.name} makes the archive")
        archive = self.source.ask_line("image-archive", self.source_id)
        os.makedirs(self.staging_root, mode=0o700, exist_ok=True)
        path = os.path.join(self.staging_root, archive["name"])
        here = os.path.getsize(path) if os.path.exists(path) else 0
        self.require_space(archive["size"] - here, image.size)
        self.progress.begin("ship", archive["size"], f"archive from {self.source.name}")
        self.fetch_archive(archive["name"], path)
        self.bytes = archive["size"] - here
        self.progress.begin("verify", archive["size"])
        if sha256_of(path) != archive["sha256"]:
            os.unlink(path)
            raise TransferError("the archive arrived with other content and was removed")
        self.load(file_pieces(path))
        os.unlink(path)
        self.source.ask_line("image-done", self.source_id)

    def fetch_archive(self, name: str, path: str) -> None:
        with watched(path, self.progress):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return self.source.rsync(name, path)
                except Dropped:
                    if attempt == ATTEMPTS:
                        raise

    def by_stream(self, image: Image) -> None:
        self.require_space(0, image.size)
        self.progress.begin("ship", image.size, f"stream from {self.source.name}")
        with self.source.ask("image-stream", self.source_id) as answer:
            self.load(self.counted(answer))

    def counted(self, stream: t.BinaryIO) -> t.Iterator[bytes]:
        while True:
            piece = stream.read(CHUNK)
            if not piece:
                return
            self.bytes += len(piece)
            self.progress.done = self.bytes
            yield piece

    # The engine

    def load(self, archive: t.Iterator[bytes]) -> None:
        self.progress.message = "the engine loads the layers"
        headers = {"Content-Type": "application/x-tar"}
        for event in self.api.stream_json("POST", "/images/load", body=Pieces(archive), query={"quiet": True}, headers=headers):
            if "error" in event:
                raise TransferError(f"the engine did not load the image: {event['error']}")

    def finish(self, image: Image) -> Image:
        """A load that says nothing is no proof: look at what is there now, and remember where it came from."""
        document = self.api.inspect_image(self.reference)
        if document is None or from_inspect(document).identity != image.identity:
            # A stream or an archive was made by id and has no name in it.
            document = self.tagged(image)
        loaded = from_inspect(document, image.digests)
        verdict = compare(image.as_dict(), loaded.as_dict())
        if not verdict.same:
            raise TransferError(f"{self.reference} is another image after the load: other {verdict.reason}")
        self.record.note(loaded.id, image.digests, reference=self.reference, identity=loaded.identity, source=self.origin)
        return loaded

    def tagged(self, image: Image) -> dict[str, t.Any]:
        found = next((held for held in local_images(self.api) if held.identity == image.identity), None)
        if found is None:
            raise TransferError(f"{self.reference} is not there after the load")
        name, dummy, tag = self.reference.rpartition(":")
        self.api.call("POST", f"/images/{found.id}/tag", query={"repo": name, "tag": tag})
        return t.cast("dict[str, t.Any]", self.api.inspect_image(self.reference))

    # Space

    def lack_of_space(self, staged: int, loaded: int) -> tuple[str, int, int] | None:
        """Both are counted, on one filesystem or on two: staged layers stay until the engine has them."""
        demands: dict[int, tuple[str, int]] = {}
        for path, size in ((self.staging_root, staged), (self.api.info()["DockerRootDir"], loaded)):
            place = existing(path)
            device = os.stat(place).st_dev
            demands[device] = (place, demands.get(device, (place, 0))[1] + size)
        for place, size in demands.values():
            free = shutil.disk_usage(place).free
            if size and size + MARGIN > free:
                return place, size + MARGIN, free
        return None

    def require_space(self, staged: int, loaded: int) -> None:
        lack = self.lack_of_space(staged, loaded)
        if lack:
            place, size, free = lack
            raise Refused(self.refusal("space", f"{free} bytes free at {place}", f"{size} bytes", "free that much, or name another directory in image_staging"))

    def refusal(self, name: str, found: str, wanted: str, next_step: str) -> Refusal:
        return Refusal(f"image.{name}", self.node, f"image {self.reference} from {self.origin}", found, wanted, next_step)


def local_images(api: DockerApi) -> list[Image]:
    """Every image of this engine: their layers need not be sent."""
    documents = (api.inspect_image(entry["Id"]) for entry in api.call("GET", "/images/json"))
    return [from_inspect(document) for document in documents if document is not None]


@contextlib.contextmanager
def watched(path: str, progress: Progress) -> t.Iterator[None]:
    """Another program writes the file: its size is the progress."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(1):
            with contextlib.suppress(OSError):
                progress.done = os.path.getsize(path)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def file_pieces(path: str) -> t.Iterator[bytes]:
    with open(path, "rb") as stream:
        while True:
            piece = stream.read(CHUNK)
            if not piece:
                return
            yield piece


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    for piece in file_pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def main(words: t.Sequence[str]) -> int:
    """The job: ``words`` is the path of a request that _unit.Job wrote."""
    return run_job(words[0], lambda request, progress: Ship(request, progress).run())
