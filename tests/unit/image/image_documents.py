# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Inspect documents as engines give them. What both stores say of one image is from Docker's documentation and from GB10 owners."""

from __future__ import annotations

import copy
import typing as t

DIGEST = "sha256:b0501f99fec5136f248f78d5850977a2ec32d55cd9a665f4a9ffef24cbdf7fe5"
OTHER_DIGEST = "sha256:447114ee77d14c9b4732ee23978ada2a0ee9027868a231d6fd42700a8b25be1d"
CONFIG_ID = "sha256:3430d6614a8e0b5f2c1d4e6f708192a3b4c5d6e7f8091a2b3c4d5e6f70819203"
LAYERS = ["sha256:" + "1" * 64, "sha256:" + "2" * 64]

OVERLAY2: dict[str, t.Any] = {
    "Id": CONFIG_ID,
    "RepoTags": ["vllm/vllm-openai:glm53-flash-arm64-cu130"],
    "RepoDigests": [f"vllm/vllm-openai@{DIGEST}"],
    "Config": {
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "CUDA_VERSION=13.0.2"],
        "Entrypoint": ["vllm", "serve"],
        "Cmd": None,
        "WorkingDir": "/vllm-workspace",
        "User": "",
        "Labels": {"org.opencontainers.image.version": "22.04", "glm53.recipe.stamp": "abc"},
    },
    "Architecture": "arm64",
    "Os": "linux",
    "Size": 26843545600,
    "GraphDriver": {"Name": "overlay2", "Data": {}},
    "RootFS": {"Type": "layers", "Layers": LAYERS},
}

# The same image where Docker keeps it in containerd: another Id, no null values, another size.
CONTAINERD: dict[str, t.Any] = {
    **copy.deepcopy(OVERLAY2),
    "Id": DIGEST,
    "Size": 9666567584,
    "Config": {
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "CUDA_VERSION=13.0.2"],
        "Entrypoint": ["vllm", "serve"],
        "WorkingDir": "/vllm-workspace",
        "Labels": {"org.opencontainers.image.version": "22.04", "glm53.recipe.stamp": "abc"},
    },
    "Descriptor": {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": DIGEST, "size": 1609},
}
del CONTAINERD["GraphDriver"]


def document(base: dict[str, t.Any] | None = None, config: dict[str, t.Any] | None = None, **changes: t.Any) -> dict[str, t.Any]:
    """A changed copy."""
    changed = {**copy.deepcopy(base or OVERLAY2), **changes}
    changed["Config"].update(config or {})
    return changed
