# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Arithmetic of the Engram row files: which rows, which sizes, which header. No data needed."""

from __future__ import annotations

import json
import pathlib

import engram_source as oracle
import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _engram as engram
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused
from hypothesis import given
from hypothesis import strategies as st

VECTORS = json.loads((pathlib.Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
SYNTHETIC = engram.Config(layers=(1, 14), vocabulary=400, heads=4, longest_ngram=3)
REAL = engram.Config(layers=(1, 14), vocabulary=16_000_000, heads=8, longest_ngram=4)


@pytest.mark.parametrize(("config", "vectors"), [(SYNTHETIC, VECTORS["synthetic"]), (REAL, VECTORS["real"])], ids=["synthetic", "real"])
def test_bucket_sizes(config, vectors):
    assert engram.bucket_sizes(config) == {int(layer): tuple(sizes) for layer, sizes in vectors["buckets"].items()}


def test_rows_of_the_real_model():
    sizes = engram.bucket_sizes(REAL)
    assert {str(layer): sum(found) for layer, found in sizes.items()} == VECTORS["real"]["rows"]


# Ranges and sizes of the published checkpoint, for two to four ranks.
REAL_FILES = [
    (2, 1, 0, 0, 192001740, 50688463456),
    (2, 1, 1, 192001740, 384006168, 50689173088),
    (2, 14, 0, 0, 192007016, 50689856320),
    (2, 14, 1, 192007016, 384016682, 50690555920),
    (3, 1, 0, 0, 128000880, 33792236416),
    (3, 1, 1, 128000880, 256002934, 33792546352),
    (3, 1, 2, 256002934, 384006168, 33792857872),
    (3, 14, 0, 0, 128004290, 33793136656),
    (3, 14, 1, 128004290, 256009984, 33793507312),
    (3, 14, 2, 256009984, 384016682, 33793772368),
    (4, 1, 0, 0, 96000564, 25344152992),
    (4, 1, 1, 96000564, 192001740, 25344314560),
    (4, 1, 2, 192001740, 288003654, 25344509392),
    (4, 1, 3, 288003654, 384006168, 25344667792),
    (4, 14, 0, 0, 96003054, 25344810352),
    (4, 14, 1, 96003054, 192007016, 25345050064),
    (4, 14, 2, 192007016, 288011564, 25345204768),
    (4, 14, 3, 288011564, 384016682, 25345355248),
]


@pytest.mark.parametrize(("ranks", "layer", "rank", "low", "high", "size"), REAL_FILES)
def test_files_of_the_real_model(ranks, layer, rank, low, high, size):
    rows = engram.rank_rows(engram.bucket_sizes(REAL)[layer], rank, ranks)
    assert rows == (low, high)
    assert engram.file_size(rows) == size


@given(st.integers(2, 300), st.integers(1, 4), st.integers(2, 4), st.lists(st.integers(0, 60), min_size=1, max_size=3, unique=True))
def test_buckets_agree_with_the_word_for_word_search(vocabulary, heads, longest_ngram, layers):
    found = engram.bucket_sizes(engram.Config(tuple(layers), vocabulary, heads, longest_ngram))
    assert {layer: list(sizes) for layer, sizes in found.items()} == oracle.oracle_buckets(layers, vocabulary, heads, longest_ngram)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_ranks_cover_all_rows_once(sizes, ranks):
    share = -(-len(sizes) // ranks)
    if (ranks - 1) * share >= len(sizes):
        with pytest.raises(Refused, match="leaves a rank without rows"):
            engram.rank_rows(sizes, 0, ranks)
        return
    rows = [engram.rank_rows(sizes, rank, ranks) for rank in range(ranks)]
    assert rows[0].low == 0
    assert rows[-1].high == sum(sizes)
    assert all(left.high == right.low and left.length > 0 for left, right in zip(rows, rows[1:]))


def test_five_ranks_of_eight_columns_are_refused():
    with pytest.raises(Refused) as caught:
        engram.rank_rows(VECTORS["synthetic"]["buckets"]["1"], 0, 5)
    assert caught.value.refusals[0].id == "engram.ranks"
    assert "5 for 8 hash heads" in caught.value.refusals[0].found


# Header

ROWS = engram.Rows(0, 1650)
WANTED = engram.header(1, ROWS, 3396)


def test_header_bytes():
    raw = WANTED.pack()
    assert len(raw) == 4096
    assert raw[:8] == b"DSV1EN41"
    assert raw[:64].hex() == "44535631454e3431010000000000000000000000000000007206000000000000440d0000000000000801000000000000" + "00" * 16


def test_right_header_has_no_problem():
    assert engram.header_problem(WANTED.pack(), WANTED, 0, 2) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"magic": engram.MISREAD_MAGIC}, "magic 'DSV41EN1', the spelling of the comments"),
        ({"magic": 0}, "wanted 'DSV1EN41'"),
        ({"layer": 14}, "layer 14, wanted 1"),
        ({"high": 1698}, "rows [0,1698), which is the even split of older packers; wanted [0,1650)"),
        ({"low": 3, "high": 9}, "which is another split"),
        ({"total": 3397}, "total 3397, wanted 3396"),
        ({"row_bytes": 272}, "row_bytes 272, wanted 264"),
    ],
)
def test_wrong_header_is_explained(changes, said):
    assert said in engram.header_problem(WANTED._replace(**changes).pack(), WANTED, 0, 2)


def test_split_of_the_models_own_converter_is_named():
    """Layer 14 of the real model on three ranks: the two even splits differ by one row."""
    wanted = engram.header(14, engram.rank_rows(engram.bucket_sizes(REAL)[14], 0, 3), 384016682)
    assert "rounded up" in engram.header_problem(wanted._replace(high=128005561).pack(), wanted, 0, 3)
    assert "older packers" in engram.header_problem(wanted._replace(high=128005560).pack(), wanted, 0, 3)


def test_short_and_dirty_headers():
    assert "only 100 bytes" in engram.header_problem(bytes(100), WANTED, 0, 2)
    assert "not zero" in engram.header_problem(WANTED.pack()[:-1] + b"x", WANTED, 0, 2)


# config.json

KEYS = {"engram_layer_ids": [1, 14], "engram_vocab_size": 400, "engram_n_heads": 4, "engram_max_ngram_size": 3}


@pytest.mark.parametrize(
    "content", [KEYS, {"text_config": KEYS}, {"text_config": {"hidden_size": 1}, **KEYS}], ids=["flat", "nested", "flat beside text_config"]
)
def test_both_forms_of_config(content):
    assert engram.Config.from_dict(content) == SYNTHETIC


@pytest.mark.parametrize(
    "change",
    [
        {"engram_layer_ids": None},
        {"engram_layer_ids": []},
        {"engram_layer_ids": [1, 1]},
        {"engram_layer_ids": ["1"]},
        {"engram_vocab_size": "400"},
        {"engram_vocab_size": True},
        {"engram_n_heads": 0},
        {"engram_max_ngram_size": 1},
        {"engram_num_embeddings": [3396]},
    ],
    ids=str,
)
def test_bad_config_names_the_key(change):
    with pytest.raises(Refused) as caught:
        engram.Config.from_dict({**KEYS, **change})
    assert next(iter(change)) in caught.value.refusals[0].thing


@pytest.mark.parametrize("content", [None, [], {}, {"text_config": None}], ids=str)
def test_config_of_another_model(content):
    with pytest.raises(Refused, match="engram_layer_ids"):
        engram.Config.from_dict(content)


# What the engine says

LAYERS = {1: engram.Rows(0, 192001740), 14: engram.Rows(0, 192007016)}
LOG = """\
File-backed Engram layer=1 rank=0/2 rows=[0,192001740) cache=4.0GiB scales=0.0GiB packed=True (not pinned 47GiB UVA)
(Worker_TP0 pid=618) File-backed Engram layer=1 rank=0/2 rows=[0,192001740) cache=0.0GiB packed=True
(Worker_TP0 pid=618) File-backed Engram layer=14 rank=0/2 rows=[0,192007016) cache=0.0GiB packed=True
"""


def test_log_of_a_rank_that_uses_its_files():
    assert engram.log_problems(LOG, 0, 2, LAYERS) == []


def test_log_of_another_rank_does_not_count():
    assert len(engram.log_problems(LOG, 1, 2, LAYERS)) == 2


def test_log_of_a_silent_fallback():
    log = LOG.replace("layer=14 rank=0/2 rows=[0,192007016) cache=0.0GiB packed=True", "layer=14 rank=0/2 rows=[0,192007016) cache=0.0GiB packed=False")
    assert engram.log_problems(log, 0, 2, LAYERS) == ["layer 14: packed=False, the engine reads the checkpoint instead of the row file"]


def test_log_with_other_rows():
    assert "serves rows [0,192001740), the file has [0,5)" in engram.log_problems(LOG, 0, 2, {1: engram.Rows(0, 5)})[0]


def test_log_without_the_reader_says_stop():
    log = LOG + "INFO 11-29 16:45:50 [engram.py:1021] Engram table offloaded to pinned host memory: 192001740 rows x 256, 47.21 GiB per rank\n"
    assert "stop it" in engram.log_problems(log, 0, 2, LAYERS)[0]
