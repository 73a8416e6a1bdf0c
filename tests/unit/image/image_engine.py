# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An engine with images, on a socket: saves, pushes, and loads them as Docker does. What it does was measured on real ones."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import tarfile
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._image_export import legacy_name
from fake_docker import FakeDocker


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def chain_ids(layers: t.Sequence[str]) -> list[str]:
    """The chain id up to each layer: the name under which the classic store keeps it (OCI image spec, "Layer ChainID")."""
    chains: list[str] = []
    for layer in layers:
        chains.append(layer if not chains else "sha256:" + hashlib.sha256(f"{chains[-1]} {layer}".encode()).hexdigest())
    return chains


class EngineImage:
    """An image with its content."""

    def __init__(self, layers: list[bytes], tag: str = "team/app:1", digests: list[str] | None = None, **config: t.Any) -> None:
        self.content = {sha256(layer): layer for layer in layers}
        self.layers = [sha256(layer) for layer in layers]
        self.settings = {"Env": ["A=1"], "Entrypoint": ["/app"], **config}
        content = {"architecture": "amd64", "os": "linux", "config": self.settings, "rootfs": {"type": "layers", "diff_ids": self.layers}}
        self.config = json.dumps(content).encode()
        self.id = sha256(self.config)
        self.tag = tag
        self.digests = digests or []

    def document(self) -> dict[str, t.Any]:
        return {
            "Id": self.id,
            "RepoTags": [self.tag] if self.tag else [],
            "RepoDigests": [f"{self.tag.rpartition(':')[0]}@{digest}" for digest in self.digests],
            "Config": self.settings,
            "Architecture": "amd64",
            "Os": "linux",
            "Size": sum(len(layer) for layer in self.content.values()),
            "RootFS": {"Type": "layers", "Layers": self.layers},
        }

    def history(self) -> list[dict[str, t.Any]]:
        return [{"Size": len(self.content[layer])} for layer in reversed(self.layers)]


class Engine(FakeDocker):
    """A classic store, or a containerd store that has compressed blobs."""

    def __init__(self, *images: EngineImage, containerd: bool = False, legacy_save: bool = True) -> None:
        super().__init__()
        self.images = {image.id: image for image in images}
        self.containerd = containerd
        self.legacy_save = legacy_save
        self.loaded: list[bytes] = []
        self.uploaded: list[str] = []
        self.root = "/"

    def __enter__(self) -> Engine:
        super().__enter__()
        status = [["driver-type", "io.containerd.snapshotter.v1"]] if self.containerd else [["Backing Filesystem", "extfs"]]
        self.routes.update(
            {
                ("GET", "/info"): lambda request: {"DriverStatus": status, "DockerRootDir": self.root},
                ("GET", "/version"): {"ApiVersion": "1.41", "Arch": "amd64", "Version": "20.10.24"},
                ("GET", "/images/json"): lambda request: [{"Id": image.id} for image in self.images.values()],
                ("POST", "/images/load"): self.load,
            }
        )
        self._route()
        return self

    def _route(self) -> None:
        for image in self.images.values():
            for name in filter(None, (image.id, image.tag)):
                self.routes[("GET", f"/images/{name}/json")] = lambda request, image=image: image.document()
            self.routes[("GET", f"/images/{image.id}/history")] = lambda request, image=image: image.history()
            self.routes[("GET", f"/images/{image.id}/get")] = lambda request, image=image: self.save(image)
            self.routes[("POST", f"/images/{image.id}/tag")] = lambda request, image=image: self.tagged(image, request["query"])

    def add(self, image: EngineImage) -> None:
        self.images[image.id] = image
        self._route()

    def tagged(self, image: EngineImage, query: dict[str, str]) -> tuple[int, None]:
        name = f"{query['repo']}:{query['tag']}"
        self.routes[("GET", f"/images/{name}/json")] = lambda request: {**image.document(), "RepoTags": [name]}
        self.routes[("POST", f"/images/{query['repo']}/push")] = lambda request: self.push(image, query["repo"])
        self.routes[("DELETE", f"/images/{name}")] = lambda request: (200, [])
        return 201, None

    # docker save

    def save(self, image: EngineImage) -> bytes:
        return legacy_archive(image) if self.legacy_save else modern_archive(image)

    # docker push

    def blob(self, layer: bytes) -> bytes:
        return gzip.compress(layer, 1, mtime=0)

    def push(self, image: EngineImage, repository: str) -> bytes:
        host, dummy, name = repository.partition("/")
        connection = http.client.HTTPConnection(host, timeout=10)

        def ask(method: str, path: str, body: t.Any = None, **options: t.Any) -> http.client.HTTPResponse:
            connection.request(method, path, body=body, **options)
            response = connection.getresponse()
            response.read()
            return response

        def send(digest: str, data: bytes) -> None:
            if ask("HEAD", f"/v2/{name}/blobs/{digest}").status == 200:
                return
            self.uploaded.append(digest)
            place = ask("POST", f"/v2/{name}/blobs/uploads/").headers["Location"]
            if self.containerd:
                done = ask("PUT", f"{place}?digest={digest}", data)
            else:
                written = ask("PATCH", place, iter([data]), encode_chunked=True)
                assert written.headers["Range"] == f"0-{len(data) - 1}"
                done = ask("PUT", f"{place}?digest={digest.replace(':', '%3A')}")
                assert ask("HEAD", f"/v2/{name}/blobs/{digest}").status == 200, "the engine asks again whether it has arrived"
            assert done.status == 201

        try:
            entries = []
            for layer in image.layers:
                blob = self.blob(image.content[layer])
                send(sha256(blob), blob)
                entry = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": sha256(blob)}
                entries.append({**entry, "size": len(blob)} if self.containerd else entry)
            send(image.id, image.config)
            config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": image.id, "size": len(image.config)}
            manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": entries}
            ask("PUT", f"/v2/{name}/manifests/ship", json.dumps(manifest))
        except (OSError, http.client.HTTPException) as exc:
            return json.dumps({"error": str(exc)}).encode()
        finally:
            connection.close()
        return b'{"status": "pushed"}'

    # docker load

    def load(self, request: dict[str, t.Any]) -> bytes:
        self.loaded.append(request["body"])
        with tarfile.open(fileobj=io.BytesIO(request["body"])) as archive:
            files = {member.name: t.cast(t.IO[bytes], archive.extractfile(member)).read() for member in archive if member.isreg()}
        try:
            image = self.from_oci(files) if self.containerd else self.from_docker(files)
        except KeyError as exc:
            return json.dumps({"error": f"open {exc}: no such file or directory"}).encode()
        self.add(image)
        return json.dumps({"stream": f"Loaded image: {image.tag}"}).encode()

    def from_docker(self, files: dict[str, bytes]) -> EngineImage:
        entry = json.loads(files["manifest.json"])[0]
        config = json.loads(files[entry["Config"]])
        held = {chain: image for image in self.images.values() for chain in chain_ids(image.layers)}
        layers = []
        for layer, chain, name in zip(config["rootfs"]["diff_ids"], chain_ids(config["rootfs"]["diff_ids"]), entry["Layers"]):
            if chain in held:
                layers.append(held[chain].content[layer])
            else:
                layers.append(plain(files[name]))
        return self.checked(layers, (entry["RepoTags"] or [""])[0], files[entry["Config"]])

    def from_oci(self, files: dict[str, bytes]) -> EngineImage:
        here = {sha256(self.blob(layer)): self.blob(layer) for image in self.images.values() for layer in image.content.values()}
        blobs = {**here, **{f"sha256:{name.rpartition('/')[2]}": data for name, data in files.items() if name.startswith("blobs/")}}
        entry = json.loads(files["index.json"])["manifests"][0]
        manifest = json.loads(blobs[entry["digest"]])
        layers = []
        for layer in manifest["layers"]:
            assert len(blobs[layer["digest"]]) == layer["size"]
            layers.append(plain(blobs[layer["digest"]]))
        name = entry["annotations"]["io.containerd.image.name"]
        return self.checked(layers, name.replace("docker.io/", ""), blobs[manifest["config"]["digest"]])

    @staticmethod
    def checked(layers: list[bytes], tag: str, config: bytes) -> EngineImage:
        content = json.loads(config)
        image = EngineImage(layers, tag, **content["config"])
        assert image.layers == content["rootfs"]["diff_ids"], "the engine compares the layers with the config"
        image.config, image.id = config, sha256(config)
        return image


def plain(data: bytes) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def archive_of(files: dict[str, bytes | str]) -> bytes:
    """A tar in the order of the names, as the engine walks its folder. A text is the target of a link."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def legacy_archive(image: EngineImage) -> bytes:
    """As Docker before 25 writes it."""
    files: dict[str, bytes | str] = {}
    names: list[str] = []
    first: dict[str, str] = {}
    for number, (layer, chain) in enumerate(zip(image.layers, chain_ids(image.layers))):
        description: dict[str, t.Any] = {"created": "1970-01-01T00:00:00Z", "container_config": {"Hostname": "", "Env": None, "Cmd": None}}
        if names:
            description["parent"] = names[-1]
        if number == len(image.layers) - 1:
            description.update(created="2026-11-29T19:50:59.980621282Z", config=image.settings, architecture="amd64")
            name = hashlib.sha256(image.config).hexdigest()
        else:
            name = legacy_name(description, chain)
        names.append(name)
        files[f"{name}/VERSION"] = b"1.0"
        files[f"{name}/json"] = json.dumps({"id": name, **description, "os": "linux"}).encode()
        files[f"{name}/layer.tar"] = f"../{first[layer]}/layer.tar" if layer in first else image.content[layer]
        first.setdefault(layer, name)
    config = f"{image.id[7:]}.json"
    files[config] = image.config
    files["manifest.json"] = json.dumps([{"Config": config, "RepoTags": None, "Layers": [f"{name}/layer.tar" for name in names]}]).encode()
    return archive_of(files)


def modern_archive(image: EngineImage) -> bytes:
    """As Docker from 25 on writes it from a classic store."""
    files: dict[str, bytes | str] = {f"blobs/sha256/{layer[7:]}": content for layer, content in image.content.items()}
    files[f"blobs/sha256/{image.id[7:]}"] = image.config
    layers = [f"blobs/sha256/{layer[7:]}" for layer in image.layers]
    files["manifest.json"] = json.dumps([{"Config": f"blobs/sha256/{image.id[7:]}", "RepoTags": None, "Layers": layers}]).encode()
    files["index.json"] = b"{}"
    files["oci-layout"] = b"{}"
    return archive_of(files)
