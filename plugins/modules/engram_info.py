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
  - With O(container) it also reads what the engine in that container has said about its Engram rows since its start. The engine falls
    back to the checkpoint without a word of warning, so only its own lines prove that the row files are in use.
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
  container:
    description: Name of the rank's container. Without it no engine is asked.
    type: str
  docker_socket:
    description: The socket of the Docker Engine.
    type: path
    default: /var/run/docker.sock
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

- name: Ask the running engine whether it uses them
  sparkops.inference.engram_info:
    source: /var/lib/sparkops/weights/acme--big/0123456789012345678901234567890123456789
    directory: /var/lib/sparkops/engram/acme--big/0123456789012345678901234567890123456789/tp2
    rank: 0
    tensor_parallel: 2
    container: big-rank0
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
engine:
  description:
    - What the engine does. C(packed) is true when it has said for each layer that it reads the row file with the rows that the file has.
    - C(problems) has every difference as a text, and C(pinned) is true when it keeps whole tables in memory instead.
  returned: when O(container) is given
  type: dict
  sample: {packed: false, pinned: false, problems: ['layer 14: packed=False, the engine reads the checkpoint instead of the row file']}
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _engram, _engram_files
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError, quote
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import FrameReader
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused


def said_by(params: t.Mapping[str, t.Any]) -> str:
    """The lines of a container's log that speak of Engram. A log can be long; the rest of it is never kept."""
    reader = FrameReader()
    pieces = DockerApi(params["docker_socket"]).stream(
        "GET", f"/containers/{quote(params['container'])}/logs", query={"stdout": "1", "stderr": "1"}, timeout=30
    )
    return "\n".join(line for piece in pieces for line in reader.lines(piece) if "Engram" in line)


def engine_report(params: t.Mapping[str, t.Any], rows: t.Mapping[int, _engram.Rows]) -> dict[str, t.Any]:
    try:
        log = said_by(params)
    except DockerError as exc:
        return {"packed": False, "pinned": False, "problems": [f"the log of {params['container']} cannot be read: {exc}"]}
    problems = _engram.log_problems(log, params["rank"], params["tensor_parallel"], rows)
    return {"packed": bool(rows) and not problems, "pinned": _engram.pins_tables(log), "problems": problems}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "directory": {"type": "path", "required": True},
            "rank": {"type": "int", "required": True},
            "tensor_parallel": {"type": "int", "required": True},
            "layers": {"type": "list", "elements": "int", "default": []},
            "container": {"type": "str"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        report = _engram_files.look(params["source"], params["directory"], params["rank"], params["tensor_parallel"], params["layers"]).report()
    except Refused as exc:
        report = _engram_files.nothing(params["directory"], str(exc))
    engine = {}
    if params["container"]:
        rows = {int(layer): _engram.Rows(*entry["rows"]) for layer, entry in report["layers"].items()}
        engine = {"engine": engine_report(params, rows)}
    module.exit_json(changed=False, engram=report, **engine)


if __name__ == "__main__":
    main()
