"""TokenStream of a decode pod: the window of unacknowledged batches of a gateway."""

from __future__ import annotations

from common.pb import decode_pb2
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
