#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: page_cache
short_description: Give up the page cache of exactly the given files
version_added: 0.1.0
description:
  - Asks the kernel to give up the cached pages of all files at or below O(paths), as their owner and without root, and tells what is left.
  - Files on ZFS have a second cache, which no request for a file reaches. As root the module asks ZFS to give up that one as a whole.
  - On unified memory the cache of copied weights is memory that the GPU does not get without reclaim.
  - The page cache is no managed state, so the module never reports a change.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Tells what is cached and gives nothing up.
  diff_mode:
    support: N/A
    description: Nothing is changed.
  idempotent:
    support: full
    description: A second run finds nothing left to give up.
options:
  paths:
    description: Files and directories. Each must exist.
    type: list
    elements: path
    required: true
  timeout:
    description: Seconds to go on while pages are left, for example because a copy is still being written back.
    type: int
    default: 30
  drop_caches:
    description:
      - Also drop the clean page cache of the whole machine. This needs root.
      - Without root the module says so in RV(dropped) and does not fail.
    type: bool
    default: false
  proc_root:
    description: Root of the proc tree, for tests.
    type: path
    default: /proc
notes:
  - Pages that a process has mapped stay. They belong to a running engine.
"""

EXAMPLES = r"""
- name: Give up the cache of a model's weights
  sparkops.inference.page_cache:
    paths:
      - /var/lib/sparkops/weights/acme--tiny/0123456789abcdef0123456789abcdef01234567
"""

RETURN = r"""
files:
  description: How many files there are.
  returned: always
  type: int
size_bytes:
  description: Their size.
  returned: always
  type: int
cached_bytes:
  description: How much of them was cached before. V(null) when they belong to another account, which the kernel does not tell.
  returned: always
  type: int
left_bytes:
  description: How much of them is cached now, V(null) as RV(cached_bytes).
  returned: always
  type: int
arc_bytes:
  description: Size of ZFS's own cache (ARC) before. V(null) when none of the paths lies on ZFS.
  returned: always
  type: int
arc_left_bytes:
  description: Its size now. Without root it is as before.
  returned: always
  type: int
dropped:
  description: What became of O(drop_caches), one of V(no), V(yes), V(not allowed).
  returned: always
  type: str
"""

import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _mounts
from ansible_collections.sparkops.inference.plugins.module_utils._memory import read_arc, read_text
from ansible_collections.sparkops.inference.plugins.module_utils._page_cache import evict, files_of, resident_in

# Inodes cost others and free little, but with them ZFS gives up its cache.
PAGE_CACHE = "1"
INODES = "2"
ARCSTATS = "spl/kstat/zfs/arcstats"
# A request frees a part only (zfs_arc_shrinker_limit); one that frees less than this found nothing more.
LEAST_FREED = 16 << 20


def cached(paths: t.Sequence[str]) -> int | None:
    """Bytes in the page cache, None when the kernel does not tell this account."""
    try:
        return resident_in(paths)
    except PermissionError:
        return None


def give_up(paths: t.Sequence[str], timeout: float) -> int | None:
    """Evict until nothing is left, or until the time is over; what is left."""
    deadline = time.monotonic() + timeout
    while True:
        evict(paths)
        left = cached(paths)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(1)


def drop(proc_root: str, what: str) -> str:
    try:
        with open(os.path.join(proc_root, "sys/vm/drop_caches"), "w", encoding="ascii") as stream:
            stream.write(what)
    except PermissionError:
        return "not allowed"
    return "yes"


def drop_all(proc_root: str) -> str:
    os.sync()
    return drop(proc_root, PAGE_CACHE)


def on_zfs(paths: t.Sequence[str], proc_root: str) -> bool:
    mounts = _mounts.read(proc_root)
    holders = (_mounts.holding(mounts, os.path.realpath(path)) for path in paths)
    return any(holder is not None and holder.type == "zfs" for holder in holders)


def arc_size(proc_root: str) -> int:
    return read_arc(read_text(os.path.join(proc_root, ARCSTATS)))


def shrink_arc(proc_root: str, timeout: float) -> int:
    """Ask until ZFS gives nothing more, or until the time is over; what it keeps."""
    deadline = time.monotonic() + timeout
    left = arc_size(proc_root)
    while drop(proc_root, INODES) == "yes":
        before, left = left, arc_size(proc_root)
        if before - left < LEAST_FREED or time.monotonic() >= deadline:
            break
    return left


def work(params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    # In check mode an earlier stage may not have made them yet.
    paths = [path for path in params["paths"] if os.path.exists(path)] if check_mode else params["paths"]
    sizes = [os.stat(name).st_size for name in files_of(paths)]
    before = cached(paths)
    arc = arc_size(params["proc_root"]) if on_zfs(paths, params["proc_root"]) else None
    return {
        "files": len(sizes),
        "size_bytes": sum(sizes),
        "cached_bytes": before,
        "left_bytes": before if check_mode else give_up(paths, params["timeout"]),
        "arc_bytes": arc,
        "arc_left_bytes": arc if arc is None or check_mode else shrink_arc(params["proc_root"], params["timeout"]),
        "dropped": drop_all(params["proc_root"]) if params["drop_caches"] and not check_mode else "no",
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path", "required": True},
            "timeout": {"type": "int", "default": 30},
            "drop_caches": {"type": "bool", "default": False},
            "proc_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    try:
        result = work(module.params, module.check_mode)
    except OSError as exc:
        module.fail_json(msg=f"The page cache of {', '.join(module.params['paths'])} could not be given up: {exc}")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
