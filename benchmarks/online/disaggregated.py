"""Measures online serving, disaggregated and aggregated: open-loop Poisson arrivals through the real gateway.

    python benchmarks/online/disaggregated.py --out benchmarks/results/pd_online-h100x2.json

`pd` is one prefill and one decode pod; `agg` is two pods with both roles. Each pod has its own GPU. Both modes get the
same arrivals (fixed seed) and unique prompts of the same lengths. Local prefill is off. Times are from the client.

The result file is written after each load. `--add FILE` takes the other modes and loads from an earlier result on the
same card; each row has its commit. `--budget S` shortens the last loads so that all end in time, and
`--at-most r2=50 agg.r2=20` shortens single loads; the rows have the seconds. `--shape tiny --device cpu` checks on a
CPU that the script works.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import pd_stack, report
from benchmarks.support.pd_stack import FLAGS, StackClient, TimedAnswer, prompts, running, transport_of
from benchmarks.support.report import ms, spread
from loadtest.workload import arrivals

METRICS = """
Metrics in milliseconds; those of `agg` have the prefix agg_:

- NAME_ttft_p50, p99: from the time at which a request was due until its first token arrived.
- NAME_ttft_..._over_fcfs: this minus the same percentile of a replay. The replay computes the same arrivals first come
  first served (on two servers for `agg`), each in the idle prefill time. The idle prefill time is from the start of the
  first chunk until the token was on the host, by the pod's clock: the median of sequential requests before the load,
  after others have warmed up the card.
- NAME_ttft_..._over_computed (in rows): the same with the compute time that each request had at the pod, if the gateway
  still has it. This excludes changes of the card's speed.
- NAME_gap12: from token 1, which prefill sends, to token 2, the first of decode. NAME_itl: between all later tokens;
  rows have it with gap12 included too.
"""

SEED = 7
IDLE_WARM_UP, IDLE_REQUESTS = 8, 16
QUEUED_S = 0.01  # A request that waits longer than this at the prefill pod was behind other requests.
SLOWEST = 4  # Number of slowest calls with timelines in a row.
TIMELINES = 250  # Number of latest requests with timelines. The gateway keeps 256.
TAIL_S = 15.0  # Time for the last answers of a load and the end of the pods.
SHORTEST_S = 5.0  # The shortest load.


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A load point. It ends after `requests` requests or `seconds` seconds of arrivals."""

    name: str
    rate: float
    prompt: int
    output: int
    requests: int
    seconds: float

    def arrivals(self) -> list[float]:
        """Returns the arrival times in seconds from the start, the same at every call."""
        times = arrivals.until(arrivals.poisson(self.rate, random.Random(f"{SEED}-{self.name}")), self.seconds)
        return list(itertools.islice(times, self.requests))


LOADS = {
    "llama-3.1-8b": (
        *(LoadPoint(f"r{rate}", float(rate), 4096, 128, 300, 300.0) for rate in (2, 5, 8)),
        LoadPoint("r07_15000", 0.7, 15000, 64, 300, 300.0),
    ),
    "tiny": (
        *(LoadPoint(f"r{rate}", float(rate), 60, 6, requests, 10.0) for rate, requests in ((2, 3), (5, 6), (8, 8))),
        LoadPoint("r07_15000", 0.7, 150, 4, 2, 10.0),
    ),
}
#: Fields of a load's row that become metrics.
SHOWN = {
    "r2": ("ttft_p50", "itl_p99"),
    "r5": ("ttft_p50_over_fcfs", "ttft_p99_over_fcfs", "itl_p99", "itl_p999", "gap12_p50", "gap12_p99"),
    "r8": ("ttft_p50_over_fcfs", "ttft_p99_over_fcfs", "itl_p99"),
    "r07_15000": ("ttft_p50", "itl_p99"),
}


Timeline = dict[str, dict[str, Any]]


def replay(arrived: Sequence[float], services_s: Sequence[float], servers: int) -> list[float]:
    """Returns the TTFT of each arrival with its service time, if `servers` servers work first come first served."""
    free_at, ttfts = [0.0] * servers, []
    for at, service_s in zip(arrived, services_s, strict=True):
        ended = max(heapq.heappop(free_at), at) + service_s
        heapq.heappush(free_at, ended)
        ttfts.append(ended - at)
    return ttfts


async def idle(client: StackClient, shape: str, load: LoadPoint) -> dict[str, Any]:
    """Measures requests of this load's length one after another on idle pods. Warm-up requests do not count."""
    seed = f"{SEED}-{load.name}-idle"
    batch = prompts(shape, IDLE_WARM_UP + IDLE_REQUESTS, load.prompt, seed)
    answers = [await client.ask(prompt, 4) for prompt in batch][IDLE_WARM_UP:]
    return {
        "idle_ttft": spread([a.ttft_s for a in answers]),
        "idle_gap12": spread([a.gap12_s for a in answers]),
        "compute": parts(answers, await timelines(client, answers)).get("compute"),
    }


async def timelines(client: StackClient, answers: Sequence[TimedAnswer]) -> list[Timeline]:
    """Returns the gateway's events of each request, {} for requests that the gateway no longer has."""
    await asyncio.sleep(0.1)  # the report of a hand-off may arrive after the last token
    dropped = max(0, len(answers) - TIMELINES)
    return [{}] * dropped + [await client.timeline(answer) for answer in answers[dropped:]]


def call_s(events: Timeline) -> float:
    """Returns the time of the call to the prefill pod without queue and compute there."""
    first = events.get("first_token", {})
    return first["t"] - events["prefill"]["t"] - first["queue_s"] - first["compute_s"] if "queue_s" in first else 0.0


def parts(answers: Sequence[TimedAnswer], events_of: Sequence[Timeline]) -> dict[str, dict[str, float]]:
    """Returns the spread of the parts of all requests, from the events of gateway and pods.

    The parts of the time to first token:

        client    from the due time to the gateway, and from the gateway to the client
        admit     admission in the gateway
        reserve   routing, and the Reserve call to the decode pod
        call      to the prefill pod and back
        queue, compute    at the prefill pod; compute_queued: compute of requests that waited behind others

    exposed and exposed_*: the exposed time of the hand-off and its parts.
    """
    times = defaultdict[str, list[float]](list)
    for answer, events in zip(answers, events_of, strict=True):
        request: dict[str, float] = {}
        first = events.get("first_token", {})
        if "queue_s" in first:
            request |= {"queue": first["queue_s"], "compute": first["compute_s"]}
            if first["queue_s"] > QUEUED_S:
                request["compute_queued"] = first["compute_s"]
            request |= {"call": call_s(events), "client": answer.ttft_s - first["t"]}
            request |= {"admit": events["admitted"]["t"], "reserve": events["prefill"]["t"] - events["admitted"]["t"]}
        if "handed_off" in events:
            request["exposed"] = events["handed_off"]["exposed_s"]
            exposed_parts = events["handed_off"]["parts"].items()
            request |= {f"exposed_{name.removesuffix('_s')}": seconds for name, seconds in exposed_parts}
        for name, seconds in request.items():
            times[name].append(seconds)
    return {name: spread(seconds) for name, seconds in times.items()}


async def play(client: StackClient, shape: str, load: LoadPoint) -> tuple[list[float], list[TimedAnswer], int]:
    """Sends all requests when they are due. Returns arrivals and answers in order, and the number of errors."""
    due_s = load.arrivals()
    batch = prompts(shape, len(due_s), load.prompt, seed=f"{SEED}-{load.name}")
    gc.collect()
    gc.freeze()
    begin = time.perf_counter() + 0.5
    try:
        ended = await asyncio.gather(
            *(client.ask(p, load.output, due=begin + at) for p, at in zip(batch, due_s, strict=True)),
            return_exceptions=True,
        )
    finally:
        gc.unfreeze()
    failed = [repr(answer) for answer in ended if isinstance(answer, BaseException)]
    print(*failed[:5], sep="\n", end="\n" if failed else "", flush=True)
    kept = [(at, answer) for at, answer in zip(due_s, ended, strict=True) if isinstance(answer, TimedAnswer)]
    return [at for at, _ in kept], [answer for _, answer in kept], len(failed)


async def measure_load(
    client: StackClient, shape: str, load: LoadPoint, service_s: float, servers: int
) -> dict[str, Any]:
    """Plays a load and returns its row. service_s: the idle prefill time; servers: pods that prefill."""
    due_s, answers, failed = await play(client, shape, load)
    events_of = await timelines(client, answers)
    compute_s = [events.get("first_token", {}).get("compute_s", service_s) for events in events_of]
    ttft = spread([a.ttft_s for a in answers])
    replayed = {"fcfs": spread(replay(due_s, [service_s] * len(answers), servers))}
    replayed["computed"] = spread(replay(due_s, compute_s, servers))
    gap12, itl = [a.gap12_s for a in answers], [gap for a in answers for gap in a.gaps_s]
    return {
        **asdict(load),
        "requests": len(answers),
        "took_s": round(max(a.at[-1] for a in answers) - min(a.due for a in answers), 1),
        "idle_prefill_ms": ms(service_s),
        "ttft": ttft,
        "fcfs_ttft": replayed["fcfs"],
        "gap12": spread(gap12),
        "itl": spread(itl),
        "itl_with_gap12": spread([*itl, *gap12]),
        "tpot": spread([(a.at[-1] - a.at[0]) / (len(a.at) - 1) for a in answers]),
        "sent_late_ms_max": ms(max(a.sent_late_s for a in answers)),
        **{
            f"ttft_{share}_over_{against}": round(ttft[share] - replayed[against][share], 3)
            for share, against in itertools.product(("p50", "p99"), replayed)
        },
        "failed": failed,
        "commit": report.commit(),
        "pods_said": parts(answers, events_of),
        "slowest_calls": sorted(events_of, key=call_s)[-SLOWEST:],
        "retried": sum("retry" in events for events in events_of),
    }


def metrics_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for r in rows:
        for shown in SHOWN[r["name"]]:
            kind, _, share = shown.partition("_")
            name = f"{'agg_' if r['mode'] == 'agg' else ''}{r['name']}_{shown}"
            metrics[name] = r[shown] if shown in r else r[kind][share]
    return metrics


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    service: dict[int, float] = {}
    options = {"allow_tcp": args.allow_tcp, "flags": FLAGS | report.pairs(args.flags)}
    loads = {load.name: load for load in LOADS[args.shape]}
    for mode in args.modes:
        aggregated = mode == "agg"
        async with running(args.shape, args.device, aggregated=aggregated, **options) as (stack, client):
            for load in (loads[name] for name in args.loads):
                quiet = await idle(client, args.shape, load)
                connections = transport_of(stack)
                print(mode, load.name, *connections, sep="\n", flush=True)
                if (compute := quiet.pop("compute")) is not None:
                    service[load.prompt] = compute["p50"] / 1e3
                service_s = service.get(load.prompt, quiet["idle_ttft"]["p50"] / 1e3)
                left = args.budget - TAIL_S - (time.perf_counter() - began)
                if left < SHORTEST_S:
                    print(f"{mode} {load.name}: skipped, --budget is used up", flush=True)
                    continue
                most = args.at_most.get(f"{mode}.{load.name}", args.at_most.get(load.name, math.inf))
                played = replace(load, seconds=min(load.seconds, args.seconds, most, left))
                row = await measure_load(client, args.shape, played, service_s, servers=2 if aggregated else 1)
                rows.append({"mode": mode, **row, **quiet, "connections": connections})
                print(json.dumps(rows[-1]), flush=True)
                write(args, rows)
                await asyncio.sleep(1.0)
    return rows


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Writes the result so far. Returns its metrics."""
    rows = [*earlier(args.add, rows), *rows]
    metrics = metrics_of(rows)
    report.write(args.out, "pd_online", metrics, *pd_stack.PACKAGES, shape=args.shape, rows=rows)
    return metrics


def earlier(path: Path | None, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of an earlier result that `rows` do not replace, each with its commit."""
    if path is None:
        return []
    result = json.loads(path.read_text())
    # The name of a CPU is followed by the number of threads, which may differ.
    if result["card"].partition(",")[0] != report.card().partition(",")[0]:
        raise SystemExit(f"--add {path}: this result is from another card, {result['card']}")
    replaced = {(r["mode"], r["name"]) for r in rows}
    return [{"commit": result["commit"]} | r for r in result["rows"] if (r["mode"], r["name"]) not in replaced]


def main(argv: Sequence[str] | None = None) -> None:
    parser = pd_stack.arguments(__doc__, METRICS, LOADS)
    parser.add_argument("--add", type=Path, metavar="FILE", help="earlier result to take the other rows from")
    parser.add_argument("--modes", choices=("pd", "agg"), nargs="+", default=["pd", "agg"])
    parser.add_argument("--loads", choices=SHOWN, nargs="+", default=list(SHOWN))
    parser.add_argument("--seconds", type=float, default=math.inf, help="longest duration of each load")
    parser.add_argument(
        "--at-most", nargs="+", default=[], metavar="[MODE.]LOAD=SECONDS", help="longest duration of one load"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all loads together")
    args = parser.parse_args(argv)
    args.at_most = {name: float(seconds) for name, seconds in report.pairs(args.at_most).items()}
    rows = asyncio.run(measure(args))
    report.show(write(args, rows))
    if failed := sum(r["failed"] for r in rows):
        raise SystemExit(f"{failed} requests failed")


if __name__ == "__main__":
    main()
