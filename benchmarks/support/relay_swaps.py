"""Requests for one adapter name over a gateway, prefill and decode pods, while its adapter is exchanged under load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.lora.adapter_cluster import NAMES, AdapterFiles, adapter_cluster
from tests.rigs.pods.harness import prompt_of

AHEAD = 24  # Requests that are under way at once
MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SwapCounts:
    """The outcome of one run."""

    requests: int
    swaps: int  # Exchanges of the name
    wrong: int  # Answers that differ from that of the adapter which had the name when the request was sent


async def swap_over_hand_off(files: AdapterFiles, requests: int) -> SwapCounts:
    """Sends requests for one name while two adapters take turns under it on all pods, every 3 to 9 requests.

    Prompts have three lengths, of which one has a cached prefix most of the time.
    """
    async with adapter_cluster(files, pod_wait_s=30.0) as cluster:
        prompts = [prompt_of(length) for length in (7, 19, 42)]
        right = {
            (name, number): await cluster.ask(name, prompt, max_tokens=MAX_TOKENS)
            for name in NAMES
            for number, prompt in enumerate(prompts)
        }
        assert all(right[NAMES[0], number] != right[NAMES[1], number] for number in range(len(prompts)))
        slots, tasks, swaps = asyncio.Semaphore(AHEAD), list[asyncio.Task[bool]](), 0

        async def is_right(name: str, number: int) -> bool:
            try:
                return await cluster.ask("mine", prompts[number], max_tokens=MAX_TOKENS) == right[name, number]
            finally:
                slots.release()

        while len(tasks) < requests:
            name = NAMES[swaps % 2]
            await cluster.admin("load", lora_name="mine", lora_path=name)
            swaps += 1
            for _ in range(min(3 + swaps % 7, requests - len(tasks))):
                await slots.acquire()
                tasks.append(asyncio.ensure_future(is_right(name, len(tasks) % len(prompts))))
                await asyncio.sleep(0)  # the request finds what its name means
        answers = await asyncio.gather(*tasks)
        return SwapCounts(requests, swaps, answers.count(False))
