# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import ast
import inspect
import os
import pathlib
import subprocess
import sys

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _memory
from hypothesis import given
from hypothesis import strategies as st

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
FIXTURES = pathlib.Path(__file__).parent / "fixtures"


# Readers


def test_meminfo_of_an_idle_machine():
    found = _memory.read_meminfo((FIXTURES / "meminfo_idle").read_text())
    assert found.total == 127535204 * KIB
    assert found.available == 123865188 * KIB
    assert found.swap_used == 0
    assert found.hugepages == 0


def test_meminfo_of_a_serving_machine():
    """About 85 GiB of the driver stand in no category: only MemAvailable knows of them."""
    found = _memory.read_meminfo((FIXTURES / "meminfo_serving").read_text())
    assert _memory.gib(found.available) == "21.0 GiB"
    assert _memory.gib(found.swap_used) == "2.9 GiB"
    assert found.cached == (63156 + 20718092 + 2158744 - 187392) * KIB


@pytest.mark.parametrize("text", ["", "MemTotal: 1 kB\nMemFree: 1 kB\n", "Usage: cat /proc/meminfo"])
def test_nothing_is_decided_on_a_broken_meminfo(text):
    with pytest.raises(ValueError, match="MemAvailable"):
        _memory.read_meminfo(text)


def test_reserved_huge_pages_are_bytes():
    text = (FIXTURES / "meminfo_idle").read_text().replace("HugePages_Total:       0", "HugePages_Total:    1024")
    assert _memory.read_meminfo(text).hugepages == 2 * GIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2065247, VLLM::Worker_TP0, 102843 MiB\n", [(2065247, "VLLM::Worker_TP0", 102843 * MIB)]),
        ("pid, process_name, used_gpu_memory [MiB]\n23335, VLLM::Worker_TP0, 123190 MiB\n", [(23335, "VLLM::Worker_TP0", 123190 * MIB)]),
        ("3150, python3, 218\n6330, sglang::scheduler, 96073\n", [(3150, "python3", 218 * MIB), (6330, "sglang::scheduler", 96073 * MIB)]),
        ("4711, python3, [N/A]\n", [(4711, "python3", None)]),
        ("4711, a, name with, commas, [N/A]\n", [(4711, "a, name with, commas", None)]),
        ("", []),
        ("No devices were found\n", []),
    ],
)
def test_compute_apps(text, expected):
    assert _memory.read_compute_apps(text) == [_memory.GpuUse(*entry) for entry in expected]


@pytest.mark.parametrize(
    ("host_config", "expected"),
    [
        ({"DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]}, True),
        ({"DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": ["0"], "Capabilities": None}]}, True),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}, True),
        ({"Runtime": "nvidia"}, True),
        ({"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, True),
        ({"Devices": [{"PathOnHost": "/dev/infiniband"}], "Runtime": "runc", "DeviceRequests": None}, False),
        ({}, False),
    ],
)
def test_uses_gpu(host_config, expected):
    assert _memory.uses_gpu({"HostConfig": host_config}) is expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("rw,nosuid,nodev,size=65011712k,inode64", 65011712 * KIB),
        ("rw,nosuid,nodev,inode64", 50 * GIB),
        ("rw,size=25%", 25 * GIB),
        ("rw,size=8g", 8 * GIB),
        ("rw,size=1048576", 1048576),
    ],
)
def test_shm_limit(options, expected):
    mounts = f"/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs {options} 0 0\ntmpfs /run tmpfs rw,size=1k 0 0\n"
    assert _memory.read_shm_limit(mounts, 100 * GIB) == expected


def test_shm_limit_without_the_mount():
    assert _memory.read_shm_limit("", 100 * GIB) == 50 * GIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('EARLYOOM_ARGS="-r 3600 -m 5 -s 100"\n', 5 * GIB),
        ('EARLYOOM_ARGS="-M 2097152,1048576 --avoid sshd"\n', 2 * GIB),
        ('EARLYOOM_ARGS="-m 5 -M 2097152"\n', 2 * GIB),
        ("EARLYOOM_ARGS='-m 2,1'\n", 2 * GIB),
        ('EARLYOOM_ARGS=""\n', 10 * GIB),
    ],
)
def test_earlyoom(text, expected):
    assert _memory.read_earlyoom(text, 100 * GIB).floor == expected


def test_earlyoom_that_is_not_configured():
    assert _memory.read_earlyoom("# EARLYOOM_ARGS=\"-m 5\"\n", 100 * GIB) is None


def test_arc():
    assert _memory.read_arc("name type data\nhits 4 5\nsize                            4    17179869184\nc_max 4 1\n") == 16 * GIB
    assert _memory.read_arc("") == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), ("12 GiB", 12 * GIB), ("1.5GiB", 1610612736), ("64g", 64 * GIB), ("512 MiB", 512 * MIB), ("2684354560", 2684354560), ("100 MB", 10**8)],
)
def test_sizes(value, expected):
    assert _memory.to_bytes(value) == expected


@pytest.mark.parametrize("value", ["", "12 Gib", "a lot", None, True, "-1", "1e9"])
def test_what_is_no_size(value):
    with pytest.raises(ValueError, match="is no size"):
        _memory.to_bytes(value)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (None, True),
        ({"speculation": ["dspark"]}, True),
        ({"speculation": "none"}, False),
        ({"sequences_above": 2}, True),
        ({"sequences_above": 4}, False),
        ({"pool_above": 1}, False),  # not set: never above anything
        ({"speculation": ["dspark"], "sequences_above": 9}, False),
    ],
)
def test_conditions(condition, expected):
    assert _memory.holds(condition, {"speculation": "dspark", "sequences": 4}) is expected


# Processes and tenants


def proc_tree(root: pathlib.Path, *processes: tuple[int, str, int, int, str]) -> str:
    """A tree of /proc with pid, name, start time, resident pages, and container id."""
    for pid, name, started, pages, container in processes:
        folder = root / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} ({name}) S 1 {' '.join(['0'] * 17)} {started} 0 0\n")
        (folder / "statm").write_text(f"999 {pages} 0 0 0 0 0\n")
        (folder / "cgroup").write_text(f"0::/system.slice/docker-{container}.scope\n" if container else "0::/user.slice\n")
    (root / "meminfo").write_text("MemTotal: 1 kB\n")
    return str(root)


CONTAINER, OTHER = "a" * 64, "b" * 64
PAGE = os.sysconf("SC_PAGE_SIZE")


def test_processes(tmp_path):
    root = proc_tree(tmp_path, (1, "systemd", 1, 10, ""), (2, "kthreadd", 1, 0, ""), (300, "odd) (name", 70, 5, ""), (400, "vllm", 80, 1000, CONTAINER))
    (tmp_path / "500").mkdir()  # ended while it was read
    found = _memory.read_processes(root)
    assert sorted(found) == [1, 300, 400]
    assert found[300] == _memory.Process(300, "odd) (name", 70, 5 * PAGE, "")
    assert found[400].container == CONTAINER


@pytest.mark.parametrize("cgroup", ["12:memory:/docker/" + CONTAINER, f"0::/system.slice/docker-{CONTAINER}.scope", f"0::/docker/{CONTAINER}/init"])
def test_container_of_a_process(tmp_path, cgroup):
    root = proc_tree(tmp_path, (7, "a", 1, 1, ""))
    (tmp_path / "7" / "cgroup").write_text(cgroup + "\n")
    assert _memory.read_processes(root)[7].container == CONTAINER


def test_usage_adds_the_gpu_and_leaves_out_our_own():
    processes = {
        1: _memory.Process(1, "gnome-shell", 1, 300 * MIB, ""),
        2: _memory.Process(2, "gnome-shell", 1, 200 * MIB, ""),
        3: _memory.Process(3, "python3", 1, 2 * GIB, OTHER),
        4: _memory.Process(4, "vllm", 1, 5 * GIB, CONTAINER),
    }
    gpu = [_memory.GpuUse(3, "python3", 10 * GIB), _memory.GpuUse(4, "vllm", 90 * GIB), _memory.GpuUse(2, "gnome-shell", None)]
    used = _memory.usage(processes, gpu, {OTHER: "tts", CONTAINER: "tiny-rank0"}, own={CONTAINER})
    assert used == {"process gnome-shell": 500 * MIB, "container tts": 12 * GIB}
    assert _memory.tenants(used, {"container tts"}, GIB) == [_memory.Tenant("container tts", 12 * GIB, True)]
    # A GPU container is named even if nothing of it can be seen.
    assert _memory.tenants({}, {"container tts"}, GIB) == [_memory.Tenant("container tts", 0, True)]


def test_fastest_growing_counts_a_newcomer_with_all_it_has():
    before = {1: _memory.Process(1, "a", 10, GIB, ""), 2: _memory.Process(2, "b", 10, GIB, ""), 3: _memory.Process(3, "c", 10, GIB, "")}
    now = {
        1: _memory.Process(1, "a", 10, 2 * GIB, ""),
        2: _memory.Process(2, "new b", 99, 9 * GIB, ""),
        3: _memory.Process(3, "c", 10, 4 * GIB, ""),
        4: _memory.Process(4, "d", 99, 9 * GIB, ""),
    }
    assert [(one.name, grown) for one, grown in _memory.fastest_growing(before, now)] == [
        ("new b", 9 * GIB), ("d", 9 * GIB), ("c", 3 * GIB), ("a", GIB),
    ]  # fmt: skip
    assert _memory.fastest_growing(now, now) == []


# The idle level


def test_projection_takes_off_what_came_since():
    idle = {"available": 113 * GIB, "used": {"process dashboard": GIB, "process gone": GIB}}
    level, newcomers = _memory.projected_available(idle, {"process dashboard": 3 * GIB, "container tts": 10 * GIB, "process noise": 10 * MIB})
    assert level == 101 * GIB
    assert newcomers == {"container tts": 10 * GIB, "process dashboard": 2 * GIB}


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (None, True),
        ({}, True),
        ({"boot": "x", "available": 110 * GIB}, False),  # lower within one boot: perhaps memory that the driver lost
        ({"boot": "x", "available": 90 * GIB}, True),
        ({"boot": "before", "available": 110 * GIB}, True),
    ],
)
def test_when_the_idle_level_is_replaced(recorded, expected):
    assert _memory.better_idle(recorded, {"boot": "x", "available": 100 * GIB}) is expected


def test_memory_that_does_not_come_back():
    """Case R12 (2): MemAvailable 61 M kB, recorded idle 113 M kB."""
    available, idle = 61_000_000 * KIB, 113_000_000 * KIB
    assert not _memory.memory_back(available, idle, 2 * GIB)
    assert _memory.memory_back(idle - GIB, idle, 2 * GIB)
    lack = _memory.not_back(available, idle, 300, {"process python3": 3 * GIB})
    assert lack.found == "about 50 GiB still held since the last stop, waited 300 s; held by process python3 3.0 GiB"
    assert "reboot" in lack.next_step
    assert "GPU driver" in _memory.not_back(available, idle, 1, {}).found


@pytest.mark.parametrize(
    ("series", "expected"),
    [([1, 1, 1], False), ([60 * GIB, 80 * GIB, 100 * GIB, 100 * GIB, 100 * GIB], False), ([1, *[100 * GIB] * 5], True)],
)
def test_steady(series, expected):
    assert _memory.steady(series) is expected


# The guard


def gibs(*values: float) -> list[int]:
    return [int(value * GIB) for value in values]


@pytest.mark.parametrize(
    ("samples", "floor", "acts"),
    [
        (gibs(20, 14, 9, 6, 5, 4.9, 4.8), 5, True),  # R12 (4)
        (gibs(20, 14, 9, 6, 5, 4.9), 5, False),  # the first low sample
        (gibs(7, 7, 7, 7, 7, 7, 7, 7, 7, 7), 5, False),  # R12 (5): MemFree is not looked at at all
        (gibs(4, 4, 8), 5, False),  # a dip that came back
        (gibs(4, 8, 4), 5, False),
        (gibs(5, 5), 5, False),  # at the floor is not below it
        ([], 5, False),
        (gibs(1), 5, False),
    ],
)
def test_guard(samples, floor, acts):
    reason = _memory.guard_verdict(samples, floor * GIB, 2)
    assert bool(reason) is acts
    if acts:
        assert reason == (
            "MemAvailable below 5.00 GiB in 2 samples in a row; the last samples in GiB: 20.00, 14.00, 9.00, 6.00, 5.00, 4.90, 4.80"
        )


def test_guard_that_is_off():
    assert _memory.guard_verdict(gibs(0.1, 0.1, 0.1), 0, 2) == ""
    assert _memory.guard_verdict(gibs(0.1, 0.1, 0.1), GIB, 0) == ""


@given(st.lists(st.integers(0, 10 * GIB), max_size=30), st.integers(0, 10 * GIB), st.integers(1, 5))
def test_guard_acts_exactly_on_a_run_of_low_samples(samples, floor, consecutive):
    low = len(samples) >= consecutive and all(sample < floor for sample in samples[-consecutive:])
    assert bool(_memory.guard_verdict(samples, floor, consecutive)) is low


def test_guard_needs_nothing_else():
    """The node service is one file and takes this function as text."""
    scope: dict = {"t": __import__("typing")}
    exec(compile("from __future__ import annotations\n" + inspect.getsource(_memory.guard_verdict), "guard", "exec"), scope)  # noqa: S102
    assert scope["guard_verdict"](gibs(1, 1), 2 * GIB, 2)


def test_the_file_is_importable_on_its_own():
    """Standard library only: the node has no ansible_collections."""
    path = pathlib.Path(_memory.__file__)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "os", "re", "typing"}
    code = f"import sys; sys.path.insert(0, {str(path.parent)!r}); import _memory; print(_memory.gib(1 << 30))"
    assert subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout == "1.0 GiB\n"
