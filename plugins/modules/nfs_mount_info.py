#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nfs_mount_info
short_description: Say within seconds whether the servers of a node's NFS mounts answer
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.named
description:
  - Asks each NFS mount at or below a folder for something that only its server knows, in a child that is killed when its time is over.
options:
  root:
    description: Folder to look below.
    type: path
    required: true
  directories:
    description: The trees that are wanted, below O(root). A stale mount of another tree is no problem, unless a container has it.
    type: list
    elements: str
    required: true
  seconds:
    description: Time that a server has to answer. All mounts are asked at the same time.
    type: int
    default: 10
"""

EXAMPLES = r"""
- name: Look whether the head's files can be read
  sparkops.inference.nfs_mount_info:
    root: "{{ spark_node.weights_root }}"
    directories: "{{ spark_plan.artefacts | map(attribute='directory') | list }}"
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
mounts:
  description: The mounts with their state, one of V(live), V(stale), V(denied), V(dead), V(broken).
  returned: always
  type: list
  elements: dict
  sample:
    - {path: /var/lib/sparkops/weights/acme--tiny/0123, source: "198.51.100.11:/x", server: 198.51.100.11, state: dead, detail: no answer within 10 s}
problems:
  description: One refusal for each mount that is not live and is in the way.
  returned: always
  type: list
  elements: dict
message:
  description: The problems as one text, empty when there is none.
  returned: always
  type: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _mounts
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import format_refusals


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "node": {"type": "str", "required": True},
            "directories": {"type": "list", "elements": "str", "required": True},
            "seconds": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    params = module.params
    mounts = _mounts.network_mounts(_mounts.read(), params["root"])
    looks = _limited.look_at(mounts, params["seconds"])
    trees = [os.path.join(params["root"], directory) for directory in params["directories"]]
    problems = _limited.refusals(params["node"], zip(mounts, looks), trees)
    module.exit_json(
        changed=False,
        mounts=[
            {"path": mount.path, "source": mount.source, "server": mount.server, "state": look.state, "detail": look.detail}
            for mount, look in zip(mounts, looks)
        ],
        problems=[problem.as_dict() for problem in problems],
        message=format_refusals(problems) if problems else "",
    )


if __name__ == "__main__":
    main()
