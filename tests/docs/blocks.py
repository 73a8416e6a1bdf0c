# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The marked code blocks of a page: ``<!-- block: NAME; WHAT -->`` before a fence. What is not marked is found too, so that nothing escapes a test."""

from __future__ import annotations

import dataclasses
import json
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FENCE = re.compile(r"^(?:<!-- block: (?P<name>[^;\n]+); (?P<what>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BODY = re.compile(r"-d '(\{.*\})'", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    name: str
    what: str
    language: str
    text: str

    @property
    def body(self) -> dict | None:
        """The JSON that a request sends."""
        match = BODY.search(self.text)
        return json.loads(match.group(1)) if match else None


def blocks(page: str) -> list[Block]:
    with open(os.path.join(ROOT, page), encoding="utf-8") as stream:
        return [Block(found["name"] or "", found["what"] or "", found["language"], found["text"]) for found in FENCE.finditer(stream.read())]


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    with open(os.path.join(ROOT, page), encoding="utf-8") as stream:
        part = stream.read().split(f"## {heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE).group(0).splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
