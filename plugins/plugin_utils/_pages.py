# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Pages that stand alone: one file with its style, its plots and its data, made from a template. On the controller only."""

from __future__ import annotations

import json
import os
import typing as t

import jinja2

COLLECTION = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
TEMPLATES = os.path.join(COLLECTION, "roles", "report", "templates")
# Of the reader's account on the controller, and not of the project: a run leaves nothing in somebody's repository.
DEFAULT_DIRECTORY = os.path.join("sparkops", "reports")


def render(name: str, **values: t.Any) -> str:
    """The page ``name`` with ``values``. Texts come from logs and models: all of them are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["embedded"] = embedded
    return environment.get_template(f"{name}.html.j2").render(**values)


def embedded(document: t.Any) -> str:
    """JSON that can stand inside of a script element: no text in it can end the element."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False)
    return jinja2.utils.markupsafe.Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def report_directory(wanted: str | None, deployment: str) -> str:
    """Where the reports of a deployment are kept on the controller."""
    if wanted:
        return os.path.join(os.path.expanduser(wanted), deployment)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, DEFAULT_DIRECTORY, deployment)


def write(path: str, text: str) -> None:
    """Whole or not at all. A report has no secret, but it is its owner's."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def read_documents(directory: str, prefix: str) -> list[dict[str, t.Any]]:
    """The documents PREFIX-*.json of a directory in the order of their names; what is no document is left out."""
    found = []
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    for name in names:
        if not (name.startswith(f"{prefix}-") and name.endswith(".json")):
            continue
        try:
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                document = json.load(file)
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and document.get("format") == 1:
            found.append(document)
    return found


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def collection_version() -> str:
    """Of the installed archive, else of the checkout."""
    try:
        with open(os.path.join(COLLECTION, "MANIFEST.json"), encoding="utf-8") as file:
            return json.load(file)["collection_info"]["version"]
    except (OSError, ValueError, KeyError):
        pass
    try:
        with open(os.path.join(COLLECTION, "galaxy.yml"), encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("version:"))
    except (OSError, StopIteration):
        return "unknown"
