"""Prefills that start before the KV target is known (SetTarget), in prefill pods and in the gateway."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from common.errors import DeadlineExceeded, InvalidRequest, LayoutMismatch, Unavailable
from common.pb import prefill_pb2, transfer_pb2
from common.rpc import translate_rpc_errors
from common.types import ValidRequest
from common.wire import kv_target_from_pb, kv_target_to_pb, request_to_pb, token_from_pb
from gateway.dispatch import attempt, prefill_call
from pod import requests
from prefill_service import hand_off
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.pods.harness import CHUNK, Cluster, oracle, prompt_of, request, tiny_llama
from tests.rigs.waiting import until

PROMPT = prompt_of(3 * CHUNK + 5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("late"))


@pytest.mark.parametrize("after", ["before", "", "progress", "first_token"])
async def test_the_target_may_come_at_any_time(model_dir: Path, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    monkeypatch.setattr(requests, "RETRY_LIMIT_S", 30.0)
    async with Cluster.start(model_dir) as cluster:
        asked = request(PROMPT, 6)
        inbox = cluster.stream_of(cluster.decode).expect(asked.request_id)
        reply = await cluster.reserve(asked, remote_only=True)
        set_target = prefill_pb2.SetTargetRequest(request_id=asked.request_id, target=reply.target)
        overtakes = asyncio.ensure_future(cluster.prefill.prefill.SetTarget(set_target)) if after == "before" else None
        await asyncio.sleep(0.1 if overtakes else 0.0)
        call = cluster.prefill.prefill.Prefill(prefill_pb2.PrefillRequest(request=request_to_pb(asked)))
        ids: list[int] = []
        kinds: list[str] = []
        with translate_rpc_errors():
            if not after:
                await until(lambda: len(cluster.prefill.service.requests) > 0)
                await cluster.prefill.prefill.SetTarget(set_target)
                await cluster.prefill.prefill.SetTarget(set_target)  # again: no effect
            async for event in call:
                kinds.append(event.WhichOneof("event") or "")
                if kinds[-1] == after and kinds.count(after) == 1:
                    await asyncio.sleep(0.05)
                    assert cluster.prefill.runtime.transfer_node.stats().open_outgoing == 0
                    await cluster.prefill.prefill.SetTarget(set_target)
                if event.HasField("first_token"):
                    ids.append(token_from_pb(event.first_token.token).id)
                if event.HasField("handed_off"):
                    assert event.handed_off.blocks == len(reply.target.blocks)
        assert kinds[-1] == "handed_off"
        while len(ids) < 6:
            ids += [token.id for token in (await asyncio.wait_for(inbox.get(), 30)).tokens]
        (wanted,) = oracle(model_dir).generate([PROMPT], asked.sampling)
        assert ids == wanted.ids


async def test_a_prompt_that_gets_no_target_releases_everything(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster.start(model_dir) as cluster:
        for cancelled in (True, False):
            monkeypatch.setattr(hand_off, "SET_TARGET_TIMEOUT_S", 30.0 if cancelled else 4.0)
            asked = request(prompt_of(2 * CHUNK, seed=cancelled), 4)
            call = cluster.prefill.prefill.Prefill(prefill_pb2.PrefillRequest(request=request_to_pb(asked)))
            kinds: list[str] = []
            async for event in call:
                kinds.append(event.WhichOneof("event") or "")
                if kinds[-1] == "first_token":
                    if cancelled:
                        break
                    assert cluster.prefill.runtime.engine.pool.counts().leased == 2 * CHUNK // 4
            if cancelled:
                call.cancel()
            else:
                assert kinds[-1] == "failed"
            await cluster.prefill.settled()
        # The same before the end of the first chunk: the result of the step in flight is dropped.
        launch = cluster.prefill.runtime.engine.runner.launch
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*args: object) -> object:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run(asyncio.sleep(0.1))
            return launch(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(cluster.prefill.runtime.engine.runner, "launch", slow)
        call = cluster.prefill.prefill.Prefill(
            prefill_pb2.PrefillRequest(request=request_to_pb(request(prompt_of(2 * CHUNK, seed=7), 4)))
        )
        await call.initial_metadata() if begun.is_set() else await begun.wait()
        call.cancel()
        await cluster.prefill.settled()


async def test_set_target_waits_while_the_grammar_is_compiled(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RETRY_LIMIT_S", 1.0)
    async with Cluster.start(model_dir) as cluster:
        refusal: InvalidRequest | None = None

        async def compiles(_request: ValidRequest) -> None:
            await asyncio.sleep(2.0)
            if refusal is not None:
                raise refusal

        monkeypatch.setattr(cluster.prefill.runtime.grammars, "compile", compiles)
        answer = await cluster.generate(request(PROMPT, 3), remote_only=True, late_s=0.0)
        assert [token.id for token in answer.tokens] == oracle(model_dir).generate(
            [PROMPT], request(PROMPT, 3).sampling
        )[0].ids
        refusal = InvalidRequest("the grammar is refused", field="guided")
        asked, stub = request(PROMPT, 3), cluster.prefill.prefill
        reply = await cluster.reserve(asked, remote_only=True)
        call = stub.Prefill(prefill_pb2.PrefillRequest(request=request_to_pb(asked)))
        set_target = prefill_pb2.SetTargetRequest(request_id=asked.request_id, target=reply.target)
        with pytest.raises(Unavailable), translate_rpc_errors():
            await stub.SetTarget(set_target)
        with pytest.raises(InvalidRequest, match="the grammar is refused"), translate_rpc_errors():
            async for _ in call:
                pass
        assert not cluster.prefill.service._preparing
        await cluster.abort(asked.request_id)  # otherwise the decode pod keeps its blocks until the reservation ends


async def test_only_the_first_target_counts_and_it_has_to_fit(model_dir: Path) -> None:
    async with Cluster.start(model_dir) as cluster:
        stub = cluster.prefill.prefill
        asked = request(PROMPT, 2)
        reply = await cluster.reserve(asked, remote_only=True)
        target = kv_target_from_pb(reply.target)

        async def tell(**fields: object) -> None:
            changed = kv_target_to_pb(replace(target, **fields))  # type: ignore[arg-type]
            with translate_rpc_errors():
                await stub.SetTarget(prefill_pb2.SetTargetRequest(request_id=asked.request_id, target=changed))

        with pytest.raises(Unavailable):
            await tell()
        call = stub.Prefill(prefill_pb2.PrefillRequest(request=request_to_pb(asked)))
        await until(lambda: len(cluster.prefill.service.requests) > 0)
        with pytest.raises(LayoutMismatch):
            await tell(fingerprint="00" * 16)
        with pytest.raises(InvalidRequest):
            await tell(blocks=target.blocks[1:])
        await tell()
        if len(cluster.prefill.service.requests):
            with pytest.raises((InvalidRequest, Unavailable)):
                await tell(first_block=0, blocks=tuple(reversed(target.blocks)))
        kinds = [event.WhichOneof("event") async for event in call]
        assert kinds[-1] == "handed_off"


# -- the gateway with fake pods


@pytest_asyncio.fixture
async def late() -> AsyncIterator[FakeCluster]:
    """Prefill pods that accept late targets, and decode pods with ample room."""
    async with fake_cluster(prefill=1, decode=2) as cluster:
        for pod in cluster.prefills:
            pod.late_targets = True
        for pod in cluster.decodes:
            pod.load = transfer_pb2.Load(free_blocks=512)
        yield cluster


@pytest_asyncio.fixture
async def gw(late: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(late, smollm2_dir) as made:
        yield made


async def settled(gw: Rig, cluster: FakeCluster) -> None:
    await gw.settled()
    await until(lambda: all(pod.idle for pod in (*cluster.prefills, *cluster.decodes)))


async def text(gw: Rig) -> str:
    return str((await gw.complete()).json()["choices"][0]["text"])


def answer_once_prefill_began(late: FakeCluster) -> None:
    async def began(asked: ValidRequest) -> None:
        await until(lambda: any(asked.request_id == r.request_id for pod in late.prefills for r in pod.seen.prefilled))

    for pod in late.decodes:
        pod.faults.before_reserve = began


async def test_prefill_begins_while_the_decode_pod_is_asked(gw: Rig, late: FakeCluster) -> None:
    (prefill,) = late.prefills
    expected = await text(gw)
    answer = asyncio.Event()
    for pod in late.decodes:
        pod.faults.before_reserve = lambda _request: answer.wait()
    task = asyncio.create_task(text(gw))
    await until(lambda: len(prefill.seen.prefilled) == 2)
    assert len(prefill.seen.late_targets) == 1
    assert not task.done(), "no token before the KV target is known"
    answer.set()
    assert await task == expected
    assert prefill.seen.late_targets == [asked.request_id for asked in prefill.seen.prefilled]
    assert not prefill.seen.prefill_cancels
    await settled(gw, late)


async def test_a_rejection_cancels_the_prefill_and_the_next_reservation_starts_another(
    gw: Rig, late: FakeCluster
) -> None:
    (prefill,) = late.prefills
    expected = await text(gw)
    answer_once_prefill_began(late)
    for pod in late.decodes:
        pod.faults.reject = 1
    assert (await gw.complete()).status_code == 429
    late.decodes[0].faults.reject = 1
    answers = 0
    while late.decodes[0].faults.reject:  # routing decides how many of them go to the other decode pod before
        assert await text(gw) == expected
        answers += 1
    await until(lambda: len(prefill.seen.prefill_cancels) == 3)
    assert len(prefill.seen.prefilled) == 1 + 2 + answers + 1
    await settled(gw, late)


async def test_if_no_decode_pod_has_room_no_prefill_is_left(gw: Rig, late: FakeCluster) -> None:
    (prefill,) = late.prefills
    answer_once_prefill_began(late)
    for pod in late.decodes:
        pod.faults.reject = 100
    response = await gw.complete()
    assert response.status_code == 429
    await until(lambda: len(prefill.seen.prefill_cancels) == 2)
    assert len(prefill.seen.prefilled) == 2
    await settled(gw, late)


async def test_an_early_prefill_error_does_not_count_before_the_target_is_known(gw: Rig, late: FakeCluster) -> None:
    (prefill,) = late.prefills
    expected = await text(gw)
    prefill.faults.prefill_error, prefill.faults.prefill_errors = Unavailable("it is busy"), 1
    failed = asyncio.Event()

    async def fails(_request: ValidRequest) -> None:
        failed.set()

    prefill.faults.before_prefill = fails
    for pod in late.decodes:
        pod.faults.before_reserve = lambda _request: failed.wait()
    assert await text(gw) == expected
    assert len(prefill.seen.prefilled) == 3
    await settled(gw, late)


async def test_a_failed_set_target_leads_to_another_attempt(gw: Rig, late: FakeCluster) -> None:
    (prefill,) = late.prefills
    prefill.faults.target_error = Unavailable("it has gone")
    response = await gw.complete()
    assert response.status_code == 503
    assert len(prefill.seen.prefilled) == 3
    prefill.faults.target_error = None
    assert (await gw.complete()).status_code == 200
    await settled(gw, late)


async def test_the_error_of_the_prefill_hides_that_of_set_target(
    gw: Rig, late: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_call, "TARGET_GRACE_S", 30.0)
    (prefill,) = late.prefills
    prefill.faults.target_error = Unavailable("the request is not known to this pod")
    prefill.faults.prefill_error = InvalidRequest("the grammar is refused", field="guided_regex")

    async def target_failed(asked: ValidRequest) -> None:
        await until(lambda: asked.request_id in prefill.seen.late_targets)
        await asyncio.sleep(0.02)  # the answer to SetTarget is first

    prefill.faults.before_prefill = target_failed
    response = await gw.complete()
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the grammar is refused")
    assert len(prefill.seen.prefilled) == 1
    await settled(gw, late)


async def test_a_client_that_disconnects_during_reserve_leaves_nothing(gw: Rig, late: FakeCluster) -> None:
    (prefill,) = late.prefills
    for pod in late.decodes:
        pod.faults.reserve_delay_s = 60.0
    client = asyncio.create_task(gw.complete())
    await until(lambda: bool(prefill.seen.prefilled))
    client.cancel()
    await asyncio.wait([client])
    await until(lambda: bool(prefill.seen.prefill_cancels))
    await gw.settled()


@pytest.mark.parametrize("scarce", ["blocks", "waiting"])
async def test_without_ample_room_the_prefill_waits_for_reserve(gw: Rig, late: FakeCluster, scarce: str) -> None:
    (prefill,) = late.prefills
    for pod in late.decodes:
        pod.load = transfer_pb2.Load(free_blocks=40 if scarce == "blocks" else 512, waiting=int(scarce == "waiting"))
    views = [pod.view for pod in gw.gateway.pod_table.pods.values()]
    await until(
        lambda: sum(v.load is not None and (v.load.free_blocks == 40 or v.load.waiting == 1) for v in views if v) == 2
    )
    assert (await gw.complete()).status_code == 200
    assert not prefill.seen.late_targets
    assert len(prefill.seen.prefilled) == 1


@pytest.mark.parametrize("on_time", [2, 3], ids=["prompt", "target"])
async def test_a_deadline_during_set_target_is_a_504(
    gw: Rig, late: FakeCluster, on_time: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`on_time` is the number of calls before the deadline, of: start, Reserve, Prefill, SetTarget."""
    calls = itertools.count(1)

    def timeout_until(_deadline: float) -> float:
        if next(calls) > on_time:
            raise DeadlineExceeded("the request's time is over")
        return 1.0

    for module in (attempt, prefill_call):
        monkeypatch.setattr(module, "timeout_until", timeout_until)
    late.prefills[0].faults.prefill_delay_s = 30.0
    body = {"model": MODEL, "prompt": "Hello"}
    answer = await gw.http.post("/v1/completions", json=body, headers={"x-request-timeout": "1"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (504, "the request's time is over")
    assert len(late.prefills[0].seen.prefilled) <= on_time - 2  # the end may overtake the call
    assert not late.prefills[0].seen.late_targets
    await settled(gw, late)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


async def test_tokens_of_a_local_prefill_may_come_before_its_answer(gw: Rig, late: FakeCluster) -> None:
    expected = await text(gw)
    for pod in late.decodes:
        pod.faults.local_after_s = 0.1
    for _ in range(4):
        assert await text(gw) == expected
        await settled(gw, late)
    assert len(late.prefills[0].seen.prefilled) == 5  # each was sent before the answer, and cancelled with it
