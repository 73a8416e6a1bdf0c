# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lab as a whole: brings all parts up in order, takes them down, tells how they are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from sparklab import hub_content, images, settings
from sparklab.daemons import Daemons
from sparklab.debian import stamp
from sparklab.docker import Docker
from sparklab.images import Images
from sparklab.lock import Lock
from sparklab.nodes import Nodes
from sparklab.registry import Registry
from sparklab.run import LabError, say, succeeds
from sparklab.settings import HERE, Node, Paths

LOCK = Lock(settings.RUN, "tests/lab/lab", "SPARKLAB_CACHE")
SHORT_NAMES = {"vllm": images.VLLM_IMAGE, **{f"stub:{tag}": f"{images.STUB_IMAGE}:{tag}" for tag in images.STUB_TAGS}, "stub": f"{images.STUB_IMAGE}:1"}


class Lab:
    """Everything together."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.daemons = Daemons(paths.state / "processes.json", paths.logs)
        self.docker = Docker(paths, self.daemons)
        self.registry = Registry(paths, self.daemons, self.docker)
        self.images = Images(paths, self.docker)
        self.nodes = Nodes(paths, self.docker)

    # Up -----------------------------------------------------------------------------------------------------------

    def up(self, count: int, *, fresh: bool, vllm: bool = True, newer: Sequence[str] = ()) -> None:
        """Bring the lab up; on a healthy lab this only checks. *newer* names nodes of the next Debian."""
        self.paths.make()
        self.docker.ensure_engine()
        image = self.images.ensure_node()
        image_of = {name: self.images.ensure_node(images.NEWER_SUITE) for name in newer}
        self.nodes.ensure_networks()
        self._ensure_services(fresh=fresh)
        wanted = settings.nodes(count)
        self.nodes.ensure_controller_key()
        if fresh:
            for node in self.existing_nodes()[count:]:
                self.nodes.remove_one(node)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: self.nodes.ensure(node, image_of.get(node.name, image), fresh=fresh), wanted))
            self.nodes.write_known_hosts(self.existing_nodes())
            list(pool.map(self.nodes.wait_ready, wanted))
        say(f"{len(wanted)} nodes are ready: " + ", ".join(f"{node.name} {node.user}@{node.management}" for node in wanted))
        self._sweep()
        self._publish(vllm=vllm)
        self.images.remove_outdated()

    def build(self, *, vllm: bool = True) -> None:
        """Make all images and fill the registry's storage; an engine started for that alone is ended again."""
        self.paths.make()
        self.docker.ensure_engine()
        self.images.ensure_node()
        self._publish(vllm=vllm)
        hub_content.ensure(self.paths)
        self.images.remove_outdated()
        if not self.docker.labelled("container"):
            self.docker.stop_engine()

    def _publish(self, *, vllm: bool) -> None:
        """See that the registry holds the images."""
        for tag in images.STUB_TAGS:
            if not self.registry.holds(f"{images.STUB_IMAGE}:{tag}", images.stub_stamp(tag)):
                self.registry.push(self.images.ensure_stub(tag))
        if vllm and not self.registry.holds(images.VLLM_IMAGE, self.images.vllm_stamp()):
            self.registry.push(self.images.ensure_vllm())

    def _ensure_services(self, *, fresh: bool) -> None:
        """Start what the nodes talk to."""
        self.registry.ensure()
        self.daemons.ensure_listening("apt", (settings.GATEWAY, settings.APT_PORT), [
            sys.executable, "-m", "http.server", "--bind", settings.GATEWAY, "--directory", self.images.apt_folder, str(settings.APT_PORT)])
        if fresh:
            self.daemons.stop("hub")  # its faults and counters are gone with it
        hub_content.ensure(self.paths, fresh=fresh)
        self.daemons.ensure_listening("hub", (settings.GATEWAY, settings.HUB_PORT), [
            sys.executable, "-B", HERE / "hub.py", "--root", self.paths.hub, "--bind", settings.GATEWAY, "--port", str(settings.HUB_PORT),
            "--admin-port", str(settings.HUB_ADMIN_PORT)], {"SPARKLAB_STAMP": stamp(HERE / "hub.py")})

    def existing_nodes(self) -> list[Node]:
        """List the nodes that have a container."""
        names = [name for name in self.docker.labelled("container") if name.startswith("spark-")]
        return sorted((settings.node_by_name(name) for name in names), key=lambda node: node.number)

    # Single acts --------------------------------------------------------------------------------------------------

    def reset(self, names: list[str]) -> None:
        """Make nodes virgin again."""
        known = self._known_nodes(names)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: self.nodes.ensure(node, self.docker.inspect("container", node.name)["Image"], fresh=True), known))
            list(pool.map(self.nodes.wait_ready, known))
        self._sweep()

    def _sweep(self) -> None:
        """Remove old volumes in the background, one sweeper at a time."""
        stale = self.nodes.stale_volumes()
        if stale and self.daemons.pid("sweeper") is None:
            self.daemons.start("sweeper", [self.docker.client, "volume", "rm", "--force", *stale])

    def _known_nodes(self, names: list[str]) -> list[Node]:
        existing = {node.name: node for node in self.existing_nodes()}
        if unknown := [name for name in names if name not in existing]:
            raise LabError(f"no such node: {', '.join(unknown)} (there are: {', '.join(existing) or 'none, see `lab up`'})")
        return [existing[name] for name in names] or list(existing.values())

    def preload(self, names: list[str], image: str) -> None:
        """Put an image into nodes' engines under its registry name, past the product's own ways.

        A node that reaches the registry pulls, so that the image has its digest there; the others get it loaded.
        """
        reference = f"{settings.REGISTRY}/{SHORT_NAMES.get(image, image)}"
        for node in self._known_nodes(names):
            inside = ["exec", node.name, "docker"]
            if succeeds([self.docker.client, *inside, "image", "inspect", reference]):
                continue
            say(f"{node.name}: {'pulling' if node.reaches_registry else 'loading'} {reference}")
            if node.reaches_registry:
                self.docker(*inside, "pull", "--quiet", reference)
            else:
                self._load(node, reference)

    def _load(self, node: Node, reference: str) -> None:
        """Save an image from a node that has it, or from the outer engine, into another node's engine."""
        for other in self.existing_nodes():
            source = self._inner(other)
            if other != node and succeeds([*source, "image", "inspect", reference]):
                break
        else:
            source = [self.docker.client]
            image = reference.removeprefix(f"{settings.REGISTRY}/")
            if self.docker.inspect("image", image) is None:
                self.registry.fetch(image)
            self.docker("image", "tag", image, reference)
        self.docker.pipe([*source, "save", reference], [*self._inner(node), "load", "--quiet"])

    def _inner(self, node: Node) -> list[str]:
        """Return a client for a node's own engine, over its socket: a stream through `exec` takes twice the time."""
        container = self.docker.inspect("container", node.name) or {}
        return [self.docker.client, "--host", f"unix:///proc/{container['State']['Pid']}/root/run/docker.sock"]

    def image(self, name: str) -> dict[str, str]:
        """Tell reference, digest and stamp of an image."""
        image = SHORT_NAMES.get(name, name)
        entry = self.registry.pushed().get(image)
        if entry is None:
            raise LabError(f"the registry has no {image} (known short names: {', '.join(SHORT_NAMES)}; `lab build` makes them)")
        return {"reference": f"{settings.REGISTRY}/{image}", "pinned": f"{settings.REGISTRY}/{image}@{entry['digest']}",
                "auth_reference": f"{settings.REGISTRY_AUTH}/{image}", **entry}

    # Down ---------------------------------------------------------------------------------------------------------

    def down(self) -> None:
        """Remove what the lab made and end what it started; images and downloads stay in the cache."""
        self.paths.make()
        if not self.docker.answers() and any(self.paths.engine.iterdir()):
            self.docker.ensure_engine()  # a crashed lab's containers are known to its engine only
        self.daemons.stop("sweeper")
        if self.docker.answers():
            self.nodes.remove()
        for name in self.daemons.running():
            if name != "engine":
                self.daemons.stop(name)
        self.docker.stop_engine()

    def clean(self) -> None:
        """Take the lab down and remove its images and its cache."""
        self.down()
        foreign = self.docker.answers()
        if foreign:
            self.images.remove_all()
        say(f"removing {self.paths.cache}")
        for folder in (self.paths.engine, self.paths.images, self.paths.registry, self.paths.hub, self.paths.state):
            shutil.rmtree(folder, ignore_errors=True)
        if self.paths.cache.is_dir() and not any(self.paths.cache.iterdir()):
            self.paths.cache.rmdir()

    # Status -------------------------------------------------------------------------------------------------------

    def status(self) -> dict:
        """Tell everything that a test or a person may want to know; changes nothing."""
        answers = self.docker.answers()
        owner = LOCK.read_owner()
        running = self.daemons.running()
        model = hub_content.description()
        nodes = []
        for node in self.existing_nodes() if answers else []:
            container = self.docker.inspect("container", node.name) or {}
            nodes.append({
                "name": node.name, "user": node.user, "home": node.home, "management": node.management, "fabric": node.fabric,
                "reaches_registry": node.reaches_registry, "running": container.get("State", {}).get("Running", False),
                "ssh": succeeds(self.nodes.ssh_words(node, "true"), timeout=10),
            })
        services = {"registry": settings.REGISTRY, "registry-auth": settings.REGISTRY_AUTH, "hub": settings.HUB_URL, "apt": settings.APT_URL}
        return {
            "healthy": bool(nodes) and all(node["ssh"] for node in nodes) and set(services) <= set(running),
            "owner": asdict(owner) | {"live": owner.live} if owner else None,
            "cache": str(self.paths.cache),
            "engine": {"answers": answers, "ours": self.docker.ours, "client": self.docker.client, "pid": running.get("engine")},
            "nodes": nodes,
            "services": {name: {"address": address, "pid": running.get(name)} for name, address in services.items()},
            "images": {image: {"reference": f"{settings.REGISTRY}/{image}", **entry} for image, entry in self.registry.pushed().items()},
            "registry_credentials": str(self.registry.password_file),
            "hub": {"url": settings.HUB_URL, "admin": f"http://127.0.0.1:{settings.HUB_ADMIN_PORT}", "credentials": str(self.paths.state / "hub.json"),
                    "repository": model["repository"], "revision": model["revision"], "older_revision": model["revisions"]["older"]["revision"],
                    "gated_repository": hub_content.GATED_REPOSITORY, "bulk_repository": model["bulk"]["repository"]},
            "ssh": {"key": str(self.paths.ssh_key), "known_hosts": str(self.paths.known_hosts)},
        }
