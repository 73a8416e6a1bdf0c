# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Reads the .env file of a launch script as data, and says the same in inventory variables. Nothing in it is executed."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from ansible_collections.sparkops.inference.plugins.module_utils._options import ConversionError, Option, convert
from ansible_collections.sparkops.inference.plugins.module_utils._profile_language import near

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHELL = re.compile(r"\$[A-Za-z_{(]|`")
# A name that only one of the launchers has tells which one it was.
_TELLTALES = {
    "deepseek": ("DSV41_", "DSPARK_", "ENGRAM_", "HF_ENGRAM"),
    "glm": ("DFLASH_", "GLM53_ADAPTIVE", "GLM53_DENSE", "MTP_TOKENS", "ABLIT", "MODEL_FALLBACK"),
}
_HOSTS = {"HEAD": 0, "WORKER": 1, "WORKER2": 2, "WORKER3": 3}


@dataclasses.dataclass
class Translation:
    """What a .env file says in our words."""

    group: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    # By rank; the inventory names are the user's.
    hosts: dict[int, dict[str, t.Any]] = dataclasses.field(default_factory=dict)
    # Variables of secrets that were set; their values stay in the file.
    secrets: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict[str, t.Any]:
        return {**dataclasses.asdict(self), "hosts": {str(rank): values for rank, values in self.hosts.items()}}


def parse(text: str) -> tuple[dict[str, str], list[str]]:
    """The assignments of a .env file, the last one of a name, and notes about what cannot be taken as it stands."""
    values: dict[str, str] = {}
    notes = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            notes.append(f"line {number} is no assignment and is left out")
            continue
        name, raw = match.group(1), match.group(2).strip()
        value, literal = _value(raw)
        if value is None:
            notes.append(f"line {number}: the quotes of {name} do not end on the line, so it is left out")
            continue
        if not literal and _SHELL.search(value):
            notes.append(f"line {number}: {name} has shell in it, which is not worked out: correct its value by hand")
        if name in values and values[name] != value:
            notes.append(f"line {number}: {name} is set twice, the last one holds, as in the shell")
        values[name] = value
    return values, notes


def _value(raw: str) -> tuple[str | None, bool]:
    """The text of a value, and whether it stands in single quotes, where nothing has a meaning."""
    if raw[:1] in ("'", '"'):
        quote = raw[0]
        end = raw.find(quote, 1)
        while quote == '"' and end > 0 and raw[end - 1] == "\\":
            end = raw.find(quote, end + 1)
        if end < 0:
            return None, False
        inside = raw[1:end]
        return (inside.replace('\\"', '"') if quote == '"' else inside), quote == "'"
    return re.split(r"\s+#", raw, maxsplit=1)[0].rstrip(), False


def recipe_of(values: t.Mapping[str, str]) -> str | None:
    """Which of the two launchers a file belongs to; None when it does not say."""
    score = {recipe: sum(name.startswith(starts) for name in values) for recipe, starts in _TELLTALES.items()}
    best = max(score, key=lambda recipe: score[recipe])
    return best if score[best] and list(score.values()).count(score[best]) == 1 else None


def translate(values: t.Mapping[str, str], recipe: str, knobs: t.Sequence[t.Mapping[str, t.Any]], options: t.Mapping[str, Option]) -> Translation:
    """A .env file in inventory variables of the recipe's profile."""
    rows = {row["upstream"]: row for row in knobs if recipe in row["recipes"]}
    reader = _Reader(options)
    for name, value in values.items():
        if name not in rows:
            reader.result.unknown.append(name + near(name, rows))
        else:
            reader.read(rows[name], value)
    return reader.finish(values)


class _Reader:
    def __init__(self, options: t.Mapping[str, Option]) -> None:
        self.options = options
        self.result = Translation()

    def read(self, row: t.Mapping[str, t.Any], value: str) -> None:
        name = row["upstream"]
        if "values" in row:
            self.result.group.update(row["values"].get(value, {}))
        elif value == "" and row["reader"] not in ("or_none", "off_list"):
            # Upstream takes an empty value for the default, and so does an inventory.
            return
        else:
            _READERS[row["reader"]](self, name, (row["variables"] or [""])[0], value, row)

    def finish(self, values: t.Mapping[str, str]) -> Translation:
        if values.get("USE_HOST_NCCL", "0") != "1":
            for own in [self.result.group, *self.result.hosts.values()]:
                own.pop("serve_host_nccl_dir", None)
        for name, value in list(self.result.group.items()):
            self._convert(self.result.group, name, value)
        for own in self.result.hosts.values():
            for name, value in list(own.items()):
                self._convert(own, name, value)
        return self.result

    def _convert(self, own: dict[str, t.Any], name: str, value: t.Any) -> None:
        option = self.options.get(name)
        if name.startswith("ansible_"):
            return
        if option is None:
            self.result.notes.append(f"{name} is an option of another state of the recipe, so {value} is left out")
            del own[name]
            return
        try:
            own[name] = convert(option, value)
        except ConversionError as error:
            self.result.notes.append(f"{name}: found {error.found}; wanted {error.wanted}")
            del own[name]
            return
        if own[name] is None or (own[name] == option.default and option.scope == "group"):
            # What is the default anyway would only hide that it is.
            del own[name]

    # -- one way of reading each -------------------------------------------------------------------------------

    def text(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = value

    def json(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = value

    def list(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = [item for item in value.split(",") if item]

    def off_list(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = [] if value in ("", "off") else value.split(",")

    def or_none(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = value or "none"

    def gib(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = f"{value} GiB"

    def mixed_prefill(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group[variable] = {"-1": "skip", "off": "0", "no": "0"}.get(value, value)

    def layers(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        first, _dash, last = value.partition("-")
        self.result.group["serve_ablit_first_layer"] = first
        self.result.group["serve_ablit_last_layer"] = last or first

    def direction(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group["serve_ablit_direction_file" if "/" in value else "serve_ablit_direction"] = value

    def secret(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.secrets.append(variable)
        self.result.notes.append(f"{name} is a secret and is not shown: put it into a vault as {variable}")

    def drop(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.dropped[name] = row.get("note") or "Not needed here."

    def environment(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.group.setdefault("serve_environment", {})[name] = value

    def extra_env(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        for pair in value.split():
            key, _equals, text = pair.partition("=")
            if _SECRET.search(key):
                self.result.notes.append(f"{name}: {key} looks like a secret and is left out; the environment of a container can be read by others")
            else:
                self.environment(key, variable, text, row)

    def extra_args(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        """Upstream splits at blanks, whatever the quotes say; so it is split here, that nothing changes."""
        items = value.split()
        for position, item in enumerate(items):
            flag, equals, text = item.partition("=")
            if flag == "--kv-cache-memory-bytes":
                self.result.group["serve_kv_cache_memory_bytes"] = text if equals else "".join(items[position + 1 : position + 2])
                del items[position : position + (1 if equals else 2)]
                break
        if items:
            self.result.group[variable] = items

    def host(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self._of_host(name)[variable] = value.lstrip("=").split(",") if variable == "fabric_hcas" else value.lstrip("=")

    def host_cache(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.notes.append(f"{name}: compiled kernels in {value} are taken over by playbooks/adopt.yml; new ones lie in serve_cache_root")

    def host_nccl(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        if name != "USE_HOST_NCCL":
            self._of_host(name)["serve_host_nccl_dir"] = value

    def account(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        user, at, address = value.rpartition("@")
        own = self._of_host(name)
        own["ansible_user"] = user if at else value
        if at:
            own["ansible_host"] = address

    def gid(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        self.result.notes.append(f"{name}={value} is not taken over, because such a number moves: fabric_gid_policy auto finds it at each start")
        self.result.group["fabric_gid_policy"] = "auto"

    def adopt_tree(self, name: str, variable: str, value: str, row: t.Mapping[str, t.Any]) -> None:
        path = value.rstrip("/") + "/hub" if name == "HF_HOME" else value
        self.result.group.setdefault(variable, []).append(path)

    def _of_host(self, name: str) -> dict[str, t.Any]:
        return self.result.hosts.setdefault(_HOSTS.get(name.partition("_")[0], 0), {})


_READERS: dict[str, t.Callable[[_Reader, str, str, str, t.Mapping[str, t.Any]], None]] = {
    word: getattr(_Reader, word)
    for word in (
        "text", "json", "list", "off_list", "or_none", "gib", "mixed_prefill", "layers", "direction", "secret", "drop", "environment",
        "extra_env", "extra_args", "host", "host_cache", "host_nccl", "account", "gid", "adopt_tree",
    )
}  # fmt: skip


def inventory(translation: Translation, names: t.Sequence[str], profile: str) -> str:
    """The translation as an inventory to look at, in YAML that is JSON value by value."""
    lines = ["sparks:", "  hosts:"]
    for rank, name in enumerate(names):
        lines.append(f"    {name}:")
        lines += [f"      {key}: {_yaml(value)}" for key, value in translation.hosts.get(rank, {}).items()]
    lines += ["  vars:", f"    serve_nodes: {_yaml(list(names))}", f"    serve_profile: {profile}"]
    lines += [f"    {key}: {_yaml(value)}" for key, value in sorted(translation.group.items())]
    lines += [f"    # {name}: its value stays in the old file until you put it into a vault" for name in translation.secrets]
    return "\n".join(lines) + "\n"


def _yaml(value: t.Any) -> str:
    return json.dumps(value, ensure_ascii=False)
