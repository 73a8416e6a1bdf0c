# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Where a deployment keeps what on a node, and small readers of it. Standard library only."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import threading
import time
import typing as t

LEASE_SECONDS = 120
KEPT_LOGS = 10  # of each kind: runs of the rank, checks and builds of its image
API_KEY_FILE = "key/api_key"  # in a directory of its own, which is what rank 0's container mounts

STAGED_FILE = "staged.json"  # which image and which trees were brought here for the next start, proven or not


def read_json(path: str, default: t.Any = None) -> t.Any:
    """The document, or ``default`` when the file is not there or is not JSON."""
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return default


def write_json(path: str, value: t.Any) -> None:
    """Replace the document in one step. Threads of one process may write the same document."""
    partial = f"{path}.{os.getpid()}.{threading.get_ident()}.partial"
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(value, stream, sort_keys=True, indent=1)
    os.replace(partial, path)


def note_staged(state_dir: str, **what: t.Any) -> None:
    """``directories`` of weights and the id of an ``image`` may lie here for days before their first start: what tidies up must know whose
    they are. They come one after the other, and what is not given stays as it was noted."""
    path = os.path.join(state_dir, STAGED_FILE)
    noted = read_json(path, {})
    wanted = {**noted, "format": 1, **what}
    if noted != wanted:
        os.makedirs(state_dir, mode=0o750, exist_ok=True)
        write_json(path, wanted)


def keep_newest(folder: str, pattern: str, count: int) -> None:
    """Remove all but the newest files of a kind. Their names begin alike and go on with their time."""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))[:-count]:
        os.unlink(path)


def boot_identity(proc_root: str = "/proc") -> str:
    """Another text after each boot. The kernel's id alone does not change when a node that is itself a container starts again: the
    start time of its first process does."""
    try:
        with open(os.path.join(proc_root, "sys/kernel/random/boot_id"), encoding="utf-8") as stream:
            boot = stream.read().strip()
        with open(os.path.join(proc_root, "1/stat"), encoding="utf-8", errors="replace") as stream:
            return f"{boot}:{stream.read().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""


def run_place() -> str:
    """Where the number of a process means something, for the id of a run: its name, machine, and process namespace. Two controllers may have one
    name, and a controller in a container with the network of its host has the host's."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/etc/machine-id", encoding="utf-8") as stream:
        parts.append(stream.read().strip()[:8])
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts)


def process_start(pid: int | str) -> str:
    """Start time of a process in clock ticks since boot; a pid alone may be used again. Empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def process_run_id(pid: int) -> str:
    """``PLACE:PID:START``, by which a lease names its holder: a run of ansible-playbook, or the rank service of rank 0."""
    return f"{run_place()}:{pid}:{process_start(pid)}"


def has_ended(run_id: str) -> bool:
    """True only for a holder of this very machine and view of its processes, whose process is gone."""
    place, dummy, rest = run_id.partition(":")
    pid, dummy, start = rest.partition(":")
    return place == run_place() and pid.isdecimal() and process_start(pid) != start


def renew_lease(state_dir: str, run_id: str) -> None:
    """For work that may outlive the lease. Only our own: one that another run has taken over stays with it. Work that is under way does not
    end for a full disk."""
    path = os.path.join(state_dir, "lease.json")
    lease = read_json(path, {})
    if lease.get("run_id") == run_id:
        with contextlib.suppress(OSError):
            write_json(path, {**lease, "expires": time.time() + LEASE_SECONDS})


def keep_lease(state_dir: str, run_id: str | None) -> None:
    """Renew it for as long as this process lives. Without a run there is none."""

    def renew() -> None:
        while True:
            renew_lease(state_dir, run_id or "")
            time.sleep(LEASE_SECONDS / 4)

    if run_id:
        threading.Thread(target=renew, daemon=True).start()


def heartbeat_path(state_dir: str) -> str:
    """The rank service writes below /run where systemd made it a directory, else beside the state."""
    runtime = os.path.join("/run/sparkops", os.path.basename(state_dir))
    return os.path.join(runtime if os.path.isdir(runtime) else state_dir, "heartbeat.json")


def api_address(state_dir: str) -> str:
    """Where the API of this deployment is reached on its head, as recorded at the last start."""
    return (read_json(os.path.join(state_dir, "rank.json"), {}).get("api") or {}).get("address") or "127.0.0.1"


def read_api_key(state_dir: str) -> str:
    """The API key on rank 0; empty when the API has none."""
    try:
        with open(os.path.join(state_dir, API_KEY_FILE), encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def summary(document: t.Mapping[str, t.Any] | None) -> dict[str, t.Any] | None:
    """What we need of a container's inspect document."""
    if document is None:
        return None
    state, labels = document["State"], document["Config"].get("Labels") or {}
    return {
        "id": document["Id"],
        "status": state["Status"],
        "running": state["Running"],
        "exit_code": state["ExitCode"],
        "oom_killed": state["OOMKilled"],
        "started_at": state["StartedAt"],
        "finished_at": state["FinishedAt"],
        "spec": labels.get("sparkops.spec", ""),
        "group": labels.get("sparkops.group", ""),
    }


class FrameReader:
    """Takes the engine's framing off a log: 1 byte stream, 3 zero, 4 byte big-endian length, data.

    Containers with a terminal have no frames; their text never has the three zero bytes.
    """

    def __init__(self) -> None:
        self.raw = b""
        self.text = b""
        self.framed: bool | None = None

    def feed(self, piece: bytes) -> bytes:
        """The text of the frames that are complete by now."""
        self.raw += piece
        if self.framed is None and len(self.raw) >= 8:
            self.framed = self.raw[1:4] == b"\0\0\0"
        if self.framed is None:
            return b""
        if not self.framed:
            text, self.raw = self.raw, b""
            return text
        pieces, offset = [], 0
        while offset + 8 <= len(self.raw):
            end = offset + 8 + int.from_bytes(self.raw[offset + 4:offset + 8], "big")
            if end > len(self.raw):
                break
            pieces.append(self.raw[offset + 8:end])
            offset = end
        self.raw = self.raw[offset:]
        return b"".join(pieces)

    def lines(self, piece: bytes) -> t.Iterator[str]:
        """The lines that are complete by now."""
        *complete, self.text = (self.text + self.feed(piece)).split(b"\n")
        for line in complete:
            yield line.decode("utf-8", "replace").rstrip("\r")
