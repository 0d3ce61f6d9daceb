"""Items of the Responses API: parsing of input items, and the chat messages that items stand for.

An assistant's turn is several items (reasoning, a message, calls), but one message of a chat.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from gateway.api.http.json_fields import unsupported_value, wrong_type

ResponseItem = dict[str, Any]

MAX_ITEMS = 16384
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_item_id(kind: str) -> str:
    """Returns a new item id of OpenAI's form."""
    return f"{_ID_PREFIXES[kind]}_{secrets.token_hex(16)}"


def parse_input(value: object) -> list[ResponseItem]:
    """Returns `input` as items in one form, each with an id. Raises InvalidRequest, which names the place."""
    if value is None:
        raise InvalidRequest("input is missing", field="input")
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}], None)]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array of items", value)
    if not value:
        raise InvalidRequest("input is empty", field="input")
    if len(value) > MAX_ITEMS:
        raise InvalidRequest(f"input may have at most {MAX_ITEMS} entries", field="input")
    return [_item(item, f"input[{i}]") for i, item in enumerate(value)]


def _item(value: object, name: str) -> ResponseItem:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get("type") or "message"
    if kind not in _KINDS:
        raise unsupported_value(f"{name}.type", kind, ", ".join(_KINDS))
    given = value.get("id")
    if given is not None and not isinstance(given, str):
        raise wrong_type(f"{name}.id", "a string", given)
    if kind == "message":
        role = value.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{name}.role must be one of {', '.join(_ROLES)}", field=f"{name}.role")
        part = "output_text" if role == "assistant" else "input_text"
        return _message(role, _parts(value.get("content"), f"{name}.content", part), given)
    item: ResponseItem = {"id": given or new_item_id(kind), "type": kind, "status": "completed"}
    if kind == "function_call":
        for member in ("call_id", "name", "arguments"):
            item[member] = _string(value.get(member), f"{name}.{member}")
        return item
    if kind == "function_call_output":
        output = value.get("output")
        text = output if isinstance(output, str) else _text(_parts(output, f"{name}.output", "input_text"))
        return {**item, "call_id": _string(value.get("call_id"), f"{name}.call_id"), "output": text}
    parts = {member: value.get(member) or [] for member in ("summary", "content")}
    summary = _parts(parts["summary"], f"{name}.summary", "summary_text")
    return {**item, "summary": summary, "content": _parts(parts["content"], f"{name}.content", "reasoning_text")}


def _message(role: str, content: list[ResponseItem], given: str | None) -> ResponseItem:
    item = {"id": given or new_item_id("message"), "type": "message", "role": role}
    return {**item, "content": content, "status": "completed"}


def _parts(value: object, name: str, kind: str) -> list[ResponseItem]:
    """Parses text parts. All get the type `kind`, because their own types do not matter for a chat."""
    if isinstance(value, str):
        return [_part(kind, value)]
    if value is None:
        raise InvalidRequest(f"{name} is missing", field=name)
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of text parts", value)
    parts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise wrong_type(f"{name}[{i}]", "an object", part)
        given = part.get("type")
        if given not in _TEXT_PARTS:
            raise unsupported_value(f"{name}[{i}].type", given, "text")
        member = "refusal" if given == "refusal" else "text"
        parts.append(_part(kind, _string(part.get(member), f"{name}[{i}].{member}")))
    return parts


def _part(kind: str, text: str) -> ResponseItem:
    part: ResponseItem = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def _string(value: object, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"{name} is missing", field=name)
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


def _text(parts: Sequence[ResponseItem]) -> str:
    return "\n".join(part["text"] for part in parts)


def to_messages(instructions: str | None, items: Sequence[ResponseItem]) -> list[ResponseItem]:
    """Returns the chat messages that the items stand for.

    Instructions, and system messages directly after them, become one system message.
    """
    messages: list[ResponseItem] = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn: ResponseItem | None = None  # the assistant's open turn, to which further items may belong
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            turn = None
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
                messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{_text(item['content'])}"}
            else:
                messages.append({"role": role, "content": _text(item["content"])})
            turn = None
        else:
            if turn is None or not _continues(turn, kind):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add(turn, item)
    return [message for message in messages if not _is_empty_turn(message)]


def _continues(turn: ResponseItem, kind: str) -> bool:
    """Returns whether an item belongs to the open turn.

    Reasoning begins a turn, and a message comes before calls.
    """
    if kind == "function_call":
        return True
    return kind == "message" and turn["content"] is None and "tool_calls" not in turn


def _add(turn: ResponseItem, item: ResponseItem) -> None:
    if item["type"] == "reasoning":
        turn["reasoning_content"] = _text(item["content"] or item["summary"])
    elif item["type"] == "message":
        turn["content"] = _text(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _is_empty_turn(message: ResponseItem) -> bool:
    """Returns whether a message is reasoning that no content or call followed."""
    return message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message
