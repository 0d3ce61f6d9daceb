"""A pod that makes no progress: the requests that it stalls continue on other pods, and requests that wait stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.pb import transfer_pb2
from gateway.pods import pod as gateway_pod
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until

TOKENS = 12
BOUND_S = 0.3
LONG_S = 1.2  #: In this time the gateway would find a stalled request.


@pytest.fixture(autouse=True)
def _frequent_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_pod, "INFO_PERIOD_S", 0.05)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2, decode=2) as c:
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir, stuck_step_s=BOUND_S) as r:
        yield r
        await r.settled()


def stalled(gw: Rig, role: str) -> float:
    """Returns the number of attempts that stalled on pods of this role."""
    return gw.gateway.metrics.stalled.labels(role)._value.get()


def state(gw: Rig, pod: FakePod) -> str:
    return gw.gateway.pod_table.pods[pod.address].state


async def text(gw: Rig) -> str:
    """Sends a request and returns its text."""
    answer = await gw.complete(max_tokens=TOKENS, seed=7)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def received(gw: Rig, tokens: int) -> None:
    """Waits until the running request has this many output tokens."""
    await until(lambda: sum(c.usage.completion for r in gw.gateway._requests.values() for c in r.choices) >= tokens)


@asynccontextmanager
async def stepping(pod: FakePod) -> AsyncIterator[None]:
    """Lets the engine of the pod end steps."""

    async def step() -> None:
        while True:
            pod.steps = (pod.steps or 0) + 1
            await asyncio.sleep(0.01)

    task = asyncio.create_task(step())
    try:
        yield
    finally:
        task.cancel()


async def test_a_pod_is_watched_after_an_error(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look, errors = gateway_pod.Pod._find_stalls, [ValueError("a bug") for _ in range(3)]

    def failing(self: gateway_pod.Pod, *, answered: bool) -> None:
        if errors:
            raise errors.pop()
        look(self, answered=answered)

    monkeypatch.setattr(gateway_pod.Pod, "_find_stalls", failing)
    await until(lambda: caplog.text.count("could not be watched") == 3, 30)
    victim = cluster.decodes[0]
    await victim.stop()
    await until(lambda: not gw.gateway.pod_table.pods[victim.address].alive, 30)


async def stalls(gw: Rig, cluster: FakeCluster) -> tuple[FakePod, asyncio.Task[str]]:
    """Starts a request that gets five tokens and then no more. Returns its decode pod and the request's task.

    All other requests get all their tokens.
    """
    for pod in cluster.decodes:
        pod.faults.stall_after = 4
    task = asyncio.create_task(text(gw))
    await received(gw, 5)
    (victim,) = (pod for pod in cluster.decodes if not pod.idle)
    for pod in cluster.decodes:
        pod.faults.stall_after = None
    return victim, task


def no_step(pod: FakePod) -> None:
    """A sequence runs, and the number of steps stays the same."""
    pod.steps, pod.load = 9, transfer_pb2.Load(running=1)


def silent(pod: FakePod) -> None:
    """The pod does not answer Info."""
    pod.faults.info_delay_s = 60.0


def says_stuck(pod: FakePod) -> None:
    """The pod's watchdog has found a stuck loop."""
    pod.stuck = "the engine is stuck"


@pytest.mark.parametrize("trouble", [no_step, silent, says_stuck])
async def test_an_answer_continues_token_for_token_on_another_pod(
    gw: Rig, cluster: FakeCluster, trouble: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await text(gw)
    victim, task = await stalls(gw, cluster)
    assert callable(trouble)
    if trouble is silent:
        monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 1.5)  # of the other pods, too
    trouble(victim)
    assert await task == expected
    assert (stalled(gw, "decode"), stalled(gw, "prefill")) == (1, 0)
    await until(lambda: len(victim.seen.decode_aborts) == 1)
    last = next(pod for pod in cluster.decodes if pod is not victim).seen.reserved[-1]
    assert len(last.output_ids) == 5
    assert state(gw, victim) in ("stuck", "gone")
    # The pod is avoided until it makes progress.
    reserved = len(victim.seen.reserved)
    for _ in range(4):
        assert await text(gw) == expected
    assert len(victim.seen.reserved) == reserved
    victim.steps, victim.stuck, victim.faults.info_delay_s = 10, "", 0.0
    victim.load = transfer_pb2.Load()
    monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 10.0)
    await until(lambda: state(gw, victim) == "ready")


async def test_a_request_is_not_stalled_while_the_pod_steps(gw: Rig, cluster: FakeCluster) -> None:
    victim, task = await stalls(gw, cluster)
    victim.load = transfer_pb2.Load(running=1)
    async with stepping(victim):
        await asyncio.sleep(LONG_S)
        assert not task.done()
        assert stalled(gw, "decode") == 0
        assert state(gw, victim) == "ready"
    await task  # no step ends any more


async def test_a_request_that_waits_for_its_kv_is_not_stalled(gw: Rig, cluster: FakeCluster) -> None:
    """The decode pod ends no step, because its only sequence is one that another gateway has paused."""
    expected = await text(gw)
    for pod in cluster.decodes:
        no_step(pod)
    for pod in cluster.prefills:
        pod.faults.prefill_delay_s = LONG_S
    assert await text(gw) == expected
    assert (stalled(gw, "decode"), stalled(gw, "prefill")) == (0, 0)


@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_prompt_in_the_queue_of_a_decode_pod_is_not_stalled(
    gw: Rig, cluster: FakeCluster, waiting: int
) -> None:
    """Without a queue on the pod, the prompt is in the step that does not end. It is stalled then."""
    expected = await text(gw)
    for pod in cluster.decodes:
        pod.faults.local_after_s, pod.faults.stall_after = 0.0, 0
    task = asyncio.create_task(text(gw))
    await until(lambda: any(pod.seen.stalls for pod in cluster.decodes))
    (victim,) = (pod for pod in cluster.decodes if pod.seen.stalls)
    victim.load, victim.steps = transfer_pb2.Load(running=1, waiting=waiting), 3
    for pod in cluster.decodes:
        pod.faults.stall_after = None
    if waiting:
        await asyncio.sleep(LONG_S)
        assert not task.done()
        assert stalled(gw, "decode") == 0
        victim.load = transfer_pb2.Load(running=1)
    assert await task == expected
    assert stalled(gw, "decode") == 1


async def test_a_prefill_without_progress_moves_to_another_pod(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=2) as cluster, rig(cluster, smollm2_dir, stuck_step_s=BOUND_S) as gw:
        expected = await text(gw)
        for pod in cluster.prefills:
            pod.seen.prefilled.clear()
            pod.faults.prefill_delay_s = 600.0
        task = asyncio.create_task(text(gw))
        await until(lambda: any(pod.seen.prefilled for pod in cluster.prefills))
        (victim,) = (pod for pod in cluster.prefills if pod.seen.prefilled)
        for pod in cluster.prefills:
            pod.faults.prefill_delay_s = 0.0
        # In the queue of a pod that computes another prompt: not stalled.
        victim.steps, victim.load = 9, transfer_pb2.Load(running=1, waiting=1)
        await asyncio.sleep(LONG_S)
        assert not task.done()
        assert stalled(gw, "prefill") == 0
        victim.load = transfer_pb2.Load(running=1)
        assert await task == expected
        assert (stalled(gw, "decode"), stalled(gw, "prefill")) == (0, 1)
        await until(lambda: len(victim.seen.prefill_cancels) == 1)
        assert state(gw, victim) == "stuck"
        assert state(gw, cluster.decodes[0]) == "ready"
        await gw.settled()


async def test_the_gateway_says_which_loop_is_stuck(gw: Rig, cluster: FakeCluster) -> None:
    for pod in cluster.decodes:
        says_stuck(pod)
    await until(lambda: not gw.gateway.ready)
    answer = await gw.http.get("/ready")
    assert answer.status_code == 503
    assert "decode: 2 stuck; the engine is stuck" in answer.text
    shown: httpx.Response = await gw.http.get("/dashboard/state")
    reasons = {pod["name"]: (pod["state"], pod["reason"]) for pod in shown.json()["pods"]}
    assert reasons["decode-0"] == ("stuck", "the engine is stuck")
    for pod in cluster.decodes:
        pod.stuck = ""
    await until(lambda: gw.gateway.ready)


async def test_a_gateway_without_a_bound_waits(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with rig(cluster, smollm2_dir, stuck_step_s=0.0) as gw:
        expected = await text(gw)
        victim, task = await stalls(gw, cluster)
        no_step(victim)
        await asyncio.sleep(LONG_S)
        assert not task.done()
        await victim.stop()
        assert await task == expected
        await gw.settled()
