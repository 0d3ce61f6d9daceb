"""A body of /v1/responses, and the chat that it asks for: the parameters of chats under the names of this endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema
from typing_extensions import TypedDict

from common.errors import InvalidRequest
from gateway.api.http.json import Json
from gateway.api.openai.conversation import (
    MAX_TOOLS,
    FunctionSchema,
    chat_messages,
    declared_functions,
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
    param,
    told_by,
    validated,
)
from gateway.api.openai.requests import MAX_LOGPROBS, Conversation, Sampling, format_grammar, generation_spec
from gateway.api.openai.responses.items import MAX_ITEMS, InputItem, ResponseItem, parse_input, to_messages
from gateway.serving.request import ChatBody, GenerationSpec
from gateway.text.tools.format import RequestTools

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"


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


class ToolType(TypedDict):
    """The type of a tool, which is checked before its other members."""

    type: Literal["function"]


class ResponseTool(ToolType, FunctionSchema):
    """An entry of `tools`."""


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
    told_by(_kind_of_choice, "must be none, auto, required, a named function, or allowed_tools with mode and tools"),
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


class ResponseRequest(Sampling, Conversation):
    """A body of /v1/responses."""

    input: Annotated[
        Annotated[str, STRING]
        | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), ARRAY],
        BY_KIND,
    ] = param("A text, or items: messages, function_call, function_call_output, reasoning.", ...)
    instructions: str | None = param("A system message before the input; not stored for later responses.")
    max_output_tokens: int | None = param(
        "Most tokens to generate; prompt and answer must fit the context.",
        words="the rest of the context",
        ge=1,
        le=INT32_MAX,
    )
    previous_response_id: str | None = param(
        "Continues a stored response; needs Redis. 404 if it is not stored or has expired.", max_length=256
    )
    store: bool = param(
        "Stores the response in Redis for --response-ttl-s; without Redis nothing is stored, and `store` in the answer "
        "is false.",
        True,
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
        "Functions that the model may call; no other tools.", []
    )
    tool_choice: Choice = param(
        "Which tools may or must be called: none, auto, required, a function, or allowed_tools.", "auto"
    )
    background: Annotated[Any, Only(False)] = param("Answering later.")
    truncation: Annotated[Any, Only("disabled")] = param("Dropping items that do not fit.")
    conversation: Refused = param("Conversations as objects.")
    prompt: Refused = param("Stored prompt templates.")
    context_management: Refused = param("Compaction of long conversations.")
    max_tool_calls: Ignored = param("A limit for built-in tools, of which there are none.")
    stream_options: Ignored = param("Padding against eavesdroppers.")


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A checked /v1/responses body."""

    #: The input items of this request, without the items of a previous response.
    input: tuple[ResponseItem, ...]
    previous_response_id: str | None
    store: bool
    #: Fields that the answer repeats.
    echoed_fields: Json
    spec: GenerationSpec
    template_kwargs: Json
    tools: RequestTools | None

    def chat(self, previous_items: Sequence[ResponseItem] = ()) -> ChatBody:
        """Returns the chat to answer after the items of a previous response. Raises InvalidRequest."""
        messages = to_messages(self.echoed_fields["instructions"], [*previous_items, *self.input])
        return ChatBody(self.spec, chat_messages(messages), self.template_kwargs, self.tools)


def parse_response(body: object) -> ResponseBody:
    """Checks a /v1/responses body. Raises InvalidRequest, which names the field."""
    r = validated(ResponseRequest, body)
    output_format = _output_format(r.text)
    effort = None if r.reasoning is None else r.reasoning.effort
    tools = [
        {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("parameters"),
            "strict": tool.get("strict") or False,
        }
        for tool in r.tools
    ]
    response = ResponseBody(
        input=tuple(parse_input(r.input)),
        previous_response_id=r.previous_response_id,
        store=r.store,
        echoed_fields={
            "instructions": r.instructions,
            "max_output_tokens": r.max_output_tokens,
            "metadata": r.metadata,
            "model": r.model,
            "parallel_tool_calls": r.parallel_tool_calls,
            "previous_response_id": r.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": r.temperature,
            "text": {"format": output_format},
            "tool_choice": r.tool_choice,
            "tools": tools,
            "top_logprobs": r.top_logprobs,
            "top_p": r.top_p,
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


def _output_format(text: TextOptions | None) -> Json:
    """Returns text.format in the form that the answer repeats."""
    given: Json = {**(text.format if text is not None and text.format is not None else {"type": "text"})}
    names = ("type", "name", "schema", "strict", "description") if given["type"] == "json_schema" else ("type",)
    return {name: given[name] for name in names if given.get(name) is not None}


def _request_tools(r: ResponseRequest, tools: Sequence[Json]) -> RequestTools | None:
    """Returns the tools, None if no tool may be called. Raises InvalidRequest, which names the field."""
    by_name, choice = declared_functions(tools, "tools"), r.tool_choice
    if not by_name:
        if choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice needs tools", field="tool_choice")
        return None
    mode, shown, callable_names = choice, set(by_name), set(by_name)
    if not isinstance(choice, str) and choice["type"] == "allowed_tools":
        mode = choice["mode"]
        named = [tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)]
        shown = callable_names = {name for name in named if isinstance(name, str)}
        if not shown or not shown <= set(by_name):
            raise InvalidRequest("tool_choice.tools must name some of the tools", field="tool_choice.tools")
    elif not isinstance(choice, str):
        mode, callable_names = "required", {require_declared(choice["name"], "tool_choice.name", by_name)}
    if mode == "none":
        return None
    functions = [{k: v for k, v in tool.items() if k != "type" and v is not None} for tool in tools]
    return RequestTools(
        tuple(function for name, function in by_name.items() if name in callable_names),
        tuple({"type": "function", "function": function} for function in functions if function["name"] in shown),
        required=mode == "required",
        parallel=r.parallel_tool_calls,
        legacy=False,
        field="tools",
    )
