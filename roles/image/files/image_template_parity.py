# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run inside an image: does its chat template say the same as the model's own for plain conversations?

``image_template_parity.py TEMPLATE SOURCE``; SOURCE is a directory with ``chat_template.jinja`` or ``tokenizer_config.json``. A template that is mounted
over the image's stands in SPARKOPS_CHAT_TEMPLATE.
"""

from __future__ import annotations

import difflib
import json
import os
import sys

CONVERSATIONS = (
    [{"role": "user", "content": "What is 17*19?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one."},
    ],
)


def read(path):
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except OSError as exc:
        raise SystemExit(f"{path}: {exc.strerror}: nothing to compare") from None


def own_template(source):
    path = os.path.join(source, "chat_template.jinja")
    if os.path.exists(path):
        return read(path)
    template = json.loads(read(os.path.join(source, "tokenizer_config.json"))).get("chat_template")
    if not isinstance(template, str):
        raise SystemExit(f"{source} has no chat template to compare with")
    return template


def special_tokens(source):
    """What a template may use beside the messages."""
    try:
        with open(os.path.join(source, "tokenizer_config.json"), encoding="utf-8") as stream:
            config = json.load(stream)
    except OSError:
        return {}
    tokens = {name: config.get(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {name: token.get("content", "") if isinstance(token, dict) else token for name, token in tokens.items()}


def render(template, messages, tokens):
    # Only inside the image, which has it for the same purpose.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text):
        raise ValueError(text)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: "2026-01-01")
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)


def main(path, source):
    template = os.environ.get("SPARKOPS_CHAT_TEMPLATE") or read(path)
    own, tokens = own_template(source), special_tokens(source)
    different = 0
    for messages in CONVERSATIONS:
        one, other = render(template, messages, tokens), render(own, messages, tokens)
        if one != other:
            different += 1
            lines = difflib.unified_diff(other.splitlines(), one.splitlines(), "model", "image", lineterm="")
            sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.write(f"{len(CONVERSATIONS)} conversations, {different} different\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
