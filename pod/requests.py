"""The requests that a pod knows, by id, until nothing is held for them any more; and the moment when there are none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RequestRegistry(Generic[T]):
    """Changed on the event loop only; `get` may be called on any thread (an entry never changes identity)."""

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
        """False when the entry is not here any more."""
        if self._entries.get(request_id) is not entry:
            return False
        del self._entries[request_id]
        if not self._entries:
            self._idle.set()
        return True

    async def wait_idle(self) -> None:
        """Returns once there are none."""
        await self._idle.wait()


RETRY_LIMIT_S, POLL_S = 0.5, 0.002


async def retry_until(ask: Callable[[], T], passing: Callable[[T], bool]) -> T:
    """What ask answers; as long as the answer is one that will pass, asks again, for PATIENCE_S at most."""
    until = time.monotonic() + RETRY_LIMIT_S
    while True:
        answer = ask()
        if not passing(answer) or time.monotonic() >= until:
            return answer
        await asyncio.sleep(POLL_S)
