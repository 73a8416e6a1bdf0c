# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node of the group may do on another: the forced command of its ssh key.

``node_gate.py STATE_ROOT WEIGHTS_ROOT`` reads SSH_ORIGINAL_COMMAND and allows

* ``state|start|stop|stop-now|ready DEPLOYMENT`` to the address that the deployment here has recorded as its head, and
* what source_gate.py beside this file allows: to read weights and images.

Everything else ends with code 126 and one line on stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CONTROL = re.compile(r"(state|start|stop|stop-now|ready) ([A-Za-z0-9][A-Za-z0-9_.-]*)")


def refuse(reason):
    sys.stderr.write(f"sparkops: refused: {reason}\n")
    sys.exit(126)


def head_address(state_dir):
    """The address of rank 0 as recorded at the last start of this deployment, None when there was none."""
    try:
        with open(os.path.join(state_dir, "rank.json"), encoding="utf-8") as stream:
            return json.load(stream)["head_address"]
    except (OSError, ValueError, KeyError):
        return None


def main():
    if len(sys.argv) != 3:
        refuse("usage: node_gate.py STATE_ROOT WEIGHTS_ROOT")
    state_root, weights_root = sys.argv[1:]
    command = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    order = CONTROL.fullmatch(command)
    if order is None:
        os.environ["SPARKOPS_STATE_ROOT"] = state_root
        os.execv(sys.executable, [sys.executable, os.path.join(HERE, "source_gate.py"), weights_root])
    verb, deployment = order.groups()
    state_dir = os.path.join(state_root, deployment)
    client = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    head = head_address(state_dir)
    if head is None and verb == "state":
        sys.stdout.write(json.dumps({"service": "absent", "error": f"{state_dir} holds no rank", "container": None, "tail": []}) + "\n")
        sys.exit(1)
    if client != head:
        refuse(f"{client or 'unknown address'} is not the head of {deployment}")
    os.execv(sys.executable, [sys.executable, os.path.join(HERE, "rank_service.py"), verb, state_dir])


if __name__ == "__main__":
    main()
