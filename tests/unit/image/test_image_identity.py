# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


import pytest
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import (
    compare,
    from_inspect,
    normal_architecture,
    parse_reference,
    present_prefix,
)
from image_documents import CONTAINERD, DIGEST, LAYERS, OTHER_DIGEST, OVERLAY2, document

ABSENT = {"present": False}
LOADED = document(RepoDigests=[])
OTHER_LAYERS = document(Id="sha256:" + "5" * 64, RepoDigests=[], RootFS={"Layers": [LAYERS[0], "sha256:" + "3" * 64]})


def described(inspected, recorded=()):
    return from_inspect(inspected, recorded).as_dict()


# Case R10 of the field problems, 1 to 7, then what the stores and registries add to it.
@pytest.mark.parametrize(
    ("target", "same", "reason"),
    [
        pytest.param(described(document(Id="sha256:" + "2" * 64)), True, "digest", id="1-same-digest-other-id"),
        pytest.param(described(document(Id="sha256:" + "2" * 64, RepoDigests=[])), True, "content", id="2-loaded-same-layers"),
        pytest.param(described(document(Id="sha256:" + "2" * 64, RepoDigests=[]), [DIGEST]), True, "digest", id="3-recorded-source-digest"),
        pytest.param(described(document(Id="sha256:" + "2" * 64, RepoDigests=[f"app@{OTHER_DIGEST}"])), False, "digest", id="4-same-tag-other-digest"),
        pytest.param(described(OTHER_LAYERS), False, "layers", id="5-other-layers"),
        pytest.param(described(document(Id="sha256:" + "2" * 64, Architecture="amd64")), False, "platform", id="6-amd64"),
        pytest.param(ABSENT, False, "absent", id="7-absent"),
        pytest.param(described(CONTAINERD), True, "digest", id="other-store"),
        pytest.param(described(document(CONTAINERD, RepoDigests=[])), True, "content", id="other-store-loaded"),
        pytest.param(described(document(Id="sha256:" + "2" * 64, RepoDigests=[], config={"Env": ["A=1"]})), False, "config", id="other-environment"),
        pytest.param(described(document(Id="sha256:" + "2" * 64, RepoDigests=[], config={"Entrypoint": ["bash"]})), False, "config", id="other-entrypoint"),
        pytest.param(described(document(RepoDigests=[f"app@{OTHER_DIGEST}"])), True, "id", id="index-and-platform-digest-of-one-image"),
    ],
)
def test_same_image_or_not(target, same, reason):
    assert compare(described(OVERLAY2), target) == (same, reason)


def test_after_a_transfer_the_recorded_digest_ends_the_argument():
    """Case 4 with equal content: one transfer, which moves no layer, and never again."""
    other = document(Id="sha256:" + "2" * 64, RepoDigests=[f"app@{OTHER_DIGEST}"])
    assert not compare(described(OVERLAY2), described(other)).same
    assert compare(described(OVERLAY2), described(other, [DIGEST])).same


@pytest.mark.parametrize("field", ["Env", "Entrypoint", "Cmd", "WorkingDir", "User"])
def test_every_part_that_changes_a_container_is_in_the_identity(field):
    value = "x" if field in ("WorkingDir", "User") else ["x"]
    assert from_inspect(document(config={field: value})).identity != from_inspect(OVERLAY2).identity


@pytest.mark.parametrize("nothing", [{"Cmd": []}, {"User": ""}, {"OnBuild": None}, {"Labels": {"other": "label"}}])
def test_what_changes_no_container_is_not(nothing):
    assert from_inspect(document(config=nothing)).identity == from_inspect(OVERLAY2).identity


def test_names_of_architectures():
    assert [normal_architecture(name) for name in ("aarch64", "x86_64", "arm64", "riscv64")] == ["arm64", "amd64", "arm64", "riscv64"]


@pytest.mark.parametrize(
    ("text", "name", "tag", "digest", "registry"),
    [
        ("vllm/vllm-openai:x", "vllm/vllm-openai", "x", None, "docker.io"),
        ("docker.io/library/debian", "debian", None, None, "docker.io"),
        ("library/debian:13", "debian", "13", None, "docker.io"),
        ("docker.io/vllm/vllm-openai:x", "vllm/vllm-openai", "x", None, "docker.io"),
        ("192.0.2.1:5000/team/app:1", "192.0.2.1:5000/team/app", "1", None, "192.0.2.1:5000"),
        ("localhost/app:1", "localhost/app", "1", None, "localhost"),
        ("[2001:db8::1]:5000/team/app:1", "[2001:db8::1]:5000/team/app", "1", None, "[2001:db8::1]:5000"),
        ("[2001:db8::1]/team/app:1", "[2001:db8::1]/team/app", "1", None, "[2001:db8::1]"),
        (f"registry.example/team/app@{DIGEST}", "registry.example/team/app", None, DIGEST, "registry.example"),
        (f"registry.example:5000/app:2.9bpw@{DIGEST}", "registry.example:5000/app", "2.9bpw", DIGEST, "registry.example:5000"),
    ],
)
def test_references(text, name, tag, digest, registry):
    reference = parse_reference(text)
    assert (reference.name, reference.tag, reference.digest, reference.registry) == (name, tag, digest, registry)


@pytest.mark.parametrize("text", ["", "App:1", "app:", "app@sha256:12", "a b", "app:1@latest", "https://registry.example/app"])
def test_what_is_no_reference(text):
    with pytest.raises(ValueError):
        parse_reference(text)


@pytest.mark.parametrize(
    ("held", "count"),
    [([], 0), ([["a", "b", "c"]], 3), ([["a"], ["a", "b", "x"]], 2), ([["b", "c"]], 0), ([["a", "b", "c", "d"]], 3)],
)
def test_layers_that_are_here_are_counted_from_the_bottom(held, count):
    assert present_prefix(["a", "b", "c"], held) == count
