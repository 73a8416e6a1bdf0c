#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_group
short_description: Start all ranks of a group from rank 0, workers first, or end them
version_added: 0.1.0
description:
  - Runs on rank 0 and asks the rank service of every node through the forced-command ssh key over the fabric.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Predicts a change and starts nothing.
  diff_mode:
    support: none
    description: There is no text to compare.
options:
  state:
    description:
      - What the group shall be.
      - V(ready) tells the rank services that the started group was proven, so that it serves now and no longer loads. It changes no container.
    type: str
    choices: [started, stopped, ready]
    default: started
  state_dir:
    description: Directory of the deployment on rank 0.
    type: path
    required: true
  program:
    description: Path of rank_service.py on this node.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Start the group
  sparkops.inference.serve_group:
    state_dir: /var/lib/sparkops/lab_tiny
    program: /usr/local/lib/sparkops/rank_service.py
"""

RETURN = r"""
ranks:
  description: What each rank answered, by rank number.
  returned: always
  type: dict
"""

import sys

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._group_channel import ask_group


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "stopped", "ready"], "default": "started"},
            "state_dir": {"type": "path", "required": True},
            "program": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=module.params["state"] != "ready", ranks={})
    verb = {"started": "group-start", "stopped": "group-stop", "ready": "group-ready"}[module.params["state"]]
    answer = ask_group(module.run_command, sys.executable, module.params["program"], verb, module.params["state_dir"])
    if answer["error"]:
        module.fail_json(msg=f"Not every rank could be {module.params['state']}: {answer['error']}", ranks=answer["ranks"])
    module.exit_json(changed=module.params["state"] != "ready", ranks=answer["ranks"])


if __name__ == "__main__":
    main()
