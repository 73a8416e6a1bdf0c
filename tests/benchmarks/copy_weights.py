# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Copies to workers, beside the recipes' own rsync lines: the same files, one sshd on loopback, one disk.

Reports medians and ratios, and prints rows for docs/speed.md; never fails on a time, always on a copy that is not the head's, byte for
byte. Needs sshd and rsync. Run it from the checkout, with the link tree on the path; each part stands alone:

    PYTHONPATH=.collections python3 tests/benchmarks/copy_weights.py --only rails,workers --rounds 3

Before each copy the source is read once, so that all begin with it in the page cache. Slow rails are forwarders with a limit on loopback
addresses of their own. What it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import json
import os
import pathlib
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.filter.weight_sync import sync_sources
from ansible_collections.sparkops.inference.plugins.module_utils import _manifest, _sync_job, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest

MIB = 2**20
COMMIT = "a" * 40
DIRECTORY = f"bench--model/{COMMIT}"
GATE = pathlib.Path(__file__).parents[2] / "roles" / "bootstrap" / "files" / "source_gate.py"
HEAD = "127.0.0.1"
RAILS = ("127.0.0.2", "127.0.0.3")
WORKERS = ("w1", "w2", "w3", "w4")
# What the launchers that pairs of Sparks run today call, with their options; a folder's own path ends with a slash.
PARTIAL = ("-a", "--partial")
UNSAFE_LINKS = ("-av", "--mkpath", "--progress", "--copy-unsafe-links")


class Server:
    """An sshd of our own: with the gate for our copies, and with a shell for the recipes' lines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder / "ssh"
        self.folder.mkdir()
        self.known_hosts = self.folder / "known_hosts"
        for name in ("host", "gate", "shell"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        keys = {name: (self.folder / f"{name}.pub").read_text().strip() for name in ("host", "gate", "shell")}
        command = f'restrict,command="{sys.executable} {GATE} {folder}"'
        (self.folder / "authorized").write_text(f"{command} {keys['gate']}\n{keys['shell']}\n")
        with socket.create_server((HEAD, 0)) as probe:
            self.port = probe.getsockname()[1]
        self.known_hosts.write_text("".join(f"[{address}]:{self.port} {keys['host']}\n" for address in (HEAD, *RAILS)) + f"{HEAD} {keys['host']}\n")
        configuration = {
            "Port": self.port, "ListenAddress": HEAD, "HostKey": self.folder / "host", "AuthorizedKeysFile": self.folder / "authorized",
            "StrictModes": "no", "UsePAM": "no", "PidFile": "none", "MaxStartups": 100,
        }  # fmt: skip
        (self.folder / "config").write_text("".join(f"{name} {value}\n" for name, value in configuration.items()))
        with contextlib.suppress(OSError):
            os.makedirs("/run/sshd", exist_ok=True)
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
        if program is None:
            raise SystemExit("sshd is not installed: apt-get install openssh-server (the benchmark starts its own on loopback; the service may stay off)")
        self.process = subprocess.Popen([program, "-D", "-e", "-f", self.folder / "config"], stderr=subprocess.DEVNULL)
        time.sleep(0.5)

    def shell(self) -> str:
        return f"ssh -F /dev/null -p {self.port} -i {self.folder / 'shell'} -o BatchMode=yes -o UserKnownHostsFile={self.known_hosts}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class SlowRail:
    """A forwarder to the sshd with a limit on what comes back, shared by all its connections, and a count of it."""

    # A sleep ends late: what was lost to that may be caught up, or a single connection would get less than the limit.
    SLACK = 0.05

    def __init__(self, address: str, port: int, rate: float) -> None:
        self.listener = socket.create_server((address, port), backlog=64)
        self.target = (HEAD, port)
        self.rate, self.due, self.sent = rate, time.monotonic(), 0
        self.lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                far = socket.create_connection(self.target)
                for source, target, limited in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(source, target, limited), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if limited:
                    with self.lock:
                        self.sent += len(data)
                        self.due = max(self.due, time.monotonic() - self.SLACK) + len(data) / self.rate
                        pause = self.due - time.monotonic()
                    time.sleep(max(0.0, pause))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Bench:
    def __init__(self, folder: pathlib.Path, server: Server) -> None:
        self.folder = folder
        self.server = server
        self.code = _unit.install_code(_unit.loaded_code(), str(folder / "lib"))
        self.shape = (0, 0)
        self.manifest: Manifest

    def tree(self, node: str) -> pathlib.Path:
        return self.folder / node / DIRECTORY

    def make_head(self, shards: int, size: int) -> None:
        if self.shape == (shards, size):
            return
        tree = self.tree("head")
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        for number in range(shards):
            with open(tree / f"model-{number:05}.safetensors", "wb") as stream:
                stream.write(len(header).to_bytes(8, "little") + header)
                for _unused in range(size // MIB):
                    stream.write(os.urandom(MIB))
        files = [File(path.name, path.stat().st_size) for path in sorted(tree.iterdir())]
        hashes = _manifest.hash_files(str(tree), files)
        self.manifest = Manifest("bench/model", COMMIT, tuple(File(file.path, file.size, hashes[file.path]) for file in files))
        self.shape = (shards, size)

    def clear(self) -> None:
        """Empty workers, nothing left to write, the source in memory: transport fabric gives up the pages that it has sent."""
        for node in ("worker", *WORKERS):
            shutil.rmtree(self.folder / node, ignore_errors=True)
        os.sync()
        for file in self.manifest.files:
            with open(self.tree("head") / file.path, "rb", buffering=0) as stream:
                while stream.read(MIB):
                    pass

    def prove(self, node: str, what: str) -> None:
        """The same names, and the same bytes."""
        tree = self.tree(node)
        problems = [f"{item.path}: {item.text}" for item in _manifest.check_hashes(str(tree), self.manifest.files)]
        names = {str(path.relative_to(tree)) for path in tree.rglob("*")} ^ {file.path for file in self.manifest.files}
        if problems or names:
            raise SystemExit(f"{what}: {node} does not have the head's files: {'; '.join([*problems, *sorted(names)])}")

    # Ours

    def plan(self, nodes: t.Sequence[str], rails: t.Sequence[str]) -> dict[str, t.Any]:
        """What filter sync_sources reads of a plan."""
        return {
            "nodes": ["head", *nodes], "head": "head", "settings": {}, "addresses": dict.fromkeys(["head", *nodes], HEAD),
            "node_settings": {"head": {"weight_sync_rails": list(rails)}},
        }  # fmt: skip

    def begin(self, node: str = "worker", nodes: t.Sequence[str] = ("worker",), rails: t.Sequence[str] = (HEAD,), **options: t.Any) -> subprocess.Popen[bytes]:
        """The sync job as its unit runs it."""
        state = self.folder / f"state-{node}"
        state.mkdir(exist_ok=True)
        (state / "result.json").unlink(missing_ok=True)
        plan = self.plan(nodes, rails)
        facts = {name: {"spark_node": {"user": {"name": getpass.getuser()}, "weights_root": str(self.folder / name)}} for name in plan["nodes"]}
        content = {
            "artefacts": [{"name": "model", "directory": DIRECTORY, "manifest": self.manifest.as_dict()}], "weights_root": str(self.folder / node),
            "state_dir": str(state), "node": node, "sources": [{**source, "port": self.server.port} for source in sync_sources(facts, plan, node)],
            "key": str(self.server.folder / "gate"), "known_hosts": str(self.server.known_hosts), "method": "rsync", "policy": "auto", "verify": False,
            "transport": "ssh", "streams": 4, "stall_seconds": 60, "space_margin": 0, "reserve": [], "run_id": "bench", "result": str(state / "result.json"),
            "progress": str(state / "progress.json"), **options,
        }  # fmt: skip
        (state / "request.json").write_text(json.dumps(content))
        return subprocess.Popen(_unit.python_argv(self.code, _sync_job.__name__.rpartition(".")[2], str(state / "request.json")))

    def result(self, node: str = "worker") -> dict[str, t.Any]:
        return json.loads((self.folder / f"state-{node}" / "result.json").read_text())

    def ours(self, nodes: t.Sequence[str] = ("worker",), **options: t.Any) -> None:
        """All workers at once, as a play starts them, each reading from whom the role lets it read."""
        processes = {node: self.begin(node, nodes, **options) for node in nodes}
        finish(processes.values())
        failed = [node for node, process in processes.items() if process.returncode]
        if failed:
            raise SystemExit("\n".join(f"ours on {node}: {self.result(node)}" for node in failed))

    # The recipes'

    def begin_recipe(self, options: t.Sequence[str], node: str, rail: str) -> subprocess.Popen[bytes]:
        self.tree(node).mkdir(parents=True, exist_ok=True)
        source = f"{rail}:{self.tree('head')}/"
        return subprocess.Popen(["rsync", *options, "-e", self.server.shell(), source, f"{self.tree(node)}/"], stdout=subprocess.DEVNULL)

    def recipe(self, options: t.Sequence[str], nodes: t.Sequence[str] = ("worker",), rail: str = HEAD, together: bool = False) -> None:
        """One line per worker, one after another or all at once: the launchers have both loops."""
        for group in [nodes] if together else [[node] for node in nodes]:
            processes = [self.begin_recipe(options, node, rail) for node in group]
            finish(processes)
            if any(process.returncode for process in processes):
                raise SystemExit(f"rsync {' '.join(options)} has failed")

    def flip_a_byte(self) -> None:
        """Size and times stay as they were."""
        path = self.tree("worker") / self.manifest.files[0].path
        status = path.stat()
        with open(path, "r+b") as stream:
            stream.seek(status.st_size // 2)
            byte = stream.read(1)
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte[0] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def finish(processes: t.Collection[subprocess.Popen[bytes]]) -> None:
    """Wait for all; an end of ours is an end of theirs."""
    try:
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


@dataclasses.dataclass
class Case:
    """One way to do the work. A case without a goal is what the others are compared with."""

    name: str
    work: t.Callable[[], None]
    goal: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)
    uplink: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def sent(self) -> str:
        return f"; the head sends {statistics.median(self.uplink):.2f} times the model" if self.uplink else ""


@dataclasses.dataclass
class Contest:
    """Cases side by side: each round runs every case once, so that a slow minute of the machine hits all of them."""

    title: str
    cases: list[Case]
    nodes: tuple[str, ...] = ("worker",)
    uplink: SlowRail | None = None

    def run(self, bench: Bench, rounds: int, fresh: bool = True) -> Contest:
        print(f"\n{self.title}, medians of {rounds}", flush=True)
        for _unused in range(rounds):
            for case in self.cases:
                if fresh:
                    bench.clear()
                before = self.uplink.sent if self.uplink else 0
                began = time.perf_counter()
                case.work()
                case.seconds.append(time.perf_counter() - began)
                if self.uplink:
                    case.uplink.append((self.uplink.sent - before) / bench.manifest.size)
                for node in self.nodes:
                    bench.prove(node, case.name)
        for case in self.cases:
            each = " ".join(f"{value:.2f}" for value in case.seconds)
            print(f"  {case.name:<62} {case.median:7.2f} s  ({each}){case.sent}", flush=True)
        return self

    @property
    def references(self) -> list[Case]:
        return [case for case in self.cases if not case.goal]

    def rows(self) -> list[str]:
        beside = ", ".join(f"{case.name} ({case.median:.1f} s)" for case in self.references)
        found = []
        for case in self.cases:
            if case.goal:
                ratios = ", ".join(f"{reference.median / case.median:.2f}" for reference in self.references)
                found.append(f"| {self.title}: {case.name} | {beside} | {ratios}, in {case.median:.2f} s{case.sent} | {case.goal} |")
        return found

    def as_dict(self) -> dict[str, t.Any]:
        return {
            case.name: {
                "median": case.median, "rounds": case.seconds, "uplink_of_model": case.uplink, "goal": case.goal,
                "ratios": {reference.name: reference.median / case.median for reference in self.references},
            }
            for case in self.cases
        }  # fmt: skip


@dataclasses.dataclass
class Flip:
    """What each does about a byte that was flipped in a copy, with the file's old size and times."""

    cells: tuple[str, str, str]

    def rows(self) -> list[str]:
        return [f"| a flipped byte in a file of the same size and time | {' | '.join(self.cells)} |"]

    def as_dict(self) -> dict[str, t.Any]:
        return dict(zip(("recipes", "ours", "goal"), self.cells))


def line(options: t.Sequence[str], more: str = "") -> str:
    return f"`rsync {' '.join(options)}`{more}"


class Parts:
    """The parts of the benchmark by name, each with the files that it needs."""

    def __init__(self, bench: Bench, options: argparse.Namespace) -> None:
        self.bench, self.options = bench, options
        self.rate = f"{options.slow_rate} MiB/s"

    def head(self, total: int, shards: int) -> str:
        size = max(1, total // shards)
        self.bench.make_head(shards, size * MIB)
        return f"{size * shards * MIB / 1e9:.2f} GB"

    def first(self) -> Contest:
        size = self.head(self.options.mib, 16)
        cases = [Case(line(way), lambda way=way: self.bench.recipe(way)) for way in (PARTIAL, UNSAFE_LINKS)]
        cases.append(Case("ours over ssh, each file proven by hash", self.bench.ours, "1.3"))
        cases.append(Case("ours over the transport bound to the fabric, proven", lambda: self.bench.ours(transport="fabric"), "1.6"))
        return Contest(f"first copy of {size}", cases).run(self.bench, self.options.rounds)

    def second(self) -> Contest:
        size = self.head(self.options.mib, 16)
        self.bench.clear()
        self.bench.ours()
        self.bench.recipe(PARTIAL)  # sets the times by which rsync knows its files
        cases = [Case(line(way), lambda way=way: self.bench.recipe(way)) for way in (PARTIAL, UNSAFE_LINKS)]
        cases.append(Case("ours", self.bench.ours, "under 1 s"))
        return Contest(f"second copy of {size}, nothing to do", cases).run(self.bench, self.options.rounds, fresh=False)

    def flip(self) -> Flip:
        bench = self.bench
        self.head(self.options.mib, 16)
        bench.clear()
        bench.ours()
        bench.recipe(PARTIAL)
        bench.flip_a_byte()
        seen = []
        for way in (PARTIAL, UNSAFE_LINKS):
            bench.recipe(way)
            damaged = bool(_manifest.check_hashes(str(bench.tree("worker")), bench.manifest.files[:1]))
            seen.append(f"{line(way)}: {'not seen' if damaged else 'mended'}")
            if not damaged:
                bench.flip_a_byte()
        if bench.begin(verify=True).wait() == 0 or [item["id"] for item in bench.result().get("refusals", [])] != ["sync.damaged"]:
            raise SystemExit(f"the flipped byte was not found by verify: {bench.result()}")
        bench.ours()
        bench.prove("worker", "ours after a flipped byte")
        report = bench.result()["artefacts"]["model"]
        if report["files"] != 1:
            raise SystemExit(f"not only the damaged file was sent again: {report}")
        found = Flip((", ".join(seen), f"found by `verify`; one file sent again in {report['seconds']:.2f} s", "found"))
        print(f"\n{found.rows()[0]}", flush=True)
        return found

    def rails(self) -> Contest:
        size = self.head(self.options.slow_mib, 8)
        with self.slow_rails():
            cases = [Case(line(way, " over one"), lambda way=way: self.bench.recipe(way, rail=RAILS[0])) for way in (PARTIAL, UNSAFE_LINKS)]
            cases.append(Case("ours over one", lambda: self.bench.ours(rails=RAILS[:1])))
            cases.append(Case("ours over two", lambda: self.bench.ours(rails=RAILS), "1.9"))
            return Contest(f"{size} over rails of {self.rate}", cases).run(self.bench, self.options.rounds)

    def workers(self) -> Contest:
        size = self.head(self.options.workers_mib, 8)
        with self.slow_rails() as rails:
            cases = [
                Case(line(UNSAFE_LINKS, how), lambda together=together: self.bench.recipe(UNSAFE_LINKS, WORKERS, RAILS[0], together))
                for how, together in ((", one worker after another", False), (", all workers at once", True))
            ]
            cases.append(Case("ours, in a chain, proven", lambda: self.bench.ours(WORKERS, rails=RAILS[:1], streams=2), "the uplink once"))
            title = f"{size} to four workers, the head's uplink {self.rate}"
            return Contest(title, cases, WORKERS, rails[0]).run(self.bench, self.options.rounds)

    @contextlib.contextmanager
    def slow_rails(self) -> t.Iterator[list[SlowRail]]:
        with contextlib.ExitStack() as stack:
            rails = []
            for address in RAILS:
                rails.append(SlowRail(address, self.bench.server.port, self.options.slow_rate * MIB))
                stack.callback(rails[-1].close)
            yield rails


PARTS: dict[str, t.Callable[[Parts], Contest | Flip]] = {
    "first": Parts.first, "second": Parts.second, "flip": Parts.flip, "rails": Parts.rails, "workers": Parts.workers,
}  # fmt: skip


def chosen(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="/var/tmp", help="folder on the disk to measure; needs twice the files of a part, five times those of workers")
    parser.add_argument("--only", type=chosen, default=list(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--mib", type=int, default=1600, help="size of the model of first, second and flip")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rate", type=int, default=30, help="MiB/s of a slow rail")
    parser.add_argument("--slow-mib", type=int, default=640, help="of rails: enough that start and end of a copy weigh little")
    parser.add_argument("--workers-mib", type=int, default=320, help="of workers; the recipe sends it four times")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_unused: sys.exit(143))  # so that it cleans up
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sparkops-copy-", dir=options.folder))
    server = Server(folder)
    try:
        parts = Parts(Bench(folder, server), options)
        found = {name: PARTS[name](parts) for name in options.only}
    finally:
        server.close()
        shutil.rmtree(folder)
    print("\n| work | beside | ratio | goal |\n| --- | --- | --- | --- |")
    for part in found.values():
        print("\n".join(part.rows()))
    if options.json:
        versions = [subprocess.run(argv, capture_output=True, text=True, check=True) for argv in (["rsync", "--version"], ["ssh", "-V"])]
        report = {
            "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "versions": [(done.stdout or done.stderr).splitlines()[0] for done in versions]},
            "settings": {"mib": options.mib, "slow_rate": options.slow_rate, "slow_mib": options.slow_mib, "workers_mib": options.workers_mib},
            "parts": {name: part.as_dict() for name, part in found.items()},
        }
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
