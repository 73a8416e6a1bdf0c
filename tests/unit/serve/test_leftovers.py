# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What prune and uninstall may remove, on real directories and an engine that answers from a table."""

from __future__ import annotations

import fcntl
import json
import os
import sys

import pytest

from ansible_collections.sparkops.inference.plugins.filter import serve as filters
from ansible_collections.sparkops.inference.plugins.module_utils import _history
from ansible_collections.sparkops.inference.plugins.module_utils import _leftovers as leftovers
from ansible_collections.sparkops.inference.plugins.module_utils import _rank_state
from ansible_collections.sparkops.inference.plugins.modules import deployment_info, node_prune, node_uninstall
from run_module import run

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "image"))

from fake_docker import FakeDocker  # noqa: E402

TREES = ("acme--tiny/one", "acme--tiny/two", "acme--tiny/three", "acme--other/x")


def record(number, revision, image):
    return {
        "id": f"{number:012x}", "deployment": "d", "profile": "p", "proven_at": f"2026-01-0{number}T00:00:00+00:00", "nodes": ["a"],
        "image": {"id": image}, "artefacts": [{"repository": "acme/tiny", "revision": revision, "directory": f"acme--tiny/{revision}"}],
        "plan": {}, "spec": {"mounts": [], "labels": {}},
    }


class Images:
    """Images by id with their names; deletions change it."""

    def __init__(self, **images):
        self.images = {f"sha256:{name}": list(tags) for name, tags in images.items()}
        self.containers = []

    def routes(self):
        found = {("GET", "/images/json"): lambda request: [{"Id": one, "RepoTags": tags} for one, tags in self.images.items()],
                 ("GET", "/containers/json"): self.listed}
        for one, tags in self.images.items():
            for name in [one, *tags]:
                found[("GET", f"/images/{name}/json")] = lambda request, name=name: self.look(name)
                found[("DELETE", f"/images/{name}")] = lambda request, name=name: self.delete(name)
        return found

    def listed(self, request):
        wanted = [label.split("=") for label in json.loads(request["query"].get("filters", "{}")).get("label", [])]
        return [entry for entry in self.containers if all(entry.get("Labels", {}).get(key) in (value or [*entry["Labels"].values()]) for key, *value in wanted)]

    def look(self, name):
        for one, tags in self.images.items():
            if name == one or name in tags:
                return {"Id": one, "RepoTags": tags, "Size": 1000}
        return 404, {"message": "no such image"}

    def delete(self, name):
        for one, tags in list(self.images.items()):
            if name in tags:
                tags.remove(name)
            if name == one or not tags:
                del self.images[one]
        return []


@pytest.fixture(name="node")
def fixture_node(tmp_path):
    """Three deployments' worth: records one, two and three of d, whose images have our names; a tree of nobody."""
    root = tmp_path / "state"
    for tree in TREES:
        (root / "weights" / tree).mkdir(parents=True)
        (root / "weights" / tree / "model.safetensors").write_bytes(b"x" * 8192)
        (root / "weights" / (tree + ".manifest.json")).write_text("{}")
    (root / "d" / "container").mkdir(parents=True)
    for number, (revision, image) in enumerate([("one", "i1"), ("two", "i2"), ("three", "i3")], start=1):
        _history.keep(str(root / "d"), record(number, revision, f"sha256:{image}"), 10)
    (root / "images.json").write_text(json.dumps({"format": 1, "images": {"sha256:i0": {"digests": []}}}))
    engine = Images(
        i0=["reg/x:0"], i1=["reg/x:1", f"sparkops-kept:d-{1:012x}"], i2=[f"sparkops-kept:d-{2:012x}"], i3=["reg/x:3", f"sparkops-kept:d-{3:012x}"],
        foreign=["postgres:17"],
    )
    with FakeDocker(engine.routes()) as docker:
        yield root, engine, docker


def prune(node, capsys, **more):
    root, dummy, docker = node
    return run(node_prune, capsys, state_root=str(root), weights_root=str(root / "weights"), engram_root=str(root / "engram"),
               docker_socket=docker.socket_path, **more)


def what(things):
    return sorted((one["kind"], one["what"].split("/")[-1].split(" ")[0]) for one in things)


def test_prune_keeps_what_the_newest_records_need_and_a_preview_removes_nothing(node, capsys):
    root, engine, dummy = node
    preview = prune(node, capsys, keep=2, _ansible_check_mode=True)
    assert preview["changed"] and all((root / "weights" / tree).is_dir() for tree in TREES) and len(engine.images) == 5
    done = prune(node, capsys, keep=2)
    assert done["removed"] == preview["removed"] and done["bytes"] == preview["bytes"] >= 2 * 8192
    assert what(done["removed"]) == [("image", "x:0"), ("image", "x:1"), ("record", f"{1:012x}"), ("weights", "one"), ("weights", "x")]
    assert sorted(os.listdir(root / "weights")) == ["acme--tiny"]
    assert sorted(os.listdir(root / "weights" / "acme--tiny")) == ["three", "three.manifest.json", "two", "two.manifest.json"]
    assert set(engine.images) == {"sha256:i2", "sha256:i3", "sha256:foreign"}
    assert prune(node, capsys, keep=2)["changed"] is False


def test_what_was_begun_of_a_tree_goes_unless_the_tree_is_wanted_or_written(node, capsys):
    root, dummy, dummy2 = node
    incoming = root / "weights" / ".sparkops-incoming"
    for name in ("acme--tiny/three", "acme--tiny/four", "acme--tiny/five", "acme--gone/y"):
        (incoming / name).mkdir(parents=True)
        (incoming / name / "model.safetensors").write_bytes(b"x" * 8192)
    wanted = [str(root / "weights/acme--tiny/four")]
    with open(root / "weights/acme--tiny/five.lock", "w", encoding="utf-8") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        done = prune(node, capsys, keep=2, wanted_paths=wanted)
    assert ("unfinished", "y") in what(done["removed"]) and {("unfinished", name) for name in ("three", "four", "five")} <= set(what(done["kept"]))
    assert sorted(str(path.relative_to(incoming)) for path in incoming.glob("*/*")) == ["acme--tiny/five", "acme--tiny/four", "acme--tiny/three"]
    assert ("unfinished", "five") in what(prune(node, capsys, keep=2, wanted_paths=wanted)["removed"])


def test_what_was_proven_last_stays_whatever_its_age(node, capsys):
    root, engine, dummy = node
    (root / "d" / "last_good.json").write_text(json.dumps(record(1, "one", "sha256:i1")))
    prune(node, capsys, keep=1)
    assert (root / "weights" / "acme--tiny" / "one").is_dir() and (root / "weights" / "acme--tiny" / "three").is_dir()
    assert not (root / "weights" / "acme--tiny" / "two").exists()
    assert {"sha256:i1", "sha256:i3"} <= set(engine.images)


def test_what_a_container_or_the_inventory_uses_stays(node, capsys):
    root, engine, dummy = node
    engine.containers = [{"Names": ["/nb"], "ImageID": "sha256:i0", "Mounts": [{"Source": str(root / "weights" / "acme--other" / "x" / "sub")}]}]
    done = prune(node, capsys, keep=1, wanted_paths=[str(root / "weights" / "acme--tiny" / "one")], wanted_images=["reg/x:1"])
    kept = {one["what"].split(" ")[0].split("/")[-1]: one["kept"] for one in done["kept"]}
    assert kept["x"] == "container nb" and kept["x:0"] == "container nb" and kept["one"] == "this inventory" and kept["x:1"] == "this inventory"
    assert what(done["removed"]) == [("image", "sha256:i2"), ("record", f"{1:012x}"), ("record", f"{2:012x}"), ("weights", "two")]


def test_what_another_deployment_staged_or_was_to_start_with_stays(node, capsys):
    """A second deployment that has not run yet, and one whose proof failed."""
    root = node[0]
    _rank_state.note_staged(str(root / "e"), directories=["acme--tiny/one"])
    (root / "engram/acme--tiny/one").mkdir(parents=True)
    (root / "weights/.sparkops-incoming/acme--tiny/one").mkdir(parents=True)
    (root / "f").mkdir()
    (root / "f" / "rank.json").write_text(json.dumps({"mounts": [], "artefacts": [{"path": str(root / "weights/acme--other/x")}]}))
    done = prune(node, capsys, keep=1)
    kept = {(one["kind"], one["what"].split("/")[-1]): one["kept"] for one in done["kept"]}
    assert kept[("weights", "one")] == kept[("pack", "one")] == kept[("unfinished", "one")] == "staged for e" and kept[("weights", "x")] == "staged for f"
    assert ("weights", "two") in what(done["removed"])
    gone = uninstall(node, capsys, weights=True)
    assert not gone["last"] and (root / "weights/acme--tiny/one").is_dir()


def test_an_image_that_another_deployment_staged_stays(node, capsys):
    """It has never run and is in no record. What was noted of its weights, before or after, is noted still."""
    root, engine, dummy = node
    _rank_state.note_staged(str(root / "e"), directories=["acme--tiny/one"])
    _rank_state.note_staged(str(root / "e"), image="sha256:i0")
    preview = prune(node, capsys, keep=1, _ansible_check_mode=True)
    done = prune(node, capsys, keep=1)
    assert done["kept"] == preview["kept"] and "sha256:i0" in engine.images
    kept = {(one["kind"], one["what"].split("/")[-1].split(" ")[0]): one["kept"] for one in done["kept"]}
    assert kept[("image", "x:0")] == kept[("weights", "one")] == "staged for e"
    _rank_state.note_staged(str(root / "e"), image="sha256:i3")
    assert ("image", "x:0") in what(prune(node, capsys, keep=1)["removed"]), "what is to be started is another one now"
    gone = uninstall(node, capsys)
    assert "sha256:i3" in engine.images and [one["kept"] for one in gone["kept"] if one["kind"] == "image"] == ["deployment e"]


def test_a_tree_that_is_being_written_stays(node, capsys):
    root = node[0]
    with open(root / "weights" / "acme--other" / "x.lock", "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = prune(node, capsys)
    assert {one["what"].split("/")[-1]: one["kept"] for one in done["kept"]}["x"] == "it is being written"


def test_other_machines_disks_and_links_are_no_trees_of_ours(tmp_path):
    (tmp_path / "acme--tiny" / "one").mkdir(parents=True)
    (tmp_path / "acme--tiny" / "two").symlink_to("one")
    (tmp_path / "stray").mkdir()
    assert leftovers.trees(str(tmp_path), []) == [str(tmp_path / "acme--tiny" / "one")]
    mounts = f"head:/x {tmp_path}/acme--tiny/one nfs4 ro 0 0\n/dev/sda1 / ext4 rw 0 0\n"
    assert leftovers.remote_mounts(mounts) == [f"{tmp_path}/acme--tiny/one"]
    assert leftovers.trees(str(tmp_path), leftovers.remote_mounts(mounts)) == []
    assert leftovers.trees(str(tmp_path / "acme--tiny"), [str(tmp_path)]) == []


def test_a_directory_with_a_mount_in_it_is_not_removed(node, capsys, monkeypatch):
    root = node[0]
    (root / "shared").mkdir()
    monkeypatch.setattr(leftovers, "mounts", lambda: f"tank/w {root}/weights/acme--other/x zfs rw 0 0\nhead:/x {root}/shared/in nfs4 ro 0 0\n")
    assert {one["what"].split("/")[-1]: one["kept"] for one in prune(node, capsys)["kept"]}["x"].endswith("acme--other/x is a mount")
    done = uninstall(node, capsys)
    assert (root / "shared").is_dir() and [one["kept"] for one in done["kept"] if one["what"].endswith("shared")] == [f"{root}/shared/in is a mount"]


def test_a_name_of_ours_is_that_of_one_deployment(node):
    dummy, engine, docker = node
    engine.images["sha256:i1"].append(f"sparkops-kept:d-x-{1:012x}")
    leftovers.untag(leftovers.DockerApi(docker.socket_path), "d")
    assert engine.images["sha256:i1"] == ["reg/x:1", f"sparkops-kept:d-x-{1:012x}"]
    assert engine.images["sha256:i2"] == [f"sparkops-kept:d-{2:012x}"], "the last name is not taken away, for the image would go with it"


# --- uninstall


def uninstall(node, capsys, **more):
    root, dummy, docker = node
    return run(node_uninstall, capsys, deployment="d", state_root=str(root), weights_root=str(root / "weights"), engram_root=str(root / "engram"),
               libexec=str(root.parent / "libexec"), docker_socket=docker.socket_path, **more)


def test_uninstall_takes_all_but_weights_and_on_request_these_too(node, capsys):
    root, engine, dummy = node
    (root.parent / "libexec").mkdir()
    (root / "keys").mkdir()
    done = uninstall(node, capsys)
    assert done["last"] and os.listdir(root) == ["weights"] and not (root.parent / "libexec").exists()
    assert all((root / "weights" / tree).is_dir() for tree in TREES)
    # Images that no record of this deployment names are not its.
    assert set(engine.images) == {"sha256:i0", "sha256:foreign"}
    again = uninstall(node, capsys, weights=True, artefacts=["acme--tiny/one"])
    assert what(again["removed"]) == [("weights", "one")], "of the others no record is left that says whose they were"


def test_uninstall_with_weights_takes_those_of_its_records(node, capsys):
    root = node[0]
    (root / "weights" / leftovers.INCOMING / "acme--tiny").mkdir(parents=True)  # as a download leaves it
    done = uninstall(node, capsys, weights=True)
    assert [one for one in what(done["removed"]) if one[0] == "weights"] == [("weights", "one"), ("weights", "three"), ("weights", "two")]
    assert sorted(os.listdir(root / "weights")) == ["acme--other"]


def test_weights_that_stay_are_known_by_their_real_path(node, capsys):
    """The state root is reached through a link, or the weights in it are one."""
    root, dummy, docker = node
    (root.parent / "link").symlink_to("state")
    more = {"engram_root": str(root / "engram"), "libexec": str(root.parent / "libexec"), "docker_socket": docker.socket_path}
    run(node_uninstall, capsys, deployment="d", state_root=str(root.parent / "link"), weights_root=str(root / "weights"), **more)
    assert all((root / "weights" / tree).is_dir() for tree in TREES)
    (root / "weights").rename(root.parent / "elsewhere")
    (root / "weights").symlink_to("../elsewhere")
    run(node_uninstall, capsys, deployment="d", state_root=str(root), weights_root=str(root.parent / "elsewhere"), **more)
    assert all((root / "weights" / tree).is_dir() for tree in TREES)


def test_what_another_deployment_needs_stays(node, capsys):
    root, engine, dummy = node
    (root / "keys").mkdir()
    (root / "e").mkdir()
    _history.keep(str(root / "e"), record(9, "two", "sha256:i2"), 10)
    done = uninstall(node, capsys, weights=True)
    assert not done["last"] and (root / "keys").is_dir() and (root / "e" / "last_good.json").exists()
    assert (root / "weights" / "acme--tiny" / "two").is_dir() and "sha256:i2" in engine.images
    assert {one["what"].split("/")[-1].split(" ")[0]: one["kept"] for one in done["kept"]}["two"] == "deployment e"


def test_nothing_is_removed_while_a_rank_runs_and_check_mode_only_lists(node, capsys):
    root, engine, dummy = node
    engine.containers = [{"Names": ["/d-rank0"], "State": "running", "ImageID": "sha256:i3", "Labels": {"sparkops.deployment": "d"}, "Mounts": []}]
    assert "d-rank0 runs" in uninstall(node, capsys)["msg"]
    preview = uninstall(node, capsys, _ansible_check_mode=True)
    assert ("container", "d-rank0") in what(preview["removed"]) and (root / "d").is_dir()


def test_a_check_that_was_left_over_goes_and_keeps_no_image(node, capsys):
    root, engine, docker = node
    left = {"Names": ["/sparkops-check-d"], "State": "exited", "ImageID": "sha256:i3", "Labels": {"sparkops.check": "d"}, "Mounts": []}
    engine.containers = [left, {**left, "Names": ["/sparkops-check-e"], "Labels": {"sparkops.check": "e"}}]
    assert [name for kind, name in what(uninstall(node, capsys, _ansible_check_mode=True)["removed"]) if kind == "container"] == ["sparkops-check-d"]
    engine.containers = [left]
    docker.routes[("DELETE", "/containers/sparkops-check-d")] = (204, None)
    done = uninstall(node, capsys, images=True)
    assert "DELETE" in {request["method"] for request in docker.requests if request["path"].endswith("/containers/sparkops-check-d")}
    assert not [one for one in done["kept"] if "sparkops-check" in one["kept"]] and "sha256:i3" not in engine.images


# --- what runs, and the way to another


def test_the_deployments_of_a_node(node, capsys):
    root, engine, docker = node
    (root / "d" / "rank.json").write_text('{"rank": 1}')
    engine.containers = [{"Names": ["/d-rank1"], "State": "running", "ImageID": "sha256:i3", "Labels": {"sparkops.deployment": "d"}}]
    found = run(deployment_info, capsys, state_root=str(root), docker_socket=docker.socket_path)["deployments"]
    assert [(one["name"], one["rank"], one["container"], one["running"], one["last_good"]["id"]) for one in found] == [("d", 1, "d-rank1", True, f"{3:012x}")]


def deployment(name, running=True, nodes=("a", "b"), number=1, proven=True):
    good = _history.brief({**record(number, "one", "sha256:i1"), "nodes": list(nodes)})
    return {"name": name, "running": running, "last_good": good if proven else None}


PLAN = {"deployment": "new", "nodes": ["a", "b"], "head": "a"}


@pytest.mark.parametrize(
    "a, b, name, refusal",
    [
        ([deployment("old")], [deployment("old")], "old", ""),
        ([deployment("old")], [deployment("old", running=False)], "old", ""),
        ([deployment("new")], [deployment("new")], "", ""),
        ([], [], "", ""),
        ([deployment("old"), deployment("older")], [], "", "switch.several"),
        ([deployment("old", proven=False)], [deployment("old", proven=False)], "", "switch.unproven"),
        ([deployment("old")], [deployment("old", number=2)], "", "switch.unproven"),
        ([deployment("old", nodes=("a", "b", "c"))], [deployment("old", nodes=("a", "b", "c"))], "", "switch.nodes"),
    ],
)
def test_what_a_switch_leaves(a, b, name, refusal):
    hosts = {"a": {"__switch_found": {"deployments": a}}, "b": {"__switch_found": {"deployments": b}}}
    found = filters.switch_source(hosts, PLAN)
    assert found["name"] == name and refusal in found["refusal"] and bool(refusal) == bool(found["refusal"])


def test_removals_are_told_with_sizes():
    answer = {"removed": [{"kind": "weights", "what": "/w/x", "size": 3 << 30}], "kept": [{"kind": "image", "what": "y", "size": 10, "kept": "container z"}]}
    assert filters.removal_lines(answer, True) == ["would remove weights /w/x (3.0 GiB)", "keeps image y (10 B): container z", "would free 3.0 GiB"]


def test_what_was_checked_is_told_for_each_rank():
    plan = {"nodes": ["a", "b"], "head": "a", "ranks": 2}
    manifest = {"files": [{"path": "x", "size": 1 << 20}, {"path": "y", "size": 1 << 20}]}
    host = {
        "spark_image": {"identity": "sha256:" + "1" * 64}, "spark_fabric": {"interface": "eth1", "address": "198.51.100.11"},
        "__serve_manifests": {"artefacts": [{"manifest": manifest}]}, "__memory_report": {"memory": {"level": 1 << 30, "basis": "projected"}},
    }
    lines = filters.checked_lines({"a": host, "b": {}}, plan)
    assert "image sha256:111111111111, 2 files of 2.0 MiB" in lines[0]
    assert "fabric eth1 198.51.100.11" in lines[0] and "memory 1.0 GiB available (projected)" in lines[0]
    assert "image unknown" in lines[1] and "memory not known" in lines[1]
