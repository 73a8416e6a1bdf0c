# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Entrypoint of every rank's container: decide what can only be known at each start, then become the engine.

Reads entry.json beside this file. The GID index is looked up in sysfs at each start, because the slots move with link events; the
API key comes from a mounted file, so that no ``docker inspect`` shows it; hooks of the image run where the image has them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def say(text):
    sys.stderr.write(f"sparkops entry: {text}\n")
    sys.stderr.flush()


def fail(text):
    say(f"refused: {text}")
    sys.exit(78)  # EX_CONFIG of sysexits.h


def gid_index(gid, sys_root="/sys"):
    """The index to pin, None when none is to be pinned. One number must hold for all HCAs of the rank."""
    if gid["policy"] == "unpinned" or not gid["hcas"]:
        return None
    sys.path.insert(0, HERE)
    import _gid

    addresses = {hca: gid.get("addresses", {}).get(hca) or [gid["address"]] for hca in gid["hcas"]}
    index, table = _gid.resolve(sys_root, addresses)
    if gid["policy"] == "auto":
        if index is None:
            fail(f"no GID index is RoCE v2 with the node's own address on every HCA: {table}")
        return index
    tables = {hca: _gid.read_table(sys_root, hca.partition(":")[0], int(hca.partition(":")[2] or 1)) for hca in gid["hcas"]}
    bad = [hca for hca in gid["hcas"] if gid["index"] not in _gid.usable_indexes(tables[hca], addresses[hca])]
    if bad:
        fail(f"GID index {gid['index']} does not hold the node's own address as RoCE v2 on {', '.join(bad)}; {index} would work: {table}")
    return gid["index"]


def environment(entry):
    """What is added to the container's environment at this start."""
    added = {}
    index = gid_index(entry["gid"])
    if index is not None:
        added["NCCL_IB_GID_INDEX"] = str(index)
        say(f"GID index {index} on {', '.join(entry['gid']['hcas'])}")
    if entry["key"]:
        with open(entry["key"]["file"], encoding="utf-8") as stream:
            added[entry["key"]["variable"]] = stream.read().strip()
    for variable, place in entry["package_paths"].items():
        path = package_path(place)
        if path:
            added[variable] = path
    return added


def package_path(place):
    """A file of an installed package, without importing the package; empty when it is not installed."""
    found = importlib.util.find_spec(place["package"])
    locations = found and found.submodule_search_locations
    return os.path.join(list(locations)[0], place["path"]) if locations else ""


def run_hook(hook):
    """An empty text, or what went wrong: a script of the image is run, or put in the place of a package's file."""
    if "copy_to" not in hook:
        code = subprocess.run([sys.executable, hook["path"]], check=False).returncode
        return f"{hook['path']} ended with {code}" if code else ""
    target = package_path(hook["copy_to"])
    if not target:
        return f"{hook['path']}: there is no package {hook['copy_to']['package']} to put it into"
    try:
        shutil.copyfile(hook["path"], target)
    except OSError as exc:
        return f"{hook['path']} to {target}: {exc.strerror}"
    return ""


def run_hooks(hooks):
    """In order, each only where the image has it."""
    for hook in hooks:
        wrong = run_hook(hook) if os.path.exists(hook["path"]) else ""
        if wrong and hook["on_failure"] == "fail":
            fail(wrong)
        if wrong:
            say(wrong)


def main():
    with open(os.path.join(HERE, "entry.json"), encoding="utf-8") as stream:
        entry = json.load(stream)
    command = sys.argv[1:]
    if not command:
        fail("no command")
    os.environ.update(environment(entry))
    run_hooks(entry["hooks"])
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        fail(f"{command[0]}: {exc.strerror}")


if __name__ == "__main__":
    main()
