# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Copies between nodes: the reader pulls from a peer's gate, over ssh with rsync or unencrypted over the fabric."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import threading
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File

# AES runs in hardware on both sides of every Spark; the default cipher does not.
CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com"
BLOCK = 1024 * 1024
# rsync could not read or write some files.
RSYNC_PARTIAL = (23, 24)
# What a failure on this node's own disk is.
LOCAL = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "disk_full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "not_writable"),
}


class CopyError(Exception):
    """A copy ended early. ``kind`` decides what the user is told."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Peer(t.NamedTuple):
    """A node to read from."""

    node: str
    address: str
    rails: tuple[str, ...]
    user: str
    root: str
    key: str
    known_hosts: str
    port: int = 22
    # Addresses that this node connects from: each rail has its own.
    clients: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, content: t.Mapping[str, t.Any], key: str, known_hosts: str) -> Peer:
        address = content["address"]
        return cls(
            content["node"],
            address,
            tuple(content.get("rails") or [address]),
            content["user"],
            content["root"],
            key,
            known_hosts,
            int(content.get("port") or 22),
            tuple(content.get("clients") or ()),
        )

    def ssh(self, address: str | None = None) -> list[str]:
        """Never asks, never waits for long, trusts only the pinned host keys, and reads no configuration of the user."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "4",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "Compression": "no",
            "Ciphers": CIPHERS,
        }
        words = ["ssh", "-F", "/dev/null", "-T", "-p", str(self.port), "-i", self.key, "-l", self.user]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        # Host keys are pinned for the first address; another rail is the same machine.
        if address and address != self.address:
            words += ["-o", f"HostKeyAlias={self.address}"]
        return [*words, address or self.address]

    def explain(self, stderr: str, code: int) -> CopyError:
        return explain(stderr, code, f"{self.user}@{self.address}")


def explain(stderr: str, code: int, where: str) -> CopyError:
    """What a failed ssh, or rsync over it, means for the user."""
    text = " ".join(stderr.split())[-400:] or f"code {code}"
    # Before the words of ssh, which rsync has for a file, too.
    if code in RSYNC_PARTIAL and "[sender]" in stderr:
        return CopyError("source", f"{where}: {text}")
    if code in RSYNC_PARTIAL and "Permission denied" in stderr:
        return CopyError("not_writable", text)
    if "Host key verification failed" in stderr or "host key" in stderr.lower() and "changed" in stderr.lower():
        return CopyError("host_key", f"{where}: {text}")
    if "Permission denied" in stderr:
        return CopyError("key", f"{where}: {text}")
    if "sparkops: refused" in stderr:
        return CopyError("gate", f"{where}: {text}")
    if "No space left" in stderr or "Disk quota" in stderr:
        return CopyError("disk_full", text)
    if "command not found" in stderr or "rsync is not installed" in stderr:
        return CopyError("rsync", f"{where}: {text}")
    return CopyError("link", f"{where}: {text}")


def local_kind(exc: OSError) -> str | None:
    """None when it is the line's: what a filter says to a connection names no file."""
    kind = LOCAL.get(exc.errno or 0)
    return kind if kind == "disk_full" or exc.filename else None


def balance(files: t.Iterable[File], bins: int) -> list[list[File]]:
    """Spread files over streams so that all end at about the same time: largest first, always to the emptiest."""
    result: list[list[File]] = [[] for _unused in range(max(1, bins))]
    loads = [0] * len(result)
    for file in sorted(files, key=lambda file: (-file.size, file.path)):
        least = loads.index(min(loads))
        result[least].append(file)
        loads[least] += file.size
    return [part for part in result if part]


def complete_files(peer: Peer, tree: str, rail: str | None = None) -> dict[str, int]:
    """Files of a peer's tree that have their final names. Asked over a rail, or over the peer's own address."""
    try:
        # The program of a unit has no AnsibleModule to call.
        # pylint: disable-next=ansible-bad-function
        done = subprocess.run(
            [*peer.ssh(rail), shlex.join(["weights-list", tree])], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise CopyError("link", f"{peer.user}@{peer.address}: no answer for 120 s") from None
    if done.returncode:
        raise peer.explain(done.stderr, done.returncode)
    try:
        return {str(path): int(size) for path, size in json.loads(done.stdout).items()}
    except ValueError:
        raise CopyError("gate", f"{peer.node}: the gate gave no list") from None


def over_living_rails(peer: Peer, tree: str) -> Peer:
    """The peer with those rails only that answer, or as it is when none does."""
    living = []
    for rail in peer.rails:
        with contextlib.suppress(CopyError):
            complete_files(peer, tree, rail)
            living.append(rail)
    return peer._replace(rails=tuple(living)) if living else peer


class Sink(t.Protocol):
    """Where copied files go. ``arrived`` is called from several threads."""

    def staged(self, path: str) -> str: ...

    def arrived(self, file: File, sha256: str | None) -> None: ...


class Streams:
    """Several streams at once; the first failure ends them all."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._closers: list[t.Callable[[], None]] = []
        self._lock = threading.Lock()

    def run(self, workers: t.Sequence[t.Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._guard, args=(worker,), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self.stop()
            raise
        if self.error:
            raise self.error

    def _guard(self, worker: t.Callable[[], None]) -> None:
        try:
            worker()
        except Exception as exc:  # handed to the caller of run
            with self._lock:
                self.error = self.error or exc
            self.stop()

    def on_stop(self, closer: t.Callable[[], None]) -> None:
        """How to end what a stream waits for."""
        with self._lock:
            self._closers.append(closer)
        if self._stop.is_set():
            closer()

    def stop(self, error: Exception | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            closers = list(self._closers)
        self._stop.set()
        for closer in closers:
            with contextlib.suppress(OSError):
                closer()


def rsync_copy(peer: Peer, tree: str, files: t.Sequence[File], streams: int, sink: Sink, control: Streams) -> None:
    """Copy with rsync over ssh, one process per stream, over all rails in turn.

    The files are new here or differ, so they go whole. The staging folder keeps what a cut stream left, and --append goes
    on from there; a wrong beginning can't survive the hash check.
    """
    # A stream keeps about a core busy here, and another one on the peer: more streams than cores only take turns. Each rail has one.
    count = max(len(peer.rails), min(streams, os.cpu_count() or streams))
    workers = []
    for number, part in enumerate(balance(files, count)):
        rail = peer.rails[number % len(peer.rails)]
        workers.append(lambda part=part, rail=rail: _rsync_stream(peer, rail, tree, part, sink, control))
    control.run(workers)


def rsync_argv(peer: Peer, rail: str, tree: str, staging: str) -> list[str]:
    shell = shlex.join(peer.ssh(rail)[:-1])
    source = f"[{rail}]" if ":" in rail else rail
    # %b is known only after a file has ended, so a line means that the file is complete.
    return ["rsync", "--append", "--from0", "--files-from=-", "--out-format=%b %n", f"--rsh={shell}", f"{source}:{tree}/", f"{staging}/"]


def _rsync_stream(peer: Peer, rail: str, tree: str, files: t.Sequence[File], sink: Sink, control: Streams) -> None:
    by_path = {file.path: file for file in files}
    argv = rsync_argv(peer, rail, tree, sink.staged("").rstrip("/"))
    # A file that an earlier stream left whole has nothing to append, and rsync does not name it: it is proven at the end.
    # A group of its own: rsync forks, and its ssh would outlive it.
    # The program of a unit has no AnsibleModule to call.
    # pylint: disable-next=ansible-bad-function
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        control.on_stop(lambda: os.killpg(process.pid, signal.SIGKILL))
        errors: list[bytes] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
        reader.start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\0".join(by_path).encode() + b"\0")  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        last = None
        for line in process.stdout:  # type: ignore[union-attr]
            name = line.decode("utf-8", "replace").rstrip("\n").partition(" ")[2]
            if name not in by_path:
                continue
            # rsync still sets the times of a file that it has just named; it is done with it when it names the next.
            if last:
                sink.arrived(by_path.pop(last), None)
            last = name
        code = process.wait()
        reader.join(5)
    if code:
        raise peer.explain(b"".join(errors).decode("utf-8", "replace"), code)
    for file in by_path.values():
        sink.arrived(file, None)


@contextlib.contextmanager
def fabric_session(peer: Peer, control: Streams) -> t.Iterator[tuple[bytes, list[tuple[str, int]]]]:
    """Let the peer listen on its rails for as long as this ssh session lives; the secret comes through ssh."""
    argv = [*peer.ssh(), shlex.join(["weights-send", *peer.rails, *(["--", *peer.clients] if peer.clients else [])])]
    # The program of a unit has no AnsibleModule to call.
    # pylint: disable-next=ansible-bad-function
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # A peer that lets us in and then offers nothing would be waited for without end.
        control.on_stop(process.kill)
        try:
            line = process.stdout.readline()  # type: ignore[union-attr]
            if control.error:
                raise control.error
            if not line:
                process.stdin.close()  # type: ignore[union-attr]
                raise peer.explain(process.stderr.read().decode("utf-8", "replace"), process.wait())  # type: ignore[union-attr]
            offer = json.loads(line)
            yield bytes.fromhex(offer["secret"]), [tuple(place) for place in offer["listen"]]
        finally:
            process.kill()


def fabric_copy(peer: Peer, tree: str, files: t.Sequence[File], streams: int, sink: Sink, control: Streams) -> None:
    """Copy over plain connections on the fabric. Each file is hashed while it arrives; the manifest's hash decides."""
    work: queue.SimpleQueue[File] = queue.SimpleQueue()
    for file in sorted(files, key=lambda file: -file.size):
        work.put(file)
    with fabric_session(peer, control) as (secret, listeners):
        count = min(max(streams, len(listeners)), len(files))
        control.run(
            [lambda place=listeners[number % len(listeners)]: _fabric_stream(peer, place, secret, tree, work, sink, control) for number in range(count)]
        )


def _fabric_stream(peer: Peer, place: tuple[str, int], secret: bytes, tree: str, work: queue.SimpleQueue[File], sink: Sink, control: Streams) -> None:
    try:
        with socket.create_connection(place, timeout=10) as connection:
            connection.settimeout(120)
            control.on_stop(lambda: connection.shutdown(socket.SHUT_RDWR))
            nonce = _exactly(connection, 32)
            connection.sendall(hmac.new(secret, nonce, hashlib.sha256).digest())
            while True:
                try:
                    file = work.get_nowait()
                except queue.Empty:
                    return
                sink.arrived(file, _receive_file(connection, tree, file, sink))
    except (OSError, EOFError) as exc:
        kind = local_kind(exc) if isinstance(exc, OSError) else None
        if kind:
            raise CopyError(kind, str(exc)) from None
        raise CopyError("link", f"{place[0]} port {place[1]} of {peer.node}: {exc or 'the connection ended'}") from None


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _line(connection: socket.socket) -> dict[str, t.Any]:
    data = b""
    while not data.endswith(b"\n"):
        data += _exactly(connection, 1)
    return json.loads(data)


def _receive_file(connection: socket.socket, tree: str, file: File, sink: Sink) -> str:
    """Receive one file from where an earlier attempt ended, and return the hash of the whole."""
    path = sink.staged(file.path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    digest = hashlib.sha256()
    with open(path, "a+b", buffering=0) as target:
        offset = _hash_start(target, file.size, digest)
        connection.sendall(json.dumps({"tree": tree, "path": file.path, "offset": offset}).encode() + b"\n")
        head = _line(connection)
        if "error" in head:
            # What the system says of a file is no refusal of the gate.
            raise CopyError("source" if head["error"].startswith("[Errno") else "gate", f"{file.path}: {head['error']}")
        buffer = memoryview(bytearray(BLOCK))
        left = head["size"] - head["offset"]
        if head["size"] != file.size or head["offset"] != offset:
            raise CopyError("source", f"{file.path}: the source has {head['size']} bytes, its manifest says {file.size}")
        while left:
            count = connection.recv_into(buffer, min(left, BLOCK), socket.MSG_WAITALL)
            if not count:
                raise EOFError
            digest.update(buffer[:count])
            _write_all(target, buffer[:count])
            left -= count
    return digest.hexdigest()


def _hash_start(target: t.BinaryIO, size: int, digest: t.Any) -> int:
    """Hash what is there of a file; more than the file's size is rubbish and goes."""
    if os.fstat(target.fileno()).st_size > size:
        target.truncate(0)
    target.seek(0)
    offset = 0
    while True:
        block = target.read(BLOCK)
        if not block:
            return offset
        digest.update(block)
        offset += len(block)


def _write_all(target: t.BinaryIO, view: memoryview) -> None:
    while view:
        view = view[target.write(view) :]
