# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's side of M(sparkops.inference.bench_record); its documentation is in plugins/modules/bench_record.py."""

from __future__ import annotations

import json
import os
import time
import typing as t

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.sparkops.inference.plugins.plugin_utils._bench_page import bench_document, bench_view
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import plain
from ansible_collections.sparkops.inference.plugins.plugin_utils._pages import collection_version, read_documents, render, report_directory, write


def page(run: dict[str, t.Any], others: t.Sequence[dict[str, t.Any]]) -> str:
    return render("bench", view=bench_view(run, others), data=run, version=collection_version())


class ActionModule(ActionBase):
    _requires_connection = False
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = plain(
            self.validate_argument_spec(
                argument_spec={
                    "survey": {"type": "dict", "required": True},
                    "results": {"type": "list", "elements": "dict", "required": True},
                    "skipped": {"type": "list", "elements": "dict", "default": []},
                    "image": {"type": "dict", "default": {}},
                }
            )[1]
        )
        plan = plain((task_vars or {})["spark_plan"])
        seconds = sum(entry["seconds"] for entry in arguments["results"])
        ended = time.time()
        about = {
            "id": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(ended)),
            "begun_at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ended - seconds)),
            "seconds": round(seconds, 1),
            "image": plan["image"]["reference"],
            "image_digest": arguments["image"].get("digest") or plan["image"].get("digest") or "",
            "weights": [{"repository": entry["repository"], "revision": entry["revision"]} for entry in plan["artefacts"]],
        }
        results = [{**entry, "case": entry["item"]} for entry in arguments["results"]]
        run = bench_document(plan, arguments["survey"], results, arguments["skipped"], about)
        directory = report_directory(plan["settings"]["report_directory"], plan["deployment"])
        path = os.path.join(directory, f"bench-{run['id']}.json")
        text = page(run, read_documents(directory, "bench"))
        if not self._task.check_mode:
            try:
                write(path, json.dumps(run, indent=1, sort_keys=True) + "\n")
                write(os.path.join(directory, f"bench-{run['id']}.html"), text)
            except OSError as error:
                raise AnsibleActionFail(f"Keeping the benchmark in {directory}: {error}") from error
        return {**result, "changed": False, "run": run, "json": path, "page": path.removesuffix("json") + "html"}
