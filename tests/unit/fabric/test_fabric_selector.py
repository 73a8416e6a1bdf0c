# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""NCCL's selector of devices: R2 (selector rows), A5, A6, A11."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.sparkops.inference.plugins.module_utils import _nccl_selector as selector

PORTS = [("rocep1s0f0", 1), ("rocep1s0f1", 1), ("roceP2p1s0f0", 1), ("roceP2p1s0f1", 1)]
COUNTS = {name: 1 for name, dummy in PORTS}


def names(text: str) -> list[str]:
    return [name for name, dummy in selector.expand(selector.parse(text), PORTS).ports]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rocep1s0f1", ["rocep1s0f1"]),
        ("=rocep1s0f1,roceP2p1s0f1", ["rocep1s0f1", "roceP2p1s0f1"]),
        ("= rocep1s0f1 , roceP2p1s0f1 ", ["rocep1s0f1", "roceP2p1s0f1"]),
        ("^=rocep1s0f0", ["rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"]),
        ("^rocep1s0f", ["roceP2p1s0f0", "roceP2p1s0f1"]),
        ("rocep1s0f1:1", ["rocep1s0f1"]),
        ("rocep1s0f1,", ["rocep1s0f1"]),
        (",rocep1s0f1,,rocep1s0f1:1,rocep1s0f1", ["rocep1s0f1"]),
        ("rocep1s0f", ["rocep1s0f0", "rocep1s0f1"]),
        ("roce", [name for name, dummy in PORTS]),
        ("^=rocep1s0f0,rocep1s0f1,roceP2p1s0f0,roceP2p1s0f1", []),
    ],
)
def test_expands_as_meant(text, wanted):
    assert names(text) == wanted


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "names no device"),
        ("   ", "names no device"),
        ("=", "names no device"),
        ("^", "names no device"),
        ("^=,", "names no device"),
        ("=a,=b", "'=b' is not a device name"),
        ("=^rocep1s0f1", "is not a device name"),
        ("rocep1s0f1 roceP2p1s0f1", "is not a device name"),
        (":1", "is not a device name"),
        ("rocep1s0f1:", "is not a port"),
        ("rocep1s0f1:0", "is not a port"),
        ("rocep1s0f1:-1", "is not a port"),
        ("rocep1s0f1:+1", "is not a port"),
        ("rocep1s0f1:256", "is not a port"),
        ("rocep1s0f1:4294967295", "is not a port"),
        ("rocep1s0f1:18446744073709551615", "is not a port"),
        ("rocep1s0f1:1:1", "is not a port"),
        ("rocep1s0f1:x", "is not a port"),
        ("rocep1s0f1:１", "is not a port"),
        ("rocep1s0f9", "matches no device; the devices are: roceP2p1s0f0"),
        ("=rocep1s0f", "matches no device"),
        ("rocep1s0f1:2", "'rocep1s0f1:2' matches no device"),
        ("^=rocep1s0f9", "matches no device"),
    ],
)
def test_refuses_what_is_no_selector_or_no_device(text, part):
    with pytest.raises(selector.SelectorError, match=".*") as caught:
        selector.expand(selector.parse(text), PORTS)
    assert part in str(caught.value)


def test_a_whole_name_is_never_widened_by_prefix_matching():
    ports = [("mlx5_1", 1), ("mlx5_10", 1), ("mlx5_11", 1)]
    found = selector.expand(selector.parse("mlx5_1"), ports)
    assert found.ports == (("mlx5_1", 1),)
    assert "mlx5_10, mlx5_11" in found.notices[0]
    assert selector.expand(selector.parse("=mlx5_1"), ports).notices == ()


def test_only_whole_names_count_as_named():
    assert selector.expand(selector.parse("rocep1s0f"), PORTS).named == frozenset()
    assert selector.expand(selector.parse("^=rocep1s0f0"), PORTS).named == frozenset()
    assert selector.expand(selector.parse("rocep1s0f1"), PORTS).named == {("rocep1s0f1", 1)}


def test_emits_the_exact_form_with_ports_only_where_a_device_has_several():
    assert selector.emit([("rocep1s0f1", 1), ("roceP2p1s0f1", 1)], COUNTS) == "=rocep1s0f1,roceP2p1s0f1"
    assert selector.emit([("mlx4_0", 2)], {"mlx4_0": 2}) == "=mlx4_0:2"
    assert selector.emit([], {}) == ""


@given(st.lists(st.sampled_from(PORTS), unique=True, min_size=1))
def test_what_is_emitted_means_the_same_ports_again(ports):
    text = selector.emit(ports, COUNTS)
    assert set(selector.expand(selector.parse(text), PORTS).ports) == set(ports)


@given(st.text(alphabet="^=,: roceP2p1s0f19-_.x", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        found = selector.expand(selector.parse(text), PORTS)
    except selector.SelectorError:
        return
    assert set(found.ports) <= set(PORTS)
