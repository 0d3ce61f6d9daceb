"""Requests that a pod knows, and retries of an answer that is expected to change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RequestRegistry(Generic[T]):
    """Requests by id, until the pod holds nothing for them any more.

    Changed on the event loop only. `get` may run on any thread, because an entry never changes identity.
    """

    def __init__(self) -> None:
        self._entries: dict[str, T] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def get(self, request_id: str) -> T | None:
        return self._entries.get(request_id)

    def values(self) -> list[T]:
        return list(self._entries.values())

    def add(self, request_id: str, entry: T) -> None:
        assert request_id not in self._entries, "an id is taken once"
        self._entries[request_id] = entry
        self._idle.clear()

    def remove(self, request_id: str, entry: T) -> bool:
        """Returns False if the entry was removed before."""
        if self._entries.get(request_id) is not entry:
            return False
        del self._entries[request_id]
        if not self._entries:
            self._idle.set()
        return True

    async def wait_idle(self) -> None:
        """Returns once the registry is empty."""
        await self._idle.wait()


RETRY_LIMIT_S, POLL_S = 0.5, 0.002


async def retry_until(ask: Callable[[], T], temporary: Callable[[T], bool]) -> T:
    """Calls `ask` until `temporary` is false for its answer, for at most RETRY_LIMIT_S. Returns the last answer."""
    until = time.monotonic() + RETRY_LIMIT_S
    while True:
        answer = ask()
        if not temporary(answer) or time.monotonic() >= until:
            return answer
        await asyncio.sleep(POLL_S)
