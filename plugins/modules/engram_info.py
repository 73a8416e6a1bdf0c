#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engram_info
short_description: Say whether one rank has Engram row files that an engine may be given
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
description:
  - Compares header, size, and recorded source of each row file with the Engram source. Reads a few pages, whatever the size.
  - A reason not to use the row files is an answer of this module and never its failure, because the engine can do without them.
options:
  source:
    description: Folder with C(config.json), the safetensors index, and the shards that hold the Engram tables.
    type: path
    required: true
  directory:
    description: Folder of the row files.
    type: path
    required: true
  rank:
    description: Rank of this node.
    type: int
    required: true
  tensor_parallel:
    description: Number of ranks that share the rows.
    type: int
    required: true
  layers:
    description: Layers to look for. The default is all Engram layers of C(config.json).
    type: list
    elements: int
    default: []
seealso:
  - module: sparkops.inference.engram_pack
"""

EXAMPLES = r"""
- name: Look at the row files of this rank
  sparkops.inference.engram_info:
    source: /var/lib/sparkops/weights/acme--big/0123456789012345678901234567890123456789
    directory: /var/lib/sparkops/engram/acme--big/0123456789012345678901234567890123456789/tp2
    rank: 0
    tensor_parallel: 2
"""

RETURN = r"""
engram:
  description: The same as RV(sparkops.inference.engram_pack#module:engram).
  returned: always
  type: dict
  sample:
    directory: /var/lib/sparkops/engram/acme--big/0123456789012345678901234567890123456789/tp2
    valid: true
    reason: ''
    layers:
      '1': {file: engram-l1-r0of2.bin, valid: true, reason: '', rows: [0, 192001740], size: 50688463456}
    others: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _engram_files
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "directory": {"type": "path", "required": True},
            "rank": {"type": "int", "required": True},
            "tensor_parallel": {"type": "int", "required": True},
            "layers": {"type": "list", "elements": "int", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        report = _engram_files.look(params["source"], params["directory"], params["rank"], params["tensor_parallel"], params["layers"]).report()
    except Refused as exc:
        report = _engram_files.nothing(params["directory"], str(exc))
    module.exit_json(changed=False, engram=report)


if __name__ == "__main__":
    main()
