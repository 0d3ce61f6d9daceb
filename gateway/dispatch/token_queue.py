"""Tokens of one attempt's sequences (children) on their way from the pods to whoever answers the client.

Whoever answers asks with `next`, one delta at a time, which merges what came meanwhile: that is how a reader that is
behind gets larger pieces. One that keeps up gives `relay` functions instead, which are called for each delta in the
very turn of the event loop in which it came: nothing is queued, and no task is woken, for a token. Nearly every token
is of such a reader, comes alone and is its id and nothing else: `pass_on` is for those.

Invariant: whichever way, a child's deltas come in order, each token once, and its finish reason with the last.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from common.errors import BatonError
from common.types import FinishReason, Token


class TokenDelta(NamedTuple):
    """Tokens of one sequence (child) that are next in order."""

    tokens: Sequence[Token] = ()
    finish: FinishReason | None = None
    child: int = 0


OnTokens = Callable[[Sequence[Token], FinishReason | None], bool]  # what a Delta tells; False: no more
OnTokenId = Callable[[int], bool]  # the same, of one token that has nothing but its id, and does not end the sequence


class TokenQueue:
    """Of n children (size). output: what the only one has from an attempt before. max_pending: tokens of a child that
    may wait. complete: all that was asked for was given. stopped: children of which nothing more is wanted. error: what
    ended the attempt early.
    """

    def __init__(self, n: int, max_pending: int, output: Sequence[int] = ()) -> None:
        self.complete = False
        self.stopped_samples: set[int] = set()
        self.error: BatonError | None = None
        self._max_pending = max_pending
        self.num_samples = n
        self._orders = [TokenOrder(output) for _ in range(n)]
        self._unfinished = set(range(n))
        self._ready_samples: deque[int] = deque()  # children that may have something to give
        self._on_tokens: OnTokens | None = None  # of `relay`
        self._on_token_id: OnTokenId | None = None  # the same
        self._waiter: asyncio.Future[None] | None = None  # of `next` and `relay`

    def put(self, child: int, tokens: Sequence[Token], finish: FinishReason | None) -> bool:
        """More of a child; False when too much of it waits."""
        order, take = self._orders[child], self._on_tokens
        order.put(tokens)
        if finish is not None:
            order.set_finish(finish)
        if child in self.stopped_samples:
            return True
        if take is not None and (delta := self._take_ready(child)) is not None:
            self._call_reader(take, delta.tokens, delta.finish)
            return True
        if child not in self._ready_samples:  # one that stayed behind would keep the reader from relaying
            self._ready_samples.append(child)
        self._wake_reader()
        return order.num_pending <= self._max_pending

    def relay_token_id(self, index: int, token_id: int) -> bool:
        """Gives one token of the only child to who relays; False: it has to be `put`."""
        take = self._on_token_id
        if take is None or not self._orders[0].append_if_next(index, token_id):
            return False
        self._call_reader(take, token_id)
        return True

    def fail(self, error: BatonError) -> None:
        """Nothing will follow; tokens that are in order already are still given first. The first error counts."""
        if self.error is None:
            self.error = error
        self._wake_reader()

    def stop_sample(self, child: int) -> bool:
        """Nothing more is wanted of one child; whether its pod has to be told."""
        if child not in self._unfinished or child in self.stopped_samples:
            return False
        self.stopped_samples.add(child)
        return not self._orders[child].finish_known

    @property
    def has_tokens(self) -> bool:
        """There are tokens, in order."""
        return any(order.ids for order in self._orders)

    def unfinished(self) -> dict[int, Sequence[int]]:
        """The tokens so far of each child of which more is wanted."""
        return {child: self._orders[child].ids for child in sorted(self._unfinished - self.stopped_samples)}

    def take_duplicates(self) -> int:
        """Tokens that came twice, since the last call."""
        count = sum(order.num_duplicates for order in self._orders)
        for order in self._orders:
            order.num_duplicates = 0
        return count

    async def next(self) -> TokenDelta:
        """All tokens of one child that are next in order; the last ones with its finish reason. Raises `error`."""
        while True:
            while self._ready_samples:
                child = self._ready_samples.popleft()
                if child not in self.stopped_samples and (delta := self._take_ready(child)) is not None:
                    return delta
            if self.error is not None:
                raise self.error
            await self._wait_for_wake()

    async def relay(self, take: OnTokens, take_id: OnTokenId | None = None) -> None:
        """Gives the only child's tokens to `take` as they come, or to take_id, until it wants no more or none will
        follow; `next` knows why. Raises what `take` raises.
        """
        assert self.num_samples == 1
        if self._ready_samples or self.error is not None:
            return
        self._on_tokens, self._on_token_id = take, take_id
        try:
            await self._wait_for_wake()
        finally:
            self._on_tokens = self._on_token_id = None

    def _take_ready(self, child: int) -> TokenDelta | None:
        """What is next in order."""
        if child not in self._unfinished:
            return None
        tokens, finish = self._orders[child].take()
        if finish is not None:
            self._unfinished.discard(child)
            self.complete = not self._unfinished
        return TokenDelta(tokens, finish, child) if tokens or finish is not None else None

    def _call_reader(self, take: Callable[..., bool], *news: Any) -> None:
        """Whoever brings the news works for other requests too, so a failure of this one's own is not raised here."""
        try:
            if take(*news) and not self.complete:
                return
            self._wake_reader()
        except Exception as e:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(e)
        self._on_tokens = self._on_token_id = None

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_for_wake(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


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
