"""One choice's output: from tokens in order to pieces of text with log-probabilities.

Lifecycle: `add` tokens until `finish` is set (a stop string was found) or the pods say the sequence ended, then `end`
once. Text held back for a stop string holds its tokens' log-probabilities back with it; tokens that begin inside the
stop string are counted but not shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import FinishReason, Token
from gateway.detokenizer import detokenizer
from gateway.reader import Reading
from gateway.stop_strings import StopScanner
from gateway.tokenizer import TextTokenizer
from gateway.tools.protocol import Delta


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with log-probabilities and the position in characters where its text begins."""

    token: Token
    offset: int


@dataclass(slots=True)  # not frozen, though nobody changes one: see Token
class Piece:
    """What one step adds to a choice; `tokens` are those generated (stop strings' included), `shown` may lag.

    deltas: what the text means, None where nothing but content is looked for.
    """

    text: str
    reported: tuple[ShownToken, ...]
    tokens: Sequence[Token]
    finish: FinishReason | None = None
    deltas: tuple[Delta, ...] | None = None


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
        reading: Reading | None = None,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer(tokenizer, reading.kept_special_ids if reading else frozenset())
        self._reader = reading.new_parser() if reading else None
        self._scanner = StopScanner(stops, include=include_stop)
        self._logprobs = logprobs
        self.text_only = not stops and not logprobs and reading is None
        self._pending: deque[ShownToken] = deque()
        self._length = 0  # characters detokenized
        self._released = 0  # characters given out
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def add(self, tokens: Sequence[Token], ended: FinishReason | None = None) -> Piece:
        """Takes the next tokens in order; `ended` is the pods' verdict that these are the last.

        After a stop string `finish` is STOP whatever the pods say; tokens behind it are dropped.
        """
        if self.text_only and ended is None:
            return Piece("".join([self.add_id(token.id) for token in tokens]), (), tokens)
        text: list[str] = []
        taken: list[Token] = []
        for token in tokens:
            if self._scanner.found:
                break
            taken.append(token)
            if self._logprobs:
                self._pending.append(ShownToken(token, self._length))
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
            return Piece(out, self._take_reported(), tuple(taken), self.finish)
        deltas, self.finish = self._reader.feed(out, taken, self.finish)
        return Piece(out, self._take_reported(), tuple(taken), self.finish, deltas)

    def add_id(self, token_id: int) -> str:
        """What `add` would show of one more token, which does not end the sequence, where the output is plain."""
        self.num_tokens += 1
        return self._detokenizer.feed(token_id)

    @property
    def reasoning_tokens(self) -> int:
        """Of num_tokens, those of a reasoning section."""
        return self._reader.reasoning_tokens if self._reader else 0

    def _take_reported(self) -> tuple[ShownToken, ...]:
        """The tokens whose text was released; when the output ended by itself, all of them."""
        shown: list[ShownToken] = []
        while self._pending:
            behind = self._released < self._length  # text is held back, or cut off by a stop string
            if behind and self._pending[0].offset >= self._released:
                break
            shown.append(self._pending.popleft())
        if self.finish is not None:
            self._pending.clear()
        return tuple(shown)
