#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: doctor_report
short_description: Say how the fabric and the machines of a group are
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
description:
  - Judges what the tasks of role P(sparkops.inference.doctor#role) have read, prints a report, and fails when anything is wrong.
  - Notices alone are no failure. It runs on the controller.
options: {}
"""

EXAMPLES = r"""
- name: Report
  sparkops.inference.doctor_report:
"""

RETURN = r"""
report:
  description: The report as printed.
  returned: always
  type: list
  elements: str
notices:
  description: Notices per rank.
  returned: always
  type: dict
parity:
  description: One row for each thing that all ranks should have in common, with the value of each.
  returned: always
  type: list
  elements: dict
refusals:
  description: All that is wrong.
  returned: always
  type: list
  elements: dict
"""
