# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The program of the sync unit on a worker: find what differs, pull it, prove it, publish the manifest, free the pages.

With the methods nfs and zfs the files are there already, mounted read-only; then it proves them, and pulls nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils import _node_copy, _safetensors, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest, Need, gib
from ansible_collections.sparkops.inference.plugins.module_utils._node_copy import CopyError, Peer, Streams
from ansible_collections.sparkops.inference.plugins.module_utils._page_cache import evict
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, Transfer
from ansible_collections.sparkops.inference.plugins.module_utils._weights_state import Busy, damaged, note_damage, tree_lock

ATTEMPTS = 3
LINK_PAUSE = 10.0
# With a chain, the peer before this one gets the files at the same time. It is asked again while it moves.
PEER_WAIT = 1.0
PEER_PATIENCE = 20.0
# What trying again can mend.
TRANSIENT = ("link", "stalled", "hash")
NEXT_STEP = {
    "key": "run the bootstrap play with bootstrap_node_keys, which lets the nodes read from each other",
    "host_key": "run the bootstrap play with bootstrap_node_keys, which pins the host keys",
    "gate": "run the bootstrap play with bootstrap_node_keys, which installs the gate",
    "rsync": "run the bootstrap play with bootstrap_packages, which installs rsync",
    "disk_full": "free space, or set weights_root to a larger filesystem",
    "hash": "run the weights play with the tag verify: the source file may be damaged",
    "source": "see that the source's account may read the file, and run the weights play: the source tree has changed",
    "not_writable": "give what the message names to this account, or remove it",
}


class Copy:
    """One artefact on its way: where its files are staged, and what was proven."""

    def __init__(self, job: SyncJob, item: t.Mapping[str, t.Any]) -> None:
        self.job = job
        self.name: str = item["name"]
        self.directory: str = item["directory"]
        self.manifest: Manifest = manifests.from_dict(item["manifest"])
        self.tree = os.path.join(job.root, self.directory)
        self.staging = os.path.join(job.root, manifests.INCOMING, self.directory)
        self.todo: list[File] = []
        self.bad: dict[str, str] = {}
        self.hashed = 0  # files that were read where they are
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        self._proofs: list[concurrent.futures.Future[None]] = []

    # What a transport needs

    def staged(self, path: str) -> str:
        return os.path.join(self.staging, path)

    def arrived(self, file: File, sha256: str | None) -> None:
        """A file is complete in the staging folder; without a hash from the transport it is read once more, beside the copy."""
        if sha256 is None:
            self._proofs.append(self._pool.submit(lambda: self.place(file, manifests.sha256_of(self.staged(file.path)))))
        else:
            self.place(file, sha256)

    def place(self, file: File, sha256: str) -> None:
        path, target = self.staged(file.path), os.path.join(self.tree, file.path)
        if sha256 != file.sha256:
            os.unlink(path)
            self.bad[file.path] = f"sha256 {sha256[:12]}..., wanted {file.sha256[:12]}..."
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # On the disk before it has its name: after a loss of power nothing short is under one. The cached pages go with it.
        evict([path])
        os.chmod(path, 0o644)
        os.replace(path, target)
        with self._lock:
            self.todo = [other for other in self.todo if other.path != file.path]

    def settle(self) -> None:
        """Wait for the proofs; files with a wrong hash stay to be done."""
        proofs, self._proofs = self._proofs, []
        concurrent.futures.wait(proofs)
        for proof in proofs:
            with contextlib.suppress(FileNotFoundError):
                proof.result()


class SyncJob(Transfer):
    """Bring all artefacts of a deployment from the peers to this node."""

    area = "sync"

    def __init__(self, request: dict[str, t.Any], progress: Progress) -> None:
        super().__init__(request, progress)
        self.root = request["weights_root"]
        self.peers = [Peer.from_dict(item, request["key"], request["known_hosts"]) for item in request["sources"]]
        self.report: dict[str, dict[str, t.Any]] = {}
        # Files that were looked at; the guard counts them where no bytes are counted.
        self.looked = 0

    @property
    def mounted(self) -> bool:
        """Whether the files are seen through a mount, and not copied."""
        return self.request["method"] != "rsync"

    def run(self) -> dict[str, t.Any]:
        copies = [Copy(self, item) for item in self.request["artefacts"]]
        if self.request["method"] == "nfs":
            threading.Thread(target=self.guard, daemon=True).start()
        with contextlib.ExitStack() as locks:
            for copy in copies:
                self.lock(locks, copy)
                self.settle_place(copy)
            # To force is to read and compare all that is there, too.
            if self.request["verify"] and self.request["policy"] != "force":
                self.verify(copies)
            for copy in copies:
                self.plan(copy)
            # What was found damaged and is right again by now has to be accepted, too: until then every look says that it is damaged.
            work = [copy for copy in copies if copy.todo or damaged(copy.tree) or manifests.load(copy.tree) != copy.manifest]
            if work and (self.request["policy"] == "verify_only" or any(copy.todo for copy in work if self.mounted)):
                raise Refused(*(self.missing_refusal(copy) for copy in work))
            if self.mounted:
                for copy in work:
                    self.accept(copy)
                # Whoever holds the disks has read it, too, and has to give its pages back.
                self.report = {copy.name: self.seen(copy) for copy in copies if copy.hashed or copy in work}
            else:
                self.check_space(work)
                for copy in work:
                    self.bring(copy)
        return {"changed": bool(work), "artefacts": self.report, "notices": self.notices, "verified": self.request["verify"], "policy": self.request["policy"]}

    def lock(self, locks: contextlib.ExitStack, copy: Copy) -> None:
        try:
            locks.enter_context(tree_lock(copy.tree))
        except Busy as exc:
            raise self.refuse("busy", f"tree {copy.tree}", f"another writer ({exc})", "one writer at a time", "wait for it, or stop it") from None

    def guard(self) -> None:
        """A read from a dead server never returns, so the whole program ends when nothing moves."""
        last, moved = None, time.monotonic()
        limit = self.request["stall_seconds"]
        while True:
            time.sleep(0.5)
            seen = (self.progress.phase, self.progress.done, self.looked)
            if seen != last:
                last, moved = seen, time.monotonic()
            elif time.monotonic() - moved > limit:
                break
        server = self.peers[-1].address
        found = Refusal(
            "sync.nfs_dead",
            self.node,
            f"NFS server {server}",
            f"no byte for {limit} s ({self.progress.phase})",
            "a server that answers",
            "bring it back, then run again",
        )
        manifests.write_json(self.request["result"], {"ok": False, "refusals": [found.as_dict()], "run_id": self.request["run_id"]})
        os._exit(1)

    def settle_place(self, copy: Copy) -> None:
        """A tree is a folder of this node, except that of a replica, which is a link into its mount."""
        if self.request["method"] == "rsync":
            return  # a link stays until there is room for what replaces it
        if self.request["method"] == "nfs":
            if os.path.islink(copy.tree):
                os.unlink(copy.tree)
            return
        wanted = os.path.relpath(os.path.join(self.root, manifests.REPLICA, copy.directory), os.path.dirname(copy.tree))
        if os.path.islink(copy.tree) and os.readlink(copy.tree) == wanted:
            return
        try:
            if os.path.islink(copy.tree):
                os.unlink(copy.tree)
            elif os.path.isdir(copy.tree):
                os.rmdir(copy.tree)
        except OSError as exc:
            raise self.refuse(
                "zfs_local_copy",
                f"tree {copy.tree}",
                f"a copy of its own ({exc.strerror})",
                "an empty place for the link into the replica",
                "remove that copy, or keep the method rsync",
            ) from None
        os.symlink(wanted, copy.tree)

    # Planning

    def verify(self, copies: t.Sequence[Copy]) -> None:
        """Re-read all files that have their size. Damage is written down: this run names it, and the next one brings only that."""
        self.progress.begin("verify", sum(copy.manifest.size for copy in copies))
        refusals = []
        for copy in copies:
            # Behind a mount the head mends a file, so that it is read again.
            noted = set() if self.mounted else damaged(copy.tree)
            files = [file for file in copy.manifest.files if file.path not in noted]
            problems = [item for item in manifests.check_hashes(copy.tree, files, progress=self.count, drop=True) if item.kind == "hash"]
            copy.hashed += len(files)
            note_damage(copy.tree, noted.union(item.path for item in problems))
            refusals += [
                Refusal(
                    "sync.damaged",
                    self.node,
                    f"{copy.name}: {copy.tree}/{item.path}",
                    item.text,
                    "the file of the manifest",
                    "run the weights play with the tag verify: the file is the head's" if self.mounted
                    else "run the sync play again: it brings only this file",
                )
                for item in problems
            ]
        if refusals:
            raise Refused(*refusals)

    def plan(self, copy: Copy) -> None:
        """Files that lack or differ. What this node's own manifest proves is not read again."""
        files = copy.manifest.files
        if not self.mounted and os.path.islink(copy.tree):
            copy.todo = list(files)
            return
        noted = damaged(copy.tree)
        # Behind a mount the head mends a damaged file, so it is read again; an own copy of it is brought anew.
        bad = {item.path for item in self.sizes(copy)} | (set() if self.mounted else noted)
        own = manifests.load(copy.tree)
        proven = {file.path for file in own.files if file in files} - noted if own and self.request["policy"] != "force" else set()
        unproven = [file for file in files if file.path not in bad and file.path not in proven]
        if unproven:
            self.progress.begin("check", sum(file.size for file in unproven), f"{copy.name}: hashing files that are already there")
            copy.hashed += len(unproven)
            found = manifests.hash_files(copy.tree, unproven, progress=self.count, drop=True)
            bad |= {file.path for file in unproven if found.get(file.path) != file.sha256}
        copy.todo = [file for file in files if file.path in bad]

    def sizes(self, copy: Copy) -> list[manifests.Problem]:
        return [problem for file in self.each(copy) for problem in manifests.check_sizes(copy.tree, [file])]

    def each(self, copy: Copy) -> t.Iterator[File]:
        """The files of a tree, each of which is a sign of life when the next one is asked for."""
        for file in copy.manifest.files:
            yield file
            self.looked += 1

    def missing_refusal(self, copy: Copy) -> Refusal:
        names = ", ".join(file.path for file in copy.todo[:5]) or "the manifest"
        return Refusal(
            "sync.incomplete",
            self.node,
            f"{copy.name} in {copy.tree}",
            f"{len(copy.todo)} files missing or different ({names})",
            "the full manifest",
            "run the weights play with the tag verify, then the sync play" if self.mounted else "set weight_sync_policy to auto, which copies them",
        )

    def check_space(self, work: t.Sequence[Copy]) -> None:
        """Say what comes, and refuse before the first byte when it can't fit. Only what lacks counts."""
        needs = [Need(item["path"], item["size"], item["what"]) for item in self.request["reserve"]]
        # Of the folder of the tree: the tree itself may still be a link into a replica, which is another filesystem.
        needs += [
            Need(os.path.dirname(copy.tree), sum(file.size for file in copy.todo) - manifests.bytes_below(copy.staging), copy.name) for copy in work
        ]
        short = manifests.shortages(needs, self.request["space_margin"])
        if short:
            raise Refused(*(space_refusal(self.node, item) for item in short))
        total = sum(file.size for copy in work for file in copy.todo)
        if total:
            rate = self.last_rate("copy")
            time_text = f", about {max(1, round(total / rate))} s at the last seen rate" if rate else ""
            self.say(f"{gib(total)} to copy into {self.root} ({gib(manifests.space(self.root).free)} free){time_text}")

    # Copying

    def accept(self, copy: Copy) -> None:
        """Every file was read and has its hash: say so beside the mount, which is this node's own disk."""
        self.check_headers(copy)
        manifests.save(copy.tree, copy.manifest)
        note_damage(copy.tree, ())
        self.progress.begin("evict", message="giving the read pages back")
        for file in self.each(copy):
            evict([os.path.join(copy.tree, file.path)])

    def seen(self, copy: Copy) -> dict[str, t.Any]:
        return {"files": len(copy.manifest.files), "bytes": 0, "seconds": 0.0, "transport": self.request["method"]}

    def bring(self, copy: Copy) -> None:
        files, total = list(copy.todo), sum(file.size for file in copy.todo)
        self.progress.begin("copy", total, self.progress.message)
        if os.path.islink(copy.tree):
            os.unlink(copy.tree)
        os.makedirs(copy.staging, exist_ok=True)
        began = time.monotonic()
        if files:
            self.pull(copy)
        seconds = time.monotonic() - began
        self.check_headers(copy)
        shutil.rmtree(copy.staging, ignore_errors=True)
        self.progress.begin("evict", message="giving the copied pages back")
        evict([os.path.join(copy.tree, file.path) for file in files])
        self.note_rate("copy", total, seconds)
        self.report[copy.name] = {"files": len(files), "bytes": total, "seconds": round(seconds, 2), "transport": self.request["transport"]}
        # Last, when every byte is on the disk: after a loss of power a manifest must not vouch for files that did not get there.
        manifests.publish(copy.tree, copy.manifest)
        note_damage(copy.tree, ())

    def pull(self, copy: Copy) -> None:
        """Take files from the nearest peer that has them, and all that is left from the head."""
        for peer in self.peers[:-1]:
            with contextlib.suppress(CopyError):
                self.follow(copy, peer)
            if not copy.todo:
                return
        head, failures = self.peers[-1], 0
        while copy.todo:
            before = len(copy.todo)
            try:
                self.copy_from(copy, head, copy.todo)
                error = CopyError("hash", "; ".join(f"{path}: {text}" for path, text in copy.bad.items()))
            except CopyError as exc:
                error = exc
            failures = 1 if len(copy.todo) < before else failures + 1
            if copy.todo and (error.kind not in TRANSIENT or failures >= ATTEMPTS):
                raise self.copy_refusal(copy, head, error)
            if copy.todo and error.kind in ("link", "stalled"):
                if error.kind == "link":
                    time.sleep(LINK_PAUSE)  # a cable that is put back, a switch port that comes up
                head = self.reachable(copy)

    def reachable(self, copy: Copy) -> Peer:
        """The head as it can be reached now: one cable that is out must not end a copy that another could bring."""
        head = self.peers[-1]
        if len(head.rails) == 1:
            return head
        living = _node_copy.over_living_rails(head, os.path.join(head.root, copy.directory))
        silent = [rail for rail in head.rails if rail not in living.rails]
        if silent:
            self.say(f"{head.node}: no answer on rail {', '.join(silent)}; the copy goes on over {', '.join(living.rails)}")
        return living

    def copy_refusal(self, copy: Copy, peer: Peer, error: CopyError) -> Refused:
        next_step = NEXT_STEP.get(error.kind, "check the link, then run again: what arrived is kept")
        return self.refuse(error.kind, f"{copy.name} from {peer.node} ({peer.user}@{peer.address})", error.text, "a copy of the manifest's files", next_step)

    def follow(self, copy: Copy, peer: Peer) -> None:
        """Take from a peer what it has proven so far, as long as it gets more: the head's uplink is used once."""
        tree, incoming = os.path.join(peer.root, copy.directory), os.path.join(peer.root, manifests.INCOMING, copy.directory)
        moved, wrong = time.monotonic(), set()
        seen: dict[str, int] = {}
        while any(file.path not in wrong for file in copy.todo) and time.monotonic() - moved < self.patience(seen):
            there = _node_copy.complete_files(peer, tree)
            ready = [file for file in copy.todo if there.get(file.path) == file.size and file.path not in wrong]
            if ready:
                self.copy_from(copy, peer, ready)
                moved = time.monotonic()
                for path, text in copy.bad.items():
                    self.say(f"{peer.node}: {tree}/{path}: {text}; taken from the head instead")
                wrong.update(copy.bad)
            else:
                # A shard of 100 GB is under way there for minutes before it has its name.
                staged = _node_copy.complete_files(peer, incoming)
                if staged != seen:
                    seen, moved = staged, time.monotonic()
                time.sleep(PEER_WAIT)

    def patience(self, staged: t.Mapping[str, int]) -> float:
        """Seconds without a byte after which a peer is left. One that has something may be reading it again, for its hash."""
        return max(PEER_PATIENCE, self.request["stall_seconds"]) if staged else PEER_PATIENCE

    def copy_from(self, copy: Copy, peer: Peer, files: t.Sequence[File]) -> None:
        """One attempt with all streams, ended when no byte arrives for too long."""
        copy.bad = {}
        control, ended = Streams(), threading.Event()
        watcher = threading.Thread(target=self.watch, args=(copy, control, ended), daemon=True)
        watcher.start()
        tree = os.path.join(peer.root, copy.directory)
        transport = _node_copy.fabric_copy if self.request["transport"] == "fabric" else _node_copy.rsync_copy
        try:
            try:
                for file in files:
                    os.makedirs(os.path.dirname(copy.staged(file.path)), exist_ok=True)
                transport(peer, tree, list(files), self.request["streams"], copy, control)
            except Exception:
                copy.settle()
                raise
            copy.settle()  # not after a cancel, which has no time for it
        except OSError as exc:
            raise CopyError(_node_copy.local_kind(exc) or "link", str(exc)) from None
        finally:
            ended.set()
            watcher.join()

    def watch(self, copy: Copy, control: Streams, ended: threading.Event) -> None:
        """Bytes below the staging folder and files that left it are the only signs of life that count."""
        last, moved = (-1, -1), time.monotonic()
        limit = self.request["stall_seconds"]
        total = self.progress.total
        while not ended.wait(0.2):
            waiting = sum(file.size for file in copy.todo)
            arrived = sum(size for _path, size in sizes_below(copy.staging))
            self.progress.done = max(self.progress.done, min(total, total - waiting + arrived))
            if (waiting, arrived) != last:
                last, moved = (waiting, arrived), time.monotonic()
            elif time.monotonic() - moved > limit:
                control.stop(CopyError("stalled", f"no byte arrived for {limit} s"))
                return

    def check_headers(self, copy: Copy) -> None:
        """The last look before the manifest: every file there, every header in line with its size."""
        problems = self.sizes(copy)
        for file in self.each(copy):
            text = _safetensors.check_file(os.path.join(copy.tree, file.path)) if file.path.endswith(".safetensors") else None
            if text:
                problems.append(manifests.Problem(file.path, "header", text))
        if problems:
            raise Refused(
                *(
                    Refusal("sync.incomplete", self.node, f"{copy.name}: {copy.tree}/{item.path}", item.text, "a complete file", "run the sync play again")
                    for item in problems
                )
            )


def space_refusal(node: str, short: manifests.Shortage) -> Refusal:
    parts = " + ".join(f"{need.what} {gib(need.size)}" for need in short.parts)
    return Refusal(
        "sync.space",
        node,
        f"filesystem of {short.path}",
        f"{gib(short.free)} free",
        f"{gib(short.needed)} ({parts}, and a margin)",
        "free space, or set weights_root to a larger filesystem",
    )


def sizes_below(folder: str) -> t.Iterator[tuple[str, int]]:
    for root, _folders, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with contextlib.suppress(OSError):
                yield path, os.stat(path).st_size


def main(arguments: t.Sequence[str]) -> int:
    return _unit.run_job(arguments[0], lambda request, progress: SyncJob(request, progress).run())
