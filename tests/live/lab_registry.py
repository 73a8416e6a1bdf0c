# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the lab's open registry holds, written past any engine: an index of several platforms."""

from __future__ import annotations

import hashlib
import json
import typing as t
import urllib.request

from conftest import STUB

HOST, REPOSITORY = STUB.rpartition(":")[0].split("/", 1)
TWO_PLATFORMS = STUB.replace(":1", ":two-platforms")
MANIFESTS = {  # what an engine has pushed, and the index to it
    "application/vnd.docker.distribution.manifest.v2+json": "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json": "application/vnd.oci.image.index.v1+json",
}
# A proxy of this machine is none for the lab.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(method: str, place: str, data: bytes | None = None, **headers: str) -> tuple[bytes, t.Any]:
    """The answer and its headers; ``place`` is below the repository, or a whole address."""
    address = place if "://" in place else f"http://{HOST}/v2/{REPOSITORY}/{place}"
    request = urllib.request.Request(address, data=data, method=method, headers={name.replace("_", "-"): value for name, value in headers.items()})
    with OPENER.open(request, timeout=30) as answer:
        return answer.read(), answer.headers


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def publish_two_platforms() -> dict[str, str]:
    """Let TWO_PLATFORMS name an index of which the stub's image is one platform, and not the first. The digests by what they are of."""
    manifest, headers = ask("GET", "manifests/1", Accept=", ".join(MANIFESTS))
    kind, content = headers["Content-Type"], json.loads(manifest)
    config, _headers = ask("GET", f"blobs/{content['config']['digest']}")
    other = json.dumps({**json.loads(config), "architecture": "arm64"}).encode()
    _body, headers = ask("POST", "blobs/uploads/")
    ask("PUT", f"{headers['Location']}&digest={sha256(other)}", other, Content_Type="application/octet-stream")
    content["config"].update(digest=sha256(other), size=len(other))
    entries = []
    for architecture, data in (("arm64", json.dumps(content).encode()), ("amd64", manifest)):
        ask("PUT", f"manifests/{sha256(data)}", data, Content_Type=kind)
        entries.append({"mediaType": kind, "digest": sha256(data), "size": len(data), "platform": {"os": "linux", "architecture": architecture}})
    index = json.dumps({"schemaVersion": 2, "mediaType": MANIFESTS[kind], "manifests": entries}).encode()
    ask("PUT", f"manifests/{TWO_PLATFORMS.rpartition(':')[2]}", index, Content_Type=MANIFESTS[kind])
    return {"index": sha256(index), **{entry["platform"]["architecture"]: entry["digest"] for entry in entries}}
