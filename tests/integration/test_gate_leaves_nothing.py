"""Some seconds of overload with clients that disconnect and deadlines that pass: afterwards nothing is held."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import httpx

from common.types import Role
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.rated_pod import RatedPod
from tests.rigs.waiting import until

CLIENTS, SECONDS = 24, 3.0


async def one(gw: Rig, rng: random.Random) -> str:
    """Sends one request of a random kind. Returns how it ended."""
    prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(20, 200))]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "n": rng.choice((1, 1, 2)), "stream": True}
    headers = {"x-request-timeout": rng.choice(("60", "60", "0.3"))}
    leaves = rng.random() < 0.2
    try:
        async with asyncio.timeout(0.05 if leaves else 30):
            async with gw.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                text = await response.aread()
    except (TimeoutError, httpx.ReadError):
        assert leaves
        return "left"
    if response.status_code != 200:
        return str(response.status_code)
    return "200" if b"[DONE]" in text else "late"


async def test_the_gate_leaves_nothing_behind(smollm2_dir: Path) -> None:
    rng, ends = random.Random(5), Counter[str]()
    async with fake_cluster(prefill=0) as cluster:
        pod = await cluster.add(Role.PREFILL, "prefill-0", RatedPod)
        cluster.decodes[0].faults.token_delay_s = 0.01
        async with rig(cluster, smollm2_dir, max_running=6, max_queue=8, max_ttft_s=1.0) as gw:
            gate, router = gw.gateway.models.first.gate, gw.gateway.models.first.router
            end = time.monotonic() + SECONDS

            async def client() -> None:
                while time.monotonic() < end:
                    ends[await one(gw, rng)] += 1

            await asyncio.gather(*[client() for _ in range(CLIENTS)])
            assert {"200", "429", "left"} <= ends.keys() <= {"200", "429", "504", "left", "late"}, ends
            await gw.settled()
            await until(lambda: not gw.gateway._requests)
            assert (gate._running, gate.waiting, len(gate._waiters)) == (0, 0, 0)
            await until(lambda: not len(router.inflight))
            assert (await gw.complete()).status_code == 200
            assert isinstance(pod, RatedPod)
            await until(lambda: pod._queued == 0)
