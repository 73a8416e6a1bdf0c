# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An index of two platforms, two workers at once, and the image's own tests. The rest of role image is in molecule/image."""

from __future__ import annotations

import json
import typing as t

import pytest
from conftest import STUB, Played, inventory_with, on, play
from lab_registry import TWO_PLATFORMS, publish_two_platforms

DEPLOYMENT, TRIO = "lab_image", "lab_trio"
NODES = ("spark-1", "spark-2", "spark-3")
CHECKED, BIG = "scenario/checked", "scenario/big"
TESTS = "/opt/lab/tests"
PART_BYTES = 20_000_000


def image(*arguments: str, **settings: t.Any) -> Played:
    return play("image", *arguments, variables={"serve_deployment": DEPLOYMENT, **settings})


def changed(done: Played) -> list[str]:
    assert done.code == 0, done.text[-4000:]
    return [node for node, count in done.changed.items() if count]


def document(node: str, reference: str) -> dict[str, t.Any]:
    return json.loads(on(node, f"docker image inspect {reference}"))[0]


def forget(*references: str) -> None:
    for node in NODES:
        on(node, f"docker image rm --force {' '.join(references)}", check=False)


@pytest.fixture(name="digests", scope="module", autouse=True)
def fixture_digests():
    """A pair with the stub, and the index at the registry."""
    made = (TWO_PLATFORMS, f"{CHECKED}:1", f"{CHECKED}:2", f"{BIG}:layers", f"{BIG}:archive", f"{BIG}:waited")
    forget(*made)
    for name in ("bootstrap", "image"):
        done = play(name, variables={"serve_deployment": DEPLOYMENT, "image_reference": STUB})
        assert done.code == 0, done.text[-3000:]
    yield publish_two_platforms()
    forget(*made)
    # A deployment that has staged something counts as one of the node, for prune and uninstall.
    for node in NODES:
        on(node, f"rm -rf /var/lib/sparkops/{DEPLOYMENT} /var/lib/sparkops/{TRIO}")


def test_an_index_and_its_platform_are_one_image_and_nothing_comes_twice(digests):
    assert changed(image(image_reference=TWO_PLATFORMS)) == ["spark-1", "spark-2"]
    head, worker = document("spark-1", TWO_PLATFORMS), document("spark-2", TWO_PLATFORMS)
    assert head["Architecture"] == worker["Architecture"] == "amd64" and head["RootFS"] == worker["RootFS"] == document("spark-1", STUB)["RootFS"]
    assert any(entry.endswith(digests["index"]) for entry in head["RepoDigests"]), head["RepoDigests"]
    assert digests["index"] in json.loads(on("spark-2", "cat /var/lib/sparkops/images.json"))["images"][worker["Id"]]["digests"]
    # Asked for the newest, the registry names the index and the node has a platform of it.
    assert changed(image(image_reference=TWO_PLATFORMS, image_pull_policy="always")) == []
    assert changed(image(image_reference=TWO_PLATFORMS, image_digest=digests["index"])) == []
    # The same image pinned by the digest of its platform: perhaps a name more, no layer, and then nothing.
    assert image(image_reference=TWO_PLATFORMS, image_digest=digests["amd64"]).code == 0
    assert changed(image(image_reference=TWO_PLATFORMS, image_digest=digests["amd64"])) == []
    assert document("spark-2", TWO_PLATFORMS)["Id"] == worker["Id"]


def test_the_digest_of_another_platform_is_refused_before_anything_is_moved(digests):
    # Not the whole table: it has ages, which change by themselves.
    listing = "docker image ls --all --digests --no-trunc --format '{{.ID}} {{.Repository}} {{.Tag}} {{.Digest}}'"
    images = on("spark-1", listing)
    done = image(image_reference=TWO_PLATFORMS, image_digest=digests["arm64"])
    assert done.code != 0 and "image.platform" in done.text and "linux/arm64" in done.text, done.text[-3000:]
    assert on("spark-1", listing) == images


def test_never_ship_accepts_a_worker_that_has_the_heads_image():
    assert image(image_reference=STUB).code == 0
    settings = {"image_reference": STUB, "image_ship_mode": "never"}
    for policy in ("missing", "always", "never"):
        # The worker reaches no registry, so that it cannot say whether the tag has moved.
        assert changed(image(image_pull_policy=policy, **settings)) == [], policy


def test_a_head_that_does_not_answer_for_a_while_is_waited_for():
    """Its sshd starts again, or a cable is put back: the link is there 40 s after the play has begun."""
    reference, rule = f"{BIG}:waited", "INPUT -i eth1 -p tcp --dport 22 -j REJECT --reject-with tcp-reset"
    on("spark-1", f"cd $(mktemp -d) && head -c 1000000 /dev/urandom >part && tar -cf - part | docker import - {reference} && rm -r $PWD")
    on("spark-1", f"iptables -I {rule} && (nohup sh -c 'sleep 40; iptables -D {rule}' >/dev/null 2>&1 &)")
    done = image(image_reference=reference, image_pull_policy="never")
    assert "spark-2" in changed(done) and document("spark-2", reference)["RootFS"] == document("spark-1", reference)["RootFS"]
    ship = json.loads(on("spark-2", f"cat /var/lib/sparkops/{DEPLOYMENT}/jobs/ship/result.json"))["ship"]
    assert ship["seconds"] > 10 and ship["bytes"] < 1.2 * 1_000_000, ship


@pytest.fixture(name="trio", scope="module")
def fixture_trio(tmp_path_factory):
    variables = {"serve_nodes": list(NODES), "serve_profile": "lab_tiny", "serve_deployment": TRIO}
    inventory = inventory_with(tmp_path_factory.mktemp("trio"), {"trio": {"hosts": dict.fromkeys(NODES, {}), "vars": variables}})
    done = play("bootstrap", inventory=inventory, variables={"spark_hosts": "trio"})
    assert done.code == 0, done.text[-3000:]
    return inventory


@pytest.mark.parametrize("mode", ["layers", "archive"])
def test_two_workers_fetch_at_once_and_nothing_is_left_on_the_way(trio, mode):
    reference = f"{BIG}:{mode}"
    part = f"cd $(mktemp -d) && head -c {PART_BYTES} /dev/urandom >part"
    on("spark-1", f"{part} && tar -cf - part | docker import - {reference} && rm -r $PWD")
    variables = {"spark_hosts": "trio", "image_reference": reference, "image_pull_policy": "never", "image_ship_mode": mode}
    done = play("image", inventory=trio, variables=variables)
    assert done.code == 0 and done.changed["spark-2"] and done.changed["spark-3"], done.text[-4000:]
    for node in NODES[1:]:
        assert document(node, reference)["RootFS"] == document("spark-1", reference)["RootFS"]
        ship = json.loads(on(node, f"cat /var/lib/sparkops/{TRIO}/jobs/ship/result.json"))["ship"]
        assert ship["mode"] == mode and PART_BYTES < ship["bytes"] < 1.1 * PART_BYTES, ship
    for node in NODES:
        assert on(node, "ls -A /var/lib/sparkops/image-ship 2>/dev/null || true") == ""
    assert changed(play("image", inventory=trio, variables=variables)) == []


@pytest.fixture(name="checks", scope="module")
def fixture_checks(tmp_path_factory) -> dict[str, t.Any]:
    """Two images with tests of their own, of which one fails in the second, and the profile that knows where they are."""
    folder = tmp_path_factory.mktemp("profiles")
    check = {"commands": [["python3", f"{TESTS}/test_first.py"]]}
    profile = {"format": 1, "description": "An image with tests of its own.", "extends": "lab_tiny", "image": {"self_check": check}}
    (folder / "lab_checked.yml").write_text(json.dumps(profile))
    for tag, code in (("1", 0), ("2", 3)):
        files = f"cd $(mktemp -d) && mkdir tests && echo 'print(6 * 7)' >tests/test_first.py && echo 'raise SystemExit({code})' >tests/test_second.py"
        dockerfile = f"printf 'FROM {STUB}\\nCOPY tests {TESTS}\\n' >Dockerfile"
        on("spark-1", f"{files} && {dockerfile} && docker build --quiet --tag {CHECKED}:{tag} . && rm -r $PWD")
    return {"serve_profile": "lab_checked", "serve_profile_paths": [str(folder)], "image_pull_policy": "never"}


def test_the_tag_selftest_runs_the_images_own_tests_on_every_rank(checks):
    good = {**checks, "image_reference": f"{CHECKED}:1"}
    assert "spark-2" in changed(image(**good))
    tested = image("--tags", "selftest", **good)
    assert tested.code == 0, tested.text[-4000:]
    for node in NODES[:2]:
        log = on(node, f"cat $(ls -t /var/lib/sparkops/{DEPLOYMENT}/logs/image-check-*.log | head -n 1)")
        assert "42" in log and f"2 tests in {TESTS}, 0 failed: none" in log and "[ended with 0]" in log, log
        assert on(node, "docker ps --all --quiet --filter label=sparkops.check") == ""
        # The first to write there: what the account does later has to find its own directory.
        owner = on(node, "stat -c %U /var/lib/sparkops").strip()
        assert on(node, f"stat -c %U /var/lib/sparkops/{DEPLOYMENT} /var/lib/sparkops/{DEPLOYMENT}/logs").split() == [owner, owner]


def test_a_test_of_the_image_that_fails_is_named_on_every_rank(checks):
    bad = {**checks, "image_reference": f"{CHECKED}:2"}
    assert "spark-2" in changed(image(**bad))
    tested = image("--tags", "selftest", **bad)
    assert tested.code != 0 and "image.check" in tested.text and "test_second.py: ended with 3" in tested.text, tested.text[-4000:]
    for node in NODES[:2]:
        assert f"{node}: self-check of image {CHECKED}:2" in tested.text
