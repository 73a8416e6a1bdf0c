# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The hub: listing and locating through huggingface_hub, its refusals told apart, and its folders on disk.

huggingface_hub is only imported inside ``Hub``, which runs in the managed environment of a download job.
"""

from __future__ import annotations

import datetime
import email.utils
import hashlib
import json
import os
import re
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest, safe_path, select, wanted_by_index

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*(\d+)\s*;\s*t\s*=\s*(\d+)")
# A hub that says "too many" without a time gets this much peace.
UNTOLD_WAIT = 10.0


class HubError(Exception):
    """The hub or the way to it failed. ``kind`` decides what the user is told and whether trying again helps."""

    def __init__(self, kind: str, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.wait = wait


# Trying again later or by another way may help.
TRANSIENT = ("rate_limited", "unreachable", "server", "cut", "expired")


def told_wait(headers: t.Mapping[str, str], now: float) -> float | None:
    """Seconds that a server asks us to wait: its RateLimit header, else Retry-After as seconds or a date."""
    lowered = {key.lower(): value for key, value in headers.items()}
    match = _RATE_LIMIT.search(lowered.get("ratelimit", ""))
    if match and int(match.group(1)) == 0:
        return float(match.group(2))
    value = lowered.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, moment.timestamp() - now)


def classify(status: int, headers: t.Mapping[str, str], what: str, has_token: bool, now: float | None = None) -> HubError:
    """Turn a status code into words that say what to do. The hub answers 401 for "who are you" and 403 for "not you"."""
    if status == 429:
        wait = told_wait(headers, time.time() if now is None else now)
        return HubError("rate_limited", f"the hub answered 429 (too many requests) for {what}", UNTOLD_WAIT if wait is None else wait)
    if status == 401:
        state = "the token was not accepted" if has_token else "no token was sent"
        return HubError("unauthorized", f"the hub answered 401 for {what}: {state}, or the repository does not exist")
    if status == 403:
        state = "the token is valid but has no access" if has_token else "access is restricted and no token was sent"
        return HubError("forbidden", f"the hub answered 403 for {what}: {state}; its licence must be accepted on the hub's page")
    if status in (404, 410):
        return HubError("not_found", f"the hub answered {status} for {what}")
    if status >= 500 or status == 408:
        return HubError("server", f"the hub answered {status} for {what}")
    return HubError("protocol", f"the hub answered {status} for {what}")


class Patience:
    """Waits that the server asks for, shared by all threads and capped in total."""

    def __init__(self, cap: float, say: t.Callable[[str], None], sleep: t.Callable[[float], None] = time.sleep) -> None:
        self.cap = cap
        self.spent = 0.0
        self._say = say
        self._sleep = sleep
        self._lock = threading.Lock()
        self._until = 0.0

    def wait(self, error: HubError) -> None:
        """Wait as told, or give up when the total would pass the cap."""
        with self._lock:
            now = time.monotonic()
            seconds = max(error.wait, 1.0)
            # Threads that were refused together wait together: only the time beyond what is already agreed counts.
            extra = max(0.0, now + seconds - max(self._until, now))
            if self.spent + extra > self.cap:
                raise HubError(
                    "rate_limit_cap", f"{error.text}; {self.spent:.0f} s of the {self.cap:.0f} s allowed were already waited, it asks for {seconds:.0f} s more"
                )
            self.spent += extra
            self._until = max(self._until, now + seconds)
            until = self._until
        self._say(f"{error.text}; waiting {seconds:.0f} s as it asks")
        self._sleep(max(0.0, until - now))


class Location(t.NamedTuple):
    """Where a file's bytes are: often a signed address elsewhere that expires."""

    url: str
    size: int | None
    headers: dict[str, str]


def _response(error: BaseException | None) -> t.Any:
    """The server's answer behind an error: the library wraps the telling one in others."""
    while error is not None:
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None):
            return response
        error = error.__cause__ or error.__context__
    return None


class Hub:
    """huggingface_hub behind three calls. Nothing is read from the user's environment or token store.

    ``patient``: the library repeats what fails, five times and without a word. Else each failure is ours to judge at once.
    """

    def __init__(self, endpoint: str, token: str | None, timeout: float, patient: bool = False) -> None:
        import httpx2
        import huggingface_hub
        from huggingface_hub import constants, set_client_factory
        from huggingface_hub.utils import build_hf_headers, get_session
        from huggingface_hub.utils._http import default_client_factory

        def client() -> t.Any:
            made = default_client_factory()
            made.event_hooks["request"].append(self._limit_time)
            made.event_hooks["response"].append(self._refuse_patience)
            if not patient:
                send = made.send

                def once(request: t.Any, **more: t.Any) -> t.Any:
                    try:
                        return send(request, **more)
                    except httpx2.TransportError as exc:
                        # What follows the question mark may be a signature.
                        raise HubError("unreachable", f"{request.url.copy_with(query=None)}: {type(exc).__name__}: {exc}") from None

                made.send = once
            return made

        set_client_factory(client)

        self.endpoint = endpoint.rstrip("/")
        self.token = token or None
        self.timeout = timeout
        self.patient = patient
        self._library = huggingface_hub
        self._session = get_session
        self._headers = build_hf_headers(token=self.token or False)
        # The library's own ten seconds abort transfers on slow links.
        constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = int(timeout)
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint, token=self.token or False)

    def _limit_time(self, request: t.Any) -> None:
        """The library lists without any limit: a hub that accepts and says nothing would hold the job for ever."""
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), self.timeout)

    def _refuse_patience(self, response: t.Any) -> None:
        """The library waits by itself when the hub says "too many", without a word and without a limit. We do it."""
        if response.status_code == 429 or (response.status_code >= 500 and not self.patient):
            raise classify(response.status_code, dict(response.headers), str(response.request.url.path), bool(self.token))

    def call(self, what: str, function: t.Callable[[], t.Any]) -> t.Any:
        """Run something of the library and turn its errors into ours."""
        try:
            return function()
        except HubError:
            raise
        except Exception as exc:  # the library, httpx2 and the Xet client each have their own tree of errors
            response = _response(exc)
            if response is not None:
                raise classify(response.status_code, dict(response.headers), what, bool(self.token)) from None
            raise HubError("unreachable", f"{what} at {self.endpoint}: {type(exc).__name__}: {exc}") from None

    def commit(self, repository: str, revision: str) -> str:
        """The commit that a branch or tag stands for now."""
        return self.call(f"{repository} at {revision}", lambda: self._api.model_info(repository, revision=revision).sha)

    def files(self, repository: str, revision: str) -> list[File]:
        """Every file of a repository at a commit, with the hub's own sha256 for the large ones."""

        def collect() -> list[File]:
            tree = self._api.list_repo_tree(repository, revision=revision, recursive=True)
            return [
                File(safe_path(item.path), item.lfs.size if item.lfs else item.size, item.lfs.sha256 if item.lfs else "", item.blob_id)
                for item in tree
                if hasattr(item, "blob_id")
            ]

        return self.call(f"the file list of {repository} at {revision[:12]}", collect)

    def locate(self, repository: str, revision: str, path: str) -> Location:
        url = self._library.hf_hub_url(repository, path, revision=revision, endpoint=self.endpoint)
        found = self.call(
            f"{path} of {repository}",
            lambda: self._library.get_hf_file_metadata(url, token=self.token or False, timeout=self.timeout, endpoint=self.endpoint),
        )
        # The token is for the hub alone; a signed address elsewhere needs none and must not get it.
        own = found.location.startswith(self.endpoint + "/")
        return Location(found.location, found.size, dict(self._headers) if own else {})

    def stream(self, location: Location, start: int, end: int, block: int) -> t.Iterator[bytes]:
        """Bytes ``start`` to ``end`` (exclusive) of a file in blocks. Ends early when the connection is cut."""
        import httpx2

        headers = {**location.headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        what = f"bytes {start}-{end - 1}"
        try:
            with self._session().stream("GET", location.url, headers=headers, follow_redirects=True, timeout=self.timeout) as response:
                if response.status_code in (400, 401, 403) and not location.headers:
                    raise HubError("expired", f"the signed address answered {response.status_code}: it has expired")
                if response.status_code == 416:
                    raise HubError("short", "the file on the server is shorter than listed")
                if response.status_code != 206:
                    if response.status_code == 200:
                        raise HubError("no_ranges", "the server sends whole files only")
                    raise classify(response.status_code, dict(response.headers), what, bool(self.token))
                given = response.headers.get("content-range", "")
                if not given.startswith(f"bytes {start}-"):
                    raise HubError("no_ranges", f"the server answered another range ({given})")
                if not given.startswith(f"bytes {start}-{end - 1}/"):
                    raise HubError("short", f"the file on the server is shorter than listed ({given})")
                yield from response.iter_raw(block)
        except httpx2.HTTPError as exc:
            raise HubError("cut", f"{what}: {type(exc).__name__}: {exc}") from None


class LocalFile(t.NamedTuple):
    """A file of an existing folder: where its bytes really are, and the hash its cache gives it."""

    path: str
    real: str
    size: int
    sha256: str
    blob: str


class LocalTree(t.NamedTuple):
    """A folder that may hold (a part of) an artefact at exactly the pinned revision."""

    folder: str
    files: dict[str, LocalFile]
    broken: tuple[str, ...]
    # Files of the repository at this commit, when the library kept its listing.
    listing: tuple[File, ...] | None


def local_trees(folder: str, repository: str, revision: str) -> list[LocalTree]:
    """Trees of a repository at a pinned commit below a folder: a hub cache (either layout) or a plain download.

    ``refs`` are never read: they name what was newest once, not what is wanted.
    """
    name = "models--" + repository.replace("/", "--")
    found = []
    for cache in (folder, os.path.join(folder, "hub")):
        snapshot = os.path.join(cache, name, "snapshots", revision)
        if os.path.isdir(snapshot):
            listing = _cached_listing(os.path.join(cache, name), revision)
            found.append(_snapshot(snapshot, listing))
    if os.path.isdir(os.path.join(folder, ".cache", "huggingface", "download")):
        found.append(_plain(folder, revision))
    return [tree for tree in found if tree.files or tree.broken]


def snapshots(folder: str, repository: str) -> list[str]:
    """Commits of a repository that a hub cache holds something of."""
    found: set[str] = set()
    for cache in (folder, os.path.join(folder, "hub")):
        place = os.path.join(cache, "models--" + repository.replace("/", "--"), "snapshots")
        found |= set(os.listdir(place)) if os.path.isdir(place) else set()
    return sorted(found)


def _cached_listing(folder: str, revision: str) -> tuple[File, ...] | None:
    """The listing that newer libraries keep per commit; a commit never changes, so it needs no network."""
    try:
        with open(os.path.join(folder, "trees", f"{revision}.json"), encoding="utf-8") as stream:
            content = json.load(stream)
        if content["format_version"] != 1:
            return None
        return tuple(
            File(safe_path(path), int(item.get("lfs_size") or item["size"]), item.get("lfs_sha256") or "", item["blob_id"])
            for path, item in content["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _walk(folder: str) -> t.Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in (".cache", ".git"))
        for name in sorted(names):
            yield os.path.relpath(os.path.join(root, name), folder)


def _snapshot(snapshot: str, listing: tuple[File, ...] | None) -> LocalTree:
    """A snapshot of a hub cache. Its links lead to blobs named by hash, directly or through the cache-wide store."""
    files, broken = {}, []
    for path in _walk(snapshot):
        full = os.path.join(snapshot, path)
        real = os.path.realpath(full)
        if not os.path.isfile(real):
            broken.append(path)
            continue
        # The first link names the blob by its etag; where that leads may be named by another kind of hash.
        etag = os.path.basename(os.readlink(full)) if os.path.islink(full) else ""
        files[path] = _local_file(path, real, etag)
    return LocalTree(snapshot, files, tuple(broken), listing)


def _plain(folder: str, revision: str) -> LocalTree:
    """A plain folder that the library filled: a note per file says which commit it is of."""
    notes = os.path.join(folder, ".cache", "huggingface", "download")
    files = {}
    for note in _walk(notes):
        if not note.endswith(".metadata"):
            continue
        path = note[: -len(".metadata")]
        try:
            with open(os.path.join(notes, note), encoding="utf-8") as stream:
                commit, etag = stream.read().split()[:2]
        except (OSError, ValueError):
            continue
        real = os.path.join(folder, path)
        if commit == revision and os.path.isfile(real) and not os.path.islink(real):
            files[path] = _local_file(path, real, etag)
    return LocalTree(folder, files, (), _cached_listing(os.path.join(folder, ".cache", "huggingface"), revision))


def _local_file(path: str, real: str, etag: str) -> LocalFile:
    sha256 = etag if SHA256.fullmatch(etag) else ""
    blob = etag if COMMIT.fullmatch(etag) else ""
    return LocalFile(path, real, os.stat(real).st_size, sha256, blob)


def local_manifest(
    tree: LocalTree, repository: str, revision: str, include: t.Sequence[str], exclude: t.Sequence[str], required: t.Sequence[str]
) -> Manifest | None:
    """The manifest of a folder that is complete by itself, or None. Only the selected files are looked at, so a
    full checkout of which an artefact needs four files counts as complete."""
    names = [*tree.files, *tree.broken]
    listed = tree.listing or [File(item.path, item.size, item.sha256, item.blob) for item in tree.files.values()]
    chosen = select(listed, include, exclude)
    wanted = {file.path for file in chosen} | set(required) | wanted_by_index(tree.folder, names, include, exclude)
    if not chosen or not any(path.endswith(".safetensors") for path in wanted) or not wanted <= set(tree.files):
        return None
    if any(tree.files[file.path].size != file.size for file in chosen):
        return None
    present = {file.path for file in chosen}
    extra = [File(item.path, item.size, item.sha256, item.blob) for item in tree.files.values() if item.path in wanted - present]
    return Manifest(repository, revision, tuple(sorted([*chosen, *extra], key=lambda file: file.path)))


def git_blob(path: str) -> str:
    """The git object id of a file: the only hash the hub gives for small files."""
    with open(path, "rb") as stream:
        content = stream.read()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def matches(path: str, file: File, sha256: str) -> bool:
    """Whether a file on disk is the listed one, by the best hash that the listing has."""
    if file.sha256:
        return sha256 == file.sha256
    try:
        return not file.blob or git_blob(path) == file.blob
    except OSError:
        return False


def pinned(revision: str) -> bool:
    return bool(COMMIT.fullmatch(revision))
