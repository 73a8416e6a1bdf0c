# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The memory sections of the profiles as they are shipped."""

from __future__ import annotations

import pathlib
import typing as t

import yaml
from ansible_collections.sparkops.inference.plugins.module_utils._profile import with_parents

FOLDER = pathlib.Path(__file__).parents[3] / "roles/plan/files/profiles"


def _find(name: str) -> dict[str, t.Any] | None:
    path = FOLDER / f"{name}.yml"
    # As Ansible does: libyaml where it is there, which is more tolerant than the loader in Python.
    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if path.exists() else None  # noqa: S506


def memory_of(name: str) -> dict[str, t.Any]:
    return with_parents(name, _find)["memory"]
