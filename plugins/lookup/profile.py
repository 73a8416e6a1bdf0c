# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: profile
short_description: The data of a profile
version_added: 0.1.0
author: The sparkops.inference authors (@sparkops)
description:
  - Finds a profile on the search path, puts it over what it extends, and returns its data.
  - The search path is the collection's own profiles, then the directories in O(paths), then C(profiles/) beside the inventory.
options:
  _terms:
    description: Names of profiles.
    required: true
    type: list
    elements: str
  paths:
    description: Directories to search. Relative ones are beside the inventory.
    type: list
    elements: str
    default: []
    vars:
      - name: serve_profile_paths
"""

EXAMPLES = r"""
- name: Show which files a profile wants
  ansible.builtin.debug:
    msg: "{{ lookup('sparkops.inference.profile', 'deepseek_v41_flash_exl3').artefacts }}"
"""

RETURN = r"""
_raw:
  description: The data of the profiles.
  type: list
  elements: dict
"""

import typing as t

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

from ansible_collections.sparkops.inference.plugins.module_utils._profile import ProfileError, with_parents
from ansible_collections.sparkops.inference.plugins.plugin_utils._inventory_values import inventory_directories
from ansible_collections.sparkops.inference.plugins.plugin_utils._profile_files import ProfileFiles


class LookupModule(LookupBase):
    def run(self, terms: list[str], variables: dict[str, t.Any] | None = None, **kwargs: t.Any) -> list[dict[str, t.Any]]:
        self.set_options(var_options=variables, direct=kwargs)
        files = ProfileFiles(self.get_option("paths"), inventory_directories(variables or {}, self._loader.get_basedir()))
        result = []
        for name in terms:
            try:
                if files.find(name) is None:
                    raise AnsibleError(f"no profile {name}; there are {', '.join(files.names())}")
                result.append(with_parents(name, files.find))
            except ProfileError as error:
                raise AnsibleError(str(error)) from error
        return result
