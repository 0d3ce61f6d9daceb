"""Parses and checks a /v1/responses body, and makes the chat that it asks for.

`parse_chat` checks the fields that a chat request has too, so that both endpoints treat them alike.
`rename_fields` gives its errors the field names of this endpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from gateway.api.http.json_fields import Json, JsonFields, unsupported_value, wrong_type
from gateway.api.openai.requests import MAX_LOGPROBS, parse_chat, refuse_unsupported
from gateway.api.openai.responses.items import ResponseItem, parse_input, to_messages
from gateway.serving.request import ChatBody

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"

#: Fields with the same name and meaning in a chat: first OpenAI's, then extensions.
_CHAT_FIELDS = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls"),
    *("top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("cache_salt", "priority", "chat_template_kwargs"),
)
#: Unsupported fields, and the values that are accepted because they change nothing.
_ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": (),
}
#: Patterns for names of a chat's fields, and the names in this endpoint. All patterns are applied, in this order.
_FIELD_NAMES = (
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^messages\b(\[\d+\][\w.\[\]]*)?|\bmessages\[\d+\][\w.\[\]]*"), "input"),
)


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A checked /v1/responses body."""

    #: The input items of this request, without the items of a previous response.
    input: tuple[ResponseItem, ...]
    instructions: str | None
    previous_response_id: str | None
    store: bool
    #: Fields that the answer repeats.
    echoed_fields: Json
    #: The chat's body without its messages.
    chat_fields: Json
    #: The chat to answer if there is no previous response.
    chat_body: ChatBody

    def chat_body_after(self, items: Sequence[ResponseItem]) -> ChatBody:
        """Returns the chat to answer after the items of a previous response. Raises InvalidRequest."""
        return _to_chat_body(self.chat_fields, self.instructions, [*items, *self.input])


def _to_chat_body(body: Json, instructions: str | None, items: Sequence[ResponseItem]) -> ChatBody:
    """Parses the chat that a response asks for. Raises InvalidRequest with field names of this endpoint."""
    try:
        chat = parse_chat({**body, "messages": to_messages(instructions, items)})
    except InvalidRequest as e:
        raise rename_fields(e) from e
    return dataclasses.replace(chat, spec=dataclasses.replace(chat.spec, max_tokens_field="max_output_tokens"))


def rename_fields(error: InvalidRequest) -> InvalidRequest:
    """Returns an error of the chat's parser with the field names of this endpoint."""
    message, field = error.message, error.field
    for pattern, name in _FIELD_NAMES:
        message = pattern.sub(name, message)
        field = pattern.sub(name, field) if field else field
    return type(error)(message, field=field)


def parse_response(body: object) -> ResponseBody:
    """Checks a /v1/responses body. Raises InvalidRequest, which names the field."""
    fields = JsonFields.of_body(body)
    refuse_unsupported(fields, _ACCEPTED_VALUES)
    instructions = fields.string("instructions", 1 << 30)
    tools, tool_choice = _parse_tools(fields)
    text = JsonFields(fields.mapping("text") or {}, "text.")
    output_format = _parse_format(text.mapping("format"))
    reasoning = JsonFields(fields.mapping("reasoning") or {}, "reasoning.")
    effort = reasoning.string("effort", 32)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wants_logprobs = LOGPROBS in _parse_include(fields) or bool(top_logprobs)
    chat_fields: Json = {name: value for name in _CHAT_FIELDS if (value := fields.raw(name)) is not None}
    chat_fields |= {
        "max_completion_tokens": fields.integer("max_output_tokens", 1, 2**31 - 1),
        "logprobs": wants_logprobs,
        "top_logprobs": (top_logprobs or 0) if wants_logprobs else None,
        "response_format": _to_response_format(output_format),
        "reasoning_effort": effort,
    }
    if tools:
        functions = [tool for tool in tools if tool["name"] in _callable_names(tool_choice, tools)]
        chat_fields["tools"] = [{"type": "function", "function": _to_chat_function(tool)} for tool in functions]
        chat_fields["tool_choice"] = _to_chat_tool_choice(tool_choice)
    elif tool_choice not in ("none", "auto"):
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    echoed_fields: Json = {
        "instructions": instructions,
        "max_output_tokens": chat_fields["max_completion_tokens"],
        "metadata": _parse_metadata(fields),
        "model": fields.raw("model"),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls") is not False,
        "previous_response_id": fields.string("previous_response_id", 256),
        "reasoning": {"effort": effort, "summary": None},
        "temperature": _or_one(fields.raw("temperature")),
        "text": {"format": output_format},
        "tool_choice": tool_choice,
        "tools": tools,
        "top_logprobs": top_logprobs or 0,
        "top_p": _or_one(fields.raw("top_p")),
    }
    items = parse_input(fields.raw("input"))
    return ResponseBody(
        input=tuple(items),
        instructions=instructions,
        previous_response_id=echoed_fields["previous_response_id"],
        store=fields.boolean("store") is not False,
        echoed_fields=echoed_fields,
        chat_fields=chat_fields,
        chat_body=_to_chat_body(chat_fields, instructions, items),
    )


def _or_one(value: Any) -> Any:
    return 1.0 if value is None else value


def _parse_include(fields: JsonFields) -> list[str]:
    """Parses the names of the further parts that the answer includes."""
    value = fields.raw("include")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise wrong_type("include", "an array of strings", value)
    return value


def _parse_metadata(fields: JsonFields) -> Json:
    metadata = fields.mapping("metadata") or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata may have at most {MAX_METADATA} entries", field="metadata")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise wrong_type("metadata", "an object of strings", value)
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequest("metadata keys have at most 64 characters, values 512", field="metadata")
    return metadata


def _parse_format(output_format: Json | None) -> Json:
    """Parses text.format into the form that the answer repeats."""
    kind = "text" if output_format is None else output_format.get("type")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        raise InvalidRequest("text.format.type must be text, json_object or json_schema", field="text.format.type")
    assert output_format is not None
    members = {name: output_format.get(name) for name in ("name", "schema", "strict", "description")}
    return {"type": kind, **{name: value for name, value in members.items() if value is not None}}


def _to_response_format(output_format: Json) -> Json:
    """Returns the response_format of a chat for a parsed text.format."""
    if output_format["type"] != "json_schema":
        return output_format
    return {
        "type": "json_schema",
        "json_schema": {name: output_format[name] for name in output_format if name != "type"},
    }


def _parse_tools(fields: JsonFields) -> tuple[list[Json], Any]:
    """Parses tools and tool_choice into the form that the answer repeats."""
    value, choice = fields.raw("tools"), fields.raw("tool_choice")
    if value is not None and not isinstance(value, list):
        raise wrong_type("tools", "an array of tools", value)
    tools: list[Json] = []
    for i, tool in enumerate(value or []):
        if not isinstance(tool, dict):
            raise wrong_type(f"tools[{i}]", "an object", tool)
        kind, name = tool.get("type"), tool.get("name")
        if kind != "function":
            raise unsupported_value(f"tools[{i}].type", kind, "function")
        if not isinstance(name, str):
            raise wrong_type(f"tools[{i}].name", "a string", name)
        optional = {member: tool.get(member) for member in ("description", "parameters", "strict")}
        tools.append({"type": "function", "name": name, **optional, "strict": optional["strict"] or False})
    return tools, _parse_tool_choice("auto" if choice is None else choice)


def _parse_tool_choice(choice: object) -> Any:
    """Parses tool_choice into the form that the answer repeats."""
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return choice
        raise InvalidRequest("tool_choice must be none, auto, required or an object", field="tool_choice")
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "a string or an object", choice)
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "name": choice["name"]}
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required") and isinstance(choice.get("tools"), list):
        return {"type": kind, "mode": choice["mode"], "tools": choice["tools"]}
    raise InvalidRequest("tool_choice must name a function, or allowed_tools with a mode", field="tool_choice")


def _callable_names(choice: Any, tools: Sequence[Json]) -> set[str]:
    """Returns the names of the functions that may be called. Raises InvalidRequest."""
    names = {tool["name"] for tool in tools}
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        chosen = {tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)}
        if not chosen or not chosen <= names:
            raise InvalidRequest("tool_choice.tools must name some of the tools", field="tool_choice.tools")
        return {name for name in names if name in chosen}
    return names


def _to_chat_tool_choice(choice: Any) -> Any:
    """Returns the tool_choice of a chat for a parsed tool_choice."""
    if isinstance(choice, str):
        return choice
    return (
        choice["mode"]
        if choice["type"] == "allowed_tools"
        else {"type": "function", "function": {"name": choice["name"]}}
    )


def _to_chat_function(tool: Json) -> Json:
    """Returns the function of a chat's tool for a parsed tool."""
    members = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in members if tool[name] is not None}
