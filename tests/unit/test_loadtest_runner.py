"""The load test runner with a fake client: sending times, users, sessions, warm-up and stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.client.base import RequestDraft
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.runner import LoadRunner
from loadtest.workload.sessions import ModelAnswer


class FakeLoadClient:
    """A LoadClient without a server. A request takes `seconds` and ends after `together` requests ran at once."""

    def __init__(
        self, seconds: float = 0.02, *, together: int = 0, fails: Callable[[RequestRecord], bool] = lambda _: False
    ) -> None:
        self.seconds = seconds
        self.together = together
        self.drafts: list[RequestDraft] = []
        self.records: list[RequestRecord] = []
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self._fails = fails

    async def model(self) -> str:
        return "fake_client"

    async def build(self, draft: RequestDraft) -> RequestDraft:
        return draft

    async def send(self, request: RequestDraft, record: RequestRecord) -> None:
        record.sent_s = time.perf_counter()
        self.drafts.append(request)
        self.records.append(record)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
            while self.most < self.together:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        record.ended_s = time.perf_counter()
        if self._fails(record):
            record.fail("http 500", "no", record.ended_s)
        else:
            record.answer = ModelAnswer(f"answer to {record.request_id}")

    async def close(self) -> None:
        pass


async def ran(fake_client: FakeLoadClient, **flags: Any) -> Any:
    return await asyncio.wait_for(LoadRunner(LoadConfig.of(flags), fake_client).execute(), 60)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    fake_client = FakeLoadClient(together=30)
    run = await ran(fake_client, rate="100", arrivals="constant", requests="30")
    assert (fake_client.most, len(run.records), run.sent, run.done, run.running) == (30, 30, 30, 30, 0)
    intended = [r.intended_s - run.began for r in sorted(run.records, key=lambda r: r.session)]
    assert intended == pytest.approx([i / 100 for i in range(30)])
    assert all(r.lag_s >= 0 for r in run.records)


async def test_a_delayed_request_keeps_its_intended_time() -> None:
    fake_client = FakeLoadClient(seconds=0.1)
    run = await ran(fake_client, rate="1000", arrivals="constant", requests="12", max_concurrency="3")
    assert fake_client.most == 3
    assert max(r.lag_s for r in run.records) >= 0.25


async def test_users_wait_for_their_answers_and_think() -> None:
    fake_client = FakeLoadClient()
    run = await ran(fake_client, users="4", requests="20")
    assert (fake_client.most, len(run.records)) == (4, 20)
    assert len({d.request_id for d in fake_client.drafts}) == 20
    thoughtful = await ran(FakeLoadClient(), users="2", requests="6", think_s="0.2")
    assert thoughtful.ended - thoughtful.began > 0.1


async def test_a_run_ends_with_its_time() -> None:
    run = await ran(FakeLoadClient(seconds=0.05), users="3", duration_s="0.5")
    assert 3 <= len(run.records) <= 33
    assert max(r.sent_s for r in run.records) - run.began < 0.5 + 10
    assert all(r.intended_s - run.began < 0.5 for r in run.records)


async def test_a_refused_user_pauses() -> None:
    run = await ran(FakeLoadClient(seconds=0.0, fails=lambda _: True), users="1", duration_s="0.8")
    assert 1 <= run.failed <= 2


async def test_conversations_carry_the_answers_on_and_stop_at_an_error() -> None:
    fake_client = FakeLoadClient()
    run = await ran(fake_client, rate="200", requests="9", turns="3")
    by_session: dict[int, list[tuple[RequestRecord, RequestDraft]]] = {}
    for record, built in zip(fake_client.records, fake_client.drafts, strict=True):
        by_session.setdefault(record.session, []).append((record, built))
    assert len(run.records) == 9
    for turns in by_session.values():
        for number, (record, built) in enumerate(turns):
            assert record.turn == number
            assert sorted(built.answers) == list(range(number))
            assert built.affinity == turns[0][1].affinity
        if len(turns) > 1:
            assert turns[1][1].answers[0] == ModelAnswer(f"answer to {turns[0][0].request_id}")
    broken = await ran(FakeLoadClient(fails=lambda r: r.turn == 1), users="1", requests="6", turns="4")
    assert [r.turn for r in broken.records] == [0, 1, 0, 1, 0, 1]
    assert broken.skipped == 6


async def test_warm_up_is_not_counted_and_asks_for_something_else() -> None:
    fake_client = FakeLoadClient()
    run = await ran(fake_client, rate="100", requests="5", warmup="7")
    assert (len(fake_client.records), len(run.records)) == (12, 5)
    seeds = [{p.seed for m in d.turn.messages for p in m.pieces} for d in fake_client.drafts]
    assert not set.union(*seeds[:7]) & set.union(*seeds[7:])


async def test_the_same_requests_abort_in_each_run() -> None:
    def leaving(fake_client: FakeLoadClient) -> dict[int, int]:
        return {r.session: r.abort_after for r in fake_client.records if r.abort_after is not None}

    first, second = FakeLoadClient(), FakeLoadClient()
    for fake_client in (first, second):
        await ran(fake_client, rate="2000", requests="200", abort_share="0.3", output_tokens="9")
    assert leaving(first) == leaving(second)
    assert 35 <= len(leaving(first)) <= 85
    assert set(leaving(first).values()) <= set(range(9))


async def test_sessions_take_the_keys_in_turn() -> None:
    fake_client = FakeLoadClient()
    await ran(fake_client, rate="500", requests="6", api_key=["a", "b", "c"])
    assert sorted(d.key for d in fake_client.drafts) == ["a", "a", "b", "b", "c", "c"]


async def test_a_stopped_run_has_the_finished_requests() -> None:
    fake_client = FakeLoadClient(seconds=30.0)
    runner = LoadRunner(LoadConfig.of({"users": "3", "duration_s": "60"}), fake_client)
    going = asyncio.create_task(runner.execute())
    while fake_client.running < 3:
        await asyncio.sleep(0.01)
    runner.stop()
    run = await asyncio.wait_for(going, 20)
    assert (run.stopped, run.unfinished, len(run.records), fake_client.cancelled) == (True, 3, 0, 3)
