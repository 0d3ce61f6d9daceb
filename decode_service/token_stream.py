"""Token stream of one gateway: numbered batches out, acknowledgements back, and a bound on the batches in between.

    open --window full--> paused --acknowledged--> open
    paused for PAUSE_LIMIT_S --> overrun: the gateway's sequences end, and Reserve refuses it until it catches up
    any --the gateway leaves--> closed

A batch gets its number when it is queued. Queued and unacknowledged batches stay near MAX_UNACKED_BATCHES, because the
engine does not schedule the sequences of a paused gateway. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from common.pb import decode_pb2

MAX_UNACKED_BATCHES = 256  # 2.5 s of output at 10 ms per step
PAUSE_LIMIT_S = 10.0


@dataclass(eq=False, kw_only=True)
class TokenStream:
    """The pod's side of one Tokens call."""

    gateway_id: str = field(kw_only=False)
    window: int  # Unacknowledged batches at which the stream pauses
    pause_limit_s: float
    on_pause: Callable[[TokenStream, bool], None]  # Called with the stream and whether it is paused, at each change
    on_overrun: Callable[[TokenStream], None]  # Called when the stream was paused for pause_limit_s seconds
    paused: bool = field(default=False, init=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._number = 0
        self._acked = 0
        self._queue: asyncio.Queue[decode_pb2.TokenBatch | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unacked(self) -> int:
        """Batches that the gateway has not acknowledged, queued ones included."""
        return self._number - self._acked

    def put_batch(self, deltas: Sequence[decode_pb2.SequenceDelta]) -> None:
        """Queues the deltas of one engine step, and pauses the stream when the window is full."""
        if self.closed or not deltas:
            return
        self._number += 1
        self._queue.put_nowait(decode_pb2.TokenBatch(number=self._number, deltas=deltas))
        if self.unacked >= self.window and not self.paused:
            self.paused = True
            self._timer = asyncio.get_running_loop().call_later(self.pause_limit_s, self.on_overrun, self)
            self.on_pause(self, True)

    def ack(self, number: int) -> None:
        """Records that the gateway consumed every batch up to `number`. A number that was never sent is clamped."""
        self._acked = max(self._acked, min(number, self._number))
        if self.paused and self.unacked <= self.window // 2:
            self.paused = False
            self._stop_timer()
            self.on_pause(self, False)

    async def batches(self) -> AsyncIterator[decode_pb2.TokenBatch]:
        """Yields batches in order until the stream is closed."""
        while (batch := await self._queue.get()) is not None:
            yield batch

    def close(self) -> None:
        """Ends `batches` after the queued ones. Idempotent."""
        if not self.closed:
            self.closed = True
            self._stop_timer()
            self._queue.put_nowait(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
