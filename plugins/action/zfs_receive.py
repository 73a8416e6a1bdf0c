# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Show the progress of a receive."""

from __future__ import annotations

from ansible_collections.sparkops.inference.plugins.plugin_utils._progress import LongWork


class ActionModule(LongWork):
    """The module of the same name, in slices."""

    module = "sparkops.inference.zfs_receive"
