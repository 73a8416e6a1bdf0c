# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Jobs that need no node, by ansible-runner: answers are text, an unanswered question is the default, and a refusal comes before any connection."""

from __future__ import annotations

import pytest
import yaml
from awx_data import needs_own_ansible
from awx_runner import TEMPLATES, answers_of, play, run

pytestmark = needs_own_ansible


@pytest.fixture(name="inventory", scope="module")
def fixture_inventory(tmp_path_factory):
    """Addresses that nobody has: a play that reaches for a node fails."""
    hosts = {f"spark-{number}": {"ansible_host": f"192.0.2.2{number}", "fabric_address": f"198.51.100.1{number}"} for number in (1, 2)}
    group = {"hosts": hosts, "vars": {"serve_nodes": ["spark-1", "spark-2"], "serve_profile": "lab_tiny"}}
    path = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"children": {"sparks": group}}}))
    return str(path)


def test_text_false_is_false(inventory):
    """With a true value the play would reach for the nodes."""
    job = run("settings", inventory, {"settings_compare": "false"})
    assert job.code == 0 and job.changed == set()
    assert "settings_compare" in job.text and "extra vars" in job.text


@pytest.mark.parametrize(
    "template, answers, parts",
    [
        ("settings", {"settings_compare": "perhaps"}, ["settings_compare", "perhaps", "true or false", "settings.value"]),
        ("bring-up", {"weights_download": "sometimes", "image_pull_policy": "yes"}, ["sometimes", "image_pull_policy", '"missing", "always", "never"']),
        ("logs", {"logs_tail": "1e3"}, ["logs_tail", "1e3", "a whole number"]),
        ("pack", {"engram_rate_limit": "fast"}, ["engram_rate_limit", "fast", "2.5 GiB"]),
        ("bring-up", {"spark_hosts": "spark_pairs"}, ["spark_pairs"]),
    ],
)
def test_a_wrong_answer_is_refused_before_any_connection(inventory, template, answers, parts):
    job = run(template, inventory, answers)
    assert "UNREACHABLE" not in job.text and job.changed == set()
    assert job.code != 0 or "skipping: no hosts matched" in job.text
    for part in parts:
        assert part in job.text


def settings(job):
    return job.text[job.text.index("spark_plan.settings:"):job.text.index("PLAY RECAP")]


def test_an_unanswered_question_is_the_default(inventory, tmp_path):
    playbook = tmp_path / "plan.yml"
    playbook.write_text("- hosts: sparks[0]\n  gather_facts: false\n  roles: [sparkops.inference.plan]\n  tasks: [{debug: {var: spark_plan.settings}}]\n")
    silent = play(str(playbook), inventory, {name: "" for name in answers_of(TEMPLATES["bring-up"], {}) if name != "spark_hosts"})
    answered = play(str(playbook), inventory, answers_of(TEMPLATES["bring-up"], {}))
    assert silent.code == answered.code == 0
    assert settings(silent) == settings(answered)


def test_the_report_becomes_artefacts_and_a_summary(inventory, tmp_path):
    playbook = tmp_path / "report.yml"
    playbook.write_text("- hosts: sparks\n  gather_facts: false\n  roles: [sparkops.inference.report]\n")
    job = play(str(playbook), inventory, {})
    assert job.code == 0, job.text
    assert job.artefacts["sparkops_endpoint"] == "http://192.0.2.21:8888/v1"
    assert job.artefacts["sparkops_verdict"] == "staged"
    assert "STAGES" in job.text and "to go back" in job.text
    assert "\r" not in job.text and "\b" not in job.text
