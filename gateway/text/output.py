"""One choice's output: from tokens in order to pieces of text with log-probabilities.

Lifecycle: `add` tokens until `finish` is set (a stop string was found) or the pods say the sequence ended, then `end`
once. Text held back for a stop string holds its tokens' log-probabilities back with it; tokens that begin inside the
stop string are counted but not shown.
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
    """A token with log-probabilities and the position in characters where its text begins."""

    token: Token
    offset: int


@dataclass(slots=True)  # not frozen, though nobody changes one: see Token
class OutputPiece:
    """What one step adds to a choice; `tokens` are those generated (stop strings' included), `shown` may lag.

    deltas: what the text means, None where nothing but content is looked for.
    """

    text: str
    reported: tuple[ReportedToken, ...]
    tokens: Sequence[Token]
    finish: FinishReason | None = None
    deltas: tuple[MessageDelta, ...] | None = None


class ChoiceOutput:
    """Text of one sequence. reading: how its text is read, None where all of it is content. include_stop: a stop string
    is shown. plain: its pieces are text and nothing else, and where a token begins is all one.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: Sequence[str],
        *,
        logprobs: bool,
        reading: OutputParserConfig | None = None,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer, reading.kept_special_ids if reading else frozenset())
        self._reader = reading.new_parser() if reading else None
        self._scanner = StopStringScanner(stops, include=include_stop)
        self._logprobs = logprobs
        self.text_only = not stops and not logprobs and reading is None
        self._pending: deque[ReportedToken] = deque()
        self._length = 0  # characters detokenized
        self._released = 0  # characters given out
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def add(self, tokens: Sequence[Token], ended: FinishReason | None = None) -> OutputPiece:
        """Takes the next tokens in order; `ended` is the pods' verdict that these are the last.

        After a stop string `finish` is STOP whatever the pods say; tokens behind it are dropped.
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
        if self._reader is None:
            return OutputPiece(out, self._take_reported(), tuple(taken), self.finish)
        deltas, self.finish = self._reader.feed(out, taken, self.finish)
        return OutputPiece(out, self._take_reported(), tuple(taken), self.finish, deltas)

    def add_id(self, token_id: int) -> str:
        """What `add` would show of one more token, which does not end the sequence, where the output is plain."""
        self.num_tokens += 1
        return self._detokenizer.feed(token_id)

    @property
    def reasoning_tokens(self) -> int:
        """Of num_tokens, those of a reasoning section."""
        return self._reader.reasoning_tokens if self._reader else 0

    def _take_reported(self) -> tuple[ReportedToken, ...]:
        """The tokens whose text was released; when the output ended by itself, all of them."""
        shown: list[ReportedToken] = []
        while self._pending:
            behind = self._released < self._length  # text is held back, or cut off by a stop string
            if behind and self._pending[0].offset >= self._released:
                break
            shown.append(self._pending.popleft())
        if self.finish is not None:
            self._pending.clear()
        return tuple(shown)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """logprob and rank: None for the first one, which nothing stands before. top: alternatives, best first."""

    id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TokenLogprob, ...] = ()


def prompt_tokens_with_logprobs(
    ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int
) -> tuple[PromptToken, ...]:
    """The prompt's tokens with num_top alternatives each; parts come in order and cover all but the first token."""
    tokens = [PromptToken(ids[0])]
    for part in parts:
        for i, (logprob, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True)):
            tokens.append(PromptToken(ids[part.first + i], logprob, rank, part.top(i)[:num_top]))
    return tuple(tokens)


def join_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Parts in order as one."""
    return PromptLogprobs(
        parts[0].first,
        tuple(x for part in parts for x in part.logprobs),
        tuple(x for part in parts for x in part.ranks),
        tuple(x for part in parts for x in part.top_ids),
        tuple(x for part in parts for x in part.top_logprobs),
    )


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """text: of the prompt. shown: its tokens, with offsets in it."""

    text: str
    reported: tuple[ReportedToken, ...]


def prompt_echo(tokenizer: TextTokenizer, tokens: Sequence[PromptToken]) -> PromptEcho:
    """The prompt as its tokens say it."""
    out = make_detokenizer(tokenizer)
    text, shown, length = [], [], 0
    for index, token in enumerate(tokens):
        shown.append(ReportedToken(Token(index, token.id, token.logprob, token.top), length))
        piece = out.feed(token.id)
        text.append(piece)
        length += len(piece)
    text.append(out.flush())
    return PromptEcho("".join(text), tuple(shown))
