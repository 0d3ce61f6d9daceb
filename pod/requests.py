"""The requests that a pod serves, and a loop that asks again while an answer is temporary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from common.errors import BatonError

DEFAULT_DEADLINE_S = 600.0  # Deadline of callers without a gRPC timeout
RETRY_LIMIT_S = 0.5  # Limit of retry_while
FIRST_POLL_S, POLL_S = 0.00025, 0.002  # Time between the first tries of retry_while, and between later ones


class PodRequest(Protocol):
    """One request that a pod serves."""

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this pod has yet to compute."""

    def fail(self, error: BatonError) -> None:
        """Ends the request with `error`. Idempotent."""

    async def drained(self) -> None:
        """Returns once the pod holds nothing for the request, for good."""


R = TypeVar("R", bound=PodRequest)
T = TypeVar("T")


class RequestRegistry(Generic[R]):
    """Requests by id, each from `add` until it is drained.

    Changed on the event loop only. `get` may run on any thread, because no entry is replaced.
    """

    def __init__(self) -> None:
        self.on_drained: Callable[[R], None] = lambda _: None  #: Called with each drained request.
        self._entries: dict[str, R] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> R | None:
        return self._entries.get(request_id)

    def add(self, request_id: str, entry: R) -> None:
        assert request_id not in self._entries, "an id is taken once"
        self._entries[request_id] = entry
        self._idle.clear()
        task = asyncio.get_running_loop().create_task(self._remove_when_drained(request_id, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove_when_drained(self, request_id: str, entry: R) -> None:
        await entry.drained()
        del self._entries[request_id]
        if not self._entries:
            self._idle.set()
        self.on_drained(entry)

    @property
    def num_sequences(self) -> int:
        """Sequences of all requests that have not ended."""
        return sum(entry.num_sequences for entry in self)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of all requests that this pod has yet to compute."""
        return sum(entry.queued_tokens for entry in self)

    def fail_all(self, error: BatonError) -> None:
        """Ends every request with `error`."""
        for entry in self:
            entry.fail(error)

    async def wait_idle(self) -> None:
        """Returns once the registry is empty."""
        await self._idle.wait()


async def retry_while(ask: Callable[[], T], temporary: Callable[[T], bool], limit_s: float | None = None) -> T:
    """Calls `ask` again while `temporary` is true for its answer, for at most limit_s (None: RETRY_LIMIT_S) seconds."""
    until = time.monotonic() + (RETRY_LIMIT_S if limit_s is None else limit_s)
    pause_s = FIRST_POLL_S
    while True:
        answer = ask()
        if not temporary(answer) or time.monotonic() >= until:
            return answer
        await asyncio.sleep(pause_s)
        pause_s = min(POLL_S, 2 * pause_s)
