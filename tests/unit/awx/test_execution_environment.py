# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What ansible-builder makes of both files, without a container engine: our own image, and any image in which the collection is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import yaml
from awx_data import environment, needs_own_ansible
from awx_survey import ROOT

pytestmark = needs_own_ansible


def builder(*arguments):
    done = subprocess.run([sys.executable, "-m", "ansible_builder", *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(path):
    with open(path, encoding="utf-8") as stream:
        return [line.strip() for line in stream if line.strip() and not line.startswith("#")]


def test_our_image_is_rendered_with_the_collections_and_nothing_of_the_checkout(tmp_path):
    builder("create", "--file", "execution-environment.yml", "--context", str(tmp_path), "--output-filename", "Containerfile")
    with open(tmp_path / "_build/requirements.yml", encoding="utf-8") as stream:
        held = {item["name"] for item in yaml.safe_load(stream)["collections"]}
    with open(os.path.join(ROOT, "galaxy.yml"), encoding="utf-8") as stream:
        assert set(yaml.safe_load(stream)["dependencies"]) <= held
    # "." would be the folder of the build: the reason why the collections are listed inline.
    assert "." not in held and "sparkops.inference" not in held
    assert lines(tmp_path / "_build/requirements.txt") == lines(os.path.join(ROOT, "meta/ee-requirements.txt"))
    assert lines(tmp_path / "_build/bindep.txt") == lines(os.path.join(ROOT, "meta/ee-bindep.txt"))
    recipe = (tmp_path / "Containerfile").read_text()
    assert "ansible-core==" in recipe and "ansible-runner==" in recipe


def test_an_image_with_the_collection_gets_what_it_needs():
    found = yaml.safe_load(builder("introspect", os.environ.get("ANSIBLE_COLLECTIONS_PATH") or os.path.join(ROOT, ".collections")))
    wanted = {"python": "meta/ee-requirements.txt", "system": "meta/ee-bindep.txt"}
    for kind, path in wanted.items():
        ours = [line.partition("#")[0].strip() for line in found[kind] if line.endswith("# from collection sparkops.inference")]
        assert ours == lines(os.path.join(ROOT, path)) != []
