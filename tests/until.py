"""Waiting for a state instead of for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


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
