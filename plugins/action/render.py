# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.render); its documentation is in plugins/modules/render.py."""

from __future__ import annotations

import json
import os
import typing as t

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.sparkops.inference.plugins.module_utils._plan import placeholder_node
from ansible_collections.sparkops.inference.plugins.module_utils._plan_text import command_text, docker_run
from ansible_collections.sparkops.inference.plugins.module_utils._rank_spec import rank_specs
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain


def rendered(plan: dict[str, t.Any]) -> dict[str, str]:
    """The files of a plan by name, from the inventory alone."""
    files = {"plan.json": _json(plan)}
    nodes = {name: placeholder_node(plan, name) for name in plan["nodes"]}
    for rank, spec in enumerate(rank_specs(plan, nodes, None, None, None)):
        files[f"rank{rank}.json"] = _json(spec)
        files[f"rank{rank}.entry.json"] = _json(spec["entry"])
        files[f"rank{rank}.docker-run.txt"] = command_text(docker_run(spec))
    return files


def _json(data: t.Any) -> str:
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = self.validate_argument_spec(argument_spec={"directory": {"type": "path", "required": True}})[1]
        directory = arguments["directory"]
        changed, diffs = [], []
        try:
            for name, text in rendered(plain((task_vars or {})["spark_plan"])).items():
                path = os.path.join(directory, name)
                before = _read(path)
                if before != text:
                    changed.append(path)
                    diffs.append({"before_header": path, "after_header": path, "before": before or "", "after": text})
                    self._write(path, text)
        except OSError as error:
            raise AnsibleActionFail(f"Writing the plan into {directory}: {error}") from error
        return {**result, "changed": bool(changed), "files": changed, "directory": directory, "diff": diffs}

    def _write(self, path: str, text: str) -> None:
        if self._task.check_mode:
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # Whole or not at all: a reader in a repository never sees half of a file.
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".new", path)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
