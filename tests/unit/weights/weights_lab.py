# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A real hub on loopback, small models made on the spot, and the download job as a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import types
import urllib.request

from ansible_collections.sparkops.inference.plugins.module_utils import _unit, _weights_job

ROOT = pathlib.Path(__file__).parents[3]
COMMIT = "a" * 40
OTHER = "b" * 40


def load(name: str, path: pathlib.Path) -> types.ModuleType:
    """Import a program that is no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lab_hub = load("sparkops_lab_hub", ROOT / "tests" / "lab" / "hub.py")


def library_folder() -> str:
    """Where huggingface_hub lies in the environment of the tests; the managed environment of a node has the same layout."""
    return str(pathlib.Path(importlib.util.find_spec("huggingface_hub").origin).parents[1])


def write_shard(path: pathlib.Path, size: int, name: str, seed: int = 0) -> None:
    """A valid safetensors file with one tensor of ``size`` bytes."""
    header = json.dumps({name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + random.Random(f"{name}{seed}").randbytes(size))


def write_model(folder: pathlib.Path, sizes: list[int]) -> None:
    """A sharded model with all its side files."""
    total = len(sizes)
    names = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    for number, (name, size) in enumerate(zip(names, sizes)):
        write_shard(folder / name, size, f"layer.{number}.weight")
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": {f"layer.{number}.weight": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "tiny"}\n')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    (folder / "README.md").write_text("not wanted\n")


class FakeHub:
    """The lab's hub, in this process."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.public, self.admin = lab_hub.serve(root)
        self.url = "http://127.0.0.1:%d" % self.public.server_address[1]

    def repository(self, name: str, sizes: list[int], commit: str = COMMIT, **settings: object) -> pathlib.Path:
        folder = self.root / name / commit
        write_model(folder, sizes)
        (self.root / name / "hub.json").write_text(json.dumps({"main": commit, **settings}))
        return folder

    def call(self, method: str, path: str, content: object = None) -> dict:
        address = "http://127.0.0.1:%d%s" % (self.admin.server_address[1], path)
        data = None if content is None else json.dumps(content).encode()
        with urllib.request.urlopen(urllib.request.Request(address, data=data, method=method)) as answer:
            return json.load(answer)

    def fault(self, kind: str, **settings: object) -> None:
        self.call("POST", "/faults", {"kind": kind, **settings})

    def served(self) -> int:
        return sum(item["bytes"] for item in self.call("GET", "/counters").values())

    def requests(self) -> int:
        return sum(item["requests"] for item in self.call("GET", "/counters").values())

    def close(self) -> None:
        for server in (self.public, self.admin):
            server.shutdown()
            server.server_close()


class Node:
    """A node's folders and its download job."""

    def __init__(self, root: pathlib.Path, endpoint: str) -> None:
        self.root = root
        self.weights = root / "weights"
        self.state = root / "state"
        self.endpoint = endpoint
        # The job's code is loaded by its import, so all that it needs is installed.
        self.code = _unit.install_code(_unit.loaded_code(), str(root / "lib"))

    def artefact(self, repository: str = "acme/tiny", commit: str = COMMIT, **more: object) -> dict:
        return {
            "name": "model", "repository": repository, "revision": commit, "directory": f"{repository.replace('/', '--')}/{commit}",
            "exclude": ["README.md"], "required": ["config.json", "tokenizer.json"], **more,
        }  # fmt: skip

    def tree(self, artefact: dict | None = None) -> pathlib.Path:
        return self.weights / (artefact or self.artefact())["directory"]

    def request(self, *artefacts: dict, token: str | None = None, **options: object) -> str:
        folder = self.state / "jobs"
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "artefacts": list(artefacts) or [self.artefact()], "weights_root": str(self.weights), "state_dir": str(self.state), "node": "spark-1",
            "download": "missing", "verify": False, "endpoint": self.endpoint, "environment": library_folder(), "adopt_from": [], "adopt_copy": False,
            "ranged_above": 1_000_000, "part_size": 65_536, "streams": 4, "timeout": 10, "stall_seconds": 5, "rate_limit_wait": 30, "space_margin": 0,
            "reserve": [], "run_id": "test", "result": str(folder / "result.json"), "progress": str(folder / "progress.json"), "secret_file": None,
            **options,
        }  # fmt: skip
        if token:
            secret = folder / "secret"
            secret.write_text(token)
            secret.chmod(0o600)
            content["secret_file"] = str(secret)
        (folder / "request.json").write_text(json.dumps(content))
        (folder / "result.json").unlink(missing_ok=True)
        return str(folder / "request.json")

    def start(self, *artefacts: dict, **options: object) -> subprocess.Popen:
        argv = _unit.python_argv(self.code, _weights_job.__name__.rpartition(".")[2], self.request(*artefacts, **options))
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"PATH": os.environ["PATH"]})

    def result(self) -> dict | None:
        return _unit.read_json(str(self.state / "jobs" / "result.json"))

    def run(self, *artefacts: dict, **options: object) -> dict:
        process = self.start(*artefacts, **options)
        output = process.communicate(timeout=120)[0].decode()
        result = self.result()
        assert result is not None, output
        return {**result, "output": output}

    def refused(self, *artefacts: dict, **options: object) -> list[dict]:
        result = self.run(*artefacts, **options)
        assert not result["ok"] and result.get("refusals"), result
        return result["refusals"]
