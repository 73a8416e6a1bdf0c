# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Fetch what each node collected, and make one archive of it on the controller. See plugins/modules/rank_bundle.py."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import tarfile
import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import process_start
from ansible_collections.sparkops.inference.plugins.module_utils._scrub import scrub
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain

display = Display()

MODULE = "sparkops.inference.rank_bundle"
KEPT = 10
# Of the plan: what somebody needs to start the same group elsewhere.
SHOWN = ("deployment", "profile", "nodes", "addresses", "image", "artefacts", "settings", "node_settings", "origins", "notices")


def run_stamp() -> str:
    """One name for all hosts of a run: when its ansible-playbook began, whose children the action plugins run in."""
    with open("/proc/stat", encoding="utf-8") as stream:
        booted = next(int(line.split()[1]) for line in stream if line.startswith("btime"))
    begun = booted + int(process_start(os.getppid())) / os.sysconf("SC_CLK_TCK")
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(begun))}-{os.getppid()}"


def members(plan: t.Mapping[str, t.Any], given: t.Mapping[str, t.Mapping[str, t.Any]]) -> tuple[dict[str, bytes], list[str]]:
    """Files of the joined archive beside those of the nodes, and the lines of its summary."""
    lines = [f"{plan['deployment']}, profile {plan['profile']}"]
    for rank, name in enumerate(plan["nodes"]):
        answer = given.get(name) or {}
        if "path" not in answer:
            lines.append(f"rank {rank} ({name}): nothing collected: {answer.get('msg', 'does not answer')}")
            continue
        lines.append(f"rank {rank} ({name}): {os.path.basename(answer['path'])}")
        lines += [f"  likely cause: {cause}" for cause in answer.get("causes", ())]
        lines += [f"  not there: {text}" for text in answer.get("missing", ())]
    shown = {name: plan[name] for name in SHOWN}
    return {"settings.json": json.dumps(scrub(shown), indent=1, sort_keys=True, default=str).encode(), "summary.txt": ("\n".join(lines) + "\n").encode()}, lines


def forget_old(folder: str, label: str) -> None:
    """Each failed start leaves a bundle: the newest of a deployment are enough."""
    pattern = re.compile(re.escape(label) + r"-\d{8}T\d{6}Z-\d+\.tar")
    found = sorted(filter(pattern.fullmatch, os.listdir(folder)), key=lambda name: os.path.getmtime(os.path.join(folder, name)))
    for name in found[:-KEPT]:
        os.unlink(os.path.join(folder, name))


class ActionModule(ActionBase):
    """``read`` on each node, then ``joined`` once."""

    _supports_async = False

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        folder = os.path.join(os.path.expanduser(arguments["destination"]), f"{arguments['label']}-{run_stamp()}")
        if arguments.get("state") == "joined":
            return {**result, "changed": False, **self._join(folder, task_vars)}
        answer = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        if answer.get("failed") or answer.get("unreachable"):
            return {**result, **answer}
        os.makedirs(folder, mode=0o700, exist_ok=True)
        local = os.path.join(folder, f"{arguments['node']}.tar.gz")
        try:
            self._connection.fetch_file(answer["path"], local)
        finally:
            # Not by a module: a group that failed is waiting to be stopped.
            self._low_level_execute_command(f"rm -f {shlex.quote(answer['path'])}")
        return {**result, **answer, "path": local}

    def _join(self, folder: str, task_vars: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        plan = plain(task_vars["spark_plan"])
        given = {name: plain(task_vars["hostvars"][name].get("__collect_rank") or {}) for name in plan["nodes"]}
        extra, lines = members(plan, given)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = f"{folder}.tar"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            for name, content in extra.items():
                entry = tarfile.TarInfo(f"{os.path.basename(folder)}/{name}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o640
                archive.addfile(entry, io.BytesIO(content))
            for name in sorted(os.listdir(folder)):
                archive.add(os.path.join(folder, name), f"{os.path.basename(folder)}/{name}")
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
        forget_old(os.path.dirname(folder), self._task.args["label"])
        for line in lines:
            display.display(line)
        display.display(f"bundle: {path}")
        return {"path": path, "summary": lines}
