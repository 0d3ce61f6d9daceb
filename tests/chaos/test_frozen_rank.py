"""A rank of a tensor-parallel pod freezes: its pod ends, answers continue, and other pods hold no blocks for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import orjson
import psutil
import pytest

from common.process.watchdog import EXIT_STUCK
from tests.rigs.chaos.catalogue import BLOCK, CHUNK, MAX_LEN, MODEL, VOCAB, write_model
from tests.rigs.stack.cluster import Cluster
from tests.rigs.waiting import until

STUCK_S = 1.0  # The pod ends after twice this time
FREED_S = 5.0  # A dead writer's blocks stay in quarantine for 2 s
PROMPT = [2 + (37 * i) % (VOCAB - 2) for i in range(3 * CHUNK + 5)]
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 250, "temperature": 0.0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model_dir = tmp_path_factory.mktemp("model")
    write_model(model_dir)
    with Cluster(
        model_dir,
        tmp_path_factory.mktemp("logs"),
        prefill=1,
        decode=2,
        pod_flags={"local-prefill": "off"},
        served_name=MODEL,
        tensor_parallel_size=2,
        device="cpu",
        dtype="float32",
        load_format="dummy",
        block_size=BLOCK,
        chunk_tokens=CHUNK,
        max_model_len=MAX_LEN,
        kv_memory=2 << 20,
        stuck_step_s=STUCK_S,
    ) as cluster:
        yield cluster


async def texts(stack: Cluster) -> AsyncIterator[str]:
    """Streams the answer to BODY."""
    timeout = httpx.Timeout(None, connect=5.0)
    async with (
        httpx.AsyncClient(base_url=stack.base_url, timeout=timeout) as client,
        client.stream("POST", "/completions", json=BODY) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = orjson.loads(line[6:])
                assert "error" not in event, event
                yield event["choices"][0]["text"]


async def answer(stack: Cluster) -> str:
    return "".join([text async for text in texts(stack)])


def rank_of(stack: Cluster, pod: str) -> psutil.Process:
    """Returns the process of the pod's other rank."""
    children = psutil.Process(stack.pid(pod)).children(recursive=True)
    (rank,) = (child for child in children if "pod.rank" in child.cmdline())
    return rank


async def leases(stack: Cluster, pod: str) -> bool:
    """Whether the pod holds blocks for a request."""
    return bool((await asyncio.to_thread(stack.info, pod)).blocks.leased)


async def require_ended(stack: Cluster, pod: str, rank: psutil.Process) -> None:
    """Waits for the end of the pod and of its frozen rank."""
    await until(lambda: not stack.alive(pod))
    assert stack.exit_code(pod) == EXIT_STUCK
    await until(lambda: not rank.is_running())


@pytest.mark.timeout(300)
async def test_a_frozen_rank_ends_its_pod_and_holds_nothing_elsewhere(stack: Cluster) -> None:
    expected = await answer(stack)
    decodes = ["decode-0", "decode-1"]

    # A decode pod: the answer continues on the other one.
    parts: list[str] = []
    frozen: psutil.Process | None = None
    async for text in texts(stack):
        parts.append(text)
        if len(parts) == 10:
            (victim,) = [pod for pod in decodes if await leases(stack, pod)]
            frozen = rank_of(stack, victim)
            os.kill(frozen.pid, signal.SIGSTOP)
    assert frozen is not None
    assert "".join(parts) == expected
    await require_ended(stack, victim, frozen)
    await asyncio.to_thread(stack.check_idle, FREED_S)

    # The prefill pod: the decode pod frees the blocks that it wrote to, and the request waits for another prefill pod.
    (left,) = (pod for pod in decodes if pod != victim)
    frozen = rank_of(stack, "prefill-0")
    os.kill(frozen.pid, signal.SIGSTOP)
    task = asyncio.create_task(answer(stack))
    await until(lambda: leases(stack, left))
    await require_ended(stack, "prefill-0", frozen)
    await asyncio.to_thread(stack.check_idle, FREED_S)
    assert not task.done()
    await asyncio.to_thread(stack.restart, "prefill-0")
    assert await task == expected
    await asyncio.to_thread(stack.check_idle, FREED_S)
