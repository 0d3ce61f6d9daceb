"""Replays a recorded trace on the block pool, with and without a crawl, for each eviction policy and pool size.

    python benchmarks/cache_policy.py --out benchmarks/results/cache_policy.json

The crawl is a burst of long prompts that never come again, with twice as many blocks as the pool, so it empties an LRU
pool. A pool that is small beside the working set has lost most blocks anyway before they are used again, and a crawl
costs it little. So the pools are shares of the trace's distinct blocks. Hit rates are those of the recorded requests
alone: of all of them, and of those behind the crawl, a tenth of the trace, where it matters. Without the trace
(`--trace`) the script says so and ends.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from common.block_hash import matchable_blocks
from engine.kv.blocks import BlockPool
from engine.kv.eviction import Priority, Retention
from loadtest.workload.trace import WorkloadRequest, WorkloadTrace, load_trace

METRICS = """
Metrics, in percentage points of hit rate that the crawl costs, with the worst of the pool sizes:

- hit_drop_points: the worst of high (the keys of the users have the priority high) and s3fifo (frequency-aware, without
  any setting), over the whole trace. Limit: 1.
- lru_drop_points: the same for plain LRU.
- high_drop_points_after, s3fifo_drop_points_after, lru_drop_points_after: the same over the tenth behind the crawl.
- pinned_prefix_hit_rate: share of the requests behind the crawl that find the pinned first block of their prompt.

Rows: hit rate of each variant and pool size, with and without the crawl.
"""
TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
POOL_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # Blocks of the pool over the distinct blocks of the trace
AFTER = 0.1  # Part of the trace behind the crawl of which hits are counted, too
CRAWL_BLOCKS = 16  # Blocks of a crawled prompt
CRAWL_POOLS = 2.0  # Blocks of the crawl over those of the pool
CRAWL_AT = 0.5  # Where in the trace it begins
CRAWL_SPAN = 0.02  # Part of the trace beside which it runs


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, and what users and crawler ask for."""

    policy: str = "lru"
    users: Retention | None = None
    pinned_blocks: int = 0  # First blocks of the users' prompts that are pinned, like a system prompt


VARIANTS = {
    "lru": Variant(),
    "high": Variant(users=Retention(Priority.HIGH)),
    "pinned": Variant(pinned_blocks=1),
    "gdsf": Variant("gdsf"),
    "s3fifo": Variant("s3fifo"),
}
PIN_SHARE = 0.1  # Part of the pool that may be pinned


def crawl(blocks: int, seed: int = 7) -> Iterator[list[bytes]]:
    """Yields the block hashes of prompts that no other client sends."""
    rng = random.Random(seed)
    for _ in range(blocks // CRAWL_BLOCKS):
        yield [rng.randbytes(16) for _ in range(CRAWL_BLOCKS)]


def replay(trace: WorkloadTrace, variant: Variant, num_blocks: int, *, crawled: bool) -> dict[str, float]:
    """Returns the hit rate of the trace's prompt tokens, and the share of requests that hit their first block."""
    pool = BlockPool(num_blocks, trace.block_size, policy=variant.policy, max_pinned=int(PIN_SHARE * num_blocks))
    first = int(CRAWL_AT * len(trace.requests))
    span = max(1, int(CRAWL_SPAN * len(trace.requests)))
    strangers = list(crawl(int(CRAWL_POOLS * num_blocks))) if crawled else []
    hits = first_hits = after = late_hits = late_tokens = 0
    for number, request in enumerate(trace.requests):
        if 0 <= number - first < span:
            share = range((number - first) * len(strangers) // span, (number - first + 1) * len(strangers) // span)
            for stranger in share:
                _serve(pool, strangers[stranger], CRAWL_BLOCKS * trace.block_size, None)
        matched = _request(pool, request, variant)
        hits += matched * trace.block_size
        if first + span <= number < first + span + AFTER * len(trace.requests):
            late_hits += matched * trace.block_size
            late_tokens += request.prompt_len
        if number >= first + span:
            after += 1
            first_hits += matched > 0
    pool.check_integrity()
    return {
        "hit_rate": hits / trace.prompt_tokens,
        "hit_rate_after": late_hits / late_tokens,
        "first_block": first_hits / after,
    }


def _request(pool: BlockPool, request: WorkloadRequest, variant: Variant) -> int:
    if variant.pinned_blocks:
        head = request.block_hashes[: variant.pinned_blocks]
        _serve(pool, head, len(head) * pool.block_size + 1, Retention(Priority.PINNED))
    return _serve(pool, request.block_hashes, request.prompt_len, variant.users)


def _serve(pool: BlockPool, hashes: Sequence[bytes], tokens: int, retention: Retention | None) -> int:
    """Computes one prompt; returns its matched blocks. A prompt that is larger than the pool is left out."""
    matchable = hashes[: matchable_blocks(tokens, pool.block_size)]
    lease = pool.lease(matchable, len(hashes) + 1, retention=retention)
    if lease is None:
        return 0
    matched = lease.cached_blocks
    lease.publish(hashes)
    lease.finish("done")
    return matched


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's trace; default: %(default)s")
    parser.add_argument("--requests", type=int, default=0, help="first requests of the trace; 0, the default: all")
    shares = "blocks over the distinct blocks of the trace"
    parser.add_argument("--pools", type=float, nargs="+", default=list(POOL_SHARES), help=shares)
    args = parser.parse_args(argv)
    if not args.trace.is_file():
        print(f"skipped: there is no file {args.trace}; --trace names one")
        return
    trace = load_trace(args.trace)
    trace = trace.first(args.requests) if args.requests else trace
    distinct = len({block for request in trace.requests for block in request.block_hashes})
    rows: list[dict[str, Any]] = []
    print(f"{'pool':>6}  {'variant':8}{'quiet':>8}{'crawl':>8}{'points':>8}   behind the crawl: points")
    for share in args.pools:
        num_blocks = int(share * distinct)
        for name, variant in VARIANTS.items():
            quiet, busy = (replay(trace, variant, num_blocks, crawled=crawled) for crawled in (False, True))
            drop, late = (100 * (quiet[key] - busy[key]) for key in ("hit_rate", "hit_rate_after"))
            rows.append(
                {
                    "pool_share": round(share, 4),
                    "pool_blocks": num_blocks,
                    "variant": name,
                    "hit_rate": round(quiet["hit_rate"], 4),
                    "hit_rate_with_crawl": round(busy["hit_rate"], 4),
                    "drop_points": round(drop, 3),
                    "hit_rate_after": round(quiet["hit_rate_after"], 4),
                    "hit_rate_after_crawl": round(busy["hit_rate_after"], 4),
                    "drop_points_after": round(late, 3),
                    "first_block_with_crawl": round(busy["first_block"], 4),
                }
            )
            rates = f"{quiet['hit_rate']:>8.2%}{busy['hit_rate']:>8.2%}{drop:>8.2f}"
            print(f"{num_blocks:>6}  {name:8}{rates}   {late:>8.2f}", flush=True)

    def worst(key: str, *names: str) -> float:
        return max(float(row[key]) for row in rows if row["variant"] in names)

    metrics = {
        "hit_drop_points": worst("drop_points", "high", "s3fifo"),
        "lru_drop_points": worst("drop_points", "lru"),
        **{f"{name}_drop_points_after": worst("drop_points_after", name) for name in ("high", "s3fifo", "lru")},
        "pinned_prefix_hit_rate": min(row["first_block_with_crawl"] for row in rows if row["variant"] == "pinned"),
    }
    report.show(metrics)
    crawl_facts = {"prompt_blocks": CRAWL_BLOCKS, "blocks_over_pool": CRAWL_POOLS, "at": CRAWL_AT, "span": CRAWL_SPAN}
    report.write(args.out, "cache_policy", metrics, rows=rows, trace=trace.name, crawl=crawl_facts)


if __name__ == "__main__":
    main()
