# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Copies to a worker, beside the recipes' own rsync lines: the same files, one sshd on loopback, one disk.

Reports medians and ratios; never fails on a time. Needs sshd and rsync. Run it from the checkout, with the link tree on the path:

    PYTHONPATH=.collections python3 tests/benchmarks/copy_weights.py --folder /var/tmp

Slow rails are forwarders with a limit on loopback addresses of their own. What it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest, _sync_job, _unit
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import File, Manifest

MIB = 2**20
COMMIT = "a" * 40
DIRECTORY = f"bench--model/{COMMIT}"
GATE = pathlib.Path(__file__).parents[2] / "roles" / "bootstrap" / "files" / "source_gate.py"
HEAD = "127.0.0.1"


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
        self.known_hosts.write_text(
            "".join(f"[{address}]:{self.port} {keys['host']}\n" for address in (HEAD, "127.0.0.2", "127.0.0.3")) + f"{HEAD} {keys['host']}\n"
        )
        configuration = {
            "Port": self.port, "ListenAddress": HEAD, "HostKey": self.folder / "host", "AuthorizedKeysFile": self.folder / "authorized",
            "StrictModes": "no", "UsePAM": "no", "PidFile": "none", "MaxStartups": 100,
        }  # fmt: skip
        (self.folder / "config").write_text("".join(f"{name} {value}\n" for name, value in configuration.items()))
        with contextlib.suppress(OSError):
            os.makedirs("/run/sshd", exist_ok=True)
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
        if program is None:
            raise SystemExit("sshd is not installed")
        self.process = subprocess.Popen([program, "-D", "-e", "-f", self.folder / "config"], stderr=subprocess.DEVNULL)
        time.sleep(0.5)

    def shell(self) -> str:
        return f"ssh -F /dev/null -p {self.port} -i {self.folder / 'shell'} -o BatchMode=yes -o UserKnownHostsFile={self.known_hosts}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class SlowRail:
    """A forwarder to the sshd with a limit on what comes back, shared by all its connections."""

    def __init__(self, address: str, port: int, rate: float) -> None:
        self.listener = socket.create_server((address, port), backlog=64)
        self.target = (HEAD, port)
        self.rate, self.due = rate, time.monotonic()
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
                        self.due = max(self.due, time.monotonic()) + len(data) / self.rate
                        pause = self.due - time.monotonic()
                    time.sleep(max(0.0, pause))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.listener.close()


class Bench:
    def __init__(self, folder: pathlib.Path, server: Server) -> None:
        self.folder = folder
        self.server = server
        self.code = _unit.install_code(_unit.loaded_code(), str(folder / "lib"))
        self.manifest: Manifest | None = None

    def tree(self, node: str) -> pathlib.Path:
        return self.folder / node / DIRECTORY

    def make_head(self, shards: int, size: int) -> None:
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

    def clear(self, *nodes: str) -> None:
        for node in nodes or ("worker",):
            shutil.rmtree(self.folder / node, ignore_errors=True)
        os.sync()

    def begin(
        self, node: str = "worker", sources: t.Sequence[tuple[str, str, t.Sequence[str]]] = (("head", HEAD, ()),), **options: t.Any
    ) -> subprocess.Popen[bytes]:
        """The sync job as its unit runs it."""
        state = self.folder / f"state-{node}"
        state.mkdir(exist_ok=True)
        peers = [
            {"node": name, "address": address, "rails": list(rails), "user": getpass.getuser(), "root": str(self.folder / name), "port": self.server.port}
            for name, address, rails in sources
        ]
        content = {
            "artefacts": [{"name": "model", "directory": DIRECTORY, "manifest": self.manifest.as_dict()}], "weights_root": str(self.folder / node),
            "state_dir": str(state),
            "node": node, "sources": peers, "key": str(self.server.folder / "gate"), "known_hosts": str(self.server.known_hosts), "method": "rsync",
            "policy": "auto",
            "verify": False,
            "transport": "ssh", "streams": 4, "stall_seconds": 60, "space_margin": 0, "reserve": [], "run_id": "bench", "result": str(state / "result.json"),
            "progress": str(state / "progress.json"), **options,
        }  # fmt: skip
        (state / "request.json").write_text(json.dumps(content))
        return subprocess.Popen(_unit.python_argv(self.code, _sync_job.__name__.rpartition(".")[2], str(state / "request.json")))

    def end(self, process: subprocess.Popen[bytes], node: str = "worker") -> None:
        if process.wait():
            raise SystemExit((self.folder / f"state-{node}" / "result.json").read_text())

    def ours(self, **options: t.Any) -> None:
        self.end(self.begin(**options))

    def recipe(self, *more: str) -> None:
        self.tree("worker").mkdir(parents=True, exist_ok=True)
        subprocess.run(["rsync", "-a", "--partial", *more, "-e", self.server.shell(), f"{HEAD}:{self.tree('head')}/", f"{self.tree('worker')}/"], check=True)

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

    def chain(self, star: bool) -> None:
        """Four workers behind a head with a slow uplink (127.0.0.2)."""
        names = ["w1", "w2", "w3", "w4"]
        self.clear(*names)
        head = ("head", HEAD, ("127.0.0.2",))
        processes = []
        for number, name in enumerate(names):
            before = [] if star or number == 0 else [(names[number - 1], HEAD, ())]
            processes.append((self.begin(name, [*before, head], streams=2), name))
        for process, name in processes:
            self.end(process, name)


def timed(work: t.Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(rounds: int, cases: dict[str, t.Callable[[], None]], before: t.Callable[[], None]) -> dict[str, float]:
    """Each round runs every case once, so that a slow minute of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _unused in range(rounds):
        for name, work in cases.items():
            before()
            times[name].append(timed(work))
    return {name: statistics.median(values) for name, values in times.items()}


def report(title: str, found: dict[str, float], reference: str, goals: dict[str, str]) -> None:
    print(f"\n{title}")
    for name, seconds in found.items():
        goal = f", goal {goals[name]}" if name in goals else ""
        print(f"  {name:<46} {seconds:7.2f} s  {found[reference] / seconds:5.2f}x{goal}", flush=True)


def measure(bench: Bench, options: argparse.Namespace) -> None:
    bench.make_head(options.shards, options.size_mib * MIB)
    first = {
        "rsync -a --partial": bench.recipe,
        "rsync -a --partial --copy-unsafe-links": lambda: bench.recipe("--copy-unsafe-links"),
        "ours, ssh, verified": bench.ours,
        "ours, fabric, verified": lambda: bench.ours(transport="fabric"),
    }
    report("first copy", medians(options.rounds, first, bench.clear), "rsync -a --partial", {"ours, ssh, verified": "1.3x", "ours, fabric, verified": "1.6x"})

    bench.clear()
    bench.ours()
    second = {"rsync -a --partial": bench.recipe, "ours": bench.ours}
    report("second copy, nothing to do", medians(options.rounds, second, lambda: None), "rsync -a --partial", {"ours": "under 1 s"})

    bench.flip_a_byte()
    bench.recipe()
    seen = bool(_manifest.check_hashes(str(bench.tree("worker")), bench.manifest.files[:1]))
    bench.begin(verify=True).wait()
    mended = {"ours": bench.ours}
    found = medians(1, mended, lambda: None)
    whole = not _manifest.check_hashes(str(bench.tree("worker")), bench.manifest.files)
    print(
        f"\nflipped byte\n  rsync -a --partial: {'not seen' if seen else 'mended'}; ours: found by verify, "
        f"one file sent again in {found['ours']:.2f} s, {'all right' if whole else 'STILL WRONG'}"
    )

    bench.make_head(8, options.slow_mib // 8 * MIB)
    rails = [SlowRail(address, bench.server.port, options.slow_rate * MIB) for address in ("127.0.0.2", "127.0.0.3")]
    slow = {
        "one rail": lambda: bench.ours(sources=[("head", HEAD, ("127.0.0.2",))]),
        "two rails": lambda: bench.ours(sources=[("head", HEAD, ("127.0.0.2", "127.0.0.3"))]),
    }
    report(f"rails of {options.slow_rate} MiB/s", medians(options.rounds, slow, bench.clear), "one rail", {"two rails": "1.9x"})
    workers = {"star": lambda: bench.chain(star=True), "chain": lambda: bench.chain(star=False)}
    report(f"four workers, uplink of {options.slow_rate} MiB/s", medians(min(options.rounds, 3), workers, lambda: None), "star", {})
    for rail in rails:
        rail.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--size-mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rate", type=int, default=30, help="MiB/s of a slow rail")
    parser.add_argument("--slow-mib", type=int, default=640, help="enough that start and end of a copy weigh little")
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sparkops-copy-", dir=options.folder))
    server = Server(folder)
    try:
        measure(Bench(folder, server), options)
    finally:
        server.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
