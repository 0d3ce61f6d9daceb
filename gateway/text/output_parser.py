"""Parses the text of one answer, piece by piece, into reasoning, tool calls and content.

Requests without tools and reasoning have no OutputParserConfig: their pieces have no deltas, and all text is content.
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
    """How the output of one request is parsed."""

    tokenizer: TextTokenizer
    reasoning_format: ReasoningFormat | None = None  # reasoning markers, None if the model has none
    #: Where the answer begins relative to the reasoning section.
    initial_section: ReasoningSection = ReasoningSection.BEFORE
    show_reasoning: bool = True  # reasoning becomes deltas; otherwise it is dropped
    tool_format: ToolFormat | None = None  # format of tool calls, None for a request without tools
    function_names: frozenset[str] = frozenset()  # functions that may be called
    max_calls: int | None = None  # number of calls after which the answer ends, None for no limit
    #: Special tokens that appear in the text, because a parser needs them or the client wants to see them.
    kept_special_ids: frozenset[int] = frozenset()


class OutputParser:
    """Splits the text of one choice into reasoning, tool calls and content."""

    def __init__(self, config: OutputParserConfig) -> None:
        self._config = config
        reasoning, tools = config.reasoning_format, config.tool_format
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, config.initial_section)
        self._tools = None if tools is None else tools.new_parser(config.function_names, config.max_calls)
        self.reasoning_tokens = 0  # tokens of the reasoning section, its markers included

    def feed(
        self, text: str, tokens: Sequence[Token], finish: FinishReason | None
    ) -> tuple[tuple[MessageDelta, ...], FinishReason | None]:
        """Returns the deltas of more text, and the finish reason.

        The choice also finishes when the last allowed call is complete.
        """
        deltas: list[MessageDelta] = []
        reasoning, answer = self._reasoning, text
        if reasoning is not None:
            was_in_reasoning = reasoning.in_reasoning
            reasoning_text, answer = reasoning.feed(text)
            self._add_reasoning(reasoning_text, deltas)
            if was_in_reasoning:
                answer_chars = None if reasoning.in_reasoning else reasoning.chars_after_section
                self._count_reasoning_tokens(tokens, len(text), answer_chars)
        self._add_answer(answer, deltas)
        if finish is not None:
            if reasoning is not None:
                reasoning_text, answer = reasoning.finish()
                self._add_reasoning(reasoning_text, deltas)
                self._add_answer(answer, deltas)
            if self._tools is not None:
                deltas.extend(self._tools.finish())
        if self._tools is not None and self._tools.num_completed:
            full = self._tools.num_completed == self._config.max_calls
            if finish is FinishReason.STOP or (finish is None and full):
                finish = FinishReason.TOOL_CALLS
        return tuple(deltas), finish

    def _count_reasoning_tokens(self, tokens: Sequence[Token], length: int, answer_chars: int | None) -> None:
        """Counts the tokens that begin in the reasoning section.

        Args:
            length: Characters of the tokens' text.
            answer_chars: How many of them, at the end, follow the section; None while the section goes on.
        """
        if answer_chars is None:
            self.reasoning_tokens += len(tokens)
        elif answer_chars == length and answer_chars:
            self.reasoning_tokens = 0  # the answer has no section
        else:
            at = 0
            for i, token in enumerate(tokens):
                if i and at >= length - answer_chars:
                    break
                self.reasoning_tokens += 1
                at += len(self._config.tokenizer.token_bytes(token.id).decode("utf-8", "ignore"))

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
