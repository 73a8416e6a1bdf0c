# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Lets ``python -m sparkvm`` run the command line."""

from __future__ import annotations

import sys

from sparkvm.cli import main

sys.exit(main())
