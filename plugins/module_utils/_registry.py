# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a registry says about an image, asked through the node's own engine.

The engine knows the mirrors, proxies, certificates and insecure registries of its node; whoever asks beside it gets
another answer than the pull will.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import ApiError, DockerApi, NotRunning, TimedOut, quote
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import Reference, normal_architecture, parse_reference
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, run_job, take_secret

DOCKER_HUB_LOGIN = "https://index.docker.io/v1/"
# Seconds without an event that end a pull. A containerd store is silent while it unpacks a layer, which may be one of 20 GB.
SILENCE = 1800.0

# The engine passes on the text of the registry or of the network, so the words are all there is. First match wins.
_KINDS = (
    ("missing", re.compile(r"manifest unknown|manifest for .* not found|name unknown|repository .* not found", re.IGNORECASE)),
    ("denied", re.compile(r"denied|unauthorized|authentication required|no basic auth|forbidden|incorrect username or password", re.IGNORECASE)),
    ("platform", re.compile(r"no matching manifest|does not match the specified platform", re.IGNORECASE)),
    ("space", re.compile(r"no space left", re.IGNORECASE)),
    ("certificate", re.compile(r"x509|server gave HTTP response to HTTPS client", re.IGNORECASE)),
    ("limit", re.compile(r"toomanyrequests|rate limit", re.IGNORECASE)),
    (
        "unreachable",
        re.compile(
            r"dial tcp|no such host|timeout|deadline exceeded|unreachable|connection refused|connection reset|i/o|EOF|proxyconnect|50[234] ",
            re.IGNORECASE,
        ),
    ),
)


class RegistryError(Exception):
    """The registry did not give what was asked. ``kind`` is one of denied, missing, platform, space, certificate, limit, unreachable, other."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Login:
    """An account at a registry, and where we have it from."""

    username: str
    password: str = dataclasses.field(repr=False)
    origin: str

    def header(self, registry: str) -> dict[str, str]:
        """The header by which the engine gets it for one request; it is stored nowhere."""
        # A containerd store sends a login to no other host than this one, and does not know Docker Hub as docker.io.
        server = DOCKER_HUB_LOGIN if registry == "docker.io" else registry
        content = {"username": self.username, "password": self.password, "serveraddress": server}
        return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(content).encode()).decode()}


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a registry has under a reference now."""

    digest: str
    platforms: tuple[str, ...]


def classify(text: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(text)), "other")


def stored_login(config: str, registry: str) -> Login | None:
    """The login that C(docker login) left in a config file. Credential helpers are programs of the user: we start none."""
    try:
        with open(config, encoding="utf-8") as stream:
            logins = json.load(stream).get("auths", {})
        key = DOCKER_HUB_LOGIN if registry == "docker.io" else registry
        entry = logins.get(key) or logins.get(f"https://{registry}") or {}
        username, colon, password = base64.b64decode(entry.get("auth", "")).decode().partition(":")
    except (OSError, ValueError, AttributeError):
        return None
    return Login(username, password, config) if colon else None


def headers(login: Login | None, reference: Reference) -> dict[str, str]:
    return login.header(reference.registry) if login else {}


def ask(api: DockerApi, reference: Reference, name: str, login: Login | None) -> Offer:
    """The digest and the platforms under ``name``; RegistryError when there is no answer. Moves no layer."""
    try:
        status, answer = api.request("GET", f"/distribution/{quote(name)}/json", headers=headers(login, reference))
    except NotRunning as exc:
        raise RegistryError("unreachable", f"{reference.registry} gave no answer in {api.timeout} s") from exc
    if status >= 400:
        text = str(answer.get("message") if isinstance(answer, dict) else answer)
        raise RegistryError("denied" if status in (401, 403) else classify(text), text)
    return Offer(answer["Descriptor"]["digest"], tuple(_platform(entry) for entry in answer.get("Platforms") or ()))


def _platform(entry: t.Mapping[str, str]) -> str:
    return f"{entry.get('os', 'linux')}/{normal_architecture(entry.get('architecture', ''))}"


def pull(api: DockerApi, reference: Reference, wanted: str, platform: str | None, login: Login | None, progress: Progress) -> None:
    """Pull a tag or a digest of ``reference``. The engine answers 200 and says in its stream how it ended."""
    query = {"fromImage": reference.name, "tag": wanted, "platform": platform}
    layers: dict[str, tuple[int, int]] = {}
    progress.begin("pull", 0, f"from {reference.registry}")
    try:
        for event in api.stream_json("POST", "/images/create", query=query, headers=headers(login, reference), timeout=SILENCE):
            if "error" in event:
                raise RegistryError(classify(event["error"]), event["error"])
            note_layer(layers, event)
            progress.done, progress.total = (sum(numbers) for numbers in zip(*layers.values())) if layers else (0, 0)
    except TimedOut as exc:
        raise RegistryError("unreachable", f"{reference.registry} sent nothing for {SILENCE:.0f} s") from exc
    except ApiError as exc:
        raise RegistryError("denied" if exc.status in (401, 403) else classify(exc.message), exc.message) from exc


def note_layer(layers: dict[str, tuple[int, int]], event: t.Mapping[str, t.Any]) -> None:
    """How much of each layer has come. A layer that the engine unpacks is counted as come, not a second time."""
    name, status, detail = event.get("id", ""), event.get("status"), event.get("progressDetail") or {}
    if status == "Downloading" and detail.get("total"):
        layers[name] = (detail.get("current", 0), detail["total"])
    elif status in ("Download complete", "Pull complete") and name in layers:
        layers[name] = (layers[name][1], layers[name][1])


def run(request: t.Mapping[str, t.Any], progress: Progress) -> dict[str, t.Any]:
    """The job: a pull that outlives the session. Its failure is an answer, because another rank may have the image."""
    password = take_secret(request)
    login = Login(request["username"], password, request["login_origin"]) if password is not None else None
    api = DockerApi(request["socket"])
    try:
        pull(api, parse_reference(request["reference"]), request["wanted"], request["platform"], login, progress)
    except RegistryError as exc:
        return {"pull_error": {"kind": exc.kind, "text": str(exc)}, "notices": request["notices"]}
    return {"pull_error": {}, "notices": request["notices"]}


def main(words: t.Sequence[str]) -> int:
    return run_job(words[0], run)
