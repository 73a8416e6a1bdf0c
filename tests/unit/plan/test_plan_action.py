# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The planner inside of Ansible: real inventories, templates, vaults, limits and extra variables."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import typing as t

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager

from ansible_collections.sparkops.inference.plugins.module_utils._plan import plan
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, format_refusals
from ansible_collections.sparkops.inference.plugins.plugin_utils import _inventory_values

INVENTORY: dict[str, t.Any] = {
    "sparks": {
        "hosts": {
            "spark-1": {"ansible_host": "192.0.2.21", "fabric_address": "198.51.100.11"},
            "spark-2": {"ansible_host": "192.0.2.22", "fabric_address": "198.51.100.12"},
            "spark-3": {"ansible_host": "192.0.2.23"},
        },
        "vars": {"serve_nodes": ["spark-1", "spark-2"], "serve_profile": "lab_tiny"},
    }
}


def changed(**values: t.Any) -> dict[str, t.Any]:
    inventory = json.loads(json.dumps(INVENTORY))
    inventory["sparks"]["vars"].update(values)
    return inventory


class Asked:
    """The answer to one host of an inventory, with Ansible's own variables but without a run."""

    def __init__(
        self, directory: pathlib.Path, inventory: dict[str, t.Any], host: str, extra: str, play: dict[str, t.Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = directory / "inventory.yml"
        path.write_text(yaml.safe_dump(inventory, allow_unicode=True), encoding="utf-8")
        loader = DataLoader()
        loader.set_basedir(str(directory))
        manager = InventoryManager(loader=loader, sources=[str(path)])
        variables = VariableManager(loader=loader, inventory=manager)
        HostVars(inventory=manager, variable_manager=variables, loader=loader)
        variables._extra_vars = loader.load(extra) or {}
        monkeypatch.setattr(_inventory_values, "load_extra_vars", lambda _loader: variables._extra_vars)
        task_vars = {**variables.get_vars(host=manager.get_host(host)), **play, "ansible_inventory_sources": [str(path)]}
        # Ansible lets the command line win over a play.
        task_vars.update(variables._extra_vars)
        self.plan, self.refusals = plan(_inventory_values.request(task_vars, loader, Templar(loader=loader, variables=task_vars).template))

    @property
    def found(self) -> dict[str, t.Any]:
        assert self.plan is not None, format_refusals(self.refusals)
        return self.plan

    @property
    def refused(self) -> list[Refusal]:
        assert self.plan is None
        return self.refusals


Ask = t.Callable[..., Asked]


@pytest.fixture(name="ask")
def fixture_ask(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    def ask(inventory: dict[str, t.Any], host: str = "spark-1", extra: str = "{}", **play: t.Any) -> Asked:
        return Asked(tmp_path, inventory, host, extra, play, monkeypatch)

    return ask


def test_the_same_plan_everywhere(ask: Ask) -> None:
    one, two, outside = (ask(INVENTORY, host).found for host in ("spark-1", "spark-2", "spark-3"))
    assert one == two == outside and one["nodes"] == ["spark-1", "spark-2"]


def test_origins_and_texts_of_the_command_line(ask: Ask) -> None:
    extra = '{"serve_boot": "false", "serve_port": "9000", "serve_max_num_seqs": "", "serve_nodes": "spark-1,spark-2"}'
    found = ask(changed(serve_max_model_len="{{ 100 + 28 }}", serve_boot=True), extra=extra, serve_stop_grace=7).found
    assert found["settings"]["serve_boot"] is False and found["api"]["port"] == 9000
    assert found["settings"]["serve_max_model_len"] == 128 and found["settings"]["serve_max_num_seqs"] == 2
    assert found["settings"]["serve_stop_grace"] == 7
    wanted = {
        "serve_boot": "extra vars",
        "serve_max_model_len": "inventory",
        "serve_stop_grace": "play vars",
        "serve_max_num_seqs": "profile",
        "serve_bind": "default",
    }
    assert {name: found["origins"][name] for name in wanted} == wanted


AWKWARD = ["two words", "it's", 'a "quote"', "$HOME", "%d", "{{ not a template }}", "{% raw %}", "naïve ü 漢", ""]


def test_awkward_texts_survive_all_layers(ask: Ask) -> None:
    """As a survey brings them: texts whose braces are no template."""
    extra = (
        yaml.safe_dump({"serve_extra_arguments": AWKWARD}, allow_unicode=True)
        .replace("'{{ not", "!unsafe '{{ not")
        .replace("'{% raw", "!unsafe '{% raw")
    )
    assert ask(INVENTORY, extra=extra).found["settings"]["serve_extra_arguments"] == AWKWARD


def test_everything_wrong_at_once(ask: Ask) -> None:
    inventory = changed(
        serve_profile="lab_tinny", serve_port="1e3", serve_max_model_len="{{ nowhere }}", serve_nodes=["spark-1", "spark-2", "spark-9"]
    )
    text = format_refusals(ask(inventory).refused)
    for words in (
        "4 problems, nothing was changed",
        "did you mean lab_tiny?",
        "serve_port",
        "'nowhere' is undefined",
        "spark-9",
        "[settings.template]",
    ):
        assert words in text, words


def test_a_broken_template_of_one_host_names_the_host(ask: Ask) -> None:
    inventory = changed()
    inventory["sparks"]["hosts"]["spark-2"]["weights_root"] = "{{ nowhere }}"
    assert [(refusal.id, refusal.node) for refusal in ask(inventory).refused] == [("settings.template", "spark-2")]


def test_two_names_for_one_machine(ask: Ask) -> None:
    inventory = changed()
    inventory["sparks"]["hosts"]["spark-2"]["ansible_host"] = "192.0.2.21"
    assert [refusal.id for refusal in ask(inventory).refused] == ["nodes.same_machine"]
    # Another port is another machine, as behind a forwarding; and a container connection has no address at all.
    inventory["sparks"]["hosts"]["spark-2"]["ansible_port"] = 2222
    assert ask(inventory).found
    inventory["sparks"]["vars"]["ansible_connection"] = "community.docker.docker"
    del inventory["sparks"]["hosts"]["spark-2"]["ansible_port"]
    assert ask(inventory).found


def test_the_environment_of_the_controller_has_no_effect(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_MODEL_LEN": "7", "HF_HOME": "/x", "serve_max_model_len": "7", "PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    found = ask(INVENTORY).found
    assert found["settings"]["serve_max_model_len"] == 256 and found["api"]["port"] == 8888


def test_a_profile_beside_the_inventory(ask: Ask, tmp_path: pathlib.Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yml").write_text(
        "{format: 1, description: x, extends: lab_tiny, options: {serve_max_num_seqs: {default: 7}}}", encoding="utf-8"
    )
    (tmp_path / "chat.jinja").write_text("hello", encoding="utf-8")
    found = ask(changed(serve_profile="mine", serve_chat_template_file="chat.jinja")).found
    assert found["settings"]["serve_max_num_seqs"] == 7
    (file,) = found["files"]
    assert file["source"] == str(tmp_path / "chat.jinja") and file["size"] == 5
    assert [refusal.id for refusal in ask(changed(serve_chat_template_file="gone.jinja")).refused] == ["settings.file"]


def test_plain_values_are_plain() -> None:
    class Text(str):
        pass

    value = _inventory_values.plain({Text("a"): [Text("b"), (1, True, None, 2.5)], "c": {"d": Text("e")}})
    assert value == {"a": ["b", [1, True, None, 2.5]], "c": {"d": "e"}}
    assert not any(isinstance(item, Text) for item in [*value, value["a"][0], value["c"]["d"]])


# -- whole runs ------------------------------------------------------------------------------------------------------


def playbook(directory: pathlib.Path, inventory: dict[str, t.Any], role: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of one role on all hosts, at whose addresses nobody listens."""
    (directory / "inventory.yml").write_text(yaml.safe_dump(inventory, allow_unicode=True), encoding="utf-8")
    (directory / "ansible.cfg").write_text("", encoding="utf-8")
    tasks = [{"ansible.builtin.debug": {"msg": "rank={{ spark_rank }} of {{ spark_plan.ranks }}, key {{ spark_plan.api.key }}"}}]
    play = [{"hosts": "sparks", "gather_facts": False, "roles": [f"sparkops.inference.{role}"], "tasks": tasks}]
    (directory / "play.yml").write_text(yaml.safe_dump(play), encoding="utf-8")
    # The directory in which this very collection is found.
    collections = str(pathlib.Path(_inventory_values.__file__).absolute()).split("/ansible_collections/", maxsplit=1)[0]
    own = {
        "ANSIBLE_HOME": str(directory / "home"),
        "ANSIBLE_CONFIG": str(directory / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": collections,
        "ANSIBLE_NOCOLOR": "1",
    }
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "inventory.yml", "play.yml", *arguments]
    return subprocess.run(command, cwd=directory, env={**os.environ, **own}, capture_output=True, text=True, check=False)


def test_a_limit_hides_no_host_and_a_secret_is_never_printed(tmp_path: pathlib.Path) -> None:
    run = playbook(tmp_path, changed(serve_api_key="hunter2-hunter2", serve_prot=1), "plan", "--limit", "spark-2,spark-3", "-vvv")
    output = " ".join((run.stdout + run.stderr).split())
    assert run.returncode == 0, output
    assert "rank=1 of 2, key given" in output and "rank=-1 of 2" in output and "rank=0" not in output
    assert "serve_prot has no effect with profile lab_tiny (did you mean serve_port?)" in output
    assert "hunter2" not in output


def test_render_reaches_no_node_and_is_idempotent(tmp_path: pathlib.Path) -> None:
    first = playbook(tmp_path, INVENTORY, "render")
    assert first.returncode == 0, first.stdout + first.stderr
    names = ["plan.json", *(f"rank{rank}{suffix}" for rank in (0, 1) for suffix in (".docker-run.txt", ".entry.json", ".json", ".service"))]
    assert sorted(path.name for path in (tmp_path / "rendered" / "lab_tiny").iterdir()) == sorted(names)
    text = (tmp_path / "rendered" / "lab_tiny" / "rank1.docker-run.txt").read_text(encoding="utf-8")
    assert text.startswith("docker run") and "--headless" in text
    assert "changed=0" in playbook(tmp_path, INVENTORY, "render", "--check").stdout


def test_render_writes_units_and_netplan_and_takes_away_what_the_plan_no_longer_has(tmp_path: pathlib.Path) -> None:
    inventory = changed(fabric_configure=True, fabric_rail_addresses={"enp1s0f1np1": ["198.51.100.11/24"]})
    inventory["sparks"]["hosts"]["spark-2"].update(
        fabric_rail_addresses={"enp1s0f1np1": ["198.51.100.12/24"], "enP2p1s0f1np1": ["203.0.113.12/24"]}, ansible_user="bob")
    folder = tmp_path / "rendered" / "lab_tiny"
    folder.mkdir(parents=True)
    (folder / "rank2.json").write_text("{}", encoding="utf-8")
    (folder / "notes.md").write_text("mine", encoding="utf-8")
    predicted = playbook(tmp_path, inventory, "render", "--check", "--limit", "spark-1")
    assert "changed=1" in predicted.stdout and (folder / "rank2.json").exists() and not (folder / "plan.json").exists(), predicted.stdout
    done = playbook(tmp_path, inventory, "render", "--limit", "spark-1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "rank2.json").exists() and (folder / "notes.md").exists()
    unit = (folder / "rank1.service").read_text(encoding="utf-8")
    assert "User=bob\n" in unit and "ExecStart=/usr/bin/python3 /usr/local/lib/sparkops/rank_service.py run /var/lib/sparkops/%i\n" in unit
    netplan = yaml.safe_load((folder / "rank1.netplan.yaml").read_text(encoding="utf-8"))["network"]["ethernets"]
    assert {name: entry["addresses"] for name, entry in netplan.items()} == {"enp1s0f1np1": ["198.51.100.12/24"], "enP2p1s0f1np1": ["203.0.113.12/24"]}
    assert all(entry["mtu"] == 9000 and entry["link-local"] == [] for entry in netplan.values())
    # What only the node knows is said to be known later, and no file is made up; the stale one goes.
    later = playbook(tmp_path, changed(fabric_configure=True), "render")
    assert later.returncode == 0 and "netplan of spark-1, spark-2: known after fabric" in later.stdout, later.stdout
    assert not (folder / "rank1.netplan.yaml").exists()
