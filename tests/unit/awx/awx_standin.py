# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A stand-in for AWX's API that stores objects, and refuses what AWX refuses: unknown playbooks, wrong surveys, a wrong token."""

from __future__ import annotations

import copy
import http.server
import json
import re
import threading
import typing as t
import urllib.parse

TOKEN = "stand-in-token"
ANSWERS = {"text": str, "textarea": str, "password": str, "multiplechoice": str, "multiselect": str, "integer": int, "float": float}
RELATIONS = ("credentials", "success_nodes", "failure_nodes", "always_nodes")
UNIFIED = ("job_templates", "workflow_job_templates", "projects", "inventory_sources")


class Wrong(Exception):
    """A request that AWX answers with an error."""

    def __init__(self, status: int, document: t.Any) -> None:
        super().__init__(document)
        self.status = status
        self.document = document


def survey_error(spec: t.Mapping[str, t.Any]) -> str | None:
    """What AWX says against a survey, None for a good one."""
    for field, kind in (("name", str), ("description", str), ("spec", list)):
        if not isinstance(spec.get(field), kind):
            return f"Field '{field}' is missing from survey spec."
    if not spec["spec"]:
        return "'spec' doesn't contain any items."
    seen: set[str] = set()
    for number, item in enumerate(spec["spec"]):
        error = question_error(item)
        if error or item["variable"] in seen:
            return f"question {number}: {error or 'duplicate variable'}"
        seen.add(item["variable"])
    return None


def question_error(item: t.Mapping[str, t.Any]) -> str | None:
    for field, kind in (("type", str), ("question_name", str), ("variable", str), ("required", bool)):
        if not isinstance(item.get(field), kind):
            return f"'{field}' is missing or of the wrong type"
    if item["type"] not in ANSWERS:
        return f"{item['type']} is no allowed type"
    default = item.get("default", "")
    if default != "" and not isinstance(default, ANSWERS[item["type"]]):
        return f"default {default!r} is no {item['type']}"
    if any(item.get(limit) is not None and not isinstance(item[limit], int) for limit in ("min", "max")):
        return "limits must be whole numbers"
    if item["type"].startswith("multi"):
        if not item.get("choices"):
            return "no choices"
        if default != "" and default not in item["choices"]:
            return f"default {default!r} is no choice"
    return None


class Store:
    """Objects by kind and id."""

    def __init__(self, playbooks: t.Collection[str]) -> None:
        self.playbooks = playbooks
        self.objects: dict[str, dict[int, dict[str, t.Any]]] = {}
        self.surveys: dict[str, t.Any] = {}
        self.related: dict[str, list[int]] = {}
        self.writes: list[str] = []
        self.create("organizations", {"name": "Default"})

    def create(self, kind: str, fields: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        number = 1 + max((known for objects in self.objects.values() for known in objects), default=0)
        url = f"/api/v2/{kind}/{number}/"
        related = {"survey_spec": f"{url}survey_spec/"}
        item = {"id": number, "url": url, "type": kind.removesuffix("s"), "related": related, "summary_fields": {}, **copy.deepcopy(fields)}
        if kind == "projects":
            # A new project is synced at once.
            update = self.create("project_updates", {"status": "successful"})
            item.update(scm_revision="0" * 40, summary_fields={"current_update": {"id": update["id"]}})
        if kind == "job_templates":
            self.check_template(item)
        self.objects.setdefault(kind, {})[number] = item
        return item

    def check_template(self, item: t.Mapping[str, t.Any]) -> None:
        if item["project"] not in self.objects.get("projects", {}) or item["playbook"] not in self.playbooks:
            raise Wrong(400, {"playbook": ["Playbook not found for project."]})

    def one(self, kind: str, number: str) -> dict[str, t.Any]:
        found = self.objects.get(kind, {}).get(int(number))
        if found is None:
            raise Wrong(404, {"detail": "Not found."})
        return found

    def search(self, kind: str, query: t.Mapping[str, str]) -> list[dict[str, t.Any]]:
        kinds = UNIFIED if kind == "unified_job_templates" else (kind,)
        objects = [item for one in kinds for item in self.objects.get(one, {}).values()]
        return [item for item in objects if all(str(item.get(field)) == value for field, value in query.items())]

    def patch(self, kind: str, number: str, fields: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        item = self.one(kind, number)
        changed = {**item, **fields}
        if kind == "job_templates":
            self.check_template(changed)
        item.update(fields)
        return item

    def create_approval(self, node: str, fields: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        # Kept out of unified_job_templates, as AWX does.
        made = self.create("workflow_approval_templates", fields)
        item = self.one("workflow_job_template_nodes", node)
        item["unified_job_template"] = made["id"]
        item["related"]["unified_job_template"] = made["url"]
        return made

    def relate(self, path: str, fields: t.Mapping[str, t.Any]) -> None:
        known = self.related.setdefault(path, [])
        if fields.get("disassociate"):
            known.remove(fields["id"])
        else:
            known.append(fields["id"])

    def answer(self, method: str, path: str, query: t.Mapping[str, str], body: t.Any) -> tuple[int, t.Any]:
        parts = path.removeprefix("/api/v2/").strip("/").split("/")
        if method != "GET":
            self.writes.append(f"{method} {'/'.join(parts)}")
        kind, number, sub = (*parts, "", "")[:3]
        if sub == "survey_spec":
            return self.survey(method, path, body)
        if sub == "create_approval_template":
            return 201, self.create_approval(number, body)
        if sub in RELATIONS:
            if method == "POST":
                self.relate(path, body)
                return 204, None
            return 200, page([{"id": known} for known in self.related.get(path, [])])
        if number:
            return 200, self.one(kind, number) if method == "GET" else self.patch(kind, number, body)
        if method == "POST":
            return 201, self.create(kind, body)
        return 200, page(self.search(kind, query))

    def survey(self, method: str, path: str, body: t.Any) -> tuple[int, t.Any]:
        if method == "POST":
            error = survey_error(body)
            if error:
                raise Wrong(400, {"error": error})
            self.surveys[path] = body
            return 200, None
        return 200, self.surveys.get(path, {})


def page(items: t.Sequence[t.Any]) -> dict[str, t.Any]:
    return {"count": len(items), "next": None, "previous": None, "results": items}


class StandIn:
    """The server in a thread; ``with StandIn(...) as awx`` gives its address and what it stores."""

    def __init__(self, playbooks: t.Collection[str]) -> None:
        self.store = Store(playbooks)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(self.store))
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *dummy: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def writes(self) -> list[str]:
        """What was written since the last call, with the numbers left out."""
        taken, self.store.writes = self.store.writes, []
        return [re.sub(r"\d+", "N", line) for line in taken]


def handler(store: Store) -> type[http.server.BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def respond(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            try:
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise Wrong(401, {"detail": "Authentication credentials were not provided."})
                with lock:
                    status, document = store.answer(self.command, url.path, query, body)
                    content = b"" if document is None else json.dumps(document).encode()
            except Wrong as exc:
                status, content = exc.status, json.dumps(exc.document).encode()
            self.send_response(status)
            self.send_header("X-API-Product-Name", "AWX")
            self.send_header("X-API-Product-Version", "24.6.1")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = respond

        def log_message(self, format: str, *args: t.Any) -> None:
            """Nothing: tests look at the writes."""

    return Handler
