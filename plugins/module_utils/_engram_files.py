# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Engram on disk: the tables in the checkpoint, the row files of one rank, and what is true about them.

Beside each row file lies a record (what it was made from, and its hash); while a file is being packed a journal lies
there instead. A file counts only when it has a record and no journal, its size and header are right, and the source
that the record names is still the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _manifest, _safetensors
from ansible_collections.sparkops.inference.plugins.module_utils._engram import (
    HEADER_BYTES,
    LAYOUT,
    ROW_BYTES,
    SCALE_BYTES,
    WEIGHT_BYTES,
    Config,
    Header,
    Rows,
    bucket_sizes,
    file_name,
    file_size,
    header,
    header_problem,
    rank_rows,
    refusal,
)
from ansible_collections.sparkops.inference.plugins.module_utils._engram_io import ALIGNED_ROWS, DirectFile, EndOfFile, buffer
from ansible_collections.sparkops.inference.plugins.module_utils._unit import Refused

if t.TYPE_CHECKING:
    from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal

FORMAT = 1
LAYOUT_FILE = "layout.json"
# Rows that are hashed, journalled and resumed together: about 138 MB of a row file.
SEGMENT_ROWS = 1024 * ALIGNED_ROWS
# What must stay free besides the files themselves: records, journals, the filesystem's own needs.
SPACE_MARGIN = 16 * 2**20

_FETCH_AGAIN = "fetch the Engram source again with the weights tag"
_DTYPES = {"weight": ("F8_E4M3", WEIGHT_BYTES), "scale": ("F8_E8M0", SCALE_BYTES)}


# The source


@dataclasses.dataclass(frozen=True)
class Table:
    """Where one layer's rows are in the checkpoint. Offsets count from the start of the file."""

    layer: int
    path: str
    rows: int
    weights: int
    scales: int
    fingerprint: dict[str, t.Any]


def read_source(directory: str, only: t.Sequence[int] = ()) -> tuple[dict[int, Table], dict[int, tuple[int, ...]]]:
    """Tables and bucket sizes of each layer. Raises Refused with everything that is wrong."""
    config = Config.from_dict(_read_json(directory, "config.json"))
    unknown = [layer for layer in only if layer not in config.layers]
    if unknown:
        wanted = f"layers of config.json, {list(config.layers)}"
        raise Refused(refusal("config", "layers", str(unknown), wanted, "correct engram.layers of the profile"))
    index = _read_json(directory, _manifest.INDEX_NAME)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    manifest = _manifest.load(directory)
    hashes = {file.path: file.sha256 for file in manifest.files} if manifest else {}
    sizes = bucket_sizes(config)
    tables: dict[int, Table] = {}
    problems: list[Refusal] = []
    for position, layer in enumerate(config.layers):
        if only and layer not in only:
            continue
        try:
            shard = _shard_of(layer, weight_map if isinstance(weight_map, dict) else {})
            tables[layer] = _read_table(directory, shard, layer, hashes.get(shard))
            _check_rows(tables[layer], sum(sizes[layer]), config.rows[position] if config.rows else None)
        except Refused as exc:
            problems.extend(exc.refusals)
    if problems:
        raise Refused(*problems)
    return tables, {layer: sizes[layer] for layer in tables}


def _read_json(directory: str, name: str) -> t.Any:
    path = os.path.join(directory, name)
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except OSError as exc:
        raise Refused(_missing(path, exc)) from exc
    except ValueError as exc:
        raise Refused(refusal("source_damaged", path, f"not JSON ({exc})", "a JSON file", _FETCH_AGAIN)) from exc


def _missing(path: str, exc: OSError) -> Refusal:
    return refusal("source_missing", path, exc.strerror or str(exc), "a readable file", "run the weights and sync tags first")


def _shard_of(layer: int, weight_map: t.Mapping[str, t.Any]) -> str:
    shards = [str(weight_map.get(_tensor(layer, part), "")) for part in _DTYPES]
    if not all(shards):
        where = f"layer {layer} in {_manifest.INDEX_NAME}"
        raise Refused(refusal("source_damaged", where, "no Engram tables", "an entry for weight and scale", _FETCH_AGAIN))
    if shards[0] != shards[1]:
        found = f"weight in {shards[0]}, scale in {shards[1]}"
        wanted = "both in one file, the reader takes no other"
        raise Refused(refusal("split_tables", f"Engram tables of layer {layer}", found, wanted, "use the original checkpoint"))
    try:
        return _manifest.safe_path(shards[0])
    except _manifest.ManifestError as exc:
        raise Refused(refusal("source_damaged", _manifest.INDEX_NAME, str(exc), "a file name", _FETCH_AGAIN)) from exc


def _tensor(layer: int, part: str) -> str:
    return f"layers.{layer}.engram.embed.{part}"


def _read_table(directory: str, shard: str, layer: int, sha256: str | None) -> Table:
    path = os.path.join(directory, shard)
    try:
        status = os.stat(path)
        raw = _read_header(path)
        found = _safetensors.parse_header(raw)
    except _safetensors.BadSafetensors as exc:
        raise Refused(refusal("source_damaged", path, str(exc), "a whole safetensors file", _FETCH_AGAIN)) from exc
    except EndOfFile as exc:
        raise Refused(refusal("source_damaged", path, str(exc.strerror), "a whole safetensors file", _FETCH_AGAIN)) from exc
    except OSError as exc:
        raise Refused(_missing(path, exc)) from exc
    if status.st_size < found.file_size:
        wanted = f"{found.file_size} bytes as its header promises"
        raise Refused(refusal("source_damaged", path, f"{status.st_size} bytes", wanted, _FETCH_AGAIN))
    places = {part: _check_tensor(path, found, layer, part) for part in _DTYPES}
    if places["weight"][1] != places["scale"][1]:
        counts = f"{places['weight'][1]} rows of weights, {places['scale'][1]} rows of scales"
        raise Refused(refusal("source_damaged", f"layer {layer} in {path}", counts, "one scale row for each weight row", _FETCH_AGAIN))
    fingerprint = {
        "shard": shard,
        "size": status.st_size,
        "header_sha256": hashlib.sha256(raw).hexdigest(),
        # What the content is known by: the hash of a manifest, or else the time of the last change.
        "sha256": sha256,
        "mtime_ns": status.st_mtime_ns,
    }
    return Table(layer, path, places["weight"][1], places["weight"][0], places["scale"][0], fingerprint)


def _read_header(path: str) -> bytes:
    """The JSON text of a safetensors file, read around the page cache like the rest of it."""
    with DirectFile(path) as file:
        length = _safetensors.header_length(bytes(file.read(buffer(8), 0, 8)))
        return bytes(file.read(buffer(8 + length), 8, length))


def _check_tensor(path: str, found: _safetensors.Header, layer: int, part: str) -> tuple[int, int]:
    """Offset in the file and number of rows of one tensor."""
    name, (dtype, width) = _tensor(layer, part), _DTYPES[part]
    tensor = found.tensors.get(name)
    if tensor is None:
        raise Refused(refusal("source_damaged", path, f"no tensor {name}", "the tensor that the index promises", _FETCH_AGAIN))
    shape = tensor.get("shape")
    if tensor.get("dtype") != dtype or not isinstance(shape, list) or len(shape) != 2 or shape[1] != width:
        form = f"{tensor.get('dtype')} {shape}"
        raise Refused(refusal("source_damaged", f"{name} in {path}", form, f"{dtype} [rows, {width}]", "use the original checkpoint"))
    start, end = tensor["data_offsets"]
    if end - start != shape[0] * width:
        wanted = f"{shape[0] * width} bytes as its shape promises"
        raise Refused(refusal("source_damaged", f"{name} in {path}", f"{end - start} bytes", wanted, _FETCH_AGAIN))
    return found.data_start + start, shape[0]


def _check_rows(table: Table, computed: int, configured: int | None) -> None:
    """Three sources must agree, or rows would go to the wrong rank: fluent garbage instead of an error."""
    if table.rows != computed or configured not in (None, computed):
        found = f"{table.rows} in the file, {configured if configured is not None else 'nothing'} in config.json, {computed} computed from the vocabulary"
        raise Refused(
            refusal("rows_disagree", f"Engram rows of layer {table.layer}", found, "the same number", "use config.json and shards of the same revision")
        )


def same_source(recorded: t.Any, found: dict[str, t.Any]) -> bool:
    """Whether a table is still what a row file was made from.

    A manifest's hash decides where both sides have one: copies of the same content may have other times.
    """
    if not isinstance(recorded, dict):
        return False
    fixed = ("shard", "size", "header_sha256")
    if any(recorded.get(key) != found[key] for key in fixed):
        return False
    key = "sha256" if recorded.get("sha256") and found["sha256"] else "mtime_ns"
    return recorded.get(key) == found[key]


# Row files


@dataclasses.dataclass(frozen=True)
class RowFile:
    """One file to be: its place, its rows, what it is made from."""

    directory: str
    rank: int
    ranks: int
    table: Table
    rows: Rows
    segment_rows: int = SEGMENT_ROWS

    @property
    def name(self) -> str:
        return file_name(self.table.layer, self.rank, self.ranks)

    @property
    def path(self) -> str:
        return os.path.join(self.directory, self.name)

    @property
    def partial(self) -> str:
        return f"{self.path}.partial"

    @property
    def journal(self) -> str:
        return f"{self.path}.journal"

    @property
    def record(self) -> str:
        return f"{self.path}.json"

    @property
    def size(self) -> int:
        return file_size(self.rows)

    @property
    def header(self) -> Header:
        return header(self.table.layer, self.rows, self.table.rows)

    @property
    def segments(self) -> list[Rows]:
        return [Rows(low, min(low + self.segment_rows, self.rows.high)) for low in range(self.rows.low, self.rows.high, self.segment_rows)]

    def offset(self, row: int) -> int:
        return HEADER_BYTES + (row - self.rows.low) * ROW_BYTES


def plan_files(source: str, directory: str, rank: int, ranks: int, layers: t.Sequence[int] = ()) -> list[RowFile]:
    """The row files of one rank. Raises Refused."""
    tables, sizes = read_source(source, layers)
    return [RowFile(directory, rank, ranks, table, rank_rows(sizes[layer], rank, ranks)) for layer, table in tables.items()]


def read_record(path: str) -> dict[str, t.Any] | None:
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def problem(file: RowFile) -> str:
    """Why a row file does not count, or an empty text. Reads one page of it."""
    if os.path.exists(file.journal):
        return "packing has begun and is not finished"
    try:
        size = os.stat(file.path).st_size
    except FileNotFoundError:
        return "not packed yet"
    except OSError as exc:
        return f"not readable ({exc.strerror})"
    if size != file.size:
        return f"{size} bytes, wanted {file.size}" + (": cut short" if size < file.size else "")
    wrong = _header_problem(file)
    if wrong:
        return wrong
    record = read_record(file.record)
    if record is None:
        return "no record of what it was made from"
    if record.get("damaged"):
        return f"found damaged by the last verification in rows {record['damaged']}"
    if not same_source(record.get("source"), file.table.fingerprint):
        return f"made from another {file.table.fingerprint['shard']} than the one that is there now"
    return ""


def _header_problem(file: RowFile) -> str:
    try:
        return header_problem(read_start(file.path), file.header, file.rank, file.ranks)
    except OSError as exc:
        return f"not readable ({exc.strerror})"


def read_start(path: str) -> bytes:
    with DirectFile(path) as file:
        return bytes(file.read(buffer(HEADER_BYTES), 0, HEADER_BYTES))


@dataclasses.dataclass(frozen=True)
class Look:
    """The row files that a rank should have, and why some of them do not count."""

    directory: str
    files: list[RowFile]
    problems: dict[str, str]

    @property
    def lacking(self) -> list[RowFile]:
        return [file for file in self.files if self.problems[file.name]]

    def report(self) -> dict[str, t.Any]:
        """The same for people and for role serve. Only with every layer valid may an engine be given the directory."""
        layers = {
            str(file.table.layer): {
                "file": file.name,
                "valid": not self.problems[file.name],
                "reason": self.problems[file.name],
                "rows": list(file.rows),
                "size": file.size,
            }
            for file in self.files
        }
        reason = "; ".join(f"{file.name}: {self.problems[file.name]}" for file in self.lacking)
        return {"directory": self.directory, "valid": not self.lacking, "reason": reason, "layers": layers, "others": others(self.directory, self.files)}


def look(source: str, directory: str, rank: int, ranks: int, layers: t.Sequence[int] = ()) -> Look:
    """A few reads of one page: cheap for 100 GB. Raises Refused."""
    files = plan_files(source, directory, rank, ranks, layers)
    return Look(directory, files, {file.name: problem(file) for file in files})


def nothing(directory: str, reason: str) -> dict[str, t.Any]:
    """The report of a rank about which nothing can be said."""
    return {"directory": directory, "valid": False, "reason": reason, "layers": {}, "others": []}


# The directory


def layout(ranks: int, repository: str, revision: str) -> dict[str, t.Any]:
    """What all files of one directory have in common; other layouts use the same file names."""
    return {"format": FORMAT, "layout": LAYOUT, "row_bytes": ROW_BYTES, "tensor_parallel": ranks, "repository": repository, "revision": revision}


def check_directory(directory: str, wanted: dict[str, t.Any], files: t.Sequence[RowFile]) -> list[Refusal]:
    """Refuse to work among files that are not ours. They are named and left alone."""
    path = os.path.join(directory, LAYOUT_FILE)
    found = read_record(path)
    if found != wanted and os.path.lexists(path):
        known = found or {}
        difference = ", ".join(f"{key} {known.get(key)}" for key in wanted if known.get(key) != wanted[key]) or "fields that are not known"
        next_step = "move that directory away, or set engram_root to another place"
        return [refusal("foreign_layout", directory, f"row files of another layout ({difference})", json.dumps(wanted), next_step)]
    result = []
    for name in _row_files(directory):
        record = read_record(os.path.join(directory, f"{name}.json"))
        if found is None or record is None:
            about = next((_header_problem(file) or "a right header" for file in files if file.name == name), "another layer, rank or number of ranks")
            origin = f"a file that this packer did not make ({about})"
            next_step = "move it away: nothing proves what it was made from"
            result.append(refusal("foreign_file", os.path.join(directory, name), origin, "only its own files", next_step))
    return result


def _row_files(directory: str) -> list[str]:
    """Finished row files. One with a journal has just been renamed, and its record comes next."""
    try:
        names = set(os.listdir(directory))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.endswith(".bin") and f"{name}.journal" not in names)


def others(directory: str, files: t.Sequence[RowFile]) -> list[str]:
    """Own files that this rank does not need (the order of the nodes was changed): they take space."""
    return [name for name in _row_files(directory) if name not in {file.name for file in files}]


def space_refusals(directory: str, files: t.Sequence[RowFile]) -> list[Refusal]:
    """Only what is still missing counts. An old file that will be replaced stays until then."""
    missing = sum(max(0, file.size - _allocated(file.partial)) for file in files)
    return [
        refusal(
            "space", f"free space on {lack.path}", _manifest.gib(lack.free), f"{_manifest.gib(lack.needed)} for the row files of this rank",
            "free space there, or set engram_root to a folder on another disk",
        )
        for lack in _manifest.shortages([_manifest.Need(directory, missing, "Engram row files")], SPACE_MARGIN)
    ]  # fmt: skip


def free_space(directory: str) -> int:
    return _manifest.space(directory).free


def _allocated(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def available_memory(meminfo: str = "/proc/meminfo") -> int:
    """MemAvailable in bytes: the only figure that counts reclaimable cache as free."""
    with open(meminfo, encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


# What the packer needs for itself, buffers and interpreter together. Measured: 40 to 110 MiB.
WORKING_MEMORY = 160 * 2**20


def memory_refusals(floor: int) -> list[Refusal]:
    """Packing beside a running model must not push it over the edge. A floor of zero asks for nothing."""
    free = available_memory()
    if not floor or free - WORKING_MEMORY >= floor:
        return []
    return [memory_refusal(free, floor)]


def memory_refusal(free: int, floor: int) -> Refusal:
    wanted = f"{_manifest.gib(floor + WORKING_MEMORY)}, which leaves the floor of {_manifest.gib(floor)} to the running model"
    return refusal("memory", "MemAvailable", _manifest.gib(free), wanted, "wait until the model has less to do, or lower engram_memory_floor")


def sync_directory(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The journal of a file that is being packed


class Journal:
    """Which segments of a partial file are on the disk, and their hashes. Lines are only appended.

    The first line says what is being made; a journal of anything else, or of another partial file, is begun anew.
    """

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.hashes: dict[int, str] = {}
        self._fd = -1

    def _identity(self, inode: int) -> dict[str, t.Any]:
        table = self.file.table
        return {
            "format": FORMAT,
            "header": list(self.file.header),
            "segment_rows": self.file.segment_rows,
            "source": table.fingerprint,
            "inode": inode,
        }

    def load(self, inode: int) -> bool:
        """Take over what an earlier run has done on the file with this inode."""
        try:
            with open(self.file.journal, encoding="utf-8") as stream:
                lines = stream.read().splitlines()
            first = json.loads(lines[0])
            source = first.pop("source")
            wanted = self._identity(inode)
            if not same_source(source, wanted.pop("source")) or first != wanted:
                return False
            self.hashes = dict(_entries(lines[1:], len(self.file.segments)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return False
        return True

    def begin(self, inode: int) -> None:
        """Start a journal, or go on with one that was loaded. A torn last line is left behind by this."""
        lines = [json.dumps(self._identity(inode)), *(_entry(number, digest) for number, digest in sorted(self.hashes.items()))]
        temporary = f"{self.file.journal}.new"
        self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._fd, "".join(f"{line}\n" for line in lines).encode())
        os.fsync(self._fd)
        os.replace(temporary, self.file.journal)
        sync_directory(self.file.directory)

    def note(self, number: int, digest: str) -> None:
        """Record a segment. Its rows must be on the disk by now."""
        os.write(self._fd, f"{_entry(number, digest)}\n".encode())
        os.fdatasync(self._fd)
        self.hashes[number] = digest

    @property
    def complete(self) -> bool:
        return len(self.hashes) == len(self.file.segments)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _entry(number: int, digest: str) -> str:
    return f"{number} {digest}"


def _entries(lines: t.Iterable[str], count: int) -> t.Iterator[tuple[int, str]]:
    for line in lines:
        number, separator, digest = line.partition(" ")
        if not separator or not number.isdecimal() or int(number) >= count or len(digest) != 64:
            return  # torn by a power cut; nothing after it can be trusted
        yield int(number), digest


def total_hash(file: RowFile, hashes: t.Sequence[str]) -> str:
    """One hash for the whole file: over its header and the hashes of its segments, in order."""
    return hashlib.sha256(file.header.pack() + b"".join(bytes.fromhex(item) for item in hashes)).hexdigest()
