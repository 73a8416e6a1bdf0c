#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_bundle
short_description: Collect what one node knows about its rank, for a person who looks for a fault
version_added: 0.1.0
description:
  - Stacks of the engine's processes by py-spy where the image has it, the rank's log, its container, the kernel's log, memory, links, GIDs,
    and the files of the deployment, in one archive. Secrets are taken out.
  - Every part has a time limit of its own and O(seconds) is that of all; what could not be read is named in C(missing.txt).
  - With its action plugin the archive is fetched to the controller, and O(state=joined) makes one of those of all nodes.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.docker
attributes:
  check_mode:
    support: full
    description: Runs in check mode too. A bundle is no state; the one file that is written is fetched and removed by the action plugin.
  diff_mode:
    support: N/A
    description: Nothing is changed.
  idempotent:
    support: N/A
    description: Each bundle is a look at one moment.
  action:
    support: full
    description: Fetching and joining happen on the controller.
options:
  state:
    description:
      - V(read) collects on this node and fetches.
      - V(joined) makes one archive of what the nodes gave in this run; on the controller.
    type: str
    choices: [read, joined]
    default: read
  node:
    description: Inventory name of this node.
    type: str
  state_dir:
    description: Directory of the deployment on this node.
    type: path
  container:
    description: Name of the rank's container.
    type: str
  hcas:
    description: RDMA devices of which the GID tables are read; all when empty.
    type: list
    elements: str
    default: []
  seconds:
    description: Time for all of it on this node.
    type: int
    default: 30
  stacks:
    description: Whether the engine's processes are asked for their stacks, which stops each for a moment.
    type: bool
    default: true
  log_lines:
    description: How many of the last lines of the log are taken.
    type: int
    default: 20000
  destination:
    description: Folder on the controller; used by the action plugin.
    type: path
  label:
    description: Beginning of the archive's name; used by the action plugin.
    type: str
"""

EXAMPLES = r"""
- name: Collect from each node
  sparkops.inference.rank_bundle:
    node: "{{ inventory_hostname }}"
    state_dir: /var/lib/sparkops/lab_tiny
    container: lab_tiny-rank0
    label: lab_tiny
    destination: bundles
"""

RETURN = r"""
path:
  description: The archive, on the controller when the action plugin has fetched it.
  returned: on success
  type: str
missing:
  description: Parts that could not be read, and why.
  returned: on success
  type: list
  elements: str
causes:
  description: Likely causes by known patterns in the log.
  returned: on success
  type: list
  elements: str
"""

import glob
import io
import json
import os
import tarfile
import tempfile
import threading
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _limited
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._gid import read_table
from ansible_collections.sparkops.inference.plugins.module_utils._likely_cause import likely_causes
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import FrameReader, heartbeat_path, read_api_key, summary
from ansible_collections.sparkops.inference.plugins.module_utils._scrub import scrub, scrub_text

PART_SECONDS = 8
FILE_LIMIT = 32 << 20
COMMANDS = {
    "dmesg.txt": ["dmesg", "--time-format", "iso"],
    "links.txt": ["ip", "-details", "-statistics", "address", "show"],
    "routes.txt": ["ip", "route", "show", "table", "all"],
    "rdma.txt": ["rdma", "link", "show"],
    "gpu.txt": ["nvidia-smi"],
    "disks.txt": ["df", "--local", "--human-readable"],
    "processes.txt": ["ps", "-eo", "pid,ppid,stat,etime,rss,comm,wchan:32", "--sort", "-rss"],
    "uname.txt": ["uname", "--all"],
}
STATE_FILES = ("rank.json", "wanted.json", "lease.json", "last_good.json", "container/entry.json", "idle.json", "group.json", "restarts.json", "sources.json")


class Missing(Exception):
    """A part that this node does not have."""


def run(words: t.Sequence[str]) -> bytes:
    """What a command prints. It gets its own time limit: nvidia-smi and df hang on sick machines."""
    try:
        done = _limited.command(words, PART_SECONDS)
    except FileNotFoundError as exc:
        raise Missing("not installed") from exc
    except (OSError, _limited.TooLong) as exc:
        raise Missing(str(exc)) from exc
    if done.returncode and not done.stdout:
        raise Missing(f"ended with {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    return done.stdout + done.stderr


def read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(FILE_LIMIT)
    except OSError as exc:
        raise Missing(exc.strerror or str(exc)) from exc


def exec_in(api: DockerApi, container: str, words: t.Sequence[str]) -> bytes:
    """What a command in the container prints. The engine keeps no time for it; the socket's own limit ends the wait."""
    body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(words)}
    made = api.call("POST", f"/containers/{container}/exec", body=body)
    frames, pieces = FrameReader(), []
    for piece in api.stream("POST", f"/exec/{made['Id']}/start", body={"Detach": False, "Tty": False}, timeout=PART_SECONDS):
        pieces.append(frames.feed(piece))
    return b"".join(pieces)


def stacks(api: DockerApi, container: str, seconds: float) -> bytes:
    """Stacks of all Python processes of the container, one after the other, until the time is over."""
    text, until = b"", time.monotonic() + seconds
    # By the numbers that the container itself gives them; the host's are others.
    found = exec_in(api, container, ["sh", "-c", "command -v py-spy >/dev/null && ls /proc | grep -E '^[0-9]+$'"]).split()
    if not found:
        raise Missing("the image has no py-spy")
    for pid in sorted(found, key=int):
        if time.monotonic() > until:
            text += b"=== no time for more\n"
            break
        command = exec_in(api, container, ["sh", "-c", f"tr '\\0' ' ' </proc/{pid.decode()}/cmdline"])
        if b"python" not in command and b"vllm" not in command.lower():
            continue
        try:
            text += b"=== " + pid + b" " + command + b"\n" + exec_in(api, container, ["py-spy", "dump", "--nonblocking", "--pid", pid.decode()]) + b"\n"
        except DockerError as exc:
            text += b"=== " + pid + f": {exc}\n".encode()
    return text


def log_of(api: DockerApi, container: str, lines: int) -> bytes:
    frames, pieces = FrameReader(), []
    query = {"stdout": "1", "stderr": "1", "timestamps": "1", "tail": str(lines)}
    for piece in api.stream("GET", f"/containers/{container}/logs", query=query, timeout=PART_SECONDS):
        pieces.append(frames.feed(piece))
    return b"".join(pieces)[-FILE_LIMIT:]


def gids(hcas: t.Sequence[str], sys_root: str = "/sys") -> bytes:
    folder = os.path.join(sys_root, "class/infiniband")
    names = list(hcas) or (sorted(os.listdir(folder)) if os.path.isdir(folder) else [])
    if not names:
        raise Missing("no RDMA device")
    return json.dumps({name: [slot.as_dict() for slot in read_table(sys_root, name.partition(":")[0])] for name in names}, indent=1).encode()


def parts(params: t.Mapping[str, t.Any], api: DockerApi) -> dict[str, t.Callable[[], bytes]]:
    """Name in the archive, and how to get it. All of them are read at the same time."""
    container, state_dir = params["container"], params["state_dir"]

    def inspected() -> bytes:
        document = api.inspect_container(container)
        if document is None:
            raise Missing("no container")
        return json.dumps(document, indent=1).encode()

    def image() -> bytes:
        document = api.inspect_container(container)
        return json.dumps(api.inspect_image(document["Image"]) if document else {}, indent=1).encode()

    found: dict[str, t.Callable[[], bytes]] = {
        "container.json": inspected,
        "image.json": image,
        "log.txt": lambda: log_of(api, container, params["log_lines"]),
        "gids.json": lambda: gids(params["hcas"]),
        "heartbeat.json": lambda: read_file(heartbeat_path(state_dir)),
        "meminfo.txt": lambda: read_file("/proc/meminfo"),
        "vmstat.txt": lambda: read_file("/proc/vmstat"),
        "pressure.txt": lambda: read_file("/proc/pressure/memory"),
        "mounts.txt": lambda: read_file("/proc/self/mounts"),
    }
    if params["stacks"]:
        found["stacks.txt"] = lambda: stacks(api, container, params["seconds"] / 2)
    found.update({name: (lambda words=words: run(words)) for name, words in COMMANDS.items()})
    unit = f"sparkops-rank@{os.path.basename(state_dir)}.service"
    # Without root on the node it is a unit of the account.
    found["service.txt"] = lambda: run(["journalctl", "--no-pager", "--lines", "500", "--unit", unit, "--user-unit", unit])
    found.update({f"state/{name}": (lambda name=name: read_file(os.path.join(state_dir, name))) for name in STATE_FILES})
    # The last runs of the rank, whose logs begin with their time, and what guard and watch have written down.
    for pattern, count in (("logs/[0-9]*.log", 2), ("events/*.json", 3)):
        for path in sorted(glob.glob(os.path.join(state_dir, pattern)))[-count:]:
            found[os.path.relpath(path, state_dir)] = lambda path=path: read_file(path)
    return found


def gather(wanted: t.Mapping[str, t.Callable[[], bytes]], seconds: float) -> tuple[dict[str, bytes], list[str]]:
    """What came within the time, and what did not. Threads that the end of this process does not wait for, as it would for those of a pool:
    a group that failed is waiting to be stopped."""
    got: dict[str, bytes] = {}
    wrong: dict[str, str] = {}

    def ask(name: str, one: t.Callable[[], bytes]) -> None:
        try:
            got[name] = one()
        except (Missing, DockerError, OSError, ValueError, KeyError) as exc:
            wrong[name] = str(exc)

    threads = {name: threading.Thread(target=ask, args=(name, one), daemon=True) for name, one in wanted.items()}
    until = time.monotonic() + seconds
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, until - time.monotonic()))
    in_time = {name: got[name] for name in wanted if name in got}
    return in_time, [f"{name}: {wrong.get(name, f'no answer within {seconds:.0f} s')}" for name in wanted if name not in in_time]


def clean(name: str, content: bytes, secrets: t.Collection[str]) -> bytes:
    text = content.decode("utf-8", "replace")
    if name.endswith(".json"):
        try:
            return json.dumps(scrub(json.loads(text), secrets), indent=1, sort_keys=True).encode()
        except ValueError:
            pass  # cut off in the middle: as text then
    return scrub_text(text, secrets).encode()


def pack(contents: t.Mapping[str, bytes]) -> str:
    """An archive that only the account of the connection can read, for it has to fetch what root collected."""
    handle, path = tempfile.mkstemp(prefix="sparkops-bundle-", suffix=".tar.gz", dir=os.environ.get("TMPDIR", "/var/tmp"))
    with os.fdopen(handle, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o640
            archive.addfile(entry, io.BytesIO(content))
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        os.chown(path, int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "-1")))
    return path


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["read", "joined"], "default": "read"},
            "node": {"type": "str"},
            "state_dir": {"type": "path"},
            "container": {"type": "str"},
            "hcas": {"type": "list", "elements": "str", "default": []},
            "seconds": {"type": "int", "default": 30},
            "stacks": {"type": "bool", "default": True},
            "log_lines": {"type": "int", "default": 20000},
            "destination": {"type": "path"},
            "label": {"type": "str"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        required_if=[("state", "read", ("node", "state_dir", "container"))],
        supports_check_mode=True,
    )
    params = module.params
    if params["state"] == "joined":
        module.fail_json(msg="state=joined is the work of the action plugin of this module")
    api = DockerApi(params["docker_socket"], timeout=PART_SECONDS)
    got, missing = gather(parts(params, api), params["seconds"])
    contents = {name: clean(name, content, [read_api_key(params["state_dir"])]) for name, content in got.items()}
    contents["missing.txt"] = ("\n".join(missing) + "\n").encode()
    try:
        container = summary(json.loads(got["container.json"])) if "container.json" in got else None
        causes = likely_causes({params["node"]: contents.get("log.txt", b"").decode("utf-8", "replace").splitlines()[-2000:]}, {params["node"]: container})
        path = pack(contents)
    except OSError as exc:
        module.fail_json(msg=f"The bundle of {params['node']} cannot be written: {exc}")
    module.exit_json(changed=False, path=path, missing=missing, causes=causes)


if __name__ == "__main__":
    main()
