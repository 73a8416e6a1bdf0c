# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of role fabric."""

from __future__ import annotations

import typing as t


def rail_addresses(fabric: t.Mapping[str, t.Any]) -> dict[str, list[str]]:
    """Interfaces of the RDMA rails, each with its addresses and their prefix lengths.

    A plain rail is left out: its interface may be the LAN's, with DHCP and the default route.
    """
    found: dict[str, list[str]] = {}
    for rail in (rail for rail in fabric.get("rails", []) if rail["hca"]):
        address = f"{rail['address']}/{rail['prefix']}"
        if address not in found.setdefault(rail["interface"], []):
            found[rail["interface"]].append(address)
    return found


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"rail_addresses": rail_addresses}
