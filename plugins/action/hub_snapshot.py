# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Show licences and a download's progress, and bring the pinned library to the node when it is needed."""

from __future__ import annotations

import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.plugin_utils import _wheels
from ansible_collections.sparkops.inference.plugins.plugin_utils._progress import LongWork, display


class ActionModule(LongWork):
    """The module of the same name, in slices."""

    module = "sparkops.inference.hub_snapshot"

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        self._task.args.update(wheel_hashes=_wheels.all_hashes(), tell_licences=True)
        return super().run(tmp, task_vars)

    def prepare(self, answer: dict[str, t.Any], arguments: dict[str, t.Any], task_vars: dict[str, t.Any] | None) -> dict[str, t.Any]:
        if answer.get("licences"):
            for line in answer["licences"]:
                display.display(f"{(task_vars or {}).get('inventory_hostname', '')}: {line}")
            arguments["tell_licences"] = False
            answer = self.call(arguments, task_vars)
        need = answer.get("needs_wheels")
        if not need:
            return answer
        python = tuple(int(part) for part in need["python"].split("."))
        if python < (3, 11):
            return self.refuse(
                arguments["node"],
                f"Python {need['python']}",
                "Python 3.11 or newer on the downloading node",
                "set ansible_python_interpreter to a newer Python",
            )
        cache = os.path.join(os.path.expanduser("~/.cache/sparkops-inference/wheels"), f"{need['python']}-{need['machine']}")
        try:
            paths = _wheels.wheels(arguments.get("wheels_from"), cache, (python[0], python[1]), need["machine"])
        except _wheels.WheelsError as exc:
            return self.refuse(
                arguments["node"],
                str(exc),
                "all wheels of requirements-hub.txt",
                "set weights_hub_wheels to a folder of the controller that holds them (docs/weights.md says how it is made)",
            )
        folder = self.send(paths)
        try:
            return self.call({**arguments, "wheels": folder}, task_vars)
        finally:
            self._remove_tmp_path(folder, force=True)

    def send(self, paths: t.Sequence[str]) -> str:
        folder = self._make_tmp_path()
        for path in paths:
            self._transfer_file(path, self._connection._shell.join_path(folder, os.path.basename(path)))
        self._fixup_perms2([folder, *(self._connection._shell.join_path(folder, os.path.basename(path)) for path in paths)])
        return folder

    def refuse(self, node: str, found: str, wanted: str, next_step: str) -> dict[str, t.Any]:
        refusal = Refusal("weights.wheels", node, "huggingface_hub for the download", found, wanted, next_step)
        return {"failed": True, "changed": False, "msg": refusal.text, "refusals": [refusal.as_dict()]}
