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
from gateway.leg import MAX_PENDING
from gateway.outlet import Delta
from gateway.pipeline import Run


class Child:
    """One choice's end of a family; as a Run. Tokens that it was not asked for are bounded by MAX_PENDING."""

    def __init__(self, family: Family, number: int) -> None:
        self._family = family
        self._number = number
        self.tokens: list[Token] = []
        self.finish: FinishReason | None = None
        self.closed = False
        self.news = asyncio.Event()

    @property
    def cached_tokens(self) -> int:
        return self._family.begun.cached_tokens

    @property
    def proposed(self) -> int:
        """Drafts of all children, told by the first."""
        return 0 if self._number else self._family.begun.proposed

    @property
    def accepted(self) -> int:
        return 0 if self._number else self._family.begun.accepted

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        return self._family.begun.prompt_logprobs

    async def next(self) -> Delta:
        """See Run.next."""
        while not (self.tokens or self.finish):
            if (part := self._family.begun.parts.get(self._number)) is not None:
                return (await part.next())._replace(child=self._number)
            await self._family.fetch(self)
        tokens, self.tokens = self.tokens, []
        return Delta(tokens, self.finish, child=self._number)

    def close(self) -> None:
        """Nothing more is wanted of it; idempotent."""
        if not self.closed:
            self.closed = True
            self._family.closed(self._number)


class Family:
    """See the top of this file."""

    def __init__(self, n: int) -> None:
        self.run: Run | None = None
        self.children = tuple(Child(self, number) for number in range(n))
        self._fetching = False
        self._error: BatonError | None = None

    @property
    def begun(self) -> Run:
        """The run, once a child was begun."""
        assert self.run is not None
        return self.run

    def begin(self, number: int, start: Callable[[], Run]) -> Child:
        """A child that will be asked; the first one starts the run for all."""
        if self.run is None:
            self.run = start()
        return self.children[number]

    async def fetch(self, child: Child) -> None:
        """Returns when there may be something for the child. Raises what ended the run early."""
        if self._error is not None:
            raise self._error
        child.news.clear()
        if self._fetching:
            await child.news.wait()
            return
        self._fetching = True
        try:
            self._deal(await self.begun.next())
        except BatonError as e:
            self._error = e
            raise
        finally:
            self._fetching = False
            self._hand_over()

    def _deal(self, delta: Delta) -> None:
        if self.begun.parts:
            for child in self.children:
                child.news.set()
            return
        child = self.children[delta.child]
        if not child.closed:
            child.tokens.extend(delta.tokens)
            child.finish = delta.finish
            if len(child.tokens) > MAX_PENDING:
                raise Overloaded("the client reads too slowly")
            child.news.set()

    def _hand_over(self) -> None:
        """Somebody who waits fetches next; with an error all are told."""
        for child in self.children:
            if child.closed or child.news.is_set():
                continue
            child.news.set()
            if self._error is None:
                return

    def closed(self, number: int) -> None:
        """A child wants nothing more."""
        if self.run is None:
            return
        if all(child.closed for child in self.children):
            self.run.close()
        else:
            self.run.stop(number)
