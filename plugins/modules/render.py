#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: render
short_description: Write a plan and the containers of its ranks as files
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Writes the plan, and for each rank its container as JSON, what its entry script reads, the docker command that would make it, the unit of
    its service, and the netplan file of its rails where C(fabric_configure) and C(fabric_rail_addresses) say one.
  - A file of a rank that the plan no longer has is taken away.
  - It runs on the controller, from the inventory alone. No node is reached, so that the files can be reviewed and kept in a repository.
  - The fact C(spark_plan) of role P(sparkops.inference.plan#role) must be there.
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
  diff_mode:
    support: full
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
  idempotent:
    support: full
    description: When run twice in a row outside check mode, with the same arguments, the second invocation indicates no change.
options:
  directory:
    description:
      - The directory on the controller. It is made when it does not exist.
    type: path
    required: true
  units:
    description:
      - The text of each node's unit by inventory name.
    type: dict
    default: {}
seealso:
  - module: sparkops.inference.plan
  - module: sparkops.inference.rank_spec
"""

EXAMPLES = r"""
- name: Write the plan for review
  sparkops.inference.render:
    directory: "{{ inventory_dir }}/rendered"
  run_once: true
"""

RETURN = r"""
directory:
  description: The directory of the files.
  returned: success
  type: str
files:
  description: The files that were written or taken away, or would be.
  returned: success
  type: list
  elements: str
known_after:
  description: What a start would also write and only a node can tell.
  returned: success
  type: list
  elements: str
"""
