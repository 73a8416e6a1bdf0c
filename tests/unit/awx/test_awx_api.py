# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""playbooks/awx.yml with the real modules of awx.awx against a stand-in of the API that stores objects."""

from __future__ import annotations

import glob
import json
import os
import re

import ansible
import pytest
from awx_data import ansible_playbook, data, needs_own_ansible
from awx_standin import TOKEN, StandIn
from awx_survey import ROOT

# Part of the package ansible up to 13; the newest line has no awx.awx.
COLLECTION = os.path.join(os.path.dirname(os.path.dirname(ansible.__file__)), "ansible_collections/awx/awx")

pytestmark = [needs_own_ansible, pytest.mark.skipif(not os.path.exists(COLLECTION), reason="the package ansible has no awx.awx since version 14")]


def apply(awx, *arguments, token=TOKEN):
    account = {"CONTROLLER_HOST": awx.address, "CONTROLLER_OAUTH_TOKEN": token}
    return ansible_playbook("-i", "localhost,", "playbooks/awx.yml", *arguments, ANSIBLE_PIPELINING="1", **account)


def changes(done):
    return int(re.search(r"changed=(\d+)", done.stdout).group(1))


@pytest.fixture(name="awx", scope="module")
def fixture_awx():
    with StandIn([os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "playbooks/*.yml"))]) as awx:
        done = apply(awx)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        awx.first = awx.writes()
        yield awx


def test_everything_is_created_as_declared(awx):
    declared, stored = data(), awx.store.objects
    templates = {item["name"]: item for item in stored["job_templates"].values()}
    assert set(templates) == {item["name"] for item in declared["controller_templates"]}
    for wanted in declared["controller_templates"]:
        made = templates[wanted["name"]]
        assert made["playbook"] == wanted["playbook"] and made["job_type"] == wanted.get("job_type", "run")
        assert awx.store.surveys[made["related"]["survey_spec"]] == wanted["survey_spec"]
    assert [item["injectors"] for item in stored["credential_types"].values()] == [item["injectors"] for item in declared["controller_credential_types"]]
    assert len(stored["workflow_job_template_nodes"]) == 6 and len(stored["workflow_approval_templates"]) == 1
    assert awx.first.count("POST workflow_job_template_nodes/N/success_nodes") == 5


def test_a_second_run_changes_nothing(awx):
    awx.writes()
    done = apply(awx)
    assert done.returncode == 0, done.stdout[-3000:]
    assert changes(done) == 0 and awx.writes() == []


def test_a_changed_survey_updates_only_its_template(awx):
    awx.writes()
    before = json.dumps(awx.store.objects, sort_keys=True)
    done = apply(awx, "--start-at-task", "Keep the job templates", "-e", '{"awx_without_questions": ["logs_tail"]}')
    assert done.returncode == 0, done.stdout[-3000:]
    assert awx.writes() == ["POST job_templates/N/survey_spec"]
    assert json.dumps(awx.store.objects, sort_keys=True) == before
    logs = next(item for item in awx.store.objects["job_templates"].values() if item["name"] == "Sparks: logs")
    assert [item["variable"] for item in awx.store.surveys[logs["related"]["survey_spec"]]["spec"]] == ["spark_hosts", "logs_of"]


def test_a_wrong_token_is_told_and_writes_nothing(awx):
    awx.writes()
    done = apply(awx, token="another")
    assert done.returncode != 0 and "Invalid authentication credentials" in done.stdout
    assert awx.writes() == []
