# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One image on two kinds of engine: Docker 20 with its own store, and Docker 26 with containerd's, in both directions.

Needs ``tests/lab/lab up --nodes 4 --newer spark-4``.
"""

from __future__ import annotations

import json
import typing as t

import pytest
from conftest import STUB, Played, inventory_with, on, play
from lab_registry import TWO_PLATFORMS, publish_two_platforms

OLD, NEW = "spark-1", "spark-4"
SECOND = STUB.replace(":1", ":2")
# The lab's own rule, by which only the first node reaches the registries.
UNREACHABLE = "OUTPUT --protocol tcp --destination 198.18.0.1 --match multiport --destination-ports 5000,5001 --jump REJECT"


@pytest.fixture(name="inventories", scope="module")
def fixture_inventories(tmp_path_factory) -> dict[str, str]:
    """Two groups of the same nodes: each of them is the head of one. A node belongs to one group at a time, so each has its inventory."""
    stores = {node: json.loads(on(node, "docker info --format '{{json .DriverStatus}}'")) for node in (OLD, NEW)}
    assert "containerd" in json.dumps(stores[NEW]) and "containerd" not in json.dumps(stores[OLD]), stores
    print({node: on(node, "docker version --format '{{.Server.Version}}'").strip() for node in (OLD, NEW)})
    newer = {"ansible_host": "198.18.0.24", "ansible_user": "dave", "fabric_address": "198.51.100.14"}
    found = {}
    for name, head, worker in (("to_new", OLD, NEW), ("to_old", NEW, OLD)):
        # As one of the lab's pair the new node has its settings; those of the group, whose name comes later, win.
        group = {"hosts": {OLD: {}, NEW: {}}, "vars": {"serve_nodes": [head, worker], "serve_deployment": name}}
        found[name] = inventory_with(tmp_path_factory.mktemp(name), {"sparks": {"hosts": {NEW: newer}}, name: group})
        done = play("bootstrap", inventory=found[name], variables={"spark_hosts": name})
        assert done.code == 0, done.text[-3000:]
    return found


def image(inventories: dict[str, str], group: str, **settings: t.Any) -> Played:
    return play("image", inventory=inventories[group], variables={"spark_hosts": group, **settings})


def document(node: str, reference: str) -> dict[str, t.Any]:
    return json.loads(on(node, f"docker image inspect {reference}"))[0]


def forget(node: str, *references: str) -> None:
    on(node, f"docker image rm --force {' '.join(references)}", check=False)


def ship(node: str, deployment: str) -> dict[str, t.Any]:
    return json.loads(on(node, f"cat /var/lib/sparkops/{deployment}/jobs/ship/result.json"))["ship"]


def same(reference: str) -> None:
    """One identity, though the ids are of two kinds."""
    old, new = document(OLD, reference), document(NEW, reference)
    assert old["RootFS"]["Layers"] == new["RootFS"]["Layers"]
    for part in ("Env", "Entrypoint", "Cmd", "WorkingDir"):
        assert (old["Config"].get(part) or None) == (new["Config"].get(part) or None), part
    assert old["Id"] != new["Id"], "the ids are the same, so this lab shows nothing"


@pytest.mark.parametrize("mode", ["layers", "archive", "stream"])
def test_from_the_old_engine_to_the_new_one_and_not_twice(inventories, mode):
    forget(NEW, STUB, SECOND)
    done = image(inventories, "to_new", image_reference=STUB, image_ship_mode=mode)
    assert done.code == 0 and done.changed[NEW] > 0, done.text[-4000:]
    same(STUB)
    assert ship(NEW, "to_new")["mode"] == mode
    again = image(inventories, "to_new", image_reference=STUB, image_ship_mode=mode)
    assert again.code == 0 and again.changed == {OLD: 0, NEW: 0}, again.text[-4000:]
    # What arrived can be run.
    assert on(NEW, f"docker run --rm --entrypoint python3 {STUB} -c 'print(6 * 7)'").strip() == "42"


def test_only_the_last_small_layer_comes_for_the_next_image(inventories):
    assert image(inventories, "to_new", image_reference=STUB).code == 0
    forget(NEW, SECOND)
    done = image(inventories, "to_new", image_reference=SECOND)
    assert done.code == 0 and done.changed[NEW] > 0, done.text[-4000:]
    same(SECOND)
    assert ship(NEW, "to_new")["bytes"] <= 20_000


@pytest.mark.parametrize("mode", ["layers", "archive", "stream"])
def test_from_the_new_engine_to_the_old_one_and_not_twice(inventories, mode):
    assert image(inventories, "to_new", image_reference=STUB).code == 0
    forget(OLD, STUB, SECOND)
    settings = {"image_reference": STUB, "image_ship_mode": mode, "image_pull_policy": "never"}
    done = image(inventories, "to_old", **settings)
    assert done.code == 0 and done.changed[OLD] > 0, done.text[-4000:]
    same(STUB)
    assert ship(OLD, "to_old")["mode"] == mode
    again = image(inventories, "to_old", **settings)
    assert again.code == 0 and again.changed == {OLD: 0, NEW: 0}, again.text[-4000:]


@pytest.fixture(name="index")
def fixture_index() -> t.Iterator[str]:
    """An index of two platforms, and the new engine can pull it."""
    digest = publish_two_platforms()["index"]
    # All that has its layers: what this store has unpacked from one image it does not fetch for the next.
    for node in (OLD, NEW):
        forget(node, TWO_PLATFORMS, STUB, SECOND)
    on(NEW, f"iptables --delete {UNREACHABLE}")
    yield digest
    on(NEW, f"iptables --append {UNREACHABLE}")
    for node in (OLD, NEW):
        forget(node, TWO_PLATFORMS)


def test_an_index_that_the_new_engine_has_pulled_comes_to_the_old_one_in_another_way(inventories, index):
    """Its store keeps the index, which Docker 26 cannot push in part: no layers can be asked for, and the whole archive comes instead."""
    settings = {"image_reference": TWO_PLATFORMS, "image_pull_on": "head"}
    done = image(inventories, "to_old", **settings)
    assert done.code == 0 and done.changed[NEW] > 0 and done.changed[OLD] > 0, done.text[-4000:]
    assert document(NEW, TWO_PLATFORMS)["Id"] == index, "this store does not keep the index, so this lab shows nothing"
    same(TWO_PLATFORMS)
    assert "mode layers failed, stream is tried" in done.text and ship(OLD, "to_old")["mode"] == "stream"
    for policy in ("missing", "always"):
        again = image(inventories, "to_old", image_pull_policy=policy, **settings)
        assert again.code == 0 and again.changed == {OLD: 0, NEW: 0}, again.text[-4000:]


def test_a_store_that_has_unpacked_another_images_layers_says_that_it_cannot_give_them(inventories, index):
    """The stub came by a ship, so its layers have other blobs than the registry's, and the pull of the index fetches none of those."""
    assert image(inventories, "to_new", image_reference=STUB, image_pull_on="head").code == 0
    done = image(inventories, "to_old", image_reference=TWO_PLATFORMS, image_pull_on="head", image_ship_mode="stream")
    assert done.code != 0 and "[image.ship]" in done.text, done.text[-4000:]
    for word in ("names blobs that it has not", "pull it again", "dave@198.51.100.14"):
        assert word in " ".join(done.text.split()), done.text[-4000:]
    assert on(OLD, f"docker image ls -q {TWO_PLATFORMS}") == ""
