"""What a load test needs of a protocol: requests made ahead of their time, sent when it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.run import RequestRecord
from loadtest.workload.prompts import ModelAnswer, Turn

BUILD_SLICE_S = 100e-6
GRACE_S = 5.0  # after the deadline, for the server to say that it has passed
RESPONSE_TIMEOUT_S = 660.0  # without a deadline: a minute more than a gateway allows by itself
LEAVE_S = 0.05  # a client that leaves before the first token waits this long


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """A request to build. answers: of the turns before it, where they are known; key: which API key, "" for none."""

    turn: Turn
    answers: Mapping[int, ModelAnswer]
    request_id: str
    affinity: str
    key: str


class LoadClient(Protocol):
    """One server, by one protocol, in one event loop. Requests are whatever `build` makes."""

    async def model(self) -> str:
        """The name of the model to ask for. Raises Unavailable, ConfigError."""

    async def build(self, draft: RequestDraft) -> Any:
        """A request, ready to send; gives way to the loop often."""

    async def send(self, request: Any, record: RequestRecord) -> None:
        """Sends it and fills the record, whatever happens; returns when it has ended."""

    async def close(self) -> None:
        """Hangs up."""


class LoopYielder:
    """Work that gives way: `await slices.rest()` between small steps costs a turn of the loop only when it is due."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + BUILD_SLICE_S

    async def yield_if_due(self) -> None:
        """Lets the loop turn if the slice is over."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + BUILD_SLICE_S
