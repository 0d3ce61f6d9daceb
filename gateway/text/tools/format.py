"""The parsed parts of an answer, and the interface of every format of tool calls.

Invariant of every parser: however the text is cut into pieces, the deltas add up to the same message. No text of a
model is an error: text that is not a well-formed call of a declared function is content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning section."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call. The first delta of a call has `id` and `name`; later ones only add arguments."""

    index: int  # number of the call in the answer
    arguments: str  #: A part of a JSON object's text.
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """Call `index`, of which deltas were returned, turned out to be malformed: its whole text is content.

    A stream cannot take the deltas back and shows the text as well. A complete answer drops the call.
    """

    index: int
    text: str


MessageDelta = ContentDelta | ReasoningDelta | ToolCallDelta | InvalidToolCall


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A complete answer. Content and reasoning are None if the answer has none."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def assemble(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    """Returns the message that all deltas of one answer add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[ToolCallDelta, list[str]]] = {}
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallDelta(index, arguments) if index in calls:
                calls[index][1].append(arguments)
            case ToolCallDelta(index, arguments):
                calls[index] = delta, [arguments]
            case InvalidToolCall(index, text):
                calls.pop(index, None)
                content.append(text)
    return ParsedMessage(
        "".join(content) or None,
        "".join(reasoning) or None,
        tuple(ToolCall(first.id, first.name, "".join(parts)) for first, parts in calls.values()),
    )


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the client declared."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    strict: bool = False  # the grammar enforces every keyword of the schema, or the request is rejected
    field: str = "tools"  # the request's field that holds the parameters; errors name it


Functions = Sequence[Function]


class ToolParser(Protocol):
    """Parser of one answer's text."""

    @property
    def num_completed(self) -> int:
        """Number of complete and well-formed calls so far."""

    def feed(self, text: str) -> list[MessageDelta]:
        """Returns the deltas of more text."""

    def finish(self) -> list[MessageDelta]:
        """Returns the deltas at the text's end: text held back, and an unfinished call as content."""


LarkLiteral = Callable[[str], str]
"""Writes a piece of text as Lark names it: a string literal, or the token id if the text is a special token."""


class ToolFormat(Protocol):
    """One way in which models write tool calls."""

    @property
    def name(self) -> str:
        """Value of --tool-parser."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and that the parser has to see."""

    @property
    def trigger(self) -> str:
        """The marker that every call begins with; "" if the place of a call identifies it."""

    def new_parser(self, function_names: frozenset[str], max_calls: int | None = None) -> ToolParser:
        """Returns a parser for one answer that may call these functions, `max_calls` times at most."""

    def call_regex(self, functions: Functions) -> str:
        """Returns a regular expression of the texts that hold a call or begin one; plain text must not match it."""

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        """Returns Lark rules that define `calls`: one call, or several if `parallel`.

        The rules use `begin`, the trigger, which the caller defines. llguidance splits text into lexemes, longest
        first, before it parses. So the beginning of a call, up to where `call_regex` distinguishes it from other text,
        is one lexeme; with `beside_json` it consists of the lexemes of JSON.
        """

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        """Returns calls as the model would have written them."""


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of one request; there is at least one."""

    callable_functions: tuple[Function, ...]  # functions that may be called
    template_tools: tuple[dict[str, Any], ...]  # all tools in the form that chat templates take
    required: bool  # the answer is at least one call
    parallel: bool  # the answer may have several calls
    legacy: bool  # the client uses OpenAI's older `functions` instead of `tools`
    field: str  # field that errors about the calls name
