"""Changes the roles of pods under load, and compares each answer with that of one undisturbed engine.

    .venv/bin/python benchmarks/reliability/role_switch.py --out benchmarks/results/role_switch.json

A gateway, two prefill pods and two decode pods with a tiny random model run in one process, over loopback and real
gRPC. A pod gets another role and, a moment later, its first role back, by the same signed call as `baton role`, while
clients send streams and whole answers, greedy and seeded, with one or two samples. Every token is one word, so a wrong
token changes the text.

- switches: changes of a role.
- failed: answers with an error. mismatches: answers with a wrong text. answers: right answers.
- moved: requests that a pod gave up. resumed_sequences: samples that the gateway continued on another pod, by outcome.
- ready_s_p99: seconds from the end of a pod's last request until the pod was ready in the new role.
- drained_s_p99: seconds from the call until that request had left.
- noticed_s_p50, noticed_s_p99: seconds from the answer to the call until the gateway used the pod in the new role.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import uvloop

from benchmarks.support import report
from common.errors import Unavailable
from common.settings.process import DEFAULT_SECRET
from common.types import Role
from fleet.roles import PodAddress, RoleSwitch, operator_signer, switch_role
from loadtest.slo import percentile
from pod.runtime import PodRuntime
from tests.rigs.chaos.catalogue import MAX_LEN, MODEL, Case, catalogue, write_model
from tests.rigs.chaos.client import ChaosClients, Gateway, Verdict
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.harness import Cluster, Pod
from tests.rigs.waiting import until

SWITCHES = 20  #: Default number of changes of a role.
CLIENTS = 12  #: Each has one request at a time.
DRAIN_S = 10.0
TRIES = 5
PAUSE_S = (0.2, 0.8)  #: Between two changes.
PODS = {"served_name": MODEL, "load_format": "dummy", "max_model_len": MAX_LEN, "chunk_tokens": 64, "num_blocks": 1024}


class Switches:
    """Changes roles, and measures."""

    def __init__(self, gw: Rig, rng: random.Random) -> None:
        self.done: list[RoleSwitch] = []
        self.noticed_s: list[float] = []
        self.over = False
        self._gw, self._rng = gw, rng
        self._signer = operator_signer(DEFAULT_SECRET, "benchmark")

    async def run(self, pods: Sequence[Pod], number: int) -> None:
        """Gives one pod after the other another role and its first role back."""
        try:
            while len(self.done) < number:
                pod = pods[len(self.done) // 2 % len(pods)].runtime
                first = pod.config.role
                other = self._rng.choice([role for role in (Role.PREFILL, Role.DECODE, Role.BOTH) if role is not first])
                for role in (other, first):
                    await asyncio.sleep(self._rng.uniform(*PAUSE_S))
                    await self._switch(pod, role)
        finally:
            self.over = True

    async def _switch(self, runtime: PodRuntime, role: Role) -> None:
        pod = PodAddress(runtime.name, runtime.address, runtime.role.current, runtime.engine.layout.scope)
        self.done.append(await _patiently(lambda: switch_role(pod, role, self._signer, drain_s=DRAIN_S)))
        answered, seen = time.monotonic(), self._gw.gateway.pod_table.pods[pod.address]
        await until(lambda: seen.state == "ready" and seen.info is not None and seen.info.role is role)
        self.noticed_s.append(time.monotonic() - answered)


async def _patiently(switch: Callable[[], Awaitable[RoleSwitch]]) -> RoleSwitch:
    """Makes the call again if no connection could be made: all processes of the benchmark share one event loop."""
    for _ in range(TRIES - 1):
        try:
            return await switch()
        except Unavailable as error:
            print(f"asked again: {error.message}")
    return await switch()


async def run(directory: Path, number: int, seed: int) -> dict[str, Any]:
    """Sends requests until `number` roles were changed. Returns the metrics."""
    write_model(directory)
    cases = await asyncio.to_thread(catalogue, directory)
    began = time.monotonic()
    async with Cluster.start(directory, prefill=2, decode=2, prefill_config=PODS, decode_config=PODS) as pods:
        addresses = tuple(pod.runtime.address for pod in pods.pods)
        cluster: Any = SimpleNamespace(addresses=addresses, decodes=pods.decodes, all_idle=lambda: True)
        async with rig(cluster, directory, models=(f"{MODEL}={directory}",)) as gw:
            switches = Switches(gw, random.Random(seed))
            async with httpx.AsyncClient(base_url=gw.url, timeout=60) as http:
                clients = ChaosClients([Gateway("gateway", gw.url, http)], cases, key=lambda _: "none")
                load = (_client(clients, cases, switches, seed, n) for n in range(CLIENTS))
                await asyncio.gather(switches.run(pods.pods, number), *load)
            await gw.settled()
            resumed = next(iter(gw.gateway.metrics.resumptions.collect())).samples
    verdicts, done = clients.tally.verdicts, switches.done
    for line in clients.tally.problems:
        print(line)
    return {
        "switches": len(done),
        "failed": verdicts[Verdict.FAILED] + verdicts[Verdict.HANG] + verdicts[Verdict.REFUSED],
        "mismatches": verdicts[Verdict.WRONG],
        "answers": verdicts[Verdict.COMPLETED],
        "moved": sum(switch.moved for switch in done),
        "resumed_sequences": {s.labels["outcome"]: s.value for s in resumed if s.name.endswith("_total")},
        "ready_s_p99": round(percentile([switch.ready_s for switch in done], 0.99), 4),
        "drained_s_p99": round(percentile([switch.drained_s for switch in done], 0.99), 4),
        "noticed_s_p50": round(percentile(switches.noticed_s, 0.5), 4),
        "noticed_s_p99": round(percentile(switches.noticed_s, 0.99), 4),
        "seconds": round(time.monotonic() - began, 1),
    }


async def _client(clients: ChaosClients, cases: Sequence[Case], switches: Switches, seed: int, number: int) -> None:
    """Sends one request after another until all roles were changed."""
    rng = random.Random(f"{seed}-{number}")
    while not switches.over:
        case = rng.choice(cases)
        await clients.one(case, {**case.body, "stream": rng.random() < 0.6}, rng, number=number)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--switches", type=int, default=SWITCHES, help="number of changes of a role")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-role-") as directory:
        metrics = uvloop.run(run(Path(directory), args.switches, args.seed))
    report.show(metrics)
    report.write(args.out, "role_switch", metrics, "torch", "grpcio")


if __name__ == "__main__":
    main()
