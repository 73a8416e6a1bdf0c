# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""docs/symptoms.yml has every hint of both recipes' documents, and names nothing that does not exist."""

from __future__ import annotations

import glob
import os
import re

import pytest
import yaml
from bench_samples import ROOT

from ansible_collections.sparkops.inference.plugins.module_utils._options import options

OPTION = re.compile(r"\b(?:serve|image|weights|weight_sync|engram|fabric|memory|bootstrap)_[a-z_]+\b(?![.]yml)")
# The "do not" lists of the two documents, which are rules of the profiles, and what else they warn of or advise: in the words of their chapters.
RULES = [*(f"D{number}" for number in range(1, 16)), *(f"G{number}" for number in range(1, 21))]
DEEPSEEK = {
    "env-order": "the settings file holds against a prefix on the command line",
    "resume": "a download goes on when it is started again",
    "hub-tool": "the hub's command line with its transfer part is needed",
    "engram-dir": "a complete native checkpoint can be used in place",
    "first-load": "what the first start does in order, minutes of it",
    "build": "when the image is built, kept or pulled",
    "ship-resume": "the image is shipped so that it can go on, or as a stream",
    "launcher-only": "containers are not handled one by one",
    "status-and-logs": "status, logs of either rank, stop, restart",
    "skip-sync": "restart without the copy",
    "stall-420": "420 s without a log line",
    "smoke": "17*19 is 323",
    "sampling": "temperature 1.0, top_p 0.95, effort",
    "spec-batches": "drafts help one or two streams",
    "boot-margin": "memory of a node and its parts",
    "long-prefill": "judge memory after a long prompt",
    "one-knob": "raise one setting at a time",
    "guard": "the guard ends its own container whoever is to blame",
    "nfs": "NFS is the default way to the worker",
    "zfs-space": "ZFS wants 385 GiB on each node",
    "rsync": "a plain local copy",
    "engram-pack": "packed rows, 25 to 50 %",
    "self-check": "GPU checks before the start",
    "interface": "loopback aliases and interfaces",
    "gid-errno61": "a wrong GID ends a rank after a minute",
}
GLM = {
    "not-healthy": "read both logs, check ssh, disk, Docker, cache, interfaces",
    "nccl-hang": "interfaces and devices of both nodes",
    "ghcr": "the worker needs no registry",
    "ghcr-limit": "anonymous limits want an account",
    "slow-drafts": "method, tokens, attention backend, kind of text",
    "ready-timeout": "loading and graphs take long, 3600 s",
    "env-order": "values before a command hold against the file",
    "prefetch": "weights can be fetched beforehand",
    "hub-tool": "hf or huggingface-cli on the head",
    "skip-transfers": "what is there need not be transferred again",
    "self-check": "GPU check before the image is shipped",
    "headroom": "memory of both nodes before a start",
    "context": "900,000 tokens, 982,612 in the cache",
    "thinking": "chat_template_kwargs at the top level",
    "sampling": "sampling in each request",
    "prefix": "prefix caching is no session",
    "ablit": "lower alpha when it loses its thread",
    "docker-without-sudo": "Docker without sudo on both",
    "ssh-to-worker": "ssh without a password to the worker",
    "tools-on-head": "curl and rsync on the head",
    "other-recipe": "not in place of the older NVFP4 deployment",
}
HINTS = [*RULES, *(f"dsv:{name}" for name in DEEPSEEK), *(f"glm:{name}" for name in GLM)]

with open(os.path.join(ROOT, "docs/symptoms.yml"), encoding="utf-8") as symptoms:
    SYMPTOMS = yaml.safe_load(symptoms)


def test_no_hint_is_missing_and_none_is_invented():
    covered = {hint for entry in SYMPTOMS for hint in entry["hints"]}
    assert covered == set(HINTS)


@pytest.mark.parametrize("entry", SYMPTOMS, ids=lambda entry: entry["symptom"][:40])
def test_what_an_entry_names_exists(entry):
    assert set(entry) - {"says"} == {"symptom", "ids", "do", "plays", "hints"} and entry["do"] and entry["plays"]
    refusals = set()
    for path in glob.glob(os.path.join(ROOT, "docs/refusals/*.yml")):
        with open(path, encoding="utf-8") as stream:
            refusals |= {refusal["id"] for refusal in yaml.safe_load(stream)}
    assert set(entry["ids"]) <= refusals
    assert all(os.path.exists(os.path.join(ROOT, f"playbooks/{play}.yml")) for play in entry["plays"])
    code = ""
    for name in ("_doctor", "_nccl_log"):
        with open(os.path.join(ROOT, f"plugins/module_utils/{name}.py"), encoding="utf-8") as stream:
            code += stream.read()
    assert all(words in code for words in entry.get("says", []))


def test_rules_that_the_hints_name_are_rules_of_the_profiles():
    for letter, profile in (("D", "deepseek_v41_flash_exl3"), ("G", "glm_53_flash_exl3")):
        with open(os.path.join(ROOT, f"roles/plan/files/profiles/{profile}.yml"), encoding="utf-8") as stream:
            rules = yaml.safe_load(stream)["rules"]
        assert {hint for hint in RULES if hint.startswith(letter)} == {name for name in rules if name[1:].isdigit()}


def test_the_options_that_are_named_exist():
    known = set(options())
    for path in glob.glob(os.path.join(ROOT, "roles/plan/files/profiles/*.yml")):
        with open(path, encoding="utf-8") as stream:
            known |= set(yaml.safe_load(stream).get("options") or {})
    assert {name for entry in SYMPTOMS for name in OPTION.findall(entry["do"])} - known == set()
