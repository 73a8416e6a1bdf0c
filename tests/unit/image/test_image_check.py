# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ansible_collections.sparkops.inference.plugins.filter.image import image_differs, image_refusals
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.modules import image_check
from fake_docker import FakeDocker
from image_documents import CONTAINERD, OVERLAY2
from module_call import call

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
COMMANDS = [["python3", "/opt/test_one.py"], ["python3", "/opt/test_two.py"]]
NAME = "sparkops-check-test"
FORCED = "sparkops-selftest-test"
# The log's driver is named: an engine may keep no logs by default.
HOST = {"NetworkMode": "none", "Mounts": [], "LogConfig": {"Type": "json-file"}}


def part(text, stream=1):
    return bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text


class Node:
    """An engine whose containers end at once with the given codes."""

    def __init__(self, folder, engine):
        self.folder, self.engine = folder, engine
        self.record = Record(str(folder))
        self.created = []
        self.codes = [0, 0]
        engine.routes.update(
            {
                ("GET", f"/images/{OVERLAY2['Id']}/json"): OVERLAY2,
                ("POST", "/containers/create"): self.create,
            }
        )
        for name in (NAME, FORCED):
            engine.routes.update(
                {
                    ("POST", f"/containers/{name}/start"): (204, None),
                    ("GET", f"/containers/{name}/json"): lambda request: {"State": {"Status": "exited", "ExitCode": self.codes[(len(self.created) - 1) % 2]}},
                    ("GET", f"/containers/{name}/logs"): lambda request: part(b"out\n") + part(b"err\n", 2),
                    ("DELETE", f"/containers/{name}"): (204, None),
                }
            )

    def create(self, request):
        self.created.append(json.loads(request["body"]))
        return 201, {"Id": "abc"}

    def arguments(self, **arguments):
        return {
            "image": OVERLAY2["Id"],
            "commands": COMMANDS,
            "environment": {"EXL3_SELFCHECK_GPU": "1"},
            "gpus": "all",
            "node": "spark-2",
            "deployment": "test",
            "state_dir": str(self.folder / "test"),
            "state_root": str(self.folder),
            "socket": self.engine.socket_path,
            **arguments,
        }

    def run(self, **arguments):
        return call(image_check, **self.arguments(**arguments))


@pytest.fixture
def node(tmp_path):
    with FakeDocker() as engine:
        yield Node(tmp_path, engine)


def test_an_image_is_proven_once_for_each_node_and_set_of_checks(node):
    assert node.run(check=True) | {"changed": True, "proven": False} == node.run(check=True) and node.created == []
    result = node.run()
    assert result["changed"] and result["proven"] and len(node.created) == 2
    with open(result["log"], encoding="utf-8") as stream:
        assert stream.read() == "".join(f"$ python3 /opt/test_{name}.py\nout\nerr\n[ended with 0]\n" for name in ("one", "two"))
    assert not node.run()["changed"] and not node.run(check=True)["changed"]
    assert node.run(commands=COMMANDS[:1])["changed"]
    assert not node.run()["changed"], "the first proof still holds"
    assert {request["path"].split("/")[-2] for request in node.engine.requests if request["path"].endswith("/start")} == {NAME}
    # Under a name of its own: tag selftest may run beside a start.
    assert node.run(force=True)["changed"] and f"/{FORCED}/start" in str(node.engine.requests[-5:])


def test_the_container_is_thrown_away_and_has_no_network(node):
    node.run()
    specification = node.created[0]
    assert specification["Entrypoint"] == ["python3"] and specification["Cmd"] == ["/opt/test_one.py"] and specification["Env"] == ["EXL3_SELFCHECK_GPU=1"]
    assert specification["HostConfig"] == {**HOST, "DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]}
    assert node.engine.requests[-1]["method"] == "DELETE"


def test_without_gpu_no_device_is_asked_for(node):
    node.run(gpus="", mounts=["/models/x:/source"])
    # Not as a bind of the short form, for which the engine makes a directory where there is none.
    mount = {"Type": "bind", "Source": "/models/x", "Target": "/source", "ReadOnly": True}
    assert node.created[0]["HostConfig"] == {**HOST, "Mounts": [mount]}


def test_a_failure_ends_the_checks_and_names_its_log(node):
    node.codes = [3, 0]
    result = node.run()
    assert result["rc"] == 1 and "test_one.py ended with 3" in result["msg"] and "err" in result["msg"] and "image-check-" in result["msg"]
    assert len(node.created) == 1
    assert not Record(str(node.folder)).of(OVERLAY2["Id"]).get("proven")


def test_a_command_that_never_ends(node):
    node.engine.routes[("GET", f"/containers/{NAME}/json")] = {"State": {"Status": "running"}}
    assert "no result after 1 s" in node.run(timeout=1)["msg"]
    assert node.engine.requests[-1]["method"] == "DELETE"


def test_a_container_that_somebody_removes_is_a_failure_with_a_reason(node):
    node.engine.routes[("GET", f"/containers/{NAME}/json")] = (404, {"message": "No such container"})
    assert "no result: its container was removed" in node.run()["msg"]


def test_no_image_is_a_prediction_in_check_mode_and_a_failure_else(node):
    assert node.run(image="none", check=True)["known_after"] == ["image"]
    assert "image.check" in node.run(image="none")["msg"]
    assert node.run(socket="/none", check=True)["known_after"] == ["bootstrap"]


def test_logs_do_not_pile_up(node):
    folder = node.folder / "test/logs"
    folder.mkdir(parents=True)
    for number in range(15):
        (folder / f"image-check-2026010{number:02}.log").write_text("")
    node.run()
    assert len(list(folder.glob("image-check-*.log"))) == image_check.KEPT_LOGS


def test_the_deployments_directory_is_made_by_the_account_and_not_by_root(node, monkeypatch):
    folder, steps = node.folder / "test/logs", []

    @contextlib.contextmanager
    def identity_at(user, path):
        steps.append((user, path, folder.exists()))
        yield
        steps.append((user, path, folder.exists()))

    monkeypatch.setattr(image_check, "identity_at", identity_at)
    assert node.run(user="me")["proven"]
    place = str(node.folder / "test")
    assert steps == [("me", place, False), ("me", place, True)]


RUN = """
import json, sys
from ansible_collections.sparkops.inference.plugins.modules import image_check
from module_call import call
print(call(image_check, **json.loads(sys.argv[1]))["msg"])
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_check_whose_session_ends_takes_its_container_along(node, number):
    """A job that is cancelled, or a link that drops: nobody would end a container that uses the GPU, and a model would be served beside it."""
    node.engine.routes[("GET", f"/containers/{NAME}/json")] = {"State": {"Status": "running"}}
    arguments = json.dumps(node.arguments())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", RUN, arguments], env=environment, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while f"/containers/{NAME}/json" not in node.engine.asked("GET") and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        told = process.communicate(timeout=60)[0]
    assert node.engine.requests[-1]["method"] == "DELETE" and "the run was ended" in told
    assert not node.record.read()["images"], "nothing was proven"


def test_log_parts_may_be_cut_anywhere():
    data = part(b"one\n") + part(b"", 2) + part(b"two\n", 2)
    assert b"".join(image_check.demultiplexed([data[index : index + 3] for index in range(0, len(data), 3)])) == b"one\ntwo\n"


# Programs that run inside the image


def run_program(name, *arguments, **environment):
    command = [sys.executable, os.path.join(ROOT, "roles/image/files", name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_selftest_runs_all_tests_and_names_the_failed_ones(tmp_path):
    (tmp_path / "test_a.py").write_text("print('fine')")
    (tmp_path / "test_b.py").write_text("raise SystemExit(3)")
    (tmp_path / "other.py").write_text("raise SystemExit(9)")
    result = run_program("image_selftest.py", str(tmp_path))
    assert result.returncode == 1 and "fine" in result.stdout and "test_b.py: ended with 3" in result.stdout and "2 tests" in result.stdout
    (tmp_path / "test_b.py").unlink()
    assert run_program("image_selftest.py", str(tmp_path)).returncode == 0
    (tmp_path / "test_a.py").unlink()
    assert run_program("image_selftest.py", str(tmp_path)).returncode == 1, "no test at all proves nothing"


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}", 0),
        ("{{ messages[0].content }}", 1),
    ],
)
@pytest.mark.parametrize("place", ["jinja", "config"])
def test_template_parity(tmp_path, template, code, place):
    pytest.importorskip("jinja2")
    own = "{%- for m in messages -%}<{{ m['role'] }}>{{ m['content'] }}{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, **({"chat_template": own} if place == "config" else {})}))
    if place == "jinja":
        (source / "chat_template.jinja").write_text(own)
    (tmp_path / "image.jinja").write_text(template)
    result = run_program("image_template_parity.py", str(tmp_path / "image.jinja"), str(source))
    assert result.returncode == code, result.stderr
    assert ("different" in result.stdout) and (("-" in result.stdout) is bool(code))
    # One that is mounted stands instead of what the image has there.
    mounted = run_program("image_template_parity.py", "/none", str(source), SPARKOPS_CHAT_TEMPLATE=template)
    assert (mounted.returncode, mounted.stdout) == (code, result.stdout)


@pytest.mark.parametrize("missing", ["template", "source"])
def test_a_template_that_is_not_there_is_named(tmp_path, missing):
    (tmp_path / "chat_template.jinja").write_text("x")
    paths = {"template": str(tmp_path / "chat_template.jinja"), "source": str(tmp_path), missing: str(tmp_path / "none")}
    result = run_program("image_template_parity.py", paths["template"], paths["source"])
    assert result.returncode == 1 and "/none" in result.stderr and "No such file or directory: nothing to compare" in result.stderr
    assert "Traceback" not in result.stderr


# What the ranks say


def described(document, recorded=()):
    from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import from_inspect

    return from_inspect(document, recorded).as_dict()


HEAD = described(OVERLAY2)
PLAN = {"nodes": ["spark-1", "spark-2", "spark-3"], "head": "spark-1", "image": {"reference": "app:1"}}


@pytest.mark.parametrize(
    ("own", "head", "differs"),
    [
        ({"present": False}, HEAD, True),
        (described(CONTAINERD), HEAD, False),
        ({**HEAD, "id": "sha256:2", "digests": [], "layers": ["x"], "identity": "y"}, HEAD, True),
        ({"present": True}, HEAD, False),
        (HEAD, {"present": True}, False),
        ({**HEAD, "unasked": True}, {"present": True}, True),
        ({**HEAD, "unasked": True}, HEAD, False),
        ({"present": False}, {"present": True}, True),
        # The head is going to build one that nobody has yet, whatever this rank has or pulls.
        (HEAD, {"present": True, "built": True}, True),
        ({"present": True}, {"present": True, "built": True}, True),
        (HEAD, {"present": True, "built": False}, False),
        # The head alone may ask the registry, and is going to follow the tag; this rank has what the head had, or the new one.
        (HEAD, {"present": True, "replaces": HEAD["identity"]}, True),
        (HEAD, {"present": True, "replaces": "sha256:8"}, False),
        ({"present": True}, {"present": True, "replaces": HEAD["identity"]}, False),
    ],
)
def test_who_has_to_get_the_image(own, head, differs):
    assert image_differs(own, head) is differs


def hostvars(**images):
    return {name.replace("_", "-"): {"spark_image": image, "__image_pull": {}} for name, image in images.items() if image is not None}


def test_ranks_that_agree_are_let_through():
    assert image_refusals(hostvars(spark_1=HEAD, spark_2=described(CONTAINERD), spark_3=HEAD), PLAN) == ""


def test_all_ranks_that_differ_are_named_at_once():
    text = image_refusals(hostvars(spark_1=HEAD, spark_2={"present": False}, spark_3={**HEAD, "identity": "sha256:9"}), PLAN)
    assert text.startswith("2 problems") and "spark-2: image app:1: found no image" in text and "spark-3: image app:1: found sha256:9" in text


def test_a_limit_that_hides_ranks_is_refused():
    assert "nothing known of spark-2, spark-3" in image_refusals(hostvars(spark_1=HEAD), PLAN) and "[image.ranks]" in image_refusals({}, PLAN)


def test_what_a_fact_cache_remembers_of_an_image_is_not_what_a_rank_has_now():
    ranks = hostvars(spark_1=HEAD, spark_2=HEAD, spark_3=HEAD)
    del ranks["spark-2"]["__image_pull"]
    assert "nothing known of spark-2" in image_refusals(ranks, PLAN)


def test_a_head_without_image_tells_why():
    ranks = hostvars(spark_1={"present": False}, spark_2={"present": False}, spark_3={"present": False})
    ranks["spark-1"]["__image_pull"] = {"pull_error": {"kind": "unreachable", "text": "no route"}}
    assert "spark-1: image app:1: found no route" in image_refusals(ranks, PLAN) and "[image.unreachable]" in image_refusals(ranks, PLAN)


def test_predictions_of_check_mode_do_not_disagree():
    predicted = {"present": True, "reference": "app:1"}
    assert image_refusals(hostvars(spark_1=predicted, spark_2=HEAD, spark_3=predicted), PLAN) == ""
