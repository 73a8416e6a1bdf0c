# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filter of role engram_pack: what a rank was given and what its engine has said in, one sentence out."""

from __future__ import annotations

import typing as t


def engram_in_use(given: t.Mapping[str, t.Any], found: t.Mapping[str, t.Any], rank: int | str) -> str:
    """Say that an engine reads its row files, or why it reads the checkpoint.

    ``given`` is the fact spark_engram of before the start, ``found`` the answer of module engram_info after it.
    """
    layers = ", ".join(found["engram"]["layers"])
    if found["engine"]["packed"]:
        return f"Engram rows of rank {rank}: packed=True for layers {layers}"
    # What was not given cannot be in use; the engine's own lines only repeat it.
    reasons = [given["reason"]] if not given["valid"] else found["engine"]["problems"] or [found["engram"]["reason"]]
    return f"Engram rows of rank {rank} are not in use, it reads the checkpoint, more slowly: {'; '.join(reasons)}"


class FilterModule:
    """Registers the filter."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"engram_in_use": engram_in_use}
