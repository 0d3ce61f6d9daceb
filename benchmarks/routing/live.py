"""Compares routing policies on a live stack: two prefill and two decode pods with SmolLM2, and a scaled-down trace.

    python benchmarks/routing/live.py --out benchmarks/results/routing_live.json

A block of 512 tokens becomes a block of 16, so that prompts share the same prefixes as in the trace. The load generator
replays conversations with several turns and short prompts, from a recorded trace or from simulator/agent_workload.py.
Each policy gets its own stack and the same arrivals. The first third warms the caches and does not count.

- predicted_over_actual: hit tokens that routing expected over hit tokens that pods found, for `cost`.
- ttft_p50_ratio_vs_rr, ttft_mean_ratio_vs_rr, computed_ratio_vs_rr: `cost` over `round_robin`. computed: prompt tokens
  that were not cached.
- routing_ms_p50: time of routing for `cost`, the median of planning (hashes, look-up) plus the median of placing
  (ranking, and booking if there are several gateways). Pods, gateway and Valkey share two cores, so it includes waiting
  for a core. routing_ms_p50_single is of requests one at a time.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cli
from benchmarks.routing.sim import DEFAULT_TRACE
from benchmarks.support import local_stack, report
from cli.demo.model import demo_model
from common.settings.up import UpConfig
from gateway.routing import router
from loadtest.client.rest_client import RestClient
from loadtest.config import LoadConfig
from loadtest.run import LoadRun, RequestRecord
from loadtest.runner import LoadRunner
from loadtest.slo import percentile
from loadtest.workload import arrivals
from loadtest.workload.trace import WorkloadRequest, WorkloadTrace, load_trace
from simulator.agent_workload import AgentWorkload
from simulator.policies import RoundRobin

SCALE = 32
BLOCK = 512 // SCALE
LONGEST = 512  # Longest prompt in tokens, scaled.
TURNS = 3  # Fewest turns of a conversation.
VOCAB = (100, 40_000)  # Range of the token ids in prompts.
SINGLE = 60  # Requests one at a time after the replay.
#: The gateway script of each policy, None: `baton gateway`. This file is one that takes the arguments of `baton`.
POLICIES = {"cost": None, "round_robin": Path(__file__)}


def chosen(trace: WorkloadTrace, count: int, rate: float, output: int) -> WorkloadTrace:
    """Selects `count` requests of the trace's conversations, with new arrivals at `rate` and (scaled) output tokens."""
    # The second block identifies a conversation: the first block is the same in every prompt of the recorded trace.
    conversations: dict[tuple[bytes, ...], list[WorkloadRequest]] = {}
    for r in trace.requests:
        if len(r.block_hashes) > 1 and r.prompt_len <= LONGEST * SCALE:
            conversations.setdefault(r.block_hashes[:2], []).append(r)
    long_enough = [requests for requests in conversations.values() if len(requests) >= TURNS]
    # Takes whole conversations in the order of their first requests.
    selected = sorted(list(chain.from_iterable(long_enough))[:count], key=lambda r: r.arrival_s)
    assert len(selected) == count, f"the trace has only {len(selected)} suitable requests"
    times = arrivals.poisson(rate, random.Random(0))
    requests = (replace(r, arrival_s=at, output_len=output * SCALE) for r, at in zip(selected, times, strict=False))
    return replace(trace, requests=tuple(requests))


@dataclass(frozen=True)
class Counters:
    """The gateway's counters of routing at one moment."""

    hits: dict[str, float]  # Prefix hit tokens, predicted and actual.
    #: Histogram of each routing step: upper bound in seconds to the number of steps up to it.
    step_seconds: dict[str, dict[float, float]]

    @classmethod
    async def read(cls, http: httpx.AsyncClient) -> Counters:
        hits: dict[str, float] = {}
        histograms: dict[str, dict[float, float]] = {}
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        for sample in (sample for family in families for sample in family.samples):
            if match := re.fullmatch(r"baton_prefix_hit_tokens_(predicted|actual)_total", sample.name):
                hits[match[1]] = sample.value
            elif sample.name == "baton_routing_seconds_bucket":
                histograms.setdefault(sample.labels["step"], {})[float(sample.labels["le"])] = sample.value
        return cls(hits, histograms)

    def median_s(self, step: str, before: Counters) -> float:
        """Returns the median time of a step since `before`, interpolated within a bucket."""
        earlier = before.step_seconds.get(step, {})
        counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(self.step_seconds[step].items())]
        half, low, below = counts[-1][1] / 2, 0.0, 0.0
        for bound, count in counts:
            if count >= half:
                return low + (bound - low) * (half - below) / max(1.0, count - below)
            low, below = bound, count
        raise AssertionError("unreachable: the last bucket contains all steps")


async def measure(policy: str, trace: WorkloadTrace, model_dir: Path) -> dict[str, float]:
    """Measures one policy on its own stack."""
    sizes = {"prefill": 2, "decode": 2, "threads": 1, "max_model_len": 1024, "chunk_tokens": 128, "block_size": BLOCK}
    config = UpConfig(model=str(model_dir), port=0, log_level="warning", **sizes)
    async with (
        local_stack.running(config, model_dir, start_s=180, gateway=POLICIES[policy]) as stack,
        httpx.AsyncClient(base_url=stack.base_url.removesuffix("/v1")) as http,
    ):
        url = stack.base_url.removesuffix("/v1")
        load = LoadConfig(url=url, model=stack.model, endpoint="completions", form="ids", vocab=VOCAB)
        load = replace(load, length_scale=1 / SCALE)
        client = RestClient(load)
        try:
            row = await replay(LoadRunner(load, client, trace), len(trace.requests) // 3, http)
            if policy == "cost":
                runner = LoadRunner(replace(load, users=1, requests=SINGLE), client, trace)
                row |= await one_at_a_time(runner, http)
        finally:
            await client.close()
    print(policy, row, flush=True)
    return row


async def replay(runner: LoadRunner, warm: int, http: httpx.AsyncClient) -> dict[str, float]:
    """Replays the trace in an open loop: requests are sent at their times. The first `warm` requests do not count."""
    replaying = asyncio.create_task(runner.execute())
    while sum(r.session < warm for r in runner.run.records) < warm and not replaying.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    before = await Counters.read(http)
    answers = [r for r in answered(await replaying) if r.session >= warm]
    after = await Counters.read(http)
    times = [r.ttft_s for r in answers if r.ttft_s is not None]
    prompts = sum(r.prompt_tokens or 0 for r in answers)
    computed = prompts - sum(r.cached_tokens or 0 for r in answers)
    hits = {name: after.hits[name] - before.hits[name] for name in after.hits}
    return {
        "ttft_p50_s": round(statistics.median(times), 3),
        "ttft_p90_s": round(percentile(times, 0.9), 3),
        "ttft_mean_s": round(statistics.fmean(times), 3),
        "computed_tokens": computed,
        "hit_rate": round(1 - computed / prompts, 4),
        "predicted_hit_tokens": hits["predicted"],
        "actual_hit_tokens": hits["actual"],
        "plan_ms_p50": round(after.median_s("plan", before) * 1e3, 3),
        "place_ms_p50": round(after.median_s("place", before) * 1e3, 3),
    }


async def one_at_a_time(runner: LoadRunner, http: httpx.AsyncClient) -> dict[str, float]:
    """Measures the steps of routing without other load."""
    before = await Counters.read(http)
    answered(await runner.execute())
    after = await Counters.read(http)
    return {f"{step}_ms_p50_single": round(after.median_s(step, before) * 1e3, 3) for step in ("plan", "place")}


def answered(run: LoadRun) -> list[RequestRecord]:
    """Returns the requests of a run. SystemExit if one failed."""
    if failed := [r for r in run.records if not r.ok]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].error} {failed[0].message}")
    return run.records


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's .jsonl (default: %(default)s)")
    parser.add_argument("--made", action="store_true", help="use the generated trace instead of a recorded one")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=0.7, help="per second (default: %(default)s, for two cores)")
    parser.add_argument("--output", type=int, default=4, help="tokens of an answer")
    args = parser.parse_args()
    generate = args.made or not args.trace.is_file()
    workload = AgentWorkload(rate=4.0, seconds=600.0, tenants=8, pause_s=10.0)
    trace = workload.trace() if generate else load_trace(args.trace)
    trace = chosen(trace, args.requests, args.rate, args.output)
    model_dir = demo_model(print)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = {policy: asyncio.run(measure(policy, trace, model_dir)) for policy in POLICIES}
    cost, rr = rows["cost"], rows["round_robin"]
    ratios = {"ttft_p50": "ttft_p50_s", "ttft_mean": "ttft_mean_s", "computed": "computed_tokens"}
    metrics = {
        "predicted_over_actual": round(cost["predicted_hit_tokens"] / max(1.0, cost["actual_hit_tokens"]), 4),
        **{f"{name}_ratio_vs_rr": round(cost[key] / rr[key], 4) for name, key in ratios.items()},
        "hit_rate_cost": cost["hit_rate"],
        "hit_rate_rr": rr["hit_rate"],
        "routing_ms_p50": round(cost["plan_ms_p50"] + cost["place_ms_p50"], 3),
        "routing_ms_p50_single": round(cost["plan_ms_p50_single"] + cost["place_ms_p50_single"], 3),
    }
    report.show(metrics)
    more = {"trace": trace.name, "rows": rows}
    report.write(args.out, "routing_live", metrics, "torch", "grpcio", "nixl-cu13", "redis", **more)


if __name__ == "__main__":
    if sys.argv[1:2] == ["gateway"]:
        router.CostPolicy = RoundRobin  # type: ignore[misc, assignment]
        cli.main()  # Does not return.
    main()
