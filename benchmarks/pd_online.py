"""Online serving, disaggregated and aggregated: open-loop Poisson arrivals through the real gateway.

    python benchmarks/pd_online.py --out benchmarks/results/pd_online-h100x2.json

`pd` is one prefill and one decode pod, `agg` two pods that do both; each pod has a GPU of its own. Both modes get the
same arrivals (fixed seed) and prompts of the same lengths, unique ones; local prefill is off; clocks are the client's.
Milliseconds; metrics of `agg` have that prefix.

- NAME_ttft_p50, p99: from when a request was due until its first token was there.
- NAME_ttft_..._over_fcfs: that, less the same percentile of a replay in which the same arrivals are computed one after
  another, first come first served, each in the idle prefill time (of two servers with `agg`). The idle prefill time is
  the pod's own: from the first chunk's start until the token was on the host, median of requests before the run that
  follow each other, on a card that others have warmed up (its clock falls with the power that prompts draw).
- NAME_ttft_..._over_computed, in rows: the same where each takes the time that it took the pod, idle or not, as far as
  the gateway keeps that (the latest requests): what is not the card's pace.
- NAME_gap12: from token 1, which prefill sends, to token 2, decode's first. NAME_itl: between all later tokens; rows
  have it with gap12 too.

The result is written after each load. `--add FILE` takes the modes and loads that this run leaves out from an earlier
result on the same card; rows have their commits. `--budget S` makes the last loads shorter, so that all of them end in
time, and `--at-most r2=50 agg.r2=20` single ones; rows tell.
`--shape tiny --device cpu` is for a CPU: it shows that the script works, not how fast anything is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.pd_stack import (
    FLAGS,
    StackClient,
    TimedAnswer,
    flags_of,
    ms,
    prompts,
    running,
    spread,
    transport_of,
)
from loadtest.slo import percentile

SEED = 7
IDLE_WARM_UP, IDLE_REQUESTS = 8, 16
SETTLE_S = 1.0
QUEUED_S = 0.01  # a request that waited longer at the prefill pod found others there
SLOWEST = 4  # calls whose timelines a row has
TIMELINES = 250  # of the latest requests; the gateway keeps 256
TAIL_S, SHORTEST_S = 15.0, 5.0  # a load's last answers and the end of the pods; no load is shorter


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """Ends with `requests` or with the arrivals of `seconds`, whichever comes first."""

    name: str
    rate: float
    prompt: int
    output: int
    requests: int
    seconds: float

    def arrivals(self) -> list[float]:
        """Seconds from the start; the same at every call."""
        rng, at = random.Random(f"{SEED}-{self.name}"), 0.0
        found: list[float] = []
        while len(found) < self.requests and (at := at + rng.expovariate(self.rate)) < self.seconds:
            found.append(at)
        return found


LOADS = {
    "llama-3.1-8b": (
        OnlineLoad("r2", 2.0, 4096, 128, 300, 300.0),
        OnlineLoad("r5", 5.0, 4096, 128, 300, 300.0),
        OnlineLoad("r8", 8.0, 4096, 128, 300, 300.0),
        OnlineLoad("r07_15000", 0.7, 15000, 64, 300, 300.0),
    ),
    "tiny": (
        OnlineLoad("r2", 2.0, 60, 6, 3, 10.0),
        OnlineLoad("r5", 5.0, 60, 6, 6, 10.0),
        OnlineLoad("r8", 8.0, 60, 6, 8, 10.0),
        OnlineLoad("r07_15000", 0.7, 150, 4, 2, 10.0),
    ),
}
# What a load's row gives to the metrics.
SHOWN = {
    "r2": ("ttft_p50", "itl_p99"),
    "r5": ("ttft_p50_over_fcfs", "ttft_p99_over_fcfs", "itl_p99", "itl_p999", "gap12_p50", "gap12_p99"),
    "r8": ("ttft_p50_over_fcfs", "ttft_p99_over_fcfs", "itl_p99"),
    "r07_15000": ("ttft_p50", "itl_p99"),
}


def replay(arrivals: Sequence[float], services_s: Sequence[float], servers: int) -> list[float]:
    """TTFT of each arrival, which takes so long, when the servers take them first come first served."""
    free = [0.0] * servers
    found = []
    for at, service_s in zip(arrivals, services_s, strict=True):
        soonest = min(range(servers), key=free.__getitem__)
        free[soonest] = max(free[soonest], at) + service_s
        found.append(free[soonest] - at)
    return found


async def idle(client: StackClient, shape: str, load: OnlineLoad) -> dict[str, Any]:
    """Requests of this length one after another while nothing else runs; the first ones warm up and do not count."""
    answers = [
        await client.ask(prompt, 4)
        for prompt in prompts(shape, IDLE_WARM_UP + IDLE_REQUESTS, load.prompt, seed=f"{SEED}-{load.name}-idle")
    ]
    counted = answers[IDLE_WARM_UP:]
    found = parts(counted, await timelines(client, counted))
    return {
        "ttft": spread([a.ttft_s for a in counted]),
        "gap12": spread([a.gap12_s for a in counted]),
        "compute_s": found["compute"]["p50"] / 1e3 if "compute" in found else None,
    }


Timeline = dict[str, dict[str, Any]]


async def timelines(client: StackClient, answers: Sequence[TimedAnswer]) -> list[Timeline]:
    """What the gateway noted of these requests; {} of those that it keeps no more."""
    await asyncio.sleep(0.1)  # a hand-off's report may come after the last token
    late = max(0, len(answers) - TIMELINES)
    return [{}] * late + [await client.timeline(answer) for answer in answers[late:]]


def call_s(events: Timeline) -> float:
    """What asking the prefill pod took beside queue and compute there."""
    first = events.get("first_token", {})
    return first["t"] - events["prefill"]["t"] - first["queue_s"] - first["compute_s"] if "queue_s" in first else 0.0


def parts(answers: Sequence[TimedAnswer], told: Sequence[Timeline]) -> dict[str, dict[str, float]]:
    """What gateway and pods noted. queue and compute: at the prefill pod; compute_queued: of those that waited for
    others there; exposed: of the hand-off, and its parts. And what else the time to the first token was: admit, at the
    gateway; reserve, routing and the decode pod; call, to the prefill pod and back; client, from when it was due to the
    gateway and back.
    """
    found: dict[str, list[float]] = {}
    for answer, events in zip(answers, told, strict=True):
        noted: dict[str, float] = {}
        first = events.get("first_token", {})
        if "queue_s" in first:
            noted |= {"queue": first["queue_s"], "compute": first["compute_s"]}
            if first["queue_s"] > QUEUED_S:
                noted["compute_queued"] = first["compute_s"]
            noted |= {"call": call_s(events), "client": answer.ttft_s - first["t"]}
            noted |= {"admit": events["admitted"]["t"], "reserve": events["prefill"]["t"] - events["admitted"]["t"]}
        if "handed_off" in events:
            noted["exposed"] = events["handed_off"]["exposed_s"]
            pieces = events["handed_off"]["parts"].items()
            noted |= {f"exposed_{name.removesuffix('_s')}": seconds for name, seconds in pieces}
        for name, seconds in noted.items():
            found.setdefault(name, []).append(seconds)
    return {name: spread(seconds) for name, seconds in found.items()}


async def play(client: StackClient, shape: str, load: OnlineLoad) -> tuple[list[float], list[TimedAnswer], list[str]]:
    """Sends everything when it is due; arrivals and answers in their order, and what failed."""
    arrivals = load.arrivals()
    made = prompts(shape, len(arrivals), load.prompt, seed=f"{SEED}-{load.name}")
    gc.collect()
    gc.freeze()
    begin = time.perf_counter() + 0.5
    try:
        ended = await asyncio.gather(
            *(client.ask(p, load.output, due=begin + at) for p, at in zip(made, arrivals, strict=True)),
            return_exceptions=True,
        )
    finally:
        gc.unfreeze()
    failed = [repr(answer) for answer in ended if isinstance(answer, BaseException)]
    kept = [(at, a) for at, a in zip(arrivals, ended, strict=True) if isinstance(a, TimedAnswer)]
    return [at for at, _ in kept], [a for _, a in kept], failed


def row(
    load: OnlineLoad,
    arrivals: Sequence[float],
    answers: Sequence[TimedAnswer],
    told: Sequence[Timeline],
    service_s: float,
    servers: int,
) -> dict[str, Any]:
    """service_s: the idle prefill time."""
    ttft = [a.ttft_s for a in answers]
    took = [events.get("first_token", {}).get("compute_s", service_s) for events in told]
    fcfs, computed = replay(arrivals, [service_s] * len(answers), servers), replay(arrivals, took, servers)
    gap12 = [a.gap12_s for a in answers]
    itl = [gap for a in answers for gap in a.gaps_s]
    found: dict[str, Any] = {
        **asdict(load),
        "requests": len(answers),
        "took_s": round(max(a.at[-1] for a in answers) - min(a.due for a in answers), 1),
        "idle_prefill_ms": ms(service_s),
        "ttft": spread(ttft),
        "fcfs_ttft": spread(fcfs),
        "gap12": spread(gap12),
        "itl": spread(itl),
        "itl_with_gap12": spread([*itl, *gap12]),
        "tpot": spread([(a.at[-1] - a.at[0]) / (len(a.at) - 1) for a in answers]),
        "sent_late_ms_max": ms(max(a.sent_late_s for a in answers)),
    }
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        for against, times in (("fcfs", fcfs), ("computed", computed)):
            found[f"ttft_{name}_over_{against}"] = round(ms(percentile(ttft, share)) - ms(percentile(times, share)), 3)
    return found


def metrics_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for r in rows:
        prefix = "agg_" if r["mode"] == "agg" else ""
        for shown in SHOWN[r["name"]]:
            kind, _, share = shown.partition("_")
            metrics[f"{prefix}{r['name']}_{shown}"] = r[shown] if shown in r else r[kind][share]
    return metrics


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    service: dict[int, float] = {}
    flags = FLAGS | flags_of(args.flags)
    for mode in args.modes:
        aggregated = mode == "agg"
        async with running(args.shape, args.device, aggregated=aggregated, allow_tcp=args.allow_tcp, flags=flags) as (
            stack,
            client,
        ):
            for load in [load for name in args.loads for load in LOADS[args.shape] if load.name == name]:
                quiet = await idle(client, args.shape, load)
                connections = transport_of(stack)
                print(mode, load.name, *connections, sep="\n", flush=True)
                if quiet["compute_s"] is not None:
                    service[load.prompt] = quiet["compute_s"]
                service_s = service.get(load.prompt, quiet["ttft"]["p50"] / 1e3)
                left = args.budget - TAIL_S - (time.perf_counter() - began)
                if left < SHORTEST_S:
                    print(f"{mode} {load.name}: no time is left", flush=True)
                    continue
                most = args.at_most.get(f"{mode}.{load.name}", args.at_most.get(load.name, math.inf))
                played = replace(load, seconds=min(load.seconds, args.seconds, most, left))
                arrivals, answers, failed = await play(client, args.shape, played)
                for failure in failed[:5]:
                    print(failure, flush=True)
                told = await timelines(client, answers)
                rows.append({"mode": mode, **row(played, arrivals, answers, told, service_s, 2 if aggregated else 1)})
                rows[-1] |= {"failed": len(failed), "idle_ttft": quiet["ttft"], "idle_gap12": quiet["gap12"]}
                rows[-1] |= {
                    "connections": connections,
                    "commit": report.commit(),
                    "pods_said": parts(answers, told),
                    "slowest_calls": sorted(told, key=call_s)[-SLOWEST:],
                    "retried": sum("retry" in events for events in told),
                }
                print(json.dumps(rows[-1]), flush=True)
                write(args, rows)
                await asyncio.sleep(SETTLE_S)
    return rows


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The result so far; its metrics."""
    rows = [*earlier(args.add, rows), *rows]
    metrics = metrics_of(rows)
    report.write(args.out, "pd_online", metrics, "torch", "triton", "nixl-cu13", "grpcio", shape=args.shape, rows=rows)
    return metrics


def earlier(path: Path | None, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier result that these do not replace; each has its commit."""
    if path is None:
        return []
    found = json.loads(path.read_text())
    if found["card"].partition(",")[0] != report.card().partition(",")[0]:  # a CPU's threads are this process's affair
        raise SystemExit(f"{path} is of another card")
    now = {(r["mode"], r["name"]) for r in rows}
    return [{"commit": found["commit"]} | r for r in found["rows"] if (r["mode"], r["name"]) not in now]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", type=Path, metavar="FILE")
    parser.add_argument("--shape", choices=LOADS, default="llama-3.1-8b")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--allow-tcp", action="store_true", help="whatever carries the KV")
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME=VALUE", help="of the pods: chunk-graphs=8192")
    parser.add_argument("--modes", choices=("pd", "agg"), nargs="+", default=["pd", "agg"])
    parser.add_argument("--loads", choices=SHOWN, nargs="+", default=list(SHOWN))
    parser.add_argument("--seconds", type=float, default=math.inf, help="shorter runs of each load; the rows tell")
    parser.add_argument("--at-most", nargs="+", default=[], metavar="[MODE.]LOAD=SECONDS", help="the same of one load")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds that all of it may take")
    args = parser.parse_args(argv)
    args.at_most = {name: float(seconds) for name, _, seconds in (one.partition("=") for one in args.at_most)}
    rows = asyncio.run(measure(args))
    for name, value in write(args, rows).items():
        print(f"{name:36} {value}")
    if failed := sum(r["failed"] for r in rows):
        raise SystemExit(f"{failed} requests failed")


if __name__ == "__main__":
    main()
