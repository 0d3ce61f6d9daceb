"""LuaScript.run, cancelled while redis-py waits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest

from common.redis.client import REDIS_FAILURES, LuaScript, RedisClient
from prefix_index.store import LUA_DIR

SCRIPT = LuaScript("unbook", directory=LUA_DIR)


class Forgetful:
    """Loses a cancel, like asyncio.wait_for before Python 3.12."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome
        self.waits = asyncio.Event()

    async def evalsha(self, *_: object) -> object:
        self.waits.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            if isinstance(self.outcome, Exception):
                raise self.outcome from None
        return self.outcome


def run(client: object) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(SCRIPT.run(cast(RedisClient, client), (), ()))


@pytest.mark.parametrize("outcome", [b"an answer", REDIS_FAILURES[0]("the connection broke")])
async def test_a_cancel_that_redis_py_loses_ends_the_task(outcome: object) -> None:
    client = Forgetful(outcome)
    task = run(client)
    await client.waits.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_timeout_of_the_caller_still_raises_timeout_error() -> None:
    async def limited() -> None:
        async with asyncio.timeout(0.01):
            await SCRIPT.run(cast(RedisClient, Forgetful(b"an answer")), (), ())

    with pytest.raises(TimeoutError):
        await limited()


async def test_a_task_that_was_cancelled_earlier_can_still_run_scripts() -> None:
    class Prompt:
        async def evalsha(self, *_: object) -> bytes:
            await asyncio.sleep(0)
            return b"an answer"

    async def work() -> object:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return await SCRIPT.run(cast(RedisClient, Prompt()), (), ())

    task = asyncio.get_running_loop().create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == b"an answer"
