# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""A small client of the Docker Engine API over its unix socket. Standard library only, because it runs on the nodes."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import typing as t
import urllib.parse

DEFAULT_SOCKET = "/var/run/docker.sock"

# A socket that nobody has made says nothing about the reason; an engine that is installed has its daemon in one of these.
ENGINE_PROGRAMS = ("/usr/bin/dockerd", "/usr/sbin/dockerd", "/usr/local/bin/dockerd", "/snap/bin/dockerd")


class DockerError(Exception):
    """Base of everything that this client raises. ``state`` has the names of spark_node.docker.state."""

    state = "error"


class NotInstalled(DockerError):
    """There is no socket and no engine program on this machine."""

    state = "not_installed"


class NotRunning(DockerError):
    """An engine is installed, and nothing answers at its socket, or not in time."""

    state = "not_running"


class TimedOut(NotRunning):
    """The engine is there, and said nothing for as long as was waited."""


class NoPermission(DockerError):
    """The socket is there, and this user may not use it."""

    state = "no_permission"


class ApiError(DockerError):
    """The engine answered with an error."""

    def __init__(self, status: int, message: str, method: str = "", path: str = "") -> None:
        super().__init__(f"{method} {path}: {status} {message}".strip())
        self.status = status
        self.message = message


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, socket_path: str, timeout: float | None) -> None:
        # Image archives go through this: the default block of 8 KiB would cost a third of the speed of a load.
        super().__init__("localhost", timeout=timeout, blocksize=1 << 20)
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


class DockerApi:
    """One connection per request: the calls are few, and a kept connection would have to survive an engine restart."""

    def __init__(self, socket_path: str = DEFAULT_SOCKET, timeout: float | None = 60) -> None:
        self.socket_path = socket_path[len("unix://") :] if socket_path.startswith("unix://") else socket_path
        self.timeout = timeout

    # The general calls

    def request(
        self,
        method: str,
        path: str,
        body: t.Any = None,
        query: t.Mapping[str, t.Any] | None = None,
        headers: t.Mapping[str, str] | None = None,
    ) -> tuple[int, t.Any]:
        """The status and the parsed answer. Statuses of 400 and above are returned, not raised: 404 is often an answer."""
        response, connection = self._send(method, path, body, query, headers, self.timeout)
        try:
            return response.status, _parsed(response.read())
        except (OSError, http.client.HTTPException) as exc:
            raise self._typed(exc) from exc
        finally:
            connection.close()

    def call(self, method: str, path: str, body: t.Any = None, query: t.Mapping[str, t.Any] | None = None) -> t.Any:
        """The parsed answer; an error status raises ApiError."""
        status, answer = self.request(method, path, body=body, query=query)
        if status >= 400:
            raise ApiError(status, _message(answer), method, path)
        return answer

    def stream(
        self,
        method: str,
        path: str,
        body: t.Any = None,
        query: t.Mapping[str, t.Any] | None = None,
        headers: t.Mapping[str, str] | None = None,
        timeout: float | None = None,
        chunk: int = 1 << 20,
    ) -> t.Iterator[bytes]:
        """The answer as pieces of bytes, for saves and logs. ``body`` may be a file object, for loads.

        ``timeout`` is for each read, not for the whole: None waits as long as the engine works.
        """
        response, connection = self._send(method, path, body, query, headers, timeout)
        try:
            if response.status >= 400:
                raise ApiError(response.status, _message(_parsed(response.read())), method, path)
            while True:
                piece = response.read1(chunk)
                if not piece:
                    return
                yield piece
        except (OSError, http.client.HTTPException) as exc:
            raise self._typed(exc) from exc
        finally:
            connection.close()

    def stream_json(
        self,
        method: str,
        path: str,
        body: t.Any = None,
        query: t.Mapping[str, t.Any] | None = None,
        headers: t.Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> t.Iterator[dict[str, t.Any]]:
        """The answer as one object per line, as pull, load, push and build send it. Their errors come in an object, with status 200."""
        rest = b""
        for piece in self.stream(method, path, body=body, query=query, headers=headers, timeout=timeout):
            *lines, rest = (rest + piece).split(b"\n")
            yield from (json.loads(line) for line in lines if line.strip())
        if rest.strip():
            yield json.loads(rest)

    # What most callers ask

    def inspect_image(self, reference: str) -> dict[str, t.Any] | None:
        """The inspect document of an image, None when the engine has no such image."""
        return self._found("GET", f"/images/{quote(reference)}/json")

    def inspect_container(self, name: str) -> dict[str, t.Any] | None:
        """The inspect document of a container, None when the engine has no such container."""
        return self._found("GET", f"/containers/{quote(name)}/json")

    def containers(self, filters: t.Mapping[str, t.Any] | None = None, everything: bool = True) -> list[dict[str, t.Any]]:
        query: dict[str, t.Any] = {"all": everything}
        if filters:
            query["filters"] = json.dumps(filters)
        return self.call("GET", "/containers/json", query=query) or []

    def info(self) -> dict[str, t.Any]:
        return self.call("GET", "/info")

    def version(self) -> dict[str, t.Any]:
        return self.call("GET", "/version")

    # Inside

    def _found(self, method: str, path: str) -> dict[str, t.Any] | None:
        status, answer = self.request(method, path)
        if status == 404:
            return None
        if status >= 400:
            raise ApiError(status, _message(answer), method, path)
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: t.Any,
        query: t.Mapping[str, t.Any] | None,
        headers: t.Mapping[str, str] | None,
        timeout: float | None,
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        sent = dict(headers or {})
        if body is not None and not isinstance(body, (bytes, str)) and not hasattr(body, "read"):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = _UnixConnection(self.socket_path, timeout)
        try:
            try:
                connection.request(method, path + _query_string(query), body=body, headers=sent, encode_chunked=hasattr(body, "read"))
            except (BrokenPipeError, ConnectionResetError):
                # An engine that refuses a load answers before it has read all of it; the answer says why.
                if not hasattr(body, "read"):
                    raise
            return connection.getresponse(), connection
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise self._typed(exc) from exc
        except BaseException:  # of the file that is the body
            connection.close()
            raise

    def _typed(self, exc: Exception) -> DockerError:
        code = getattr(exc, "errno", None)
        if code in (errno.EACCES, errno.EPERM):
            return NoPermission(f"no right to use {self.socket_path}")
        if code == errno.ENOENT and not any(os.path.exists(program) for program in ENGINE_PROGRAMS):
            return NotInstalled(f"no Docker Engine: {self.socket_path} does not exist")
        if isinstance(exc, socket.timeout):
            return TimedOut(f"the Docker Engine did not answer at {self.socket_path} within {self.timeout} s")
        return NotRunning(f"no Docker Engine answers at {self.socket_path}: {exc}")


class Pieces:
    """A file object over an iterator of bytes: what a tar reader and a request body want."""

    def __init__(self, pieces: t.Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        parts: list[memoryview] = []
        length = 0
        while length < size:
            if not self._rest:
                self._rest = memoryview(next(self._pieces, b""))
                if not self._rest:
                    break
            part = self._rest[: size - length]
            self._rest = self._rest[len(part) :]
            parts.append(part)
            length += len(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def quote(name: str) -> str:
    """A name as one part of an API path. The engine takes the slash and the colon of a reference as they are."""
    return urllib.parse.quote(name, safe="/:@")


def _query_string(query: t.Mapping[str, t.Any] | None) -> str:
    if not query:
        return ""
    values = {key: ("true" if value else "false") if isinstance(value, bool) else value for key, value in query.items() if value is not None}
    return "?" + urllib.parse.urlencode(values, doseq=True)


def _parsed(data: bytes) -> t.Any:
    if not data:
        return None
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(answer: t.Any) -> str:
    if isinstance(answer, dict) and "message" in answer:
        return str(answer["message"])
    return str(answer)
