"""A random storm of aborted requests on a cluster of one prefill and one decode pod."""

from __future__ import annotations

import asyncio
import contextlib
import random

from common.errors import BatonError, Overloaded
from engine.llm import LLM
from tests.rigs.pods.harness import Answer, Cluster, expected, prompt_of, request


async def cancelled(running: asyncio.Task[Answer]) -> None:
    """Cancels a request, as if its client had disconnected. It may have failed before."""
    running.cancel()
    with contextlib.suppress(BatonError, asyncio.CancelledError):
        await running


async def abort_storm(cluster: Cluster, llm: LLM, rng: random.Random, *, rounds: int) -> None:
    """In each round six requests are aborted at random times. Three others get the same tokens as without the storm."""
    done = 0

    async def victim(i: int) -> None:
        r = request(prompt_of(20 + 5 * (i % 7), seed=i), 20)
        running = asyncio.create_task(cluster.generate(r, remote_only=True))
        await asyncio.wait([running], timeout=rng.random() * 0.15)
        await cluster.abort(r.request_id)
        await cancelled(running)
        await cluster.abort(r.request_id)  # a Reserve may have arrived after the first abort

    async def neighbour(i: int) -> None:
        nonlocal done
        r = request(prompt_of(15 + 4 * (i % 9), seed=100 + i), 10)
        while True:
            try:
                answer = await cluster.generate(r, remote_only=True)
            except Overloaded:
                await asyncio.sleep(0.02)
                continue
            assert answer.ids == expected(llm, r)
            done += 1
            return

    for round_ in range(rounds):
        await asyncio.gather(
            *(victim(6 * round_ + i) for i in range(6)), *(neighbour(3 * round_ + i) for i in range(3))
        )
    assert done == 3 * rounds
