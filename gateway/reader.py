"""One answer's text, piece by piece, to what it means: the seam between generation and every format of answers.

`Reading` says how a request's answers are to be read; `reading.reader()` gives a MessageReader for one choice; its
`read(piece)` returns the same piece with `deltas` (see gateway/tools/protocol.py) and a finish reason that knows of
calls. `assemble(deltas)` of all pieces is the complete message. Requests without tools and reasoning have no Reading:
their pieces' deltas are None, and their text is the content.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.types import FinishReason
from gateway.output import Piece
from gateway.reasoning import ReasoningReader, ReasoningStyle, Section
from gateway.tokenizer import TextTokenizer
from gateway.tools.protocol import ContentDelta, Delta, ReasoningDelta, ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read. keep: special tokens whose text the readers need. max_calls: calls that an answer may have."""

    tokenizer: TextTokenizer
    reasoning: ReasoningStyle | None = None
    begins: Section = Section.BEFORE
    show_reasoning: bool = True
    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    max_calls: int | None = None
    keep: frozenset[int] = frozenset()

    def reader(self) -> MessageReader:
        """For one choice."""
        return MessageReader(self)


class MessageReader:
    """Reads one choice. reasoning_tokens: tokens of the reasoning section, markers included."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        style = reading.reasoning
        self._reasoning = None if style is None else ReasoningReader(style, reading.begins)
        self._tools = None if reading.tools is None else reading.tools.parser(reading.names, reading.max_calls)
        self.reasoning_tokens = 0

    def read(self, piece: Piece) -> Piece:
        """The piece with what it means; it ends the choice where the last call allowed is complete."""
        deltas: list[Delta] = []
        self._feed(piece, deltas)
        if piece.finish is not None:
            self._finish(deltas)
        finish = piece.finish
        if self._tools is not None and self._tools.completed:
            full = self._tools.completed == self._reading.max_calls
            if finish is FinishReason.STOP or (finish is None and full):
                finish = FinishReason.TOOL_CALLS
        return replace(piece, deltas=tuple(deltas), finish=finish)

    def _feed(self, piece: Piece, deltas: list[Delta]) -> None:
        reasoning, answer = self._reasoning, piece.text
        if reasoning is not None and reasoning.thinking:
            thought, answer = reasoning.feed(answer)
            self._thought(thought, deltas)
            self._count(piece, None if reasoning.thinking else reasoning.behind)
        elif reasoning is not None:
            answer = reasoning.feed(answer)[1]
        self._answered(answer, deltas)

    def _count(self, piece: Piece, behind: int | None) -> None:
        """Counts a piece's tokens of which the text's last `behind` characters are not the section's."""
        if behind is None:
            self.reasoning_tokens += len(piece.tokens)
        elif behind == len(piece.text) and behind:
            self.reasoning_tokens = 0  # there is no section
        else:
            at, end = 0, len(piece.text) - behind
            for i, token in enumerate(piece.tokens):
                if i and at >= end:
                    break
                self.reasoning_tokens += 1
                at += len(self._reading.tokenizer.piece(token.id).decode("utf-8", "ignore"))

    def _finish(self, deltas: list[Delta]) -> None:
        if self._reasoning is not None:
            thought, answer = self._reasoning.finish()
            self._thought(thought, deltas)
            self._answered(answer, deltas)
        if self._tools is not None:
            deltas.extend(self._tools.finish())

    def _thought(self, text: str, deltas: list[Delta]) -> None:
        if text and self._reading.show_reasoning:
            deltas.append(ReasoningDelta(text))

    def _answered(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._tools is None:
            deltas.append(ContentDelta(text))
        else:
            deltas.extend(self._tools.feed(text))
