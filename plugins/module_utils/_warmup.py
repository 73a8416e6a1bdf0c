# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The requests that make a fresh engine compile what its users will need, and those that show whether it talks sense.

Shapes are data of the profile. A shape that this deployment cannot have (longer than its context, wider than its sequences) is left out
by name. Standard library only.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import struct
import typing as t
import zlib

from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import COMPLETION_PATH, Answer, call, completion_text, metrics

CHAT, PLAIN = COMPLETION_PATH, "/v1/completions"
TOKENIZE_SECONDS = 30
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p")
# A judgement needs some drafts; after so many further requests there is none, and that is said.
MORE_REQUESTS = 8

Data = t.Mapping[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests that are sent at the same time. ``tokens`` is the length that the prompt must have; 0 where it does not matter."""

    says: str
    path: str
    bodies: tuple[dict[str, t.Any], ...]
    tokens: int = 0
    word: str = ""


@dataclasses.dataclass
class Report:
    """What was sent, what was left out and why, what went wrong."""

    sent: int = 0
    skipped: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where the requests go."""

    port: int
    model: str
    key: str
    timeout: float
    address: str

    def post(self, path: str, body: Data, timeout: float | None = None) -> Answer:
        return call(self.address, self.port, "POST", path, key=self.key, body={"model": self.model, **body}, timeout=timeout or self.timeout)

    def metrics(self) -> dict[str, float]:
        return metrics(call(self.address, self.port, "GET", "/metrics", timeout=10))


def shapes(data: Data, max_len: int, max_seqs: int) -> tuple[list[Shape], list[str]]:
    """All shapes of a profile that this deployment can have, and the names of the others."""
    found, skipped = [], []
    for part in ("completions", "prefill"):
        ladder = data.get(part) or {}
        for tokens in ladder.get("tokens", ()):
            says = f"{part} of {tokens} tokens"
            if tokens + ladder.get("max_tokens", 1) > max_len:
                skipped.append(f"{says}: longer than the context of {max_len}")
            else:
                found.append(Shape(says, PLAIN, (_sampling(ladder),), tokens, ladder.get("word", "hello")))
    chats = data.get("chats") or []
    found += [Shape(_chat_words(chat), CHAT, (_chat(chat, data, f"{number}"),)) for number, chat in enumerate(chats)]
    for burst in data.get("bursts") or []:
        says = f"{burst['parallel']} at once, {_chat_words(burst)}"
        if burst["parallel"] > max_seqs:
            skipped.append(f"{says}: only {max_seqs} sequences")
        else:
            found.append(Shape(says, CHAT, tuple(_chat(burst, data, f"{burst['parallel']}-{one}") for one in range(burst["parallel"]))))
    return found, skipped


def _sampling(item: Data) -> dict[str, t.Any]:
    return {name: item[name] for name in SAMPLING if name in item}


def _chat_words(item: Data) -> str:
    values = [f"{name} {item[name]}" for name in SAMPLING if name in item]
    return ", ".join([f"chat of {item['words']} words", *(["thinking"] if item.get("thinking") else []), *values])


def _chat(item: Data, data: Data, nonce: str) -> dict[str, t.Any]:
    """Words that no earlier request had, so that the prefix cache does not answer for the kernels."""
    filler = " ".join(f"word{nonce}x{number}" for number in range(item["words"]))
    body = {"messages": [{"role": "user", "content": f"{filler}\nReply with OK."}], **_sampling(item)}
    return body if item.get("thinking") else {**body, **(data.get("thinking_off") or {})}


def count_tokens(engine: Engine, prompt: str) -> int:
    """How long the engine takes a prompt to be; 0 when it does not say."""
    answer = engine.post("/tokenize", {"prompt": prompt}, TOKENIZE_SECONDS)
    return int(answer.document.get("count") or 0) if answer.status == 200 and isinstance(answer.document, dict) else 0


def prompt_of(engine: Engine, word: str, tokens: int) -> str:
    """The word so often that the prompt has exactly this length; empty when no number of words gives it.

    One and two words tell how many tokens a word and the beginning take; the result is counted again.
    """
    one, two = count_tokens(engine, word), count_tokens(engine, f"{word} {word}")
    each = two - one
    if not one or each <= 0 or tokens < one or (tokens - one) % each:
        return ""
    prompt = " ".join([word] * (1 + (tokens - one) // each))
    return prompt if count_tokens(engine, prompt) == tokens else ""


def warm_up(engine: Engine, data: Data, max_len: int, max_seqs: int) -> Report:
    """Send every shape in order."""
    todo, skipped = shapes(data, max_len, max_seqs)
    report = Report(skipped=skipped)
    with concurrent.futures.ThreadPoolExecutor(max_workers=max([1, *(len(shape.bodies) for shape in todo)])) as pool:
        for shape in todo:
            bodies = shape.bodies
            if shape.tokens:
                prompt = prompt_of(engine, shape.word, shape.tokens)
                if not prompt:
                    report.skipped.append(f"{shape.says}: {shape.word!r} makes no prompt of this length")
                    continue
                bodies = tuple({**body, "prompt": prompt} for body in bodies)
            answers = list(pool.map(lambda body, path=shape.path: engine.post(path, body), bodies))
            report.sent += len(answers)
            for answer in answers:
                _note(report, shape, answer)
            if any(answer.status == 0 for answer in answers):
                break  # nobody is there any more, or it hangs: every further request would wait its whole time
    return report


def _note(report: Report, shape: Shape, answer: Answer) -> None:
    if answer.status == 0 or answer.status >= 500:
        report.failed.append(f"{shape.says}: {answer.error or f'HTTP {answer.status}'} after {answer.seconds:.1f} s")
    elif answer.status != 200:
        report.skipped.append(f"{shape.says}: the engine takes no such request (HTTP {answer.status})")


# --- the canary --------------------------------------------------------------------------------------------------


def check_words(engine: Engine, data: Data) -> list[str]:
    """A greedy request to which every sane model answers with a known word."""
    wanted = data.get("contains")
    if not wanted:
        return []
    body = {"messages": [{"role": "user", "content": "Reply with OK."}], "temperature": 0, "max_tokens": 24, **(data.get("thinking_off") or {})}
    answer = engine.post(CHAT, body)
    text = completion_text(answer.document) if answer.status == 200 else ""
    if wanted in text:
        return []
    return [f"a greedy answer must have {wanted!r} in it and is {text[:80]!r}" if text else f"a greedy request got {answer.error or f'HTTP {answer.status}'}"]


def check_drafts(engine: Engine, data: Data) -> tuple[list[str], list[str]]:
    """Whether the engine accepts any of its own drafts: one that answers nonsense hardly does. Problems, and what could not be judged."""
    wanted = data.get("drafts") or {}
    if not wanted or wanted.get("method") in (None, "none"):
        return [], []
    body = {
        "messages": [{"role": "user", "content": "Count from 1 to 50, separated by commas."}], "temperature": 0, "max_tokens": 64,
        **(data.get("thinking_off") or {}),
    }
    for remaining in range(MORE_REQUESTS, -1, -1):
        values = engine.metrics()
        drafted, accepted = values.get(wanted["drafted"], 0.0), values.get(wanted["accepted"], 0.0)
        if drafted >= wanted["at_least_drafted"]:
            return ([f"none of {drafted:.0f} drafted tokens was accepted"] if accepted <= 0 else []), []
        if remaining:
            engine.post(CHAT, body)
    return [], [f"speculation was not judged: only {drafted:.0f} of {wanted['at_least_drafted']} tokens were drafted"]


def tiny_image() -> str:
    """A PNG of 32 times 32 red pixels as a data URL."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + b"\xff\0\0" * 32) * 32
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def capability_request(name: str, data: Data) -> dict[str, t.Any]:
    off = data.get("thinking_off") or {}
    if name == "image":
        parts = [{"type": "text", "text": "Which colour is this?"}, {"type": "image_url", "image_url": {"url": tiny_image()}}]
        return {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 16, **off}
    if name == "tool":
        function = {
            "name": "weather", "description": "The weather in a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        }
        question = "What is the weather in Oslo? Use the tool."
        tools = [{"type": "function", "function": function}]
        return {"messages": [{"role": "user", "content": question}], "tools": tools, "temperature": 0, "max_tokens": 256, **off}
    return {"messages": [{"role": "user", "content": "How much is 17 and 4?"}], "max_tokens": 256, **(data.get("thinking_on") or {})}


def capability_shown(name: str, document: t.Any) -> bool:
    """Whether the answer has what was asked for: text about the image, a call of the tool, or text in the place of reasoning."""
    try:
        message = document["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        return False
    if name == "image":
        return bool(completion_text(document))
    if name == "tool":
        return any((entry.get("function") or {}).get("name") == "weather" for entry in message.get("tool_calls") or [])
    return bool(message.get("reasoning") or message.get("reasoning_content"))


def check_capabilities(engine: Engine, data: Data, names: t.Iterable[str]) -> list[str]:
    problems = []
    for name in names:
        answer = engine.post(CHAT, capability_request(name, data))
        if answer.status != 200:
            problems.append(f"capability {name}: {answer.error or f'HTTP {answer.status}'}")
        elif not capability_shown(name, answer.document):
            problems.append(f"capability {name}: the answer has none of it")
    return problems
