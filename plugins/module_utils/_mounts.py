# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The mount table: pure readers of /proc/PID/mountinfo. Reading it touches no mount, so it never hangs."""

from __future__ import annotations

import os
import re
import typing as t

NETWORK_TYPES = ("nfs", "nfs4")
# As many as the kernel follows.
MAX_LINKS = 40
ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(t.NamedTuple):
    """One line of the table. ``options`` are those of the mount and of its filesystem."""

    path: str
    type: str
    source: str
    options: tuple[str, ...]
    device: str
    # Numbers of the groups in which mounts and unmounts are passed on, as peer or as receiver.
    groups: frozenset[str] = frozenset()

    @property
    def server(self) -> str:
        """The address that an NFS mount talks to, which its source may name otherwise."""
        return self.option("addr") or self.source.partition(":/")[0]

    @property
    def export(self) -> str:
        """The folder of the server that an NFS mount shows."""
        return "/" + self.source.partition(":/")[2]

    def option(self, name: str) -> str | None:
        """The value of an option, empty for a plain word, None when it is not set."""
        for option in self.options:
            key, _equals, value = option.partition("=")
            if key == name:
                return value
        return None


def unescape(text: str) -> str:
    return ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def parse(text: str) -> list[Mount]:
    """Mounts in the order in which they were made, from mountinfo's text."""
    found = []
    for line in text.splitlines():
        front, separator, back = line.partition(" - ")
        left, right = front.split(" "), back.split(" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        options = dict.fromkeys([*left[5].split(","), *right[2].split(",")])
        # The filesystem's "rw" says nothing when this mount of it is "ro".
        if "ro" in left[5].split(","):
            options.pop("rw", None)
        groups = frozenset(field.partition(":")[2] for field in left[6:] if field.startswith(("shared:", "master:")))
        found.append(Mount(unescape(left[4]), right[0], unescape(right[1]), tuple(options), left[2], groups))
    return found


def read(proc_root: str = "/proc", process: str = "self") -> list[Mount]:
    try:
        with open(os.path.join(proc_root, process, "mountinfo"), encoding="utf-8", errors="surrogateescape") as stream:
            return parse(stream.read())
    except OSError:
        return []


def fstab_lines(text: str, mark: str) -> dict[str, str]:
    """Place and source of the lines of /etc/fstab with an option: they count at the next boot, whatever is mounted now."""
    rows = (line.split() for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {unescape(row[1]): unescape(row[0]) for row in rows if len(row) > 3 and mark in row[3].split(",")}


def read_fstab(mark: str, root: str, path: str = "/etc/fstab") -> dict[str, str]:
    """The same of this node, at or below a folder."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return {place: source for place, source in fstab_lines(stream.read(), mark).items() if below(place, root)}
    except OSError:
        return {}


def below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def resolve(mounts: t.Sequence[Mount], path: str) -> str:
    """The path as the table names it, without symbolic links. Nothing on a network mount is looked at: what leads on from there stays as it is."""
    done, rest, links = "/", path.split("/")[::-1], 0
    while rest:
        place = os.path.normpath(os.path.join(done, rest.pop()))
        holder = holding(mounts, place)
        if holder and holder.type in NETWORK_TYPES:
            return os.path.normpath(os.path.join(place, *rest[::-1]))
        try:
            target = os.readlink(place)
        except OSError:
            done = place
            continue
        links += 1
        if links > MAX_LINKS:
            return path
        # A relative target begins where the link is; join lets an absolute one begin anew.
        done, rest = os.path.join(done, "/" if target.startswith("/") else ""), [*rest, *target.split("/")[::-1]]
    return done


def holding(mounts: t.Sequence[Mount], path: str) -> Mount | None:
    """The mount that a path lies on: the deepest, and of several at one place the last."""
    best = None
    for mount in mounts:
        if below(path, mount.path) and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


def at(mounts: t.Sequence[Mount], path: str) -> Mount | None:
    """The visible mount whose root is exactly this path."""
    found = holding(mounts, path)
    return found if found and found.path == path else None


def network_mounts(mounts: t.Sequence[Mount], root: str) -> list[Mount]:
    """NFS mounts at or below a folder, and the one that holds it."""
    holder = holding(mounts, root)
    places = {mount.path: mount for mount in mounts if below(mount.path, root)}
    if holder:
        places[holder.path] = holder
    return [mount for _path, mount in sorted(places.items()) if mount.type in NETWORK_TYPES]


class User(t.NamedTuple):
    """A process that keeps a mount of another namespace, such as a container's."""

    pid: int
    name: str
    container: str


def users(mount: Mount, proc_root: str = "/proc") -> list[User]:
    """Other mount namespaces that hold the same filesystem: unmounting it here would not free it there.

    The sandbox of a host's service gets each unmount passed on (its mount is in a group of ours), and holds nothing. An ordinary account is
    not told the namespaces of others, but what is mounted there; then each process of a container is one more user.
    """
    own = namespace(proc_root, "self")
    seen, found = {own}, []
    for pid in sorted((entry for entry in os.listdir(proc_root) if entry.isdecimal()), key=int):
        place = namespace(proc_root, pid)
        if place in seen:
            continue
        if place:
            seen.add(place)
        if any(_same(mount, other) and not mount.groups & other.groups for other in read(proc_root, pid)):
            found.append(User(int(pid), _text(proc_root, pid, "comm").strip(), container_of(_text(proc_root, pid, "cgroup"))))
    return found


def _same(one: Mount, other: Mount) -> bool:
    return (one.type, one.source, one.device) == (other.type, other.source, other.device)


def container_of(cgroup: str) -> str:
    """The short id of the container that a cgroup file names, empty when it names none."""
    match = re.search(r"(?:docker[-/]|libpod-|cri-containerd-)([0-9a-f]{12})[0-9a-f]{52}", cgroup)
    return match[1] if match else ""


def namespace(proc_root: str, pid: str) -> str | None:
    """Identity of a process's mount namespace, None when this account may not see it."""
    try:
        return os.readlink(os.path.join(proc_root, pid, "ns/mnt"))
    except OSError:
        return None


def _text(proc_root: str, pid: str, name: str) -> str:
    try:
        with open(os.path.join(proc_root, pid, name), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
