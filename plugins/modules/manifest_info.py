#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: manifest_info
short_description: Say whether a node sees the full manifest of each artefact
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.weights.trees
  - sparkops.inference.node.named
description:
  - Compares the trees of a deployment with their manifests, by size and file type. Takes well under a second.
  - A tree on an NFS mount is looked at only after its server has answered; a server that does not answer in time is refused by its address.
  - Reads nothing but file metadata, the manifests and, with O(headers), the headers of the safetensors files.
options:
  headers:
    description: Compare the header of every safetensors file with its size too.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Refuse to launch from an incomplete tree
  sparkops.inference.manifest_info:
    artefacts: "{{ spark_plan.artefacts }}"
    weights_root: "{{ spark_node.weights_root }}"
    node: "{{ inventory_hostname }}"
    headers: true
    required: true
"""

RETURN = r"""
artefacts:
  description: One entry per artefact.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Name of the artefact.
      type: str
      sample: model
    tree:
      description: Folder of the tree.
      type: str
      sample: /var/lib/sparkops/weights/acme--tiny/0123456789012345678901234567890123456789
    complete:
      description: Whether every file of the manifest is there.
      type: bool
    problems:
      description: What is wrong, by file.
      type: list
      elements: str
    manifest:
      description: The manifest, or none when the tree was never complete.
      type: dict
complete:
  description: Whether all artefacts are complete.
  returned: always
  type: bool
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import os
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _safetensors
from ansible_collections.sparkops.inference.plugins.module_utils._limited import refuse_dead
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import Manifest
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail
from ansible_collections.sparkops.inference.plugins.module_utils._weights_state import Artefact, look


def header_problems(tree: str, manifest: Manifest) -> list[str]:
    found = []
    for file in manifest.files:
        text = _safetensors.check_file(os.path.join(tree, file.path)) if file.path.endswith(".safetensors") else None
        if text:
            found.append(f"{file.path}: {text}")
    return found


def info(item: t.Mapping[str, t.Any], root: str, headers: bool) -> dict[str, t.Any]:
    artefact = Artefact.from_dict(item)
    state = look(root, artefact)
    problems = state.problems
    if headers and state.manifest and not problems:
        problems = header_problems(state.tree, state.manifest)
    return {
        "name": artefact.name,
        "tree": state.tree,
        "complete": not problems,
        "problems": problems,
        "manifest": state.manifest.as_dict() if state.manifest else None,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "artefacts": {"type": "list", "elements": "dict", "required": True},
            "weights_root": {"type": "path", "required": True},
            "node": {"type": "str", "required": True},
            "headers": {"type": "bool", "default": False},
            "required": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    dead = refuse_dead(module.params["node"], module.params["weights_root"], [item["directory"] for item in module.params["artefacts"]])
    if dead:
        fail(module, dead, artefacts=[], complete=False)
    artefacts = [info(item, module.params["weights_root"], module.params["headers"]) for item in module.params["artefacts"]]
    lacking = [item for item in artefacts if not item["complete"]]
    if lacking and module.params["required"]:
        refusals = [
            Refusal(
                "weights.incomplete",
                module.params["node"],
                f"{item['name']} in {item['tree']}",
                "; ".join(item["problems"][:5]),
                "the full manifest",
                "run the weights and sync plays",
            )
            for item in lacking
        ]
        fail(module, refusals, artefacts=artefacts, complete=False)
    module.exit_json(changed=False, artefacts=artefacts, complete=not lacking)


if __name__ == "__main__":
    main()
