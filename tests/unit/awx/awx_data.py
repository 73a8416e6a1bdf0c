# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Reads playbooks/vars/awx.yml, and says what of a job template does not exist."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import typing as t

import pytest
import yaml
from awx_survey import DATA, ROOT

# ansible-test replaces parts of Ansible in its processes, and these tests start Ansible themselves; plain pytest runs them.
UNDER_ANSIBLE_TEST = "ansible_pytest_collections" in os.environ.get("PYTEST_PLUGINS", "")
needs_own_ansible = pytest.mark.skipif(UNDER_ANSIBLE_TEST, reason="runs under plain pytest, not under ansible-test")


class Loader(yaml.SafeLoader):
    """Knows Ansible's tag for text that is no template."""


Loader.add_constructor("!unsafe", lambda loader, node: loader.construct_scalar(node))


def data() -> dict[str, t.Any]:
    with open(DATA, encoding="utf-8") as stream:
        return yaml.load(stream, Loader)


def environment(**more: str) -> dict[str, str]:
    """For ansible-playbook of the Python that runs the tests, without what a test runner has set for itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTEST_", "PYTHONPATH", "CONTROLLER_", "TOWER_"))}
    collections = os.environ.get("ANSIBLE_COLLECTIONS_PATH") or os.path.join(ROOT, ".collections")
    return {**clean, "ANSIBLE_COLLECTIONS_PATH": collections, "ANSIBLE_FORCE_COLOR": "0", "PYTHONUNBUFFERED": "1", **more}


def ansible_playbook(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ansible", "playbook", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, check=False)


@functools.lru_cache
def tags_of(playbook: str) -> frozenset[str]:
    done = ansible_playbook("-i", "inventories/sample/hosts", playbook, "--list-tags")
    return frozenset(tag.strip() for found in re.findall(r"TASK TAGS: \[(.*)\]", done.stdout) for tag in found.split(","))


def faults(template: t.Mapping[str, t.Any]) -> list[str]:
    """What a job template names and the checkout does not have."""
    playbook = template["playbook"]
    if not os.path.exists(os.path.join(ROOT, playbook)):
        return [f"{template['name']}: no {playbook}"]
    wanted = [tag for tag in template.get("job_tags", "").split(",") if tag]
    return [f"{template['name']}: {playbook} has no tag {tag}" for tag in wanted if tag not in tags_of(playbook)]
