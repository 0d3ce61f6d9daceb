"""Tools for chat templates that know nothing of them: described in the system message, in the format that is parsed.

The words are those of the templates that do know tools (Qwen 2.5), so that a model that saw them somewhere remembers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.tools.format import ToolCall, ToolFormat


def render_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], calls: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation without what only tools bring: calls and their answers become text."""
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
        made = message.get("tool_calls")
        if not made:
            plain.append(dict(message))
            continue
        written = calls.render_calls([_call(call["function"]) for call in made])
        plain.append({"role": message["role"], "content": "\n".join(filter(None, (message["content"], written)))})
    if not tools:
        return plain
    system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
    return [{"role": "system", "content": "\n\n".join(filter(None, (system, _described(tools, calls))))}, *plain]


def _call(function: Mapping[str, Any]) -> ToolCall:
    arguments = function["arguments"]
    # What a client sends back is not always an object: a format that writes objects gets one.
    return ToolCall("", function["name"], json.dumps(arguments if isinstance(arguments, dict) else {"": arguments}))


def _described(tools: Sequence[Mapping[str, Any]], calls: ToolFormat) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = calls.render_calls([ToolCall("", "function_name", '{"argument": "value"}')])
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        f"To call a function, write exactly this, with its name and its arguments:\n{example}"
    )
