#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: lease
short_description: One run at a time on a deployment
version_added: 0.1.0
description:
  - Keeps a lease file on rank 0 that names the run, its owner, and its controller, and expires unless renewed.
  - A live lease of another run is refused by name; an expired one is taken over with a notice.
  - The action plugin of the same name fills in the run, and takes over at once the lease of a run of the same controller that has ended.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Nothing is locked in check mode, since nothing is changed.
  diff_mode:
    support: none
    description: There is no text to compare.
  action:
    support: full
    description: The run and its owner are read on the controller.
options:
  state:
    description: What the lease shall be for this run.
    type: str
    choices: [held, released]
    default: held
  state_dir:
    description: Directory of the deployment on rank 0.
    type: path
    required: true
  run_id:
    description: Identity of this run; set by the action plugin.
    type: str
  owner:
    description: Who started this run; set by the action plugin.
    type: str
  node:
    description: Name of this node, for messages; set by the action plugin.
    type: str
    default: ""
  seconds:
    description: Time until the lease expires.
    type: int
    default: 120
  ended_run:
    description: A run known to have ended, whose lease may be taken over; set by the action plugin.
    type: str
"""

EXAMPLES = r"""
- name: Keep other runs away
  sparkops.inference.lease:
    state_dir: /var/lib/sparkops/lab_tiny
"""

RETURN = r"""
held:
  description: Whether this run has the lease.
  returned: always
  type: bool
lease:
  description: The lease as it is now, or the one that stands in the way.
  returned: always
  type: dict
notice:
  description: What was taken over, or that a full disk took no lease; empty when neither.
  returned: always
  type: str
"""

import errno
import fcntl
import os
import pwd
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import LEASE_SECONDS, read_json, write_json
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail


def decide(present: t.Mapping[str, t.Any], run_id: str, ended_run: str, now: float) -> tuple[bool, str]:
    """Whether ``run_id`` may have the lease, and what it takes over."""
    if not present or present["run_id"] == run_id:
        return True, ""
    if present["run_id"] == ended_run:
        return True, f"taken over from {present['owner']}, whose run has ended"
    if present["expires"] <= now:
        return True, f"taken over from {present['owner']}, expired {now - present['expires']:.0f} s ago"
    return False, ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str"},
            "owner": {"type": "str"},
            "node": {"type": "str", "default": ""},
            "seconds": {"type": "int", "default": LEASE_SECONDS},
            "ended_run": {"type": "str"},
        },
        supports_check_mode=True,
    )
    params = module.params
    if not params["run_id"]:
        module.fail_json(msg="run_id is set by the action plugin of this module")
    if module.check_mode:
        module.exit_json(changed=False, held=True, lease={}, notice="")
    path = os.path.join(params["state_dir"], "lease.json")
    if params["state"] == "released" and not os.path.exists(path):
        module.exit_json(changed=False, held=False, lease={}, notice="")
    try:
        os.makedirs(params["state_dir"], mode=0o750, exist_ok=True)
        lock = open(f"{path}.lock", "w", encoding="utf-8")
    except PermissionError as exc:
        found = f"{exc.filename}: not writable for {pwd.getpwuid(os.geteuid()).pw_name}"
        next_step = "run the bootstrap play, which makes it, as the account that runs this play"
        thing = f"state of {os.path.basename(params['state_dir'])}"
        fail(module, [Refusal("lease.state", params["node"], thing, found, "a folder that this account may write", next_step)])
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may come in the same instant
        present, now = read_json(path, {}), time.time()
        allowed, notice = decide(present, params["run_id"], params["ended_run"] or "", now)
        if params["state"] == "released":
            if present and present["run_id"] == params["run_id"]:
                os.unlink(path)
            module.exit_json(changed=False, held=False, lease=present, notice="")
        if allowed:
            present = {"run_id": params["run_id"], "owner": params["owner"], "since": present.get("since", now) if not notice else now,
                       "expires": now + params["seconds"]}
            try:
                write_json(path, present)
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # Nobody else can write one either; a stop must not wait for room.
                notice = f"not written, {exc.strerror}: no other run is kept away"
    # A lease is no part of the declared state: taking it is no change.
    module.exit_json(changed=False, held=allowed, lease=present, notice=notice)


if __name__ == "__main__":
    main()
