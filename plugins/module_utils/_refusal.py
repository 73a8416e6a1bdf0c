# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""One form for everything that stops a user: which node, what, found, wanted, next step."""

from __future__ import annotations

import dataclasses
import typing as t


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A reason not to go on.

    ``id`` is stable and listed in docs/troubleshooting.md. ``node`` is an inventory name, or empty when the
    whole group is meant.
    """

    id: str
    node: str
    thing: str
    found: str
    wanted: str
    next_step: str

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)

    @property
    def text(self) -> str:
        where = f"{self.node}: " if self.node else ""
        return f"{where}{self.thing}: found {self.found}; wanted {self.wanted}. Next: {self.next_step} [{self.id}]"


def format_refusals(refusals: t.Sequence[Refusal]) -> str:
    """All refusals of a run as one message, grouped by node in the order given."""
    if len(refusals) == 1:
        return refusals[0].text
    lines = [f"{len(refusals)} problems, nothing was changed:"]
    lines.extend(f"  {number}. {refusal.text}" for number, refusal in enumerate(refusals, start=1))
    return "\n".join(lines)


def fail(module: t.Any, refusals: t.Sequence[Refusal], **results: t.Any) -> t.NoReturn:
    """End a module (AnsibleModule) with these refusals, beside what it has found."""
    module.fail_json(msg=format_refusals(refusals), refusals=[refusal.as_dict() for refusal in refusals], **results)
