#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_history_info
short_description: Tell which proven deployments this node can go back to
version_added: 0.1.0
description:
  - Reads the records of proven deployments, and whether the image of each is still in the Docker Engine of this node.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
options:
  state_dir:
    description: Directory of the deployment on this node.
    type: path
    required: true
  container:
    description: Name of the rank's container; what it runs is no aim to go back to.
    type: str
  id:
    description: A record to return as a whole.
    type: str
"""

EXAMPLES = r"""
- name: See what there is to go back to
  sparkops.inference.serve_history_info:
    state_dir: /var/lib/sparkops/lab_tiny
"""

RETURN = r"""
records:
  description: Id, profile, time of the proof, image, and artefacts of each record, the newest first, with V(image_present).
  returned: always
  type: list
  elements: dict
last_good:
  description: Id of the record that was proven last; empty when nothing was proven yet.
  returned: always
  type: str
running:
  description: Id that the running container would have; empty when none runs.
  returned: always
  type: str
record:
  description: The record O(id); null when it was not asked for or is not there.
  returned: always
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _history
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import read_json, summary


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "container": {"type": "str"},
            "id": {"type": "str"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    api = DockerApi(params["docker_socket"], timeout=10)
    try:
        records = [
            {**_history.brief(record), "image_present": api.inspect_image(record["image"]["id"]) is not None}
            for record in _history.records(params["state_dir"])
        ]
        container = summary(api.inspect_container(params["container"])) if params["container"] else None
    except DockerError as exc:
        module.fail_json(msg=f"The images of this node cannot be seen: {exc}")
    module.exit_json(
        changed=False,
        records=records,
        last_good=(read_json(os.path.join(params["state_dir"], "last_good.json"), {}) or {}).get("id", ""),
        running=_history.record_id(container["group"]) if container and container["running"] else "",
        record=_history.read(params["state_dir"], params["id"]) if params["id"] else None,
    )


if __name__ == "__main__":
    main()
