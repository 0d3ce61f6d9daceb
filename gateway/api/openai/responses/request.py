"""A body of /v1/responses and the chat that it asks for: its items, and the parameters of chats under other names."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from typing_extensions import TypedDict

from common.errors import InvalidRequest
from gateway.api.http.json import Json
from gateway.api.openai.bodies import MAX_LOGPROBS, Conversation, Sampling
from gateway.api.openai.conversation import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    FunctionSchema,
    chat_messages,
    declared_functions,
    is_named,
    require_declared,
    template_variables,
)
from gateway.api.openai.fields import (
    ARRAY,
    BY_KIND,
    INT32_MAX,
    STRING,
    Ignored,
    Only,
    Refused,
    RequestModel,
    by_type,
    param,
    told_by,
    validated,
)
from gateway.api.openai.requests import format_grammar, generation_spec
from gateway.serving.request import ChatBody, GenerationSpec
from gateway.text.tools.format import Function, RequestTools

ResponseItem = dict[str, Any]

MAX_ITEMS = 16384
MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
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
    status: NotRequired[Any]


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


class OutputFormat(TypedDict, total=False):
    """`text.format`."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    name: Annotated[str, Field(max_length=1024)] | None
    schema: dict[str, Any] | None
    strict: bool | None
    description: str | None


class TextOptions(RequestModel):
    """`text`."""

    format: OutputFormat | None = param("text, json_object or json_schema, see response_format of chats.", words="text")


class ReasoningOptions(RequestModel):
    """`reasoning`."""

    effort: str | None = param("See reasoning_effort of chats.", max_length=32)


class FunctionType(TypedDict):
    """The type of a function, which is checked before its other members."""

    type: Literal["function"]


class FunctionTool(FunctionType, FunctionSchema):
    """A function in `tools`."""


class OtherTool(TypedDict):
    """A tool that is not a function, like web_search; the model does not see it."""

    type: Annotated[str, Field(json_schema_extra={"not": {"const": "function"}})]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(
        lambda value: "<function>" if isinstance(value, dict) and value.get("type") == "function" else "<other>"
    ),
]


class NamedFunction(TypedDict):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    name: str


class AllowedFunctions(TypedDict):
    """A `tool_choice` of several functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Any]


def _kind_of_choice(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "<mode>" if value in ("none", "auto", "required") else None
    if value.get("type") == "function" and isinstance(value.get("name"), str):
        return "<named>"
    allowed = value.get("type") == "allowed_tools" and value.get("mode") in ("auto", "required")
    return "<allowed>" if allowed and isinstance(value.get("tools"), list) else None


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedFunction, Tag("<named>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    told_by(
        _kind_of_choice,
        "must be none, auto, required, a named function, or allowed_tools with mode and tools; the model cannot call "
        "other tools",
    ),
]


def _metadata(metadata: Any) -> Any:
    if not isinstance(metadata, dict):
        return metadata
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata may have at most {MAX_METADATA} entries", field="metadata")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > 64 or len(value) > 512:
            text = "metadata must have keys of at most 64 characters, and strings of at most 512 characters"
            raise InvalidRequest(text, field="metadata")
    return metadata


_LABELS = {
    "type": "object",
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
    "maxProperties": MAX_METADATA,
}


#: A field in which other APIs have a format. To ignore it would give an answer without the format.
FormatElsewhere = Annotated[Any, Only("", {}, hint="put a schema into text.format")]


class ResponseRequest(Sampling, Conversation):
    """A body of /v1/responses."""

    input: Annotated[
        Annotated[str, STRING]
        | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), ARRAY],
        BY_KIND,
    ] = param("A text, or items: messages, function_call, function_call_output, reasoning.", ...)
    instructions: str | None = param("A system message before the input; not stored for later responses.")
    max_output_tokens: int | None = param(
        "Max tokens after the prompt; both must fit the context.", words="the rest of the context", ge=1, le=INT32_MAX
    )
    previous_response_id: str | None = param("Continues a response stored in Redis; 404 if it expired.", max_length=256)
    store: bool = param(
        "Stores the response in Redis for --response-ttl-s; `store` in the answer is false without Redis.", True
    )
    text: TextOptions | None = param("How the answer is written.")
    reasoning: ReasoningOptions | None = param("Options of reasoning models.")
    include: Annotated[list[str], Field(fail_fast=True)] = param(
        "message.output_text.logprobs is supported; other entries have no effect.", []
    )
    top_logprobs: int = param("Number of alternatives per token.", 0, ge=0, le=MAX_LOGPROBS)
    metadata: Annotated[dict[str, Any], BeforeValidator(_metadata), WithJsonSchema(_LABELS)] = param(
        "Labels that the answer repeats.", {}
    )
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = param(
        "Functions that the model may call. Other tools (web_search, custom, namespaces) are left out.", []
    )
    tool_choice: Choice = param("Tools that may or must be called: a mode, a function, or allowed_tools.", "auto")
    background: Annotated[Any, Only(False)] = param("Answering later.")
    truncation: Annotated[Any, Only("disabled")] = param("Dropping items that do not fit.")
    response_format: FormatElsewhere = param("The place of a format in chats; here it is text.format.")
    structured_outputs: FormatElsewhere = param("The same.")
    guided_json: FormatElsewhere = param("The same.")
    guided_regex: FormatElsewhere = param("The same.")
    guided_choice: FormatElsewhere = param("The same.")
    guided_grammar: FormatElsewhere = param("The same.")
    conversation: Refused = param("Conversations as objects.")
    prompt: Refused = param("Stored prompt templates.")
    context_management: Refused = param("Compaction of long conversations.")
    max_tool_calls: Ignored = param("A limit for built-in tools, of which there are none.")
    stream_options: Ignored = param("Padding against eavesdroppers.")


def new_item_id(kind: str, source: random.Random | None = None) -> str:
    """Returns a new item id of OpenAI's form, from `source` or from the system."""
    return f"{_ID_PREFIXES[kind]}_{secrets.token_hex(16) if source is None else source.randbytes(16).hex()}"


def _item(given: Mapping[str, Any]) -> ResponseItem:
    """Returns a checked item of `input` in one form, with an id."""
    kind = given.get("type") or "message"
    item: ResponseItem = {"id": given.get("id") or new_item_id(kind), "type": kind, "status": "completed"}
    match kind:
        case "message":
            part = "output_text" if given["role"] == "assistant" else "input_text"
            return {**item, "role": given["role"], "content": _parts(given["content"], part)}
        case "function_call":
            item["status"] = "incomplete" if given.get("status") == "incomplete" else "completed"
            return {**item, **{name: given[name] for name in ("call_id", "name", "arguments")}}
        case "function_call_output":
            return {**item, "call_id": given["call_id"], "output": _text(_parts(given["output"], "input_text"))}
    summary, content = (given.get(name) or [] for name in ("summary", "content"))
    return {**item, "summary": _parts(summary, "summary_text"), "content": _parts(content, "reasoning_text")}


def _parts(value: str | Sequence[Mapping[str, str]], kind: str) -> list[ResponseItem]:
    """Returns text parts of the type `kind`, because their own types do not matter for a chat."""
    texts = [value] if isinstance(value, str) else [part.get("text") or part.get("refusal", "") for part in value]
    more: ResponseItem = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]


def _text(parts: Sequence[ResponseItem]) -> str:
    return "\n".join(part["text"] for part in parts)


def _messages(instructions: str | None, items: Sequence[ResponseItem]) -> list[ResponseItem]:
    """Returns the chat messages that the items stand for.

    Instructions, and system messages directly after them, become one system message. An assistant's turn is several
    items (reasoning, a message, calls), but one message. A call that is incomplete and has no output is left out,
    because its arguments are not JSON. Raises InvalidRequest for too many messages or calls, or no message.
    """
    answered = {item["call_id"] for item in items if item["type"] == "function_call_output"}
    system = [] if instructions is None else [instructions]
    messages: list[ResponseItem] = []
    turn: ResponseItem | None = None  # the assistant's open turn, to which further items may belong
    for item in items:
        kind = item["type"]
        if kind == "function_call" and item["status"] == "incomplete" and item["call_id"] not in answered:
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            turn = None
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            if role == "system" and not messages:
                system.append(_text(item["content"]))
            else:
                messages.append({"role": role, "content": _text(item["content"])})
            turn = None
        else:
            # Reasoning begins a turn, and a message comes before calls.
            if turn is None or not (kind == "function_call" or (kind == "message" and _is_empty_turn(turn))):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add(turn, item)
    opening = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    messages = [*opening, *(message for message in messages if not _is_empty_turn(message))]
    if not messages:
        raise InvalidRequest("input has no message", field="input")
    if len(messages) > MAX_MESSAGES or any(len(message.get("tool_calls", ())) > MAX_CALLS for message in messages):
        text = f"input may stand for at most {MAX_MESSAGES} messages with at most {MAX_CALLS} calls each"
        raise InvalidRequest(text, field="input")
    return messages


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


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A checked /v1/responses body."""

    input: tuple[ResponseItem, ...]  #: The items of this request, without those of a previous response.
    previous_response_id: str | None
    store: bool
    echoed_fields: Json  #: Fields that the answer repeats.
    spec: GenerationSpec
    template_kwargs: Json
    tools: RequestTools | None

    def chat(self, previous_items: Sequence[ResponseItem] = ()) -> ChatBody:
        """Returns the chat to answer after the items of a previous response. Raises InvalidRequest."""
        messages = _messages(self.echoed_fields["instructions"], [*previous_items, *self.input])
        return ChatBody(self.spec, chat_messages(messages), self.template_kwargs, self.tools)


_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls", "previous_response_id"),
    *("temperature", "tool_choice", "top_logprobs", "top_p"),
)


def parse_response(body: object) -> ResponseBody:
    """Checks a /v1/responses body. Raises InvalidRequest, which names the field."""
    r = validated(ResponseRequest, body)
    items = [{"role": "user", "content": r.input}] if isinstance(r.input, str) else r.input
    output_format = _output_format(r.text)
    effort = None if r.reasoning is None else r.reasoning.effort
    members = ("type", "name", "description", "parameters")
    tools = [
        {**{k: tool.get(k) for k in members}, "strict": tool.get("strict") or False}
        for tool in r.tools
        if tool["type"] == "function"
    ]
    response = ResponseBody(
        input=tuple(_item(item) for item in items),
        previous_response_id=r.previous_response_id,
        store=r.store,
        echoed_fields={
            **{name: getattr(r, name) for name in _ECHOED},
            "reasoning": {"effort": effort, "summary": None},
            "text": {"format": output_format},
            "tools": tools,
        },
        spec=generation_spec(
            r,
            max_tokens=r.max_output_tokens,
            max_tokens_field="max_output_tokens",
            logprobs=r.top_logprobs if r.top_logprobs or LOGPROBS in r.include else None,
            grammar=format_grammar(output_format["type"], output_format, "text.format", "text.format"),
        ),
        template_kwargs=template_variables(r.chat_template_kwargs, effort),
        tools=_request_tools(r, tools),
    )
    response.chat()  # a previous response is read only for a body that is valid
    return response


def _allowed(allowed: Sequence[Any], by_name: Mapping[str, Function]) -> set[str]:
    """Returns the names of allowed functions, without other tools. Raises InvalidRequest for an unknown function."""
    functions = [tool for tool in allowed if not isinstance(tool, dict) or tool.get("type", "function") == "function"]
    names = {tool.get("name") if isinstance(tool, dict) else None for tool in functions}
    if not allowed or not names <= set(by_name):
        raise InvalidRequest("tool_choice.tools must name some of the tools", field="tool_choice.tools")
    return {name for name in names if isinstance(name, str)}


def _output_format(text: TextOptions | None) -> Json:
    """Returns text.format in the form that the answer repeats."""
    given: Json = {**(text.format if text is not None and text.format is not None else {"type": "text"})}
    named = given["type"] == "json_schema" or given.get("schema") is not None
    names = ("type", "name", "schema", "strict", "description") if named else ("type",)
    return {name: given[name] for name in names if given.get(name) is not None}


def _request_tools(r: ResponseRequest, tools: Sequence[Json]) -> RequestTools | None:
    """Returns the tools, None if no tool may be called. Raises InvalidRequest, which names the field."""
    by_name, choice = declared_functions(tools, "tools"), r.tool_choice
    mode: str = choice if isinstance(choice, str) else "required"
    shown, callable_names = set(by_name), set(by_name)
    if isinstance(choice, str):
        pass
    elif choice["type"] == "allowed_tools":
        mode = choice["mode"]
        shown = callable_names = _allowed(choice["tools"], by_name)
    else:
        callable_names = {require_declared(choice["name"], "tool_choice.name", by_name)}
    if mode == "required" and not callable_names:
        raise InvalidRequest("tool_choice needs a function in tools; other tools are left out", field="tool_choice")
    if mode == "none" or not callable_names:
        return None
    functions = [{k: v for k, v in tool.items() if k != "type" and v is not None} for tool in tools]
    return RequestTools(
        tuple(function for name, function in by_name.items() if name in callable_names),
        tuple({"type": "function", "function": function} for function in functions if function["name"] in shown),
        required=mode == "required",
        parallel=r.parallel_tool_calls and not is_named(choice),
        legacy=False,
        field="tools",
    )
