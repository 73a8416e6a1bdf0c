#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: api_key
short_description: Keep the API key of a deployment in a file that only its owner reads
version_added: 0.1.0
description:
  - Generates a key at the first bring-up, or stores the given one, and returns a salted HMAC of it, never the key.
  - The HMAC enters the spec of rank 0, so that a changed key is noticed while the key stays out of labels and logs.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Tells what would change.
  diff_mode:
    support: none
    description: A secret has no diff.
options:
  state_dir:
    description: Directory of the deployment on rank 0.
    type: path
    required: true
  mode:
    description:
      - V(generated) keeps the present key or makes one.
      - V(given) stores O(key).
      - V(none) removes the file, so that the API is open.
    type: str
    choices: [generated, given, none]
    default: generated
  key:
    description: The key for O(mode=given).
    type: str
"""

EXAMPLES = r"""
- name: Make sure of a key
  sparkops.inference.api_key:
    state_dir: /var/lib/sparkops/lab_tiny
"""

RETURN = r"""
path:
  description: Where the key is; empty when the API has none.
  returned: always
  type: str
hmac:
  description: Salted HMAC of the key; empty when there is none, or in check mode when it would be made.
  returned: always
  type: str
"""

import hashlib
import hmac
import os
import secrets

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import API_KEY_FILE, read_api_key

SALT_FILE = "api_key_salt"


def write_private(path: str, text: str) -> None:
    """Replace the file in one step; nobody else can read it at any moment."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    partial = f"{path}.{os.getpid()}.partial"
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(partial, path)


def salt(state_dir: str) -> bytes:
    path = os.path.join(state_dir, SALT_FILE)
    if not os.path.exists(path):
        write_private(path, secrets.token_hex(16))
    with open(path, encoding="utf-8") as stream:
        return stream.read().encode()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "mode": {"type": "str", "choices": ["generated", "given", "none"], "default": "generated"},
            "key": {"type": "str", "no_log": True},
        },
        required_if=[("mode", "given", ("key",))],
        supports_check_mode=True,
    )
    state_dir, mode = module.params["state_dir"], module.params["mode"]
    path = os.path.join(state_dir, API_KEY_FILE)
    present = read_api_key(state_dir)
    wanted = {"none": "", "given": module.params["key"], "generated": present or secrets.token_urlsafe(32)}[mode]
    changed = wanted != present
    private = not present or os.stat(path).st_mode & 0o077 == 0
    if module.check_mode:
        known = bool(wanted) and wanted == present and os.path.exists(os.path.join(state_dir, SALT_FILE))
        digest = hmac.new(salt(state_dir), wanted.encode(), hashlib.sha256).hexdigest() if known else ""
        module.exit_json(changed=changed or not private, path=path if wanted else "", hmac=digest)
    if not wanted and present:
        os.unlink(path)
    elif wanted and (changed or not private):
        write_private(path, wanted)
    digest = hmac.new(salt(state_dir), wanted.encode(), hashlib.sha256).hexdigest() if wanted else ""
    module.exit_json(changed=changed or not private, path=path if wanted else "", hmac=digest)


if __name__ == "__main__":
    main()
