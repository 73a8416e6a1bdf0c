# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A newcomer's walk through README.md and docs/first-pair.md: every marked command, in order, in one shell, on virgin nodes of the lab.

What differs from a newcomer's own pair, all of it: pip and git have the sources here, galaxy is not asked (its two dependencies are in the ansible package),
the editor is a program that types what the documents tell to type, and the lab's ssh key, hub and model stand in for the newcomer's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests/docs"))

from blocks import BODY, Block, blocks  # noqa: E402

# Containers, or with SPARKOPS_WALK=vm the virtual machines.
if os.environ.get("SPARKOPS_WALK") == "vm":
    LAB, NETWORK, PULL = os.path.join(ROOT, "tests/vmlab/vmlab"), "198.18.1", "never"
    STATE = os.path.join(os.environ.get("SPARKVM_CACHE", "/var/cache/sparkops-vmlab"), "state")
else:
    LAB, NETWORK, PULL = os.path.join(ROOT, "tests/lab/lab"), "198.18.0", "missing"
    STATE = os.path.join(os.environ.get("SPARKLAB_CACHE", "/var/cache/sparkops-lab"), "state")
PATIENCE_SECONDS = 1800
PROFILE, MODEL = "deepseek_v41_flash_exl3", "DeepSeek-v4.1-Flash-EXL3"

EDITOR = f"""#!/usr/bin/env python3
import pathlib, sys
path = pathlib.Path(sys.argv[1])
text = path.read_text()
if path.name == "hosts":
    text = text.replace("192.0.2.21", "{NETWORK}.21").replace("192.0.2.22", "{NETWORK}.22")
    text = text.replace("198.51.100.11", "198.51.100.11 ansible_user=alice").replace("198.51.100.12", "198.51.100.12 ansible_user=bob")
else:
    for name in ("packages", "docker_group", "state_dir", "node_keys"):
        assert f"bootstrap_{{name}}: false" in text, name
        text = text.replace(f"bootstrap_{{name}}: false", f"bootstrap_{{name}}: true")
    assert "serve_profile: {PROFILE}" in text
    text = text.replace("serve_profile: {PROFILE}", "serve_profile: lab_tiny")
    # The lab's own: its key, its hub, and the engine that starts in a second.
    text += '''
ansible_ssh_private_key_file: {STATE}/ssh/id_ed25519
ansible_ssh_common_args: -F /dev/null -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile={STATE}/ssh/known_hosts
ansible_python_interpreter: /usr/bin/python3
weights_hub_endpoint: http://{NETWORK}.1:8900
image_reference: 198.18.0.1:5000/sparklab/stub:1
image_pull_policy: {PULL}
'''
path.write_text(text)
"""

KEPT = ("meta", "plugins", "roles", "playbooks", "MANIFEST.json", "FILES.json")
CUT_DOWN = (
    "find .collections/ansible_collections/sparkops/inference -mindepth 1 -maxdepth 1 "
    + " ".join(f"! -name {name}" for name in KEPT)
    + " -exec rm -rf {} +"
)
# The command of a document, and what is run in its place.
INSTEAD = {
    "pip install ansible": "ansible --version",
    "git clone https://github.com/sparkops/inference && cd inference": f"git clone --quiet {ROOT} inference && cd inference",
    # And what an archive may be cut down to: nothing else of the collection is needed.
    "ansible-galaxy collection install .": f"ansible-galaxy collection install --offline . && {CUT_DOWN}",
}


def commands(block: Block) -> list[str]:
    return [line for line in (re.sub(r"\s+#.*", "", line) for line in block.text.splitlines()) if line]


def walk(page: str) -> list[str]:
    return [command for block in blocks(page) if block.what == "walk" for command in commands(block)]


class Shell:
    """One bash for a whole document: directories stay, and each command's words and exit code are seen."""

    def __init__(self, folder: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "--norc"], cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, command: str) -> tuple[int, str]:
        self.process.stdin.write(f"{command} </dev/null\necho \"::ended $?\"\n")
        self.process.stdin.flush()
        said, begun = [], time.monotonic()
        patience = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        patience.start()
        try:
            for line in self.process.stdout:
                ended = re.match(r"(.*)::ended (\d+)$", line.rstrip("\n"))
                if ended:
                    print(f"{time.monotonic() - begun:6.1f} s  {command}")
                    return int(ended.group(2)), "".join([*said, ended.group(1)])
                said.append(line)
        finally:
            patience.cancel()
        raise AssertionError(f"the shell ended in {command!r}: {''.join(said)[-6000:]}")


@pytest.fixture(name="shell", scope="module")
def fixture_shell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer")
    editor = folder / "editor"
    editor.write_text(EDITOR, encoding="utf-8")
    editor.chmod(0o755)
    # A newcomer has neither this checkout's settings nor its link tree.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTHONPATH", "XDG_"))}
    environment.update(EDITOR=str(editor), HOME=str(folder), ANSIBLE_FORCE_COLOR="0")
    shell = Shell(str(folder), environment)
    yield shell
    shell.process.stdin.close()
    shell.process.wait(10)


def follow(shell: Shell, page: str) -> dict[str, str]:
    """Run a document; each command must succeed. What they said, by command."""
    said = {}
    for command in walk(page):
        code, text = shell.run(INSTEAD.get(command, command))
        assert code == 0, f"{page}: {command!r} ended with {code}:\n{text[-6000:]}"
        said[command] = text
    return said


def test_every_console_block_is_walked_or_said_to_be_by_hand():
    marked = [block for page in ("README.md", "docs/first-pair.md") for block in blocks(page) if block.language in ("console", "bash")]
    unmarked = [block.text for block in marked if not block.what]
    # The two commands of the first part are what runs this test.
    assert unmarked == [block.text for block in marked if "make demo" in block.text]
    assert {block.what for block in marked if block.what} == {"walk", "by hand", "on the head"}
    assert set(INSTEAD) < set(walk("README.md"))


def test_the_readme_ends_in_a_serving_group(shell):
    said = follow(shell, "README.md")
    last = said["ansible-playbook -i my-sparks sparkops.inference.site"]
    assert "proof in" in last and f"endpoint http://{NETWORK}.21:8888/v1" in last and "/.local/state/sparkops/reports/lab_tiny/bringup-" in last
    assert "would change" in said["ansible-playbook -i my-sparks sparkops.inference.site --check --diff"] or "changed=" in said[
        "ansible-playbook -i my-sparks sparkops.inference.site --check --diff"
    ]


def test_the_first_pair_ends_in_an_answer(shell):
    # The inventory of the document before is in the way of the copy; a newcomer reads one of the two.
    assert shell.run("rm -r my-sparks")[0] == 0
    said = follow(shell, "docs/first-pair.md")
    assert "serve_profile" in said["ansible-playbook -i my-sparks sparkops.inference.settings -e settings_compare=false"]
    assert re.findall(r"changed=(\d+)", said["ansible-playbook -i my-sparks sparkops.inference.site"]) == ["0", "0"]
    answer = next(text for command, text in said.items() if "sparkops.inference.ask" in command)
    assert "The answer is four." in answer


def test_the_request_on_the_head_is_answered(shell):
    block = next(block for block in blocks("docs/first-pair.md") if block.what == "on the head")
    text = block.text.replace(PROFILE, "lab_tiny").replace(MODEL, "tiny")
    done = subprocess.run([LAB, "ssh", "spark-1", "bash -s"], input=text, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"].strip()
    assert json.loads(BODY.search(text).group(1))["model"] == "tiny"
    assert subprocess.run([LAB, "ssh", "spark-1", "stat -c %a ~/.sparkops-auth"], capture_output=True, text=True, check=True).stdout.strip() == "600"


def test_it_can_be_stopped_again(shell):
    code, text = shell.run("ansible-playbook -i my-sparks sparkops.inference.stop")
    assert code == 0, text[-3000:]
