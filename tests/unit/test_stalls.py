"""Stalled requests: a request is stalled after a bound without a message, while its pod makes no progress."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BatonError
from common.types import PodLoad, PoolCounts
from gateway.pods.info import PodActivity, PodInfo
from gateway.pods.stalls import StallFinder, Suspicion, stall_bound_s
from gateway.pods.view import PodView

PERIOD = 1.5
BLOCKS = PoolCounts(1, 1, 1, 1)


@dataclass(eq=False)
class Request:
    """A request that counts its messages."""

    messages: int = 0
    waits_elsewhere: bool = False
    asked: list[tuple[Suspicion, bool]] = field(default_factory=list)

    def progress(self, suspicion: Suspicion, *, queued: bool) -> int | None:
        self.asked.append((suspicion, queued))
        return None if self.waits_elsewhere else self.messages

    def on_stalled(self, error: BatonError) -> None:
        raise AssertionError("the finder only says who is stalled")


@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(0.1, 2 * PERIOD), st.floats(2 * PERIOD + 0.01, 500.0)),
            st.sampled_from([None, *Suspicion, Suspicion.NO_STEP]),
            st.sets(st.integers(0, 3)),  # requests with a message
        ),
        max_size=60,
    ),
    st.floats(3.0, 12.0),
)
def test_a_request_is_stalled_after_a_bound_without_news_and_with_suspicion(
    ticks: list[tuple[float, Suspicion | None, set[int]]], bound: float
) -> None:
    finder, requests, now = StallFinder(PERIOD), [Request() for _ in range(4)], 0.0
    finder.tick(now, None, bound, lambda: requests)
    waited: dict[int, float | None] = dict.fromkeys(range(4))
    for elapsed, suspicion, news in ticks:
        now += elapsed
        for number in news:
            requests[number].messages += 1
        stalled = finder.tick(now, suspicion, bound, lambda: requests)
        credit = elapsed if elapsed <= 2 * PERIOD else PERIOD
        expected = []
        for number, request in enumerate(requests):
            before = waited[number]
            if suspicion is None:
                waited[number] = None
            elif before is None or number in news:
                waited[number] = 0.0
            else:
                waited[number] = before + credit
                if before + credit >= bound:
                    expected.append(request)
                    waited[number] = None
        if all(abs((w or 0.0) - bound) > 1e-6 for w in waited.values()):
            assert stalled == expected


def test_a_request_that_waits_for_something_else_is_not_stalled() -> None:
    finder, waits, runs = StallFinder(PERIOD), Request(waits_elsewhere=True), Request()
    for second in range(20):
        stalled = finder.tick(float(second), Suspicion.NO_STEP, 12.0, lambda: [waits, runs], queued=True)
        assert stalled == ([runs] if second == 12 else [])
    assert waits.asked[0] == (Suspicion.NO_STEP, True)


def test_requests_are_not_asked_without_a_suspicion_or_a_bound() -> None:
    finder, request = StallFinder(PERIOD), Request()
    for second in range(30):
        assert finder.tick(float(second), None, 10.0, lambda: [request]) == []
        assert finder.tick(second + 0.5, Suspicion.SILENT, 0.0, lambda: [request]) == []
    assert request.asked == []


def info(generation: int = 1, stuck: str = "") -> PodInfo:
    from common.types import Role

    return PodInfo(
        name="p",
        generation=generation,
        address="a",
        role=Role.DECODE,
        model="m",
        fingerprint="f",
        scope="s",
        block_size=16,
        block_bytes=1,
        max_model_len=1,
        num_blocks=1,
        vocab_size=1,
        ready=True,
        draining=False,
        stuck=stuck,
    )


def suspicions(*answers: tuple[PodInfo, int | None, int] | None) -> list[Suspicion | None]:
    """Returns the suspicion after each answer to Info: (facts, steps, running sequences), None without an answer."""
    finder, found = StallFinder(PERIOD), []
    for answer in answers:
        if answer is None:
            found.append(finder.suspect(None, None, None, answered=False))
            continue
        facts, steps, running = answer
        activity = PodActivity(BLOCKS, steps=steps)
        found.append(finder.suspect(facts, activity, PodLoad(running=running), answered=True))
    return found


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(info(), 5, 1), (info(), 6, 1)], [None, None]),
        ([(info(), 5, 1), (info(), 5, 1)], [None, Suspicion.NO_STEP]),
        ([(info(), 5, 0), (info(), 5, 0)], [None, None]),
        ([(info(1), 5, 1), (info(2), 5, 1)], [None, None]),
        ([(info(), None, 1), (info(), None, 1)], [None, None]),
        ([(info(stuck="the engine is stuck"), 5, 0)], [Suspicion.STUCK]),
        ([(info(), 5, 1), None, (info(), 5, 1)], [None, Suspicion.SILENT, Suspicion.NO_STEP]),
    ],
    ids=["steps", "no step", "nothing runs", "restarted", "an older pod", "stuck", "silent"],
)
def test_what_an_answer_to_info_says(
    answers: list[tuple[PodInfo, int | None, int] | None], expected: list[Suspicion | None]
) -> None:
    assert suspicions(*answers) == expected


def test_the_bound_follows_the_steps_of_the_pod() -> None:
    view = PodView("p", block_size=16, max_request_tokens=1, num_blocks=1)
    assert stall_bound_s(10.0, None, None) == 10.0
    assert stall_bound_s(0.0, view, None) == 0.0
    assert stall_bound_s(10.0, view, None) == 10.0
    view.apply_report(PodLoad(step_s=2.0, step_slope_s=0.5, running=2), 1.0)
    assert stall_bound_s(10.0, view, None) == 60.0
    assert stall_bound_s(10.0, view, PodActivity(BLOCKS, step_bound_s=90.0)) == 90.0
