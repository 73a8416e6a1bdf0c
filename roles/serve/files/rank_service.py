# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps one rank of a serving group, and on rank 0 speaks for the group.

``run`` is the service sparkops-rank@DEPLOYMENT. ``state``, ``start``, ``stop``, ``stop-now`` (without the polite wait) and ``ready``
(the group was proven) are what the head may say to a node through the forced-command ssh key. ``group-state``, ``group-start``,
``group-stop`` and ``group-ready`` do the same for all ranks, from rank 0.

Standard library only, with the files beside it: it must run on a node before anything else of ours is there.
Every subcommand prints one JSON document; exit code 0 means done, 1 means that the document has an "error".
"""

from __future__ import annotations

import argparse
import json
import os
import sys

# Installed beside this file: the collection's own readers, so that node and modules agree.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from _rank_state import read_json  # noqa: E402
from rank_group import START_SECONDS, TAIL_LINES, Group, Paths, local_order, local_state, mark_ready, note_question  # noqa: E402

VERBS = ["run", "state", "start", "stop", "stop-now", "ready", "group-state", "group-start", "group-stop", "group-ready"]


def answer_to(verb, paths, tail):
    """The document of one verb."""
    rank = read_json(paths.rank)
    if rank is None:
        return {"service": "absent", "error": f"{paths.state_dir} holds no rank", "container": None, "tail": []}
    if not verb.startswith("group-"):
        note_question(paths, rank)
    if verb == "state":
        return local_state(paths, tail)
    if verb == "ready":
        return mark_ready(paths)
    if verb == "start":
        return local_order(paths, "run", START_SECONDS)
    if verb == "stop":
        return local_order(paths, "stop", rank["stop_timeout"] + 15)
    if verb == "stop-now":
        return local_order(paths, "stop", 10, now=True)
    ranks = getattr(Group(paths), verb[len("group-"):])()
    return {"ranks": ranks, "error": "; ".join(f"rank {number}: {one['error']}" for number, one in sorted(ranks.items()) if one.get("error"))}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("state_dir")
    parser.add_argument("--tail", type=int, default=TAIL_LINES)
    options = parser.parse_args(arguments)
    paths = Paths(options.state_dir)
    if options.verb == "run":
        from rank_node import Service  # only here: a plain answer shall cost little

        Service(options.state_dir).run()
        return 0
    answer = answer_to(options.verb, paths, options.tail)
    json.dump(answer, sys.stdout)
    sys.stdout.write("\n")
    return 1 if answer.get("error") else 0


if __name__ == "__main__":
    sys.exit(main())
