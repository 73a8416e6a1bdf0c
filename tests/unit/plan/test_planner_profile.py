# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import pathlib
import typing as t

import generate
import pytest
import yaml

from ansible_collections.sparkops.inference.plugins.module_utils import _profile
from ansible_collections.sparkops.inference.plugins.module_utils._plan import unknown_names
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles, schema

PROFILES = generate.profiles()
SERVED = [
    "deepseek_v41_flash_exl3",
    "deepseek_v41_flash_exl3_latest",
    "generic_vllm",
    "glm_53_flash_exl3",
    "glm_53_flash_exl3_latest",
    "lab_tiny",
]


def test_shipped_profiles() -> None:
    assert list(PROFILES) == SERVED


@pytest.mark.parametrize("name", SERVED)
def test_shipped_profiles_are_valid(name: str) -> None:
    assert _profile.faults(PROFILES[name], schema()) == []
    assert unknown_names(PROFILES[name]) == []


@pytest.mark.parametrize("name", SERVED)
def test_json_schema_says_the_same(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema()).validate(PROFILES[name])


@pytest.mark.parametrize("path", sorted((generate.ROOT / "roles/plan/files/profiles").glob("*.yml")), ids=lambda path: path.stem)
def test_each_file_alone_fits_the_schema(path: pathlib.Path) -> None:
    """Editors check single files: an heir lacks what its parents say, and null takes something of theirs away."""
    jsonschema = pytest.importorskip("jsonschema")
    # The pure Python loader is the stricter one; a profile must not depend on which one a machine has.
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(without(schema(), "required")).validate(without_null(data))


def without(value: t.Any, name: str) -> t.Any:
    if isinstance(value, dict):
        return {key: without(item, name) for key, item in value.items() if key != name or not isinstance(item, list)}
    return value


def without_null(value: t.Any) -> t.Any:
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def test_schema_is_a_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())


# -- our own reading of the schema -----------------------------------------------------------------------------------


def broken(value: t.Any, draw: t.Any, st: t.Any) -> t.Any:
    """One entry somewhere in a profile replaced, removed or added."""
    value = copy.deepcopy(value)
    place = value
    for _depth in range(draw(st.integers(0, 4))):
        inner = [item for item in (place.values() if isinstance(place, dict) else place) if isinstance(item, (dict, list)) and item]
        if not inner:
            break
        place = inner[draw(st.integers(0, len(inner) - 1))]
    junk = draw(st.sampled_from([1, 1.5, True, "", "x", None, [], {}, ["x"], {"x": 1}]))
    if isinstance(place, list):
        place[draw(st.integers(0, len(place) - 1))] = junk
        return value
    key = draw(st.sampled_from([*place, "unknown_key"]))
    if draw(st.booleans()):
        place[key] = junk
    else:
        place.pop(key, None)
    return value


def test_agrees_with_json_schema_on_broken_profiles() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    jsonschema = pytest.importorskip("jsonschema")
    st = hypothesis.strategies
    validator = jsonschema.Draft202012Validator(schema())

    @hypothesis.settings(max_examples=50, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.data())
    def check(data: t.Any) -> None:
        profile = broken(PROFILES[data.draw(st.sampled_from(SERVED))], data.draw, st)
        assert bool(_profile.faults(profile, schema())) == (not validator.is_valid(profile))

    check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optins": {}}, "optins is not known (did you mean options?)"),
        ({"format": 2}, "format is 2, wanted one of 1"),
        ({"format": "1"}, "format is string, wanted integer"),
        ({"description": None}, "description is null, wanted string"),
        ({"options": {"Bad Name": {"kind": "int"}}}, "the name options.Bad Name is 'Bad Name', wanted a text like"),
        ({"options": {"serve_x": {"kind": "number"}}}, "options.serve_x.kind is 'number', wanted one of str, int"),
        ({"artefacts": {"model": {"repository": "a/b"}}}, "artefacts.model lacks revision"),
        ({"container": {"devices": ["dev"]}}, "container.devices[0] is 'dev', wanted a text like ^/dev/"),
        ({"image": {"self_check": {"commands": []}}}, "image.self_check.commands has 0 items, wanted at least 1"),
        ({"extends": 3}, "extends is integer, wanted string or array"),
        ({3: 4}, "3: the name 3 is not a text"),
    ],
    ids=repr,
)
def test_faults_say_where_and_what(change: dict[t.Any, t.Any], words: str) -> None:
    profile = {"format": 1, "description": "x", **change}
    assert any(fault.startswith(words) for fault in _profile.faults(profile, schema())), _profile.faults(profile, schema())


def test_all_faults_at_once() -> None:
    assert len(_profile.faults({"options": 3, "x": 1}, schema())) == 4


# -- heirs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"a": 1}, {"a": None}, {}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3, "z": 4}}, {"a": {"x": 1, "y": 3, "z": 4}}),
        ({"a": {"x": 1}}, {"a": {"x": None}}, {"a": {}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"default": {"image": 4, "video": 1}}, {"default": {"image": 2}}, {"default": {"image": 2}}),
        ({"a": {"when": {"x": 1}, "items": [1]}}, {"a": {"when": {"y": 2}}}, {"a": {"when": {"y": 2}, "items": [1]}}),
        ({"a": {"choose": [1]}}, {"a": {"value": 1, "when": {}}}, {"a": {"value": 1, "when": {}}}),
        ({"a": {"x": 1}}, {"a": {"join": "y"}}, {"a": {"join": "y"}}),
        ({"a": "text"}, {"a": {"x": 1}}, {"a": {"x": 1}}),
    ],
    ids=repr,
)
def test_merge(base: dict[str, t.Any], over: dict[str, t.Any], expected: dict[str, t.Any]) -> None:
    assert _profile.merge(base, over) == expected


def test_merge_keeps_the_parents_order() -> None:
    assert list(_profile.merge({"a": 1, "b": 2}, {"c": 3, "a": 4})) == ["a", "b", "c"]


def test_heirs_of_several_parents() -> None:
    files = {
        "base": {"abstract": True, "a": 1, "b": 1, "c": 1},
        "mixin": {"b": 2, "c": 2},
        "heir": {"extends": ["base", "mixin"], "c": 3},
        "grandchild": {"extends": "heir", "d": 4},
    }
    assert _profile.with_parents("grandchild", files.get) == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_being_abstract_is_not_inherited_but_may_be_said_again() -> None:
    files = {"base": {"abstract": True}, "one": {"extends": "base"}, "two": {"extends": "base", "abstract": True}}
    assert "abstract" not in _profile.with_parents("one", files.get)
    assert _profile.with_parents("two", files.get)["abstract"]


def test_circles_and_missing_parents_are_faults() -> None:
    with pytest.raises(_profile.ProfileError, match="a > b"):
        _profile.with_parents("a", {"a": {"extends": "b"}, "b": {"extends": "a"}}.get)
    with pytest.raises(_profile.ProfileError, match="it extends c, which does not exist"):
        _profile.with_parents("a", {"a": {"extends": "c"}}.get)


def test_a_profile_narrows_the_collections_options_and_adds_its_own() -> None:
    known = _profile.catalogue({"options": {"serve_port": {"default": 9000, "choices": [9000]}, "serve_x": {"kind": "int", "description": "X."}}})
    assert known["serve_port"].default == 9000 and known["serve_port"].choices == (9000,) and known["serve_port"].kind == "int"
    assert known["serve_x"].kind == "int"
    assert known["serve_bind"].default == "0.0.0.0"


# -- files -----------------------------------------------------------------------------------------------------------


def test_search_path(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "profiles").mkdir()
    for path, text in {
        "own/mine.yml": "format: 1\ndescription: own",
        "own/lab_tiny.yml": "format: 1\ndescription: not this one",
        "profiles/mine.yml": "format: 1\ndescription: beside",
        "profiles/beside.yaml": "format: 1\ndescription: beside",
        "profiles/parts.yml": "abstract: true",
        "profiles/broken.yml": "{",
        "profiles/list.yml": "- 1",
    }.items():
        (tmp_path / path).write_text(text, encoding="utf-8")
    files = ProfileFiles(["own"], [str(tmp_path)])
    assert files.find("mine") == {"format": 1, "description": "own"}
    assert files.find("beside")["description"] == "beside"
    assert "not this one" not in files.find("lab_tiny")["description"]
    assert files.find("nothing") is None
    assert {"beside", "broken", "mine", "list", *SERVED} == set(files.names())
    for name in ("broken", "list"):
        with pytest.raises(_profile.ProfileError, match=name):
            files.find(name)


def test_names_in_memory_data_are_options() -> None:
    """The memory budget has conditions of its own; what it takes from options must still exist."""
    from ansible_collections.sparkops.inference.plugins.module_utils._profile_language import placeholders

    for name, profile in PROFILES.items():
        values = (profile.get("memory") or {}).get("values") or {}
        assert placeholders(values) <= set(_profile.catalogue(profile)), name
