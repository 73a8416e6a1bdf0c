# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The program of the download unit: plan all artefacts, check licence and space, adopt, fetch, prove, publish."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils import _hub_child, _safetensors, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._hub import (
    TRANSIENT,
    Hub,
    HubError,
    LocalFile,
    Patience,
    matches,
    snapshots,
)
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest, Need, gib
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._transfer import RangeFetcher, Stalled
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, Transfer
from ansible_collections.sparkops.inference.plugins.module_utils._weights_state import (
    Artefact,
    Busy,
    adoptable,
    candidates,
    damaged,
    look,
    note_damage,
    tree_lock,
)

# Ways to get a file, tried in this order. Each is used again only while it makes progress.
SMALL_WAYS = ("library", "library", "library without Xet", "ranges")
LARGE_WAYS = ("ranges", "ranges", "library", "library without Xet")
# The library's plain way refuses files above this size.
LIBRARY_LIMIT = 50_000_000_000


@dataclasses.dataclass
class Plan:
    """What one artefact lacks and where it will come from."""

    artefact: Artefact
    tree: str
    manifest: Manifest
    todo: list[File]
    local: dict[str, LocalFile]
    origin: str

    @property
    def download(self) -> list[File]:
        return [file for file in self.todo if file.path not in self.local]


class WeightsJob(Transfer):
    """Download of all artefacts of a deployment on one node."""

    area = "weights"

    def __init__(self, request: dict[str, t.Any], progress: Progress) -> None:
        super().__init__(request, progress)
        self.root = request["weights_root"]
        self.token = _unit.take_secret(request)
        self.patience = Patience(request["rate_limit_wait"], self.say)
        self.report: dict[str, dict[str, t.Any]] = {}
        # What this run has read or placed, by full path. The trees' locks keep others away, so it stays true.
        self.hashed: dict[str, str] = {}
        self._hub: Hub | None = None

    def run(self) -> dict[str, t.Any]:
        artefacts = [Artefact.from_dict(item) for item in self.request["artefacts"]]
        with contextlib.ExitStack() as locks:
            for tree in sorted({self.tree(artefact) for artefact in artefacts}):
                self.lock(locks, tree)
            if self.request["verify"]:
                self.verify(artefacts)
            plans = [plan for plan in map(self.plan, artefacts) if plan]
            for plan in plans:
                self.record_licence(plan.artefact)
            self.check_space(plans)
            changed = [self.bring_from_any(plan) for plan in plans]
        return {
            "changed": any(changed),
            "artefacts": self.report,
            "notices": self.notices,
            "verified": self.request["verify"],
            "download": self.request["download"],
        }

    def lock(self, locks: contextlib.ExitStack, tree: str) -> None:
        try:
            locks.enter_context(tree_lock(tree))
        except Busy as exc:
            raise self.refuse("busy", f"tree {tree}", f"another writer ({exc})", "one writer at a time", "wait for it, or stop it") from None

    def tree(self, artefact: Artefact) -> str:
        return os.path.join(self.root, artefact.directory)

    def staging(self, artefact: Artefact) -> str:
        """Unfinished files live here, on the filesystem of the tree, and under no name that anybody serves."""
        return os.path.join(self.root, manifests.INCOMING, artefact.directory)

    # Verification

    def verify(self, artefacts: t.Sequence[Artefact]) -> None:
        """Re-read everything that has a manifest. Damage is written down: this run names it, and the next one fetches only that."""
        known = [(artefact, self.tree(artefact), manifests.load(self.tree(artefact))) for artefact in artefacts]
        self.progress.begin("verify", sum(manifest.size for _a, _t, manifest in known if manifest))
        refusals = []
        for artefact, tree, manifest in known:
            if not manifest:
                continue
            noted = damaged(tree)
            files = [file for file in manifest.files if file.path not in noted]
            problems = [problem for problem in manifests.check_hashes(tree, files, progress=self.count, drop=True) if problem.kind == "hash"]
            note_damage(tree, noted.union(problem.path for problem in problems))
            for problem in problems:
                refusals.append(
                    Refusal(
                        "weights.damaged",
                        self.node,
                        f"{artefact.name}: {tree}/{problem.path}",
                        problem.text,
                        "the file of the manifest",
                        "run the weights play again: it fetches only this file",
                    )
                )
        if refusals:
            raise Refused(*refusals)

    # Planning

    def plan(self, artefact: Artefact) -> Plan | None:
        """Find out what is wanted, what is there, and what else on this node can be used. None: nothing to do."""
        tree = self.tree(artefact)
        state = look(self.root, artefact)
        if state.manifest and self.request["download"] != "refresh":
            manifest = state.manifest
            bad = {problem.path for problem in manifests.check_sizes(tree, manifest.files)} | damaged(tree)
            todo = [self.original(manifest, file) for file in manifest.files if file.path in bad]
            return Plan(artefact, tree, manifest, todo, self.usable(artefact, todo), manifest.repository) if todo else None
        self.progress.begin("plan", message=f"{artefact.name}: looking for what is there")
        requested = "" if artefact.is_pinned else artefact.revision
        artefact = artefact if artefact.is_pinned else self.resolved(artefact)
        manifest = dataclasses.replace(self.adopted(artefact) or self.listing(artefact), requested=requested)
        todo = self.unproven(tree, manifest)
        return Plan(artefact, tree, manifest, todo, self.usable(artefact, todo), manifest.repository)

    def resolved(self, artefact: Artefact) -> Artefact:
        """Pin a branch to the commit that it is now. What a cache calls newest is not asked."""
        if self.request["download"] == "never":
            raise self.refuse(
                "unpinned",
                f"revision of {artefact.name}",
                artefact.revision,
                "a full commit, or a tree that was downloaded before",
                f"pin a commit in the profile{self.known_commits(artefact)}",
            )
        try:
            commit = self.patiently(lambda: self.hub.commit(artefact.repository, artefact.revision))
        except HubError as exc:
            refusal = self.hub_refusal(exc, artefact, artefact.repository)
            raise Refused(
                dataclasses.replace(refusal, next_step=f"{refusal.next_step}, or pin a commit in the profile{self.known_commits(artefact)}")
            ) from None
        self.say(f"{artefact.name}: {artefact.revision} of {artefact.repository} is commit {commit} now, and stays at it; pin it in the profile")
        return dataclasses.replace(artefact, revision=commit)

    def known_commits(self, artefact: Artefact) -> str:
        found = sorted({commit for folder in self.request["adopt_from"] for commit in snapshots(folder, artefact.repository)})
        return f" (this node has {', '.join(found)})" if found else ""

    def original(self, manifest: Manifest, file: File) -> File:
        """What to fetch for a file: a slim index is made from the whole one."""
        source = (manifest.slim or {}).get("index")
        return File(**source) if source and file.path == manifests.INDEX_NAME else file

    def adopted(self, artefact: Artefact) -> Manifest | None:
        """A tree on this node that is complete by itself at the pin: the hub is not asked at all."""
        found = adoptable(artefact, self.request["adopt_from"]) if self.request["download"] != "refresh" else None
        if found is None:
            return None
        self.say(f"{artefact.name}: {found[0].folder} is complete at {found[1].revision[:12]}; using it")
        return found[1]

    def listing(self, artefact: Artefact) -> Manifest:
        """Ask the hub, then the fallbacks, what the pinned commit holds."""
        if self.request["download"] == "never":
            raise self.refuse(
                "incomplete",
                f"{artefact.name} in {self.tree(artefact)}",
                "no complete tree",
                "all files of the pinned revision",
                "set weights_download to missing, or put the tree there",
            )
        refusals = []
        for repository, revision in artefact.sources():
            try:
                files = self.patiently(lambda: self.hub.files(repository, revision))
            except HubError as exc:
                refusals.append(self.hub_refusal(exc, artefact, repository))
                continue
            manifest = Manifest(repository, revision, tuple(manifests.select(files, artefact.include, artefact.exclude)))
            lacking = manifests.lacking(manifest, artefact.required)
            if manifest.files and not lacking:
                return manifest
            names = ", ".join(problem.path for problem in lacking) or "any file"
            refusals.append(
                Refusal(
                    "weights.required",
                    self.node,
                    f"{artefact.name} in {repository} at {revision[:12]}",
                    f"no {names}",
                    "every required file",
                    "correct the profile's patterns or revision",
                )
            )
        raise Refused(*refusals)

    def hub_refusal(self, error: HubError, artefact: Artefact, repository: str) -> Refusal:
        wanted, next_step = {
            "unauthorized": ("a token that may read it", "set weights_hub_token (or weights_hub_token_file) to a token with read access"),
            "forbidden": ("access for this token", "accept the licence on the repository's page with the token's account, then run again"),
            "not_found": ("the pinned revision", "correct repository and revision in the profile"),
            "rate_limit_cap": ("fewer requests", "wait and run again: what is there is kept; a token raises the limit"),
        }.get(error.kind, ("an answer from the hub", "check weights_hub_endpoint and the node's way to it, then run again: what is there is kept"))
        return Refusal(f"weights.hub_{error.kind}", self.node, f"{artefact.name} from {repository}", error.text, wanted, next_step)

    @property
    def hub(self) -> Hub:
        """The library is loaded only when the network is needed."""
        if self._hub is None:
            if not self.request["environment"]:
                raise self.refuse("environment", "huggingface_hub", "not on this node", "the pinned wheels", "run the weights role, which brings them")
            sys.path.insert(0, self.request["environment"])
            os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
            self._hub = Hub(self.request["endpoint"], self.token, min(self.request["timeout"], self.request["stall_seconds"]))
        return self._hub

    def patiently(self, function: t.Callable[[], t.Any], tries: int = 4) -> t.Any:
        """Repeat a call while the hub asks to wait, and a few times when the way to it fails."""
        attempt = 0
        while True:
            try:
                return function()
            except HubError as exc:
                if exc.kind == "rate_limited":
                    self.patience.wait(exc)
                    continue
                attempt += 1
                if exc.kind not in TRANSIENT or attempt >= tries:
                    raise
                time.sleep(min(2.0**attempt, 10.0))

    def unproven(self, tree: str, manifest: Manifest) -> list[File]:
        """Files that are not there or, without a manifest so far, have another hash. A fallback need not read again what came before it."""
        bad = {problem.path for problem in manifests.check_sizes(tree, manifest.files)}
        there = {os.path.join(tree, file.path): file for file in manifest.files if file.path not in bad}
        unread = [file for path, file in there.items() if path not in self.hashed]
        self.progress.begin("check", sum(file.size for file in unread), "hashing files that are already there")
        found = manifests.hash_files(tree, unread, progress=self.count, drop=True)
        self.hashed.update({os.path.join(tree, path): sha256 for path, sha256 in found.items()})
        good = {file.path for path, file in there.items() if path in self.hashed and matches(path, file, self.hashed[path])}
        return [file for file in manifest.files if file.path not in good]

    def usable(self, artefact: Artefact, todo: t.Sequence[File]) -> dict[str, LocalFile]:
        """Files of other folders on this node that can stand for missing ones."""
        sizes = {file.path: file.size for file in todo}
        result: dict[str, LocalFile] = {}
        for tree, _repository, _revision in candidates(artefact, self.request["adopt_from"]):
            if artefact.slim and os.path.realpath(tree.folder) == os.path.realpath(self.tree(artefact)):
                raise self.refuse(
                    "same_folder",
                    f"{artefact.name}: {tree.folder}",
                    "source and target are one folder",
                    "two folders: the slim index would replace the whole one",
                    "take it out of weights_adopt_from",
                )
            for path, local in tree.files.items():
                if sizes.get(path) == local.size:
                    result.setdefault(path, local)
        return result

    def check_space(self, plans: t.Sequence[Plan]) -> None:
        """Say what comes, and refuse before the first byte when it can't fit."""
        needs = [Need(item["path"], item["size"], item["what"]) for item in self.request["reserve"]]
        for plan in plans:
            needs.append(Need(plan.tree, sum(file.size for file in plan.download) - self.arrived(plan), plan.artefact.name))
            needs.append(Need(plan.tree, self.to_copy(plan), f"{plan.artefact.name}, copied from another filesystem"))
        short = manifests.shortages(needs, self.request["space_margin"])
        if short:
            raise Refused(*(space_refusal(self.node, item) for item in short))
        total = sum(file.size for plan in plans for file in plan.download)
        if total:
            rate = self.last_rate("download")
            time_text = (
                f"about {max(1, round(total / rate / 60))} min at the last seen rate"
                if rate
                else f"about {max(1, round(total / 125e6 / 60))} min per Gbit/s of line"
            )
            self.say(f"{gib(total)} to download into {self.root} ({gib(manifests.space(self.root).free)} free), {time_text}")

    def to_copy(self, plan: Plan) -> int:
        """Bytes of adopted files that cannot be linked, where copies of them are allowed."""
        if not self.request["adopt_copy"]:
            return 0
        device = manifests.space(plan.tree).device
        return sum(local.size for local in plan.local.values() if os.stat(local.real).st_dev != device)

    def arrived(self, plan: Plan) -> int:
        """Bytes of an earlier attempt that already take room in the staging folder."""
        return manifests.bytes_below(self.staging(plan.artefact))

    def record_licence(self, artefact: Artefact) -> None:
        """Shown and written down before the first byte."""
        if not artefact.licence:
            return
        self.notices.append(artefact.licence_line)
        path = os.path.join(self.request["state_dir"], "licences.json")
        book = _unit.read_json(path) or {}
        entry = {"repository": artefact.repository, "revision": artefact.revision, "licence": artefact.licence["name"], "url": artefact.licence.get("url")}
        if {key: (book.get(artefact.name) or {}).get(key) for key in entry} != entry:
            book[artefact.name] = {**entry, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            manifests.write_json(path, book)

    # Bringing

    def bring_from_any(self, plan: Plan) -> bool:
        """Bring an artefact; a hub that lists a repository may still refuse its files, and then the fallbacks are asked."""
        while True:
            try:
                return self.bring(plan)
            except Refused as exc:
                following = self.following(plan, exc)
                if following is None:
                    raise
                self.say(f"{plan.artefact.name}: {exc.refusals[0].found}; going on with {following.origin}")
                plan = following

    def following(self, plan: Plan, error: Refused) -> Plan | None:
        """The same from the next repository, None when that is no help or there is none."""
        sources, tried = plan.artefact.sources(), (plan.manifest.repository, plan.manifest.revision)
        rest = sources[sources.index(tried) + 1 :] if tried in sources else []
        # Another repository of a hub that asks for patience is asked for no less.
        if not rest or not error.refusals[0].id.startswith("weights.hub_") or error.refusals[0].id == "weights.hub_rate_limit_cap":
            return None
        others = tuple(f"{repository}@{revision}" for repository, revision in rest[1:])
        try:
            listed = self.listing(dataclasses.replace(plan.artefact, repository=rest[0][0], revision=rest[0][1], fallback_repositories=others))
        except Refused as exc:
            raise Refused(*error.refusals, *exc.refusals) from None
        manifest = dataclasses.replace(listed, requested=plan.manifest.requested)
        todo = self.unproven(plan.tree, manifest)
        found = Plan(plan.artefact, plan.tree, manifest, todo, self.usable(plan.artefact, todo), manifest.repository)
        self.check_space([found])
        return found

    def bring(self, plan: Plan) -> bool:
        """Adopt, fetch, prove each file by hash, and publish the manifest as the last act. Says whether anything is other than before."""
        before = manifests.load(plan.tree)
        lost = bool(before and manifests.check_sizes(plan.tree, before.files))
        staging = self.staging(plan.artefact)
        os.makedirs(staging, exist_ok=True)
        hashes: dict[str, str] = {}
        self.link(plan, staging, hashes)
        rest = [file for file in plan.todo if file.path not in hashes]
        self.progress.begin("download", sum(file.size for file in rest), self.progress.message)
        began, ways = time.monotonic(), {}
        Fetch(self, plan, staging, hashes, ways).run(rest)
        self.note_rate("download", sum(file.size for file in rest), time.monotonic() - began)
        self.publish(plan, hashes)
        shutil.rmtree(staging, ignore_errors=True)
        self.report[plan.artefact.name] = {
            "repository": plan.origin,
            "linked": len(plan.todo) - len(rest),
            "fetched": len(rest),
            "bytes": sum(file.size for file in rest),
            "ways": ways,
        }
        # A slim index is made again from the whole one at each refresh, and is the same for the same tensors.
        made_again = {manifests.INDEX_NAME} if plan.artefact.slim else set()
        return lost or before != manifests.load(plan.tree) or bool(set(hashes) - made_again)

    def link(self, plan: Plan, staging: str, hashes: dict[str, str]) -> None:
        """Hard links to real files: no bytes, no links of links, and the cache stays as it was."""
        files = [file for file in plan.todo if file.path in plan.local]
        if not files:
            return
        for file in files:
            self.link_one(plan, plan.local[file.path], os.path.join(staging, file.path))
        self.progress.begin("adopt", sum(file.size for file in files), f"{plan.artefact.name}: hashing what is adopted")
        found = manifests.hash_files(staging, files, progress=self.count, drop=True)
        for file in files:
            local, path = plan.local[file.path], os.path.join(staging, file.path)
            expected = dataclasses.replace(file, sha256=file.sha256 or local.sha256, blob=file.blob or local.blob)
            if matches(path, expected, found.get(file.path, "")):
                self.place(plan, file, path, found[file.path], hashes)
            else:
                self.say(f"{local.real} is damaged; fetching {file.path} instead")
                os.unlink(path)

    def link_one(self, plan: Plan, local: LocalFile, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        try:
            os.link(local.real, target)
        except OSError as exc:
            if exc.errno == errno.EXDEV and self.request["adopt_copy"]:
                shutil.copyfile(local.real, target)
            elif exc.errno == errno.EXDEV:
                size = sum(item.size for item in plan.local.values())
                raise self.refuse(
                    "other_filesystem",
                    f"{plan.artefact.name}: {local.real}",
                    f"{gib(size)} on another filesystem than {plan.tree}",
                    "the same filesystem, so that links do",
                    "set weights_root to a folder on that filesystem, or weights_adopt_copy to true, or take the folder out of weights_adopt_from",
                ) from None
            else:
                owner = os.stat(local.real).st_uid
                raise self.refuse(
                    "adopt_owner",
                    local.real,
                    f"owned by uid {owner}: {exc.strerror}",
                    f"a file that uid {os.geteuid()} may link",
                    "change the owner of that folder, or take it out of weights_adopt_from",
                ) from None

    def place(self, plan: Plan, file: File, path: str, sha256: str, hashes: dict[str, str]) -> None:
        """A proven file gets its final name."""
        target = os.path.join(plan.tree, file.path)
        if plan.artefact.slim and file.path == manifests.INDEX_NAME:
            path, sha256 = self.make_slim(plan, file, path, sha256)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(target) and not os.path.islink(target):
            raise self.refuse("in_the_way", target, "a folder", "a file", "remove the folder")
        manifests.write_through(path)
        os.replace(path, target)
        hashes[file.path] = self.hashed[target] = sha256

    def make_slim(self, plan: Plan, file: File, path: str, sha256: str) -> tuple[str, str]:
        """Write the index of the wanted tensors beside the whole one, and note what it was made from."""
        tensors = plan.artefact.slim["tensors"]  # type: ignore[index]
        with open(path, encoding="utf-8") as stream:
            text, shards = manifests.slim_index(stream.read(), tensors)
        left_out = sorted(shards - {item.path for item in plan.manifest.files})
        if left_out:
            raise self.refuse(
                "slim",
                f"{plan.artefact.name}: tensors {', '.join(tensors)}",
                f"also in {', '.join(left_out)}, which the patterns leave out",
                "every shard of these tensors",
                "correct the profile's include patterns",
            )
        slim = path + ".slim"
        with open(slim, "w", encoding="utf-8") as stream:
            stream.write(text)
        made = File(file.path, os.path.getsize(slim), manifests.sha256_of(slim))
        files = tuple(made if item.path == file.path else item for item in plan.manifest.files)
        source = {"path": file.path, "size": file.size, "sha256": sha256, "blob": file.blob}
        plan.manifest = dataclasses.replace(plan.manifest, files=files, slim={"tensors": list(tensors), "index": source})
        os.unlink(path)
        return slim, made.sha256

    def publish(self, plan: Plan, hashes: t.Mapping[str, str]) -> None:
        """Every file has a hash and every header fits its size, else there is no manifest."""
        problems = manifests.check_sizes(plan.tree, plan.manifest.files)
        names = [file.path for file in plan.manifest.files]
        for path in names:
            text = _safetensors.check_file(os.path.join(plan.tree, path)) if path.endswith(".safetensors") else None
            if text:
                problems.append(manifests.Problem(path, "header", text))
        wanted = manifests.wanted_by_index(plan.tree, names, plan.artefact.include, plan.artefact.exclude)
        problems += [manifests.Problem(path, "missing", "named by the index, not in the repository") for path in sorted(wanted - set(names))]
        if problems:
            raise Refused(
                *(
                    Refusal(
                        "weights.incomplete",
                        self.node,
                        f"{plan.artefact.name}: {plan.tree}/{item.path}",
                        item.text,
                        "a complete, readable file",
                        "check repository, revision and patterns of the profile",
                    )
                    for item in problems
                )
            )
        unknown = [file for file in plan.manifest.files if not file.sha256 and file.path not in hashes]
        computed = {**manifests.hash_files(plan.tree, unknown), **hashes}
        files = tuple(dataclasses.replace(file, sha256=computed.get(file.path) or file.sha256) for file in plan.manifest.files)
        manifests.publish(plan.tree, dataclasses.replace(plan.manifest, files=files, licence=plan.artefact.licence))
        note_damage(plan.tree, ())


class HubFile:
    """A ranged source on the hub with a renewable signed address."""

    def __init__(self, job: WeightsJob, repository: str, revision: str, path: str) -> None:
        self._locate = lambda: job.patiently(lambda: job.hub.locate(repository, revision, path))
        self._hub = job.hub
        self._lock = threading.Lock()
        self._at = 0.0
        self.location = self._locate()

    def renew(self) -> None:
        """All streams notice an expiry at once; one new address serves them all."""
        with self._lock:
            if time.monotonic() - self._at > 5:
                self.location = self._locate()
                self._at = time.monotonic()

    def stream(self, start: int, end: int, block: int) -> t.Iterator[bytes]:
        return self._hub.stream(self.location, start, end, block)


class Fetch:
    """Bring the missing files of one artefact by the ways that work."""

    def __init__(self, job: WeightsJob, plan: Plan, staging: str, hashes: dict[str, str], ways: dict[str, str]) -> None:
        self.job = job
        self.plan = plan
        self.staging = staging
        self.hashes = hashes
        self.ways = ways
        self.settled = 0

    def run(self, files: t.Sequence[File]) -> None:
        rest = self.keep(files)
        threshold = self.job.request["ranged_above"]
        self.by(SMALL_WAYS, [file for file in rest if file.size <= threshold])
        for file in sorted((file for file in rest if file.size > threshold), key=lambda file: -file.size):
            self.by(LARGE_WAYS, [file])

    def keep(self, files: t.Sequence[File]) -> list[File]:
        """Files that an interrupted run left complete in the staging folder."""
        there = [file for file in files if file.size == size_of(os.path.join(self.staging, file.path))]
        return [file for file in files if file not in there or not self.prove(file, "an earlier run")]

    def prove(self, file: File, way: str) -> bool:
        """Hash a staged file; a good one is published, a bad one is gone."""
        path = os.path.join(self.staging, file.path)
        try:
            sha256 = manifests.sha256_of(path, drop=True)
        except OSError:
            return False
        if not matches(path, file, sha256) or os.path.getsize(path) != file.size:
            self.job.say(f"{file.path} came damaged by {way}; trying again")
            os.unlink(path)
            return False
        os.chmod(path, 0o644)
        self.job.place(self.plan, file, path, sha256, self.hashes)
        self.ways[file.path] = way
        self.settled += file.size
        self.job.progress.done = max(self.job.progress.done, self.settled)
        return True

    def by(self, ways: t.Sequence[str], files: t.Sequence[File]) -> None:
        """Go through the ways until every file is proven. What can't be mended by trying ends at once."""
        error: HubError | None = None
        rest = list(files)
        for way in ways:
            if not rest:
                return
            try:
                if way == "ranges":
                    for file in rest:
                        self.ranges(file)
                else:
                    self.library(rest, xet=way == "library")
                error = None
            except HubError as exc:
                if exc.kind in ("unauthorized", "forbidden", "rate_limit_cap"):
                    raise Refused(self.job.hub_refusal(exc, self.plan.artefact, self.plan.manifest.repository)) from None
                error = exc
                self.job.say(f"{way} failed: {exc.text}")
            rest = [file for file in rest if not self.prove(file, way)]
        if rest:
            names = ", ".join(file.path for file in rest[:5])
            reason = error.text if error else "the bytes that came have another hash than listed"
            raise Refused(
                Refusal(
                    f"weights.hub_{error.kind}" if error else "weights.hash",
                    self.job.node,
                    f"{self.plan.artefact.name}: {names}",
                    reason,
                    "the listed files",
                    f"tried: {', '.join(dict.fromkeys(ways))}; run again: what arrived is kept",
                )
            )

    def ranges(self, file: File) -> None:
        """Our own way: parallel, journaled, resumable."""
        folder = os.path.join(self.staging, ".parts")
        os.makedirs(folder, exist_ok=True)
        part = os.path.join(folder, (file.sha256 or file.blob)[:40] + ".part")
        request = self.job.request
        try:
            source = HubFile(self.job, self.plan.manifest.repository, self.plan.manifest.revision, file.path)
            if source.location.size not in (None, file.size):
                raise HubError("short", f"{file.path}: the server says {source.location.size} bytes, listed are {file.size}")
            fetcher = RangeFetcher(
                source,
                part,
                file.size,
                file.sha256 or file.blob,
                self.job.patience,
                request["streams"],
                request["part_size"],
                request["stall_seconds"],
                self.job.count,
            )
            self.job.count(sum(fetcher.journal.done))
            fetcher.run()
        except Stalled as exc:
            raise HubError("stalled", f"{file.path}: {exc}") from None
        target = os.path.join(self.staging, file.path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(part, target)
        os.unlink(part + ".journal")

    def library(self, files: t.Sequence[File], xet: bool) -> None:
        """The library's way, in a process of its own: a stalled call can only be ended from outside."""
        too_large = [file for file in files if not xet and file.size > LIBRARY_LIMIT]
        if too_large:
            raise HubError("too_large", f"the library's plain way refuses {too_large[0].path} ({gib(too_large[0].size)})")
        job = self.job
        for patience in range(100):
            error = self.library_once([file for file in files if size_of(os.path.join(self.staging, file.path)) != file.size], xet)
            if error is None or error.kind != "rate_limited":
                break
            job.patience.wait(error)
        if error:
            raise error

    def library_once(self, files: t.Sequence[File], xet: bool) -> HubError | None:
        if not files:
            return None
        job, manifest = self.job, self.plan.manifest
        order = {
            "environment": job.request["environment"],
            "endpoint": job.request["endpoint"],
            "timeout": min(job.request["timeout"], job.request["stall_seconds"]),
            "token": job.token,
            "repository": manifest.repository,
            "revision": manifest.revision,
            "files": [file.path for file in files],
            "folder": self.staging,
            "threads": job.request["streams"],
        }
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": self.staging,
            "HF_HOME": os.path.join(self.staging, ".hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        environment["HF_HUB_DISABLE_XET"] = "0" if xet else "1"
        argv = _unit.python_argv(code_root(), _hub_child.__name__.rpartition(".")[2])
        # The program of a unit has no AnsibleModule to call.
        # pylint: disable-next=ansible-bad-function
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
            try:
                child.stdin.write(json.dumps(order).encode())  # type: ignore[union-attr]
                child.stdin.close()  # type: ignore[union-attr]
                return self.watch(child)
            finally:
                child.kill()

    def watch(self, child: subprocess.Popen[bytes]) -> HubError | None:
        """Watch the bytes on disk while the library works; its own progress text proves nothing."""
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.extend(child.stdout), daemon=True)  # type: ignore[arg-type]
        reader.start()
        last, moved = -1, time.monotonic()
        limit = self.job.request["stall_seconds"]
        while child.poll() is None:
            arrived = sum(size_of(path) for path in files_below(self.staging))
            self.job.progress.done = max(self.job.progress.done, min(self.settled + arrived, self.job.progress.total))
            if arrived != last:
                last, moved = arrived, time.monotonic()
            elif time.monotonic() - moved > limit:
                child.kill()
                raise HubError("stalled", f"no byte arrived for {limit:.0f} s")
            time.sleep(0.2)
        reader.join(5)
        return child_error(lines, child.returncode)


def child_error(lines: t.Sequence[bytes], code: int) -> HubError | None:
    """The most telling failure of the library process."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            content = json.loads(line)
            found.append(HubError(content["kind"], content["text"], content.get("wait", 0.0)))
    order = ("rate_limited", "unauthorized", "forbidden", "not_found")
    found.sort(key=lambda error: order.index(error.kind) if error.kind in order else len(order))
    if found:
        return found[0]
    return HubError("library", f"the library's process ended with {code}") if code else None


def code_root() -> str:
    """The folder that ``ansible_collections`` of this program lies in."""
    return os.path.abspath(__file__).rsplit(os.sep + "ansible_collections" + os.sep, 1)[0]


def space_refusal(node: str, short: manifests.Shortage) -> Refusal:
    parts = " + ".join(f"{need.what} {gib(need.size)}" for need in short.parts)
    return Refusal(
        "weights.space",
        node,
        f"filesystem of {short.path}",
        f"{gib(short.free)} free",
        f"{gib(short.needed)} ({parts}, and a margin)",
        "free space, or set weights_root to a larger filesystem",
    )


def files_below(folder: str) -> t.Iterator[str]:
    for root, _folders, names in os.walk(folder):
        for name in names:
            yield os.path.join(root, name)


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def main(arguments: t.Sequence[str]) -> int:
    return _unit.run_job(arguments[0], lambda request, progress: WeightsJob(request, progress).run())
