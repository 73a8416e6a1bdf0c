# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The download as a user runs it: a virgin node, lost connections, kills, and a node that may not use the network."""

from __future__ import annotations

import os
import shutil

import pytest
from ansible_collections.sparkops.inference.plugins.plugin_utils import _wheels
from conftest import on, play
from weights_node import DEPLOYMENT, NODE, REPOSITORY, SECOND, SIZES, TOTAL, TREE, UNIT, forget, listed, main_pid, variables, weights, whole

# Nothing that a node sends to open a connection leaves it, and each try counts; the two rules come first.
RULES = ("! -o lo -p tcp --syn -j REJECT", "! -o lo -p udp -j REJECT")
BLOCK = "; ".join(f"iptables -I OUTPUT {rule}" for rule in RULES)
UNBLOCK = "; ".join(f"iptables -D OUTPUT {rule}" for rule in RULES)
TRIES = "iptables -nvxL OUTPUT | awk 'NR == 3 || NR == 4 {tries += $1} END {print tries + 0}'"


@pytest.fixture(name="node", scope="module", autouse=True)
def fixture_node():
    done = play("bootstrap", variables=variables())
    assert done.code == 0, done.text[-3000:]


@pytest.fixture(autouse=True)
def empty(hub):
    forget()
    yield
    forget()


def changed(done) -> int:
    return done.changed[NODE]


def test_a_virgin_node_gets_library_and_files_without_any_package_index(hub, tmp_path):
    """The controller may not ask an index either: it has a folder of wheels."""
    python = tuple(int(part) for part in on(NODE, "python3 -c 'import sys; print(*sys.version_info[:2])'").split())
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    cache = os.path.expanduser(f"~/.cache/sparkops-inference/wheels/{python[0]}.{python[1]}-x86_64")
    for path in _wheels.wheels(None, cache, python, "x86_64"):
        shutil.copy(path, wheels)
    # Sockets of ssh have short names only.
    sockets = os.path.expanduser("~/.ansible/cp")
    offline = {"HOME": str(tmp_path), "ANSIBLE_SSH_CONTROL_PATH_DIR": sockets, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "weights_hub_wheels": str(wheels)}
    forget("/var/lib/sparkops/venv-hub", f"/var/lib/sparkops/{DEPLOYMENT}")

    predicted = weights("--check", **offline).end()
    assert predicted.code == 0 and changed(predicted) == 1, predicted.text[-3000:]
    assert hub.counters(REPOSITORY) == {} and on(NODE, "ls -d /var/lib/sparkops/venv-hub /var/lib/sparkops/weights 2>/dev/null || true") == ""

    (lost,) = wheels.glob("filelock-*")
    lost.rename(tmp_path / lost.name)
    refused = weights(**offline).end()
    assert refused.code != 0 and "weights.wheels" in refused.text and "filelock" in refused.text and hub.counters(REPOSITORY) == {}

    (tmp_path / lost.name).rename(lost)
    done = weights(**offline).end()
    assert done.code == 0 and changed(done) == 1 and whole(), done.text[-3000:]
    assert "public domain" in done.text and "to download into" in done.text


def test_a_complete_node_needs_no_network_not_even_the_hub(hub):
    assert weights().end().code == 0
    hub.quiet()
    on(NODE, BLOCK)
    try:
        for arguments in (("--check",), (), ("--tags", "verify")):
            done = weights(*arguments).end()
            assert done.code == 0 and changed(done) == 0, done.text[-3000:]
        # A lost manifest: all is hashed again, but the list of the hub is wanted, and the try is seen.
        assert int(on(NODE, TRIES)) == 0 and hub.counters(REPOSITORY) == {}
        on(NODE, f"rm {TREE}.manifest.json")
        refused = weights().end()
        assert refused.code != 0 and "weights.hub_unreachable" in refused.text and int(on(NODE, TRIES)) > 0
    finally:
        on(NODE, UNBLOCK)
    done = weights().end()
    assert done.code == 0 and hub.served(f"{REPOSITORY}/model-") == 0


def test_a_complete_cache_is_adopted_without_the_network(hub):
    """The hub's own layout, with a newer commit as main. Hard links of the real files; the cache stays as it is."""
    assert weights().end().code == 0
    commit = TREE.rsplit("/", 1)[1]
    cache = "/home/carol/.cache/huggingface/hub/models--sparklab--bulk"
    script = f"""
        set -e
        mkdir -p {cache}/blobs {cache}/refs {cache}/snapshots/{commit}
        printf {'f' * 40} >{cache}/refs/main
        cd {TREE}
        for name in *; do
            blob=$(sha256sum "$name" | cut -d' ' -f1)
            mv "$name" {cache}/blobs/$blob
            ln -s ../../blobs/$blob {cache}/snapshots/{commit}/$name
        done
        chown -R carol: /home/carol/.cache
        find {cache} | sort | sha256sum
    """
    before = on(NODE, script)
    try:
        forget("/var/lib/sparkops/venv-hub")
        hub.quiet()
        on(NODE, BLOCK)
        try:
            done = weights().end()
            assert done.code == 0 and changed(done) == 1 and whole(), done.text[-3000:]
            assert int(on(NODE, TRIES)) == 0 and hub.counters(REPOSITORY) == {}
        finally:
            on(NODE, UNBLOCK)
        assert on(NODE, f"find {TREE} -type f -links 2 | wc -l").strip() == str(len(SIZES))
        assert on(NODE, f"find {cache} | sort | sha256sum") == before
        # A file of another account can't be linked: its path and owner are named.
        forget()
        on(NODE, f"chown root: {cache}/blobs/*")
        refused = weights(weights_download="never").end()
        assert refused.code != 0 and "weights.adopt_owner" in refused.text and "owned by uid 0" in refused.text, refused.text[-3000:]
    finally:
        on(NODE, f"rm -rf {cache}")


def test_verify_names_the_flipped_byte_and_the_next_run_fetches_one_file(hub):
    assert weights().end().code == 0
    hub.quiet()
    flip = f"import os; p='{TREE}/{SECOND}'; s=os.stat(p); f=open(p,'r+b'); f.seek(9**7); b=f.read(1); f.seek(9**7); f.write(bytes([b[0]^1])); f.close()"
    on(NODE, f'python3 -c "{flip}; os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))"')
    assert changed(weights().end()) == 0
    refused = weights("--tags", "verify").end()
    assert refused.code != 0 and "weights.damaged" in refused.text and SECOND in refused.text and hub.counters(REPOSITORY) == {}
    done = weights().end()
    assert done.code == 0 and whole() and hub.served(f"{REPOSITORY}/model-") == hub.served(SECOND) == SIZES[SECOND]


def test_two_kills_cost_at_most_a_tenth(hub):
    """Kill -9 of the downloader in the middle of the shards, twice; the third run finishes."""
    hub.fault("slow", path="sparklab/bulk/*.safetensors", rate=6_000_000)
    for share in (0.25, 0.6):
        going = weights()
        hub.until(share * TOTAL, REPOSITORY)
        on(NODE, f"systemctl kill --signal=KILL {UNIT}")
        killed = going.end()
        assert killed.code != 0 and "weights.job_died" in killed.text
    hub.lab("faults", "clear")
    done = weights().end()
    assert done.code == 0 and whole(), done.text[-3000:]
    print(f"served over three runs: {hub.served(REPOSITORY) / TOTAL:.3f} of the total")
    assert hub.served(REPOSITORY) <= 1.1 * TOTAL


def test_lost_connections_and_a_dead_controller_cost_nothing(hub):
    hub.fault("slow", path="sparklab/bulk/*.safetensors", rate=1_000_000)
    going = weights()
    hub.until(0.1 * TOTAL, REPOSITORY)
    going.until("MiB/s")
    pid = main_pid()
    # Every session of the account ends on the node; Ansible comes again and sees the same work.
    on(NODE, "for pid in $(pgrep -u carol sshd); do kill -9 $pid; done", check=False)
    hub.until(0.25 * TOTAL, REPOSITORY)
    assert going.process.poll() is None and main_pid() == pid != 0
    # The controller dies; another run, as of somebody else, attaches.
    going.kill()
    hub.until(0.4 * TOTAL, REPOSITORY)
    attached = weights()
    attached.until("MiB/s")
    hub.lab("faults", "clear")
    assert main_pid() in (pid, 0)
    done = attached.end()
    assert done.code == 0 and changed(done) == 1 and whole(), done.text[-3000:]
    assert hub.served(REPOSITORY) <= 1.02 * TOTAL


def test_a_cancel_stops_the_work_and_keeps_what_has_come(hub):
    hub.fault("slow", path="sparklab/bulk/*.safetensors", rate=4_000_000)
    going = weights()
    hub.until(0.3 * TOTAL, REPOSITORY)
    cancelled = play("cancel", variables=variables())
    assert cancelled.code == 0 and changed(cancelled) == 1, cancelled.text[-3000:]
    assert on(NODE, f"systemctl is-active {UNIT}", check=False).strip() == "inactive"
    stopped = going.end()
    assert stopped.code != 0 and "weights.cancelled" in stopped.text
    assert listed() == {} or not whole()
    hub.lab("faults", "clear")
    assert weights().end().code == 0 and whole()
    assert hub.served(REPOSITORY) <= 1.1 * TOTAL
