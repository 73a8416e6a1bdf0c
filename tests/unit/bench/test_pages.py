# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Pages before any browser sees them: what is compared with what, and that no text can become markup."""

from __future__ import annotations

import json
import os
import re

import bench_samples
import pytest

from ansible_collections.sparkops.inference.plugins.action.bench_record import page
from ansible_collections.sparkops.inference.plugins.callback import stages
from ansible_collections.sparkops.inference.plugins.plugin_utils import _pages
from ansible_collections.sparkops.inference.plugins.plugin_utils._bench_page import bench_view, published_decode, published_prefill
from ansible_collections.sparkops.inference.plugins.plugin_utils._plots import Series, chart, ticks, timeline
from ansible_collections.sparkops.inference.plugins.plugin_utils._run_record import Recorder, run_view, stage_rows

RUN, BEFORE = bench_samples.bench("20261129T100000Z", 1.0), bench_samples.bench("20261101T100000Z", 0.9)


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def test_published_figures_are_those_of_the_same_case():
    assert published_decode(RUN, "prose", 1)["tokens_per_second"] == 31.6
    assert published_decode(RUN, "prose", 3) is None
    silent = {**RUN, "settings": {"serve_speculation_method": "none"}}
    assert published_decode(silent, "prose", 4)["tokens_per_second"] == 53.7
    assert published_prefill(RUN, 8192)["tokens"] == 8211
    assert published_prefill(RUN, 12000) is None and published_prefill(RUN, None) is None


def test_earlier_runs_are_those_of_the_same_deployment_before_this_one():
    other = {**BEFORE, "deployment": "glm"}
    later = bench_samples.bench("20261130T100000Z", 2)
    view = bench_view(RUN, [other, BEFORE, RUN, later])
    assert [one["id"] for one in view["earlier"]] == [BEFORE["id"]]
    assert view["decode"][0]["before"]["tokens_per_second"]["median"] == BEFORE["decode"][0]["tokens_per_second"]["median"]
    assert view["prefill"][0]["before"]["tokens_per_second"] == BEFORE["prefill"][0]["tokens_per_second"]
    assert bench_view(RUN, [])["decode"][0]["before"] is None


def test_memory_is_the_least_of_the_run_and_says_when():
    rows = bench_view(RUN, [])["memory"]
    assert (rows[0]["gib"], rows[0]["during"]) == ("2.56", "prompt of 455,000 tokens")
    assert (rows[1]["gib"], rows[1]["node"]) == ("5.00", "spark-2")


def test_notes_say_what_shares_the_speed():
    assert any("requests of others" in note for note in RUN["notes"]) and any("2 requests at once" in note for note in RUN["notes"])


FAILED = bench_samples.bringup(failed=True)


@pytest.mark.parametrize("text", [page(RUN, [BEFORE]), _pages.render("bringup", view=run_view(FAILED), data=FAILED, version="1")], ids=["bench", "bringup"])
def test_a_page_stands_alone_and_texts_stay_texts(text):
    assert "<script>" not in text and text.count("<script") == 1
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", text)
    assert bench_samples.HOSTILE in json.dumps(data_of(text), ensure_ascii=False).replace('\\"', '"')


def test_the_data_in_a_page_is_its_document():
    assert data_of(page(RUN, [])) == json.loads(json.dumps(RUN))


def test_a_page_of_an_engine_that_answered_nothing():
    empty = {**RUN, "decode": [], "prefill": [], "probes": [], "expected": {}, "notes": [], "skipped": [], "max_model_len": None}
    assert "<svg" not in page(empty, [])


# --- the report of a run ---------------------------------------------------------------------------------------------------


def test_a_run_is_told_stage_by_stage_with_bytes_memory_and_the_way_back():
    run = bench_samples.bringup()
    assert run["verdict"] == "proven" and run["proof"]["text"] == "323"
    assert [(row["node"], row["what"], row["bytes"], row["bytes_per_second"]) for row in run["transfers"]] == [
        ("spark-1", "weights: model", 197 * 2**30, round(197 * 2**30 / 100)),
        ("spark-2", "weight_sync: model", 197 * 2**30, round(197 * 2**30 / 80)),
        ("spark-2", "image", 9 * 2**30, round(9 * 2**30 / 20)),
    ]
    assert run["memory"][0] == {"node": "spark-1", "available_bytes": 4 * 2**30, "during": "the start of the group"}
    assert run["last_good"] == {"proven_at": "2026-11-01T10:00:00+00:00", "profile": "glm_53_flash_exl3"}
    assert run["nodes"][1]["docker"] == "29.2" and run["image"]["identities"] == {"spark-2": "sha256:" + "cd" * 32}


def test_a_replica_counts_among_what_was_moved():
    found = bench_samples.recorder()
    done = {"replica": {"bytes": 100 * bench_samples.GIB, "seconds": 50.0, "snapshot": "sparkops-1", "transport": "zfs"}}
    found.task("weight_sync", "spark-2", "Receive", "sparkops.inference.zfs_receive", 101, 152, "changed", {"changed": True, "done": done})
    moved = found.transfers[-1]
    assert (moved["what"], moved["how"], moved["bytes_per_second"]) == ("weight_sync: replica", "zfs", 2 * bench_samples.GIB)


@pytest.mark.parametrize("proven", [True, False])
def test_the_way_back_is_a_play_where_there_is_one(proven):
    run = bench_samples.bringup()
    if not proven:
        run["last_good"] = {}
    text = _pages.render("bringup", view=run_view(run), data=run, version="1")
    assert ("<code>rollback.yml</code>" in text) == proven and ("nothing to return to" in text) != proven


def test_a_failure_is_the_verdict_and_keeps_its_words():
    run = bench_samples.bringup(failed=True)
    assert run["verdict"] == "failed" and run["failures"][0]["node"] == "spark-2" and "rank 1 ended" in run["failures"][0]["message"]
    assert {row["status"] for row in stage_rows(run["spans"]) if row["node"] == "spark-2" and row["stage"] == "serve"} == {"failed"}


def test_spans_of_one_stage_grow_together_and_a_return_is_a_new_one():
    found = Recorder()
    for stage, begun, ended, status in (("image", 0, 2, "ok"), ("image", 2, 3, "changed"), ("serve", 3, 4, "ok"), ("image", 4, 9, "ok")):
        found.task(stage, "a", "t", "ansible.builtin.debug", begun, ended, status, {})
    assert [(span["stage"], span["begun"], span["ended"], span["status"]) for span in found.spans] == [
        ("image", 0, 3, "changed"), ("serve", 3, 4, "ok"), ("image", 4, 9, "ok"),
    ]  # fmt: skip
    assert [row["seconds"] for row in stage_rows(found.spans)] == [8, 1]


def test_what_changed_nothing_or_only_looked_leaves_no_report():
    quiet = Recorder()
    quiet.task("plan", "a", "t", "sparkops.inference.plan", 0, 1, "ok", {"spark_plan": bench_samples.plan()})
    quiet.task("serve", "a", "t", "ansible.builtin.debug", 1, 2, "ok", {})
    assert not quiet.worth_a_report
    looked = Recorder()
    looked.task("plan", "a", "t", "sparkops.inference.plan", 0, 1, "ok", {"spark_plan": bench_samples.plan()})
    looked.task("status", "a", "t", "ansible.builtin.assert", 1, 2, "failed", {"msg": "half"})
    assert not looked.worth_a_report
    assert bench_samples.recorder().worth_a_report


def test_a_censored_result_is_not_read():
    found = Recorder()
    found.task("serve", "a", "t", "sparkops.inference.serve_proof", 0, 1, "ok", {"censored": "hidden", "proof": {"ok": True}})
    assert found.proof is None


def test_reports_are_kept_and_the_oldest_given_up(tmp_path, monkeypatch):
    found = bench_samples.recorder()
    found.plan["settings"]["report_directory"] = str(tmp_path)
    monkeypatch.setattr(stages, "REPORTS_KEPT", 2)
    paths = [stages.keep_report(found, "", ["Serve"], 1_800_000_000 + 60 * number, 1_800_000_030 + 60 * number) for number in range(3)]
    assert sorted(os.listdir(tmp_path / "deepseek")) == sorted(
        os.path.basename(path).replace("html", ending) for path in paths[1:] for ending in ("html", "json")
    )
    assert data_of((tmp_path / "deepseek" / os.path.basename(paths[2])).read_text(encoding="utf-8"))["seconds"] == 30


def test_reports_lie_in_the_accounts_state_directory(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert _pages.report_directory(None, "x") == "/state/sparkops/reports/x"
    assert _pages.report_directory("/mine", "x") == "/mine/x"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert _pages.report_directory("", "x") == "/home/me/.local/state/sparkops/reports/x"
    assert _pages.report_directory("~/r", "x") == "/home/me/r/x"


def test_what_is_no_document_is_passed_over(tmp_path):
    (tmp_path / "bench-1.json").write_text("{", encoding="utf-8")
    (tmp_path / "bench-2.json").write_text('{"format": 2}', encoding="utf-8")
    (tmp_path / "bench-3.json").write_text('{"format": 1, "id": "3"}', encoding="utf-8")
    (tmp_path / "other-4.json").write_text('{"format": 1, "id": "4"}', encoding="utf-8")
    assert [one["id"] for one in _pages.read_documents(str(tmp_path), "bench")] == ["3"]
    assert _pages.read_documents(str(tmp_path / "nowhere"), "bench") == []


# --- plots -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "greatest, wanted",
    [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (42.5, [0, 10, 20, 30, 40, 50]), (1054, [0, 250, 500, 750, 1000, 1250])],
)
def test_ticks_are_round_and_reach_over_the_greatest(greatest, wanted):
    assert ticks(greatest) == wanted


def test_a_bar_is_as_high_as_its_value():
    drawn = chart("t", "u", [Series("s", "bar", "now", ((0, 5, 5, 5), (1, 10, 8, 10)))], {0: "a", 1: "b"})
    bars = [shape for shape in drawn["shapes"] if shape["kind"] == "rect"]
    assert bars[1]["h"] == 2 * bars[0]["h"] and bars[0]["x"] < bars[1]["x"]
    assert [shape["style"] for shape in drawn["shapes"] if shape["style"] == "whisker"] == ["whisker"]


def test_nothing_measured_is_no_plot():
    assert chart("t", "u", [Series("s", "bar", "now", ())], {}) is None
    assert timeline([], [], 10) is None


def test_a_span_without_length_can_be_seen():
    drawn = timeline(["a"], [{"row": "a", "begun": 5, "ended": 5, "style": "ok", "title": ""}], 100)
    assert next(shape for shape in drawn["shapes"] if shape["kind"] == "rect")["w"] == 1.5
