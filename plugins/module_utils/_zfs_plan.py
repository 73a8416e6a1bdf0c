# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Which snapshot goes to a worker, and from which base. Output of zfs in, decisions out; no I/O."""

from __future__ import annotations

import os
import re
import typing as t

PREFIX = "sparkops-"
SNAPSHOT = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_.:-]+")
# Arguments of zfs, before the dataset.
LIST_MOUNTED = ("list", "-H", "-r", "-t", "filesystem", "-o", "name,mounted")


class Snapshot(t.NamedTuple):
    """``guid`` is what both nodes agree on: a name may be used again for other content."""

    name: str
    guid: str
    created: int  # createtxg: order within one pool, whatever its clock said


class Source(t.NamedTuple):
    """The head's dataset."""

    dataset: str
    snapshots: tuple[Snapshot, ...]


class Replica(t.NamedTuple):
    """The worker's dataset. ``snapshots`` are all of it, whoever made them; ``written`` are bytes since the newest; ``below`` are datasets in it."""

    dataset: str
    exists: bool
    snapshots: tuple[Snapshot, ...] = ()
    written: int = 0
    token: str = ""
    below: tuple[str, ...] = ()


class Token(t.NamedTuple):
    """What a resume token is about."""

    dataset: str
    snapshot: str
    guid: str


class Receive(t.NamedTuple):
    """``action``: none, resume, full, or incremental. ``abort``: a left-over state goes first. ``lost``: what only -F could do away with."""

    action: str
    target: Snapshot | None = None
    base: Snapshot | None = None
    abort: str = ""
    lost: tuple[str, ...] = ()
    token: str = ""


def parse_snapshots(text: str) -> tuple[Snapshot, ...]:
    """``zfs list -Hp -t snapshot -o name,guid,createtxg``, oldest first."""
    found = []
    for line in text.splitlines():
        words = line.split("\t")
        if len(words) == 3 and "@" in words[0]:
            found.append(Snapshot(words[0].partition("@")[2], words[1], int(words[2])))
    return tuple(sorted(found, key=lambda snapshot: snapshot.created))


def parse_properties(text: str) -> dict[str, str]:
    """``zfs get -Hp -o property,value``; a property that has no value is left out."""
    return {name: value for name, _tab, value in (line.partition("\t") for line in text.splitlines()) if value and value != "-"}


def parse_size(text: str, name: str = "size") -> int | None:
    """Bytes of a stream from ``zfs send -nP``: a line "size", then the number. ``zfs destroy -np`` has one "reclaim"."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def parse_token(text: str) -> Token | None:
    """``zfs send -nvt TOKEN`` prints what is in it, as name-value pairs."""
    pairs = dict(re.findall(r"(toname|toguid) = (\S+)", text))
    dataset, at, snapshot = pairs.get("toname", "").partition("@")
    if not at or "toguid" not in pairs:
        return None
    return Token(dataset, snapshot, str(int(pairs["toguid"], 0)))


def ours(snapshots: t.Iterable[Snapshot]) -> list[Snapshot]:
    return [snapshot for snapshot in snapshots if SNAPSHOT.fullmatch(snapshot.name)]


def newest(snapshots: t.Iterable[Snapshot]) -> Snapshot | None:
    return max(ours(snapshots), key=lambda snapshot: snapshot.created, default=None)


def common_base(source: Source, replica: Replica) -> Snapshot | None:
    """The newest snapshot that both nodes have, by its GUID."""
    there = {snapshot.guid for snapshot in replica.snapshots}
    return max((snapshot for snapshot in source.snapshots if snapshot.guid in there), key=lambda snapshot: snapshot.created, default=None)


def plan_receive(source: Source, replica: Replica, token: Token | None = None) -> Receive:
    """How the worker gets the head's newest snapshot of ours.

    ``token`` is what the head reads in the worker's token: None when it cannot be sent from there any more. A valid one is resumed,
    even where a newer snapshot exists by now: its bytes are not sent twice, and the next round brings the rest.
    """
    target = newest(source.snapshots)
    abort = ""
    if replica.token:
        held = next((snapshot for snapshot in source.snapshots if token and snapshot.guid == token.guid), None)
        if token and token.dataset == source.dataset and held:
            return Receive("resume", held, token=replica.token)
        abort = f"the head no longer has {token.dataset}@{token.snapshot}" if token else "the head cannot read its token, so the source snapshot is gone"
    if target is None:
        return Receive("none", None, None, abort)
    if not replica.exists:
        return Receive("full", target, None, abort)
    base = common_base(source, replica)
    if base is None:
        # It is destroyed as a whole: what was never in a snapshot goes too, and so does each dataset below.
        lost = (f"all content of {replica.dataset}", *(f"snapshot {replica.dataset}@{snapshot.name}" for snapshot in replica.snapshots))
        return Receive("full", target, None, abort, (*lost, *(f"dataset {name}" for name in replica.below)))
    # Snapshots are sorted by the replica's own order, in which the common one has another createtxg.
    names = [snapshot.guid for snapshot in replica.snapshots]
    newer = replica.snapshots[names.index(base.guid) + 1 :]
    lost = tuple(f"snapshot {replica.dataset}@{snapshot.name}" for snapshot in newer)
    if replica.written and base.guid != target.guid:
        lost += (f"{replica.written} bytes written since {replica.dataset}@{replica.snapshots[-1].name}",)
    if base.guid == target.guid:
        return Receive("none", target, base, abort)
    return Receive("incremental", target, base, abort, lost)


def to_prune(snapshots: t.Sequence[Snapshot], keep: int, needed: t.Collection[str] = ()) -> list[Snapshot]:
    """Our oldest snapshots. Never one that a node may need as its next base, and never somebody else's."""
    mine = sorted(ours(snapshots), key=lambda snapshot: snapshot.created)
    rest = mine[: max(0, len(mine) - max(1, keep))]
    return [snapshot for snapshot in rest if snapshot.guid not in needed]


def to_discard(snapshots: t.Sequence[Snapshot], name: str) -> list[Snapshot] | None:
    """Snapshots that a rollback to ``name`` destroys; None when there is no such snapshot."""
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.created)
    place = next((number for number, snapshot in enumerate(ordered) if snapshot.name == name), None)
    return None if place is None else ordered[place + 1 :]


def parse_mounted(text: str) -> list[str]:
    """The mounted ones of LIST_MOUNTED, inner ones first: in this order they can be unmounted."""
    return [name for name, dummy, mounted in (line.partition("\t") for line in reversed(text.splitlines())) if mounted == "yes"]


def changed_paths(text: str, watched: t.Sequence[str]) -> list[str]:
    """Paths of ``zfs diff -H`` that belong to the trees or manifests; locks and staging do not count."""
    found = []
    for line in text.splitlines():
        words = line.split("\t")
        paths = [unescape(word) for word in words[1:]]
        found += [path for path in paths if any(path == place or path.startswith(place + "/") for place in watched)]
    return found


def unescape(text: str) -> str:
    """zfs diff writes a byte that is not plain as a backslash, a zero, and its number in octal."""
    return os.fsdecode(re.sub(rb"\\0([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), os.fsencode(text)))
