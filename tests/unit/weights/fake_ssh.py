# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stands in for ssh in tests: runs the gate at once, as sshd would, and fails as the file FAKE_SSH_FAULT says.

``denied``, ``host-key``   the words of the real ssh, code 255
``cut BYTES``              end after so many bytes from the peer, code 255
``stall BYTES``            say nothing more after so many bytes
``dead ADDRESS``           no answer on this address, whatever is asked
The first word may be preceded by a number of calls that the fault lasts, as in ``2 cut 1000``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

WORDS = {"denied": "alice@198.51.100.11: Permission denied (publickey).", "host-key": "Host key verification failed."}


def fault() -> list[str]:
    path = os.environ["FAKE_SSH_FAULT"]
    if not os.path.exists(path):
        return []
    words = open(path, encoding="ascii").read().split()
    if words and words[0].isdigit():
        left, words = int(words[0]) - 1, words[1:]
        if left:
            open(path, "w", encoding="ascii").write(f"{left} {' '.join(words)}")
        else:
            os.unlink(path)
    return words


def destination() -> list[str]:
    """The address, and what follows it."""
    words = sys.argv[1:]
    while words[0].startswith("-"):
        words = words[1 if words[0] == "-T" else 2 :]
    return words


def main() -> int:
    address, *command = destination()
    order = " ".join(command)
    with open(os.environ["FAKE_SSH_LOG"], "a", encoding="utf-8") as log:
        log.write(" ".join(sys.argv[1:]) + "\n")
    if os.path.exists(os.environ["FAKE_SSH_FAULT"]) and open(os.environ["FAKE_SSH_FAULT"], encoding="ascii").read() == f"dead {address}":
        sys.stderr.write(f"ssh: connect to host {address} port 22: No route to host\n")
        return 255
    words = fault() if "weights-list" not in order else []
    if words and words[0] in WORDS:
        sys.stderr.write(WORDS[words[0]] + "\n")
        return 255
    environment = {**os.environ, "SSH_ORIGINAL_COMMAND": order, "SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22"}
    gate = [sys.executable, os.environ["FAKE_SSH_GATE"], os.environ["FAKE_SSH_ROOTS"]]
    if not words or words[0] == "dead":
        os.execve(sys.executable, gate, environment)
    process = subprocess.Popen(gate, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    threading.Thread(target=feed, args=(process,), daemon=True).start()
    left = int(words[1])
    while left > 0:
        piece = os.read(process.stdout.fileno(), min(left, 65536))
        if not piece:
            return process.wait()
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        left -= len(piece)
    if words[0] == "stall":
        time.sleep(600)
    process.kill()
    return 255


def feed(process: subprocess.Popen) -> None:
    while piece := os.read(0, 65536):
        process.stdin.write(piece)
        process.stdin.flush()
    process.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
