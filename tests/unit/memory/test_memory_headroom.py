# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The module as a whole on fake trees: /proc, /etc, a Docker Engine, and nvidia-smi."""

from __future__ import annotations

import json
import os

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import NoPermission, NotInstalled
from ansible_collections.sparkops.inference.plugins.modules import memory_headroom
from checkpoints import write

GIB, KIB = 1 << 30, 1 << 10
PAGE = os.sysconf("SC_PAGE_SIZE")
OWN, FOREIGN, PLAIN = "a" * 64, "b" * 64, "c" * 64
RULES = [{"bucket": "layers", "match": r"layers\.", "sharding": "split"}, {"bucket": "rest", "match": "", "sharding": "replicated"}]
MEMORY = {"weights": {"trees": [{"artefact": "model", "rules": RULES}]}, "admission": [{"name": "all", "kind": "sum", "margin": "2 GiB"}], "shm": {"used": 0}}
SERVING = {"tensor_parallel": 2, "pipeline_parallel": 1, "speculation": "none", "pool": 4 * GIB}


class Node:
    """A fake machine; attributes may be changed between runs."""

    def __init__(self, root):
        self.root = root
        self.docker = []
        self.docker_errors = []
        self.smi = None
        self.levels = [104_000_000]
        self.free = 9_000_000
        for folder in ("proc/sys/kernel/random", "etc/default", "state", "tree"):
            (root / folder).mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
        self.process(1, "systemd", 0, started=5)  # with the kernel's id it tells one boot from another
        (root / "proc/mounts").write_text("tmpfs /dev/shm tmpfs rw,size=1g 0 0\n")

    def process(self, pid, name, size, container="", started=100):
        folder = self.root / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} ({name}) S 1 {' '.join(['0'] * 17)} {started} 0 0\n")
        (folder / "statm").write_text(f"0 {size // PAGE} 0 0 0 0 0\n")
        (folder / "cgroup").write_text(f"0::/system.slice/docker-{container}.scope\n" if container else "0::/\n")

    def meminfo(self):
        available = self.levels.pop(0) if len(self.levels) > 1 else self.levels[0]
        numbers = {"MemTotal": 127600000, "MemFree": self.free, "MemAvailable": available, "Cached": 98000000, "SwapTotal": 16777212, "SwapFree": 16777212}
        return "".join(f"{name}: {number} kB\n" for name, number in numbers.items())

    def weights(self, layers=80 * GIB, rest=GIB):
        write(self.root / "tree", [("layers.0.w", layers), ("norm", rest)], 2)


@pytest.fixture
def node(tmp_path, monkeypatch):
    machine = Node(tmp_path)

    class Engine:
        def __init__(self, socket, timeout):
            pass

        def containers(self, everything):
            for error in machine.docker_errors:
                raise error
            return [{"Id": one["id"], "Names": ["/" + one["name"]]} for one in machine.docker]

        def inspect_container(self, identifier):
            gpu = next(one["gpu"] for one in machine.docker if one["id"] == identifier)
            return {"HostConfig": {"DeviceRequests": [{"Capabilities": [["gpu"]]}]} if gpu else {}}

    read_text = memory_headroom._memory.read_text
    monkeypatch.setattr(memory_headroom._memory, "read_text", lambda path: machine.meminfo() if path.endswith("/meminfo") else read_text(path))
    monkeypatch.setattr(memory_headroom, "DockerApi", Engine)
    monkeypatch.setattr(memory_headroom.AnsibleModule, "get_bin_path", lambda module, name: "/usr/bin/nvidia-smi" if machine.smi is not None else None)
    monkeypatch.setattr(memory_headroom.AnsibleModule, "run_command", lambda module, command: (0, machine.smi, ""))
    return machine


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only by sleeping."""
    now = [0.0]
    monkeypatch.setattr(memory_headroom.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory_headroom.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def run(node, capsys):
    def call(**args):
        roots = {"proc_root": str(node.root / "proc"), "etc_root": str(node.root / "etc")}
        with patch_module_args({"node": "spark-1", **roots, **args}), pytest.raises(SystemExit) as stop:
            memory_headroom.main()
        return stop.value.code, json.loads(capsys.readouterr().out)

    return call


def full(node, **more):
    return {"memory": MEMORY, "serving": SERVING, "trees": {"model": str(node.root / "tree")}, "state_dir": str(node.root / "state"), **more}


def lack_ids(result):
    return [lack["id"] for lack in result["lacks"]]


# The verdict


def test_measured_and_it_fits(node, run):
    node.weights()
    code, result = run(**full(node, phase="measured"))
    assert code == 0 and not result["changed"] and result["lacks"] == []
    assert result["needs"] == {"weights": 41 * GIB, "kv": 4 * GIB, "workspace": 0, "shm": 0}
    assert result["memory"]["basis"] == "measured" and result["memory"]["level"] == 104_000_000 * KIB
    assert result["table"][-1].split() == ["all", "2", "81.00", "41.00", "41.00"]
    assert result["largest"]["pool"] == 104_000_000 * KIB - 43 * GIB


def test_measured_and_it_does_not_fit(node, run):
    node.weights(layers=300 * GIB)
    code, result = run(**full(node, phase="measured", rank=1))
    assert code == 1
    found = "spark-1: memory by rule 'all': found 99.2 GiB available (measured), 57.8 GiB too little; wanted 157.0 GiB: weights 151.0 GiB"
    assert result["msg"].startswith(found)
    assert result["msg"].endswith("[memory.headroom]")
    assert [refusal["id"] for refusal in result["refusals"]] == ["memory.headroom"]


def test_the_caller_may_decide(node, run):
    node.weights(layers=300 * GIB)
    code, result = run(**full(node, phase="measured", refuse=False))
    assert code == 0 and lack_ids(result) == ["memory.headroom"] and result["lacks"][0]["text"].endswith("[memory.headroom]")


def test_an_accepted_refusal_is_a_notice(node, run):
    node.weights(layers=300 * GIB)
    code, result = run(**full(node, phase="measured", accept=["memory.headroom"]))
    assert code == 0 and result["lacks"] == []
    assert any(text.startswith("Accepted by its id memory.headroom") for text in result["notices"])


def test_no_budget_no_start(node, run):
    code, result = run(**full(node))
    assert code == 1 and lack_ids(result) == ["memory.budget"] and result["needs"] == {}


def test_check_mode_before_the_weights_are_there(node, run):
    code, result = run(**full(node, _ansible_check_mode=True))
    assert code == 0 and result["known_after"] == ["weights"] and result["lacks"] == []


def test_without_memory_data_only_the_floor(node, run):
    assert run(phase="measured")[0] == 0
    node.levels = [1_000_000]
    code, result = run(phase="measured")
    assert code == 1 and lack_ids(result) == ["memory.floor"] and "memory_floor" in result["msg"]


def test_a_broken_meminfo_is_no_verdict(node, run, monkeypatch):
    monkeypatch.setattr(node, "meminfo", lambda: "")
    code, result = run()
    assert code == 1 and "could not be judged: no MemTotal" in result["msg"]


# Tenants, guards, growth


def test_tenants(node, run):
    node.docker = [{"id": OWN, "name": "tiny-rank0", "gpu": True}, {"id": FOREIGN, "name": "tts", "gpu": True}, {"id": PLAIN, "name": "web", "gpu": False}]
    node.process(10, "VLLM::Worker_TP", 5 * GIB, OWN)
    node.process(11, "python3", GIB, FOREIGN)
    node.process(12, "nginx", 2 * GIB, PLAIN)
    node.process(13, "Xorg", GIB // 4)
    node.smi = f"10, VLLM::Worker_TP, 90000 MiB\n11, python3, [N/A]\n13, Xorg, {2048} MiB\n"
    code, result = run(own_containers=["tiny-rank0"], phase="measured", refuse=False)
    assert code == 0 and lack_ids(result) == ["memory.gpu_tenant"]
    assert [(one["key"], one["gpu"]) for one in result["tenants"]] == [("process Xorg", False), ("container web", False), ("container tts", True)]
    assert run(own_containers=["tiny-rank0"], phase="measured", accept=["memory.gpu_tenant"])[0] == 0


@pytest.mark.parametrize(("error", "told"), [(NoPermission("no right to use /var/run/docker.sock"), True), (NotInstalled("no Docker Engine"), False)])
def test_containers_that_cannot_be_read(node, run, error, told):
    node.docker_errors = [error]
    code, result = run()
    assert code == 0 and any("Containers could not be read" in text for text in result["notices"]) is told


def test_only_a_running_guard_counts(node, run):
    (node.root / "etc/default/earlyoom").write_text('EARLYOOM_ARGS="-M 2097152"\n')
    assert run()[1]["guards"] == []
    node.process(20, "earlyoom", 1 << 20)
    assert run()[1]["guards"] == [{"name": "earlyoom", "floor": 2 * GIB, "detail": "-M 2097152", "loading_only": False}]
    (node.root / "etc/default/earlyoom").unlink()
    node.process(21, "systemd-oomd", 1 << 20)
    result = run()[1]
    assert result["guards"][0]["floor"] == 12760000 * KIB and result["guards"][0]["detail"] == "its defaults"
    assert any(text.startswith("systemd-oomd runs on this node") for text in result["notices"])


def test_growth(node, run, clock, monkeypatch):
    node.process(30, "hog", GIB)
    sleep = memory_headroom.time.sleep
    monkeypatch.setattr(memory_headroom.time, "sleep", lambda seconds: (node.process(30, "hog", 3 * GIB), sleep(seconds)))
    assert run(sample_seconds=1)[1]["growing"] == [{"name": "hog", "pid": 30, "rss": 3 * GIB, "grown": 2 * GIB}]


def test_own_guards_and_shm_of_the_container(node, run):
    node.weights()
    memory = {**MEMORY, "steady": {"available": "4 GiB", "low": "2 GiB"}}
    guards = [{"name": "the memory guard while serving", "floor": 3 * GIB, "loading_only": False}]
    result = run(**full(node, memory=memory, own_guards=guards, shm_size="64g", phase="measured", refuse=False))[1]
    assert lack_ids(result) == ["memory.guard_floor"] and result["memory"]["shm_limit"] == 64 * GIB


# The idle level


def idle_of(node):
    path = node.root / "state/idle.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_idle_is_recorded_once(node, run):
    node.process(40, "dashboard", GIB)
    args = {"state_dir": str(node.root / "state"), "record_idle": True, "phase": "measured"}
    assert run(_ansible_check_mode=True, **args)[1]["changed"] and idle_of(node) is None
    assert run(**args)[1]["changed"]
    assert idle_of(node)["available"] == 104_000_000 * KIB and idle_of(node)["used"] == {"process dashboard": GIB}
    assert not run(_ansible_check_mode=True, **args)[1]["changed"] and not run(**args)[1]["changed"]
    node.levels = [90_000_000]
    assert not run(**args)[1]["changed"]
    (node.root / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")
    assert run(**args)[1]["changed"] and idle_of(node)["available"] == 90_000_000 * KIB


def test_idle_is_not_recorded_while_something_of_ours_runs(node, run):
    node.docker = [{"id": OWN, "name": "tiny-rank0", "gpu": False}]
    result = run(state_dir=str(node.root / "state"), record_idle=True, phase="measured", own_containers=["tiny-rank0"])[1]
    assert not result["changed"] and idle_of(node) is None


def test_idle_needs_the_state_directory(node, run):
    assert run(state_dir=str(node.root / "absent"), record_idle=True, phase="measured")[0] == 0


def record(node, available, used=None):
    (node.root / "state/idle.json").write_text(json.dumps({"format": 1, "boot": "boot-1:5", "available": available, "total": 0, "used": used or {}}))


def test_projected_while_the_old_engine_serves(node, run):
    node.weights()
    node.docker = [{"id": OWN, "name": "tiny-rank0", "gpu": True}]
    node.process(10, "VLLM::Worker_TP", 5 * GIB, OWN)
    node.process(11, "dashboard", 3 * GIB)
    node.levels = [4_000_000]
    record(node, 113 * GIB, {"process dashboard": GIB})
    code, result = run(**full(node, own_containers=["tiny-rank0"]))
    assert code == 0 and result["memory"]["basis"] == "projected" and result["memory"]["level"] == 111 * GIB
    assert "Came or grew since the idle level was recorded: process dashboard 2.0 GiB." in result["notices"]


def test_nothing_can_be_projected_without_an_idle_level(node, run):
    node.weights()
    node.docker = [{"id": OWN, "name": "tiny-rank0", "gpu": True}]
    node.levels = [4_000_000]
    code, result = run(**full(node, own_containers=["tiny-rank0"]))
    assert code == 0 and result["memory"]["basis"] == "not known" and result["memory"]["level"] is None and result["largest"] == {}
    assert any("it is measured after the stop" in text for text in result["notices"])


# The wait after a stop


def test_r12_2_memory_that_is_still_held(node, run, clock):
    """MemFree 60 M, MemAvailable 61 M, recorded idle 113 M kB; a worker outlived its container, and a build job came."""
    node.free, node.levels = 60_000_000, [61_000_000]
    record(node, 113_000_000 * KIB)
    node.process(50, "VLLM::Worker_TP", 3 * GIB)
    node.process(51, "make", 2 * GIB)
    node.smi = "50, VLLM::Worker_TP, [N/A]\n"
    args = {"state_dir": str(node.root / "state"), "record_idle": True, "phase": "measured"}
    code, result = run(wait=30, tolerance=4 * GIB, **args)
    assert code == 1 and result["waited_seconds"] == 30
    assert "found about 48 GiB still held since the last stop, waited 30 s; held by process VLLM::Worker_TP 3.0 GiB; wanted" in result["msg"]
    assert idle_of(node)["available"] == 113_000_000 * KIB  # what is held is no idle level


def test_what_is_left_of_our_own_containers_is_named(node, run, clock):
    node.docker = [{"id": OWN, "name": "tiny-rank0", "gpu": True}]
    node.process(50, "VLLM::Worker_TP", 3 * GIB, OWN)
    node.levels = [61_000_000]
    record(node, 113_000_000 * KIB)
    result = run(wait=5, phase="measured", own_containers=["tiny-rank0"], state_dir=str(node.root / "state"))[1]
    assert "held by container tiny-rank0 3.0 GiB" in result["msg"]


def test_r12_2_held_by_the_driver(node, run, clock):
    node.levels = [61_000_000]
    record(node, 113_000_000 * KIB)
    result = run(wait=30, phase="measured", state_dir=str(node.root / "state"))[1]
    assert "about 50 GiB still held since the last stop, waited 30 s; no process holds it, so it is the GPU driver" in result["msg"]
    assert "reboot this node" in result["msg"]


def test_memory_that_comes_back(node, run, clock):
    node.levels = [61_000_000, 80_000_000, 100_000_000, 112_000_000, 112_500_000]
    record(node, 113_000_000 * KIB)
    code, result = run(wait=30, phase="measured", state_dir=str(node.root / "state"))
    assert code == 0 and result["waited_seconds"] == 3


def test_a_newcomer_does_not_make_the_wait_fail(node, run, clock):
    node.levels = [103_000_000]
    node.process(60, "build", 10 * GIB)
    record(node, 113_000_000 * KIB)
    assert run(wait=30, phase="measured", state_dir=str(node.root / "state"))[1]["waited_seconds"] == 0


def test_without_an_idle_level_it_waits_until_memory_is_steady(node, run, clock):
    node.levels = [61_000_000, 80_000_000, 100_000_000, 104_000_000]
    code, result = run(wait=30, phase="measured", state_dir=str(node.root / "state"), record_idle=True)
    assert code == 0 and result["waited_seconds"] == 7 and idle_of(node)["available"] == 104_000_000 * KIB


def test_check_mode_does_not_wait(node, run, clock):
    node.levels = [61_000_000]
    record(node, 113_000_000 * KIB)
    assert run(wait=30, phase="measured", state_dir=str(node.root / "state"), _ansible_check_mode=True)[1]["waited_seconds"] == 0


# Eviction


def test_eviction_before_measuring(node, run, monkeypatch):
    asked = []
    monkeypatch.setattr(memory_headroom._page_cache, "evict", lambda paths: asked.append(list(paths)) or 123)
    node.weights()
    assert run(**full(node, phase="measured", evict=True))[1]["evicted_bytes"] == 123
    assert asked == [[str(node.root / "tree")]]
    run(**full(node, phase="measured", evict=True, _ansible_check_mode=True))
    run(trees={"model": str(node.root / "absent")}, phase="measured", evict=True)
    assert asked[1:] == [[]]


def test_eviction_that_is_not_allowed_is_told(node, run, monkeypatch):
    def refuse(paths):
        raise PermissionError("tree/model.safetensors")

    monkeypatch.setattr(memory_headroom._page_cache, "evict", refuse)
    code, result = run(phase="measured", evict=True)
    assert code == 0 and any("could not be given up" in text for text in result["notices"])
