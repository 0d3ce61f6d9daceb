"""Measures Baton through its REST API on one card, with requests that arrive at random times.

The load is open loop: a request is sent at its Poisson arrival time, whatever runs. Prompts are token ids, no prompt
occurs twice, and answers are greedy with ignore_eos. There are two setups on the same card, one after the other: one
pod with both roles (`both`), and one prefill with one decode pod (`pd`). Both have default settings. Each load runs for
a short time first, which does not count.

    python benchmarks/online/one_card.py --out benchmarks/results/online-h200.json

`--shape tiny` checks on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import local_stack, pd_stack, report
from benchmarks.support.report import spread
from benchmarks.support.sse_client import SseStream
from cli.stack.stack import Stack
from common.settings.up import UpConfig

METRICS = """
Metrics, in ms; those of the load `chat` on one pod with both roles have no prefix:

- ttft_ms: from the arrival time of a request to its first token. itl_ms: between two tokens of an answer.
- tpot_ms: time from the first to the last token, divided by the number of tokens after the first.
- e2e_ms: from the arrival time to the last token.
- pd_ marks the setup with one prefill and one decode pod. shared_ marks the load with a shared prefix.
"""

SETUPS = ("both", "pd")
SHOWN = {"ttft": ("p50", "p90", "p99"), "itl": ("p50", "p90", "p99"), "tpot": ("p50",), "e2e": ("p50", "p99")}
WAIT_S = 120.0  # Longest time of an answer.


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    name: str
    rate: float  # Requests per second.
    prompt: int  # Tokens of a prompt.
    shared: int  # Tokens at the start of all prompts.
    output: int  # Tokens of an answer.
    seconds: float
    warm_up: int = 24  # Requests before the load that do not count.

    @property
    def prefix(self) -> str:
        """Prefix of the metrics' names."""
        return "" if self.name == "chat" else f"{self.name}_"


LOADS = {
    "llama-3.1-8b": (OnlineLoad("chat", 30, 256, 0, 128, 9.5), OnlineLoad("shared", 8, 4096, 3840, 128, 12.0)),
    "tiny": (OnlineLoad("chat", 4, 30, 0, 8, 2.0, 4), OnlineLoad("shared", 4, 300, 240, 8, 2.0, 4)),
}


def arrivals(load: OnlineLoad, rng: random.Random) -> Iterator[float]:
    """Yields Poisson arrival times, in seconds after the start."""
    at = rng.expovariate(load.rate)
    while at < load.seconds:
        yield at
        at += rng.expovariate(load.rate)


def request_bytes(prompt: Sequence[int], load: OnlineLoad) -> bytes:
    body = {"model": pd_stack.MODEL, "prompt": prompt, "max_tokens": load.output, "temperature": 0.0}
    raw = orjson.dumps(body | {"ignore_eos": True, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def ask(port: int, request: bytes, tokens: int, due: float) -> list[float]:
    """Sends a request at a time of time.monotonic(). Returns the delays of its tokens after that time."""
    stream = SseStream(request)
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", port)
    stream.transport.write(request)
    async with asyncio.timeout(WAIT_S):
        await stream.ended.wait()
    stream.transport.close()
    events = stream.events()
    times = [at - due for at, event in events if any(choice["text"] for choice in event.get("choices", ()))]
    if len(times) != tokens:
        raise SystemExit(f"an answer has {len(times)} tokens, expected {tokens}: {bytes(stream.data[-500:])!r}")
    return times


async def measure(port: int, shape: str, load: OnlineLoad, setup: str) -> dict[str, Any]:
    rng = random.Random(f"{setup} {load.name}")
    size = pd_stack.CONFIGS[shape]["vocab_size"]
    shared = rng.choices(range(size), k=load.shared)

    async def play(times: Sequence[float]) -> list[list[float]]:
        prompts = [shared + rng.choices(range(size), k=load.prompt - load.shared) for _ in times]
        requests = [request_bytes(prompt, load) for prompt in prompts]
        began = time.monotonic() + 0.1
        calls = [ask(port, request, load.output, began + at) for request, at in zip(requests, times, strict=True)]
        return await asyncio.gather(*calls)

    await play([0.0])  # nothing of the shared prefix is cached yet
    await play([i / load.rate for i in range(load.warm_up)])
    answers = await play(list(arrivals(load, rng)))
    row = {
        "ttft": spread([times[0] for times in answers]),
        "itl": spread([b - a for times in answers for a, b in pairwise(times)]),
        "tpot": spread([(times[-1] - times[0]) / (len(times) - 1) for times in answers]),
        "e2e": spread([times[-1] for times in answers]),
    }
    return {"setup": setup, "load": load.name, "rate": load.rate, "requests": len(answers), **row}


@contextlib.asynccontextmanager
async def running(args: argparse.Namespace, setup: str) -> AsyncIterator[Stack]:
    """Runs the pods of a setup, which share one card, and a gateway."""
    with tempfile.TemporaryDirectory(prefix="baton-model-") as folder:
        directory = Path(folder)
        pd_stack.make_model(directory, args.shape)
        config = UpConfig(
            model=str(directory),
            served_name=pd_stack.MODEL,
            port=0,
            aggregated=1 if setup == "both" else 0,
            device=args.device,
            load_format="dummy",
            max_model_len=8192 if args.shape != "tiny" else 1024,
            host_cache=0,
            log_level="info",
            drain_s=2.0,
        )
        flags = report.pairs(args.flags)
        async with local_stack.running(config, directory, start_s=300.0, pod_flags=flags) as stack:
            yield stack


async def run(args: argparse.Namespace) -> None:
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for setup in args.setups:
        began = time.perf_counter()
        async with running(args, setup) as stack:
            ready_s = round(time.perf_counter() - began, 1)
            port = urlsplit(stack.base_url).port
            assert port is not None
            for load in LOADS[args.shape]:
                if load.name not in args.loads:
                    continue
                row = await measure(port, args.shape, load, setup) | {"ready_s": ready_s}
                rows.append(row)
                for kind, shares in SHOWN.items():
                    names = {
                        share: f"{load.prefix}{'' if setup == 'both' else 'pd_'}{kind}_ms_{share}" for share in shares
                    }
                    metrics |= {name: row[kind][share] for share, name in names.items()}
                print(setup, load.name, {kind: row[kind] for kind in SHOWN}, flush=True)
                report.write(args.out, "online", metrics, *pd_stack.PACKAGES, shape=args.shape, rows=rows)
    report.show(metrics)


def main(argv: Sequence[str] | None = None) -> None:
    parser = pd_stack.arguments(__doc__, METRICS, LOADS)
    parser.add_argument("--setups", choices=SETUPS, nargs="+", default=list(SETUPS))
    parser.add_argument("--loads", choices=("chat", "shared"), nargs="+", default=["chat", "shared"])
    asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
