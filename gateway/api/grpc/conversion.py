"""Converts tools, reasoning and structured output between gRPC messages and the fields of REST bodies.

The parsers of the REST API check the fields, so that both APIs accept the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from google.protobuf.message import Message

from common.errors import InvalidRequest, RequestTooLarge
from common.pb import inference_pb2
from gateway.api.http.json_value import MAX_DEPTH, Json, deeper_than
from gateway.serving.request import MAX_JSON_PARTS
from gateway.text.tools.format import ContentDelta, InvalidToolCall, MessageDelta, ReasoningDelta, ToolCallDelta

#: Parts that a message counts for, because it costs more than a plain entry.
MESSAGE_PARTS = 8
_MODES: dict[int, str] = {
    inference_pb2.ToolChoice.MODE_UNSPECIFIED: "auto",
    inference_pb2.ToolChoice.MODE_NONE: "none",
    inference_pb2.ToolChoice.MODE_REQUIRED: "required",
}

_EARLY_STOPPING: dict[int, bool | str] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    inference_pb2.EARLY_STOPPING_FIRST: True,
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}
_FORMS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_CHAT_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs")


def shared_fields(request: inference_pb2.GenerateRequest) -> Json:
    """Returns the fields of other names or types that chats and other prompts have."""
    fields: Json = {}
    if request.logit_bias:
        fields["logit_bias"] = {str(entry.token): entry.bias for entry in request.logit_bias}
    if request.HasField("structured_output"):
        structured_output = request.structured_output
        forms: Json = {_FORMS[f.name]: value for f, value in structured_output.ListFields()}
        if "choice" in forms:
            forms["choice"] = list(structured_output.choice.texts)
        fields["structured_outputs"] = forms
    return fields | {"early_stopping": _EARLY_STOPPING.get(request.early_stopping, request.early_stopping)}


def require_no_chat_fields(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidRequest for a field that only a chat may have."""
    given = {field.name for field, _ in request.ListFields()}
    for name in _CHAT_ONLY:
        if name in given:
            raise InvalidRequest(f"{name} is only for chat prompts", field=name)


def chat_fields(request: inference_pb2.GenerateRequest) -> Json:
    """Returns the fields of a chat. Raises InvalidRequest for text that is not JSON."""
    fields = conversation_fields(request)
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.HasField("include_reasoning"):
        fields["include_reasoning"] = request.include_reasoning
    return fields


def conversation_fields(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Json:
    """Returns the fields that the chat template renders. Raises InvalidRequest for text that is not JSON."""
    fields: Json = {"messages": [_message(message) for message in request.chat.messages]}
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    return fields


def add_deltas(message: inference_pb2.GenerateResponse, deltas: Iterable[MessageDelta]) -> None:
    """Puts the parsed meaning of an answer's text into its message, in place of the text."""
    text: list[str] = []
    reasoning: list[str] = []
    for delta in deltas:
        match delta:
            case ContentDelta(part) | InvalidToolCall(text=part):
                text.append(part)
            case ReasoningDelta(part):
                reasoning.append(part)
            case ToolCallDelta(index, arguments, call_id, name):
                message.tool_calls.add(index=index, id=call_id, name=name, arguments=arguments)
    message.text, message.reasoning = "".join(text), "".join(reasoning)


def _message(message: inference_pb2.ChatMessage) -> Json:
    out: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.name:
        out["name"] = message.name
    return out


def _tool(tool: inference_pb2.Function, name: str) -> Json:
    function: Json = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _object(tool.parameters, f"{name}.parameters")
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: inference_pb2.ToolChoice) -> str | Json:
    if choice.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    if choice.mode not in _MODES:
        raise InvalidRequest(f"tool_choice has the unknown mode {choice.mode}", field="tool_choice")
    return _MODES[choice.mode]


def _object(text: str, name: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be the text of a JSON object", field=name)
    if deeper_than(value, MAX_DEPTH):
        raise InvalidRequest(f"{name} is nested deeper than {MAX_DEPTH} levels", field=name)
    return value


def require_max_parts(message: Message, max_parts: Callable[[], int]) -> None:
    """Raises RequestTooLarge for more parts than `max_parts()` allows, because parsing them would block the event loop.

    An entry is one part, and an entry that is a message counts as MESSAGE_PARTS.
    """
    if message.ByteSize() > MAX_JSON_PARTS // MESSAGE_PARTS:  # a shorter message cannot have too many
        _subtract_parts(message, max_parts())


def _subtract_parts(message: Message, max_parts: int) -> int:
    for field, value in message.ListFields():
        if field.is_repeated:
            max_parts -= len(value) * (1 if field.message_type is None else MESSAGE_PARTS)
            if max_parts < 0:
                raise RequestTooLarge(f"{field.name} has more entries than a request may have", field=field.name)
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                max_parts = _subtract_parts(inner, max_parts)
    return max_parts
