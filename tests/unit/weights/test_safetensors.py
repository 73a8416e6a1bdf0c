# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Safetensors headers: what is damage and what is not."""

from __future__ import annotations

import json
import struct

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _safetensors as safetensors
from hypothesis import given
from hypothesis import strategies as st


def document(tensors: dict, data: bytes = b"") -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + data


GOOD = {"__metadata__": {"format": "pt"}, "t": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (document(GOOD, b"x" * 16), None),
        (document({}, b""), None),
        (document(GOOD, b"x" * 9), "but its header promises"),
        (document(GOOD, b"x" * 17), "but its header promises"),
        (b"", "too short"),
        (b"1234567", "too short"),
        (struct.pack("<Q", 2**40) + b"{}", "out of range"),
        (struct.pack("<Q", 100) + b"{}", "cut after"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{x", "not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not JSON"),
        (document({"t": {"data_offsets": [4, 0]}}), "no valid data_offsets"),
        (document({"t": {"data_offsets": [0]}}), "no valid data_offsets"),
        (document({"t": {"data_offsets": [0, True]}}), "no valid data_offsets"),
        (document({"t": 3}), "no valid data_offsets"),
    ],
)
def test_check_file(tmp_path, content, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    found = safetensors.check_file(path)
    assert found is None if text is None else text in found


def test_a_missing_file_is_a_finding(tmp_path):
    assert "No such file" in safetensors.check_file(tmp_path / "absent")


@given(st.binary(max_size=200))
def test_no_content_crashes_the_reader(content):
    try:
        safetensors.parse_header(content)
    except safetensors.BadSafetensors:
        pass


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=6))
def test_the_promised_size_is_that_of_the_last_tensor(ranges):
    tensors = {name: {"dtype": "U8", "data_offsets": sorted(ends)} for name, ends in ranges.items()}
    raw = json.dumps(tensors).encode()
    header = safetensors.parse_header(raw)
    assert header.file_size == 8 + len(raw) + max((max(ends) for ends in ranges.values()), default=0)
