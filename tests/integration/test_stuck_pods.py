"""Real pods with a stuck loop: Info names the loop, and the pod refuses work until it recovers or ends.

Answers continue on other pods.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.auth import GATEWAY, Signer
from common.errors import Unavailable
from common.process.lifecycle import Lifecycle, LifecycleState
from common.process.watchdog import EXIT_STUCK
from common.rpc import open_channel
from common.settings.pod import PodConfig
from common.settings.process import DEFAULT_SECRET
from common.types import Role, ValidRequest
from decode_service.servicer import DecodeServicer
from engine.engine import Engine
from engine.llm import LLM
from gateway.dispatch.dispatch import Dispatch
from gateway.pods import pod as gateway_pod
from gateway.pods.table import PodTable
from gateway.routing.router import Router
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from kv_transfer.sender import write_limits
from pod.monitoring.rates import PodRates
from pod.runtime import PodRuntime
from tests.rigs.engine.blocked_step import BlockedStep, blocked_steps
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, Cluster, Pod, expected, prompt_of, request
from tests.rigs.waiting import until

WATCHED = {"stuck_step_s": 1.0}
LOCAL = {"local_prefill": "512"}


@pytest.fixture(autouse=True)
def _usual_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets short rates: on a busy machine 20 times a measured step may exceed the short bound of these tests."""
    monkeypatch.setattr(PodRates, "predicted_step_s", lambda *_: 0.001)
    monkeypatch.setattr(PodRates, "decode_fit", lambda _: (0.001, 0.0001))
    monkeypatch.setattr(gateway_pod, "INFO_PERIOD_S", 0.05)


def watch(pod: Pod) -> list[int]:
    """Starts the pod's watchdog. Returns a list of the exit codes with which it would have ended the process."""
    exits: list[int] = []
    pod.runtime.watch.watchdog.end = exits.append
    pod.runtime.watch.start()
    return exits


async def health(pod: Pod) -> int:
    """Returns the status of the pod's health check."""
    async with open_channel(pod.runtime.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def test_a_stuck_step_makes_the_pod_unready_until_it_ends(model_dir: Path, llm: LLM) -> None:
    async with Cluster.start(model_dir, prefill=0, decode_config={**WATCHED, **LOCAL, "stuck_step_s": 2.0}) as cluster:
        pod = cluster.decode
        exits = watch(pod)
        r = request(prompt_of(9), 5)
        try:
            assert (await pod.info()).stuck == ""
            with blocked_steps(pod.runtime.engine) as blocked:
                task = asyncio.create_task(cluster.generate(r))
                await until(lambda: blocked.entered.is_set())
                await until(lambda: bool(pod.runtime.watch.stuck))
                info = await pod.info()
                assert (info.ready, info.stuck) == (False, "the engine is stuck")
                assert info.step_bound_s == 2.0
                await until(lambda: _gives(health(pod), health_pb2.HealthCheckResponse.NOT_SERVING))
                with pytest.raises(Unavailable, match="the engine is stuck on pod"):
                    await cluster.reserve(request(prompt_of(5)))
                await until(lambda: pod.counted("stuck_loops") == {("engine",): 1.0})  # counted after the stacks
                steps = info.activity.steps
            assert (await task).ids == expected(llm, r)
            await until(lambda: _is_ready(pod))
            assert await health(pod) == health_pb2.HealthCheckResponse.SERVING
            assert (await pod.info()).activity.steps >= steps + 5
            assert exits == []
        finally:
            pod.runtime.watch.stop()


async def _gives(call: Any, wanted: object) -> bool:
    return bool(await call == wanted)


async def _is_ready(pod: Pod) -> bool:
    return bool((await pod.info()).ready)


async def test_a_step_that_never_ends_ends_the_process(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster.start(model_dir, prefill=0, decode_config={**WATCHED, **LOCAL}) as cluster:
        exits = watch(cluster.decode)
        try:
            with blocked_steps(cluster.decode.runtime.engine):
                task = asyncio.create_task(cluster.generate(request(prompt_of(9), 5)))
                await until(lambda: bool(exits))
            assert exits[0] == EXIT_STUCK
            await task
        finally:
            cluster.decode.runtime.watch.stop()
    assert "thread engine:\n" in caplog.text
    assert "in _blocking_launch" in caplog.text
    assert "ending this process with exit code 6" in caplog.text


async def test_a_stuck_transfer_thread_is_found(model_dir: Path) -> None:
    async with Cluster.start(model_dir, prefill=0, decode_config=WATCHED) as cluster:
        exits, release = watch(cluster.decode), threading.Event()
        try:
            cluster.decode.runtime.transfer_node._thread.submit(lambda: release.wait(60))
            await until(lambda: cluster.decode.runtime.watch.stuck == "the transfer thread is stuck")
            assert not (await cluster.decode.info()).ready
            await until(lambda: bool(exits))
        finally:
            release.set()
            cluster.decode.runtime.watch.stop()


async def test_the_warm_up_has_no_bound(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pod runs as in its process, so the watchdog starts when the pod is ready."""
    warm_up = Engine.warm_up

    def slow(engine: Engine) -> None:
        time.sleep(3.0)  # three bounds
        warm_up(engine)

    monkeypatch.setattr(Engine, "warm_up", slow)
    monkeypatch.setattr(Lifecycle, "install_signals", lambda _: None)
    sizes: dict[str, Any] = {"block_size": BLOCK, "max_model_len": MAX_LEN, "chunk_tokens": CHUNK, "threads": 1}
    config = PodConfig(role=Role.BOTH, model=str(model_dir), device="cpu", kv_memory=1 << 20, **sizes, **WATCHED)
    runtime = await PodRuntime.create(config, backend=lambda _: LoopbackBackend(LoopbackFabric()))
    exits: list[int] = []
    runtime.watch.watchdog.end = exits.append
    running = asyncio.create_task(runtime.run(DecodeServicer(runtime)))
    await until(lambda: runtime.lifecycle.state is LifecycleState.READY)
    assert "stuck" not in caplog.text
    runtime.engine_loop.call(runtime._warm_up)  # the same work is too long for a pod that is ready
    await until(lambda: bool(exits))
    await until(lambda: not runtime.watch.stuck)
    runtime.lifecycle.begin_drain("test")
    await running


@asynccontextmanager
async def gateway(cluster: Cluster) -> AsyncIterator[tuple[Router, PodTable, GatewayMetrics]]:
    addresses = tuple(pod.runtime.address for pod in cluster.pods)
    signer = Signer(DEFAULT_SECRET.encode(), GATEWAY, "g", 1)
    table = PodTable(addresses, None, signer=signer, model="tiny", stuck_s=2.0)
    metrics = GatewayMetrics()
    router = Router(table, metrics)
    await table.start()
    try:
        await until(lambda: len(table.decode_pods()) == len(cluster.decodes))
        yield router, table, metrics
    finally:
        await router.stop()
        await table.stop()


async def answer(router: Router, valid: ValidRequest) -> list[int]:
    """Returns the token ids of the answer."""
    timeline = Timeline(valid.request_id, None, "test")
    dispatch = Dispatch(router, valid, deadline=time.monotonic() + 60, timeline=timeline)
    ids: list[int] = []
    try:
        while True:
            delta = await dispatch.next()
            ids += [token.id for token in delta.tokens]
            if delta.finish is not None:
                return ids
    finally:
        dispatch.close()


async def first_blocked(blocked: Sequence[BlockedStep]) -> int:
    """Waits until one of the engines is blocked, and releases the others. Returns the number of the blocked one."""
    await until(lambda: any(one.entered.is_set() for one in blocked))
    (victim,) = (number for number, one in enumerate(blocked) if one.entered.is_set())
    for number, one in enumerate(blocked):
        if number != victim:
            one.release()
    return victim


@pytest.mark.parametrize("watched", [False, True], ids=["seen by the gateway", "said by the pod"])
async def test_an_answer_continues_when_its_decode_pod_is_stuck(model_dir: Path, llm: LLM, watched: bool) -> None:
    """Without its watchdog the pod says nothing, and the gateway sees that no step ends."""
    async with (
        Cluster.start(model_dir, prefill=0, decode=2, role=Role.BOTH, decode_config={"stuck_step_s": 2.0}) as cluster,
        gateway(cluster) as (router, table, metrics),
    ):
        if watched:
            for pod in cluster.decodes:
                watch(pod)
        with (
            blocked_steps(cluster.decodes[0].runtime.engine, after=6) as first,
            blocked_steps(cluster.decodes[1].runtime.engine, after=6) as second,
        ):
            r = request(prompt_of(9), 20)
            task = asyncio.create_task(answer(router, r))
            victim = cluster.decodes[await first_blocked([first, second])]
            assert await task == expected(llm, r)
            assert metrics.stalled.labels("decode")._value.get() == 1
            assert table.pods[victim.runtime.address].state == "stuck"
        # The blocked step ends, and the abandoned sequence with it.
        await victim.settled()
        await until(lambda: table.pods[victim.runtime.address].state == "ready")
        for pod in cluster.decodes:
            pod.runtime.watch.stop()


async def test_an_answer_continues_when_its_prefill_pod_is_stuck(model_dir: Path, llm: LLM) -> None:
    config = {"stuck_step_s": 2.0, "local_prefill": "off"}
    async with (
        Cluster.start(model_dir, prefill=2, prefill_config={"stuck_step_s": 2.0}, decode_config=config) as cluster,
        gateway(cluster) as (router, table, metrics),
    ):
        with (
            blocked_steps(cluster.prefills[0].runtime.engine, after=1) as first,
            blocked_steps(cluster.prefills[1].runtime.engine, after=1) as second,
        ):
            r = request(prompt_of(3 * CHUNK), 6)
            task = asyncio.create_task(answer(router, r))
            victim = cluster.prefills[await first_blocked([first, second])]
            assert await task == expected(llm, r)
            assert metrics.stalled.labels("prefill")._value.get() == 1
            assert table.pods[victim.runtime.address].state == "stuck"
        await victim.settled()
        await until(lambda: table.pods[victim.runtime.address].state == "ready")


async def test_an_answer_moves_when_the_writes_of_its_hand_off_do_not_end(
    model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pods answer calls and do steps, so only the sender can see it."""
    monkeypatch.setattr(write_limits, "WRITE_SILENCE_S", 1.0)
    async with (
        Cluster.start(model_dir, prefill=1, decode=2, decode_config={"local_prefill": "off"}, check=False) as cluster,
        gateway(cluster) as (router, _, _),
    ):
        before = [request(prompt_of(9, seed=seed), 6) for seed in range(6)]
        await asyncio.gather(*(answer(router, r) for r in before))  # connects all pairs
        victim = cluster.decodes[0]
        cluster.fabric.freeze(victim.agent)
        try:
            after = [request(prompt_of(9, seed=10 + seed), 6) for seed in range(6)]
            assert await asyncio.gather(*(answer(router, r) for r in after)) == [expected(llm, r) for r in after]
        finally:
            cluster.fabric.thaw(victim.agent)
