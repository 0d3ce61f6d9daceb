"""What a fuzz target is: makes inputs from a seed, and runs one input against the code of a surface.

To add a target: write a subclass in targets/, and add it to TARGETS in targets/__init__.py.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Self

from tests.fuzz.mutators import mutate


class FuzzTarget(ABC):
    """One surface of the code that gets bytes from outside. A context manager: inputs run inside the block."""

    words: Sequence[bytes] = ()  #: Texts that mutations insert.
    usual_bytes = 1024  #: Most bytes of an input, but for one in a hundred.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Releases what the target holds."""
        return

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Returns valid inputs. Called inside the block."""

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        """Returns the next input. `corpus` are the seeds, and inputs with outcomes that no earlier input had."""
        return mutate(rng.choice(corpus), rng, self.words, corpus, self.usual_bytes)

    @abstractmethod
    def run(self, data: bytes) -> str:
        """Runs one input. Returns its outcome in a few words. Documented errors are outcomes; others are raised."""


class AsyncFuzzTarget(FuzzTarget):
    """A target with an event loop. An exception that no task handles is raised by the input that caused it."""

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._unhandled: list[BaseException | str] = []
        self._runner.get_loop().set_exception_handler(
            lambda _, context: self._unhandled.append(context.get("exception") or context["message"])
        )
        self.stack = AsyncExitStack()
        self._runner.run(self.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.stack.aclose())
        self._runner.close()

    @abstractmethod
    async def start(self) -> None:
        """Starts what inputs need; `stack` ends it."""

    @abstractmethod
    async def handle(self, data: bytes) -> str:
        """Runs one input, as `run` describes."""

    def run(self, data: bytes) -> str:
        outcome = self._runner.run(self.handle(data))
        unhandled, self._unhandled = self._unhandled, []
        for error in unhandled:
            raise AssertionError(f"unhandled in the event loop: {error!r}") from (
                error if isinstance(error, BaseException) else None
            )
        return outcome
