#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_plan
short_description: Choose interface, RDMA ports, and GIDs of every rank
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
description:
  - Takes what M(sparkops.inference.fabric_info) found on all ranks, and the settings, and works out what this host uses; or says all that is wrong.
  - It runs on the controller. Role P(sparkops.inference.fabric#role) runs it and keeps the result as the fact C(spark_fabric).
options:
  others:
    description: Results of M(sparkops.inference.fabric_info) for ranks outside of the play, with the name of the rank as C(item).
    type: list
    elements: dict
    default: []
  accept:
    description: Ids of refusals that are no reason to fail here, because the caller is about to mend them.
    type: list
    elements: str
    default: []
  quiet:
    description: Whether to keep the notices out of the output.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Choose the fabric of this rank
  sparkops.inference.fabric_plan:
  register: result
"""

RETURN = r"""
fabric:
  description: The choice for this host; empty when the host is no rank.
  returned: success
  type: dict
  contains:
    interface:
      description: Interface that carries the fabric address.
      returned: success
      type: str
    address:
      description: The fabric address.
      returned: success
      type: str
    hcas:
      description: RDMA devices, with a port number where it is not the first. Empty without RDMA.
      returned: success
      type: list
      elements: str
    selector:
      description: The same in NCCL's exact form.
      returned: success
      type: str
    gid:
      description:
        - The policy, the index if the user gave one, and the own addresses that a GID may hold for each device.
        - Its parts C(now) and C(usable) are findings of the moment and belong into no specification.
      returned: success
      type: dict
    rails:
      description: Paths to the other ranks with interface, address, MTU, and device of both ends.
      returned: success
      type: list
      elements: dict
    topology:
      description: Shape of the whole group.
      returned: success
      type: str
    notices:
      description: What is not as good as it could be, and why.
      returned: success
      type: list
      elements: str
topology:
  description: Shape of the cabling and the linked pairs of ranks.
  returned: when all ranks were read
  type: dict
parity:
  description: One row for each thing that all ranks should have in common, with the value of each.
  returned: when all ranks were read
  type: list
  elements: dict
refusals:
  description: All that is wrong.
  returned: always
  type: list
  elements: dict
"""
