# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Layers out of an engine, without root and without knowledge of its directories.

There are two ways. C(docker save) gives everything, so that what is not wanted has to be read and thrown away; it is the
fastest way to all layers of a classic store. C(docker push) asks before each layer whether the registry has it: a registry of
our own on the loopback that says "yes" to all but the wanted layers gets only those, and it is the one way to the
compressed layers and the manifest of a containerd store.

This file has no imports from the collection: it also runs beside the gate of a node.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import http.server
import json
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import threading
import typing as t
import urllib.parse

if t.TYPE_CHECKING:
    import io

    from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi

CHUNK = 1 << 20
# Configs and manifests are small; what is larger in an archive is a layer.
SMALL = 4 << 20
TLS_HANDSHAKE = b"\x16"
# How the directory of a push begins; a killed one leaves it.
PUSHED = "push-"
# Where the system's containerd keeps what it has, unless its settings name another root.
CONTAINERD_ROOT, CONTAINERD_SETTINGS = "/var/lib/containerd", "/etc/containerd/config.toml"
# More ranks than this do not ask one head at the same time: where each would find room, none waits for another.
RECEIVERS = 15
PLAIN_LAYER = "application/vnd.oci.image.layer.v1.tar"


class ExportError(Exception):
    """The engine did not give what was asked."""


class TooMuch(ExportError):
    """The engine sends so much that nobody wants that ``docker save`` would be cheaper."""


class Blob(t.NamedTuple):
    """One layer as it is transferred. ``digest`` is of these bytes, ``diff_id`` of the layer without compression."""

    diff_id: str
    digest: str
    size: int
    media_type: str


class Exported(t.NamedTuple):
    """What comes with the layers: the manifest as the engine wrote it, and the config."""

    manifest: bytes
    config: bytes


# docker save


class Saved:
    """Layers out of C(docker save) while it comes, in each of its layouts.

    From 25 on the files are named by their digests. Before, a folder has the layer and a json, and its name is a hash of
    the layer's chain; the last layer's hash has the whole config in it, so the one folder that no chain explains is the last.
    """

    def __init__(self, layers: t.Sequence[str]) -> None:
        self.layers = list(layers)
        self._small: dict[str, bytes] = {}
        self._folders: dict[str, str] = {}

    def read(self, stream: t.BinaryIO) -> t.Iterator[tuple[Blob, t.BinaryIO]]:
        """Each layer in the archive's order, as it is at the read position of the file."""
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK) as archive:
            for member in archive:
                content = t.cast(t.BinaryIO, archive.extractfile(member)) if member.isreg() else None
                if content is None:
                    continue
                diff_id = self._layer_of(member.name)
                if diff_id:
                    yield Blob(diff_id, diff_id, member.size, PLAIN_LAYER), content
                elif member.size <= SMALL:
                    self._small[member.name] = content.read()
                    self._note_folder(member.name)

    def config(self) -> bytes:
        """The config, once everything is read."""
        return self._small[json.loads(self._small["manifest.json"])[0]["Config"]]

    def _layer_of(self, name: str) -> str | None:
        folder, dummy, last = name.rpartition("/")
        if last == "layer.tar":
            return self._folders.get(folder)
        diff_id = f"sha256:{last}"
        return diff_id if folder == "blobs/sha256" and diff_id in self.layers else None

    def _note_folder(self, name: str) -> None:
        folder, dummy, last = name.rpartition("/")
        if last == "json" and folder:
            self._folders[folder] = self._explain(folder, json.loads(self._small[name]))

    def _explain(self, folder: str, description: t.Mapping[str, t.Any]) -> str:
        chain = ""
        for layer in self.layers[:-1]:
            chain = layer if not chain else _sha256(f"{chain} {layer}".encode())
            if legacy_name(description, chain) == folder:
                return layer
        return self.layers[-1]


def legacy_name(description: t.Mapping[str, t.Any], chain: str) -> str:
    """The folder's name in an archive of Docker before 25, as image/v1 of the engine makes it for all layers but the last.

    The outer keys are sorted, the inner ones stay as the engine wrote them.
    """
    hashed = {"container_config": description.get("container_config"), "created": description.get("created"), "layer_id": chain}
    if "parent" in description:
        hashed["parent"] = "sha256:" + description["parent"]
    return _sha256(json.dumps(hashed, separators=(",", ":")).encode())[len("sha256:") :]


def _sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# docker push


class Receiver:
    """A registry on the loopback that keeps nothing: wanted blobs go to ``sink``, all others are "there already".

    ``sink`` gets (digest, size, file) and is called for one blob at a time. A classic store compresses while it pushes and
    knows a digest only afterwards, so such a blob waits in ``spool``; ``limit`` ends a push of more than that for nothing.
    """

    def __init__(self, spool: str, sink: t.Callable[[str, int, t.BinaryIO], None]) -> None:
        self.spool = spool
        self.sink = sink
        self.wanted: set[str] = set()
        self.wanted_config: str | None = None
        self.limit = SMALL
        self.manifest = b""
        self.small: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.spooled = 0
        self._one_at_a_time = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.name = f"127.0.0.1:{self._server.server_address[1]}/sparkops/{secrets.token_hex(6)}"

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def push(self, api: DockerApi, image_id: str, platform: str | None = None) -> Exported:
        """Let the engine push the image here. The name that it needs for that is gone afterwards."""
        tag = f"{self.name}:ship"
        api.call("POST", f"/images/{image_id}/tag", query={"repo": self.name, "tag": "ship"})
        try:
            # The header is obligatory, also for a registry without accounts.
            headers = {"X-Registry-Auth": base64.urlsafe_b64encode(b"{}").decode()}
            for event in api.stream_json("POST", f"/images/{self.name}/push", query={"tag": "ship", "platform": platform}, headers=headers):
                if self.error is not None:
                    break
                if "error" in event:
                    raise ExportError(f"the engine did not give its layers: {event['error']}")
        finally:
            api.request("DELETE", f"/images/{tag}", query={"noprune": True})
        if self.error is not None:
            raise self.error
        if "layers" not in json.loads(self.manifest or "{}"):
            raise ExportError("the engine pushes an index of several platforms; only Docker 27 and newer push one of them")
        return Exported(self.manifest, self.small.get(json.loads(self.manifest)["config"]["digest"], b""))

    # Called by the handlers

    def has(self, digest: str) -> bool:
        return digest not in self.wanted and digest != self.wanted_config

    def receive(self, digest: str, size: int, stream: t.BinaryIO) -> None:
        if digest in self.wanted:
            with self._one_at_a_time:
                self.wanted.discard(digest)
                self.sink(digest, size, stream)
        elif size <= SMALL:
            self.small[digest] = stream.read(size)
            if digest == self.wanted_config:
                self.wanted_config = None  # the engine asks once more whether it has arrived
        else:
            raise ExportError(f"the engine pushes {digest}, which nobody asked for")

    def receive_spooled(self, digest: str, path: str) -> None:
        size = os.path.getsize(path)
        if digest in self.wanted or size <= SMALL:
            with open(path, "rb") as stream:
                self.receive(digest, size, stream)

    def count(self, size: int) -> None:
        self.spooled += size
        if self.spooled > self.limit:
            raise TooMuch(f"the engine pushed more than {self.limit} bytes")


def _handler(receiver: Receiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Registry(http.server.BaseHTTPRequestHandler):
        """As much of the distribution API as a push needs."""

        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            """A containerd store tries TLS first, and takes nothing but an answer in HTTP for a no."""
            if t.cast("io.BufferedReader", self.rfile).peek(1)[:1] == TLS_HANDSHAKE:
                self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                self.close_connection = True
            else:
                super().handle_one_request()

        def log_message(self, *arguments: object) -> None:
            """Stdout and stderr belong to the transfer."""

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(200, b"{}", Docker_Distribution_Api_Version="registry/2.0")

        def do_HEAD(self) -> None:
            match = re.search(r"/blobs/(sha256:[0-9a-f]{64})$", self.path)
            if match and receiver.has(match.group(1)):
                # The size is not known here, and no engine compares it.
                self.answer(200, Docker_Content_Digest=match.group(1))
            else:
                self.answer(404)

        def do_POST(self) -> None:
            self.drain()
            self.answer(202, Location=f"/v2/uploads/{secrets.token_hex(8)}", Range="0-0")

        def do_PATCH(self) -> None:
            self.guarded(self.append)

        def append(self) -> None:
            with open(self.spool_path(), "ab") as spool:
                for piece in self.pieces():
                    receiver.count(len(piece))
                    spool.write(piece)
                size = spool.tell()
            # The engine takes the range as the number of bytes that were written.
            self.answer(202, Location=self.path.partition("?")[0], Range=f"0-{max(size - 1, 0)}")

        def do_PUT(self) -> None:
            self.guarded(self.take if "digest=" in self.path else self.take_manifest)

        def guarded(self, work: t.Callable[[], None]) -> None:
            """What goes wrong here is told by the thread that reads the engine's answer."""
            try:
                work()
            except Exception as exc:
                receiver.error = receiver.error or exc
                self.close_connection = True

        def take_manifest(self) -> None:
            receiver.manifest = b"".join(self.pieces())
            self.answer(201, Docker_Content_Digest=_sha256(receiver.manifest))

        def take(self) -> None:
            """The end of an upload: all of it at once, or the last piece of one that was spooled."""
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            digest = query["digest"][0]
            length = int(self.headers.get("Content-Length") or 0)
            if length:
                receiver.receive(digest, length, t.cast(t.BinaryIO, self.rfile))
            else:
                path = self.spool_path()
                self.append_rest(path)
                receiver.receive_spooled(digest, path)
                os.unlink(path)
            self.answer(201, Docker_Content_Digest=digest)

        def append_rest(self, path: str) -> None:
            with open(path, "ab") as spool:
                for piece in self.pieces():
                    spool.write(piece)

        def spool_path(self) -> str:
            match = re.search(r"/uploads/([0-9a-f]{16})", self.path)
            if match is None:
                raise ExportError(f"an upload without a name: {self.path}")
            return os.path.join(receiver.spool, match.group(1))

        def drain(self) -> None:
            for dummy in self.pieces():
                pass

        def pieces(self) -> t.Iterator[bytes]:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                yield from self.chunks()
                return
            left = int(self.headers.get("Content-Length") or 0)
            while left:
                piece = self.rfile.read(min(left, CHUNK))
                if not piece:
                    raise ExportError("the engine ended a push early")
                left -= len(piece)
                yield piece

        def chunks(self) -> t.Iterator[bytes]:
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                piece = self.rfile.read(size)
                self.rfile.readline()
                if not size:
                    return
                yield piece

    return Registry


# Either way


def containerd_store(info: t.Mapping[str, t.Any]) -> bool:
    """Whether the engine keeps its images in containerd; from C(/info)."""
    return any("io.containerd.snapshotter" in str(word) for pair in info.get("DriverStatus") or () for word in pair)


def image_root(info: t.Mapping[str, t.Any], settings: str = CONTAINERD_SETTINGS) -> str:
    """Where the engine's images lie; from C(/info), which tells the root of Docker only.

    The containerd of the system has a root of its own, one that Docker runs for itself lies below Docker's.
    """
    own = "docker" in (info.get("Containerd") or {}).get("Address", "")
    if own or not containerd_store(info):
        return t.cast("str", info["DockerRootDir"])
    try:
        with open(settings, encoding="utf-8", errors="replace") as stream:
            named = re.search(r"""^\s*root\s*=\s*["'](/[^"']*)["']""", stream.read().partition("\n[")[0], re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else CONTAINERD_ROOT


def one_platform(api: DockerApi, os_name: str, architecture: str) -> str | None:
    """How to name the platform in an index of several, where the engine can (from API 1.46, Docker 27, on)."""
    if api_version(api) < (1, 46):
        return None
    return json.dumps({"os": os_name, "architecture": architecture})


def api_version(api: DockerApi) -> tuple[int, ...]:
    return tuple(int(part) for part in api.version()["ApiVersion"].split("."))


@contextlib.contextmanager
def room_to_save(api: DockerApi, document: t.Mapping[str, t.Any], folder: str | None = None) -> t.Iterator[None]:
    """Hold the room for a save until its stream has ended. The archive may go into a ``folder``.

    A classic store saves into a temporary directory of its own before the first byte comes out. What the saves of other receivers have still to write
    is not missing from the free space yet: where there is no room for all of them, they come one after the other.
    """
    info = api.info()
    size, target = 0 if containerd_store(info) else document["Size"], (folder or "/", document["Size"] if folder else 0)
    with contextlib.ExitStack() as held:
        if size:
            # The programs' own directory: also of a save through sudo, or for another state root, and no lock of anything else.
            handle = os.open(os.path.dirname(os.path.abspath(__file__)), os.O_RDONLY)
            held.callback(os.close, handle)
            tight = lack_of_space((info["DockerRootDir"], RECEIVERS * size), target)
            fcntl.flock(handle, fcntl.LOCK_EX if tight else fcntl.LOCK_SH)
        lack = lack_of_space((info["DockerRootDir"], size), target)
        if lack:
            place, needed, free = lack
            advice = "; image_staging names another directory" if folder else ""
            raise ExportError(f"{place} of the source has {free} bytes free, and docker save needs {needed} there{advice}")
        yield


def lack_of_space(*demands: tuple[str, int], margin: int = 0) -> tuple[str, int, int] | None:
    """The first filesystem without room for all that is to lie there at once: a place on it, what is needed and what is free."""
    needed: dict[int, tuple[str, int]] = {}
    for path, size in demands:
        place = existing(path)
        device = os.stat(place).st_dev
        needed[device] = (place, needed.get(device, (place, 0))[1] + size)
    for place, size in needed.values():
        free = shutil.disk_usage(place).free
        if size and size + margin > free:
            return place, size + margin, free
    return None


def make_folder(path: str, state_root: str) -> None:
    """A folder and its parents, as far as they are not there; what was there is somebody's and stays as it is."""
    made, place = [], path
    while not os.path.exists(place):
        made.append(place)
        place = os.path.dirname(place)
    os.makedirs(path, mode=0o700, exist_ok=True)
    for place in made:
        give_to_owner(place, state_root)


def give_to_owner(made: str | int, state_root: str) -> None:
    """What root makes, a path or an open file, belongs to the account of the state root: it would keep that account's own ships out."""
    if os.geteuid() == 0:
        owner = os.stat(state_root)
        os.chown(made, owner.st_uid, owner.st_gid)


def existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


class Exporter:
    """Wanted layers of one image of an engine, each as (blob, file) to ``sink``; then its manifest and config.

    Layers that the engine compresses lie for a while in a directory of their own below ``spool``.
    """

    def __init__(
        self, api: DockerApi, document: t.Mapping[str, t.Any], pieces: t.Callable[[t.Iterator[bytes]], t.BinaryIO], spool: str, state_root: str
    ) -> None:
        self.api = api
        self.document = document
        self.spool = spool
        self.state_root = state_root
        self.layers: list[str] = document["RootFS"]["Layers"]
        self._file_over = pieces

    def export(self, wanted: t.Collection[str], sink: t.Callable[[Blob, t.BinaryIO], None]) -> Exported:
        if containerd_store(self.api.info()):
            return self.by_push(wanted, sink, limit=0)
        expected = sum(size for layer, size in self.sizes().items() if layer in wanted)
        # Compressing costs five times more than reading: a push pays as long as little of the image is wanted.
        if expected * 5 < self.document.get("Size", 0):
            try:
                return self.by_push(wanted, sink, limit=2 * expected + SMALL)
            except TooMuch:
                pass
        return self.by_save(wanted, sink)

    def sizes(self) -> dict[str, int]:
        history = self.api.call("GET", f"/images/{self.document['Id']}/history")
        return layer_sizes(self.layers, [entry.get("Size", 0) for entry in history], self.document.get("Size", 0))

    def by_save(self, wanted: t.Collection[str], sink: t.Callable[[Blob, t.BinaryIO], None]) -> Exported:
        left = set(wanted)
        saved = Saved(self.layers)
        sizes: dict[str, int] = {}
        with room_to_save(self.api, self.document):
            for blob, content in saved.read(self._file_over(self.api.stream("GET", f"/images/{self.document['Id']}/get"))):
                sizes[blob.diff_id] = blob.size
                if blob.diff_id in left:
                    left.discard(blob.diff_id)
                    sink(blob, content)
        if left:
            raise ExportError(f"the engine's archive lacks {', '.join(sorted(left))}")
        config = saved.config()
        return Exported(plain_manifest(config, [(layer, sizes.get(layer, 0)) for layer in self.layers]), config)

    def by_push(self, wanted: t.Collection[str], sink: t.Callable[[Blob, t.BinaryIO], None], limit: int) -> Exported:
        """Two pushes: the first moves no known layer and tells which digest is which layer, the second moves what is wanted."""
        if not self.document.get("RepoTags"):
            raise TooMuch("an image without a name would be gone with the name that a push needs")
        platform = one_platform(self.api, self.document["Os"], self.document["Architecture"])
        # Not in /tmp, which may be memory.
        make_folder(self.spool, self.state_root)
        spool = tempfile.mkdtemp(prefix=PUSHED, dir=self.spool)
        give_to_owner(spool, self.state_root)
        blobs: dict[str, Blob] = {}

        def pass_on(digest: str, size: int, stream: t.BinaryIO) -> None:
            sink(blobs[digest]._replace(size=size), stream)

        try:
            with Receiver(spool, pass_on) as receiver:
                receiver.limit = limit
                manifest = json.loads(receiver.push(self.api, self.document["Id"], platform).manifest)
                blobs.update(blobs_of(manifest, self.layers))
                receiver.wanted = {blob.digest for blob in blobs.values() if blob.diff_id in wanted}
                receiver.wanted_config = manifest["config"]["digest"]
                receiver.limit *= 2
                pushed = receiver.push(self.api, self.document["Id"], platform)
        finally:
            shutil.rmtree(spool, ignore_errors=True)
        if receiver.wanted:
            raise ExportError(f"the engine did not give {', '.join(sorted(receiver.wanted))}")
        return pushed


def layer_sizes(layers: t.Sequence[str], history: t.Sequence[int], total: int) -> dict[str, int]:
    """About how large each layer is. The history, newest first, has a line for each layer and for each step without one."""
    sizes = [size for size in reversed(history) if size]
    if len(sizes) < len(layers):
        # Layers without content look like steps: which ones is not told. What is counted too low here is little.
        sizes = [0] * (len(layers) - len(sizes)) + sizes
    elif len(sizes) > len(layers):
        sizes = [total] + [0] * (len(layers) - 1)
    found: dict[str, int] = {}
    for layer, size in zip(layers, sizes):
        found[layer] = max(size, found.get(layer, 0))
    return found


def blobs_of(manifest: t.Mapping[str, t.Any], layers: t.Sequence[str]) -> dict[str, Blob]:
    """The blobs of a manifest by their digests; its layers stand in the order of the config's.

    A classic store takes the sizes from the registry, and ours knows none.
    """
    entries = manifest["layers"]
    if len(entries) != len(layers):
        raise ExportError(f"the manifest has {len(entries)} layers and the image {len(layers)}")
    return {entry["digest"]: Blob(layer, entry["digest"], entry.get("size", 0), entry["mediaType"]) for layer, entry in zip(layers, entries)}


def plain_manifest(config: bytes, layers: t.Sequence[tuple[str, int]]) -> bytes:
    """A manifest for uncompressed layers, whose digests are their diff ids."""
    content = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": _sha256(config), "size": len(config)},
        "layers": [{"mediaType": PLAIN_LAYER, "digest": layer, "size": size} for layer, size in layers],
    }
    return json.dumps(content, separators=(",", ":")).encode()
