"""A decode pod dies during an answer: the answer continues on other pods, each token once, or ends with one error."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from common.pb import inference_pb2, inference_pb2_grpc
from common.types import FinishReason, Role, SamplingParams, ValidRequest
from gateway.dispatch import attempt, dispatch
from gateway.routing.placement import Placement
from gateway.routing.router import RoutingPlan
from gateway.telemetry.timeline import Timeline
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import LAYOUT, FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until

TOKENS = 12


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2, decode=3) as c:
        yield c


def counted(gw: Rig, outcome: str) -> float:
    return gw.gateway.metrics.resumptions.labels(outcome)._value.get()


def known(gw: Rig) -> int:
    """Returns the output tokens so far of the running requests."""
    return sum(choice.usage.completion for t in gw.gateway._requests.values() for choice in t.choices)


def asked(cluster: FakeCluster) -> list[ValidRequest]:
    """Returns the requests that prefill pods, or pods of role both, got, in the order of attempts."""
    seen = [r for pod in cluster.prefills for r in pod.seen.prefilled]
    seen += [r for pod in cluster.decodes if pod.role is Role.BOTH for r in pod.seen.reserved]
    return sorted(seen, key=lambda request: int(request.request_id.rsplit("-", 1)[1].split(".")[0]))


def stall(cluster: FakeCluster, after: int | None) -> None:
    for pod in cluster.decodes:
        pod.faults.stall_after = after


async def lose(gw: Rig, cluster: FakeCluster, tokens: int, *, stalled: int | None = None) -> list[FakePod]:
    """Waits for so many output tokens, then stops the pods that decode. The others stall after `stalled` tokens."""
    await until(lambda: known(gw) >= tokens)
    victims = [pod for pod in cluster.decodes if not pod.idle]
    stall(cluster, stalled)
    for pod in victims:
        await pod.stop()
    return victims


async def said(gw: Rig, stream: bool, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """Returns the text of each choice, and usage and log-probabilities. Fails on an error."""
    if not stream:
        body = (await gw.complete(max_tokens=TOKENS, **fields)).json()
        logprobs = {c["index"]: (c["logprobs"] or {}).get("token_logprobs") for c in body["choices"]}
        return [c["text"] for c in body["choices"]], {"usage": body["usage"], "logprobs": logprobs}
    options = {"stream_options": {"include_usage": True}}
    _, events = await gw.stream("completions", max_tokens=TOKENS, **options, **fields)
    assert events[-1] == "[DONE]", events[-1]
    texts: dict[int, str] = defaultdict(str)
    scores: dict[int, Any] = defaultdict(list)
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            scores[choice["index"]] += (choice.get("logprobs") or {}).get("token_logprobs") or [None]
    logprobs = {i: None if scores[i][0] is None else scores[i] for i in texts}
    return [texts[i] for i in sorted(texts)], {"usage": events[-2]["usage"], "logprobs": logprobs}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True}, {"n": 3}, {"n": 2, "logprobs": 1}])
async def test_the_answer_is_that_of_an_undisturbed_run(
    gw: Rig, cluster: FakeCluster, stream: bool, fields: dict[str, Any]
) -> None:
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.cached_tokens = 3
    expected = await said(gw, stream, seed=7, **fields)
    for pod in cluster.prefills:
        pod.seen.prefilled.clear()
    stall(cluster, 4)
    n = fields.get("n", 1)
    task = asyncio.create_task(said(gw, stream, seed=7, **fields))
    victims = await lose(gw, cluster, 5 * n)
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.cached_tokens = 4  # of the resumed prompt; must not be reported
    assert await task == expected
    assert (len(victims), counted(gw, "resumed"), counted(gw, "failed")) == (1, n, 0)
    first, *rest = asked(cluster)
    assert sorted(r.child for r in rest) == list(range(n))
    script = cluster.script(first)
    for request in rest:
        ids = [token + request.child for token in script]
        assert list(request.output_ids) == ids[:5]
        assert request.sampling.n == 1
        assert (request.prompt_ids, request.sampling.seed) == (first.prompt_ids, 7)
        assert (request.sampling.max_tokens, request.sampling.logprobs) == (TOKENS, first.sampling.logprobs)
        assert not any(request in pod.seen.reserved for pod in victims)
    assert len({r.request_id for r in rest}) == n
    await gw.settled()


async def test_a_request_without_a_seed_resumes_with_the_same_seed(gw: Rig, cluster: FakeCluster) -> None:
    stall(cluster, 2)
    task = asyncio.create_task(gw.complete(max_tokens=TOKENS))
    await lose(gw, cluster, 3)
    assert (await task).status_code == 200
    first, second = asked(cluster)
    assert first.sampling.seed == second.sampling.seed


async def test_a_stop_string_may_begin_before_the_loss(gw: Rig, cluster: FakeCluster) -> None:
    [whole], _ = await said(gw, True)
    stop = whole[3:6]
    stall(cluster, 3)
    task = asyncio.create_task(said(gw, True, stop=stop))
    await lose(gw, cluster, 4)
    assert (await task)[0] == [whole[: whole.index(stop)]]


async def test_finished_samples_are_not_run_again(gw: Rig, cluster: FakeCluster) -> None:
    texts, _ = await said(gw, True, n=3)
    stop = texts[2][2:4]  # ends sample 2 early
    assert not any(stop in text for text in texts[:2])
    stall(cluster, 6)
    task = asyncio.create_task(said(gw, True, n=3, stop=stop))
    await until(lambda: any(pod.seen.child_aborts for pod in cluster.decodes))
    await lose(gw, cluster, 7 + 7 + 4)
    assert (await task)[0] == [*texts[:2], texts[2][:2]]
    assert sorted(r.child for r in asked(cluster) if r.output_ids) == [0, 1]
    assert counted(gw, "resumed") == 2
    await gw.settled()


async def test_each_resumed_sample_can_be_stopped_and_abandoned(gw: Rig, cluster: FakeCluster) -> None:
    texts, _ = await said(gw, True, n=3)
    stop = texts[2][3:5]
    assert not any(stop in text for text in texts[:2])
    stall(cluster, 3)
    task = asyncio.create_task(said(gw, True, n=3, stop=stop))
    [victim] = await lose(gw, cluster, 12, stalled=6)
    left = [pod for pod in cluster.decodes if pod is not victim]
    await until(lambda: sum(len(pod.seen.decode_aborts) for pod in left) == 1)  # sample 2, by its stop string
    task.cancel()
    await asyncio.wait([task])
    await gw.settled()


async def test_an_answer_survives_the_loss_of_two_decode_pods(gw: Rig, cluster: FakeCluster) -> None:
    expected, _ = await said(gw, True)
    stall(cluster, 3)
    task = asyncio.create_task(said(gw, True))
    await lose(gw, cluster, 4, stalled=2)
    await lose(gw, cluster, 4 + 3)
    assert (await task)[0] == expected
    assert counted(gw, "resumed") == 2
    assert [len(r.output_ids) for r in asked(cluster)[-3:]] == [0, 4, 7]


async def test_after_the_last_attempt_the_answer_ends_with_the_loss(gw: Rig, cluster: FakeCluster) -> None:
    stall(cluster, 3)
    task = asyncio.create_task(gw.stream("completions", max_tokens=TOKENS))
    await lose(gw, cluster, 4, stalled=2)
    await lose(gw, cluster, 7, stalled=1)
    await lose(gw, cluster, 9)
    _, events = await task
    assert "ended" in events[-2]["error"]["message"]
    assert (counted(gw, "resumed"), counted(gw, "failed")) == (2, 1)
    await gw.settled()


async def test_without_another_pod_the_answer_ends_with_the_loss(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes[1:]:
        pod.draining = True
    table = gw.gateway.pod_table
    await until(lambda: len(table.decode_pods()) == 1)
    stall(cluster, 3)
    task = asyncio.create_task(gw.stream("completions", max_tokens=TOKENS))
    await lose(gw, cluster, 4)
    _, events = await task
    assert "token stream of decode pod decode-0 ended" in events[-2]["error"]["message"]
    assert counted(gw, "failed") == 1


async def test_an_answer_resumes_only_on_pods_of_the_same_layout(gw: Rig, cluster: FakeCluster) -> None:
    """Pods of another layout are there, and serve what begins."""
    expected, _ = await said(gw, True)
    other = replace(LAYOUT, revision="r1")
    table = gw.gateway.pod_table
    stall(cluster, 3)
    task = asyncio.create_task(gw.stream("completions", max_tokens=TOKENS))
    await until(lambda: known(gw) >= 4)
    for pod in cluster.pods.values():
        if pod.idle:
            pod.layout = other
    await until(lambda: len(table.pods_by_layout().get(other.fingerprint, [])) >= 3)
    await lose(gw, cluster, 4)
    _, events = await task
    assert "ended" in events[-2]["error"]["message"]
    await until(lambda: len(table.decode_pods()) == 2)
    assert (await said(gw, True))[0] == expected


async def test_a_full_pod_is_asked_again(gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_FULL_PAUSE_S", 0.1)
    expected, _ = await said(gw, True)
    stall(cluster, 3)
    task = asyncio.create_task(said(gw, True))
    await until(lambda: known(gw) >= 4)
    for pod in cluster.decodes:
        pod.faults.reject = 1
    await lose(gw, cluster, 4)
    assert (await task)[0] == expected
    for pod in cluster.decodes:
        pod.faults.reject = 0
    stall(cluster, 3)
    failed = asyncio.create_task(gw.stream("completions", max_tokens=TOKENS))
    await until(lambda: known(gw) >= 4)
    for pod in cluster.decodes:
        pod.faults.reject = 1000
    await lose(gw, cluster, 4)
    _, events = await failed
    assert "ended" in events[-2]["error"]["message"]  # what happened to it, not what stood in the way


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("too late"), InternalError("not a number"), InvalidRequest("no token is left")]
)
async def test_an_error_of_the_request_itself_is_not_retried(gw: Rig, cluster: FakeCluster, error: BatonError) -> None:
    stall(cluster, 2)
    task = asyncio.create_task(gw.stream("completions", max_tokens=TOKENS))
    await until(lambda: known(gw) >= 3)
    [pod] = [pod for pod in cluster.decodes if not pod.idle]
    [(request_id, (_, gateway_id))] = pod._running.items()
    pod._emit(gateway_id, request_id, [], FinishReason.ERROR, error=error)
    _, events = await task
    assert "choices" in events[0]
    assert "error" in events[-2]
    assert len(asked(cluster)) == 1
    assert (counted(gw, "resumed"), counted(gw, "failed")) == (0, 0)


async def test_a_client_that_reads_too_slowly_gets_no_second_pod(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MAX_PENDING_TOKENS", 2)
    request = ValidRequest("slow", MODEL, (1, 2, 3), SamplingParams(max_tokens=TOKENS))
    timeline = Timeline("slow", None, "completions")
    run = dispatch.Dispatch(gw.gateway.models.first.router, request, deadline=time.monotonic() + 30, timeline=timeline)

    async def read_late() -> None:
        await run.next()
        await until(lambda: run._attempt is not None and run._attempt.token_queue.error is not None)
        for _ in range(TOKENS):  # first what waits
            await run.next()

    with pytest.raises(Overloaded, match="too slowly"):
        await read_late()
    assert len(asked(cluster)) == 1
    await gw.settled()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_end_while_an_attempt_starts_leaves_no_booking(gw: Rig, cluster: FakeCluster, cancelled: bool) -> None:
    """Another task ends the request. The task that starts the attempt goes on for some turns of the event loop."""
    request = ValidRequest("ended", MODEL, (1, 2, 3), SamplingParams(max_tokens=TOKENS))
    timeline = Timeline("ended", None, "completions")
    run = dispatch.Dispatch(gw.gateway.models.first.router, request, deadline=time.monotonic() + 30, timeline=timeline)
    for pod in cluster.decodes:
        pod.faults.reserve_delay_s = 0.2
    place, closed = RoutingPlan.place, asyncio.Event()

    async def late(*args: Any) -> Placement | None:
        run.close()
        closed.set()
        return await place(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoutingPlan, "place", late)
        reading = asyncio.create_task(run.next())
        await until(lambda: any(pod.seen.reserved for pod in cluster.decodes))
        assert closed.is_set()
        if cancelled:
            reading.cancel()
        with pytest.raises((asyncio.CancelledError, Cancelled)):
            await asyncio.wait_for(reading, 30)
    views = [pod.view for pod in gw.gateway.pod_table.pods.values() if pod.view is not None]
    assert len(views) == len(cluster.decodes) + len(cluster.prefills)
    assert not any(len(view.prefill_bookings) or len(view.decode_bookings) for view in views)
    with pytest.raises(Cancelled):
        await run.next()
    assert sum(len(pod.seen.reserved) for pod in cluster.decodes) == 1
    await gw.settled()


async def test_a_cut_stream_and_an_error_of_one_sequence_are_losses_too(gw: Rig, cluster: FakeCluster) -> None:
    expected, _ = await said(gw, True)
    for pod in cluster.decodes[:2]:
        pod.faults.decode_error, pod.faults.decode_errors = Unavailable("it leaves"), 1
    assert (await said(gw, True))[0] == expected
    for pod in cluster.decodes:
        pod.faults.decode_error = None
    stall(cluster, 3)
    task = asyncio.create_task(said(gw, True))
    await until(lambda: known(gw) >= 4)
    stall(cluster, None)
    for pod in cluster.decodes:
        pod.cut_streams()
    assert (await task)[0] == expected
    await gw.settled()


async def test_prompt_log_probabilities_are_asked_for_once(gw: Rig, cluster: FakeCluster) -> None:
    stall(cluster, 3)
    task = asyncio.create_task(gw.complete(max_tokens=TOKENS, prompt_logprobs=1))
    await lose(gw, cluster, 4)
    assert (await task).status_code == 200
    assert [r.sampling.prompt_logprobs for r in asked(cluster)] == [1, None]


async def test_a_resume_is_in_the_timeline(gw: Rig, cluster: FakeCluster) -> None:
    stall(cluster, 3)
    task = asyncio.create_task(gw.complete(max_tokens=TOKENS))
    await lose(gw, cluster, 4)
    answer = (await task).json()
    events = (await gw.http.get(f"/debug/requests/{answer['id']}")).json()["events"]
    [resume] = [e for e in events if e["event"] == "resume"]
    assert (resume["sequences"], resume["output_tokens"]) == (1, 4)
    assert "ended" in resume["error"]
    text = (await gw.http.get("/metrics")).text
    assert 'baton_resumed_sequences_total{outcome="resumed"} 1.0' in text


async def test_pods_of_role_both_resume_too(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=0, decode=0, both=2) as cluster, rig(cluster, smollm2_dir) as gw:
        expected = await said(gw, True, n=2)
        stall(cluster, 4)
        task = asyncio.create_task(said(gw, True, n=2))
        await lose(gw, cluster, 8)
        assert await task == expected
        assert sorted((r.child, len(r.output_ids)) for r in asked(cluster)[-2:]) == [(0, 4), (1, 4)]


async def test_grpc_token_indices_continue_after_a_resume(smollm2_dir: Path, unused_tcp_port: int) -> None:
    async with (
        fake_cluster(decode=2) as cluster,
        rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as gw,
        grpc.aio.insecure_channel(f"127.0.0.1:{gw.server.grpc_port}") as channel,
    ):
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=TOKENS, n=2)

        async def parts() -> list[inference_pb2.GenerateResponse]:
            return [part async for part in stub.Generate(request, timeout=30)]

        stall(cluster, 3)
        task = asyncio.create_task(parts())
        await lose(gw, cluster, 8)
        got = await task
        for child in range(2):
            tokens = [t for part in got if part.index == child for t in part.tokens]
            assert [t.index for t in tokens] == list(range(TOKENS))
            assert {t.child for t in tokens} == {child}
            assert [t.id for t in tokens] == [id_ + child for id_ in cluster.script(asked(cluster)[0])]
