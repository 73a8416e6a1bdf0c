#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plan
short_description: Work out the effective deployment of a serving group
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
description:
  - Reads the options of all hosts in C(serve_nodes), the profile and its rules, and works out the effective deployment.
  - Everything that is wrong with them is reported at once. Nothing on any node is looked at or changed.
  - It runs on the controller, so that it works for hosts outside of C(--limit) as well.
  - Role P(sparkops.inference.plan#role) runs it and keeps the result as facts for all other roles.
options: {}
seealso:
  - module: sparkops.inference.rank_spec
"""

EXAMPLES = r"""
- name: Work out the effective deployment
  sparkops.inference.plan:
  register: result

- name: Show which image will run
  ansible.builtin.debug:
    var: result.spark_plan.image
"""

RETURN = r"""
spark_plan:
  description:
    - The effective deployment, the same for each host of the group.
    - No secret is in it, only whether one was given.
  returned: success
  type: dict
  contains:
    deployment:
      description: The name of the deployment.
      type: str
    nodes:
      description: The hosts in rank order.
      type: list
      elements: str
    settings:
      description: All effective settings by option name.
      type: dict
    origins:
      description: Where each setting comes from, one of V(default), V(profile), V(inventory), V(play vars) or V(extra vars).
      type: dict
    notices:
      description: What is not wrong but worth knowing.
      type: list
      elements: str
spark_rank:
  description: The rank of this host, V(-1) when it is not in C(serve_nodes).
  returned: success
  type: int
refusals:
  description: Everything that is wrong, when there is no plan.
  returned: failure
  type: list
  elements: dict
"""
