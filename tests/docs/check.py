# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pages that are made from data: role READMEs from their specs, docs/troubleshooting.md from docs/refusals.

``python tests/docs/check.py`` fails when a page is stale; with ``--write`` it writes them.
"""

from __future__ import annotations

import glob
import os
import re
import sys

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, ".collections"))

from ansible_collections.sparkops.inference.plugins.module_utils._options import options  # noqa: E402

OPTIONS = options()
NOTICE = "<!-- Made by tests/docs/check.py --write; do not edit. -->"
MARKUP = re.compile(r"\b[CVOMI]\(([^)]*)\)")


def plain(text: str) -> str:
    """Ansible's markup as Markdown code."""
    return MARKUP.sub(r"`\1`", text).replace("|", "\\|")


def lines_of(description: str | list[str]) -> list[str]:
    return [description] if isinstance(description, str) else description


def range_of(option: object) -> str:
    return option.wanted if option.choices or option.minimum is not None or option.maximum is not None else ""


def option_row(name: str, spec: dict) -> str:
    option = OPTIONS.get(name)
    if option is None:
        kind, default, allowed = spec.get("type", "str"), spec.get("default"), ", ".join(map(str, spec.get("choices", [])))
    else:
        kind, default, allowed = option.kind, option.default, range_of(option)
    shown = "" if default is None else f"`{default}`"
    return f"| `{name}` | {kind} | {shown} | {allowed} | {plain(' '.join(lines_of(spec['description'])))} |"


def role_readme(role: str) -> str:
    specs = {"main": {}}
    path = os.path.join(ROOT, "roles", role, "meta/argument_specs.yml")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            specs = yaml.safe_load(stream)["argument_specs"]
    with open(os.path.join(ROOT, "roles", role, "meta/main.yml"), encoding="utf-8") as stream:
        meta = yaml.safe_load(stream)
    first = "main" if "main" in specs else next(iter(specs))
    main = specs[first]
    parts = [f"# Role sparkops.inference.{role}", NOTICE, f"{meta['galaxy_info']['description']}."]
    parts += [plain(line) for line in lines_of(main.get("description", []))]
    dependencies = [entry["role"] for entry in meta.get("dependencies", [])]
    if dependencies:
        parts.append(f"Runs before it: {', '.join(f'`{name}`' for name in dependencies)}.")
    if main.get("options"):
        rows = [option_row(name, spec) for name, spec in sorted(main["options"].items())]
        parts.append("\n".join(["| option | type | default | allowed | meaning |", "| --- | --- | --- | --- | --- |", *rows]))
    others = [f"* `{name}`: {plain(spec['short_description'])}." for name, spec in specs.items() if name != first]
    if others:
        parts.append("\n".join(["Other entry points (`tasks_from`):", "", *others]))
    return "\n\n".join(parts) + "\n"


def refusals() -> list[dict]:
    found = []
    for path in glob.glob(os.path.join(ROOT, "docs/refusals/*.yml")):
        with open(path, encoding="utf-8") as stream:
            found += yaml.safe_load(stream)
    return sorted(found, key=lambda entry: entry["id"])


def symptoms() -> str:
    """What one sees, what the plays say, and which play mends it."""
    with open(os.path.join(ROOT, "docs/symptoms.yml"), encoding="utf-8") as stream:
        entries = yaml.safe_load(stream)
    rows = []
    for entry in entries:
        said = [*(f"[`{name}`](#{anchor(name)})" for name in entry["ids"]), *(f"notice: {words}" for words in entry.get("says", []))]
        plays = ", ".join(f"`{name}.yml`" for name in entry["plays"])
        rows.append(f"| {entry['symptom']} | {', '.join(said) or 'nothing'} | {entry['do']} | {plays} |")
    return "\n".join(["| what one sees | what the plays say | what to do | plays |", "| --- | --- | --- | --- |", *rows])


def anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-").lower()


def troubleshooting() -> str:
    parts = [
        "# Troubleshooting", NOTICE,
        "Every message that stops a run names the node, the thing, what was found, what is wanted, and the next step, and ends with an id in brackets. "
        "All problems of a run come at once, and nothing was changed before. This page has each id.",
        "Where to begin: `preflight.yml` says what is wrong with the nodes, `status.yml` with the group, `doctor.yml` with the machines and their links, "
        "`logs.yml` shows the ranks' own words.",
        "## By symptom", symptoms(),
    ]
    area = ""
    for entry in refusals():
        if entry["id"].partition(".")[0] != area:
            area = entry["id"].partition(".")[0]
            parts.append(f"## {area}")
        parts.append(f"<a id=\"{anchor(entry['id'])}\"></a>**`{entry['id']}`** {entry['means']}\n*Next:* {entry['do']}")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    roles = sorted(os.path.basename(path) for path in glob.glob(os.path.join(ROOT, "roles/*")))
    return {
        **{f"roles/{role}/README.md": role_readme(role) for role in roles},
        "docs/troubleshooting.md": troubleshooting(),
    }


def main() -> int:
    stale = []
    for path, text in pages().items():
        full = os.path.join(ROOT, path)
        present = ""
        if os.path.exists(full):
            with open(full, encoding="utf-8") as stream:
                present = stream.read()
        if present == text:
            continue
        stale.append(path)
        if "--write" in sys.argv:
            with open(full, "w", encoding="utf-8") as stream:
                stream.write(text)
    if stale and "--write" not in sys.argv:
        print(f"stale: {', '.join(stale)}; run: python tests/docs/check.py --write")
        return 1
    print(f"pages: {'wrote ' + ', '.join(stale) if stale else 'all are up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
