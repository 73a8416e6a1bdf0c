# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An image that no registry has: built by the head's own engine as far as allowed, without a network, and brought to the worker."""

from __future__ import annotations

import json
import re
import typing as t

import pytest
from conftest import STUB, Played, on, play

BUILT = "scenario/built:1"
RECIPE, EXTRA = "/home/alice/recipe", "/home/alice/extra"
LABEL = "sparkops.recipe.stamp"
DOCKERFILE = f"""
FROM docker.io/library/debian@sha256:{'0' * 64}
ARG RECIPE_STAMP
COPY overlay /overlay
RUN test -s /overlay/extra
LABEL {LABEL}=${{RECIPE_STAMP}}
"""


def image(*arguments: str, **settings: t.Any) -> Played:
    base = {"serve_deployment": "lab_build", "image_reference": BUILT, "image_recipe": RECIPE}
    return play("image", *arguments, variables={**base, **settings})


def build(*arguments: str, mode: str, **settings: t.Any) -> Played:
    given = {"image_build_base": STUB, "image_build_inputs": {"overlay/extra": EXTRA}, **settings}
    return image(*arguments, image_build=mode, **given)


def changed(done: Played) -> list[str]:
    assert done.code == 0, done.text[-4000:]
    return [node for node, count in done.changed.items() if count]


def document(node: str) -> dict[str, t.Any]:
    return json.loads(on(node, f"docker image inspect {BUILT}"))[0]


def write_recipe(dockerfile: str = DOCKERFILE, word: str = "first") -> None:
    files = f"mkdir -p {RECIPE}/overlay; cat >{RECIPE}/Dockerfile <<'END'\n{dockerfile}\nEND\necho {word} >{RECIPE}/overlay/word; echo given >{EXTRA}"
    on("spark-1", f"{files}; chown -R alice: {RECIPE} {EXTRA}")


@pytest.fixture(name="recipe", scope="module", autouse=True)
def fixture_recipe():
    for name, settings in (("bootstrap", {}), ("image", {"image_reference": STUB})):
        done = play(name, variables={"serve_deployment": "lab_build", **settings})
        assert done.code == 0, done.text[-3000:]
    write_recipe()
    yield
    for node in ("spark-1", "spark-2"):
        on(node, f"docker image rm --force {BUILT}; rm -rf {RECIPE} {EXTRA} /var/lib/sparkops/lab_build", check=False)


def test_an_image_is_built_only_as_far_as_allowed():
    refused = image()
    assert refused.code != 0 and "image_build" in refused.text and "image." in refused.text, refused.text[-3000:]

    assert changed(build("--check", mode="when_unavailable")) == ["spark-1", "spark-2"]
    assert on("spark-1", f"docker image ls -q {BUILT}") == ""
    assert changed(build(mode="when_unavailable")) == ["spark-1", "spark-2"]
    head, worker = document("spark-1"), document("spark-2")
    assert head["RootFS"]["Layers"] == worker["RootFS"]["Layers"]
    stamp = head["Config"]["Labels"][LABEL]
    assert re.fullmatch("[0-9a-f]{64}", stamp) and worker["Config"]["Labels"][LABEL] == stamp
    assert on("spark-2", f"docker run --rm --entrypoint cat {BUILT} /overlay/word /overlay/extra").split() == ["first", "given"]
    assert "RUN test" in on("spark-1", "cat /var/lib/sparkops/lab_build/logs/image-build-*.log")
    assert changed(build(mode="when_unavailable")) == []

    write_recipe(word="second")
    told = build(mode="when_unavailable")
    assert changed(told) == [] and "Nothing is built; image_build=on_stamp_change would build it" in told.text
    assert document("spark-1")["Id"] == head["Id"]
    assert changed(build(mode="on_stamp_change")) == ["spark-1", "spark-2"]
    assert document("spark-2")["Config"]["Labels"][LABEL] == document("spark-1")["Config"]["Labels"][LABEL] != stamp
    assert on("spark-2", f"docker run --rm --entrypoint cat {BUILT} /overlay/word").strip() == "second"
    shipped = json.loads(on("spark-2", "cat /var/lib/sparkops/lab_build/jobs/ship/result.json"))["ship"]
    assert shipped["mode"] == "layers" and shipped["bytes"] < 1_000_000


def test_a_build_that_fails_shows_its_words_and_leaves_the_image():
    before = document("spark-1")["Id"]
    write_recipe(DOCKERFILE + "RUN echo no such kernel; exit 3\n")
    refused = build(mode="on_stamp_change")
    assert refused.code != 0 and "image.build" in refused.text and "no such kernel" in refused.text, refused.text[-3000:]
    assert document("spark-1")["Id"] == before
    assert on("spark-1", "docker image ls --format '{{.Repository}}:{{.Tag}}' | grep building || true") == ""
    lost = build(mode="on_stamp_change", image_build_inputs={"overlay/extra": "/nowhere"})
    assert lost.code != 0 and "image.recipe" in lost.text and "/nowhere" in lost.text


def test_the_head_checks_the_recipe_out_and_asks_nobody_again():
    write_recipe(word="third")
    git = f"git -C {RECIPE} -c user.name=x -c user.email=x@example.org"
    on("spark-1", "apt-get update -q && apt-get install -qy --no-install-recommends git")
    on("spark-1", f"sudo -u alice sh -c '{git} init -q && {git} add . && {git} commit -qm x'")
    commit = on("spark-1", f"sudo -u alice git -C {RECIPE} rev-parse HEAD").strip()
    given = {"image_recipe": None, "image_recipe_repository": f"file://{RECIPE}", "image_recipe_commit": commit, "mode": "on_stamp_change"}

    refused = build(**{**given, "image_recipe_commit": "master"})
    assert refused.code != 0 and "plan.recipe" in refused.text, refused.text[-3000:]
    assert changed(build("--check", **given)) == ["spark-1", "spark-2"]
    assert on("spark-1", "ls /var/lib/sparkops/lab_build").split().count("recipe") == 0
    assert changed(build(**given)) == ["spark-1", "spark-2"]
    assert on("spark-2", f"docker run --rm --entrypoint cat {BUILT} /overlay/word").strip() == "third"
    assert on("spark-1", "stat -c %U /var/lib/sparkops/lab_build/recipe/Dockerfile").strip() == "alice"
    on("spark-1", f"mv {RECIPE} {RECIPE}.away")
    try:
        assert changed(build(**given)) == []
    finally:
        on("spark-1", f"mv {RECIPE}.away {RECIPE}")
