# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A task that runs once takes the conditions of its import, and asks the first host alone: one beside the group would skip it for all."""

from __future__ import annotations

import pathlib
import typing as t

import pytest
import yaml

ROLES = pathlib.Path(__file__).resolve().parents[2] / "roles"
OF_A_HOST = ("spark_rank", "inventory_hostname")


def flattened(tasks: t.Sequence[dict[str, t.Any]], when: str = "") -> t.Iterator[tuple[dict[str, t.Any], str]]:
    """Tasks with all conditions that are evaluated for each host."""
    for task in tasks or ():
        own = f"{when} {task.get('when', '')}"
        yield task, own
        for part in ("block", "rescue", "always"):
            yield from flattened(task.get(part, ()), own)


def once(role: str, file: str, when: str) -> t.Iterator[str]:
    """Names of tasks that run once below a condition that differs between hosts. A dynamic include begins anew: hosts that skip it do not count."""
    for task, own in flattened(yaml.safe_load((ROLES / role / "tasks" / file).read_text(encoding="utf-8")), when):
        if task.get("run_once") and any(word in own for word in OF_A_HOST):
            yield f"{role}/{file}: {task['name']}"
        imported = task.get("ansible.builtin.import_tasks")
        other = task.get("ansible.builtin.import_role")
        if imported:
            yield from once(role, imported, own)
        elif other:
            yield from once(other["name"].rpartition(".")[2], other.get("tasks_from", "main.yml"), own)


@pytest.mark.parametrize("role", sorted(path.parent.name for path in ROLES.glob("*/tasks")))
def test_no_task_that_runs_once_depends_on_the_first_host(role):
    assert not [name for path in sorted((ROLES / role / "tasks").glob("*.yml")) for name in once(role, path.name, "")]
