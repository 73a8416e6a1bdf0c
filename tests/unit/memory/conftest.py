# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from checkpoints import DRAFTER_BYTES, DeepSeek, Glm, write, write_file


@pytest.fixture(scope="session")
def deepseek_tensors():
    return DeepSeek().tensors()


@pytest.fixture(scope="session")
def glm_tensors():
    return Glm().tensors()


@pytest.fixture(scope="session")
def deepseek_tree(tmp_path_factory, deepseek_tensors):
    folder = tmp_path_factory.mktemp("deepseek")
    write(folder, deepseek_tensors, DeepSeek.shards)
    return str(folder)


@pytest.fixture(scope="session")
def glm_trees(tmp_path_factory, glm_tensors):
    model, drafter = tmp_path_factory.mktemp("glm"), tmp_path_factory.mktemp("drafter")
    write(model, glm_tensors, Glm.shards)
    write_file(str(drafter / "model.safetensors"), [("layers.0.weight", DRAFTER_BYTES)])
    return {"model": str(model), "drafter": str(drafter)}
