# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Verification of shards by hash, beside ``sha256sum`` over the same files.

Reports medians and ratios; never fails on a time. Run it from the checkout, with the link tree on the path:

    PYTHONPATH=.collections python3 tests/benchmarks/verify_weights.py --folder /var/tmp

What it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest, _page_cache

MIB = 2**20


def make_shards(folder: pathlib.Path, count: int, size: int) -> list[_manifest.File]:
    for number in range(count):
        with open(folder / f"model-{number:05}.safetensors", "wb") as stream:
            for _unused in range(size // MIB):
                stream.write(os.urandom(MIB))
    files = [_manifest.File(path.name, path.stat().st_size) for path in sorted(folder.iterdir())]
    hashes = _manifest.hash_files(str(folder), files)
    return [_manifest.File(file.path, file.size, hashes[file.path]) for file in files]


def timed(work: t.Callable[[], t.Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def flip_a_byte(path: pathlib.Path) -> None:
    """Size and times stay as they were."""
    status = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(status.st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--size-mib", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the files' pages before each measurement")
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sparkops-verify-", dir=options.folder))
    try:
        files = make_shards(folder, options.shards, options.size_mib * MIB)
        names = [str(folder / file.path) for file in files]

        def reference() -> None:
            subprocess.run(["sha256sum", *names], stdout=subprocess.DEVNULL, check=True)

        def ours() -> None:
            # The pages stay, so that each round has the same start; verification of a node gives them back.
            if _manifest.check_hashes(str(folder), files):
                raise SystemExit("a whole tree was judged damaged")

        times: dict[str, list[float]] = {"sha256sum": [], "verify": []}
        for _unused in range(options.rounds):
            for name, work in (("sha256sum", reference), ("verify", ours)):
                if options.cold:
                    _page_cache.evict([folder])
                times[name].append(timed(work))
        flip_a_byte(folder / files[len(files) // 2].path)
        found = [problem.path for problem in _manifest.check_hashes(str(folder), files)]
        total = sum(file.size for file in files) / MIB
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, seconds in medians.items():
            print(f"{name:<10} {seconds:6.2f} s  {total / seconds:8.0f} MiB/s  (median of {options.rounds}, {os.cpu_count()} cores)")
        print(
            f"ratio      {medians['sha256sum'] / medians['verify']:.2f}x, goal 4x; "
            f"a flipped byte with the old size and time: {'found' if found else 'NOT FOUND'}"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
