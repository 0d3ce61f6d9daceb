"""The model's chat template: turns a conversation into the prompt format of the model's training.

It comes from chat_template.jinja or tokenizer_config.json, and is rendered as in `transformers`: sandboxed, with
trim_blocks, lstrip_blocks and the same helpers. Pods only get token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequest

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def special_token_text(config: Mapping[str, Any], name: str) -> str:
    """Returns the text of a special token (bos_token, ...) in a tokenizer_config.json; "" if it has none."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def load_templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: "tool_use", if present, is for tools, "default" for the rest; or none.

    Raises ConfigError for a file that is no text.
    """
    path = model_dir / "chat_template.jinja"
    try:
        named = {p.stem: p.read_text("utf-8") for p in sorted(model_dir.glob("additional_chat_templates/*.jinja"))}
        if path.is_file():
            return {**named, "default": path.read_text("utf-8")}
    except ValueError as e:
        raise ConfigError(f"model: a chat template is not UTF-8 text: {e}", field="model") from e
    template = config.get("chat_template")
    if isinstance(template, list):
        pairs = [(t.get("name"), t.get("template")) for t in template if isinstance(t, dict)]
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {"default": template} if isinstance(template, str) else {}


class ChatTemplate:
    """Renders conversations, with the model's tokenizer_config.json. Raises ConfigError if a template is invalid."""

    def __init__(self, model_dir: Path, config: Mapping[str, Any]) -> None:
        self._names = {name: text for name in _SPECIAL if (text := special_token_text(config, name))}
        sources = load_templates(model_dir, config)
        #: Source of the template for conversations with tools; "" without templates.
        self.source = sources.get("tool_use", sources.get("default", ""))
        self.supports_tools = False  #: This template uses the variable `tools`.
        self._template: jinja2.Template | None = None
        self._with_tools: jinja2.Template | None = None
        if "default" not in sources:
            return
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = self._with_tools = env.from_string(sources["default"])
            if "tool_use" in sources:
                self._with_tools = env.from_string(sources["tool_use"])
            self.supports_tools = "tools" in meta.find_undeclared_variables(env.parse(self.source))
        except Exception as e:  # constants are computed here, so that any error of an expression is possible
            raise ConfigError(f"model: the chat template does not compile: {e}", field="model") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt for the assistant's next message. Raises InvalidRequest if the template refuses."""
        template = self._with_tools if tools else self._template
        if template is None:
            problem = "this model has no chat template: send a prompt in place of messages"
            raise InvalidRequest(problem, field="messages")
        try:
            named = {"messages": list(messages), "tools": None if tools is None else list(tools), "documents": None}
            return template.render({**self._names, **(kwargs or {}), **named}, add_generation_prompt=True)
        except jinja2.TemplateError as e:
            raise InvalidRequest(f"the model's chat template refuses these messages: {e}", field="messages") from e
        except Exception as e:  # a template is a program, which may divide by zero or call itself
            text = f"the model's chat template cannot render these messages: {type(e).__name__}"
            raise InvalidRequest(text, field="messages") from e
