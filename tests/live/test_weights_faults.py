# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A hub that misbehaves, as the user of the play sees it. tests/unit/weights has the same faults in all their variants."""

from __future__ import annotations

import json
import os

import pytest
from conftest import ROOT, on, play
from weights_node import NODE, REPOSITORY, SECOND, THIRD, TOTAL, TREE, WEIGHTS, forget, listed, variables, weights, whole

SHARD = f"sparklab/bulk/{SECOND}"
STATE = os.path.join(os.environ.get("SPARKLAB_CACHE", "/var/cache/sparkops-lab"), "state")
with open(os.path.join(ROOT, "tests/lab/tiny_model.json"), encoding="utf-8") as stream:
    TINY = json.load(stream)
NEWEST, OLDER = TINY["revision"], TINY["revisions"]["older"]["revision"]


@pytest.fixture(name="node", scope="module", autouse=True)
def fixture_node():
    done = play("bootstrap", variables=variables())
    assert done.code == 0, done.text[-3000:]


@pytest.fixture(autouse=True)
def empty(hub):
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    ("kind", "settings", "part"),
    [
        ("rate-limit", {"path": SHARD, "times": 2, "seconds": 2}, "waiting 2 s as it asks"),
        ("rate-limit", {"path": "sparklab/bulk/api/*", "times": 1, "seconds": 2}, "429 (too many requests)"),
        ("stall", {"path": SHARD, "bytes": 300_000, "times": 2}, ""),
        ("cut", {"path": SHARD, "bytes": 400_000, "times": 6}, ""),
        ("corrupt", {"path": SHARD, "times": 1}, "came damaged"),
        ("error", {"path": SHARD, "times": 2, "status": 503}, ""),
    ],
)
def test_what_passes_is_lived_through(hub, kind, settings, part):
    hub.fault(kind, **settings)
    done = weights().end()
    assert done.code == 0 and part in done.text and whole(), done.text[-3000:]
    assert hub.served(REPOSITORY) <= (1.5 if kind == "corrupt" else 1.1) * TOTAL


@pytest.mark.parametrize(
    ("kind", "settings", "parts"),
    [
        ("unauthorized", {"path": "sparklab/bulk/api/*"}, ["weights.hub_unauthorized", "no token was sent", "weights_hub_token"]),
        ("forbidden", {"path": SHARD}, ["weights.hub_forbidden", "licence must be accepted"]),
        ("short", {"path": "sparklab/bulk/" + THIRD}, [THIRD]),
        ("missing", {"path": "sparklab/bulk/config.json"}, ["weights.required", "no config.json"]),
        ("missing", {"path": SHARD}, ["weights.incomplete", SECOND]),
        ("stall", {"path": SHARD, "bytes": 0}, [SECOND, "tried: ranges, library, library without Xet"]),
        ("rate-limit", {"path": "sparklab/bulk/*", "seconds": 60}, ["weights.hub_rate_limit_cap", "60 s more"]),
    ],
)
def test_what_does_not_pass_is_named_and_no_tree_is_called_complete(hub, kind, settings, parts):
    hub.fault(kind, **settings)
    refused = weights(weights_rate_limit_wait=20).end()
    assert refused.code != 0
    for part in [NODE, "wanted", "Next", *parts]:
        assert part in refused.text, refused.text[-3000:]
    assert not {SECOND, THIRD} <= set(listed()) and on(NODE, f"ls {TREE}.manifest.json 2>/dev/null || true") == ""


@pytest.mark.parametrize("who", ["nobody", "stranger", "reader"])
def test_a_gated_model(hub, who):
    with open(os.path.join(STATE, "hub.json"), encoding="utf-8") as stream:
        token = json.load(stream).get(f"{who}_token", "hf_of_nobody")
    done = weights("-vvv", serve_model_repository="sparklab/tiny-llama-gated", serve_model_revision=NEWEST, weights_hub_token=token).end()
    told = {"nobody": "weights.hub_unauthorized", "stranger": "weights.hub_forbidden", "reader": ""}[who]
    assert (done.code == 0) == (who == "reader") and told in done.text, done.text[-3000:]
    assert token not in done.text
    assert on(NODE, f"grep -rlF {token} /var/lib/sparkops /home/carol 2>/dev/null || true") == ""


def commit(of: str) -> str:
    return on(NODE, f"python3 -c \"import json; print(json.load(open('{WEIGHTS}/sparklab--tiny-llama/{of}.manifest.json'))['revision'])\"").strip()


def test_a_branch_is_resolved_once_recorded_and_stays(hub):
    tiny = {"serve_model_repository": "sparklab/tiny-llama", "serve_model_revision": "main"}
    done = weights(**tiny).end()
    assert done.code == 0 and f"is commit {NEWEST} now, and stays at it" in done.text and commit("main") == NEWEST, done.text[-3000:]
    hub.lab("move-ref", OLDER)
    try:
        hub.quiet()
        again = weights(**tiny).end()
        assert again.code == 0 and "changed=0" in again.text and commit("main") == NEWEST and hub.counters() == {}
        assert weights(**tiny, weights_download="refresh").end().code == 0 and commit("main") == OLDER
        # A pin does not care where the branch is.
        pinned = weights(serve_model_repository="sparklab/tiny-llama", serve_model_revision=NEWEST).end()
        assert pinned.code == 0 and commit(NEWEST) == NEWEST
    finally:
        hub.lab("move-ref", NEWEST)


def test_no_room_is_refused_with_numbers_before_the_first_byte(hub):
    refused = weights(weights_space_margin="4 TiB").end()
    assert refused.code != 0 and "weights.space" in refused.text and "4096.1 GiB" in refused.text, refused.text[-3000:]
    assert hub.served(f"{REPOSITORY}/model-") == 0 and listed() == {}


def test_folders_that_are_not_there_are_no_reason_to_fail(hub):
    done = weights(weights_adopt_from=["~/.cache/huggingface/hub", "/nowhere"]).end()
    assert done.code == 0 and whole(), done.text[-3000:]
