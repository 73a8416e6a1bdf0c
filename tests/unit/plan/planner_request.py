# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the planner's tests share: a request as an inventory would make it, without Ansible."""

from __future__ import annotations

import functools
import pathlib
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _plan, _rank_spec
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles, schema

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
# The shape files that three GLM nodes need; what is in them does not matter to a plan.
THREE_NODES = {"/opt/glm53/tp3/patch.py": "tp3/patch.py"}

NODES = tuple(f"spark-{number}" for number in range(1, 5))


@functools.cache
def shipped_profiles() -> ProfileFiles:
    return ProfileFiles()


def request(profile: str | None, ranks: int = 2, hosts: dict[str, dict[str, t.Any]] | None = None, **values: t.Any) -> _plan.Request:
    """A group of hosts with group variables ``values``, and ``hosts`` for single ones. ``_name`` sets a field of the request."""
    files = shipped_profiles()
    nodes = list(NODES[:ranks])
    fields = {name[1:]: values.pop(name) for name in list(values) if name.startswith("_")}
    common = {"serve_nodes": nodes, **({"serve_profile": profile} if profile else {}), **values}
    own = {name: {**common, "fabric_address": f"198.51.100.{number}"} for number, name in enumerate(nodes, start=11)}
    for name, variables in (hosts or {}).items():
        own.setdefault(name, dict(common)).update(variables)
    data = {
        "hosts": own,
        "host": nodes[0],
        "inventory": set(own),
        "play_hosts": nodes,
        "find_profile": files.find,
        "profile_names": files.names,
        "schema": schema(),
        "read_file": lambda path: {"source": f"/inventory/{path}", "sha256": "0" * 64, "size": 1, "vector_length": 4096},
        **fields,
    }
    return _plan.Request(**data)


def planned(profile: str, ranks: int = 2, **values: t.Any) -> dict[str, t.Any]:
    """The plan of a request that must have one."""
    plan, refusals = _plan.plan(request(profile, ranks, **values))
    assert plan is not None, format_refusals(refusals)
    return plan


def refused(profile: str | None, ranks: int = 2, **values: t.Any) -> list[Refusal]:
    """The refusals of a request that must have some."""
    plan, refusals = _plan.plan(request(profile, ranks, **values))
    assert plan is None and refusals
    return refusals


def node_facts(plan: dict[str, t.Any], name: str) -> dict[str, t.Any]:
    """What a node would say about itself."""
    number = plan["nodes"].index(name) + 1
    return {
        "state_dir": f"/var/lib/sparkops/{plan['deployment']}",
        "weights_root": f"/data{number}/weights",
        "user": {"home": f"/home/user{number}"},
        "fabric": {
            "interface": f"enp1s0f{number}np{number}",
            "address": plan["addresses"][name],
            "hcas": [f"rocep1s0f{number}", f"roceP2p1s0f{number}"],
        },
    }


def specs(plan: dict[str, t.Any], **facts: t.Any) -> list[dict[str, t.Any]]:
    """The containers of all ranks."""
    nodes = {name: {**node_facts(plan, name), **facts} for name in plan["nodes"]}
    return _rank_spec.rank_specs(plan, nodes, "sha256:" + "1" * 64, "2" * 64, "3" * 64)
