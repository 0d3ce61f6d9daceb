"""Checks the messages of a chat and converts them to the form that chat templates take.

Content is always text. Arguments of calls are parsed, because templates print objects in their own way; arguments that
are not a JSON object stay text. Tool answers carry the name of the function that they answer. OpenAI's older form
(function_call, and the role function) becomes tool_calls and the role tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest
from gateway.api.http.json_fields import MAX_DEPTH, deeper_than, unsupported_value, wrong_type

#: Messages of one chat. A template takes some 10 us for each.
MAX_MESSAGES = 16384
#: Calls of one message.
MAX_CALLS = 1024

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def parse_messages(value: object) -> tuple[dict[str, Any], ...]:
    """Returns the messages as chat templates take them. Raises InvalidRequest, which names the place."""
    if value is None:
        raise InvalidRequest("messages is missing", field="messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array of messages", value)
    if not value:
        raise InvalidRequest("messages is empty", field="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"messages may have at most {MAX_MESSAGES} entries", field="messages")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(value)]
    _add_function_names(messages)
    return tuple(messages)


def _message(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    role = value.get("role")
    if not isinstance(role, str):
        raise wrong_type(f"{name}.role", "a string", role)
    if role not in _ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(_ROLES)}", field=f"{name}.role")
    content, calls = value.get("content"), _calls(value, name)
    if content is None and not (role == "assistant" and calls):
        raise InvalidRequest(f"{name}.content is missing", field=f"{name}.content")
    message = {**value, "role": _ROLES[role], "content": _content(content, f"{name}.content")}
    message.pop("tool_calls", None)
    message.pop("function_call", None)
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values, legacy_call = message.get("tool_calls"), message.get("function_call")
    if values is not None and not isinstance(values, list):
        raise wrong_type(f"{name}.tool_calls", "an array", values)
    if values and len(values) > MAX_CALLS:
        raise InvalidRequest(f"{name}.tool_calls may have at most {MAX_CALLS} entries", field=f"{name}.tool_calls")
    if not values and legacy_call is not None:
        return [{"type": "function", "function": _function(legacy_call, f"{name}.function_call")}]
    return [_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(values or ())]


def _call(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind, call_id = value.get("type", "function"), value.get("id")
    if kind != "function":
        raise InvalidRequest(f"{name}.type must be function", field=f"{name}.type")
    if call_id is not None and not isinstance(call_id, str):
        raise wrong_type(f"{name}.id", "a string", call_id)
    return {**value, "type": "function", "function": _function(value.get("function"), f"{name}.function")}


def _function(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    if not isinstance(value.get("name"), str):
        raise wrong_type(f"{name}.name", "a string", value.get("name"))
    arguments = value.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    elif not isinstance(arguments, dict):
        raise wrong_type(f"{name}.arguments", "a string", arguments)
    return {**value, "arguments": arguments}


def _object_or_text(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and not deeper_than(value, MAX_DEPTH) else text


def _content(value: object, name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of text parts", value)
    texts: list[str] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise wrong_type(f"{name}[{i}]", "an object", part)
        kind = part.get("type")
        if kind != "text":
            raise unsupported_value(f"{name}[{i}].type", kind, "text")
        text = part.get("text")
        if not isinstance(text, str):
            raise wrong_type(f"{name}[{i}].text", "a string", text)
        texts.append(text)
    return "\n".join(texts)


def _add_function_names(messages: list[dict[str, Any]]) -> None:
    """Adds to each tool answer the name of the function that it answers."""
    called: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                called[call["id"]] = call["function"]["name"]
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and "name" not in message and isinstance(answered, str) and answered in called:
            message["name"] = called[answered]
