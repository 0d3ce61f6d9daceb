"""The planner's process: what it tells the scale adapter, what its metrics say, and the Kubernetes API with faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.errors import Unavailable
from common.settings.process import DEFAULT_SECRET
from common.types import PodLoad, Role
from fleet import planner as planner_module
from fleet import scale as scale_module
from fleet.decision import ActionKind, DemandReading, FleetAction, FleetDecider, FleetLimits, FleetReading, PodReading
from fleet.demand import ReadFleet
from fleet.lease import PlannerLease
from fleet.planner import FleetPlanner, PlannerMetrics
from fleet.roles import PodAddress
from fleet.scale import KubernetesScale
from prefix_index.store import PodRecord, PodStatus

LIMITS = FleetLimits(start_s=20.0, max_prefill=3)
LOADS = {Role.PREFILL: PodLoad(prefill_rate=40_000.0), Role.DECODE: PodLoad(step_s=0.006, step_slope_s=0.0004)}
WORKLOADS = {Role.PREFILL: "baton-prefill", Role.DECODE: "baton-decode"}


@dataclass
class FakeReader:
    """Readings of a load of prompts of 4,000 tokens."""

    roles: dict[str, Role]
    rate: float = 1.0  # Requests per second
    blind: bool = False  # No gateway reports
    arrivals: float = 0.0
    at: float = 0.0

    async def read(self, now: float) -> ReadFleet:
        self.arrivals += self.rate * (now - self.at)
        self.at, n = now, self.arrivals
        pods = tuple(PodReading(name, role, LOADS[role], 0.0, 3000, 16) for name, role in self.roles.items())
        demand = None if self.blind else DemandReading(n, n * 4000, n * 4000, n * 300, n, n, 0, 0.5)
        records = {
            name: PodStatus(PodRecord(name, 1, "127.0.0.1:1", role, "m", "s", "f" * 32, 16, 512, 64), LOADS[role])
            for name, role in self.roles.items()
        }
        return ReadFleet(FleetReading(now, pods, demand), records)


@dataclass
class FakeScale:
    """An adapter whose pods never come to life."""

    replicas: dict[Role, int]
    calls: list[str] = field(default_factory=list)

    async def pending(self, pods: Any) -> Mapping[Role, int]:
        have = {role: sum(name.startswith(role.value) for name in pods) for role in self.replicas}
        return {role: max(0, number - have[role]) for role, number in self.replicas.items()}

    async def add(self, role: Role, number: int) -> None:
        self.replicas[role] += number

    async def remove(self, pod: str, role: Role) -> None:
        self.calls.append(pod)

    async def withdraw(self, role: Role) -> None:
        self.calls.append("withdraw")
        self.replicas[role] -= 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def planner_of(reader: FakeReader, scale: FakeScale, clock: Clock, limits: FleetLimits = LIMITS) -> FleetPlanner:
    return FleetPlanner(limits, reader, scale, PlannerMetrics(), secret=DEFAULT_SECRET, clock=clock)  # type: ignore[arg-type]


async def steps(planner: FleetPlanner, clock: Clock, number: int) -> list[FleetAction]:
    found = []
    for _ in range(number):
        clock.now += 5.0
        found += await planner.step()
    return [action for action in found if action.kind is not ActionKind.HOLD]


async def test_pods_that_never_start_are_ordered_once_also_by_a_restarted_planner() -> None:
    """Pods for which there is no machine were ordered every 3 * start_s, beyond every limit."""
    reader, clock = FakeReader({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}, rate=25.0), Clock()
    scale = FakeScale({Role.PREFILL: 1, Role.DECODE: 1})
    for _ in range(3):
        await steps(planner_of(reader, scale, clock), clock, 30)
    assert scale.replicas[Role.PREFILL] == LIMITS.max_prefill


async def test_a_pod_that_does_not_serve_is_removed_before_one_that_does() -> None:
    """The planner removed the only pod that served, because one without a machine was counted beside it."""
    reader, clock = FakeReader({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}, rate=15.0), Clock()
    scale = FakeScale({Role.PREFILL: 1, Role.DECODE: 1})
    planner = planner_of(reader, scale, clock)
    await steps(planner, clock, 8)
    assert scale.replicas[Role.PREFILL] > 1
    reader.rate = 0.5
    await steps(planner, clock, 60)
    assert set(scale.calls) == {"withdraw"}
    assert scale.replicas[Role.PREFILL] == 1


async def test_the_time_of_the_last_complete_data_stands_still_without_data() -> None:
    reader, clock = FakeReader({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}), Clock()
    planner = planner_of(reader, FakeScale({Role.PREFILL: 1, Role.DECODE: 1}), clock)
    reader.blind = True
    await steps(planner, clock, 2)
    metric = planner._metrics.read_at.collect()
    assert next(iter(metric)).samples[0].value == 0
    reader.blind = False
    await steps(planner, clock, 1)
    assert next(iter(planner._metrics.read_at.collect())).samples[0].value > 0


async def test_decisions_go_on_while_a_pod_drains_for_its_new_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner was blind for the 30 s of a drain, and added no pod although the load grew."""
    asked: list[str] = []

    async def drains(pod: PodAddress, *_args: Any, **_named: Any) -> None:
        asked.append(pod.name)
        await asyncio.sleep(3600)

    monkeypatch.setattr(planner_module, "switch_role", drains)
    clock, decodes = Clock(), {f"decode-{i}": Role.DECODE for i in range(8)}
    reader = FakeReader({"prefill-0": Role.PREFILL, **decodes}, rate=15.0)
    scale = FakeScale({Role.PREFILL: 1, Role.DECODE: 8})
    planner = planner_of(reader, scale, clock)
    running = asyncio.create_task(planner.run(0.005))
    try:
        async with asyncio.timeout(5.0):
            while not asked:
                clock.now += 5.0
                await asyncio.sleep(0.01)
            reader.rate = 60.0
            while scale.replicas[Role.PREFILL] == 1:
                clock.now += 5.0
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
    assert len(asked) == len(set(asked)), "a pod that changes its role is not asked again"


def test_a_planner_of_roles_counts_no_pods_that_no_one_starts() -> None:
    """Pods that were only printed as started kept back the role switch that was possible."""
    decider, reader = FleetDecider(replace(LIMITS, scales=False)), FakeReader({})
    reader.roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}

    async def run() -> list[FleetAction]:
        found = []
        for at in range(5, 100, 5):
            found += decider.decide((await reader.read(float(at))).reading)
        return found

    reader.rate = 25.0
    assert {action.kind for action in asyncio.run(run())} == {ActionKind.HOLD}


async def test_of_two_planners_one_acts(tmp_path: Path) -> None:
    """Two planners ordered the same pods twice, and undid each other's decisions."""
    valkey, clock = EmbeddedValkey(0, tmp_path), Clock()
    url = await valkey.start()
    leases = [PlannerLease(url, "m", name, 5.0) for name in ("planner a", "planner b")]
    try:
        reader = FakeReader({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}, rate=25.0)
        scale = FakeScale({Role.PREFILL: 1, Role.DECODE: 1})
        first, second = (
            FleetPlanner(LIMITS, reader, scale, PlannerMetrics(), secret=DEFAULT_SECRET, clock=clock, lease=lease)  # type: ignore[arg-type]
            for lease in leases
        )
        for _ in range(2):
            assert await first.step()
            assert await second.step() == []
        await leases[0].close()
        assert await second.step()
        leases[0] = PlannerLease(url, "m", "planner a", 5.0)
        assert await leases[0].hold() == "planner b"
        await valkey.stop()
        with pytest.raises(Unavailable, match="lease"):
            await second.step()
    finally:
        for lease in leases:
            await lease.close()
        await valkey.stop()


# -- Kubernetes


@dataclass
class FakeApi:
    """The scales of Deployments, over HTTP."""

    replicas: dict[str, int]
    version: int = 7
    body: bytes | None = None  # Sent in place of each answer
    delay_s: float = 0.0
    meddles: bool = False  # Another client changes each scale after it was read
    patched: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        method, path = head.split()[:2]
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")), 0)
        sent = json.loads(await reader.readexactly(length)) if length else None
        status, answer = self.answer(method, path, sent)
        body = json.dumps(answer).encode() if self.body is None else self.body
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        try:
            for byte in body:
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(bytes((byte,)))
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    def answer(self, method: str, path: str, sent: Any) -> tuple[int, object]:
        workload = path.split("/")[-2]
        if method == "patch":
            known = (sent.get("metadata") or {}).get("resourceVersion")
            if workload in self.replicas and known not in (None, str(self.version)):
                return 409, {"kind": "Status", "reason": "Conflict"}
            self.patched.append((path, sent))
            if workload in self.replicas:
                self.replicas[workload] = sent["spec"]["replicas"]
            return 200, {}
        scale = {"metadata": {"resourceVersion": str(self.version)}, "spec": {"replicas": self.replicas[workload]}}
        if self.meddles:
            self.version += 1
        return 200, scale


@asynccontextmanager
async def kubernetes(
    tmp_path: Path, workloads: Mapping[Role, str] = WORKLOADS
) -> AsyncIterator[tuple[FakeApi, KubernetesScale]]:
    for name, text in (("token", "t"), ("namespace", "ns")):
        (tmp_path / name).write_text(text)
    api = FakeApi(dict.fromkeys(workloads.values(), 2))
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield api, KubernetesScale(f"http://{host}:{port}", tmp_path, workloads)
    finally:
        server.close()


async def test_replicas_are_changed_and_pods_marked(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as (api, scale):
        await scale.add(Role.PREFILL, 2)
        await scale.remove("baton-decode-abc", Role.PREFILL)
        await scale.withdraw(Role.PREFILL)
        assert api.replicas == {"baton-prefill": 3, "baton-decode": 1}
        assert any(path.endswith("/pods/baton-decode-abc") for path, _ in api.patched)
        assert await scale.pending(["baton-prefill-x", "baton-decode-abc"]) == {Role.PREFILL: 2, Role.DECODE: 0}


async def test_a_deployment_whose_name_begins_with_another_is_told_apart(tmp_path: Path) -> None:
    async with kubernetes(tmp_path, {Role.PREFILL: "baton", Role.DECODE: "baton-decode"}) as (api, scale):
        await scale.remove("baton-decode-abc", Role.DECODE)
        assert api.replicas == {"baton": 2, "baton-decode": 1}


async def test_a_change_of_another_client_is_not_overwritten(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as (api, scale):
        api.meddles = True
        with pytest.raises(Unavailable, match="409"):
            await scale.add(Role.PREFILL, 1)
        assert api.replicas["baton-prefill"] == 2


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b'{"spec": null}', b'{"spec": {"replicas": "x"}}'])
async def test_an_answer_that_is_no_scale_is_an_error_in_words(tmp_path: Path, body: bytes) -> None:
    async with kubernetes(tmp_path) as (api, scale):
        api.body = body
        with pytest.raises(Unavailable):
            await scale.add(Role.PREFILL, 1)
        assert not api.patched


async def test_a_slow_answer_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_module, "CALL_S", 0.2)
    async with kubernetes(tmp_path) as (api, scale):
        api.delay_s = 0.15  # each byte comes in time, the answer does not
        with pytest.raises(Unavailable, match="does not answer"):
            await asyncio.wait_for(scale.add(Role.PREFILL, 1), 5.0)


async def test_a_missing_token_is_an_error_in_words(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as (_, scale):
        (tmp_path / "token").unlink()
        with pytest.raises(Unavailable, match="no readable file token"):
            await scale.add(Role.PREFILL, 1)
