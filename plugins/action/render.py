# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.render); its documentation is in plugins/modules/render.py."""

from __future__ import annotations

import json
import os
import re
import typing as t

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.sparkops.inference.plugins.module_utils import _netplan
from ansible_collections.sparkops.inference.plugins.module_utils._plan import placeholder_node
from ansible_collections.sparkops.inference.plugins.module_utils._plan_text import command_text, docker_run
from ansible_collections.sparkops.inference.plugins.module_utils._rank_spec import rank_specs
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain


ARGUMENTS: dict[str, dict[str, t.Any]] = {"directory": {"type": "path", "required": True}, "units": {"type": "dict", "default": {}}}

# All names that a file of a rank can have; such a file that the plan no longer has is taken away.
_OURS = re.compile(r"rank\d+\.(json|entry\.json|docker-run\.txt|service|netplan\.yaml)")


def rendered(plan: dict[str, t.Any], units: t.Mapping[str, str]) -> dict[str, str]:
    """The files of a plan by name, from the inventory alone."""
    files = {"plan.json": _json(plan)}
    nodes = {name: placeholder_node(plan, name) for name in plan["nodes"]}
    for rank, spec in enumerate(rank_specs(plan, nodes, None, None, None)):
        files[f"rank{rank}.json"] = _json(spec)
        files[f"rank{rank}.entry.json"] = _json(spec["entry"])
        files[f"rank{rank}.docker-run.txt"] = command_text(docker_run(spec))
        name = plan["nodes"][rank]
        if name in units:
            files[f"rank{rank}.service"] = units[name]
        rails = plan["node_settings"][name]["fabric_rail_addresses"]
        if plan["settings"]["fabric_configure"] and rails:
            files[f"rank{rank}.netplan.yaml"] = _netplan.render(rails, plan["settings"]["fabric_mtu"])
    return files


def known_later(plan: t.Mapping[str, t.Any]) -> list[str]:
    """What a start would also write and only the node can tell."""
    unsaid = [name for name in plan["nodes"] if not plan["node_settings"][name]["fabric_rail_addresses"]]
    if not plan["settings"]["fabric_configure"] or not unsaid:
        return []
    return [f"netplan of {', '.join(unsaid)}: known after fabric, which keeps the addresses that the rails have; fabric_rail_addresses would say them here"]


def _json(data: t.Any) -> str:
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)[1]
        directory, plan = arguments["directory"], plain((task_vars or {})["spark_plan"])
        try:
            files = rendered(plan, {name: str(text) for name, text in arguments["units"].items()})
            diffs = [self._keep(os.path.join(directory, name), text) for name, text in files.items()]
            diffs += [self._keep(os.path.join(directory, name), None) for name in _left_over(directory, files)]
        except (OSError, _netplan.NetplanError) as error:
            raise AnsibleActionFail(f"Writing the plan into {directory}: {error}") from error
        changed = [diff for diff in diffs if diff]
        return {
            **result, "changed": bool(changed), "files": [diff["after_header"] for diff in changed], "directory": directory, "diff": changed,
            "known_after": known_later(plan),
        }

    def _keep(self, path: str, text: str | None) -> dict[str, str] | None:
        """Make a file what it should be, or take it away; what that changes."""
        before = _read(path)
        if before == text:
            return None
        if not self._task.check_mode:
            os.unlink(path) if text is None else self._write(path, text)
        return {"before_header": path, "after_header": path, "before": before or "", "after": text or ""}

    @staticmethod
    def _write(path: str, text: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # Whole or not at all: a reader in a repository never sees half of a file.
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".new", path)


def _left_over(directory: str, files: t.Collection[str]) -> list[str]:
    present = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(name for name in present if _OURS.fullmatch(name) and name not in files)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
