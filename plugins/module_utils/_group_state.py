# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The state of a serving group from what each of its ranks says. Pure: facts in, verdict and evidence out."""

from __future__ import annotations

import typing as t

# What a group can be (DESIGN section 1). Only "serving" with the wanted spec is left alone.
ABSENT, HALF, STALE, LOADING, SERVING, WEDGED = "absent", "half", "stale", "loading", "serving", "wedged"


def describe_rank(info: t.Mapping[str, t.Any] | None, asked: bool = True) -> str:
    """One rank in a few words for a person."""
    if not asked:
        return "was not read (--limit)"
    if info is None:
        return "does not answer: it may still run"
    container = info.get("container")
    if container is None:
        return "no container"
    if container["running"]:
        return "running"
    text = f"{container['status']} with code {container['exit_code']}"
    service = info.get("service") or {}
    why = [*(["killed for lack of memory"] if container.get("oom_killed") else []), *([service["guard"]] if service.get("guard") else []),
           *([service["orphan"]] if service.get("orphan") else []), *service.get("lacking", [])]
    return ", ".join([text, *why])


def rank_is_running(info: t.Mapping[str, t.Any] | None) -> bool:
    return bool(info and info.get("container") and info["container"]["running"])


def group_state(
    nodes: t.Sequence[str],
    infos: t.Mapping[str, t.Mapping[str, t.Any] | None],
    wanted: t.Mapping[str, str],
    api: t.Mapping[str, t.Any] | None,
    left_out: t.Collection[str] = (),
) -> dict[str, t.Any]:
    """Judge the group.

    ``nodes``: inventory names by rank. ``infos``: result of rank_info by name, None where the node did not answer.
    ``wanted``: spec hash by name; empty where it is not known yet. ``api``: what rank 0's API said:
    {"health": HTTP status, "proof": {"ok", "verdict", "detail"}}, None when it was not asked.
    ``left_out``: names that are not in this run; of them nothing is known.
    Returns {"state", "reasons": [...], "ranks": [{"rank", "node", "says"}]}.
    """
    ranks = [{"rank": rank, "node": name, "says": describe_rank(infos.get(name), name not in left_out)} for rank, name in enumerate(nodes)]
    running = [name for name in nodes if rank_is_running(infos.get(name))]
    down = [entry for entry in ranks if entry["node"] not in running]
    lines = [f"rank {entry['rank']} ({entry['node']}): {entry['says']}" for entry in down]
    health = (api or {}).get("health", 0)

    def verdict(state: str, reasons: list[str]) -> dict[str, t.Any]:
        return {"state": state, "reasons": reasons, "ranks": ranks}

    if not running:
        unreachable = any(infos.get(name) is None for name in nodes)
        return verdict(HALF if unreachable else ABSENT, lines)
    if down:
        if health == 200:
            lines.append("rank 0's /health still says 200; that is no proof")
        return verdict(HALF, lines)
    stale = [name for name in nodes if wanted.get(name) and infos[name]["container"]["spec"] != wanted[name]]
    if stale:
        return verdict(STALE, [f"rank {nodes.index(name)} ({name}): runs another spec than the wanted one" for name in stale])
    groups = {infos[name]["container"]["group"] for name in nodes}
    if len(groups) > 1:
        return verdict(STALE, ["the ranks were started as parts of different groups"])
    if health != 200:
        return verdict(LOADING, [f"rank 0's /health says {health or 'nothing'}"])
    proof = (api or {}).get("proof") or {}
    if not proof.get("ok"):
        return verdict(WEDGED, [f"/health says 200, but a completion ends in {proof.get('verdict', 'nothing')}: {proof.get('detail', '')}"])
    return verdict(SERVING, [f"busy: {proof.get('detail', '')}"] if proof.get("verdict") == "busy" else [])
