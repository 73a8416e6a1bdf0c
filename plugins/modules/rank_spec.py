#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_spec
short_description: Work out the exact container of this host's rank
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
description:
  - Joins the plan with what the nodes say about themselves into image, arguments, environment, mounts, devices and limits of one container.
  - It runs on the controller and changes nothing.
  - The facts C(spark_plan) and C(spark_rank) of role P(sparkops.inference.plan#role) must be there, and C(spark_node) of all ranks.
options:
  image_id:
    description:
      - The identity of the image on the nodes. Without it the spec names the image by its reference.
    type: str
  entry_sha256:
    description:
      - The SHA-256 of the entry script. A changed script is a changed spec.
    type: str
  api_key_hmac:
    description:
      - A salted HMAC of the API key, so that a changed key is a changed spec of the head.
    type: str
seealso:
  - module: sparkops.inference.plan
  - module: sparkops.inference.render
"""

EXAMPLES = r"""
- name: Work out this host's container
  sparkops.inference.rank_spec:
    image_id: "{{ image_result.id }}"
  register: result

- name: Show the engine's arguments
  ansible.builtin.debug:
    var: result.spec.command
"""

RETURN = r"""
spec:
  description:
    - The container of this host's rank, none when the host is not in C(serve_nodes).
  returned: success
  type: dict
  contains:
    name:
      description: The name of the container.
      type: str
    entrypoint:
      description: The entry script's argument list.
      type: list
      elements: str
    command:
      description: The engine's argument list.
      type: list
      elements: str
    env:
      description: The environment variables.
      type: dict
    mounts:
      description: The bind mounts.
      type: list
      elements: dict
    labels:
      description: The labels, with the hash of this spec and the hash of the whole group.
      type: dict
"""
