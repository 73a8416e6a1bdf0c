# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Packed Engram rows on a serving pair. The stand-in reads the mounted files as the real reader does; no engine for the CPU knows Engram."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, STUB, inspect, on, play

DEPLOYMENT = "lab_engram"
REVISION = "0123456789abcdef0123456789abcdef01234567"
ROWS = f"/var/lib/sparkops/engram/sparklab--engram-vectors/{REVISION}/tp2"
HUB = os.path.join(os.environ.get("SPARKLAB_CACHE", "/var/cache/sparkops-lab"), "hub/sparklab/engram-vectors")


def variables(**environment):
    return {
        "serve_profile": "lab_engram", "serve_profile_paths": [os.path.join(ROOT, "molecule/engram_pack/profiles")],
        "image_reference": STUB, "serve_ready_timeout": 120, "serve_port": 8898, "serve_rendezvous_port": 29598,
        "serve_environment": {"STUB_ENGRAM": "1,14", **{f"STUB_{name}": value for name, value in environment.items()}},
    }


@pytest.fixture(name="source", scope="module")
def fixture_source():
    """The source of the published vectors, in the lab's hub."""
    subprocess.run([sys.executable, os.path.join(ROOT, "tests/unit/engram/engram_source.py"), os.path.join(HUB, REVISION)], check=True)
    with open(os.path.join(HUB, "hub.json"), "w", encoding="utf-8") as stream:
        json.dump({"main": REVISION}, stream)


def words(done):
    """The output as one line: long messages are broken where it pleases Ansible."""
    return " ".join(done.text.split())


def vectors():
    with open(os.path.join(ROOT, "tests/unit/engram/vectors.json"), encoding="utf-8") as stream:
        return {row[0]: row[6] for row in json.load(stream)["synthetic"]["tp"]["2"]}


def test_pair_serves_from_its_packed_rows(source):
    """One bring-up: the slim source fetched once and synced, packed by both ranks, mounted, and in use by their own word."""
    done = play("site", variables=variables())
    assert done.code == 0, done.text[-4000:]
    for rank, node in enumerate(("spark-1", "spark-2")):
        assert f"Engram rows of rank {rank}: packed=True for layers 1, 14" in words(done)
        container = inspect(node, f"{DEPLOYMENT}-rank{rank}")
        assert {"Source": ROWS, "Destination": "/engram-packed", "RW": False}.items() <= next(
            mount for mount in container["Mounts"] if mount["Destination"] == "/engram-packed").items()
        assert "DSV41_PACKED_DIR=/engram-packed" in container["Config"]["Env"]
        log = on(node, f"docker logs {DEPLOYMENT}-rank{rank} 2>&1 | grep File-backed")
        assert log.count("packed=True") == 2 and f"rank={rank}/2" in log
        found = dict(line.split()[::-1] for line in on(node, f"cd {ROWS} && sha256sum *.bin").splitlines())
        assert found == {name: digest for name, digest in vectors().items() if f"-r{rank}of2" in name}
        # The slim source: two shards, no decoy, nothing of the whole tree.
        slim = on(node, f"ls {ROWS.replace('engram/', 'weights/', 1).removesuffix('/tp2')}").split()
        assert slim == ["config.json", "model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors", "model.safetensors.index.json"]


def test_pack_alone_changes_nothing_and_repacks_what_is_lost_while_the_pair_serves(source):
    started = inspect("spark-2", f"{DEPLOYMENT}-rank1")["State"]["StartedAt"]
    again = play("site", "--tags", "pack", variables=variables())
    assert again.code == 0 and "changed=1" not in again.text, again.text[-3000:]
    on("spark-2", f"rm {ROWS}/engram-l14-r1of2.bin")
    predicted = play("site", "--tags", "pack", "--check", variables=variables())
    assert predicted.code == 0 and predicted.text.count("changed=1") == 1, predicted.text[-3000:]
    done = play("site", "--tags", "pack", variables=variables())
    assert done.code == 0 and done.text.count("changed=1") == 1, done.text[-3000:]
    assert vectors()["engram-l14-r1of2.bin"] in on("spark-2", f"sha256sum {ROWS}/engram-l14-r1of2.bin")
    assert inspect("spark-2", f"{DEPLOYMENT}-rank1")["State"]["StartedAt"] == started


def test_a_fallback_is_named_with_its_reason(source):
    """Rank 1's engine says nothing of layer 14, rank 0 reads its files: that pair serves, and it is told."""
    done = play("restart", variables=variables(ENGRAM_RANK1="1"))
    assert done.code == 0, done.text[-4000:]
    assert "Engram rows of rank 0: packed=True for layers 1, 14" in words(done)
    assert ("Engram rows of rank 1 are not in use, it reads the checkpoint, more slowly: layer 14: the engine said nothing about "
            "Engram rows of rank 1") in words(done)
    assert play("stop", variables=variables()).code == 0
