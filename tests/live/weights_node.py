# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The third node of the lab as one that only downloads: 72 MiB in three shards that no engine loads."""

from __future__ import annotations

import json
import os
import typing as t

from conftest import ROOT, on
from plays import Playing

NODE = "spark-3"
DEPLOYMENT = "lab_weights"
UNIT = f"sparkops-weights-{DEPLOYMENT}.service"
REPOSITORY = "sparklab/bulk"
WEIGHTS = "/var/lib/sparkops/weights"

with open(os.path.join(ROOT, "tests/lab/tiny_model.json"), encoding="utf-8") as stream:
    BULK = json.load(stream)["bulk"]
SIZES = {name: item["size"] for name, item in BULK["files"].items()}
TOTAL = sum(SIZES.values())
TREE = f"{WEIGHTS}/sparklab--bulk/{BULK['revision']}"
FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def variables(**more: t.Any) -> dict[str, t.Any]:
    """Every shard comes by ranges in small parts, and faults are noticed in seconds."""
    return {
        "spark_hosts": "solo", "serve_deployment": DEPLOYMENT, "serve_model_repository": REPOSITORY, "serve_model_revision": BULK["revision"],
        "bootstrap_packages": False, "weights_ranged_above": "1 MiB", "weights_range_part": "1 MiB", "weights_streams": 2,
        "weights_stall_timeout": 5, "weights_hub_timeout": 10, **more,
    }  # fmt: skip


def weights(*arguments: str, **more: t.Any) -> Playing:
    """The play, begun. What is no option of the collection goes to the environment of ansible-playbook."""
    environment = {name: more.pop(name) for name in list(more) if name.isupper()}
    return Playing("weights", *arguments, variables=variables(**more), **environment)


def forget(*folders: str) -> None:
    """Files and state of earlier tests, but neither keys nor the managed library."""
    on(NODE, f"systemctl stop {UNIT} 2>/dev/null; rm -rf {WEIGHTS} /var/lib/sparkops/{DEPLOYMENT}/jobs {' '.join(folders)}")


def listed() -> dict[str, str]:
    """Hash by name of what lies in the tree."""
    lines = on(NODE, f"cd {TREE} 2>/dev/null && find . -type f -printf '%P\\0' | xargs -0 --no-run-if-empty sha256sum || true").splitlines()
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def whole() -> bool:
    return listed() == {name: item["sha256"] for name, item in BULK["files"].items()}


def main_pid() -> int:
    return int(on(NODE, f"systemctl show --property MainPID --value {UNIT}"))
