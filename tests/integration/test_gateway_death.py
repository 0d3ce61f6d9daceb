"""kill -9 of a gateway while it streams: a retry at another gateway gets the same tokens, and pods free everything."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import torch

from cli.stack.supervisor import PortLease
from common.types import SamplingParams
from engine.llm import LLM
from gateway.serving.answer_keys import digest
from gateway.serving.request import AnswerIdentity
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.harness import Cluster, prompt_of
from tests.rigs.waiting import until

torch.set_num_threads(1)

MAX_TOKENS = 60
READ = 8  #: Tokens that the first client gets before its gateway dies.
HEADERS = {"idempotency-key": "k"}
BODY = {
    "model": "tiny",
    "prompt": prompt_of(21),
    "max_tokens": MAX_TOKENS,
    "temperature": 1.0,
    "ignore_eos": True,
    "stream": True,
}


@asynccontextmanager
async def gateway_process(model_dir: Path, pods: Cluster) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs a gateway with these pods as a process of its own. Yields it and its URL."""
    with PortLease() as lease:
        addresses = ",".join(pod.runtime.address for pod in pods.pods)
        arguments = ("--model", str(model_dir), "--served-name", "tiny", "--pods", addresses, "--port", str(lease.port))
        command = (sys.executable, "-m", "cli", "gateway", *arguments)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{lease.port}"
            async with httpx.AsyncClient() as http:

                async def ready() -> bool:
                    assert process.returncode is None, "the gateway has ended"
                    try:
                        return (await http.get(f"{url}/ready")).status_code == 200
                    except httpx.TransportError:
                        return False

                await until(ready, timeout_s=120.0)
            yield process, url
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def stack(model_dir: Path, smollm2_dir: Path) -> AsyncIterator[tuple[Cluster, Rig]]:
    """Runs tiny pods, and a gateway in this process."""
    config = {"num_blocks": 128}
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as pods:
        addresses = tuple(pod.runtime.address for pod in pods.pods)
        fakes: Any = SimpleNamespace(addresses=addresses, decodes=pods.decodes, all_idle=lambda: True)
        async with rig(fakes, smollm2_dir, models=(f"tiny={smollm2_dir}",)) as gw:
            yield pods, gw


async def read(url: str, texts: list[str]) -> None:
    """Sends BODY with the key, and appends the texts of the stream to `texts` as they come."""
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{url}/v1/completions", json=BODY, headers=HEADERS) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                texts.append(orjson.loads(line.removeprefix("data: "))["choices"][0]["text"])


def expected(llm: LLM, gw: Rig) -> str:
    """Returns the text that the key's seed gives on one engine."""
    seed = AnswerIdentity(digest("", HEADERS["idempotency-key"]), "", 0).seed(0)
    sampling = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed)
    [answer] = llm.generate([tuple(BODY["prompt"])], sampling, ignore_eos=True)  # type: ignore[arg-type]
    return gw.gateway.tokenizer.decode(answer.ids)


async def test_a_retry_after_the_gateways_death_has_every_token(model_dir: Path, smollm2_dir: Path, llm: LLM) -> None:
    async with stack(model_dir, smollm2_dir) as (pods, gw), gateway_process(smollm2_dir, pods) as (process, url):
        cut: list[str] = []
        first = asyncio.create_task(read(url, cut))
        await until(lambda: len(cut) >= READ or first.done())
        killed = threading.Event()
        pods.decode.runtime.engine_loop.call(lambda: killed.wait(60))  # the answer cannot end before the kill
        try:
            process.kill()
            [failure] = await asyncio.gather(first, return_exceptions=True)
        finally:
            killed.set()
        assert isinstance(failure, httpx.TransportError)
        whole: list[str] = []
        await read(gw.url, whole)
        assert "".join(whole) == expected(llm, gw)
        assert "".join(whole).startswith("".join(cut))
        assert len("".join(cut)) < len("".join(whole))
        for pod in pods.pods:
            await pod.settled()


async def test_a_dead_gateways_requests_leave_nothing_on_the_pods(model_dir: Path, smollm2_dir: Path) -> None:
    async with stack(model_dir, smollm2_dir) as (pods, _), gateway_process(smollm2_dir, pods) as (process, url):
        texts: list[str] = []
        streams = [asyncio.create_task(read(url, texts)) for _ in range(3)]  # one answer with three readers
        streams += [asyncio.create_task(_post(url, seed)) for seed in range(8)]
        await until(lambda: len(pods.decode.service.requests) >= 2)
        process.kill()
        await asyncio.gather(*streams, return_exceptions=True)
        for pod in pods.pods:
            await pod.settled()


async def _post(url: str, seed: int) -> None:
    body = {**BODY, "prompt": prompt_of(30 + seed, seed=seed), "stream": False}
    async with httpx.AsyncClient(timeout=60) as http:
        await http.post(f"{url}/v1/completions", json=body)


async def test_two_live_gateways_compute_the_same_answer_at_once(model_dir: Path, smollm2_dir: Path, llm: LLM) -> None:
    async with (
        stack(model_dir, smollm2_dir) as (pods, gw),
        rig(
            SimpleNamespace(addresses=tuple(p.runtime.address for p in pods.pods), decodes=pods.decodes),  # type: ignore[arg-type]
            smollm2_dir,
            models=(f"tiny={smollm2_dir}",),
        ) as other,
    ):
        texts: tuple[list[str], list[str]] = ([], [])
        await asyncio.gather(*(read(each.url, into) for each, into in zip((gw, other), texts, strict=True)))
        assert "".join(texts[0]) == "".join(texts[1]) == expected(llm, gw)
