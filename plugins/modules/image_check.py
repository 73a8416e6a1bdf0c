#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_check
short_description: Prove an image on a node by its own checks
version_added: 0.1.0
description:
  - Runs commands of an image in throw-away containers, one after the other, and keeps what they print.
  - A node where the image has passed these checks already is left alone, until the image or the checks change.
  - A check that uses the GPU must not run beside a serving model. On unified memory that is how the machine locks up.
author:
  - The sparkops.inference authors (@sparkops)
attributes:
  check_mode:
    support: full
    description: Nothing is run, and the result is predicted.
  diff_mode:
    support: none
    description: There is nothing to compare.
  idempotent:
    support: partial
    description: Can be run again without change.
    details: With O(force=true) the checks always run.
options:
  image:
    description: Image to check, by its id or reference on this node.
    type: str
    required: true
  commands:
    description: Argument vectors to run. The first that fails ends the checks.
    type: list
    elements: list
    required: true
  environment:
    description: Environment of the commands.
    type: dict
    default: {}
  gpus:
    description: GPUs for the containers, V(all) or empty for none.
    type: str
    default: ""
  mounts:
    description: Directories to mount read-only, as C(source:target).
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that one command may take.
    type: int
    default: 900
  force:
    description: Run the checks although the image is proven.
    type: bool
    default: false
  node:
    description: Name of this node, for messages.
    type: str
    required: true
  deployment:
    description: Name of the deployment; part of the container's name.
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
    description: Account of this node that the log belongs to, when the module runs as root.
    type: str
    default: ""
  socket:
    description: Socket of the Docker Engine.
    type: path
    default: /var/run/docker.sock
"""

EXAMPLES = r"""
- name: Prove the image before the group starts
  sparkops.inference.image_check:
    image: "{{ spark_image.id }}"
    commands: [[python3, /opt/engine/test_kernels.py]]
    gpus: all
    node: "{{ inventory_hostname }}"
    deployment: engine
    state_dir: /var/lib/sparkops/engine
    state_root: /var/lib/sparkops
"""

RETURN = r"""
log:
  description: File on the node with all that the commands printed.
  returned: when something was run
  type: str
proven:
  description: Whether the image has passed these checks on this node.
  returned: always
  type: bool
known_after:
  description: What has to run before the image is there; in check mode only.
  returned: always
  type: list
  elements: str
"""

import hashlib
import json
import os
import signal
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi, DockerError
from ansible_collections.sparkops.inference.plugins.module_utils._image_record import Record
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import KEPT_LOGS, keep_newest
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import identity_at

TAIL = 80


class CheckFailed(Exception):
    """A command did not end with 0."""


def proof_of(commands: t.Sequence[t.Sequence[str]], environment: t.Mapping[str, str], gpus: str) -> str:
    """A name for what was proven: other checks prove something else."""
    return hashlib.sha256(json.dumps([commands, environment, gpus], sort_keys=True).encode()).hexdigest()[:16]


def demultiplexed(pieces: t.Iterable[bytes]) -> t.Iterator[bytes]:
    """The text of a log stream: each part has a header of eight bytes, of which the last four are its length."""
    rest = b""
    for piece in pieces:
        rest += piece
        while len(rest) >= 8 and len(rest) >= 8 + int.from_bytes(rest[4:8], "big"):
            end = 8 + int.from_bytes(rest[4:8], "big")
            yield rest[8:end]
            rest = rest[end:]


def split_mount(mount: str) -> tuple[str, str]:
    source, dummy, target = mount.rpartition(":")
    return source, target


class ImageCheck:
    """The checks of one image on this node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.api = DockerApi(self.params["socket"])
        self.record = Record(self.params["state_root"])
        # A forced one is the tag selftest, which may run while a start checks.
        self.name = f"sparkops-{'selftest' if self.params['force'] else 'check'}-{self.params['deployment']}"
        self.log = os.path.join(self.params["state_dir"], "logs", time.strftime("image-check-%Y%m%dT%H%M%SZ.log", time.gmtime()))

    def run(self) -> dict[str, t.Any]:
        document = self.api.inspect_image(self.params["image"])
        if document is None:
            if self.module.check_mode:
                return {"changed": True, "proven": False, "known_after": ["image"]}
            raise CheckFailed(f"no image {self.params['image']} on this node")
        proof = proof_of(self.params["commands"], self.params["environment"], self.params["gpus"])
        proven = proof in self.record.of(document["Id"]).get("proven", [])
        if proven and not self.params["force"]:
            return {"changed": False, "proven": True, "known_after": []}
        if not self.module.check_mode:
            self.check(document["Id"])
            self.record.note(document["Id"], proven=sorted({*self.record.of(document["Id"]).get("proven", []), proof}))
        return {"changed": True, "proven": not self.module.check_mode, "log": self.log, "known_after": []}

    def check(self, image_id: str) -> None:
        # The first to need the deployment's directory makes it.
        with identity_at(self.params["user"], self.params["state_dir"]):
            os.makedirs(os.path.dirname(self.log), exist_ok=True)
            keep_newest(os.path.dirname(self.log), "image-check-*.log", KEPT_LOGS - 1)
            log = open(self.log, "ab")
        with log:
            for command in self.params["commands"]:
                words = [str(word) for word in command]
                log.write(f"$ {' '.join(words)}\n".encode())
                code = self.run_container(image_id, words, log)
                log.write(f"[ended with {code}]\n".encode())
                if code != 0:
                    log.flush()
                    raise CheckFailed(f"{' '.join(words)} ended with {code}; its last lines:\n{self.tail()}\nAll of it is in {self.log}")

    def run_container(self, image_id: str, words: list[str], log: t.BinaryIO) -> int | str:
        self.remove()
        try:
            self.api.call("POST", "/containers/create", body=self.specification(image_id, words), query={"name": self.name})
            self.api.call("POST", f"/containers/{self.name}/start")
            return self.follow(log)
        finally:
            self.remove()

    def specification(self, image_id: str, words: list[str]) -> dict[str, t.Any]:
        # Not as "Binds", for which the engine makes a directory of root where there is none.
        mounts = [{"Type": "bind", "Source": source, "Target": target, "ReadOnly": True} for source, target in map(split_mount, self.params["mounts"])]
        # What it prints is read from its log, and the engine's own default may be a driver that keeps none.
        host: dict[str, t.Any] = {"NetworkMode": "none", "Mounts": mounts, "LogConfig": {"Type": "json-file"}}
        if self.params["gpus"]:
            host["DeviceRequests"] = [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]
        return {
            "Image": image_id,
            "Entrypoint": words[:1],
            "Cmd": words[1:],
            "Env": [f"{name}={value}" for name, value in self.params["environment"].items()],
            "Labels": {"sparkops.check": self.params["deployment"]},
            "HostConfig": host,
        }

    def follow(self, log: t.BinaryIO) -> int | str:
        """Until the command ends or its time is over. The log is read in turns, because a silent command must end too."""
        deadline = time.monotonic() + self.params["timeout"]
        while time.monotonic() < deadline:
            container = self.api.inspect_container(self.name)
            if container is None:
                return "no result: its container was removed"
            state = container["State"]
            if state["Status"] in ("exited", "dead"):
                self.save(log)
                return state["ExitCode"]
            time.sleep(0.5)
        self.save(log)
        return f"no result after {self.params['timeout']} s"

    def save(self, log: t.BinaryIO) -> None:
        query = {"stdout": True, "stderr": True}
        for text in demultiplexed(self.api.stream("GET", f"/containers/{self.name}/logs", query=query, timeout=30)):
            log.write(text)

    def remove(self) -> None:
        self.api.request("DELETE", f"/containers/{self.name}", query={"force": True, "v": True})

    def tail(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as stream:
            return "".join(stream.readlines()[-TAIL:]).rstrip()


def ended(_number: int, _frame: t.Any) -> t.NoReturn:
    """The session is gone: without this the container would go on, with the GPU, and nobody would end it."""
    raise CheckFailed("the run was ended")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "required": True},
            "commands": {"type": "list", "elements": "list", "required": True},
            "environment": {"type": "dict", "default": {}},
            "gpus": {"type": "str", "default": ""},
            "mounts": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 900},
            "force": {"type": "bool", "default": False},
            "node": {"type": "str", "required": True},
            "deployment": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "state_root": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    check = ImageCheck(module)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, ended)
    try:
        module.exit_json(**check.run())
    except (CheckFailed, DockerError, OSError) as exc:
        if module.check_mode and isinstance(exc, DockerError):
            module.exit_json(changed=True, proven=False, known_after=["bootstrap"])
        fail(module, str(exc))


def fail(module: AnsibleModule, found: str) -> t.NoReturn:
    refusal = Refusal(
        "image.check",
        module.params["node"],
        f"self-check of image {module.params['image']}",
        found,
        "checks that end with 0",
        "read the log; do not serve with this image, or skip the checks with image_self_check=false",
    )
    module.fail_json(msg=refusal.text, refusals=[refusal.as_dict()])


if __name__ == "__main__":
    main()
