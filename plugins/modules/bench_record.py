#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bench_record
short_description: Keep a benchmark on the controller, with a page beside the published figures and earlier runs
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Writes what M(sparkops.inference.serve_bench) measured as C(bench-TIME.json) and C(bench-TIME.html), which stands alone.
  - Earlier runs of the same deployment and model in the directory are shown beside it.
  - It runs on the controller. The fact C(spark_plan) of role P(sparkops.inference.plan#role) must be there, whose C(report_directory) it uses.
attributes:
  check_mode:
    support: full
    description: Writes nothing in check mode.
  diff_mode:
    support: none
    description: There is nothing to compare, since each run has files of its own.
  idempotent:
    support: none
    description: Each run is kept.
options:
  survey:
    description: What RV(sparkops.inference.serve_bench#module:measured) of the case V(survey) says.
    type: dict
    required: true
  results:
    description: The results of M(sparkops.inference.serve_bench) in a loop over cases; C(item) of each is its case.
    type: list
    elements: dict
    required: true
  skipped:
    description: What was left out, each with C(case) and C(reason).
    type: list
    elements: dict
    default: []
  image:
    description: The image on the head, of which C(digest) is kept.
    type: dict
    default: {}
seealso:
  - module: sparkops.inference.serve_bench
"""

EXAMPLES = r"""
- name: Keep the benchmark
  sparkops.inference.bench_record:
    survey: "{{ surveyed.measured }}"
    results: "{{ measured.results }}"
"""

RETURN = r"""
run:
  description: The document of the run.
  returned: always
  type: dict
json:
  description: Where it is kept.
  returned: always
  type: str
page:
  description: Where its page is.
  returned: always
  type: str
"""
