# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The source of a ship as its receiver sees it: verbs over ssh, and where what comes is staged."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._image_export import CHUNK, Blob, give_to_owner, make_folder
from ansible_collections.sparkops.inference.plugins.module_utils._node_copy import explain

# A frame is a line; the longest one has a manifest of some hundred layers in it.
LINE = 1 << 20
SSH_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oStrictHostKeyChecking=yes",
    "-oIdentitiesOnly=yes",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
)
# AES has instructions of its own on every Spark and server; the default cipher costs twice the time.
CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,aes128-ctr,chacha20-poly1305@openssh.com"


class TransferError(Exception):
    """The ship cannot be done this way; the text says why."""


class Dropped(TransferError):
    """The link or the source ended early: what came is kept, and another attempt goes on from there."""


def failed_ssh(source: str, program: str, stderr: str, code: int) -> TransferError:
    """What ssh, or rsync over it, ended with: a link that may come back, or what trying again cannot mend."""
    error = explain(stderr, code, source)
    kind = Dropped if error.kind == "link" and "Could not resolve hostname" not in stderr else TransferError
    return kind(f"{program} {source}: {stderr or 'the connection was lost'}")


class Question:
    """One verb asked of the source. What the other end had to say is raised when the caller is done reading the answer."""

    def __init__(self, argv: t.Sequence[str], source: str) -> None:
        self.argv = argv
        self.source = source

    def __enter__(self) -> t.BinaryIO:
        self._errors = tempfile.TemporaryFile()
        # The program of a unit has no AnsibleModule to call.
        # pylint: disable-next=ansible-bad-function
        self._process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors)
        self._answer = t.cast(t.BinaryIO, self._process.stdout)
        return self._answer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: t.Any) -> None:
        ended_early = isinstance(error, Dropped)
        if error is not None and not ended_early:
            self._process.kill()
        self._answer.close()
        self._process.wait()
        with self._errors:
            if error is None or ended_early:
                self.judge()

    def judge(self) -> None:
        """The answer is over: raise what the other end had to say. Code 255 is ssh's own; a program that was killed says nothing."""
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace").strip()
        if code == 255 or (code and not text):
            raise failed_ssh(self.source, "ssh to", text, code)
        if code:
            raise TransferError(f"{self.source}: {text}")


class Source:
    """The peer that has the image, behind the forced command of its gate."""

    def __init__(self, address: str, user: str, key: str, known_hosts: str) -> None:
        self.name = f"{user}@{address}"
        self._options = [*SSH_OPTIONS, f"-oUserKnownHostsFile={known_hosts}", f"-oCiphers={CIPHERS}", "-i", key]

    def ask(self, *words: str) -> Question:
        return Question(["ssh", *self._options, self.name, " ".join(words)], self.name)

    def ask_line(self, *words: str) -> dict[str, t.Any]:
        with self.ask(*words) as answer:
            return read_frame(answer)

    def rsync(self, name: str, target: str) -> None:
        """Fetch a file of the source's staging directory; what is there of it already is proven and kept."""
        shell = " ".join(["ssh", *self._options])
        argv = ["rsync", "--inplace", "--append-verify", "--rsync-path=image-rsync", f"--rsh={shell}", f"{self.name}:{name}", target]
        # The program of a unit has no AnsibleModule to call.
        # pylint: disable-next=ansible-bad-function
        result = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if result.returncode != 0:
            raise failed_ssh(self.name, "rsync from", result.stderr.decode("utf-8", "replace").strip(), result.returncode)


def read_frame(stream: t.BinaryIO) -> dict[str, t.Any]:
    line = stream.readline(LINE)
    if not line.endswith(b"\n"):
        raise Dropped("the source's answer ended early")
    return json.loads(line)


def read_exactly(stream: t.BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise Dropped("the source's answer ended early")
    return data


class Staging:
    """Layers on their way: C(<diff id>-<digest>) when complete, with C(.part) at the end before that."""

    def __init__(self, folder: str, state_root: str) -> None:
        self.folder = folder
        self.state_root = state_root
        make_folder(folder, state_root)

    def path(self, blob: Blob) -> str:
        return os.path.join(self.folder, f"{blob.diff_id[7:]}-{blob.digest[7:]}")

    @staticmethod
    def blob(path: str) -> Blob:
        """What the name of a complete layer says. The media type is the manifest's affair."""
        diff_id, dummy, digest = os.path.basename(path).partition("-")
        return Blob(f"sha256:{diff_id}", f"sha256:{digest}", os.path.getsize(path), "")

    def complete(self, diff_id: str) -> str | None:
        """The path of a layer that is there."""
        return next((os.path.join(self.folder, name) for name in self._names(diff_id) if not name.endswith(".part")), None)

    def word(self, diff_id: str) -> str:
        """How to ask for the rest of a layer."""
        for name in self._names(diff_id):
            digest = name.partition("-")[2][: -len(".part")]
            return f"{diff_id}@{os.path.getsize(os.path.join(self.folder, name))}:sha256:{digest}"
        return diff_id

    def held_bytes(self, diff_ids: t.Iterable[str]) -> int:
        return sum(os.path.getsize(os.path.join(self.folder, name)) for diff_id in diff_ids for name in self._names(diff_id))

    def receive(self, blob: Blob, offset: int, stream: t.BinaryIO) -> t.Iterator[bytes]:
        """The whole blob: what an earlier attempt left of it, then what comes now. It gets its name once its digest is right."""
        part = self.path(blob) + ".part"
        self._remove_others(blob.diff_id, part)
        hashed = hashlib.sha256()
        with open(part, "r+b" if offset else "wb") as target:
            give_to_owner(target.fileno(), self.state_root)
            for piece in exact_pieces(target, offset):
                hashed.update(piece)
                yield piece
            for piece in exact_pieces(stream, blob.size - offset):
                target.write(piece)
                hashed.update(piece)
                yield piece
        if f"sha256:{hashed.hexdigest()}" != blob.digest:
            os.unlink(part)
            raise Dropped(f"layer {blob.digest} came with other content")
        os.rename(part, self.path(blob))

    def _names(self, diff_id: str) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith(f"{diff_id[7:]}-")]

    def _remove_others(self, diff_id: str, part: str) -> None:
        """A part of the same layer that was compressed in another way is of no use."""
        for name in self._names(diff_id):
            if os.path.join(self.folder, name) != part:
                os.unlink(os.path.join(self.folder, name))


def exact_pieces(stream: t.BinaryIO, count: int) -> t.Iterator[bytes]:
    while count:
        piece = stream.read(min(CHUNK, count))
        if not piece:
            raise Dropped("the link was cut")
        count -= len(piece)
        yield piece
