# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The Engram packer beside dd and a one-thread numpy loop: the same bytes, a cold cache, one disk.

Reports medians and ratios; never fails on a time. Run it from the checkout, with the link tree on the path:

    PYTHONPATH=.collections python3 tests/benchmarks/pack.py --folder /var/tmp

What it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _engram, _engram_files, _engram_job, _page_cache, _unit

LAYERS = (1, 14)
MIB = 2**20

# What the packers of the recipes do, in their own way: read a chunk, interleave it in memory, write it.
NUMPY_LOOP = """
import os, sys
import numpy
source, target, rows, weights, scales, step = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
with open(source, "rb") as table, open(target, "wb") as out:
    out.write(bytes(4096))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        chunk = numpy.empty((count, 264), numpy.uint8)
        table.seek(weights + first * 256)
        chunk[:, :256] = numpy.fromfile(table, numpy.uint8, count * 256).reshape(count, 256)
        table.seek(scales + first * 8)
        chunk[:, 256:] = numpy.fromfile(table, numpy.uint8, count * 8).reshape(count, 8)
        out.write(chunk)
    out.flush()
    os.fsync(out.fileno())
"""


class Measured(t.NamedTuple):
    seconds: float
    peak_mib: float
    processor_seconds: float


def make_source(folder: pathlib.Path, size: int) -> dict[int, _engram_files.Table]:
    """Two layers of random rows, ``size`` bytes in all, with a config.json that agrees."""
    vocabulary = size // len(LAYERS) // _engram.ROW_BYTES // 24
    config = _engram.Config(layers=LAYERS, vocabulary=vocabulary, heads=8, longest_ngram=4)
    folder.mkdir()
    keys = {"engram_layer_ids": list(LAYERS), "engram_vocab_size": vocabulary, "engram_n_heads": 8, "engram_max_ngram_size": 4}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    weight_map = {}
    noise = os.urandom(8 * MIB)
    for layer, sizes in _engram.bucket_sizes(config).items():
        name, rows = f"model-{layer:05d}.safetensors", sum(sizes)
        tensors = {}
        position = 0
        for part, dtype, width in (("weight", "F8_E4M3", 256), ("scale", "F8_E8M0", 8)):
            tensor = f"layers.{layer}.engram.embed.{part}"
            tensors[tensor] = {"dtype": dtype, "shape": [rows, width], "data_offsets": [position, position + rows * width]}
            weight_map[tensor] = name
            position += rows * width
        header = json.dumps(tensors).encode()
        write_noise(folder / name, len(header).to_bytes(8, "little") + header, position, noise)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return _engram_files.read_source(str(folder))[0]


def write_noise(path: pathlib.Path, start: bytes, size: int, noise: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(start)
        while size > 0:
            size -= stream.write(noise[:size])
        stream.flush()
        os.fsync(stream.fileno())


def measure(*commands: t.Sequence[str]) -> Measured:
    """Run commands one after the other; time in all, the largest peak memory, processor time in all."""
    begin = time.monotonic()
    peak = processor = 0.0
    for command in commands:
        # A child's peak memory includes what it had before exec; a plain fork of this small process is far below.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        errors = process.stderr.read() if process.stderr else b""
        _pid, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{command[0]} ended with {process.returncode}: {errors.decode(errors='replace')}")
        peak = max(peak, usage.ru_maxrss / 1024)
        processor += usage.ru_utime + usage.ru_stime
    return Measured(time.monotonic() - begin, peak, processor)


class Contest:
    """The three ways to the same bytes, in one folder."""

    def __init__(self, folder: pathlib.Path, size: int, tuning: dict[str, int]) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.tables = make_source(self.source, size)
        self.bytes = sum(_engram.HEADER_BYTES + table.rows * _engram.ROW_BYTES for table in self.tables.values())
        write_noise(folder / "plain", b"", self.bytes, os.urandom(8 * MIB))
        self.code = _unit.install_code(_unit.loaded_code(), str(folder / "lib"))
        self.tuning = tuning

    def dd(self) -> Measured:
        return measure(["dd", f"if={self.folder / 'plain'}", f"of={self.folder / 'copy'}", "bs=64M", "conv=fsync"])

    def packer(self) -> Measured:
        request = {
            "source": str(self.source), "directory": str(self.folder / "packed"), "rank": 0, "tensor_parallel": 1, "layers": None,
            "repository": "bench/engram", "revision": "0" * 40, "state": "present", "rate_limit": 0, "memory_floor": 0, "priority": "normal",
            "run_id": "bench", "result": str(self.folder / "result.json"), "progress": str(self.folder / "progress.json"), "tuning": self.tuning,
        }  # fmt: skip
        (self.folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        return measure(_unit.python_argv(self.code, "_engram_job", str(self.folder / "request.json")))

    def numpy_loop(self) -> Measured:
        (self.folder / "looped").mkdir()
        return measure(
            *[
                [
                    sys.executable,
                    "-c",
                    NUMPY_LOOP,
                    table.path,
                    str(self.folder / "looped" / str(layer)),
                    *map(str, (table.rows, table.weights, table.scales, 262144)),
                ]
                for layer, table in self.tables.items()
            ]
        )

    def same_rows(self) -> bool:
        """Both packers made the same rows; the loop writes no header."""
        for layer in self.tables:
            skip = f"--ignore-initial={_engram.HEADER_BYTES}"
            packed = self.folder / "packed" / _engram.file_name(layer, 0, 1)
            if subprocess.run(["cmp", "--silent", skip, str(packed), str(self.folder / "looped" / str(layer))], check=False).returncode:
                return False
        return True

    def cool(self) -> None:
        """Nothing of the inputs in the page cache, nothing left to write."""
        os.sync()
        _page_cache.evict([str(self.source), str(self.folder / "plain")])

    def cached_mib(self) -> float:
        return _page_cache.resident_in([str(self.source), str(self.folder / "packed")]) / MIB

    def tidy(self) -> None:
        (self.folder / "copy").unlink(missing_ok=True)
        for name in ("packed", "looped"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/var/tmp", help="folder on the disk to measure; needs three times the size")
    parser.add_argument("--mib", type=int, default=2048, help="size of the row files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--workers", type=int, default=_engram_job.Tuning().workers)
    parser.add_argument("--chunk-rows", type=int, default=_engram_job.Tuning().chunk_rows)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="sparkops-bench-") as name:
        report = run(pathlib.Path(name), arguments)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run(folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, t.Any]:
    contest = Contest(folder, arguments.mib * MIB, {"workers": arguments.workers, "chunk_rows": arguments.chunk_rows})
    ways = {"dd": contest.dd, "packer": contest.packer}
    if importlib.util.find_spec("numpy"):
        ways["numpy loop"] = contest.numpy_loop
    rounds: dict[str, list[Measured]] = {way: [] for way in ways}
    cached = 0.0
    for number in range(arguments.rounds):
        # The ways take turns, so that a slow minute of the machine hits all of them.
        for way, act in ways.items():
            contest.cool()
            rounds[way].append(act())
            if way == "packer":
                cached = max(cached, contest.cached_mib())
        if "numpy loop" in ways and number == 0 and not contest.same_rows():
            raise SystemExit("the packer and the numpy loop do not agree")
        contest.tidy()
    return show(rounds, contest.bytes, cached)


def show(rounds: dict[str, list[Measured]], size: int, cached: float) -> dict[str, t.Any]:
    base = statistics.median(item.seconds for item in rounds["dd"])
    report: dict[str, t.Any] = {"bytes": size, "cached_after_packing_mib": cached, "ways": {}}
    print(f"{size / 1e9:.2f} GB, cold cache, median of {len(rounds['dd'])}")
    print(f"{'way':<12} {'seconds':>8} {'GB/s':>6} {'of dd':>6} {'cpu s':>6} {'peak MiB':>9}  all rounds")
    for way, items in rounds.items():
        seconds = statistics.median(item.seconds for item in items)
        peak = max(item.peak_mib for item in items)
        cpu = statistics.median(item.processor_seconds for item in items)
        each = " ".join(f"{item.seconds:.2f}" for item in items)
        print(f"{way:<12} {seconds:8.2f} {size / seconds / 1e9:6.2f} {base / seconds:6.2f} {cpu:6.2f} {peak:9.0f}  {each}")
        report["ways"][way] = {
            "seconds": seconds,
            "rate_of_dd": base / seconds,
            "processor_seconds": cpu,
            "peak_mib": peak,
            "rounds": [item.seconds for item in items],
        }
    print(f"page cache of source and row files after packing: {cached:.1f} MiB")
    return report


if __name__ == "__main__":
    main()
