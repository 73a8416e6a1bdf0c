# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run a module in this process and catch its answer."""

from __future__ import annotations

import contextlib
import io
import json
import typing as t

import pytest
from ansible.module_utils.testing import patch_module_args


def call(module: t.Any, check: bool = False, **arguments: t.Any) -> dict[str, t.Any]:
    """What the module answers, with its return code as C(rc)."""
    output = io.StringIO()
    given = {name: value for name, value in arguments.items() if value is not None}
    with patch_module_args({**given, "_ansible_check_mode": check}), contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        module.main()
    answer = json.loads(output.getvalue().splitlines()[-1])
    return {**answer, "rc": ended.value.code}
