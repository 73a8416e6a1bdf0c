#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_rank
short_description: Stop the rank on this node and keep its log
version_added: 0.1.0
description:
  - Asks the rank service to stop the container, or stops it through the Docker Engine when the service does not answer.
  - The container is kept for reading; its log is archived in the directory of the deployment, the newest ten.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.docker
attributes:
  check_mode:
    support: full
    description: Tells whether something would be stopped.
  diff_mode:
    support: none
    description: There is no text to compare.
options:
  state:
    description: What the rank shall be. Starting is an act of the group, see M(sparkops.inference.serve_group).
    type: str
    choices: [stopped]
    default: stopped
  state_dir:
    description: Directory of the deployment on this node.
    type: path
    required: true
  container:
    description: Name of the rank's container.
    type: str
    required: true
  grace_seconds:
    description: Seconds between the polite signal and the hard one.
    type: int
    default: 60
  tail:
    description: How many of the last log lines are returned.
    type: int
    default: 40
"""

EXAMPLES = r"""
- name: Stop the rank
  sparkops.inference.serve_rank:
    state_dir: /var/lib/sparkops/lab_tiny
    container: lab_tiny-rank0
"""

RETURN = r"""
container:
  description: The container after the stop, null when there is none.
  returned: always
  type: dict
tail:
  description: The last lines of its log.
  returned: always
  type: list
  elements: str
log:
  description: Where the log was archived; empty when there was nothing to archive.
  returned: always
  type: str
"""

import collections
import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import KEPT_LOGS, FrameReader, keep_newest, read_json, summary, write_json

LOG_LIMIT = 64 << 20  # bytes; the engine's own log keeps the rest


def log_bytes(api: DockerApi, name: str, lines: str) -> bytes:
    """The end of the container's log, without the engine's framing: what is older than the limit is let go."""
    frames, pieces, size = FrameReader(), collections.deque(), 0
    for piece in api.stream("GET", f"/containers/{name}/logs", query={"stdout": "1", "stderr": "1", "tail": lines}, timeout=30):
        pieces.append(frames.feed(piece))
        size += len(pieces[-1])
        while size > LOG_LIMIT and len(pieces) > 1:
            size -= len(pieces.popleft())
    return b"".join(pieces)


def archive_path(state_dir: str, document: t.Mapping[str, t.Any]) -> str:
    """One file per run of a container: its start time and id tell them apart, so that a second stop archives nothing new."""
    started = document["State"]["StartedAt"][:19].replace(":", "").replace("-", "")
    return os.path.join(state_dir, "logs", f"{started}-{document['Id'][:12]}.log")


def archive(api: DockerApi, state_dir: str, document: t.Mapping[str, t.Any]) -> str:
    if document["State"]["StartedAt"].startswith("0001"):
        return ""  # created, never started
    path = archive_path(state_dir, document)
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
        with open(f"{path}.partial", "wb") as stream:
            stream.write(log_bytes(api, document["Id"], "all"))
        os.replace(f"{path}.partial", path)
    # Ours begin with their time; the image's checks and builds keep logs of other names here.
    keep_newest(os.path.dirname(path), "[0-9]*.log", KEPT_LOGS)
    return path


def order_stop(wanted_path: str) -> str:
    """What the service goes by from now on. An empty text, or why it could not be written: on a full disk a rank must still end."""
    wanted = read_json(wanted_path, {})
    if wanted.get("action") != "run" and wanted.get("by") not in ("boot", "watch"):
        return ""
    try:
        write_json(wanted_path, {"action": "stop", "id": f"{time.time():.6f}", "at": time.time()})
    except OSError as exc:
        return str(exc)
    return ""


def finish(module: AnsibleModule, unwritten: str, **result: t.Any) -> t.NoReturn:
    if unwritten:
        msg = f"The rank {module.params['container']} does not run, but its service still holds it for wanted and may start the group again: {unwritten}. "
        module.fail_json(msg=f"{msg}Mend that and stop it again", **result)
    module.exit_json(**result)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["stopped"], "default": "stopped"},
            "state_dir": {"type": "path", "required": True},
            "container": {"type": "str", "required": True},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "grace_seconds": {"type": "int", "default": 60},
            "tail": {"type": "int", "default": 40},
        },
        supports_check_mode=True,
    )
    params = module.params
    name, grace = params["container"], params["grace_seconds"]
    api = DockerApi(params["docker_socket"], timeout=grace + 60)
    wanted_path = os.path.join(params["state_dir"], "wanted.json")
    try:
        document = api.inspect_container(name)
        changed = document is not None and document["State"]["Running"]
        if module.check_mode:
            module.exit_json(changed=changed, container=summary(document), tail=[], log="")
        # First the wish, so that the service does not take the end of the rank for a failure.
        # An order of the keeper, which means to bring the group back, must not outlive this one.
        unwritten = order_stop(wanted_path)
        if document is None:
            finish(module, unwritten, changed=False, container=None, tail=[], log="")
        if changed:
            api.call("POST", f"/containers/{name}/stop", query={"t": str(grace)})
        document = api.call("GET", f"/containers/{name}/json")
        if document["State"]["Running"]:
            module.fail_json(msg=f"The container {name} still runs after a stop with {grace} s of grace")
        tail = log_bytes(api, document["Id"], str(params["tail"])).decode("utf-8", "replace").splitlines()
        try:
            log = archive(api, params["state_dir"], document)
        except OSError as exc:
            log = ""
            module.warn(f"The log of {name} was not archived, its container keeps it: {exc}")
        finish(module, unwritten, changed=changed, container=summary(document), tail=tail, log=log)
    except (DockerError, OSError) as exc:
        module.fail_json(msg=f"The rank {name} cannot be stopped: {exc}")


if __name__ == "__main__":
    main()
