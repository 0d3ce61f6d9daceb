"""The interface of a protocol client: requests are built early and sent on time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from common.errors import ConfigError, Unavailable
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.workload.sessions import ModelAnswer, PromptMessage, TextPiece, Turn

T = TypeVar("T")
BUILD_SLICE_S = 100e-6  # Seconds of work between two yields to the event loop.
GRACE_S = 5.0  # Seconds after the deadline for the server's own timeout answer.
RESPONSE_TIMEOUT_S = 660.0  # Limit of a response without a deadline: one minute more than the gateway's own limit.
CONNECT_S = 10.0
CACHED_PIECES = 4096  # Pieces with kept text or token ids.
ABORT_WAIT_S = 0.05  # Seconds that a client waits before it aborts, if it aborts before the first token.


@dataclass(frozen=True, slots=True)
class RequestDraft:
    turn: Turn
    answers: Mapping[int, ModelAnswer]  # Answers of earlier turns, by turn.
    request_id: str
    affinity: str
    key: str  # API key, "" for none.

    def earlier_answer(self, message: PromptMessage) -> ModelAnswer | None:
        """Returns the server's answer that an assistant message repeats; None for other messages, and without one."""
        return None if message.answer is None else self.answers.get(message.answer)


class LoadClient(Protocol):
    """A client of one server and one protocol, in one event loop. `send` takes the objects that `build` makes."""

    async def model(self) -> str: ...  # The model name to request. Raises Unavailable, ConfigError.
    async def build(self, draft: RequestDraft) -> Any: ...  # Yields to the event loop often.
    async def send(self, request: Any, record: RequestRecord) -> None: ...  # Fills the record, also on failure.
    async def close(self) -> None: ...


def chosen_model(config: LoadConfig, served: Sequence[str]) -> str:
    """Returns the configured model, or the first that the server lists. Raises Unavailable, ConfigError."""
    if not served:
        raise Unavailable(f"{config.url} serves no model")
    if config.model and config.model not in served:
        raise ConfigError(f"--model: {config.url} serves {', '.join(served)}, not {config.model}", field="model")
    return config.model or served[0]


class LoopYielder:
    """Splits the long work of one request: yields to the event loop every 100 us."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + BUILD_SLICE_S

    async def each(self, build: Callable[[TextPiece], T], pieces: Iterable[TextPiece]) -> AsyncIterator[T]:
        for piece in pieces:
            yield build(piece)
            if time.perf_counter() >= self._until:
                await asyncio.sleep(0)
                self._until = time.perf_counter() + BUILD_SLICE_S
