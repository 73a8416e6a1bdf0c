# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What AWX is told exists, and asks as the planner understands it."""

from __future__ import annotations

import glob
import os
import re

import pytest
import yaml
from awx_data import data, faults, needs_own_ansible
from awx_standin import survey_error
from awx_survey import GROUP_QUESTION, ROOT, block, question, written

from ansible_collections.sparkops.inference.plugins.module_utils._options import Option, convert, options
from ansible_collections.sparkops.inference.plugins.module_utils._profile import catalogue, with_parents
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles

DATA = data()
TEMPLATES = DATA["controller_templates"]
WORKFLOWS = DATA["controller_workflows"]
QUESTIONS = {item["variable"]: item for entry in [*TEMPLATES, *WORKFLOWS] for item in entry["survey_spec"]["spec"]}

# Plays that are no job of AWX, and why.
NOT_OFFERED = {
    "adopt": "reads a launch script's files on the nodes, once and by hand",
    "ask": "its question is no option of the planner; prove asks the profile's own",
    "awx": "makes the templates themselves",
    "bench": "takes most of an hour and keeps its pages on the controller, where a job's container loses them",
    "bootstrap": "a part of bring-up, tag bootstrap",
    "discover": "writes an inventory on the controller, which a job's container loses",
    "fabric": "a part of bring-up, tag fabric",
    "fabric_restore": "takes a network configuration back: somebody should be at the machine",
    "metrics": "writes files for Prometheus on the controller, where a job's container loses them",
    "memory_policy": "changes the host once, not the deployment",
    "memory_prompt": "holds the engine for minutes with one prompt: somebody should want that",
    "memory": "preflight and doctor report the same",
    "prune": "what it would remove has to be read first: check mode, by hand",
    "render": "writes files on the controller, which a job's container loses",
    "serve": "a part of bring-up, tag serve",
    "share": "sync does the same; the recovery after a server's failure is for somebody who has looked at it",
    "switch": "which profile a group serves belongs into its inventory; bring-up goes there",
    "uninstall": "removes a deployment with its key: by hand",
    "zfs_rollback": "goes back to a snapshot that somebody has to look up on the head",
}


def names(kind):
    return [item["name"] for item in DATA[kind]]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template["name"])
def test_playbook_and_tags_of_a_template_exist(template):
    assert faults(template) == []


@needs_own_ansible
def test_a_playbook_or_a_tag_that_does_not_exist_is_noticed():
    assert faults({"name": "x", "playbook": "playbooks/rollforward.yml"}) == ["x: no playbooks/rollforward.yml"]
    assert faults({"name": "x", "playbook": "playbooks/site.yml", "job_tags": "weights,wieghts"}) == ["x: playbooks/site.yml has no tag wieghts"]


def test_every_play_is_a_job_or_left_out_for_a_reason():
    plays = {os.path.basename(path).removesuffix(".yml") for path in glob.glob(os.path.join(ROOT, "playbooks/*.yml"))}
    offered = {os.path.basename(template["playbook"]).removesuffix(".yml") for template in TEMPLATES}
    assert plays - offered - set(NOT_OFFERED) == set(), "add a template to playbooks/vars/awx.yml, or a reason here"
    assert offered & set(NOT_OFFERED) == set()


def test_names_are_unique():
    for kind in (kind for kind in DATA if kind.startswith("controller_")):
        assert len(set(names(kind))) == len(names(kind)), kind


def test_what_is_referred_to_is_declared():
    for template in TEMPLATES:
        assert template["project"] in names("controller_projects")
        assert template["inventory"] in names("controller_inventories")
        assert template["execution_environment"] in names("controller_execution_environments")
    for source in DATA["controller_inventory_sources"]:
        assert source["inventory"] in names("controller_inventories")


def test_the_workflow_asks_between_staging_and_the_swap():
    steps = {node["identifier"]: node for node in WORKFLOWS[0]["workflow_nodes"]}
    order, following = [], "stage"
    while following:
        order.append(following)
        node = steps[following]
        if node["unified_job_template"]["type"] == "job_template":
            assert node["unified_job_template"]["name"] in names("controller_templates")
        successors = node.get("related", {}).get("success_nodes", [])
        following = successors[0]["identifier"] if successors else None
    assert order == ["stage", "sync", "pack", "approval", "restart", "prove"] == list(steps)
    assert steps["approval"]["unified_job_template"]["type"] == "workflow_approval"


def test_the_questions_are_fresh():
    assert block() in written(), "run python tests/unit/awx/awx_survey.py --write"


@pytest.mark.parametrize("entry", [*TEMPLATES, *WORKFLOWS], ids=lambda entry: entry["name"])
def test_a_survey_is_one_that_awx_takes(entry):
    assert survey_error(entry["survey_spec"]) is None
    assert entry["survey_spec"]["spec"][0] == GROUP_QUESTION


@pytest.mark.parametrize("name", sorted(set(QUESTIONS) - {"spark_hosts"}))
def test_a_question_says_what_the_planner_knows(name):
    option, item = options()[name], QUESTIONS[name]
    assert item == question(option)
    assert not option.secret and not item["required"]
    assert convert(option, item["default"]) == convert(option, option.default)
    for choice in item.get("choices", []):
        assert convert(option, choice) is not None
    assert convert(option, "") is None, "unanswered is not the default"


def test_no_profile_has_another_default_for_what_a_survey_asks():
    files = ProfileFiles()
    for profile in files.names():
        known = catalogue(with_parents(profile, files.find))
        assert {name: known[name].default for name in QUESTIONS if name in known} == {name: options()[name].default for name in QUESTIONS if name in known}


def test_false_is_false_in_any_form_that_a_survey_has():
    option = options()["weights_verify"]
    assert [convert(option, raw) for raw in ("false", "False", "no", False, "0")] == [False] * 5


@pytest.mark.parametrize(
    "fields, wanted",
    [
        ({"kind": "int", "default": 3, "minimum": 1, "maximum": 9}, {"type": "integer", "default": 3, "min": 1, "max": 9}),
        ({"kind": "int"}, {"type": "integer", "default": ""}),
        ({"kind": "float", "default": 0.5, "minimum": 0.1, "maximum": 10}, {"type": "float", "default": 0.5, "max": 10}),
        ({"kind": "bool", "default": False}, {"type": "multiplechoice", "choices": ["true", "false"], "default": "false"}),
        ({"kind": "str", "choices": ["a", "b"]}, {"type": "multiplechoice", "choices": ["a", "b"], "default": ""}),
        ({"kind": "size", "default": "2 GiB"}, {"type": "text", "default": "2 GiB"}),
        ({"kind": "list", "default": ["a", 1]}, {"type": "textarea", "default": '["a", 1]'}),
    ],
)
def test_a_question_has_the_type_default_and_limits_of_its_option(fields, wanted):
    made = question(Option.from_dict("x", {"description": "An C(x).", **fields}))
    assert {name: made[name] for name in ("type", "default", "min", "max", "choices") if name in made} == wanted
    assert made["question_description"].startswith("An x.")


def test_a_secret_is_never_asked():
    with pytest.raises(ValueError, match="credential"):
        question(options()["serve_api_key"])


def test_credential_types_fill_options_and_hide_what_is_secret():
    known = options()
    for kind in DATA["controller_credential_types"]:
        fields = {field["id"]: field for field in kind["inputs"]["fields"]}
        for name, value in kind["injectors"]["extra_vars"].items():
            assert name in known or name.startswith("ansible_"), name
            for used in re.findall(r"{{ (\w+) }}", value):
                assert name not in known or fields[used].get("secret", False) == known[name].secret


def test_artefacts_cannot_be_mistaken_for_options():
    """AWX hands a node's artefacts to the next one as extra variables."""
    with open(os.path.join(ROOT, "roles/report/vars/main.yml"), encoding="utf-8") as stream:
        artefacts = yaml.safe_load(stream)["__report_artefacts"]
    assert artefacts and all(name.startswith("sparkops_") for name in artefacts)


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        return yaml.safe_load(stream)


def test_a_project_sync_finds_the_collection_itself():
    assert {"name": ".", "type": "dir"} in read("requirements.yml")["collections"]


def test_the_execution_environment_has_what_the_collection_needs():
    image = read("execution-environment.yml")["dependencies"]
    held = {item["name"]: item["version"] for item in image["galaxy"]["collections"]}
    for name, bound in read("galaxy.yml")["dependencies"].items():
        assert numbers(held[name]) >= numbers(bound), f"{name} {held[name]} is not {bound}"
    assert numbers(image["ansible_core"]["package_pip"]) >= numbers(read("meta/runtime.yml")["requires_ansible"])
    own = read("meta/execution-environment.yml")["dependencies"]
    assert own == {name: image[name] for name in ("python", "system")}
    assert all(os.path.exists(os.path.join(ROOT, path)) for path in own.values())


def numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text))


def test_the_picker_of_awx_offers_the_sample_inventory():
    """It lists files named hosts, and ours is one that the templates point to."""
    assert DATA["awx_inventory_path"] == "inventories/sample/hosts"
    assert os.path.exists(os.path.join(ROOT, DATA["awx_inventory_path"]))
