"""One answer's text, piece by piece, to what it means: the seam between generation and every format of answers.

`OutputParserConfig` says how a request's answers are to be read; `reading.reader()` gives a MessageReader for one choice, whose
`read(text, tokens, finish)` returns deltas (see gateway/text/tools/format.py) and a finish reason that knows of calls.
ChoiceOutput does so for every Piece: formats find `piece.deltas`, and `assemble(deltas of all pieces)` is the complete
message. Requests without tools and reasoning have no Reading, and pieces without deltas: all their text is content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import FinishReason, Token
from gateway.text.reasoning import ReasoningFormat, ReasoningParser, ReasoningSection
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import ContentDelta, MessageDelta, ReasoningDelta, ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserConfig:
    """How to read. keep: special tokens whose text the readers need. max_calls: calls that an answer may have."""

    tokenizer: TextTokenizer
    reasoning_format: ReasoningFormat | None = None
    initial_section: ReasoningSection = ReasoningSection.BEFORE
    show_reasoning: bool = True
    tool_format: ToolFormat | None = None
    function_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    kept_special_ids: frozenset[int] = frozenset()

    def new_parser(self) -> OutputParser:
        """For one choice."""
        return OutputParser(self)


class OutputParser:
    """Reads one choice. reasoning_tokens: tokens of the reasoning section, markers included."""

    def __init__(self, reading: OutputParserConfig) -> None:
        self._config = reading
        style = reading.reasoning_format
        self._reasoning = None if style is None else ReasoningParser(style, reading.initial_section)
        self._tools = (
            None
            if reading.tool_format is None
            else reading.tool_format.new_parser(reading.function_names, reading.max_calls)
        )
        self.reasoning_tokens = 0

    def feed(
        self, text: str, tokens: Sequence[Token], finish: FinishReason | None
    ) -> tuple[tuple[MessageDelta, ...], FinishReason | None]:
        """What more text means, and why the choice ends: also because the last call allowed is complete."""
        deltas: list[MessageDelta] = []
        self._feed(text, tokens, deltas)
        if finish is not None:
            self._finish(deltas)
        if self._tools is not None and self._tools.num_completed:
            full = self._tools.num_completed == self._config.max_calls
            if finish is FinishReason.STOP or (finish is None and full):
                finish = FinishReason.TOOL_CALLS
        return tuple(deltas), finish

    def _feed(self, text: str, tokens: Sequence[Token], deltas: list[MessageDelta]) -> None:
        reasoning, answer = self._reasoning, text
        if reasoning is not None and reasoning.in_reasoning:
            thought, answer = reasoning.feed(text)
            self._add_reasoning(thought, deltas)
            self._count(tokens, len(text), None if reasoning.in_reasoning else reasoning.chars_after_section)
        elif reasoning is not None:
            answer = reasoning.feed(text)[1]
        self._add_answer(answer, deltas)

    def _count(self, tokens: Sequence[Token], length: int, behind: int | None) -> None:
        """Counts those of a text's tokens that begin before its last `behind` characters; None: all of them."""
        if behind is None:
            self.reasoning_tokens += len(tokens)
        elif behind == length and behind:
            self.reasoning_tokens = 0  # there is no section
        else:
            at = 0
            for i, token in enumerate(tokens):
                if i and at >= length - behind:
                    break
                self.reasoning_tokens += 1
                at += len(self._config.tokenizer.token_bytes(token.id).decode("utf-8", "ignore"))

    def _finish(self, deltas: list[MessageDelta]) -> None:
        if self._reasoning is not None:
            thought, answer = self._reasoning.finish()
            self._add_reasoning(thought, deltas)
            self._add_answer(answer, deltas)
        if self._tools is not None:
            deltas.extend(self._tools.finish())

    def _add_reasoning(self, text: str, deltas: list[MessageDelta]) -> None:
        if text and self._config.show_reasoning:
            deltas.append(ReasoningDelta(text))

    def _add_answer(self, text: str, deltas: list[MessageDelta]) -> None:
        if not text:
            return
        if self._tools is None:
            deltas.append(ContentDelta(text))
        else:
            deltas.extend(self._tools.feed(text))
