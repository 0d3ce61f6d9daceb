"""The n samples of one prompt, which share a dispatch and are read independently of each other."""

from __future__ import annotations

import asyncio

from common.errors import BatonError, Overloaded
from common.types import FinishReason, Token
from gateway.dispatch.attempt import MAX_PENDING_TOKENS
from gateway.dispatch.dispatch import Dispatch
from gateway.dispatch.token_queue import TokenDelta


class Sample:
    """The reader of one sample of a group. Every sample has to be closed, also one that was never read."""

    def __init__(self, group: SampleGroup, index: int) -> None:
        self.tokens: list[Token] = []  #: Tokens that came and were not read, at most MAX_PENDING_TOKENS.
        self.finish: FinishReason | None = None
        self.closed = False
        self.wakeup = asyncio.Event()  #: Set when the sample has tokens, or may read the dispatch itself.
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
    """The n samples of one prompt. The last closed sample closes their dispatch.

    No task runs for the group. The first sample that waits for tokens reads the dispatch for all samples. Each of the
    others waits until its tokens have come, or until the reading sample has enough and it is its turn to read.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.samples = tuple(Sample(self, index) for index in range(dispatch.request.sampling.n))
        self._fetching = False  # a sample reads the dispatch now
        self._error: BatonError | None = None  # the error that ended the dispatch

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
        if all(sample.closed for sample in self.samples):
            self.dispatch.close()
        else:
            self.dispatch.stop_sample(index)
