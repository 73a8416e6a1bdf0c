#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_prune
short_description: Remove superseded weights, packed rows, images, and records of this node
version_added: 0.1.0
description:
  - Keeps what the newest O(keep) records of every deployment on the node need, always with the last good one, what any container uses,
    what was staged last for any deployment, and what O(wanted_paths) and O(wanted_images) name.
  - In check mode it lists with sizes what would go. Files on other machines' disks (NFS) are never looked at.
author:
  - The sparkops.inference authors (@sparkops)
extends_documentation_fragment:
  - sparkops.inference.node.docker
attributes:
  check_mode:
    support: full
    description: Lists what would go, with sizes.
  diff_mode:
    support: none
    description: There is no text to compare.
  idempotent:
    support: full
    description: A second call finds nothing to remove.
options:
  state_root:
    description: Directory that the deployments of this node have their state in.
    type: path
    required: true
  weights_root:
    description: Directory of model files.
    type: path
    required: true
  engram_root:
    description: Directory of packed Engram rows.
    type: path
    required: true
  keep:
    description: How many records of each deployment are kept with what they need.
    type: int
    default: 2
  wanted_paths:
    description: Directories that stay.
    type: list
    elements: path
    default: []
  wanted_images:
    description: References or ids of images that stay.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: See what could go
  sparkops.inference.node_prune:
    state_root: /var/lib/sparkops
    weights_root: /var/lib/sparkops/weights
    engram_root: /var/lib/sparkops/engram
  check_mode: true
"""

RETURN = r"""
removed:
  description: What went, or would in check mode, with kind, name, and bytes.
  returned: always
  type: list
  elements: dict
kept:
  description: What stays, and who needs it.
  returned: always
  type: list
  elements: dict
bytes:
  description: Sum of what went. Layers that images share count with each.
  returned: always
  type: int
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _history
from ansible_collections.sparkops.inference.plugins.module_utils import _leftovers as leftovers
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError


class Prune:
    """One look at a node, and what follows from it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.params = module, module.params
        self.api = DockerApi(self.params["docker_socket"], timeout=300)
        self.mounted = leftovers.mounts()

    def needed(self) -> leftovers.Needed:
        needed = leftovers.Needed(paths={path: "this inventory" for path in self.params["wanted_paths"]})
        for name in self.params["wanted_images"]:
            document = self.api.inspect_image(name)
            if document:
                needed.images[document["Id"]] = "this inventory"
        for name in leftovers.deployments(self.params["state_root"]):
            state_dir = os.path.join(self.params["state_root"], name)
            for record in leftovers.kept_records(state_dir, self.params["keep"]):
                leftovers.note_record(needed, record, self.params["weights_root"], f"record {record['id']} of {name}")
            leftovers.note_wanted(needed, state_dir, [self.params["weights_root"], self.params["engram_root"]], f"staged for {name}")
        leftovers.note_containers(needed, self.api)
        return needed

    def records(self) -> list[leftovers.Thing]:
        found = []
        for name in leftovers.deployments(self.params["state_root"]):
            state_dir = os.path.join(self.params["state_root"], name)
            kept = {record["id"] for record in leftovers.kept_records(state_dir, self.params["keep"])}
            for record in _history.records(state_dir):
                path = os.path.join(_history.history_dir(state_dir), record["id"])
                found.append(leftovers.Thing("record", path, leftovers.size_of(path), "one of the newest" if record["id"] in kept else ""))
        return found

    def things(self) -> list[leftovers.Thing]:
        needed = self.needed()
        return [
            *self.records(),
            *leftovers.directories("weights", self.params["weights_root"], needed, self.mounted),
            *leftovers.unfinished(self.params["weights_root"], needed, self.mounted),
            *leftovers.directories("pack", self.params["engram_root"], needed, self.mounted),
            *leftovers.images(self.api, self.params["state_root"], needed),
        ]

    def remove(self, thing: leftovers.Thing) -> None:
        """A record goes first, with our name for its image; an image that is used after all says why it stays."""
        if thing.kind == "record":
            state_dir, record_id = os.path.dirname(os.path.dirname(thing.what)), os.path.basename(thing.what)
            leftovers.untag(self.api, os.path.basename(state_dir), record_id)
            _history.forget(state_dir, record_id)
        elif thing.kind == "image":
            thing.kept = leftovers.remove_image(self.api, thing.what.rpartition(" ")[2])
        else:
            leftovers.remove_tree(thing.what, self.params["engram_root" if thing.kind == "pack" else "weights_root"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_root": {"type": "path", "required": True},
            "weights_root": {"type": "path", "required": True},
            "engram_root": {"type": "path", "required": True},
            "keep": {"type": "int", "default": 2},
            "wanted_paths": {"type": "list", "elements": "path", "default": []},
            "wanted_images": {"type": "list", "elements": "str", "default": []},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    prune = Prune(module)
    try:
        things = prune.things()
        going = [thing for thing in things if not thing.kept]
        if not module.check_mode:
            for thing in going:
                prune.remove(thing)
    except (DockerError, OSError) as exc:
        module.fail_json(msg=f"This node cannot be pruned: {exc}")
    removed = [thing.as_dict() for thing in going if not thing.kept]
    kept = [thing.as_dict() for thing in things if thing.kept]
    module.exit_json(changed=bool(removed), removed=removed, kept=kept, bytes=sum(thing["size"] for thing in removed))


if __name__ == "__main__":
    main()
