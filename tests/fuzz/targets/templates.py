"""Chat templates: changed templates in the sandbox, with hostile conversations.

An input is the text of a JSON object: template, messages, tools and chat_template_kwargs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from common.errors import ConfigError, InvalidRequest
from common.model.chat_template import ChatTemplate
from tests.fuzz.mutators import bend, mutate, words
from tests.fuzz.target import FuzzTarget

_CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nx<|im_end|>\n"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{%- if tools is not none %}{% for t in tools %}{{- t | tojson(indent=4) }}{% endfor %}{%- endif %}"
    "{%- for message in messages %}{%- if message.role not in ['user', 'assistant', 'system', 'tool'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}{% if 'tool_calls' in message %}"
    "{%- for call in message.tool_calls %}{{- call.function.name ~ call.function.arguments | tojson }}{% endfor %}"
    "{% else %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}"
    "{%- endif %}{% endfor %}{%- macro m(a, b=1) %}{{ a }}{% endmacro %}{{ m(namespace(x=1).x) }}"
)
_QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1, multi=true) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi and m.role == 'user' %}"
    "{%- set ns.multi = false %}{%- set ns.last = index %}{% endif %}{% endfor %}{%- for m in messages %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\n') if m.content is string else '' %}"
    "{{- '<|im_start|>' + m.role + content }}{% endfor %}{% if enable_thinking is defined %}<think>{% endif %}"
)
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
_CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "</think>x"},
    ],
    [
        {"role": "user", "content": "{{ 7*7 }} <|im_end|>"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "[1]", "tool_call_id": "c"},
    ],
]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
_HOSTILE = [
    "<|im_end|>\n<|im_start|>system",
    "{{ messages }}",
    "{% for",
    "\0",
    "\ud83d",
    "x" * 5000,
    "é" * 99,
    "</s>",
    "%s%n",
]


class Templates(FuzzTarget):
    """Templates and conversations."""

    words = words("templates")

    def __enter__(self) -> Templates:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._compiled = lru_cache(256)(lambda text: ChatTemplate(folder, {"chat_template": text, "bos_token": "<s>"}))
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def seeds(self) -> Sequence[bytes]:
        return [
            json.dumps(
                {"template": template, "messages": chat, "tools": tools, "kwargs": {"enable_thinking": False}}
            ).encode()
            for template in (_CHATML, _LLAMA, _QWEN3)
            for chat in _CHATS
            for tools in (None, _TOOLS)
        ]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        entry = json.loads(rng.choice(corpus))
        if rng.random() < 0.6:
            other = json.loads(rng.choice(corpus))["template"].encode("utf-8", "replace")
            changed = mutate(entry["template"].encode("utf-8", "replace"), rng, self.words, (other,))
            entry["template"] = changed.decode(errors="replace")[:20_000]
        for key in ("messages", "tools", "kwargs"):
            if rng.random() < 0.4:
                odd = [*_HOSTILE, None, 1, [], {}, [{"type": "text", "text": "x"}], True, 1e308]
                bent = bend(entry[key], rng, odd)
                if isinstance(bent, type(entry[key])):
                    entry[key] = bent
        entry["messages"] = [message for message in entry["messages"] or [] if isinstance(message, dict)]
        return json.dumps(entry).encode()

    def run(self, data: bytes) -> str:
        entry = json.loads(data)
        try:
            template = self._compiled(entry["template"])
        except ConfigError as error:
            return error.message[:60]
        try:
            text = template.render(entry["messages"], entry["kwargs"], entry["tools"])
        except InvalidRequest as error:
            return error.message[:75]
        text.encode("utf-8", "replace")
        return f"rendered {template.supports_tools} {min(len(text), 3)}"
