"""Routing on a live stack: two prefill and two decode pods with SmolLM2 on this machine, a trace scaled down.

A block of 512 tokens becomes one of 16, filled by a generator that its hash seeds, so that prompts share exactly what
the trace's share. Conversations with several turns and short prompts are replayed, of the recorded trace or of the
made one of simulator/workload.py. Each policy gets a stack of its own and the same arrivals. The first third warms the
caches and is not counted.

- predicted_over_actual: hit tokens that routing expected over those that pods found, under `cost`.
- ttft_p50_ratio_vs_rr, ttft_mean_ratio_vs_rr, computed_ratio_vs_rr: `cost` over `round_robin`; computed are prompt
  tokens that no cache supplied.
- routing_ms_p50: what a request waits for routing under `cost`: the median of planning (hashes, look-up) and that of
  placing (ranking, and reserving where the gateway is not alone), added. During the replay pods, gateway and Valkey
  share two cores, so it has waits for a core in it; routing_ms_p50_single is of requests that come one at a time.

    python benchmarks/routing_live.py --out benchmarks/results/routing_live.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.routing_sim import DEFAULT_TRACE
from common.config import UpConfig
from common.models import resolve_model
from common.percentile import percentile
from common.stack import Stack
from common.supervisor import Supervisor
from common.trace import Trace, TraceRequest, load_trace
from simulator.workload import Agents

SCALE = 32
BLOCK = 512 // SCALE
LONGEST = 512  # tokens of a prompt, scaled
TURNS = 3  # of a conversation, at least
VOCAB = (100, 40_000)
SINGLE = 60  # requests that come one at a time, after the replay
POLICIES = ("cost", "round_robin")


@dataclass(frozen=True)
class Request:
    """at: seconds from the start."""

    at: float
    prompt: list[int]


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def scaled(trace: Trace, count: int, rate: float) -> list[Request]:
    """`count` requests of the trace's conversations, with prompts SCALE times shorter, at `rate` a second."""
    # A conversation is told by its second block: the first heads every prompt of the recorded trace.
    talks: dict[tuple[bytes, ...], list[TraceRequest]] = {}
    for r in trace.requests:
        if len(r.chain) > 1 and r.prompt_len <= LONGEST * SCALE:
            talks.setdefault(r.chain[:2], []).append(r)
    whole = [talk for talk in talks.values() if len(talk) >= TURNS]
    # Conversations that begin one after another, as many as it takes, each to its end.
    kept = sorted(list(chain.from_iterable(whole))[:count], key=lambda r: r.arrival_s)
    assert len(kept) == count, f"the trace has only {len(kept)} requests that fit"
    gap = 1 / rate
    rng = random.Random(0)
    at, requests = 0.0, []
    for r in kept:
        prompt: list[int] = []
        for h in r.chain:
            block = random.Random(h)
            prompt += [block.randrange(*VOCAB) for _ in range(BLOCK)]
        rest = max(1, r.prompt_len // SCALE - len(prompt))
        prompt += [rng.randrange(*VOCAB) for _ in range(rest)]
        requests.append(Request(at, prompt))
        at += rng.expovariate(1 / gap)
    return requests


async def ask(client: httpx.AsyncClient, model: str, request: Request, output: int) -> Answer:
    """One streamed completion."""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    begin, first, usage = time.perf_counter(), 0.0, {}
    async with client.stream("POST", "completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begin
                usage = orjson.loads(line[6:]).get("usage") or usage
    return Answer(first, usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


@dataclass(frozen=True)
class Counters:
    """The gateway's, so far: hit tokens, predicted and actual, and how long steps of routing took.

    took: step -> upper bounds in seconds -> steps up to there.
    """

    hits: dict[str, float]
    took: dict[str, dict[float, float]]

    @classmethod
    async def read(cls, client: httpx.AsyncClient, base_url: str) -> Counters:
        text = (await client.get(base_url.removesuffix("/v1") + "/metrics")).text
        hits = re.findall(r"^baton_prefix_hit_tokens_(predicted|actual)_total\S* (\S+)$", text, re.MULTILINE)
        took: dict[str, dict[float, float]] = {}
        for labels, count in re.findall(r"^baton_routing_seconds_bucket{(\S+)} (\S+)$", text, re.MULTILINE):
            named = dict(re.findall(r'(\w+)="([^"]+)"', labels))
            took.setdefault(named["step"], {})[float(named["le"])] = float(count)
        return cls({name: float(value) for name, value in hits}, took)

    def median_s(self, step: str, before: Counters) -> float:
        """Of the steps since `before`, interpolated within a bucket."""
        earlier = before.took.get(step, {})
        counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(self.took[step].items())]
        half, low, below = counts[-1][1] / 2, 0.0, 0.0
        for bound, count in counts:
            if count >= half:
                return low + (bound - low) * (half - below) / max(1.0, count - below)
            low, below = bound, count
        raise AssertionError("the last bucket has everything")


async def measure(policy: str, requests: list[Request], model_dir: Path, args: argparse.Namespace) -> dict[str, float]:
    """One policy on a stack of its own."""
    with tempfile.TemporaryDirectory() as logs:
        config = UpConfig(
            model=str(model_dir), port=0, prefill=2, decode=2, threads=1, max_model_len=1024, chunk_tokens=128,
            block_size=BLOCK, routing_policy=policy, log_level="warning",
        )  # fmt: skip
        stack = Stack.plan(config, model_dir, Path(logs))
        supervisor = Supervisor(stack.specs, on_event=print)
        try:
            await supervisor.start(180)
            limits = httpx.Limits(max_connections=64)
            async with httpx.AsyncClient(base_url=stack.base_url, timeout=300, limits=limits) as client:
                return await replay(client, stack, policy, requests, args.output)
        finally:
            await supervisor.stop(10)
            stack.close()


async def replay(
    client: httpx.AsyncClient, stack: Stack, policy: str, requests: list[Request], output: int
) -> dict[str, float]:
    """Open loop: requests come at their times, whatever became of those before."""
    warm = len(requests) // 3
    begin = time.perf_counter()

    async def one(request: Request) -> Answer:
        await asyncio.sleep(max(0.0, begin + request.at - time.perf_counter()))
        return await ask(client, stack.model, request, output)

    first = [asyncio.create_task(one(request)) for request in requests[:warm]]
    rest = [asyncio.create_task(one(request)) for request in requests[warm:]]
    await asyncio.gather(*first)
    before = await Counters.read(client, stack.base_url)
    answers = await asyncio.gather(*rest)
    after = await Counters.read(client, stack.base_url)
    times = [a.ttft_s for a in answers]
    computed = sum(a.prompt_tokens - a.cached_tokens for a in answers)
    hits = {name: after.hits[name] - before.hits[name] for name in after.hits}
    row = {
        "ttft_p50_s": round(statistics.median(times), 3),
        "ttft_p90_s": round(percentile(times, 0.9), 3),
        "ttft_mean_s": round(statistics.fmean(times), 3),
        "computed_tokens": computed,
        "hit_rate": round(1 - computed / sum(a.prompt_tokens for a in answers), 4),
        "predicted_hit_tokens": hits["predicted"],
        "actual_hit_tokens": hits["actual"],
        "plan_ms_p50": round(after.median_s("plan", before) * 1e3, 3),
        "place_ms_p50": round(after.median_s("place", before) * 1e3, 3),
    }
    if policy == "cost":
        row |= await one_at_a_time(client, stack, requests[:SINGLE], output)
    print(policy, row, flush=True)
    return row


async def one_at_a_time(
    client: httpx.AsyncClient, stack: Stack, requests: list[Request], output: int
) -> dict[str, float]:
    """The steps of routing while nothing else is to be done."""
    before = await Counters.read(client, stack.base_url)
    for request in requests:
        await ask(client, stack.model, request, output)
    after = await Counters.read(client, stack.base_url)
    return {f"{step}_ms_p50_single": round(after.median_s(step, before) * 1e3, 3) for step in ("plan", "place")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's .jsonl (default: %(default)s)")
    parser.add_argument("--made", action="store_true", help="the made trace instead of a recorded one")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument(
        "--rate", type=float, default=0.7, help="requests a second (default: %(default)s, for two cores)"
    )
    parser.add_argument("--output", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made = args.made or not args.trace.is_file()
    trace = Agents(rate=4.0, seconds=600.0, tenants=8, pause_s=10.0).trace() if made else load_trace(args.trace)
    requests = scaled(trace, args.requests, args.rate)
    model_dir = resolve_model("smollm2", say=print)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = {policy: asyncio.run(measure(policy, requests, model_dir, args)) for policy in POLICIES}
    cost, rr = rows["cost"], rows["round_robin"]
    metrics = {
        "predicted_over_actual": round(cost["predicted_hit_tokens"] / max(1.0, cost["actual_hit_tokens"]), 4),
        "ttft_p50_ratio_vs_rr": round(cost["ttft_p50_s"] / rr["ttft_p50_s"], 4),
        "ttft_mean_ratio_vs_rr": round(cost["ttft_mean_s"] / rr["ttft_mean_s"], 4),
        "computed_ratio_vs_rr": round(cost["computed_tokens"] / rr["computed_tokens"], 4),
        "hit_rate_cost": cost["hit_rate"],
        "hit_rate_rr": rr["hit_rate"],
        "routing_ms_p50": round(cost["plan_ms_p50"] + cost["place_ms_p50"], 3),
        "routing_ms_p50_single": round(cost["plan_ms_p50_single"] + cost["place_ms_p50_single"], 3),
    }
    for name, value in metrics.items():
        print(f"{name:28} {value}")
    report.write(
        args.out, "routing_live", metrics, "torch", "grpcio", "nixl-cu13", "redis", trace=trace.name, rows=rows
    )


if __name__ == "__main__":
    main()
