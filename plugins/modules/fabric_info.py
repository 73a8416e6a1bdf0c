#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_info
short_description: Read the links, RDMA ports, and GID tables of a node
version_added: 0.1.0
description:
  - Reads interfaces, addresses, routes, RDMA ports, GID tables, PCIe width, MTU, and the versions that two nodes should have in common.
  - Reads only. What refuses to be read, as empty GID slots of real cards do, is skipped.
  - Needs C(ip) on the node. C(ibv_devinfo) is used where it is installed, for the active RDMA MTU.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
options:
  sys_root:
    description: Root of the sysfs tree, for tests.
    type: path
    default: /sys
  proc_root:
    description: Root of the proc tree, for tests.
    type: path
    default: /proc
  etc_root:
    description: Where configuration files lie, for tests.
    type: path
    default: /etc
"""

EXAMPLES = r"""
- name: Read the fabric of a node
  sparkops.inference.fabric_info:
  register: fabric
"""

RETURN = r"""
fabric:
  description: What the node says about its fabric.
  returned: always
  type: dict
  contains:
    interfaces:
      description: Network interfaces with kind, state, carrier, speed, MTU, driver, PCI function, and IPv4 addresses.
      returned: always
      type: list
      elements: dict
    ports:
      description:
        - RDMA ports with state, interface, firmware, PCIe width, RDMA MTU, and GID table.
        - RV(fabric.ports[].usable) are the GID indexes that hold an own IPv4 address as RoCE v2.
        - Ports of equal RV(fabric.ports[].link) are the two halves of one QSFP port.
      returned: always
      type: list
      elements: dict
      contains:
        usable:
          description: Usable GID indexes.
          returned: always
          type: list
          elements: int
        link:
          description: Name of the QSFP port; empty when the PCI function is not known.
          returned: always
          type: str
    routes:
      description: IPv4 routes of the main table that lead somewhere.
      returned: always
      type: list
      elements: dict
"""

import json
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._fabric_facts import read_facts
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

# Whole commands, so that tests can compare them to the letter.
ADDRESSES = ("ip", "-json", "-details", "address", "show")
ROUTES = ("ip", "-json", "-4", "route", "show")
RDMA_DEVICES = ("ibv_devinfo",)


def run_json(module: AnsibleModule, command: t.Sequence[str]) -> list[dict[str, t.Any]]:
    try:
        code, out, err = module.run_command(list(command), environ_update={"LC_ALL": "C"}, handle_exceptions=False)
        parsed = json.loads(out or "[]")
    except OSError as exc:  # not installed
        code, out, err, parsed = 127, "", str(exc), None
    except ValueError:
        parsed = None
    if code != 0 or not isinstance(parsed, list):
        refusal = Refusal(
            "fabric.ip_command", "", " ".join(command), f"exit code {code}, {(err or out).strip()[:200]!r}",
            "a JSON list", "install iproute2 on the node (Debian and Ubuntu: package iproute2)",
        )
        fail(module, [refusal])
    return [entry for entry in parsed if isinstance(entry, dict)]


def rdma_devices(module: AnsibleModule) -> str:
    """Text of ibv_devinfo; empty where it is not installed or knows no device."""
    if module.get_bin_path(RDMA_DEVICES[0]) is None:
        return ""
    code, out, dummy = module.run_command(list(RDMA_DEVICES), environ_update={"LC_ALL": "C"})
    return out if code == 0 else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sys_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "etc_root": {"type": "path", "default": "/etc"},
        },
        supports_check_mode=True,
    )
    roots = {name: module.params[f"{name}_root"] for name in ("sys", "proc", "etc")}
    facts = read_facts(roots, run_json(module, ADDRESSES), run_json(module, ROUTES), rdma_devices(module))
    module.exit_json(changed=False, fabric=facts)


if __name__ == "__main__":
    main()
