# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Programs by a table: a call that is not in it fails the test, and so does one that was not made."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkops.inference.plugins.module_utils import _zfs_command


class Commands:
    """``rows``: (argument vector, code, output, error), in the order in which they are called. ``...`` in a vector stands for any rest."""

    def __init__(self, *rows: tuple) -> None:
        self.rows = [(row[0].split() if isinstance(row[0], str) else list(row[0]), *row[1:]) for row in rows]
        self.unexpected: list[list[str]] = []

    def run(self, argv: t.Sequence[str], **_more: t.Any) -> tuple[int, str, str]:
        words = [word.rpartition("/")[2] if number == 0 else word for number, word in enumerate(argv)]
        wanted = self.rows[0][0] if self.rows else []
        if words != wanted and not (wanted[-1:] == ["..."] and words[: len(wanted) - 1] == wanted[:-1]):
            self.unexpected.append(list(argv))
            raise AssertionError(f"found {words}, wanted {wanted}")
        _argv, code, *texts = self.rows.pop(0)
        return code, texts[0] if texts else "", texts[1] if len(texts) > 1 else ""


def call(monkeypatch, capsys, program, commands: Commands, check: bool = False, absent: t.Container[str] = (), **arguments: t.Any) -> dict[str, t.Any]:
    """Run a module's main with real arguments; only the programs are from the table. ``absent`` are those that are not installed."""

    def find(module, name, required=False, opt_dirs=None):
        if name not in absent:
            return f"/usr/sbin/{name}"
        return module.fail_json(msg=f"{name} is not installed") if required else None

    monkeypatch.setattr(AnsibleModule, "run_command", lambda _self, argv, **more: commands.run(argv, **more))
    monkeypatch.setattr(AnsibleModule, "get_bin_path", find)
    monkeypatch.setattr(_zfs_command, "answer", commands.run)
    with patch_module_args({**arguments, "_ansible_check_mode": check, "_ansible_diff": True}), pytest.raises(SystemExit):
        program.main()
    result = json.loads(capsys.readouterr().out)
    assert not commands.unexpected and not commands.rows, (commands.unexpected, commands.rows, result)
    return result


def ids(result: dict[str, t.Any]) -> list[str]:
    return [item["id"] for item in result.get("refusals", [])]
