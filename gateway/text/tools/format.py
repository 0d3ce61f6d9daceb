"""The parsed parts of an answer, the base of all tool call parsers, and the interface of every format of tool calls.

Invariants of every parser: however the text is cut into pieces, the deltas add up to the same message. No text of a
model is an error: text that is not a well-formed call of a declared function is content. White space between calls,
and between text and calls, is dropped; all other white space is kept, in order.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol, runtime_checkable

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of functions, by the function's name."""


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
    """Call `index` is malformed: `text` is content. A stream cannot take its deltas back; complete answers drop it."""

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

SYSTEM_RANDOM = random.SystemRandom()  #: Source of the ids of calls, unless an answer has its own source.


def openai_call_id(source: random.Random = SYSTEM_RANDOM) -> str:
    """Returns a new call id of OpenAI's form."""
    return f"call_{source.randbytes(12).hex()}"


class ToolDeltaBuilder:
    """Builds the deltas of one answer and numbers its calls.

        begin_call -> [set_function -> add_arguments*] -> end_call, or reject_call at any point

    A call that max_tokens cuts gets neither end_call nor reject_call: its deltas stay as they are.

    After `max_calls` complete calls it adds no more deltas.
    """

    def __init__(self, max_calls: int | None, new_id: Callable[[], str]) -> None:
        self._max_calls = max_calls
        self.new_id = new_id  #: Returns the id of the next call.
        self._out: list[MessageDelta] = []
        self._space = ""  # white space that is content unless a call follows
        self._space_before_call = ""  #: White space before the open call; content if the call is rejected.
        self._next_index = 0
        self._named = False
        self.num_completed = 0  # calls completed so far
        self._full = False  # `max_calls` are complete

    def take_deltas(self) -> list[MessageDelta]:
        """Returns the deltas since the last call of this method."""
        out, self._out = self._out, []
        return out

    def add_content(self, text: str) -> None:
        """Adds text outside of calls."""
        if not text or self._full:
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._out.append(ContentDelta(kept))

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning; only an AnswerParser calls it."""
        if text and not self._full:
            self._out.append(ReasoningDelta(text))

    def begin_call(self) -> None:
        """Begins a call, or a text that looks like one."""
        self._space_before_call, self._space = self._space, ""
        self._named = False

    @property
    def named(self) -> bool:
        """Whether the function of the open call, or of the last one, is known."""
        return self._named

    def set_function(self, name: str, call_id: str = "") -> None:
        """Sets the function of the open call, and the id that the model wrote, if any."""
        self._named = True
        if not self._full:
            self._out.append(ToolCallDelta(self._next_index, "", call_id or self.new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Adds arguments to the open call."""
        if text and not self._full:
            self._out.append(ToolCallDelta(self._next_index, text))

    def end_call(self) -> None:
        """Completes the open call."""
        assert self._named
        if not self._full:
            self.num_completed += 1
            self._next_index += 1
            self._full = self.num_completed == self._max_calls

    def reject_call(self, text: str) -> None:
        """Turns the open call into content; `text` is its whole text."""
        text, self._space = self._space_before_call + text, ""
        if self._full:
            return
        if not self._named:
            self.add_content(text)
            return
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._out.append(InvalidToolCall(self._next_index, kept))
        self._next_index += 1

    def finish(self) -> None:
        """Ends the text."""
        if self._space and not self.num_completed:
            self._out.append(ContentDelta(self._space))
        self._space = ""


def split_at_marker(buffer: str, marker: str) -> tuple[str, str, str]:
    """Splits like str.partition. If the marker is missing: text that cannot begin it, "", and the tail that may."""
    if marker in buffer:
        return buffer.partition(marker)
    for at in range(max(0, len(buffer) - len(marker) + 1), len(buffer)):
        if marker.startswith(buffer[at:]):
            return buffer[:at], "", buffer[at:]
    return buffer, "", ""


class ToolParser(ABC):
    """Parser of one answer's text, which it buffers; subclasses define the states."""

    new_id = staticmethod(openai_call_id)

    def __init__(
        self, function_names: frozenset[str], max_calls: int | None = None, schemas: Schemas | None = None
    ) -> None:
        """`schemas`, if given, give types to arguments that a format writes without types."""
        self._function_names = function_names
        self._schemas: Schemas = schemas or {}
        self._builder = ToolDeltaBuilder(max_calls, self.new_id)
        self._buffer = ""
        self._cut = False  # max_tokens ended the text

    @property
    def num_completed(self) -> int:
        """Number of complete and well-formed calls so far."""
        return self._builder.num_completed

    def draw_ids_from(self, source: random.Random) -> None:
        """Makes the ids of calls a function of `source`, so that a repeated answer has the same ids."""
        self._builder.new_id = partial(self.new_id, source)

    def feed(self, text: str) -> list[MessageDelta]:
        """Returns the deltas of more text."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._builder.take_deltas()

    def finish(self, *, cut: bool = False) -> list[MessageDelta]:
        """Returns the deltas at the text's end: text held back, and an unfinished call as content.

        `cut`: max_tokens ended the text, and an unfinished call with a known function keeps its arguments so far.
        """
        self._cut = cut
        self._flush_rest()
        self._builder.finish()
        return self._builder.take_deltas()

    @abstractmethod
    def _step(self) -> bool:
        """Does one state's work on the buffer. Returns False when it needs more text."""

    @abstractmethod
    def _flush_rest(self) -> None:
        """Adds the buffered text that no further text will complete."""


class AnswerSection(Enum):
    """The part of an answer that an AnswerParser is reading."""

    HEADER = auto()  # markup with a meaning that is not known yet
    REASONING = auto()
    ANSWER = auto()  # content and calls


class AnswerParser(ToolParser):
    """A parser that reads the whole answer: it also separates the reasoning."""

    @property
    @abstractmethod
    def section(self) -> AnswerSection:
        """The part of the answer that the next text belongs to."""


LarkLiteral = Callable[[str], str]
"""Writes a piece of text as Lark names it: a string literal, or the token id if the text is a special token."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model by which its formats are recognised."""

    template: str = ""  # the chat template's source
    tokens: Collection[str] = ()  # texts of the added tokens
    architectures: tuple[str, ...] = ()  # `architectures` and `model_type` of config.json
    names: tuple[str, ...] = ()  # the served name and the directory's name


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs by which `auto` recognises the models of one format. The template decides first, the name last."""

    template: tuple[str, ...] = ()  #: Texts that are all in the chat template.
    tokens: tuple[str, ...] = ()  #: Texts; one is an added token or in the chat template.
    absent: tuple[str, ...] = ()  #: Texts of other formats; none is in the chat template.
    architectures: tuple[str, ...] = ()  #: Names; one is an architecture or the model_type in config.json.
    name: str = ""  #: Regular expression that matches in a name of the model; case does not matter.

    def in_template(self, facts: ModelFacts) -> bool:
        """Whether the chat template or the tokens show the format."""
        if any(text in facts.template for text in self.absent):
            return False
        if self.template and all(text in facts.template for text in self.template):
            return True
        return any(text in facts.tokens or text in facts.template for text in self.tokens)

    def in_architecture(self, facts: ModelFacts) -> bool:
        """Whether the architecture shows the format."""
        return any(name in facts.architectures for name in self.architectures)

    def in_name(self, facts: ModelFacts) -> bool:
        """Whether a name of the model shows the format."""
        return bool(self.name) and any(re.search(self.name, name, re.IGNORECASE) for name in facts.names)


NO_SIGNS = Signs()


class ToolFormat(Protocol):
    """One way in which models write tool calls."""

    @property
    def name(self) -> str:
        """Value of --tool-parser."""

    @property
    def signs(self) -> Signs:
        """The signs by which `auto` recognises the models of this format."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and that the parser has to see."""

    @property
    def trigger(self) -> str:
        """The marker that every call begins with; "" if the place of a call identifies it."""

    def new_parser(
        self, function_names: frozenset[str], max_calls: int | None = None, schemas: Schemas | None = None
    ) -> ToolParser:
        """Returns a parser for one answer that may call these functions, `max_calls` times at most."""

    def call_regex(self, functions: Functions) -> str:
        """Returns a regular expression of the texts that hold a call or begin one; plain text must not match it."""

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        """Returns Lark rules that define `calls`: one call, or several if `parallel`.

        The rules use `begin`, the trigger, which the caller defines. llguidance splits text into lexemes, longest
        first, before it parses. So the beginning of a call, up to where `call_regex` distinguishes it from other text,
        is one lexeme. `beside_json`: the answer is `calls | @text`, and the client's grammar @text may be JSON; then
        the beginning of a call consists of the lexemes of JSON.
        """

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        """Returns calls as the model would have written them."""


@runtime_checkable
class AnswerFormat(ToolFormat, Protocol):
    """A tool format that also defines the form of reasoning and text. It reads answers without tools too."""

    def new_parser(
        self, function_names: frozenset[str], max_calls: int | None = None, schemas: Schemas | None = None
    ) -> AnswerParser:
        """Returns a parser for one answer."""

    def answer_rules(
        self, functions: Functions, literal: LarkLiteral, *, text: bool, required: bool, parallel: bool
    ) -> str:
        """Returns the Lark rules of a whole answer, from `start` on.

        With functions, the answer calls at least one of them if `required`, else it may call. Its text matches the
        rule @text if `text`, else it is any text.
        """

    def declared(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the tools of a chat as the model's template takes them."""

    def history(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the messages of a chat as the model's template takes them."""


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of one request; there is at least one."""

    callable_functions: tuple[Function, ...]  # functions that may be called
    template_tools: tuple[dict[str, Any], ...]  # all tools in the form that chat templates take
    required: bool  # the answer is at least one call
    parallel: bool  # the answer may have several calls
    legacy: bool  # the client uses OpenAI's older `functions` instead of `tools`
    field: str  # field that errors about the calls name
