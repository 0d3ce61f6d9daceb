"""The bounds of engine steps: from measured rates, from the warm-up, and on the ranks of a tensor-parallel pod."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from common.process import watchdog
from common.process.rank_channel import RankMessage
from common.process.watchdog import EXIT_STUCK, Heartbeat, Watchdog
from engine.loop import EngineLoop
from engine.parallel import rank as rank_module
from engine.parallel.rank import Rank, serve
from engine.parallel.rank_group import ENGINE_KINDS
from engine.schedule.outputs import Inbox, OnStep, StepResult
from engine.schedule.scheduler import ScheduledSequence
from pod.monitoring.rates import PodRates
from pod.monitoring.watch import PodWatch

FULL = 256


def step(chunks: list[int], decodes: int) -> list[ScheduledSequence]:
    """Returns a step with prompt chunks of these sizes and with `decodes` decoding sequences."""
    seq: Any = None
    parts = [ScheduledSequence(seq, 0, tokens, False) for tokens in chunks]
    return parts + [ScheduledSequence(seq, 9, 1, True, is_decode=True)] * decodes


def watch(*steps: list[ScheduledSequence], rates: PodRates, device: str = "cpu", stuck_s: float = 10.0) -> PodWatch:
    group = SimpleNamespace(step_bound_s=0.0)
    engine: Any = SimpleNamespace(
        device=SimpleNamespace(type=device),
        steps_under_way=steps,
        rank_group=group,
        scheduler=SimpleNamespace(config=SimpleNamespace(max_step_tokens=FULL, max_seqs=8)),
    )
    loop: Any = SimpleNamespace(heartbeat=Heartbeat())
    return PodWatch(stuck_s, engine, loop, loop, rates, on_stuck=lambda _: None, on_change=lambda: None)


def measured(prompt_s: float, decode_s: float) -> PodRates:
    """Returns rates after steps of FULL prompt tokens in `prompt_s` seconds, and of one decode in `decode_s` seconds.

    Half of a decode step's time does not depend on the number of sequences.
    """
    rates = PodRates(FULL)
    for _ in range(9):
        rates.observe_step(FULL, 0, prompt_s)
        rates.observe_step(0, 1, decode_s)
    return rates


@pytest.mark.parametrize(
    ("steps", "bound_s"),
    [
        ([], 10.0),
        ([step([FULL], 0)], 40.0),
        ([step([FULL // 2, FULL // 4], 0)], 30.0),
        ([step([], 1)], 20.0),
        ([step([], 3)], 40.0),
        ([step([FULL], 1)], 60.0),
        ([step([], 1), step([FULL], 1)], 70.0),
    ],
)
def test_a_step_may_take_twenty_times_its_predicted_time(steps: list[list[ScheduledSequence]], bound_s: float) -> None:
    assert watch(*steps, rates=measured(2.0, 1.0)).step_bound_s() == pytest.approx(bound_s)


def test_the_bound_is_at_least_the_setting() -> None:
    assert watch(step([FULL], 3), rates=measured(0.1, 0.01)).step_bound_s() == 10.0
    assert watch(step([FULL], 3), rates=measured(0.1, 0.01), stuck_s=0.0).step_bound_s() == 0.0


def test_a_step_without_measured_rates_is_bounded_by_the_warm_up() -> None:
    """A large prompt on a CPU takes much longer than the prompt of the warm-up, on a GPU it does not."""
    cpu, gpu = (watch(step([FULL], 0), rates=PodRates(FULL), device=device) for device in ("cpu", "cuda"))
    cpu.warm_up_s = gpu.warm_up_s = 0.6
    assert cpu.step_bound_s() == pytest.approx(20 * 0.6 * FULL)
    assert gpu.step_bound_s() == pytest.approx(20 * 0.6)


def test_the_ranks_get_the_bound_of_the_largest_step() -> None:
    found = watch(step([], 1), rates=measured(2.0, 1.0))
    assert found._sampled_bound_s() == pytest.approx(20.0)
    group: Any = found._engine.rank_group
    assert group.step_bound_s == pytest.approx(20 * (2.0 + 0.5 + 8 * 0.5))


class Channel:
    """A double of the channel to rank 0. It gives these messages, and then "stop" once `over` is set."""

    def __init__(self, *messages: RankMessage) -> None:
        self._messages = list(messages)
        self.over = threading.Event()

    def receive(self) -> RankMessage:
        if self._messages:
            return self._messages.pop(0)
        self.over.wait()
        return RankMessage("stop", {}, b"")


@pytest.mark.parametrize(("bound_s", "ends"), [(0.1, True), (0.0, False)])
def test_a_rank_that_waits_longer_than_the_bound_ends_itself(
    monkeypatch: pytest.MonkeyPatch, bound_s: float, ends: bool
) -> None:
    """When one rank ends, all end. Before the pod is ready there is no bound, and the rank waits."""
    exits: list[int] = []
    ended, waits = threading.Event(), threading.Event()

    def end(code: int) -> None:
        exits.append(code)
        ended.set()

    def made(stuck_s: float) -> Watchdog:
        return Watchdog(stuck_s, end=end)

    monkeypatch.setattr(watchdog, "PERIOD_S", 0.02)
    monkeypatch.setattr(rank_module, "Watchdog", made)
    channel: Any = Channel(RankMessage("step", {"bound_s": bound_s}, b""))
    rank = Rank(1, [channel] * len(ENGINE_KINDS))

    monkeypatch.setattr(rank, "_step", lambda _: waits.wait(60))
    thread = threading.Thread(target=serve, args=(rank,))
    thread.start()
    assert ended.wait(30 if ends else 1.0) == ends
    assert set(exits) == ({EXIT_STUCK} if ends else set())
    waits.set()
    channel.over.set()
    thread.join()


def test_a_rank_waits_for_messages_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.02)
    monkeypatch.setattr(rank_module, "Watchdog", lambda stuck_s: Watchdog(stuck_s, end=exits.append))
    channel: Any = Channel(RankMessage("step", {"bound_s": 0.5}, b""))
    rank = Rank(1, [channel] * len(ENGINE_KINDS))
    monkeypatch.setattr(rank, "_step", lambda _: None)
    thread = threading.Thread(target=serve, args=(rank,))
    thread.start()
    channel.over.wait(2.0)
    channel.over.set()
    thread.join()
    assert exits == []


def test_the_heart_does_not_beat_while_the_device_ends_no_step() -> None:
    """With overlap the loop polls the device, and runs the messages that arrive meanwhile."""
    device_ends = threading.Event()

    class HungEngine:
        """An engine with a step on a device that hangs."""

        device = SimpleNamespace(type="cpu")
        failure = None
        scheduler = SimpleNamespace(request_ids=list)
        pool = SimpleNamespace()

        @property
        def has_work(self) -> bool:
            return not device_ends.is_set()

        def step(self, _on_step: OnStep, inbox: Inbox) -> StepResult:
            while not device_ends.is_set():
                inbox(time.perf_counter() + 0.001)
            return StepResult()

        def finish_in_flight(self, _on_step: OnStep) -> None:
            pass

    engine: Any = HungEngine()
    loop = EngineLoop(engine, lambda _: None)
    loop.start()
    assert loop.call(lambda: True).result(30)
    beats = loop.heartbeat.beats
    for _ in range(5):
        assert loop.call(lambda: loop.heartbeat.beats).result(30) == beats
    assert not loop.heartbeat.idle
    device_ends.set()
    end = time.monotonic() + 30
    while not (loop.heartbeat.beats > beats and loop.heartbeat.idle) and time.monotonic() < end:
        time.sleep(0.001)
    assert loop.heartbeat.beats > beats
    loop.stop(30)
    assert loop.heartbeat.idle
