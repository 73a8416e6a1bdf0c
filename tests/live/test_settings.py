# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Effective settings against a serving pair: what a start would change, and what has no effect."""

from __future__ import annotations

import pytest
from conftest import STUB, inspect, on, play, status


def variables(**more):
    return {
        "serve_deployment": "lab_settings", "image_reference": STUB, "serve_ready_timeout": 120, "serve_port": 8896, "serve_rendezvous_port": 29596,
        "serve_environment": {"LAB_TEXT": "as it was"}, **more,
    }


@pytest.fixture(name="pair", scope="module")
def fixture_pair():
    done = play("site", variables=variables())
    assert done.code == 0, done.text[-4000:]
    yield
    assert play("stop", variables=variables()).code == 0


def test_the_settings_of_a_serving_group_change_nothing(pair):
    code, document = status(variables=variables(status_settings=True))
    assert code == 0
    assert document["would_change"] == {name: {"changes": [], "reason": ""} for name in ("spark-1", "spark-2")}
    assert document["settings"]["serve_port"] == {"origin": "extra vars", "value": 8896}
    assert document["settings"]["serve_profile"]["origin"] == "inventory" and document["settings"]["serve_dtype"]["origin"] == "profile"
    assert document["settings"]["serve_boot"]["origin"] == "default"


def test_what_a_start_would_change_is_named_for_each_rank_and_not_done(pair):
    started = inspect("spark-1", "lab_settings-rank0")["State"]["StartedAt"]
    wishes = variables(serve_environment={"LAB_TEXT": "other"}, serve_max_num_seqs=3, image_reference=STUB.replace("stub:1", "stub:9"))
    for done in (play("settings", variables=wishes), play("status", variables={**wishes, "status_settings": True})):
        for change in ("argument --max-num-seqs: 2 -> 3", "variable LAB_TEXT: as it was -> other", "-> not on this node yet"):
            assert done.text.count(change) >= 2, done.text[-4000:]
        # What the fabric decides is the same as at the start.
        assert "absent" not in done.text
    assert inspect("spark-1", "lab_settings-rank0")["State"]["StartedAt"] == started


def test_variables_of_a_login_are_named_and_ignored(pair):
    on("spark-2", "printf 'export HF_HOME=/nowhere MAX_MODEL_LEN=7 LAB_OTHER=1\\n' >>/data/home/bob/.profile; chown bob /data/home/bob/.profile")
    try:
        done = play("settings", variables=variables())
        assert done.code == 0 and "environment of spark-2 and ignored: HF_HOME, MAX_MODEL_LEN" in done.text, done.text[-3000:]
        again = play("site", variables=variables())
        assert again.code == 0 and "changed=1" not in again.text, again.text[-3000:]
        container = inspect("spark-2", "lab_settings-rank1")
        assert "--max-model-len" in container["Args"] and container["Args"][container["Args"].index("--max-model-len") + 1] == "256"
        assert not any("/nowhere" in pair or "MAX_MODEL_LEN" in pair for pair in container["Config"]["Env"])
    finally:
        on("spark-2", "sed -i '/LAB_OTHER/d' /data/home/bob/.profile")
