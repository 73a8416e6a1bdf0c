# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The form of every block of docs/api.md. tests/live/test_owner.py sends them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import yaml
from bench_samples import ROOT

sys.path.insert(0, os.path.join(ROOT, "tests/docs"))

from blocks import blocks, table  # noqa: E402

PAGE = "docs/api.md"
BLOCKS = {block.name: block for block in blocks(PAGE)}
# What both recipes' documents send or describe.
WANTED = {
    "quick test", "thinking off", "literal extra_body", "library", "effort and recommended sampling", "sampling", "streaming", "image", "tools", "tool results",
    "key", "address", "models", "tokenize",
}  # fmt: skip
KINDS = ("on the head", "set", "sent", "form", "wrong", "refused with ")
# Fields of the chat and tokenize requests that the engine knows; a mistyped one would be ignored without a word.
FIELDS = {
    "model", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "chat_template_kwargs", "reasoning_effort",
    "tools", "tool_choice", "prompt",
}  # fmt: skip
REQUESTS = [block for block in BLOCKS.values() if block.body is not None]


def test_every_request_of_both_documents_is_there_and_marked():
    assert set(BLOCKS) == WANTED
    assert all(block.what.startswith(KINDS) for block in BLOCKS.values())


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda block: block.name)
def test_a_block_can_be_run(block):
    if block.language == "python":
        ast.parse(block.text)
    else:
        assert block.language == "bash"
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    # The key stands in a file or in a program of the shell itself, never among the arguments of a process.
    assert "Bearer" not in block.text or block.text.startswith("(umask 077; printf ")


@pytest.mark.parametrize("block", REQUESTS, ids=lambda block: block.name)
def test_a_request_has_known_fields_at_its_top_level(block):
    assert set(block.body) - FIELDS == ({"extra_body"} if block.what == "wrong" else set())
    assert block.body["model"] in ("DeepSeek-v4.1-Flash-EXL3", "GLM-5.3-Flash-EXL3")


def test_the_library_gets_what_belongs_to_the_top_level_in_extra_body():
    words = [word for node in ast.walk(ast.parse(BLOCKS["library"].text)) if isinstance(node, ast.Call) for word in node.keywords]
    given = next(word.value for word in words if word.arg == "extra_body")
    assert ast.literal_eval(given) == {"chat_template_kwargs": BLOCKS["thinking off"].body["chat_template_kwargs"]}


def test_the_recommended_sampling_and_efforts_are_the_profiles():
    for name in ("deepseek_v41_flash_exl3", "glm_53_flash_exl3"):
        with open(os.path.join(ROOT, f"roles/plan/files/profiles/{name}.yml"), encoding="utf-8") as stream:
            sampling = yaml.safe_load(stream)["sampling"]
        recommended = BLOCKS["effort and recommended sampling"].body
        assert {key: recommended[key] for key in ("temperature", "top_p")} == {key: sampling["recommended"][key] for key in ("temperature", "top_p")}
        with open(os.path.join(ROOT, PAGE), encoding="utf-8") as stream:
            page = stream.read()
        efforts = sampling["reasoning_effort"]
        assert all(f"`{choice}`" in page for choice in efforts.get("choices", []))
        assert all(f"`{name}` ({efforts[name]}" in page for name in ("low", "high", "max") if name in efforts)


def test_the_tables_say_what_is_open_and_what_is_not_promised():
    rows = table(PAGE, "What the key guards")
    assert {row[1] for row in rows} == {"200", "401"} and len(rows) >= 10
    promised = [row[0] for row in table(PAGE, "What prefix caching and MAX_NUM_SEQS promise") if row[0]]
    assert promised == ["prefix caching", "`serve_max_num_seqs` (`MAX_NUM_SEQS`)"]
