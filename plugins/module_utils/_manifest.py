# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Manifests: which files make an artefact complete, and whether a tree on disk is that.

A manifest is ``<tree>.manifest.json`` beside the tree. It exists only when the tree was once complete and every
file had its hash, so a cheap look at the sizes is enough afterwards.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
import os
import pwd
import stat
import tempfile
import threading
import typing as t

FORMAT = 1
# Below the folder of the trees: where files are until their hash was right, and where the replica of the head's dataset is mounted.
INCOMING = ".sparkops-incoming"
REPLICA = ".replica"
INDEX_NAME = "model.safetensors.index.json"
# Fits a core's second level cache, from which OpenSSL hashes 15 % faster than from memory (measured: 4 MiB), and is large enough that twenty
# threads do not wait for the GIL, which hashlib and read give up.
HASH_BLOCK = 512 * 1024


class ManifestError(ValueError):
    """A manifest or a path in it can't be trusted."""


@dataclasses.dataclass(frozen=True)
class File:
    """One file of an artefact. ``sha256`` is empty as long as nobody knows it."""

    path: str
    size: int
    sha256: str = ""
    # The hub's git object id: the name of a small file's blob in a hub cache.
    blob: str = ""

    def as_dict(self) -> dict[str, t.Any]:
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


@dataclasses.dataclass(frozen=True)
class Manifest:
    repository: str
    revision: str
    files: tuple[File, ...]
    licence: dict[str, t.Any] | None = None
    # For a slim tree: which tensors its index keeps, and the index that it was made from.
    slim: dict[str, t.Any] | None = None
    # The branch or tag that was asked for, when the profile pins no commit: ``revision`` is what it was then.
    requested: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def as_dict(self) -> dict[str, t.Any]:
        content = {
            "format": FORMAT,
            "repository": self.repository,
            "revision": self.revision,
            "files": [file.as_dict() for file in self.files],
            "licence": self.licence,
        }
        optional = {"slim": self.slim, "requested": self.requested}
        return {**content, **{name: value for name, value in optional.items() if value}}


class Problem(t.NamedTuple):
    """Why a file does not count: ``kind`` is missing, size, link, header or hash."""

    path: str
    kind: str
    text: str


def safe_path(path: str) -> str:
    """A path of a manifest must stay below the tree, whoever wrote it."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or "\n" in path or any(part in ("", ".", "..") for part in parts):
        raise ManifestError(f"path {path!r} is not a plain relative path")
    return path


def manifest_path(tree: str) -> str:
    return tree.rstrip("/") + ".manifest.json"


def from_dict(content: t.Any) -> Manifest:
    try:
        if content["format"] != FORMAT:
            raise ManifestError(f"manifest format {content['format']!r} is not {FORMAT}")
        files = tuple(File(safe_path(item["path"]), int(item["size"]), str(item["sha256"])) for item in content["files"])
        return Manifest(content["repository"], content["revision"], files, content.get("licence"), content.get("slim"), content.get("requested", ""))
    except (KeyError, TypeError) as exc:
        raise ManifestError(f"manifest lacks or mistypes {exc}") from exc


def load(tree: str) -> Manifest | None:
    """The manifest of a tree, or None when there is none or it is unreadable: then nothing is proven."""
    try:
        with open(manifest_path(tree), encoding="utf-8") as stream:
            return from_dict(json.load(stream))
    except (OSError, ValueError):
        return None


def save(tree: str, manifest: Manifest) -> None:
    """Publish a manifest: the last act of a download or a copy."""
    write_json(manifest_path(tree), manifest.as_dict())


def publish(tree: str, manifest: Manifest) -> None:
    """Save a manifest, and remove what only its predecessor named: files of an older commit. Nothing else is touched."""
    before = load(tree)
    save(tree, manifest)
    kept = {file.path for file in manifest.files}
    for file in before.files if before else ():
        if file.path not in kept:
            try:
                os.unlink(os.path.join(tree, file.path))
            except FileNotFoundError:
                continue


def write_through(path: str) -> None:
    """Bring a file's bytes to the disk. Before it gets its final name: after a loss of power nothing short is under one."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)


def write_json(path: str, content: t.Any, mode: int = 0o644) -> None:
    """Replace a file in one step, durably."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".sparkops-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1, sort_keys=True)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def selected(path: str, include: t.Sequence[str], exclude: t.Sequence[str]) -> bool:
    """Whether the patterns of an artefact take a file. No include pattern takes all; a trailing slash means a folder."""

    def matches(patterns: t.Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)

    return (not include or matches(include)) and not matches(exclude)


def select(files: t.Iterable[File], include: t.Sequence[str], exclude: t.Sequence[str]) -> list[File]:
    return sorted((file for file in files if selected(file.path, include, exclude)), key=lambda file: file.path)


def index_names(tree: str, path: str = INDEX_NAME) -> set[str]:
    """Shards that an index names, as paths below the tree. Counting files proves nothing; the index does."""
    with open(os.path.join(tree, path), encoding="utf-8") as stream:
        weight_map = json.load(stream)["weight_map"]
    folder = os.path.dirname(path)
    return {safe_path(os.path.join(folder, name)) for name in weight_map.values()}


def wanted_by_index(tree: str, paths: t.Iterable[str], include: t.Sequence[str], exclude: t.Sequence[str]) -> set[str]:
    """Shards that the indexes of a tree name and the patterns take."""
    wanted: set[str] = set()
    for path in paths:
        if path.endswith(".safetensors.index.json"):
            try:
                wanted |= index_names(tree, path)
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                continue
    return {path for path in wanted if selected(path, include, exclude)}


def slim_index(text: str, tensors: t.Sequence[str]) -> tuple[str, set[str]]:
    """An index of only the wanted tensors, and the shards they lie in. The same input always gives the same bytes.

    A loader that is pointed at the whole index would ask for every shard of the model.
    """
    index = json.loads(text)
    kept = {name: shard for name, shard in index["weight_map"].items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in tensors)}
    if not kept:
        raise ManifestError(f"the index names no tensor like {', '.join(tensors)}")
    metadata = {"total_size": index.get("metadata", {}).get("total_size"), "slim": list(tensors)}
    return json.dumps({"metadata": metadata, "weight_map": kept}, indent=1, sort_keys=True) + "\n", {safe_path(shard) for shard in kept.values()}


def lacking(manifest: Manifest, required: t.Sequence[str]) -> list[Problem]:
    """Files that a profile asks for and the listing has not: a download can't mend these."""
    present = {file.path for file in manifest.files}
    return [
        Problem(pattern, "missing", "required by the profile, not in the repository at this revision")
        for pattern in required
        if not any(fnmatch.fnmatchcase(path, pattern) for path in present)
    ]


def check_sizes(tree: str, files: t.Iterable[File]) -> list[Problem]:
    """Compare a tree with a manifest without reading content."""
    return [problem for problem in (_check_size(tree, file) for file in files) if problem]


def _check_size(tree: str, file: File) -> Problem | None:
    path = os.path.join(tree, file.path)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return Problem(file.path, "missing", "missing")
    except OSError as exc:
        return Problem(file.path, "missing", exc.strerror or str(exc))
    if stat.S_ISLNK(status.st_mode):
        state = "link" if os.path.exists(path) else "dangling link"
        return Problem(file.path, "link", f"a {state}, not a real file")
    if not stat.S_ISREG(status.st_mode):
        return Problem(file.path, "link", "not a regular file")
    if status.st_size != file.size:
        return Problem(file.path, "size", f"{status.st_size} bytes, wanted {file.size}")
    return None


def sha256_of(path: str, progress: t.Callable[[int], None] | None = None, drop: bool = False) -> str:
    """Hash a file. ``drop`` gives its pages back: on unified memory, page cache is GPU memory."""
    digest = hashlib.sha256()
    buffer = bytearray(HASH_BLOCK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        position = 0
        while True:
            count = stream.readinto(buffer)
            if not count:
                break
            digest.update(view[:count])
            position += count
            if drop:
                # From the beginning: a folio is given back only as a whole, and one of the kernel's read-ahead may be larger than a block.
                os.posix_fadvise(stream.fileno(), 0, position, os.POSIX_FADV_DONTNEED)
            if progress:
                progress(count)
        if drop:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def hash_files(
    tree: str,
    files: t.Sequence[File],
    threads: int = 0,
    progress: t.Callable[[int], None] | None = None,
    drop: bool = False,
) -> dict[str, str]:
    """Hash files on all cores, largest first so that the last one to end is small. Unreadable files are left out."""
    lock = threading.Lock()

    def report(count: int) -> None:
        if progress:
            with lock:
                progress(count)

    def one(file: File) -> tuple[str, str]:
        try:
            return file.path, sha256_of(os.path.join(tree, file.path), report, drop)
        except OSError:
            return file.path, ""

    ordered = sorted(files, key=lambda file: file.size, reverse=True)
    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        return {path: digest for path, digest in pool.map(one, ordered) if digest}


def check_hashes(
    tree: str,
    files: t.Sequence[File],
    threads: int = 0,
    progress: t.Callable[[int], None] | None = None,
    drop: bool = False,
) -> list[Problem]:
    """Read everything and name the damaged files."""
    problems = check_sizes(tree, files)
    skipped = {problem.path for problem in problems}
    rest = [file for file in files if file.path not in skipped]
    found = hash_files(tree, rest, threads, progress, drop)
    for file in rest:
        if found.get(file.path) != file.sha256:
            text = f"sha256 {found[file.path][:12]}..., wanted {file.sha256[:12]}..." if file.path in found else "not readable"
            problems.append(Problem(file.path, "hash", text))
    return problems


class Space(t.NamedTuple):
    """Room on one filesystem."""

    path: str
    device: int
    free: int


def existing_parent(path: str) -> str:
    """The nearest folder that exists: a virgin host has no tree yet."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return path


def unwritable(path: str, option: str) -> dict[str, str] | None:
    """Why this account may make nothing at a path, in the words of a refusal; None when it may."""
    parent = existing_parent(path)
    if os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return None
    account = pwd.getpwuid(os.geteuid()).pw_name
    return {
        "thing": parent,
        "found": f"owned by uid {os.stat(parent).st_uid}, not writable for {account}",
        "wanted": "a folder that the account may write",
        "next_step": f"sudo chown {account} {parent}, or set {option}; the bootstrap play makes the default place only",
    }


def space(path: str) -> Space:
    parent = existing_parent(path)
    figures = os.statvfs(parent)
    return Space(parent, os.stat(parent).st_dev, figures.f_bavail * figures.f_frsize)


def bytes_below(folder: str) -> int:
    """Bytes that files below a folder take on disk; a partial file may look larger than it is."""
    total = 0
    for root, _folders, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total


class Need(t.NamedTuple):
    """Bytes that some work will write below a path."""

    path: str
    size: int
    what: str


class Shortage(t.NamedTuple):
    path: str
    needed: int
    free: int
    parts: tuple[Need, ...]


def shortages(needs: t.Iterable[Need], margin: int) -> list[Shortage]:
    """Filesystems that are too small for the sum of what is to be written there. Nothing to write needs nothing."""
    groups: dict[int, tuple[Space, list[Need]]] = {}
    for need in needs:
        if need.size > 0:
            where = space(need.path)
            groups.setdefault(where.device, (where, []))[1].append(need)
    result = []
    for where, parts in groups.values():
        total = sum(need.size for need in parts) + margin
        if total > where.free:
            result.append(Shortage(where.path, total, where.free, tuple(parts)))
    return result


def gib(size: float) -> str:
    """Bytes for people."""
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= divisor:
            return f"{size / divisor:.1f} {unit}"
    return f"{int(size)} bytes"
