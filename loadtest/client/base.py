"""The interface of a protocol client: requests are built early and sent on time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.run import RequestRecord
from loadtest.workload.prompts import ModelAnswer, Turn

#: Seconds of work between two yields to the event loop.
BUILD_SLICE_S = 100e-6
#: Seconds after the deadline for the server's own timeout answer.
GRACE_S = 5.0
#: Limit of a response without a deadline: one minute more than the gateway's own limit.
RESPONSE_TIMEOUT_S = 660.0
#: Seconds that a client waits before it aborts, if it aborts before the first token.
ABORT_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """The description of a request to build."""

    turn: Turn
    #: Answers of earlier turns, by turn.
    answers: Mapping[int, ModelAnswer]
    request_id: str
    affinity: str
    #: API key, "" for none.
    key: str


class LoadClient(Protocol):
    """A client of one server and one protocol, in one event loop. `send` takes the objects that `build` makes."""

    async def model(self) -> str:
        """Returns the model name to request. Raises Unavailable, ConfigError."""

    async def build(self, draft: RequestDraft) -> Any:
        """Builds a request. Yields to the event loop often."""

    async def send(self, request: Any, record: RequestRecord) -> None:
        """Sends the request and fills the record, also on failure. Returns when the request has ended."""

    async def close(self) -> None:
        """Closes all connections."""


class LoopYielder:
    """Splits long work: `await yielder.yield_if_due()` yields to the event loop every 100 us."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + BUILD_SLICE_S

    async def yield_if_due(self) -> None:
        """Yields if the time slice has ended."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + BUILD_SLICE_S
