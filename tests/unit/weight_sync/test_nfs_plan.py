# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is exported to whom, and how it is mounted."""

from __future__ import annotations

import pytest
from ansible_collections.sparkops.inference.plugins.module_utils import _mounts, _nfs_plan
from ansible_collections.sparkops.inference.plugins.module_utils._mounts import Mount, User
from ansible_collections.sparkops.inference.plugins.module_utils._nfs_plan import Export, Wanted
from hypothesis import given
from hypothesis import strategies as st

TREE = "/var/lib/sparkops/weights/acme--tiny/" + "a" * 40
OTHER = "/var/lib/sparkops/weights/acme--draft/" + "b" * 40
WORKER = "198.51.100.12"
HEAD = "198.51.100.11"
# A mount of Debian 13's kernel (6.12), as its table showed it; the server there had agreed to 524288.
LIVE = (
    f"612 29 0:57 / {TREE} ro,nosuid,nodev,noexec,relatime shared:330 - nfs4 {HEAD}:{TREE} "
    "ro,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,nconnect=8,timeo=600,retrans=2,sec=sys,clientaddr=198.51.100.12,"
    "local_lock=none,addr=198.51.100.11\n"
)
ROOT = "29 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


def mount(text: str = LIVE) -> Mount:
    return _mounts.parse(ROOT + text)[-1]


def refused(found) -> list[str]:
    return [item.id for item in found]


# --- the server ------------------------------------------------------------------------------------------------


def test_only_the_trees_for_only_the_named_clients_read_only_and_squashed():
    text = _nfs_plan.exports_text(_nfs_plan.wanted_exports([TREE, OTHER], [WORKER, "198.51.100.13"]))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == 4
    for line in lines:
        path, rest = line.split(" ")
        client, options = rest.rstrip(")").split("(")
        assert path in (TREE, OTHER) and client in (WORKER, "198.51.100.13")
        words = options.split(",")
        assert {"ro", "root_squash", "sync", "no_subtree_check"} <= set(words)
        assert not {"rw", "no_root_squash", "insecure", "crossmnt"} & set(words)
        assert sum(word.startswith("fsid=") for word in words) == 1


def test_our_file_reads_as_it_was_written():
    wanted = _nfs_plan.wanted_exports([TREE, OTHER], [WORKER, "2001:db8::12"])
    assert set(_nfs_plan.parse_exports(_nfs_plan.exports_text(wanted))) == set(wanted)


def test_a_path_keeps_its_id_and_two_paths_never_share_one():
    assert _nfs_plan.fsid(TREE) == _nfs_plan.fsid(TREE) != _nfs_plan.fsid(OTHER)


@pytest.mark.parametrize(
    "clients",
    [[], ["*"], ["198.51.100.0/24"], ["spark-2"], [WORKER, "*"], ["@group"], [""]],
)
def test_a_list_that_is_empty_or_wider_than_an_address_is_refused(clients):
    assert refused(_nfs_plan.input_refusals("spark-1", [TREE], clients)) == ["sync.nfs_clients"]


def test_addresses_are_taken():
    assert _nfs_plan.input_refusals("spark-1", [TREE], [WORKER, "2001:db8::12"]) == []


@given(st.text(min_size=1))
def test_no_path_can_add_a_line_or_a_client(path):
    """Whatever passes stands in the file as one word that comes back as itself."""
    if _nfs_plan.input_refusals("spark-1", [path], [WORKER]):
        return
    found = _nfs_plan.parse_exports(_nfs_plan.exports_text(_nfs_plan.wanted_exports([path], [WORKER])))
    assert [(export.path, export.client) for export in found] == [(path, WORKER)]


@pytest.mark.parametrize(
    ("type", "wanted"),
    [("ext4", None), ("xfs", None), ("zfs", None), ("btrfs", None), ("overlay", "overlay"), ("fuse.sshfs", "FUSE"), ("nfs4", "again"), ("tmpfs", "memory")],
)
def test_what_the_kernel_cannot_export_is_refused_with_the_reason(type, wanted):
    found = _nfs_plan.filesystem_refusal("spark-1", TREE, Mount("/", type, "none", (), "0:1"))
    assert (found is None) if wanted is None else (found.id == "sync.nfs_filesystem" and wanted in found.found)


# As Debian 13 printed it, with names of ours.
TABLE = f"""\
{TREE}
\t\t{WORKER}(sync,wdelay,hide,no_subtree_check,fsid={_nfs_plan.fsid(TREE)},sec=sys,ro,secure,root_squash,no_all_squash)
/srv/home     \t198.51.100.0/24(sync,wdelay,hide,no_subtree_check,sec=sys,rw,secure,root_squash,no_all_squash)
"""


def test_the_table_of_the_kernel_is_read_with_long_paths_on_lines_of_their_own():
    found = _nfs_plan.parse_exports(TABLE)
    assert [(export.path, export.client) for export in found] == [(TREE, WORKER), ("/srv/home", "198.51.100.0/24")]
    assert _nfs_plan.readback_problems(_nfs_plan.wanted_exports([TREE], [WORKER]), found) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("ro,secure", "rw,secure"), "has rw"),
        (("root_squash,no_all", "no_root_squash,no_all"), "no_root_squash"),
        ((f"\t\t{WORKER}(", "\t\t<world>("), "given to *"),
        ((f"\t\t{WORKER}(", "\t\t198.51.100.13("), f"not given to {WORKER}"),
        ((f"fsid={_nfs_plan.fsid(TREE)}", "fsid=0"), "lacks fsid"),
        ((TABLE, ""), "not given"),
    ],
)
def test_the_table_is_compared_with_what_was_asked_for(change, words):
    found = _nfs_plan.parse_exports(TABLE.replace(*change))
    assert words in "; ".join(_nfs_plan.readback_problems(_nfs_plan.wanted_exports([TREE], [WORKER]), found))


def test_an_export_of_others_that_holds_a_tree_is_refused_and_others_are_not():
    """The whole cache root with its token, as upstream gives it away."""
    wanted = _nfs_plan.wanted_exports([TREE], [WORKER])
    wide = Export("/var/lib/sparkops", "*", frozenset({"ro", "no_root_squash"}))
    beside = Export("/var/lib/sparkops/weights-of-others", "*", frozenset({"ro"}))
    same = Export(TREE, "198.51.100.99", frozenset({"ro"}))
    found = _nfs_plan.wide_refusals("spark-1", wanted, [wide, beside, same, *wanted])
    assert [(item.id, item.thing) for item in found] == [("sync.nfs_wide", "export /var/lib/sparkops"), ("sync.nfs_wide", f"export {TREE}")]


def test_what_our_file_no_longer_names_is_taken_away():
    before = _nfs_plan.wanted_exports([TREE, OTHER], [WORKER])
    assert [export.path for export in _nfs_plan.stale_exports(before, _nfs_plan.wanted_exports([TREE], [WORKER]))] == [OTHER]


# --- the client ------------------------------------------------------------------------------------------------

WANTED = Wanted(TREE, HEAD, TREE)


def test_the_options_are_those_of_the_documents():
    words = _nfs_plan.mount_options().split(",")
    assert {"nfsvers=4.2", "ro", "nconnect=8", "rsize=1048576", "wsize=1048576", "hard", "timeo=600"} <= set(words)
    assert "soft" not in words and _nfs_plan.BOOT_MARK not in words
    # Without "bg": it tries again only what mount.nfs takes for passing, and an address that is not there yet is none of that.
    assert set(_nfs_plan.fstab_options().split(",")) - set(words) == {"nofail", "_netdev", "x-sparkops"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("", ""), ""),
        (("nconnect=8,", ""), "nconnect not set, wanted 8"),
        (("nconnect=8", "nconnect=4"), "nconnect 4, wanted 8"),
        (("vers=4.2", "vers=4.1"), "vers 4.1"),
        (("hard,", "soft,"), "hard not set"),
        ((f"nfs4 {HEAD}:", "nfs4 198.51.100.99:"), "198.51.100.99"),
        (("addr=198.51.100.11", "addr=198.51.100.99"), "server 198.51.100.99"),
        (("ro,nosuid", "rw,nosuid"), "ro not set"),
        # The server agrees to less; that is no reason to mount again and again.
        (("rsize=1048576,wsize=1048576", "rsize=524288,wsize=524288"), ""),
    ],
)
def test_a_mount_with_other_options_is_noticed(change, words):
    text = LIVE.replace(*change) if change[0] else LIVE
    if change[0].startswith("ro"):
        text = text.replace(" ro,vers", " rw,vers")
    found = "; ".join(_nfs_plan.differences(mount(text), WANTED))
    assert words in found if words else found == ""


def test_connections_that_another_mount_decides_are_not_asked_for_again():
    other = mount(LIVE.replace(TREE, "/mnt/other").replace("nconnect=8,", ""))
    assert _nfs_plan.differences(mount(LIVE.replace("nconnect=8,", "")), WANTED, [other]) == []


CONTAINER = User(4711, "python3", "0123456789ab")


@pytest.mark.parametrize(
    ("present", "state", "users", "recover", "action"),
    [
        (None, "", [], False, "mount"),
        (LIVE, "live", [], False, "keep"),
        (LIVE, "live", [CONTAINER], False, "keep"),
        (LIVE.replace("nconnect=8", "nconnect=1"), "live", [], False, "remount"),
        (LIVE.replace("nconnect=8", "nconnect=1"), "live", [CONTAINER], False, "refuse_used"),
        (LIVE.replace(f"nfs4 {HEAD}:", "nfs4 198.51.100.99:"), "dead", [], False, "remount"),
        (LIVE, "stale", [], False, "refuse_stale"),
        (LIVE, "stale", [], True, "remount"),
        (LIVE, "stale", [CONTAINER], True, "refuse_used"),
        (LIVE, "dead", [CONTAINER], True, "refuse_used"),
        (f"40 29 254:1 / {TREE} rw - ext4 /dev/vdb rw\n", "", [], False, "refuse_foreign"),
    ],
)
def test_a_mount_is_made_anew_only_when_nobody_uses_it(present, state, users, recover, action):
    step = _nfs_plan.plan_mount(WANTED, mount(present) if present else None, state, users, recover=recover)
    assert step.action == action
    assert not users or action == "keep" or "container 0123456789ab" in step.reason
