#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_bench
short_description: Measure one thing of a serving group, from rank 0
version_added: 0.1.0
description:
  - Streams chats to rank 0's API (temperature 0, thinking off) and measures the time to the first token and tokens a second.
  - Meanwhile it reads the available memory of every rank, and afterwards what the engine's metrics say about accepted drafts.
  - One call is one case, so that the play shows how far it is. It judges nothing.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.read_only
  - sparkops.inference.engine
options:
  program:
    description: Path of rank_service.py on this node, through which the memory of the other ranks is read.
    type: path
    required: true
  case:
    description:
      - What is measured. Its key C(kind) is one of V(survey), V(warmup), V(decode), V(prefill), V(probe).
      - Role P(sparkops.inference.bench#role) makes the others from what the survey returns.
    type: dict
    required: true
  timeout:
    description: Seconds that one request may take.
    type: int
    default: 1800
"""

EXAMPLES = r"""
- name: Ask what there is to measure
  sparkops.inference.serve_bench:
    state_dir: /var/lib/sparkops/lab_tiny
    program: /usr/local/lib/sparkops/rank_service.py
    api_port: 8888
    model: tiny
    case: {kind: survey}
"""

RETURN = r"""
measured:
  description: The numbers of the case; its keys depend on the kind.
  returned: success
  type: dict
memory:
  description: The least MemAvailable in bytes that was seen of each rank, by rank number.
  returned: success
  type: dict
acceptance:
  description: Drafts, accepted tokens, their ratio, and the ratio at each position; null without drafting.
  returned: success
  type: dict
seconds:
  description: How long the case took.
  returned: success
  type: float
"""

import sys
import threading
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._bench_plan import chat_body, filler, words_for
from ansible_collections.sparkops.inference.plugins.module_utils._bench_stats import (
    RUNNING,
    acceptance,
    decode_case,
    parse_metrics,
    prefill_case,
    probe_case,
    run_of,
    total,
)
from ansible_collections.sparkops.inference.plugins.module_utils._engine_api import call, served_models
from ansible_collections.sparkops.inference.plugins.module_utils._engine_stream import Streamed, stream_chat
from ansible_collections.sparkops.inference.plugins.module_utils._group_channel import ask_group, lowest
from ansible_collections.sparkops.inference.plugins.module_utils._node import parse_meminfo
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import api_address, read_api_key
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

# This node's own memory costs a file read; the other ranks cost an ssh round trip each, whose heartbeats change once a second.
OWN_SECONDS = 0.2
RANKS_SECONDS = 2.0
REMEMBERED_SECONDS = 10.0
SAMPLE_WORDS = 400
SIZING_ROUNDS = 6


class MemoryWatch(threading.Thread):
    """Reads the available memory of all ranks until it is told to end."""

    def __init__(self, read_own: t.Callable[[], int], read_ranks: t.Callable[[], dict[str, int]]) -> None:
        super().__init__(daemon=True)
        self.read_own, self.read_ranks = read_own, read_ranks
        self.samples: list[dict[str, int]] = []
        self.over = threading.Event()

    def run(self) -> None:
        due = 0.0
        while True:
            self.samples.append({"0": self.read_own()})
            if time.monotonic() >= due:
                self.samples.append(self.read_ranks())
                due = time.monotonic() + RANKS_SECONDS
            if self.over.wait(OWN_SECONDS):
                return

    def lowest(self) -> dict[str, int]:
        self.over.set()
        self.join(30)
        return lowest(self.samples)


class Bench:
    """The cases, against one API."""

    def __init__(self, params: t.Mapping[str, t.Any], key: str) -> None:
        self.port, self.model, self.timeout, self.key = params["api_port"], params["model"], params["timeout"], key
        self.address = api_address(params["state_dir"])

    def metrics(self) -> str:
        answer = call(self.address, self.port, "GET", "/metrics", timeout=10)
        return answer.document if answer.status == 200 and isinstance(answer.document, str) else ""

    def chat(self, prompt: str, max_tokens: int) -> Streamed:
        return stream_chat(self.address, self.port, self.key, chat_body(self.model, prompt, max_tokens), self.timeout)

    def survey(self, case: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        models = call(self.address, self.port, "GET", "/v1/models", key=self.key, timeout=10)
        version = call(self.address, self.port, "GET", "/version", timeout=10)
        metrics = parse_metrics(self.metrics())
        mine = [entry for entry in (models.document or {}).get("data", []) if entry.get("id") == self.model] if models.status == 200 else []
        return {
            "served": served_models(models),
            "said": models.error or f"HTTP {models.status}",
            "max_model_len": mine[0].get("max_model_len") if mine else None,
            "version": (version.document or {}).get("version", "") if version.status == 200 else "",
            "metrics": bool(metrics),
            "others_running": int(total(metrics, RUNNING) or 0),
        }

    def warmup(self, case: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        return run_of([self.chat(case["prompt"], case["max_tokens"])])

    def decode(self, case: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        return decode_case(case, [run_of(self.together(case)) for dummy in range(case["runs"])])

    def together(self, case: t.Mapping[str, t.Any]) -> list[Streamed]:
        """The same chat in as many streams at the same moment."""
        results: list[Streamed] = []
        gate = threading.Barrier(case["streams"])

        def one() -> None:
            gate.wait(30)
            results.append(self.chat(case["prompt"], case["max_tokens"]))

        threads = [threading.Thread(target=one) for dummy in range(case["streams"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def prefill(self, case: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        prompt, error = self.sized(case["tokens"])
        return prefill_case(case, Streamed(begun=0, error=error) if error else self.chat(prompt, case["max_tokens"]))

    def sized(self, tokens: int) -> tuple[str, str]:
        """A prompt of at most ``tokens`` tokens, and nearly as many, as the engine's own tokenizer counts; or why there is none."""
        nonce = f"{time.time_ns():x}"
        words = min(SAMPLE_WORDS, tokens)
        for dummy in range(SIZING_ROUNDS):
            prompt = filler(words, nonce)
            answer = call(self.address, self.port, "POST", "/tokenize", key=self.key, body={"model": self.model, "prompt": prompt}, timeout=120)
            if answer.status != 200 or not isinstance(answer.document, dict):
                return "", f"/tokenize: {answer.error or f'HTTP {answer.status}'}"
            counted = answer.document["count"]
            if 0.98 * tokens <= counted <= tokens or (words == 1 and counted <= tokens):
                return prompt, ""
            words = words_for(tokens, words, counted)
        return (prompt, "") if counted <= tokens else ("", f"{words} words are {counted} tokens, wanted are at most {tokens}")

    def probe(self, case: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        streamed = self.chat(case["question"], case["max_tokens"])
        return probe_case(case, streamed.text, streamed.error)


KINDS: dict[str, t.Callable[[Bench, t.Mapping[str, t.Any]], dict[str, t.Any]]] = {
    "survey": Bench.survey, "warmup": Bench.warmup, "decode": Bench.decode, "prefill": Bench.prefill, "probe": Bench.probe,
}  # fmt: skip


def own_available() -> int:
    with open("/proc/meminfo", encoding="utf-8") as stream:
        return parse_meminfo(stream.read())["MemAvailable"] * 1024


def ranks_available(module: AnsibleModule, begun: float) -> dict[str, int]:
    """The services sample more often than this asks, and know the lowest of ten seconds; a younger case takes what is available now."""
    name = "lowest_kib" if time.monotonic() - begun >= REMEMBERED_SECONDS else "available_kib"
    answer = ask_group(module.run_command, sys.executable, module.params["program"], "group-state", module.params["state_dir"])
    return {
        rank: one["memory"][name] * 1024
        for rank, one in answer["ranks"].items()
        if one.get("service") == "alive" and (one.get("memory") or {}).get(name)
    }


def not_serving(model: str, port: int, survey: t.Mapping[str, t.Any]) -> Refusal:
    return Refusal(
        "bench.not_serving", "", f"port {port} of the head", f"models {', '.join(survey['served']) or 'none'} ({survey['said']})", f"model {model}",
        "run play status, and play site where the group does not serve",
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "program": {"type": "path", "required": True},
            "api_port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "case": {"type": "dict", "required": True},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    case = module.params["case"]
    if case.get("kind") not in KINDS:
        module.fail_json(msg=f"case.kind is {case.get('kind')!r}; wanted one of {', '.join(KINDS)}")
    bench = Bench(module.params, read_api_key(module.params["state_dir"]))
    begun, before = time.monotonic(), bench.metrics()
    watch = MemoryWatch(own_available, lambda: ranks_available(module, begun))
    watch.start()
    measured = KINDS[case["kind"]](bench, case)
    memory = watch.lowest()
    if case["kind"] == "survey" and module.params["model"] not in measured["served"]:
        refusal = not_serving(module.params["model"], module.params["api_port"], measured)
        module.fail_json(msg=refusal.text, refusals=[refusal.as_dict()])
    module.exit_json(
        changed=False, measured=measured, memory=memory, acceptance=acceptance(before, bench.metrics()), seconds=round(time.monotonic() - begun, 1)
    )


if __name__ == "__main__":
    main()
