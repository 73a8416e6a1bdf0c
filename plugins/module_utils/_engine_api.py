# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What the engine says over HTTP, told apart as finely as a person needs it. Standard library only."""

from __future__ import annotations

import dataclasses
import http.client
import ipaddress
import json
import time
import typing as t

COMPLETION_PATH = "/v1/chat/completions"
# What vLLM serves beside the prefixes that its key guards; which of them an image has depends on model and version. The first ones do inference.
UNGUARDED = (
    "/invocations", "/pooling", "/score", "/classify", "/rerank", "/tokenize", "/detokenize", "/pause", "/sleep", "/metrics", "/load", "/version", "/docs",
)  # fmt: skip
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One HTTP exchange. ``status`` is 0 when nobody answered; then ``error`` says why."""

    status: int
    document: t.Any
    seconds: float
    error: str = ""


def call(address: str, port: int, method: str, path: str, key: str = "", body: t.Any = None, timeout: float = 10) -> Answer:
    """One request with an overall time limit per socket operation; never raises."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    begun = time.monotonic()
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        raw = response.read()
    except (OSError, http.client.HTTPException) as exc:
        return Answer(0, None, time.monotonic() - begun, f"{type(exc).__name__}: {exc}")
    finally:
        connection.close()
    try:
        document = json.loads(raw) if raw else None
    except ValueError:
        document = raw.decode("utf-8", "replace")
    return Answer(response.status, document, time.monotonic() - begun)


def own_address(bind: str) -> str:
    """Where a node reaches its own API that listens on ``bind``: one that listens on one address answers on no other."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return "127.0.0.1"
    if not address.is_unspecified:
        return bind
    return "127.0.0.1" if address.version == 4 else "::1"


def option_of(document: t.Mapping[str, t.Any] | None, name: str) -> str:
    """An option on the command line of a container; empty where it is not given. The settings may have another value by now."""
    words = (document or {}).get("Args") or []
    return next((after for word, after in zip(words, words[1:]) if word == name), "")


def served_models(answer: Answer) -> list[str]:
    """Model ids of a /v1/models answer."""
    if answer.status != 200 or not isinstance(answer.document, dict):
        return []
    return [entry.get("id", "") for entry in answer.document.get("data", []) if isinstance(entry, dict)]


def open_paths(address: str, port: int) -> list[str]:
    """Paths that answer without a key. A GET does nothing where a POST is wanted: 405 says that it is there and open."""
    found = []
    for path in UNGUARDED:
        status = call(address, port, "GET", path, timeout=3).status
        if status and status not in (401, 403, 404):
            found.append(path)
    return found


def metrics(answer: Answer) -> dict[str, float]:
    """The values of a /metrics answer by name, summed over their labels. Histograms' buckets are of no use that way and are left in."""
    found: dict[str, float] = {}
    if answer.status != 200 or not isinstance(answer.document, str):
        return found
    for line in answer.document.splitlines():
        name, dummy, value = line.partition(" ")
        labelled, opened, rest = line.partition("{")
        if opened:
            name, value = labelled, rest.rpartition("}")[2]
        try:
            found[name] = found.get(name, 0.0) + float(value.split()[0])
        except (ValueError, IndexError):
            continue  # a comment
    return found


def completion_text(document: t.Any) -> str:
    """The text of the first choice: content, else reasoning (which newer engines fill instead), else plain text."""
    try:
        choice = document["choices"][0]
    except (KeyError, IndexError, TypeError):
        return ""
    message = choice.get("message") or {}
    for text in (message.get("content"), message.get("reasoning"), message.get("reasoning_content"), choice.get("text")):
        if text and str(text).strip():
            return str(text).strip()
    return ""


@dataclasses.dataclass(frozen=True)
class Proof:
    """Whether a real completion came, what it said, and else what was wrong in one of a few words."""

    ok: bool
    verdict: str  # ok, no_answer, key_wrong, key_wanted, wrong_model, error, empty, wrong_answer; of rank_info also busy
    text: str
    seconds: float
    detail: str = ""


def judge_completion(answer: Answer, key_given: bool, expected: str = "") -> Proof:
    """Only text from the engine counts: a status of 200 alone proves nothing."""
    if answer.status == 0:
        return Proof(False, "no_answer", "", answer.seconds, answer.error)
    if answer.status in (401, 403):
        if key_given:
            return Proof(False, "key_wrong", "", answer.seconds, "the server is up and does not accept our key")
        return Proof(False, "key_wanted", "", answer.seconds, "the server is up and wants a key; none is configured")
    if answer.status == 404:
        return Proof(False, "wrong_model", "", answer.seconds, f"the server does not serve this model: {_brief(answer.document)}")
    if answer.status != 200:
        return Proof(False, "error", "", answer.seconds, f"HTTP {answer.status}: {_brief(answer.document)}")
    text = completion_text(answer.document)
    if not text:
        return Proof(False, "empty", "", answer.seconds, f"no text in the answer: {_brief(answer.document)}")
    if expected and text != expected:
        return Proof(False, "wrong_answer", text, answer.seconds, f"expected {expected!r}")
    return Proof(True, "ok", text, answer.seconds)


def _brief(document: t.Any) -> str:
    return (document if isinstance(document, str) else json.dumps(document))[:300]


def prove(address: str, port: int, model: str, request: t.Mapping[str, t.Any], key: str = "", expected: str = "", timeout: float = 120) -> Proof:
    """One bounded completion against the model that we mean to serve, not against whatever holds the port."""
    models = call(address, port, "GET", "/v1/models", key=key, timeout=min(timeout, 10))
    if models.status == 200 and model not in served_models(models):
        return Proof(False, "wrong_model", "", models.seconds, f"port {port} serves {', '.join(served_models(models)) or 'no model'}, not {model}")
    answer = call(address, port, "POST", COMPLETION_PATH, key=key, body={"model": model, **request}, timeout=timeout)
    return judge_completion(answer, bool(key), expected)
