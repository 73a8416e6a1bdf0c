# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run a job template's own fields with ansible-runner, the engine of AWX, and answers as AWX would hand them over."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
import typing as t

import ansible_runner
from awx_data import data, environment
from awx_survey import ROOT

TEMPLATES = {template["name"].removeprefix("Sparks: "): template for template in data()["controller_templates"]}


@dataclasses.dataclass
class Job:
    """What AWX knows of a job when it has ended."""

    status: str
    code: int
    text: str
    changed: set[str]
    artefacts: dict[str, t.Any]


def answers_of(template: t.Mapping[str, t.Any], given: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Defaults of the survey under the given answers. AWX drops what no question asks without a word; here that is a fault of the test."""
    questions = {item["variable"]: item for item in template["survey_spec"]["spec"]}
    strangers = set(given) - set(questions)
    if strangers:
        raise KeyError(f"{template['name']} does not ask for {', '.join(sorted(strangers))}")
    return {**{name: item["default"] for name, item in questions.items() if item["default"] != ""}, **given}


def run(
    name: str,
    inventory: str,
    given: t.Mapping[str, t.Any] | None = None,
    tags: str = "",
    limit: str = "",
    check: bool = False,
    cancelled: t.Callable[[], bool] | None = None,
) -> Job:
    """One job of the template. Tags, limit, and check mode count only where the template lets a user choose them.

    ``cancelled`` is asked while the job runs; a true answer is AWX's cancel button.
    """
    template = TEMPLATES[name]
    for chosen, question in ((tags, "ask_tags_on_launch"), (limit, "ask_limit_on_launch"), (check, "ask_job_type_on_launch")):
        if chosen and not template.get(question):
            raise KeyError(f"{template['name']} does not let a user choose: {question}")
    return play(
        template["playbook"],
        inventory,
        answers_of(template, given or {}),
        tags=tags or template.get("job_tags", ""),
        limit=limit,
        check=check or template.get("job_type") == "check",
        diff=template.get("diff_mode", False),
        cancelled=cancelled,
    )


def play(
    playbook: str,
    inventory: str,
    variables: t.Mapping[str, t.Any],
    tags: str = "",
    limit: str = "",
    check: bool = False,
    diff: bool = False,
    cancelled: t.Callable[[], bool] | None = None,
) -> Job:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as private:
        done = ansible_runner.run(
            private_data_dir=private,
            project_dir=ROOT,
            playbook=playbook,
            inventory=inventory,
            extravars=dict(variables),
            tags=tags or None,
            limit=limit or None,
            cmdline=" ".join(["--check"] * check + ["--diff"] * diff) or None,
            # Connections of its own, as AWX gives each job: an open one of another run would hide a wrong key.
            envvars=environment(PATH=path, ANSIBLE_CALLBACKS_ENABLED="sparkops.inference.stages", ANSIBLE_SSH_CONTROL_PATH_DIR=os.path.join(private, "cp")),
            cancel_callback=cancelled,
            quiet=True,
        )
        events = list(done.events)
        # As a person reads it: AWX turns the colours of Ansible's own lines into those of the page.
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(event["stdout"] for event in events if event["stdout"])).replace("\r\n", "\n")
    last = next((event["event_data"] for event in events if event["event"] == "playbook_on_stats"), {})
    return Job(done.status, done.rc, text, {host for host, count in last.get("changed", {}).items() if count}, last.get("artifact_data", {}))
