# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The knobs of both launch scripts, the files made from the table, and that no variable is without effect."""

from __future__ import annotations

import json
import pathlib
import re
import typing as t

import generate
import pytest
import yaml
from planner_request import HERE, ROOT, THREE_NODES, planned, specs

from ansible_collections.sparkops.inference.plugins.module_utils import _launcher_env, _plan
from ansible_collections.sparkops.inference.plugins.module_utils._options import Option, options

NAMES = yaml.safe_load((HERE / "upstream_names.yml").read_text(encoding="utf-8"))
# Counted by hand in the facts; a lost row is seen here, whatever the other files say.
COUNTS = {"deepseek": 167, "glm": 252}


@pytest.mark.parametrize("path", list(generate.FILES), ids=lambda path: path.name)
def test_made_files_are_up_to_date(path: pathlib.Path) -> None:
    assert path.read_text(encoding="utf-8") == generate.FILES[path](), f"run tests/unit/plan/generate.py: {path} is behind"


@pytest.mark.parametrize("recipe", sorted(COUNTS))
def test_no_knob_is_missing(recipe: str) -> None:
    documented = yaml.safe_load((ROOT / "docs" / "knobs.yml").read_text(encoding="utf-8"))["knobs"]
    rows = [row["upstream"] for row in documented if recipe in row["recipes"]]
    assert len(rows) == len(set(rows)) == len(NAMES[recipe]) == COUNTS[recipe]
    assert sorted(rows) == sorted(NAMES[recipe])


def test_every_knob_says_where_it_is_now() -> None:
    for row in generate.knobs():
        assert row["ranks"] in ("B", "H", "P", "L") and row["where"], row
        assert row["variables"] or row.get("note"), row
        assert ("reader" in row) != ("values" in row), row
        assert row.get("reader", "text") in _launcher_env._READERS, row


def test_knobs_name_options_that_exist() -> None:
    known = generate.catalogues()
    for row in generate.knobs():
        for recipe in row["recipes"]:
            names = {name for profile in generate.RECIPES[recipe] for name in known[profile]}
            assert set(row["variables"]) <= names, row
            for values in row.get("values", {}).values():
                assert set(values) <= names, row


def test_options_and_knobs_tell_the_same_story() -> None:
    """An option's upstream names are rows that name the option."""
    known = generate.catalogues()
    rows = {(recipe, row["upstream"]): row for row in generate.knobs() for recipe in row["recipes"]}
    for recipe, profiles in generate.RECIPES.items():
        for profile in profiles:
            for name, option in known[profile].items():
                for upstream in option.upstream:
                    if (recipe, upstream) in rows:
                        assert name in rows[recipe, upstream]["variables"], (profile, name, upstream)


def test_every_documented_place_exists() -> None:
    """Arguments and variables that the page names are in the container of some state of the recipe."""
    texts = {}
    for recipe, profiles in generate.RECIPES.items():
        parts = [generate.profiles()[profile].get(part) for profile in profiles for part in ("arguments", "environment")]
        texts[recipe] = (
            json.dumps(parts)
            + "--port --master-port --master-addr --tensor-parallel-size --nnodes --served-model-name"
            + " ".join(_plan.engine.RESERVED_ENVIRONMENT)
        )
    for row in generate.knobs():
        for recipe in row["recipes"] if len(row["recipes"]) == 1 else []:
            for place in re.findall(r"`(--[a-z-]+|[A-Z][A-Z0-9_]+)`", row["where"]):
                assert place in texts[recipe], (row["upstream"], place)


# -- every variable has an effect ------------------------------------------------------------------------------------

# A value that is not the default, where it cannot be made up from kind and range.
OTHER: dict[str, t.Any] = {
    "serve_kv_cache_dtype": "auto",
    "serve_host_nccl_dir": "/nccl",
    "serve_nccl_ring_library": "/nccl.so",
    "serve_cuda_arch": "12.0",
    "serve_cuda_allocator": "none",
    "serve_mixed_prefill": "128",
    "serve_spinwait_ms": 16,
    "serve_reasoning_effort": "low",
    "serve_exl3_moe_shape": "2,12,8",
    "serve_nccl_protocols": "Simple",
    "serve_multimodal_limits": {"image": 2},
    "serve_hf_overrides": {"x": 1},
    "serve_speculative_config": {"method": "ngram"},
    "serve_capture_sizes": [1, 2],
    "serve_dense_fp8": ["kda"],
    "serve_dense_exl3_prefill_bf16": ["kda_in"],
    "serve_adaptive_k_set": [1, 2],
    "serve_adaptive_k_saturate": "3",
    "serve_model_repository": "acme/other",
    "serve_drafter_repository": "acme/other",
    "serve_engram_repository": "acme/other",
    "serve_model_revision": "b" * 40,
    "serve_drafter_revision": "b" * 40,
    "serve_engram_revision": "b" * 40,
    "serve_model_fallbacks": ["acme/other"],
    "serve_model_include": ["*.json"],
    "serve_model_exclude": ["*.bin"],
    "serve_ablit_direction_file": "x.pt",
    "serve_chat_template_file": "x.jinja",
    "serve_prefix_match_unit": 64,
}

# Some have an effect only beside others.
BESIDE: dict[str, dict[str, t.Any]] = {
    "serve_host_nccl_library": {"serve_host_nccl_dir": "/nccl"},
    "serve_capture_sizes": {"serve_enforce_eager": False},
    "serve_mtp_tokens": {"serve_speculation_method": "mtp"},
    "serve_ablit_direction_file": {"serve_ablit": True},
    "serve_multimodal_encoder_mode": {"serve_language_model_only": False},
    "serve_multimodal_limits": {"serve_language_model_only": False},
    "serve_skip_multimodal_profiling": {"serve_language_model_only": False},
    "serve_nccl_subnet_prefix": {},
    "serve_nccl_ring_library": {"serve_nccl_ring": True},
    "serve_attention_slice_tokens": {"_ranks": 4},
}


def other_value(option: Option, current: t.Any) -> t.Any:
    if option.name in OTHER:
        return OTHER[option.name]
    if option.choices:
        return next(choice for choice in option.choices if choice != current)
    if option.kind == "bool":
        return not current
    if option.kind in ("int", "float", "size"):
        start = current if isinstance(current, (int, float)) and not isinstance(current, bool) else (option.minimum or 1)
        step = 0.05 if option.kind == "float" else 1
        return start - step if option.maximum is not None and start + step > option.maximum else start + step
    return {"str": "other", "path": "/other", "list": ["other"], "dict": {"other": "1"}}[option.kind]


def essence(plan: dict[str, t.Any]) -> str:
    """What is done because of a plan: containers, files to fetch, image, proof, budget. Settings themselves do not count."""
    bare = [{key: value for key, value in spec.items() if key != "labels"} for spec in specs(plan)]
    parts = ("artefacts", "image", "files", "timeouts", "proof", "warmup", "memory", "sampling", "served_model_name", "api")
    return json.dumps([bare, {part: plan[part] for part in parts}], sort_keys=True)


def profile_variables() -> list[t.Any]:
    return [
        pytest.param(profile, name, id=f"{profile}-{name}")
        for profile, known in generate.catalogues().items()
        for name in known
        if name not in options()
    ]


@pytest.mark.parametrize(("profile", "name"), profile_variables())
def test_every_profile_variable_changes_the_deployment(profile: str, name: str) -> None:
    beside = dict(BESIDE.get(name, {}))
    ranks = beside.pop("_ranks", 2)
    rules = list(generate.profiles()[profile].get("rules") or {})
    known = generate.catalogues()[profile]
    base = {name: value for name, value in beside.items() if name in known}
    if profile == "generic_vllm":
        base.update(serve_model_repository="acme/model", serve_model_revision="a" * 40, image_reference="i:1")
    # Whether the profile is well formed is another test's question, and the slowest part of a plan.
    base.update(serve_accept_rules=rules, _schema={})
    before = planned(profile, ranks, **base)
    value = other_value(known[name], before["settings"][name])
    after = planned(profile, ranks, **{**base, name: value})
    assert essence(before) != essence(after), f"{name} = {value!r} changes nothing"


# -- settings that roles read ----------------------------------------------------------------------------------------


def test_roles_read_only_settings_that_exist() -> None:
    pattern = re.compile(r"spark_plan\.settings\.([a-z_0-9]+)")
    secrets = {name for name, option in options().items() if option.secret}
    known = {name for profile in generate.catalogues().values() for name in profile}
    for path in [*ROOT.glob("roles/*/*/*.yml"), *ROOT.glob("playbooks/*.yml"), *ROOT.glob("roles/*/templates/*")]:
        for name in pattern.findall(path.read_text(encoding="utf-8")):
            assert name in known, f"{path.relative_to(ROOT)} reads {name}"
            assert name not in secrets, f"{path.relative_to(ROOT)} reads {name}, and a secret is never in the plan"


def test_three_nodes_golden_has_the_shape_files() -> None:
    assert planned("glm_53_flash_exl3_latest", 3, serve_files=THREE_NODES)["ranks"] == 3
