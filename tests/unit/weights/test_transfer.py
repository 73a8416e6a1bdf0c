# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The ranged fetcher against a source in memory that fails in all the ways a network can."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _transfer
from ansible_collections.sparkops.inference.plugins.module_utils._hub import HubError, Patience
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONTENT = random.Random(1).randbytes(1_000_003)


class Memory:
    """A source that serves ``content`` and follows a script of failures, one per request."""

    def __init__(self, content=CONTENT, script=(), cut_every=0):
        self.content = content
        self.script = list(script)
        self.cut_every = cut_every
        self.served = 0
        self.requests = 0
        self.renewed = 0
        self.lock = threading.Lock()

    def renew(self):
        self.renewed += 1

    def stream(self, start, end, block):
        with self.lock:
            self.requests += 1
            fault = self.script.pop(0) if self.script else None
            number = self.requests
        if isinstance(fault, HubError):
            raise HubError(fault.kind, fault.text, fault.wait)
        if fault == "stall":
            time.sleep(30)
        position = start
        while position < end:
            piece = self.content[position : min(end, position + min(block, 10_000))]
            with self.lock:
                self.served += len(piece)
            yield piece
            position += len(piece)
            if fault == "cut" or (self.cut_every and number % self.cut_every == 0):
                return
            if fault == "more" and position >= end:
                yield b"x"


def fetcher(path, source, said=None, cap=100, **options):
    patience = Patience(cap, (said if said is not None else []).append, lambda seconds: None)
    return _transfer.RangeFetcher(source, str(path), len(source.content), "identity", patience, **{"streams": 4, "smallest_part": 50_000, **options})


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_whole_file(tmp_path):
    source = Memory()
    fetcher(tmp_path / "x", source).run()
    assert digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()
    assert source.served == len(CONTENT)


def test_cuts_cost_nothing_but_the_requests(tmp_path):
    source = Memory(cut_every=2)
    fetcher(tmp_path / "x", source).run()
    assert digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()
    assert source.served == len(CONTENT)


def test_an_expired_address_is_renewed(tmp_path):
    source = Memory(script=[HubError("expired", "gone")])
    fetcher(tmp_path / "x", source).run()
    assert source.renewed == 1 and digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()


def test_too_many_requests_are_waited_out_and_said(tmp_path):
    said = []
    source = Memory(script=[HubError("rate_limited", "the hub answered 429", 3)])
    fetcher(tmp_path / "x", source, said).run()
    assert said == ["the hub answered 429; waiting 3 s as it asks"]


def test_the_cap_on_waiting_ends_the_attempt(tmp_path):
    source = Memory(script=[HubError("rate_limited", "429", 300)])
    with pytest.raises(HubError) as caught:
        fetcher(tmp_path / "x", source, cap=10).run()
    assert caught.value.kind == "rate_limit_cap"


@pytest.mark.parametrize("kind", ["forbidden", "unauthorized", "not_found", "no_ranges", "short", "protocol"])
def test_what_trying_again_cannot_mend_ends_at_once(tmp_path, kind):
    source = Memory(script=[HubError(kind, "no")] * 50)
    with pytest.raises(HubError) as caught:
        fetcher(tmp_path / "x", source).run()
    assert caught.value.kind == kind and source.requests <= 4


def test_more_bytes_than_asked_for_are_refused(tmp_path):
    with pytest.raises(HubError, match="more than was asked for"):
        fetcher(tmp_path / "x", Memory(script=["more"] * 50)).run()


def test_a_stall_is_seen_by_the_bytes_on_disk(tmp_path):
    source = Memory(script=["stall"] * 4)
    began = time.monotonic()
    fetch = fetcher(tmp_path / "x", source, stall_seconds=1)
    monitor = threading.Thread(target=lambda: fetch._watch([threading.current_thread()]), daemon=True)
    monitor.start()
    monitor.join(5)
    assert isinstance(fetch._error, _transfer.Stalled) and time.monotonic() - began < 4


def test_a_second_attempt_fetches_only_what_lacks(tmp_path):
    failing = Memory(script=[None] * 6 + [HubError("forbidden", "no")] * 50)
    with pytest.raises(HubError):
        fetcher(tmp_path / "x", failing).run()
    source = Memory()
    fetcher(tmp_path / "x", source).run()
    assert digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()
    assert failing.served + source.served == len(CONTENT) and source.served < len(CONTENT)


def test_other_settings_do_not_void_what_is_there(tmp_path):
    failing = Memory(script=[None] * 6 + [HubError("forbidden", "no")] * 50)
    with pytest.raises(HubError):
        fetcher(tmp_path / "x", failing).run()
    source = Memory()
    fetcher(tmp_path / "x", source, smallest_part=7_777, streams=2).run()
    assert digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()
    assert failing.served + source.served == len(CONTENT)


def test_after_a_reboot_only_flushed_parts_count(tmp_path, monkeypatch):
    failing = Memory(script=[None] * 3 + ["cut", HubError("forbidden", "no")] + [HubError("forbidden", "no")] * 50)
    with pytest.raises(HubError):
        fetcher(tmp_path / "x", failing, streams=1).run()
    monkeypatch.setattr(_transfer, "boot_id", lambda: "another boot")
    journal = _transfer.Journal(str(tmp_path / "x.journal"), "identity", len(CONTENT), 1)
    whole = [number for number in range(journal.count) if journal.done[number]]
    assert len(whole) == 3 and all(journal.done[number] == journal.length(number) for number in whole)


def test_another_file_starts_from_zero(tmp_path):
    fetcher(tmp_path / "x", Memory()).run()
    other = _transfer.Journal(str(tmp_path / "x.journal"), "other identity", len(CONTENT), 50_000)
    assert set(other.done) == {0}


@pytest.mark.parametrize("damage", [b"", b"rubbish", b"{}" + b"\0" * 5000, b"\xff" * 9000])
def test_a_damaged_journal_starts_from_zero(tmp_path, damage):
    (tmp_path / "x.journal").write_bytes(damage)
    source = Memory()
    fetcher(tmp_path / "x", source).run()
    assert digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()


def test_a_file_that_lost_its_tail_is_not_trusted(tmp_path):
    fetcher(tmp_path / "x", Memory()).run()
    os.truncate(tmp_path / "x", 400_000)
    source = Memory()
    fetcher(tmp_path / "x", source).run()
    assert digest(tmp_path / "x") == hashlib.sha256(CONTENT).hexdigest()
    assert source.served >= len(CONTENT) - 400_000


@given(size=st.integers(1, 10**12), streams=st.integers(1, 64), smallest=st.integers(1, 10**9))
def test_parts_cover_the_file_and_are_few(size, streams, smallest):
    part = _transfer.part_size(size, streams, smallest)
    count = -(-size // part)
    assert count * part >= size and count <= max(1, streams * 4)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(st.sampled_from([None, "cut", HubError("cut", "cut"), HubError("server", "500")]), max_size=12),
    size=st.integers(1, 120_000),
    part=st.integers(500, 200_000),
)
def test_any_mix_of_cuts_gives_the_file(tmp_path_factory, script, size, part):
    folder = tmp_path_factory.mktemp("any")
    source = Memory(CONTENT[:size], script)
    source_fetcher = fetcher(folder / "x", source, smallest_part=part)
    source_fetcher._stop.wait = lambda seconds: None  # no need to wait between attempts
    try:
        source_fetcher.run()
    except HubError as error:
        assert error.kind in ("cut", "server")  # more failures in a row than one part is allowed
        return
    assert (folder / "x").read_bytes() == CONTENT[:size]
