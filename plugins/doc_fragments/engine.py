# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What modules that send requests to the engine of rank 0 have in common."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  state_dir:
    description: Directory of the deployment on rank 0, which holds the API key.
    type: path
    required: true
  api_port:
    description: Port of the API.
    type: int
    required: true
  model:
    description: Name under which the model is served.
    type: str
    required: true
"""
