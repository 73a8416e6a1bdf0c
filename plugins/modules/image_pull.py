#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_pull
short_description: Keep an image present from its registry
version_added: 0.1.0
description:
  - Looks whether a node has the wanted image, by its pinned digest or by its tag, and pulls it as the policy says.
  - A pinned image that is there is used without asking the registry.
  - The platform is checked before anything is transferred.
  - The pull is a unit of its own that outlives the session; a second run attaches to it.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: The registry is asked, nothing is pulled, and the result is predicted.
  diff_mode:
    support: none
    description: An image has no difference to show.
  facts:
    support: full
    description: Sets the fact C(spark_image) to RV(image).
  idempotent:
    support: partial
    description: Can be run again without change.
    details: With O(policy=always) a tag that has moved in the registry is a change.
options:
  reference:
    description: Image with its tag.
    type: str
    required: true
  digest:
    description: Registry digest that the image must have.
    type: str
  platform:
    description: Platform such as V(linux/arm64). The engine's own by default.
    type: str
  policy:
    description: When the registry is asked.
    type: str
    choices: [missing, always, never]
    default: missing
  required:
    description:
      - Whether it is a failure when the image can't be pulled.
      - Otherwise RV(pull_error) says why not, and another rank can ship it.
    type: bool
    default: true
  buildable:
    description:
      - Whether the head may build the image, so that one which is published for other platforms only is no failure.
      - Without that it is refused on every node, since no other rank could ship it.
    type: bool
    default: false
  staged:
    description: Whether the deployment is to start with this image, so that M(sparkops.inference.node_prune) keeps it.
    type: bool
    default: false
  shared:
    description: Whether the peers of this node may fetch the image from it.
    type: bool
    default: false
  staging:
    description: Directory of this node for image parts on their way to peers.
    type: path
  username:
    description: Account at the registry. It is sent with the request and stored nowhere.
    type: str
  password:
    description: Password or token of O(username).
    type: str
  login_file:
    description: File of C(docker login) with the account to use when O(username) is not set.
    type: path
  size:
    description: About how many bytes the unpacked image has, to refuse a pull that the disk has no room for.
    type: int
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
  user:
    description: Account of this node that runs the pull, when the module runs as root. It must have the right to use Docker.
    type: str
    default: ""
  state:
    description: V(cancelled) stops a pull that is going on.
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
  state_root:
    description: Directory where this node notes what it knows about its images.
    type: path
    required: true
  socket:
    description: Socket of the Docker Engine.
    type: path
    default: /var/run/docker.sock
  probe_timeout:
    description: Seconds after which a registry that does not answer counts as unreachable.
    type: int
    default: 20
"""

EXAMPLES = r"""
- name: Have the pinned image
  sparkops.inference.image_pull:
    reference: registry.example/team/engine:2.9
    digest: sha256:447114ee77d14c9b4732ee23978ada2a0ee9027868a231d6fd42700a8b25be1d
    node: "{{ inventory_hostname }}"
    deployment: engine
    state_dir: /var/lib/sparkops/engine
    state_root: /var/lib/sparkops
"""

RETURN = r"""
image:
  description: The image on this node; C(identity) is the same text on every node that holds the same image.
  returned: always
  type: dict
  sample:
    present: true
    identity: sha256:9d9e1a5d0c6e2f3c1b7a4c8c5d3e0f6b7a8899aabbccddeeff00112233445566
    id: sha256:3430d6614a8e0b5f2c1d4e6f708192a3b4c5d6e7f8091a2b3c4d5e6f70819203
    platform: linux/arm64
pull_error:
  description: Why the image could not be pulled.
  returned: always
  type: dict
  sample:
    kind: unreachable
    text: "dial tcp: lookup registry.example: no such host"
notices:
  description: What the user should know although the work went well.
  returned: always
  type: list
  elements: str
running:
  description: Whether the pull still goes on.
  returned: always
  type: bool
run_id:
  description: The run to wait for.
  returned: when RV(running=true)
  type: str
progress:
  description: How far the pull is.
  returned: when RV(running=true)
  type: dict
known_after:
  description: What has to run before the identity is known; in check mode only.
  returned: always
  type: list
  elements: str
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _registry
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._image_export import image_root, lack_of_space
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import (
    MAX_LAYERS,
    Image,
    Reference,
    from_inspect,
    own_platform,
    parse_reference,
)
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._registry import (
    Login,
    Offer,
    RegistryError,
    ask,
    stored_login,
)
from ansible_collections.sparkops.inference.plugins.module_utils._unit import LongModule, long_options

OR_BUILD = "or let it be built (image_recipe, image_build=when_unavailable)"
NEXT_STEPS = {
    "policy": f"run the image play with image_pull_policy=missing, put the image there, {OR_BUILD}",
    "denied": f"check image_registry_username and image_registry_password, ask for the right to read this image, {OR_BUILD}",
    "missing": f"check image_reference and image_digest, {OR_BUILD}",
    "platform": f"name an image for this platform in image_reference, {OR_BUILD}",
    "space": "free disk space where Docker keeps its images",
    "certificate": "make the node's Docker trust this registry (its CA certificate, or insecure-registries in daemon.json)",
    "limit": "log in with image_registry_username, or wait until the limit ends",
    "unreachable": f"check name, route, and proxy of the node, put the image there and set image_pull_policy=never, {OR_BUILD}",
    "other": "read the text of the engine above",
}


def needs(present: bool, pinned: bool, policy: str) -> str:
    """What to do: use what is there, pull, ask the registry whether the tag has moved, or lack it."""
    if policy == "never":
        return "use" if present else "lack"
    if not present:
        return "pull"
    # A digest names content: asking again can bring nothing new.
    return "ask" if policy == "always" and not pinned else "use"


class ImagePull(LongModule):
    """The wanted image on this node."""

    area, work, program = "image", "pull", _registry

    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module)
        self.reference: Reference = parse_reference(self.params["reference"])
        self.digest: str | None = self.params["digest"] or self.reference.digest
        self.platform: str = self.params["platform"] or ""
        self.api = DockerApi(self.params["socket"], timeout=self.params["probe_timeout"])
        self.record = Record(self.params["state_root"])
        self.login = self.given_login()
        self.changed = False
        self.replaces: str | None = None
        self.notices: list[str] = []
        self.pull_error: dict[str, str] = {}

    def present(self) -> dict[str, t.Any]:
        try:
            image = self.image()
        except RegistryError as exc:
            self.lack(exc.kind, str(exc))
            # An upgrade that could not be had leaves what was there.
            image = self.find()
            if image is not None:
                self.notices.append(f"{self.wanted} could not be pulled, what is here counts: {exc}")
        except DockerError:
            if not self.module.check_mode:
                raise
            return self.predicted("bootstrap")  # which may still install Docker or give the right to use it
        if image is None:
            return self.predicted("image") if self.changed else self.described({"present": False})
        self.accept(image)
        found = {**image.as_dict(), "reference": self.reference.tagged, "digest": self.digest or min(image.digests, default=None)}
        # For check mode, which cannot compare: an upgrade of the head is one of this node too.
        return self.described({**found, "unasked": True} if self.pull_error else found)

    def image(self) -> Image | None:
        """The image, pulled if need be; None when check mode only predicts it."""
        self.platform = self.platform or own_platform(self.api.version())
        # One that was going on may be the pull of another image for this deployment.
        outcome = self.earlier(**self.target)
        if outcome is not None:
            return self.pulled(outcome)
        held = self.find()
        action = needs(held is not None, bool(self.digest), self.params["policy"])
        if action == "use":
            return held
        if action == "lack":
            raise RegistryError("policy", f"no image {self.wanted} for {self.platform} on this node{self.near_miss()}, and the policy is not to pull")
        offer = self.ask()
        if held and offer.digest in held.digests:
            return held
        if offer.platforms and self.platform not in offer.platforms:
            raise RegistryError("platform", f"{self.wanted} exists for {', '.join(offer.platforms)}")
        self.check_space()
        self.changed = True
        self.replaces = held.identity if held else None
        return None if self.module.check_mode else self.pulled(self.end_of(self.begin(*self.request())))

    @property
    def target(self) -> dict[str, str]:
        """What the job is asked to bring."""
        return {"reference": self.reference.tagged, "wanted": self.digest or self.reference.tag or "latest"}

    @property
    def wanted(self) -> str:
        return f"{self.reference.name}@{self.digest}" if self.digest else self.reference.tagged

    def find(self) -> Image | None:
        """The image by its digest if it is pinned, else by its tag. A pinned image that was shipped is known by our note."""
        for name in dict.fromkeys((self.wanted, self.reference.tagged)):
            document = self.api.inspect_image(name)
            if document is None:
                continue
            image = from_inspect(document, self.record.digests(document["Id"]))
            if image.platform == self.platform and (not self.digest or self.digest in image.digests):
                return image
        return None

    def near_miss(self) -> str:
        """What this node has under the wanted name instead."""
        document = self.api.inspect_image(self.reference.tagged)
        if document is None:
            return ""
        image = from_inspect(document, self.record.digests(document["Id"]))
        return f" ({self.reference.tagged} is for {image.platform}, digest {', '.join(sorted(image.digests)) or 'not known'})"

    def ask(self) -> Offer:
        """A refused login proves nothing about a public image, so that one is asked for without login too."""
        try:
            return ask(self.api, self.reference, self.wanted, self.login)
        except RegistryError as exc:
            if exc.kind != "denied" or self.login is None:
                raise
            refused = exc
        try:
            offer = ask(self.api, self.reference, self.wanted, None)
        except RegistryError:
            raise refused from None
        registry = self.reference.registry
        found = f"{registry} refuses the login of {self.login.username!r} from {self.login.origin}, and gives {self.wanted} to anybody"
        if self.params["username"]:
            self.refuse("login", found, "a login that is accepted, or none", "correct image_registry_username and image_registry_password, or unset both")
        self.notices.append(f"{found}. The image is pulled without login; run 'docker logout {registry}' on the node.")
        self.login = None
        return offer

    def check_space(self) -> None:
        """Only for a first pull: a later one shares most layers with what is there, and nobody tells how many."""
        size = self.params["size"]
        if not size or self.api.call("GET", "/images/json", query={"filters": f'{{"reference": ["{self.reference.name}"]}}'}):
            return
        lack = lack_of_space((image_root(self.api.info()), size))
        if lack:
            place, size, free = lack
            raise RegistryError("space", f"{free} bytes free at {place}, the image needs {size}")

    def request(self) -> tuple[dict[str, t.Any], str | None]:
        """For the job; the password goes another way."""
        wanted = {
            "socket": self.params["socket"],
            **self.target,
            "platform": self.platform,
            "username": self.login.username if self.login else None,
            "login_origin": self.login.origin if self.login else None,
            # For the call that sees the end, which is seldom this one.
            "notices": self.notices,
        }
        return wanted, self.login.password if self.login else None

    def pulled(self, outcome: t.Mapping[str, t.Any]) -> Image:
        """The image after the pull has ended; what the engine says is checked by looking."""
        self.changed = True
        self.notices = list(outcome.get("notices", []))
        if outcome["pull_error"]:
            raise RegistryError(outcome["pull_error"]["kind"], outcome["pull_error"]["text"])
        image = self.find()
        if image is None:
            raise RegistryError("other", f"the pull of {self.wanted} ended well and the image is not there")
        return image

    def accept(self, image: Image) -> None:
        """Note whose the image is, give it its name, and let the peers have it."""
        if len(image.layers) > MAX_LAYERS:
            self.refuse("layers", f"{len(image.layers)} layers", f"at most {MAX_LAYERS}", "build the image with fewer layers: other nodes cannot load it")
        if self.params["staged"]:
            self.note_staged(image.id)
        if self.reference.tagged not in image.tags:
            # Pulled by digest it has no tag, and what has no tag is removed by "docker image prune".
            self.changed = True
            if not self.module.check_mode:
                self.api.call("POST", f"/images/{image.id}/tag", query={"repo": self.reference.name, "tag": self.reference.tag or "latest"})
        source = {"staging": self.params["staging"], "socket": self.api.socket_path}
        if self.params["shared"] and not self.record.shares(image.id, image.digests, source):
            self.changed = True
            if not self.module.check_mode:
                self.record.share(image.id, image.digests, source, reference=self.reference.tagged, identity=image.identity)

    def lack(self, kind: str, text: str) -> None:
        """The registry gives none. Another rank may ship it, but what is published for another platform only has to be built."""
        self.changed = False
        self.pull_error = {"kind": kind, "text": text}
        if self.params["required"] or kind == "platform" and not self.params["buildable"]:
            self.refuse(kind, text, f"{self.wanted} for {self.platform}", NEXT_STEPS[kind])

    def refuse(self, name: str, found: str, wanted: str, next_step: str) -> t.NoReturn:
        self.fail([self.refusal(name, f"image {self.params['reference']}", found, wanted, next_step)])

    def predicted(self, after: str) -> dict[str, t.Any]:
        self.changed = True
        found = {"present": True, "reference": self.reference.tagged, "digest": self.digest, "replaces": self.replaces}
        return self.described(found, known_after=[after])

    def described(self, image: dict[str, t.Any], **more: t.Any) -> dict[str, t.Any]:
        facts = {"spark_image": image}
        return self.result([], changed=self.changed, image=image, pull_error=self.pull_error, ansible_facts=facts, **{"notices": self.notices, **more})

    def given_login(self) -> Login | None:
        params = self.params
        if params["username"]:
            return Login(params["username"], params["password"] or "", "image_registry_username")
        return stored_login(params["login_file"], self.reference.registry) if params["login_file"] else None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "digest": {"type": "str"},
            "platform": {"type": "str"},
            "policy": {"type": "str", "choices": ["missing", "always", "never"], "default": "missing"},
            "required": {"type": "bool", "default": True},
            "buildable": {"type": "bool", "default": False},
            "staged": {"type": "bool", "default": False},
            "shared": {"type": "bool", "default": False},
            "staging": {"type": "path"},
            "username": {"type": "str"},
            "password": {"type": "str", "no_log": True},
            "login_file": {"type": "path"},
            "size": {"type": "int"},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
            "probe_timeout": {"type": "int", "default": 20},
            **long_options(),
        },
        supports_check_mode=True,
    )
    try:
        pull = ImagePull(module)
    except ValueError as exc:
        refusal = Refusal("image.reference", module.params["node"], "image_reference", str(exc), "an image reference", "correct image_reference")
        module.fail_json(msg=refusal.text, refusals=[refusal.as_dict()])
    try:
        pull.main(pull.present)
    except (DockerError, OSError) as exc:
        pull.refuse("engine", str(exc), "an engine that answers", "see what preflight says of Docker on this node")


if __name__ == "__main__":
    main()
