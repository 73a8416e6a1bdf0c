#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: launcher_caches
short_description: Compiled kernels of a launch script, taken over
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Links the compiled kernels that a launch script has kept into the cache directories of a deployment on the same node.
  - Files that are there already stay, and the old directory is not changed. On another filesystem files are copied.
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
  diff_mode:
    support: none
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
  idempotent:
    support: full
    description: When run twice in a row outside check mode, with the same arguments, the second invocation indicates no change.
options:
  sources:
    description:
      - Directories that a launch script has used. Those that do not exist are left out.
    type: list
    elements: path
    required: true
  target:
    description:
      - The directory of the deployment's caches.
    type: path
    required: true
  user:
    description:
      - The account that shall own the directories that are made, when the module runs as root. The files stay as they are, they are the
        same ones.
    type: str
"""

EXAMPLES = r"""
- name: Take over compiled kernels
  sparkops.inference.launcher_caches:
    sources: [~/.cache/vllm-dsv41-flash-exl3]
    target: /var/lib/sparkops/deepseek_v41_flash_exl3/cache
"""

RETURN = r"""
files:
  description: How many files were taken over, or would be.
  returned: success
  type: int
taken_from:
  description: The directories that were there.
  returned: success
  type: list
  elements: str
"""

import os
import pwd
import shutil
import typing as t

from ansible.module_utils.basic import AnsibleModule

# Below the launch scripts' one directory; all else in it is the engine's own cache.
PARTS = ("triton", "tilelang", "nv")


def pairs(source: str, target: str) -> t.Iterator[tuple[str, str]]:
    """Each file of an old cache with its place in the new one."""
    for part in PARTS:
        yield from _files(os.path.join(source, part), os.path.join(target, part), ())
    yield from _files(source, os.path.join(target, "vllm"), PARTS)


def _files(source: str, target: str, without: t.Sequence[str]) -> t.Iterator[tuple[str, str]]:
    for directory, names, files in os.walk(source):
        if directory == source:
            names[:] = [name for name in names if name not in without]
        for name in files:
            path = os.path.join(directory, name)
            # A link may lead out of the tree; what it leads to is taken over where it lies.
            if os.path.isfile(path) and not os.path.islink(path):
                yield path, os.path.join(target, os.path.relpath(path, source))


def make_folder(path: str, user: str | None) -> None:
    """The directory and what lacks above it. Whoever makes further ones beside it later is the account."""
    lacking = []
    while not os.path.isdir(path):
        lacking.append(path)
        path = os.path.dirname(path)
    for folder in reversed(lacking):
        os.mkdir(folder)
        if user and os.geteuid() == 0:
            account = pwd.getpwnam(user)
            os.chown(folder, account.pw_uid, account.pw_gid)


def take_over(source: str, target: str, user: str | None = None) -> None:
    make_folder(os.path.dirname(target), user)
    try:
        os.link(source, target)
    except OSError:
        # Another filesystem, or one that knows no hard links.
        shutil.copy2(source, target)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sources": {"type": "list", "elements": "path", "required": True},
            "target": {"type": "path", "required": True},
            "user": {"type": "str"},
        },
        supports_check_mode=True,
    )
    target = module.params["target"]
    sources = [source for source in module.params["sources"] if os.path.isdir(source)]
    missing = [pair for source in sources for pair in pairs(source, target) if not os.path.lexists(pair[1])]
    try:
        for old, new in missing if not module.check_mode else []:
            take_over(old, new, module.params["user"])
    except (OSError, LookupError) as exc:
        module.fail_json(msg=f"Taking over compiled kernels into {target}: {exc}")
    module.exit_json(changed=bool(missing), files=len(missing), taken_from=sources)


if __name__ == "__main__":
    main()
