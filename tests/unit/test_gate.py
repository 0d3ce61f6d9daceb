"""Gate: requests that pass at once, wait, or are rejected, and the release of their places."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from common.errors import DeadlineExceeded, Overloaded, Unavailable
from gateway.admission.api_keys import ANONYMOUS, Caller
from gateway.admission.gate import Gate, GateLimits
from gateway.admission.queue import QueueEntry
from gateway.telemetry.metrics import GatewayMetrics
from tests.rigs.waiting import until

A, B = (Caller(tenant=name, key_id=name) for name in "ab")


@dataclass
class Pods:
    """A QueueForecast with settable values."""

    queued_s: float = 0.0
    per_s: float = 1000.0
    measured: bool = True
    num_pods: int = 1

    def queue_s(self, launched: int) -> float:
        return self.queued_s + launched / self.per_s

    def compute_s(self, tokens: int) -> float:
        return tokens / self.per_s

    def tokens_per_s(self) -> float:
        return self.per_s


def gate(pods: Pods, **limits: float) -> Gate:
    return Gate(GateLimits(**limits), pods, GatewayMetrics())  # type: ignore[arg-type]


async def nothing() -> int:
    return 0


async def enter(
    g: Gate, caller: Caller = ANONYMOUS, *, work: int = 10, wait_s: float = 60.0, priority: int = 0, held: int = 0
) -> QueueEntry:
    async def cached() -> int:
        return held

    return await g.acquire(caller, priority, work, 2 * work, time.monotonic() + wait_s, cached)


async def soon(g: Gate, caller: Caller = ANONYMOUS, **kwargs: float) -> asyncio.Task[QueueEntry]:
    """Starts a request that has to wait."""
    before = g.waiting
    task = asyncio.create_task(enter(g, caller, **kwargs))  # type: ignore[arg-type]
    while g.waiting == before and not task.done():
        await asyncio.sleep(0)
    return task


async def test_requests_pass_at_once_while_the_pods_keep_up() -> None:
    g = gate(Pods())
    entries = []
    for _ in range(50):
        entries.append(await enter(g))
        g.on_first_token(entries[-1])
    for entry in entries:
        g.release(entry, 20)
    assert g._running == 0


async def test_with_max_running_the_next_request_in_fair_order_passes_after_a_release() -> None:
    g = gate(Pods(), max_running=1)
    first = await enter(g)
    waiting = [await soon(g, A) for _ in range(3)] + [await soon(g, B)]
    assert g.waiting == 4
    order: list[str] = []
    for task, name in zip(waiting, "aaab", strict=True):
        task.add_done_callback(lambda t, name=name: order.append(name))  # type: ignore[misc]
    g.release(first, 20)
    while g.waiting or not all(task.done() for task in waiting):
        await asyncio.sleep(0.005)
        for task in waiting:
            if task.done() and not getattr(task, "left", False):
                task.left = True  # type: ignore[attr-defined]
                g.release(task.result(), 20)
    assert order.index("b") <= 1
    g.stop()


async def test_requests_wait_while_pods_have_long_queues_but_one_always_runs() -> None:
    pods = Pods(queued_s=5.0)
    g = gate(pods)
    only = await enter(g)  # nothing else is out: waiting would not help
    task = await soon(g)
    await asyncio.sleep(0.05)
    assert not task.done()
    pods.queued_s = 0.0
    second = await asyncio.wait_for(task, 20)
    g.release(only, 0)
    g.release(second, 0)


async def test_a_forecast_after_the_deadline_or_max_ttft_is_rejected_at_once() -> None:
    pods = Pods(queued_s=5.0)
    g = gate(pods, max_ttft_s=30)
    await enter(g)
    with pytest.raises(Overloaded) as late:
        await enter(g, wait_s=3.0)
    assert late.value.retry_after_s is not None
    assert late.value.retry_after_s >= 1
    waiting = [await soon(g, A, work=5000) for _ in range(4)]
    with pytest.raises(Overloaded):  # its own requests are in the way
        await enter(g, A, work=8000)
    pods.queued_s = 28.0
    with pytest.raises(Unavailable):  # others' are
        await enter(g, B, work=2000)
    cached = await soon(g, B, work=2000, held=1999)  # what a pod has need not be computed
    assert not cached.done()
    for task in (*waiting, cached):
        task.cancel()
    await asyncio.gather(*waiting, cached, return_exceptions=True)
    assert g.waiting == 0
    g.stop()


async def test_a_forecast_close_to_the_limit_is_rejected() -> None:
    pods = Pods(queued_s=29.0)
    g = gate(pods, max_ttft_s=30)
    await enter(g)
    with pytest.raises(Overloaded):
        await enter(g)
    pods.queued_s = 28.0
    waiting = await soon(g)
    assert not waiting.done()
    await drop(g, waiting)


async def drop(g: Gate, *tasks: asyncio.Task[QueueEntry]) -> None:
    """Cancels waiting requests and checks that none is left."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert g.waiting == 0
    g.stop()


async def test_a_stuck_queue_rejects_new_requests_and_an_empty_one_does_not() -> None:
    now = [0.0]
    g = Gate(GateLimits(max_running=1, max_ttft_s=30), Pods(), GatewayMetrics(), lambda: now[0])
    await enter(g, work=10**6)  # no request is before it
    now[0] = 1.0
    tasks = [await soon(g)]
    now[0] = 29.0
    tasks.append(await soon(g))
    now[0] = 32.0
    with pytest.raises(Overloaded):
        await enter(g)
    await drop(g, *tasks)


async def test_the_forecast_uses_the_measured_speed_of_the_queue() -> None:
    """A request of 20 tokens leaves every 10 s, so three waiting ones and the running one take 30 to 40 s."""
    now = [0.0]
    g = Gate(GateLimits(max_running=1, max_ttft_s=42), Pods(), GatewayMetrics(), lambda: now[0])
    running = await enter(g)
    tasks = [await soon(g) for _ in range(3)]
    for _ in range(3):
        now[0] += 10.0
        g.release(running, 20)
        running = await tasks.pop(0)
        tasks.append(await soon(g))
    for passed in (0.5, 9.0):
        now[0] += passed
        late = await soon(g)
        with pytest.raises(Overloaded):
            await enter(g)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
    await drop(g, *tasks)


async def test_the_queue_is_served_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Pods):
        errors = 3

        def queue_s(self, launched: int) -> float:
            if g.waiting and self.errors:
                self.errors -= 1
                raise ValueError("a bug")
            return super().queue_s(launched)

    pods = Failing()
    g = gate(pods, max_running=1)
    running = await enter(g)
    waiting = await soon(g)
    await until(lambda: pods.errors == 0)
    g.release(running, 20)
    await asyncio.wait_for(waiting, 30)
    assert caplog.text.count("the queue could not be served") == 3
    g.stop()


async def test_without_measurements_no_request_is_delayed_or_rejected() -> None:
    pods = Pods(queued_s=500.0, per_s=1.0, measured=False)
    g = gate(pods, max_ttft_s=5, max_queue=8)
    await enter(g)
    tasks = [await soon(g, work=1000) for _ in range(8)]
    with pytest.raises(Overloaded):
        await enter(g)  # the queue is full
    pods.measured = True
    await drop(g, *tasks)


async def test_cached_tokens_of_waiting_requests_do_not_count_in_the_forecast() -> None:
    g = gate(Pods(queued_s=2.0), max_ttft_s=10)
    await enter(g)
    tasks = [await soon(g, work=5000, held=4900) for _ in range(20)]
    tasks.append(await soon(g, work=5000))
    with pytest.raises(Overloaded):
        await enter(g, work=5000)
    await drop(g, *tasks)


async def test_a_full_queue_evicts_from_the_tenant_with_the_most_waiting_tokens() -> None:
    g = gate(Pods(), max_running=1, max_queue=3)
    await enter(g)
    flood = [await soon(g, A) for _ in range(3)]
    with pytest.raises(Overloaded):
        await enter(g, A)
    other = asyncio.create_task(enter(g, B))
    with pytest.raises(Overloaded):
        await flood[2]
    assert not other.done()
    for task in (*flood, other):
        task.cancel()
    await asyncio.gather(*flood, other, return_exceptions=True)
    assert (g.waiting, g._waiters) == (0, {})
    g.stop()


async def test_a_victim_may_be_cancelled_in_the_same_turn() -> None:
    g = gate(Pods(), max_running=1, max_queue=2)
    await enter(g)
    flood = [await soon(g, A) for _ in range(2)]
    other = asyncio.create_task(enter(g, B))
    flood[1].cancel()  # the task sees it in the next turn, when `other` comes
    while not flood[1].done():
        await asyncio.sleep(0)
    assert not other.done(), other.exception()
    with pytest.raises(asyncio.CancelledError):
        await flood[1]
    assert g.waiting == 2
    await drop(g, flood[0], other)


async def test_passed_deadlines_and_cancelled_clients_leave_no_entry() -> None:
    g = gate(Pods(), max_running=1, max_ttft_s=0)
    first = await enter(g)
    late, gone, stays = await soon(g, wait_s=0.2), await soon(g), await soon(g)
    gone.cancel()
    with pytest.raises(DeadlineExceeded):
        await late
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert g.waiting == 1
    g.release(first, 0)
    entry = await asyncio.wait_for(stays, 20)
    # Passed and cancelled in the same turn of the loop: the entry is released.
    both = await soon(g)
    g.release(entry, 0)
    while not next(iter(g._waiters.values())).done():
        await asyncio.sleep(0)
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    assert (g.waiting, g._running, g._waiters) == (0, 0, {})
    g.stop()
