"""TokenStream of a decode pod: the window of unacknowledged batches of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.pb import decode_pb2
from decode_service import servicer as servicer_module
from decode_service.servicer import DecodeServicer
from decode_service.token_stream import TokenStream


def delta(request_id: str = "r") -> list[decode_pb2.SequenceDelta]:
    return [decode_pb2.SequenceDelta(request_id=request_id)]


class Gateway:
    """Records the callbacks of a stream."""

    def __init__(self, window: int = 4, pause_limit_s: float = 60.0) -> None:
        self.pauses: list[bool] = []
        self.overruns = 0
        self.stream = TokenStream(
            "gw",
            window=window,
            pause_limit_s=pause_limit_s,
            on_pause=lambda _stream, paused: self.pauses.append(paused),
            on_overrun=lambda _stream: self.overrun(),
        )

    def overrun(self) -> None:
        self.overruns += 1


async def test_batches_are_numbered_from_one_and_end_with_the_stream() -> None:
    stream = Gateway().stream
    for _ in range(3):
        stream.put_batch(delta())
    stream.put_batch([])
    stream.close()
    stream.put_batch(delta())
    assert [batch.number async for batch in stream.batches()] == [1, 2, 3]


async def test_a_full_window_pauses_once_and_half_of_it_resumes() -> None:
    gateway = Gateway(window=4)
    for _ in range(6):
        gateway.stream.put_batch(delta())
    assert gateway.pauses == [True]
    gateway.stream.ack(3)
    assert gateway.pauses == [True]
    gateway.stream.ack(4)
    assert gateway.pauses == [True, False]
    gateway.stream.ack(1)  # late
    assert gateway.stream.unacked == 2
    gateway.stream.ack(10**9)  # never sent
    assert gateway.stream.unacked == 0
    gateway.stream.close()


async def test_a_pause_that_lasts_is_an_overrun_and_one_that_ends_is_not() -> None:
    import asyncio

    slow, quick = Gateway(window=1, pause_limit_s=0.01), Gateway(window=1, pause_limit_s=0.01)
    for gateway in (slow, quick):
        gateway.stream.put_batch(delta())
    quick.stream.ack(1)
    while not slow.overruns:
        await asyncio.sleep(0.01)
    assert (slow.overruns, quick.overruns) == (1, 0)
    assert slow.stream.paused


async def test_a_fault_in_the_acknowledgements_ends_the_call_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Admission", "_require_own_id"):
        monkeypatch.setattr(servicer_module, name, lambda _: None)

    class Requests(list[Any]):
        """No requests."""

    async def messages() -> AsyncIterator[decode_pb2.TokensRequest]:
        yield decode_pb2.TokensRequest(gateway_id="gw")
        await asyncio.sleep(0)
        raise ValueError("a fault")

    async def no_headers(_: Any) -> None:
        pass

    pod: Any = SimpleNamespace(requests=Requests(), role=SimpleNamespace(require=lambda *_: None))
    context: Any = SimpleNamespace(send_initial_metadata=no_headers)
    before = asyncio.all_tasks()
    with pytest.raises(ValueError, match="a fault"):
        async for _ in DecodeServicer(pod).Tokens(messages(), context):
            pass
    assert asyncio.all_tasks() == before
