# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line of the lab."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from sparklab import hub_content, settings
from sparklab.lab import LOCK, SHORT_NAMES, Lab
from sparklab.run import LabError
from sparklab.settings import Paths


def parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    top = argparse.ArgumentParser(prog="lab", description="A lab of DGX Spark stand-ins in containers. README.md beside the program tells more.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="make the images and fill the registry, without starting nodes")
    up = commands.add_parser("up", help="bring the lab up, or check and repair it")
    up.add_argument("--nodes", type=int, default=settings.DEFAULT_NODES, metavar="N", help="how many (default: %(default)s)")
    up.add_argument("--fresh", action="store_true", help="virgin nodes with empty volumes, and the hub as it was made")
    up.add_argument("--newer", action="append", default=[], metavar="NODE", help="a node of the next Debian: Docker 26 with containerd's image store")
    for command in (build, up):
        command.add_argument("--without-vllm", action="store_true", help="leave out the real engine's image")
    reset = commands.add_parser("reset", help="make nodes virgin again")
    reset.add_argument("node", nargs="+")
    commands.add_parser("down", help="remove the nodes and end what the lab started; the cache stays")
    commands.add_parser("clean", help="down, and remove the cache")
    commands.add_parser("status", help="print the state as JSON; exit code 4 when the lab is not healthy")

    preload = commands.add_parser("preload", help="put an image into nodes' own engines")
    preload.add_argument("image", help=f"{', '.join(SHORT_NAMES)}, or a repository:tag of the registry")
    preload.add_argument("node", nargs="*", help="default: all")
    image = commands.add_parser("image", help="print reference, digest and stamp of an image as JSON")
    image.add_argument("image")
    ssh = commands.add_parser("ssh", help="log in to a node, or run a command there")
    ssh.add_argument("node")
    ssh.add_argument("words", nargs=argparse.REMAINDER)

    faults = commands.add_parser("faults", help="let the hub misbehave").add_subparsers(dest="act", required=True, metavar="ACT")
    faults.add_parser("list", help="print what is set")
    faults.add_parser("clear", help="forget all")
    fault = faults.add_parser("set", help="add one; see the head of hub.py")
    fault.add_argument("kind")
    fault.add_argument("--path", default="*", help="pattern for ORGANISATION/NAME/FILE")
    for name, kind in (("times", int), ("bytes", int), ("seconds", float), ("rate", int), ("status", int)):
        fault.add_argument(f"--{name}", type=kind)
    counters = commands.add_parser("counters", help="print the hub's bytes and requests by path")
    counters.add_argument("--clear", action="store_true", help="start from zero")
    move = commands.add_parser("move-ref", help="let a branch of a hub repository point to another commit")
    move.add_argument("revision")
    move.add_argument("--repository", default=hub_content.tiny_model.REPOSITORY)
    move.add_argument("--ref", default="main")
    commands.add_parser("describe-model", help="write tiny_model.json anew, after a change of tiny_model.py")
    return top


def hub_admin(method: str, path: str, content: dict | None = None) -> object:
    """Talk to the hub's admin port."""
    request = urllib.request.Request(f"http://127.0.0.1:{settings.HUB_ADMIN_PORT}{path}", method=method,
                                     data=None if content is None else json.dumps(content).encode())
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise LabError(f"the hub refused: {error.read().decode(errors='replace')}") from error
    except urllib.error.URLError as error:
        raise LabError(f"the hub does not run (`lab up` starts it): {error.reason}") from error


def print_json(content: object) -> None:
    print(json.dumps(content, indent=2))


def change(options: argparse.Namespace, paths: Paths, lab: Lab) -> None:
    """Run a command that changes the lab, alone and as its owner."""
    with LOCK.exclusive(options.command):
        LOCK.claim(paths.cache)
        match options.command:
            case "build":
                lab.build(vllm=not options.without_vllm)
            case "up":
                lab.up(options.nodes, fresh=options.fresh, vllm=not options.without_vllm, newer=options.newer)
            case "reset":
                lab.reset(options.node)
            case "preload":
                lab.preload(options.node, options.image)
            case "down":
                lab.down()
            case "clean":
                lab.clean()
        LOCK.release_if_gone()


def ask(options: argparse.Namespace, lab: Lab) -> int:
    """Run a command that needs no lock."""
    match options.command:
        case "status":
            status = lab.status()
            print_json(status)
            return 0 if status["healthy"] else 4
        case "image":
            print_json(lab.image(options.image))
        case "ssh":
            words = lab.nodes.ssh_words(settings.node_by_name(options.node), *options.words)
            os.execvp(words[0], words)
        case "faults" if options.act == "set":
            fault = {name: getattr(options, name) for name in ("kind", "path", "times", "bytes", "seconds", "rate", "status")}
            print_json(hub_admin("POST", "/faults", {name: value for name, value in fault.items() if value is not None}))
        case "faults":
            print_json(hub_admin("DELETE" if options.act == "clear" else "GET", "/faults"))
        case "counters":
            print_json(hub_admin("DELETE" if options.clear else "GET", "/counters"))
        case "move-ref":
            print_json(hub_admin("POST", "/refs", {"repository": options.repository, "ref": options.ref, "revision": options.revision}))
        case "describe-model":
            hub_content.write_description()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    paths = Paths.from_environment()
    lab = Lab(paths)
    try:
        if options.command in ("build", "up", "reset", "preload", "down", "clean"):
            if os.geteuid() != 0:
                raise LabError("this needs root: networks, an engine and a Debian tree are made")
            change(options, paths, lab)
            return 0
        return ask(options, lab)
    except (LabError, ValueError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("lab: interrupted; `lab up` goes on from here, `lab down` cleans up", file=sys.stderr)
        return 130
