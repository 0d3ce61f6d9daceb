"""TokenQueue and Attempt.on_delta: each token is given once, in order, by `next` and by `relay`."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError
from common.pb import decode_pb2, types_pb2
from common.types import FinishReason, SamplingParams, Token, ValidRequest
from gateway.dispatch.attempt import Attempt
from gateway.dispatch.token_queue import TokenQueue
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline


def bring(queue: TokenQueue, index: int) -> bool:
    """Puts one token as Attempt does. Returns whether it was relayed at once."""
    if queue.relay_token_id(index, 100 + index):
        return True
    assert queue.put(0, [Token(index, 100 + index)], None)
    return False


async def relaying(
    queue: TokenQueue,
    on_token_id: Callable[[int], bool],
    on_tokens: Callable[[Sequence[Token], FinishReason | None], bool],
) -> asyncio.Task[None]:
    """Returns a task that relays and waits for tokens."""
    task = asyncio.create_task(queue.relay(on_tokens, on_token_id))
    await asyncio.sleep(0)
    return task


@given(
    arrivals=st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.booleans()), max_size=12),
    at_once=st.booleans(),
)
def test_each_token_is_given_once_in_order_by_next_and_by_relay(
    arrivals: list[tuple[list[int], bool]], at_once: bool
) -> None:
    """The reader calls `next` and `relay` in turn. It may run between two arrivals."""
    got: list[int] = []
    finishes: list[FinishReason] = []

    def on_tokens(tokens: Sequence[Token], finish: FinishReason | None) -> bool:
        got.extend(token.id for token in tokens)
        if finish is not None:
            finishes.append(finish)
        return True

    def on_token_id(token_id: int) -> bool:
        got.append(token_id)
        return True

    async def read(queue: TokenQueue) -> None:
        while not queue.complete:
            delta = await queue.next()
            on_tokens(delta.tokens, delta.finish)
            if not queue.complete:
                await queue.relay(on_tokens, on_token_id)

    async def run() -> None:
        queue = TokenQueue(1, 100)
        reader = asyncio.create_task(read(queue))
        for indices, pause in [*arrivals, *(([i], not at_once) for i in range(10))]:
            if len(indices) == 1:
                bring(queue, indices[0])
            else:
                queue.put(0, [Token(i, 100 + i) for i in indices], None)
            for _ in range(3 * pause):
                await asyncio.sleep(0)
        queue.put(0, [], FinishReason.STOP)
        await reader

    asyncio.run(run())
    assert got == list(range(100, 110))
    assert finishes == [FinishReason.STOP]


async def test_relay_token_id_works_only_while_a_reader_relays() -> None:
    queue, got = TokenQueue(1, 100), list[int]()
    assert not bring(queue, 0)
    assert (await queue.next()).tokens == [Token(0, 100)]

    def until_three(token_id: int) -> bool:
        got.append(token_id)
        return len(got) < 3

    task = await relaying(queue, until_three, lambda tokens, finish: pytest.fail("they come alone"))
    assert [bring(queue, i) for i in range(1, 5)] == [True, True, True, False]  # the third was enough
    await task
    assert got == [101, 102, 103]
    assert (await queue.next()).tokens == [Token(4, 104)]
    assert not bring(queue, 5)


async def test_an_exception_of_the_relaying_reader_does_not_reach_the_pod_stream() -> None:
    queue = TokenQueue(1, 100)

    def broken(token_id: int) -> bool:
        raise ZeroDivisionError

    task = await relaying(queue, broken, lambda tokens, finish: True)
    assert bring(queue, 0)
    assert not bring(queue, 1)
    with pytest.raises(ZeroDivisionError):
        await task
    assert (await queue.next()).tokens == [Token(1, 101)]


def attempt_of(request: ValidRequest) -> Attempt:
    plan: Any = SimpleNamespace(request=request, router=SimpleNamespace(metrics=GatewayMetrics()))
    return Attempt(plan, deadline=time.monotonic() + 60, timeline=Timeline("r", None, "completions"))


async def test_fields_beside_a_token_count_while_it_is_relayed() -> None:
    attempt = attempt_of(ValidRequest("r", "m", (1, 2, 3), SamplingParams(max_tokens=9)))
    alone: list[int] = []
    others: list[tuple[list[int], FinishReason | None]] = []

    def on_tokens(tokens: Sequence[Token], finish: FinishReason | None) -> bool:
        others.append(([token.id for token in tokens], finish))
        return True

    def on_token_id(token_id: int) -> bool:
        alone.append(token_id)
        return True

    task = await relaying(attempt.token_queue, on_token_id, on_tokens)
    drafts = decode_pb2.Speculation(proposed=4, accepted=0)
    more: list[dict[str, Any]] = [{}, {"cached_tokens": 2}, {"speculation": drafts}, {}]
    for index, fields in enumerate(more):
        token = types_pb2.Token(index=index, id=100 + index)
        attempt.on_delta(decode_pb2.SequenceDelta(request_id="r", tokens=[token], **fields))
    assert (alone, others) == ([100, 103], [([101], None), ([102], None)])
    assert (attempt.cached_tokens, attempt.drafts_proposed) == (2, 4)
    token = types_pb2.Token(index=4, id=104)
    attempt.on_delta(
        decode_pb2.SequenceDelta(request_id="r", tokens=[token], finish_reason=types_pb2.FINISH_REASON_LENGTH)
    )
    assert others[-1] == ([104], FinishReason.LENGTH)
    assert attempt.token_queue.complete
    await task
    attempt.close()


async def test_a_resumed_sequence_keeps_its_number_and_its_tokens() -> None:
    request = ValidRequest("r", "m", (1,), SamplingParams(max_tokens=8, n=3)).resumed(2, [100, 101])
    assert (request.child_indices, request.context_ids, request.sampling.n) == (range(2, 3), (1, 100, 101), 1)
    attempt = attempt_of(request)
    assert attempt.token_queue.unfinished() == {0: array("I", [100, 101])}
    for index in (1, 2):  # the first of them is there already
        token = types_pb2.Token(index=index, id=100 + index, child=2)
        attempt.on_delta(decode_pb2.SequenceDelta(request_id="r", tokens=[token], child=2))
    assert await attempt.token_queue.next() == ([Token(2, 102, child=2)], None, 0)
    attempt.on_delta(decode_pb2.SequenceDelta(request_id="r", tokens=[types_pb2.Token(index=3, id=1)]))
    with pytest.raises(InternalError, match="sequence 0"):  # the attempt has only sequence 2
        await attempt.token_queue.next()
    attempt.close()


async def test_a_reader_that_starts_late_can_still_relay() -> None:
    """The tokens before its `next` are one delta, and no entry is left that would end its relay at once."""
    queue, got = TokenQueue(1, 100), list[int]()
    for index in range(3):
        assert not bring(queue, index)
    assert [token.index for token in (await queue.next()).tokens] == [0, 1, 2]

    def on_token_id(token_id: int) -> bool:
        got.append(token_id)
        return True

    task = await relaying(queue, on_token_id, lambda _tokens, _finish: True)
    assert bring(queue, 3)
    assert got == [103]
    task.cancel()
