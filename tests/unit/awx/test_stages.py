# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The summary of stages: whose time it was, and what changed where."""

from __future__ import annotations

from ansible_collections.sparkops.inference.plugins.callback.stages import Clock


def clock(*moments):
    return Clock(iter(moments).__next__)


def test_time_belongs_to_the_role_whose_task_runs():
    times = clock(0, 2, 2, 5, 5, 6)
    for role in ("sparkops.inference.plan", "sparkops.inference.weights", "sparkops.inference.plan"):
        times.begin(role)
    times.end()
    assert [(name, stage.seconds) for name, stage in times.stages.items()] == [("plan", 3), ("weights", 3)]


def test_tasks_of_others_are_no_stage():
    times = clock(0, 4)
    times.begin("sparkops.inference.serve")
    times.begin("somebody.else.role")
    times.begin(None)
    times.end()
    times.stage("somebody.else.role").changed.add("spark-1")
    assert times.lines(check=False) == ["serve      4.0 s  ok"]


def test_a_line_says_what_changed_or_would_change_and_what_failed():
    times = clock(0, 1)
    times.begin("sparkops.inference.image")
    times.end()
    stage = times.stage("sparkops.inference.image")
    stage.changed.update(("spark-2", "spark-1"))
    assert stage.words(check=False) == "changed spark-1, spark-2"
    stage.failed.add("spark-3")
    assert stage.words(check=True) == "would change spark-1, spark-2; failed on spark-3"


def test_nothing_of_ours_prints_nothing():
    assert Clock().lines(check=False) == []
