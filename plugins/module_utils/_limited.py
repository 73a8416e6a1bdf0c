# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Looks and commands that may hang, in children that are killed when their time is over.

Any call on a hard NFS mount waits for as long as its server is away, and the caller with it. A child of our own can be given up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _mounts
from ansible_collections.sparkops.inference.plugins.module_utils._mounts import Mount
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

SECONDS = 10.0
# How long a killed child gets to end.
KILLED = 1.0
# A look reads little: enough for one answer of the server.
SAMPLE = 4096
# What an answer of the server says of a mount.
ERRORS = {errno.ESTALE: "stale", errno.ENOENT: "stale", errno.EACCES: "denied", errno.EPERM: "denied"}


class TooLong(Exception):
    """A look did not end in its time."""


class Look(t.NamedTuple):
    """State of a mount: live, stale (its server forgot it), denied (to this account or node), dead (no answer), or broken."""

    state: str
    detail: str


def command(words: t.Sequence[str], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run a command. TooLong when it does not end; from several threads at once, which run_command of a module does not allow."""
    # No context manager, which waits for the end: on a suspended pool a killed command has none.
    # pylint: disable-next=ansible-bad-function,consider-using-with
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as exc:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED)
        raise TooLong(str(exc)) from exc
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def limited(looks: t.Sequence[t.Callable[[], t.Any]], seconds: float = SECONDS) -> list[t.Any]:
    """Results of all looks, which run at the same time. One that takes too long gives TooLong, one that raises gives its OSError."""
    children = [_start(look) for look in looks]
    deadline = time.monotonic() + seconds
    return [_collect(pid, reader, deadline) for pid, reader in children]


def _start(look: t.Callable[[], t.Any]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        # A child that the kernel will not end must not hold the output that the controller waits for.
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        try:
            answer = {"result": look()}
        except OSError as exc:
            answer = {"errno": exc.errno, "text": str(exc)}
        os.write(writer, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _collect(pid: int, reader: int, deadline: float) -> t.Any:
    data = b""
    try:
        while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reader, 65536)
            if not piece:
                os.waitpid(pid, 0)
                return _result(data)
            data += piece
    finally:
        os.close(reader)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + KILLED
    # Waits on NFS are killable; what is not is left to init.
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    return TooLong()


def _result(data: bytes) -> t.Any:
    answer = json.loads(data or b'{"errno": 5, "text": "the look ended without an answer"}')
    return OSError(answer["errno"], answer["text"]) if "errno" in answer else answer["result"]


# --- mounts ----------------------------------------------------------------------------------------------------


def ask_server(path: str) -> bool:
    """Needs an answer of the server: sizes of the filesystem are in no cache of the client, and neither is the content that is read."""
    os.statvfs(path)
    with os.scandir(path) as entries:
        file = next((entry.path for entry in entries if entry.is_file(follow_symlinks=False)), None)
    if file:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(handle, SAMPLE, 0)
        finally:
            os.close(handle)
    return True


def look_at(mounts: t.Sequence[Mount], seconds: float = SECONDS) -> list[Look]:
    """State of each mount."""
    answers = limited([lambda path=mount.path: ask_server(path) for mount in mounts], seconds)
    return [_judge(mount, answer, seconds) for mount, answer in zip(mounts, answers)]


def _judge(mount: Mount, answer: t.Any, seconds: float) -> Look:
    if isinstance(answer, TooLong):
        return Look("dead", f"server {mount.server} gave no answer within {seconds:.0f} s")
    if isinstance(answer, OSError):
        number = answer.errno or errno.EIO
        return Look(ERRORS.get(number, "broken"), f"server {mount.server} says {os.strerror(number)}")
    return Look("live", "")


def not_live(root: str, seconds: float = SECONDS, proc_root: str = "/proc") -> list[tuple[Mount, Look]]:
    """NFS mounts below ``root`` that must not be touched now. Without such mounts nothing is asked."""
    mounts = _mounts.network_mounts(_mounts.read(proc_root), root)
    return [(mount, look) for mount, look in zip(mounts, look_at(mounts, seconds)) if look.state != "live"]


def refusal(node: str, mount: Mount, look: Look) -> Refusal:
    """Why nothing on a mount can be had now."""
    thing = f"NFS mount {mount.path} of {mount.source}"
    if look.state == "stale":
        return Refusal(
            "sync.nfs_stale",
            node,
            thing,
            look.detail,
            "a handle that the server knows",
            "run share.yml with the tag recover, which mounts it again",
        )
    if look.state == "denied":
        return Refusal(
            "sync.nfs_denied", node, thing, look.detail, "files that this account may read",
            f"look at the export and the rights of its files on {mount.server}; for folders that the head shares, run share.yml",
        )  # fmt: skip
    return Refusal(
        "sync.nfs_dead", node, thing, look.detail, "an answer",
        f"bring the NFS server at {mount.server} back: readers go on by themselves; or stop the group and run share.yml with the tag recover",
    )  # fmt: skip


def hinders(mount: Mount, look: Look, trees: t.Sequence[str]) -> bool:
    """Whether a mount is in the way of those who want ``trees``. A stale one of an earlier tree is not, unless a container still has it."""
    if look.state != "stale":
        return look.state != "live"
    return any(_mounts.below(tree, mount.path) for tree in trees) or bool(_mounts.users(mount))


def refusals(node: str, looks: t.Iterable[tuple[Mount, Look]], trees: t.Sequence[str]) -> list[Refusal]:
    """One refusal for each mount that hinders."""
    return [refusal(node, mount, look) for mount, look in looks if hinders(mount, look, trees)]


def refuse_dead(node: str, root: str, directories: t.Sequence[str] = ("",), seconds: float = SECONDS) -> list[Refusal]:
    """One refusal for each NFS mount below ``root`` that must not be touched now by who wants these of its folders, or itself."""
    return refusals(node, not_live(root, seconds), [os.path.join(root, directory) for directory in directories])
