# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An engine on a unix socket that answers from a table, for tests without Docker."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socketserver
import tempfile
import threading
import typing as t
import urllib.parse

Handler = t.Callable[[dict], t.Any]


class FakeDocker:
    """Routes are {(method, path): answer}; an answer is a value, (status, value), bytes, or a function of the request."""

    def __init__(self, routes: dict[tuple[str, str], t.Any] | None = None) -> None:
        self.routes = dict(routes or {})
        self.requests: list[dict] = []
        # The folder of a test may be too deep for a socket path (108 characters).
        self._folder = tempfile.mkdtemp(prefix="fd")
        self.socket_path = os.path.join(self._folder, "d.sock")

    def __enter__(self) -> FakeDocker:
        self._server = _Server(self.socket_path, _handler_class(self))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def asked(self, method: str | None = None) -> list[str]:
        return [request["path"] for request in self.requests if method in (None, request["method"])]


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def _handler_class(fake: FakeDocker) -> type[http.server.BaseHTTPRequestHandler]:
    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return "unix"

        def log_message(self, *args: object) -> None:
            pass

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                data = b""
                while True:
                    size = int(self.rfile.readline(), 16)
                    data += self.rfile.read(size)
                    self.rfile.readline()
                    if not size:
                        return data
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self) -> None:
            parsed = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(parsed.path)
            request = {
                "method": self.command,
                "path": path,
                "query": dict(urllib.parse.parse_qsl(parsed.query)),
                "headers": dict(self.headers),
                "body": self._body(),
            }
            fake.requests.append(request)
            answer = fake.routes.get((self.command, path), (404, {"message": f"no such thing: {path}"}))
            if callable(answer):
                answer = answer(request)
            status, value = answer if isinstance(answer, tuple) else (200, answer)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_HEAD = do_PUT = _answer

    return Answer
