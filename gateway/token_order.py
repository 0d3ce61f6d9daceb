"""Tokens from two pods into one sequence: in order of index, each once.

Invariant: `take` gives the indices without gap or repetition, and the finish reason with or after the last. They begin
with 0, or behind what the sequence has from a pod before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from common.types import FinishReason, Token


class TokenOrder:
    """Reorders one sequence. ids: its tokens in order, ready or taken; output: those that were there before. pending:
    tokens that arrived and were not taken; duplicates: tokens dropped.
    """

    def __init__(self, output: Sequence[int] = ()) -> None:
        self.ids = array("I", output)
        self._ready: list[Token] = []
        self._early: dict[int, Token] = {}  # came before one with a lower index
        self._end: int | None = None
        self._finish: FinishReason | None = None
        self.num_duplicates = 0

    @property
    def num_pending(self) -> int:
        return len(self._ready) + len(self._early)

    @property
    def finish_known(self) -> bool:
        """The finish reason is known; tokens may still be missing."""
        return self._finish is not None

    def append_if_next(self, index: int, token_id: int) -> bool:
        """Whether this token is exactly what `take` would give if it were put now; then it counts as put and taken."""
        if index != len(self.ids) or self._ready or self._early or self._end is not None:
            return False
        self.ids.append(token_id)
        return True

    def put(self, tokens: Iterable[Token]) -> None:
        """Takes tokens in any order, as often as they come."""
        for token in tokens:
            index = token.index
            if index < len(self.ids) or index in self._early:
                self.num_duplicates += 1
            elif self._end is None or index < self._end:
                if index > len(self.ids):
                    self._early[index] = token
                    continue
                self._append(token)
                while self._early and (early := self._early.pop(len(self.ids), None)) is not None:
                    self._append(early)

    def _append(self, token: Token) -> None:
        self._ready.append(token)
        self.ids.append(token.id)

    def set_finish(self, reason: FinishReason) -> None:
        """The sequence ends with the last token that arrived so far; there is always at least one."""
        if self._finish is None:
            self._finish = reason
            self._end = max(len(self.ids), 1 + max(self._early, default=0))

    def take(self) -> tuple[list[Token], FinishReason | None]:
        """All tokens that are next in order, and the finish reason once nothing is missing before it."""
        out, self._ready = self._ready, []
        return out, self._finish if self._end is not None and len(self.ids) >= self._end else None
