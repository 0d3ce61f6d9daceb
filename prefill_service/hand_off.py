"""One prompt on a prefill pod: chunks in, blocks and the first token out.

    begin -> chunk* -> first token -> handed off
    any state -> ended early by an error, an abort or the deadline

Where the KV goes may be said later than the prompt: until then its blocks are held here, and nothing else waits.

Three threads meet here. The engine thread calls `on_output` after each step: it takes reader holds on the blocks that
the chunk completed and pushes them, so the sequence's lease may end while writes are in flight. The transfer thread
calls `on_progress`. Everything else runs on the event loop. The trace lists events in the order in which they happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import abc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from common.errors import BatonError, Cancelled, DeadlineExceeded
from common.pb import prefill_pb2
from common.types import FinishReason, KvTarget, PromptLogprobs, Token
from common.wire import error_to_pb, finish_reason_to_pb, prompt_logprobs_to_pb, token_to_pb
from engine.engine import SequenceOutput
from engine.kv.blocks import BlockPin
from engine.schedule.sequence import Sequence
from kv_transfer.messages import TransferReport
from kv_transfer.sender.transfers import OutgoingTransfer

Event = prefill_pb2.PrefillEvent
MAX_REPORTED_PUSHES = 256  # that are told one by one


@dataclass(frozen=True, slots=True)
class HandOffEvent:
    """One entry: kind is chunk (value: computed tokens), delivered (blocks so far), first_token (its id) or end.

    start, at: a time.monotonic() each; only a chunk has a start.
    """

    kind: str
    value: int
    at: float
    start: float = 0.0


class _PushPin:
    """A reader hold that tells when it is over."""

    def __init__(self, hold: BlockPin, over: Callable[[], None]) -> None:
        self._hold = hold
        self._over = over

    @property
    def blocks(self) -> abc.Sequence[int]:
        return self._hold.blocks

    def release(self, blocks: abc.Sequence[int] | None = None) -> None:
        """Any thread."""
        self._hold.release(blocks)
        if not self._hold.pinned:
            self._over()


@dataclass(slots=True)
class Push:
    """Blocks of one chunk; start, end: when they were handed to the transfer, and when no write of them was left."""

    blocks: int
    start: float
    end: float = 0.0


class PrefillHandOff:
    """The life of one prefill request, whose n sequences end here with their first tokens. Built, iterated and closed
    on the event loop.

    abort_sequence ends the sequence in the engine; it is called once, when the hand-off ends before its first token.
    handed_off accounts the transfer and the seconds since its first push, once it is complete. Call `direct` once.
    """

    def __init__(
        self,
        seq: Sequence,
        deadline_s: float,
        abort_sequence: Callable[[], None],
        handed_off: Callable[[TransferReport, float], None],
    ) -> None:
        self.seq = seq
        self.target: KvTarget | None = None
        self.history: list[HandOffEvent] = []
        self._lock = threading.Lock()  # of the four below
        self._transfer: OutgoingTransfer | None = None
        self._held_pushes: list[tuple[int, _PushPin]] = []  # pushes that wait for a target
        self._finished: tuple[list[int], list[FinishReason | None]] | None = None
        self._abandoned = False  # there will be no target
        self._abort_sequence = abort_sequence
        self._record_hand_off = handed_off
        self._aio = asyncio.get_running_loop()
        self._engine_ended = asyncio.Event()
        self._inbox: asyncio.Queue[Event | TransferReport | BatonError] = asyncio.Queue()
        self.arrived_at = time.monotonic()
        self.outcome: TransferReport | BatonError | None = None
        self.pulled_from: tuple[str, float] | None = None  # from which pod a prefix was pulled, and until when
        self.deadline = self.arrived_at + deadline_s
        self._first_chunk_at: float | None = None
        self._first_push_at = 0.0
        self._transfer_s = 0.0  # from the first push to the commit
        self._next_block = 0
        self._has_first_token = False
        self._first_tokens: list[tuple[int, FinishReason | None]] = []  # by child
        self.closed = asyncio.Event()
        self._open_pushes: set[int] = set()  # first blocks of pushes that are not over
        self.pushes: dict[int, Push] = {}  # by first block
        self._read_over = asyncio.Event()
        self._transfer_over: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()  # there is a target, or there will be none

    def set_target(self, target: KvTarget, transfer: OutgoingTransfer) -> None:
        """Where the KV goes; what is there already goes at once. On the event loop. Raises InvalidRequest."""
        with self._lock:
            assert self._transfer is None, "directed twice"
            self.target, self._transfer = target, transfer
            self._next_block = max(self._next_block, target.first_block)
            transfer.on_progress = self.on_progress
            early, self._held_pushes = self._held_pushes, []
            for first, reading in early:
                transfer.push(first, reading.blocks, reading)
            if self._finished is not None:
                transfer.finish(*self._finished)
        self._transfer_over = self._aio.create_task(self._await_transfer())
        self._decided.set()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return 0 if self._has_first_token or self.closed.is_set() else self.seq.prefill_len - self.seq.computed

    # -- engine thread ------------------------------------------------------------------------------------------------

    def on_output(self, output: SequenceOutput, seconds: float) -> None:
        """News from a step that took `seconds`; the sequence's lease still stands."""
        now = time.monotonic()
        if output.error is not None or output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._post(output.error or Cancelled("the request was aborted"))
            self.on_engine_released()
            return
        if self._first_chunk_at is None:
            self._first_chunk_at = now - seconds
        chunk = output.seq is self.seq  # else it only tells the first token of another child
        if chunk:
            self.history.append(HandOffEvent("chunk", min(output.computed, self.seq.prefill_len), now, now - seconds))
        # What the gateway waits for goes first: posting writes takes the interpreter from the loop that sends it. For
        # the last chunk's news nobody waits: they go when the hand-off is over.
        if chunk and (output.prompt_logprobs is not None or not output.tokens):
            self._post(Event(progress=self._progress(output.computed, output.prompt_logprobs)))
        if output.tokens:
            token = output.tokens[0]
            self._first_tokens.append((token.id, output.finish_reason))
            self.history.append(HandOffEvent("first_token", token.id, now))
            self._post(Event(first_token=self._first_token(token, output.finish_reason, now)))
        if chunk:
            self._push(output.computed, output.computed >= self.seq.prefill_len)
        if len(self._first_tokens) == self.seq.request.sampling.n:
            tokens, finishes = [token for token, _ in self._first_tokens], [finish for _, finish in self._first_tokens]
            with self._lock:
                self._finished = tokens, finishes
                if self._transfer is not None:
                    self._transfer.finish(tokens, finishes)
            self.on_engine_released()

    def on_step_failed(self, output: SequenceOutput, error: BatonError) -> None:
        """What the step did for this request could not be handed on: the request ends."""
        self._post(error)
        if output.ended:
            self.on_engine_released()
        self._aio.call_soon_threadsafe(self.close)

    def _push(self, computed: int, done: bool) -> None:
        lease = self.seq.lease
        assert lease is not None, "a sequence that computed has a lease"
        size = self.seq.block_size
        end = -(-self.seq.prefill_len // size) if done else computed // size
        if end > self._next_block:  # after a preemption the first chunks repeat blocks that already went
            first, self._next_block = self._next_block, end
            now = time.monotonic()
            self._first_push_at = self._first_push_at or now
            self.pushes[first] = Push(end - first, now)
            reading = _PushPin(lease.pin_for_read(first, end - first), lambda: self._reading_ended(first))
            self._open_pushes.add(first)
            with self._lock:
                if self._transfer is not None:
                    self._transfer.push(first, reading.blocks, reading)
                elif self._abandoned:
                    reading.release()
                else:
                    self._held_pushes.append((first, reading))

    def on_engine_released(self) -> None:
        """The engine has let go of the sequence (any thread)."""
        self._aio.call_soon_threadsafe(self._engine_ended.set)

    def on_refused(self, error: BatonError) -> None:
        """The engine did not take the sequence (any thread)."""
        self._post(error)
        self.on_engine_released()

    # -- transfer thread ----------------------------------------------------------------------------------------------

    def on_progress(self, delivered: int) -> None:
        """`delivered` blocks have reached the target so far."""
        self.history.append(HandOffEvent("delivered", delivered, time.monotonic()))

    def _reading_ended(self, first: int) -> None:
        self.pushes[first].end = time.monotonic()

        def end() -> None:
            self._open_pushes.discard(first)
            self._read_over.set()

        self._aio.call_soon_threadsafe(end)

    # -- event loop ---------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[Event]:
        """Progress per chunk, the first token, the hand-off's outcome.

        Raises the error that ended the request when no first token has been sent; later failures are a Failed event.
        """
        while True:
            item = await self._next()
            if isinstance(item, TransferReport):
                self.outcome = item
                self.history.append(HandOffEvent("end", item.blocks, time.monotonic()))
                yield Event(handed_off=self._handed_off(item))
                return
            if isinstance(item, BatonError):
                self.outcome = item
                if not self._has_first_token:
                    raise item
                yield Event(failed=error_to_pb(item))
                return
            self._has_first_token |= item.HasField("first_token")
            yield item

    async def _next(self) -> Event | TransferReport | BatonError:
        left = self.deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0.0)):  # wait_for may swallow the cancellation of the call (3.11)
                return await self._inbox.get()
        except TimeoutError:
            return DeadlineExceeded("the request's deadline passed during prefill")

    async def _await_transfer(self) -> None:
        assert self._transfer is not None
        try:
            report = await self._transfer.done()
        except BatonError as error:
            self._inbox.put_nowait(error)
            return
        self._transfer_s = time.monotonic() - self._first_push_at if report.blocks else 0.0
        self._record_hand_off(report, self._transfer_s)
        if self.outcome is None:  # what is told of a drained request need not wait until its events are read
            self.outcome = report
        self._inbox.put_nowait(Event(progress=self._progress(self.seq.prefill_len)))
        self._inbox.put_nowait(report)

    def fail(self, error: BatonError) -> None:
        """Ends the request's event stream with `error` (Abort, drain)."""
        self._inbox.put_nowait(error)

    def close(self) -> None:
        """Ends what still runs: the sequence before its first token, the transfer before its commit. Idempotent."""
        if self.closed.is_set():
            return
        self.closed.set()
        if not self._engine_ended.is_set():
            self._abort_sequence()
        with self._lock:
            self._abandoned = True
            early, self._held_pushes = self._held_pushes, []
            if self._transfer is not None:
                self._transfer.abort("the prefill request ended")
        for _, reading in early:
            reading.release()
        self._decided.set()

    async def target_decided(self) -> None:
        """Returns when there is a target, or there will be none."""
        await self._decided.wait()

    async def drained(self) -> None:
        """Returns when neither the engine nor a posted write holds anything for this request any more."""
        await self._engine_ended.wait()
        await self.target_decided()
        if self._transfer_over is not None:
            await self._transfer_over
        while self._open_pushes:
            self._read_over.clear()
            await self._read_over.wait()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _post(self, item: Event | BatonError) -> None:
        self._aio.call_soon_threadsafe(self._inbox.put_nowait, item)

    def _progress(self, computed: int, scores: PromptLogprobs | None = None) -> prefill_pb2.PrefillProgress:
        return prefill_pb2.PrefillProgress(
            computed_tokens=computed,
            cached_tokens=self.seq.cached_tokens,
            delivered_blocks=0 if self._transfer is None else self._transfer.delivered_blocks,
            prompt_logprobs=None if scores is None else prompt_logprobs_to_pb(scores),
        )

    def _first_token(self, token: Token, finish: FinishReason | None, now: float) -> prefill_pb2.FirstToken:
        started = self.arrived_at if self._first_chunk_at is None else self._first_chunk_at
        return prefill_pb2.FirstToken(
            token=token_to_pb(token),
            child=token.child,
            finish_reason=finish_reason_to_pb(finish),
            cached_tokens=self.seq.cached_tokens,
            queue_s=max(0.0, started - self.arrived_at),
            compute_s=now - started,
        )

    def _handed_off(self, report: TransferReport) -> prefill_pb2.HandedOff:
        now = time.monotonic()
        since = self._first_chunk_at or self.arrived_at
        return prefill_pb2.HandedOff(
            blocks=report.blocks,
            bytes=report.bytes,
            exposed_s=report.exposed_s,
            blocks_before_last_chunk=self.delivered_before_last_chunk(),
            transport=report.transport,
            seconds=self._transfer_s,
            pushes=[
                prefill_pb2.Push(first_block=first, blocks=push.blocks, start_s=push.start - since, end_s=end - since)
                for first, push in sorted(self.pushes.items())[:MAX_REPORTED_PUSHES]
                if (end := push.end or now)
            ],
            parts=prefill_pb2.ExposedParts(**dataclasses.asdict(report.parts)),
        )

    def delivered_before_last_chunk(self) -> int:
        """Blocks whose delivery precedes the end of the last chunk's compute, by the order of events."""
        last = max((i for i, t in enumerate(self.history) if t.kind == "chunk"), default=0)
        return max((t.value for t in self.history[:last] if t.kind == "delivered"), default=0)
