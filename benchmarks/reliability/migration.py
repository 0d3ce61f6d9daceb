"""Forces migrations of running answers, and compares each answer with that of one undisturbed engine.

    .venv/bin/python benchmarks/reliability/migration.py --out benchmarks/results/migration.json

A gateway, two prefill pods and three decode pods with a tiny random model run in one process, over loopback and real
gRPC. In a migration an answer loses its decode pod and continues on another one. The benchmark forces it after a random
number of tokens: it reports to the gateway that the pod's token stream has ended. The pod goes on sending until the
gateway tells it to stop. The next pod loses the answer too with a probability of AGAIN. Requests are streams and whole
answers, greedy and seeded, with one or two samples. Every token is one word, so a wrong token changes the text.

- forced: migrations. on_tokens: the same by the length of the answer at that moment.
- answers, mismatches, failed: right answers, answers with a wrong text, answers with an error.
- resumed_sequences: samples that the gateway continued on another pod, by outcome.
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

FORCED = 1000  #: Default number of migrations.
CLIENTS = 16  #: Each has one request at a time.
AGAIN = 0.7  #: Probability that a second pod loses an answer too.
LOSE_AFTER = (1, 24)  #: A pod loses an answer after at least the first and less than the second number of tokens.
PODS = {"served_name": MODEL, "load_format": "dummy", "max_model_len": MAX_LEN, "chunk_tokens": 64, "num_blocks": 1024}
LENGTHS = (1, 4, 16, 1000)  #: Upper ends of the ranges of lengths in `on_tokens`.


@dataclass
class Migrations:
    """Decides which answers lose their pod, and counts the migrations."""

    rng: random.Random
    forced: int = 0  #: Migrations so far.
    on_tokens: Counter[int] = field(default_factory=Counter)  #: Migrations by range of length, named by its upper end.

    def attach(self, pod: Pod) -> None:
        """Puts a LosingSink before the sink of each answer that is to lose the pod."""
        subscribe = pod.subscribe

        def losing(request_id: str, sink: TokenSink) -> None:
            attempt = int(request_id.rpartition("-")[2].partition(".")[0])
            # A request has three attempts, so the pod of the third attempt keeps the answer.
            loses = attempt == 1 or (attempt == 2 and self.rng.random() < AGAIN)
            subscribe(request_id, LosingSink(self, sink, self.rng.randrange(*LOSE_AFTER)) if loses else sink)

        pod.subscribe = losing  # type: ignore[method-assign]


class LosingSink:
    """Passes the deltas of one request on. After `after` tokens it reports that the token stream is lost."""

    def __init__(self, migrations: Migrations, sink: TokenSink, after: int) -> None:
        self._migrations, self._sink, self._after = migrations, sink, after
        self._tokens, self._ended, self._lost = 0, 0, False

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        if self._lost:
            return
        self._sink.on_delta(delta)
        self._tokens += len(delta.tokens)
        if self._tokens >= self._after and not delta.finish_reason:
            self._lost = True
            self._migrations.forced += 1
            self._migrations.on_tokens[next(n for n in LENGTHS if self._tokens <= n)] += 1
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
    migrations, began = Migrations(random.Random(seed)), time.monotonic()
    async with Cluster.start(directory, prefill=2, decode=3, prefill_config=PODS, decode_config=PODS) as pods:
        addresses = tuple(pod.runtime.address for pod in pods.pods)
        cluster: Any = SimpleNamespace(addresses=addresses, decodes=pods.decodes, all_idle=lambda: True)
        async with rig(cluster, directory, models=(f"{MODEL}={directory}",)) as gw:
            for pod in gw.gateway.pod_table.pods.values():
                migrations.attach(pod)
            async with httpx.AsyncClient(base_url=gw.url, timeout=60) as http:
                clients = ChaosClients([Gateway("gateway", gw.url, http)], cases, key=lambda _: "none")
                await asyncio.gather(*(_client(clients, cases, migrations, forced, seed, n) for n in range(CLIENTS)))
            await gw.settled()
            resumed = next(iter(gw.gateway.metrics.resumptions.collect())).samples
    verdicts, seconds = clients.tally.verdicts, time.monotonic() - began
    for line in clients.tally.problems:
        print(line)
    return {
        "forced": migrations.forced,
        "mismatches": verdicts[Verdict.WRONG],
        "failed": verdicts[Verdict.FAILED] + verdicts[Verdict.HANG] + verdicts[Verdict.REFUSED],
        "answers": verdicts[Verdict.COMPLETED],
        "resumed_sequences": {s.labels["outcome"]: s.value for s in resumed if s.name.endswith("_total")},
        "on_tokens": {f"<={n}": migrations.on_tokens[n] for n in LENGTHS},
        "seconds": round(seconds, 1),
    }


async def _client(
    clients: ChaosClients, cases: Sequence[Case], migrations: Migrations, forced: int, seed: int, number: int
) -> None:
    """Sends one request after another until enough migrations have happened."""
    rng = random.Random(f"{seed}-{number}")
    while migrations.forced < forced:
        case = rng.choice(cases)
        await clients.one(case, {**case.body, "stream": rng.random() < 0.6}, rng, number=number)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--forced", type=int, default=FORCED, help="number of migrations")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-migration-") as directory:
        metrics = uvloop.run(run(Path(directory), args.forced, args.seed))
    report.show(metrics)
    report.write(args.out, "migration", metrics, "torch", "grpcio")


if __name__ == "__main__":
    main()
