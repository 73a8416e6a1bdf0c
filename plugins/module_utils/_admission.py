# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Whether a rank fits on its node, by the profile's rules. Pure: readings and profile data in, verdict out."""

from __future__ import annotations

import dataclasses
import math
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _kv_pool
from ansible_collections.sparkops.inference.plugins.module_utils._memory import (
    GIB,
    Guard,
    Lack,
    Meminfo,
    Tenant,
    gib,
    holds,
    to_bytes,
)

# The engine's own default (vLLM 0.32), where neither profile nor user gives one.
ENGINE_UTILISATION = 0.92
# Where a profile has no rule: what both recipes leave to the host.
DEFAULT_RULE: dict[str, t.Any] = {"name": "host", "kind": "sum", "margin": 2 * GIB}
ITEMS = ("weights", "kv", "workspace", "shm")
# Less of swap or of ZFS's cache is not worth a line.
WORTH_TELLING = GIB

Memory = t.Mapping[str, t.Any]
Serving = t.Mapping[str, t.Any]


@dataclasses.dataclass(frozen=True)
class View:
    """What is known of a node's memory at one moment. ``available`` may be projected."""

    meminfo: Meminfo
    available: int
    basis: str  # measured, projected, not known
    used: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    tenants: t.Sequence[Tenant] = ()
    gpu_containers: t.Sequence[str] = ()
    guards: t.Sequence[Guard] = ()
    own_guards: t.Sequence[Guard] = ()
    shm_limit: int = 0
    floor: int = 0
    evictable: int = 0
    arc: int = 0


@dataclasses.dataclass
class Verdict:
    """What stops the start, what to know, and what would be safe."""

    lacks: list[Lack] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)
    items: dict[str, int] = dataclasses.field(default_factory=dict)
    largest: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    tokens: int | None = None

    @property
    def need(self) -> int:
        return sum(self.items.values())


def judge(view: View, memory: Memory, weights: int | None, serving: Serving) -> Verdict:
    """The verdict on one node. ``weights`` is this rank's part of the checkpoint, None where the profile has no memory data."""
    verdict = Verdict()
    if weights is None:
        _judge_floor(view, verdict)
    else:
        verdict.items = budget_items(view, memory, weights, serving)
        _judge_rules(view, memory, serving, verdict)
        _judge_pool(view, memory, serving, verdict)
        verdict.largest.update(largest(view, memory, serving, verdict.items))
        _judge_guards(view, memory, verdict)
        verdict.notices += [advice["text"] for advice in memory.get("advice") or [] if holds(advice.get("when"), serving)]
    _judge_tenants(view, verdict)
    verdict.notices += host_notices(view, verdict)
    return verdict


# The budget


def budget_items(view: View, memory: Memory, weights: int, serving: Serving) -> dict[str, int]:
    """What the rank will hold, in bytes by kind."""
    workspace = sum(to_bytes(item["size"]) for item in memory.get("workspace") or [] if holds(item.get("when"), serving))
    shm = memory.get("shm") or {}
    return {
        "weights": weights,
        "kv": pool_bytes(view.meminfo.total, weights, workspace, serving),
        "workspace": workspace,
        # Without a figure of what is used, all that the mount allows counts: it comes from the same memory.
        "shm": to_bytes(shm["used"]) if "used" in shm else view.shm_limit,
    }


def utilisation_of(serving: Serving) -> float:
    return serving.get("utilisation") or ENGINE_UTILISATION


def pool_bytes(total: int, weights: int, workspace: int, serving: Serving) -> int:
    """The KV pool: as pinned, else what the engine's share leaves after weights and workspace."""
    if serving.get("pool"):
        return int(serving["pool"])
    return max(0, int(utilisation_of(serving) * total) - weights - workspace)


# The rules


def rules_of(memory: Memory) -> t.Sequence[t.Mapping[str, t.Any]]:
    return memory.get("admission") or [DEFAULT_RULE]


def need_of(rule: t.Mapping[str, t.Any], items: t.Mapping[str, int], total: int, serving: Serving) -> tuple[int, str]:
    """The bytes that a rule wants to be available, and how they come about."""
    margin = to_bytes(rule.get("margin", 0))
    if rule["kind"] == "utilisation":
        share = utilisation_of(serving)
        return int(share * total) + margin, f"utilisation {share:g} of {gib(total)} and a margin of {gib(margin)}"
    names = rule.get("items") or ITEMS
    parts = ", ".join(f"{name} {gib(items[name])}" for name in names)
    return sum(items[name] for name in names) + margin, f"{parts}, and a margin of {gib(margin)}"


def _judge_rules(view: View, memory: Memory, serving: Serving, verdict: Verdict) -> None:
    for rule in rules_of(memory):
        need, parts = need_of(rule, verdict.items, view.meminfo.total, serving)
        if need <= view.available:
            continue
        found = f"{gib(view.available)} available ({view.basis}), {gib(need - view.available)} too little"
        wanted = f"{gib(need)}: {parts}"
        next_step = _how_to_fit(view, memory, serving, verdict.items)
        if rule.get("refuse", True):
            verdict.lacks.append(Lack("memory.headroom", f"memory by rule {rule['name']!r}", found, wanted, next_step))
        else:
            verdict.notices.append(f"Rule {rule['name']!r} does not hold: {found}; it wants {wanted}. Safer: {next_step}.")


def _how_to_fit(view: View, memory: Memory, serving: Serving, items: t.Mapping[str, int]) -> str:
    safe = largest(view, memory, serving, items)
    held = "; ".join(f"{tenant.key} holds {gib(tenant.bytes)}" for tenant in view.tenants[:3])
    ways = [f"free memory on this node ({held})" if held else "free memory on this node"]
    if serving.get("pool") and safe["pool"] > 0:
        ways.append(f"serve with a smaller KV pool (safe here: {gib(safe['pool'])})")
    elif not serving.get("pool") and safe["utilisation"] > 0:
        ways.append(f"serve with a smaller utilisation (safe here: {safe['utilisation']:.2f})")
    if serving.get("speculation", "none") != "none":
        ways.append("serve without speculation")
    return ", or ".join(ways)


def _judge_pool(view: View, memory: Memory, serving: Serving, verdict: Verdict) -> None:
    """The engine refuses a pool that can't hold one request of the maximum length: say so before weights are loaded."""
    pool = verdict.items["kv"]
    try:
        verdict.tokens = _kv_pool.tokens(pool, memory.get("kv"), serving)
        smallest = _kv_pool.smallest_pool(memory.get("kv"), serving)
        longest = _kv_pool.largest_length(pool, memory.get("kv"), serving)
    except _kv_pool.KvUnknown as exc:
        verdict.notices.append(f"The tokens of the KV pool are not known: {exc}.")
        return
    verdict.largest["length"] = longest
    if pool < smallest:
        verdict.lacks.append(
            Lack(
                id="memory.kv_pool",
                thing="KV pool",
                found=f"{gib(pool)}, which holds requests of at most {longest} tokens",
                wanted=f"{gib(smallest)} for a maximum length of {serving['length']} tokens",
                next_step="serve with a shorter maximum length, or with a larger KV pool if the memory allows it",
            )
        )


def largest(view: View, memory: Memory, serving: Serving, items: t.Mapping[str, int]) -> dict[str, t.Any]:
    """The largest utilisation and KV pool that every rule would accept on this node."""
    utilisation = _largest_utilisation(view, memory)
    pools = [
        view.available - to_bytes(rule.get("margin", 0)) - sum(items[name] for name in rule.get("items") or ITEMS if name != "kv")
        for rule in rules_of(memory)
        if rule["kind"] == "sum" and "kv" in (rule.get("items") or ITEMS)
    ]
    if not pools:
        pools = [int(utilisation * view.meminfo.total) - items["weights"] - items["workspace"]]
    return {"utilisation": utilisation, "pool": max(0, min(pools))}


def _largest_utilisation(view: View, memory: Memory) -> float:
    margins = [to_bytes(rule.get("margin", 0)) for rule in rules_of(memory) if rule["kind"] == "utilisation"]
    margin = max(margins, default=to_bytes(DEFAULT_RULE["margin"]))
    # Cut, not rounded: the value is printed for people to use. The hair keeps 0.57 from being cut to 0.56.
    return max(0.0, math.floor((view.available - margin) / view.meminfo.total * 100 + 1e-9) / 100)


def _judge_floor(view: View, verdict: Verdict) -> None:
    """A profile without memory data: nothing is computed, so only a plain floor can be asked for."""
    verdict.notices.append(f"The profile has no memory data: only {gib(view.floor)} of available memory are asked for, nothing is computed.")
    if view.available < view.floor:
        verdict.lacks.append(
            Lack(
                id="memory.floor",
                thing="memory",
                found=f"{gib(view.available)} available ({view.basis})",
                wanted=f"at least {gib(view.floor)}",
                next_step="free memory on this node, or set memory_floor to what this model needs",
            )
        )


# Guards and tenants


def _judge_guards(view: View, memory: Memory, verdict: Verdict) -> None:
    """A guard whose floor lies above what a healthy engine leaves will end a healthy engine."""
    remaining = view.available - verdict.need
    steady = {name: to_bytes(value) for name, value in (memory.get("steady") or {}).items() if name in ("available", "low")}
    armed = min((guard.floor for guard in view.own_guards), default=0)
    for guard in (*view.guards, *view.own_guards):
        healthy = steady.get("available" if guard.loading_only else "low", remaining)
        if guard.floor > healthy:
            verdict.lacks.append(
                Lack(
                    id="memory.guard_floor",
                    thing=f"floor of {guard.name}",
                    found=f"{gib(guard.floor)} ({guard.detail})",
                    wanted=f"at most {gib(healthy)}, which a healthy engine leaves {'after loading' if guard.loading_only else 'in a long prompt'}",
                    next_step=f"lower the floor of {guard.name}, or switch it off on this node",
                )
            )
        elif guard in view.guards and guard.floor >= armed:
            verdict.notices.append(
                f"{guard.name} acts at {gib(guard.floor)} ({guard.detail}), not after our own guard ({gib(armed) if armed else 'off'}): "
                "it may kill one rank alone."
            )


def _judge_tenants(view: View, verdict: Verdict) -> None:
    for name in view.gpu_containers:
        held = next((tenant.bytes for tenant in view.tenants if tenant.key == f"container {name}"), 0)
        verdict.lacks.append(
            Lack(
                id="memory.gpu_tenant",
                thing=f"container {name}",
                found=f"it uses the GPU and holds {gib(held)} that can be seen" if held else "it uses the GPU",
                wanted="no other GPU container on a serving node",
                next_step=f"stop {name} yourself, or accept memory.gpu_tenant: this collection never touches it",
            )
        )
    others = [tenant for tenant in view.tenants if tenant.key not in {f"container {name}" for name in view.gpu_containers}]
    if others:
        verdict.notices.append("Large tenants: " + ", ".join(f"{tenant.key} {gib(tenant.bytes)}" for tenant in others[:5]) + ".")


def host_notices(view: View, verdict: Verdict) -> list[str]:
    """What a person should know of the host's memory, whatever the verdict."""
    found = []
    meminfo = view.meminfo
    wanted = verdict.need or view.floor
    if view.basis == "measured" and meminfo.free < wanted <= meminfo.available:
        found.append(
            f"MemFree is {gib(meminfo.free)} and {gib(meminfo.cached)} are page cache: a check of the engine that reads MemFree may see less "
            f"than there is. The pages of the weights can be given up without root ({gib(view.evictable)} of them are cached)."
        )
    if meminfo.swap_used >= WORTH_TELLING:
        found.append(f"{gib(meminfo.swap_used)} of {gib(meminfo.swap_total)} swap are in use: swap hides a lack of memory until ssh is dead.")
    if meminfo.hugepages:
        found.append(f"{gib(meminfo.hugepages)} are reserved as huge pages and lost to the engine.")
    if meminfo.cma_total == 0 and meminfo.cma_free > 0:
        found.append("CmaTotal is 0 with CmaFree above 0: the kernel's kexec handover holds about 26 GiB; kho=off on the kernel command line frees it.")
    if view.arc >= WORTH_TELLING:
        found.append(f"ZFS holds {gib(view.arc)} as its own cache, which MemAvailable does not count as free: zfs_arc_max limits it.")
    remaining = view.available - verdict.need
    if view.shm_limit > max(remaining, 0) and verdict.items:
        found.append(f"/dev/shm may take {gib(view.shm_limit)} of the same memory and only {gib(max(remaining, 0))} are left: a smaller limit is safer.")
    return found
