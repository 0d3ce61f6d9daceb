"""Items of the Responses API: parsing of input items, and the chat messages that items stand for.

An assistant's turn is several items (reasoning, a message, calls), but one message of a chat.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from common.errors import InvalidRequest
from gateway.api.openai.conversation import MAX_CALLS, MAX_MESSAGES
from gateway.api.openai.fields import ARRAY, BY_KIND, STRING, by_type

ResponseItem = dict[str, Any]

MAX_ITEMS = 16384
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class TextPart(TypedDict):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(TypedDict):
    """A part of an answer that is a refusal."""

    type: Literal["refusal"]
    refusal: str


def _kind_of_part(value: Any) -> str:
    return "<refusal>" if isinstance(value, dict) and value.get("type") == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_kind_of_part)
]
Parts = Annotated[Annotated[str, STRING] | Annotated[list[Part], Field(fail_fast=True), ARRAY], BY_KIND]


class MessageItem(TypedDict):
    """A message of the conversation."""

    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: NotRequired[str | None]


class FunctionCallItem(TypedDict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: NotRequired[str | None]


class FunctionCallOutputItem(TypedDict):
    """The answer to a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: NotRequired[str | None]


class ReasoningItem(TypedDict):
    """The reasoning section of an earlier answer."""

    type: Literal["reasoning"]
    summary: NotRequired[Parts | None]
    content: NotRequired[Parts | None]
    id: NotRequired[str | None]


def _kind_of_item(value: Any) -> str | None:
    kind = (value.get("type") or "message") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) and kind in _ID_PREFIXES else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    by_type(_kind_of_item, ", ".join(_ID_PREFIXES)),
]


def new_item_id(kind: str) -> str:
    """Returns a new item id of OpenAI's form."""
    return f"{_ID_PREFIXES[kind]}_{secrets.token_hex(16)}"


def parse_input(value: str | Sequence[Mapping[str, Any]]) -> list[ResponseItem]:
    """Returns a checked `input` as items in one form, each with an id."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_item(item) for item in value]


def _item(given: Mapping[str, Any]) -> ResponseItem:
    kind = given.get("type") or "message"
    item: ResponseItem = {"id": given.get("id") or new_item_id(kind), "type": kind, "status": "completed"}
    match kind:
        case "message":
            part = "output_text" if given["role"] == "assistant" else "input_text"
            return {**item, "role": given["role"], "content": _parts(given["content"], part)}
        case "function_call":
            return {**item, **{name: given[name] for name in ("call_id", "name", "arguments")}}
        case "function_call_output":
            return {**item, "call_id": given["call_id"], "output": _text(_parts(given["output"], "input_text"))}
    summary, content = (given.get(name) or [] for name in ("summary", "content"))
    return {**item, "summary": _parts(summary, "summary_text"), "content": _parts(content, "reasoning_text")}


def _parts(value: str | Sequence[Mapping[str, str]], kind: str) -> list[ResponseItem]:
    """Returns text parts. All get the type `kind`, because their own types do not matter for a chat."""
    texts = [value] if isinstance(value, str) else [part.get("text") or part.get("refusal", "") for part in value]
    more: ResponseItem = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]


def _text(parts: Sequence[ResponseItem]) -> str:
    return "\n".join(part["text"] for part in parts)


def to_messages(instructions: str | None, items: Sequence[ResponseItem]) -> list[ResponseItem]:
    """Returns the chat messages that the items stand for.

    Instructions, and system messages directly after them, become one system message. Raises InvalidRequest for too many
    messages or calls, or no message.
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
    messages = [message for message in messages if not _is_empty_turn(message)]
    if not messages:
        raise InvalidRequest("input has no message", field="input")
    if len(messages) > MAX_MESSAGES or any(len(message.get("tool_calls", ())) > MAX_CALLS for message in messages):
        text = f"input may stand for at most {MAX_MESSAGES} messages with at most {MAX_CALLS} calls each"
        raise InvalidRequest(text, field="input")
    return messages


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
