"""The output of one choice: tokens in order become pieces of text with log-probabilities.

Lifecycle: `add` tokens until `finish` is set, by a stop string or by the finish reason of the pods. While text is held
back because a stop string may begin in it, the log-probabilities of its tokens are held back too. Tokens that begin
inside a stop string are counted but not reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import FinishReason, PromptLogprobs, Token, TokenLogprob
from gateway.text.detokenizer import make_detokenizer
from gateway.text.output_parser import OutputParserConfig
from gateway.text.stop_strings import StopStringScanner
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import MessageDelta


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token with log-probabilities."""

    token: Token
    #: Position of the token's text in the answer, in characters.
    offset: int


@dataclass(slots=True)  # never changed, but not frozen, because a frozen one takes longer to create (see Token)
class OutputPiece:
    """The text and tokens that one step adds to a choice."""

    text: str
    #: Tokens with log-probabilities, of released text only; they may lag behind `tokens`.
    reported: tuple[ReportedToken, ...]
    #: Tokens generated in this step, also the tokens of a stop string.
    tokens: Sequence[Token]
    finish: FinishReason | None = None
    #: The parsed meaning of the text, None if all of it is content.
    deltas: tuple[MessageDelta, ...] | None = None


class ChoiceOutput:
    """Turns the tokens of one sequence into pieces of text."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: Sequence[str],
        *,
        logprobs: bool,
        parser_config: OutputParserConfig | None = None,
        include_stop: bool = False,
    ) -> None:
        """
        Args:
            parser_config: How the text is parsed; None means that all of it is content.
            include_stop: A stop string is part of the text.
        """
        self._detokenizer = make_detokenizer(
            tokenizer, parser_config.kept_special_ids if parser_config else frozenset()
        )
        self._parser = parser_config.new_parser() if parser_config else None
        self._scanner = StopStringScanner(stops, include=include_stop)
        self._logprobs = logprobs
        #: Pieces hold text and nothing else: no stop strings, no log-probabilities and no parser.
        self.text_only = not stops and not logprobs and parser_config is None
        self._pending: deque[ReportedToken] = deque()
        #: Characters detokenized.
        self._length = 0
        #: Characters returned.
        self._released = 0
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def add(self, tokens: Sequence[Token], ended: FinishReason | None = None) -> OutputPiece:
        """Takes the next tokens in order. `ended` is the pods' finish reason if these are the last tokens.

        A stop string sets `finish` to STOP, in place of the pods' reason, and drops later tokens.
        """
        if self.text_only and ended is None:
            return OutputPiece("".join([self.add_id(token.id) for token in tokens]), (), tokens)
        text: list[str] = []
        taken: list[Token] = []
        for token in tokens:
            if self._scanner.found:
                break
            taken.append(token)
            if self._logprobs:
                self._pending.append(ReportedToken(token, self._length))
            piece = self._detokenizer.feed(token.id)
            self._length += len(piece)
            text.append(self._scanner.feed(piece))
        self.num_tokens += len(taken)
        if ended is not None and not self._scanner.found:
            tail = self._detokenizer.flush()
            self._length += len(tail)
            text.append(self._scanner.feed(tail))
            if not self._scanner.found:
                text.append(self._scanner.flush())
        self.finish = FinishReason.STOP if self._scanner.found else ended
        out = "".join(text)
        self._released += len(out)
        if self._parser is None:
            return OutputPiece(out, self._take_reported(), tuple(taken), self.finish)
        deltas, self.finish = self._parser.feed(out, taken, self.finish)
        return OutputPiece(out, self._take_reported(), tuple(taken), self.finish, deltas)

    def add_id(self, token_id: int) -> str:
        """Returns the text of one more token that does not end the sequence. Only for text-only output."""
        self.num_tokens += 1
        return self._detokenizer.feed(token_id)

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens in reasoning sections; `num_tokens` includes them."""
        return self._parser.reasoning_tokens if self._parser else 0

    def _take_reported(self) -> tuple[ReportedToken, ...]:
        """Returns the tokens of the released text; at the end of the output, all that are left."""
        reported: list[ReportedToken] = []
        while self._pending:
            incomplete = self._released < self._length  # text is held back, or cut off by a stop string
            if incomplete and self._pending[0].offset >= self._released:
                break
            reported.append(self._pending.popleft())
        if self.finish is not None:
            self._pending.clear()
        return tuple(reported)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt. `logprob` and `rank` are None for the first token, which has no predecessor."""

    id: int
    logprob: float | None = None
    rank: int | None = None
    #: Alternatives, best first.
    top: tuple[TokenLogprob, ...] = ()


def prompt_tokens_with_logprobs(
    ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int
) -> tuple[PromptToken, ...]:
    """Returns the prompt's tokens with `num_top` alternatives each.

    `parts` are in order and cover all tokens but the first.
    """
    tokens = [PromptToken(ids[0])]
    for part in parts:
        for i, (logprob, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True)):
            tokens.append(PromptToken(ids[part.first + i], logprob, rank, part.top(i)[:num_top]))
    return tuple(tokens)


def join_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Joins parts that are in order."""
    return PromptLogprobs(
        parts[0].first,
        tuple(x for part in parts for x in part.logprobs),
        tuple(x for part in parts for x in part.ranks),
        tuple(x for part in parts for x in part.top_ids),
        tuple(x for part in parts for x in part.top_logprobs),
    )


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The prompt as part of an answer."""

    text: str
    #: The prompt's tokens with their offsets in `text`.
    reported: tuple[ReportedToken, ...]


def prompt_echo(tokenizer: TextTokenizer, tokens: Sequence[PromptToken]) -> PromptEcho:
    """Returns the prompt's text and tokens, detokenized from its ids."""
    out = make_detokenizer(tokenizer)
    text, reported, length = [], [], 0
    for index, token in enumerate(tokens):
        reported.append(ReportedToken(Token(index, token.id, token.logprob, token.top), length))
        piece = out.feed(token.id)
        text.append(piece)
        length += len(piece)
    text.append(out.flush())
    return PromptEcho("".join(text), tuple(reported))
