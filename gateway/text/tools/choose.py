"""Chooses a model's format of tool calls, by name or by its chat template and special tokens."""

from __future__ import annotations

from collections.abc import Collection

from common.errors import ConfigError
from common.settings.kinds import TOOL_PARSERS
from gateway.text.tools import json_formats as formats
from gateway.text.tools import pythonic
from gateway.text.tools.format import ToolFormat
from gateway.text.tools.json_formats import HermesFormat, Llama3Format, MistralFormat
from gateway.text.tools.pythonic import PythonicFormat


def choose_tool_format(name: str, template: str, tokens: Collection[str]) -> ToolFormat:
    """Returns the format with this name. Raises ConfigError.

    "auto" takes the first row found in the chat template for tools or in the added tokens:

        <tool_call> in the template                                                hermes
        [TOOL_CALLS] in the template or a token                                    mistral
        <|python_start|> in either, or an example like [func_name1(...)]           pythonic
        <|python_tag|> in either, or "parameters" as the key of a call's arguments llama3_json
        otherwise                                                                  hermes
    """
    match name if name != "auto" else _guess(template, tokens):
        case "hermes":
            return HermesFormat()
        case "llama3_json":
            return Llama3Format()
        case "mistral":
            return MistralFormat(named=formats.MISTRAL_ARGS in tokens)
        case "pythonic":
            return PythonicFormat()
        case _:
            raise ConfigError(f"tool_parser: {name!r} is not one of {', '.join(TOOL_PARSERS)}", field="tool_parser")


def _guess(template: str, tokens: Collection[str]) -> str:
    if "<tool_call>" in template:
        return "hermes"
    if formats.MISTRAL_BEGIN in template or formats.MISTRAL_BEGIN in tokens:
        return "mistral"
    if pythonic.START in template or pythonic.START in tokens or "func_name1(" in template:
        return "pythonic"
    if (
        formats.LLAMA3_TAG in template
        or formats.LLAMA3_TAG in tokens
        or '"parameters": dictionary of argument name' in template
    ):
        return "llama3_json"
    return "hermes"
