"""Requests with an Idempotency-Key over fake pods: one or two gateways, streams that are read in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from cli.stack.valkey import EmbeddedValkey
from common.types import ValidRequest
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}


def seeded(request: ValidRequest) -> list[int]:
    """Returns an answer of letters that depends on the seed and the prompt. It is the script of the fake pods."""
    sampling = request.sampling
    return [66 + (sum(request.prompt_ids) + sampling.seed + 5 * i) % 26 for i in range(sampling.max_tokens)]


def key(name: str, **more: str) -> dict[str, str]:
    return {"idempotency-key": name, **more}


def outcomes(gw: Rig) -> dict[str, float]:
    """Returns the number of requests with keys, by outcome."""
    samples = next(iter(gw.gateway.metrics.keyed_requests.collect())).samples
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total") and s.value}


def computed(cluster: FakeCluster) -> int:
    """Returns the number of prompts that prefill pods have got."""
    return sum(len(pod.seen.prefilled) for pod in cluster.prefills)


class Stream:
    """A stream that is read in the background. `raw` grows as bytes come."""

    def __init__(self, gw: Rig, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.raw = b""
        self.status = 0
        self.headers: httpx.Headers | None = None
        self._task = asyncio.create_task(self._read(gw, path, {**body, "stream": True}, headers))

    async def _read(self, gw: Rig, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        async with gw.http.stream("POST", path, json=body, headers=headers) as response:
            self.status, self.headers = response.status_code, response.headers
            async for piece in response.aiter_raw():
                self.raw += piece

    async def begun(self) -> Stream:
        """Waits for the first bytes."""
        await until(lambda: bool(self.raw) or self._task.done())
        return self

    async def whole(self) -> bytes:
        """Waits for the end. Returns all bytes."""
        await self._task
        return self.raw

    async def disconnect(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def two_gateways(
    cluster: FakeCluster, model_dir: Path, directory: Path, **settings: Any
) -> AsyncIterator[tuple[Rig, Rig, EmbeddedValkey]]:
    """Runs two gateways over the same pods. They share the claims of keys in Valkey."""
    valkey = EmbeddedValkey(0, directory)
    shared = {"redis": await valkey.start(), "index_timeout_s": 20.0, **settings}
    try:
        async with rig(cluster, model_dir, **shared) as one, rig(cluster, model_dir, **shared) as two:
            yield one, two, valkey
            for gw in (one, two):
                await gw.settled()
    finally:
        await valkey.stop()


def counted(gw: Rig, endpoint: str) -> dict[str, float]:
    """Returns the number of requests of an endpoint, by outcome. Retries that read a known answer do not count."""
    samples = next(iter(gw.gateway.metrics.requests.collect())).samples
    ended = [s for s in samples if s.name.endswith("_total") and s.value and s.labels["endpoint"] == endpoint]
    return {s.labels["outcome"]: s.value for s in ended}
