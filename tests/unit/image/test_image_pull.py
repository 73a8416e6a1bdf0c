# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Registry answers and the module's paths, on a fake engine."""

from __future__ import annotations

import base64
import json
import os
import stat
import time

import pytest
import yaml
from ansible_collections.sparkops.inference.plugins.module_utils import _registry, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import from_inspect, parse_reference
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._registry import Login, RegistryError, ask, classify, stored_login
from ansible_collections.sparkops.inference.plugins.modules import image_pull
from fake_docker import FakeDocker
from image_documents import DIGEST, LAYERS, OTHER_DIGEST, document
from module_call import call

NAME = "registry.example/team/app"
TAGGED = f"{NAME}:1"
IMAGE = document(RepoTags=[TAGGED], RepoDigests=[f"{NAME}@{DIGEST}"])
DENIED = (500, {"message": 'Head "https://registry.example/v2/team/app/manifests/1": denied: requested access to the resource is denied'})


def offer(digest=DIGEST, *platforms):
    found = [{"os": name.partition("/")[0], "architecture": name.partition("/")[2]} for name in platforms or ("linux/arm64",)]
    return {"Descriptor": {"digest": digest, "mediaType": "application/vnd.oci.image.index.v1+json"}, "Platforms": found}


class Node:
    """A fake engine, and a state root."""

    def __init__(self, folder, engine):
        self.folder = folder
        self.engine = engine
        self.record = Record(str(folder / "state"))
        engine.routes[("GET", "/version")] = {"Version": "29.2.1", "ApiVersion": "1.52", "Arch": "arm64"}
        engine.routes[("GET", "/info")] = {"DockerRootDir": str(folder)}
        engine.routes[("GET", "/images/json")] = []
        engine.routes[("POST", "/images/create")] = self.pulled
        self.after_pull = IMAGE
        self.pull_answer = b"\n".join(
            [
                b'{"status": "Pulling from team/app", "id": "1"}',
                b'{"status": "Downloading", "id": "a", "progressDetail": {"current": 5, "total": 10}}',
                b'{"status": "Pull complete", "id": "a"}',
            ]
        )

    def has(self, inspected, *names):
        for name in names or (TAGGED, f"{NAME}@{DIGEST}"):
            self.engine.routes[("GET", f"/images/{name}/json")] = inspected
        self.engine.routes[("POST", f"/images/{inspected['Id']}/tag")] = self.tagged

    def tagged(self, request):
        self.has({**IMAGE, "RepoTags": [f"{request['query']['repo']}:{request['query']['tag']}"]})
        return 201, None

    def pulled(self, request):
        if self.after_pull is not None:
            wanted = request["query"]["tag"]
            self.has(self.after_pull, f"{NAME}@{wanted}" if wanted.startswith("sha256:") else f"{NAME}:{wanted}")
        return self.pull_answer

    def offers(self, answer, digest=None):
        self.engine.routes[("GET", f"/distribution/{NAME}@{digest}/json" if digest else f"/distribution/{TAGGED}/json")] = answer

    def run(self, **arguments):
        wanted = {
            "reference": TAGGED,
            "node": "spark-1",
            "deployment": "test",
            "state_dir": str(self.folder / "state/test"),
            "state_root": str(self.folder / "state"),
            "socket": self.engine.socket_path,
            "probe_timeout": 5,
            **arguments,
        }
        return call(image_pull, **wanted)

    def pulls(self):
        return [request["query"] for request in self.engine.requests if request["path"] == "/images/create"]


@pytest.fixture
def node(tmp_path, monkeypatch):
    # Without systemd the job is a process of its own: the same code as in the unit.
    monkeypatch.setattr(_unit, "available", lambda module: False)
    monkeypatch.setattr(_unit, "state", lambda module, name: _unit.Unit(False, "", 0))
    (tmp_path / "state").mkdir()
    with FakeDocker() as engine:
        yield Node(tmp_path, engine)


# What the registry says


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("manifest unknown: manifest unknown", "missing"),
        ("manifest for registry.example/team/app:9 not found: manifest unknown", "missing"),
        ("denied: requested access to the resource is denied", "denied"),
        ('Head "http://198.51.100.1:5001/v2/team/app/manifests/1": no basic auth credentials', "denied"),
        ("unauthorized: authentication required", "denied"),
        ("pull access denied for app, repository does not exist or may require 'docker login'", "denied"),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", "platform"),
        ("image with reference app was found but does not match the specified platform: wanted linux/arm64, actual: linux/amd64", "platform"),
        ("failed to register layer: write /x: no space left on device", "space"),
        ('Get "https://registry.example/v2/": x509: certificate signed by unknown authority', "certificate"),
        ("http: server gave HTTP response to HTTPS client", "certificate"),
        ("toomanyrequests: You have reached your pull rate limit", "limit"),
        ('Get "https://registry.example/v2/": dial tcp: lookup registry.example: no such host', "unreachable"),
        ('Get "https://198.51.100.9/v2/": dial tcp 198.51.100.9:443: connect: network is unreachable', "unreachable"),
        ("net/http: request canceled while waiting for connection (Client.Timeout exceeded)", "unreachable"),
        ("unexpected status code 502 Bad Gateway", "unreachable"),
        ("something else", "other"),
    ],
)
def test_texts_of_engine_and_registry(text, kind):
    assert classify(text) == kind


@pytest.mark.parametrize(
    ("auths", "registry", "user"),
    [
        ({"registry.example": {"auth": base64.b64encode(b"me:secret:with colon").decode()}}, "registry.example", "me"),
        ({"https://index.docker.io/v1/": {"auth": base64.b64encode(b"me:x").decode()}}, "docker.io", "me"),
        ({"https://registry.example": {"auth": base64.b64encode(b"me:x").decode()}}, "registry.example", "me"),
        ({"registry.example": {}}, "registry.example", None),
        ({"other.example": {"auth": base64.b64encode(b"me:x").decode()}}, "registry.example", None),
        ({"registry.example": {"auth": "no base64"}}, "registry.example", None),
    ],
)
def test_stored_logins(tmp_path, auths, registry, user):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auths": auths}))
    login = stored_login(str(path), registry)
    assert (login.username if login else None) == user


def test_no_stored_login_without_a_file(tmp_path):
    assert stored_login(str(tmp_path / "none"), "registry.example") is None


def test_a_login_is_not_shown():
    assert "secret" not in repr(Login("me", "secret", "x"))


def test_asking_sends_the_login_in_a_header_and_normalises_platforms():
    with FakeDocker({("GET", f"/distribution/{TAGGED}/json"): offer(DIGEST, "linux/x86_64", "linux/arm64")}) as engine:
        found = ask(DockerApi(engine.socket_path), parse_reference(TAGGED), TAGGED, Login("me", "secret", "x"))
        header = engine.requests[0]["headers"]["X-Registry-Auth"]
    assert found == (DIGEST, ("linux/amd64", "linux/arm64")) or (found.digest, found.platforms) == (DIGEST, ("linux/amd64", "linux/arm64"))
    assert json.loads(base64.urlsafe_b64decode(header)) == {"username": "me", "password": "secret", "serveraddress": "registry.example"}


def test_a_login_at_docker_hub_names_it_as_the_engines_do():
    header = Login("me", "secret", "x").header(parse_reference("docker.io/team/app:1").registry)["X-Registry-Auth"]
    assert json.loads(base64.urlsafe_b64decode(header))["serveraddress"] == "https://index.docker.io/v1/"


def test_a_pull_that_fails_in_its_stream_is_an_error(tmp_path):
    progress = _unit.Progress(str(tmp_path / "p.json"))
    with FakeDocker({("POST", "/images/create"): b'{"status": "x"}\n{"error": "manifest unknown"}'}) as engine, pytest.raises(RegistryError) as error:
        _registry.pull(DockerApi(engine.socket_path), parse_reference(TAGGED), "1", None, None, progress)
    assert error.value.kind == "missing"


def test_a_registry_that_falls_silent_does_not_hold_the_pull(tmp_path, monkeypatch):
    monkeypatch.setattr(_registry, "SILENCE", 0.2)
    with FakeDocker({("POST", "/images/create"): lambda request: time.sleep(1)}) as engine:
        with pytest.raises(RegistryError, match="sent nothing for 0 s") as caught:
            _registry.pull(DockerApi(engine.socket_path), parse_reference(TAGGED), "1", None, None, _unit.Progress(str(tmp_path / "p")))
    assert caught.value.kind == "unreachable"


def test_progress_of_layers():
    layers = {}
    for event in (
        {"status": "Pulling fs layer", "id": "a"},
        {"status": "Downloading", "id": "a", "progressDetail": {"current": 5, "total": 10}},
        {"status": "Downloading", "id": "b", "progressDetail": {"current": 1, "total": 4}},
        {"status": "Download complete", "id": "a"},
        {"status": "Extracting", "id": "a", "progressDetail": {"current": 1, "total": 30}},
        {"status": "Already exists", "id": "c"},
    ):
        _registry.note_layer(layers, event)
    assert layers == {"a": (10, 10), "b": (1, 4)}


# What is there, and what to do


@pytest.mark.parametrize(
    ("present", "pinned", "policy", "action"),
    [
        (True, True, "missing", "use"),
        (True, False, "missing", "use"),
        (False, True, "missing", "pull"),
        (False, False, "missing", "pull"),
        (True, True, "always", "use"),
        (True, False, "always", "ask"),
        (False, False, "always", "pull"),
        (True, False, "never", "use"),
        (False, True, "never", "lack"),
    ],
)
def test_policies(present, pinned, policy, action):
    assert image_pull.needs(present, pinned, policy) == action


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("digest", [None, DIGEST])
def test_an_image_that_is_there_is_used_without_asking_the_registry(node, check, digest):
    node.has(IMAGE)
    result = node.run(digest=digest, check=check)
    assert (result["changed"], result["image"]["present"], result["image"]["digest"]) == (False, True, DIGEST)
    assert result["ansible_facts"]["spark_image"]["identity"].startswith("sha256:")
    assert not [path for path in node.engine.asked() if path.startswith("/distribution")]
    assert node.engine.asked("POST") == []


@pytest.mark.parametrize("there", [False, True])
def test_whose_the_image_is_is_noted_where_it_is_staged_and_not_where_it_is_looked_at(node, there):
    staged = node.folder / "state/test/staged.json"
    node.offers(offer())
    if there:
        node.has(IMAGE)
    node.run(staged=True, check=True)
    if there:
        node.run()
    assert not staged.exists()
    node.run(staged=True)
    assert json.loads(staged.read_text())["image"] == IMAGE["Id"]


@pytest.mark.parametrize("digest", [None, DIGEST])
def test_a_missing_image_is_pulled_as_predicted_and_then_left_alone(node, digest):
    node.offers(offer(), digest)
    node.after_pull = document(IMAGE, RepoTags=[]) if digest else IMAGE
    predicted = node.run(digest=digest, check=True)
    assert predicted["changed"] and predicted["known_after"] == ["image"] and node.engine.asked("POST") == []
    done = node.run(digest=digest)
    assert done["changed"] and done["image"]["present"] and done["image"]["platform"] == "linux/arm64", done
    assert node.pulls() == [{"fromImage": NAME, "tag": digest or "1", "platform": "linux/arm64"}]
    assert not node.run(digest=digest, check=True)["changed"]
    assert not node.run(digest=digest)["changed"]


def test_an_image_pulled_by_digest_gets_the_tag(node):
    node.offers(offer(), DIGEST)
    node.after_pull = document(IMAGE, RepoTags=[])
    node.run(digest=DIGEST)
    assert f"/images/{IMAGE['Id']}/tag" in node.engine.asked("POST")


def test_a_moved_tag_does_not_change_a_pinned_deployment(node):
    """The tag here is another image now; the pinned one is there too."""
    node.has(document(IMAGE, Id="sha256:9", RepoDigests=[f"{NAME}@{OTHER_DIGEST}"]), TAGGED)
    node.has(IMAGE, f"{NAME}@{DIGEST}")
    result = node.run(digest=DIGEST, policy="always")
    assert result["image"]["id"] == IMAGE["Id"] and node.pulls() == []


@pytest.mark.parametrize(("digest", "changed"), [(DIGEST, False), (OTHER_DIGEST, True)])
def test_always_follows_a_tag_that_has_moved(node, digest, changed):
    node.has(IMAGE)
    node.offers(offer(digest))
    node.after_pull = document(IMAGE, Id="sha256:" + "7" * 64, RepoDigests=[f"{NAME}@{OTHER_DIGEST}"])
    predicted = node.run(policy="always", check=True)
    assert predicted["changed"] is changed and predicted["image"].get("replaces") == (from_inspect(IMAGE).identity if changed else None)
    result = node.run(policy="always")
    assert result["changed"] is changed and result["image"]["digest"] == digest
    assert not node.run(policy="always")["changed"]


def test_a_shipped_image_is_known_by_the_recorded_digest(node):
    node.has(document(IMAGE, RepoDigests=[]), TAGGED)
    node.record.note(IMAGE["Id"], [DIGEST])
    assert node.run(digest=DIGEST) | {"changed": False, "pull_error": {}} == node.run(digest=DIGEST)
    assert node.pulls() == []


def test_another_platform_is_refused_before_anything_is_transferred(node):
    node.offers(offer(DIGEST, "linux/amd64", "linux/s390x"))
    for required in (True, False):
        result = node.run(required=required)
        assert result["rc"] == 1 and "linux/amd64, linux/s390x" in result["msg"] and "image.platform" in result["msg"]
    assert node.pulls() == []


def test_what_the_head_may_build_is_not_refused_for_its_platform(node):
    node.offers(offer(DIGEST, "linux/amd64"))
    done = node.run(required=False, buildable=True)
    assert (done["changed"], done["image"], done["pull_error"]["kind"]) == (False, {"present": False}, "platform")
    assert "linux/amd64" in done["pull_error"]["text"] and node.pulls() == []


def test_an_image_of_another_platform_here_does_not_count(node):
    node.has(document(IMAGE, Architecture="amd64"))
    node.offers(offer(DIGEST, "linux/amd64"))
    assert "image.platform" in node.run()["msg"]
    # Without asking a registry, too, it is told what is here.
    told = node.run(policy="never")["msg"]
    assert "image.policy" in told and "for linux/arm64" in told and f"{TAGGED} is for linux/amd64, digest {DIGEST}" in told


@pytest.mark.parametrize("required", [True, False])
def test_a_tag_that_does_not_exist_is_a_failure_and_not_done(node, required):
    node.offers((404, {"message": "manifest unknown: manifest unknown"}))
    result = node.run(required=required)
    if required:
        assert result["rc"] == 1 and "image.missing" in result["msg"] and result["refusals"][0]["node"] == "spark-1"
    else:
        assert result["pull_error"]["kind"] == "missing" and not result["image"]["present"] and not result["changed"]


def test_a_pull_that_ends_well_without_an_image_is_a_failure(node):
    node.offers(offer())
    node.after_pull = None
    assert "the image is not there" in node.run()["msg"]


def test_a_pull_of_another_image_that_was_going_on_is_not_taken_for_the_wanted_one(node, monkeypatch):
    node.offers(offer())
    job = node.folder / "state/test/jobs/pull"
    job.mkdir(parents=True)
    earlier = {"run_id": "1", "reference": f"{NAME}:0", "wanted": "0"}
    (job / "request.json").write_text(json.dumps(earlier))
    (job / "result.json").write_text(json.dumps({"run_id": "1", "ok": True, "pull_error": {}}))
    result = node.run(run_id="1")
    assert result["image"]["id"] == IMAGE["Id"] and [pull["tag"] for pull in node.pulls()] == ["1"]


def test_an_error_of_the_pull_is_the_answer(node):
    node.offers(offer())
    node.after_pull = None
    node.pull_answer = b'{"error": "failed to register layer: no space left on device"}'
    assert "image.space" in node.run()["msg"]
    assert node.run(required=False)["pull_error"]["kind"] == "space"


def test_policy_never(node):
    result = node.run(policy="never")
    assert result["rc"] == 1 and "image_pull_policy=missing" in result["msg"] and node.engine.asked("POST") == []
    assert node.run(policy="never", required=False)["pull_error"]["kind"] == "policy"


def test_a_refusal_names_the_option_that_would_build(node):
    node.offers((404, {"message": "manifest unknown: manifest unknown"}))
    for policy in ("missing", "never"):
        assert "image_build=when_unavailable" in node.run(policy=policy)["msg"]


def test_an_upgrade_that_cannot_be_had_leaves_what_is_there(node):
    """A worker without registry has the image all the same: it may be the head's, and nothing has to be shipped."""
    node.has(IMAGE)
    node.offers((500, {"message": "dial tcp 198.51.100.1:5000: connect: connection refused"}))
    result = node.run(policy="always", required=False)
    assert result["image"]["present"] and result["image"]["id"] == IMAGE["Id"] and result["image"]["unasked"] and not result["changed"]
    assert result["pull_error"]["kind"] == "unreachable" and "what is here counts" in result["notices"][0]
    assert "image.unreachable" in node.run(policy="always")["msg"], "who has to have the newest is told"


def test_a_first_pull_needs_room(node, monkeypatch):
    node.offers(offer())
    result = node.run(size=1 << 60)
    assert "image.space" in result["msg"] and str(1 << 60) in result["msg"] and node.pulls() == []
    node.engine.routes[("GET", "/images/json")] = [{"Id": "another version"}]
    assert node.run(size=1 << 60)["changed"]


def test_too_many_layers_are_refused(node):
    node.has(document(IMAGE, RootFS={"Layers": [f"sha256:{number:064}" for number in range(124)]}))
    assert "124 layers" in node.run()["msg"]
    node.has(document(IMAGE, RootFS={"Layers": [f"sha256:{number:064}" for number in range(123)]}))
    assert node.run()["image"]["present"]


# Logins


def denies_logins(node, anonymous=None):
    node.engine.routes[("GET", f"/distribution/{TAGGED}/json")] = lambda request: DENIED if "X-Registry-Auth" in request["headers"] else (anonymous or offer())


def test_a_stale_stored_login_is_named_and_the_public_image_pulled_without_it(node):
    denies_logins(node)
    config = node.folder / "config.json"
    config.write_text(json.dumps({"auths": {"registry.example": {"auth": base64.b64encode(b"me:expired").decode()}}}))
    result = node.run(login_file=str(config))
    assert result["image"]["present"] and "docker logout registry.example" in result["notices"][0]
    assert [request for request in node.engine.requests if request["path"] == "/images/create"][0]["headers"].get("X-Registry-Auth") is None
    assert "expired" not in json.dumps(result)
    # A pull takes longer than one slice, and the last one is what the user sees.
    begun = json.loads((node.folder / "state/test/jobs/pull/request.json").read_text())
    assert node.run(login_file=str(config), run_id=begun["run_id"])["notices"] == result["notices"]


def test_a_wrong_given_login_for_a_public_image_is_refused_with_the_reason(node):
    denies_logins(node)
    result = node.run(username="me", password="hunter2 hunter2")
    assert "image.login" in result["msg"] and "gives registry.example/team/app:1 to anybody" in result["msg"]
    assert "hunter2" not in json.dumps(result)


def test_denied_with_and_without_login(node):
    denies_logins(node, anonymous=DENIED)
    assert "image.denied" in node.run(username="me", password="hunter2 hunter2")["msg"]
    node.offers(DENIED)
    assert "image.denied" in node.run()["msg"]


def test_a_given_login_goes_with_the_pull_and_lies_nowhere(node):
    node.offers(offer())
    result = node.run(username="me", password="hunter2 hunter2")
    pull = [request for request in node.engine.requests if request["path"] == "/images/create"][0]
    assert json.loads(base64.urlsafe_b64decode(pull["headers"]["X-Registry-Auth"]))["password"] == "hunter2 hunter2"
    assert result["image"]["present"]
    for folder, dummy, names in os.walk(node.folder):
        for name in names:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as stream:
                assert "hunter2" not in stream.read(), name


# The head, and check mode before there is a Docker


def test_the_head_records_what_peers_may_have(node):
    node.has(IMAGE)
    arguments = {"shared": True, "staging": "/data/ship"}
    assert node.run(**arguments, check=True)["changed"]
    assert not os.path.exists(node.record.path)
    assert node.run(**arguments)["changed"]
    content = node.record.read()
    assert content["source"] == {"staging": "/data/ship", "socket": node.engine.socket_path} and content["images"][IMAGE["Id"]]["digests"] == [DIGEST]
    assert not node.run(**arguments, check=True)["changed"] and not node.run(**arguments)["changed"]
    assert stat.S_IMODE(os.stat(node.record.path).st_mode) == 0o644


def test_check_mode_without_docker_predicts(node):
    result = node.run(check=True, socket=str(node.folder / "none.sock"))
    assert result["changed"] and result["known_after"] == ["bootstrap"]
    failed = node.run(socket=str(node.folder / "none.sock"))
    assert failed["rc"] == 1 and "image.engine" in failed["msg"]


def test_a_reference_that_is_none(node):
    assert "image.reference" in node.run(reference="https://registry.example/app")["msg"]


def test_every_kind_of_failure_is_in_the_catalogue():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    with open(os.path.join(root, "docs/refusals/image.yml"), encoding="utf-8") as stream:
        listed = {entry["id"] for entry in yaml.safe_load(stream)}
    assert {f"image.{kind}" for kind in image_pull.NEXT_STEPS} <= listed
    assert {kind for kind, dummy in _registry._KINDS} | {"other", "policy"} == set(image_pull.NEXT_STEPS)


def test_layers_of_the_result_are_those_of_the_engine(node):
    node.has(IMAGE)
    assert node.run()["image"]["layers"] == LAYERS
