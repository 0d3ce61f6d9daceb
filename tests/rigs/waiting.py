"""A clock for what waits for a time: a test decides when that has come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Clock:
    """time.monotonic(), and so much more as a test puts it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Waits until the condition holds; the limit only catches what hangs."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("it did not happen in time") from None
