# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What owners do with a group: the requests of docs/api.md, a benchmark with its page, reports, and lines for Prometheus."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, STUB, on, play

for part in ("tests/docs", "tests/browser", "tests/metrics"):
    sys.path.insert(0, os.path.join(ROOT, part))

from blocks import blocks, table  # noqa: E402
from browser import boxes, browser, cells, dom, painted, screenshot  # noqa: E402
from test_metrics import ENGINE  # noqa: E402

from ansible_collections.sparkops.inference.plugins.module_utils._bench_stats import parse_metrics  # noqa: E402

HEAD, API = "spark-1", "http://198.18.0.21:8888"
PAGE = "docs/api.md"
MODELS = re.compile("DeepSeek-v4.1-Flash-EXL3|GLM-5.3-Flash-EXL3")
REQUESTS = [block for block in blocks(PAGE) if block.what == "sent" or block.what == "wrong" or block.what.startswith("refused")]
# The whole answer, then its status on a line of its own.
PREAMBLE = f"set -eu\ncurl() {{ command curl -w '\\n%{{http_code}}' \"$@\"; }}\nAPI={API}\n"


@pytest.fixture(name="auth", scope="module")
def fixture_auth(serving, tmp_path_factory):
    """The file that the page's first block makes."""
    path = tmp_path_factory.mktemp("auth") / "auth"
    key = on(HEAD, "cat /var/lib/sparkops/lab_tiny/key/api_key").strip()
    path.write_text(f"Authorization: Bearer {key}\n", encoding="utf-8")
    return path


def send(text, auth):
    """Run a block as it stands, but for the model's name and answers that fit into the tiny model's context. Returns status and answer."""
    text = re.sub(r'"max_tokens": \d+', '"max_tokens": 16', MODELS.sub("tiny", text))
    done = subprocess.run(["bash"], input=f"{PREAMBLE}AUTH={auth}\n{text}", capture_output=True, text=True, timeout=120, check=True)
    answer, dummy, status = done.stdout.rpartition("\n")
    return int(status), answer


@pytest.mark.parametrize("block", REQUESTS, ids=lambda block: block.name)
def test_each_request_of_the_api_page(serving, auth, block):
    status, answer = send(block.text, auth)
    if block.what.startswith("refused"):
        assert status == 400 and json.loads(answer)["error"]["message"], answer
        return
    assert status == 200, answer
    if block.body is None:
        assert json.loads(answer)["data"][0]["id"] == "tiny"
    elif block.body.get("stream"):
        events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["usage"]["completion_tokens"] > 0
    elif "prompt" in block.body:
        assert json.loads(answer)["count"] > 0
    else:
        assert json.loads(answer)["choices"][0]["message"]["content"], answer


def test_a_literal_extra_body_changes_nothing(serving, auth):
    """The server takes it without a word; what is in it has no effect, while the same at the top level has."""
    block = next(block for block in REQUESTS if block.what == "wrong")
    nested = block.text.replace('{"chat_template_kwargs": {"enable_thinking": false}}', '{"max_tokens": 1}')
    top = block.text.replace('"extra_body": {"chat_template_kwargs": {"enable_thinking": false}}', '"max_tokens": 1')
    tokens = [json.loads(send(text.replace('"max_tokens": 1', '"max_completion_tokens": 1'), auth)[1])["usage"]["completion_tokens"] for text in (nested, top)]
    assert tokens[0] > 1 and tokens[1] == 1


def test_the_key_file_of_the_page_is_made_on_the_head(serving):
    block = next(block for block in blocks(PAGE) if block.what == "on the head")
    text = block.text.replace("deepseek_v41_flash_exl3", "lab_tiny") + "\nstat -c %a ~/.sparkops-auth; cat ~/.sparkops-auth; rm ~/.sparkops-auth"
    done = subprocess.run([os.path.join(ROOT, "tests/lab/lab"), "ssh", HEAD, "bash -s"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["600", "Authorization:", "Bearer", on(HEAD, "cat /var/lib/sparkops/lab_tiny/key/api_key").strip()]


@pytest.mark.parametrize("row", table(PAGE, "What the key guards"), ids=lambda row: row[0])
def test_the_table_of_open_paths_is_true(serving, row):
    method, path = re.fullmatch(r"`(GET|POST) (/\S+)`", row[0]).groups()
    bodies = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [65]}, "/v1/completions": {"prompt": "a", "max_tokens": 1}}
    body = {"model": "tiny", **bodies.get(path, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})}
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-X", method, f"{API}{path}"]
    if method == "POST":
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == row[1]


def test_rules_and_dashboard_find_their_metrics_in_the_real_engine(serving):
    told = parse_metrics(subprocess.run(["curl", "-s", f"{API}/metrics"], capture_output=True, text=True, check=True).stdout)
    assert ENGINE - set(told) == set()


def value_at(document, key):
    for part in key.split("."):
        document = document[int(part)] if isinstance(document, list) else (document or {}).get(part)
    return document


def test_a_benchmark_of_the_real_engine_and_its_page(serving, auth, tmp_path):
    variables = {"bench_runs": 2, "bench_tokens": 32, "bench_streams": [1, 2], "bench_prefill": "64,128,8192", "report_directory": str(tmp_path)}
    for number in (1, 2):
        done = play("bench", variables=variables)
        assert done.code == 0, done.text[-4000:]
        assert re.findall(r"changed=(\d+)", done.text) == ["0", "0"]
        assert len(glob.glob(f"{tmp_path}/lab_tiny/bench-*.json")) == number
    print(f"bench.yml with short runs: {done.ended - done.begun:.0f} s")
    path = sorted(glob.glob(f"{tmp_path}/lab_tiny/bench-*.html"))[-1]
    with open(path.removesuffix("html") + "json", encoding="utf-8") as stream:
        run = json.load(stream)
    key = auth.read_text(encoding="utf-8").split()[-1]
    assert key not in done.text and key not in json.dumps(run)
    assert [(row["what"], row["streams"]) for row in run["decode"]] == [("counting", 1), ("counting", 2), ("prose", 1), ("prose", 2)]
    for row in run["decode"]:
        assert row["tokens_per_second"]["min"] > 0 and row["first_token_ms"]["min"] > 0 and [one["error"] for one in row["runs"]] == ["", ""]
        assert row["acceptance"] is None, "the tiny model drafts nothing"
    assert [row["wanted_tokens"] for row in run["prefill"]] == [64, 128]
    assert all(0.9 * row["wanted_tokens"] <= row["tokens"] and row["tokens_per_second"] > 0 for row in run["prefill"])
    assert any("8,192" in row["case"] for row in run["skipped"])
    assert all(row["answer"] for row in run["probes"])
    # Both ranks were seen in the cases that took their time.
    assert {row["node"] for case in run["decode"] for row in case["memory"] if row["available_bytes"]} == {"spark-1", "spark-2"}
    if not browser():
        pytest.skip("this system has no package of a browser")
    shown = cells(dom(path), "data-key")
    assert len(shown) >= 20
    for key, text in shown.items():
        wanted = value_at(run, key)
        assert text == ("" if wanted is None else str(wanted)), key
    image = screenshot(path, str(tmp_path))
    places = boxes(path, str(tmp_path))
    assert [place["name"] for place in places] == ["Decode", "Prefill", "Least available memory"]
    assert all(painted(image, place)["coloured"] > 100 for place in places)


# --- lines for Prometheus, with the stand-in ---------------------------------------------------------------------------------

DEPLOYMENT = "lab_owner"
TEXTFILES = "/var/lib/textfiles-of-the-test"


def variables(**more):
    return {
        "serve_deployment": DEPLOYMENT, "image_reference": STUB, "serve_port": 8897, "serve_rendezvous_port": 29597, "serve_ready_timeout": 120,
        "metrics_exporter": True, "metrics_textfile_directory": TEXTFILES, "metrics_probe_interval": 1, **more,
    }  # fmt: skip


def lines(node):
    """What the exporter writes when it is run now."""
    return parse_metrics(on(node, f"systemctl start sparkops-metrics.service; cat {TEXTFILES}/sparkops.prom"))


def value(node, name, **labels):
    return next((number for found, number in lines(node).get(name, []) if labels.items() <= found.items()), None)


def state():
    return [found["state"] for found, number in lines("spark-1")["sparkops_group_state"] if number == 1 and found["deployment"] == DEPLOYMENT]


@pytest.fixture(name="exporter", scope="module")
def fixture_exporter(serving, tmp_path_factory):
    """A second group beside the real one, and the exporter on both nodes. Yields where the controller's files are."""
    reports = tmp_path_factory.mktemp("reports")
    mine = variables(report_directory=str(reports))
    done = play("site", variables=mine)
    assert done.code == 0, done.text[-4000:]
    assert f"report {reports}/{DEPLOYMENT}/bringup-" in done.text
    refused = play("metrics", variables=mine)
    assert refused.code != 0 and "metrics.textfile_directory" in refused.text
    for node in ("spark-1", "spark-2"):
        on(node, f"mkdir -p {TEXTFILES}")
    predicted = play("metrics", "--check", variables=mine)
    assert predicted.code == 0 and "changed=0 " not in predicted.text, predicted.text[-3000:]
    for wanted in (True, False):
        done = play("metrics", variables=mine)
        assert done.code == 0 and (re.findall(r"changed=(\d+)", done.text) != ["0", "0"]) is wanted, done.text[-3000:]
    yield reports / DEPLOYMENT
    done = play("metrics", variables={**mine, "metrics_exporter": False})
    assert done.code == 0 and on("spark-1", f"ls -A {TEXTFILES}; ls /etc/systemd/system | grep sparkops-metrics || true") == ""
    for node in ("spark-1", "spark-2"):
        on(node, f"rm -rf {TEXTFILES}")
    assert play("stop", variables=mine).code == 0


def test_the_report_of_a_real_bring_up(exporter):
    path = glob.glob(f"{exporter}/bringup-*.html")[0]
    with open(path.removesuffix("html") + "json", encoding="utf-8") as stream:
        run = json.load(stream)
    assert run["verdict"] == "proven" and run["proof"]["text"] == "The answer is four."
    assert {span["node"] for span in run["spans"]} == {"spark-1", "spark-2"} and "serve" in {span["stage"] for span in run["spans"]}
    assert [row["node"] for row in run["memory"]] == ["spark-1", "spark-2"] and all(row["available_bytes"] > 0 for row in run["memory"])
    assert run["nodes"][1]["docker"] and run["weights"][0]["revision"]
    if browser():
        assert cells(dom(path), "data-key")["verdict"] == "proven"


def test_a_serving_group_is_told(exporter):
    assert state() == ["serving"]
    assert value("spark-1", "sparkops_rank_running", deployment=DEPLOYMENT) == 1 and value("spark-2", "sparkops_rank_running", deployment=DEPLOYMENT) == 1
    assert value("spark-1", "sparkops_group_ranks_running", deployment=DEPLOYMENT) == 2
    assert value("spark-1", "sparkops_group_last_token_timestamp_seconds", deployment=DEPLOYMENT) > 0
    assert value("spark-2", "sparkops_group_state") is None, "a worker sees no group"
    available = int(on("spark-1", "awk '/MemAvailable/ {print $2}' /proc/meminfo")) * 1024
    assert abs(value("spark-1", "sparkops_node_memory_available_bytes") / available - 1) < 0.2
    # The node exporter's own account reads it, and the key is in nothing that it reads.
    text = on("spark-1", f"setpriv --reuid nobody --clear-groups cat {TEXTFILES}/sparkops.prom")
    assert on("spark-1", f"cat /var/lib/sparkops/{DEPLOYMENT}/key/api_key").strip() not in text + on("spark-1", "cat /run/sparkops-metrics/seen.json")


def test_targets_and_rules_are_on_the_controller(exporter):
    with open(f"{exporter}/metrics/vllm.json", encoding="utf-8") as stream:
        assert json.load(stream) == [{"targets": ["198.18.0.21:8897"], "labels": {"deployment": DEPLOYMENT, "node": "spark-1"}}]
    with open(f"{exporter}/metrics/node.json", encoding="utf-8") as stream:
        assert [entry["targets"] for entry in json.load(stream)] == [["198.18.0.21:9100"], ["198.18.0.22:9100"]]
    for name in ("alerts.yml", "dashboard.json"):
        with open(f"{exporter}/metrics/{name}", "rb") as written, open(os.path.join(ROOT, "roles/metrics/files", name), "rb") as source:
            assert written.read() == source.read()


def test_a_wedged_group_is_told(exporter):
    tell = "curl -s -X POST -H 'Content-Type: application/json' http://127.0.0.1:8897/debug/set -d"
    on("spark-1", f"{tell} '{{\"COMPLETION\": \"500\"}}'; sleep 2")
    assert state() == ["wedged"]
    assert value("spark-1", "sparkops_rank_running", deployment=DEPLOYMENT) == 1, "it is wedged and not down"
    on("spark-1", f"{tell} '{{\"COMPLETION\": \"\"}}'")
    assert state() == ["serving"]


def test_a_killed_worker_is_told_on_both_nodes(exporter):
    on("spark-2", f"docker kill {DEPLOYMENT}-rank1; sleep 2")
    assert state() == ["half"]
    labels = {"deployment": DEPLOYMENT, "rank": "1"}
    assert (value("spark-2", "sparkops_rank_running", **labels), value("spark-2", "sparkops_rank_wanted", **labels)) == (0, 1)
    assert value("spark-2", "sparkops_rank_exit_code", **labels) == 137
    on("spark-2", f"systemctl stop sparkops-rank@{DEPLOYMENT}; sleep 6")
    assert value("spark-2", "sparkops_rank_service_up", **labels) == 0 and value("spark-2", "sparkops_rank_running", **labels) is None
    on("spark-2", f"systemctl start sparkops-rank@{DEPLOYMENT}")
