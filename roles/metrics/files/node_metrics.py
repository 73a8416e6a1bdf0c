# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes what is true of this node, its ranks, and on a head of its group, into a text file for Prometheus' node exporter.

A timer runs it every few seconds. It changes nothing; on a head it may ask the model for one token, to tell a wedged group from an
idle one. The API key goes from its file into a request header and nowhere else.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import subprocess
import sys
import time

# Installed beside this file: the collection's own readers, so that node and plays agree.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from _engine_api import COMPLETION_PATH, call, completion_text  # noqa: E402
from _group_state import WEDGED, group_state  # noqa: E402
from _metrics_text import UNPROVEN, counters, exposition, group_samples, next_look, node_samples, rank_samples, unix_time  # noqa: E402
from _rank_state import heartbeat_path, read_api_key, read_json, write_json  # noqa: E402

HEARTBEAT_STALE_SECONDS = 5.0
ASK_SECONDS = 60.0
# Seconds without a step of an engine that has work: no step takes as long, except one that compiles a kernel.
PATIENCE_SECONDS = 300.0
# The least that proves: one token of an answer nobody reads.
REQUEST = {"messages": [{"role": "user", "content": "Reply with OK."}], "max_tokens": 1, "temperature": 0}


def meminfo():
    with open("/proc/meminfo", encoding="utf-8") as stream:
        words = [line.split() for line in stream]
    return {row[0].rstrip(":"): int(row[1]) for row in words if len(row) > 1 and row[1].isdecimal()}


def group_answers(program, state_dir):
    """What every rank says, through the head's own service."""
    try:
        done = subprocess.run([sys.executable, program, "group-state", state_dir, "--tail", "0"], capture_output=True, timeout=60, check=False)
        return json.loads(done.stdout)["ranks"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return {}


def api_says(api, state_dir, start, memory, now, interval):
    """Health and proof of the API in the form of group_state, and what is known for the next look."""
    place = (api.get("address", "127.0.0.1"), api["port"])
    health = call(*place, "GET", "/health", timeout=5)
    if health.status != 200:
        return {"health": health.status, "proof": None}, memory
    known, ask = next_look(memory, read_counters(place), start, now, interval, PATIENCE_SECONDS)
    if ask:
        known.update(asked_at=now, ok=gives_a_token(place, api["model"], read_api_key(state_dir)))
        if known["ok"]:
            # The token that was asked for is no news at the next look.
            known.update(token_at=time.time(), steps=read_counters(place)["steps"])
    return {"health": 200, "proof": {"ok": bool(known["ok"])}}, known


def read_counters(place):
    metrics = call(*place, "GET", "/metrics", timeout=10)
    return counters(metrics.document if metrics.status == 200 and isinstance(metrics.document, str) else "")


def gives_a_token(place, model, key):
    """Any token will do, also one that is no text by itself."""
    answer = call(*place, "POST", COMPLETION_PATH, key=key, body={"model": model, **REQUEST}, timeout=ASK_SECONDS)
    document = answer.document if isinstance(answer.document, dict) else {}
    return answer.status == 200 and bool((document.get("usage") or {}).get("completion_tokens") or completion_text(document))


def look_at_group(state_dir, record, options, memory, now):
    """Samples of the group whose head this node is."""
    answers = group_answers(options.program, state_dir)
    names = [str(peer["rank"]) for peer in record["peers"]]
    alive = {name: answers.get(name, {}).get("service") == "alive" for name in names}
    infos = {name: {"container": answers[name]["container"]} if alive[name] else None for name in names}
    containers = [(info or {}).get("container") or {} for info in infos.values()]
    running = sum(1 for container in containers if container.get("running"))
    said, known = None, memory
    # Half a group is told by its containers; a request would only wait for the rank that is gone.
    if running == len(names):
        said, known = api_says(record["api"], state_dir, containers[0]["started_at"], memory, now, options.probe_interval)
    state = group_state(names, infos, {}, said)["state"]
    if state == WEDGED and known.get("ok") is None:
        state = UNPROVEN
    proven = unix_time(read_json(os.path.join(state_dir, "last_good.json"), {}).get("proven_at", ""))
    return group_samples(record["deployment"], state, len(names), running, known.get("token_at"), proven), known


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-root", required=True)
    parser.add_argument("--program", required=True, help="path of rank_service.py")
    parser.add_argument("--output", required=True)
    parser.add_argument("--probe-interval", type=float, required=True, help="seconds without a token after which one is asked for; 0: never")
    parser.add_argument("--memory", required=True, help="file that keeps what was seen until the next look")
    options = parser.parse_args(arguments)
    now = time.time()
    samples, remembered = node_samples(meminfo(), now), read_json(options.memory, {})
    known = {}
    for path in sorted(glob.glob(os.path.join(options.state_root, "*", "rank.json"))):
        record, state_dir = read_json(path), os.path.dirname(path)
        if not record:
            continue
        samples += rank_samples(record, read_json(heartbeat_path(state_dir)), now, HEARTBEAT_STALE_SECONDS)
        if record["rank"] == 0:
            of_group, known[record["deployment"]] = look_at_group(state_dir, record, options, remembered.get(record["deployment"], {}), now)
            samples += of_group
    write_json(options.memory, known)
    with open(options.output + ".new", "w", encoding="utf-8") as stream:
        stream.write(exposition(samples))
    os.chmod(options.output + ".new", 0o644)
    os.replace(options.output + ".new", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
