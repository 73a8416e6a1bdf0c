# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The last deployment of a node takes everything of ours with it."""

from __future__ import annotations

import subprocess

from conftest import LAB, STUB, on, play

VARIABLES = {
    "spark_hosts": "solo", "serve_deployment": "lab_gone", "image_reference": STUB, "serve_port": 8897, "serve_stop_grace": 5, "uninstall_weights": True,
}
LEFT = (
    "ls -d /var/lib/sparkops /usr/local/lib/sparkops /etc/systemd/system/sparkops* /etc/systemd/system/*.wants/sparkops* /run/sparkops/* 2>/dev/null;"
    " docker ps -aq; docker image ls -q; grep -l sparkops /home/*/.ssh/authorized_keys /data/home/*/.ssh/authorized_keys 2>/dev/null;"
    " systemctl list-units --all --plain --no-legend 'sparkops*'; true"
)


def test_after_uninstall_nothing_of_ours_is_left():
    subprocess.run([LAB, "preload", "stub", "spark-3"], check=True, capture_output=True, timeout=120)
    done = play("site", variables=VARIABLES)
    assert done.code == 0, done.text[-4000:]
    assert "/var/lib/sparkops" in on("spark-3", LEFT)
    preview = play("uninstall", "--check", variables=VARIABLES)
    assert preview.code == 0 and "would remove weights" in preview.text
    done = play("uninstall", variables=VARIABLES)
    assert done.code == 0, done.text[-4000:]
    assert on("spark-3", LEFT) == ""
    again = play("uninstall", variables=VARIABLES)
    assert again.code == 0, again.text[-3000:]
