"""Which format of tool calls a model writes: by name, or told by its chat template and its special tokens."""

from __future__ import annotations

from collections.abc import Collection

from common.errors import ConfigError
from common.settings.kinds import TOOL_PARSERS
from gateway.text.tools import mistral, pythonic
from gateway.text.tools.format import ToolFormat
from gateway.text.tools.hermes import HermesFormat
from gateway.text.tools.llama3 import TAG, Llama3Format
from gateway.text.tools.mistral import MistralFormat
from gateway.text.tools.pythonic import PythonicFormat


def choose_tool_format(name: str, template: str, tokens: Collection[str]) -> ToolFormat:
    """template: source of the chat template that gets tools; tokens: texts of the added tokens. Raises ConfigError.

    auto, first match wins: <tool_call> in the template is hermes; [TOOL_CALLS] there or among the tokens mistral;
    <|python_start|>, or an example like [func_name1(params_name1=...)], pythonic; <|python_tag|>, or "parameters" as
    the key of a call's arguments, llama3_json; hermes for all others.
    """
    match name if name != "auto" else _guess(template, tokens):
        case "hermes":
            return HermesFormat()
        case "llama3_json":
            return Llama3Format()
        case "mistral":
            return MistralFormat(named=mistral.ARGS in tokens)
        case "pythonic":
            return PythonicFormat()
        case _:
            raise ConfigError(f"tool_parser: {name!r} is not one of {', '.join(TOOL_PARSERS)}", field="tool_parser")


def _guess(template: str, tokens: Collection[str]) -> str:
    if "<tool_call>" in template:
        return "hermes"
    if mistral.BEGIN in template or mistral.BEGIN in tokens:
        return "mistral"
    if pythonic.START in template or pythonic.START in tokens or "func_name1(" in template:
        return "pythonic"
    if TAG in template or TAG in tokens or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return "hermes"
