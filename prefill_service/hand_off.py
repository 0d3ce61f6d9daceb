"""Hand-off of one prompt on a prefill pod: compute chunks, push their blocks, commit the first tokens.

    start --> [pull a prefix] --> queue --> chunk 1 --> ... --> chunk n --> first tokens --> handed off
                                              |                   |             |
    to the decode pod (SetTarget):          push ...            push          commit

    any state --error, abort, deadline--> closed

The KV target may arrive after the prompt. Until then this object keeps the pins of the computed blocks. The engine
thread pins a chunk's blocks, then pushes them, so the sequence's lease may end while writes are in flight. The transfer
thread releases the pins.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import abc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Unavailable,
    describe,
)
from common.kv_groups import PageOrder
from common.pb import prefill_pb2
from common.tracing.tracer import TraceContext
from common.types import FinishReason, KvTarget, PromptLogprobs, Token
from common.wire import error_to_pb, finish_reason_to_pb, prompt_logprobs_to_pb, token_to_pb
from engine.kv.ledger import BlockPin
from engine.schedule.outputs import SequenceOutput
from engine.schedule.sequence import Sequence
from kv_transfer.messages import TransferReport
from kv_transfer.sender.transfers import OutgoingTransfer
from pod.runtime import PodRuntime
from prefill_service.prefix_pull import PrefixPuller

_log = logging.getLogger(__name__)

Event = prefill_pb2.PrefillEvent

MAX_REPORTED_PUSHES = 256  # HandedOff lists at most this many pushes one by one
SET_TARGET_TIMEOUT_S = 10.0  # More than the gateway needs: a decode pod answers Reserve at once, or it asks another one


@dataclass(frozen=True, slots=True)
class HandOffEvent:
    """One entry of a hand-off's history. Times are time.monotonic() seconds."""

    kind: str  # chunk, first_token or end
    value: int  # chunk: prompt tokens computed so far. first_token: the token's id. end: blocks.
    at: float
    start: float = 0.0  # Start of the step; chunks only


@dataclass(eq=False, slots=True)
class _PushPin:
    """A read pin on the blocks of one push. Calls `on_released` once the last block is released."""

    pin: BlockPin
    on_released: Callable[[], None]

    @property
    def blocks(self) -> abc.Sequence[int]:
        return self.pin.blocks

    def release(self, blocks: abc.Sequence[int] | None = None) -> None:
        """Releases the pins of these blocks (None: of all remaining blocks). Any thread."""
        self.pin.release(blocks)
        if not self.pin.pinned:
            self.on_released()


@dataclass(slots=True)
class Push:
    """Blocks of one chunk on their way. Times are time.monotonic() seconds."""

    blocks: int
    start: float  # The transfer got the blocks
    end: float = 0.0  # The last write of the blocks ended; 0 until then


class PrefillHandOff:
    """One prefill request. Its n sequences end on this pod, each with its first token. Call `start` once."""

    num_sequences = 1  # A prompt is computed once for all n samples

    def __init__(
        self,
        pod: PodRuntime,
        seq: Sequence,
        deadline_s: float,
        *,
        puller: PrefixPuller,
        caller_span: TraceContext | None = None,
    ) -> None:
        self.seq = seq
        self.caller_span = caller_span  # The caller's span, if the request is traced
        self.target: KvTarget | None = None
        self.history: list[HandOffEvent] = []  # Events in the order in which they happened
        self.arrived_at = time.monotonic()
        self.deadline = self.arrived_at + deadline_s
        self.outcome: TransferReport | BatonError | None = None  # How the hand-off ended; None until then
        self.pulled_from: tuple[str, float] | None = None  # The pod of a pulled prefix, and the end of the pull
        self.pushes: dict[int, Push] = {}  # Pushes by first block
        self._pod = pod
        self._puller = puller
        self._aio = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox: asyncio.Queue[Event | TransferReport | BatonError] = asyncio.Queue()
        self._engine_ended = asyncio.Event()
        self._target_decided = asyncio.Event()  # Set once the target is known, or will never be
        self._transfer_task: asyncio.Task[None] | None = None  # Ends with the transfer
        self._push_released = asyncio.Event()
        self._first_chunk_at: float | None = None
        self._first_push_at = 0.0
        self._transfer_s = 0.0  # Seconds from the first push to the commit
        self._order = PageOrder.of_prompt(pod.engine.layout, seq.request.context_len)
        self._next_block = 0
        self._has_first_token = False
        self._first_tokens: list[tuple[int, FinishReason | None]] = []
        # The engine thread and the event loop share the fields below, under the lock.
        self._lock = threading.Lock()
        self._closed = asyncio.Event()
        self._transfer: OutgoingTransfer | None = None
        self._held_pushes: list[tuple[int, _PushPin]] = []  # Pushes that wait for a target, by first block
        self._held_pins = ExitStack()  # Releases the pins of these pushes
        self._finished = False  # All first tokens exist

    def start(self, target: KvTarget | None, hint: prefill_pb2.PullHint | None) -> None:
        """Queues the prompt in the engine, after the pull that `hint` suggests.

        Without a target the hand-off fails unless `set_target` follows within SET_TARGET_TIMEOUT_S. Raises what
        set_target raises; the hand-off is closed then.
        """
        if target is None:
            self._spawn(self._await_target())
        else:
            try:
                self.set_target(target)
            except BaseException:
                self._engine_ended.set()
                self.close()
                raise
        if hint is None:
            self._pod.engine_loop.add(self.seq, self._on_refused)
        else:
            self._spawn(self._pull_then_add(hint))

    def set_target(self, target: KvTarget) -> None:
        """Starts the transfer to `target` and pushes the blocks that are computed already. Idempotent.

        Raises InvalidRequest for a second, different target; LayoutMismatch or InvalidRequest for one that does not
        fit; Unavailable when the hand-off is closed or the transfer node does not run.
        """
        request = self.seq.request
        if self._closed.is_set():
            raise Unavailable(f"request {request.request_id} has ended on this pod")
        if self.target is not None:
            if self.target != target:
                raise InvalidRequest("the request has another target", field="target")
            return
        num_pages, first_block = self._order.num_pages, self._order.block_at(target.first_block)
        if target.fingerprint != self._pod.engine.layout.fingerprint:
            raise LayoutMismatch("the target's KV layout differs from this pod's", field="fingerprint")
        if first_block is None or target.first_block + len(target.blocks) != num_pages:
            raise InvalidRequest("the target does not cover the prompt's blocks", field="target")
        node, left_s = self._pod.transfer_node, self._remaining_s()
        transfer = node.start_transfer(target, request.request_id, num_pages, left_s, request.adapter)
        with self._lock:
            self.target, self._transfer = target, transfer
            self._next_block = max(self._next_block, first_block)
            self._held_pins.pop_all()
            for first, pin in self._held_pushes:
                transfer.push(self._order.first_page(first), pin.blocks, pin)
            if self._finished:
                self._finish(transfer)
        self._transfer_task = self._aio.create_task(self._await_transfer(transfer))
        self._target_decided.set()

    @property
    def queued(self) -> bool:
        """No chunk of the prompt has been computed."""
        return self._first_chunk_at is None

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return 0 if self._has_first_token or self._closed.is_set() else self.seq.prefill_len - self.seq.computed

    # -- engine thread ------------------------------------------------------------------------------------------------
    def on_output(self, output: SequenceOutput, seconds: float) -> None:
        """Handles the output of a step that took `seconds`. The sequence's lease is still valid."""
        try:
            self._take_output(output, seconds)
        except Exception as error:  # must not end the step's other sequences
            _log.exception("the output of a step could not be handled", extra={"request_id": output.seq.request_id})
            if output.ended:
                self._on_engine_released()
            self._aio.call_soon_threadsafe(self.fail, InternalError(describe(error)))

    def _take_output(self, output: SequenceOutput, seconds: float) -> None:
        now = time.monotonic()
        if output.error is not None or output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._on_refused(output.error or Cancelled("the request was aborted"))
            return
        if self._first_chunk_at is None:
            self._first_chunk_at = now - seconds
        chunk = output.seq is self.seq  # other children only report their first token
        if chunk:
            self.history.append(HandOffEvent("chunk", min(output.computed, self.seq.prefill_len), now, now - seconds))
        # Events go out before the push: posting writes takes the GIL from the event loop that sends them.
        # The last chunk's progress is sent with the end of the hand-off, because no caller waits for it.
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
            with self._lock:
                self._finished = True
                if self._transfer is not None:
                    self._finish(self._transfer)
            self._on_engine_released()

    def _finish(self, transfer: OutgoingTransfer) -> None:
        transfer.finish(*zip(*self._first_tokens, strict=True))

    def _push(self, computed: int, done: bool) -> None:
        """Pushes the blocks that are full since the last push; all that are left if `done`."""
        lease = self.seq.lease
        assert lease is not None, "a sequence that computed has a lease"
        size = self.seq.block_size
        end = -(-self.seq.prefill_len // size) if done else computed // size
        with self._lock:
            first = self._next_block
            if end <= first or self._closed.is_set():
                return  # after a preemption the first chunks repeat blocks that were pushed before
            self._next_block = end
            now = time.monotonic()
            self._first_push_at = self._first_push_at or now
            self.pushes[first] = Push(end - first, now)
            pages = lease.pin_for_read(first, end - first, self._order)
            pin = _PushPin(pages, lambda: self._on_push_released(first))
            if self._transfer is not None:
                self._transfer.push(self._order.first_page(first), pin.blocks, pin)
            else:
                self._held_pushes.append((first, pin))
                self._held_pins.callback(pin.release)

    def _on_refused(self, error: BatonError) -> None:
        """Called when the engine did not accept the sequence, or gave it up. Any thread."""
        self._post(error)
        self._on_engine_released()

    def _on_engine_released(self) -> None:
        """Called when the engine released the sequence. Any thread."""
        self._aio.call_soon_threadsafe(self._engine_ended.set)

    # -- transfer thread ----------------------------------------------------------------------------------------------
    def _on_push_released(self, first: int) -> None:
        """Called when no write of the push at block `first` is left."""
        self.pushes[first].end = time.monotonic()
        self._aio.call_soon_threadsafe(self._push_released.set)

    # -- event loop ---------------------------------------------------------------------------------------------------
    async def events(self) -> AsyncIterator[Event]:
        """Yields progress per chunk, the first tokens, and the outcome of the hand-off.

        An error before the first token is raised. A later one is yielded as a Failed event.
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
        try:
            # asyncio.wait_for may swallow the cancellation of the call (Python 3.11)
            async with asyncio.timeout(max(self._remaining_s(), 0.0)):
                return await self._inbox.get()
        except TimeoutError:
            return DeadlineExceeded("the request's deadline passed during prefill")

    async def _await_target(self) -> None:
        """Fails a hand-off that gets no target in time: its blocks would stay pinned without a use."""
        try:
            async with asyncio.timeout(SET_TARGET_TIMEOUT_S):
                await self._target_decided.wait()
        except TimeoutError:
            self.fail(Unavailable(f"no KV target was set within {SET_TARGET_TIMEOUT_S:g} s (SetTarget did not arrive)"))

    async def _pull_then_add(self, hint: prefill_pb2.PullHint) -> None:
        pull = self._aio.create_task(self._puller.pull(self.seq.request, hint, self._remaining_s()))
        closed = self._aio.create_task(self._closed.wait())
        try:
            await asyncio.wait({pull, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not pull.done() or (pull.exception() is None and pull.result()):
                self.pulled_from = hint.pod, time.monotonic()
        finally:
            pull.cancel()
            closed.cancel()
        if self._closed.is_set():
            self._engine_ended.set()
        else:
            self._pod.engine_loop.add(self.seq, self._on_refused)

    async def _await_transfer(self, transfer: OutgoingTransfer) -> None:
        try:
            report = await transfer.done()
        except BatonError as error:
            self._inbox.put_nowait(error)
            return
        self._transfer_s = time.monotonic() - self._first_push_at if report.blocks else 0.0
        exemplar = None if self.caller_span is None else {"trace_id": self.caller_span.trace_id}
        self._pod.record_hand_off(report, self._transfer_s, exemplar)
        if self.outcome is None:  # the spans of a drained request need the outcome before the caller reads the event
            self.outcome = report
        for item in (Event(progress=self._progress(self.seq.prefill_len)), report):
            self._inbox.put_nowait(item)

    def fail(self, error: BatonError) -> None:
        """Ends the hand-off; the event stream ends with `error`."""
        self._inbox.put_nowait(error)
        self.close()

    def close(self) -> None:
        """Ends the sequence if it has no first token, and the transfer if it is not committed. Idempotent."""
        if self._closed.is_set():
            return
        if not self._engine_ended.is_set():
            self._pod.engine_loop.abort(self.seq.request_id)
        with self._lock:
            self._closed.set()
            if self._transfer is not None:
                self._transfer.abort("the prefill request ended")
        self._held_pins.close()
        self._target_decided.set()

    async def drained(self) -> None:
        """Returns once neither the engine nor a posted write holds a block for this request."""
        await self._engine_ended.wait()
        await self._target_decided.wait()
        if self._transfer_task is not None:
            await self._transfer_task
        while not all(push.end for push in self.pushes.values()):
            self._push_released.clear()
            await self._push_released.wait()

    def _remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._aio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            blocks_before_last_chunk=report.delivered_before_finish,
            transport=report.transport,
            seconds=self._transfer_s,
            pushes=[
                prefill_pb2.Push(first_block=first, blocks=push.blocks, start_s=push.start - since, end_s=end - since)
                for first, push in sorted(self.pushes.items())[:MAX_REPORTED_PUSHES]
                if (end := push.end or now)
            ],
            parts=prefill_pb2.ExposedParts(**dataclasses.asdict(report.parts)),
        )
