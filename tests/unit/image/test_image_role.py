# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the role's variables come to."""

from __future__ import annotations

import os

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
DIGEST = "sha256:" + "d" * 64


def variable(name, mode="never", recipe=None, commands=(), files=(), **settings):
    with open(os.path.join(ROOT, "roles/image/vars/main.yml"), encoding="utf-8") as stream:
        texts = {key: trust_as_template(value) for key, value in yaml.safe_load(stream).items() if isinstance(value, str)}
    values = {"image_build": mode, "image_recipe": recipe, "image_recipe_repository": None, "image_pull_on": "every", "image_template_source": None, **settings}
    image = {"digest": DIGEST, "self_check": {"commands": commands}}
    plan = {"image": image, "files": files, "settings": values, "ranks": 2, "node_settings": {"spark-1": values}}
    node = {"user": {"home": "/home/me"}, "state_root": "/state", "state_dir": "/state/d"}
    known = {"spark_plan": plan, "spark_rank": 0, "spark_node": node, "inventory_hostname": "spark-1", "role_path": os.path.join(ROOT, "roles/image")}
    return Templar(DataLoader(), variables={**texts, **known}).template(texts[name])


@pytest.mark.parametrize("mode, recipe, pin", [("never", "/r", DIGEST), ("when_unavailable", None, DIGEST), ("when_unavailable", "/r", "")])
def test_a_restart_takes_the_image_that_was_built_for_the_pinned_one(mode, recipe, pin):
    assert variable("__image_pin_of_what_is_there", mode, recipe) == pin


def conditions(path, **wanted):
    """Those of a task, after looking into it: a fact cache may have the image of an earlier run, and nobody has looked yet in this one."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        (task,) = [task for task in yaml.safe_load(stream) if wanted.items() <= (task.get("ansible.builtin.include_role") or task).items()]
    return task["when"]


def test_a_restart_looks_at_the_images_whatever_a_fact_cache_remembers():
    known = {"spark_rank": 1, "spark_image": PULLED}
    for looked in (False, True):
        templar = Templar(DataLoader(), variables={**known, **({"__image_pull": {}} if looked else {})})
        found = conditions("roles/serve/tasks/staged.yml", tasks_from="check.yml")
        assert all(templar.evaluate_conditional(trust_as_template(condition)) for condition in found) is not looked


def tasks_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        return yaml.safe_load(stream)


@pytest.mark.parametrize(("images", "there"), [([{"Id": "sha256:1"}], True), ([], False)])
def test_no_group_is_stopped_for_an_image_that_was_pruned_since_it_was_compared(images, there):
    """By the id of which the container is made. A rollback has it from its record, and asks the same in a prediction."""
    assert tasks_of("roles/serve/tasks/replace.yml")[0]["ansible.builtin.include_tasks"] == "admit.yml"
    look, refuse = tasks_of("roles/serve/tasks/admit.yml")[:2]
    known = {"spark_image": {"id": "sha256:1"}, "__serve_image": {"images": images}}
    templar = Templar(DataLoader(), variables=known)
    assert templar.template(trust_as_template(look["community.docker.docker_image_info"]["name"])) == "sha256:1"
    assert templar.evaluate_conditional(trust_as_template(refuse["ansible.builtin.assert"]["that"])) is there


def test_no_image_is_shipped_from_a_head_that_was_only_remembered():
    head = {"spark_image": PULLED}
    known = {"spark_rank": 1, "spark_image": {"present": False}, "spark_plan": {"settings": {"image_ship_mode": "auto"}, "head": "spark-1"}}
    found = conditions("roles/image/tasks/main.yml", name="Bring the head's image over the fabric to a rank that lacks it")[:-1]
    for looked in (False, True):
        templar = Templar(DataLoader(), variables={**known, "hostvars": {"spark-1": {**head, **({"__image_pull": {}} if looked else {})}}})
        assert all(templar.evaluate_conditional(trust_as_template(condition)) for condition in found) is looked


PULLED = {"present": True, "identity": "sha256:1"}


@pytest.mark.parametrize(
    ("image", "mode", "asked"),
    [
        (PULLED, "never", True),
        ({"present": False}, "when_unavailable", True),
        # Check mode predicts a pull: nobody knows the stamp of what it will bring.
        ({"present": True}, "never", False),
        ({"present": True}, "on_stamp_change", False),
        ({"present": True}, "always", True),
    ],
)
def test_the_stamp_of_an_image_that_is_only_predicted_is_not_compared(image, mode, asked):
    with open(os.path.join(ROOT, "roles/image/tasks/main.yml"), encoding="utf-8") as stream:
        task = next(task for task in yaml.safe_load(stream) if task.get("ansible.builtin.import_tasks") == "build.yml")
    known = {"spark_rank": 0, "spark_image": image, "__image_recipe": "/r", "spark_plan": {"settings": {"image_build": mode}}}
    templar = Templar(DataLoader(), variables=known)
    assert all(templar.evaluate_conditional(trust_as_template(condition)) for condition in task["when"]) is asked


@pytest.mark.parametrize(
    ("name", "option", "given", "path"),
    [
        ("__image_recipe", "recipe", "~/recipe", "/home/me/recipe"),
        ("__image_recipe", "recipe", "/data/~/recipe", "/data/~/recipe"),
        ("__image_recipe", "image_recipe_repository", "https://git.example/recipe", "/state/d/recipe"),
        ("__image_recipe", "image_recipe_repository", None, ""),
        ("__image_staging", "image_staging", "~/ship", "/home/me/ship"),
        ("__image_staging", "image_staging", None, "/state/image-ship"),
        ("__image_template_source", "image_template_source", "~/model", "/home/me/model"),
        ("__image_template_source", "image_template_source", None, ""),
    ],
)
def test_a_home_is_that_of_the_account_and_not_of_root_who_runs_the_modules(name, option, given, path):
    assert variable(name, **{option: given}) == path


@pytest.mark.parametrize(
    ("commands", "folder"),
    [
        ([], ""),
        ([["python3", "/opt/x/test_a.py"], ["python3", "/opt/y/test_b.py"]], "/opt/x"),
        ([["python3", "-u", "/opt/x/test_a.py"]], "/opt/x"),
        ([["nvidia-smi"], ["/opt/x/test_a.py", "--quick"]], "/opt/x"),
    ],
)
def test_the_images_own_tests_are_beside_its_self_check(commands, folder):
    assert variable("__image_test_folder", commands=commands) == folder


def test_the_chat_template_that_is_compared_is_the_one_that_is_served(tmp_path):
    own = tmp_path / "mine.jinja"
    own.write_text("{{ messages }}\n")
    files = [{"target": "/sparkops-files/chat_template.jinja", "source": str(own)}]
    both = {"serve_chat_template": "/opt/x/chat_template.jinja", "image_template_source": "/model"}
    assert variable("__image_template", **both) == "/opt/x/chat_template.jinja" and variable("__image_template_text", **both) == ""
    both["serve_chat_template_file"] = str(own)
    assert variable("__image_template", files=files, **both) == files[0]["target"]
    assert variable("__image_template_text", files=files, **both) == "{{ messages }}\n"
    # A file that serve_files lays over the image's own is served, too.
    over = [{"target": "/opt/x/chat_template.jinja", "source": str(own)}]
    assert variable("__image_template_text", files=over, serve_chat_template="/opt/x/chat_template.jinja") == "{{ messages }}\n"


@pytest.mark.parametrize(("template", "refused"), [(None, True), ("/opt/x/chat_template.jinja", False)])
def test_a_comparison_of_nothing_is_refused(template, refused):
    """The model's own template is served where none is set; a name that nobody has set ended in a traceback."""
    task = tasks_of("roles/image/tasks/selftest.yml")[0]
    served = variable("__image_template", serve_chat_template=template)
    templar = Templar(DataLoader(), variables={"__image_template": served})
    assert templar.evaluate_conditional(trust_as_template(task["ansible.builtin.assert"]["that"])) is not refused
