# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What of ours lies on a node and who still needs it: trees of weights, packed rows, images, records. For prune and uninstall.

Needed is what a kept record names, what was staged or started last, what a container has mounted or was made from, and what the caller
wants. Only places of our own layout are ever looked at for something to remove: ``<weights>/<org>--<name>/<revision>``, the same below its
staging folder, ``<engram>/<org>--<name>/<revision>``, images that we have recorded.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import shutil
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _history
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import ApiError, DockerApi
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import INCOMING
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import STAGED_FILE, read_json

REPOSITORY = re.compile(r"[^/]+--[^/]+")
# Beside a tree: what belongs to it alone (module_utils/_weights_state.py, _manifest.py).
BESIDE = (".manifest.json", ".damaged.json", ".lock")
REMOTE = ("nfs", "nfs4", "cifs", "fuse.sshfs", "autofs")


@dataclasses.dataclass
class Thing:
    """Something of ours. ``kept`` says why it stays; empty means that it may go."""

    kind: str  # weights, unfinished, pack, image, record, container, state
    what: str
    size: int
    kept: str = ""

    def as_dict(self) -> dict[str, t.Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Needed:
    """Paths and image ids that somebody needs, each with who."""

    paths: dict[str, str] = dataclasses.field(default_factory=dict)
    images: dict[str, str] = dataclasses.field(default_factory=dict)

    def why_path(self, path: str) -> str:
        """Who needs a directory: one of its own, or one that it lies in."""
        own = path.rstrip("/") + "/"
        return next((who for other, who in self.paths.items() if (other.rstrip("/") + "/").startswith(own) or own.startswith(other.rstrip("/") + "/")), "")


def deployments(state_root: str) -> list[str]:
    """Names of the deployments that this node has state of."""
    try:
        names = sorted(os.listdir(state_root))
    except OSError:
        return []
    marks = ("rank.json", "last_good.json", "history", "container", STAGED_FILE)
    return [name for name in names if any(os.path.exists(os.path.join(state_root, name, mark)) for mark in marks)]


def kept_records(state_dir: str, keep: int) -> list[dict[str, t.Any]]:
    """The newest records, and the last good one whatever its age."""
    found = _history.records(state_dir)
    last = (read_json(os.path.join(state_dir, "last_good.json"), {}) or {}).get("id")
    return [record for number, record in enumerate(found) if number < keep or record["id"] == last]


def note_record(needed: Needed, record: t.Mapping[str, t.Any], weights_root: str, who: str) -> None:
    for mount in record["spec"].get("mounts") or []:
        needed.paths.setdefault(mount["source"], who)
    for artefact in record.get("artefacts") or []:
        needed.paths.setdefault(os.path.join(weights_root, artefact["directory"]), who)
    if (record.get("image") or {}).get("id"):
        needed.images.setdefault(record["image"]["id"], who)


def note_wanted(needed: Needed, state_dir: str, roots: t.Sequence[str], who: str) -> None:
    """What was staged last for a deployment, and what its rank is to start with: it need not have run yet."""
    staged = read_json(os.path.join(state_dir, STAGED_FILE), {})
    for directory in staged.get("directories") or []:
        for root in roots:
            needed.paths.setdefault(os.path.join(root, directory), who)
    if staged.get("image"):
        needed.images.setdefault(staged["image"], who)
    rank = read_json(os.path.join(state_dir, "rank.json"), {})
    for path in [*(rank.get("mounts") or []), *(artefact["path"] for artefact in rank.get("artefacts") or [])]:
        needed.paths.setdefault(path, who)


def note_containers(needed: Needed, api: DockerApi, but: str = "") -> None:
    """What any container of this node has mounted or was made from, also one that has ended. ``but``: a deployment whose containers do not count."""
    for entry in api.containers():
        labels = entry.get("Labels") or {}
        if but and but in (labels.get("sparkops.deployment"), labels.get("sparkops.check")):
            continue
        who = f"container {(entry.get('Names') or ['?'])[0].lstrip('/')}"
        needed.images.setdefault(entry.get("ImageID", ""), who)
        for mount in entry.get("Mounts") or []:
            if mount.get("Source"):
                needed.paths.setdefault(mount["Source"], who)


def remote_mounts(text: str) -> list[str]:
    """Mount points of other machines' files, from /proc/self/mounts: they are not ours, and looking into a dead one hangs."""
    rows = (line.split() for line in text.splitlines())
    return [row[1] for row in rows if len(row) > 2 and row[2] in REMOTE]


def mounted_in(path: str, text: str) -> str:
    """Why a directory is not ours to remove as a whole: something is mounted at it or in it (NFS, a dataset of ZFS). Empty otherwise."""
    own = path.rstrip("/") + "/"
    points = [row[1] for row in (line.split() for line in text.splitlines()) if len(row) > 2]
    return next((f"{point} is a mount" for point in points if (point.rstrip("/") + "/").startswith(own)), "")


def mounts() -> str:
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as stream:
        return stream.read()


def trees(root: str, remote: t.Sequence[str]) -> list[str]:
    """``<org>--<name>/<revision>`` below a root, on disks of this node."""
    found = []
    if any((root + "/").startswith(point.rstrip("/") + "/") for point in remote) or not os.path.isdir(root):
        return found
    for repository in sorted(filter(REPOSITORY.fullmatch, os.listdir(root))):
        folder = os.path.join(root, repository)
        if folder in remote or os.path.islink(folder):
            continue
        for revision in sorted(os.listdir(folder)):
            path = os.path.join(folder, revision)
            if path not in remote and os.path.isdir(path) and not os.path.islink(path):
                found.append(path)
    return found


def size_of(path: str) -> int:
    """Bytes on disk; a file with several names here counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for folder, dummy, files in os.walk(path):
        for name in files:
            try:
                entry = os.lstat(os.path.join(folder, name))
            except OSError:
                continue  # went meanwhile
            if (entry.st_dev, entry.st_ino) not in seen:
                seen.add((entry.st_dev, entry.st_ino))
                total += entry.st_blocks * 512
    return total


def is_locked(tree: str) -> bool:
    """Whether somebody writes this tree right now."""
    try:
        with open(tree.rstrip("/") + ".lock", "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def directories(kind: str, root: str, needed: Needed, mounted: str) -> list[Thing]:
    """The trees of a root, with who needs each. ``mounted`` is the text of /proc/self/mounts."""
    return [
        Thing(kind, path, size_of(path), needed.why_path(path) or mounted_in(path, mounted) or ("it is being written" if is_locked(path) else ""))
        for path in trees(root, remote_mounts(mounted))
    ]


def unfinished(root: str, needed: Needed, mounted: str) -> list[Thing]:
    """What downloads and copies have begun and not ended, of trees that nobody wants any more: the others go on from there."""
    place = os.path.join(root, INCOMING)
    found = []
    for path in trees(place, remote_mounts(mounted)):
        tree = os.path.join(root, os.path.relpath(path, place))
        found.append(Thing("unfinished", path, size_of(path), needed.why_path(tree) or ("it is being written" if is_locked(tree) else "")))
    return found


def images(api: DockerApi, state_root: str, needed: Needed) -> list[Thing]:
    """Images that we have pulled, shipped, or recorded; nobody else's."""
    record = Record(state_root)
    ours = set(record.read()["images"])
    for entry in api.call("GET", "/images/json") or []:
        if any(tag.startswith(f"{_history.KEPT_IMAGES}:") for tag in entry.get("RepoTags") or []):
            ours.add(entry["Id"])
    found = []
    for image_id in sorted(ours):
        document = api.inspect_image(image_id)
        if document is not None:
            name = next((tag for tag in document.get("RepoTags") or [] if not tag.startswith(_history.KEPT_IMAGES)), image_id[:19])
            found.append(Thing("image", f"{name} {document['Id']}", int(document.get("Size") or 0), needed.images.get(document["Id"], "")))
    return found


def remove_tree(path: str, root: str) -> None:
    """A tree with what lies beside it, and the folders between it and the root that are empty then."""
    shutil.rmtree(path)
    for ending in BESIDE:
        if os.path.exists(path + ending):
            os.unlink(path + ending)
    folder = os.path.dirname(path)
    while folder != root and not os.listdir(folder):
        os.rmdir(folder)
        folder = os.path.dirname(folder)


def remove_empty(place: str) -> None:
    """The folders below that hold nothing, and the place itself when it is empty then."""
    for folder, _folders, _files in os.walk(place, topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)


def remove_image(api: DockerApi, image_id: str) -> str:
    """Take all its names away, and it with the last. An empty text, or why it stays: somebody uses it after all."""
    document = api.inspect_image(image_id)
    if document is None:
        return ""
    try:
        for tag in document.get("RepoTags") or []:
            api.call("DELETE", f"/images/{tag}")
        if api.inspect_image(image_id) is not None:
            api.call("DELETE", f"/images/{image_id}")
    except ApiError as exc:
        return exc.message
    return ""


def untag(api: DockerApi, deployment: str, record_id: str = "") -> None:
    """Our own names for the images of a deployment, or of one record of it."""
    beginning = f"{_history.KEPT_IMAGES}:{deployment}-{record_id}"
    for entry in api.call("GET", "/images/json") or []:
        for tag in entry.get("RepoTags") or []:
            # A deployment's name may be the beginning of another's: after it comes the id and no more.
            if tag.startswith(beginning) and _history.ID.fullmatch(tag[len(f"{_history.KEPT_IMAGES}:{deployment}-"):]):
                if len(entry["RepoTags"]) > 1:
                    api.call("DELETE", f"/images/{tag}")
