# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The download job as a process, against the lab's hub with its faults switched on. Bytes are counted by the hub."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import time

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _manifest as manifests
from ansible_collections.sparkops.inference.plugins.module_utils import _safetensors, _unit, _weights_job, _weights_state
from test_hub import hub_cache
from weights_lab import COMMIT, OTHER, write_model

SIZES = [200_000, 300_000, 3_000_000]
LARGE = "model-00003-of-00003.safetensors"
SMALL = "model-00002-of-00003.safetensors"


def files_of(tree: pathlib.Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


def same(tree: pathlib.Path, source: pathlib.Path, left_out=("README.md",)) -> bool:
    names = files_of(source) - set(left_out)
    return files_of(tree) == names and all((tree / name).read_bytes() == (source / name).read_bytes() for name in names)


def total(source: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in source.iterdir() if path.name != "README.md")


def test_a_virgin_node(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    result = node.run()
    assert result["ok"] and result["changed"] and same(node.tree(), source)
    assert result["artefacts"]["model"]["ways"][LARGE] == "ranges" and result["artefacts"]["model"]["ways"][SMALL] == "library"
    manifest = manifests.load(str(node.tree()))
    assert manifest.revision == COMMIT and all(len(file.sha256) == 64 for file in manifest.files)
    assert not (node.weights / ".sparkops-incoming" / "acme--tiny" / COMMIT).exists()
    assert hub.served() <= 1.02 * total(source)


def test_a_second_run_touches_no_network(hub, node):
    hub.repository("acme/tiny", SIZES)
    node.run()
    hub.close()
    result = node.run(environment=None)
    assert result["ok"] and not result["changed"]


@pytest.mark.parametrize(("large", "small"), [(True, True), (False, True), (True, False)], ids=["both", "side file", "shard"])
def test_only_what_lacks_is_fetched(hub, node, large, small):
    source = hub.repository("acme/tiny", SIZES)
    node.run()
    hub.call("DELETE", "/counters")
    lost = [name for name, chosen in ((LARGE, large), ("tokenizer.json", small)) if chosen]
    for name in lost:
        (node.tree() / name).unlink()
    assert node.run()["ok"] and same(node.tree(), source)
    assert hub.served() == sum((source / name).stat().st_size for name in lost)


def test_a_file_of_another_size_is_replaced(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    node.run()
    os.truncate(node.tree() / SMALL, 299_000)
    assert node.run()["ok"] and same(node.tree(), source)


def test_files_without_a_manifest_are_hashed_not_fetched(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    node.run()
    hub.call("DELETE", "/counters")
    pathlib.Path(manifests.manifest_path(str(node.tree()))).unlink()
    with open(node.tree() / SMALL, "r+b") as stream:
        stream.seek(150_000)
        stream.write(b"damage")
    assert node.run()["ok"] and same(node.tree(), source)
    assert hub.served() == (source / SMALL).stat().st_size


@pytest.mark.parametrize("always", [False, True])
def test_verify_names_the_damaged_file_and_the_next_run_fetches_only_it(hub, node, always):
    """Also where the inventory asks for a verification in every run."""
    source = hub.repository("acme/tiny", SIZES)
    node.run()
    hub.call("DELETE", "/counters")
    status = os.stat(node.tree() / SMALL)
    with open(node.tree() / SMALL, "r+b") as stream:
        stream.seek(150_000)
        stream.write(b"damage")
    os.utime(node.tree() / SMALL, ns=(status.st_atime_ns, status.st_mtime_ns))
    refusals = node.refused(verify=True)
    assert [item["id"] for item in refusals] == ["weights.damaged"] and SMALL in refusals[0]["thing"] and hub.served() == 0
    assert _weights_state.look(str(node.weights), _weights_state.Artefact.from_dict(node.artefact())).problems == [
        f"{SMALL}: found damaged by the last verification"
    ]
    assert node.run(verify=always)["ok"] and same(node.tree(), source)
    assert hub.served() == (source / SMALL).stat().st_size
    assert not node.run(verify=True)["changed"]


def test_two_kills_in_the_middle_cost_at_most_a_tenth(hub, node):
    """Kill -9 twice while shards arrive; the third run finishes."""
    source = hub.repository("acme/tiny", [8_000_000, 8_000_000, 8_000_000, 4_000_000])
    hub.fault("slow", path="acme/tiny/*.safetensors", rate=4_000_000)
    for share in (0.25, 0.6):
        process = node.start(ranged_above=1_000_000)
        while hub.served() < share * total(source):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.communicate()
    hub.call("DELETE", "/faults")
    result = node.run(ranged_above=1_000_000)
    assert result["ok"] and same(node.tree(), source)
    assert hub.served() <= 1.1 * total(source)


def test_too_many_requests(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    hub.fault("rate-limit", path="acme/tiny/api/tree", times=1, seconds=1)
    hub.fault("rate-limit", path=f"acme/tiny/{LARGE}", times=1, seconds=2)
    hub.fault("rate-limit", path=f"acme/tiny/{SMALL}", times=1, seconds=1)
    began = time.monotonic()
    result = node.run()
    assert result["ok"] and same(node.tree(), source) and time.monotonic() - began > 3
    waits = [notice for notice in result["notices"] if "waiting" in notice]
    assert any("waiting 2 s as it asks" in notice for notice in waits) and any("waiting 1 s as it asks" in notice for notice in waits)
    assert any("api/models" in notice for notice in waits)


@pytest.mark.parametrize(("timeout", "tries"), [(1, 2), (10, 1)])
@pytest.mark.parametrize("path", ["api/tree", LARGE, SMALL])
def test_each_request_has_the_time_that_was_set(hub, node, path, timeout, tries):
    """A slow line needs more than the library's own ten seconds; one that says nothing is given up and asked again."""
    source = hub.repository("acme/tiny", SIZES)
    hub.fault("delay", path=f"acme/tiny/{path}", times=1, seconds=3)
    result = node.run(timeout=timeout, stall_seconds=20, streams=1, part_size=4_000_000)
    assert result["ok"] and same(node.tree(), source)
    assert hub.call("GET", "/counters")[f"acme/tiny/{path}"]["requests"] == tries


def test_a_hub_that_accepts_and_says_nothing_is_given_up(hub, node):
    hub.repository("acme/tiny", SIZES)
    hub.fault("delay", path="acme/tiny/api/*", seconds=60)
    (refusal,) = node.refused(timeout=1)
    assert refusal["id"] == "weights.hub_unreachable" and hub.url in refusal["found"]


def test_waiting_has_a_cap(hub, node):
    hub.repository("acme/tiny", SIZES)
    hub.fault("rate-limit", path="acme/tiny/*", seconds=20)
    (refusal,) = node.refused(rate_limit_wait=5)
    assert refusal["id"] == "weights.hub_rate_limit_cap" and "5 s allowed" in refusal["found"]


@pytest.mark.parametrize("token", [None, "hf_of_nobody", "hf_of_a_stranger", "hf_of_a_reader"])
def test_access_is_told_apart_and_no_token_is_printed(hub, node, token):
    source = hub.repository("acme/tiny", SIZES, gated=True, access=["reader"])
    (hub.root / "tokens.json").write_text(json.dumps({"hf_of_a_reader": "reader", "hf_of_a_stranger": "stranger"}))
    result = node.run(token=token)
    if token == "hf_of_a_reader":
        assert result["ok"] and same(node.tree(), source)
    else:
        (refusal,) = result["refusals"]
        expected = {
            None: ("weights.hub_unauthorized", "no token was sent"),
            "hf_of_nobody": ("weights.hub_unauthorized", "was not accepted"),
            "hf_of_a_stranger": ("weights.hub_forbidden", "has no access"),
        }
        assert refusal["id"] == expected[token][0] and expected[token][1] in refusal["found"]
    assert not (node.state / "jobs" / "secret").exists()
    told = json.dumps(result) + "".join(path.read_text(errors="replace") for path in (node.state / "jobs").iterdir())
    assert "hf_of_" not in told


@pytest.mark.parametrize(("fault", "identifier"), [("unauthorized", "weights.hub_unauthorized"), ("forbidden", "weights.hub_forbidden")])
@pytest.mark.parametrize("path", ["api/tree", LARGE, SMALL])
def test_a_refused_file_ends_the_run_at_once(hub, node, fault, identifier, path):
    hub.repository("acme/tiny", SIZES)
    hub.fault(fault, path=f"acme/tiny/{path}")
    assert [item["id"] for item in node.refused()] == [identifier]
    assert hub.requests() < 30


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_a_stall_is_cut_off_and_tried_again(hub, node, name):
    source = hub.repository("acme/tiny", SIZES)
    hub.fault("stall", path=f"acme/tiny/{name}", bytes=100_000, times=1 if name == SMALL else 4, seconds=60)
    result = node.run(stall_seconds=2, timeout=30)
    assert result["ok"] and same(node.tree(), source)


def test_an_endless_stall_goes_through_all_ways_and_then_says_so(hub, node):
    hub.repository("acme/tiny", SIZES)
    hub.fault("stall", path=f"acme/tiny/{LARGE}", bytes=0, seconds=60)
    (refusal,) = node.refused(stall_seconds=1, timeout=30)
    assert LARGE in refusal["thing"] and "tried: ranges, library, library without Xet" in refusal["next_step"]


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_cut_connections(hub, node, name):
    source = hub.repository("acme/tiny", SIZES)
    hub.fault("cut", path=f"acme/tiny/{name}", bytes=50_000, times=3)
    result = node.run()
    assert result["ok"] and same(node.tree(), source)
    assert hub.served() <= 1.1 * total(source) + 3 * 65_536


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_a_short_file_never_gets_its_name(hub, node, name):
    hub.repository("acme/tiny", SIZES)
    hub.fault("short", path=f"acme/tiny/{name}", bytes=7)
    (refusal,) = node.refused()
    assert name in refusal["thing"]
    assert not (node.tree() / name).exists() and manifests.load(str(node.tree())) is None


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_wrong_bytes_are_fetched_again(hub, node, name):
    source = hub.repository("acme/tiny", SIZES)
    hub.fault("corrupt", path=f"acme/tiny/{name}", times=1)
    result = node.run()
    assert result["ok"] and same(node.tree(), source)
    assert any("came damaged" in notice for notice in result["notices"])


def test_bytes_that_stay_wrong_are_refused_by_name(hub, node):
    hub.repository("acme/tiny", SIZES)
    hub.fault("corrupt", path=f"acme/tiny/{SMALL}")
    (refusal,) = node.refused()
    assert refusal["id"] == "weights.hash" and SMALL in refusal["thing"]
    assert not (node.tree() / SMALL).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_side_file_is_named(hub, node, name):
    hub.repository("acme/tiny", SIZES)
    hub.fault("missing", path=f"acme/tiny/{name}")
    (refusal,) = node.refused()
    assert refusal["id"] == "weights.required" and name in refusal["found"] and hub.served() == 0


def test_a_shard_that_only_the_index_knows_is_named(hub, node):
    hub.repository("acme/tiny", SIZES)
    hub.fault("missing", path=f"acme/tiny/{SMALL}")
    refusals = node.refused()
    assert [item["id"] for item in refusals] == ["weights.incomplete"] and SMALL in refusals[0]["thing"]
    assert manifests.load(str(node.tree())) is None


def test_a_shard_whose_header_promises_more_is_named(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    os.truncate(source / SMALL, (source / SMALL).stat().st_size - 7)
    assert _safetensors.check_file(source / SMALL)
    (refusal,) = node.refused()
    assert refusal["id"] == "weights.incomplete" and SMALL in refusal["thing"] and "header promises" in refusal["found"]


def test_a_moved_main_changes_nothing(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    write_model(hub.root / "acme/tiny" / OTHER, [1000])
    node.run()
    hub.call("POST", "/refs", {"repository": "acme/tiny", "revision": OTHER})
    assert not node.run()["changed"] and same(node.tree(), source)
    assert node.run(download="refresh")["ok"] and same(node.tree(), source)


def test_refresh_finds_what_sizes_do_not_show(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    node.run()
    hub.call("DELETE", "/counters")
    with open(node.tree() / LARGE, "r+b") as stream:
        stream.seek(150_000)
        stream.write(b"damage")
    result = node.run(download="refresh")
    assert result["ok"] and result["changed"] and same(node.tree(), source)
    assert hub.served() == (source / LARGE).stat().st_size
    again = node.run(download="refresh")
    assert again["ok"] and not again["changed"]


def test_never_refuses_what_is_not_there(hub, node):
    hub.repository("acme/tiny", SIZES)
    (refusal,) = node.refused(download="never")
    assert refusal["id"] == "weights.incomplete" and hub.requests() == 0


@pytest.mark.parametrize("fallback", ["mirror/tiny", f"mirror/tiny@{OTHER}"])
def test_a_fallback_repository(hub, node, fallback):
    commit = OTHER if "@" in fallback else COMMIT
    source = hub.repository("mirror/tiny", SIZES, commit)
    result = node.run(node.artefact(fallback_repositories=[fallback]))
    assert result["ok"] and same(node.tree(), source)
    assert result["artefacts"]["model"]["repository"] == "mirror/tiny"
    assert not node.run(node.artefact(fallback_repositories=[fallback]), environment=None)["changed"]


@pytest.mark.parametrize("refused", ["gated", "forbidden", "missing"])
def test_a_repository_that_lists_and_then_refuses_its_files_has_a_fallback(hub, node, refused):
    hub.repository("acme/tiny", SIZES, **({"gated": True} if refused == "gated" else {}))
    source = hub.repository("mirror/tiny", SIZES, OTHER)
    if refused == "forbidden":
        hub.fault("forbidden", path=f"acme/tiny/{LARGE}")
    elif refused == "missing":
        hub.fault("error", path=f"acme/tiny/{LARGE}", status=404)
    artefact = node.artefact(fallback_repositories=[f"mirror/tiny@{OTHER}"])
    result = node.run(artefact)
    assert result["ok"] and same(node.tree(), source) and result["artefacts"]["model"]["repository"] == "mirror/tiny", result
    assert any("going on with mirror/tiny" in notice for notice in result["notices"])
    # What the first one gave is proven and kept.
    assert hub.served() < 1.1 * total(source)
    assert not node.run(artefact, environment=None)["changed"]


def test_what_a_run_has_hashed_it_does_not_read_again_for_a_fallback(tmp_path, monkeypatch):
    job = _weights_job.WeightsJob({"node": "spark-1", "weights_root": str(tmp_path), "rate_limit_wait": 0}, _unit.Progress(str(tmp_path / "progress.json")))
    tree, read = tmp_path / "tree", []
    tree.mkdir()
    (tree / "there").write_bytes(b"1234")
    (tmp_path / "staged").write_bytes(b"5678")
    original = manifests.hash_files
    monkeypatch.setattr(manifests, "hash_files", lambda folder, files, **more: read.extend(file.path for file in files) or original(folder, files, **more))

    def listed(**contents):
        return manifests.Manifest("a/b", COMMIT, tuple(manifests.File(name, 4, hashlib.sha256(text).hexdigest()) for name, text in contents.items()))

    first = listed(there=b"1234", placed=b"5678")
    todo = job.unproven(str(tree), first)
    assert [file.path for file in todo] == ["placed"] and read == ["there"]
    artefact = _weights_state.Artefact.from_dict({"name": "model", "repository": "a/b", "revision": COMMIT, "directory": "tree"})
    plan = _weights_job.Plan(artefact, str(tree), first, todo, {}, "a/b")
    job.place(plan, todo[0], str(tmp_path / "staged"), todo[0].sha256, {})
    assert job.unproven(str(tree), first) == [] and read == ["there"]
    other = listed(there=b"1234", placed=b"9999")
    assert [file.path for file in job.unproven(str(tree), other)] == ["placed"] and read == ["there"]


def test_when_no_fallback_helps_either_all_of_them_are_named(hub, node):
    hub.repository("acme/tiny", SIZES, gated=True)
    hub.repository("mirror/tiny", SIZES, OTHER, private=True)
    refusals = node.refused(node.artefact(fallback_repositories=[f"mirror/tiny@{OTHER}"]))
    assert [refusal["id"] for refusal in refusals] == ["weights.hub_unauthorized"] * 2
    assert "acme/tiny" in refusals[0]["thing"] and "mirror/tiny" in refusals[1]["thing"]


def test_a_branch_stays_at_the_commit_of_its_first_download(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    artefact = node.artefact(commit="main")
    result = node.run(artefact)
    assert result["ok"] and same(node.tree(artefact), source) and any(f"is commit {COMMIT} now" in notice for notice in result["notices"])
    assert manifests.load(str(node.tree(artefact))).revision == COMMIT
    newer = hub.repository("acme/tiny", [4000, 5000], OTHER)
    assert not node.run(artefact, environment=None)["changed"]
    (node.tree(artefact) / "tokenizer.json").unlink()
    assert node.run(artefact)["ok"] and same(node.tree(artefact), source)
    assert node.run(artefact, download="refresh")["ok"] and manifests.load(str(node.tree(artefact))).revision == OTHER
    assert all((node.tree(artefact) / path.name).read_bytes() == path.read_bytes() for path in newer.iterdir() if path.name != "README.md")
    assert not (node.tree(artefact) / LARGE).exists(), "a file of the older commit"


@pytest.mark.parametrize("download", ["missing", "never"])
def test_without_a_pin_and_a_hub_the_user_is_asked(hub, node, tmp_path, download):
    cache = hub_cache(tmp_path, "classic")
    (cache / "models--acme--tiny" / "snapshots" / OTHER).mkdir()
    hub.close()
    (refusal,) = node.refused(node.artefact(commit="main"), adopt_from=[str(cache)], download=download)
    assert f"this node has {COMMIT}, {OTHER}" in refusal["next_step"]


def test_every_artefact_goes_the_same_way(hub, node):
    sources = [hub.repository(name, SIZES) for name in ("acme/tiny", "acme/drafter")]
    artefacts = [node.artefact(), node.artefact("acme/drafter", name="drafter")]
    assert node.run(*artefacts)["ok"]
    assert all(same(node.tree(artefact), source) for artefact, source in zip(artefacts, sources))
    (node.tree(artefacts[1]) / "tokenizer.json").unlink()
    assert list(node.run(*artefacts)["artefacts"]) == ["drafter"]


def test_a_hub_that_is_not_there(hub, node):
    hub.close()
    (refusal,) = node.refused()
    assert refusal["id"] == "weights.hub_unreachable" and hub.url in refusal["found"]


def test_no_room_is_said_with_numbers_before_the_first_byte(hub, node):
    hub.repository("acme/tiny", SIZES)
    (refusal,) = node.refused(space_margin=2**60, reserve=[{"path": str(node.weights), "size": 80, "what": "image archive"}])
    assert refusal["id"] == "weights.space" and "image archive" in refusal["wanted"] and "model 3.3 MiB" in refusal["wanted"]
    assert hub.served() == 0 and not node.tree().exists()


def test_the_licence_is_shown_and_recorded(hub, node):
    hub.repository("acme/tiny", SIZES)
    artefact = node.artefact(licence={"name": "MIT", "url": "https://example.org/licence", "accept": True})
    assert "licence of model (acme/tiny): MIT https://example.org/licence" in node.run(artefact)["notices"]
    assert json.loads((node.state / "licences.json").read_text())["model"]["licence"] == "MIT"
    assert manifests.load(str(node.tree())).licence["name"] == "MIT"


def test_only_one_writer(hub, node):
    hub.repository("acme/tiny", SIZES)
    with _weights_state.tree_lock(str(node.tree())):
        (refusal,) = node.refused()
    assert refusal["id"] == "weights.busy" and f"process {os.getpid()}" in refusal["found"]
    assert node.run()["ok"]


def test_a_cancel_keeps_what_arrived(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    hub.fault("slow", path="acme/tiny/*.safetensors", rate=500_000)
    process = node.start()
    while hub.served() < 1_000_000:
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=20)
    assert node.result()["cancelled"] is True
    hub.call("DELETE", "/faults")
    assert node.run()["ok"] and same(node.tree(), source)
    assert hub.served() <= 1.25 * total(source)


def test_a_cancel_is_no_bad_line_that_is_tried_again(hub, node):
    hub.repository("acme/tiny", SIZES)
    hub.fault("delay", path="acme/tiny/api/*", seconds=8)
    process = node.start()
    while not hub.requests():
        time.sleep(0.02)
    begun = time.monotonic()
    process.terminate()
    process.communicate(timeout=20)
    assert node.result()["cancelled"] is True and time.monotonic() - begun < 5


# What is on the node already


@pytest.mark.parametrize("layout", ["classic", "shared"])
def test_a_cache_is_adopted_without_the_network(hub, node, tmp_path, layout):
    cache = hub_cache(tmp_path, layout)
    result = node.run(adopt_from=[str(cache)], environment=None)
    assert result["ok"] and same(node.tree(), tmp_path / "plain") and hub.requests() == 0
    for path in node.tree().iterdir():
        assert path.is_file() and not path.is_symlink() and path.stat().st_nlink == 2
    assert (cache / "models--acme--tiny" / "refs" / "main").read_text() == "c" * 40


def test_an_incomplete_cache_gives_what_it_has(hub, node, tmp_path):
    source = hub.repository("acme/tiny", [3000, 4000])
    cache = hub_cache(tmp_path, "classic")
    (cache / "models--acme--tiny" / "snapshots" / COMMIT / "model-00002-of-00002.safetensors").unlink()
    result = node.run(adopt_from=[str(cache)])
    assert result["ok"] and same(node.tree(), source)
    assert result["artefacts"]["model"]["linked"] == 4 and hub.served() == (source / "model-00002-of-00002.safetensors").stat().st_size


def test_a_damaged_file_of_a_cache_is_fetched_instead(hub, node, tmp_path):
    source = hub.repository("acme/tiny", [3000, 4000])
    cache = hub_cache(tmp_path, "classic")
    blob = os.path.realpath(cache / "models--acme--tiny" / "snapshots" / COMMIT / "model-00002-of-00002.safetensors")
    with open(blob, "r+b") as stream:
        stream.seek(2000)
        stream.write(b"damage")
    result = node.run(adopt_from=[str(cache)])
    assert result["ok"] and same(node.tree(), source) and any("is damaged" in notice for notice in result["notices"])


def test_another_filesystem_is_refused_with_numbers(hub, node, tmp_path, monkeypatch):
    other = pathlib.Path("/dev/shm")
    if not os.access(other, os.W_OK) or os.stat(other).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second filesystem")
    folder = other / f"sparkops-test-{os.getpid()}"
    folder.mkdir()
    try:
        cache = hub_cache(folder, "classic")
        (refusal,) = node.refused(adopt_from=[str(cache)], environment=None)
        assert refusal["id"] == "weights.other_filesystem" and "another filesystem" in refusal["found"] and "weights_root" in refusal["next_step"]
        assert manifests.load(str(node.tree())) is None
        (refusal,) = node.refused(adopt_from=[str(cache)], environment=None, adopt_copy=True, space_margin=2**60)
        assert refusal["id"] == "weights.space" and "copied from another filesystem" in refusal["wanted"]
        result = node.run(adopt_from=[str(cache)], environment=None, adopt_copy=True)
        assert result["ok"] and same(node.tree(), folder / "plain")
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()


# Slim trees

SLIM = {"tensors": ["layer.1.weight", "layer.2.weight"], "files": ["config.json"]}
SLIM_FILES = ["model-0000[23]-of-00003.safetensors", "model.safetensors.index.json", "config.json"]


def slim_artefact(node, **more):
    return node.artefact(include=SLIM_FILES, exclude=[], required=["config.json", "model.safetensors.index.json"], slim=SLIM, **more)


def test_a_slim_tree_is_never_the_whole_model(hub, node):
    source = hub.repository("acme/tiny", SIZES)
    artefact = slim_artefact(node)
    assert node.run(artefact)["ok"]
    assert files_of(node.tree()) == {"config.json", "model.safetensors.index.json", SMALL, LARGE}
    assert json.loads((node.tree() / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": sum(SIZES), "slim": SLIM["tensors"]},
        "weight_map": {"layer.1.weight": SMALL, "layer.2.weight": LARGE},
    }
    assert not node.run(artefact, environment=None)["changed"] and not node.run(artefact, verify=True, environment=None)["changed"]
    assert not node.run(artefact, download="refresh")["changed"]
    assert hub.served() < total(source)


def test_a_slim_tree_from_a_full_checkout_is_links(hub, node, tmp_path):
    cache = hub_cache(tmp_path, "shared", sizes=SIZES)
    artefact = slim_artefact(node)
    assert node.run(artefact, adopt_from=[str(cache)], environment=None)["ok"] and hub.requests() == 0
    assert (node.tree() / LARGE).stat().st_nlink == 2 and not (node.tree() / LARGE).is_symlink()
    assert json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())["weight_map"].keys() == {
        "layer.0.weight",
        "layer.1.weight",
        "layer.2.weight",
    }
    assert os.path.realpath(cache / "models--acme--tiny" / "snapshots" / COMMIT / "model.safetensors.index.json").endswith(manifests_blob(cache))


def manifests_blob(cache):
    return os.path.basename(os.readlink(cache / "models--acme--tiny" / "snapshots" / COMMIT / "model.safetensors.index.json"))


def test_a_lost_slim_index_is_made_again(hub, node):
    hub.repository("acme/tiny", SIZES)
    artefact = slim_artefact(node)
    node.run(artefact)
    before = (node.tree() / "model.safetensors.index.json").read_bytes()
    hub.call("DELETE", "/counters")
    (node.tree() / "model.safetensors.index.json").write_text("{}")
    assert node.run(artefact)["ok"] and (node.tree() / "model.safetensors.index.json").read_bytes() == before
    assert hub.served() < 2000


def test_another_selection_of_tensors_makes_another_index(hub, node):
    hub.repository("acme/tiny", SIZES)
    node.run(slim_artefact(node))
    other = {**slim_artefact(node), "slim": {"tensors": ["layer.2.weight"], "files": ["config.json"]}}
    assert _weights_state.look(str(node.weights), _weights_state.Artefact.from_dict(other)).problems
    assert node.run(other)["changed"]
    assert list(json.loads((node.tree() / "model.safetensors.index.json").read_text())["weight_map"]) == ["layer.2.weight"]


def test_a_tensor_in_a_shard_that_is_left_out_is_refused(hub, node):
    hub.repository("acme/tiny", SIZES)
    artefact = {**slim_artefact(node), "slim": {"tensors": ["layer.*.weight"], "files": ["config.json"]}}
    (refusal,) = node.refused(artefact)
    assert refusal["id"] == "weights.slim" and "model-00001-of-00003.safetensors" in refusal["found"]


def test_source_and_target_may_not_be_one_folder(hub, node):
    hub.repository("acme/tiny", SIZES)
    artefact = slim_artefact(node)
    write_model(node.tree(), SIZES)
    notes = node.tree() / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name in files_of(node.tree()):
        (notes / f"{name}.metadata").write_text(f"{COMMIT}\n{'0' * 40}\n1.0\n")
    before = (node.tree() / "model.safetensors.index.json").read_bytes()
    (refusal,) = node.refused(artefact, adopt_from=[str(node.tree())])
    assert refusal["id"] == "weights.same_folder" and (node.tree() / "model.safetensors.index.json").read_bytes() == before
