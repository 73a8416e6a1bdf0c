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
import re
import shutil
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import ApiError, DockerApi, Pieces
from ansible_collections.sparkops.inference.plugins.module_utils._image_archive import (
    MANIFEST_TYPE,
    blob_name,
    classic_tail,
    containerd_tail,
    header,
    padding,
)
from ansible_collections.sparkops.inference.plugins.module_utils._image_export import (
    CHUNK,
    Blob,
    Exported,
    ExportError,
    Receiver,
    containerd_store,
    give_to_owner,
    image_root,
    lack_of_space,
    make_folder,
    one_platform,
)
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import Image, compare, from_inspect, present_prefix
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._image_source import (
    Dropped,
    Question,
    Source,
    Staging,
    TransferError,
    exact_pieces,
    read_exactly,
    read_frame,
)
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, run_job

# Seconds between attempts that brought nothing: longer than a cable that is pulled and put back, or a head's sshd that starts again.
PAUSES = (5, 15, 30, 60)
# What a load needs beside the layers themselves.
MARGIN = 256 << 20
# Parts of an image that nobody has asked for any more.
FORGOTTEN_SECONDS = 7 * 24 * 3600
# What a ship leaves in the staging directory. The user names that one, so other things may lie there.
STAGED = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}\.tar(\.json)?")


T = t.TypeVar("T")


class Lack(t.NamedTuple):
    """What this node has not of an image: all layers above the ``kept`` lowest ones, which it has as part of ``base``."""

    image: Image
    base: Image | None
    kept: int
    layers: list[str]
    size: int


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
        self.state_root: str = request["state_root"]
        self.staged = os.path.join(self.staging_root, self.identity[7:23])
        self.api = DockerApi(request["socket"], timeout=120)
        self.source = Source(request["address"], request["user"], request["key"], request["known_hosts"])
        self.record = Record(self.state_root)
        self.progress = progress
        self.containerd = False
        self.bytes = 0
        self.archived = ""
        self.notices: list[str] = []

    def run(self) -> dict[str, t.Any]:
        started = time.monotonic()
        try:
            mode, loaded = self.bring()
        except (TransferError, ApiError) as exc:
            raise Refused(self.refusal("ship", str(exc), "the same image as there", "mend that and run again: what has come already is kept")) from exc
        self.clean_up()
        self.forget_old()
        ship = {"mode": mode, "bytes": self.bytes, "seconds": round(time.monotonic() - started, 1)}
        return {"image": loaded.as_dict(), "ship": ship, "notices": self.notices}

    def bring(self) -> tuple[str, Image]:
        answer = self.persistently(lambda: self.source.ask_line("image-inspect", self.source_id), lambda: 0)
        image = from_inspect(answer["inspect"], answer["recorded"])
        if image.identity != self.identity:
            raise TransferError(f"{self.source.name} has {image.identity} under this id; wanted {self.identity}")
        lack = self.lack(image, answer["sizes"])
        *others, last = self.choose(lack)
        for mode in others:
            try:
                return self.bring_by(mode, lack)
            except Dropped:
                raise
            except TransferError as exc:
                self.notices.append(f"mode {mode} failed, {last} is tried: {exc}")
        return self.bring_by(last, lack)

    def bring_by(self, mode: str, lack: Lack) -> tuple[str, Image]:
        if mode == "layers":
            self.by_layers(lack)
        elif mode == "archive":
            self.by_archive(lack)
        else:
            self.by_stream(lack)
        return mode, self.finish(lack.image)

    def persistently(self, attempt: t.Callable[[], T], held: t.Callable[[], int]) -> T:
        """Until the link lasts. ``held`` are the bytes that have come: with each one more, the patience begins anew."""
        pauses = iter(PAUSES)
        while True:
            before = held()
            try:
                return attempt()
            except Dropped as exc:
                if held() > before:
                    pauses = iter(PAUSES)
                pause = next(pauses, None)
                if pause is None:
                    raise
                self.progress.message = f"{exc}; again in {pause} s"
                time.sleep(pause)

    def lack(self, image: Image, sizes: t.Mapping[str, int]) -> Lack:
        self.containerd = containerd_store(self.api.info())
        # From a containerd store the manifest is wanted too, and only an image with a name can be asked for it.
        held = [other for other in local_images(self.api) if other.tags or not self.containerd]
        kept = present_prefix(image.layers, [other.layers for other in held])
        base = next((other for other in held if kept and present_prefix(image.layers, [other.layers]) == kept), None)
        # A layer is kept by its place in the chain: the same one further up has to come again.
        layers = list(dict.fromkeys(image.layers[kept:]))
        return Lack(image, base, kept, layers, sum(sizes.get(layer, 0) for layer in layers))

    def choose(self, lack: Lack) -> list[str]:
        """Modes in the order to try them. Layers skip what is here and can be resumed, but need room in the staging directory; a stream needs none."""
        if self.mode == "archive":
            return ["archive", "layers"]
        if self.mode != "auto":
            return [self.mode]
        staged = Staging(self.staged, self.state_root).held_bytes(lack.layers) if os.path.isdir(self.staged) else 0
        tight = self.lack_of_space(lack.size - staged, lack.size, lack.size)
        return ["stream", "layers"] if tight and not (lack.kept and self.lack_of_space(0, lack.image.size, lack.size)) else ["layers", "stream"]

    # Layers

    def by_layers(self, lack: Lack) -> None:
        """The engine unpacks while the layers come. After a cut it gets once more what is staged, and then the rest."""
        staging = Staging(self.staged, self.state_root)
        self.drop_damaged(staging, lack.layers)
        self.require_space(lack.size - staging.held_bytes(lack.layers), lack.size, lack.size)
        self.progress.begin("ship", lack.size, f"{len(lack.layers)} layers from {self.source.name}")
        self.persistently(lambda: self.fetch_layers(lack, staging), lambda: staging.held_bytes(lack.layers))

    def fetch_layers(self, lack: Lack, staging: Staging) -> None:
        before = staging.held_bytes(lack.layers)
        try:
            self.load(self.archive(lack, staging))
        finally:
            self.bytes += staging.held_bytes(lack.layers) - before

    def drop_damaged(self, staging: Staging, layers: t.Iterable[str]) -> None:
        """After a power cut a file may have its final name and not its bytes: the engine would refuse it in every run."""
        self.progress.message = "verifying the layers that came before"
        for path in filter(None, map(staging.complete, layers)):
            if f"sha256:{sha256_of(path)}" != staging.blob(path).digest:
                os.unlink(path)

    def archive(self, lack: Lack, staging: Staging) -> t.Generator[bytes, None, None]:
        self.progress.done = 0
        blobs: dict[str, Blob] = {}
        for layer in lack.layers:
            path = staging.complete(layer)
            if path:
                blobs[layer] = Staging.blob(path)
                with open(path, "rb") as content:
                    yield from self.blob_member(blobs[layer], exact_pieces(content, blobs[layer].size))
        words = [staging.word(layer) for layer in lack.layers if layer not in blobs]
        with self.source.ask("image-layers", self.source_id, *words) as answer:
            head = read_frame(answer)
            while head["kind"] == "layer":
                blob = Blob(head["diff_id"], head["digest"], head["size"], head["media_type"])
                blobs[blob.diff_id] = blob
                yield from self.blob_member(blob, staging.receive(blob, head["offset"], answer))
                head = read_frame(answer)
            exported = Exported(head["manifest"].encode(), read_exactly(answer, head["size"]))
        self.progress.message = "the engine registers the layers"
        if self.containerd:
            yield containerd_tail(self.reference, self.manifest(lack, exported, blobs), exported.config)
        else:
            yield classic_tail(self.reference, lack.image.layers, {layer: blob.digest for layer, blob in blobs.items()}, exported.config)

    def blob_member(self, blob: Blob, pieces: t.Iterator[bytes]) -> t.Iterator[bytes]:
        yield header(blob_name(blob.digest), blob.size)
        for piece in pieces:
            self.progress.done += len(piece)
            yield piece
        yield padding(blob.size)

    def manifest(self, lack: Lack, exported: Exported, blobs: t.Mapping[str, Blob]) -> bytes:
        """The source's manifest where it fits the blobs of this node; else one that names the blobs which are here."""
        content = json.loads(exported.manifest)
        entries = [dict(entry) for entry in content["layers"]]
        if lack.base:
            try:
                with Receiver(self.staging_root, lambda digest, size, stream: None) as receiver:
                    own = receiver.push(self.api, lack.base.id, one_platform(self.api, *lack.base.platform.split("/")))
            except ExportError as exc:
                raise TransferError(f"what this node has of the image already: {exc}") from exc
            entries[: lack.kept] = json.loads(own.manifest)["layers"][: lack.kept]
        for entry, layer in zip(entries[lack.kept :], lack.image.layers[lack.kept :]):
            entry.update(digest=blobs[layer].digest, size=blobs[layer].size)
        if entries == content["layers"]:
            return exported.manifest
        digest = "sha256:" + hashlib.sha256(exported.config).hexdigest()
        config = {"mediaType": content["config"]["mediaType"], "digest": digest, "size": len(exported.config)}
        return json.dumps({"schemaVersion": 2, "mediaType": content.get("mediaType", MANIFEST_TYPE), "config": config, "layers": entries}).encode()

    # Whole archives

    def by_archive(self, lack: Lack) -> None:
        """Made and checked at the source, fetched with rsync, loaded from a file: each step can be done again."""
        if shutil.which("rsync") is None:
            raise TransferError("rsync is not installed on this node")
        make_folder(self.staging_root, self.state_root)
        self.load(file_pieces(self.persistently(lambda: self.fetch_archive(lack), lambda: size_of(self.archived))))

    def fetch_archive(self, lack: Lack) -> str:
        self.progress.begin("archive", 0, f"{self.source.name} makes the archive")
        archive = self.source.ask_line("image-archive", self.source_id)
        path = self.archived = os.path.join(self.staging_root, archive["name"])
        here = size_of(path)
        self.require_space(archive["size"] - here, archive["size"], lack.size)
        self.progress.begin("ship", archive["size"], f"archive from {self.source.name}")
        with open(path, "ab") as target:
            give_to_owner(target.fileno(), self.state_root)
        try:
            with watched(path, self.progress):
                self.source.rsync(archive["name"], path)
        finally:
            self.bytes += size_of(path) - here
        self.progress.message = "verifying the archive"
        if sha256_of(path) != archive["sha256"]:
            os.unlink(path)
            raise TransferError("the archive arrived with other content and was removed")
        return path

    def by_stream(self, lack: Lack) -> None:
        self.require_space(0, lack.image.size, lack.size)
        self.progress.begin("ship", lack.image.size, f"stream from {self.source.name}")
        question = self.source.ask("image-stream", self.source_id)
        with question as answer:
            self.load(self.counted(answer, question))

    def counted(self, stream: t.BinaryIO, question: Question) -> t.Generator[bytes, None, None]:
        while True:
            piece = stream.read(CHUNK)
            if not piece:
                # Before the engine complains of half an archive: why it ended is known here.
                question.judge()
                return
            self.bytes += len(piece)
            self.progress.done = self.bytes
            yield piece

    def clean_up(self) -> None:
        """The image is here: what its parts took is free again, also of a way that was tried first and did not lead here."""
        shutil.rmtree(self.staged, ignore_errors=True)
        if self.archived:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.archived)
            with contextlib.suppress(TransferError):  # it is forgotten there after a day
                self.source.ask_line("image-done", self.source_id)

    def forget_old(self) -> None:
        """Parts of images that nobody wants any more; several deployments of this node stage here."""
        for name in os.listdir(self.staging_root) if os.path.isdir(self.staging_root) else ():
            path = os.path.join(self.staging_root, name)
            with contextlib.suppress(OSError):  # of another account, or another run was faster
                if STAGED.fullmatch(name) and time.time() - os.path.getmtime(path) > FORGOTTEN_SECONDS:
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    # The engine

    def load(self, archive: t.Generator[bytes, None, None]) -> None:
        headers = {"Content-Type": "application/x-tar"}
        # Closed at once, whatever happens: the archive may hold a connection to the source.
        with contextlib.closing(archive):
            body = Pieces(readable(archive))
            for event in self.api.stream_json("POST", "/images/load", body=body, query={"quiet": True}, headers=headers):
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

    def lack_of_space(self, staged: int, sent: int, added: int) -> tuple[str, int, int] | None:
        """All is counted, on one filesystem or on two: staged layers stay until the engine has them, and the engine keeps what it was sent beside the
        layers that it makes of it, a classic store until the load ends and a containerd store for good."""
        return lack_of_space((self.staging_root, staged), (image_root(self.api.info()), sent + added), margin=MARGIN)

    def require_space(self, staged: int, sent: int, added: int) -> None:
        lack = self.lack_of_space(staged, sent, added)
        if lack:
            place, size, free = lack
            raise Refused(self.refusal("space", f"{free} bytes free at {place}", f"{size} bytes", "free that much, or name another directory in image_staging"))

    def refusal(self, name: str, found: str, wanted: str, next_step: str) -> Refusal:
        return Refusal(f"image.{name}", self.node, f"image {self.reference} from {self.origin}", found, wanted, next_step)


def local_images(api: DockerApi) -> list[Image]:
    """Every image of this engine: their layers need not be sent."""
    documents = (api.inspect_image(entry["Id"]) for entry in api.call("GET", "/images/json"))
    return [from_inspect(document) for document in documents if document is not None]


def readable(archive: t.Iterator[bytes]) -> t.Iterator[bytes]:
    """Inside a request the client takes each error of the system for one of the engine's socket: a full disk for an engine that is silent."""
    try:
        yield from archive
    except OSError as exc:
        raise TransferError(f"parts of the image on this node: {exc}") from exc


@contextlib.contextmanager
def watched(path: str, progress: Progress) -> t.Iterator[None]:
    """Another program writes the file: its size is the progress."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(1):
            progress.done = size_of(path)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def file_pieces(path: str) -> t.Generator[bytes, None, None]:
    with open(path, "rb") as stream:
        while True:
            piece = stream.read(CHUNK)
            if not piece:
                return
            yield piece


def size_of(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    for piece in file_pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def main(words: t.Sequence[str]) -> int:
    """The job: ``words`` is the path of a request that _unit.Job wrote."""
    return run_job(words[0], lambda request, progress: Ship(request, progress).run())
