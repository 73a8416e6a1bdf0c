# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The pages in a real browser: they render, show the numbers of their run, and their plots are really painted."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
from browser import boxes, browser, cells, dom, painted, screenshot

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests/unit/bench"))

import bench_samples  # noqa: E402

from ansible_collections.sparkops.inference.plugins.action.bench_record import page  # noqa: E402
from ansible_collections.sparkops.inference.plugins.plugin_utils._pages import render  # noqa: E402
from ansible_collections.sparkops.inference.plugins.plugin_utils._run_record import run_view  # noqa: E402

BENCH, BEFORE = bench_samples.bench("20261129T100000Z", 1.0), bench_samples.bench("20261101T100000Z", 0.9)
RUNS = {False: bench_samples.bringup(), True: bench_samples.bringup(failed=True)}


def value_at(document, key):
    """decode.0.tokens_per_second.median of a document; None where a part of the way is not there."""
    for part in key.split("."):
        document = document[int(part)] if isinstance(document, list) else (document or {}).get(part)
    return document


def same_numbers(document, run):
    """Every cell that names a number of the run shows it."""
    shown = cells(document, "data-key")
    for key, text in shown.items():
        wanted = value_at(run, key)
        assert text == ("" if wanted is None else str(wanted)), key
    return shown


@pytest.fixture(name="write")
def fixture_write(tmp_path):
    def write(text):
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_there_is_a_browser():
    assert browser(), "none of the browsers that tests/setup.sh installs was found"


def test_the_benchmark_shows_the_numbers_of_its_run(write):
    document = dom(write(page(BENCH, [BEFORE])))
    shown = same_numbers(document, BENCH)
    assert len(shown) >= 4 * len(BENCH["decode"]) + 3 * len(BENCH["prefill"])
    assert shown["decode.0.tokens_per_second.median"] == "31.6" and shown["prefill.0.first_token_s"] == str(BENCH["prefill"][0]["first_token_s"])
    # No text of the model became a script: the title is still ours.
    assert re.search(r"<title>DeepSeek-v4.1-Flash-EXL3: benchmark of", document)
    assert json.loads(cells(document, "id")["data"]) == json.loads(json.dumps(BENCH))


def test_its_plots_are_painted(write, tmp_path):
    path = write(page(BENCH, [BEFORE]))
    places = boxes(path, str(tmp_path))
    assert [place["name"] for place in places] == ["Decode", "Prefill", "Least available memory", "Accepted drafts by position"]
    image = screenshot(path, str(tmp_path))
    for place in places:
        seen = painted(image, place)
        assert seen["pixels"] > 20000 and seen["coloured"] > 100, place["name"]


def test_a_plot_without_marks_would_be_noticed(write, tmp_path):
    """The check above can fail: without bars, lines and dots no coloured pixel is left."""
    text = re.sub(r"<(rect|circle|path)[^>]*?(/>|>.*?</\1>)", "", page(BENCH, [BEFORE]), flags=re.DOTALL)
    path = write(re.sub(r'<line class="stroke[^>]*>.*?</line>', "", text))
    image = screenshot(path, str(tmp_path))
    assert {painted(image, place)["coloured"] for place in boxes(path, str(tmp_path))} == {0}


@pytest.mark.parametrize("failed", [False, True])
def test_the_report_of_a_bring_up_shows_its_run(write, tmp_path, failed):
    run = RUNS[failed]
    path = write(render("bringup", view=run_view(run), data=run, version="0.1.0"))
    document = dom(path)
    assert same_numbers(document, run)["verdict"] == ("failed" if failed else "proven")
    assert cells(document, "data-bytes").keys() == {str(row["bytes"]) for row in run["transfers"]} | {str(row["available_bytes"]) for row in run["memory"]}
    assert json.loads(cells(document, "id")["data"]) == json.loads(json.dumps(run))
    assert ("rank 1 ended" in document) is failed
    place = boxes(path, str(tmp_path))[0]
    assert place["name"] == "Stages by node" and painted(screenshot(path, str(tmp_path)), place)["coloured"] > 300
