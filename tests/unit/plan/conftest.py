# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The golden files of the planner's tests."""

from __future__ import annotations

import json
import os
import pathlib
import typing as t

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def golden() -> t.Callable[[str, t.Any], None]:
    """Compares data with a golden file. UPDATE_GOLDEN=1 writes it anew, to be read before it is committed."""

    def compare(name: str, data: t.Any) -> None:
        path = HERE / "golden" / name
        text = json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert json.loads(path.read_text(encoding="utf-8")) == json.loads(text), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"

    return compare
