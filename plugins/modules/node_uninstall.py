#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_uninstall
short_description: Remove what a deployment has put on this node
version_added: 0.1.0
description:
  - Removes its containers, state, keys, packed rows, and on request its images and weights, as far as nothing else on the node needs them.
  - When it was the last deployment, the shared programs, node keys, and the state root go too. Packages, groups, and network files stay.
  - Refuses while a container of the deployment runs.
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
  deployment:
    description: Name of the deployment.
    type: str
    required: true
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
  libexec:
    description: Directory of our programs.
    type: path
    required: true
  artefacts:
    description: Directories of the deployment's artefacts below the weights and Engram roots, beside those of its records.
    type: list
    elements: str
    default: []
  image:
    description: Reference of the deployment's image, beside those of its records.
    type: str
    default: ""
  weights:
    description: Whether model files go.
    type: bool
    default: false
  images:
    description: Whether images go.
    type: bool
    default: true
"""

EXAMPLES = r"""
- name: Remove a deployment and its weights
  sparkops.inference.node_uninstall:
    deployment: lab_tiny
    state_root: /var/lib/sparkops
    weights_root: /var/lib/sparkops/weights
    engram_root: /var/lib/sparkops/engram
    libexec: /usr/local/lib/sparkops
    weights: true
"""

RETURN = r"""
removed:
  description: What went, or would in check mode, with kind, name, and bytes.
  returned: always
  type: list
  elements: dict
kept:
  description: What stays although it was asked for, and who needs it.
  returned: always
  type: list
  elements: dict
last:
  description: Whether no other deployment is left on the node.
  returned: always
  type: bool
"""

import os
import shutil
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _history, _mounts
from ansible_collections.sparkops.inference.plugins.module_utils import _leftovers as leftovers
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError


class Uninstall:
    """What a deployment has put here, found before anything is removed."""

    def __init__(self, module: AnsibleModule) -> None:
        self.params = module.params
        self.api = DockerApi(self.params["docker_socket"], timeout=300)
        self.state_dir = os.path.join(self.params["state_root"], self.params["deployment"])
        self.others = [name for name in leftovers.deployments(self.params["state_root"]) if name != self.params["deployment"]]
        self.own_records = _history.records(self.state_dir)
        self.mounted = leftovers.mounts()

    def containers(self) -> list[dict[str, t.Any]]:
        """Ranks, and a check of the image whose run was killed."""
        labels = (f"sparkops.{kind}={self.params['deployment']}" for kind in ("deployment", "check"))
        return [entry for label in labels for entry in self.api.containers({"label": [label]})]

    def needed(self) -> leftovers.Needed:
        """What others need: everything that their records name, however old, and what was staged for them."""
        needed = leftovers.Needed()
        for name in self.others:
            state_dir = os.path.join(self.params["state_root"], name)
            for record in _history.records(state_dir):
                leftovers.note_record(needed, record, self.params["weights_root"], f"deployment {name}")
            leftovers.note_wanted(needed, state_dir, [self.params["weights_root"], self.params["engram_root"]], f"deployment {name}")
        leftovers.note_containers(needed, self.api, but=self.params["deployment"])
        return needed

    def own(self, trees: list[leftovers.Thing]) -> list[leftovers.Thing]:
        """Those of this deployment; their place below a root is ``<repository>/<revision>``."""
        names = {entry["directory"] for record in self.own_records for entry in record.get("artefacts") or []} | set(self.params["artefacts"])
        return [thing for thing in trees if "/".join(thing.what.split("/")[-2:]) in names]

    def own_images(self, needed: leftovers.Needed) -> list[leftovers.Thing]:
        names = [(record.get("image") or {}).get("id") for record in self.own_records] + [self.params["image"]]
        found: dict[str, leftovers.Thing] = {}
        for document in (self.api.inspect_image(name) for name in names if name):
            if document:
                what = f"{(document.get('RepoTags') or ['image'])[0]} {document['Id']}"
                found[document["Id"]] = leftovers.Thing("image", what, int(document.get("Size") or 0), needed.images.get(document["Id"], ""))
        return list(found.values())

    def things(self) -> list[leftovers.Thing]:
        needed = self.needed()
        found = [leftovers.Thing("container", entry["Names"][0].lstrip("/"), 0) for entry in self.containers()]
        if self.params["images"]:
            found += self.own_images(needed)
        if self.params["weights"]:
            found += self.own(leftovers.directories("weights", self.params["weights_root"], needed, self.mounted))
            found += self.own(leftovers.unfinished(self.params["weights_root"], needed, self.mounted))
        found += self.own(leftovers.directories("pack", self.params["engram_root"], needed, self.mounted))
        paths = [self.state_dir] if os.path.isdir(self.state_dir) else []
        for path in paths + ([] if self.others else self.shared()):
            kept = leftovers.mounted_in(path, self.mounted)
            found.append(leftovers.Thing("state", path, 0 if kept else leftovers.size_of(path), kept))
        return found

    def shared(self) -> list[str]:
        """What the last deployment takes with it: our programs, and all of the state root but weights that stay."""
        found = [self.params["libexec"]] if os.path.isdir(self.params["libexec"]) else []
        root = self.params["state_root"]
        # Where a folder leads through a symbolic link, weights_root is its real path.
        mounts = _mounts.read()
        spared = {_mounts.resolve(mounts, path) for path in (self.state_dir, self.params["weights_root"], self.params["engram_root"])}
        inside = sorted(os.path.join(root, name) for name in os.listdir(root)) if os.path.isdir(root) else []
        return found + [path for path in inside if _mounts.resolve(mounts, path) not in spared]

    def remove(self, thing: leftovers.Thing) -> None:
        if thing.kind == "container":
            self.api.call("DELETE", f"/containers/{thing.what}", query={"v": "1"})
        elif thing.kind == "image":
            leftovers.untag(self.api, self.params["deployment"])
            thing.kept = leftovers.remove_image(self.api, thing.what.rpartition(" ")[2])
        elif thing.kind in ("weights", "unfinished", "pack"):
            leftovers.remove_tree(thing.what, self.params["engram_root" if thing.kind == "pack" else "weights_root"])
        elif os.path.isdir(thing.what) and not os.path.islink(thing.what):
            shutil.rmtree(thing.what)
        else:
            os.unlink(thing.what)

    def leave(self) -> None:
        """Our names for images that stay, and directories that are empty now."""
        leftovers.untag(self.api, self.params["deployment"])
        if not self.others:
            leftovers.remove_empty(os.path.join(self.params["weights_root"], leftovers.INCOMING))
        for path in (self.params["engram_root"], self.params["weights_root"], self.params["state_root"]):
            if not self.others and os.path.isdir(path) and not os.listdir(path):
                os.rmdir(path)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deployment": {"type": "str", "required": True},
            "state_root": {"type": "path", "required": True},
            "weights_root": {"type": "path", "required": True},
            "engram_root": {"type": "path", "required": True},
            "libexec": {"type": "path", "required": True},
            "artefacts": {"type": "list", "elements": "str", "default": []},
            "image": {"type": "str", "default": ""},
            "weights": {"type": "bool", "default": False},
            "images": {"type": "bool", "default": True},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    uninstall = Uninstall(module)
    try:
        running = [entry["Names"][0].lstrip("/") for entry in uninstall.containers() if entry.get("State") == "running"]
        if running and not module.check_mode:
            module.fail_json(msg=f"Nothing is removed while {', '.join(running)} runs: stop the group first")
        things = uninstall.things()
        going = [thing for thing in things if not thing.kept]
        if not module.check_mode:
            for thing in going:
                uninstall.remove(thing)
            uninstall.leave()
    except (DockerError, OSError) as exc:
        module.fail_json(msg=f"{module.params['deployment']} cannot be removed as a whole: {exc}. Run it again when that is mended")
    removed = [thing.as_dict() for thing in going if not thing.kept]
    module.exit_json(changed=bool(removed), removed=removed, kept=[thing.as_dict() for thing in things if thing.kept], last=not uninstall.others)


if __name__ == "__main__":
    main()
