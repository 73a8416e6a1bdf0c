# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""A process of its own for huggingface_hub's downloads, so that a stalled call can be ended from outside.

The order comes as JSON on standard input (it holds the token), failures go as JSON lines to standard output.
"""

from __future__ import annotations

import concurrent.futures
import json
import sys
import threading
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._hub import Hub, HubError


def main(_arguments: t.Sequence[str]) -> int:
    order = json.load(sys.stdin)
    sys.path.insert(0, order["environment"])
    import huggingface_hub

    hub = Hub(order["endpoint"], order["token"], order["timeout"], patient=True)
    failed = threading.Event()
    lock = threading.Lock()

    def fetch(path: str) -> None:
        if failed.is_set():
            return
        try:
            hub.call(
                f"{path} of {order['repository']}",
                lambda: huggingface_hub.hf_hub_download(
                    order["repository"], path, revision=order["revision"], local_dir=order["folder"], token=order["token"] or False, endpoint=order["endpoint"]
                ),
            )
        except HubError as exc:
            failed.set()
            with lock:
                sys.stdout.write(json.dumps({"path": path, "kind": exc.kind, "text": exc.text, "wait": exc.wait}) + "\n")
                sys.stdout.flush()

    with concurrent.futures.ThreadPoolExecutor(order["threads"]) as pool:
        list(pool.map(fetch, order["files"]))
    return 1 if failed.is_set() else 0
