# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A stand-in for vLLM that starts in a second and misbehaves on request.

It takes vLLM's command line (``vllm serve MODEL --nnodes N --node-rank R --master-addr A --master-port P [--headless] ...``;
options that it does not know are accepted), waits for all ranks, and serves the part of the API that a bring-up uses. What it
does by itself follows the real engine: the port opens only when all ranks are there; after the loss of a rank /health stays
200, the next completion ends in 500, then /health is 503 and the process exits with 0.

Extra addresses: GET /debug/argv (command line and names of environment variables), GET /debug/requests (bodies of the last
completions), POST /debug/set {"COMPLETION": "hang"} (change a behaviour while it runs).

Behaviours, each an environment variable STUB_NAME, or STUB_NAME_RANK1 for one rank only:

    LOAD_SECONDS=1         time until a rank is ready          ANSWER=text            what it answers
    EXIT_AFTER=T           exit T seconds after the start      EXIT_CODE=0            with this code
    EXIT_READY_AFTER=T     exit T seconds after ready          STARTUP_ERROR=text     print it and exit with 1 before anything else
    HANG=1                 never become ready, without a word  WRITES=folder          but write a growing file there
    HEALTH=503             answer of /health                   HEALTH_FOR=T           only for the first T seconds after ready
    COMPLETION=            hang | empty | 500 | reasoning (text only there) | error-body (200 with an error in it) | garbage
    FIRST_ANSWER=T         seconds for the first completion    FROZEN=T               a completion shows no new token for T seconds
    IGNORE_TERM=1          survive SIGTERM                     MEMORY_MB=N            hold N MB of memory
    SERVED=name            claim to serve another model        RENDEZVOUS_TIMEOUT=600 seconds to wait for the other ranks
    TOKEN_SECONDS=T        time between two tokens             DRAFTS=K               claim to draft K tokens a step and to accept half of them
    ENGRAM=1,14            have these Engram layers: read the row files in $DSV41_PACKED_DIR, or fall back, and say so like the real reader
    ENGRAM_PINNED=1        keep the tables in memory instead, as an engine without the reader says
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VERSION = "0.32.0+stub"
ANSWER = "The answer is four."


def log(message: str, level: str = "INFO") -> None:
    print(f"{level} {time.strftime('%m-%d %H:%M:%S')} [stub_engine.py:1] {message}", file=sys.stderr, flush=True)


class Behaviour:
    """Reads the variables, those for this rank before those for all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.changed: dict[str, str] = {}

    def text(self, name: str, default: str = "") -> str:
        if name in self.changed:
            return self.changed[name]
        return os.environ.get(f"STUB_{name}_RANK{self.rank}", os.environ.get(f"STUB_{name}", default))

    def number(self, name: str, default: float = 0) -> float:
        return float(self.text(name) or default)


class Ranks:
    """The rendezvous: rank 0 waits for all others and notices when one is gone; the others notice the loss of rank 0."""

    def __init__(self, options: argparse.Namespace, timeout: float) -> None:
        self.rank, self.count = options.node_rank, options.nnodes
        self.address = (options.master_addr, options.master_port)
        self.timeout = timeout
        self.lost = threading.Event()

    def meet(self) -> None:
        if self.count == 1:
            return
        log(f"rank {self.rank} of {self.count}: rendezvous at {self.address[0]}:{self.address[1]}")
        peers = self._wait_for_all() if self.rank == 0 else [self._join()]
        for peer in peers:
            threading.Thread(target=self._watch, args=(peer,), daemon=True).start()

    def _wait_for_all(self) -> list[socket.socket]:
        """Accept every other rank once, then tell all of them to go."""
        end = time.monotonic() + self.timeout
        peers: dict[int, socket.socket] = {}
        with socket.create_server(("", self.address[1])) as server:
            while len(peers) < self.count - 1:
                server.settimeout(max(0.1, end - time.monotonic()))
                try:
                    peer, _where = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.count)) - set(peers))
                    raise SystemExit(f"RuntimeError: rendezvous timed out after {self.timeout:.0f} s waiting for ranks {missing}") from None
                hello = peer.recv(16).decode(errors="replace").split()
                if len(hello) == 2 and hello[0] == "rank" and hello[1].isdigit():
                    peers[int(hello[1])] = peer
                else:
                    peer.close()  # a port probe
        for peer in peers.values():
            peer.sendall(b"go")
            peer.settimeout(None)
        return list(peers.values())

    def _join(self) -> socket.socket:
        """Connect to rank 0, which may come later than this one."""
        end = time.monotonic() + self.timeout
        while True:
            try:
                peer = socket.create_connection(self.address, timeout=3)
                peer.sendall(f"rank {self.rank}".encode())
                peer.settimeout(max(0.1, end - time.monotonic()))
                if peer.recv(2) == b"go":
                    peer.settimeout(None)
                    return peer
            except OSError:
                pass
            if time.monotonic() > end:
                raise SystemExit(f"RuntimeError: no rank 0 at {self.address[0]}:{self.address[1]} within {self.timeout:.0f} s")
            time.sleep(0.2)

    def _watch(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            while peer.recv(64):
                pass
        except OSError:
            pass
        self.lost.set()


class Engine:
    """What the requests share."""

    def __init__(self, options: argparse.Namespace, behaviour: Behaviour, ranks: Ranks) -> None:
        self.options, self.behaviour, self.ranks = options, behaviour, ranks
        self.key = options.api_key or os.environ.get("VLLM_API_KEY", "")
        self.names = [behaviour.text("SERVED")] if behaviour.text("SERVED") else options.served_model_name or [options.model]
        self.ready_at = time.monotonic()
        self.dead = False
        self.lock = threading.Lock()
        self.running = self.prompt_tokens = self.generated_tokens = self.succeeded = 0
        self.requests: list[dict] = []

    def health(self) -> int:
        if self.dead:
            return 503
        code, seconds = int(self.behaviour.number("HEALTH", 200)), self.behaviour.number("HEALTH_FOR")
        return 200 if seconds and time.monotonic() - self.ready_at > seconds else code

    def die(self) -> None:
        """End as the real engine does after a failed completion: /health 503 for a moment, then exit code 0."""
        self.dead = True
        log("EngineCore encountered an issue. See stack trace (above) for the root cause.", "ERROR")
        threading.Timer(2, os._exit, args=(0,)).start()

    def words(self, limit: int) -> Iterator[str]:
        """Generate the answer, one word as one token."""
        words = self.behaviour.text("ANSWER", ANSWER).split(" ")
        if self.behaviour.text("COMPLETION") == "garbage":
            words = ["!" * 8] * 8
        pause = self.behaviour.number("TOKEN_SECONDS")
        for number, word in enumerate(words[:limit]):
            if number:
                time.sleep(pause)
            with self.lock:
                self.generated_tokens += 1
            yield word if number == 0 else f" {word}"

    def metrics(self) -> str:
        label = f'{{engine="0",model_name="{self.names[0]}"}}'
        with self.lock:
            values = {
                "vllm:num_requests_running": ("gauge", self.running), "vllm:num_requests_waiting": ("gauge", 0), "vllm:kv_cache_usage_perc": ("gauge", 0.0),
                "vllm:prompt_tokens_total": ("counter", self.prompt_tokens), "vllm:generation_tokens_total": ("counter", self.generated_tokens),
            }
            lines = [f"# TYPE {name} {kind}\n{name}{label} {float(value)}" for name, (kind, value) in values.items()]
            success = label.replace("}", ',finished_reason="stop"}')
            lines.append(f"# TYPE vllm:request_success_total counter\nvllm:request_success_total{success} {float(self.succeeded)}")
            lines += self.draft_metrics(label)
        return "\n".join(lines) + "\n"

    def draft_metrics(self, label: str) -> list[str]:
        """As if each generated token were a step: the first half of the positions is always accepted."""
        drafts = int(self.behaviour.number("DRAFTS"))
        steps, accepted = self.generated_tokens, drafts // 2
        values = {"num_drafts": steps, "num_draft_tokens": steps * drafts, "num_accepted_tokens": steps * accepted} if drafts else {}
        lines = [f"vllm:spec_decode_{name}_total{label} {float(value)}" for name, value in values.items()]
        for place in range(drafts):
            at = label.replace("}", f',position="{place}"}}')
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{at} {float(steps if place < accepted else 0)}")
        return lines


class Handler(BaseHTTPRequestHandler):
    """The HTTP interface."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def answer(self, status: int, content: object, kind: str = "application/json") -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        """Check the key, which guards /v1 only."""
        if not self.engine.key or not self.path.startswith("/v1") or self.headers.get("Authorization") == f"Bearer {self.engine.key}":
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if not self.allowed():
            return
        match self.path.partition("?")[0]:
            case "/health" | "/ping":
                self.answer(self.engine.health(), "", "text/plain")
            case "/version":
                self.answer(200, {"version": VERSION})
            case "/v1/models":
                more = {"object": "model", "created": 0, "owned_by": "vllm", "root": self.engine.options.model, "parent": None,
                        "max_model_len": self.engine.options.max_model_len, "permission": []}
                self.answer(200, {"object": "list", "data": [{"id": name, **more} for name in self.engine.names]})
            case "/metrics":
                self.answer(200, self.engine.metrics(), "text/plain; version=0.0.4")
            case "/debug/argv":
                self.answer(200, {"argv": sys.argv, "environment": sorted(os.environ), "rank": self.engine.ranks.rank, "pid": os.getpid()})
            case "/debug/requests":
                self.answer(200, self.engine.requests)
            case _:
                self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        try:
            body = json.loads(self.rfile.read(length) or b"{}")
        except json.JSONDecodeError:
            self.answer(400, {"error": {"message": "not JSON", "type": "BadRequestError", "param": None, "code": 400}})
            return
        if not self.allowed():
            return
        match self.path:
            case "/v1/chat/completions":
                self.complete(body, chat=True)
            case "/v1/completions":
                self.complete(body, chat=False)
            case "/tokenize":
                text = prompt_of(body)
                self.answer(200, {"count": len(text), "max_model_len": self.engine.options.max_model_len, "tokens": list(text), "token_strs": None})
            case "/debug/set":
                self.engine.behaviour.changed.update({name: str(value) for name, value in body.items()})
                self.answer(200, self.engine.behaviour.changed)
            case _:
                self.answer(404, {"detail": "Not Found"})

    def complete(self, body: dict, *, chat: bool) -> None:
        engine, behaviour = self.engine, self.engine.behaviour
        if body.get("model") not in (None, *engine.names):
            self.answer(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}})
            return
        with engine.lock:
            engine.requests = [*engine.requests[-49:], body]
            first = engine.prompt_tokens == 0
            engine.prompt_tokens += max(1, len(prompt_of(body)))
            engine.running += 1
        try:
            if engine.ranks.lost.is_set() or engine.dead or behaviour.text("COMPLETION") == "500":
                self.answer(500, {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}})
                if engine.ranks.lost.is_set():
                    engine.die()
                return
            if behaviour.text("COMPLETION") == "hang":
                while behaviour.text("COMPLETION") == "hang":
                    time.sleep(0.2)
            if first:
                time.sleep(behaviour.number("FIRST_ANSWER"))
            time.sleep(behaviour.number("FROZEN"))
            if behaviour.text("COMPLETION") == "error-body":
                self.answer(200, {"error": {"message": "something went wrong", "type": "InternalServerError", "param": None, "code": 500}})
                return
            self.send_completion(body, chat=chat)
            with engine.lock:
                engine.succeeded += 1
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with engine.lock:
                engine.running -= 1

    def send_completion(self, body: dict, *, chat: bool) -> None:
        engine, how = self.engine, self.engine.behaviour.text("COMPLETION")
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        words = [] if how == "empty" else engine.words(limit)
        prompt = len(prompt_of(body))
        frame = {"id": "cmpl-stub", "created": int(time.time()), "model": body.get("model") or engine.names[0]}
        place = "reasoning" if how == "reasoning" else "content"
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            count = 0
            for count, word in enumerate(words, start=1):
                choice = {"index": 0, "delta": {place: word}, "finish_reason": None} if chat else {"index": 0, "text": word, "finish_reason": None}
                self.event({**frame, "object": "chat.completion.chunk" if chat else "text_completion", "choices": [choice]})
            last = {"index": 0, "delta": {}, "finish_reason": "stop"} if chat else {"index": 0, "text": "", "finish_reason": "stop"}
            self.event({**frame, "object": "chat.completion.chunk" if chat else "text_completion", "choices": [last]})
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
                self.event({**frame, "object": "chat.completion.chunk" if chat else "text_completion", "choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        tokens = list(words)
        text = "".join(tokens)
        message: dict = {"role": "assistant", "content": None, "reasoning": None, "tool_calls": [], place: text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"} if chat else {"index": 0, "text": text, "finish_reason": "stop"}
        usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens), "total_tokens": prompt + len(tokens)}
        self.answer(200, {**frame, "object": "chat.completion" if chat else "text_completion", "choices": [choice], "usage": usage})

    def event(self, content: dict) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        log(f'{self.client_address[0]} - {format % args}')


class Server(ThreadingHTTPServer):
    """The API server."""

    daemon_threads = True


def prompt_of(body: dict) -> bytes:
    """Return the bytes of a prompt or of messages; the stand-in's tokens are bytes."""
    if "messages" in body:
        return "".join(str(message.get("content") or "") for message in body["messages"]).encode()
    return str(body.get("prompt") or "").encode()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm", description="Stand-in for vLLM", allow_abbrev=False)
    parser.add_argument("--version", "-v", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False)
    serve.add_argument("model", nargs="?", default="model")
    serve.add_argument("--served-model-name", nargs="+", default=[])
    serve.add_argument("--nnodes", "-n", type=int, default=1)
    serve.add_argument("--node-rank", "-r", type=int, default=0)
    serve.add_argument("--master-addr", default="127.0.0.1")
    serve.add_argument("--master-port", type=int, default=29501)
    serve.add_argument("--headless", action="store_true")
    serve.add_argument("--host", default="0.0.0.0")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--api-key", default="")
    serve.add_argument("--max-model-len", type=int, default=4096)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        log(f"accepted without effect: {' '.join(unknown)}")
    return options


def open_engram(behaviour: Behaviour, ranks: int) -> None:
    """Look at the row files as the real reader does: what is wrong with one is no error, the checkpoint is read instead."""
    if behaviour.text("ENGRAM_PINNED"):
        log("Engram table offloaded to pinned host memory: 192001740 rows x 256, 47.21 GiB per rank")
        return
    for layer in filter(None, behaviour.text("ENGRAM").split(",")):
        path = Path(os.environ.get("DSV41_PACKED_DIR", "/nonexistent")) / f"engram-l{layer}-r{behaviour.rank}of{ranks}.bin"
        low = high = 0
        packed = False
        try:
            with path.open("rb") as file:
                magic, of_layer, low, high, _total, row_bytes = struct.unpack("<8s5Q", file.read(48))
                packed = (magic, of_layer, row_bytes) == (b"DSV1EN41", int(layer), 264) and path.stat().st_size >= 4096 + (high - low) * row_bytes
        except (OSError, struct.error):
            pass
        log(f"File-backed Engram layer={layer} rank={behaviour.rank}/{ranks} rows=[{low},{high}) cache=0.0GiB scales=0.0GiB packed={packed}")


def end_after(seconds: float, code: int) -> None:
    threading.Timer(seconds, os._exit, args=(code,)).start()


def hang(folder: str) -> None:
    """Never become ready; write to a folder if asked, as an engine does that compiles for minutes without a log line."""
    while True:
        time.sleep(1)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with (Path(folder) / "progress.bin").open("ab") as progress:
                progress.write(b"\0" * 4096)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    behaviour = Behaviour(options.node_rank)
    if error := behaviour.text("STARTUP_ERROR"):
        print(error, file=sys.stderr, flush=True)
        return 1
    # As process 1 of a container it gets no default signal actions.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if behaviour.text("IGNORE_TERM") else lambda *_: os._exit(0))
    if options.model.startswith("/") and not (Path(options.model) / "config.json").exists():
        print(f"OSError: {options.model} does not appear to have a file named config.json", file=sys.stderr, flush=True)
        return 1
    if behaviour.text("EXIT_AFTER"):
        end_after(behaviour.number("EXIT_AFTER"), int(behaviour.number("EXIT_CODE")))
    ballast = bytearray(os.urandom(1 << 20) * int(behaviour.number("MEMORY_MB")))
    log(f"vLLM API server version {VERSION}, model {options.model}, {len(ballast) >> 20} MB held")
    if behaviour.text("HANG"):
        hang(behaviour.text("WRITES"))
    ranks = Ranks(options, behaviour.number("RENDEZVOUS_TIMEOUT", 600))
    ranks.meet()
    open_engram(behaviour, options.nnodes)
    time.sleep(behaviour.number("LOAD_SECONDS", 1))
    if behaviour.text("EXIT_READY_AFTER"):
        end_after(behaviour.number("EXIT_READY_AFTER"), int(behaviour.number("EXIT_CODE")))
    if options.headless or options.node_rank > 0:
        log(f"rank {options.node_rank} is ready, without an API server")
        ranks.lost.wait()
        log("lost rank 0", "ERROR")
        return 1
    engine = Engine(options, behaviour, ranks)
    server = Server((options.host, options.port), type("Handler", (Handler,), {"engine": engine}))
    log(f"Starting vLLM server on http://{options.host}:{options.port}")
    log("Application startup complete.")
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
