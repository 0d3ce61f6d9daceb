"""Pods that reject, die, stall and repeat tokens: every request ends with its answer or one clear error."""

from __future__ import annotations

import asyncio
import time
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
    ModelNotFound,
    Overloaded,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from common.types import FinishReason, SamplingParams, ValidRequest
from gateway.dispatch.attempt import Attempt
from gateway.telemetry.timeline import Timeline
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, right_text
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2, decode=2) as c:
        yield c


def retries(gw: Rig) -> float:
    samples = [s for m in gw.gateway.metrics.retries.collect() for s in m.samples if s.name.endswith("_total")]
    return sum(s.value for s in samples)


async def test_tokens_may_come_before_the_answer_to_reserve(gw: Rig, cluster: FakeCluster) -> None:
    """They come over another stream. No booking of a prompt that the decode pod computes itself may be left."""
    expected = await right_text(gw)
    for pod in cluster.decodes:
        pod.faults.local_after_s = 0.1
    for _ in range(4):
        assert (await gw.complete()).json()["choices"][0]["text"] == expected
        await gw.settled()


async def test_a_full_decode_pod_sends_the_request_to_the_other(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    for pod in cluster.decodes:
        pod.faults.reject = 1
        assert (await gw.complete()).json()["choices"][0]["text"] == expected
        pod.faults.reject = 0
    assert retries(gw) == 0


async def test_full_decode_pods_give_429_with_retry_after_and_no_prefill(gw: Rig, cluster: FakeCluster) -> None:
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
async def test_a_failed_prefill_is_retried_on_another_pod(
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
        (ModelNotFound("another model", field="model"), 500, "server_error"),
        (Unauthenticated("wrong secret"), 500, "server_error"),
        (InternalError("stack trace with secrets"), 500, "server_error"),
    ],
)
async def test_an_error_of_every_pod_becomes_one_clear_error(
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
async def test_after_a_broken_hand_off_the_request_is_retried_on_other_pods(
    gw: Rig, cluster: FakeCluster, drop: bool
) -> None:
    expected = await right_text(gw)

    def break_all() -> None:
        for pod in cluster.prefills:
            pod.faults.drop_prefill_after_first = int(drop)
            pod.faults.hand_off_error = None if drop else TransferFailed("blocks were lost")
            pod.faults.hand_off_errors = 1

    break_all()
    _, events = await gw.stream("completions")
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected
    break_all()
    assert (await gw.complete()).json()["choices"][0]["text"] == expected
    begun = [request for pod in cluster.prefills for request in pod.seen.prefilled if request.output_ids]
    assert len(begun) >= 2


@pytest.mark.parametrize("n", [1, 2])
async def test_first_tokens_that_are_lost_with_the_prefill_call_are_computed_again(
    gw: Rig, cluster: FakeCluster, n: int
) -> None:
    """Only the prefill pod sends them. The decode pod has all KV and sends every later token."""
    expected = [choice["text"] for choice in (await gw.complete(n=n)).json()["choices"]]
    for pod in cluster.prefills:
        pod.faults.lose_first_tokens = 1
    answer = await gw.complete(n=n)
    assert [choice["text"] for choice in answer.json()["choices"]] == expected
    assert sum(pod.faults.lose_first_tokens for pod in cluster.prefills) < len(cluster.prefills)
    await gw.settled()
    assert sum(len(pod.seen.decode_aborts) for pod in cluster.decodes) >= 1


async def test_early_repeated_and_swapped_tokens_of_a_decode_pod(gw: Rig, cluster: FakeCluster) -> None:
    expected = (await gw.complete(max_tokens=20)).json()["choices"][0]["text"]
    for pod in (*cluster.decodes, *cluster.prefills):
        pod.faults.duplicate = pod.faults.reorder = pod.faults.decode_before_first = True
    _, events = await gw.stream("completions", max_tokens=20)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected
    assert (await gw.complete(max_tokens=20)).json()["choices"][0]["text"] == expected


async def test_a_missing_token_ends_the_stream_at_the_deadline(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        pod.faults.stall_after = 3
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with gw.http.stream("POST", "/v1/completions", json=body, headers={"x-request-timeout": "3"}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert "time is over" in lines[-2]
    assert lines[-1] == "data: [DONE]"


async def test_death_of_a_decode_pod_before_the_first_token_is_not_noticed(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    dead = asyncio.Event()
    for pod in cluster.prefills:
        pod.faults.before_prefill = lambda _request: dead.wait()
    before = [len(pod.seen.reserved) for pod in cluster.decodes]
    task = asyncio.create_task(gw.stream("completions"))
    await until(lambda: any(pod.seen.prefilled[-1:] and not pod.idle for pod in cluster.prefills))
    (victim,) = (pod for pod, n in zip(cluster.decodes, before, strict=True) if len(pod.seen.reserved) > n)
    await victim.stop()
    await until(lambda: not gw.gateway.pod_table.pods[victim.address].token_stream_up)
    dead.set()
    status, events = await task
    assert status == 200
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected


async def test_an_error_of_one_sequence_and_a_cut_stream_are_retried(gw: Rig, cluster: FakeCluster) -> None:
    expected = await right_text(gw)
    for pod in cluster.decodes:
        pod.faults.decode_error, pod.faults.decode_errors = Unavailable("preempted for good"), 1
    assert (await gw.complete()).json()["choices"][0]["text"] == expected
    assert retries(gw) >= 1
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
async def test_a_client_that_disconnects_frees_everything(
    gw: Rig, cluster: FakeCluster, stream: bool, where: str
) -> None:
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.faults.reserve_delay_s = 5.0 if where == "reserve" else 0.0
        pod.faults.prefill_delay_s = 5.0 if where == "prefill" else 0.0
        pod.faults.stall_after = 2
    client = asyncio.create_task(gw.stream("completions") if stream else gw.complete())
    await until(lambda: any(_reached(where, pod) for pod in (*cluster.prefills, *cluster.decodes)))
    client.cancel()
    await asyncio.wait([client])
    await gw.settled()
    await until(lambda: any(pod.seen.decode_aborts for pod in cluster.decodes))  # a call of its own
    assert sum(len(pod.seen.decode_aborts) for pod in cluster.decodes) == 1
    assert len([c for pod in cluster.prefills for c in pod.seen.prefill_cancels]) == int(where == "prefill")
    assert (await gw.http.get("/metrics")).text.count('baton_aborts_total{reason="disconnect"} 1.0') == 1


def _reached(where: str, pod: FakePod) -> bool:
    """Returns whether a request has reached this pod; a decode pod has sent its second token."""
    seen = {"reserve": pod.seen.reserved, "prefill": pod.seen.prefilled, "decode": pod.seen.hand_offs}
    return bool(seen[where])


async def test_many_concurrent_requests_with_aborts_leave_nothing_behind(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        pod.faults.token_delay_s = 0.002

    async def one(i: int) -> int:
        try:
            timeout = 0.05 if i % 5 == 0 else 30
            return (
                await gw.http.post(
                    "/v1/completions", json={"model": MODEL, "prompt": f"p{i}", "max_tokens": 20}, timeout=timeout
                )
            ).status_code
        except httpx.TimeoutException:
            return 0

    statuses = await asyncio.gather(*(one(i) for i in range(60)))
    assert [s for i, s in enumerate(statuses) if i % 5] == [200] * 48
    await gw.settled()
    reserved = [len(pod.seen.reserved) for pod in cluster.decodes]
    assert min(reserved) > 10


@pytest.mark.parametrize("drop", [False, True])
async def test_a_failed_hand_off_after_a_complete_answer_frees_the_decode_pod(
    gw: Rig, cluster: FakeCluster, drop: bool
) -> None:
    for pod in cluster.prefills:
        pod.faults.drop_prefill_after_first = int(drop)
        pod.faults.hand_off_error = None if drop else TransferFailed("blocks were lost")
    assert (await gw.complete(max_tokens=1)).status_code == 200
    await gw.settled()
    assert sum(len(pod.seen.decode_aborts) for pod in cluster.decodes) == 1


async def make_attempt(gw: Rig, max_tokens: int) -> Attempt:
    request = ValidRequest("r", MODEL, (1, 2, 3), SamplingParams(max_tokens=max_tokens))
    plan, timeline = await gw.gateway.models.first.router.plan(request), Timeline("id", None, "completions")
    return Attempt(plan, deadline=time.monotonic() + 30, timeline=timeline)


async def test_a_hand_off_that_fails_before_the_answer_is_taken_frees_the_decode_pod(
    gw: Rig, cluster: FakeCluster
) -> None:
    for pod in cluster.prefills:
        pod.faults.hand_off_error = TransferFailed("blocks were lost")
    attempt = await make_attempt(gw, max_tokens=1)
    await attempt.start()
    await until(
        lambda: not any(pod.view and len(pod.view.prefill_bookings) for pod in gw.gateway.pod_table.pods.values())
    )
    await until(lambda: bool(attempt.blamed_pods))
    assert (await attempt.token_queue.next()).finish is FinishReason.LENGTH
    attempt.close()
    await gw.settled()
    assert sum(len(pod.seen.decode_aborts) for pod in cluster.decodes) == 1


async def test_a_prefill_that_is_cancelled_before_it_begins_leaves_no_booking(gw: Rig, cluster: FakeCluster) -> None:
    attempt = await make_attempt(gw, max_tokens=4)
    await attempt.start()
    attempt.close()
    await gw.settled()
    assert not any(pod.seen.prefilled for pod in cluster.prefills)


@pytest.mark.parametrize("local", [False, True])
async def test_a_reservation_that_is_made_after_the_end_of_its_attempt_is_aborted(
    gw: Rig, cluster: FakeCluster, local: bool
) -> None:
    """The abort of `close` comes before the pod has reserved, so the pod does not know the request yet."""
    reserves = asyncio.Event()
    for pod in cluster.decodes:
        pod.faults.before_reserve = lambda _: reserves.wait()
        pod.faults.local_after_s = 0.0 if local else None
        pod.faults.stall_after = 0
    attempt = await make_attempt(gw, max_tokens=4)
    starting = asyncio.create_task(attempt.start())
    await until(lambda: any(pod.seen.reserved for pod in cluster.decodes))
    attempt.close()
    await until(lambda: any(pod.seen.decode_aborts for pod in cluster.decodes))
    reserves.set()
    await starting
    attempt.close()
    await until(lambda: all(pod.idle for pod in cluster.decodes))
    await gw.settled()
    assert not len(gw.gateway.models.first.router.inflight)


async def leave_during_prefill(gw: Rig, cluster: FakeCluster) -> None:
    client = asyncio.create_task(gw.complete())
    await until(lambda: any(pod.seen.prefilled for pod in cluster.prefills))
    client.cancel()
    await asyncio.wait([client])


async def test_an_abort_is_repeated_until_the_pod_has_taken_it(gw: Rig, cluster: FakeCluster) -> None:
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.faults.prefill_delay_s = 60.0  # so that no token reveals an orphan
        pod.faults.abort_errors = 3
    await leave_during_prefill(gw, cluster)
    await gw.settled()
    assert sum(len(pod.seen.decode_aborts) for pod in cluster.decodes) == 1


async def test_an_abort_ends_with_the_token_stream(gw: Rig, cluster: FakeCluster) -> None:
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.faults.prefill_delay_s = 60.0
        pod.faults.abort_errors = 1 << 30
    await leave_during_prefill(gw, cluster)
    await until(lambda: any(pod.faults.abort_errors < 1 << 30 for pod in cluster.decodes))
    aborting = next(p for p in gw.gateway.pod_table.pods.values() if p._aborted)
    loops = len(aborting._tasks)
    for pod in cluster.decodes:
        pod.cut_streams()
        pod._running.clear()
    await until(lambda: len(aborting._tasks) == loops - 1)


@pytest.mark.parametrize("limit", ["the pods", "max_inflight"])
async def test_a_burst_beyond_capacity_is_refused_at_once(smollm2_dir: Path, limit: str) -> None:
    async with fake_cluster(prefill=2, decode=2) as cluster:
        for pod in cluster.decodes:
            pod.capacity = 4 if limit == "the pods" else 100
            pod.faults.stall_after = 1
        async with rig(cluster, smollm2_dir, max_inflight=8 if limit == "max_inflight" else 1024) as gw:
            running = [asyncio.create_task(gw.complete()) for _ in range(8)]
            await until(lambda: sum(len(pod._running) for pod in cluster.decodes) == 8)
            async with httpx.AsyncClient(base_url=gw.url, timeout=30, limits=httpx.Limits(max_connections=200)) as http:
                body = {"model": MODEL, "prompt": "Hello"}
                refused = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(100)))
            assert not any(task.done() for task in running)  # the rejections came while all others were running
            assert {r.status_code for r in refused} == {429}
            assert {r.json()["error"]["code"] for r in refused} == {"rate_limit_exceeded"}
            assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
            assert sum(len(pod.seen.prefilled) for pod in cluster.prefills) == 8
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await gw.settled()
            for pod in cluster.decodes:
                pod.faults.stall_after = None
            assert (await gw.complete()).status_code == 200
