# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Two registries over one storage: one for everybody, one that asks for a password."""

from __future__ import annotations

import json
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparklab import settings
from sparklab.daemons import Daemons
from sparklab.docker import Docker
from sparklab.images import STAMP_LABEL
from sparklab.run import LabError, listening, run, say, tail, wait_for
from sparklab.settings import Paths

USER = "sparklab"


class Registry:
    """Debian's docker-registry, its storage in the cache."""

    def __init__(self, paths: Paths, daemons: Daemons, docker: Docker) -> None:
        self.paths = paths
        self.daemons = daemons
        self.docker = docker

    @property
    def password_file(self) -> Path:
        return self.paths.state / "registry.json"

    @property
    def pushed_file(self) -> Path:
        return self.paths.registry / "pushed.json"

    def _configuration(self, name: str, address: str, *, password: bool) -> Path:
        """Write a registry's configuration; JSON is YAML too."""
        content: dict = {
            "version": 0.1, "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(self.paths.registry)}, "delete": {"enabled": True}, "cache": {"blobdescriptor": "inmemory"}},
            "http": {"addr": address},
        }
        if password:
            content["auth"] = {"htpasswd": {"realm": "sparklab", "path": str(self._htpasswd())}}
        path = self.paths.state / f"{name}.yml"
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path

    def _htpasswd(self) -> Path:
        """Make a password once, and a file of its bcrypt hash, which perl can compute on every Debian."""
        path = self.paths.state / "htpasswd"
        if not path.exists() or not self.password_file.exists():
            password = secrets.token_urlsafe(18)
            salt = "".join(secrets.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789") for _letter in range(22))
            digest = run(["perl", "-e", r'chomp(my $p = <STDIN>); print crypt($p, "\$2b\$05\$" . shift)', salt], data=f"{password}\n".encode())
            if not digest.startswith("$2b$05$"):
                raise LabError("perl's crypt knows no bcrypt here, so the registry with a password cannot be set up")
            self.password_file.write_text(json.dumps({"registry": settings.REGISTRY_AUTH, "username": USER, "password": password}, indent=2) + "\n")
            self.password_file.chmod(0o600)
            path.write_text(f"{USER}:{digest}\n")
        return path

    def ensure(self) -> None:
        """Start both registries."""
        for name, port, password in (("registry", settings.REGISTRY_PORT, False), ("registry-auth", settings.REGISTRY_AUTH_PORT, True)):
            self._serve(name, settings.GATEWAY, port, password=password)

    def _serve(self, name: str, address: str, port: int, *, password: bool) -> None:
        argv: list[str | Path] = ["docker-registry", "serve", self._configuration(name, f"{address}:{port}", password=password)]
        if not self.daemons.current(name, argv):
            self.daemons.stop(name)
            say(f"starting {name} on {address}:{port}")
            self.daemons.start(name, argv)
        wait_for(f"{name} listens on {address}:{port}", lambda: listening(address, port), 15, explain=lambda: tail(self.daemons.log(name)))

    # Images -------------------------------------------------------------------------------------------------------

    def pushed(self) -> dict[str, dict[str, str]]:
        """Return what is in the registry: repository:tag -> stamp and digest."""
        try:
            return json.loads(self.pushed_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def holds(self, image: str, stamp: str) -> bool:
        """Tell whether the storage has an image of this recipe; no registry need run for that."""
        entry = self.pushed().get(image, {})
        repository, _colon, tag = image.rpartition(":")
        link = self.paths.registry / "docker/registry/v2/repositories" / repository / "_manifests/tags" / tag / "current/link"
        return entry.get("stamp") == stamp and link.exists() and link.read_text() == entry.get("digest")

    def push(self, image: str) -> str:
        """Push an image and return its digest.

        Engines trust a registry without TLS on loopback only, unless they are told otherwise, and an engine that was
        there before the lab is not to be reconfigured. So the push goes to a third process over the same storage.
        """
        stamp = self.docker.image_label(image, STAMP_LABEL)
        say(f"pushing {image}")
        with self._loopback() as address:
            self.docker("image", "tag", image, f"{address}/{image}")
            output = self.docker("image", "push", f"{address}/{image}")
            self.docker("image", "rm", f"{address}/{image}")
        found = re.search(r"digest: (sha256:[0-9a-f]{64})", output)
        if not found:
            raise LabError(f"the push of {image} told no digest:\n{output}")
        entries = self.pushed() | {image: {"stamp": stamp, "digest": found[1]}}
        fresh = self.pushed_file.with_suffix(".new")
        fresh.write_text(json.dumps(entries, indent=2) + "\n")
        fresh.replace(self.pushed_file)
        return found[1]

    def fetch(self, image: str) -> None:
        """Bring an image back into the outer engine, which may have lost what the storage still has."""
        say(f"fetching {image}")
        with self._loopback() as address:
            self.docker("image", "pull", "--quiet", f"{address}/{image}")
            self.docker("image", "tag", f"{address}/{image}", image)
            self.docker("image", "rm", f"{address}/{image}")

    @contextmanager
    def _loopback(self) -> Iterator[str]:
        """Serve the storage on loopback for a moment."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            self._serve("registry-loopback", "127.0.0.1", port, password=False)
            yield f"127.0.0.1:{port}"
        finally:
            self.daemons.stop("registry-loopback")
