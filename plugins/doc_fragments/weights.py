# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What modules that look after model files have in common."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = ""

    TREES = r"""
options:
  artefacts:
    description: The artefacts of the plan, each with C(name), C(repository), C(revision) and C(directory).
    type: list
    elements: dict
    required: true
  weights_root:
    description: Folder that holds all trees.
    type: path
    required: true
  required:
    description: Refuse when an artefact is not complete.
    type: bool
    default: false
"""

    FROM_PEERS = r"""
options:
  key:
    description: This node's own private key for its peers.
    type: path
    required: true
  known_hosts:
    description: The pinned host keys of the peers.
    type: path
    required: true
  state_root:
    description: State folder of the collection on the node.
    type: path
    required: true
"""

    WRITTEN = r"""
options:
  space_margin:
    description: Bytes that must stay free.
    type: int
    default: 2147483648
  reserve:
    description: Other bytes that will be written, each with C(path), C(size) and C(what). They count against the free space.
    type: list
    elements: dict
    default: []
  weights_root:
    description: Folder that holds all trees. An absolute path on the node.
    type: path
    required: true
"""
