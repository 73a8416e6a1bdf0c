# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""A chat that is streamed, with the time of its tokens. Standard library only."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import COMPLETION_PATH


@dataclasses.dataclass
class Streamed:
    """One streamed answer. Moments are those of ``time.monotonic``; ``first`` and ``last`` are None when no token came."""

    begun: float
    first: float | None = None
    last: float | None = None
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first is None else self.first - self.begun

    def take(self, event: t.Any, now: float) -> None:
        """One event of the stream. Reasoning is generated like the answer, so its tokens count too."""
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self.error = f"the stream ended with an error: {json.dumps(event['error'])[:300]}"
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = usage.get("completion_tokens", self.completion_tokens)
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            piece = "".join(str(delta.get(name) or "") for name in ("reasoning", "reasoning_content", "content"))
            if piece:
                self.first = now if self.first is None else self.first
                self.last = now
                self.text += piece
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def events(lines: t.Iterable[bytes]) -> t.Iterator[t.Any]:
    """The documents of a stream of server-sent events, until the one that says that it is done."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError:
            yield {"error": {"message": f"not JSON: {data[:100]!r}"}}


def stream_chat(address: str, port: int, key: str, body: t.Mapping[str, t.Any], timeout: float) -> Streamed:
    """Send one chat and read its tokens as they come; never raises. ``timeout`` is for all of it."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    document = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    streamed = Streamed(begun=time.monotonic())
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("POST", COMPLETION_PATH, body=document, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            streamed.error = f"HTTP {response.status}: {response.read()[:300].decode('utf-8', 'replace')}"
            return streamed
        for event in events(iter(response.readline, b"")):
            now = time.monotonic()
            streamed.take(event, now)
            if now - streamed.begun > timeout:
                streamed.error = f"not finished within {timeout:.0f} s"
                break
    except (OSError, http.client.HTTPException) as exc:
        streamed.error = f"{type(exc).__name__}: {exc}"
    finally:
        connection.close()
    if not streamed.error and streamed.first is None:
        streamed.error = "no token came"
    return streamed
