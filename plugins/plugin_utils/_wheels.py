# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The pinned wheels of huggingface_hub for a node: from a folder of the user, or fetched once by the controller's pip.

A node needs no pip, no venv module and no way to a package index.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import typing as t

REQUIREMENTS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "roles", "weights", "files", "requirements-hub.txt")


class WheelsError(Exception):
    """The wheels can't be had; the text says why."""


class Requirement(t.NamedTuple):
    name: str
    version: str
    hashes: frozenset[str]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> list[Requirement]:
    """Read a requirements file with hashes."""
    result = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", line)
        if match:
            result.append(Requirement(normalised(match[1]), match[2], frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))))
    return result


def requirements() -> list[Requirement]:
    with open(REQUIREMENTS, encoding="utf-8") as stream:
        return parse(stream.read())


def all_hashes() -> list[str]:
    return sorted(digest for requirement in requirements() for digest in requirement.hashes)


def fits(wheel: str, python: tuple[int, int], machine: str) -> bool:
    """Whether a wheel's tags fit CPython of that version on Linux."""
    try:
        interpreters, abis, platforms = (part.split(".") for part in wheel[: -len(".whl")].rsplit("-", 3)[1:])
    except ValueError:
        return False
    if not any(platform == "any" or (platform.startswith("manylinux") and platform.endswith("_" + machine)) for platform in platforms):
        return False
    if "py3" in interpreters and "none" in abis:
        return True
    own = f"cp{python[0]}{python[1]}"
    if own in interpreters and (own in abis or "none" in abis):
        return True
    stable = [int(tag[3:]) for tag in interpreters if re.fullmatch(r"cp3\d+", tag)]
    return "abi3" in abis and any(minor <= python[1] for minor in stable)


def choose(folder: str, wanted: t.Sequence[Requirement], python: tuple[int, int], machine: str) -> list[str]:
    """One wheel per requirement from a folder, each with a pinned hash. All that lacks is named at once."""
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".whl")] if os.path.isdir(folder) else []
    chosen, lacking = [], []
    for requirement in wanted:
        fitting = [
            os.path.join(folder, name)
            for name in names
            if normalised(name.split("-")[0]) == requirement.name and name.split("-")[1] == requirement.version and fits(name, python, machine)
        ]
        good = [path for path in fitting if sha256_of(path) in requirement.hashes]
        if good:
            chosen.append(good[0])
        else:
            lacking.append(f"{requirement.name}=={requirement.version}" + (" (other hash than pinned)" if fitting else ""))
    if lacking:
        raise WheelsError(f"{folder} lacks {', '.join(lacking)} for Python {python[0]}.{python[1]} on {machine}")
    return chosen


def sha256_of(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def download(folder: str, python: tuple[int, int], machine: str) -> None:
    """Let the controller's own pip fetch the pinned wheels for another machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", f"{python[0]}.{python[1]}"]
    for policy in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{policy}_{machine}"]
    command += ["--dest", folder, "--requirement", REQUIREMENTS]
    os.makedirs(folder, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WheelsError(f"the controller's pip could not fetch the pinned wheels: {last}")


def wheels(folder: str | None, cache: str, python: tuple[int, int], machine: str) -> list[str]:
    """The wheels for one kind of node. Without a folder of the user they are fetched once into ``cache``."""
    wanted = requirements()
    if folder:
        return choose(folder, wanted, python, machine)
    try:
        return choose(cache, wanted, python, machine)
    except WheelsError:
        download(cache, python, machine)
    return choose(cache, wanted, python, machine)
