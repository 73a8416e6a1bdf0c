# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gate as sshd starts it: what a peer may read, and everything else it may not."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_lab import ROOT, load

GATE = ROOT / "roles" / "bootstrap" / "files" / "source_gate.py"
gate = load("sparkops_source_gate", GATE)


def ask(root, command, connection="127.0.0.1 50000 127.0.0.1 22", **options):
    environment = {"PATH": os.environ["PATH"], "SSH_ORIGINAL_COMMAND": command, "SSH_CONNECTION": connection}
    return subprocess.run([sys.executable, str(GATE), str(root)], env=environment, capture_output=True, text=True, timeout=30, check=False, **options)


@pytest.fixture
def weights(tmp_path):
    root = tmp_path / "weights"
    (root / "org--model" / "rev").mkdir(parents=True)
    (root / "org--model" / "rev" / "a.safetensors").write_bytes(b"A" * 100_000)
    (root / "org--model" / "rev" / "config.json").write_text("{}")
    (tmp_path / "token").write_text("secret")
    (root / "org--model" / "rev" / "out").symlink_to(tmp_path / "token")
    (root / "folder-out").symlink_to(tmp_path)
    return root


@pytest.mark.parametrize(
    "command",
    [
        "",
        "id",
        "cat /etc/passwd",
        "rsync --server -tRe.LsfxCIvu . {root}/org--model/rev/",
        "rsync --server --sender -tRe.LsfxCIvu . /etc/",
        "rsync --server --sender -tRe.LsfxCIvu . {root}/../token",
        "rsync --server --sender -tRe.LsfxCIvu . {root}/folder-out/",
        "rsync --server --sender -tRe.LsfxCIvu . {root}/org--model/rev/ /etc/",
        "rsync --server --sender -tLRe.LsfxCIvu . {root}/org--model/rev/",
        "rsync --server --sender -tkRe.LsfxCIvu . {root}/org--model/rev/",
        "rsync --server --sender --remove-source-files -te.LsfxCIvu . {root}/org--model/rev/",
        "rsync --server --sender --log-file=/tmp/x -te.LsfxCIvu . {root}/org--model/rev/",
        "rsync --server --sender -te.LsfxCIvu --files-from=/etc/shadow . {root}/org--model/rev/",
        "rsync --server --daemon --sender . {root}",
        "rsync --server --sender -se.LsfxCIvu",
        "weights-list /etc",
        "weights-list {root}/folder-out",
        "weights-list {root} {root}",
        "weights-send",
        "weights-send 0.0.0.0",
        "weights-send ::",
        "weights-send not-an-address",
        "image-inspect $(id)",
        "'unclosed",
    ],
)
def test_refused(weights, command):
    done = ask(weights, command.format(root=weights))
    assert done.returncode == 126 and done.stderr.startswith("sparkops: refused: ") and done.stdout == ""


def test_the_gate_wants_roots():
    assert subprocess.run([sys.executable, str(GATE), "relative"], capture_output=True, timeout=30, check=False).returncode == 126


def test_a_list_names_real_files_only(weights):
    done = ask(weights, f"weights-list {weights}/org--model/rev")
    assert json.loads(done.stdout) == {"a.safetensors": 100_000, "config.json": 2}


def test_a_tree_that_is_not_there_yet_is_empty(weights):
    assert json.loads(ask(weights, f"weights-list {weights}/org--other/rev").stdout) == {}


def test_the_sender_is_told_the_real_folder(weights, monkeypatch):
    monkeypatch.setattr(gate.shutil, "which", lambda name, path: f"/usr/bin/{name}")
    words = ["rsync", "--server", "--sender", "-tRe.LsfxCIvu", "--append", "--files-from=-", "--from0", ".", f"{weights}/org--model/../org--model/rev/"]
    assert gate.rsync_argv(words, [str(weights)]) == [
        "/usr/bin/rsync",
        "--server",
        "--sender",
        "-tRe.LsfxCIvu",
        "--append",
        "--files-from=-",
        "--from0",
        ".",
        f"{weights}/org--model/rev/",
    ]


@given(st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20), max_size=6))
def test_no_words_reach_a_program_with_other_options(words):
    try:
        argv = gate.rsync_argv(["rsync", "--server", "--sender", *words], ["/nowhere"])
    except gate.Refused:
        return
    assert all(option in gate.RSYNC_WORDS or gate.RSYNC_LETTERS.fullmatch(option) for option in argv[3:-2])


class Session:
    """An open ``weights-send``."""

    def __init__(self, root, *addresses):
        environment = {
            "PATH": os.environ["PATH"],
            "SSH_ORIGINAL_COMMAND": " ".join(["weights-send", *addresses]),
            "SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22",
        }
        self.process = subprocess.Popen([sys.executable, str(GATE), str(root)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        offer = json.loads(self.process.stdout.readline())
        self.secret, self.places = bytes.fromhex(offer["secret"]), [tuple(place) for place in offer["listen"]]

    def connect(self, secret=None, place=0):
        connection = socket.create_connection(self.places[place], timeout=10)
        nonce = connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(hmac.new(secret or self.secret, nonce, hashlib.sha256).digest())
        return connection

    def read(self, connection, **request):
        connection.sendall(json.dumps(request).encode() + b"\n")
        stream = connection.makefile("rb")
        head = json.loads(stream.readline())
        return head, stream.read(head["size"] - head["offset"]) if "size" in head else b""

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture
def session(weights):
    opened = Session(weights, "127.0.0.1", "127.0.0.2")
    yield opened
    opened.close()


def test_files_come_from_each_rail_and_from_any_offset(weights, session):
    tree = str(weights / "org--model" / "rev")
    for place in (0, 1):
        head, data = session.read(session.connect(place=place), tree=tree, path="a.safetensors", offset=99_000)
        assert head == {"size": 100_000, "offset": 99_000} and data == b"A" * 1000
    assert [address for address, _port in session.places] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ("org--model/rev", "out"),
        ("org--model/rev", "../../../token"),
        ("org--model/rev", "absent"),
        ("..", "token"),
        ("org--model", "rev"),
        ("folder-out", "token"),
    ],
)
def test_nothing_outside_is_sent(weights, session, tree, path):
    head, data = session.read(session.connect(), tree=str(weights / tree), path=path)
    assert "error" in head and data == b""


def test_without_the_secret_nothing_is_sent(weights, session):
    connection = session.connect(secret=b"x" * 32)
    connection.sendall(json.dumps({"tree": str(weights / "org--model" / "rev"), "path": "config.json"}).encode() + b"\n")
    try:
        assert connection.recv(100) == b""
    except ConnectionResetError:
        pass


def test_the_sockets_end_with_the_session(session):
    session.close()
    with pytest.raises(OSError):
        socket.create_connection(session.places[0], timeout=2)
