# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Loss of power and reboots of real machines: the rank services bring the group back, or say why not, and no play runs."""

from __future__ import annotations

import time

import plays
import pytest
from conftest import MACHINES, lab, on, play, until

DEPLOYMENT, PORT = "lab_tiny", 8888
SECONDS = 300
WEIGHTS = "/srv/weights"


def completion() -> str:
    return plays.completion(on, DEPLOYMENT, PORT)


def running(machine: str) -> list[str]:
    return on(machine, "docker ps --format '{{.Names}}'", check=False).split()


def boots() -> list[str]:
    return [on(machine, "cat /proc/sys/kernel/random/boot_id").strip() for machine in MACHINES]


def starts() -> list[str]:
    return [on(machine, f"docker inspect --format '{{{{.State.StartedAt}}}}' {DEPLOYMENT}-rank{rank}").strip() for rank, machine in enumerate(MACHINES)]


def power(order: str) -> None:
    """Lose power, as a whole: nothing is flushed, and nobody is told."""
    head, worker = MACHINES
    lab("power-off", *{"head": [head], "worker": [worker]}.get(order, MACHINES))
    if order == "worker late":
        lab("power-on", head)
        time.sleep(60)
        lab("power-on", worker)
    else:
        lab("power-on", *{"head": [head], "worker": [worker]}.get(order, MACHINES))


@pytest.mark.parametrize("order", ["head", "worker", "both", "worker late"])
def test_after_a_loss_of_power_the_group_comes_back_by_itself(serving, order):
    on(MACHINES[0], f"rm -f /var/lib/sparkops/{DEPLOYMENT}/restarts.json")  # four losses of power within an hour are the test's own doing
    booted, begun = boots(), starts()
    power(order)
    back = time.monotonic()
    lost = {"head": [True, False], "worker": [False, True]}.get(order, [True, True])
    assert [before != now for before, now in zip(booted, boots())] == lost
    until("both ranks started again", lambda: all(now > before for before, now in zip(begun, starts())), SECONDS)
    until("a completion", lambda: completion() != "", SECONDS)
    took = time.monotonic() - back
    print(f"{order}: a completion {took:.0f} s after the last boot")
    assert took < SECONDS


def test_a_reboot_in_good_order_is_no_different(serving):
    begun = starts()
    lab("reboot", *MACHINES)
    back = time.monotonic()
    until("both ranks started again", lambda: all(now > before for before, now in zip(begun, starts())), SECONDS)
    until("a completion", lambda: completion() != "", SECONDS)
    print(f"a completion {time.monotonic() - back:.0f} s after the reboot of both")


def test_without_the_weights_disk_no_rank_runs_and_the_status_names_the_mount(serving):
    """The worker's weights are on a disk of their own, which is not there after a reboot."""
    worker = MACHINES[1]
    for machine in MACHINES:
        on(machine, f"mkdir -p {WEIGHTS}")
    on(worker, f"mkfs.ext4 -q -F /dev/vdd && echo '/dev/vdd {WEIGHTS} ext4 nofail 0 0' >> /etc/fstab && mount {WEIGHTS}")
    for machine in MACHINES:
        on(machine, f"chown --reference=/var/lib/sparkops {WEIGHTS}")
    settings = {"weights_root": WEIGHTS}
    for name in ("bootstrap", "weights", "sync", "serve"):
        done = play(name, variables=settings)
        assert done.code == 0, done.text[-5000:]
    assert completion()
    on(worker, "sed -i 's,^/dev/vdd,#&,' /etc/fstab")
    lab("reboot", worker)
    wanted = f"{WEIGHTS} is not mounted"
    for machine in MACHINES:
        until(f"{machine} names it", lambda: wanted in on(machine, f"systemctl status --no-pager sparkops-rank@{DEPLOYMENT}", check=False), SECONDS)
    time.sleep(20)
    assert running(MACHINES[0]) == running(worker) == []
    on(worker, f"sed -i 's,^#/dev/vdd,/dev/vdd,' /etc/fstab && systemctl daemon-reload && mount {WEIGHTS}")
    until("a completion", lambda: completion() != "", SECONDS)
