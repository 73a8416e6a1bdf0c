# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import io
import json
import os
import socket

import pytest

from ansible_collections.sparkops.inference.plugins.module_utils import _docker_api as docker_api
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import (
    ApiError,
    DockerApi,
    NoPermission,
    NotInstalled,
    NotRunning,
)
from ansible_collections.sparkops.inference.tests.unit.image.fake_docker import FakeDocker


def test_request_returns_status_and_parsed_answer() -> None:
    with FakeDocker({("GET", "/info"): {"Driver": "overlay2"}, ("GET", "/_ping"): b"OK"}) as fake:
        api = DockerApi(f"unix://{fake.socket_path}", timeout=5)
        assert api.request("GET", "/info") == (200, {"Driver": "overlay2"})
        assert api.request("GET", "/_ping") == (200, "OK")
        assert api.request("GET", "/nothing")[0] == 404


def test_query_and_body_are_encoded() -> None:
    with FakeDocker({("POST", "/containers/create"): (201, {"Id": "abc"})}) as fake:
        DockerApi(fake.socket_path).call("POST", "/containers/create", body={"Image": "a"}, query={"name": "x y", "all": True, "none": None})
        request = fake.requests[0]
    assert request["query"] == {"name": "x y", "all": "true"}
    assert json.loads(request["body"]) == {"Image": "a"}
    assert request["headers"]["Content-Type"] == "application/json"


def test_missing_image_and_container_are_none() -> None:
    with FakeDocker() as fake:
        api = DockerApi(fake.socket_path)
        assert api.inspect_image("example/image:tag@sha256:aa") is None
        assert api.inspect_container("x") is None
        assert fake.asked() == ["/images/example/image:tag@sha256:aa/json", "/containers/x/json"]


def test_error_status_raises_with_the_engine_message() -> None:
    with FakeDocker({("GET", "/images/x/json"): (500, {"message": "layer does not exist"})}) as fake:
        with pytest.raises(ApiError, match="layer does not exist") as error:
            DockerApi(fake.socket_path).inspect_image("x")
    assert error.value.status == 500


def test_stream_json_splits_lines() -> None:
    lines = b'{"status": "Pulling"}\r\n{"status": "Done"}\n\n{"error": "x"}'
    with FakeDocker({("POST", "/images/create"): lines}) as fake:
        assert list(DockerApi(fake.socket_path).stream_json("POST", "/images/create")) == [{"status": "Pulling"}, {"status": "Done"}, {"error": "x"}]


def test_stream_sends_a_file_and_raises_on_error() -> None:
    with FakeDocker({("POST", "/images/load"): lambda request: (200, request["body"])}) as fake:
        api = DockerApi(fake.socket_path)
        assert b"".join(api.stream("POST", "/images/load", body=io.BytesIO(b"x" * 70000))) == b"x" * 70000
        with pytest.raises(ApiError):
            list(api.stream("GET", "/images/none/get"))


def test_no_engine_at_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(docker_api, "ENGINE_PROGRAMS", (str(tmp_path / "dockerd"),))
    with pytest.raises(NotInstalled) as error:
        DockerApi(str(tmp_path / "none.sock")).info()
    assert error.value.state == "not_installed"


def test_installed_engine_without_socket(tmp_path, monkeypatch) -> None:
    program = tmp_path / "dockerd"
    program.write_text("")
    monkeypatch.setattr(docker_api, "ENGINE_PROGRAMS", (str(program),))
    with pytest.raises(NotRunning):
        DockerApi(str(tmp_path / "none.sock")).info()


def test_stale_socket_file(monkeypatch) -> None:
    with FakeDocker() as fake:
        stale = os.path.join(os.path.dirname(fake.socket_path), "stale.sock")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(stale)
        with pytest.raises(NotRunning):
            DockerApi(stale).info()


def test_no_permission(monkeypatch) -> None:
    def refuse(self: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(docker_api._UnixConnection, "connect", refuse)
    with pytest.raises(NoPermission) as error:
        DockerApi("/var/run/docker.sock").version()
    assert error.value.state == "no_permission"


def test_an_engine_that_hangs_is_not_running() -> None:
    folder = FakeDocker()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(folder.socket_path)
        server.listen(1)
        with pytest.raises(NotRunning, match="within 0.2 s"):
            DockerApi(folder.socket_path, timeout=0.2).info()
