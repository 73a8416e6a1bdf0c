#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Judge the facts of a node and say everything that is wrong with it at once
version_added: 0.1.0
description:
  - Judges what M(sparkops.inference.node_facts) has read against the plan. A node that did not answer is one of the problems.
  - What a bootstrap item that is switched on will mend is told as a prediction and is no failure.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
attributes:
  action:
    support: full
    description: Runs on the controller.
options: {}
"""

EXAMPLES = r"""
- name: Say everything that is wrong with this node
  sparkops.inference.preflight:
"""

RETURN = r"""
refusals:
  description: What stands in the way, each with id, node, thing, found, wanted, and next step.
  returned: always
  type: list
  elements: dict
predictions:
  description: What bootstrap will mend.
  returned: always
  type: list
  elements: str
notices:
  description: What is worth knowing.
  returned: always
  type: list
  elements: str
"""
