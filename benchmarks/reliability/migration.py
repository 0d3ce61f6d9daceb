"""Counts forced migrations of running answers, and those after which an answer differs from an undisturbed one.

    .venv/bin/python benchmarks/reliability/migration.py --out benchmarks/results/migration.json

A gateway, two prefill and three decode pods with a tiny random model run in one process, over loopback and real gRPC.
An answer loses its decode pod after a random number of tokens, as if that pod's token stream had ended, and once more
on the next pod with a probability of AGAIN. The pod goes on sending until it is told to stop. Requests are streams and
whole answers, greedy and seeded, with one or two samples. Each text is compared with that of one engine alone, where
every token is one word.

`forced` is the number of migrations, `mismatches` that of answers with another text, `failed` that of answers with an
error. `on_tokens` says how many migrations happened at which length of the answer.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import uvloop

from benchmarks.support import report
from common.errors import BatonError, Unavailable
from common.pb import decode_pb2
from gateway.pods.pod import Pod, TokenSink
from gateway.pods.stalls import Suspicion
from tests.rigs.chaos.catalogue import MAX_LEN, MODEL, Case, catalogue, write_model
from tests.rigs.chaos.client import ChaosClients, Gateway, Verdict
from tests.rigs.gateway.gateway_rig import rig
from tests.rigs.pods.harness import Cluster

FORCED, CLIENTS, AGAIN = 1000, 16, 0.7
PODS = {"served_name": MODEL, "load_format": "dummy", "max_model_len": MAX_LEN, "chunk_tokens": 64, "num_blocks": 1024}
LENGTHS = (1, 4, 16, 1000)  #: Upper ends of the lengths in `on_tokens`.


@dataclass
class Deaths:
    """Decides which answers lose their pod, and counts them."""

    rng: random.Random
    forced: int = 0
    on_tokens: Counter[int] = field(default_factory=Counter)

    def attach(self, pod: Pod) -> None:
        """Puts a DoomedSink before each sink of the pod."""
        subscribe = pod.subscribe

        def doomed(request_id: str, sink: TokenSink) -> None:
            attempt = int(request_id.rpartition("-")[2].partition(".")[0])
            dies = attempt == 1 or (attempt == 2 and self.rng.random() < AGAIN)  # a request has three attempts
            subscribe(request_id, DoomedSink(self, sink, self.rng.randrange(1, 24)) if dies else sink)

        pod.subscribe = doomed  # type: ignore[method-assign]


class DoomedSink:
    """Passes the deltas of one request on, and reports a lost stream after `after` tokens."""

    def __init__(self, deaths: Deaths, sink: TokenSink, after: int) -> None:
        self._deaths, self._sink, self._after = deaths, sink, after
        self._tokens, self._ended, self._lost = 0, 0, False

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        if self._lost:
            return
        self._sink.on_delta(delta)
        self._tokens += len(delta.tokens)
        if self._tokens >= self._after and not delta.finish_reason:
            self._lost = True
            self._deaths.forced += 1
            self._deaths.on_tokens[next(n for n in LENGTHS if self._tokens <= n)] += 1
            self._sink.on_stream_lost(Unavailable("the benchmark ended the stream"))

    def on_stream_lost(self, error: BatonError) -> None:
        if not self._lost:
            self._sink.on_stream_lost(error)

    def progress(self, suspicion: Suspicion, *, queued: bool) -> int | None:
        return None if self._lost else self._sink.progress(suspicion, queued=queued)

    def on_stalled(self, error: BatonError) -> None:
        self._sink.on_stalled(error)


async def run(directory: Path, forced: int, seed: int) -> dict[str, Any]:
    """Sends requests until `forced` migrations have happened. Returns the metrics."""
    write_model(directory)
    cases = await asyncio.to_thread(catalogue, directory)
    deaths, began = Deaths(random.Random(seed)), time.monotonic()
    async with Cluster.start(directory, prefill=2, decode=3, prefill_config=PODS, decode_config=PODS) as pods:
        addresses = tuple(pod.runtime.address for pod in pods.pods)
        shown: Any = SimpleNamespace(addresses=addresses, decodes=pods.decodes, all_idle=lambda: True)
        async with rig(shown, directory, models=(f"{MODEL}={directory}",)) as gw:
            for pod in gw.gateway.pod_table.pods.values():
                deaths.attach(pod)
            async with httpx.AsyncClient(base_url=gw.url, timeout=60) as http:
                clients = ChaosClients([Gateway("gateway", gw.url, http)], cases, key=lambda _: "none")
                await asyncio.gather(*(_client(clients, cases, deaths, forced, seed, n) for n in range(CLIENTS)))
            await gw.settled()
            resumed = next(iter(gw.gateway.metrics.resumptions.collect())).samples
    verdicts, seconds = clients.tally.verdicts, time.monotonic() - began
    for line in clients.tally.problems:
        print(line)
    return {
        "forced": deaths.forced,
        "mismatches": verdicts[Verdict.WRONG],
        "failed": verdicts[Verdict.FAILED] + verdicts[Verdict.HANG] + verdicts[Verdict.REFUSED],
        "answers": verdicts[Verdict.COMPLETED],
        "resumed_sequences": {s.labels["outcome"]: s.value for s in resumed if s.name.endswith("_total")},
        "on_tokens": {f"<={n}": deaths.on_tokens[n] for n in LENGTHS},
        "seconds": round(seconds, 1),
    }


async def _client(
    clients: ChaosClients, cases: Sequence[Case], deaths: Deaths, forced: int, seed: int, number: int
) -> None:
    rng = random.Random(f"{seed}-{number}")
    while deaths.forced < forced:
        case = rng.choice(cases)
        await clients.one(case, {**case.body, "stream": rng.random() < 0.6}, rng, number=number)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--forced", type=int, default=FORCED, help="migrations")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-migration-") as directory:
        metrics = uvloop.run(run(Path(directory), args.forced, args.seed))
    report.show(metrics)
    report.write(args.out, "migration", metrics, "torch", "grpcio")


if __name__ == "__main__":
    main()
