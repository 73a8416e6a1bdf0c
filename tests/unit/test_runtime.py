# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""meta/runtime.yml: the groups of module_defaults."""

from __future__ import annotations

import glob
import importlib
import os

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMMON = {"docker": {"docker_socket"}, "engine": {"state_dir", "api_port", "model"}, "node": {"node"}}


def groups():
    with open(os.path.join(ROOT, "meta/runtime.yml"), encoding="utf-8") as stream:
        return yaml.safe_load(stream)["action_groups"]


def documentation(name, kind):
    """DOCUMENTATION, or another text of a kind, of a module or fragment of ours. Ansible's own reader takes a second for each module."""
    module = importlib.import_module(f"ansible_collections.sparkops.inference.plugins.{name}")
    return yaml.load(getattr(getattr(module, "ModuleDocFragment", module), kind), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def options_of(module):
    document = documentation(f"modules.{module}", "DOCUMENTATION")
    found = set(document.get("options", ()))
    for fragment in document.get("extends_documentation_fragment", ()):
        name, dummy, kind = fragment.removeprefix("sparkops.inference.").partition(".")
        found |= set(documentation(f"doc_fragments.{name}", kind.upper() or "DOCUMENTATION").get("options", ()))
    return found


def test_a_group_has_all_modules_with_its_options_and_no_other():
    modules = (os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, "plugins/modules/[a-z]*.py")))
    options = {module: options_of(module) for module in modules}
    assert groups() == {name: sorted(module for module, own in options.items() if common <= own) for name, common in COMMON.items()}


def test_the_groups_are_documented():
    with open(os.path.join(ROOT, "docs/architecture.md"), encoding="utf-8") as stream:
        text = stream.read()
    assert [name for name in groups() if f"| `{name}` | {', '.join(f'`{option}`' for option in sorted(COMMON[name]))} |" not in text] == []
