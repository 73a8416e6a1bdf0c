# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Each job template's own fields, run by ansible-runner as AWX would, against the lab: what it returns, changes, and leaves as artefacts.

The engine is the stand-in: it starts in a second, and what a job says and leaves is the same.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import os
import re
import sys
import time
import typing as t

import pytest
import weights_node
from conftest import ROOT, STUB, fingerprint, inventory_with, on, running
from conftest import play as playbook
from plays import Playing

sys.path.insert(0, os.path.join(ROOT, "tests/unit/awx"))

from awx_data import data  # noqa: E402
from awx_runner import TEMPLATES, play, run  # noqa: E402

UNREACHABLE = os.path.join(ROOT, "tests/live/unreachable.yml")
NODES = ["spark-1", "spark-2"]
LEASE = "/var/lib/sparkops/lab_tiny/lease.json"
REPORT = {f"sparkops_{name}" for name in ("deployment", "profile", "model", "endpoint", "image", "image_digest", "revision", "verdict")}
STATUS = {"sparkops_status"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A job and what must come of it."""

    template: str
    answers: dict[str, str] = dataclasses.field(default_factory=dict)
    tags: str = ""
    limit: str = ""
    inventory: str = ""
    fails: bool = False
    artefacts: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        answers = (f"{name}={value}" for name, value in self.answers.items())
        words = [self.template, *answers, self.tags, self.limit, "unreachable" if self.inventory else ""]
        return " ".join(word for word in words if word)


def snapshot() -> dict[str, str]:
    """What tests/predict takes a node to be."""
    loader = importlib.machinery.SourceFileLoader("predict", os.path.join(ROOT, "tests/predict"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("predict", loader))
    loader.exec_module(module)
    return module.snapshot(NODES)


@pytest.fixture(name="inventory", scope="session")
def fixture_inventory(tmp_path_factory) -> str:
    """The lab's inventory with settings of the group beside it, as a project of AWX has them; the third node only downloads."""
    downloader = {name: value for name, value in weights_node.variables().items() if name != "spark_hosts"}
    groups = {"sparks": {"vars": {"image_reference": STUB}}, "solo": {"vars": downloader}}
    return inventory_with(tmp_path_factory.mktemp("inventory"), groups)


@pytest.fixture(name="serving", scope="session")
def fixture_serving(inventory) -> None:
    done = playbook("site", inventory=inventory)
    assert done.code == 0, done.text[-5000:]


@pytest.fixture(name="check")
def fixture_check(inventory) -> t.Callable[[Row], t.Any]:
    return lambda row, **more: check_job(row, inventory, **more)


def check_job(row: Row, inventory: str, **more: t.Any) -> t.Any:
    job = run(row.template, row.inventory or inventory, row.answers, tags=row.tags, limit=row.limit, **more)
    assert (job.code != 0) == row.fails, job.text[-4000:]
    assert not re.search("[\r\b\x1b]", job.text), "a terminal's tricks"
    assert set(job.artefacts) == row.artefacts
    for part in row.parts:
        assert part in job.text, job.text[-4000:]
    return job


def wrong(template: str, name: str, value: str) -> Row:
    return Row(template, {name: value}, fails=True, parts=(name, value, "settings.value"))


# State before: the pair serves as declared. No row changes anything.
SERVING = [
    Row("bring-up", artefacts=frozenset(REPORT), parts=("STAGES", "serve", "to go back")),
    Row("bring-up", {"weights_download": "never", "image_pull_policy": "never", "weight_sync_policy": ""}, artefacts=frozenset(REPORT)),
    Row("bring-up", tags="weights,sync"),
    wrong("bring-up", "image_pull_policy", "sometimes"),
    Row("bring-up", {"spark_hosts": "nobody"}, fails=True, parts=("nobody",)),
    Row("preflight"),
    Row("preflight", inventory=UNREACHABLE, fails=True, parts=("preflight.unreachable", "spark-2")),
    Row("doctor"),
    Row("doctor", {"spark_hosts": "nobody"}, fails=True),
    Row("settings", {"settings_compare": "False"}, parts=("settings_compare",)),
    Row("settings", parts=("nothing",)),
    wrong("settings", "settings_compare", "perhaps"),
    Row("logs", {"logs_of": "head", "logs_tail": "5"}),
    wrong("logs", "logs_tail", "1e3"),
    Row("stage", artefacts=frozenset(REPORT), parts=("staged",)),
    wrong("stage", "weights_download", "yes"),
    Row("image", {"image_ship_mode": "layers"}),
    wrong("image", "image_ship_mode", "pigeon"),
    Row("weights", {"weights_verify": "no"}, limit="spark-1"),
    wrong("weights", "weights_verify", "2"),
    Row("sync"),
    wrong("sync", "weight_sync_policy", "FORCE"),
    Row("pack", {"engram_rate_limit": "100 MiB"}),
    wrong("pack", "engram_rate_limit", "fast"),
    Row("prove", artefacts=frozenset(REPORT), parts=("proven", "answered in")),
    Row("history", parts=("last good",)),
    Row("history", {"spark_hosts": "nobody"}, fails=True),
    Row("collect", parts=("bundle: ",)),
    Row("collect", inventory=UNREACHABLE, fails=True, parts=("collect.unread", "spark-2")),
    wrong("rollback", "rollback_to", "yesterday"),
    wrong("stop", "serve_stop_grace", "-1"),
    Row("cancel"),
    Row("cancel", inventory=UNREACHABLE, fails=True, parts=("cancel.unreachable", "spark-2")),
]

# The same, but every byte of the nodes is compared.
LOOKING = [Row("status", artefacts=frozenset(STATUS), parts=("serving",)), Row("drift", artefacts=frozenset(REPORT))]
DRIFT_AWAY = Row("drift", inventory=UNREACHABLE, fails=True, parts=("spark-2",))
# State before: another job holds the lease.
LEASED = Row("restart", fails=True, parts=("lease.held", "awx@pod-7"))
# The rows that change something, each with the state that the one before left.
ROLLBACK = Row("rollback", artefacts=frozenset(REPORT), parts=("Returning lab_tiny to",))
RESTART = Row("restart", artefacts=frozenset(REPORT))
STOP = Row("stop", {"serve_stop_grace": "5"})
STOPPED = [
    Row("status", artefacts=frozenset(STATUS), fails=True, parts=("absent", "status.not_serving")),
    Row("prove", fails=True, parts=("absent", "prove.not_serving")),
]
STOPPED_DRIFT = Row("drift", artefacts=frozenset(REPORT), parts=("would change",))


def test_every_template_has_a_row_that_succeeds_and_one_that_fails():
    rows = [*SERVING, *LOOKING, DRIFT_AWAY, LEASED, RESTART, STOP, ROLLBACK, *STOPPED]
    for fails in (False, True):
        assert {row.template for row in rows if row.fails == fails} == set(TEMPLATES)


@pytest.mark.parametrize("row", SERVING, ids=str)
def test_a_job_on_a_serving_pair(check, serving, row):
    before = [fingerprint(node) for node in NODES]
    assert check(row).changed == set()
    assert before == [fingerprint(node) for node in NODES]


@pytest.mark.parametrize("row", LOOKING, ids=str)
def test_looking_leaves_every_node_as_it_was(check, serving, row):
    before = snapshot()
    assert check(row).changed == set()
    assert before == snapshot()


def test_drift_with_a_node_away_fails_and_leaves_every_node_as_it_was(check, serving):
    before = snapshot()
    check(DRIFT_AWAY)
    assert before == snapshot()


def test_the_credential_for_host_keys_makes_a_job_insist_on_them(serving, inventory, tmp_path):
    """ansible-runner switches the check off, as AWX does; what the credential injects must switch it on again."""
    kind = next(item for item in data()["controller_credential_types"] if item["name"] == "Sparks: known hosts")
    known = os.path.join(os.environ.get("SPARKLAB_CACHE", "/var/cache/sparkops-lab"), "state/ssh/known_hosts")
    (tmp_path / "nobody").write_text("")
    for path, fails in ((known, False), (str(tmp_path / "nobody"), True)):
        injected = {name: value.replace("{{ tower.filename.known_hosts }}", path) for name, value in kind["injectors"]["extra_vars"].items()}
        job = play("playbooks/preflight.yml", inventory, injected)
        assert (job.code != 0) == fails, job.text[-3000:]
        assert ("preflight.unreachable" in job.text) == fails


def foreign_lease(expires: float) -> None:
    on("spark-1", f"echo '{{\"run_id\": \"pod-7:1:1\", \"owner\": \"awx@pod-7\", \"since\": 1, \"expires\": {expires}}}' > {LEASE}; chown alice: {LEASE}")


def test_a_job_beside_another_job_is_refused_by_name(check, serving):
    foreign_lease(time.time() + 3600)
    try:
        check(LEASED)
        assert len(running("spark-1")) == len(running("spark-2")) == 1
        # A live lease is named, not taken: the other job may be well.
        check(Row("cancel", parts=("awx@pod-7",)))
        assert "pod-7" in on("spark-1", f"cat {LEASE}")
    finally:
        on("spark-1", f"rm -f {LEASE}")


def test_of_two_jobs_at_once_one_is_refused_by_name(check, serving, inventory):
    other = Playing("restart", inventory=inventory)
    try:
        other.until("replace | Stop whatever")
        job = check(Row("restart", fails=True, parts=("lease.held",)))
        assert job.changed == set() and "replace | Stop whatever" not in job.text
    finally:
        assert other.end().code == 0
    assert len(running("spark-1")) == len(running("spark-2")) == 1


DOWNLOAD = Row("weights", {"spark_hosts": "solo"}, fails=True, parts=("MiB/s",))


@pytest.fixture(name="downloads")
def fixture_downloads(inventory, hub):
    """A node that lacks everything, and a hub that takes most of a minute: the work of a cancelled job goes on until the next one has begun."""
    done = playbook("bootstrap", inventory=inventory, variables={"spark_hosts": "solo"})
    assert done.code == 0, done.text[-3000:]
    weights_node.forget()
    hub.fault("slow", path="sparklab/bulk/*.safetensors", rate=800_000)
    yield
    weights_node.forget()


def cancel_in_the_middle(check, hub) -> int:
    job = check(DOWNLOAD, cancelled=lambda: hub.served(weights_node.REPOSITORY) > 0.2 * weights_node.TOTAL)
    assert job.status == "canceled"
    return weights_node.main_pid()


def test_the_next_job_attaches_to_the_work_of_a_cancelled_one(check, hub, downloads):
    working = cancel_in_the_middle(check, hub)
    assert working != 0
    assert check(Row("weights", {"spark_hosts": "solo"})).changed == {weights_node.NODE}
    assert weights_node.whole() and hub.served(weights_node.REPOSITORY) <= 1.02 * weights_node.TOTAL


def test_the_work_of_a_cancelled_job_can_be_stopped(check, hub, downloads):
    assert cancel_in_the_middle(check, hub) != 0
    assert check(Row("cancel", {"spark_hosts": "solo"})).changed == {weights_node.NODE}
    assert weights_node.main_pid() == 0
    served = hub.served(weights_node.REPOSITORY)
    time.sleep(3)
    assert hub.served(weights_node.REPOSITORY) == served


def test_cancel_gives_back_the_lease_of_a_dead_job(check, serving):
    foreign_lease(time.time() - 1)
    check(Row("cancel"))
    assert on("spark-1", f"cat {LEASE} 2>/dev/null || true") == ""


def test_cancel_stops_what_a_cancelled_job_left_running(check, serving):
    units = {"spark-1": ("weights", "pull", "engram"), "spark-2": ("sync", "ship")}
    for node, works in units.items():
        for work in works:
            on(node, f"systemd-run --collect --quiet --unit=sparkops-{work}-lab_tiny sleep 600")
    on("spark-1", "systemd-run --collect --quiet --unit=sparkops-weights-lab_tiny2 sleep 600")
    try:
        assert check(Row("cancel")).changed == set(NODES)
        for node, works in units.items():
            for work in works:
                assert on(node, f"systemctl is-active sparkops-{work}-lab_tiny", check=False).strip() == "inactive"
        # Another deployment on the same node is not ours to stop, nor is the service that keeps the rank.
        assert on("spark-1", "systemctl is-active sparkops-weights-lab_tiny2").strip() == "active"
        assert on("spark-1", "systemctl is-active sparkops-rank@lab_tiny").strip() == "active"
        assert check(Row("cancel")).changed == set()
    finally:
        on("spark-1", "systemctl stop sparkops-weights-lab_tiny2", check=False)


def test_restart_stop_and_back(check, serving):
    assert check(RESTART).changed == set(NODES)
    assert check(STOP).changed == set(NODES)
    for row in STOPPED:
        check(row)
    before = snapshot()
    assert check(STOPPED_DRIFT).changed == set(NODES)
    assert before == snapshot()
    # What was proven last is on record: it comes back without the stages before it.
    job = check(ROLLBACK)
    assert job.changed == set(NODES) and job.artefacts["sparkops_verdict"] == "proven"
    check(STOP)
    job = check(SERVING[0])
    assert job.changed == set(NODES) and job.artefacts["sparkops_verdict"] == "proven"
