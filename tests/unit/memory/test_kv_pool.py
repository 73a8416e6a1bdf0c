# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _kv_pool
from ansible_collections.sparkops.inference.plugins.module_utils._memory import to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_data import memory_of

GIB = 1 << 30
DEEPSEEK, GLM, GLM_LATEST = (memory_of(name)["kv"] for name in ("deepseek_v41_flash_exl3", "glm_53_flash_exl3", "glm_53_flash_exl3_latest"))


def published(kv):
    """The serving values, the pool, and the tokens of the published figure."""
    figure = dict(kv["published"])
    return figure, to_bytes(figure.pop("pool")), figure.pop("tokens")


def glm_latest(length, draft_compact=False):
    values = {"batched_tokens": 7168, "speculation": "dflash", "draft_tokens": 7, "draft_compact": draft_compact, "tensor_parallel": 2}
    return {**values, "length": length}


@pytest.mark.parametrize(
    ("kv", "block_tokens"),
    [
        pytest.param(DEEPSEEK, 64, id="774,400 at 2.5 GiB"),
        pytest.param(GLM, 3584, id="982,612 at 15.67 GiB"),
        pytest.param(GLM_LATEST, 3584, id="883,552 at 14 GiB"),
    ],
)
def test_published_figures(kv, block_tokens):
    serving, pool, tokens = published(kv)
    assert abs(_kv_pool.tokens(pool, kv, serving) - tokens) <= block_tokens


def test_deepseek_is_exact_and_not_fitted():
    serving, pool, tokens = published(DEEPSEEK)
    assert _kv_pool.block_bytes(DEEPSEEK) == 3 * (37440 + 8640)
    assert _kv_pool.blocks_per_request(DEEPSEEK, serving, 614400) == 4800 + 9600 + 15 * 67 + 1
    assert _kv_pool.tokens(pool, DEEPSEEK, serving) == tokens
    assert not [group for group in DEEPSEEK["groups"] if group.get("basis") == "measured"]


@pytest.mark.parametrize(
    ("pool", "length", "tokens"),
    [(15032385536, 850000, 883552), (17448304640, 1000000, 1118466)],  # two boots of upstream with a pinned pool
)
def test_glm_latest_gives_every_pinned_figure(pool, length, tokens):
    assert _kv_pool.tokens(pool, GLM_LATEST, glm_latest(length)) == tokens


@pytest.mark.parametrize(("pool", "tokens"), [(11811160064, 1.23e6), (15032385536, 1.57e6)])
def test_glm_latest_with_compact_draft_pages(pool, tokens):
    assert _kv_pool.tokens(pool, GLM_LATEST, glm_latest(850000, draft_compact=True)) == pytest.approx(tokens, abs=5000)


def test_glm_memory_of_one_request():
    """Upstream: a request of a million tokens takes 14.52 GiB, one of 500k 10.98 GiB."""
    sizes = [_kv_pool.smallest_pool(GLM_LATEST, glm_latest(length)) / GIB for length in (1_000_000, 500_000)]
    assert [round(size, 2) for size in sizes] == [14.52, 10.98]


def test_glm_of_the_document_cannot_hold_a_million():
    """The document says so of the same settings; it is the second figure that the fitted constant has to give."""
    serving, pool, dummy = published(GLM)
    assert _kv_pool.largest_length(pool, GLM, serving) < 1_000_000
    assert _kv_pool.smallest_pool(GLM, serving) <= pool


def test_fitted_constants_are_marked():
    fitted = [group for group in GLM["groups"] if group.get("basis") == "measured"]
    assert [group["name"] for group in fitted] == ["draft"]
    assert [group["name"] for group in GLM_LATEST["groups"] if group.get("basis") == "measured"] == ["compact draft"]


def test_speculation_costs_pool():
    serving, pool, tokens = published(DEEPSEEK)
    assert _kv_pool.tokens(pool, DEEPSEEK, {**serving, "speculation": "none"}) > tokens
    serving, pool, tokens = published(GLM)
    without = _kv_pool.tokens(pool, GLM, {**serving, "speculation": "none"})
    assert without > _kv_pool.tokens(pool, GLM, {**serving, "speculation": "mtp", "draft_tokens": 2}) > tokens
    assert without == _kv_pool.tokens(pool, GLM, {**serving, "speculation": "none", "draft_tokens": 0})


@pytest.mark.parametrize(
    ("kv", "change", "message"),
    [
        (None, {}, "no KV geometry"),
        ({}, {}, "no KV geometry"),
        (GLM, {"tensor_parallel": 4}, "only known for tensor parallel 2, not 4"),
        (GLM, {"batched_tokens": None}, "batched_tokens has no value"),
        (GLM, {"length": 0}, "length has no value"),
        ({**GLM, "groups": [{"name": "a", "kind": "ring"}]}, {}, "kind 'ring'"),
    ],
)
def test_what_is_not_known_is_said(kv, change, message):
    serving, pool, dummy = published(GLM)
    with pytest.raises(_kv_pool.KvUnknown, match=message):
        _kv_pool.tokens(pool, kv, {**serving, **change})


@settings(deadline=None)
@given(st.integers(0, 64 * GIB), st.integers(0, GIB), st.sampled_from([DEEPSEEK, GLM, GLM_LATEST]))
def test_more_pool_never_holds_less(pool, more, kv):
    serving = published(kv)[0]
    assert _kv_pool.tokens(pool, kv, serving) <= _kv_pool.tokens(pool + more, kv, serving)


@settings(deadline=None)
@given(st.integers(1, 1 << 20), st.sampled_from([DEEPSEEK, GLM, GLM_LATEST]))
def test_the_smallest_pool_holds_its_length_and_one_block_less_does_not(length, kv):
    serving = {**published(kv)[0], "length": length}
    smallest = _kv_pool.smallest_pool(kv, serving)
    assert _kv_pool.largest_length(smallest, kv, serving) >= length
    assert _kv_pool.largest_length(smallest - 1, kv, serving) < length
    assert _kv_pool.tokens(smallest, kv, serving) == length
