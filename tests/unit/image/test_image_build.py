# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _unit
from ansible_collections.sparkops.inference.plugins.module_utils._image_build import Context, floating_bases, stamp_argument, with_base
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._image_stamp import Rule, recipe_files, stamps
from ansible_collections.sparkops.inference.plugins.modules import image_build
from fake_docker import FakeDocker
from image_documents import document
from module_call import call

TAGGED = "registry.example/team/app:1"
DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG BASE=x
FROM vllm/vllm-openai:glm53@sha256:905c02933be6021301db2dc284e24e3727467aa3a0f63b41d609885778a07bce AS base
FROM --platform=linux/arm64 debian:13 as tools
FROM base
ARG RECIPE_STAMP
LABEL dsv41.recipe.stamp="${RECIPE_STAMP}" other=1
COPY overlay /overlay
"""


@pytest.fixture
def recipe(tmp_path):
    """A checkout with all that the rules have to tell apart."""
    root = tmp_path / "recipe"
    for path in (
        "Dockerfile",
        "README.md",
        "start.sh",
        "overlay/exl3.py",
        "overlay/__pycache__/exl3.cpython-312.pyc",
        "overlay/store.so",
        "files/chat.jinja",
        "files/deep/er.py",
        "files/nfs-share.sh",
        "files/nfs-server/Dockerfile",
        "tests/test_a.py",
        "tests/old.pyc",
        "ablit/vector.py",
        "ablit/transplant/big.py",
        "scripts/pack.py",
        ".git/HEAD",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"content of {path}\n")
    (root / "Dockerfile").write_text(DOCKERFILE)
    os.symlink("chat.jinja", root / "files/link")
    return root


@pytest.mark.parametrize(
    ("label", "files"),
    [
        (
            "dsv41.recipe.stamp",
            ["Dockerfile", "files/chat.jinja", "files/deep/er.py", "files/nfs-server/Dockerfile", "files/nfs-share.sh", "overlay/exl3.py", "tests/test_a.py"],
        ),
        (
            "glm53.recipe.stamp",
            ["Dockerfile", "ablit/vector.py", "files/chat.jinja", "files/deep/er.py", "overlay/exl3.py", "overlay/store.so", "tests/test_a.py"],
        ),
    ],
)
def test_which_files_are_in_the_stamp(recipe, label, files):
    assert recipe_files(str(recipe), Rule.of(label)) == files


def test_a_rule_of_the_profile_and_one_for_unknown_labels(recipe):
    given = Rule.of("x", {"folders": ["scripts"], "exclude": []})
    assert recipe_files(str(recipe), given) == ["Dockerfile", "scripts/pack.py"]
    everything = recipe_files(str(recipe), Rule.of("x"))
    assert "README.md" in everything and "ablit/transplant/big.py" in everything and not [path for path in everything if path.startswith(".git/")]


def test_the_stamp_is_what_sha256sum_gives(recipe):
    paths = "Dockerfile files/chat.jinja files/deep/er.py files/nfs-server/Dockerfile files/nfs-share.sh overlay/exl3.py tests/test_a.py"
    command = f"sha256sum {paths} | sort | sha256sum"
    wanted = subprocess.run(command, shell=True, cwd=recipe, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout.split()[0]
    assert stamps(str(recipe), Rule.of("dsv41.recipe.stamp"))[0] == wanted


def test_a_stamp_with_the_publishers_paths_is_known_too(recipe):
    paths = recipe_files(str(recipe), Rule.of("glm53.recipe.stamp"))
    text = "".join(f"{hashlib.sha256((recipe / path).read_bytes()).hexdigest()}  {recipe}/{path}\n" for path in paths)
    assert hashlib.sha256(text.encode()).hexdigest() in stamps(str(recipe), Rule.of("glm53.recipe.stamp"))


def test_the_stamp_does_not_depend_on_the_place(recipe, tmp_path):
    before = stamps(str(recipe), Rule.of("glm53.recipe.stamp"))[0]
    shutil.copytree(recipe, tmp_path / "elsewhere/deep/clone", symlinks=True)
    assert stamps(str(tmp_path / "elsewhere/deep/clone"), Rule.of("glm53.recipe.stamp"))[0] == before


@pytest.mark.parametrize(
    ("path", "moves"),
    [
        ("overlay/exl3.py", True),
        ("tests/test_a.py", True),
        ("README.md", False),
        ("scripts/pack.py", False),
        ("overlay/__pycache__/exl3.cpython-312.pyc", False),
        (".git/HEAD", False),
    ],
)
def test_what_moves_the_stamp(recipe, path, moves):
    before = stamps(str(recipe), Rule.of("dsv41.recipe.stamp"))[0]
    (recipe / path).write_text("other")
    assert (stamps(str(recipe), Rule.of("dsv41.recipe.stamp"))[0] != before) is moves


# Dockerfiles


def test_the_first_base_is_replaced_and_its_digest_dropped():
    changed = with_base(DOCKERFILE, "local/base:1")
    assert "FROM local/base:1 AS base\n" in changed and "sha256:905c" not in changed
    assert changed.count("FROM") == 3 and "FROM --platform=linux/arm64 debian:13 as tools" in changed


def test_bases_without_digest_are_named():
    assert floating_bases(DOCKERFILE) == ["debian:13"]
    assert floating_bases("FROM scratch\nFROM ${BASE}\n") == []


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        ('LABEL a.stamp="${RECIPE_STAMP}"', "RECIPE_STAMP"),
        ("LABEL a.stamp=$STAMP", "STAMP"),
        ('LABEL "a.stamp"="$STAMP"', "STAMP"),
        ("LABEL a.stamp=fixed", None),
        ("", None),
    ],
)
def test_the_argument_of_the_stamp(line, argument):
    assert stamp_argument(line, "a.stamp") == argument


def test_the_context_has_inputs_and_another_dockerfile_and_the_checkout_stays(recipe, tmp_path):
    wheel = tmp_path / "instanttensor.whl"
    wheel.write_text("wheel")
    link = tmp_path / "newest.whl"
    link.symlink_to(wheel)
    before = sorted(path for path in recipe.rglob("*"))
    target = io.BytesIO()
    Context(str(recipe), "FROM local\n", {"wheels/instanttensor.whl": str(link), "files/chat.jinja": str(wheel)}).write(target)
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive if member.isreg()}
    assert files["Dockerfile"] == b"FROM local\n"
    assert files["wheels/instanttensor.whl"] == files["files/chat.jinja"] == b"wheel"
    assert files["overlay/exl3.py"] == b"content of overlay/exl3.py\n" and ".git/HEAD" not in files
    assert sorted(recipe.rglob("*")) == before


# The module


@pytest.mark.parametrize(
    ("mode", "unavailable", "differs", "build"),
    [
        ("never", True, True, False),
        ("never", False, True, False),
        ("when_unavailable", True, True, True),
        ("when_unavailable", False, True, False),
        ("when_unavailable", True, False, False),
        ("on_stamp_change", False, True, True),
        ("on_stamp_change", True, True, True),
        ("on_stamp_change", False, False, False),
        ("always", False, False, True),
        ("always", True, True, True),
    ],
)
def test_when_it_is_built(mode, unavailable, differs, build):
    assert image_build.must_build(mode, unavailable, differs) is build


DOCKER = """#!/bin/sh
echo "$@" >{folder}/argv
cat >{folder}/context.tar
echo "Step 1"
echo "{last}" >&2
exit {code}
"""


class Head:
    """A head with a checkout, an engine, and a docker client that builds nothing."""

    def __init__(self, folder, recipe, engine, monkeypatch):
        self.folder, self.recipe, self.engine = folder, recipe, engine
        engine.routes[("GET", "/info")] = {"DockerRootDir": str(folder)}
        engine.routes[("GET", "/version")] = {"Arch": "arm64"}
        (folder / "bin").mkdir()
        (folder / "state").mkdir()
        self.client(0)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        self.stamp = stamps(str(recipe), Rule.of("dsv41.recipe.stamp"))[0]

    def client(self, code, last="done"):
        path = self.folder / "bin/docker"
        path.write_text(DOCKER.format(folder=self.folder, code=code, last=last))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def image(self, stamp, layers=3, name=TAGGED, architecture="arm64"):
        found = document(
            Id=f"sha256:{layers:064}",
            Architecture=architecture,
            RepoTags=[name],
            RepoDigests=[],
            config={"Labels": {"dsv41.recipe.stamp": stamp}},
            RootFS={"Layers": ["sha256:" + f"{n:064}" for n in range(layers)]},
        )
        self.engine.routes[("GET", f"/images/{name}/json")] = found
        self.engine.routes[("POST", f"/images/{found['Id']}/tag")] = lambda request: self.adopted(found)
        return found

    def adopted(self, found):
        self.engine.routes[("GET", f"/images/{TAGGED}/json")] = found
        return 201, None

    def run(self, check=False, **arguments):
        wanted = {
            "reference": TAGGED,
            "recipe": str(self.recipe),
            "label": "dsv41.recipe.stamp",
            "node": "spark-1",
            "deployment": "test",
            "state_dir": str(self.folder / "state/test"),
            "state_root": str(self.folder / "state"),
            "socket": self.engine.socket_path,
            "shared": True,
            **arguments,
        }
        return call(image_build, check=check, **wanted)

    def argv(self):
        return (self.folder / "argv").read_text().split()


@pytest.fixture
def head(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(_unit, "available", lambda module: False)
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(False, "", 0))
    with FakeDocker() as engine:
        yield Head(tmp_path, recipe, engine, monkeypatch)


def test_the_same_stamp_says_nothing(head):
    head.image(head.stamp)
    result = head.run(mode="on_stamp_change")
    assert (result["changed"], result["differs"], result["notices"], result.get("ansible_facts")) == (False, False, [], {})


def test_another_stamp_is_reported_and_nothing_is_built(head):
    head.image("published")
    result = head.run()
    assert result["differs"] and not result["changed"]
    assert head.stamp in result["notices"][0] and "published" in result["notices"][0] and "image_build=on_stamp_change" in result["notices"][0]
    assert not (head.folder / "argv").exists()


def test_a_build_has_stamp_log_and_name(head):
    head.image(head.stamp, layers=5, name=f"{TAGGED}-building")
    predicted = head.run(mode="when_unavailable", unavailable=True, check=True)
    assert predicted["changed"] and predicted["known_after"] == ["image"] and not (head.folder / "argv").exists()
    result = head.run(mode="when_unavailable", unavailable=True, build_args={"MAX_JOBS": "8"})
    assert result["changed"] and len(result["ansible_facts"]["spark_image"]["layers"]) == 5, result
    assert head.argv() == [
        "build",
        f"--tag={TAGGED}-building",
        f"--label=dsv41.recipe.stamp={head.stamp}",
        "--build-arg=MAX_JOBS=8",
        f"--build-arg=RECIPE_STAMP={head.stamp}",
        "-",
    ]
    assert "Step 1\ndone\n" == open(result["log"], encoding="utf-8").read()
    assert f"/images/{TAGGED}-building" in head.engine.asked("DELETE")
    assert "debian:13" in result["notices"][0]
    begun = json.loads((head.folder / "state/test/jobs/build/request.json").read_text())
    last = head.run(mode="when_unavailable", unavailable=True, run_id=begun["run_id"])
    assert last["notices"] == result["notices"] and last["changed"], "a build takes many slices, and the last one is what the user sees"
    assert result["image"]["id"] in Record(str(head.folder / "state")).read()["images"], "peers may have it"
    staged = head.folder / "state/test/staged.json"
    assert json.loads(staged.read_text())["image"] == result["image"]["id"], "it is there for this deployment's next start"
    staged.unlink()
    again = head.run(mode="when_unavailable", unavailable=True)
    assert not again["changed"] and again["ansible_facts"]["spark_image"]["present"], "what was built stands for what cannot be pulled"
    assert json.loads(staged.read_text())["image"] == result["image"]["id"]


def test_the_newest_ten_logs_of_builds_stay_and_those_of_others(head):
    folder = head.folder / "state/test/logs"
    folder.mkdir(parents=True)
    old = [f"image-build-202601{day:02}T000000Z.log" for day in range(1, 13)]
    others = ["20260101T102030-cccccccccccc.log", "image-check-20260101T000000Z.log"]
    for name in [*old, *others]:
        (folder / name).write_text("")
    head.client(7, "no")
    head.run(mode="always")
    names = {path.name for path in folder.iterdir()}
    assert names.issuperset([*old[3:], *others]) and not names & set(old[:3]) and len(names) == 10 + len(others)


@pytest.mark.parametrize(("stamp", "built"), [("published", True), (None, False)])
def test_a_prediction_says_whether_nobody_can_have_the_image_yet(head, stamp, built):
    """A build of the same recipe may come out of the builder's cache as what is there."""
    head.image(stamp or head.stamp)
    assert head.run(mode="always", check=True)["ansible_facts"]["spark_image"]["built"] is built


@pytest.mark.parametrize(("mode", "changed"), [("never", False), ("when_unavailable", False), ("on_stamp_change", True), ("always", True)])
def test_an_engine_that_bootstrap_may_still_install_is_no_failure_of_a_prediction(head, tmp_path, mode, changed):
    predicted = head.run(mode=mode, check=True, socket=str(tmp_path / "none"))
    assert (predicted["rc"], predicted.get("changed"), predicted.get("notices")) == (0, changed, []), predicted
    assert ("spark_image" in predicted["ansible_facts"]) is changed
    assert "image.engine" in head.run(mode=mode, socket=str(tmp_path / "none"))["msg"]


@pytest.mark.parametrize(("mode", "changed"), [("never", False), ("on_stamp_change", True)])
def test_a_recipe_that_is_only_predicted_is_not_looked_for(head, tmp_path, mode, changed):
    predicted = head.run(mode=mode, check=True, recipe=str(tmp_path / "none"), fetched=True)
    assert (predicted["rc"], predicted["changed"], predicted["known_after"]) == (0, changed, ["recipe"] if changed else []), predicted
    assert "image.recipe" in head.run(mode=mode, recipe=str(tmp_path / "none"), fetched=True)["msg"]


def test_a_build_that_fails_shows_its_last_lines(head):
    head.client(7, "\n".join(f"line {number}" for number in range(100)))
    result = head.run(mode="always")
    assert result["rc"] == 1 and "image.build" in result["msg"] and "ended with 7" in result["msg"]
    assert "line 99" in result["msg"] and "line 60" in result["msg"] and "line 59\n" not in result["msg"]


def test_too_many_layers_never_get_the_name(head):
    head.image(head.stamp, layers=124, name=f"{TAGGED}-building")
    result = head.run(mode="always")
    assert "image.layers" in result["msg"] and "124 layers" in result["msg"]
    assert not [path for path in head.engine.asked("POST") if path.endswith("/tag")]


@pytest.mark.parametrize("platform", [None, "linux/arm64"])
def test_the_published_image_of_another_platform_does_not_stand_for_the_wanted_one(head, platform):
    """It lies under the name and was made of this very recipe, so its stamp is right."""
    head.image(head.stamp, architecture="amd64")
    wanted = {"mode": "when_unavailable", "unavailable": True, "platform": platform}
    assert head.run(check=True, **wanted)["known_after"] == ["image"]
    head.image(head.stamp, layers=5, name=f"{TAGGED}-building")
    assert head.run(**wanted)["image"]["platform"] == "linux/arm64"
    assert (head.folder / "argv").exists()


def test_a_build_for_another_platform_never_gets_the_name(head):
    head.image(head.stamp, name=f"{TAGGED}-building", architecture="amd64")
    result = head.run(mode="always")
    assert "image.platform" in result["msg"] and "linux/amd64" in result["msg"] and "linux/arm64" in result["msg"]
    assert not [path for path in head.engine.asked("POST") if path.endswith("/tag")]


def test_all_that_lacks_is_named_at_once(head):
    result = head.run(recipe=str(head.folder / "none"), inputs={"a.whl": str(head.folder / "a.whl")})
    assert len(result["refusals"]) == 2 and "image_recipe" in result["msg"] and "image_build_inputs" in result["msg"]


def test_a_build_needs_room(head):
    assert "image.space" in head.run(mode="always", size=1 << 60)["msg"]
    assert not (head.folder / "argv").exists()


def test_a_build_of_another_image_that_was_going_on_is_not_taken_for_the_wanted_one(head):
    job = head.folder / "state/test/jobs/build"
    job.mkdir(parents=True)
    (job / "request.json").write_text(json.dumps({"run_id": "1", "reference": "registry.example/team/other:1"}))
    (job / "result.json").write_text(json.dumps({"run_id": "1", "ok": True, "log": "x"}))
    head.image(head.stamp, name=f"{TAGGED}-building")
    result = head.run(mode="when_unavailable", unavailable=True, run_id="1")
    assert result["image"]["present"] and f"--tag={TAGGED}-building" in head.argv()
