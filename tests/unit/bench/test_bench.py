# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is measured, from which requests, and how the numbers come about."""

from __future__ import annotations

import json

import bench_samples
import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.filter.bench import bench_lines
from ansible_collections.sparkops.inference.plugins.module_utils._bench_plan import PROBES, bench_cases, filler, words_for
from ansible_collections.sparkops.inference.plugins.module_utils._bench_stats import (
    acceptance,
    decode_rate,
    is_degenerate,
    parse_metrics,
    prefill_case,
    probe_case,
    run_of,
    summary,
)
from ansible_collections.sparkops.inference.plugins.module_utils._engine_stream import Streamed, events
from ansible_collections.sparkops.inference.plugins.module_utils._group_channel import lowest
from ansible_collections.sparkops.inference.plugins.modules import serve_bench

SETTINGS = {"bench_kinds": ["counting", "prose"], "bench_streams": [1, 2, 4], "bench_runs": 5, "bench_tokens": 400, "bench_prefill": [8192, 601000]}


def streamed(begun, first, last, tokens, **more):
    return Streamed(begun=begun, first=first, last=last, completion_tokens=tokens, **more)


# --- what to measure -------------------------------------------------------------------------------------------------------


def test_all_cases_where_the_context_holds_them():
    found = bench_cases(SETTINGS, {"max_model_len": 1048576})
    assert [case["kind"] for case in found["cases"]] == ["warmup", *["decode"] * 6, "prefill", "prefill", *["probe"] * len(PROBES)]
    decode = [case for case in found["cases"] if case["kind"] == "decode"]
    assert [(case["what"], case["streams"]) for case in decode] == [("counting", 1), ("counting", 2), ("counting", 4), ("prose", 1), ("prose", 2), ("prose", 4)]
    assert {(case["runs"], case["max_tokens"]) for case in decode} == {(5, 400)}
    assert found["skipped"] == []


def test_a_rung_that_does_not_fit_is_left_out_and_named():
    found = bench_cases(SETTINGS, {"max_model_len": 600000})
    assert [case["tokens"] for case in found["cases"] if case["kind"] == "prefill"] == [8192]
    assert [row["case"] for row in found["skipped"]] == ["prompt of 601,000 tokens"]
    assert "600,000" in found["skipped"][0]["reason"]


def test_short_contexts_get_shorter_answers_and_say_so():
    found = bench_cases(SETTINGS, {"max_model_len": 256})
    assert {case["max_tokens"] for case in found["cases"] if case["kind"] == "decode"} == {128}
    assert found["skipped"][0]["case"] == "answers of 400 tokens"


def test_an_engine_that_does_not_tell_its_context_is_asked_everything():
    assert bench_cases(SETTINGS, {"max_model_len": None})["skipped"] == []


def test_no_two_prompts_begin_alike_and_sizes_stay_below():
    assert filler(50, "a").split()[0] != filler(50, "b").split()[0]
    assert len(filler(50, "a").split()) == 50
    assert words_for(8192, 400, 520) <= 8192 * 400 / 520
    assert words_for(1, 400, 100000) == 1


# --- numbers ---------------------------------------------------------------------------------------------------------------


def test_the_rate_of_one_stream_is_the_recipes_formula():
    assert decode_rate([streamed(0, 2, 12, 401)]) == 40
    assert decode_rate([streamed(0, 2, 12, 1)]) is None
    assert decode_rate([streamed(0, 2, 12, None)]) is None
    assert decode_rate([streamed(0, 2, 12, 401, error="HTTP 500")]) is None
    assert decode_rate([]) is None


def test_streams_that_ran_together_count_once():
    both = [streamed(0, 2, 12, 101), streamed(0, 3, 12, 101)]
    assert decode_rate(both) == 20
    run = run_of(both)
    assert run["tokens_per_second"] == 20 and run["per_stream"] == [10, 11.111] and run["first_token_ms"] == [2000, 3000]


def test_summaries_are_over_what_was_measured():
    assert summary([3, None, 1, 2]) == {"median": 2, "min": 1, "max": 3}
    assert summary([None]) is None


def test_prefill_counts_until_the_first_token():
    row = prefill_case({"tokens": 8192}, streamed(10, 18, 19, 32, prompt_tokens=8000))
    assert (row["tokens_per_second"], row["first_token_s"], row["decode_tokens_per_second"]) == (1000, 8, 31)
    failed = prefill_case({"tokens": 8192}, Streamed(begun=0, error="/tokenize: HTTP 404"))
    assert failed["tokens_per_second"] is None and failed["error"]


@pytest.mark.parametrize(
    "text, degenerate",
    [
        ("!!!!!!!!", True), ("", True), (" \n", True), ("nan", True), ("NaN, nan", True),
        ("Paris", False), ("9.9", False), ("OK", False), ("a", False), ("banana", False),
    ],  # fmt: skip
)
def test_words_that_no_sound_engine_says(text, degenerate):
    assert is_degenerate(text) is degenerate


def test_an_answer_is_compared_where_there_is_one():
    case = {"question": "q", "expects": "Paris"}
    assert probe_case(case, " It is paris.", "")["sound"] is True
    assert probe_case(case, "London", "")["sound"] is False
    assert probe_case(case, "", "HTTP 500")["sound"] is None
    assert probe_case({"question": "q", "expects": ""}, "Blue.", "")["sound"] is True


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} %d
vllm:num_requests_running{engine="0",model_name="a \\"b\\" {c}"} 2.0
vllm:odd NaN
"""


def test_acceptance_is_what_was_added():
    found = acceptance(METRICS % (10, 20, 9, 8, 1), METRICS % (110, 220, 159, 98, 61))
    assert found == {"drafts": 100, "drafted": 200, "accepted": 150, "ratio": 0.75, "per_step": 1.5, "per_position": [0.9, 0.6]}
    assert acceptance("", "") is None
    assert acceptance(METRICS % (10, 20, 9, 8, 1), METRICS % (10, 20, 9, 8, 1)) is None
    # The engine was started anew in between: its counters say nothing about the case.
    assert acceptance(METRICS % (500, 1000, 900, 8, 1), METRICS % (10, 20, 9, 8, 1)) is None


def test_labels_with_quotes_and_braces_are_read():
    assert parse_metrics(METRICS % (1, 1, 1, 1, 1))["vllm:num_requests_running"][0][1] == 2


def test_the_least_of_each_rank():
    assert lowest([{"0": 5}, {"0": 3, "1": 9}, {"0": 4, "1": 8}, {}]) == {"0": 3, "1": 8}


def test_a_run_in_lines_for_a_terminal():
    run = bench_samples.bench("20261129T100000Z", 1.0)
    lines = bench_lines(run)
    assert lines[0] == "prose, 1 streams: 31.6 tokens/s (28.4 to 34.8), first token 222 ms, 70.0 % of drafts accepted"
    assert lines[2] == f"prose, 4 streams: {bench_samples.HOSTILE}", "an error is told in the place of figures"
    assert lines[4] == "prompt of 8,192 tokens (8192): 970.8 tokens/s, first token 8.44 s"
    assert [line for line in lines if line.startswith("left out: prompt of 601,000 tokens")] and lines[-1].startswith("note: ")


# --- the stream ------------------------------------------------------------------------------------------------------------


def test_events_end_where_the_stream_says_so():
    lines = [b": comment\n", b'data: {"a": 1}\n', b"\n", b"data: broken\n", b"data: [DONE]\n", b'data: {"a": 2}\n']
    assert [sorted(event) for event in events(lines)] == [["a"], ["error"]]


def test_reasoning_counts_and_an_error_in_the_stream_is_told():
    one = Streamed(begun=0)
    one.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1)
    assert one.first is None
    one.take({"choices": [{"delta": {"reasoning": "Hm"}}]}, 2)
    one.take({"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}, 3)
    one.take({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}, 4)
    assert (one.first, one.last, one.text, one.completion_tokens, one.prompt_tokens) == (2, 3, "HmYes", 2, 4)
    one.take({"error": {"message": "EngineCore"}}, 5)
    assert "EngineCore" in one.error


# --- against the stand-in --------------------------------------------------------------------------------------------------


def run(engine, capsys, case, **more):
    arguments = {"state_dir": engine.state_dir, "program": engine.program, "api_port": engine.port, "model": "tiny", "case": case, **more}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        serve_bench.main()
    return json.loads(capsys.readouterr().out)


FORTY = {"STUB_ANSWER": " ".join(map(str, range(40))), "STUB_TOKEN_SECONDS": "0.01", "STUB_DRAFTS": "4"}


@pytest.mark.parametrize("engine", [FORTY], indirect=True)
def test_a_case_of_two_streams_with_its_drafts_and_memory(engine, capsys):
    survey = run(engine, capsys, {"kind": "survey"})["measured"]
    assert survey["served"] == ["tiny"] and survey["max_model_len"] == 4096 and survey["metrics"] and survey["others_running"] == 0
    case = {"kind": "decode", "label": "prose, 2 streams", "what": "prose", "streams": 2, "runs": 2, "prompt": "p", "max_tokens": 32}
    result = run(engine, capsys, case)
    measured = result["measured"]
    assert [one["tokens"] for one in measured["runs"]] == [[32, 32], [32, 32]]
    # 31 pauses of 10 ms in each of two streams: at most 200 tokens a second, whatever the machine does.
    assert 0 < measured["tokens_per_second"]["median"] <= 200
    assert measured["first_token_ms"]["min"] > 0
    assert result["acceptance"] == {"drafts": 128, "drafted": 512, "accepted": 256, "ratio": 0.5, "per_step": 2, "per_position": [1, 1, 0, 0]}
    # The silent rank's last words are no measurement.
    assert result["memory"]["1"] == 2048 * 1024 and set(result["memory"]) == {"0", "1"} and result["memory"]["0"] == 4096 * 1024


@pytest.mark.parametrize("engine", [{"STUB_ANSWER": "one two"}], indirect=True)
def test_a_prompt_has_the_length_that_was_asked_for(engine, capsys):
    measured = run(engine, capsys, {"kind": "prefill", "label": "x", "tokens": 2000, "max_tokens": 8})["measured"]
    assert 0.98 * 2000 <= measured["tokens"] <= 2000 and measured["tokens_per_second"] > 0 and not measured["error"]


@pytest.mark.parametrize("engine", [{"STUB_COMPLETION": "500"}], indirect=True)
def test_an_engine_that_fails_is_told_with_its_words(engine, capsys):
    case = {"kind": "decode", "label": "x", "what": "prose", "streams": 1, "runs": 1, "prompt": "p", "max_tokens": 8}
    measured = run(engine, capsys, case)["measured"]
    assert measured["tokens_per_second"] is None and "HTTP 500" in measured["runs"][0]["error"] and "EngineCore" in measured["runs"][0]["error"]


@pytest.mark.parametrize("engine", [{"STUB_COMPLETION": "hang"}], indirect=True)
def test_a_request_that_hangs_ends_with_its_time(engine, capsys):
    measured = run(engine, capsys, {"kind": "probe", "label": "x", "question": "q", "expects": "", "max_tokens": 8}, timeout=1)["measured"]
    assert measured["sound"] is None and "timed out" in measured["error"]


@pytest.mark.parametrize("engine", [{"STUB_ANSWER": "one two three four", "STUB_TOKEN_SECONDS": "0.6"}], indirect=True)
def test_a_stream_that_drags_on_ends_with_its_time_and_keeps_what_came(engine, capsys):
    measured = run(engine, capsys, {"kind": "probe", "label": "x", "question": "q", "expects": "", "max_tokens": 8}, timeout=1)["measured"]
    assert "not finished within 1 s" in measured["error"] and measured["answer"].startswith("one two")


@pytest.mark.parametrize("engine", [{"STUB_SERVED": "another"}], indirect=True)
def test_another_model_on_the_port_is_refused(engine, capsys):
    result = run(engine, capsys, {"kind": "survey"})
    assert result["failed"] and "another" in result["msg"] and result["msg"].endswith("[bench.not_serving]")


def test_an_unknown_kind_is_refused(tmp_path, capsys):
    arguments = {"state_dir": str(tmp_path), "program": "/nowhere", "api_port": 1, "model": "m", "case": {"kind": "guess"}}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        serve_bench.main()
    assert "guess" in json.loads(capsys.readouterr().out)["msg"]
