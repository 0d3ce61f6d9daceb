"""Pods that refuse, die, stall and repeat themselves: every request ends with its answer or a clear error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from common.types import Role
from tests.fake_pods import FakeCluster, fake_cluster
from tests.gateway_rig import MODEL, Rig, rig, until


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2, decode=2) as c:
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r
        await r.settled()


async def right_text(gw: Rig) -> str:
    """The answer of a healthy cluster."""
    return str((await gw.complete()).json()["choices"][0]["text"])


def retries(gw: Rig) -> float:
    samples = [s for m in gw.gateway.metrics.retries.collect() for s in m.samples if s.name.endswith("_total")]
    return sum(s.value for s in samples)


async def test_a_full_decode_pod_sends_the_request_to_the_other(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    for pod in cluster.decodes:
        pod.faults.reject = 1
        assert (await gw.complete()).json()["choices"][0]["text"] == expected
        pod.faults.reject = 0
    assert retries(gw) == 0


async def test_all_full_is_429_with_retry_after_and_without_prefill(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        pod.faults.reject = 100
    for stream in (False, True):
        response = await gw.complete(stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert response.json()["error"]["type"] == "rate_limit_error"
    assert not any(pod.seen.prefilled for pod in cluster.prefills)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [Unavailable("gone"), TransferFailed("broken"), Overloaded("busy"), LayoutMismatch("x"), Unauthenticated("x")],
)
async def test_a_failed_prefill_is_tried_elsewhere(
    gw: Rig, cluster: FakeCluster, stream: bool, error: BatonError
) -> None:
    expected = await right_text(gw)
    for bad in cluster.prefills:
        bad.faults.prefill_error, bad.faults.prefill_errors = error, 1
    if stream:
        status, events = await gw.stream("completions")
        assert status == 200
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected
    else:
        assert (await gw.complete()).json()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("too long for this pod", field="prompt"), 400, "invalid_request_error"),
        (Overloaded("busy", retry_after_s=4), 429, "rate_limit_error"),
        (Unavailable("draining"), 503, "server_error"),
        (LayoutMismatch("layouts differ"), 500, "server_error"),
        (Unauthenticated("wrong secret"), 500, "server_error"),
        (InternalError("stack trace with secrets"), 500, "server_error"),
    ],
)
async def test_what_every_pod_says_becomes_one_clear_error(
    gw: Rig, cluster: FakeCluster, error: BatonError, status: int, kind: str
) -> None:
    for pod in cluster.decodes:
        pod.faults.reserve_error = error
    response = await gw.complete()
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    for pod in cluster.decodes:
        pod.faults.reserve_error = None
    for pod in cluster.prefills:
        pod.faults.prefill_error = error
    response = await gw.complete()
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "secret" not in response.text


@pytest.mark.parametrize("drop", [False, True])
async def test_a_broken_hand_off_is_repeated_for_an_answer_and_an_error_event_for_a_stream(
    gw: Rig, cluster: FakeCluster, drop: bool
) -> None:
    expected = await right_text(gw)

    def break_all() -> None:
        for pod in cluster.prefills:
            pod.faults.drop_prefill_after_first = int(drop)
            pod.faults.hand_off_error = None if drop else TransferFailed("blocks were lost")

    break_all()
    _, events = await gw.stream("completions")
    assert "choices" in events[0]
    assert events[-1]["error"]["type"] == "server_error"
    break_all()
    task = asyncio.create_task(gw.complete())
    await asyncio.sleep(0.03)
    for pod in cluster.prefills:
        pod.faults.hand_off_error = None
    response = await task
    assert response.json()["choices"][0]["text"] == expected


async def test_decode_that_speaks_before_prefill_and_repeats_and_swaps_tokens(gw: Rig, cluster: FakeCluster) -> None:
    expected = (await gw.complete(max_tokens=20)).json()["choices"][0]["text"]
    for pod in (*cluster.decodes, *cluster.prefills):
        pod.faults.duplicate = pod.faults.reorder = pod.faults.decode_before_first = True
    _, events = await gw.stream("completions", max_tokens=20)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected
    assert (await gw.complete(max_tokens=20)).json()["choices"][0]["text"] == expected


async def test_a_gap_that_outlives_the_deadline_ends_the_stream(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        pod.faults.stall_after = 3
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with gw.http.stream("POST", "/v1/completions", json=body, headers={"x-request-timeout": "0.4"}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert "time is over" in lines[-1]
    assert "[DONE]" not in lines[-1]


async def test_death_of_a_decode_pod_before_the_first_token_is_not_noticed(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    for pod in cluster.prefills:
        pod.faults.prefill_delay_s = 0.3
    task = asyncio.create_task(gw.stream("completions"))
    await until(lambda: any(pod.seen.reserved[1:] for pod in cluster.decodes) or len(_all_reserved(cluster)) == 2)
    victim = next(pod for pod in cluster.decodes if any(r is _all_reserved(cluster)[-1] for r in pod.seen.reserved))
    await victim.stop()
    status, events = await task
    assert status == 200
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected


def _all_reserved(cluster: FakeCluster) -> list[object]:
    return [r for pod in cluster.decodes for r in pod.seen.reserved]


async def test_death_of_a_decode_pod_in_mid_stream_is_a_clear_error(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        pod.faults.stall_after = 2
    task = asyncio.create_task(gw.stream("chat"))
    await until(lambda: any(not pod.idle for pod in cluster.decodes))
    await asyncio.sleep(0.2)
    await next(pod for pod in cluster.decodes if not pod.idle).stop()
    _, events = await task
    assert "ended" in events[-1]["error"]["message"]
    await asyncio.sleep(0.1)
    for pod in cluster.decodes:
        pod.faults.stall_after = None
    assert (await gw.complete()).status_code == 200


async def test_an_error_of_one_sequence_and_a_cut_stream_are_retried(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    for pod in cluster.decodes:
        pod.faults.decode_error = Unavailable("preempted for good")
    task = asyncio.create_task(gw.complete())
    await until(lambda: retries(gw) >= 1)
    for pod in cluster.decodes:
        pod.faults.decode_error = None
    assert (await task).json()["choices"][0]["text"] == expected
    for pod in cluster.decodes:
        pod.faults.stall_after = 1
    task = asyncio.create_task(gw.complete())
    await until(lambda: any(not pod.idle for pod in cluster.decodes))
    for pod in cluster.decodes:
        pod.faults.stall_after = None
        pod.cut_streams()
    assert (await task).json()["choices"][0]["text"] == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["reserve", "prefill", "decode"])
async def test_a_client_that_goes_away_frees_everything(
    gw: Rig, cluster: FakeCluster, stream: bool, where: str
) -> None:
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.faults.reserve_delay_s = 5.0 if where == "reserve" else 0.0
        pod.faults.prefill_delay_s = 5.0 if where == "prefill" else 0.0
        pod.faults.stall_after = 2
    with pytest.raises(httpx.ReadTimeout):
        await gw.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": stream}, timeout=0.4
        ) if not stream else await _read_forever(gw)
    await gw.settled()
    assert sum(len(pod.seen.decode_aborts) for pod in cluster.decodes) == 1
    assert len([c for pod in cluster.prefills for c in pod.seen.prefill_cancels]) == int(where == "prefill")
    assert (await gw.http.get("/metrics")).text.count('baton_aborts_total{reason="disconnect"} 1.0') == 1


async def _read_forever(gw: Rig) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with gw.http.stream("POST", "/v1/completions", json=body, timeout=0.4) as response:
        async for _ in response.aiter_lines():
            pass


async def test_a_restarted_pod_on_the_same_port_is_learned_anew(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    restarted = [await pod.restart() for pod in (*cluster.prefills, *cluster.decodes)]
    cluster.prefills, cluster.decodes = restarted[:2], restarted[2:]
    await until(lambda: len(gw.gateway.table.decodes()) == 2 and len(gw.gateway.table.pods) == 4, 3)
    assert all(p.info and p.info.generation == 2 for p in gw.gateway.table.pods.values() if p.can_decode)
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
            await until(lambda: all(p.alive for p in gw.gateway.table.pods.values()))
            await asyncio.sleep(0.3)
            assert not gw.gateway.ready


async def test_a_pod_that_does_both_needs_no_prefill(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=0, decode=0, both=1) as cluster, rig(cluster, smollm2_dir) as gw:
        cluster.decodes[0].cached_tokens = 32
        body = (await gw.complete(max_tokens=4)).json()
        assert body["usage"]["completion_tokens"] == 4
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert cluster.decodes[0].role is Role.BOTH
        await gw.settled()


async def test_drain_finishes_what_runs_and_refuses_the_rest(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.prefills:
        pod.faults.prefill_delay_s = 0.3
    running = asyncio.create_task(gw.complete())
    await asyncio.sleep(0.1)
    drain = asyncio.create_task(gw.server.drain())
    await asyncio.sleep(0.05)
    assert (await gw.complete()).status_code == 503
    assert (await gw.http.get("/ready")).status_code == 503
    assert (await running).status_code == 200
    await asyncio.wait_for(drain, 2)


async def test_many_at_once_with_aborts_leave_nothing_behind(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        pod.faults.token_delay_s = 0.002

    async def one(i: int) -> int:
        try:
            timeout = 0.05 if i % 5 == 0 else 30
            return (await gw.http.post(
                "/v1/completions", json={"model": MODEL, "prompt": f"p{i}", "max_tokens": 20}, timeout=timeout
            )).status_code  # fmt: skip
        except httpx.TimeoutException:
            return 0

    statuses = await asyncio.gather(*(one(i) for i in range(60)))
    assert [s for i, s in enumerate(statuses) if i % 5] == [200] * 48
    await gw.settled()
    reserved = [len(pod.seen.reserved) for pod in cluster.decodes]
    assert min(reserved) > 10
