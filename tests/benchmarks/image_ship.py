# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Ships of an image between two nodes of the lab, beside the recipes' own line and a registry pull.

Reports medians, ratios and the bytes on the worker's fabric interface; never fails on a time. The lab must be up
(``tests/lab/lab up``). Run it from the checkout, with the link tree on the path:

    PYTHONPATH=.collections python3 tests/benchmarks/image_ship.py

What it makes on the nodes is removed at the end; the registry keeps the image until `lab down`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import tempfile
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _image_ship, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._image_identity import from_inspect

ROOT = pathlib.Path(__file__).parents[2]
STATE = pathlib.Path(os.environ.get("SPARKLAB_CACHE", "/var/cache/sparkops-lab")) / "state"
FOLDER = "/var/tmp/sparkops-bench"
MARK = "sparkops-bench"
MIB = 2**20

MAKE = """
set -eu
mkdir -p {folder}/context && cd {folder}/context
for part in one two three; do head -c {part} /dev/urandom >$part; done
tar -cf - one | docker import - {name}:base >/dev/null
for tag in 1 2; do
    head -c {small} /dev/urandom >small
    printf 'FROM {name}:base\\nCOPY two /two\\nCOPY three /three\\nCOPY small /small\\nENTRYPOINT ["/one"]\\n' >Dockerfile
    docker build --quiet --tag {name}:$tag . >/dev/null
    docker push --quiet {name}:$tag >/dev/null
done
rm -rf {folder}/context
"""

SHIP = """
import json, sys
from ansible_collections.sparkops.inference.plugins.module_utils import _image_ship, _unit
outcome = _image_ship.Ship(json.load(open(sys.argv[1])), _unit.Progress("{folder}/progress.json")).run()
"""


class Node:
    """A node of the lab, over its management address."""

    def __init__(self, user: str, address: str, fabric: str) -> None:
        self.user, self.address, self.fabric = user, address, fabric

    def run(self, script: str, data: bytes | None = None, check: bool = True) -> str:
        words = ["ssh", "-F", "/dev/null", "-i", str(STATE / "ssh/id_ed25519"), "-o", f"UserKnownHostsFile={STATE / 'ssh/known_hosts'}"]
        words += ["-o", "BatchMode=yes", f"{self.user}@{self.address}", f"sudo sh -c {shlex.quote(script)}"]
        result = subprocess.run(words, input=data, stdin=None if data is not None else subprocess.DEVNULL, stdout=subprocess.PIPE, check=check)
        return result.stdout.decode()

    def timed(self, script: str) -> float:
        """Seconds on the node itself, without the login. What fails ends the benchmark: it would be the fastest."""
        lines = self.run(f"set -e; a=$(date +%s.%N); {script}; b=$(date +%s.%N); echo; echo $a $b").split()
        return float(lines[-1]) - float(lines[-2])

    def home(self) -> str:
        """Homes of real pairs seldom lie at the same place."""
        return self.run(f"getent passwd {self.user} | cut -d: -f6").strip()

    def received(self) -> int:
        return int(self.run("cat /sys/class/net/eth1/statistics/rx_bytes"))


class Contest:
    """Two nodes with keys for each other, and an image in two versions of which the last small layer differs."""

    def __init__(self, source: Node, target: Node, registry: str, size: int, small: int) -> None:
        self.source, self.target = source, target
        self.name = f"{registry}/{MARK}"
        self.size, self.small = size, small

    def prepare(self) -> None:
        self.tidy()
        for node in (self.source, self.target):
            node.run(f"mkdir -p {FOLDER} && chmod 755 {FOLDER} && ssh-keygen -q -t ed25519 -N '' -C {MARK} -f {FOLDER}/key && chmod 644 {FOLDER}/key.pub")
        # The recipes' line goes from the head with a shell, ours from the worker through a forced command.
        self.allow(self.target, self.source, "")
        gate = f'restrict,command="env SPARKOPS_STATE_ROOT={FOLDER} sudo -E python3 {FOLDER}/image_source.py $SSH_ORIGINAL_COMMAND" '
        self.allow(self.source, self.target, gate)
        files = [ROOT / "roles/image/files/image_source.py", *(ROOT / f"plugins/module_utils/{name}.py" for name in ("_docker_api", "_image_export"))]
        for path in files:
            self.source.run(f"cat >{FOLDER}/{path.name}", path.read_bytes())
        with tempfile.TemporaryDirectory() as folder:
            code = _unit.install_code([_image_ship, *_unit.loaded_code()], os.path.join(folder, "lib"))
            archive = subprocess.run(["tar", "-C", code, "-cf", "-", "."], stdout=subprocess.PIPE, check=True).stdout
        self.target.run(f"mkdir -p {FOLDER}/code && tar -C {FOLDER}/code -xf -", archive)
        self.target.run(f"cat >{FOLDER}/ship.py", SHIP.format(folder=FOLDER).encode())
        self.source.run(MAKE.format(folder=FOLDER, name=self.name, part=self.size // 3, small=self.small))
        self.share()

    def allow(self, host: Node, guest: Node, options: str) -> None:
        public = guest.run(f"cat {FOLDER}/key.pub").strip()
        folder = f"{host.home()}/.ssh"
        host.run(
            f"install -d -o {host.user} -m 700 {folder} && cat >>{folder}/authorized_keys && chown {host.user} {folder}/authorized_keys",
            f"{options}{public}\n".encode(),
        )
        key = host.run("cat /etc/ssh/ssh_host_ed25519_key.pub").strip()
        guest.run(f"cat >>{FOLDER}/known_hosts", f"{host.fabric} {key}\n".encode())

    def share(self) -> None:
        """What role image records on the head."""
        self.images = {tag: json.loads(self.source.run(f"docker image inspect {self.name}:{tag}"))[0] for tag in ("1", "2")}
        record = {"format": 1, "images": {image["Id"]: {"digests": []} for image in self.images.values()}}
        self.source.run(f"cat >{FOLDER}/images.json", json.dumps(record).encode())

    # The ways

    def recipe(self, tag: str) -> float:
        shell = f"ssh -i {FOLDER}/key -o BatchMode=yes -o UserKnownHostsFile={FOLDER}/known_hosts {self.target.user}@{self.target.fabric} sudo docker load"
        return self.source.timed(f"docker save {self.name}:{tag} | {shell} >/dev/null")

    def ship(self, tag: str, mode: str) -> float:
        image = self.images[tag]
        request = {
            "reference": f"{self.name}:{tag}",
            "source_id": image["Id"],
            "identity": from_inspect(image).identity,
            "origin": "source",
            "node": "target",
            "mode": mode,
            "staging": f"{FOLDER}/ship",
            "socket": "/var/run/docker.sock",
            "address": self.source.fabric,
            "user": self.source.user,
            "key": f"{FOLDER}/key",
            "known_hosts": f"{FOLDER}/known_hosts",
            "state_root": FOLDER,
        }
        self.target.run(f"cat >{FOLDER}/request.json", json.dumps(request).encode())
        return self.target.timed(f"PYTHONPATH={FOLDER}/code python3 -S {FOLDER}/ship.py {FOLDER}/request.json")

    def pull(self, tag: str) -> float:
        """On the source, which is the one that reaches the registry."""
        return self.source.timed(f"docker pull --quiet {self.name}:{tag} >/dev/null")

    def forget(self, node: Node, *tags: str) -> None:
        node.run(f"docker image rm --force {' '.join(f'{self.name}:{tag}' for tag in tags)} >/dev/null 2>&1", check=False)

    def tidy(self) -> None:
        for node in (self.source, self.target):
            self.forget(node, "1", "2", "base")
            keys = f"{node.home()}/.ssh/authorized_keys"
            node.run(f"rm -rf {FOLDER}; [ ! -e {keys} ] || sed -i /{MARK}/d {keys}")


def measure(contest: Contest, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The ways take turns, so that a slow minute of the machine hits all of them."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(row: str, way: str, act: t.Callable[[], float]) -> None:
        before = contest.target.received()
        seconds = act()
        found.setdefault(row, {}).setdefault(way, []).append(seconds)
        found[row].setdefault(f"{way}, bytes", []).append(contest.target.received() - before)

    for dummy in range(rounds):
        ships = {mode: lambda tag, mode=mode: contest.ship(tag, mode) for mode in ("layers", "stream")}
        for way, act in {"recipe": contest.recipe, **ships}.items():
            contest.forget(contest.target, "1", "2")
            note("first ship", way, lambda act=act: act("1"))
            if way != "stream":
                note("changed last layer", way, lambda act=act: act("2"))
        contest.forget(contest.source, "1", "2", "base")
        note("first ship", "registry pull", lambda: contest.pull("1"))
        note("changed last layer", "registry pull", lambda: contest.pull("2"))
        time.sleep(1)
    return found


def show(contest: Contest, found: dict[str, dict[str, list[float]]]) -> None:
    print(f"an image of {contest.size / 1e6:.0f} MB, a last layer of {contest.small / 1e6:.1f} MB; medians")
    for row, ways in found.items():
        base = statistics.median(ways["recipe"])
        print(f"{row:<20} {'seconds':>8} {'of recipe':>10} {'MB received':>12}  all rounds")
        for way, seconds in ways.items():
            if not way.endswith(", bytes"):
                middle, received = statistics.median(seconds), statistics.median(ways[f"{way}, bytes"])
                print(f"  {way:<18} {middle:8.2f} {middle / base:10.2f} {received / 1e6:12.2f}  {' '.join(f'{value:.2f}' for value in seconds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=860, help="size of the image")
    parser.add_argument("--small-kib", type=int, default=2048, help="size of the layer that changes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--registry", default="198.18.0.1:5000")
    arguments = parser.parse_args()
    if not (STATE / "ssh/id_ed25519").exists():
        raise SystemExit("the lab is not up: tests/lab/lab up")
    contest = Contest(
        Node("alice", "198.18.0.21", "198.51.100.11"),
        Node("bob", "198.18.0.22", "198.51.100.12"),
        arguments.registry,
        arguments.mib * MIB,
        arguments.small_kib * 1024,
    )
    try:
        contest.prepare()
        show(contest, measure(contest, arguments.rounds))
    finally:
        contest.tidy()


if __name__ == "__main__":
    main()
