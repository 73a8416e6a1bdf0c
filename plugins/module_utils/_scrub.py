# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Take secrets out of what leaves a node for a person to read, or to send to somebody else."""

from __future__ import annotations

import re
import typing as t

GONE = "(removed)"
NAMES = re.compile(r"(?i)(key|token|passw|secret|credential|authorization)")
# What such names hold without being secret: numbers of tokens and switches are what a reader of a bundle needs.
HARMLESS = re.compile(r"(?i)max_num_batched_tokens|tokenizer|_tokens$|^tokens|keys?_?(?:dir|path|mode)$|known")
PATTERNS = (
    re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"()\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"()\bgh[pousr]_[A-Za-z0-9]{20,}"),
    re.compile(r"(://[^/\s:@]+:)[^/\s@]+(?=@)"),
    re.compile(r"(?i)((?:api[_-]?key|token|password|secret)[\"']?\s*[=:]\s*[\"']?)[A-Za-z0-9._~+/=-]{12,}"),
)


def is_secret_name(name: str) -> bool:
    return bool(NAMES.search(name)) and not HARMLESS.search(name)


def scrub_text(text: str, secrets: t.Collection[str] = ()) -> str:
    """Without the given values, and without what looks like a token."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, GONE)
    for pattern in PATTERNS:
        text = pattern.sub(lambda match: match.group(1) + GONE, text)
    return text


def scrub(value: t.Any, secrets: t.Collection[str] = (), name: str = "") -> t.Any:
    """The same for a document: a text under a name that speaks of a secret goes as a whole, as does the value of such a variable."""
    if isinstance(value, dict):
        return {key: scrub(item, secrets, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [scrub(item, secrets, name) for item in value]
    if not isinstance(value, str):
        return value
    variable, equals, rest = value.partition("=")
    if equals and rest and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable) and is_secret_name(variable):
        return f"{variable}={GONE}"
    if value and is_secret_name(name):
        return GONE
    return scrub_text(value, secrets)
