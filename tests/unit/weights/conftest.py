# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Fixtures. Our own code is imported when a test runs: a conftest is read before pytest-ansible is ready."""

from __future__ import annotations

import pytest


@pytest.fixture
def hub(tmp_path):
    from weights_lab import FakeHub

    (tmp_path / "hub").mkdir()
    fake = FakeHub(tmp_path / "hub")
    yield fake
    fake.close()


@pytest.fixture
def node(tmp_path, hub):
    from weights_lab import Node

    return Node(tmp_path / "node", hub.url)
