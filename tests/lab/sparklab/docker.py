# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The outer engine: the one that is there, or Debian's, started and ended by the lab."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from sparklab.daemons import Daemons
from sparklab.run import LabError, run, say, succeeds, tail, unmount_below, wait_for
from sparklab.settings import LABEL, RUN, Paths

SOCKET = "/run/docker.sock"


class Docker:
    """A client that can talk to the engine.

    The first ``docker`` on PATH may be too old or too new for the engine at hand, so all of them are tried.
    """

    def __init__(self, paths: Paths, daemons: Daemons) -> None:
        self.paths = paths
        self.daemons = daemons
        self.client = ""

    @staticmethod
    def clients() -> list[str]:
        """List the docker clients of this machine, in the order of PATH."""
        found: list[str] = []
        for folder in [*os.get_exec_path(), "/usr/bin"]:
            program = shutil.which("docker", path=folder)
            if program and program not in found:
                found.append(program)
        return found

    def answers(self) -> bool:
        """Tell whether some client gets an answer from an engine; remember which one."""
        for client in self.clients():
            if succeeds([client, "info"], timeout=20):
                self.client = client
                return True
        return False

    def ensure_engine(self) -> None:
        """Use the engine that answers, or start one."""
        if self.answers():
            return
        if not self.clients() or shutil.which("dockerd") is None:
            raise LabError("no Docker engine answers and there is no dockerd to start (tests/setup.sh installs one)")
        if self.daemons.pid("engine") is None:
            say("starting a Docker engine")
            self._remember_machine()
            self.daemons.start("engine", [
                "dockerd", "--storage-driver", "overlay2", "--data-root", self.paths.engine, "--exec-root", RUN / "docker",
                "--pidfile", RUN / "dockerd.pid", "--host", f"unix://{SOCKET}", "--log-level", "warn",
            ])
        wait_for("the Docker engine answers", self._answers_or_died, 60, pause=0.2, explain=lambda: tail(self.daemons.log("engine")))

    def _answers_or_died(self) -> bool:
        if self.daemons.pid("engine") is None:
            raise LabError(f"the Docker engine ended at once\n{tail(self.daemons.log('engine'))}")
        return self.answers()

    @property
    def ours(self) -> bool:
        """Whether the engine is one that the lab started."""
        return self.daemons.pid("engine") is not None

    def stop_engine(self) -> None:
        """End the engine, if the lab started it, and undo what it did to the machine's network."""
        if not self.ours:
            return
        self.daemons.stop("engine", seconds=60)
        self.client = ""
        for folder in (self.paths.engine, RUN / "docker"):
            unmount_below(folder)
        before = json.loads(self._machine_file.read_text()) if self._machine_file.exists() else {}
        if before.get("docker0") is False:
            run(["ip", "link", "delete", "docker0"], check=False)
        if before.get("forward") == "ACCEPT":
            run(["iptables", "--policy", "FORWARD", "ACCEPT"], check=False)
        self._machine_file.unlink(missing_ok=True)

    @property
    def _machine_file(self) -> Path:
        return self.paths.state / "machine.json"

    def _remember_machine(self) -> None:
        """Write down what an engine changes at its start and leaves behind at its end."""
        if not self._machine_file.exists():
            policy = run(["iptables", "--list-rules", "FORWARD"], check=False).split()[:3]
            content = {"docker0": Path("/sys/class/net/docker0").exists(), "forward": policy[-1] if policy else "ACCEPT"}
            self._machine_file.write_text(json.dumps(content) + "\n")

    # The commands that the lab needs ------------------------------------------------------------------------------

    def __call__(self, *words: str | Path, check: bool = True, data: bytes | None = None, timeout: float | None = None) -> str:
        if not self.client and not self.answers():
            raise LabError("no Docker engine answers (`lab up` starts one)")
        return run([self.client, *words], check=check, data=data, timeout=timeout).strip()

    def inspect(self, kind: str, name: str) -> dict | None:
        """Return what the engine knows about a container, image, network or volume."""
        text = self(kind, "inspect", name, check=False)
        found = json.loads(text) if text else []
        return found[0] if found else None

    def image_label(self, reference: str, label: str) -> str:
        """Return a label of an image, or nothing when the image or the label is missing."""
        image = self.inspect("image", reference)
        return ((image or {}).get("Config") or {}).get("Labels", {}).get(label, "") if image and image["Config"].get("Labels") else ""

    def labelled(self, kind: str) -> list[str]:
        """Name everything of a kind (container, network, volume) that the lab made."""
        form = "{{.Names}}" if kind == "container" else "{{.Name}}"
        more = ["--all"] if kind == "container" else []
        return self(kind, "ls", *more, "--filter", f"label={LABEL}", "--format", form).split()

    def import_tree(self, tar: Path, reference: str, changes: list[str]) -> None:
        """Make an image with one layer of a tar file."""
        words = [word for change in changes for word in ("--change", change)]
        self("import", *words, tar, reference)

    def pipe(self, source: list[str], sink: list[str]) -> None:
        """Connect two programs, say a save with a load, without a file in between."""
        with subprocess.Popen(source, stdout=subprocess.PIPE) as first:
            second = subprocess.run(sink, stdin=first.stdout, capture_output=True, check=False)
        if first.returncode or second.returncode:
            raise LabError(f"{' '.join(source)} | {' '.join(sink)} failed: {second.stderr.decode(errors='replace').strip()}")
