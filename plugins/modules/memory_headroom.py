#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_headroom
short_description: Tell whether a rank will fit into this node's memory, and what holds the rest
version_added: 0.1.0
description:
  - Reads C(/proc/meminfo), all processes, the containers, the GPU's processes, and the configuration of other memory guards.
  - Compares MemAvailable with the budget of weights, KV pool, and workspace by the profile's rules. MemFree and NVML decide nothing.
  - While the old engine still runs, the level is projected, from the recorded idle level less the tenants that came since. After the
    stop it is measured.
  - Nothing is ever stopped or removed.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.docker
attributes:
  check_mode:
    support: full
    description: Waits for nothing, gives nothing up and records nothing. Weights that are not there yet are named in RV(known_after).
  diff_mode:
    support: none
    description: The recorded idle level is not shown as a difference.
  idempotent:
    support: partial
    description: The verdict follows the memory of the moment. The idle level is recorded again only when it is higher or after a reboot.
options:
  node:
    description: Inventory name of this host, for messages.
    type: str
    default: ""
  rank:
    description: Rank of this host.
    type: int
    default: 0
  phase:
    description: V(projected) while the old engine still serves, V(measured) after it has stopped.
    type: str
    choices: [projected, measured]
    default: projected
  memory:
    description: The section V(memory) of the profile. Without V(weights) in it only O(floor) is asked for.
    type: dict
    default: {}
  serving:
    description: Values of the settings that the section names, such as V(utilisation), V(pool), V(length), V(tensor_parallel).
    type: dict
    default: {}
  trees:
    description: Directory of each artefact, by the artefact's name.
    type: dict
    default: {}
  floor:
    description: Bytes that must be available where the profile has no memory data.
    type: int
    default: 2147483648
  state_dir:
    description: Directory of the deployment on this node, where the idle level is recorded. Without it nothing is recorded.
    type: path
  record_idle:
    description: Record the level of this moment as idle when none of O(own_containers) runs.
    type: bool
    default: false
  own_containers:
    description: Names of the containers that the start replaces.
    type: list
    elements: str
    default: []
  wait:
    description: Seconds to wait until memory is back near the idle level, before anything is measured. 0 does not wait.
    type: int
    default: 0
  tolerance:
    description: Bytes by which the level may stay below the idle level.
    type: int
    default: 2147483648
  evict:
    description: Give up the page cache of O(trees) before measuring.
    type: bool
    default: false
  shm_size:
    description: What the container's own C(/dev/shm) may take, such as V(64g). Without it the limit of this host's C(/dev/shm) counts.
    type: str
  tenant_size:
    description: Bytes from which another process or container is named.
    type: int
    default: 1073741824
  own_guards:
    description: Our own guards that will be armed, each with V(name), V(floor) in bytes and V(loading_only).
    type: list
    elements: dict
    default: []
  accept:
    description: Ids of refusals that the user accepts. They become notices.
    type: list
    elements: str
    default: []
  sample_seconds:
    description: Seconds between two readings of all processes, to name those that grow. 0 reads once.
    type: float
    default: 0
  refuse:
    description: Whether the module fails when the rank does not fit. Without it the caller decides with RV(lacks).
    type: bool
    default: true
  proc_root:
    description: Root of the proc tree, for tests.
    type: path
    default: /proc
  etc_root:
    description: Root of the configuration of other guards, for tests.
    type: path
    default: /etc
"""

EXAMPLES = r"""
- name: Report the memory of this node
  sparkops.inference.memory_headroom:
    sample_seconds: 1
    refuse: false

- name: Refuse to start where less than 20 GiB are available
  sparkops.inference.memory_headroom:
    phase: measured
    floor: 21474836480
"""

RETURN = r"""
memory:
  description:
    - Bytes by name, V(total), V(available), V(free), V(cached), V(swap_total), V(swap_used), V(hugepages), V(shm_limit).
    - V(level) is what the verdict is based on, V(basis) says whether it was measured or projected.
  returned: always
  type: dict
tenants:
  description: Large processes and containers that are not ours, and all that use the GPU, with V(key), V(bytes), V(gpu).
  returned: always
  type: list
  elements: dict
growing:
  description: The processes that grew most within O(sample_seconds), with V(name), V(pid), V(rss), V(grown).
  returned: always
  type: list
  elements: dict
guards:
  description: Other guards on this node, with V(name), V(floor), V(detail).
  returned: always
  type: list
  elements: dict
idle:
  description: The recorded idle level; empty when there is none.
  returned: always
  type: dict
needs:
  description: What the rank will hold, in bytes by kind; empty when it is not known.
  returned: always
  type: dict
largest:
  description: The largest V(utilisation), V(pool) in bytes and V(length) in tokens that this node can take.
  returned: always
  type: dict
tokens:
  description: How many tokens the KV pool holds, V(null) when that is not known.
  returned: always
  type: int
table:
  description: The budget of weights as lines for a person.
  returned: always
  type: list
  elements: str
lacks:
  description: Refusals, with V(id), V(node), V(thing), V(found), V(wanted), V(next_step), V(text).
  returned: always
  type: list
  elements: dict
notices:
  description: What a person should know, whatever the verdict.
  returned: always
  type: list
  elements: str
waited_seconds:
  description: How long the module waited for memory.
  returned: always
  type: float
evicted_bytes:
  description: Size of the files whose page cache was given up.
  returned: always
  type: int
known_after:
  description: The stages that must run before there can be a verdict, in check mode.
  returned: always
  type: list
  elements: str
"""

import dataclasses
import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _memory, _page_cache
from ansible_collections.sparkops.inference.plugins.module_utils._admission import Verdict, View, judge
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import boot_identity, read_json, write_json
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail
from ansible_collections.sparkops.inference.plugins.module_utils._weight_budget import BudgetError, budget, table

NVIDIA_QUERY = ["--query-compute-apps=pid,process_name,used_gpu_memory", "--format=csv,noheader"]
POLL_SECONDS = 1.0


@dataclasses.dataclass
class Containers:
    """The running containers, as far as this account may see them."""

    names: dict[str, str]
    gpu: list[str]
    own: set[str]


class Headroom:
    """One reading of the node, and the verdict on it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.notices: list[str] = []
        self.known_after: list[str] = []
        self.lacks: list[_memory.Lack] = []
        self.table: list[str] = []
        self.evicted = 0
        self.waited = 0.0
        self.containers = self.read_containers()
        self.gpu = self.read_gpu()
        self.idle: dict[str, t.Any] = read_json(self.idle_path, {}) if self.params["state_dir"] else {}

    # Readings

    @property
    def idle_path(self) -> str:
        return os.path.join(self.params["state_dir"], "idle.json")

    def proc(self, *names: str) -> str:
        return _memory.read_text(os.path.join(self.params["proc_root"], *names))

    def read_containers(self) -> Containers:
        found = Containers({}, [], set())
        api = DockerApi(self.params["docker_socket"], timeout=10)
        try:
            for entry in api.containers(everything=False):
                name = (entry.get("Names") or ["/"])[0].lstrip("/")
                found.names[entry["Id"]] = name
                if name in self.params["own_containers"]:
                    found.own.add(entry["Id"])
                elif _memory.uses_gpu(api.inspect_container(entry["Id"]) or {}):
                    found.gpu.append(name)
        except DockerError as exc:
            if exc.state != "not_installed":
                self.notices.append(f"Containers could not be read, so GPU tenants among them are not known: {exc}.")
        return found

    def read_gpu(self) -> list[_memory.GpuUse]:
        program = self.module.get_bin_path("nvidia-smi")
        if program is None:
            return []
        code, out, dummy = self.module.run_command([program, *NVIDIA_QUERY])
        return _memory.read_compute_apps(out) if code == 0 else []

    def meminfo(self) -> _memory.Meminfo:
        return _memory.read_meminfo(self.proc("meminfo"))

    def used(self, own: t.Collection[str]) -> dict[str, int]:
        return _memory.usage(_memory.read_processes(self.params["proc_root"]), self.gpu, self.containers.names, own)

    def growing(self) -> list[dict[str, t.Any]]:
        if self.params["sample_seconds"] <= 0:
            return []
        before = _memory.read_processes(self.params["proc_root"])
        time.sleep(self.params["sample_seconds"])
        now = _memory.read_processes(self.params["proc_root"])
        return [{"name": one.name, "pid": one.pid, "rss": one.rss, "grown": grown} for one, grown in _memory.fastest_growing(before, now)]

    def other_guards(self, total: int, used: t.Mapping[str, int]) -> list[_memory.Guard]:
        """Guards of others that run. One that is only configured kills nothing."""
        running = [name for name in _memory.MEMORY_DAEMONS if f"process {name}" in used]
        text = _memory.read_text(os.path.join(self.params["etc_root"], "default", "earlyoom"))
        guard = _memory.read_earlyoom(text, total) if "earlyoom" in running else None
        if "earlyoom" in running and guard is None:
            guard = _memory.Guard("earlyoom", int(total * _memory.EARLYOOM_DEFAULT_PERCENT / 100), "its defaults")
        others = [name for name in running if name != "earlyoom"]
        if others:
            self.notices.append(f"{', '.join(others)} runs on this node and may kill one rank alone when memory is short.")
        return [guard] if guard else []

    # Acts, none of them in check mode

    def wait(self) -> None:
        """Until the memory of what was stopped is back, or the time is over."""
        if self.params["wait"] <= 0 or self.module.check_mode:
            return
        begun = time.monotonic()
        series: list[int] = []
        while True:
            series.append(self.meminfo().available)
            expected, holders = self.expected()
            self.waited = time.monotonic() - begun
            if self.is_back(series, expected):
                return
            if self.waited >= self.params["wait"]:
                break
            time.sleep(POLL_SECONDS)
        if expected is not None:
            self.lacks.append(_memory.not_back(series[-1], expected, self.waited, holders))

    def expected(self) -> tuple[int | None, dict[str, int]]:
        """The level to wait for, and who may hold what lacks. A tenant that came is no reason to wait, unless it uses the GPU."""
        if not self.idle:
            return None, {}
        self.gpu = self.read_gpu()
        processes = _memory.read_processes(self.params["proc_root"])
        everyone = _memory.usage(processes, self.gpu, self.containers.names, ())
        others = _memory.usage(processes, self.gpu, self.containers.names, self.containers.own)
        on_gpu = _memory.gpu_keys(processes, self.gpu, self.containers.names)
        level, dummy = _memory.projected_available(self.idle, {key: number for key, number in others.items() if key not in on_gpu})
        suspects = {key: number for key, number in everyone.items() if key in on_gpu or key not in others}
        return level, _memory.grown_since(self.idle.get("used") or {}, suspects)

    def is_back(self, series: t.Sequence[int], expected: int | None) -> bool:
        if expected is None:
            return _memory.steady(series)
        return _memory.memory_back(series[-1], expected, self.params["tolerance"])

    def evict(self) -> None:
        if not self.params["evict"] or self.module.check_mode:
            return
        try:
            self.evicted = _page_cache.evict(self.existing_trees())
        except OSError as exc:
            self.notices.append(f"The page cache of the weights could not be given up: {exc}.")

    def record_idle(self, view: View) -> bool:
        """Whether the idle level was, or in check mode would be, recorded."""
        level = {
            "format": 1,
            "boot": boot_identity(self.params["proc_root"]),
            "available": view.meminfo.available,
            "total": view.meminfo.total,
            "used": dict(view.used),
        }
        still_held = any(lack.id == "memory.not_back" for lack in self.lacks)
        possible = self.params["state_dir"] and (self.module.check_mode or os.path.isdir(self.params["state_dir"]))
        if not self.params["record_idle"] or not possible or self.containers.own or still_held:
            return False
        if not _memory.better_idle(self.idle, level):
            return False
        if not self.module.check_mode:
            write_json(self.idle_path, level)
            self.give_to_owner_of_state_dir()
        self.idle = level
        return True

    def give_to_owner_of_state_dir(self) -> None:
        """With become this file would be root's in a directory that the account owns."""
        owner = os.stat(self.params["state_dir"])
        if os.geteuid() == 0:
            os.chown(self.idle_path, owner.st_uid, owner.st_gid)

    # The verdict

    def existing_trees(self) -> list[str]:
        return [path for path in self.params["trees"].values() if os.path.isdir(path)]

    def evictable(self, meminfo: _memory.Meminfo) -> int:
        """Cached bytes of the weights. It costs a second for 200 GiB, so only where there is cache, and what was given up is gone."""
        if self.evicted or meminfo.available - meminfo.free < _memory.GIB:
            return 0
        try:
            return sum(_page_cache.resident_in([path]) for path in self.existing_trees())
        except OSError:
            return 0

    def weights(self) -> int | None:
        """This rank's bytes; None where the profile has no data, or where it is not known (then a lack or a stage says so)."""
        if not self.params["memory"].get("weights"):
            return None
        try:
            found = budget(self.params["memory"]["weights"], self.params["trees"], self.params["serving"])
        except BudgetError as exc:
            if exc.missing and self.module.check_mode:
                self.known_after.append("weights")
                return None
            self.lacks.append(
                _memory.Lack(
                    id="memory.budget",
                    thing="budget of weights",
                    found=str(exc),
                    wanted="complete weights, and a rule of sharding for each tensor",
                    next_step="run the weights play, or correct memory.weights of the profile",
                )
            )
            return None
        self.table = table(found)
        return found.per_rank[self.params["rank"]]

    def level(self, meminfo: _memory.Meminfo, used: t.Mapping[str, int]) -> tuple[int, str]:
        """What will be available when the start begins, and how that is known."""
        if self.params["phase"] == "measured" or not self.containers.own:
            return meminfo.available, "measured"
        if not self.idle:
            self.notices.append("The old engine runs and no idle level is recorded: nothing can be projected, so it is measured after the stop.")
            return meminfo.total, "not known"
        level, newcomers = _memory.projected_available(self.idle, used)
        if newcomers:
            named = ", ".join(f"{key} {_memory.gib(number)}" for key, number in newcomers.items())
            self.notices.append(f"Came or grew since the idle level was recorded: {named}.")
        return level, "projected"

    def own_guards(self) -> list[_memory.Guard]:
        detail = "option of this collection"
        return [_memory.Guard(one["name"], int(one["floor"]), detail, bool(one.get("loading_only"))) for one in self.params["own_guards"]]

    def shm_limit(self, total: int) -> int:
        return _memory.to_bytes(self.params["shm_size"]) if self.params["shm_size"] else _memory.read_shm_limit(self.proc("mounts"), total)

    def view(self) -> View:
        meminfo, used = self.meminfo(), self.used(self.containers.own)
        available, basis = self.level(meminfo, used)
        gpu_keys = {f"container {name}" for name in self.containers.gpu}
        return View(
            meminfo=meminfo,
            available=available,
            basis=basis,
            used=used,
            tenants=_memory.tenants(used, gpu_keys, self.params["tenant_size"]),
            gpu_containers=self.containers.gpu,
            guards=self.other_guards(meminfo.total, used),
            own_guards=self.own_guards(),
            shm_limit=self.shm_limit(meminfo.total),
            floor=self.params["floor"],
            evictable=self.evictable(meminfo) if basis == "measured" else 0,
            arc=_memory.read_arc(self.proc("spl", "kstat", "zfs", "arcstats")),
        )

    def verdict(self, view: View) -> Verdict:
        memory = self.params["memory"]
        weights = self.weights()
        if view.basis == "not known" or (weights is None and memory.get("weights")):
            return Verdict()
        verdict = judge(view, memory, weights, self.params["serving"])
        accepted = [lack for lack in verdict.lacks if lack.id in self.params["accept"]]
        verdict.notices += [f"Accepted by its id {lack.id}: {lack.thing}, {lack.found}." for lack in accepted]
        self.lacks += [lack for lack in verdict.lacks if lack not in accepted]
        return verdict

    def run(self) -> dict[str, t.Any]:
        self.wait()
        self.evict()
        growing = self.growing()
        view = self.view()
        verdict = self.verdict(view)
        changed = self.record_idle(view)
        return {
            "changed": changed,
            "memory": self.numbers(view),
            "tenants": [one._asdict() for one in view.tenants],
            "growing": growing,
            "guards": [one._asdict() for one in view.guards],
            "idle": self.idle,
            "needs": verdict.items,
            "largest": verdict.largest,
            "tokens": verdict.tokens,
            "table": self.table,
            "notices": self.notices + verdict.notices,
            "waited_seconds": round(self.waited, 1),
            "evicted_bytes": self.evicted,
            "known_after": self.known_after,
        }

    @staticmethod
    def numbers(view: View) -> dict[str, t.Any]:
        names = ("total", "available", "free", "cached", "swap_total", "swap_used", "hugepages")
        return {
            **{name: getattr(view.meminfo, name) for name in names},
            "shm_limit": view.shm_limit,
            "level": view.available if view.basis != "not known" else None,
            "basis": view.basis,
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "rank": {"type": "int", "default": 0},
            "phase": {"type": "str", "choices": ["projected", "measured"], "default": "projected"},
            "memory": {"type": "dict", "default": {}},
            "serving": {"type": "dict", "default": {}},
            "trees": {"type": "dict", "default": {}},
            "floor": {"type": "int", "default": 2 * _memory.GIB},
            "state_dir": {"type": "path"},
            "record_idle": {"type": "bool", "default": False},
            "own_containers": {"type": "list", "elements": "str", "default": []},
            "wait": {"type": "int", "default": 0},
            "tolerance": {"type": "int", "default": 2 * _memory.GIB},
            "evict": {"type": "bool", "default": False},
            "shm_size": {"type": "str"},
            "tenant_size": {"type": "int", "default": _memory.GIB},
            "own_guards": {"type": "list", "elements": "dict", "default": []},
            "accept": {"type": "list", "elements": "str", "default": []},
            "sample_seconds": {"type": "float", "default": 0},
            "refuse": {"type": "bool", "default": True},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "proc_root": {"type": "path", "default": "/proc"},
            "etc_root": {"type": "path", "default": "/etc"},
        },
        supports_check_mode=True,
    )
    headroom = Headroom(module)
    try:
        result = headroom.run()
    except ValueError as exc:
        module.fail_json(msg=f"The memory of this node could not be judged: {exc}")
    refusals = [Refusal(node=module.params["node"], **lack._asdict()) for lack in headroom.lacks]
    result["lacks"] = [{**refusal.as_dict(), "text": refusal.text} for refusal in refusals]
    if refusals and module.params["refuse"]:
        fail(module, refusals, **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
