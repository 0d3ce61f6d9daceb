"""Bodies of /v1/messages and /v1/messages/count_tokens: their models, and the chat that they ask for.

A message of Anthropic's form has blocks. Each run of text becomes one chat message, each tool_result a message of the
role tool. Thinking blocks become reasoning of the history. Messages of one role in a row become one message, because
many chat templates refuse them otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from common.errors import InvalidRequest
from common.grammar.compiler import GrammarSource
from gateway.api.http.json import Json
from gateway.api.openai.bodies import ModelRequest, Sampling, Stop
from gateway.api.openai.conversation import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TemplateVariables,
    chat_messages,
    template_variables,
)
from gateway.api.openai.fields import (
    ARRAY,
    BY_KIND,
    INT32_MAX,
    STRING,
    Ignored,
    Refused,
    RequestModel,
    by_type,
    param,
    validated,
)
from gateway.api.openai.requests import format_grammar, generation_spec
from gateway.serving.request import ChatBody, GenerationSpec
from gateway.text.tools.format import Function, RequestTools

#: Begins a line about billing that Claude Code puts before its system blocks. The line is dropped: it differs in each
#: request, so no prefix would be found in a cache.
BILLING_LINE = "x-anthropic-billing-header:"
_NAME = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
_EFFORTS = {"xhigh": "high", "max": "high"}  #: Efforts that chat templates do not know, with the next known one.


class TextBlock(TypedDict):
    """A block of text."""

    type: Literal["text"]
    text: str


class TextSource(TypedDict):
    """The source of a plain text document."""

    type: Literal["text"]
    data: str


def _kind_of(*kinds: str) -> Any:
    """Returns a function that returns the tag of an object with a member `type` of these kinds."""

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else None
        return f"<{kind}>" if isinstance(kind, str) and kind in kinds else None

    return tag


class DocumentBlock(TypedDict):
    """A document; only plain text is served."""

    type: Literal["document"]
    source: TextSource
    title: NotRequired[str | None]


class ToolUseBlock(TypedDict):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(TypedDict):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(TypedDict):
    """Reasoning that is not readable; it is left out."""

    type: Literal["redacted_thinking"]


ReadableBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[DocumentBlock, Tag("<document>")],
    by_type(_kind_of("text", "document"), "text, document"),
]


class ToolResultBlock(TypedDict):
    """The answer to a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[
        Annotated[
            Annotated[str, STRING] | Annotated[list[ReadableBlock], Field(fail_fast=True), ARRAY],
            BY_KIND,
        ]
        | None
    ]
    is_error: NotRequired[bool | None]


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type(_kind_of("text", "document", "tool_result"), "text, document, tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    by_type(
        _kind_of("text", "tool_use", "thinking", "redacted_thinking"), "text, tool_use, thinking, redacted_thinking"
    ),
]


class UserMessage(TypedDict):
    """A message of the user, or a system message between others."""

    role: Literal["user", "system"]
    content: Annotated[
        Annotated[str, STRING] | Annotated[list[UserBlock], Field(fail_fast=True), ARRAY],
        BY_KIND,
    ]


class AssistantMessage(TypedDict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, STRING] | Annotated[list[AssistantBlock], Field(fail_fast=True), ARRAY],
        BY_KIND,
    ]


def _kind_of_message(value: Any) -> str:
    return "<assistant>" if isinstance(value, dict) and value.get("role") == "assistant" else "<user>"


AnyMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")] | Annotated[AssistantMessage, Tag("<assistant>")],
    Discriminator(_kind_of_message),
]


class CustomTool(TypedDict):
    """A function of the client that the model may call."""

    type: NotRequired[Literal["custom"] | None]
    name: Annotated[str, _NAME]
    description: NotRequired[Annotated[str, Field(max_length=1 << 16)] | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]


class ServerTool(TypedDict):
    """A tool that Anthropic's servers run. It is left out."""

    type: str
    name: str


def _kind_of_tool(value: Any) -> str:
    other = isinstance(value, dict) and value.get("type") not in (None, "custom")
    return "<other>" if other else "<custom>"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[ServerTool, Tag("<other>")], Discriminator(_kind_of_tool)
]


class ToolMode(TypedDict):
    """A `tool_choice` that names no tool."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: NotRequired[bool | None]


class ForcedTool(TypedDict):
    """A `tool_choice` of one tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: NotRequired[bool | None]


def _kind_of_choice(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool":
        return "<named>"
    return "<mode>" if kind in ("auto", "any", "none") else None


ToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")] | Annotated[ForcedTool, Tag("<named>")],
    by_type(_kind_of_choice, "auto, any, tool, none"),
]


class Thinking(TypedDict):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NotRequired[Annotated[int, Field(ge=0)] | None]


class SchemaFormat(TypedDict):
    """A format that the answer has to match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict, total=False):
    """`output_config`."""

    effort: Annotated[str, Field(max_length=32)] | None
    format: SchemaFormat | None


class MessagesPrompt(RequestModel):
    """Parameters that decide the prompt."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = param(
        "The conversation, oldest first: text, tool_use, tool_result and thinking blocks, documents of plain text.", ...
    )
    system: (
        Annotated[
            Annotated[str, STRING] | Annotated[list[TextBlock], Field(fail_fast=True), ARRAY],
            BY_KIND,
        ]
        | None
    ) = param("The system message, as text or text blocks.")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = param(
        "Functions that the model may call. Anthropic's own tools (web_search and others) are left out.", []
    )
    tool_choice: ToolChoice | None = param(
        "auto, any (at least one call), tool (exactly one call of that tool), none (the model sees no tools).",
        words="auto with tools",
    )
    thinking: Thinking | None = param(
        "enabled or adaptive: the model thinks if its template can, and the answer has thinking blocks; budget_tokens "
        "has no effect.",
        words="disabled",
    )
    output_config: OutputConfig | None = param(
        "effort: how long the model thinks, a template variable. format: a JSON schema that the answer has to match."
    )
    output_format: SchemaFormat | None = param("The older name of output_config.format.")
    chat_template_kwargs: TemplateVariables | None = param("Variables for the chat template.")
    cache_control: Ignored = param("Prefixes are cached without it.")
    context_management: Ignored = param("Clearing of old calls and their results.")
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = param("MCP servers that the server would call.")
    container: Ignored = param("A container for code that the server would run.")
    betas: Ignored = param("Names of beta features.")
    service_tier: Ignored = param("Service class; there is only one.")
    inference_geo: Ignored = param("Where the model runs.")
    metadata: Ignored = param("The client's id of the user.")
    speed: Ignored = param("Service class; there is only one.")


class CountTokensRequest(MessagesPrompt, ModelRequest):
    """A body of /v1/messages/count_tokens."""


class MessageRequest(MessagesPrompt, Sampling):
    """A body of /v1/messages."""

    max_tokens: int = param(
        "Max tokens of the answer. An answer also ends at the end of the context, with the stop_reason "
        "model_context_window_exceeded.",
        ...,
        ge=1,
        le=INT32_MAX,
    )
    temperature: float = param("Softmax temperature; 0 is greedy.", 1.0, ge=0, le=1)
    stop_sequences: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] = param(
        "Strings that end the answer; not part of it.", []
    )
    stop: Refused = param("OpenAI's name of stop_sequences.")


def parse_message(body: object) -> ChatBody:
    """Checks a /v1/messages body. Raises InvalidRequest, which names the field."""
    r = validated(MessageRequest, body)
    spec = generation_spec(
        r.model_copy(update={"stop": tuple(r.stop_sequences)}),
        max_tokens=r.max_tokens,
        logprobs=None,
        lower_max_tokens=True,
        grammar=_grammar(r),
    )
    return _chat(r, spec)


def parse_count(body: object) -> ChatBody:
    """Checks a /v1/messages/count_tokens body. Raises InvalidRequest, which names the field."""
    r = validated(CountTokensRequest, body)
    return _chat(r, GenerationSpec(model=r.model))


def _chat(r: MessagesPrompt, spec: GenerationSpec) -> ChatBody:
    thinks = r.thinking is not None and r.thinking["type"] != "disabled"
    messages = _messages(r)
    answer_start = ""
    if messages[-1]["role"] == "assistant":
        if thinks or "tool_calls" in messages[-1]:
            what = "calls" if "tool_calls" in messages[-1] else "text while thinking is enabled"
            raise InvalidRequest(f"messages must not end with the assistant's {what}", field="messages")
        answer_start = messages.pop()["content"]
    effort = None if r.output_config is None else r.output_config.get("effort")
    # Chat templates have different names for this switch.
    switch = {"enable_thinking": thinks, "thinking": thinks}
    variables = {**switch, **template_variables(r.chat_template_kwargs, _EFFORTS.get(effort or "", effort))}
    return ChatBody(
        spec,
        chat_messages(messages),
        variables,
        _tools(r),
        include_reasoning=thinks or variables["enable_thinking"] is True,
        answer_start=answer_start,
    )


def _grammar(r: MessageRequest) -> GrammarSource | None:
    for field, given in (
        ("output_config.format", None if r.output_config is None else r.output_config.get("format")),
        ("output_format", r.output_format),
    ):
        if given is not None:
            return format_grammar("json_schema", given, field, field)
    return None


# -- messages


def _messages(r: MessagesPrompt) -> list[Json]:
    """Returns the chat messages of a body, without two of the same role in a row except tool. Raises InvalidRequest."""
    system = [r.system] if isinstance(r.system, str) else [block["text"] for block in r.system or ()]
    system = [text for text in system if not text.startswith(BILLING_LINE)]
    turns: list[Json] = [{"role": "system", "content": "\n\n".join(system)}] if any(system) else []
    for given in r.messages:
        content = given["content"]
        blocks: Sequence[Mapping[str, Any]]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turns += [_answer(blocks)] if given["role"] == "assistant" else _turns(given["role"], blocks)
    messages = _merged(turns)
    if len(messages) > MAX_MESSAGES or any(len(message.get("tool_calls", ())) > MAX_CALLS for message in messages):
        text = f"messages may stand for at most {MAX_MESSAGES} chat messages with at most {MAX_CALLS} calls each"
        raise InvalidRequest(text, field="messages")
    return messages


def _turns(role: str, blocks: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Returns a chat message for each of a user's blocks, in their order."""
    turns: list[Json] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else "\n".join(map(_text, content))
            if block.get("is_error"):
                text = f"Error: {text}" if text else "Error"
            turns.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        else:
            turns.append({"role": role, "content": _text(block)})
    return turns or [{"role": role, "content": ""}]


def _answer(blocks: Iterable[Mapping[str, Any]]) -> Json:
    """Returns the chat message of an assistant's blocks."""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] in texts:
            texts[block["type"]].append(block[block["type"]])
    message: Json = {"role": "assistant", "content": "\n".join(filter(None, texts["text"]))}
    if any(texts["thinking"]):
        message["reasoning_content"] = "\n".join(texts["thinking"])
    return {**message, "tool_calls": calls} if calls else message


def _text(block: Mapping[str, Any]) -> str:
    if block["type"] == "text":
        text: str = block["text"]
        return text
    title = block.get("title")
    return "\n".join((*([title] if title else []), block["source"]["data"]))


def _merged(turns: Iterable[Json]) -> list[Json]:
    """Returns the messages, without two of the same role in a row except tool.

    A run of messages is joined at once. A body may have 50,000 of them, and each join copies the text.
    """
    messages: list[Json] = []
    for role, group in itertools.groupby(turns, lambda turn: turn["role"]):
        run = [*group]
        if role == "tool" or len(run) == 1:
            messages += run
            continue
        message: Json = {"role": role, "content": "\n".join(filter(None, (turn["content"] for turn in run)))}
        if thoughts := [turn["reasoning_content"] for turn in run if turn.get("reasoning_content")]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls := [call for turn in run for call in turn.get("tool_calls", ())]:
            message["tool_calls"] = calls
        messages.append(message)
    return messages


# -- tools


def _tools(r: MessagesPrompt) -> RequestTools | None:
    """Returns the tools, None if no tool may be called. Raises InvalidRequest, which names the field."""
    functions: dict[str, Function] = {}
    shown: list[dict[str, Any]] = []
    tools: Sequence[Mapping[str, Any]] = r.tools
    for i, tool in enumerate(tools):
        if "input_schema" not in tool:
            continue
        name, schema, field = tool["name"], tool["input_schema"], f"tools[{i}].input_schema"
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"{field} must describe an object", field=field)
        if not isinstance(schema.get("properties"), dict | None):
            raise InvalidRequest(f"{field}.properties must be an object", field=f"{field}.properties")
        if name in functions:
            raise InvalidRequest(f"tools has two tools of the name {name!r}", field="tools")
        functions[name] = Function(name, schema, strict=tool.get("strict") or False, field=field)
        described = {"description": tool["description"]} if tool.get("description") else {}
        shown.append({"type": "function", "function": {"name": name, **described, "parameters": schema}})
    choice = r.tool_choice
    mode = "auto" if choice is None else choice["type"]
    callable_functions = tuple(functions.values())
    if choice is not None and choice["type"] == "tool":
        if choice["name"] not in functions:
            text = f"tool_choice.name {choice['name'][:128]!r} is none of the tools that the client runs"
            raise InvalidRequest(text, field="tool_choice.name")
        callable_functions = (functions[choice["name"]],)
    elif mode == "any" and not functions:
        raise InvalidRequest("tool_choice is any, and there is no tool that the client runs", field="tool_choice")
    if mode == "none" or not functions:
        return None
    one = mode == "tool" or (choice is not None and choice.get("disable_parallel_tool_use") is True)
    return RequestTools(
        callable_functions,
        tuple(shown),
        required=mode in ("any", "tool"),
        parallel=not one,
        legacy=False,
        field="tools",
    )
