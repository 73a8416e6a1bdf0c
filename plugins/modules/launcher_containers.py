#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: launcher_containers
short_description: Containers that a launch script has started
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.docker
description:
  - Names the containers of the recipes' own launch scripts on a node, stops them, and starts again those that it has stopped.
  - No container is ever removed.
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
  diff_mode:
    support: none
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
  idempotent:
    support: full
    description: When run twice in a row outside check mode, with the same arguments, the second invocation indicates no change.
options:
  state:
    description:
      - V(listed) only reads. V(stopped) stops what runs and writes it down. V(started) starts what was written down.
    type: str
    choices: [listed, stopped, started]
    default: listed
  names:
    description:
      - The names to look for.
    type: list
    elements: str
    required: true
  record:
    description:
      - The file in which stopped containers are written down.
    type: path
    required: true
  grace:
    description:
      - Seconds between the polite and the hard signal.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Name what a launch script has started
  sparkops.inference.launcher_containers:
    names: [dsv41-exl3-head, dsv41-exl3-worker]
    record: /var/lib/sparkops/adopted.json
"""

RETURN = r"""
containers:
  description: The containers that are there.
  returned: success
  type: list
  elements: dict
  sample: [{"name": "dsv41-exl3-head", "state": "running", "image": "ghcr.io/x/y:z"}]
recorded:
  description: Names of the containers that were stopped here and not started again.
  returned: success
  type: list
  elements: str
"""

import json
import os
import tempfile
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError, quote


def found(api: DockerApi, names: t.Sequence[str]) -> list[dict[str, t.Any]]:
    """What is there of the names, in their order."""
    containers = {}
    for container in api.containers():
        for name in container.get("Names") or []:
            containers[name.lstrip("/")] = {"state": container.get("State", ""), "image": container.get("Image", "")}
    return [{"name": name, **containers[name]} for name in names if name in containers]


def read_record(path: str) -> list[str]:
    """The names in the record; none when there is no record."""
    try:
        with open(path, encoding="utf-8") as stream:
            return list(json.load(stream)["stopped"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


class Launcher:
    """The containers of a launch script on this node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.api = DockerApi(module.params["docker_socket"], timeout=module.params["grace"] + 30)
        self.record = module.params["record"]

    def listed(self) -> dict[str, t.Any]:
        return self._result(False)

    def stopped(self) -> dict[str, t.Any]:
        running = [container["name"] for container in found(self.api, self.module.params["names"]) if container["state"] == "running"]
        if running and not self.module.check_mode:
            # Written down first: what is stopped and not written down would not come back.
            self._write(sorted({*read_record(self.record), *running}))
            for name in running:
                self.api.call("POST", f"/containers/{quote(name)}/stop", query={"t": self.module.params["grace"]})
        return self._result(bool(running))

    def started(self) -> dict[str, t.Any]:
        recorded = read_record(self.record)
        wanted = [name for name in self.module.params["names"] if name in recorded]
        there = {container["name"]: container["state"] for container in found(self.api, wanted)}
        if not self.module.check_mode:
            for name in wanted:
                if there.get(name) != "running":
                    self.api.call("POST", f"/containers/{quote(name)}/start")
            if wanted:
                self._write([name for name in recorded if name not in wanted])
        return self._result(bool(wanted))

    def _result(self, changed: bool) -> dict[str, t.Any]:
        return {"changed": changed, "containers": found(self.api, self.module.params["names"]), "recorded": read_record(self.record)}

    def _write(self, names: list[str]) -> None:
        if not names:
            os.unlink(self.record)
            return
        handle, path = tempfile.mkstemp(dir=self.module.tmpdir)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({"stopped": names}, stream)
        self.module.atomic_move(path, self.record)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listed", "stopped", "started"], "default": "listed"},
            "names": {"type": "list", "elements": "str", "required": True},
            "record": {"type": "path", "required": True},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "grace": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    launcher = Launcher(module)
    try:
        result = getattr(launcher, module.params["state"])()
    except DockerError as exc:
        if exc.state == "not_installed":
            module.exit_json(changed=False, containers=[], recorded=read_record(module.params["record"]))
        module.fail_json(msg=f"Containers of a launch script, state {module.params['state']}: {exc}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
