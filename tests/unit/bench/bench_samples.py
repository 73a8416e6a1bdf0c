# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A plan, two benchmarks and a run to make pages of: with published figures, drafts, a failed case, and text that is no HTML."""

from __future__ import annotations

import os
import typing as t

import yaml

from ansible_collections.sparkops.inference.plugins.plugin_utils._bench_page import bench_document
from ansible_collections.sparkops.inference.plugins.plugin_utils._run_record import Recorder, run_document, verdict

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
GIB = 2**30
HOSTILE = '<script>document.title="taken"</script> & "quotes" </script>'


def plan() -> dict[str, t.Any]:
    with open(os.path.join(ROOT, "roles/plan/files/profiles/deepseek_v41_flash_exl3.yml"), encoding="utf-8") as stream:
        expected = yaml.safe_load(stream)["expected"]
    return {
        "deployment": "deepseek", "profile": "deepseek_v41_flash_exl3", "served_model_name": "DeepSeek-v4.1-Flash-EXL3", "nodes": ["spark-1", "spark-2"],
        "head": "spark-1", "api": {"port": 8888, "key": "generated", "bind": "0.0.0.0"}, "notices": ["a notice"],
        "settings": {"serve_max_num_seqs": 2, "serve_max_model_len": 600000, "serve_port": 8888, "report_directory": None},
        "image": {"reference": "registry.example/deepseek:2.9bpw", "digest": "sha256:" + "ab" * 32},
        "artefacts": [{"name": "model", "repository": "acme/model", "revision": "0" * 40}],
        "expected": expected,
    }  # fmt: skip


def decode(what: str, streams: int, rate: float, acceptance: dict | None = None, error: str = "") -> dict[str, t.Any]:
    case = {"kind": "decode", "label": f"{what}, {streams} streams", "what": what, "streams": streams, "max_tokens": 400}
    spread = None if error else {"median": rate, "min": round(rate * 0.9, 3), "max": round(rate * 1.1, 3)}
    run = {"tokens_per_second": None if error else rate, "per_stream": [], "first_token_ms": [], "tokens": [400], "finish": ["length"], "error": error}
    first = None if error else {"median": 221.5, "min": 200.0, "max": 300.0}
    measured = {"what": what, "streams": streams, "max_tokens": 400, "tokens_per_second": spread, "first_token_ms": first, "runs": [run]}
    return {"case": case, "measured": measured, "memory": {"0": int(4.1 * GIB), "1": int(5.8 * GIB)}, "acceptance": acceptance, "seconds": 60.0}


def prefill(tokens: int, rate: float, low: float) -> dict[str, t.Any]:
    case = {"kind": "prefill", "label": f"prompt of {tokens:,} tokens", "tokens": tokens, "max_tokens": 32}
    first = round(tokens / rate, 3)
    measured = {"wanted_tokens": tokens, "tokens": tokens, "first_token_s": first, "tokens_per_second": rate, "decode_tokens_per_second": 20.5, "error": ""}
    return {"case": case, "measured": measured, "memory": {"0": int(low * GIB)}, "acceptance": None, "seconds": first}


def probe(question: str, answer: str, sound: bool | None) -> dict[str, t.Any]:
    measured = {"question": question, "expects": "Paris", "answer": answer, "degenerate": False, "sound": sound, "error": ""}
    return {"case": {"kind": "probe", "label": question}, "measured": measured, "memory": {"0": 4 * GIB, "1": 5 * GIB}, "acceptance": None, "seconds": 0.4}


ACCEPTED = {"drafts": 100, "drafted": 300, "accepted": 210, "ratio": 0.7, "per_step": 2.1, "per_position": [0.9, 0.7, 0.5]}


def bench(stamp: str, factor: float) -> dict[str, t.Any]:
    results = [
        decode("prose", 1, round(31.6 * factor, 3), ACCEPTED), decode("prose", 2, round(42.5 * factor, 3), ACCEPTED), decode("prose", 4, 0, error=HOSTILE),
        decode("counting", 1, round(40 * factor, 3), {**ACCEPTED, "per_position": [1.0, 0.95, 0.9]}),
        prefill(8192, round(970.8 * factor, 3), 3.9), prefill(65536, round(1022.7 * factor, 3), 3.1), prefill(455000, round(802 * factor, 3), 2.56),
        probe("What is the capital of France?", f"Paris {HOSTILE}", True), probe("Odd?", "London", False), probe("Silent?", "", None),
    ]  # fmt: skip
    about = {
        "id": stamp, "begun_at": f"2026-11-{stamp[6:8]} 10:00:00 UTC", "seconds": 900.0,
        "image": "registry.example/deepseek:2.9bpw", "image_digest": "sha256:abab",
        "weights": [{"repository": "acme/model", "revision": "0" * 40}],
    }  # fmt: skip
    survey = {"version": "0.32.0", "max_model_len": 600000, "others_running": 1}
    skipped = [{"case": "prompt of 601,000 tokens", "reason": "the context holds 600,000 tokens, template and answer included"}]
    return bench_document(plan(), survey, results, skipped, about)


def recorder(failed: bool = False) -> Recorder:
    """A run with copies on both nodes, told task by task as the callback tells it."""
    found = Recorder()
    found.task("plan", "spark-1", "Work out", "sparkops.inference.plan", 0, 0.2, "ok", {"spark_plan": plan()})
    for host, version in (("spark-1", "29.1"), ("spark-2", "29.2")):
        facts = {
            "os": {"name": "DGX OS"}, "kernel": "6.17", "docker": {"version": version}, "python": {"version": "3.12.3"},
            "memory": {"available_kib": 110 * 2**20},
        }  # fmt: skip
        found.task("node_facts", host, "Read", "sparkops.inference.node_facts", 0.2, 1, "ok", {"ansible_facts": {"spark_node": facts}})
    done = {"model": {"repository": "acme/model", "bytes": 197 * GIB}}
    found.task("weights", "spark-1", "Fetch", "sparkops.inference.hub_snapshot", 1, 101, "changed", {"changed": True, "done": done})
    copied = {"model": {"files": 39, "bytes": 197 * GIB, "seconds": 80.0, "transport": "ssh"}}
    found.task("weight_sync", "spark-2", "Copy", "sparkops.inference.weight_sync", 101, 190, "changed", {"changed": True, "done": copied})
    shipped = {"ship": {"mode": "layers", "bytes": 9 * GIB, "seconds": 20.0}, "image": {"identity": "sha256:" + "cd" * 32}}
    found.task("image", "spark-2", "Ship", "sparkops.inference.image_ship", 190, 212, "changed", shipped)
    seen = {"verdict": "healthy", "least_available_kib": {"0": 4 * 2**20, "1": 6 * 2**20}}
    found.task("serve", "spark-1", "Wait", "sparkops.inference.serve_health", 212, 400, "ok", seen)
    good = {"rank": {"memory": {"available_kib": 90 * 2**20}, "last_good": {"proven_at": "2026-11-01T10:00:00+00:00", "profile": "glm_53_flash_exl3"}}}
    found.task("serve", "spark-1", "Look", "sparkops.inference.rank_info", 400, 401, "ok", good)
    if failed:
        found.task("serve", "spark-2", "Fail", "ansible.builtin.fail", 401, 402, "failed", {"msg": f"rank 1 ended: {HOSTILE}"})
    else:
        proof = {"proof": {"ok": True, "verdict": "ok", "text": "323", "seconds": 1.5, "detail": ""}}
        found.task("serve", "spark-1", "Prove", "sparkops.inference.serve_proof", 401, 403, "ok", proof)
    return found


def bringup(failed: bool = False) -> dict[str, t.Any]:
    found = recorder(failed)
    about = {
        "id": "20261129T100000Z", "begun_at": "2026-11-29 10:00:00 UTC", "seconds": 403.0, "plays": ["Serve"], "verdict": verdict(found, "staged"),
        "ansible": "2.19.3", "collection": "0.1.0",
    }  # fmt: skip
    return run_document(found, about)
