"""kill -9 of any process under load: every request ends, and once that process is back everything works again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster import Cluster

CLIENTS = 4
END_S = 60.0  # the deadline of each request, generous: what must not happen is that one never ends


@pytest.fixture(scope="module")
def cluster(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(smollm2_dir, tmp_path_factory.mktemp("logs"), kv_memory="64M") as running:
        yield running


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int = 12) -> str | None:
    """The whole answer, or None for a clear error; anything else raises."""
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [choice async for chunk in stream for choice in chunk.choices]
    except openai.APIError:
        return None
    assert chunks[-1].finish_reason == "length"
    return "".join(choice.text for choice in chunks)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "valkey"])
async def test_a_killed_process_fails_no_more_than_its_requests_and_comes_back(cluster: Cluster, victim: str) -> None:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=END_S) as client:
        prompts = [f"{victim} {i}: once upon a time, in a harbour town, " * (1 + i % 4) for i in range(CLIENTS)]
        expected = [await ask(client, cluster.model, prompt) for prompt in prompts]
        assert None not in expected
        started = asyncio.Event()
        over = False

        async def keep_asking(prompt: str, answer: str | None) -> None:
            while not over:
                started.set()
                async with asyncio.timeout(END_S):
                    assert await ask(client, cluster.model, prompt) in (answer, None)
                await asyncio.sleep(0.05)

        load = asyncio.gather(*(keep_asking(p, e) for p, e in zip(prompts, expected, strict=True)))
        await started.wait()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(cluster.kill, victim)
        await asyncio.sleep(2.0)
        await asyncio.to_thread(cluster.restart, victim)
        over = True
        await load

        assert await asyncio.gather(*(ask(client, cluster.model, prompt) for prompt in prompts)) == expected
    await asyncio.to_thread(cluster.check_idle)
