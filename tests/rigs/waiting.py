"""A clock that tests can advance, a wait for a condition, and a count of loop turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


class Clock:
    """time.monotonic() plus `ahead_s`, which a test sets."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Waits until the condition holds; the time limit only ends hanging tests."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"the condition did not hold within {timeout_s:g} s") from None


async def turns_while(work: Awaitable[Any]) -> tuple[Any, int]:
    """Returns the result or the error, and the number of loop turns that another task had meanwhile."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    try:
        return (await asyncio.gather(work, return_exceptions=True))[0], turns
    finally:
        counter.cancel()
