# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which snapshot goes to a worker, and from which base."""

from __future__ import annotations

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _zfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._zfs_plan import Replica, Snapshot, Source, Token
from hypothesis import given
from hypothesis import strategies as st


def snap(number: int, guid: str = "", name: str = "") -> Snapshot:
    return Snapshot(name or f"sparkops-{number}", guid or f"g{number}", number)


def source(*snapshots: Snapshot) -> Source:
    return Source("tank/weights", snapshots)


def replica(*snapshots: Snapshot, **more) -> Replica:
    return Replica("pool/copy", more.pop("exists", True), snapshots, **more)


ONE, TWO, THREE = snap(10), snap(20), snap(30)


@pytest.mark.parametrize(
    ("head", "worker", "action", "base", "lost"),
    [
        (source(ONE), replica(exists=False), "full", None, 0),
        (source(ONE), replica(ONE), "none", ONE, 0),
        (source(ONE, TWO), replica(ONE), "incremental", ONE, 0),
        (source(ONE, TWO, THREE), replica(ONE, TWO), "incremental", TWO, 0),
        # The base is the newest that both have, even where the worker has pruned more.
        (source(ONE, TWO, THREE), replica(TWO), "incremental", TWO, 0),
        # A name that was used again for other content is another snapshot.
        (source(snap(10, "new"), TWO), replica(snap(10, "old")), "full", None, 2),
        (source(ONE, TWO), replica(ONE, snap(15, "own", "by-hand")), "incremental", ONE, 1),
        (source(ONE, TWO), replica(ONE, written=4096), "incremental", ONE, 1),
        (source(TWO), replica(ONE), "full", None, 2),
        (source(ONE), replica(), "full", None, 1),
        # Snapshots of others are never what is sent, but may be the base.
        (source(snap(5, "", "daily"), ONE), replica(snap(5, "", "daily")), "incremental", snap(5, "", "daily"), 0),
        (source(snap(5, "", "daily")), replica(exists=False), "none", None, 0),
    ],
)
def test_the_base_is_chosen_by_guid(head, worker, action, base, lost):
    step = _zfs_plan.plan_receive(head, worker)
    assert (step.action, step.base, len(step.lost)) == (action, base, lost)
    assert step.target == _zfs_plan.newest(head.snapshots)


def test_what_would_be_lost_is_named():
    step = _zfs_plan.plan_receive(source(ONE, TWO), replica(ONE, snap(15, "own", "by-hand"), written=4096))
    assert step.lost == ("snapshot pool/copy@by-hand", "4096 bytes written since pool/copy@by-hand")


def test_a_dataset_that_goes_as_a_whole_is_named_with_all_that_is_in_it():
    """By mistake it may be one that holds more than model files."""
    step = _zfs_plan.plan_receive(source(ONE), replica(snap(9, "own", "daily"), below=("pool/copy/home", "pool/copy/disk")))
    assert step.lost == ("all content of pool/copy", "snapshot pool/copy@daily", "dataset pool/copy/home", "dataset pool/copy/disk")


TOKEN = "1-e0-deadbeef"


@pytest.mark.parametrize(
    ("token", "action", "abort"),
    [
        (Token("tank/weights", "sparkops-20", "g20"), "resume", ""),
        # The source snapshot was pruned, or made anew under its name.
        (Token("tank/weights", "sparkops-20", "other"), "incremental", "no longer has tank/weights@sparkops-20"),
        (Token("tank/else", "sparkops-20", "g20"), "incremental", "no longer has tank/else@sparkops-20"),
        (None, "incremental", "cannot read its token"),
    ],
)
def test_a_left_over_receive_is_resumed_or_given_up_and_said(token, action, abort):
    step = _zfs_plan.plan_receive(source(ONE, TWO, THREE), replica(ONE, token=TOKEN), token)
    assert step.action == action and abort in step.abort and bool(abort) == bool(step.abort)
    assert step.token == (TOKEN if action == "resume" else "")


def test_a_resumed_receive_goes_to_its_own_snapshot_even_where_a_newer_one_is():
    step = _zfs_plan.plan_receive(source(ONE, TWO, THREE), replica(ONE, token=TOKEN), Token("tank/weights", "sparkops-20", "g20"))
    assert step.target == TWO and not step.base


def test_the_words_of_a_token():
    # Of ZFS 2.3.9; zfs list said 901736785980915416 of that snapshot.
    text = """resume token contents:
nvlist version: 0
\tobject = 0x4
\toffset = 0xa00000
\tbytes = 0xb02098
\ttoguid = 0xc839cd4494b7ed8
\ttoname = tank/weights@sparkops-20261130T002703Z
\tlargeblockok = 1
\tembedok = 1
\tcompressok = 1
full send of tank/weights@sparkops-20261130T002703Z estimated size is 17.7M
total estimated size is 17.7M
"""
    assert _zfs_plan.parse_token(text) == Token("tank/weights", "sparkops-20261130T002703Z", "901736785980915416")
    assert _zfs_plan.parse_token("cannot resume send: 'tank/weights@sparkops-20' used in the initial send no longer exists") is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("full\ttank/weights@sparkops-1\t1048576\nsize\t1048576\n", 1048576),
        ("incremental\tsparkops-1\ttank/weights@sparkops-2\t624\nsize\t624\n", 624),
        ("", None),
    ],
)
def test_the_size_of_a_stream(text, size):
    assert _zfs_plan.parse_size(text) == size


def test_snapshots_come_in_the_order_of_their_pool_and_not_of_their_names():
    text = "p/d@sparkops-b\t7\t30\np/d@sparkops-a\t8\t40\np/d@daily\t9\t20\nnonsense\n"
    assert [item.name for item in _zfs_plan.parse_snapshots(text)] == ["daily", "sparkops-b", "sparkops-a"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), unique_by=lambda item: item[1]), st.integers(1, 5), st.data())
def test_pruning_never_takes_the_newest_a_needed_one_or_somebody_elses(items, keep, data):
    snapshots = [Snapshot(f"sparkops-{number}" if mine else f"daily-{number}", str(number), number) for mine, number in items]
    needed = data.draw(st.sets(st.sampled_from([item.guid for item in snapshots]))) if snapshots else set()
    gone = _zfs_plan.to_prune(snapshots, keep, needed)
    mine = sorted((item for item in snapshots if item.name.startswith("sparkops-")), key=lambda item: item.created)
    assert set(gone) <= set(mine) - set(mine[len(mine) - min(keep, len(mine)) :])
    assert not {item.guid for item in gone} & needed
    assert all(item.guid in needed for item in set(mine[: max(0, len(mine) - keep)]) - set(gone))


@given(st.lists(st.integers(1, 50), unique=True), st.lists(st.integers(1, 50), unique=True), st.integers(0, 3))
def test_a_plan_ends_where_the_head_is_or_says_what_it_costs(head, worker, written):
    """Following the plan without loss always makes the head's newest the worker's newest."""
    theirs = source(*[snap(number) for number in sorted(head)])
    ours = replica(*[snap(number) for number in sorted(worker)], exists=bool(worker), written=written)
    step = _zfs_plan.plan_receive(theirs, ours)
    if not head:
        assert step.action == "none"
    elif step.action == "none":
        assert step.target.guid in {item.guid for item in ours.snapshots}
    elif step.action == "incremental":
        assert step.base in theirs.snapshots and step.base in ours.snapshots and step.target == theirs.snapshots[-1]
        kept = [item for item in ours.snapshots if f"snapshot pool/copy@{item.name}" not in step.lost]
        assert kept[-1] == step.base
        assert step.base not in theirs.snapshots or all(item.created <= step.base.created or item not in ours.snapshots for item in theirs.snapshots)
    else:
        assert not set(theirs.snapshots) & set(ours.snapshots)
        assert not worker or step.lost


def test_only_trees_and_manifests_make_a_snapshot_worthwhile():
    watched = ["/w/acme--tiny/c", "/w/acme--tiny/c.manifest.json"]
    text = "M\t/w/acme--tiny/\nM\t/w/acme--tiny/c.lock\n+\t/w/.sparkops-incoming/acme--tiny/c/x\n"
    assert _zfs_plan.changed_paths(text, watched) == []
    assert _zfs_plan.changed_paths(text + "M\t/w/acme--tiny/c/model.safetensors\n", watched) == ["/w/acme--tiny/c/model.safetensors"]
    assert _zfs_plan.changed_paths("R\t/w/x\t/w/acme--tiny/c/with\\0040space\n", watched) == ["/w/acme--tiny/c/with space"]
    assert _zfs_plan.changed_paths("M\t/mod\\0303\\0250les/c/\\0134\n", ["/modèles/c"]) == ["/modèles/c/\\"]


def test_a_rollback_names_what_it_destroys():
    assert _zfs_plan.to_discard([ONE, TWO, THREE], "sparkops-20") == [THREE]
    assert _zfs_plan.to_discard([ONE], "sparkops-10") == []
    assert _zfs_plan.to_discard([ONE], "sparkops-11") is None
