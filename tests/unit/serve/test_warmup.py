# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Warm-up shapes, the canary, and the drain, against an engine that answers as told."""

from __future__ import annotations

import http.server
import json
import struct
import threading
import zlib

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _engine_api, _profile_language, _warmup
from ansible_collections.sparkops.inference.plugins.module_utils._profile import with_parents
from ansible_collections.sparkops.inference.plugins.modules import serve_canary, serve_drain, serve_warmup
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles
from run_module import run


class Engine:
    """One token for each word; what it answers and counts is set by the test."""

    def __init__(self):
        self.requests, self.together, self.most = [], 0, 0
        self.values = {}
        self.text, self.status = "OK", 200
        self.message = {}
        self.tokens = lambda prompt: len(prompt.split())
        self.on_request = lambda engine: None
        engine, lock = self, threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def reply(self, status, value):
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                engine.on_request(engine)
                self.reply(200, "# TYPE x gauge\n" + "".join(f'{name}{{engine="0",x="}} 1"}} {value}\n' for name, value in engine.values.items()))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self.reply(200, {"count": engine.tokens(body["prompt"])})
                    return
                with lock:
                    engine.together += 1
                    engine.most = max(engine.most, engine.together)
                    engine.requests.append((self.path, body))
                threading.Event().wait(0.05)
                engine.on_request(engine)
                with lock:
                    engine.together -= 1
                self.reply(engine.status, {"choices": [{"message": {"content": engine.text, **engine.message}}]})

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture(name="engine")
def fixture_engine():
    engine = Engine()
    yield engine
    engine.server.shutdown()
    engine.server.server_close()


def client(engine, timeout=5):
    return _warmup.Engine(engine.port, "tiny", "", timeout, "127.0.0.1")


def recipe(name, **settings):
    """The data of a shipped profile with its placeholders filled."""
    profile = with_parents(name, ProfileFiles().find)
    values = {option: spec.get("default") for option, spec in profile["options"].items() if spec} | {"serve_warmup": True, "serve_completion_timeout": 240}
    return _profile_language.resolve(profile["warmup"], {**values, **settings})


# Facts: 15 requests at two sequences, 13 at one, 18 at three, 22 at four.
@pytest.mark.parametrize("sequences, requests", [(1, 13), (2, 15), (3, 18), (4, 22)])
def test_the_deepseek_sweep_is_that_of_the_recipe(sequences, requests):
    found, skipped = _warmup.shapes(recipe("deepseek_v41_flash_exl3"), 600000, sequences)
    assert sum(len(shape.bodies) for shape in found) == requests
    assert len(skipped) == 4 - sequences if sequences > 1 else len(skipped) == 3
    assert [shape.tokens for shape in found if shape.tokens] == [1, 10, 26, 58, 122, 250]


def test_the_glm_sweep_has_its_24_requests_and_drops_what_does_not_fit():
    data = recipe("glm_53_flash_exl3")
    assert sum(len(shape.bodies) for shape in _warmup.shapes(data, 900000, 4)[0]) == 24
    found, skipped = _warmup.shapes(data, 32768, 4)
    assert skipped == ["prefill of 65536 tokens: longer than the context of 32768"]
    assert 14336 in [shape.tokens for shape in found]


def test_greedy_sampled_thinking_and_parallel_requests_are_sent_once_each(engine):
    data = {
        "thinking_off": {"chat_template_kwargs": {"enable_thinking": False}},
        "completions": {"tokens": [1, 9], "word": "hello", "max_tokens": 1, "temperature": 0},
        "chats": [{"words": 3, "temperature": 0, "max_tokens": 4}, {"words": 2, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "thinking": True}],
        "bursts": [{"parallel": 3, "words": 2, "temperature": 0}],
    }
    # The last three arrive together: one that waits for the end of another breaks the barrier, and its connection with it.
    together = threading.Barrier(3)
    engine.on_request = lambda engine: len(engine.requests) > 4 and together.wait(30)
    report = _warmup.warm_up(client(engine), data, 1000, 3)
    assert (report.sent, report.skipped, report.failed) == (7, [], [])
    assert [body["prompt"] for path, body in engine.requests if path == "/v1/completions"] == ["hello", " ".join(["hello"] * 9)]
    chats = [body for path, body in engine.requests if path == "/v1/chat/completions"]
    assert chats[0]["temperature"] == 0 and chats[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in chats[1] and (chats[1]["top_k"], chats[1]["top_p"]) == (40, 0.9) and "max_tokens" not in chats[1]
    assert engine.most == 3
    # No two prompts begin alike: else the prefix cache answers.
    assert len({body["messages"][0]["content"].split()[0] for body in chats}) == len(chats)


def test_a_prompt_has_exactly_the_length_or_is_left_out(engine):
    engine.tokens = lambda prompt: 1 + len(prompt)  # a beginning of one, and one for each byte
    one = client(engine)
    assert _warmup.prompt_of(one, "a", 16) == " ".join(["a"] * 8)
    assert _warmup.prompt_of(one, "a", 17) == "" and _warmup.prompt_of(one, "hello", 3) == ""
    report = _warmup.warm_up(one, {"completions": {"tokens": [17], "word": "a"}}, 100, 1)
    assert report.sent == 0 and "no prompt of this length" in report.skipped[0]


def test_an_error_of_the_server_fails_and_one_of_the_request_is_told(engine):
    data = {"chats": [{"words": 1}, {"words": 2}]}
    engine.status = 400
    report = _warmup.warm_up(client(engine), data, 100, 1)
    assert len(report.skipped) == 2 and not report.failed
    engine.status = 500
    assert len(_warmup.warm_up(client(engine), data, 100, 1).failed) == 2


def test_after_a_hang_nothing_more_is_sent(engine):
    engine.on_request = lambda engine: threading.Event().wait(1)
    report = _warmup.warm_up(client(engine, 0.2), {"chats": [{"words": 1}, {"words": 2}]}, 100, 1)
    assert report.sent == 1 and len(report.failed) == 1


def test_the_module_counts_kernels_and_fails_with_what_failed(engine, tmp_path, capsys):
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "triton" / "abc" / "_topk_topp_kernel.json").write_text("{}")
    arguments = {
        "state_dir": str(tmp_path), "api_port": engine.port, "model": "tiny", "max_model_len": 100, "max_num_seqs": 1, "kernel_cache": str(tmp_path / "triton"),
        "shapes": {"chats": [{"words": 1}], "kernels": {"name": "_topk_topp_kernel", "at_least": 3}, "request_timeout": 5},
    }
    done = run(serve_warmup, capsys, **arguments)
    assert (done["sent"], done["kernels"]) == (1, 1) and "3 were expected" in done["skipped"][0]
    engine.status = 503
    assert "warm-up: chat of 1 words: HTTP 503" in run(serve_warmup, capsys, **arguments)["msg"]


# --- the canary


def canary(engine, capsys, tmp_path, data, **more):
    return run(serve_canary, capsys, node="a", state_dir=str(tmp_path), api_port=engine.port, model="tiny", canary=data, timeout=5, **more)


def test_nonsense_and_unaccepted_drafts_are_told_together(engine, capsys, tmp_path):
    engine.text = "!!!!!!!!"
    engine.values = {"drafted": 700.0, "accepted": 0.0}
    data = {"contains": "OK", "drafts": {"method": "dflash", "drafted": "drafted", "accepted": "accepted", "at_least_drafted": 64}}
    done = canary(engine, capsys, tmp_path, data)
    assert done["failed"] and "serve.canary" in done["msg"]
    assert "'!!!!!!!!'" in done["msg"] and "none of 700 drafted tokens" in done["msg"]
    engine.text, engine.values["accepted"] = "OK.", 1.0
    assert canary(engine, capsys, tmp_path, data)["unjudged"] == []


def test_too_few_drafts_are_asked_for_and_else_not_judged(engine, capsys, tmp_path):
    data = {"drafts": {"method": "mtp", "drafted": "drafted", "accepted": "accepted", "at_least_drafted": 64}}

    def more(one):
        one.values = {"drafted": 8.0 * len(one.requests), "accepted": 2.0}

    engine.on_request = more
    assert canary(engine, capsys, tmp_path, data)["unjudged"] == [] and len(engine.requests) == 8
    engine.on_request = lambda one: None
    engine.values = {}
    assert "only 0 of 64" in canary(engine, capsys, tmp_path, data)["unjudged"][0]
    engine.requests.clear()
    assert canary(engine, capsys, tmp_path, {"drafts": {**data["drafts"], "method": "none"}})["unjudged"] == [] and not engine.requests


@pytest.mark.parametrize(
    "name, message, shown",
    [
        ("image", {"content": "red"}, True),
        ("image", {"content": ""}, False),
        ("tool", {"content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}, True),
        ("tool", {"content": "I call weather(Oslo)", "tool_calls": []}, False),
        ("reasoning", {"content": "21", "reasoning": "17 and 4"}, True),
        ("reasoning", {"content": "21"}, False),
    ],
)
def test_a_capability_is_what_the_answer_has(engine, capsys, tmp_path, name, message, shown):
    engine.message = message
    done = canary(engine, capsys, tmp_path, {}, capabilities=[name])
    assert done.get("failed", False) is not shown
    assert shown or f"capability {name}" in done["msg"]


def test_the_tiny_image_is_a_png():
    data = __import__("base64").b64decode(_warmup.tiny_image().partition(",")[2])
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (32, 32)
    length = struct.unpack(">I", data[33:37])[0]
    assert len(zlib.decompress(data[41:41 + length])) == 32 * 97


# --- metrics and the drain


def test_metrics_are_summed_over_their_labels():
    text = '# HELP x y\nvllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1",model="a } b"} 2\nup 1\nbroken\n'
    assert _engine_api.metrics(_engine_api.Answer(200, text, 0.0)) == {"vllm:num_requests_running": 3.0, "up": 1.0}
    assert _engine_api.metrics(_engine_api.Answer(404, {"detail": "x"}, 0.0)) == {}


def test_what_answers_without_the_key_is_named(engine, monkeypatch):
    answers = {"/invocations": 405, "/metrics": 200, "/pause": 401, "/docs": 404}
    monkeypatch.setattr(_engine_api, "call", lambda address, port, method, path, timeout: _engine_api.Answer(answers.get(path, 0), None, 0.0))
    assert _engine_api.open_paths("127.0.0.1", engine.port) == ["/invocations", "/metrics"]


def test_a_drain_waits_for_running_and_waiting_requests(engine):
    engine.values = {_engine_api.RUNNING: 1, _engine_api.WAITING: 2}
    asked = []

    def fewer(one):
        asked.append(1)
        if len(asked) == 3:
            one.values = {_engine_api.RUNNING: 0, _engine_api.WAITING: 0}

    engine.on_request = fewer
    renewed = []
    left, waited = serve_drain.drain(("127.0.0.1", engine.port), 10, lambda: renewed.append(1), pause=0.01)
    assert left == 0 and len(asked) == 3 and len(renewed) == 2
    assert serve_drain.words(0, 7.2) == "running requests ended within 7 s" and serve_drain.words(0, 0.0) == serve_drain.words(None, 9) == ""


def test_a_drain_that_takes_too_long_says_how_many_are_cut(engine):
    engine.values = {_engine_api.RUNNING: 2, _engine_api.WAITING: 1}
    left, waited = serve_drain.drain(("127.0.0.1", engine.port), 0.1, lambda: None, pause=0.02)
    assert left == 3 and 0.1 <= waited < 30
    assert serve_drain.words(left, 60) == "3 requests still ran after 60 s and were cut"


def test_a_drain_outlives_an_answer_that_is_missed_and_not_an_engine_that_is_gone(monkeypatch):
    said = [3, None, None, 2, 0]
    monkeypatch.setattr(serve_drain, "unfinished", lambda place: said.pop(0))
    assert serve_drain.drain(("127.0.0.1", 1), 10, lambda: None, pause=0.01)[0] == 0 and not said
    said = [3, None, None, None]
    assert serve_drain.drain(("127.0.0.1", 1), 10, lambda: None, pause=0.01)[0] is None and not said


def test_an_engine_without_counters_or_one_that_is_gone_is_not_waited_for(engine):
    assert serve_drain.drain(("127.0.0.1", engine.port), 60, lambda: None)[0] is None
    assert serve_drain.drain(("127.0.0.1", 1), 60, lambda: None)[0] is None


@pytest.mark.parametrize(
    "document, place",
    [
        ({"State": {"Running": True}, "Args": ["/sparkops/entry.py", "vllm", "serve", "/model", "--port", "8899"]}, ("127.0.0.1", 8899)),
        ({"State": {"Running": True}, "Args": ["--host", "192.0.2.21", "--port", "8899"]}, ("192.0.2.21", 8899)),
        ({"State": {"Running": True}, "Args": ["vllm", "serve", "--headless"]}, None),
        ({"State": {"Running": False}, "Args": ["--port", "8899"]}, None),
        (None, None),
    ],
)
def test_the_place_is_that_of_the_container_that_runs(document, place):
    assert serve_drain.place_of(document) == place
