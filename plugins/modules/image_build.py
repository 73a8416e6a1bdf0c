#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_build
short_description: Compare an image with its recipe, and build it when that is allowed
version_added: 0.1.0
description:
  - Makes the stamp of a recipe's checkout and compares it with the label of the image on this node. A difference is reported.
  - Builds the image only as far as O(mode) allows. The build is a unit of its own that outlives the session; its log is kept.
  - The image gets its name only after the build has succeeded and its layers are few enough for other nodes to load.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Nothing is built, and the result is predicted.
  diff_mode:
    support: none
    description: An image has no difference to show.
  facts:
    support: full
    description: Sets the fact C(spark_image) to RV(image) when the image is built or was built from this recipe before.
  idempotent:
    support: partial
    description: Can be run again without change.
    details: With O(mode=always) every run builds.
options:
  reference:
    description: Image with its tag.
    type: str
    required: true
  recipe:
    description: Checkout of the recipe on this node, with a C(Dockerfile) in it.
    type: path
    required: true
  label:
    description: Label of the image that holds the stamp.
    type: str
    default: sparkops.recipe.stamp
  rule:
    description: Which files belong to the stamp - C(files), C(folders), C(exclude). Known for the labels of the published recipes.
    type: dict
  mode:
    description:
      - V(never) only reports.
      - V(when_unavailable) builds when O(unavailable=true).
      - V(on_stamp_change) builds when the image is missing or has another stamp.
      - V(always) builds.
    type: str
    choices: [never, when_unavailable, on_stamp_change, always]
    default: never
  unavailable:
    description: Whether the wanted image is neither here nor at its registry.
    type: bool
    default: false
  build_args:
    description: Further build arguments.
    type: dict
    default: {}
  base:
    description: Local image for the first C(FROM), for a builder that can't reach the registry.
    type: str
  inputs:
    description: Files of this node by their path in the build context.
    type: dict
    default: {}
  size:
    description: About how many bytes the unpacked image has, for the check of disk space.
    type: int
  shared:
    description: Whether the peers of this node may fetch the image from it.
    type: bool
    default: false
  staging:
    description: Directory of this node for image parts on their way to peers.
    type: path
  node:
    description: Name of this node, for messages.
    type: str
    required: true
  deployment:
    description: Name of the deployment; part of the unit's name.
    type: str
    required: true
  state_dir:
    description: Directory of the deployment's state, where the log is kept.
    type: path
    required: true
  state_root:
    description: Directory where this node notes what it knows about its images.
    type: path
    required: true
  user:
    description: Account of this node that runs the build, when the module runs as root. It must have the right to use Docker.
    type: str
    default: ""
  socket:
    description: Socket of the Docker Engine.
    type: path
    default: /var/run/docker.sock
  state:
    description: V(cancelled) stops a build that is going on.
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
- name: Say whether the image is of this checkout
  sparkops.inference.image_build:
    reference: registry.example/team/engine:2.9
    recipe: /home/me/recipe
    label: dsv41.recipe.stamp
    node: "{{ inventory_hostname }}"
    deployment: engine
    state_dir: /var/lib/sparkops/engine
    state_root: /var/lib/sparkops
"""

RETURN = r"""
stamp:
  description: Stamp of the checkout.
  returned: always
  type: str
image_stamp:
  description: Stamp that the image has as its label; empty without image or label.
  returned: always
  type: str
differs:
  description: Whether the two are different.
  returned: always
  type: bool
log:
  description: Log of the build on the node.
  returned: when something was built
  type: str
image:
  description: The image on this node, as M(sparkops.inference.image_pull) describes it.
  returned: when it is there
  type: dict
notices:
  description: What the user should know although the work went well.
  returned: always
  type: list
  elements: str
running:
  description: Whether the build still goes on.
  returned: always
  type: bool
run_id:
  description: The run to wait for.
  returned: when RV(running=true)
  type: str
progress:
  description: How far the build is.
  returned: when RV(running=true)
  type: dict
known_after:
  description: What has to run before the result is known; in check mode only.
  returned: always
  type: list
  elements: str
"""

import os
import shutil
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import (
    _docker_api,
    _image_build,
    _image_identity,
    _manifest,
    _refusal,
    _unit,
)
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._image_build import floating_bases
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import Image, from_inspect
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._image_stamp import Rule, stamps
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Job, UnitError

JOB_CODE = (_docker_api, _image_build, _image_identity, _manifest, _refusal, _unit)
# Layers of a build lie on the disk beside the image until they are part of it.
MARGIN = 2 << 30


class Failed(Exception):
    """There are reasons to stop."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__(format_refusals(refusals))
        self.refusals = refusals


class Running(Exception):
    """The build goes on longer than this call may wait."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id


def must_build(mode: str, unavailable: bool, differs: bool) -> bool:
    """Whether ``mode`` asks for a build. An image that was built from this very recipe is available, whatever the registry says."""
    return mode == "always" or differs and (mode == "on_stamp_change" or mode == "when_unavailable" and unavailable)


class ImageBuild:
    """The image of a recipe on this node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.recipe: str = self.params["recipe"]
        self.api = DockerApi(self.params["socket"])
        self.job = Job(module, "build", self.params["deployment"], self.params["state_dir"], self.params["user"])
        self.forms: list[str] = []
        self.notices: list[str] = []

    def run(self) -> dict[str, t.Any]:
        if self.params["state"] == "cancelled":
            return self.cancel()
        self.require_recipe()
        self.forms = stamps(self.recipe, Rule.of(self.params["label"], self.params["rule"]))
        run_id = self.params["run_id"] or (self.job.current_run() if not self.module.check_mode and self.job.running() else None)
        if run_id:
            return self.built(run_id)
        image = self.find()
        differs = self.differs(image)
        if must_build(self.params["mode"], self.params["unavailable"], differs):
            self.require_space()
            return self.result(image, changed=True, known_after=["image"]) if self.module.check_mode else self.built(self.begin())
        if differs:
            self.report(image)
        return self.result(image, changed=self.share(image) if self.params["unavailable"] and image and not differs else False)

    def find(self) -> Image | None:
        document = self.api.inspect_image(self.params["reference"])
        return from_inspect(document, Record(self.params["state_root"]).digests(document["Id"])) if document else None

    def differs(self, image: Image | None) -> bool:
        return image is None or image.labels.get(self.params["label"]) not in self.forms

    def report(self, image: Image | None) -> None:
        found = f"the stamp {image.labels.get(self.params['label'], 'nothing')}" if image else "no image"
        self.notices.append(
            f"{self.params['reference']}: the recipe in {self.recipe} has the stamp {self.forms[0]}, the image {found}. "
            "Nothing is built; image_build=on_stamp_change would build it."
        )

    def require_recipe(self) -> None:
        """All that lacks, before anything is built."""
        wanted = {os.path.join(self.recipe, "Dockerfile"): "image_recipe", **{path: "image_build_inputs" for path in self.params["inputs"].values()}}
        lacking = [(path, option) for path, option in wanted.items() if not os.path.isfile(path)]
        if lacking:
            raise Failed(*(self.refusal("recipe", path, "no such file", "a file on this node", f"correct {option}") for path, option in lacking))

    def require_space(self) -> None:
        root = self.api.info()["DockerRootDir"]
        free, size = shutil.disk_usage(root).free, (self.params["size"] or 0) + MARGIN
        if free < size:
            raise Failed(self.refusal("space", root, f"{free} bytes free", f"{size} bytes for a build", "free disk space where Docker keeps its images"))

    def begin(self) -> str:
        params = self.params
        with open(os.path.join(self.recipe, "Dockerfile"), encoding="utf-8") as stream:
            floating = [] if params["base"] else floating_bases(stream.read())
        if floating:
            self.notices.append(f"the recipe starts from {', '.join(floating)} without a digest: another build may give another image")
        with _unit.identity(params["user"]):
            root = _unit.install_code(JOB_CODE, os.path.join(params["state_root"], "lib"))
            log = os.path.join(params["state_dir"], "logs", time.strftime("image-build-%Y%m%dT%H%M%SZ.log", time.gmtime()))
            os.makedirs(os.path.dirname(log), exist_ok=True)
        request = {name: params[name] for name in ("reference", "recipe", "label", "build_args", "base", "inputs", "node", "socket")}
        return self.job.begin(_unit.python_argv(root, "_image_build"), {**request, "stamp": self.forms[0], "log": log})

    def built(self, run_id: str) -> dict[str, t.Any]:
        if not self.job.wait(self.params["wait_slice"] or float("inf")):
            raise Running(run_id)
        outcome = self.job.outcome(run_id) or {"ok": False, "error": _unit.last_lines(self.module, self.job.name)}
        if outcome.get("refusals"):
            raise Failed(*(Refusal(**item) for item in outcome["refusals"]))
        if not outcome["ok"]:
            found = outcome.get("error") or "it was stopped on request"
            raise Failed(self.refusal("build", f"unit {self.job.name}", found, "a finished build", "run again"))
        image = self.find()
        self.share(image)
        return {**self.result(image, changed=True), "log": outcome["log"]}

    def share(self, image: Image | None) -> bool:
        """Let the peers have it. Says whether that is new."""
        record = Record(self.params["state_root"])
        source = {"staging": self.params["staging"], "socket": self.api.socket_path}
        if image is None or not self.params["shared"] or record.shares(image.id, image.digests, source):
            return False
        if not self.module.check_mode:
            record.share(image.id, image.digests, source, reference=self.params["reference"], identity=image.identity)
        return True

    def cancel(self) -> dict[str, t.Any]:
        running = self.job.running()
        if running and not self.module.check_mode:
            _unit.stop(self.module, self.job.name)
        return {"changed": running, "running": False, "notices": [], "known_after": []}

    def result(self, image: Image | None, changed: bool, known_after: t.Sequence[str] = ()) -> dict[str, t.Any]:
        result: dict[str, t.Any] = {
            "changed": changed,
            "running": False,
            "stamp": self.forms[0],
            "image_stamp": image.labels.get(self.params["label"], "") if image else "",
            "differs": self.differs(image),
            "notices": self.notices,
            "known_after": list(known_after),
        }
        if known_after:
            result["image"] = {"present": True, "reference": self.params["reference"], "digest": None}
        elif image is not None:
            result["image"] = {**image.as_dict(), "reference": self.params["reference"], "digest": min(image.digests, default=None)}
        # Without a build the image that was pulled is the one, except that one of this recipe stands for a pull that failed.
        if known_after or changed or (self.params["unavailable"] and image is not None and not self.differs(image)):
            result["ansible_facts"] = {"spark_image": result["image"]}
        return result

    def refusal(self, name: str, thing: str, found: str, wanted: str, next_step: str) -> Refusal:
        return Refusal(f"image.{name}", self.params["node"], thing, found, wanted, next_step)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "recipe": {"type": "path", "required": True},
            "label": {"type": "str", "default": "sparkops.recipe.stamp"},
            "rule": {"type": "dict"},
            "mode": {"type": "str", "choices": ["never", "when_unavailable", "on_stamp_change", "always"], "default": "never"},
            "unavailable": {"type": "bool", "default": False},
            "build_args": {"type": "dict", "default": {}},
            "base": {"type": "str"},
            "inputs": {"type": "dict", "default": {}},
            "size": {"type": "int"},
            "shared": {"type": "bool", "default": False},
            "staging": {"type": "path"},
            "node": {"type": "str", "required": True},
            "deployment": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "state_root": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
            "state": {"type": "str", "choices": ["present", "cancelled"], "default": "present"},
            "wait_slice": {"type": "int", "default": 0},
            "run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    build = ImageBuild(module)
    try:
        module.exit_json(**build.run())
    except Running as exc:
        module.exit_json(changed=True, running=True, run_id=exc.run_id, progress=build.job.current(), notices=[], known_after=[])
    except Failed as exc:
        module.fail_json(msg=str(exc), refusals=[refusal.as_dict() for refusal in exc.refusals])
    except (DockerError, UnitError, OSError) as exc:
        refusal = build.refusal("build", f"build of {module.params['reference']}", str(exc), "a finished build", "see what preflight says of Docker on this node")
        module.fail_json(msg=refusal.text, refusals=[refusal.as_dict()])


if __name__ == "__main__":
    main()
