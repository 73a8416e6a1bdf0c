# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""QEMU's command line, its monitor, and the choice between the processor's virtualisation and emulation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

from sparklab.run import LabError, say
from sparkvm.settings import DISKS, MEMORY_MB, PROCESSORS, RUN, Machine, Paths

PROGRAM = "qemu-system-x86_64"
ACCELERATORS = {
    "kvm": ("-accel", "kvm", "-cpu", "host"),
    "tcg": ("-accel", "tcg,thread=multi", "-cpu", "max"),
}
PROOF_SECONDS = 20
"""Virtualised, the first program starts after two or three seconds."""
FIRST_WORD = "Loading, please wait"  # of initramfs-tools' /init

# The places on the virtual PCI bus by which setup knows the network cards.
MANAGEMENT_SLOT, RAIL_SLOTS = 0x10, (0x11, 0x12)
# No predictable names (setup gives a GB10's), and no work against side channels, which emulation makes slow.
KERNEL = "root=/dev/vda rw net.ifnames=0 console=ttyS0 quiet mitigations=off systemd.show_status=0"


def base(accelerator: str, system: Path, overlay: Path, seed: Path, console: Path) -> list[str]:
    """Return what every virtual machine has: kernel, root disk as vda, the seed as vdb."""
    return [
        PROGRAM, "-machine", "pc", *ACCELERATORS[accelerator], "-smp", str(PROCESSORS), "-m", str(MEMORY_MB), "-display", "none", "-nodefaults",
        "-serial", f"file:{console}", "-device", "virtio-rng-pci,addr=0x3",
        "-kernel", str(system / "vmlinuz"), "-initrd", str(system / "initrd"), "-append", KERNEL,
        # The host's page cache is all the safety that a disk needs that is made anew in seconds.
        "-drive", f"file={overlay},if=none,id=root,format=qcow2,cache=unsafe,discard=unmap", "-device", "virtio-blk-pci,drive=root,addr=0x4",
        "-drive", f"file={seed},if=none,id=seed,format=raw,readonly=on", "-device", "virtio-blk-pci,drive=seed,addr=0x5",
    ]


def rail_socket(machine: Machine, rail: int) -> Path:
    return RUN / f"{machine.name}-rail{rail}"


def monitor_socket(machine: Machine) -> Path:
    return RUN / f"{machine.name}-monitor"


def network(machine: Machine, peer: Machine) -> list[str]:
    """Return the cards: management on a tap; each rail a cable to the peer, which needs no start order."""
    words = [
        "-netdev", f"tap,id=management,ifname={machine.tap},script=no,downscript=no",
        "-device", f"virtio-net-pci,netdev=management,romfile=,id=nic-management,addr={MANAGEMENT_SLOT:#x},mac=52:54:00:c6:12:{20 + machine.number:02x}",
    ]
    for rail, slot in zip(machine.rails, RAIL_SLOTS):
        words += [
            "-netdev", f"dgram,id=rail{rail.number},local.type=unix,local.path={rail_socket(machine, rail.number)},"
                       f"remote.type=unix,remote.path={rail_socket(peer, rail.number)}",
            # One hardware address for both rails of a machine: soft-RoCE makes a device's system GUID of it, and on a real card
            # the two halves of a port have one. The rails are separate cables, so nothing else minds.
            "-device", f"virtio-net-pci,netdev=rail{rail.number},romfile=,id=nic-rail{rail.number},addr={slot:#x},mac=52:54:00:c6:33:{machine.number:02x}",
        ]
    return words


def disks(folder: Path) -> list[str]:
    words = []
    for place, (serial, _size) in enumerate(DISKS):
        words += ["-drive", f"file={folder / serial}.qcow2,if=none,id={serial},format=qcow2,cache=unsafe,discard=unmap",
                  "-device", f"virtio-blk-pci,drive={serial},serial={serial},addr={0x6 + place:#x}"]
    return words


def monitor(machine: Machine) -> list[str]:
    return ["-qmp", f"unix:{monitor_socket(machine)},server=on,wait=off"]


def command(machine: Machine, name: str, arguments: dict[str, object]) -> object:
    """Run one command of a machine's monitor."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(120)  # a snapshot takes some seconds
        try:
            connection.connect(str(monitor_socket(machine)))
        except OSError as error:
            raise LabError(f"{machine.name} does not run: {error}") from error
        with connection.makefile("rw") as stream:
            stream.readline()  # the greeting
            answer: dict = {}
            for words in ({"execute": "qmp_capabilities"}, {"execute": name, "arguments": arguments}):
                stream.write(json.dumps(words) + "\n")
                stream.flush()
                answer = json.loads(stream.readline())
                while "event" in answer:
                    answer = json.loads(stream.readline())
    if "error" in answer:
        raise LabError(f"{machine.name}: {name}: {answer['error'].get('desc')}")
    return answer.get("return")


def human_command(machine: Machine, line: str) -> None:
    """Run a command that the monitor has for people only: its answer is a text, and any text is a complaint."""
    answer = command(machine, "human-monitor-command", {"command-line": line})
    if answer:
        raise LabError(f"{machine.name}: {line}: {answer}")


def accelerator(paths: Paths) -> str:
    """Return what was chosen; emulation, which works everywhere, until something faster was seen to work."""
    record = paths.state / "accelerator"
    return record.read_text().strip() if record.exists() else "tcg"


def prove_accelerator(paths: Paths, system: Path) -> None:
    """Choose the processor's virtualisation where it boots this very kernel. That /dev/kvm exists says nothing: it may hang for ever."""
    record = paths.state / "accelerator"
    wanted = os.environ.get("SPARKVM_ACCELERATOR")
    if wanted and wanted not in ACCELERATORS:
        raise LabError(f"SPARKVM_ACCELERATOR is {wanted!r}; known: {', '.join(ACCELERATORS)}")
    if wanted or not Path("/dev/kvm").exists():
        record.write_text(wanted or "tcg")
    elif not record.exists():
        proven = boots(system, "kvm", paths.logs / "kvm-console.log")
        say("the kernel boots with kvm" if proven else "the kernel does not boot with kvm here: the machines are emulated")
        record.write_text("kvm" if proven else "tcg")


def boots(system: Path, name: str, console: Path) -> bool:
    """Boot without any disk, until the first program says its first word."""
    console.unlink(missing_ok=True)
    words = [PROGRAM, "-machine", "pc", *ACCELERATORS[name], "-m", "512", "-display", "none", "-nodefaults", "-serial", f"file:{console}",
             "-kernel", str(system / "vmlinuz"), "-initrd", str(system / "initrd"), "-append", "console=ttyS0"]
    end = time.monotonic() + PROOF_SECONDS
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and time.monotonic() < end:
                if console.exists() and FIRST_WORD in console.read_text(errors="replace"):
                    return True
                time.sleep(0.2)
        finally:
            process.kill()
    return False
