#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_log_info
short_description: Read the log of this node's rank, or look in it for what must be there
version_added: 0.1.0
description:
  - Reads the container's log through the Docker Engine API, also of a container that has ended.
  - With O(follow) the action plugin of the same name goes on reading and prints each line with its node as it comes.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.node.docker
attributes:
  action:
    support: full
    description: New lines are read on the node in slices and printed on the controller.
options:
  container:
    description: Name of the rank's container.
    type: str
    required: true
  node:
    description: Inventory name of this node, for messages.
    type: str
    required: true
  tail:
    description: How many of the last lines are returned.
    type: int
    default: 0
  since:
    description: Return all lines that are newer than this C(cursor) of an earlier call; O(tail) does not count then.
    type: str
  follow:
    description: Seconds for which new lines are printed; used by the action plugin.
    type: int
    default: 0
  wanted:
    description: Lines that the log must have, or the task fails with all that are lacking. A log whose beginning was rotated away proves no lack.
    type: list
    elements: dict
    default: []
    suboptions:
      text:
        description: Regular expression that is searched in each line.
        type: str
        required: true
      at_least:
        description: In how many lines.
        type: int
        default: 1
      says:
        description: What it means when they are lacking.
        type: str
        required: true
      wanted:
        description: Whether it is looked for.
        type: bool
        default: true
"""

EXAMPLES = r"""
- name: See whether both Engram layers read the packed rows
  sparkops.inference.rank_log_info:
    node: spark-1
    container: deepseek-rank0
    wanted:
      - {text: "packed=True", at_least: 2, says: Engram rows are read from the checkpoint}
"""

RETURN = r"""
lines:
  description: The lines that were asked for.
  returned: always
  type: list
  elements: str
cursor:
  description: Time of the last line, for O(since); empty when there was none.
  returned: always
  type: str
found:
  description: In how many lines each of O(wanted) was found.
  returned: always
  type: dict
unjudged:
  description: What of O(wanted) could not be judged, and why.
  returned: always
  type: list
  elements: str
refusals:
  description: What is lacking.
  returned: on refusal
  type: list
  elements: dict
"""

import calendar
import collections
import re
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import FrameReader
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

# No engine is silent for so long after its start, not even one that is read from a cold disk.
FIRST_WORDS_SECONDS = 300


def unix_time(stamp: str) -> str:
    """The engine's own time of a line as it wants it back: seconds and nanoseconds."""
    seconds, dummy, rest = stamp.rstrip("Z").partition(".")
    return f"{calendar.timegm(time.strptime(seconds, '%Y-%m-%dT%H:%M:%S'))}.{(rest or '0').ljust(9, '0')[:9]}"


def read(api: DockerApi, container: str, tail: int, since: str = "") -> t.Iterator[tuple[str, str]]:
    """(time, text) of each line, the oldest first."""
    query = {"stdout": "1", "stderr": "1", "timestamps": "1", **({"since": unix_time(since)} if since else {"tail": str(tail)})}
    frames = FrameReader()

    def complete() -> t.Iterator[str]:
        for piece in api.stream("GET", f"/containers/{container}/logs", query=query, timeout=30):
            yield from frames.lines(piece)
        if frames.text:
            yield frames.text.decode("utf-8", "replace")  # a last line without an end

    for line in complete():
        stamp, dummy, text = line.partition(" ")
        if stamp and not (since and stamp <= since):
            yield stamp, text


def count(api: DockerApi, container: str, wanted: t.Sequence[t.Mapping[str, t.Any]]) -> tuple[dict[str, int], str]:
    """In how many lines each was found, and the time of the first line of all."""
    patterns = {item["text"]: re.compile(item["text"]) for item in wanted}
    found, first = dict.fromkeys(patterns, 0), ""
    for stamp, text in read(api, container, -1):
        first = first or stamp
        for name, pattern in patterns.items():
            found[name] += bool(pattern.search(text))
    return found, first


def has_lost_its_beginning(first: str, started: str) -> bool:
    """Whether the Docker Engine has rotated away what this run said first. One that still has the end of an earlier run has all of this one."""
    return bool(first) and float(unix_time(first)) - float(unix_time(started)) > FIRST_WORDS_SECONDS


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "required": True},
            "node": {"type": "str", "required": True},
            "tail": {"type": "int", "default": 0},
            "since": {"type": "str"},
            "follow": {"type": "int", "default": 0},
            "wanted": {
                "type": "list", "elements": "dict", "default": [],
                "options": {
                    "text": {"type": "str", "required": True},
                    "at_least": {"type": "int", "default": 1},
                    "says": {"type": "str", "required": True},
                    "wanted": {"type": "bool", "default": True},
                },
            },
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    api = DockerApi(params["docker_socket"], timeout=10)
    wanted = [item for item in params["wanted"] if item["wanted"]]
    try:
        document = api.inspect_container(params["container"])
        if document is None:
            module.exit_json(changed=False, lines=[], cursor="", found={}, unjudged=[])
        asked = params["tail"] or params["since"]
        last = collections.deque(read(api, params["container"], params["tail"], params["since"] or ""), maxlen=100000) if asked else ()
        found, first = count(api, params["container"], wanted) if wanted else ({}, "")
    except DockerError as exc:
        module.fail_json(msg=f"The log of {params['container']} cannot be read: {exc}")
    lacking = [item for item in wanted if found[item["text"]] < item["at_least"]]
    unjudged = []
    if lacking and has_lost_its_beginning(first, document["State"]["StartedAt"]):
        unjudged = [f"{params['node']}: {item['text']!r} was not judged: the log begins only at {first[:19]}, what the start said is gone" for item in lacking]
        lacking = []
    result = {
        "changed": False, "lines": [text for dummy, text in last], "cursor": last[-1][0] if last else params["since"] or "", "found": found,
        "unjudged": unjudged,
    }
    refusals = [
        Refusal(
            "serve.log_lines", params["node"], f"log of {params['container']}", f"{item['text']!r} in {found[item['text']]} lines",
            f"at least {item['at_least']}", f"{item['says']}; compare image and settings of this rank with the others",
        )
        for item in lacking
    ]
    if refusals:
        fail(module, refusals, **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
