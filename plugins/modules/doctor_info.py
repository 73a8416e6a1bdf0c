#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: doctor_info
short_description: Read what tells of ill health on a node
version_added: 0.1.0
description:
  - Driver libraries, GPU state, link state of interfaces, held packages, kernel log of this boot, log of the rank, and whether metrics are shown.
  - Reads only, each thing with a time limit. What cannot be read is empty.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
options:
  interfaces:
    description: Interfaces to ask C(ethtool) about.
    type: list
    elements: str
    default: []
  container:
    description: Container of the rank, whose log is read. Empty for none.
    type: str
    default: ""
  metrics_address:
    description: Where the API is reached on this node; one that is bound to an address answers on no other.
    type: str
    default: 127.0.0.1
  metrics_port:
    description: Port of the API on this node, to look for metrics. V(0) for none.
    type: int
    default: 0
  root:
    description: Root of the file system, for tests.
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Read what tells of ill health
  sparkops.inference.doctor_info:
    interfaces: [enp1s0f1np1]
    container: tiny-rank0
    metrics_port: 8888
  register: health
"""

RETURN = r"""
health:
  description: The readings.
  returned: always
  type: dict
  contains:
    libraries:
      description: File names of the driver's libraries.
      returned: always
      type: list
      elements: str
    gpu:
      description: GPU state as printed by C(nvidia-smi).
      returned: always
      type: str
    links:
      description: Speed, link, reason, and medium per interface.
      returned: always
      type: dict
    held:
      description: Packages on hold.
      returned: always
      type: list
      elements: str
    metrics:
      description: V(on), V(off), or V(unknown).
      returned: always
      type: str
"""

import os
import typing as t
import urllib.error

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.sparkops.inference.plugins.module_utils._doctor import GPU_FIELDS, LIBRARY, parse_ethtool
from ansible_collections.sparkops.inference.plugins.module_utils._memory import read_text

COMMAND_SECONDS = 15
HTTP_SECONDS = 5
LOG_LINES = 5000
LIBRARY_FOLDERS = ("usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib")


def limited(*command: str) -> list[str]:
    """A command that cannot hang: nvidia-smi does so on a sick driver."""
    return ["timeout", "--signal=KILL", str(COMMAND_SECONDS), *command]


def output_of(module: AnsibleModule, *command: str) -> tuple[str, str]:
    """What a command prints on both channels; empty when it is not installed."""
    if module.get_bin_path(command[0]) is None:
        return "", ""
    dummy, out, err = module.run_command(limited(*command), environ_update={"LC_ALL": "C"})
    return out, err


def list_folder(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def automatic_upgrades(root: str) -> bool:
    folder = os.path.join(root, "etc/apt/apt.conf.d")
    text = "".join(read_text(os.path.join(folder, name)) for name in sorted(list_folder(folder)))
    last = [line for line in text.splitlines() if line.strip().startswith("APT::Periodic::Unattended-Upgrade")][-1:]
    return bool(last) and '"0"' not in last[0]


def rank_log(module: AnsibleModule) -> str:
    name = module.params["container"]
    if not name:
        return ""
    return "\n".join(output_of(module, "docker", "--host", f"unix://{module.params['docker_socket']}", "logs", "--tail", str(LOG_LINES), name))


def metrics(address: str, port: int) -> str:
    """Whether an API that answers shows the engine's metrics."""
    if not port:
        return "unknown"
    try:
        with open_url(f"http://{'[' + address + ']' if ':' in address else address}:{port}/metrics", timeout=HTTP_SECONDS, use_proxy=False) as answer:
            return "on" if b"vllm:" in answer.read(1 << 20) else "off"
    except urllib.error.HTTPError:
        return "off"
    except (OSError, ValueError):
        return "unknown"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "interfaces": {"type": "list", "elements": "str", "default": []},
            "container": {"type": "str", "default": ""},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "metrics_address": {"type": "str", "default": "127.0.0.1"},
            "metrics_port": {"type": "int", "default": 0},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    root = module.params["root"]
    gpu, gpu_error = output_of(module, "nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    health: dict[str, t.Any] = {
        "libraries": sorted({name for folder in LIBRARY_FOLDERS for name in list_folder(os.path.join(root, folder)) if LIBRARY.match(name)}),
        "gpu": gpu,
        "gpu_error": f"{gpu_error}{gpu if 'mismatch' in gpu else ''}",
        "links": {name: parse_ethtool(output_of(module, "ethtool", name)[0]) for name in module.params["interfaces"]},
        "held": output_of(module, "apt-mark", "showhold")[0].split(),
        "automatic_upgrades": automatic_upgrades(root),
        "journal_kept": os.path.isdir(os.path.join(root, "var/log/journal")),
        "kernel_log": output_of(module, "journalctl", "--dmesg", "--quiet", "--no-pager", "--output=cat", f"--lines={LOG_LINES}")[0],
        "rank_log": rank_log(module),
        "metrics": metrics(module.params["metrics_address"], module.params["metrics_port"]),
    }
    module.exit_json(changed=False, health=health)


if __name__ == "__main__":
    main()
