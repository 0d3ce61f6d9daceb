"""What a model's text means, and what every format of tool calls provides.

The seam that other code uses is gateway/text/output_parser.py: text piece in, these deltas out. Invariant of every parser: however
a text is cut into pieces, the deltas in sum are the same. Nothing that a model writes is an error: what is not a
well-formed call of a function that the client declared is content.
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
    """More of the reasoning section's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one call: the first delta of a call has id and name, later ones only more of its arguments (JSON)."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """Call `index`, of which deltas were given out, turned out to be malformed: its whole text is content.

    A stream cannot take back what it sent and only shows the text; a complete answer drops the call.
    """

    index: int
    text: str


MessageDelta = ContentDelta | ReasoningDelta | ToolCallDelta | InvalidToolCall


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; arguments is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A complete answer, taken apart. content and reasoning are None when there is nothing of the kind."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def assemble(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    """The message that the deltas of one answer add up to."""
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
    """A function that the client declared. parameters: a JSON schema of an object; strict: follow it to the letter.

    field: the request's field that holds the parameters, for errors.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    field: str = "tools"


class ToolParser(Protocol):
    """Reads one answer's text. completed: calls that are complete and well-formed."""

    @property
    def num_completed(self) -> int:
        """Calls complete so far."""

    def feed(self, text: str) -> list[MessageDelta]:
        """What more text adds."""

    def finish(self) -> list[MessageDelta]:
        """What the text's end adds: held back text, or an unfinished call as content."""


LarkLiteral = Callable[[str], str]
"""A piece of text as a Lark grammar names it: a string, or the id where the text is a special token."""


class ToolFormat(Protocol):
    """One way in which models write calls.

    name: for --tool-parser. markers: texts that may be special tokens and must reach the parser. trigger: the marker
    that every call begins with, "" when a call is told by where it stands.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def trigger(self) -> str: ...

    def new_parser(self, names: frozenset[str], max_calls: int | None = None) -> ToolParser:
        """A parser for one answer, where these functions may be called, at most max_calls times."""

    def call_regex(self, functions: Sequence[Function]) -> str:
        """A regular expression of the texts that hold a call, or begin one: what plain text must not be."""

    def lark_rules(
        self, functions: Sequence[Function], literal: LarkLiteral, *, parallel: bool, beside_json: bool
    ) -> str:
        """Lark rules in which `calls` is one call, if parallel several; `begin`, not defined here, is the trigger.

        llguidance splits text into lexemes before it parses, longest first: what a call begins with, up to where
        `opening` tells it from other text, is one lexeme, or, beside_json, the lexemes of JSON.
        """

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model would have written them."""


@dataclass(frozen=True, slots=True)
class RequestTools:
    """Tools of one request, at least one. callable: those that may be called; shown: all, as templates take them.

    required: the answer is at least one call. parallel: it may be several. legacy: the client speaks functions.
    field: what an error about the calls names.
    """

    callable_functions: tuple[Function, ...]
    template_tools: tuple[dict[str, Any], ...]
    required: bool
    parallel: bool
    legacy: bool
    field: str
