# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import engram_source as oracle
import pytest


@pytest.fixture(name="source")
def fixture_source(tmp_path):
    oracle.vector_checkpoint(tmp_path / "source")
    return tmp_path / "source"
