# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Taking over from launch scripts: their containers and their compiled kernels."""

from __future__ import annotations

import json
import os
import pathlib
import pwd
import typing as t

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.sparkops.inference.plugins.filter import plan as filters
from ansible_collections.sparkops.inference.plugins.module_utils import _docker_api
from ansible_collections.sparkops.inference.plugins.modules import launcher_caches, launcher_containers


def run(module: t.Any, capsys: pytest.CaptureFixture[str], **arguments: t.Any) -> dict[str, t.Any]:
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


class Engine:
    """An engine with containers by name and state."""

    def __init__(self, **states: str) -> None:
        self.states = {name.replace("_", "-"): state for name, state in states.items()}
        self.calls: list[str] = []

    def __call__(self, socket: str, timeout: float) -> Engine:
        return self

    def containers(self) -> list[dict[str, t.Any]]:
        return [{"Names": [f"/{name}"], "State": state, "Image": "i:1"} for name, state in self.states.items()]

    def call(self, method: str, path: str, query: t.Any = None) -> None:
        _root, _containers, name, verb = path.split("/")
        self.calls.append(f"{verb} {name}" + (f" {query['t']}" if query else ""))
        self.states[name] = {"stop": "exited", "start": "running"}[verb]


NAMES = ["dsv41-worker", "dsv41-head", "other"]


@pytest.fixture(name="engine")
def fixture_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(dsv41_worker="running", dsv41_head="exited", mine="running")
    monkeypatch.setattr(launcher_containers, "DockerApi", engine)
    return engine


def test_listing_changes_nothing(engine: Engine, capsys: t.Any, tmp_path: pathlib.Path) -> None:
    result = run(launcher_containers, capsys, names=NAMES, record=str(tmp_path / "r"))
    assert result["changed"] is False and engine.calls == []
    assert [(container["name"], container["state"]) for container in result["containers"]] == [("dsv41-worker", "running"), ("dsv41-head", "exited")]


def test_stop_and_restore(engine: Engine, capsys: t.Any, tmp_path: pathlib.Path) -> None:
    record = tmp_path / "adopted.json"
    arguments = {"names": NAMES, "record": str(record), "grace": 5, "_ansible_tmpdir": str(tmp_path)}
    predicted = run(launcher_containers, capsys, state="stopped", _ansible_check_mode=True, **arguments)
    assert predicted["changed"] is True and engine.calls == [] and not record.exists()
    assert run(launcher_containers, capsys, state="stopped", **arguments)["recorded"] == ["dsv41-worker"]
    # What did not run is not touched, now and later; nor is what is not named.
    assert engine.calls == ["stop dsv41-worker 5"]
    assert run(launcher_containers, capsys, state="stopped", **arguments)["changed"] is False
    assert run(launcher_containers, capsys, state="started", _ansible_check_mode=True, **arguments)["changed"] is True
    result = run(launcher_containers, capsys, state="started", **arguments)
    assert result["changed"] is True and result["recorded"] == [] and not record.exists()
    assert engine.calls[1:] == ["start dsv41-worker"]
    assert run(launcher_containers, capsys, state="started", **arguments)["changed"] is False


def test_heads_are_started_apart_from_workers(engine: Engine, capsys: t.Any, tmp_path: pathlib.Path) -> None:
    engine.states["dsv41-head"] = "running"
    arguments = {"record": str(tmp_path / "r"), "_ansible_tmpdir": str(tmp_path)}
    run(launcher_containers, capsys, state="stopped", names=NAMES, **arguments)
    assert run(launcher_containers, capsys, state="started", names=["dsv41-worker"], **arguments)["recorded"] == ["dsv41-head"]
    run(launcher_containers, capsys, state="started", names=["dsv41-head"], **arguments)
    assert engine.calls[-2:] == ["start dsv41-worker", "start dsv41-head"]


def test_a_stop_that_fails_is_written_down_already(engine: Engine, capsys: t.Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: t.Any, **values: t.Any) -> None:
        raise _docker_api.NotRunning("gone")

    monkeypatch.setattr(engine, "call", fail)
    record = tmp_path / "r"
    result = run(launcher_containers, capsys, state="stopped", names=NAMES, record=str(record), _ansible_tmpdir=str(tmp_path))
    assert result["failed"] and "state stopped: gone" in result["msg"]
    assert launcher_containers.read_record(str(record)) == ["dsv41-worker"]


def test_no_engine_is_no_container(capsys: t.Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_docker_api, "ENGINE_PROGRAMS", ())
    result = run(launcher_containers, capsys, names=NAMES, record=str(tmp_path / "r"), docker_socket=str(tmp_path / "none"))
    assert result["containers"] == [] and not result.get("failed")


GROUP = {"nodes": ["a", "b"], "deployment": "big"}
AGAIN = {"recorded": ["dsv41-exl3-head"]}


@pytest.mark.parametrize(
    ("a", "b", "hindrance"),
    [
        ({}, {}, ""),
        ({"__serve_stopped": {"tail": []}}, {"__serve_stopped": {"tail": ["last"]}}, ""),
        ({"__serve_stopped": {"tail": []}}, {"__serve_stopped": {"failed": True}}, "the new rank of b was not seen to stop"),
        ({}, {"__adopt_again": {"unreachable": True}}, "b did not answer"),
        ({}, {"__adopt_again": None, "__serve_stopped": {"unreachable": True}}, "b did not answer; the new rank of b was not seen to stop"),
    ],
    ids=["nothing was started", "all stopped", "one still runs", "one is away", "one is away and may run"],
)
def test_old_containers_come_back_only_for_a_whole_group(a: dict[str, t.Any], b: dict[str, t.Any], hindrance: str) -> None:
    hostvars = {"a": {"__adopt_again": AGAIN, **a}, "b": {"__adopt_again": AGAIN, **b}}
    assert filters.adopt_hindrance(hostvars, GROUP) == hindrance
    text = filters.adopt_failure(hostvars, GROUP, "a")
    assert text.startswith("a: the new group of big: ")
    if hindrance:
        assert f"dsv41-exl3-head stays stopped, because {hindrance}" in text and "adopt_restore=true" in text
    else:
        assert "dsv41-exl3-head was started again" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"stopped": 3}', "x"])
def test_a_broken_record_is_no_record(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "r"
    path.write_text(content, encoding="utf-8")
    assert launcher_containers.read_record(str(path)) == []


# -- compiled kernels ------------------------------------------------------------------------------------------------


@pytest.fixture(name="old")
def fixture_old(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("torch_compile/a", "triton/k/b", "tilelang/c", "nv/d/e"):
        path = tmp_path / "old" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    (tmp_path / "old" / "link").symlink_to("/etc/passwd")
    (tmp_path / "old" / "dangling").symlink_to("nowhere")
    return tmp_path / "old"


def test_folders_of_taken_kernels_belong_to_the_account(
    old: pathlib.Path, capsys: t.Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module runs as root for files that a container wrote; the account makes further folders beside them later."""
    owned = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: owned.append(os.path.relpath(path, tmp_path)))
    account = pwd.getpwuid(os.getuid()).pw_name
    run(launcher_caches, capsys, sources=[str(old)], target=str(tmp_path / "new"), user=account)
    assert sorted(owned) == ["new", "new/nv", "new/nv/d", "new/tilelang", "new/triton", "new/triton/k", "new/vllm", "new/vllm/torch_compile"]
    result = run(launcher_caches, capsys, sources=[str(old)], target=str(tmp_path / "other"), user="nobody-has-this-name")
    assert result["failed"] and "nobody-has-this-name" in result["msg"]


def test_kernels_are_linked_to_their_places(old: pathlib.Path, capsys: t.Any, tmp_path: pathlib.Path) -> None:
    arguments = {"sources": [str(old), str(tmp_path / "absent")], "target": str(tmp_path / "new")}
    predicted = run(launcher_caches, capsys, _ansible_check_mode=True, **arguments)
    assert (predicted["changed"], predicted["files"]) == (True, 4) and not (tmp_path / "new").exists()
    result = run(launcher_caches, capsys, **arguments)
    assert (result["changed"], result["files"], result["taken_from"]) == (True, 4, [str(old)])
    found = {str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert found == {"vllm/torch_compile/a", "triton/k/b", "tilelang/c", "nv/d/e"}
    assert os.path.samefile(old / "triton/k/b", tmp_path / "new/triton/k/b")
    assert run(launcher_caches, capsys, **arguments)["changed"] is False


def test_newer_kernels_stay(old: pathlib.Path, capsys: t.Any, tmp_path: pathlib.Path) -> None:
    own = tmp_path / "new" / "triton" / "k" / "b"
    own.parent.mkdir(parents=True)
    own.write_text("newer", encoding="utf-8")
    run(launcher_caches, capsys, sources=[str(old)], target=str(tmp_path / "new"))
    assert own.read_text(encoding="utf-8") == "newer"


def test_another_filesystem_is_copied(old: pathlib.Path, capsys: t.Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: t.Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    run(launcher_caches, capsys, sources=[str(old)], target=str(tmp_path / "new"))
    assert (tmp_path / "new/nv/d/e").read_text(encoding="utf-8") == "nv/d/e"
    assert not os.path.samefile(old / "nv/d/e", tmp_path / "new/nv/d/e")


def test_a_full_disk_is_a_failure_with_words(old: pathlib.Path, capsys: t.Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: t.Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher_caches, "take_over", full)
    result = run(launcher_caches, capsys, sources=[str(old)], target=str(tmp_path / "new"))
    assert result["failed"] and "No space left" in result["msg"]
