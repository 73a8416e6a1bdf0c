# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the documentation of several modules has in common."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = ""

    READ_ONLY = r"""
attributes:
  check_mode:
    support: full
    description: Changes nothing, so it runs in check mode too.
  diff_mode:
    support: N/A
    description: Nothing is changed.
  idempotent:
    support: full
    description: Nothing is changed.
"""

    DOCKER = r"""
options:
  docker_socket:
    description: The socket of the Docker Engine. C(DOCKER_HOST) is ignored.
    type: path
    default: /var/run/docker.sock
"""

    NAMED = r"""
options:
  node:
    description: Inventory name of the node, for messages.
    type: str
    required: true
"""

    JOB = r"""
options:
  state_dir:
    description: State folder of the deployment on the node.
    type: path
    required: true
  deployment:
    description: Name of the deployment. It names the unit.
    type: str
    required: true
  wait_slice:
    description: Return after this many seconds even if the work goes on, with RV(running) set. Zero waits for the end.
    type: int
    default: 0
  run_id:
    description: The RV(run_id) of an earlier call, to get the outcome of that run.
    type: str
"""
