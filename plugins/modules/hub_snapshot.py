#!/usr/bin/python
# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hub_snapshot
short_description: Keep complete, verified model files of pinned revisions on a node
version_added: 0.1.0
author:
  - The sparkops.inference authors (@sparkops)
description:
  - Brings every artefact of a deployment to O(weights_root) at exactly its pinned commit, and proves it.
  - A tree is complete when its manifest exists and every file of it has its size. The manifest is written last, after
    every file was checked against the hash that the hub lists for it.
  - Complete trees that are already on the node are adopted by hard links, by the pinned commit and never by a branch name.
    When everything is there, no network is touched.
  - The work runs in a transient systemd unit that survives a lost connection. A second run attaches to it.
  - Never touches a container.
extends_documentation_fragment:
  - sparkops.inference.weights.written
  - sparkops.inference.node.job
  - sparkops.inference.node.named
attributes:
  check_mode:
    support: full
    description: Predicts whether files would be brought, without the network.
  diff_mode:
    support: none
    description: There is nothing useful to show as a difference.
  idempotent:
    support: full
    description: Nothing is brought twice.
options:
  artefacts:
    description:
      - The artefacts of the plan, each with C(name), C(repository), C(revision), C(directory), and optionally
        C(fallback_repositories), C(include), C(exclude), C(required), C(licence), C(size_bytes) and C(slim).
    type: list
    elements: dict
    required: true
  state_root:
    description: State folder of the collection on the node, for the managed library and code.
    type: path
    required: true
  user:
    description: User that owns the files. Used when the module runs as root.
    type: str
    default: ''
  state:
    description:
      - V(present) brings the files.
      - V(cancelled) stops a running download. What has arrived is kept.
    type: str
    choices: [present, cancelled]
    default: present
  download:
    description:
      - V(missing) fetches what is not there.
      - V(never) only checks and refuses when something is missing.
      - V(refresh) asks the hub again and compares every file by hash.
    type: str
    choices: [missing, never, refresh]
    default: missing
  verify:
    description: Read all files again on all cores and compare their hashes. Damaged files are named; the next run fetches only them.
    type: bool
    default: false
  endpoint:
    description: Address of the hub.
    type: str
    default: https://huggingface.co
  token:
    description: Access token for the hub. It is handed to the job in a file that the job removes once read.
    type: str
  token_file:
    description: File on the node that holds the token. Its mode must be 0600.
    type: path
  tell_licences:
    description: Return with RV(licences) instead of beginning, so that they are shown before the first byte. Used by the action plugin.
    type: bool
    default: false
  wheels:
    description: Folder on the node with the wheels of the pinned library. Set by the action plugin when it is needed.
    type: path
  wheels_from:
    description: Folder on the controller with the wheels. Without it the controller's own pip fetches them once. Used by the action plugin.
    type: path
  wheel_hashes:
    description: The sha256 of each wheel that may be used.
    type: list
    elements: str
    default: []
  adopt_from:
    description: Folders that may hold complete trees already, either a hub cache or a plain download folder. V(~) is the home of O(user).
    type: list
    elements: str
    default: []
  adopt_copy:
    description: Copy when an adopted tree lies on another filesystem. Otherwise that is refused.
    type: bool
    default: false
  accept_licences:
    description: Names of artefacts or licences whose terms are accepted.
    type: list
    elements: str
    default: []
  ranged_above:
    description: Files larger than this many bytes are fetched by ranges, with resume.
    type: int
    default: 1000000000
  part_size:
    description: Smallest part of a ranged download in bytes.
    type: int
    default: 67108864
  streams:
    description: Connections to the hub at the same time.
    type: int
    default: 8
  timeout:
    description: Seconds without an answer from the hub after which one request is given up.
    type: int
    default: 60
  stall_seconds:
    description: Seconds without a byte on the disk after which an attempt is given up and the next way is tried.
    type: int
    default: 120
  rate_limit_wait:
    description: Seconds that may be spent in total waiting as the hub asks.
    type: int
    default: 1800
seealso:
  - module: sparkops.inference.weight_sync
  - module: sparkops.inference.manifest_info
"""

EXAMPLES = r"""
- name: Bring the model of the plan to the head
  sparkops.inference.hub_snapshot:
    artefacts: "{{ spark_plan.artefacts }}"
    weights_root: "{{ spark_node.weights_root }}"
    state_dir: "{{ spark_node.state_dir }}"
    state_root: "{{ spark_node.state_root }}"
    deployment: "{{ spark_plan.deployment }}"
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
artefacts:
  description: One entry per artefact.
  returned: always
  type: list
  elements: dict
  sample:
    - name: model
      tree: /var/lib/sparkops/weights/acme--tiny/0123456789012345678901234567890123456789
      complete: true
      size: 1048576
      files: 7
done:
  description: What the run brought, per artefact, and by which way.
  returned: always
  type: dict
notices:
  description: What the run had to say, such as waits that the hub asked for.
  returned: always
  type: list
  elements: str
running:
  description: Whether the work goes on.
  returned: always
  type: bool
run_id:
  description: Identity of the run that goes on or has ended.
  returned: when a run was started or attached to
  type: str
progress:
  description: State of the work.
  returned: when RV(running) is true
  type: dict
licences:
  description: Licences of what is going to be brought.
  returned: with O(tell_licences), when something with a licence is going to be brought
  type: list
  elements: str
needs_wheels:
  description: The Python version and machine that wheels of the library are needed for.
  returned: when the library is not on the node and is needed
  type: dict
known_after:
  description: Stages that this prediction depends on.
  returned: always
  type: list
  elements: str
refusals:
  description: Every reason not to go on.
  returned: on refusal
  type: list
  elements: dict
"""

import hashlib
import os
import platform
import pwd
import stat
import sys
import typing as t
import zipfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkops.inference.plugins.module_utils import _limited, _manifest, _unit, _weights_job, _weights_state
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._weights_state import Artefact, adoptable, look

# Passed on to the job as they are.
JOB_OPTIONS = (
    "weights_root", "state_dir", "node", "download", "verify", "endpoint", "adopt_copy", "ranged_above", "part_size", "streams", "timeout", "stall_seconds",
    "rate_limit_wait", "space_margin", "reserve", "artefacts",
)  # fmt: skip


class Snapshot(_unit.LongModule):
    """State of the artefacts on this node, and the job that mends it."""

    area = work = "weights"
    program = _weights_job

    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module)
        self.artefacts = [Artefact.from_dict(item) for item in module.params["artefacts"]]

    # What is there

    def look(self) -> list[dict[str, t.Any]]:
        """Sizes only: well under a second for hundreds of files."""
        with _unit.identity(self.user):
            return [self.look_at(artefact) for artefact in self.artefacts]

    def look_at(self, artefact: Artefact) -> dict[str, t.Any]:
        state = look(self.params["weights_root"], artefact)
        files = state.manifest.files if state.manifest else ()
        return {
            "name": artefact.name,
            "tree": state.tree,
            "complete": not state.problems,
            "problems": state.problems,
            "files": len(files),
            "size": sum(file.size for file in files),
            "adoptable": bool(state.problems) and not _weights_state.damaged(state.tree) and adoptable(artefact, self.adopt_folders()) is not None,
        }

    # Reasons not to begin

    def refusals(self, lacking: t.Sequence[dict[str, t.Any]]) -> list[Refusal]:
        """All that is wrong with the request, before anything is made."""
        found = self.token_refusals()
        if lacking:
            found += self.licence_refusals()
            found += self.incomplete_refusals(lacking)
            found += self.space_refusals(lacking)
            # In check mode the folder may be one that the bootstrap play is going to make.
            found += [] if self.module.check_mode else self.folder_refusals()
        return found

    def incomplete_refusals(self, lacking: t.Sequence[dict[str, t.Any]]) -> list[Refusal]:
        if self.params["download"] != "never":
            return []
        return [
            self.refusal(
                "incomplete",
                f"{item['name']} in {item['tree']}",
                "; ".join(item["problems"][:5]),
                "all files of the pinned revision",
                "set weights_download to missing, or put the tree there",
            )
            for item in lacking
            if not item["adoptable"]
        ]

    def space_refusals(self, lacking: t.Sequence[dict[str, t.Any]]) -> list[Refusal]:
        """With the profile's size a lack is known before the hub is asked; the job counts exactly, by file."""
        sizes = {artefact.name: artefact.size_bytes or 0 for artefact in self.artefacts}
        needs = [_manifest.Need(item["path"], item["size"], item["what"]) for item in self.params["reserve"]]
        for item in lacking:
            if not item["adoptable"]:
                staging = os.path.join(self.params["weights_root"], _manifest.INCOMING, os.path.relpath(item["tree"], self.params["weights_root"]))
                needs.append(
                    _manifest.Need(item["tree"], sizes[item["name"]] - _manifest.bytes_below(item["tree"]) - _manifest.bytes_below(staging), item["name"])
                )
        return [_weights_job.space_refusal(self.node, short) for short in _manifest.shortages(needs, self.params["space_margin"])]

    def licence_refusals(self) -> list[Refusal]:
        accepted = set(self.params["accept_licences"])
        return [
            self.refusal(
                "licence", f"licence of {artefact.name}", f"{artefact.licence['name']} ({artefact.licence.get('url') or 'no address'}), not accepted",
                "your acceptance", f"read it and add {artefact.name} to weights_accept_licences",
            )
            for artefact in self.artefacts
            if artefact.licence and not artefact.licence.get("accept") and not accepted & {artefact.name, artefact.licence["name"]}
        ]  # fmt: skip

    def licences(self, lacking: t.Sequence[dict[str, t.Any]]) -> list[str]:
        names = {item["name"] for item in lacking}
        return [artefact.licence_line for artefact in self.artefacts if artefact.name in names and artefact.licence]

    def token_refusals(self) -> list[Refusal]:
        path = self.params["token_file"]
        if not path:
            return []
        try:
            status = os.stat(path)
        except OSError as exc:
            return [self.refusal("token_file", path, exc.strerror or str(exc), "a file with the token, mode 0600", "correct weights_hub_token_file")]
        if stat.S_IMODE(status.st_mode) & 0o077:
            return [self.refusal("token_file", path, f"mode {stat.S_IMODE(status.st_mode):04o}", "mode 0600", f"chmod 0600 {path}")]
        return []

    def folder_refusals(self) -> list[Refusal]:
        """The user must be able to write where the trees will be."""
        with _unit.identity(self.user):
            lack = _manifest.unwritable(self.params["weights_root"], "weights_root")
        return [self.refusal("not_writable", **lack)] if lack else []

    # The managed library

    def environment(self) -> str | None:
        """The library's folder on this node, when it is there."""
        path = os.path.join(self.params["state_root"], "venv-hub", self.environment_name())
        return path if os.path.isdir(path) else None

    def environment_name(self) -> str:
        return hashlib.sha256("\n".join(sorted(self.params["wheel_hashes"])).encode()).hexdigest()[:16]

    def install_environment(self) -> None:
        """Unpack the wheels. A wheel is a zip whose content works from any folder; nothing else is needed on the node."""
        allowed = set(self.params["wheel_hashes"])
        wheels = sorted(os.path.join(self.params["wheels"], name) for name in os.listdir(self.params["wheels"]) if name.endswith(".whl"))
        for wheel in wheels:
            if _manifest.sha256_of(wheel) not in allowed:
                self.fail(
                    [
                        self.refusal(
                            "wheel_hash",
                            os.path.basename(wheel),
                            "a hash that is not pinned",
                            "a wheel of requirements-hub.txt",
                            "make the folder of weights_hub_wheels again",
                        )
                    ]
                )
        target = os.path.join(self.params["state_root"], "venv-hub", self.environment_name())
        with _unit.identity(self.user):
            building = f"{target}.{os.getpid()}"
            os.makedirs(building)
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(building)
            os.rename(building, target)

    # Running

    def request(self) -> dict[str, t.Any]:
        request = {name: self.params[name] for name in JOB_OPTIONS}
        request["accepted"] = [artefact.name for artefact in self.artefacts if artefact.licence and not self.licence_refusals()]
        with _unit.identity(self.user):
            request["environment"] = self.environment()
            request["adopt_from"] = self.adopt_folders()
            os.makedirs(self.params["weights_root"], exist_ok=True)
        return request

    def needs_library(self, lacking: t.Sequence[dict[str, t.Any]]) -> bool:
        """A tree that is complete elsewhere on this node is adopted without the hub, and a node without internet has no use for its library."""
        return self.params["download"] == "refresh" or not all(item["adoptable"] for item in lacking)

    def adopt_folders(self) -> list[str]:
        """A tilde is the home of the account that owns the files, on this node, whoever runs the module."""
        home = pwd.getpwnam(self.user).pw_dir if self.user else pwd.getpwuid(os.getuid()).pw_dir
        return [home + path[1:] if path == "~" or path.startswith("~/") else path for path in self.params["adopt_from"]]

    def token(self) -> str | None:
        if self.params["token_file"]:
            with open(self.params["token_file"], encoding="utf-8") as stream:
                return stream.read().strip()
        return self.params["token"]

    def present(self) -> dict[str, t.Any]:
        # The folder may be a share of the user's, and even a look at a tree would hang when its server is gone.
        dead = _limited.refuse_dead(self.node, self.params["weights_root"], [item["directory"] for item in self.params["artefacts"]])
        if dead:
            self.fail(dead)
        outcome = self.earlier()
        state = self.look()
        lacking = [item for item in state if not item["complete"]]
        reread = (self.params["verify"] and not (outcome or {}).get("verified")) or (
            self.params["download"] == "refresh" and (outcome or {}).get("download") != "refresh"
        )
        if not lacking and not reread:
            self.note_staged()
            return self.result(state, outcome)
        refusals = self.refusals(lacking)
        if refusals:
            self.fail(refusals)
        if self.module.check_mode:
            return self.result(state, {"changed": bool(lacking)})
        licences = self.licences(lacking)
        if licences and self.params["tell_licences"]:
            return self.result(state, outcome, licences=licences)
        if self.needs_library(lacking) and not self.environment():
            if not self.params["wheels"]:
                need = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "machine": platform.machine()}
                return self.result(state, outcome, needs_wheels=need)
            self.install_environment()
        self.note_staged()
        outcome = self.end_of(self.begin(self.request(), self.token()))
        return self.result(self.look(), outcome)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **_unit.long_options(),
            "artefacts": {"type": "list", "elements": "dict", "required": True},
            "weights_root": {"type": "path", "required": True},
            "download": {"type": "str", "choices": ["missing", "never", "refresh"], "default": "missing"},
            "verify": {"type": "bool", "default": False},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
            "token_file": {"type": "path", "no_log": False},
            "tell_licences": {"type": "bool", "default": False},
            "wheels": {"type": "path"},
            "wheels_from": {"type": "path"},
            "wheel_hashes": {"type": "list", "elements": "str", "default": []},
            "adopt_from": {"type": "list", "elements": "str", "default": []},
            "adopt_copy": {"type": "bool", "default": False},
            "accept_licences": {"type": "list", "elements": "str", "default": []},
            "ranged_above": {"type": "int", "default": 1000000000},
            "part_size": {"type": "int", "default": 67108864},
            "streams": {"type": "int", "default": 8},
            "timeout": {"type": "int", "default": 60},
            "stall_seconds": {"type": "int", "default": 120},
            "rate_limit_wait": {"type": "int", "default": 1800},
            "space_margin": {"type": "int", "default": 2147483648},
            "reserve": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    snapshot = Snapshot(module)
    snapshot.main(snapshot.present)


if __name__ == "__main__":
    main()
