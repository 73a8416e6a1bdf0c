#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: deployment_info
short_description: Tell which deployments have state on this node, and which of them run
version_added: 0.1.0
description:
  - Reads the state root and the containers with our labels.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
options:
  state_root:
    description: Directory that the deployments of this node have their state in.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: See what is on this node
  sparkops.inference.deployment_info:
    state_root: /var/lib/sparkops
"""

RETURN = r"""
deployments:
  description: Name, state directory, rank, container, whether it runs, and the record that was proven last, null when there is none.
  returned: always
  type: list
  elements: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _history
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._leftovers import deployments
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import read_json


def main() -> None:
    module = AnsibleModule(
        argument_spec={"state_root": {"type": "path", "required": True}, "docker_socket": {"type": "path", "default": "/var/run/docker.sock"}},
        supports_check_mode=True,
    )
    try:
        containers = DockerApi(module.params["docker_socket"], timeout=10).containers({"label": ["sparkops.deployment"]})
    except DockerError as exc:
        module.fail_json(msg=f"The containers of this node cannot be seen: {exc}")
    found = []
    for name in deployments(module.params["state_root"]):
        state_dir = os.path.join(module.params["state_root"], name)
        own = next((entry for entry in containers if entry["Labels"]["sparkops.deployment"] == name), None)
        last_good = read_json(os.path.join(state_dir, "last_good.json"))
        found.append({
            "name": name,
            "state_dir": state_dir,
            "rank": (read_json(os.path.join(state_dir, "rank.json"), {}) or {}).get("rank"),
            "container": own["Names"][0].lstrip("/") if own else "",
            "running": bool(own) and own.get("State") == "running",
            "last_good": _history.brief(last_good) if isinstance(last_good, dict) and last_good.get("id") else None,
        })
    module.exit_json(changed=False, deployments=found)


if __name__ == "__main__":
    main()
