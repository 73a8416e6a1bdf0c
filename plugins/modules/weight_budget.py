#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: weight_budget
short_description: Count the bytes of weights that each rank will hold
version_added: 0.1.0
description:
  - Reads the headers of all safetensors files that a tree's index names, and adds up the bytes per rank by the profile's rules of sharding.
  - Refuses when the budget cannot be computed. It never guesses, and it never skips a tensor.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Reads only, so it runs in check mode too. Trees that are not there yet are named in RV(known_after) instead of refused.
  diff_mode:
    support: N/A
    description: Nothing is changed.
options:
  node:
    description: Inventory name of this host, for messages.
    type: str
    default: ""
  weights:
    description: The section V(memory.weights) of the profile, with the rules of sharding.
    type: dict
    required: true
  trees:
    description: Directory of each artefact, by the artefact's name.
    type: dict
    required: true
  serving:
    description: The settings that decide what is loaded, V(tensor_parallel), V(pipeline_parallel), V(speculation), and those that rules name.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show what each rank will hold
  sparkops.inference.weight_budget:
    weights:
      trees:
        - artefact: model
          rules:
            - {bucket: layers, match: 'model\.layers\.', sharding: split}
            - {bucket: all else, match: '', sharding: replicated}
    trees:
      model: /var/lib/sparkops/weights/acme--tiny/0123456789abcdef0123456789abcdef01234567
    serving:
      tensor_parallel: 2
"""

RETURN = r"""
per_rank:
  description: Bytes of each rank.
  returned: when the budget is known
  type: list
  elements: int
total_bytes:
  description: Bytes of all tensors of the trees.
  returned: when the budget is known
  type: int
files:
  description: How many files were read.
  returned: when the budget is known
  type: int
buckets:
  description: Name, sharding, tensors, total bytes, and bytes per rank of each kind of tensor.
  returned: when the budget is known
  type: list
  elements: dict
table:
  description: The budget as lines for a person.
  returned: when the budget is known
  type: list
  elements: str
known_after:
  description: The stages that must run first, in check mode.
  returned: when the budget is not known yet
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail
from ansible_collections.sparkops.inference.plugins.module_utils._weight_budget import BudgetError, budget, table


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "weights": {"type": "dict", "required": True},
            "trees": {"type": "dict", "required": True},
            "serving": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        found = budget(params["weights"], params["trees"], params["serving"])
    except BudgetError as exc:
        if exc.missing and module.check_mode:
            module.exit_json(changed=False, known_after=["weights"])
        refusal = Refusal(
            id="memory.budget",
            node=params["node"],
            thing="budget of weights",
            found=str(exc),
            wanted="complete weights, and a rule of sharding for each tensor",
            next_step="run the weights play, or correct memory.weights of the profile",
        )
        fail(module, [refusal])
    module.exit_json(
        changed=False,
        per_rank=list(found.per_rank),
        total_bytes=found.total,
        files=found.files,
        buckets=[bucket._asdict() for bucket in found.buckets],
        table=table(found),
    )


if __name__ == "__main__":
    main()
