"""The queue of an attempt's tokens, between the pods that send them and the reader that answers the client.

    pods -- put -------------> order of sample 0 --+-- next --> reader    wakes a task; gives all tokens that wait
                               order of sample 1 --+
         -- relay_token_id --> order of sample 0 ----- relay -> reader    calls the reader in the same loop turn

A reader that is behind calls `next`, and its pieces grow. A reader that keeps up calls `relay` with callbacks: then no
token is queued and no task is woken. Nearly every token is relayed alone and has nothing but its id, so
`relay_token_id` handles that case without a list.

Invariant: on both ways a sample's tokens come in order, each token once, and the finish reason comes with the last.
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
    """The next tokens of one sample, in order; `finish` is set with its last token."""

    tokens: Sequence[Token] = ()
    finish: FinishReason | None = None
    sample: int = 0


#: Callbacks of a relaying reader, for a delta and for one token that has nothing but its id and is not the last. They
#: return False to end the relay.
OnTokens = Callable[[Sequence[Token], FinishReason | None], bool]
OnTokenId = Callable[[int], bool]


class TokenQueue:
    """Puts the tokens of n samples in order and gives each token once, to one reader."""

    def __init__(self, num_samples: int, max_pending: int, output_ids: Sequence[int] = ()) -> None:
        """`max_pending`: tokens of a sample that may wait. `output_ids`: from earlier attempts; not given again."""
        self.num_samples = num_samples
        self.complete = False  # the reader has got every sample with its finish reason
        self.error: BatonError | None = None  # the error that ended the attempt early
        self.stopped_samples: set[int] = set()  #: Samples that the reader has stopped before their end.
        self._max_pending = max_pending
        self._orders = [TokenOrder(output_ids) for _ in range(num_samples)]
        self._unfinished = set(range(num_samples))  # samples that have not ended for the reader
        self._ready_samples: deque[int] = deque()  #: Samples with tokens that `next` has not seen; each once.
        self._on_tokens: OnTokens | None = None  #: Callback for tokens; None unless `relay` runs.
        self._on_token_id: OnTokenId | None = None  #: Callback for a lone token id; None like the other.
        self._waiter: asyncio.Future[None] | None = None  # the reader's future while it waits in `next` or `relay`

    # -- the pods' side

    def put(self, sample: int, tokens: Sequence[Token], finish: FinishReason | None) -> bool:
        """Takes tokens of a sample in any order. Returns False if more than `max_pending` tokens of it wait."""
        order, on_tokens = self._orders[sample], self._on_tokens
        order.put(tokens)
        if finish is not None:
            order.set_finish(finish)
        if sample in self.stopped_samples:
            return True
        if on_tokens is not None and (delta := self._take_ready(sample)) is not None:
            self._call_reader(on_tokens, delta.tokens, delta.finish)
            return True
        # Each sample is entered once: an entry that `next` did not take would end the reader's next relay at once.
        if sample not in self._ready_samples:
            self._ready_samples.append(sample)
        self._wake_reader()
        return order.num_pending <= self._max_pending

    def relay_token_id(self, index: int, token_id: int) -> bool:
        """Gives one token of the only sample to the relaying reader.

        Returns False, without effect, if no reader relays or the token is not the next one; then `put` has to take it.
        """
        on_token_id = self._on_token_id
        if on_token_id is None or not self._orders[0].append_if_next(index, token_id):
            return False
        self._call_reader(on_token_id, token_id)
        return True

    def fail(self, error: BatonError) -> None:
        """Ends the queue: the reader gets the tokens that are in order, then the error. The first error stays."""
        if self.error is None:
            self.error = error
        self._wake_reader()

    # -- the reader's side

    async def next(self) -> TokenDelta:
        """Returns all tokens of one sample that are next in order. Raises `error` after the last of them."""
        while True:
            while self._ready_samples:
                sample = self._ready_samples.popleft()
                if sample not in self.stopped_samples and (delta := self._take_ready(sample)) is not None:
                    return delta
            if self.error is not None:
                raise self.error
            await self._wait_for_wake()

    async def relay(self, on_tokens: OnTokens, on_token_id: OnTokenId | None = None) -> None:
        """Calls the reader back for each token of the only sample, in the loop turn in which it arrives.

        Returns when a callback returns False, when the sample is complete, when an error is set, or at once if tokens
        wait already. The reader then calls `next`, which gives the tokens or the error. Raises what a callback raises.
        """
        assert self.num_samples == 1
        if self._ready_samples or self.error is not None:
            return
        self._on_tokens, self._on_token_id = on_tokens, on_token_id
        try:
            await self._wait_for_wake()
        finally:
            self._on_tokens = self._on_token_id = None

    def stop_sample(self, sample: int) -> bool:
        """Gives no more tokens of a sample. Returns True if the decode pod still computes it, as far as is known."""
        if sample not in self._unfinished or sample in self.stopped_samples:
            return False
        self.stopped_samples.add(sample)
        return not self._orders[sample].finish_known

    # -- what a later attempt needs to know

    @property
    def finish_known(self) -> bool:
        """Nothing more comes from the pods: each sample was stopped, or has its finish reason."""
        return all(order.finish_known or i in self.stopped_samples for i, order in enumerate(self._orders))

    @property
    def num_received(self) -> int:
        """Tokens of all samples that have arrived, each once, from earlier attempts too."""
        return sum(order.num_received for order in self._orders)

    @property
    def has_tokens(self) -> bool:
        """At least one token is in order, from this attempt or from an earlier one."""
        return any(order.ids for order in self._orders)

    @property
    def has_first_tokens(self) -> bool:
        """The first token of this attempt is in order, for each sample that was not stopped."""
        return all(order.begun or i in self.stopped_samples for i, order in enumerate(self._orders))

    def unfinished(self) -> dict[int, Sequence[int]]:
        """Returns the token ids so far of each sample that was neither finished nor stopped."""
        return {sample: self._orders[sample].ids for sample in sorted(self._unfinished - self.stopped_samples)}

    def take_duplicates(self) -> int:
        """Returns how many tokens were dropped as duplicates since the last call."""
        count = sum(order.num_duplicates for order in self._orders)
        for order in self._orders:
            order.num_duplicates = 0
        return count

    # -- between the two sides

    def _take_ready(self, sample: int) -> TokenDelta | None:
        """Takes the tokens of a sample that are next in order; None if there are none and it does not end."""
        if sample not in self._unfinished:
            return None
        tokens, finish = self._orders[sample].take()
        if finish is not None:
            self._unfinished.discard(sample)
            self.complete = not self._unfinished
        return TokenDelta(tokens, finish, sample) if tokens or finish is not None else None

    def _call_reader(self, callback: Callable[..., bool], *arguments: Any) -> None:
        """Calls a relaying reader, and ends its relay if it wants no more or the sample is complete.

        The caller reads a token stream of many requests. So an exception of this reader goes to the task that waits in
        `relay`, not to the caller.
        """
        try:
            if callback(*arguments) and not self.complete:
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
    """Puts the tokens of one sequence in order of their index and drops duplicates.

    |<---------------- ids ---------------->|
    | output_ids |  taken  |  _ready        |  gap  |  _early  |
    index 0                                 ^ the next token   ^ _end, once the finish reason is known
    """

    def __init__(self, output_ids: Sequence[int] = ()) -> None:
        self.ids = array("I", output_ids)  #: Ids of all tokens without a gap, from earlier attempts too.
        self.num_duplicates = 0  #: Tokens dropped because they arrived twice.
        self._start = len(self.ids)
        self._ready: list[Token] = []
        self._early: dict[int, Token] = {}  # by index; a token before them is missing
        self._end: int | None = None  # number of tokens of the whole sequence
        self._finish: FinishReason | None = None

    @property
    def begun(self) -> bool:
        """The first token after `output_ids` has arrived."""
        return len(self.ids) > self._start

    @property
    def num_received(self) -> int:
        """Tokens that arrived, each once."""
        return len(self.ids) + len(self._early)

    @property
    def num_pending(self) -> int:
        """Tokens that arrived and were not taken."""
        return len(self._ready) + len(self._early)

    @property
    def finish_known(self) -> bool:
        """The finish reason has arrived; tokens before it may still be missing."""
        return self._finish is not None

    def append_if_next(self, index: int, token_id: int) -> bool:
        """Appends a token and counts it as taken, if it is the next one and nothing else waits. Else returns False."""
        if index != len(self.ids) or self._ready or self._early or self._end is not None:
            return False
        self.ids.append(token_id)
        return True

    def put(self, tokens: Iterable[Token]) -> None:
        """Takes tokens in any order and any number of times. Tokens at or after the end are dropped."""
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
        """Sets the finish reason. The sequence ends with its last token so far, and has at least one token."""
        if self._finish is None:
            self._finish = reason
            self._end = max(len(self.ids), 1 + max(self._early, default=0))

    def take(self) -> tuple[list[Token], FinishReason | None]:
        """Takes all tokens that are next in order, and the finish reason if no token before the end is missing."""
        taken, self._ready = self._ready, []
        return taken, self._finish if self._end is not None and len(self.ids) >= self._end else None
