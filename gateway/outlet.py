"""Tokens of one attempt's sequences (children) on their way from the pods to whoever answers the client.

Whoever answers asks with `next`, one delta at a time, which merges what came meanwhile: that is how a reader that is
behind gets larger pieces. One that keeps up gives `relay` functions instead, which are called for each delta in the
very turn of the event loop in which it came: nothing is queued, and no task is woken, for a token. Nearly every token
is of such a reader, comes alone and is its id and nothing else: `pass_on` is for those.

Invariant: whichever way, a child's deltas come in order, each token once, and its finish reason with the last.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.errors import BatonError
from common.types import FinishReason, Token
from gateway.token_order import TokenOrder


class Delta(NamedTuple):
    """Tokens of one sequence (child) that are next in order."""

    tokens: Sequence[Token] = ()
    finish: FinishReason | None = None
    child: int = 0


Take = Callable[[Sequence[Token], FinishReason | None], bool]  # what a Delta tells; False: no more
TakeId = Callable[[int], bool]  # the same, of one token that has nothing but its id, and does not end the sequence


class Outlet:
    """Of n children (size). output: what the only one has from an attempt before. max_pending: tokens of a child that
    may wait. complete: all that was asked for was given. stopped: children of which nothing more is wanted. error: what
    ended the attempt early.
    """

    def __init__(self, n: int, max_pending: int, output: Sequence[int] = ()) -> None:
        self.complete = False
        self.stopped: set[int] = set()
        self.error: BatonError | None = None
        self._max_pending = max_pending
        self.size = n
        self._orders = [TokenOrder(output) for _ in range(n)]
        self._unfinished = set(range(n))
        self._news: deque[int] = deque()  # children that may have something to give
        self._take: Take | None = None  # of `relay`
        self._take_id: TakeId | None = None  # the same
        self._waiter: asyncio.Future[None] | None = None  # of `next` and `relay`

    def put(self, child: int, tokens: Sequence[Token], finish: FinishReason | None) -> bool:
        """More of a child; False when too much of it waits."""
        order, take = self._orders[child], self._take
        order.put(tokens)
        if finish is not None:
            order.end(finish)
        if child in self.stopped:
            return True
        if take is not None and (delta := self._ready(child)) is not None:
            self._hand_on(take, delta.tokens, delta.finish)
            return True
        if child not in self._news:  # one that stayed behind would keep the reader from relaying
            self._news.append(child)
        self._wake()
        return order.pending <= self._max_pending

    def pass_on(self, index: int, token_id: int) -> bool:
        """Gives one token of the only child to who relays; False: it has to be `put`."""
        take = self._take_id
        if take is None or not self._orders[0].pass_on(index, token_id):
            return False
        self._hand_on(take, token_id)
        return True

    def fail(self, error: BatonError) -> None:
        """Nothing will follow; tokens that are in order already are still given first. The first error counts."""
        if self.error is None:
            self.error = error
        self._wake()

    def stop(self, child: int) -> bool:
        """Nothing more is wanted of one child; whether its pod has to be told."""
        if child not in self._unfinished or child in self.stopped:
            return False
        self.stopped.add(child)
        return not self._orders[child].ended

    @property
    def begun(self) -> bool:
        """There are tokens, in order."""
        return any(order.ids for order in self._orders)

    def unfinished(self) -> dict[int, Sequence[int]]:
        """The tokens so far of each child of which more is wanted."""
        return {child: self._orders[child].ids for child in sorted(self._unfinished - self.stopped)}

    def take_duplicates(self) -> int:
        """Tokens that came twice, since the last call."""
        count = sum(order.duplicates for order in self._orders)
        for order in self._orders:
            order.duplicates = 0
        return count

    async def next(self) -> Delta:
        """All tokens of one child that are next in order; the last ones with its finish reason. Raises `error`."""
        while True:
            while self._news:
                child = self._news.popleft()
                if child not in self.stopped and (delta := self._ready(child)) is not None:
                    return delta
            if self.error is not None:
                raise self.error
            await self._woken()

    async def relay(self, take: Take, take_id: TakeId | None = None) -> None:
        """Gives the only child's tokens to `take` as they come, or to take_id, until it wants no more or none will
        follow; `next` knows why. Raises what `take` raises.
        """
        assert self.size == 1
        if self._news or self.error is not None:
            return
        self._take, self._take_id = take, take_id
        try:
            await self._woken()
        finally:
            self._take = self._take_id = None

    def _ready(self, child: int) -> Delta | None:
        """What is next in order."""
        if child not in self._unfinished:
            return None
        tokens, finish = self._orders[child].take()
        if finish is not None:
            self._unfinished.discard(child)
            self.complete = not self._unfinished
        return Delta(tokens, finish, child) if tokens or finish is not None else None

    def _hand_on(self, take: Callable[..., bool], *news: Any) -> None:
        """Whoever brings the news works for other requests too, so a failure of this one's own is not raised here."""
        try:
            if take(*news) and not self.complete:
                return
            self._wake()
        except Exception as e:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(e)
        self._take = self._take_id = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
