# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The disk that all machines start from, cached by the hash of its recipe.

Two steps, because the first takes minutes: a tree of Debian packages with its kernel and the modules that no test machine's own kernel
has (ZFS is compiled); then what makes it a machine of the lab, with the stand-in's image in its engine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sparklab import images
from sparklab import settings as container_lab
from sparklab.debian import debian_tree, stamp, workplace
from sparklab.run import run, say
from sparkvm.settings import HERE, Paths

SUITE = "trixie"
COMPONENTS = "main,contrib"  # ZFS is in contrib
SIZE = "12G"

PACKAGES = (
    # ZFS first: the kernel, its headers and the source that is compiled.
    "linux-image-amd64", "linux-headers-amd64", "zfs-dkms", "zfsutils-linux", "nfs-kernel-server", "nfs-common",
    "rdma-core", "ibverbs-utils", "perftest", "docker.io", "docker-cli", "iptables", "iproute2", "iputils-ping", "ethtool", "pciutils",
    "netplan.io", "avahi-daemon", "avahi-utils", "openssh-server", "rsync", "zstd", "acl", "curl", "ca-certificates", "netbase",
    "python3", "python3-apt", "python3-requests", "python3-yaml", "sudo", "procps", "psmisc", "less", "tcpdump",
    "systemd-sysv", "linux-sysctl-defaults", "udev", "dbus", "dbus-user-session", "libpam-systemd", "kmod", "initramfs-tools", "zlib1g", "e2fsprogs",
)

BOOT_MODULES = ("virtio_pci", "virtio_blk", "ext4")

FINISH = r"""
ls lib/modules/*/updates/dkms/zfs.ko* >/dev/null # compiled for the kernel of this tree, or no disk
rm -f etc/ssh/ssh_host_*
cp -a --no-preserve=ownership --remove-destination "$FILES"/. .
chroot . systemctl enable sparkvm-seed.service systemd-networkd.service ssh.service docker.service
# Nothing is exported, imported, or told before somebody says so; what waits for disks and modules costs half a minute of a slow boot.
chroot . systemctl disable nfs-server.service avahi-daemon.service avahi-daemon.socket zfs.target zfs-import.target zfs-import-cache.service \
    zfs-load-module.service zfs-mount.service zfs-share.service zfs-volume-wait.service zfs-zed.service zfs-volumes.target
chroot . systemctl mask getty.target systemd-networkd-wait-online.service fstrim.timer e2scrub_all.timer e2scrub_reap.service apt-daily.timer \
    apt-daily-upgrade.timer dpkg-db-backup.timer man-db.timer rdma-ndd.service systemd-pstore.service
# Of an initial disk with every driver the unpacking alone takes seconds in software emulation.
chroot . update-initramfs -u -k all
cp boot/vmlinuz-* "$RESULT/vmlinuz"
cp boot/initrd.img-* "$RESULT/initrd"
rm -rf boot/* usr/src/* var/lib/dkms usr/lib/gcc usr/libexec/gcc usr/share/doc/* usr/share/man/* usr/share/locale/* var/lib/apt/lists/* var/cache/apt/*
: >etc/machine-id
rm -f var/lib/docker/engine-id
"""
"""Run in a copy of the tree of packages, so that a change here does not compile ZFS again."""


IMPORT = r"""
mount --bind "$PWD" "$PWD" # the engine needs a root that is a mount
cd "$PWD"
mount --bind /proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
cp "$STUB" run/stub.tar
chroot . dockerd --storage-driver overlay2 --bridge none --iptables=false --host unix:///run/import.sock --pidfile /run/import.pid &
engine=$!
trap 'kill $engine; wait $engine' EXIT
tries=0
until chroot . docker --host unix:///run/import.sock info >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 120 ]
    sleep 0.5
done
chroot . docker --host unix:///run/import.sock import --change 'ENTRYPOINT ["vllm", "serve"]' --change 'CMD []' /run/stub.tar "$REFERENCE"
"""
"""Run in the tree, in a mount namespace of its own: the machines' own engine takes the stand-in's image without a boot."""


def files() -> dict[str, str]:
    """Return the files that make a plain Debian a machine of the lab; all else comes with its second disk."""
    modules = "".join(f"{name}\n" for name in BOOT_MODULES)
    return {
        "etc/systemd/system/sparkvm-seed.service": (HERE / "guest" / "sparkvm-seed.service").read_text(),
        "etc/initramfs-tools/conf.d/sparkvm": "MODULES=list\n",
        "etc/initramfs-tools/modules": modules,
        # Of the modules that rdma-core loads at boot, those that libibverbs needs; the others (NFS, SRP, iSER over RDMA) take 15 seconds.
        "etc/rdma/modules/rdma.conf": "ib_uverbs\nrdma_ucm\n",
        "etc/rdma/modules/roce.conf": "",
        "etc/locale.conf": "LANG=C.UTF-8\n",
        "etc/fstab": "/dev/vda / ext4 defaults,noatime 0 1\n",
    }


def packages_folder(paths: Paths) -> Path:
    return paths.images / f"packages-{stamp(SUITE, COMPONENTS, PACKAGES)}"


def ensure_packages(paths: Paths) -> Path:
    """Return the tree of all packages, made if need be."""
    folder = packages_folder(paths)
    if not folder.exists():
        log = paths.logs / "build-packages.log"
        log.unlink(missing_ok=True)
        say(f"installing the machines' packages (about eight minutes, most of it the ZFS module; log: {log})")
        with workplace(paths.images) as work:
            debian_tree(work / "root", SUITE, PACKAGES, (), work=work, components=COMPONENTS, log=log)
            (work / "root").rename(folder)
    return folder


def system_stamp() -> str:
    return stamp(SUITE, COMPONENTS, PACKAGES, SIZE, FINISH, IMPORT, files(), images.stub_stamp("1"))


def system_folder(paths: Paths) -> Path:
    return paths.images / f"system-{system_stamp()}"


def ensure_system(paths: Paths) -> Path:
    """Return the folder with ``root.img``, ``vmlinuz`` and ``initrd``, made if need be."""
    folder = system_folder(paths)
    if not folder.exists():
        packages = ensure_packages(paths)
        log = paths.logs / "build-system.log"
        log.unlink(missing_ok=True)
        say(f"making the machines' disk (log: {log})")
        with workplace(paths.images) as work:
            for name, content in files().items():
                path = work / "files" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
            tree, result = work / "root", work / "result"
            run(["cp", "-a", "--reflink=auto", packages, tree])
            result.mkdir()
            (work / "stub").mkdir()
            environment = {**os.environ, "FILES": str(work / "files"), "RESULT": str(result), "STUB": str(images.stub_tree(work / "stub")),
                           "REFERENCE": f"{container_lab.REGISTRY}/{images.STUB_IMAGE}:1"}
            run(["unshare", "--mount", "sh", "-euc", f"cd {tree}\n{IMPORT}"], environment=environment, log=log)
            run(["sh", "-euc", f"cd {tree}\n{FINISH}"], environment=environment, log=log)
            run(["truncate", "--size", SIZE, result / "root.img"])
            run(["mkfs.ext4", "-q", "-L", "sparkvm", "-E", "lazy_itable_init=1,nodiscard", "-d", tree, result / "root.img"], log=log)
            result.rename(folder)
    return folder


def remove_outdated(paths: Paths) -> None:
    """Remove the trees and disks of older recipes."""
    for kind, current in (("packages", packages_folder(paths)), ("system", system_folder(paths))):
        for folder in paths.images.glob(f"{kind}-*"):
            if folder != current:
                shutil.rmtree(folder)
