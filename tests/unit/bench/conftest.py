# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lab's stand-in engine as a process of its own, with a key, so that requests are real ones."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
KEY = "the-key-of-this-test"


@dataclasses.dataclass
class Engine:
    port: int
    state_dir: str
    program: str
    process: subprocess.Popen


@pytest.fixture(name="engine")
def fixture_engine(tmp_path, request):
    """``request.param``: variables of the stand-in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "key").mkdir()
    (tmp_path / "key/api_key").write_text(KEY + "\n", encoding="utf-8")
    # What rank 0 would hear from its workers.
    program = tmp_path / "rank_service.py"
    program.write_text(
        'import json\nprint(json.dumps({"ranks": {"0": {"service": "alive", "memory": {"available_kib": 4096}},'
        ' "1": {"service": "alive", "memory": {"available_kib": 2048}}, "2": {"service": "silent", "memory": {"available_kib": 1}}}, "error": ""}))\n',
        encoding="utf-8",
    )
    environment = {**os.environ, "VLLM_API_KEY": KEY, "STUB_LOAD_SECONDS": "0", **getattr(request, "param", {})}
    command = [sys.executable, os.path.join(ROOT, "tests/lab/stub_engine.py"), "serve", "m", "--served-model-name", "tiny", "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", str(port), "--max-model-len", "4096"], env=environment, stderr=subprocess.DEVNULL) as process:
        for dummy in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except urllib.error.HTTPError:
                break  # it answers, as it was told to
            except OSError:
                time.sleep(0.05)
        yield Engine(port, str(tmp_path), str(program), process)
        process.terminate()
