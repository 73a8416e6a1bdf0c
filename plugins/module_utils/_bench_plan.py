# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What a benchmark asks, in which order, and what of it does not fit. Pure."""

from __future__ import annotations

import random
import typing as t

# A list that a model continues without surprise, which drafts guess well, and free text, which they do not.
PROMPTS = {
    "counting": "Count from 1 to 200. Write the numbers only, separated by commas.",
    "prose": "Explain how a hash map works, from the hash function to resizing, in plain prose.",
}
PROBES = (
    {"question": "What is the capital of France? Answer in one word.", "expects": "Paris"},
    {"question": "Which number is larger, 9.9 or 9.11? Answer with the number only.", "expects": "9.9"},
    {"question": "Describe the sky in one sentence.", "expects": ""},
)
WARMUP_TOKENS = 32
PROBE_TOKENS = 64
# Generated after each prompt of the ladder: enough to see how fast tokens come at that depth.
LADDER_ANSWER_TOKENS = 32
# Room for the chat template around a prompt that is measured in tokens of its own text.
TEMPLATE_TOKENS = 64

Case = dict[str, t.Any]


def bench_cases(settings: t.Mapping[str, t.Any], survey: t.Mapping[str, t.Any]) -> dict[str, list[Case]]:
    """``cases`` in order, and ``skipped`` with the reason of each.

    ``survey``: what the running engine says of itself; ``max_model_len`` is None where it says nothing.
    """
    longest = survey.get("max_model_len")
    tokens, runs = settings["bench_tokens"], settings["bench_runs"]
    cases: list[Case] = []
    skipped: list[Case] = []
    if longest is not None and tokens + TEMPLATE_TOKENS > longest:
        tokens = max(8, longest // 2)
        skipped.append({"case": f"answers of {settings['bench_tokens']} tokens", "reason": f"the context holds {longest} tokens: {tokens} are asked for"})
    if settings["bench_kinds"]:
        cases.append({"kind": "warmup", "label": "warm up", "prompt": PROMPTS["counting"], "max_tokens": min(WARMUP_TOKENS, tokens)})
    for kind in settings["bench_kinds"]:
        for streams in settings["bench_streams"]:
            label = f"{kind}, {streams} stream{'s' if streams > 1 else ''}"
            cases.append(
                {"kind": "decode", "label": label, "what": kind, "streams": streams, "runs": runs, "prompt": PROMPTS[kind], "max_tokens": tokens}
            )
    for wanted in settings["bench_prefill"]:
        label = f"prompt of {wanted:,} tokens"
        if longest is not None and wanted + TEMPLATE_TOKENS + LADDER_ANSWER_TOKENS > longest:
            skipped.append({"case": label, "reason": f"the context holds {longest:,} tokens, template and answer included"})
            continue
        cases.append({"kind": "prefill", "label": label, "tokens": wanted, "max_tokens": LADDER_ANSWER_TOKENS})
    cases += [{"kind": "probe", "label": probe["question"], **probe, "max_tokens": PROBE_TOKENS} for probe in PROBES]
    return {"cases": cases, "skipped": skipped}


def chat_body(model: str, prompt: str, max_tokens: int) -> dict[str, t.Any]:
    """The protocol of the published figures: greedy, no thinking."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "top_p": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }


WORDS = "the engine reads a long page about rivers stones and weather before it says one short thing".split()


def filler(words: int, nonce: str) -> str:
    """``words`` words that begin with a nonce, so that no cached prefix answers for the prompt."""
    source = random.Random(nonce)
    return " ".join([f"[{nonce}]", *(source.choice(WORDS) for dummy in range(max(0, words - 1)))])


def words_for(tokens: int, words: int, counted: int) -> int:
    """How many words make ``tokens`` tokens when ``words`` of them made ``counted``; a little less, never more."""
    return max(1, int(words * tokens / max(1, counted) * 0.99))
