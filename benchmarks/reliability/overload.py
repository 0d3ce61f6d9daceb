"""Measures a stack at its capacity and far beyond it: goodput, refusals, waits, and how soon it is empty afterwards.

    .venv/bin/python benchmarks/reliability/overload.py --out benchmarks/results/overload.json

A stack of real processes (prefill, decode, gateway, Valkey) serves the demo model on a CPU with `--max-ttft-s`. First
CLOSED clients, each with one request at a time, measure the capacity in answers per second. Then two loads run for
--seconds each: requests arrive at even times, at the capacity and at --times the capacity. All prompts differ. Clients
and stack share the processors, so the clients have a lower priority.

- reject_ms_p99: time in the gateway from the head of a request to its refusal (`baton_refusal_seconds`), for requests
  that are refused on arrival. reject_ms_p99_all: for all refusals; a request that waited has its wait in it.
- accepted_ttft_s_p99: time at the client from sending a request to its first token, for all requests that got one.
- goodput_ratio: answers per second with a first token within --max-ttft-s, at --times the capacity, divided by the same
  at the capacity.
- drain_s: time from the end of the load until gateway and pods hold no request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support import local_stack, report
from cli.demo.model import demo_model
from common.settings.up import UpConfig
from loadtest.slo import percentile

CLOSED = 6  #: Clients that measure the capacity.
VOCAB = (100, 40_000)  #: Range of the prompts' token ids.
PATIENCE = 3.0  #: A client waits this many times --max-ttft-s for the end of its answer.
REFUSED_PAUSE_S = 0.2  #: Pause of a client after a refusal, while the capacity is measured.
NICE = 10  #: How much the priority of the clients is lower.
DRAIN_LIMIT_S = 120.0  #: A stack that still holds requests this long after a load is broken.
Buckets = dict[float, float]  #: Upper bound in seconds -> number of observations up to it.


@dataclass
class LoadOutcome:
    """The requests of one load, as their clients saw them."""

    seconds: float = 0.0  #: From the first request to the last.
    ttft_s: list[float] = field(default_factory=list)  #: Time to the first token of each request that got one.
    statuses: Counter[str] = field(default_factory=Counter)  #: Requests by HTTP status, or by how they failed.
    retry_after_s: list[float] = field(default_factory=list)  #: Header retry-after of each refusal.

    def good(self, limit_s: float) -> float:
        """Returns the answers per second with a first token in time."""
        return sum(seconds <= limit_s for seconds in self.ttft_s) / self.seconds


@dataclass
class Client:
    """Sends completions to one gateway, each over its own connection."""

    url: str
    model: str
    args: argparse.Namespace
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def request(self, load: LoadOutcome) -> str:
        """Sends one request, reads its answer and adds it to the load. Returns the status, as in `statuses`."""
        prompt = [self.rng.randrange(*VOCAB) for _ in range(self.args.prompt)]
        fields = {"model": self.model, "prompt": prompt, "max_tokens": self.args.output, "stream": True}
        body = orjson.dumps({**fields, "ignore_eos": True, "temperature": 0})
        address, sent, status, writer = urlsplit(self.url), time.perf_counter(), "failed", None
        try:
            async with asyncio.timeout(PATIENCE * self.args.max_ttft_s):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
                writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
                answer = (await reader.readuntil(b"\r\n\r\n")).decode()
                status = answer.split()[1]
                if retry := re.search(r"retry-after: (\d+)", answer, re.IGNORECASE):
                    load.retry_after_s.append(float(retry[1]))
                first = True
                while line := await reader.readline():
                    if line.startswith(b"data: {"):
                        if b'"error"' in line:
                            status = "error event"
                        elif first and status == "200":
                            first = False
                            load.ttft_s.append(time.perf_counter() - sent)
        except TimeoutError:
            status = "timed out"
        except (OSError, asyncio.IncompleteReadError):
            status = "failed"
        finally:
            load.statuses[status] += 1
            if writer is not None:
                writer.close()
        return status

    async def closed(self, seconds: float) -> LoadOutcome:
        """Runs CLOSED clients that each have one request at a time. Returns their load."""
        load, began = LoadOutcome(), time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - began < seconds:
                if await self.request(load) != "200":
                    await asyncio.sleep(REFUSED_PAUSE_S)

        await asyncio.gather(*[client() for _ in range(CLOSED)])
        load.seconds = time.perf_counter() - began
        return load

    async def open(self, per_s: float, seconds: float) -> tuple[LoadOutcome, set[asyncio.Task[None]]]:
        """Sends requests at even times. Returns the load, and the tasks of the requests that have not ended."""
        load, began, tasks = LoadOutcome(), time.perf_counter(), set[asyncio.Task[None]]()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, began + number / per_s - time.perf_counter()))
            task = asyncio.create_task(self.request(load))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        load.seconds = time.perf_counter() - began
        return load, tasks


async def refusals(http: httpx.AsyncClient) -> dict[str, Buckets]:
    """Returns the buckets of the metric baton_refusal_seconds by its label `stage`."""
    found: dict[str, Buckets] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            if sample.name == "baton_refusal_seconds_bucket":
                found.setdefault(sample.labels["stage"], {})[float(sample.labels["le"])] = sample.value
    return found


def refused(after: Mapping[str, Buckets], before: Mapping[str, Buckets]) -> dict[str, int]:
    """Returns the number of refusals between two readings, by stage."""
    counts = {
        stage: int(buckets[math.inf] - before.get(stage, {}).get(math.inf, 0)) for stage, buckets in after.items()
    }
    return {stage: count for stage, count in counts.items() if count}


def quantile_ms(after: Buckets, before: Mapping[float, float], share: float) -> float:
    """Returns the quantile `share` of the observations between two readings, interpolated within a bucket."""
    counts = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(after.items())]
    rank, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return 1e3 * (low + (bound - low) * (rank - below) / (count - below))
        low, below = bound, count
    return 0.0


async def empty(http: httpx.AsyncClient) -> bool:
    """Returns whether neither the gateway nor a pod holds a request."""
    state: Any = (await http.get("/dashboard/state")).json()
    loads = [pod[name] or 0 for pod in state["pods"] for name in ("queued_tokens", "running", "waiting", "reserved")]
    return not (state["gateway"]["running"] or state["gateway"]["waiting"] or any(loads))


async def drained(http: httpx.AsyncClient) -> float:
    """Waits until the stack is empty. Returns the seconds. Raises RuntimeError after DRAIN_LIMIT_S."""
    began = time.perf_counter()
    while not await empty(http):
        if time.perf_counter() - began > DRAIN_LIMIT_S:
            raise RuntimeError(
                f"gateway or pods still hold requests {DRAIN_LIMIT_S:.0f} s after the load: see their logs"
            )
        await asyncio.sleep(0.05)
    return time.perf_counter() - began


async def measure(client: Client, http: httpx.AsyncClient, args: argparse.Namespace) -> dict[str, Any]:
    """Runs all loads. Returns the metrics."""
    await client.closed(args.warm)  # the pods compile kernels and measure their rates
    capacity = len((closed := await client.closed(args.warm)).ttft_s) / closed.seconds
    await drained(http)
    metrics: dict[str, Any] = {"capacity_per_s": round(capacity, 3)}
    goods = []
    for times in (1.0, args.times):
        before = await refusals(http)
        load, tasks = await client.open(times * capacity, args.seconds)
        drain_s = await drained(http)
        if tasks:
            await asyncio.wait(tasks)
        after = await refusals(http)
        goods.append(load.good(args.max_ttft_s))
        name = f"{times:g}x"
        metrics |= {
            f"good_per_s_{name}": round(goods[-1], 3),
            f"requests_{name}": sum(load.statuses.values()),
            f"ended_{name}": dict(load.statuses),
            f"refused_{name}": refused(after, before),
            f"ttft_s_p50_{name}": round(percentile(load.ttft_s, 0.5), 3),
        }
        report.show(metrics)
    every: Buckets = Counter()
    earlier: Buckets = Counter()
    for total, part in itertools.chain(((every, b) for b in after.values()), ((earlier, b) for b in before.values())):
        total.update(part)  # type: ignore[arg-type]
    metrics |= {
        "reject_ms_p50": round(quantile_ms(after["arrival"], before.get("arrival", {}), 0.5), 2),
        "reject_ms_p99": round(quantile_ms(after["arrival"], before.get("arrival", {}), 0.99), 2),
        "reject_ms_p99_all": round(quantile_ms(every, earlier, 0.99), 2),
        "accepted_ttft_s_p50": round(percentile(load.ttft_s, 0.5), 3),
        "accepted_ttft_s_p99": round(percentile(load.ttft_s, 0.99), 3),
        "accepted_ttft_s_max": round(max(load.ttft_s), 3),
        "goodput_ratio": round(goods[1] / goods[0], 3),
        "drain_s": round(drain_s, 3),
        "retry_after_s_p50": percentile(load.retry_after_s, 0.5),
    }
    return metrics


async def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--times", type=float, default=20.0, help="load beyond the capacity, as a multiple of it")
    parser.add_argument("--seconds", type=float, default=25.0, help="duration of each load")
    parser.add_argument(
        "--warm", type=float, default=8.0, help="duration of the warm-up, and of the measurement of the capacity"
    )
    parser.add_argument("--max-ttft-s", type=float, default=5.0, help="the gateway's setting")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of an answer")
    args = parser.parse_args()
    os.environ["BATON_MAX_TTFT_S"] = str(args.max_ttft_s)
    model_dir = demo_model()
    config = UpConfig(model=str(model_dir), port=0, log_level="warning", threads=1, max_model_len=1024)
    async with local_stack.running(config, model_dir, start_s=90) as stack:
        url = stack.base_url.removesuffix("/v1")
        os.nice(NICE)  # the stack's processes run already
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            metrics = await measure(Client(url, stack.model, args), http, args)
    report.show(metrics)
    names = ("times", "seconds", "warm", "max_ttft_s", "prompt", "output")
    settings = {name: getattr(args, name) for name in names} | {"closed": CLOSED, "nice": NICE}
    report.write(args.out, "overload", metrics, "uvicorn", "torch", "nixl", settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
