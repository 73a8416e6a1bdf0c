# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line of the lab."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from sparklab.run import LabError
from sparkvm.lab import LOCK, Lab
from sparkvm.settings import Paths, machine_by_name

CHANGING = ("build", "up", "reset", "power-off", "power-on", "reboot", "link", "down", "clean")


def parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    top = argparse.ArgumentParser(prog="vmlab", description="Two virtual DGX Spark stand-ins. README.md beside the program tells more.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="make the disk from which the machines start")
    up = commands.add_parser("up", help="bring the machines up, or check them")
    up.add_argument("--fresh", action="store_true", help="virgin machines with empty disks")
    for name, text in (("reset", "make machines virgin again"), ("power-off", "pull the plug"),
                       ("power-on", "start machines that are off, and wait"), ("reboot", "reboot from inside and wait")):
        commands.add_parser(name, help=text).add_argument("machine", nargs="*", help="default: all")
    link = commands.add_parser("link", help="put the cable of a rail out or in, as one machine sees it")
    link.add_argument("machine")
    link.add_argument("rail", type=int, choices=(1, 2))
    link.add_argument("state", choices=("up", "down"))
    commands.add_parser("down", help="power off; the disks stay")
    commands.add_parser("clean", help="down, and remove the cache")
    commands.add_parser("status", help="print the state as JSON; exit code 4 when the lab is not healthy")
    ssh = commands.add_parser("ssh", help="log in to a machine, or run a command there")
    ssh.add_argument("machine")
    ssh.add_argument("words", nargs=argparse.REMAINDER)
    return top


def change(options: argparse.Namespace, paths: Paths, lab: Lab) -> None:
    """Run a command that changes the lab, alone and as its owner."""
    with LOCK.exclusive(options.command):
        LOCK.claim(paths.cache)
        match options.command:
            case "build":
                lab.build()
            case "up":
                lab.up(fresh=options.fresh)
            case "reset":
                lab.reset(options.machine)
            case "power-off":
                lab.power_off(options.machine)
            case "power-on":
                lab.power_on(options.machine)
            case "reboot":
                lab.reboot(options.machine)
            case "link":
                lab.machines.set_link(machine_by_name(options.machine), options.rail, options.state == "up")
            case "down":
                lab.down()
            case "clean":
                lab.clean()
        LOCK.release_if_gone()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    paths = Paths.from_environment()
    lab = Lab(paths)
    try:
        if options.command in CHANGING:
            if os.geteuid() != 0:
                raise LabError("this needs root: a network and a Debian tree are made")
            change(options, paths, lab)
        elif options.command == "status":
            status = lab.status()
            print(json.dumps(status, indent=2))
            return 0 if status["healthy"] else 4
        else:
            words = lab.machines.ssh_words(machine_by_name(options.machine), *options.words)
            os.execvp(words[0], words)
    except (LabError, ValueError) as error:
        print(f"vmlab: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("vmlab: interrupted; `vmlab up` goes on from here, `vmlab down` cleans up", file=sys.stderr)
        return 130
    return 0
