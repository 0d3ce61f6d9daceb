"""The n samples of one prompt, which share one dispatch.

No task runs for the group. The first sample that waits for tokens reads the dispatch for all samples. Each of the
others waits until its tokens have come, or until the reading sample has enough and it is its turn to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import BatonError, Overloaded
from common.types import FinishReason, Token
from gateway.dispatch.attempt import MAX_PENDING_TOKENS
from gateway.dispatch.dispatch import Dispatch
from gateway.dispatch.token_queue import TokenDelta


class Sample:
    """The reader of one sample of a group.

    Every sample has to be closed, also one that was never read: the dispatch is closed with the last of them.
    """

    def __init__(self, group: SampleGroup, index: int) -> None:
        #: Tokens that came and were not read, at most MAX_PENDING_TOKENS.
        self.tokens: list[Token] = []
        self.finish: FinishReason | None = None
        self.closed = False
        #: Set when the sample has tokens, or may read the dispatch itself.
        self.wakeup = asyncio.Event()
        self._group = group
        self._index = index

    async def next(self) -> TokenDelta:
        """Returns the next tokens in order, with the finish reason after the last. Raises BatonError."""
        while not (self.tokens or self.finish):
            if (resumed := self._group.dispatch.resumed_samples.get(self._index)) is not None:
                return (await resumed.next())._replace(sample=self._index)
            await self._group.fetch(self)
        tokens, self.tokens = self.tokens, []
        return TokenDelta(tokens, self.finish, self._index)

    def close(self) -> None:
        """Ends the sample on the pods if it still runs. Idempotent."""
        if not self.closed:
            self.closed = True
            self._group.on_sample_closed(self._index)


class SampleGroup:
    """The samples of one prompt. The first `start` creates the dispatch; the last closed sample closes it."""

    def __init__(self, n: int) -> None:
        self.dispatch_or_none: Dispatch | None = None
        self.samples = tuple(Sample(self, index) for index in range(n))
        self._fetching = False  # a sample reads the dispatch now
        self._error: BatonError | None = None  # the error that ended the dispatch

    @property
    def dispatch(self) -> Dispatch:
        """The shared dispatch. A sample must have been started."""
        assert self.dispatch_or_none is not None
        return self.dispatch_or_none

    def start(self, index: int, new_dispatch: Callable[[], Dispatch]) -> Sample:
        """Returns the sample. The first call creates the dispatch for all."""
        if self.dispatch_or_none is None:
            self.dispatch_or_none = new_dispatch()
        return self.samples[index]

    async def fetch(self, sample: Sample) -> None:
        """Returns when there may be tokens for the sample. Raises the error that ended the dispatch."""
        if self._error is not None:
            raise self._error
        sample.wakeup.clear()
        if self._fetching:
            await sample.wakeup.wait()
            return
        self._fetching = True
        try:
            self._deliver(await self.dispatch.next())
        except BatonError as e:
            self._error = e
            raise
        finally:
            self._fetching = False
            self._wake_next_reader()

    def _deliver(self, delta: TokenDelta) -> None:
        """Gives a delta to its sample. If the samples continue on their own, all of them are woken."""
        if self.dispatch.resumed_samples:
            for sample in self.samples:
                sample.wakeup.set()
            return
        sample = self.samples[delta.sample]
        if not sample.closed:
            sample.tokens.extend(delta.tokens)
            sample.finish = delta.finish
            if len(sample.tokens) > MAX_PENDING_TOKENS:
                raise Overloaded("the client reads too slowly")
            sample.wakeup.set()

    def _wake_next_reader(self) -> None:
        """Wakes one waiting sample, which reads next. After an error all are woken, to raise it."""
        for sample in self.samples:
            if sample.closed or sample.wakeup.is_set():
                continue
            sample.wakeup.set()
            if self._error is None:
                return

    def on_sample_closed(self, index: int) -> None:
        """Ends the sample, or the dispatch if it was the last."""
        if self.dispatch_or_none is None:
            return
        if all(sample.closed for sample in self.samples):
            self.dispatch_or_none.close()
        else:
            self.dispatch_or_none.stop_sample(index)
