"""The model's chat template: turns a conversation into the prompt format of the model's training.

It comes from a file that the user names, chat_template.jinja or tokenizer_config.json, and is rendered as in
`transformers`. Pods only get token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2
from jinja2 import meta

from common.errors import ConfigError, InvalidRequest, describe
from common.model.generation import special_token_text
from common.model.template_environment import TemplateEnvironment

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
#: Names of the field with a message's reasoning. The first is the name in use now.
_REASONING = ("reasoning_content", "thinking", "reasoning")
MAX_ERROR = 500  #: Characters of a template's own error message that the client sees.


def load_templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: "tool_use", if present, is for tools, "default" for the rest; or none.

    Raises ConfigError for a file that is not text.
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


def read_template_file(path: Path) -> str:
    """Returns the template in a file that the user named. Raises ConfigError (field "chat_template")."""
    try:
        return path.read_text("utf-8")
    except OSError as e:
        raise ConfigError(f"chat_template: cannot read {path}: {e.strerror}", field="chat_template") from e
    except ValueError as e:
        raise ConfigError(f"chat_template: {path} is not UTF-8 text: {e}", field="chat_template") from e


class ChatTemplate:
    """Renders conversations, with the model's tokenizer_config.json. Raises ConfigError if a template is invalid."""

    def __init__(
        self,
        model_dir: Path,
        config: Mapping[str, Any],
        *,
        file: Path | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Compiles the model's templates, or the one in `file`. `variables` are defaults of template variables."""
        self._names = {name: text for name in _SPECIAL if (text := special_token_text(config, name))}
        self._names |= variables or {}
        field = "model" if file is None else "chat_template"
        sources = load_templates(model_dir, config) if file is None else {"default": read_template_file(file)}
        #: Source of the template for conversations with tools; "" without templates.
        self.source = sources.get("tool_use", sources.get("default", ""))
        self.supports_tools = False  #: This template uses the variable `tools`.
        self._template: jinja2.Template | None = None
        self._with_tools: jinja2.Template | None = None
        if "default" not in sources:
            return
        self._environment = env = TemplateEnvironment()
        env.start()
        try:
            self._template = self._with_tools = env.from_string(sources["default"])
            if "tool_use" in sources:
                self._with_tools = env.from_string(sources["tool_use"])
            self.supports_tools = "tools" in meta.find_undeclared_variables(env.parse(self.source))
        except Exception as e:  # constants are computed here, so that any error of an expression is possible
            line = f" (line {e.lineno})" if isinstance(e, jinja2.TemplateSyntaxError) else ""
            text = f"{field}: the chat template does not compile: {describe(e)}{line}"
            raise ConfigError(text, field=field) from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt for the assistant's next message.

        Raises InvalidRequest with the template's own error and its line, whatever the template raises.
        """
        template = self._with_tools if tools else self._template
        if template is None:
            problem = "this model has no chat template: send a prompt in place of messages"
            raise InvalidRequest(problem, field="messages")
        named = {
            "messages": [_normalized(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": True,
        }
        env = self._environment
        env.start()
        parts = template.root_render_func(template.new_context({**self._names, **(kwargs or {}), **named}))
        try:
            return _whole_characters(env.concat(parts))
        except jinja2.TemplateError as e:
            cause = str(e) if type(e) is jinja2.TemplateError and str(e) else describe(e)
            place = _place(template, parts, e.__traceback__)
            text = f"the model's chat template refuses these messages{place}: {cause[:MAX_ERROR]}"
            raise InvalidRequest(text, field="messages") from e
        except Exception as e:  # a template is a program, which may divide by zero or call itself
            place, cause = _place(template, parts, e.__traceback__), describe(e)
            text = f"the model's chat template cannot render these messages{place}: {cause[:MAX_ERROR]}"
            raise InvalidRequest(text, field="messages") from e


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as `transformers` gives it to templates: without nulls, its reasoning by its present name."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _whole_characters(text: str) -> str:
    """Returns a text that UTF-8 can encode: half a surrogate pair becomes U+FFFD, two halves become their character."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:  # JSON in a tool's arguments may contain half a pair
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _place(template: jinja2.Template, parts: Any, traceback: TracebackType | None) -> str:
    """Returns the line of the template in which an error arose, as a part of an error message.

    `parts` is the generator of the output. It is suspended if the output became too long.
    """
    line = 0 if parts.gi_frame is None else template.get_corresponding_lineno(parts.gi_frame.f_lineno)
    while traceback is not None:
        of_template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if isinstance(of_template, jinja2.Template):
            line = of_template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return f" (line {line} of the template)" if line else ""
