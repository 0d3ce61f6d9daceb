"""The n choices of one prompt: one run through the pods, whose news are dealt to the children.

There is no task behind it: whichever child waits for news fetches them, for all; the others wait until something is
theirs or nobody fetches any more. A child that is closed early is ended on the pods alone; the run is closed with the
last one, so all of them have to be closed, those too that were never asked for anything. Once the run has come into
parts, each child asks its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import BatonError, Overloaded
from common.types import FinishReason, PromptLogprobs, Token
from gateway.dispatch.attempt import MAX_PENDING
from gateway.dispatch.dispatch import Dispatch
from gateway.dispatch.token_queue import TokenDelta


class Sample:
    """One choice's end of a family; as a Run. Tokens that it was not asked for are bounded by MAX_PENDING."""

    def __init__(self, family: SampleGroup, number: int) -> None:
        self._group = family
        self._index = number
        self.tokens: list[Token] = []
        self.finish: FinishReason | None = None
        self.closed = False
        self.wakeup = asyncio.Event()

    @property
    def cached_tokens(self) -> int:
        return self._group.dispatch.cached_tokens

    @property
    def drafts_proposed(self) -> int:
        """Drafts of all children, told by the first."""
        return 0 if self._index else self._group.dispatch.drafts_proposed

    @property
    def drafts_accepted(self) -> int:
        return 0 if self._index else self._group.dispatch.drafts_accepted

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        return self._group.dispatch.prompt_logprobs

    async def next(self) -> TokenDelta:
        """See Run.next."""
        while not (self.tokens or self.finish):
            if (part := self._group.dispatch.resumed_samples.get(self._index)) is not None:
                return (await part.next())._replace(child=self._index)
            await self._group.fetch(self)
        tokens, self.tokens = self.tokens, []
        return TokenDelta(tokens, self.finish, child=self._index)

    def close(self) -> None:
        """Nothing more is wanted of it; idempotent."""
        if not self.closed:
            self.closed = True
            self._group.on_sample_closed(self._index)


class SampleGroup:
    """See the top of this file."""

    def __init__(self, n: int) -> None:
        self.dispatch_or_none: Dispatch | None = None
        self.samples = tuple(Sample(self, number) for number in range(n))
        self._fetching = False
        self._error: BatonError | None = None

    @property
    def dispatch(self) -> Dispatch:
        """The run, once a child was begun."""
        assert self.dispatch_or_none is not None
        return self.dispatch_or_none

    def start(self, number: int, start: Callable[[], Dispatch]) -> Sample:
        """A child that will be asked; the first one starts the run for all."""
        if self.dispatch_or_none is None:
            self.dispatch_or_none = start()
        return self.samples[number]

    async def fetch(self, child: Sample) -> None:
        """Returns when there may be something for the child. Raises what ended the run early."""
        if self._error is not None:
            raise self._error
        child.wakeup.clear()
        if self._fetching:
            await child.wakeup.wait()
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
        if self.dispatch.resumed_samples:
            for child in self.samples:
                child.wakeup.set()
            return
        child = self.samples[delta.child]
        if not child.closed:
            child.tokens.extend(delta.tokens)
            child.finish = delta.finish
            if len(child.tokens) > MAX_PENDING:
                raise Overloaded("the client reads too slowly")
            child.wakeup.set()

    def _wake_next_reader(self) -> None:
        """Somebody who waits fetches next; with an error all are told."""
        for child in self.samples:
            if child.closed or child.wakeup.is_set():
                continue
            child.wakeup.set()
            if self._error is None:
                return

    def on_sample_closed(self, number: int) -> None:
        """A child wants nothing more."""
        if self.dispatch_or_none is None:
            return
        if all(child.closed for child in self.samples):
            self.dispatch_or_none.close()
        else:
            self.dispatch_or_none.stop_sample(number)
