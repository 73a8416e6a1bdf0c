# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils._admission import View, budget_items, judge, need_of, rules_of
from ansible_collections.sparkops.inference.plugins.module_utils._memory import Guard, Meminfo, Tenant, gib
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_data import memory_of

GIB, KIB = 1 << 30, 1 << 10
DEEPSEEK, GLM = memory_of("deepseek_v41_flash_exl3"), memory_of("glm_53_flash_exl3")
DEEPSEEK_WEIGHTS, GLM_WEIGHTS = 106814000000, 88811000000
TOTAL = 127600000 * KIB  # MemTotal of case R12


def meminfo(available, free=None, **more):
    values = {"total": TOTAL, "free": available if free is None else free, "available": available, "cached": 0, "swap_total": 0, "swap_free": 0}
    return Meminfo(**{**values, "hugepages": 0, "cma_total": KIB, "cma_free": 0, **more})


def view(available, **more):
    info = more.pop("meminfo", None) or meminfo(available)
    return View(**{"meminfo": info, "available": available, "basis": "measured", **more})


def deepseek(**more):
    values = {"utilisation": 0.88, "pool": 2684354560, "length": 600000, "sequences": 2, "batched_tokens": 1024, "speculation": "dspark", "draft_tokens": 3}
    return {**values, "tensor_parallel": 2, **more}


def glm(**more):
    values = {"utilisation": 0.87, "length": 900000, "sequences": 4, "batched_tokens": 1024, "speculation": "dflash", "draft_tokens": 7}
    return {**values, "tensor_parallel": 2, **more}


def ids(verdict):
    return [lack.id for lack in verdict.lacks]


# Case R12


def test_r12_1_a_full_page_cache_is_free_memory():
    """MemFree 9 M, Cached 98 M, MemAvailable 104 M kB."""
    info = meminfo(104_000_000 * KIB, free=9_000_000 * KIB, cached=98_000_000 * KIB)
    verdict = judge(view(info.available, meminfo=info, evictable=90 * GIB), GLM, 80 * GIB, glm(utilisation=0.78, length=200000))
    assert ids(verdict) == []
    assert verdict.largest["utilisation"] == 0.79
    notice = next(text for text in verdict.notices if text.startswith("MemFree"))
    assert "MemFree is 8.6 GiB" in notice and "may see less" in notice
    assert "given up without root (90.0 GiB of them are cached)" in notice


def test_r12_3_each_node_by_itself():
    first, second = (judge(view(number * KIB), GLM, 80 * GIB, glm(utilisation=0.78, length=200000)) for number in (104_000_000, 99_000_000))
    assert ids(first) == [] and ids(second) == ["memory.headroom"]
    assert second.lacks[0].found == "94.4 GiB available (measured), 2.5 GiB too little"
    assert second.lacks[0].wanted == "96.9 GiB: utilisation 0.78 of 121.7 GiB and a margin of 2.0 GiB"
    assert "safe here: 0.75" in second.lacks[0].next_step


def test_r12_5_shm_and_earlyoom():
    """shm 64g without a figure of what is used counts whole; a floor of 2 GiB is told before launch."""
    unknown = {name: value for name, value in DEEPSEEK.items() if name != "shm"}
    assert budget_items(view(0, shm_limit=64 * GIB), unknown, DEEPSEEK_WEIGHTS, deepseek())["shm"] == 64 * GIB
    verdict = judge(view(119 * GIB, shm_limit=64 * GIB, guards=[Guard("earlyoom", 2 * GIB, "-M 2097152")]), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek())
    assert ids(verdict) == []
    assert any("/dev/shm may take 64.0 GiB" in text for text in verdict.notices)
    assert any(text.startswith("earlyoom acts at 2.0 GiB (-M 2097152), not after our own guard (off)") for text in verdict.notices)


def test_r12_swap_in_use_is_told():
    info = meminfo(119 * GIB, swap_total=16 * GIB, swap_free=0)
    verdict = judge(view(119 * GIB, meminfo=info), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek())
    assert "16.0 GiB of 16.0 GiB swap are in use: swap hides a lack of memory until ssh is dead." in verdict.notices


# The two recipes


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (118.1, ([], False)),  # an idle machine
        (112.0, ([], True)),  # the launcher's own rule passes, a long prompt would not
        (110.0, (["memory.headroom"], True)),
    ],
)
def test_deepseek(available, expected):
    verdict = judge(view(int(available * GIB)), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek())
    assert (ids(verdict), any(text.startswith("Rule 'long prefill' does not hold") for text in verdict.notices)) == expected


def test_deepseek_boot_margin_is_the_launchers():
    need, parts = need_of(rules_of(DEEPSEEK)[0], {"weights": DEEPSEEK_WEIGHTS}, TOTAL, deepseek())
    assert gib(need) == "111.5 GiB" and parts == "weights 99.5 GiB, and a margin of 12.0 GiB"


def test_glm_utilisation_rule_is_the_launchers():
    need, dummy = need_of(rules_of(GLM)[0], {}, TOTAL, glm())
    assert need == int(0.87 * TOTAL) + 2 * GIB


def test_glm_pool_follows_the_utilisation():
    verdict = judge(view(119 * GIB), GLM, GLM_WEIGHTS, glm())
    assert verdict.items["kv"] == pytest.approx(15.67 * GIB, rel=0.01)
    assert verdict.tokens == pytest.approx(982_612, rel=0.01)
    assert judge(view(119 * GIB), GLM, GLM_WEIGHTS, glm(pool=14 * GIB, length=100000)).items["kv"] == 14 * GIB


@pytest.mark.parametrize(
    ("available", "change", "expected"),
    [
        (110, {}, "free memory on this node, or serve without speculation"),
        (110, {"speculation": "none"}, "free memory on this node"),
        (115, {"pool": 8 * GIB}, "free memory on this node, or serve with a smaller KV pool (safe here: 1.0 GiB), or serve without speculation"),
    ],
)
def test_the_next_step_names_only_what_helps(available, change, expected):
    memory = {**DEEPSEEK, "admission": [{**DEEPSEEK["admission"][1], "refuse": True}]}
    lack = judge(view(available * GIB), memory, 100 * GIB, deepseek(**change)).lacks[0]
    assert lack.next_step == expected


def test_a_pool_that_cannot_hold_the_length_is_refused():
    verdict = judge(view(119 * GIB), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek(pool=1 << 30))
    assert ids(verdict) == ["memory.kv_pool"]
    assert verdict.lacks[0].wanted.endswith("for a maximum length of 600000 tokens")
    assert f"at most {verdict.largest['length']} tokens" in verdict.lacks[0].found


def test_unknown_tokens_are_a_notice():
    verdict = judge(view(119 * GIB), GLM, 50 * GIB, glm(tensor_parallel=4))
    assert verdict.tokens is None and "length" not in verdict.largest
    assert any("tokens of the KV pool are not known" in text for text in verdict.notices)
    assert ids(verdict) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"sequences": 4}, ["More than two sequences"]),
        ({"sequences": 4, "speculation": "none"}, []),
        ({"pool": 3 * GIB}, ["A KV pool above 2.5 GiB"]),
    ],
)
def test_advice(change, said):
    notices = judge(view(125 * GIB), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek(**change)).notices
    found = [text for text in notices if text.startswith(("More than two", "A KV pool"))]
    assert len(found) == len(said) and all(text.startswith(start) for text, start in zip(found, said))


# Without memory data


@pytest.mark.parametrize(("available", "expected"), [(5 * GIB, []), (GIB, ["memory.floor"])])
def test_a_profile_without_memory_data(available, expected):
    verdict = judge(view(available, floor=2 * GIB), {}, None, {})
    assert ids(verdict) == expected
    assert verdict.notices[0] == "The profile has no memory data: only 2.0 GiB of available memory are asked for, nothing is computed."
    assert verdict.items == {} and verdict.largest == {}


def test_a_profile_with_rules_of_sharding_alone():
    verdict = judge(view(20 * GIB), {"weights": {}}, 10 * GIB, {"utilisation": 0.15, "tensor_parallel": 2})
    assert verdict.items == {"weights": 10 * GIB, "kv": int(0.15 * TOTAL) - 10 * GIB, "workspace": 0, "shm": 0}
    assert ids(verdict) == ["memory.headroom"]
    assert "rule 'host'" in verdict.lacks[0].thing


# Guards and tenants


@pytest.mark.parametrize(
    ("guards", "own", "expected"),
    [
        ([Guard("earlyoom", 12 * GIB, "-m 10")], [], ["memory.guard_floor"]),
        ([], [Guard("serving", 3 * GIB, "option")], ["memory.guard_floor"]),
        ([], [Guard("loading", 3 * GIB, "option", loading_only=True)], []),  # while loading no prompt takes memory
        ([], [Guard("loading", 5 * GIB, "option", loading_only=True)], ["memory.guard_floor"]),
        ([], [Guard("serving", 1610612736, "option")], []),
    ],
)
def test_guards_that_would_end_a_healthy_engine(guards, own, expected):
    assert ids(judge(view(119 * GIB, guards=guards, own_guards=own), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek())) == expected


def test_guards_without_a_steady_level_are_compared_with_what_remains():
    memory = {name: value for name, value in DEEPSEEK.items() if name != "steady"}
    verdict = judge(view(119 * GIB, guards=[Guard("earlyoom", 12 * GIB, "-m 10")]), memory, DEEPSEEK_WEIGHTS, deepseek())
    assert ids(verdict) == ["memory.guard_floor"] and verdict.lacks[0].wanted.startswith("at most 4.5 GiB")


def test_a_gpu_container_is_refused_and_a_large_process_is_told():
    tenants = [Tenant("container tts", 3 * GIB, True), Tenant("process java", 2 * GIB, False)]
    verdict = judge(view(119 * GIB, tenants=tenants, gpu_containers=["tts"]), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek())
    assert ids(verdict) == ["memory.gpu_tenant"]
    assert verdict.lacks[0].thing == "container tts" and "holds 3.0 GiB" in verdict.lacks[0].found and "never touches it" in verdict.lacks[0].next_step
    assert "Large tenants: process java 2.0 GiB." in verdict.notices


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"hugepages": 4 * GIB}, "4.0 GiB are reserved as huge pages"),
        ({"cma_total": 0, "cma_free": 64 * KIB}, "CmaTotal is 0 with CmaFree above 0"),
    ],
)
def test_host_notices(change, start):
    info = meminfo(119 * GIB, **change)
    assert any(text.startswith(start) for text in judge(view(119 * GIB, meminfo=info), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek()).notices)


def test_zfs_cache_is_told():
    assert any("ZFS holds 16.0 GiB" in text for text in judge(view(119 * GIB, arc=16 * GIB), DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek()).notices)


# What is called safe is accepted


@settings(deadline=None)
@given(st.integers(0, TOTAL), st.integers(0, 100 * GIB))
def test_the_largest_utilisation_is_accepted_and_the_next_is_not(available, weights):
    found = judge(view(available), GLM, weights, glm()).largest["utilisation"]
    assert found == 0 or "memory.headroom" not in ids(judge(view(available), GLM, weights, glm(utilisation=found)))
    assert "memory.headroom" in ids(judge(view(available), GLM, weights, glm(utilisation=round(found + 0.01, 2))))


@settings(deadline=None)
@given(st.integers(0, TOTAL), st.integers(0, 100 * GIB))
def test_the_largest_pool_is_accepted_and_a_larger_one_is_not(available, weights):
    memory = {**DEEPSEEK, "admission": [{**DEEPSEEK["admission"][1], "refuse": True}]}
    found = judge(view(available), memory, weights, deepseek()).largest["pool"]
    assert found == 0 or "memory.headroom" not in ids(judge(view(available), memory, weights, deepseek(pool=found)))
    assert "memory.headroom" in ids(judge(view(available), memory, weights, deepseek(pool=found + 1)))


def test_a_view_is_not_changed_by_judging():
    before = view(119 * GIB, tenants=(Tenant("process java", 2 * GIB, False),))
    judge(before, DEEPSEEK, DEEPSEEK_WEIGHTS, deepseek())
    assert before == dataclasses.replace(before)
