"""One gateway's token stream: numbered batches out, acknowledgements back, and a bound on what lies between.

open --window full--> paused --acknowledged--> open
paused for PAUSE_LIMIT_S --> overrun: the gateway's sequences are ended, new ones are refused until it catches up
any --stream ends--> closed

Invariant: a batch is numbered when it is queued; queued plus sent but unacknowledged batches stay near WINDOW, because
the pause keeps the engine from scheduling the gateway's sequences. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from common.pb import decode_pb2

MAX_UNACKED_BATCHES = 256  # batches; at 10 ms a step 2.5 s of output
PAUSE_LIMIT_S = 10.0


class TokenStream:
    """The pod's side of one Tokens call.

    on_pause(stream, paused) and on_overrun(stream) are called when the gateway falls behind.
    """

    def __init__(
        self,
        gateway_id: str,
        *,
        window: int,
        pause_limit_s: float,
        on_pause: Callable[[TokenStream, bool], None],
        on_overrun: Callable[[TokenStream], None],
    ) -> None:
        self.gateway_id = gateway_id
        self.paused = False
        self.closed = False
        self._on_pause = on_pause
        self._on_overrun = on_overrun
        self._window = window
        self._pause_limit_s = pause_limit_s
        self._number = 0
        self._acked = 0
        self._queue: asyncio.Queue[decode_pb2.TokenBatch | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unacked(self) -> int:
        """Batches queued or sent that the gateway has not consumed."""
        return self._number - self._acked

    def put_batch(self, deltas: Sequence[decode_pb2.SequenceDelta]) -> None:
        """Queues one engine step's news; pauses the gateway's sequences when the window is full."""
        if self.closed or not deltas:
            return
        self._number += 1
        self._queue.put_nowait(decode_pb2.TokenBatch(number=self._number, deltas=deltas))
        if self.unacked >= self._window and not self.paused:
            self.paused = True
            self._timer = asyncio.get_running_loop().call_later(self._pause_limit_s, self._on_overrun, self)
            self._on_pause(self, True)

    def ack(self, number: int) -> None:
        """The gateway consumed every batch up to `number`; numbers that were never sent are clamped."""
        self._acked = max(self._acked, min(number, self._number))
        if self.paused and self.unacked <= self._window // 2:
            self.paused = False
            self._stop_timer()
            self._on_pause(self, False)

    async def batches(self) -> AsyncIterator[decode_pb2.TokenBatch]:
        """Batches in order until the stream is closed."""
        while (batch := await self._queue.get()) is not None:
            yield batch

    def close(self) -> None:
        """Ends `batches` after what is queued. Idempotent."""
        if not self.closed:
            self.closed = True
            self._stop_timer()
            self._queue.put_nowait(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
