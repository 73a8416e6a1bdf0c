# Copyright (c) 2026, sparkops.inference contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A test lab of DGX Spark stand-ins: containers that boot systemd, sshd and a Docker Engine of their own."""
