# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the hub serves: the tiny model, open and gated, and a larger repository."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from pathlib import Path

from sparklab import settings, tiny_model
from sparklab.run import LabError, say
from sparklab.settings import HERE, Paths

GATED_REPOSITORY = f"{tiny_model.REPOSITORY}-gated"
DESCRIPTION = HERE / "tiny_model.json"


def description() -> dict:
    """Return the committed description of the repositories."""
    return json.loads(DESCRIPTION.read_text())


def ensure(paths: Paths, *, fresh: bool = False) -> None:
    """Write what is missing; with *fresh* what tests have added or changed goes, and ``main`` is back in its place."""
    wanted = description()
    bulk = wanted["bulk"]
    revisions = {name: entry["revision"] for name, entry in wanted["revisions"].items()}
    contents = {
        tiny_model.REPOSITORY: (revisions, {"main": wanted["revision"]}),
        GATED_REPOSITORY: ({"current": wanted["revision"]}, {"main": wanted["revision"], "gated": True, "access": ["reader"]}),
        tiny_model.BULK_REPOSITORY: ({"bulk": bulk["revision"]}, {"main": bulk["revision"]}),
    }
    if fresh:
        for folder in paths.hub.glob("*/*/*"):
            known, _options = contents.get(f"{folder.parts[-3]}/{folder.parts[-2]}", ({}, {}))
            names = [name for name, revision in known.items() if revision == folder.name]
            if not names or not _intact(folder, bulk if names == ["bulk"] else wanted["revisions"][names[0]]):
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        for folder in [*paths.hub.glob("*/*"), *paths.hub.glob("*")]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    _ensure_tokens(paths)
    for repository, (known, options) in contents.items():
        folder = paths.hub / repository
        folder.mkdir(parents=True, exist_ok=True)
        for name, revision in known.items():
            if not (folder / revision).is_dir():
                write_revision(folder / revision, name, bulk if name == "bulk" else wanted["revisions"][name])
        if not (folder / "hub.json").exists():
            (folder / "hub.json").write_text(json.dumps(options, indent=2) + "\n")


def _intact(folder: Path, wanted: dict) -> bool:
    """Tell whether a revision has just the files of the description."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return set(found) == set(wanted["files"]) and all(
        hashlib.sha256(path.read_bytes()).hexdigest() == wanted["files"][name]["sha256"] for name, path in found.items())


def write_revision(folder: Path, name: str, wanted: dict) -> None:
    """Make a revision and compare each byte with the description before it is served."""
    say(f"making {folder.parent.parent.name}/{folder.parent.name} at {folder.name[:12]} ({name})")
    contents = tiny_model.bulk_files() if name == "bulk" else tiny_model.files(name)
    if tiny_model.describe(contents)["files"] != wanted["files"]:
        raise LabError(f"the files made for {folder.parent.name} ({name}) differ from {DESCRIPTION}: after a change of tiny_model.py run `lab describe-model`")
    tiny_model.write(folder, contents)


def _ensure_tokens(paths: Paths) -> None:
    """Make a token with access to the gated repository and one without."""
    record = paths.state / "hub.json"
    if not record.exists():
        record.touch(mode=0o600)
        record.write_text(json.dumps({
            "url": settings.HUB_URL, "admin": f"http://127.0.0.1:{settings.HUB_ADMIN_PORT}",
            "reader_token": f"hf_{secrets.token_hex(17)}", "stranger_token": f"hf_{secrets.token_hex(17)}",
        }, indent=2) + "\n")
    tokens = json.loads(record.read_text())
    (paths.hub / "tokens.json").write_text(json.dumps({tokens["reader_token"]: "reader", tokens["stranger_token"]: "stranger"}, indent=2) + "\n")


def write_description() -> None:
    """Write the description anew, after a change of the model."""
    DESCRIPTION.write_text(json.dumps(tiny_model.describe_all(), indent=2) + "\n")
