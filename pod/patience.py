"""Waiting for a moment that passes by itself: blocks of the pool that only want a copy in the host before they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S, POLL_S = 0.5, 0.002


async def patiently(ask: Callable[[], T], passing: Callable[[T], bool]) -> T:
    """What ask answers; as long as the answer is one that will pass, asks again, for PATIENCE_S at most."""
    until = time.monotonic() + PATIENCE_S
    while True:
        answer = ask()
        if not passing(answer) or time.monotonic() >= until:
            return answer
        await asyncio.sleep(POLL_S)
