# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a node remembers about its images, by the engine's own id: where they came from and whether they are proven here.

A loaded image has no registry digest, so without this note it would be shipped again and again. The source's end of a
ship reads the same file to know what it may give away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._manifest import write_json

NAME = "images.json"


class Record:
    """The file ``images.json`` in the state root. Lost or damaged, it costs one more check and no more."""

    def __init__(self, state_root: str) -> None:
        self.path = os.path.join(state_root, NAME)

    def read(self) -> dict[str, t.Any]:
        try:
            with open(self.path, encoding="utf-8") as stream:
                content = json.load(stream)
        except (OSError, ValueError):
            content = None
        return content if isinstance(content, dict) and isinstance(content.get("images"), dict) else {"format": 1, "images": {}}

    def of(self, image_id: str) -> dict[str, t.Any]:
        return self.read()["images"].get(image_id, {})

    def digests(self, image_id: str) -> list[str]:
        return list(self.of(image_id).get("digests", ()))

    def shares(self, image_id: str, digests: t.Collection[str], source: t.Mapping[str, t.Any]) -> bool:
        """Whether the peers may have the image already, with all that is known of it."""
        content = self.read()
        return image_id in content["images"] and set(digests) <= set(self.digests(image_id)) and content.get("source") == source

    def share(self, image_id: str, digests: t.Iterable[str], source: t.Mapping[str, t.Any], **more: t.Any) -> None:
        """Let the peers have an image. ``source`` has the C(staging) directory and the C(socket) of the engine for image_source.py."""
        self._change(image_id, digests, {"source": dict(source)}, more)

    def note(self, image_id: str, digests: t.Iterable[str] = (), **more: t.Any) -> None:
        """Add what is known about an image; several deployments of a node share the file."""
        self._change(image_id, digests, {}, more)

    def _change(self, image_id: str, digests: t.Iterable[str], general: t.Mapping[str, t.Any], more: t.Mapping[str, t.Any]) -> None:
        with self._locked():
            content = self.read()
            content.update(general)
            entry = content["images"].setdefault(image_id, {})
            entry.update(more)
            entry["digests"] = sorted(set(entry.get("digests", ())) | set(digests))
            write_json(self.path, content)
            self._give_to_owner()

    def _give_to_owner(self) -> None:
        """Written by root, it belongs to the account that the state root belongs to, as all in it does."""
        if os.getuid() == 0:
            owner = os.stat(os.path.dirname(self.path))
            os.chown(self.path, owner.st_uid, owner.st_gid)

    @contextlib.contextmanager
    def _locked(self) -> t.Iterator[None]:
        """The directory itself is the lock: a lock file made by root would stop the account afterwards."""
        folder = os.path.dirname(self.path)
        os.makedirs(folder, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
