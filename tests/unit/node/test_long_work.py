# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Long work on a node that starts no units: real processes, with real ends."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _detached, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

# Works until it is told to stop, with a child in a session of its own, as rsync and ssh are.
WORK = """
import subprocess, sys, time
from {package} import _unit

def work(request, progress):
    if request["then"] == "die":
        print("no more bytes"); sys.stdout.flush(); subprocess.os._exit(3)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:
        progress.message = str(child.pid)
        while request["then"] == "wait":
            time.sleep(0.05)
        child.kill()
    return {{"changed": True}}

sys.exit(_unit.run_job(sys.argv[1], work))
"""
# A task that begins it, says its number, and waits for the end that comes with its session.
TASK = """
import json, signal, sys, time
from {package} import _unit
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would pass on that it is ignored
_unit.available = lambda module: False
job = _unit.Job(None, "weights", "d", sys.argv[1], "")
job.begin(json.loads(sys.argv[2]), {{"then": "wait"}})
print(_unit.read_json(job.process)["pid"], flush=True)
time.sleep(1000)
"""
PATH = {**os.environ, "PYTHONPATH": ":".join(sys.path)}


@pytest.fixture(name="argv", scope="module")
def fixture_argv(tmp_path_factory):
    program = f"import sys; from {_unit.PACKAGE} import _unit; print(_unit.install_code(_unit.loaded_code(), sys.argv[1]))"
    code = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path_factory.mktemp("lib"))],
        check=True, stdout=subprocess.PIPE, text=True, env=PATH,
    )  # fmt: skip
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {code.stdout.strip()!r})\n" + WORK.format(package=_unit.PACKAGE)]


@pytest.fixture(name="job")
def fixture_job(tmp_path, monkeypatch):
    monkeypatch.setattr(_unit, "available", lambda module: False)
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(False, "", 0))
    yield lambda: _unit.Job(None, "weights", "d", str(tmp_path / "state"), "")
    record = _unit.read_json(str(tmp_path / "state/jobs/weights/process.json"))
    if record:
        _detached.end(record, 5)


@pytest.mark.parametrize("uid, user, account", [(0, "", "owner"), (0, "me", "me"), (1000, "", "")])
def test_what_root_makes_for_a_deployment_belongs_to_the_account_of_the_place(job, tmp_path, monkeypatch, uid, user, account):
    """A job that runs as root, for an account that may not use Docker: the account's own work comes to the same directories."""
    steps = []

    @contextlib.contextmanager
    def identity(name):
        steps.append((name, (tmp_path / "state/jobs").exists() and (tmp_path / "state/progress").exists()))
        yield

    monkeypatch.setattr(_unit, "identity", identity)
    monkeypatch.setattr(_unit.os, "getuid", lambda: uid)
    monkeypatch.setattr(_unit.pwd, "getpwuid", lambda number: type("Entry", (), {"pw_name": "owner"}) if number == os.stat(tmp_path).st_uid else None)
    work = job()
    work.user = user
    monkeypatch.setattr(work, "_detach", lambda command: None)
    work.begin(["true"], {})
    assert steps[:2] == [(account, False), (user, True)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root works for others")
def test_the_account_goes_on_where_root_began(job, monkeypatch):
    """An account that may use Docker since a moment ago finds the job folder of root's work as its own."""
    monkeypatch.setattr(_unit.Job, "_detach", lambda self, command: None)
    with tempfile.TemporaryDirectory() as place:  # other accounts may not look into tmp_path
        os.chown(place, 65534, 65534)
        for user in ("", "nobody", ""):
            work = _unit.Job(None, "pull", "d", f"{place}/d", user)
            work.begin(["true"], {}, secret="hf_secret")
            assert os.stat(work.folder).st_uid == 65534 and os.stat(work.folder).st_mode & 0o777 == 0o700
            assert os.stat(work.request).st_uid == (65534 if user else 0)


def test_a_full_disk_hides_no_reason(tmp_path, monkeypatch):
    """The room of the result is kept from the start; what tells of progress may fail."""
    request, result = tmp_path / "request.json", tmp_path / "result.json"
    request.write_text(json.dumps({"progress": str(tmp_path / "progress.json"), "result": str(result), "run_id": "r"}))
    write = _unit.write_json

    def full(path, content, mode=0o644):
        if os.path.exists(f"{result}.room"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, mode)

    def work(dummy, progress):
        assert os.stat(f"{result}.room").st_size == _unit.RESULT_ROOM
        progress.begin("copy", 5)
        raise _unit.Refused(Refusal("sync.disk_full", "spark-2", "a", "b", "c", "d"))

    monkeypatch.setattr(_unit, "write_json", full)
    monkeypatch.setattr(_unit.signal, "signal", lambda *words: None)
    assert _unit.run_job(str(request), work) == 1
    assert json.loads(result.read_text())["refusals"][0]["id"] == "sync.disk_full"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json", "request.json", "result.json"]


def child_of(job):
    """The number of the job's own child, once there is one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            return int(job.current().get("message", ""))
        time.sleep(0.05)
    raise AssertionError("the job said nothing")


def test_a_result_comes_by_the_same_files(job, argv):
    one = job()
    run_id = one.begin(argv, {"then": "end"})
    assert one.wait(30) and one.outcome(run_id)["changed"]


def test_it_outlives_the_session_of_its_task_and_a_second_run_attaches(job, argv, tmp_path):
    task = [sys.executable, "-c", TASK.format(package=_unit.PACKAGE), str(tmp_path / "state"), json.dumps(argv)]
    with subprocess.Popen(task, stdout=subprocess.PIPE, text=True, env=PATH, start_new_session=True) as process:
        pid = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGHUP)
    second = job()
    assert second.running() and os.getsid(pid) == pid
    assert second.current_run() == _unit.read_json(second.request)["run_id"] and not second.wait(0)


def test_a_cancel_ends_all_of_it_and_says_so(job, argv):
    one = job()
    run_id = one.begin(argv, {"then": "wait"})
    child = child_of(one)
    job().stop()
    assert not one.running() and not os.path.exists(f"/proc/{child}")
    assert one.outcome(run_id)["cancelled"]


def test_what_does_not_listen_is_made_to_end(tmp_path):
    with open(tmp_path / "log", "wb") as output:
        record = _detached.start(["sh", "-c", "trap '' TERM; echo x; while :; do sleep 0.1; done", "mark"], output, dict(os.environ))
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    assert _detached.is_running(record, "mark")
    _detached.end(record, 0.5)
    assert not _detached.is_running(record, "mark")


def test_another_process_of_the_same_number_is_left_alone(job):
    mine = {"pid": os.getpid(), "began": _detached._began(os.getpid())}
    arguments = [word.decode() for word in open("/proc/self/cmdline", "rb").read().split(b"\0")]
    assert _detached.is_running(mine, arguments[0])
    assert not _detached.is_running(mine, "/s/jobs/weights/request.json")
    assert not _detached.is_running({**mine, "began": "1"}, arguments[0])
    assert not _detached.is_running({"pid": os.getpid(), "began": ""}, arguments[0])


def test_a_program_that_the_kernel_still_loads_runs(monkeypatch):
    """Its command line is empty then (one of two looks right after a start, on a busy machine)."""
    mine = {"pid": os.getpid(), "began": _detached._began(os.getpid())}
    monkeypatch.setattr(_detached, "open", lambda path, *mode, **more: io.BytesIO() if path.endswith("/cmdline") else open(path, *mode, **more), raising=False)
    assert _detached.is_running(mine, "mark")
    assert not _detached.is_running({**mine, "began": "1"}, "mark")


def test_a_job_that_died_has_its_last_words_in_a_file(job, argv):
    one = job()
    run_id = one.begin(argv, {"then": "die"})
    assert one.wait(30) and one.outcome(run_id) is None
    assert one.last_words() == "no more bytes" and one.log == one.output


@pytest.mark.parametrize("then", ["wait", "die"])
def test_a_secret_that_was_not_read_goes_with_its_job(job, argv, then):
    one = job()
    one.begin(argv, {"then": then}, secret="hf_secret")
    assert os.stat(one.secret).st_mode & 0o777 == 0o600
    one.stop() if then == "wait" else one.wait(30)
    assert not one.running() and not os.path.exists(one.secret)


def test_a_program_that_is_not_there_is_an_error_at_once(job):
    with pytest.raises(_unit.UnitError, match="no-such-program"):
        job().begin(["/no-such-program"], {}, secret="hf_secret")
    assert not os.path.exists(job().secret)


def test_a_transfer_tells_notices_once_and_leaves_its_rate_beside_the_others(tmp_path):
    (tmp_path / "rates.json").write_text('{"copy": 7}')
    one = _unit.Transfer({"node": "spark-1", "state_dir": str(tmp_path)}, _unit.Progress(str(tmp_path / "progress.json")))
    one.area = "sync"
    for text in ("a", "b", "a"):
        one.say(text)
    assert one.notices == ["a", "b"] and one.progress.message == "a"
    one.count(3)
    one.count(4)
    assert one.progress.done == 7
    one.note_rate("download", _unit.LEAST_RATED - 1, 1.0)  # too little to tell
    assert one.last_rate("download") is None
    one.note_rate("download", 4 * _unit.LEAST_RATED, 2.0)
    assert (one.last_rate("download"), one.last_rate("copy")) == (2 * _unit.LEAST_RATED, 7)
    assert one.refuse("x", "a", "b", "c", "d").refusals[0].id == "sync.x"
