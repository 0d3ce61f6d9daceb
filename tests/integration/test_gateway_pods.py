"""Pods that restart, freeze, answer late or do not fit: the gateway uses only those that can serve its model."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common import rpc
from common.errors import (
    Unavailable,
)
from common.types import Role
from gateway.pods import pod as gateway_pod
from gateway.pods.fitness import BreakerState
from tests.rigs.gateway.gateway_rig import MODEL, Rig, booked, rig, right_text
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

ROOT = Path(__file__).parents[2]


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2, decode=2) as c:
        yield c


async def test_a_restarted_pod_on_the_same_port_is_recognised(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    restarted = [await pod.restart() for pod in (*cluster.prefills, *cluster.decodes)]
    cluster.prefills, cluster.decodes = restarted[:2], restarted[2:]
    await until(lambda: len(gw.gateway.pod_table.decode_pods()) == 2 and len(gw.gateway.pod_table.pods) == 4)
    assert all(p.info and p.info.generation == 2 for p in gw.gateway.pod_table.pods.values() if p.can_decode)
    assert await right_text(gw) == expected


async def test_readiness_follows_the_pods(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=1, decode=1) as cluster, rig(cluster, smollm2_dir) as gw:
        cluster.prefills[0].draining = True
        await until(lambda: not gw.gateway.ready)
        assert (await gw.http.get("/ready")).status_code == 503
        assert (await gw.http.get("/live")).status_code == 200
        response = await gw.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        cluster.prefills[0].draining = False
        await until(lambda: gw.gateway.ready)
        assert (await gw.http.get("/health")).status_code == 200


async def test_pods_of_other_layouts_are_never_paired(smollm2_dir: Path) -> None:
    from dataclasses import replace

    async with fake_cluster(prefill=1, decode=1) as cluster:
        cluster.prefills[0].layout = replace(cluster.prefills[0].layout, revision="other")
        async with rig(cluster, smollm2_dir, wait=False) as gw:
            await until(lambda: all(p.alive for p in gw.gateway.pod_table.pods.values()))
            await asyncio.sleep(0.3)
            assert not gw.gateway.ready


async def test_a_pod_of_role_both_needs_no_prefill_pod(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=0, decode=0, both=1) as cluster, rig(cluster, smollm2_dir) as gw:
        cluster.decodes[0].cached_tokens = 32
        body = (await gw.complete(max_tokens=4)).json()
        assert body["usage"]["completion_tokens"] == 4
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert cluster.decodes[0].role is Role.BOTH
        await gw.settled()


async def test_stop_ends_while_every_pod_is_being_rechecked(gw: Rig) -> None:
    await asyncio.sleep(0.1)
    for pod in gw.gateway.pod_table.pods.values():
        pod.recheck()
    async with asyncio.timeout(30):
        await gw.gateway.pod_table.stop()


async def test_pods_of_another_model_or_protocol_are_not_used_and_logged_once(
    smollm2_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster(prefill=3, decode=3) as cluster:
        for pods in (cluster.prefills, cluster.decodes):
            pods[0].served_name, pods[1].protocol_version, pods[2].served_name = "other", 2, MODEL
        with caplog.at_level(logging.WARNING, "gateway.pods.pod"):
            async with rig(cluster, smollm2_dir, wait=False) as gw:

                def lines() -> list[str]:
                    return [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]

                await until(lambda: gw.gateway.ready and len(lines()) >= 4)
                await asyncio.sleep(1.2)  # several looks
                assert [p.address for p in gw.gateway.pod_table.decode_pods()] == [cluster.decodes[2].address]
                assert {(await gw.complete(prompt=f"p{i}")).status_code for i in range(5)} == {200}
                said = lines()
                assert len(said) == 4
                assert sum("serves 'other'; expected 'smol'" in line for line in said) == 2
                assert sum("protocol version is 2; expected 1" in line for line in said) == 2
                cluster.decodes[0].served_name = MODEL  # it came back as another
                await until(lambda: len(gw.gateway.pod_table.decode_pods()) == 2)
                await gw.settled()


async def test_a_pod_that_answers_late_for_a_while_is_busy_and_not_gone(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = cluster.decodes[0]
    known = gw.gateway.pod_table.pods[pod.address]
    monkeypatch.setattr(gateway_pod, "SILENCE_S", 1000.0)
    monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 0.05)
    pod.faults.info_delay_s = 30.0
    asked = pod.seen.infos
    await until(lambda: pod.seen.infos >= asked + 3)
    assert known.alive
    monkeypatch.setattr(gateway_pod, "SILENCE_S", 0.0)
    await until(lambda: not known.alive)
    monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 1.0)
    pod.faults.info_delay_s = 0.0
    await until(lambda: known.alive)


async def test_a_gateway_that_was_frozen_does_not_take_its_pods_for_gone(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_pod, "SILENCE_S", 3.0)
    monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 0.5)
    pods, known = [*cluster.prefills, *cluster.decodes], gw.gateway.pod_table.pods
    for pod in pods:
        pod.faults.info_delay_s = 0.3
        asked = pod.seen.infos
        await until(lambda pod=pod, asked=asked: pod.seen.infos > asked)  # type: ignore[misc]
    time.sleep(3.5)  # noqa: ASYNC251 - the event loop stands still with a call in flight, as after SIGSTOP
    for pod in pods:
        pod.faults.info_delay_s = 0.0
    answers = {pod.address: known[pod.address].last_answer_at for pod in pods}
    while any(known[address].last_answer_at == at for address, at in answers.items()):
        assert all(known[pod.address].alive for pod in pods)
        await asyncio.sleep(0.01)


def received(gw: Rig) -> int:
    """Returns the number of output tokens that the running requests have."""
    return sum(choice.usage.completion for r in gw.gateway._requests.values() for choice in r.choices)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
async def test_a_frozen_pod_is_detected_by_the_keepalive_of_its_channel(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """The pod freezes with a request. The keepalive is shorter than in production, for a short test."""
    times = {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 1_500, "grpc.http2.ping_timeout_ms": 1_500}
    options = tuple((key, times.get(key, value)) for key, value in rpc._CHANNEL_OPTIONS)
    monkeypatch.setattr(rpc, "_CHANNEL_OPTIONS", options)
    lone = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.rigs.pods.lone_pod", role.value), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert lone.stdout is not None
        address = (await lone.stdout.readline()).decode().strip()
        async with fake_cluster() as cluster:
            well = cluster.prefills[0]
            well.draining = True
            async with rig(cluster, smollm2_dir, pods=(address, *cluster.addresses), wait=False) as gw:
                pods = gw.gateway.pod_table.pods
                await until(lambda: gw.gateway.ready)
                task = asyncio.create_task(gw.complete())
                await until(lambda: booked(pods[address]) > 0)
                if role is Role.BOTH:  # all the tokens that it ever sends
                    await until(lambda: received(gw) >= 2)
                else:  # it has the prompt
                    await asyncio.sleep(0.5)
                lone.send_signal(signal.SIGSTOP)
                well.draining = False
                answer = await task
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] == 16
                await gw.settled()
    finally:
        lone.kill()
        await lone.wait()


async def test_a_pod_that_fails_gets_only_probes_until_it_works_again(gw: Rig, cluster: FakeCluster) -> None:
    bad = cluster.decodes[0]
    expected = await right_text(gw)
    bad.faults.reserve_error = Unavailable("the GPU is broken")
    table = gw.gateway.pod_table
    view = next(pod.view for pod in table.pods.values() if pod.name == bad.name)
    assert view is not None
    for _ in range(40):
        assert (await gw.complete()).json()["choices"][0]["text"] == expected
    assert view.breaker.state(time.monotonic()) is not BreakerState.CLOSED
    assert 1.0 in [
        n for labels, n in table.count_breakers() if labels[1:] in (("decode", "open"), ("decode", "half_open"))
    ]
    bad.faults.reserve_error = None

    async def closes() -> bool:
        await gw.complete()
        return view.breaker.state(time.monotonic()) is BreakerState.CLOSED

    deadline = time.monotonic() + 20
    while not await closes():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
