# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Build an image from its recipe: the context that the builder gets, the build as a job, and what the result must be."""

from __future__ import annotations

import collections
import io
import os
import re
import subprocess
import tarfile
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._docker_api import DockerApi
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import MAX_LAYERS, from_inspect
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Progress, Refused, run_job

TAIL = 40
_FROM = re.compile(r"^(?P<start>\s*FROM\s+(?:--platform=\S+\s+)?)(?P<image>\S+)(?:\s+AS\s+(?P<stage>\S+))?", re.IGNORECASE | re.MULTILINE)


def with_base(dockerfile: str, base: str) -> str:
    """The Dockerfile with another first image: a builder looks for a digest at the registry even when the image is here."""
    return _FROM.sub(lambda match: match["start"] + base + match.group(0)[match.end("image") - match.start() :], dockerfile, count=1)


def floating_bases(dockerfile: str) -> list[str]:
    """Images of FROM lines that are no stage of the same file and have no digest: another build may get another one."""
    found: list[str] = []
    stages: set[str] = set()
    for match in _FROM.finditer(dockerfile):
        image = match["image"]
        if image.lower() not in stages and image != "scratch" and "@sha256:" not in image and "$" not in image:
            found.append(image)
        stages.add((match["stage"] or "").lower())
    return found


def stamp_argument(dockerfile: str, label: str) -> str | None:
    """The build argument from which the recipe fills its stamp label."""
    match = re.search(re.escape(label) + r"[\"']?\s*=\s*[\"']?\$\{?(\w+)", dockerfile)
    return match.group(1) if match else None


class Context:
    """The build context as a tar: the checkout as it is, with the given inputs, and with another Dockerfile if need be.

    Nothing is written into the checkout, which is the user's and whose stamp must stay what it is.
    """

    def __init__(self, recipe: str, dockerfile: str, inputs: t.Mapping[str, str]) -> None:
        self.recipe = recipe
        self.dockerfile = dockerfile
        self.inputs = inputs

    def write(self, target: t.IO[bytes]) -> None:
        with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for name in sorted(os.listdir(self.recipe)):
                if name not in ("Dockerfile", ".git"):
                    archive.add(os.path.join(self.recipe, name), name, filter=self._unless_given)
            self._add_text(archive, "Dockerfile", self.dockerfile.encode())
            for name, path in sorted(self.inputs.items()):
                # A link would point to nothing in the builder.
                archive.add(os.path.realpath(path), name)

    def _unless_given(self, member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name in self.inputs else member

    @staticmethod
    def _add_text(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        member.mode = 0o644
        archive.addfile(member, io.BytesIO(content))


class Build:
    """One build. The image gets its name only when it is what it has to be, so a failed build changes nothing."""

    def __init__(self, request: t.Mapping[str, t.Any], progress: Progress) -> None:
        self.request = request
        self.progress = progress
        self.api = DockerApi(request["socket"], timeout=120)
        self.reference: str = request["reference"]
        self.temporary = f"{self.reference}-building"
        self.log: str = request["log"]

    def run(self) -> dict[str, t.Any]:
        with open(os.path.join(self.request["recipe"], "Dockerfile"), encoding="utf-8") as stream:
            dockerfile = stream.read()
        if self.request["base"]:
            dockerfile = with_base(dockerfile, self.request["base"])
        self.build(dockerfile)
        try:
            self.adopt()
        finally:
            self.api.request("DELETE", f"/images/{self.temporary}")
        return {"log": self.log, "notices": self.request["notices"]}

    def argv(self, dockerfile: str) -> list[str]:
        arguments = dict(self.request["build_args"])
        argument = stamp_argument(dockerfile, self.request["label"])
        if argument:
            arguments.setdefault(argument, self.request["stamp"])
        words = [f"--build-arg={name}={value}" for name, value in sorted(arguments.items())]
        # The label in any case: a recipe may have forgotten its argument.
        return ["docker", "build", f"--tag={self.temporary}", f"--label={self.request['label']}={self.request['stamp']}", *words, "-"]

    def build(self, dockerfile: str) -> None:
        self.progress.begin("build", 0, f"log {self.log}")
        environment = {**os.environ, "DOCKER_HOST": f"unix://{self.request['socket']}", "BUILDKIT_PROGRESS": "plain"}
        last: collections.deque[str] = collections.deque(maxlen=TAIL)
        context = Context(self.request["recipe"], dockerfile, self.request["inputs"])
        with open(self.log, "wb") as log:
            pipe = subprocess.PIPE
            # The program of a unit has no AnsibleModule to call.
            # pylint: disable-next=ansible-bad-function
            process = subprocess.Popen(self.argv(dockerfile), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment)
            try:
                context.write(t.cast("t.IO[bytes]", process.stdin))
                t.cast("t.IO[bytes]", process.stdin).close()
            except BrokenPipeError:
                pass  # the builder has ended; why is in what it printed
            for line in t.cast("t.IO[bytes]", process.stdout):
                log.write(line)
                log.flush()
                last.append(line.decode("utf-8", "replace").rstrip())
                self.progress.message = last[-1][:120] or self.progress.message
            code = process.wait()
        if code != 0:
            found = "\n".join([f"docker build ended with {code}; its last lines:", *last, f"All of it is in {self.log}"])
            raise Refused(self.refusal("build", found, "a build that succeeds"))

    def adopt(self) -> None:
        document = self.api.inspect_image(self.temporary)
        if document is None:
            raise Refused(self.refusal("build", f"the build ended well and {self.temporary} is not there", "an image"))
        image = from_inspect(document)
        if len(image.layers) > MAX_LAYERS:
            raise Refused(self.refusal("layers", f"{len(image.layers)} layers", f"at most {MAX_LAYERS}: a worker cannot load more"))
        if image.platform != self.request["platform"]:
            raise Refused(self.refusal("platform", f"an image for {image.platform}", f"one for {self.request['platform']}"))
        name, dummy, tag = self.reference.rpartition(":")
        self.api.call("POST", f"/images/{image.id}/tag", query={"repo": name, "tag": tag})

    def refusal(self, name: str, found: str, wanted: str) -> Refusal:
        thing = f"build of {self.reference} from {self.request['recipe']}"
        return Refusal(f"image.{name}", self.request["node"], thing, found, wanted, "correct the recipe; the image that was there is untouched")


def main(words: t.Sequence[str]) -> int:
    """The job: ``words`` is the path of a request that _unit.Job wrote."""
    return run_job(words[0], lambda request, progress: Build(request, progress).run())
