"""Tools for chat templates that do not know them: described in the system message, in the format that is parsed.

The wording is taken from Qwen 2.5's templates, because a model may have seen it in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.tools.format import ToolCall, ToolFormat


def render_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Returns the chat for a template without tools: calls and their answers become text, tools a system message."""
    plain: list[dict[str, Any]] = []
    answers: dict[str, Any] | None = None
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answers is None:
                plain.append(answers := {"role": "user", "content": text})
            else:
                answers["content"] += f"\n{text}"
            continue
        answers = None
        calls = message.get("tool_calls")
        if not calls:
            plain.append(dict(message))
            continue
        written = tool_format.render_calls([_call(call["function"]) for call in calls])
        plain.append({"role": message["role"], "content": "\n".join(filter(None, (message["content"], written)))})
    if not tools:
        return plain
    system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
    return [{"role": "system", "content": "\n\n".join(filter(None, (system, _described(tools, tool_format))))}, *plain]


def _call(function: Mapping[str, Any]) -> ToolCall:
    arguments = function["arguments"]
    # A client may send arguments that are not an object; formats that write objects need one.
    return ToolCall("", function["name"], json.dumps(arguments if isinstance(arguments, dict) else {"": arguments}))


def _described(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = tool_format.render_calls([ToolCall("", "function_name", '{"argument": "value"}')])
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        f"To call a function, write exactly this, with its name and its arguments:\n{example}"
    )
