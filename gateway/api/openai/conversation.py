"""Messages and tools of a chat: their models, and their conversion to the form that chat templates take.

Content becomes text. Arguments of calls are parsed, because templates print objects in their own way; arguments that
are not a JSON object stay text. Tool answers carry the name of the function that they answer. OpenAI's older forms
(functions, function_call, and the role function) become tools, tool_calls and the role tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from common.errors import InvalidRequest
from gateway.api.http.json import MAX_DEPTH, deeper_than, without_lone_surrogates
from gateway.api.openai.fields import ARRAY, BY_KIND, KEEP, OBJECT, STRING, Only, Refused, by_type, told_by
from gateway.text.tools.format import Function, RequestTools

MAX_MESSAGES = 16384  #: Messages of one chat. A template takes some 10 us for each.
MAX_CALLS = 1024  #: Calls of one message.
MAX_TOOLS = 512
_ROLES = {"developer": "system", "function": "tool"}
_parse_json = json.JSONDecoder().decode  # a body may have 40,000 calls


class TextContent(TypedDict):
    """A text as a part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalContent(TypedDict):
    """A refusal of an earlier answer as a part of its content."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[TextContent, Tag("<text>")] | Annotated[RefusalContent, Tag("<refusal>")],
    by_type(
        lambda value: (
            {"text": "<text>", "refusal": "<refusal>"}.get(str(value.get("type"))) if isinstance(value, dict) else None
        ),
        "text and refusal",
    ),
]


class CalledFunction(TypedDict):
    """A call of an earlier answer."""

    name: str
    arguments: NotRequired[Annotated[Annotated[str, STRING] | Annotated[dict[str, Any], OBJECT], BY_KIND] | None]


class Call(TypedDict):
    """An entry of `tool_calls`."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


Content = Annotated[Annotated[str, STRING] | Annotated[list[ContentPart], Field(fail_fast=True), ARRAY], BY_KIND]
Calls = Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)]


class Message(TypedDict):
    """A message of a chat. Templates also get its other members."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content
    tool_calls: NotRequired[Calls | None]
    function_call: NotRequired[CalledFunction | None]


class CallingMessage(TypedDict):
    """A message with calls, which needs no content."""

    role: Literal["assistant"]
    content: NotRequired[Content | None]
    tool_calls: Annotated[Calls, Field(min_length=1)]


class RefusingMessage(TypedDict):
    """An earlier answer that is a refusal, which needs no content."""

    role: Literal["assistant"]
    content: NotRequired[Content | None]
    refusal: str


class OldCallingMessage(TypedDict):
    """A message with a call in the older form."""

    role: Literal["assistant"]
    content: NotRequired[Content | None]
    function_call: CalledFunction


def _kind_of_message(value: Any) -> str:
    if isinstance(value, dict) and value.get("role") == "assistant":
        if value.get("tool_calls"):
            return "<calling>"
        if value.get("function_call") is not None:
            return "<old>"
        if value.get("refusal") is not None and value.get("content") is None:
            return "<refusing>"
    return "<message>"


AnyMessage = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[CallingMessage, Tag("<calling>")]
    | Annotated[OldCallingMessage, Tag("<old>")]
    | Annotated[RefusingMessage, Tag("<refusing>")],
    Discriminator(_kind_of_message),
]
Messages = Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), KEEP]


class FunctionSchema(TypedDict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: NotRequired[Annotated[str, Field(max_length=1 << 16)] | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionSchema


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), KEEP]
Functions = Annotated[list[FunctionSchema], Field(max_length=MAX_TOOLS, fail_fast=True), KEEP]


class FunctionName(TypedDict):
    """The name of a declared function."""

    name: str


class NamedTool(TypedDict):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(TypedDict):
    """Tools of which some may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedToolsChoice(TypedDict):
    """A `tool_choice` of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "<mode>" if value in ("none", "auto", "required") else None
    if value.get("type") == "function" and isinstance(value.get("function"), dict):
        return "<named>"
    return "<allowed>" if value.get("type") == "allowed_tools" else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    told_by(_kind_of_choice, "must be none, auto, required, or an object with the type function or allowed_tools"),
]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], STRING] | Annotated[FunctionName, OBJECT],
    told_by(
        lambda value: "<object>" if isinstance(value, dict) else "<string>" if value in ("none", "auto") else None,
        "must be none, auto or a function",
    ),
]


class ReservedVariables(TypedDict, total=False):
    """Variables of the chat template that other fields of the request set."""

    messages: Refused
    tools: Refused
    documents: Annotated[Any, Only([])]
    add_generation_prompt: Annotated[Any, Only(True)]
    continue_final_message: Annotated[Any, Only(False)]


TemplateVariables = Annotated[ReservedVariables, KEEP]


def template_variables(variables: TemplateVariables | None, reasoning_effort: str | None = None) -> dict[str, Any]:
    """Returns the template variables. Templates of reasoning models use reasoning_effort or enable_thinking, if any."""
    effort: dict[str, Any] = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    if reasoning_effort == "none":
        effort["enable_thinking"] = False
    return {**effort, **(variables or {})}


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Returns checked messages as chat templates take them."""
    converted = [_message(message) for message in messages]
    called: dict[str, str] = {}
    for message in converted:
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call.get("id")}
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and "name" not in message and isinstance(answered, str) and answered in called:
            message["name"] = called[answered]
    return tuple(converted)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, calls = message["role"], message.get("tool_calls")
    content = message.get("content") or (message.get("refusal") if role == "assistant" else None) or ""
    if not calls and message.get("function_call") is not None:
        calls = [{"type": "function", "function": message["function_call"]}]
    if not isinstance(content, str):
        content = "\n".join(part["text"] if part["type"] == "text" else part["refusal"] for part in content)
    converted = {**message, "role": _ROLES.get(role, role), "content": content}
    converted.pop("tool_calls", None)
    converted.pop("function_call", None)
    if calls:
        converted["tool_calls"] = [
            {**call, "type": "function", "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return converted


def _arguments(function: Mapping[str, Any]) -> dict[str, Any] | str:
    arguments: dict[str, Any] | str = function.get("arguments") or {}
    if isinstance(arguments, dict):
        return arguments
    try:
        value = _parse_json(arguments)
    except (ValueError, RecursionError):
        return arguments
    deep = arguments.count("{") + arguments.count("[") > MAX_DEPTH and deeper_than(value, MAX_DEPTH)
    if deep or not isinstance(value, dict):
        return arguments
    # Python's parser takes half a surrogate pair, which no tokenizer can encode.
    return without_lone_surrogates(value) if "\\u" in arguments else value


def declared_functions(functions: Sequence[Mapping[str, Any]], field: str, inner: str = "") -> dict[str, Function]:
    """Returns the functions of a request's field by name. `inner` is the path from an entry to its function.

    Raises InvalidRequest for parameters of no object, or two functions of the same name.
    """
    declared: dict[str, Function] = {}
    for i, function in enumerate(functions):
        place, schema = f"{field}[{i}]{inner}.parameters", function.get("parameters") or {}
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"{place} must describe an object", field=place)
        if not isinstance(schema.get("properties"), dict | None):
            raise InvalidRequest(f"{place}.properties must be an object", field=f"{place}.properties")
        name = function["name"]
        if name in declared:
            raise InvalidRequest(f"{field} has two functions of the same name", field=field)
        declared[name] = Function(name, schema, strict=function.get("strict") or False, field=place)
    return declared


def is_named(choice: Any) -> bool:
    """Whether a ToolChoice names one function, which is then called exactly once."""
    return isinstance(choice, dict) and choice["type"] == "function"


def chat_tools(
    tools: Sequence[Tool], tool_choice: Any, functions: Sequence[FunctionSchema], function_call: Any, *, parallel: bool
) -> RequestTools | None:
    """Returns the tools of a chat, None if no tool may be called. Raises InvalidRequest, which names the place.

    tool_choice and function_call are a checked ToolChoice and FunctionChoice.
    """
    if tools and functions:
        raise InvalidRequest("tools and functions exclude each other", field="functions")
    template_tools: tuple[dict[str, Any], ...]
    if legacy := bool(functions):
        template_tools = tuple({"type": "function", "function": function} for function in functions)
        by_name = declared_functions(functions, "functions")
    else:
        template_tools = tuple({**tool} for tool in tools)
        by_name = declared_functions([tool["function"] for tool in tools], "tools", ".function")
    chosen, chosen_function = _chosen(tool_choice, by_name), _chosen_function(function_call, by_name)
    mode, names = chosen_function if legacy else chosen
    if not by_name or mode == "none":
        return None
    return RequestTools(
        tuple(function for name, function in by_name.items() if names is None or name in names),
        template_tools,
        required=mode == "required",
        parallel=parallel and not legacy and not is_named(tool_choice),
        legacy=legacy,
        field="functions" if legacy else "tools",
    )


def _chosen(choice: Any, by_name: Mapping[str, Function]) -> tuple[str, set[str] | None]:
    """Returns the mode of a ToolChoice and the names of the functions that may be called (None: all)."""
    if choice == "required" and not by_name:
        raise InvalidRequest("tool_choice is required, and there are no tools", field="tool_choice")
    if choice is None or isinstance(choice, str):
        return choice or "auto", None
    if choice["type"] == "function":
        return "required", {require_declared(choice["function"]["name"], "tool_choice.function.name", by_name)}
    allowed, place = choice["allowed_tools"], "tool_choice.allowed_tools.tools"
    return allowed["mode"], {
        require_declared(tool["function"]["name"], f"{place}[{i}].function.name", by_name)
        for i, tool in enumerate(allowed["tools"])
    }


def _chosen_function(choice: Any, by_name: Mapping[str, Function]) -> tuple[str, set[str] | None]:
    if choice is None or isinstance(choice, str):
        return choice or "auto", None
    return "required", {require_declared(choice["name"], "function_call.name", by_name)}


def require_declared(name: str, field: str, by_name: Mapping[str, Function]) -> str:
    """Returns the name if it is one of the declared functions. Raises InvalidRequest."""
    if name not in by_name:
        raise InvalidRequest(f"{field} {name[:128]!r} is not one of the functions that the request has", field=field)
    return name
