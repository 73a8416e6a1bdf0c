# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The modules as Ansible calls them. The job runs for real, as a process of its own: no systemd is asked."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import engram_source as oracle
import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkops.inference.plugins.filter.engram import engram_in_use
from ansible_collections.sparkops.inference.plugins.module_utils import _engram_files, _unit
from ansible_collections.sparkops.inference.plugins.modules import engram_info, engram_pack
from ansible_collections.sparkops.inference.tests.unit.image.fake_docker import FakeDocker

NAMES = ["engram-l1-r0of2.bin", "engram-l14-r0of2.bin"]
INSTALL = """
import sys
from ansible_collections.sparkops.inference.plugins.module_utils import _unit
from ansible_collections.sparkops.inference.plugins.modules import engram_pack
print(_unit.install_code(_unit.loaded_code(), sys.argv[1]))
"""


@pytest.fixture(name="code", scope="session")
def fixture_code(tmp_path_factory):
    """The code of the unit, installed the way a node does it: outside of the collection loader of these tests."""
    argv = [sys.executable, "-c", INSTALL, str(tmp_path_factory.mktemp("lib"))]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}).stdout.strip()


@pytest.fixture(name="call")
def fixture_call(tmp_path, monkeypatch, capsys, code):
    monkeypatch.setattr(_unit, "available", lambda module: False)
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(False, "", 0))
    monkeypatch.setattr(_unit, "install_code", lambda modules, library: code)
    (tmp_path / "state").mkdir()
    defaults = {
        "source": str(tmp_path / "source"),
        "directory": str(tmp_path / "engram" / "tp2"),
        "rank": 0,
        "tensor_parallel": 2,
        "repository": "acme/big",
        "revision": "0" * 40,
        "deployment": "big",
        "state_dir": str(tmp_path / "state" / "big"),
        "state_root": str(tmp_path / "state"),
        "node": "spark-1",
        "memory_floor": 0,
        "priority": "normal",
    }

    def call(check=False, **more):
        with patch_module_args({**defaults, **more, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            engram_pack.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_check_apply_check_apply(source, call, tmp_path):
    predicted = call(check=True)
    assert predicted["changed"]
    assert predicted["packed"] == NAMES
    assert not (tmp_path / "engram").exists()
    applied = call()
    assert applied["changed"]
    assert applied["packed"] == NAMES
    assert applied["engram"]["valid"]
    assert applied["engram"]["layers"]["14"] == {"file": NAMES[1], "valid": True, "reason": "", "rows": [0, 1830], "size": 487216}
    for check in (True, False):
        again = call(check=check)
        assert not again["changed"]
        assert again["engram"] == applied["engram"]


def test_check_mode_before_the_source_is_there(call):
    predicted = call(check=True)
    assert predicted["changed"]
    assert predicted["known_after"] == ["weights", "sync"]
    assert predicted["engram"] == {
        "directory": predicted["engram"]["directory"],
        "valid": False,
        "reason": "the Engram source is not on this node yet",
        "layers": {},
        "others": [],
    }


def test_missing_source_is_refused_with_the_node(call):
    answer = call()
    assert answer["failed"]
    assert [item["id"] for item in answer["refusals"]] == ["engram.source_missing"]
    assert answer["msg"].startswith("spark-1: ")
    assert "run the weights and sync tags" in answer["msg"]


@pytest.mark.parametrize("check", [True, False])
def test_reasons_are_given_all_at_once(source, call, check):
    answer = call(check=check, memory_floor=2**60, directory="/proc/nowhere/tp2")
    assert {item["id"] for item in answer["refusals"]} >= {"engram.memory"}
    assert answer["refusals"][0]["node"] == "spark-1"


def test_too_many_ranks(source, call):
    assert call(tensor_parallel=5)["refusals"][0]["id"] == "engram.ranks"


def test_job_that_dies_says_so(source, call, monkeypatch):
    monkeypatch.setattr(_unit.Job, "_detach", lambda self, command: None)
    monkeypatch.setattr(_unit.Job, "last_words", lambda self: "Killed")
    answer = call()
    assert answer["refusals"][0]["id"] == "engram.job_died"
    assert "Killed" in answer["msg"]


def test_refusal_of_the_job_reaches_the_user(source, call, monkeypatch, tmp_path):
    """What the module sees too late: someone else took the space meanwhile."""
    monkeypatch.setattr(engram_pack.Packer, "refusals", lambda self, look: [])
    (tmp_path / "engram" / "tp2").mkdir(parents=True)
    (tmp_path / "engram" / "tp2" / NAMES[0]).write_bytes(b"x")
    answer = call()
    assert answer["refusals"][0]["id"] == "engram.foreign_file"
    assert answer["refusals"][0]["node"] == "spark-1"


def test_verify(source, call, tmp_path):
    assert not call(state="verified")["changed"]  # nothing is packed, nothing is read
    call()
    assert not call(state="verified")["changed"]
    assert not call(state="verified", check=True)["changed"]
    path = tmp_path / "engram" / "tp2" / NAMES[1]
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    answer = call(state="verified")
    assert answer["refusals"][0]["id"] == "engram.damaged"
    assert NAMES[1] in answer["msg"]
    assert "[0,1830)" in answer["msg"]
    assert call(state="verified", check=True)["refusals"][0]["id"] == "engram.damaged"  # it stays known until it is mended
    repaired = call()
    assert repaired["packed"] == [NAMES[1]]
    assert repaired["engram"]["valid"]


def test_source_that_changes_meanwhile_is_not_packed_for_ever(source, call, monkeypatch):
    original = _unit.Job._detach

    def touch_after(self, command):
        original(self, command)
        assert self.wait(60)
        os.utime(source / oracle.SHARDS[1])

    monkeypatch.setattr(_unit.Job, "_detach", touch_after)
    assert call()["refusals"][0]["id"] == "engram.unstable"


def test_running_work_is_attached_to_in_slices(source, call, monkeypatch, tmp_path):
    running = [True]
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(running[0], "", 0))
    job = tmp_path / "state" / "big" / "jobs" / "engram"
    job.mkdir(parents=True)
    (job / "request.json").write_text('{"run_id": "r7"}', encoding="utf-8")
    answer = call(wait_slice=1)
    assert (answer["running"], answer["run_id"], answer["changed"]) == (True, "r7", True)
    running[0] = False
    (job / "result.json").write_text(
        json.dumps({"run_id": "r7", "ok": True, "refusals": [], "state": "verified", "packed": [], "damaged": []}), encoding="utf-8"
    )
    answer = call(run_id="r7")  # it was a verification; what is missing is packed now
    assert answer["packed"] == NAMES


def test_cancel(call, monkeypatch):
    stopped = []
    monkeypatch.setattr(_unit, "stop", lambda module, name: stopped.append(name))
    assert not call(state="cancelled")["changed"]
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(True, "", 0))
    assert call(state="cancelled", check=True)["changed"]
    assert not stopped
    assert call(state="cancelled")["changed"]
    assert stopped == ["sparkops-engram-big"]


def info(capsys, **arguments):
    with patch_module_args(arguments), pytest.raises(SystemExit):
        engram_info.main()
    return json.loads(capsys.readouterr().out)


def test_info_never_fails(source, call, capsys, tmp_path):
    asked = {"source": str(source), "directory": str(tmp_path / "engram" / "tp2"), "rank": 0, "tensor_parallel": 2}
    found = info(capsys, **asked)["engram"]
    assert (found["valid"], found["layers"]["1"]["reason"]) == (False, "not packed yet")
    call()
    assert info(capsys, **asked)["engram"]["valid"]
    (source / "config.json").write_text("{}", encoding="utf-8")
    found = info(capsys, **asked)
    assert not found["engram"]["valid"]
    assert "engram_layer_ids" in found["engram"]["reason"]
    assert not found["changed"]


PACKED = {
    1: "(Worker_TP0 pid=6) File-backed Engram layer=1 rank=0/2 rows=[0,1650) cache=0.0GiB packed=True",
    14: "(Worker_TP0 pid=6) File-backed Engram layer=14 rank=0/2 rows=[0,1830) cache=0.0GiB packed=True",
}
PINNED = "INFO [engram.py:1021] Engram table offloaded to pinned host memory: 192001740 rows x 256, 47.21 GiB per rank"


def engine_log(*lines):
    """As the engine sends it: each line in a frame of standard error."""
    return b"".join(b"\2\0\0\0" + len(data).to_bytes(4, "big") + data for data in (f"{line}\n".encode() for line in lines))


@pytest.fixture(name="ask")
def fixture_ask(source, capsys, tmp_path):
    """engram_info beside an engine with this answer to the question for its log."""

    def ask(answer):
        with FakeDocker({("GET", "/containers/big-rank0/logs"): answer}) as docker:
            asked = {"source": str(source), "directory": str(tmp_path / "engram" / "tp2"), "rank": 0, "tensor_parallel": 2}
            found = info(capsys, **asked, container="big-rank0", docker_socket=docker.socket_path)
        assert docker.requests[0]["query"] == {"stdout": "1", "stderr": "1"}
        return found

    return ask


def test_engine_that_reads_its_files(call, ask):
    given = call()["engram"]
    found = ask(engine_log("INFO loading", *PACKED.values(), "INFO Application startup complete."))
    assert found["engine"] == {"packed": True, "pinned": False, "problems": []}
    assert engram_in_use(given, found, 0) == "Engram rows of rank 0: packed=True for layers 1, 14"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([PACKED[1], PACKED[14].replace("True", "False")], "layer 14: packed=False"),
        ([PACKED[1]], "layer 14: the engine said nothing about Engram rows of rank 0"),
        ([PACKED[1], PACKED[14].replace("1830", "1877")], "layer 14: the engine serves rows [0,1877), the file has [0,1830)"),
        ([PACKED[1], PACKED[14].replace("rank=0/2", "rank=1/2")], "layer 14: the engine said nothing about Engram rows of rank 0"),
    ],
    ids=["falls back", "silent", "other rows", "other rank"],
)
def test_engine_that_does_not_read_its_files(call, ask, lines, problem):
    given = call()["engram"]
    found = ask(engine_log(*lines))
    assert not found["engine"]["packed"] and not found["engine"]["pinned"]
    assert [text.startswith(problem) for text in found["engine"]["problems"]] == [True]
    assert f"not in use, it reads the checkpoint, more slowly: {problem}" in engram_in_use(given, found, 0)


def test_engine_that_was_given_nothing(call, ask):
    given = {"valid": False, "reason": "engram-l1-r0of2.bin: not packed yet"}
    found = ask(engine_log(*(line.replace("True", "False") for line in PACKED.values())))
    assert engram_in_use(given, found, 0).endswith("more slowly: engram-l1-r0of2.bin: not packed yet")


def test_engine_without_the_reader_is_told_apart(call, ask):
    call()
    engine = ask(engine_log(PINNED))["engine"]
    assert engine["pinned"] and not engine["packed"]


def test_log_that_cannot_be_read_proves_nothing(call, ask):
    call()
    engine = ask((404, {"message": "No such container: big-rank0"}))["engine"]
    assert not engine["packed"] and "No such container" in engine["problems"][0]


def test_source_that_went_away_proves_nothing(source, call, ask):
    given = call()["engram"]
    (source / "config.json").unlink()
    found = ask(engine_log(*PACKED.values()))
    assert not found["engine"]["packed"] and "config.json" in engram_in_use(given, found, 0)


CODE = ["module_utils/_engram.py", "module_utils/_engram_files.py", "module_utils/_engram_job.py", "module_utils/_unit.py", "modules/engram_pack.py"]


def test_every_refusal_is_documented():
    """docs/refusals/engram.yml has each id that the code can give, and no other."""
    yaml = pytest.importorskip("yaml")
    root = pathlib.Path(__file__).resolve().parents[3]
    documented = {item["id"] for item in yaml.safe_load((root / "docs/refusals/engram.yml").read_text(encoding="utf-8"))}
    text = "".join((root / "plugins" / name).read_text(encoding="utf-8") for name in CODE)
    found = {f"engram.{name}" for name in re.findall(r'refusal\(\s*"(\w+)"', text)}
    for path in (root / "roles/engram_pack/tasks").glob("*.yml"):
        found |= set(re.findall(r"\[(engram\.\w+)\]", path.read_text(encoding="utf-8")))
    assert found == documented


def test_fingerprints_of_nothing_are_false():
    assert not _engram_files.same_source(None, {"shard": "a", "size": 1, "header_sha256": "", "sha256": None, "mtime_ns": 1})
