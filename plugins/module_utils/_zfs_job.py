# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The program of the receive unit on a worker: bring the head's newest snapshot into the replica, and go on where an earlier run ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _unit, _zfs_command, _zfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import gib
from ansible_collections.sparkops.inference.plugins.module_utils._node_copy import CopyError, Peer
from ansible_collections.sparkops.inference.plugins.module_utils._sync_job import ATTEMPTS, LINK_PAUSE
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, Transfer
from ansible_collections.sparkops.inference.plugins.module_utils._zfs_plan import Receive, Replica, Source, Token

TRANSIENT = ("link", "stalled")
# A resumed stream may be followed by one that brings what came since; more rounds than this mean that nothing settles.
ROUNDS = 4
ASK_SECONDS = 120
BLOCK = 1024 * 1024
F_SETPIPE_SZ = 1031  # fcntl has the name since Python 3.10
PROGRAM_PATHS = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin"
INCOMPLETE = "incomplete stream"
WORDS = (
    ("out of space", "zfs_space"),
    ("permission denied", "zfs_rights"),
    ("has been modified", "zfs_diverged"),
    ("does not match incremental source", "zfs_diverged"),
    ("must specify -F", "zfs_diverged"),
    ("checksum mismatch", "zfs_stream"),
    ("is busy", "zfs_busy"),
)


class ReceiveError(Exception):
    """A receive ended early. ``kind`` decides what the user is told."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


GATE_STEP = "run the bootstrap play with bootstrap_node_keys"
NEXT_STEP = {
    "key": GATE_STEP,
    "host_key": GATE_STEP,
    "gate": GATE_STEP,
    "zfs_space": "free space in the pool, or set weight_sync_zfs_dataset to another pool",
    "zfs_rights": "run the sync play with become, which delegates the rights (zfs allow)",
    "zfs_diverged": "set weight_sync_zfs_discard to true, which gives up what the message names",
    "zfs_used": "run stop.yml first; the sync play with become unmounts what nobody reads",
    "zfs_busy": "find the other receive (zpool status, ps), or end it",
    "zfs_stream": "check both pools (zpool status), then run again",
}


def zfs_program() -> str:
    return shutil.which("zfs", path=f"{os.environ.get('PATH', '')}:{PROGRAM_PATHS}") or "zfs"


class ReceiveJob(Transfer):
    """One replica on its way to the head's newest snapshot."""

    area = "sync"

    def __init__(self, request: dict[str, t.Any], progress: Progress) -> None:
        super().__init__(request, progress)
        self.dataset: str = request["dataset"]
        self.zfs = zfs_program()
        self.peer = Peer.from_dict(request["source"], request["key"], request["known_hosts"])
        self.received = 0

    # Looking

    def local(self, *argv: str) -> tuple[int, str, str]:
        try:
            code, out, err = _zfs_command.answer([self.zfs, *argv])
        except _zfs_command.Silent as exc:
            raise Refused(exc.refusal(self.node)) from None
        return code, out, err.strip()

    def remote(self, *words: str) -> str:
        """One question to the head's gate."""
        try:
            # pylint: disable-next=ansible-bad-function
            done = subprocess.run(
                [*self.peer.ssh(), shlex.join(words)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=ASK_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise CopyError("link", f"{self.peer.user}@{self.peer.address}: no answer for {ASK_SECONDS} s") from None
        if done.returncode:
            raise self.peer.explain(done.stderr, done.returncode)
        return done.stdout

    def source(self) -> Source:
        answer = json.loads(self.remote("zfs-list"))
        return Source(answer["dataset"], _zfs_plan.parse_snapshots(answer["snapshots"]))

    def replica(self) -> Replica:
        code, out, _err = self.local("get", "-Hp", "-o", "property,value", "type,written,receive_resume_token", self.dataset)
        if code:
            return Replica(self.dataset, False)
        found = _zfs_plan.parse_properties(out)
        _code, listed, _err = self.local("list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid,createtxg", self.dataset)
        snapshots = _zfs_plan.parse_snapshots(listed)
        # A first receive that was cut leaves a dataset with a token and without any snapshot.
        exists = bool(snapshots) or "receive_resume_token" not in found
        _code, tree, _err = self.local("list", "-Hp", "-r", "-t", "filesystem,volume", "-o", "name", self.dataset)
        below = tuple(name for name in tree.splitlines() if name != self.dataset)
        return Replica(self.dataset, exists, snapshots, int(found.get("written", 0)), found.get("receive_resume_token", ""), below)

    def token(self, replica: Replica) -> Token | None:
        if not replica.token:
            return None
        try:
            return _zfs_plan.parse_token(self.remote("zfs-token", replica.token))
        except CopyError as exc:
            if exc.kind in ("gate", "source"):
                return None
            raise

    # Acting

    def run(self) -> dict[str, t.Any]:
        began, changed, rounds, failures = time.monotonic(), False, 0, 0
        held = self.replica()
        try:
            while True:
                try:
                    source, step = self.look()
                    if step.action == "none" and not step.abort:
                        break
                    if rounds == ROUNDS:
                        found = f"not in line after {ROUNDS} rounds"
                        raise self.refuse("zfs_stream", f"dataset {self.dataset}", found, "the head's newest snapshot", "run again")
                    changed = True
                    self.act(step)
                    rounds += 1
                except CopyError as exc:
                    # Bytes that arrived are no progress until they are kept, which the token tells.
                    before, held = held, self.replica()
                    failures = failures + 1 if held == before else 1
                    if exc.kind not in TRANSIENT or failures >= ATTEMPTS:
                        raise
                    if exc.kind == "link":
                        time.sleep(LINK_PAUSE)
        except CopyError as exc:
            raise self.refuse(
                exc.kind,
                f"{self.dataset} from {self.peer.node} ({self.peer.user}@{self.peer.address})",
                exc.text,
                "a stream of the head's snapshot",
                NEXT_STEP.get(exc.kind, "check the link, then run again: what arrived is kept"),
            ) from None
        if step.target is None:
            raise self.refuse(
                "zfs_no_snapshot",
                f"dataset {source.dataset} on {self.peer.node}",
                "no snapshot of ours",
                "one",
                "run the sync play for all ranks",
            )
        return {
            "changed": changed,
            "artefacts": {"replica": {"bytes": self.received, "seconds": round(time.monotonic() - began, 2), "snapshot": step.target.name, "transport": "zfs"}},
            "notices": self.notices,
            "snapshot": step.target._asdict(),
        }

    def look(self) -> tuple[Source, Receive]:
        source, replica = self.source(), self.replica()
        return source, _zfs_plan.plan_receive(source, replica, self.token(replica))

    def act(self, step: Receive) -> None:
        """One step: a left-over state goes first, and what follows is decided anew."""
        if step.abort:
            self.abort(step.abort)
        else:
            self.bring(step)

    def abort(self, reason: str) -> None:
        """A token that leads nowhere would block every later receive."""
        code, _out, err = self.local("receive", "-A", self.dataset)
        if code:
            raise self.refuse("zfs_busy", f"left-over receive of {self.dataset}", err, "none", "end the process that receives, or run zfs receive -A as root")
        self.say(f"gave up a cut receive: {reason}")

    def bring(self, step: Receive) -> None:
        if step.lost and not self.request["discard"]:
            raise self.refuse(
                "zfs_diverged", f"dataset {self.dataset}", f"content that the head does not have: {'; '.join(step.lost)}",
                "a replica that only ever received", NEXT_STEP["zfs_diverged"],
            )  # fmt: skip
        words = self.words(step)
        told = self.remote("zfs-size", *words)
        size = _zfs_plan.parse_size(told)
        if size is None:
            thing = f"zfs send -nP on {self.peer.node} for {self.dataset}"
            raise self.refuse("zfs", thing, " ".join(told.split()) or "no output", "the size of the stream", "run it on the head by hand")
        # A full stream does not go over a dataset that has snapshots, with or without -F.
        replaced = bool(step.lost) and step.action == "full"
        self.check_space(size, replaced)
        if step.lost:
            self.say(f"giving up, as set: {'; '.join(step.lost)}")
        if replaced:
            self.require_unmounted()
            code, _out, err = self.local("destroy", "-r", self.dataset)
            if code:
                raise self.refuse("zfs_rights", f"dataset {self.dataset}", err, "the right to destroy it", NEXT_STEP["zfs_rights"])
        self.say(f"{step.action} to {step.target.name}: {gib(size)} to receive" + (f", from {step.base.name}" if step.base else ""))
        self.progress.begin("receive", size, self.progress.message)
        self.receive(words, step)

    def require_unmounted(self) -> None:
        """Only root may unmount, whatever was delegated, and a destroy would take the snapshots before it finds out."""
        _code, listed, _err = self.local(*_zfs_plan.LIST_MOUNTED, self.dataset)
        mounted = _zfs_plan.parse_mounted(listed)
        if mounted and os.geteuid() != 0:
            raise self.refuse("zfs_used", f"dataset {self.dataset}", f"mounted: {', '.join(mounted)}", "a replica that nobody reads", NEXT_STEP["zfs_used"])

    @staticmethod
    def words(step: Receive) -> list[str]:
        """What the gate is asked for: a token alone, or a snapshot with or without its base."""
        if step.action == "resume":
            return ["token", step.token]
        return ["snapshot", step.target.name, *([step.base.guid] if step.base else [])]

    def check_space(self, size: int, replaced: bool) -> None:
        """Room in the pool, for what is still to come. A replica that goes first gives its own back, and its quota does not count."""
        place = self.dataset.rpartition("/")[0] if replaced else self.dataset
        code, out = 1, ""
        while code and place:
            code, out, _err = self.local("get", "-Hp", "-o", "value", "available", place)
            place = place.rpartition("/")[0]
        free = int(out.strip() or 0)
        if replaced:
            free += int(self.local("get", "-Hp", "-o", "value", "used", self.dataset)[1].strip() or 0)
        if size + self.request["space_margin"] > free:
            raise self.refuse(
                "zfs_space",
                f"pool of {self.dataset}",
                f"{gib(free)} free",
                f"{gib(size + self.request['space_margin'])} ({gib(size)} to receive, and a margin)",
                NEXT_STEP["zfs_space"],
            )

    def receive(self, words: t.Sequence[str], step: Receive) -> None:
        """Pump the stream; what a cut one leaves is resumed by the next round."""
        force = ["-F"] if step.lost and step.action == "incremental" else []
        command = [self.zfs, "receive", "-s", "-u", *force, self.dataset]
        try:
            self.pump([*self.peer.ssh(), shlex.join(["zfs-send", *words])], command)
        except ReceiveError as exc:
            raise self.refuse(exc.kind, f"dataset {self.dataset}", exc.text, "a finished receive", NEXT_STEP[exc.kind]) from None

    def pump(self, sender: t.Sequence[str], receiver: t.Sequence[str]) -> None:
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        # Not as contexts, which would wait for the end of a receiver that a suspended pool holds.
        # pylint: disable-next=ansible-bad-function,consider-using-with
        sink = subprocess.Popen(receiver, stdin=pipe, stdout=none, stderr=pipe, start_new_session=True)
        # pylint: disable-next=ansible-bad-function,consider-using-with
        source = subprocess.Popen(sender, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True)
        words: dict[str, bytes] = {}
        readers = [
            threading.Thread(target=lambda name=name, process=process: words.update({name: process.stderr.read()}), daemon=True)
            for name, process in (("source", source), ("sink", sink))
        ]
        for reader in readers:
            reader.start()
        whole = False
        try:
            with contextlib.suppress(BrokenPipeError):
                self.move(source.stdout.fileno(), sink.stdin.fileno())
                whole = True
        finally:
            if not whole:
                kill(source)
            # At the end of its input a receiver keeps what it has, and ends.
            sink.stdin.close()
            received = self.end_of(sink)
            sent = source.wait()
            for reader in readers:
                reader.join(5)
        self.judge(received, words.get("sink", b"").decode("utf-8", "replace"), sent, words.get("source", b"").decode("utf-8", "replace"))

    def move(self, source: int, sink: int) -> None:
        """The whole stream, from pipe to pipe."""
        for pipe in (source, sink):
            # A pipe of 64 KiB halves the rate; an account has only so many large ones.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, F_SETPIPE_SZ, BLOCK)
        os.set_blocking(sink, False)
        self.await_bytes([source], [])
        while block := os.read(source, BLOCK):
            left = memoryview(block)
            while left:
                self.await_bytes([], [sink])
                left = left[os.write(sink, left) :]
            self.progress.done += len(block)
            self.received += len(block)
            self.await_bytes([source], [])

    def await_bytes(self, readable: t.Sequence[int], writable: t.Sequence[int]) -> None:
        """Bytes are the only sign of life, at both ends."""
        limit = self.request["stall_seconds"]
        if not any(select.select(readable, writable, [], limit)):
            raise CopyError("stalled", f"no byte {'arrived' if readable else 'was taken by zfs receive'} for {limit} s")

    def end_of(self, sink: subprocess.Popen) -> int:
        """It may take a while after the last byte, and for ever in a suspended pool, where no signal ends it."""
        limit = max(_zfs_command.SECONDS, self.request["stall_seconds"])
        try:
            return sink.wait(limit)
        except subprocess.TimeoutExpired:
            kill(sink)
            raise Refused(_zfs_command.Silent(sink.args, limit).refusal(self.node)) from None

    def judge(self, received: int, sink_words: str, sent: int, source_words: str) -> None:
        words = " ".join(sink_words.split())
        # With -s the receiver has the same words for a stream that is damaged and for one that ends early. It ended the sender in the first
        # case (a signal, below zero); in the second the sender has ended by itself, and a new one goes on.
        if received and INCOMPLETE in words and sent > 0:
            raise self.peer.explain(source_words, sent)
        known = next((kind for text, kind in WORDS if text in words), None)
        if received and known:
            raise ReceiveError(known, words)
        if sent:
            raise self.peer.explain(source_words, sent)
        if received:
            raise ReceiveError("zfs_stream", words or f"zfs receive ended with {received}")


def kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: t.Sequence[str]) -> int:
    return _unit.run_job(arguments[0], lambda request, progress: ReceiveJob(request, progress).run())
