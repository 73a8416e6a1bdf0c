# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The look at a tree before a launch: without reading content, but for the header of each shard."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkops.inference.plugins.module_utils import _manifest
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest
from ansible_collections.sparkops.inference.plugins.modules import manifest_info

COMMIT = "a" * 40
SHARD = "model.safetensors"
HEADER = json.dumps({"t": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()


@pytest.fixture(name="tree")
def fixture_tree(tmp_path):
    tree = tmp_path / "acme--tiny" / COMMIT
    tree.mkdir(parents=True)
    (tree / SHARD).write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + b"x" * 16)
    (tree / "config.json").write_text("{}")
    files = [File(path.name, path.stat().st_size) for path in sorted(tree.iterdir())]
    hashes = _manifest.hash_files(str(tree), files)
    _manifest.save(str(tree), Manifest("acme/tiny", COMMIT, tuple(File(file.path, file.size, hashes[file.path]) for file in files)))
    return tree


def look(capsys, tree):
    """What role serve asks of each rank."""
    artefact = {"name": "model", "repository": "acme/tiny", "revision": COMMIT, "directory": f"acme--tiny/{COMMIT}"}
    arguments = {"artefacts": [artefact], "weights_root": str(tree.parents[1]), "node": "spark-2", "headers": True, "required": True}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        manifest_info.main()
    return json.loads(capsys.readouterr().out)


def test_a_whole_tree_may_be_launched(capsys, tree):
    assert look(capsys, tree)["complete"]


def flip_the_header(tree):
    """The size stays as it was."""
    content = (tree / SHARD).read_bytes()
    (tree / SHARD).write_bytes(content.replace(b"[0, 16]", b"[0, 99]"))
    assert len((tree / SHARD).read_bytes()) == len(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_the_header, "but its header promises"),
        (lambda tree: (tree / SHARD).unlink(), "missing"),
        (lambda tree: (tree / "config.json").write_text("{} "), "3 bytes, wanted 2"),
    ],
    ids=["header", "shard", "side file"],
)
def test_no_launch_from_a_tree_that_lacks_something(capsys, tree, damage, words):
    damage(tree)
    result = look(capsys, tree)
    assert [item["id"] for item in result["refusals"]] == ["weights.incomplete"] and result["refusals"][0]["node"] == "spark-2"
    assert words in result["msg"]
