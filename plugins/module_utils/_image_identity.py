# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""One identity for an image, whatever store holds it and however it came there. Pure functions.

The engine's own C(Id) is the digest of the config in the classic store and the digest of a manifest or an index in the
containerd store, and a loaded image has no registry digest. What all of them agree about is the content: the platform,
the uncompressed layers and the part of the config that decides what a container does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing as t

# overlay2 mounts about 125 layers; a build may succeed where the load on another node then fails.
MAX_LAYERS = 123

# What the kernel, Docker and Go call the same processor.
_ARCHITECTURES = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "armv8l": "arm64"}
_USUAL_VARIANTS = {("amd64", "v1"), ("arm", "v7"), ("arm64", "v8")}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Reference:
    """An image name in its parts. ``name`` has the registry in it as the user wrote it."""

    name: str
    tag: str | None
    digest: str | None

    @property
    def tagged(self) -> str:
        return f"{self.name}:{self.tag or 'latest'}"

    @property
    def registry(self) -> str:
        """The registry's host, with Docker's rule: a first part without dot, colon or "localhost" is a user at Docker Hub."""
        first, slash, dummy = self.name.partition("/")
        return first if slash and (first == "localhost" or "." in first or ":" in first) else "docker.io"


def parse_reference(text: str) -> Reference:
    """``registry:5000/name:tag@sha256:…`` in its parts; ValueError when it is no image reference."""
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ValueError(f"{text!r} has a digest that is not sha256: and 64 hexadecimal digits")
    path, slash, last = rest.rpartition("/")
    last, colon, tag = last.partition(":")
    name = path + slash + last
    if not re.fullmatch(r"((\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d+)?/)?[a-z0-9._/-]+", name) or (colon and not re.fullmatch(r"\w[\w.-]{0,127}", tag)):
        raise ValueError(f"{text!r} is not an image reference such as registry.example/team/name:tag")
    return Reference(_familiar(name), tag or None, digest or None)


def _familiar(name: str) -> str:
    """The engine lists images of Docker Hub without its host, and official ones without their folder."""
    for host in ("docker.io/", "index.docker.io/"):
        if name.startswith(host):
            name = name[len(host) :]
            break
    return name[len("library/") :] if name.startswith("library/") and name.count("/") == 1 else name


@dataclasses.dataclass(frozen=True)
class Image:
    """What matters of an image, in one form for all stores and sources."""

    id: str
    os: str
    architecture: str
    layers: tuple[str, ...]
    config: dict[str, t.Any]
    digests: frozenset[str] = frozenset()
    tags: tuple[str, ...] = ()
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    size: int = 0

    @property
    def platform(self) -> str:
        return f"{self.os}/{self.architecture}"

    @property
    def identity(self) -> str:
        """The same text on each node that holds the same image, and only there."""
        content = {"platform": self.platform, "layers": list(self.layers), "config": self.config}
        return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def as_dict(self) -> dict[str, t.Any]:
        return {
            "present": True,
            "identity": self.identity,
            "id": self.id,
            "platform": self.platform,
            "digests": sorted(self.digests),
            "tags": list(self.tags),
            "layers": list(self.layers),
            "size": self.size,
        }


def from_inspect(document: t.Mapping[str, t.Any], recorded: t.Iterable[str] = ()) -> Image:
    """From the engine's inspect document. ``recorded`` are registry digests that we noted when we shipped it here."""
    return Image(
        id=document["Id"],
        os=document.get("Os") or "linux",
        architecture=normal_architecture(document.get("Architecture") or ""),
        layers=tuple((document.get("RootFS") or {}).get("Layers") or ()),
        config=_behaviour(document.get("Config") or {}),
        digests=frozenset(_registry_digests(document)) | frozenset(recorded),
        tags=tuple(document.get("RepoTags") or ()),
        labels=dict((document.get("Config") or {}).get("Labels") or {}),
        size=_number(document.get("Size")),
    )


def normal_architecture(name: str) -> str:
    return _ARCHITECTURES.get(name, name)


def normal_platform(text: str) -> str:
    """A platform as engines and registries tell it: without the variant that every processor of its kind has."""
    os, dummy, processor = text.partition("/")
    architecture, slash, variant = processor.partition("/")
    architecture = normal_architecture(architecture)
    return f"{os}/{architecture}" + (slash + variant if (architecture, variant) not in _USUAL_VARIANTS else "")


def own_platform(version: t.Mapping[str, t.Any]) -> str:
    """What an engine runs without emulation; from C(/version)."""
    return f"linux/{normal_architecture(version['Arch'])}"


def _number(value: t.Any) -> int:
    return value if isinstance(value, int) else 0


def _registry_digests(document: t.Mapping[str, t.Any]) -> list[str]:
    return [entry.partition("@")[2] for entry in document.get("RepoDigests") or () if "@" in entry]


def _behaviour(config: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What of a config changes a container. Stores differ in writing "nothing" as null, as an empty list or not at all."""
    return {
        "env": sorted(config.get("Env") or ()),
        "entrypoint": _words(config.get("Entrypoint")),
        "command": _words(config.get("Cmd")),
        "workdir": config.get("WorkingDir") or "/",
        "user": config.get("User") or "",
    }


def _words(value: t.Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


class Comparison(t.NamedTuple):
    """Whether two nodes hold the same image, and what says so."""

    same: bool
    reason: str


def compare(source: t.Mapping[str, t.Any], target: t.Mapping[str, t.Any]) -> Comparison:
    """Is ``target`` the image that ``source`` is? Both as ``Image.as_dict`` tells them.

    Digests that differ settle nothing alone: one may be of an index and the other of a platform's manifest. But they ask
    for a transfer, which then moves no layer, and after it the source's digest is noted on the target.
    """
    if not target["present"]:
        return Comparison(False, "absent")
    if source["platform"] != target["platform"]:
        return Comparison(False, "platform")
    if source["id"] == target["id"]:
        return Comparison(True, "id")
    if set(source["digests"]) & set(target["digests"]):
        return Comparison(True, "digest")
    if source["layers"] != target["layers"]:
        return Comparison(False, "layers")
    if source["identity"] != target["identity"]:
        return Comparison(False, "config")
    if source["digests"] and target["digests"]:
        return Comparison(False, "digest")
    return Comparison(True, "content")


def present_prefix(layers: t.Sequence[str], held: t.Iterable[t.Sequence[str]]) -> int:
    """How many of ``layers``, from the bottom, some image on the target has too."""
    return max((_common_prefix(layers, other) for other in held), default=0)


def _common_prefix(one: t.Sequence[str], other: t.Sequence[str]) -> int:
    count = 0
    for mine, theirs in zip(one, other):
        if mine != theirs:
            break
        count += 1
    return count
