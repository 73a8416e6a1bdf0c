# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A hub that huggingface_hub's own client can use through HF_ENDPOINT, and that misbehaves on request.

Usage: hub.py --root FOLDER [--bind ADDRESS] [--port PORT] [--admin-port PORT]      (port 0: any; the ports are printed)

Repositories are folders, read anew for each request, so a test may change them while the hub runs:

    ROOT/ORGANISATION/NAME/hub.json            {"main": "<commit>", "gated": true, "access": ["reader"]}   (all but main optional)
    ROOT/ORGANISATION/NAME/<commit>/...        the files of a commit (40 hexadecimal digits)
    ROOT/tokens.json                           {"<token>": "reader"}: who holds which token

Like the real hub it answers a request for a large file with a redirect to another address, serves ranges, tells git and LFS
hashes, hides a private repository behind 401 and a gated one behind 401 (no token) or 403 (a token without access).

The admin port listens on loopback only:

    GET    /faults      what is set              POST   /faults      set one, see the class Fault
    DELETE /faults      forget all               POST   /refs        {"repository": ..., "ref": "main", "revision": ...}
    GET    /counters    bytes and requests by path since the last DELETE /counters
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npy", ".npz")
CHUNK = 64 * 1024
KINDS = ("rate-limit", "unauthorized", "forbidden", "error", "stall", "cut", "short", "corrupt", "missing", "slow", "delay")


@dataclass
class Fault:
    """One way to misbehave.

    ``rate-limit``    429 with ``RateLimit: "x";r=0;t=SECONDS`` and, unless retry_after is false, no other hint
    ``unauthorized``  401       ``forbidden``  403       ``error``  STATUS (500)
    ``stall``         stop sending after BYTES of the body and keep the connection open for SECONDS (600)
    ``cut``           close the connection after BYTES of the body
    ``short``         the body, and its Content-Length, lack the last BYTES (7); listings still tell the full size
    ``corrupt``       one byte in the middle of the body is another
    ``missing``       404, and the file is in no listing
    ``slow``          at most RATE bytes per second
    ``delay``         wait SECONDS before the answer
    """

    kind: str
    path: str = "*"
    """Pattern for ``ORGANISATION/NAME/FILE``; requests for listings have ``ORGANISATION/NAME/api/tree`` and the like."""
    times: int | None = None
    """How many requests it meets before it is gone; none: until it is deleted."""
    bytes: int = 0
    seconds: float = 0
    """None given: 3, for a stall 600."""
    rate: int = 100_000
    status: int = 500
    methods: list[str] = field(default_factory=lambda: ["GET", "HEAD"])

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of fault {self.kind!r}: {', '.join(KINDS)}")
        if not self.seconds:
            self.seconds = 600.0 if self.kind == "stall" else 3.0


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if code:
            self.headers["X-Error-Code"] = code
        if message:
            self.headers["X-Error-Message"] = message


class Hub:
    """What both ports share: repositories, faults, counters."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.faults: list[Fault] = []
        self.counters: dict[str, dict[str, int]] = {}
        self.hashes: dict[tuple[str, int, int], tuple[str, str]] = {}

    # Repositories -------------------------------------------------------------------------------------------------

    def settings(self, repository: str) -> dict:
        try:
            return json.loads((self.root / repository / "hub.json").read_text())
        except FileNotFoundError:
            raise Refused(401, "RepoNotFound", "Repository not found") from None

    def commit(self, repository: str, revision: str) -> str:
        """Return the commit that a branch, tag or (shortened) commit stands for."""
        settings = self.settings(repository)
        commit = settings.get("refs", {}).get(revision) or (settings["main"] if revision == "main" else revision)
        if not COMMIT.fullmatch(commit) or not (self.root / repository / commit).is_dir():
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def file(self, repository: str, commit: str, name: str) -> Path:
        folder = self.root / repository / commit
        path = folder / name
        if ".." in Path(name).parts or not path.is_file() or self.fault("missing", f"{repository}/{name}", "GET", use=False):
            raise Refused(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        return path

    def files(self, repository: str, commit: str) -> Iterator[tuple[str, Path]]:
        folder = self.root / repository / commit
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not self.fault("missing", f"{repository}/{name}", "GET", use=False):
                yield name, path

    def hash(self, path: Path) -> tuple[str, str]:
        """Return the git blob id and the SHA-256 of a file."""
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in self.hashes:
            git, sha = hashlib.sha1(f"blob {status.st_size}\0".encode(), usedforsecurity=False), hashlib.sha256()
            with path.open("rb") as source:
                while chunk := source.read(1 << 20):
                    git.update(chunk)
                    sha.update(chunk)
            self.hashes[key] = (git.hexdigest(), sha.hexdigest())
        return self.hashes[key]

    @staticmethod
    def is_lfs(name: str) -> bool:
        return name.endswith(LFS_SUFFIXES)

    def entry(self, name: str, path: Path, commit: str, *, expand: bool) -> dict:
        """Describe a file as the tree listing does."""
        git, sha = self.hash(path)
        size = path.stat().st_size
        found: dict = {"type": "file", "oid": git, "size": size, "path": name}
        if self.is_lfs(name):
            found["lfs"] = {"oid": sha, "size": size, "pointerSize": 134}
        if expand:
            found["lastCommit"] = {"id": commit, "title": "Made by the lab", "date": "2026-01-01T00:00:00.000Z"}
            found["securityFileStatus"] = {"status": "safe", "avScan": None, "pickleImportScan": None}
        return found

    def check_access(self, repository: str, authorization: str | None, *, content: bool) -> None:
        """Refuse as the real hub does: 401 without a (valid) token, 403 with one that has no access."""
        settings = self.settings(repository)
        if not (settings.get("private") or (settings.get("gated") and content)):
            return
        user = self.user(authorization)
        if user in settings.get("access", []):
            return
        if settings.get("private"):
            raise Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        raise Refused(401 if user is None else 403, "GatedRepo", f"Access to model {repository} is restricted.")

    def user(self, authorization: str | None) -> str | None:
        if not authorization:
            return None
        try:
            tokens = json.loads((self.root / "tokens.json").read_text())
        except FileNotFoundError:
            tokens = {}
        user = tokens.get(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return user

    # Faults and counters ------------------------------------------------------------------------------------------

    def fault(self, kind: str, path: str, method: str, *, use: bool = True) -> Fault | None:
        """Return the first fault of a kind that meets a request, and count it down."""
        with self.lock:
            for fault in self.faults:
                if fault.kind == kind and method in fault.methods and fnmatch.fnmatchcase(path, fault.path):
                    if use and fault.times is not None:
                        fault.times -= 1
                        if fault.times <= 0:
                            self.faults.remove(fault)
                    return fault
        return None

    def count(self, path: str, *, sent: int = 0, requests: int = 0) -> None:
        with self.lock:
            counter = self.counters.setdefault(path, {"bytes": 0, "requests": 0})
            counter["bytes"] += sent
            counter["requests"] += requests

    def move(self, repository: str, ref: str, revision: str) -> None:
        """Let a branch or tag point to another commit."""
        settings = self.settings(repository)
        if not (self.root / repository / revision).is_dir():
            raise ValueError(f"{repository} has no commit {revision}")
        if ref == "main":
            settings["main"] = revision
        else:
            settings.setdefault("refs", {})[ref] = revision
        fresh = self.root / repository / "hub.json.new"
        fresh.write_text(json.dumps(settings, indent=2) + "\n")
        fresh.replace(self.root / repository / "hub.json")


class Handler(BaseHTTPRequestHandler):
    """What both ports have in common."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self, status: int, content: object = None, headers: dict[str, str] | None = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read_json(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def log_message(self, format: str, *args: object) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.client_address[0]} {format % args}", flush=True)


class Public(Handler):
    """The hub as its clients see it."""

    def do_HEAD(self) -> None:
        self.handle_request()

    def do_GET(self) -> None:
        self.handle_request()

    def do_POST(self) -> None:
        self.handle_request()

    def handle_request(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(address.query)
        # Split before unquoting: a revision may hold a quoted slash (refs%2Fpr%2F1).
        words = [urllib.parse.unquote(word) for word in address.path.strip("/").split("/")]
        try:
            match words:
                case ["api", "whoami-v2"]:
                    user = self.hub.user(self.headers.get("Authorization"))
                    self.answer(200 if user else 401, {"name": user, "type": "user", "orgs": []} if user else {"error": "Unauthorized"})
                case ["api", "models", organisation, name]:
                    self.info(f"{organisation}/{name}", "main", query)
                case ["api", "models", organisation, name, "revision", revision]:
                    self.info(f"{organisation}/{name}", revision, query)
                case ["api", "models", organisation, name, "refs"]:
                    self.refs(f"{organisation}/{name}")
                case ["api", "models", organisation, name, "tree", revision, *folder]:
                    self.tree(f"{organisation}/{name}", revision, "/".join(folder), query)
                case ["api", "models", organisation, name, "paths-info", revision]:
                    self.paths_info(f"{organisation}/{name}", revision)
                case ["cdn", organisation, name, commit, *file]:
                    self.content(f"{organisation}/{name}", commit, "/".join(file))
                case [organisation, name, ("resolve" | "raw"), revision, *file]:
                    self.resolve(f"{organisation}/{name}", revision, "/".join(file))
                case _:
                    raise Refused(404, "", "Sorry, we can't find the page you are looking for.")
        except Refused as refusal:
            self.answer(refusal.status, {"error": str(refusal)}, refusal.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def before(self, repository: str, what: str, *, content: bool) -> None:
        """Count a request, apply the faults that need no body, check who asks."""
        path = f"{repository}/{what}"
        self.hub.count(path, requests=1)
        if fault := self.hub.fault("delay", path, self.command):
            time.sleep(fault.seconds)
        if fault := self.hub.fault("rate-limit", path, self.command):
            raise Refused(429, "", "Too many requests", {"RateLimit": f'"x";r=0;t={fault.seconds:.0f}', "RateLimit-Policy": '"fixed window";"x";q=1;w=300'})
        if self.hub.fault("unauthorized", path, self.command):
            raise Refused(401, "", "Invalid credentials in Authorization header")
        if self.hub.fault("forbidden", path, self.command):
            raise Refused(403, "GatedRepo", f"Access to model {repository} is restricted.")
        if fault := self.hub.fault("error", path, self.command):
            raise Refused(fault.status, "", HTTPStatus(fault.status).phrase)
        self.hub.check_access(repository, self.headers.get("Authorization"), content=content)

    # Listings -----------------------------------------------------------------------------------------------------

    def info(self, repository: str, revision: str, query: dict[str, list[str]]) -> None:
        self.before(repository, "api/info", content=False)
        commit = self.hub.commit(repository, revision)
        settings = self.hub.settings(repository)
        siblings = []
        for name, path in self.hub.files(repository, commit):
            sibling: dict = {"rfilename": name}
            if "blobs" in query:
                entry = self.hub.entry(name, path, commit, expand=False)
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 134}
            siblings.append(sibling)
        self.answer(200, {
            "_id": commit[:24], "id": repository, "modelId": repository, "author": repository.partition("/")[0], "sha": commit,
            "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z", "private": bool(settings.get("private")),
            "gated": "manual" if settings.get("gated") else False, "disabled": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings,
        })

    def refs(self, repository: str) -> None:
        self.before(repository, "api/refs", content=False)
        settings = self.hub.settings(repository)
        branches = {"main": settings["main"], **settings.get("refs", {})}
        self.answer(200, {"tags": [], "converts": [], "branches": [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in branches.items()]})

    def tree(self, repository: str, revision: str, folder: str, query: dict[str, list[str]]) -> None:
        self.before(repository, "api/tree", content=False)
        commit = self.hub.commit(repository, revision)
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        expand = query.get("expand", ["false"])[0].lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        entries: list[dict] = []
        folders: set[str] = set()
        for name, path in self.hub.files(repository, commit):
            if not name.startswith(prefix):
                continue
            inner = name[len(prefix):].split("/")
            for depth in range(1, len(inner) if recursive else min(len(inner), 2)):
                parent = prefix + "/".join(inner[:depth])
                if parent not in folders:
                    folders.add(parent)
                    oid = hashlib.sha1(parent.encode(), usedforsecurity=False).hexdigest()
                    entries.append({"type": "directory", "oid": oid, "size": 0, "path": parent})
            if recursive or len(inner) == 1:
                entries.append(self.hub.entry(name, path, commit, expand=expand))
        if not entries and folder:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on \"{revision}\"")
        # The real hub gives pages of 1000 (50 with expand) and the next page's address in a Link header.
        size, start = 50 if expand else 1000, int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + size < len(entries):
            options = {"recursive": str(recursive), "expand": str(expand), "cursor": start + size}
            place = f"http://{self.headers['Host']}{urllib.parse.urlsplit(self.path).path}?{urllib.parse.urlencode(options)}"
            headers["Link"] = f'<{place}>; rel="next"'
        self.answer(200, entries[start:start + size], headers)

    def paths_info(self, repository: str, revision: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        wanted = urllib.parse.parse_qs(self.rfile.read(length).decode())
        self.before(repository, "api/paths-info", content=False)
        commit = self.hub.commit(repository, revision)
        expand = wanted.get("expand", ["false"])[0].lower() == "true"
        found = [(name, path) for name, path in self.hub.files(repository, commit) if name in wanted.get("paths", [])]
        self.answer(200, [self.hub.entry(name, path, commit, expand=expand) for name, path in found])

    # Files --------------------------------------------------------------------------------------------------------

    def resolve(self, repository: str, revision: str, name: str) -> None:
        """Answer with a small file itself, or with the place of a large one."""
        self.before(repository, name, content=True)
        commit = self.hub.commit(repository, revision)
        path = self.hub.file(repository, commit, name)
        if not self.hub.is_lfs(name):
            self.send_file(repository, commit, name, path)
            return
        _git, sha = self.hub.hash(path)
        self.answer(302, None, {
            "Location": f"http://{self.headers['Host']}/cdn/{repository}/{commit}/{urllib.parse.quote(name)}", "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(path.stat().st_size), "ETag": f'"{sha}"', "Accept-Ranges": "bytes",
        })

    def content(self, repository: str, commit: str, name: str) -> None:
        """Answer at the place that a redirect gave; as with the real one's signed addresses, no token is asked for."""
        self.send_file(repository, commit, name, self.hub.file(repository, commit, name))

    def send_file(self, repository: str, commit: str, name: str, path: Path) -> None:
        where = f"{repository}/{name}"
        git, sha = self.hub.hash(path)
        size = path.stat().st_size
        etag = sha if self.hub.is_lfs(name) else git
        sending = self.command == "GET"
        if sending and (fault := self.hub.fault("short", where, self.command)):
            size = max(0, size - (fault.bytes or 7))
        start, end = 0, size
        if (asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")) and any(asked.groups()):
            if asked[1]:
                start, end = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
            else:
                start = max(0, size - int(asked[2]))
            if start >= end:
                raise Refused(416, "", "Range not satisfiable", {"Content-Range": f"bytes */{size}"})
        self.send_response(206 if (start, end) != (0, size) or asked else 200)
        headers = {"Content-Length": str(end - start), "ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes",
                   "Content-Type": "application/octet-stream"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        if self.hub.is_lfs(name):
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(path.stat().st_size)}
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if sending:
            self.send_body(where, path, start, end)

    def send_body(self, where: str, path: Path, start: int, end: int) -> None:
        """Send a range of a file, with the faults that concern bodies."""
        stall, cut, slow, corrupt = (self.hub.fault(kind, where, "GET") for kind in ("stall", "cut", "slow", "corrupt"))
        limit = min([end - start, *(fault.bytes for fault in (stall, cut) if fault)])
        sent, began = 0, time.monotonic()
        with path.open("rb") as source:
            source.seek(start)
            while sent < limit:
                chunk = bytearray(source.read(min(CHUNK, limit - sent, max(1024, slow.rate // 10) if slow else CHUNK)))
                middle = (end - start) // 2
                if corrupt and sent <= middle < sent + len(chunk):
                    chunk[middle - sent] ^= 0x55
                self.wfile.write(chunk)
                sent += len(chunk)
                self.hub.count(where, sent=len(chunk))
                if slow:
                    time.sleep(max(0.0, sent / slow.rate - (time.monotonic() - began)))
        if stall and limit < end - start:
            self.wait_until_gone(stall.seconds)
        if limit < end - start:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait_until_gone(self, seconds: float) -> None:
        """Hold the connection without a word until the client gives up or the time is over."""
        self.connection.settimeout(seconds)
        with contextlib.suppress(OSError):
            self.connection.recv(1)


class Admin(Handler):
    """Faults, references and counters; on loopback only."""

    def do_GET(self) -> None:
        match self.path:
            case "/faults":
                self.answer(200, [dataclasses.asdict(fault) for fault in self.hub.faults])
            case "/counters":
                with self.hub.lock:
                    self.answer(200, self.hub.counters)
            case _:
                self.answer(404, {"error": "GET /faults or /counters"})

    def do_DELETE(self) -> None:
        with self.hub.lock:
            match self.path:
                case "/faults":
                    self.hub.faults.clear()
                case "/counters":
                    self.hub.counters.clear()
                case _:
                    self.answer(404, {"error": "DELETE /faults or /counters"})
                    return
        self.answer(200, {})

    def do_POST(self) -> None:
        try:
            content = self.read_json()
            match self.path:
                case "/faults":
                    fault = Fault(**content)
                    with self.hub.lock:
                        self.hub.faults.append(fault)
                    self.answer(200, dataclasses.asdict(fault))
                case "/refs":
                    self.hub.move(content["repository"], content.get("ref", "main"), content["revision"])
                    self.answer(200, {})
                case _:
                    self.answer(404, {"error": "POST /faults or /refs"})
        except (ValueError, TypeError, KeyError, Refused) as error:
            self.answer(400, {"error": str(error)})


class Server(ThreadingHTTPServer):
    """One port; many clients at once, none of which keeps the process alive."""

    daemon_threads = True
    request_queue_size = 64


def serve(root: Path, bind: str = "127.0.0.1", port: int = 0, admin_port: int = 0) -> tuple[Server, Server]:
    """Start both ports in threads and return them (their ``server_address`` tells the ports); for tests in one process."""
    hub = Hub(root)
    servers = []
    for handler, address in ((Public, (bind, port)), (Admin, ("127.0.0.1", admin_port))):
        server = Server(address, type(handler.__name__, (handler,), {"hub": hub}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    return servers[0], servers[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="A hub for huggingface_hub's client that misbehaves on request.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--admin-port", type=int, default=0)
    options = parser.parse_args()
    public, admin = serve(options.root, options.bind, options.port, options.admin_port)
    print(json.dumps({"url": f"http://{options.bind}:{public.server_address[1]}", "admin": f"http://127.0.0.1:{admin.server_address[1]}"}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
