# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Alert rules in Prometheus' own tool, and that rules and dashboard ask for nothing that nobody tells."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from ansible_collections.sparkops.inference.plugins.module_utils._metrics_text import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/metrics/files"
TESTS = ROOT / "tests/metrics/alerts_test.yml"
CACHE = os.environ.get("SPARKOPS_CACHE", os.path.expanduser("~/.cache/sparkops-inference"))
PROMTOOL = shutil.which("promtool") or os.path.join(CACHE, "tools/promtool")
METRIC = re.compile(r"\b(?:sparkops_\w+|vllm:\w+)")
# What vLLM tells in every deployment: tests/live/test_owner.py compares it with the real engine. Drafts are told by those that draft.
ENGINE = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:iteration_tokens_total_count",
}  # fmt: skip
DRAFTING = {
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}  # fmt: skip
RULES = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_rules_fire_and_stay_silent():
    checked = promtool("check", "rules", FILES / "alerts.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("wrong", ["vector(1) > 2", 'label_replace(vector(1), "node", "x", "", "")'])
def test_rules_that_never_or_always_fire_are_all_noticed(wrong, tmp_path):
    rules = json.loads(json.dumps(RULES))
    for rule in itertools.chain.from_iterable(group["rules"] for group in rules["groups"]):
        rule.update(expr=wrong)
        rule.pop("for", None)
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    tests = yaml.safe_load(TESTS.read_text(encoding="utf-8"))
    (tmp_path / "test.yml").write_text(yaml.safe_dump({**tests, "rule_files": ["alerts.yml"]}), encoding="utf-8")
    tested = promtool("test", "rules", tmp_path / "test.yml")
    assert tested.returncode != 0
    assert set(re.findall(r"alertname: ?(\w+)", tested.stdout + tested.stderr)) == set(ALERTS)


def expressions():
    yield from (rule["expr"] for group in RULES["groups"] for rule in group["rules"])
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    yield from (entry["definition"] for entry in DASHBOARD["templating"]["list"] if "definition" in entry)


def test_rules_and_dashboard_ask_only_for_what_is_told():
    asked = {name for text in expressions() for name in METRIC.findall(text)}
    assert asked - set(FAMILIES) - ENGINE - DRAFTING == set()
    # No line is told that nobody looks at, but for those that stand in the docs for a person.
    assert set(FAMILIES) - asked <= {"sparkops_node_memory_total_bytes", "sparkops_rank_exit_code", "sparkops_rank_last_progress_timestamp_seconds",
                                     "sparkops_group_proven_timestamp_seconds", "sparkops_memory_guard_floor_bytes"}


def test_each_alert_says_what_to_do():
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert set(rule["annotations"]) == {"summary", "description"} and rule["labels"]["severity"] in ("warning", "critical")
            for play in re.findall(r"\bplay ([a-z]+)", rule["annotations"]["description"]):
                assert (ROOT / f"playbooks/{play}.yml").exists(), play


def test_the_dashboard_has_panels_that_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"]) >= 10
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = set(itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])))
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
