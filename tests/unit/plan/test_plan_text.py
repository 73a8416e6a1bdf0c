# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import pathlib
import pickle
import shlex
import struct
import subprocess
import sys
import typing as t
import zipfile

import pytest
from planner_request import planned, specs

from ansible_collections.sparkops.inference.plugins.filter import plan as filters
from ansible_collections.sparkops.inference.plugins.module_utils import _plan_text
from ansible_collections.sparkops.inference.plugins.module_utils._vector_file import vector_length

AWKWARD = ["two words", "it's", '"', "$HOME", "%d", "{{ x }}", "ü", "", "-x\n"]


def test_the_printed_command_is_the_command() -> None:
    (spec, _worker) = specs(planned("lab_tiny", serve_extra_arguments=AWKWARD))
    text = _plan_text.command_text(_plan_text.docker_run(spec))
    assert shlex.split(text.replace("\\\n", "")) == _plan_text.docker_run(spec)
    # A shell reads it the same way.
    show = [sys.executable, "-c", "import json,sys; print(json.dumps(sys.argv[1:]))"]
    read = subprocess.run(["sh", "-c", shlex.join(show) + " " + text], capture_output=True, text=True, check=True).stdout
    assert json.loads(read) == _plan_text.docker_run(spec)


def test_settings_are_printed_with_their_origin() -> None:
    plan = planned("lab_tiny", serve_port=9000, serve_api_key="hunter2", hosts={"spark-2": {"weights_root": "/two"}}, _extra_vars={"serve_port"})
    lines = filters.settings_lines(plan)
    assert lines[0] == "lab_tiny: profile lab_tiny on spark-1, spark-2"
    words = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert words["serve_port"].split() == ["extra", "vars", "9000"]
    assert words["serve_api_key"].split(maxsplit=1) == ["inventory", "given, not shown"]
    assert words["image_registry_password"].split(maxsplit=1) == ["default", "not given"]
    assert words["weights_root"].split(maxsplit=1)[1] == "spark-1: not set, spark-2: /two"
    assert words["serve_max_model_len"].split() == ["profile", "256"]
    assert words["serve_boot"].split() == ["default", "true"]
    assert len(lines) == 1 + len(plan["origins"]) and "hunter2" not in str(lines)


def inspected(spec: dict[str, t.Any]) -> dict[str, t.Any]:
    return {
        "Image": "sha256:one",
        "HostConfig": {
            "CapAdd": [f"CAP_{name}" for name in spec["capabilities"]],
            "Devices": [{"PathOnHost": path, "PathInContainer": path} for path in spec["devices"]],
            "Ulimits": [{"Name": name, "Hard": value, "Soft": value} for name, value in spec["ulimits"].items()],
            "DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}] if spec["gpus"] else None,
            "NetworkMode": spec["network_mode"], "IpcMode": spec["ipc_mode"] or "private", "OomScoreAdj": spec["oom_score_adj"] or 0,
        },
        "Config": {
            "Cmd": spec["command"], "Env": ["PATH=/usr/bin", *(f"{name}={value}" for name, value in spec["env"].items())],
            "StopTimeout": spec["stop_timeout"],
        },
        "Mounts": [{"Source": mount["source"], "Destination": mount["target"]} for mount in spec["mounts"]],
    }


@pytest.mark.parametrize("profile", ["glm_53_flash_exl3", "deepseek_v41_flash_exl3", "lab_tiny"])
def test_nothing_changes(profile: str) -> None:
    plan = planned(profile)
    for spec in specs(plan):
        assert filters.spec_changes(spec, inspected(spec), plan, "sha256:one") == []
    assert filters.spec_changes(specs(plan)[0], None, plan) == []


def test_what_would_change_is_named() -> None:
    old = planned("glm_53_flash_exl3", serve_enforce_eager=True, serve_nccl_channels=4)
    new = planned("glm_53_flash_exl3", serve_max_num_seqs=3, hosts={"spark-1": {"weights_root": "/new"}})
    changes = filters.spec_changes(specs(new, weights_root="/new")[0], inspected(specs(old)[0]), new)
    assert "argument --enforce-eager: set -> absent" in changes
    assert "argument --max-num-seqs: 4 -> 3" in changes
    assert "argument --cudagraph-capture-sizes: absent -> 1 2 4 8 16 24 32" in changes
    assert "variable NCCL_MAX_NCHANNELS: 4 -> absent" in changes
    assert any(change.startswith("mount /model: /data1/weights/") for change in changes)
    # What the image brings is not ours.
    assert not any("PATH" in change for change in changes)


def test_another_image_right_or_limit_is_named() -> None:
    plan = planned("glm_53_flash_exl3")
    spec = specs(plan)[0]
    found = inspected(spec)
    found["HostConfig"].update(CapAdd=None, Devices=[], Ulimits=None, DeviceRequests=None, OomScoreAdj=0, IpcMode="private")
    assert filters.spec_changes(spec, inspected(spec), plan, "") == [f"image: sha256:one -> not on this node yet ({spec['image']})"]
    changes = filters.spec_changes(spec, found, plan, "sha256:two")
    assert changes == [
        f"image: sha256:one -> sha256:two ({spec['image']})",
        "capabilities: absent -> IPC_LOCK",
        "devices: absent -> /dev/infiniband",
        "gpus: absent -> all",
        "ipc: absent -> host",
        "oom score: absent -> 1000",
        "ulimits: absent -> memlock=-1 stack=67108864",
    ]


# -- vector files ----------------------------------------------------------------------------------------------------


def npy(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 16


def safetensors(**tensors: list[int]) -> bytes:
    header = json.dumps(
        {"__metadata__": {"a": "b"}, **{name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]} for name, shape in tensors.items()}}
    ).encode()
    return struct.pack("<Q", len(header)) + header


class Storage:
    """Stands in for what a PyTorch file refers to."""


class Rebuilt:
    def __init__(self, *size: int) -> None:
        self.size = size

    def __reduce__(self) -> t.Any:
        return (tuple, ((Storage(), 0, self.size, (1,), False),))


class TorchPickler(pickle.Pickler):
    def persistent_id(self, obj: t.Any) -> t.Any:
        return ("storage", "FloatStorage", "0", "cpu", 4096) if isinstance(obj, Storage) else None


def torch(tmp_path: pathlib.Path, value: t.Any) -> bytes:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as stream:
            TorchPickler(stream, protocol=2).dump(value)
        archive.writestr("archive/data/0", b"\0" * 16)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (npy("(4096,)"), 4096),
        (npy("(2, 3)"), 6),
        (safetensors(direction=[4096]), 4096),
        (safetensors(a=[1], b=[2]), None),
        (b"", None),
        (b"PK not a zip", None),
        (b"\x93NUMPY\x01\x00\xff\xff", None),
        (struct.pack("<Q", 10**12) + b"{}", None),
        (b"\x02\0\0\0\0\0\0\0[]", None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_length_of_a_vector(content: bytes, expected: int | None) -> None:
    assert vector_length(content) == expected


@pytest.mark.parametrize("size", [3, 300, 4096, 100000])
def test_length_of_a_pytorch_vector(tmp_path: pathlib.Path, size: int) -> None:
    assert vector_length(torch(tmp_path, Rebuilt(size))) == size
    assert vector_length(torch(tmp_path, {"direction": Rebuilt(size)})) == size
    assert vector_length(torch(tmp_path, [Rebuilt(size), Rebuilt(size)])) is None


def test_a_pickle_is_never_run(tmp_path: pathlib.Path) -> None:
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self) -> t.Any:
            import os

            return (os.mkdir, (str(trap),))

    vector_length(torch(tmp_path, [Trap(), Rebuilt(4)]))
    assert not trap.exists()
