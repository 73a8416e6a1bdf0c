#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_ship
short_description: Bring an image to a node from one of its peers
version_added: 0.1.0
description:
  - Fetches from the peer only the layers that this node lacks, over the address and with the key of the group.
  - The work is a unit of its own that outlives the session; a second run attaches to it, and a cut transfer goes on where it ended.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Nothing is transferred, and the result is predicted.
  diff_mode:
    support: none
    description: An image has no difference to show.
  facts:
    support: full
    description: Sets the fact C(spark_image) to RV(image).
  idempotent:
    support: full
    description: An image that is there is not fetched again.
options:
  reference:
    description: Image with its tag, as it will be named on this node.
    type: str
    required: true
  image:
    description: The image as M(sparkops.inference.image_pull) describes it on the source. Without an identity it is not known yet, in check mode.
    type: dict
    required: true
  address:
    description: Address of the source.
    type: str
    required: true
  source_user:
    description: Account at the source.
    type: str
    required: true
  origin:
    description: Name of the source, for messages.
    type: str
    required: true
  key:
    description: Private key of this node.
    type: path
    required: true
  key_follows:
    description: Whether bootstrap makes O(key), so that check mode need not find it.
    type: bool
    default: false
  known_hosts:
    description: File with the host keys of the peers.
    type: path
    required: true
  node:
    description: Name of this node, for messages.
    type: str
    required: true
  deployment:
    description: Name of the deployment; part of the unit's name.
    type: str
    required: true
  state_dir:
    description: Directory of the deployment's state.
    type: path
    required: true
  state_root:
    description: Directory where this node notes what it knows about its images.
    type: path
    required: true
  staging:
    description: Directory for layers on their way.
    type: path
    required: true
  socket:
    description: Socket of the Docker Engine.
    type: path
    default: /var/run/docker.sock
  mode:
    description:
      - V(layers) sends only the layers that this node lacks and goes on after a cut.
      - V(archive) makes an archive at the source and fetches it with rsync.
      - V(stream) pipes the engine's archive and needs no room for it; a cut costs everything.
      - V(auto) takes V(layers), and V(stream) when nothing of the image is here and there is no room to stage it.
    type: str
    choices: [auto, layers, archive, stream]
    default: auto
  user:
    description: Account of this node that runs the work, when the module runs as root. It must have the right to use Docker.
    type: str
    default: ""
  state:
    description: V(cancelled) stops work that is going on.
    type: str
    choices: [present, cancelled]
    default: present
  wait_slice:
    description: Seconds to wait for the end in this call; V(0) waits until the end.
    type: int
    default: 0
  run_id:
    description: The run to go on waiting for.
    type: str
"""

EXAMPLES = r"""
- name: Bring the image from the head
  sparkops.inference.image_ship:
    reference: "{{ spark_plan.image.reference }}"
    image: "{{ hostvars[spark_plan.head].spark_image }}"
    address: "{{ spark_plan.addresses[spark_plan.head] }}"
    source_user: "{{ hostvars[spark_plan.head].spark_node.user.name }}"
    origin: "{{ spark_plan.head }}"
    key: "{{ spark_node.key.path }}"
    known_hosts: "{{ spark_node.known_hosts.path }}"
    node: "{{ inventory_hostname }}"
    deployment: "{{ spark_plan.deployment }}"
    state_dir: "{{ spark_node.state_dir }}"
    state_root: "{{ spark_node.state_root }}"
    staging: "{{ spark_node.state_root }}/image-ship"
"""

RETURN = r"""
image:
  description: The image on this node, as M(sparkops.inference.image_pull) describes it.
  returned: when RV(running=false)
  type: dict
ship:
  description: What was done - C(mode), C(bytes) over the link, and C(seconds).
  returned: when something was shipped
  type: dict
  sample:
    mode: layers
    bytes: 1049047
    seconds: 1.2
notices:
  description: What the user should know although the work went well.
  returned: always
  type: list
  elements: str
running:
  description: Whether the work still goes on.
  returned: always
  type: bool
run_id:
  description: The run to wait for.
  returned: when RV(running=true)
  type: str
progress:
  description: How far the work is.
  returned: when RV(running=true)
  type: dict
known_after:
  description: What has to run before the result is known; in check mode only.
  returned: always
  type: list
  elements: str
"""

import os
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _image_ship
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import compare, from_inspect
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._unit import LongModule, long_options

JOB_PARAMS = ("reference", "address", "origin", "node", "key", "known_hosts", "state_root", "staging", "socket", "mode")


class ImageShip(LongModule):
    """The image of a peer on this node."""

    area, work, program = "image", "ship", _image_ship

    def present(self) -> dict[str, t.Any]:
        # One that was going on may have brought another image for this deployment.
        outcome = self.earlier(identity=self.params["image"].get("identity"))
        if outcome is None:
            held = self.held()
            if held is not None:
                return self.described(held, changed=self.remember(held))
            after = "image" if self.has_key() else "bootstrap"
            if self.module.check_mode:
                return self.described({"present": True}, changed=True, known_after=[after])
            outcome = self.end_of(self.begin(self.request()))
        return self.described(outcome["image"], changed=True, ship=outcome["ship"], notices=outcome["notices"])

    def held(self) -> dict[str, t.Any] | None:
        """The image as it is here, None when it has to be brought."""
        source = self.params["image"]
        try:
            document = DockerApi(self.params["socket"]).inspect_image(self.params["reference"])
        except DockerError:
            if self.module.check_mode:
                return None  # bootstrap may still install Docker or give the right to use it
            raise
        if document is None or not source.get("identity"):
            return None
        image = from_inspect(document, Record(self.params["state_root"]).digests(document["Id"])).as_dict()
        return image if compare(source, image).same else None

    def remember(self, held: dict[str, t.Any]) -> bool:
        """What somebody else loaded here has no registry digest: a restart, which ships nothing, would not find the pinned image. Says whether it is new."""
        digests = set(held["digests"]) | set(self.params["image"].get("digests", []))
        if digests == set(held["digests"]):
            return False
        if not self.module.check_mode:
            more = {"reference": self.params["reference"], "identity": held["identity"], "source": self.params["origin"]}
            Record(self.params["state_root"]).note(held["id"], digests, **more)
        held["digests"] = sorted(digests)
        return True

    def has_key(self) -> bool:
        """Whether it is there; without it nothing is shipped, nor predicted unless bootstrap will make it."""
        there = os.path.exists(self.params["key"])
        if not there and not (self.module.check_mode and self.params["key_follows"]):
            found, next_step = f"no key {self.params['key']}", "run the bootstrap play with bootstrap_node_keys=true"
            self.fail([self.refusal("key", f"image {self.params['reference']}", found, f"a key for {self.params['origin']}", next_step)])
        return there

    def request(self) -> dict[str, t.Any]:
        source = self.params["image"]
        wanted = {name: self.params[name] for name in JOB_PARAMS}
        return {**wanted, "user": self.params["source_user"], "source_id": source["id"], "identity": source["identity"]}

    def described(self, image: dict[str, t.Any], **more: t.Any) -> dict[str, t.Any]:
        if image.get("id"):
            self.note_staged(image["id"])
        image = {**image, "reference": self.params["reference"], "digest": self.params["image"].get("digest")}
        return self.result([], image=image, ansible_facts={"spark_image": image}, **more)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "image": {"type": "dict", "required": True},
            "address": {"type": "str", "required": True},
            "source_user": {"type": "str", "required": True},
            "origin": {"type": "str", "required": True},
            "key": {"type": "path", "required": True, "no_log": False},
            "key_follows": {"type": "bool", "default": False, "no_log": False},
            "known_hosts": {"type": "path", "required": True},
            "staging": {"type": "path", "required": True},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
            "mode": {"type": "str", "choices": ["auto", "layers", "archive", "stream"], "default": "auto"},
            **long_options(),
        },
        supports_check_mode=True,
    )
    ship = ImageShip(module)
    try:
        ship.main(ship.present)
    except (DockerError, OSError) as exc:
        thing = f"image {module.params['reference']} from {module.params['origin']}"
        ship.fail([ship.refusal("engine", thing, str(exc), "an engine that answers", "see what preflight says of Docker on this node")])


if __name__ == "__main__":
    main()
