# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a peer may read on this node: the forced command of its ssh key ends here.

``source_gate.py ROOT...`` reads SSH_ORIGINAL_COMMAND and allows

* ``rsync --server --sender`` of folders below a root, with options that only read,
* ``weights-list TREE``: the files of a tree that are complete here, and
* ``weights-send ADDRESS...``: send files of trees below a root, unencrypted, from sockets that are bound to the
  given fabric addresses and that live as long as this ssh session,
* ``zfs-list``, ``zfs-size WHAT``, ``zfs-send WHAT``, ``zfs-token TOKEN``: snapshots of the dataset that is mounted at a root, where
  WHAT is ``snapshot NAME [GUID of its base]`` or ``token TOKEN``,
* ``image-...``: what image_source.py beside this file allows.

Everything else ends with code 126 and one line on stderr. Standard library only, no shell.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
# A word of an image verb; the program behind it checks what the words mean.
WORD = re.compile(r"[A-Za-z0-9._:/@=+,-]+")
# The sender's options that an rsync client of ours causes. Letters only choose what is told about files; e. carries
# protocol flags. Nothing here can write, delete, follow a link out of a root, or run another program.
RSYNC_LETTERS = re.compile(r"-[vltrogpWDSzniIRd]*(e[.0-9]*[LsfxCIvui]*)?")
RSYNC_WORDS = ("--files-from=-", "--from0", "--append", "--inplace", "--numeric-ids", "--no-r", "--no-W", "--relative", "--ignore-times", "--size-only")
# Snapshots that role weight_sync has made. The flags are chosen once: another set on top of a stream is refused, or worse on old
# releases (openzfs 6224).
SNAPSHOT = re.compile(r"sparkops-[A-Za-z0-9_.:-]+")
TOKEN = re.compile(r"[0-9a-f]+(-[0-9a-f]+)+")
SEND_FLAGS = ("-L", "-e", "-c")
CONNECTIONS = 64
SECRET_BYTES = 32


class Refused(Exception):
    """The peer asks for what it may not have."""


def refuse(reason):
    sys.stderr.write(f"sparkops: refused: {reason}\n")
    sys.exit(126)


def inside(path, roots):
    """The real place of a path below one of the roots, after links were followed."""
    real = os.path.realpath(path)
    for root in roots:
        base = os.path.realpath(root)
        if real == base or real.startswith(base + os.sep):
            return real
    raise Refused(f"{path} is not below {' or '.join(roots)}")


def rsync_argv(words, roots):
    """The checked argument vector of an rsync sender."""
    if words[1:3] != ["--server", "--sender"] or len(words) < 5:
        raise Refused("only rsync --server --sender is allowed")
    options, dot, paths = words[3:-2], words[-2], words[-1:]
    for option in options:
        if option not in RSYNC_WORDS and not RSYNC_LETTERS.fullmatch(option):
            raise Refused(f"rsync option {option}")
    if dot != ".":
        raise Refused("one source folder only")
    program = shutil.which("rsync", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        raise Refused("rsync is not installed on this node")
    folder = inside(paths[0], roots)
    return [program, "--server", "--sender", *options, ".", folder + "/"]


# Sending over the fabric


def complete_files(tree):
    """Files of a tree under their final names. A file gets its final name only when its hash was right."""
    found = {}
    for folder, _folders, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                found[os.path.relpath(path, tree)] = status.st_size
    return found


def open_file(roots, tree, path):
    """A regular file of a tree, without following a link in its last part."""
    handle = os.open(inside(os.path.join(tree, path), roots), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refused(f"{path} is not a regular file")
    return handle


def answer(secret, nonce):
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def receive(connection, count):
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def serve_connection(connection, secret, roots):
    """Prove the peer, then answer its requests: one line of JSON each, then the bytes by sendfile."""
    with connection:
        # sendfile wants a blocking socket; the kernel's own limits end a peer that is gone.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 120, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(SECRET_BYTES)
        connection.sendall(nonce)
        if not hmac.compare_digest(receive(connection, SECRET_BYTES), answer(secret, nonce)):
            return
        requests = connection.makefile("rb")
        while True:
            line = requests.readline(65536)
            if not line:
                return
            send_file(connection, json.loads(line), roots)


def send_file(connection, request, roots):
    try:
        handle = open_file(roots, request["tree"], request["path"])
    except (OSError, Refused, KeyError, TypeError) as exc:
        connection.sendall(json.dumps({"error": str(exc)}).encode() + b"\n")
        return
    try:
        size = os.fstat(handle).st_size
        offset = min(int(request.get("offset", 0)), size)
        os.posix_fadvise(handle, offset, 0, os.POSIX_FADV_SEQUENTIAL)
        connection.sendall(json.dumps({"size": size, "offset": offset}).encode() + b"\n")
        while offset < size:
            sent = os.sendfile(connection.fileno(), handle, offset, min(8 * 2**20, size - offset))
            if sent == 0:
                raise EOFError
            offset += sent
        # On unified memory the page cache of a sent file is memory that the GPU lacks.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def accept(listener, secret, roots, peers):
    count = 0
    while True:
        connection, address = listener.accept()
        if address[0] not in peers or count >= CONNECTIONS * 64:
            connection.close()
            continue
        count += 1
        threading.Thread(target=guarded, args=(connection, secret, roots), daemon=True).start()


def guarded(connection, secret, roots):
    try:
        serve_connection(connection, secret, roots)
    except (OSError, EOFError, ValueError):
        connection.close()


def weights_send(words, roots):
    """Listen on own addresses for as long as the ssh session lives; the secret goes through it."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    own, peers = words[: words.index("--")] if "--" in words else words, words[words.index("--") + 1 :] if "--" in words else []
    for word in own + peers:
        ipaddress.ip_address(word)
    if not own or len(own) > 8 or len(peers) > 8:
        raise Refused("weights-send wants one to eight addresses")
    if not fields:
        raise Refused("weights-send works only through ssh")
    allowed = set(peers) | {fields[0]}
    secret = secrets.token_bytes(SECRET_BYTES)
    ports = []
    for word in own:
        if ipaddress.ip_address(word).is_unspecified:
            raise Refused("an address of this node is wanted, not all of them")
        family = socket.AF_INET6 if ":" in word else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((word, 0))
        listener.listen(CONNECTIONS)
        ports.append([word, listener.getsockname()[1]])
        threading.Thread(target=accept, args=(listener, secret, roots, allowed), daemon=True).start()
    sys.stdout.write(json.dumps({"secret": secret.hex(), "listen": ports}) + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()  # ends with the session, and everything with it


def weights_list(words, roots):
    if len(words) != 1:
        raise Refused("weights-list wants one tree")
    tree = inside(words[0], roots)
    sys.stdout.write(json.dumps(complete_files(tree)) + "\n")


# Sending a dataset


def dataset_of(roots, mountinfo="/proc/self/mountinfo"):
    """The dataset whose mount point is one of the roots."""
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as stream:
        lines = [line.split(" - ") for line in stream]
    for front, back in lines:
        kind, source = back.split(" ")[:2]
        if kind == "zfs" and front.split(" ")[4] in {os.path.realpath(root) for root in roots}:
            return source
    raise Refused(f"{' or '.join(roots)} is not the mount point of a ZFS dataset")


def zfs_program():
    program = shutil.which("zfs", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise Refused("zfs is not installed on this node")
    return program


def zfs_output(*argv):
    done = subprocess.run([zfs_program(), *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(" ".join(done.stderr.split()) or f"zfs ended with {done.returncode}")
    return done.stdout


def zfs_snapshots(dataset):
    return zfs_output("list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid,createtxg", dataset)


def zfs_token(dataset, token):
    """What a token is about, when it is about the dataset."""
    if not TOKEN.fullmatch(token):
        raise Refused("that is no token")
    text = zfs_output("send", "-nvt", token)
    if f"toname = {dataset}@" not in text:
        raise Refused(f"the token is not about {dataset}")
    return text


def zfs_what(words, dataset):
    """The checked arguments of a send. A token carries its flags; a base is named by its GUID."""
    if words[:1] == ["token"] and len(words) == 2:
        zfs_token(dataset, words[1])
        return ["-t", words[1]]
    if words[:1] != ["snapshot"] or len(words) not in (2, 3) or not SNAPSHOT.fullmatch(words[1]):
        raise Refused("zfs-send wants a snapshot of ours, or a token")
    names = {guid: name for name, guid, _created in (line.split("\t") for line in zfs_snapshots(dataset).splitlines())}
    if len(words) == 3 and words[2] not in names:
        raise Refused(f"{dataset} has no snapshot with the GUID {words[2]}")
    return [*SEND_FLAGS, *(["-i", names[words[2]]] if len(words) == 3 else []), f"{dataset}@{words[1]}"]


def zfs(verb, words, roots):
    dataset = dataset_of(roots)
    if verb == "zfs-list" and not words:
        sys.stdout.write(json.dumps({"dataset": dataset, "snapshots": zfs_snapshots(dataset)}) + "\n")
    elif verb == "zfs-token" and len(words) == 1:
        sys.stdout.write(zfs_token(dataset, words[0]))
    elif verb == "zfs-size":
        sys.stdout.write(zfs_output("send", "-nP", *zfs_what(words, dataset)))
    elif verb == "zfs-send":
        argv = [zfs_program(), "send", *zfs_what(words, dataset)]
        os.execv(argv[0], argv)
    else:
        raise Refused(verb)


def dispatch(words, roots):
    if words[0] == "rsync":
        argv = rsync_argv(words, roots)
        os.execv(argv[0], argv)
    if words[0] == "weights-send":
        weights_send(words[1:], roots)
    elif words[0] == "weights-list":
        weights_list(words[1:], roots)
    elif words[0].startswith("zfs-"):
        zfs(words[0], words[1:], roots)
    elif words[0].startswith("image-"):
        program = os.path.join(HERE, "image_source.py")
        if not os.path.exists(program):
            raise Refused("images are not shared by this node")
        if not all(WORD.fullmatch(word) for word in words):
            raise Refused("a word of the image verb")
        os.execv(sys.executable, [sys.executable, program, *words])
    else:
        raise Refused(f"command {words[0]}")


def main():
    roots = sys.argv[1:]
    if not roots or not all(os.path.isabs(root) for root in roots):
        refuse("usage: source_gate.py ROOT...")
    try:
        words = shlex.split(os.environ.get("SSH_ORIGINAL_COMMAND", ""))
        if not words:
            raise Refused("no command, and no shell")
        dispatch(words, roots)
    except Refused as exc:
        refuse(str(exc))
    except (OSError, ValueError) as exc:
        refuse(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    main()
