# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Archives for C(docker load) in which the layers that the engine has already are left out."""

from __future__ import annotations

import hashlib
import json
import tarfile
import typing as t

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
END = b"\0" * (2 * tarfile.BLOCKSIZE)


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
