# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Long work on a node: a named transient systemd unit, its progress file, and the code that it runs.

The unit outlives the ssh session. A second run finds it by name and attaches; stopping the unit is the cancel. Where no unit can be
made a process in a session of its own takes its place, with the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pwd
import secrets
import signal
import sys
import threading
import time
import traceback
import types
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils import _detached
from ansible_collections.sparkops.inference.plugins.module_utils._manifest import write_json
from ansible_collections.sparkops.inference.plugins.module_utils._rank_state import note_staged
from ansible_collections.sparkops.inference.plugins.module_utils._refusal import Refusal, fail

if t.TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

PACKAGE = "ansible_collections.sparkops.inference.plugins.module_utils"
# Seconds that one look at a running unit takes at most: a poll, not a wait.
LOOK = 0.5
# More than the result of a job takes, with the refusals of all its files.
RESULT_ROOM = 256 << 10
# Bytes from which on a transfer tells a rate.
LEAST_RATED = 64 << 20


class UnitError(Exception):
    """systemd would not do what was asked; the text is its own."""


class Unit(t.NamedTuple):
    """What systemd says about a unit. ``active`` covers starting and stopping too: its processes may live."""

    active: bool
    result: str
    status: int


def _scope(module: AnsibleModule) -> list[str]:
    """System units as root, else the user's own service manager."""
    return [] if os.getuid() == 0 else ["--user"]


def _environment() -> dict[str, str]:
    """systemctl --user needs the runtime folder, which a session without PAM does not set."""
    if os.getuid() == 0:
        return {}
    return {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"}


def available(module: AnsibleModule) -> bool:
    """Whether a transient unit can be made here. Without it the work is a process in a session of its own."""
    if not module.get_bin_path("systemd-run"):
        return False
    rc, out, _err = module.run_command(["systemctl", *_scope(module), "is-system-running"], environ_update=_environment())
    return out.strip() in ("running", "degraded", "starting", "initializing", "maintenance") or rc == 0


def start(
    module: AnsibleModule,
    name: str,
    argv: t.Sequence[str],
    env_file: str | None = None,
    user: str | None = None,
    properties: t.Mapping[str, str] | None = None,
) -> None:
    """Start a unit. As root it runs as ``user``; without root it is that user's own unit, which bootstrap lets linger."""
    command = ["systemd-run", *_scope(module), "--collect", "--quiet", f"--unit={name}"]
    settings = {"KillMode": "control-group", "TimeoutStopSec": "20", "Nice": "5", **(properties or {})}
    if env_file:
        settings["EnvironmentFile"] = env_file
    if os.getuid() == 0:
        if user:
            command.append(f"--uid={user}")
    command.extend(f"--property={key}={value}" for key, value in settings.items())
    rc, out, err = module.run_command([*command, "--", *argv], environ_update=_environment())
    if rc != 0:
        raise UnitError((err or out).strip() or f"systemd-run ended with {rc}")


def state(module: AnsibleModule, name: str) -> Unit:
    """Ask systemd about a unit. A unit that nobody knows is inactive."""
    if not module.get_bin_path("systemctl"):
        return Unit(False, "", 0)
    command = ["systemctl", *_scope(module), "show", f"{name}.service", "--property=ActiveState,Result,ExecMainStatus"]
    rc, out, _err = module.run_command(command, environ_update=_environment())
    found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line) if rc == 0 else {}
    active = found.get("ActiveState", "inactive") in ("active", "activating", "deactivating", "reloading")
    return Unit(active, found.get("Result", ""), int(found.get("ExecMainStatus") or 0))


def stop(module: AnsibleModule, name: str) -> bool:
    """Stop a unit and all its processes. Says whether it was running."""
    running = state(module, name).active
    if running:
        rc, out, err = module.run_command(["systemctl", *_scope(module), "stop", f"{name}.service"], environ_update=_environment())
        if rc != 0:
            raise UnitError((err or out).strip())
    return running


def last_lines(module: AnsibleModule, name: str, count: int = 15) -> str:
    """The unit's last words, for a failure that left no result."""
    scope = ["--user-unit"] if os.getuid() else ["--unit"]
    command = ["journalctl", *scope, f"{name}.service", "--no-pager", "--output=cat", f"--lines={count}"]
    rc, out, _err = module.run_command(command, environ_update=_environment())
    return out.strip() if rc == 0 else ""


@contextlib.contextmanager
def identity(user: str) -> t.Iterator[None]:
    """Work with files as ``user`` although the module runs as root: what is made belongs to the user,
    and what the user may not read or write is noticed now."""
    if os.getuid() != 0 or not user or user == "root":
        yield
        return
    entry = pwd.getpwnam(user)
    groups = os.getgroups()
    os.setgroups(os.getgrouplist(user, entry.pw_gid))
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def identity_at(user: str, path: str) -> contextlib.AbstractContextManager[None]:
    """As ``user``, or, where root itself does the work, as the account whose directory ``path`` is or will lie in: what root makes there would
    keep the account's own work out."""
    if user or os.getuid() != 0:
        return identity(user)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return identity(pwd.getpwuid(os.stat(path).st_uid).pw_name)
    except KeyError:
        return identity("")  # an account that is gone


@contextlib.contextmanager
def _own_identity() -> t.Iterator[None]:
    """Inside identity(), be root again for a moment: a module's own archive below /tmp can be read by nobody else."""
    effective = os.geteuid()
    if os.getuid() == effective:
        yield
        return
    os.seteuid(os.getuid())
    try:
        yield
    finally:
        os.seteuid(effective)


def install_code(modules: t.Iterable[types.ModuleType], library: str) -> str:
    """Write the sources of our own modules below ``library``, so that a unit can run them after the task's
    temporary files are gone. The folder's name is their hash: an update never changes code that is running."""
    sources = {}
    with _own_identity():
        for item in modules:
            spec = importlib.util.find_spec(item.__name__)
            source = spec.loader.get_source(item.__name__)  # type: ignore[union-attr]
            # On a controller the loader is Ansible's own, which gives bytes.
            sources[item.__name__.rsplit(".", 1)[1]] = source.decode() if isinstance(source, bytes) else source
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]
    # A folder for each account: code that root runs is not in one that another account may write, and the other way round.
    root = os.path.join(f"{library}-{os.geteuid()}", digest)
    if os.path.exists(root):
        return root
    building = f"{root}.{secrets.token_hex(4)}"
    folder = building
    os.makedirs(folder)
    for part in PACKAGE.split("."):
        folder = os.path.join(folder, part)
        os.makedirs(folder)
        with open(os.path.join(folder, "__init__.py"), "w", encoding="utf-8"):
            pass
    for name, source in sources.items():
        with open(os.path.join(folder, f"{name}.py"), "w", encoding="utf-8") as stream:
            stream.write(source)
            # The name says what is in the folder, so after a loss of power it must be there.
            stream.flush()
            os.fsync(stream.fileno())
    with contextlib.suppress(OSError):
        os.rename(building, root)
    return root


def loaded_code() -> list[types.ModuleType]:
    """All modules of ours that this process has imported: a job needs at most these."""
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(PACKAGE + ".") and module is not None]


def python_argv(root: str, module: str, *arguments: str) -> list[str]:
    """Argument vector that runs ``main`` of an installed module, with no site packages and no user environment."""
    code = f"import sys; sys.path.insert(0, {root!r}); from {PACKAGE}.{module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


class Progress:
    """The progress file of a unit, written at most once a second."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.phase = "starting"
        self.message = ""
        self.total = 0
        self.done = 0
        self._samples: list[tuple[float, int]] = []

    def begin(self, phase: str, total: int = 0, message: str = "") -> None:
        self.phase, self.total, self.done, self.message = phase, total, 0, message
        self._samples = []
        self.write()

    def rate(self) -> float:
        """Bytes per second over the last half minute."""
        now = time.monotonic()
        self._samples.append((now, self.done))
        self._samples = [sample for sample in self._samples if now - sample[0] <= 30] or self._samples[-1:]
        first = self._samples[0]
        return (self.done - first[1]) / (now - first[0]) if now - first[0] > 0.2 else 0.0

    def write(self) -> None:
        rate = max(self.rate(), 0.0)
        content = {
            "done_bytes": self.done,
            "total_bytes": self.total,
            "rate": round(rate),
            "eta": round((self.total - self.done) / rate) if rate > 0 and self.total else None,
            "phase": self.phase,
            "message": self.message,
            "updated": time.time(),
        }
        # The work goes on without a line that tells of it, which a full disk takes first.
        with contextlib.suppress(OSError):
            write_json(self.path, content)


def read_json(path: str) -> dict[str, t.Any] | None:
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


class Refused(Exception):
    """Work stops with reasons for the user."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(refusal.text for refusal in refusals))
        self.refusals = refusals


class Transfer:
    """What the programs of transfers have in common: refusals of an area, notices, a count of bytes, and rates that the next run can tell."""

    area = ""

    def __init__(self, request: dict[str, t.Any], progress: Progress) -> None:
        self.request, self.progress = request, progress
        self.node: str = request["node"]
        self.notices: list[str] = []
        self._counting = threading.Lock()

    def refuse(self, name: str, thing: str, found: str, wanted: str, next_step: str) -> Refused:
        return Refused(Refusal(f"{self.area}.{name}", self.node, thing, found, wanted, next_step))

    def say(self, text: str) -> None:
        self.progress.message = text
        if text not in self.notices:
            self.notices.append(text)

    def count(self, size: int) -> None:
        with self._counting:
            self.progress.done += size

    @property
    def rates_path(self) -> str:
        return os.path.join(self.request["state_dir"], "rates.json")

    def last_rate(self, kind: str) -> float | None:
        return (read_json(self.rates_path) or {}).get(kind)

    def note_rate(self, kind: str, size: int, seconds: float) -> None:
        """A small transfer tells nothing of the rate of a large one."""
        if size >= LEAST_RATED and seconds > 0:
            write_json(self.rates_path, {**(read_json(self.rates_path) or {}), kind: round(size / seconds)})


class Cancelled(BaseException):
    """Somebody stopped the unit. Like KeyboardInterrupt it is no error: whoever takes errors for a bad line must not try again."""


def keep_room(result: str) -> str:
    """A file beside the result that keeps its room: work that fills the disk must be able to say so at its end. Returns its path."""
    path = f"{result}.room"
    with contextlib.suppress(OSError), open(path, "wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, RESULT_ROOM)
    return path


def run_job(request_path: str, work: t.Callable[[dict[str, t.Any], Progress], dict[str, t.Any]]) -> int:
    """Run the work of a unit: keep its progress fresh, and leave a result whatever happens."""
    request = read_json(request_path) or {}
    progress = Progress(request["progress"])
    ended = threading.Event()
    room = keep_room(request["result"])

    def tick() -> None:
        while not ended.wait(1.0):
            progress.write()

    def cancel(_number: int, _frame: t.Any) -> None:
        raise Cancelled()

    signal.signal(signal.SIGTERM, cancel)
    signal.signal(signal.SIGINT, cancel)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        result = {"ok": True, **work(request, progress)}
    except Refused as exc:
        result = {"ok": False, "refusals": [refusal.as_dict() for refusal in exc.refusals]}
    except Cancelled:
        result = {"ok": False, "cancelled": True}
    except Exception as exc:  # the result file is the only thing that the controller sees
        traceback.print_exc()
        result = {"ok": False, "error": f"{type(exc).__name__}: {exc}"}
    ended.set()
    ticker.join()
    with contextlib.suppress(OSError):
        os.unlink(room)
    write_json(request["result"], {**result, "run_id": request["run_id"]})
    progress.phase = "done" if result["ok"] else "failed"
    progress.write()
    if result.get("cancelled"):
        # Threads may be in the middle of 100 GB; nobody waits for them after a cancel.
        os._exit(1)
    return 0 if result["ok"] else 1


def take_secret(request: t.Mapping[str, t.Any]) -> str | None:
    """Read the secret of a job and remove its file at once."""
    path = request.get("secret_file")
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip() or None
    except FileNotFoundError:
        return None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class Job:
    """One kind of long work of one deployment: its unit, request, progress and result.

    The module that owns it calls ``begin`` once, then ``wait`` in bounded slices until ``finished``.
    """

    def __init__(self, module: AnsibleModule, work: str, deployment: str, state_dir: str, user: str) -> None:
        self.module = module
        self.name = f"sparkops-{work}-{deployment}"
        self.user = user
        self.folder = os.path.join(state_dir, "jobs", work)
        self.request = os.path.join(self.folder, "request.json")
        self.result = os.path.join(self.folder, "result.json")
        self.progress = os.path.join(state_dir, "progress", f"{work}.json")
        self.process = os.path.join(self.folder, "process.json")
        self.output = os.path.join(self.folder, "output.log")
        self.secret = os.path.join(self.folder, "secret")

    def running(self) -> bool:
        return self._detached() is not None or state(self.module, self.name).active

    def _detached(self) -> dict[str, t.Any] | None:
        """The record of a process that does the work where no unit could, while it goes on."""
        record = read_json(self.process)
        return record if record and _detached.is_running(record, self.request) else None

    def stop(self) -> None:
        record = self._detached()
        if record:
            _detached.end(record)
        else:
            stop(self.module, self.name)
        self._forget_secret()

    def _forget_secret(self) -> None:
        """Of a job that ended before it had read it."""
        with identity(self.user), contextlib.suppress(OSError):
            os.unlink(self.secret)

    def begin(self, argv: t.Sequence[str], request: dict[str, t.Any], secret: str | None = None) -> str:
        """Write the request and start the unit. A secret goes into a 0600 file that the job removes once read."""
        run_id = secrets.token_hex(8)
        places = [os.path.dirname(path) for path in (self.folder, self.progress)]
        with identity_at(self.user, places[0]):
            for place in places:
                os.makedirs(place, exist_ok=True)
            # The account's, also while root does the work: it may do the next one itself.
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
        with identity(self.user):
            for stale in (self.result, self.progress, self.process, self.output, self.secret):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(stale)
            secret_file = self._write_secret(secret)
            write_json(self.request, {**request, "run_id": run_id, "result": self.result, "progress": self.progress, "secret_file": secret_file}, 0o600)
        command = [*argv, self.request]
        try:
            if available(self.module):
                start(self.module, self.name, command, user=self.user)
            else:
                self._detach(command)
        except UnitError:
            self._forget_secret()  # the job never began
            raise
        return run_id

    def _write_secret(self, secret: str | None) -> str | None:
        if not secret:
            return None
        handle = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(secret)
        return self.secret

    def _detach(self, command: t.Sequence[str]) -> None:
        """No service manager: the end of the task's session must not be that of the work."""
        environment = dict(os.environ)
        if os.getuid() == 0 and self.user not in ("", "root"):
            entry = pwd.getpwnam(self.user)
            command = ["setpriv", f"--reuid={self.user}", "--init-groups", f"--regid={entry.pw_gid}", *command]
            environment.update(HOME=entry.pw_dir, USER=self.user, LOGNAME=self.user)
        try:
            with identity(self.user):
                output = open(self.output, "wb")
            with output:
                record = _detached.start(command, output, environment)
        except OSError as exc:
            raise UnitError(str(exc)) from None
        with identity(self.user):
            write_json(self.process, record)

    def last_words(self) -> str:
        """What the job said last, for a failure that left no result."""
        try:
            with identity(self.user), open(self.output, encoding="utf-8", errors="replace") as stream:
                return stream.read()[-2000:].strip()
        except FileNotFoundError:
            return last_lines(self.module, self.name)

    @property
    def log(self) -> str:
        """Where a person finds all that it said."""
        return self.output if os.path.exists(self.output) else f"journalctl -u {self.name}"

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the unit, at most ``seconds``. Says whether it has ended."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK)
        self._forget_secret()
        return True

    def outcome(self, run_id: str | None) -> dict[str, t.Any] | None:
        """The result of a run, or None when the job ended without one: it was killed."""
        content = read_json(self.result)
        return content if content and (run_id is None or content.get("run_id") == run_id) else None

    def current(self) -> dict[str, t.Any]:
        """Progress for the controller's line."""
        return read_json(self.progress) or {"phase": "starting", "done_bytes": 0, "total_bytes": 0}

    def current_run(self) -> str | None:
        return (read_json(self.request) or {}).get("run_id")


class LongModule:
    """Base of the modules that run a job: begin or attach, wait in slices, tell the outcome.

    ``area`` is the first part of the refusals' ids, ``work`` names the unit, ``program`` is the module with ``main``.
    """

    area = ""
    work = ""
    program: types.ModuleType

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.node = module.params["node"]
        self.user = module.params["user"]
        self.job = Job(module, self.work, module.params["deployment"], module.params["state_dir"], self.user)

    def refusal(self, name: str, thing: str, found: str, wanted: str, next_step: str) -> Refusal:
        return Refusal(f"{self.area}.{name}", self.node, thing, found, wanted, next_step)

    def fail(self, refusals: t.Sequence[Refusal]) -> t.NoReturn:
        fail(self.module, refusals)

    def begin(self, request: dict[str, t.Any], secret: str | None = None) -> str:
        try:
            with identity(self.user):
                root = install_code(loaded_code(), os.path.join(self.params["state_root"], "lib"))
            return self.job.begin(python_argv(root, self.program.__name__.rpartition(".")[2]), request, secret)
        except OSError as exc:
            next_step = f"free space, or give {self.params['state_root']} and what is in it to the account that works there"
            self.fail([self.refusal("job_error", f"unit {self.job.name}", str(exc), "files of the work on this node", next_step)])

    def note_staged(self, image: str = "") -> None:
        """Whose the ``image`` is, or, of the modules that bring weights, the trees of ``artefacts``."""
        what = {"image": image} if image else {"directories": [item["directory"] for item in self.params["artefacts"]]}
        if not self.module.check_mode:
            with identity_at(self.user, self.params["state_dir"]):
                note_staged(self.params["state_dir"], **what)

    def earlier(self, **wanted: t.Any) -> dict[str, t.Any] | None:
        """The outcome of a run that an earlier slice, or another controller, began. None when there is none, or its request was not the wanted one."""
        run_id = self.params["run_id"]
        if not run_id and not self.module.check_mode and self.job.running():
            run_id = self.job.current_run()
        outcome = self.end_of(run_id) if run_id else None
        begun = read_json(self.job.request) or {} if wanted else {}
        return outcome if all(begun.get(name) == value for name, value in wanted.items()) else None

    def end_of(self, run_id: str | None) -> dict[str, t.Any]:
        """Wait for the end of a run, or leave when the slice is over."""
        if not self.job.wait(self.params["wait_slice"] or float("inf")):
            self.module.exit_json(changed=True, running=True, run_id=run_id, progress=self.job.current(), artefacts=[], notices=[], known_after=[])
        outcome = self.job.outcome(run_id)
        if outcome is None:
            tail = self.job.last_words()
            self.fail(
                [
                    self.refusal(
                        "job_died",
                        f"unit {self.job.name}",
                        f"it ended without a result; its last lines: {tail or 'none'}",
                        "a finished run",
                        "run again: what arrived is kept and counts",
                    )
                ]
            )
        if outcome.get("cancelled"):
            self.fail(
                [self.refusal("cancelled", f"unit {self.job.name}", "stopped on request", "a finished run", "run again: what arrived is kept and counts")]
            )
        if outcome.get("refusals"):
            self.fail([Refusal(**item) for item in outcome["refusals"]])
        if not outcome["ok"]:
            self.fail(
                [
                    self.refusal(
                        "job_error",
                        f"unit {self.job.name}",
                        outcome.get("error", "an error"),
                        "a finished run",
                        f"see {self.job.log} on the node",
                    )
                ]
            )
        return outcome

    def result(self, artefacts: t.Sequence[t.Mapping[str, t.Any]], outcome: t.Mapping[str, t.Any] | None = None, **more: t.Any) -> dict[str, t.Any]:
        found = outcome or {}
        return {
            "changed": bool(found.get("changed")),
            "artefacts": artefacts,
            "done": found.get("artefacts", {}),
            "notices": found.get("notices", []),
            "running": False,
            "known_after": [],
            **more,
        }

    def cancel(self) -> dict[str, t.Any]:
        running = self.job.running()
        if running and not self.module.check_mode:
            self.job.stop()
        return self.result([], {"changed": running})

    def main(self, present: t.Callable[[], dict[str, t.Any]]) -> t.NoReturn:
        try:
            result = self.cancel() if self.params["state"] == "cancelled" else present()
        except UnitError as exc:
            self.fail([self.refusal("unit", f"unit {self.job.name}", str(exc), "a transient systemd unit", "check systemd on the node")])
        self.module.exit_json(**result)


def long_options() -> dict[str, t.Any]:
    """Options that every module with a job has."""
    return {
        "state_dir": {"type": "path", "required": True},
        "state_root": {"type": "path", "required": True},
        "deployment": {"type": "str", "required": True},
        "node": {"type": "str", "required": True},
        "user": {"type": "str", "default": ""},
        "state": {"type": "str", "choices": ["present", "cancelled"], "default": "present"},
        "wait_slice": {"type": "int", "default": 0},
        "run_id": {"type": "str"},
    }
