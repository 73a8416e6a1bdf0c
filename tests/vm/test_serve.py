# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A whole bring-up with the stand-in engine over real RoCE devices, and what its start makes of GID slots that move."""

from __future__ import annotations

import re

from conftest import ADDRESSES, HCAS, MACHINES, PINNED, RAILS, on, play
from test_fabric import usable


def told_index(rank):
    """The index that the entry script of a rank has found at its last start."""
    log = on(MACHINES[rank], f"docker logs lab_tiny-rank{rank} 2>&1")
    return int(re.findall(r"GID index (\d+) on", log)[-1])


def test_each_rank_pins_the_slot_that_its_own_table_has(serving):
    for rank, machine in enumerate(MACHINES):
        index = told_index(rank)
        assert all(index in usable(machine, rail) for rail in (0, 1))
        variables = on(machine, f"tr '\\0' '\\n' </proc/$(docker inspect --format '{{{{.State.Pid}}}}' lab_tiny-rank{rank})/environ")
        assert f"NCCL_IB_GID_INDEX={index}" in variables and f"NCCL_IB_HCA=={','.join(HCAS[machine])}" in variables
        assert f"NCCL_SOCKET_IFNAME=={RAILS[machine][0]}" in variables


def test_slots_that_move_between_two_starts_are_followed(serving):
    before = told_index(1)
    for rail, interface in enumerate(RAILS["spark-2"]):
        address = ADDRESSES["spark-2"][rail]
        # Another address takes the slot, and the own one comes back behind it, as after a link event.
        other = f"ip address add 192.0.2.{rail + 1}/32 dev {interface}"
        on("spark-2", f"ip address del {address} dev {interface}; {other}; ip address add {address} dev {interface}")
    now = [usable("spark-2", rail) for rail in (0, 1)]
    assert before not in now[0] and before not in now[1]
    done = play("restart", variables=PINNED)
    assert done.code == 0, done.text[-6000:]
    assert told_index(1) != before and all(told_index(1) in indexes for indexes in now)
