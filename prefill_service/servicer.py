"""The Prefill service: admits prompts to the engine, one HandOff each, and turns their events into gRPC streams.

A request is known here from its admission until neither the engine nor a posted write holds a block for it; its stream
may end earlier (cancel, deadline, failure).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from common.errors import BatonError, Cancelled, InternalError, InvalidRequest, LayoutMismatch, Unavailable
from common.grammar import CompiledGrammar
from common.pb import prefill_pb2, prefill_pb2_grpc
from common.rpc import remaining_s
from common.tracing.context import TraceContext
from common.types import KvTarget, ValidRequest
from common.wire import kv_target_from_pb, request_from_pb
from engine.engine import StepResult
from pod.requests import RequestRegistry, retry_until
from pod.runtime import PodRuntime
from prefill_service.hand_off import PrefillHandOff
from prefill_service.prefix_pull import PrefixPuller
from prefill_service.spans import record_spans

_log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 600.0  # for callers without a gRPC timeout
SET_TARGET_TIMEOUT_S = 10.0  # a decode pod answers at once, or another one is asked


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill on one pod; all methods but on_step run on the event loop."""

    full_name = "baton.v1.Prefill"

    def __init__(self, pod: PodRuntime) -> None:
        self._pod = pod
        self._requests: RequestRegistry[PrefillHandOff] = RequestRegistry()
        self._puller = PrefixPuller(pod)
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """See prefill.proto."""
        valid = request_from_pb(request.request)
        grammar = await self._pod.compile_grammar(valid)
        hint = request.pull if request.HasField("pull") else None
        deadline_s, asked_by = remaining_s(context, DEFAULT_DEADLINE_S), self._pod.caller_span(context)
        target = kv_target_from_pb(request.target) if request.HasField("target") else None
        hand_off = self._start(valid, target, deadline_s, grammar, hint, asked_by)
        try:
            async for event in hand_off.events():
                if event.HasField("failed"):
                    _log.info("hand-off failed: %s", event.failed.message, extra={"request_id": valid.request_id})
                yield event
        finally:
            hand_off.close()

    async def SetTarget(
        self, request: prefill_pb2.SetTargetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.SetTargetResponse:
        """See prefill.proto. It may overtake the Prefill that it belongs to."""
        target = kv_target_from_pb(request.target)
        hand_off = await retry_until(lambda: self._requests.get(request.request_id), lambda found: found is None)
        if hand_off is None or hand_off.closed.is_set():
            raise Unavailable(f"request {request.request_id} is not here (any more)")
        if hand_off.target is None:
            self._check_target(hand_off.seq.request, target)
            self._set_target(hand_off, target)
        elif hand_off.target != target:
            raise InvalidRequest("the request has another target", field="target")
        return prefill_pb2.SetTargetResponse()

    async def Abort(
        self, request: prefill_pb2.PrefillAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillAbortResponse:
        """See prefill.proto."""
        if hand_off := self._requests.get(request.request_id):
            hand_off.fail(Cancelled("the request was aborted"))
            hand_off.close()
        return prefill_pb2.PrefillAbortResponse()

    def _start(
        self,
        request: ValidRequest,
        target: KvTarget | None,
        deadline_s: float,
        grammar: CompiledGrammar | None,
        hint: prefill_pb2.PullHint | None,
        asked_by: TraceContext | None,
    ) -> PrefillHandOff:
        """Starts the hand-off and queues the prompt, once what a hint promises is here. Raises what makes either
        impossible.
        """
        pod = self._pod
        pod.require_ready()
        pod.limits.check(request, generates=False)
        if target is not None:
            self._check_target(request, target)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id} is already here", field="request_id")
        pod.require_deadline(self.queued_tokens + request.context_len, deadline_s)
        seq = pod.engine.new_sequence(
            request, hand_off=True, grammar=grammar, output=request.output_ids, child=request.child
        )
        exemplar = None if asked_by is None else {"trace_id": asked_by.trace_id}
        hand_off = PrefillHandOff(
            seq,
            deadline_s,
            lambda: pod.engine_loop.abort(request.request_id),
            lambda report, seconds: pod.record_hand_off(report, seconds, exemplar),
        )
        if target is not None:
            self._set_target(hand_off, target)
        else:
            self._spawn(self._await_target(hand_off))
        self._requests.add(request.request_id, hand_off)
        if hint is None:
            pod.engine_loop.add(seq, hand_off.on_refused)
        else:
            self._spawn(self._pull_then_add(hand_off, hint, deadline_s))
        self._spawn(self._remove_when_drained(request.request_id, hand_off, asked_by))
        return hand_off

    def _set_target(self, hand_off: PrefillHandOff, target: KvTarget) -> None:
        pod, request = self._pod, hand_off.seq.request
        num_blocks = pod.engine.layout.blocks_for(request.context_len)
        left_s = hand_off.deadline - time.monotonic()
        hand_off.set_target(target, pod.transfer_node.start_transfer(target, request.request_id, num_blocks, left_s))

    async def _await_target(self, hand_off: PrefillHandOff) -> None:
        """A prompt without a home holds blocks for nobody."""
        decided = asyncio.get_running_loop().create_task(hand_off.target_decided())
        await asyncio.wait({decided}, timeout=SET_TARGET_TIMEOUT_S)
        if not decided.done():
            decided.cancel()
            hand_off.fail(Unavailable("nobody said where the KV goes"))
            hand_off.close()

    async def _pull_then_add(self, hand_off: PrefillHandOff, hint: prefill_pb2.PullHint, deadline_s: float) -> None:
        aio = asyncio.get_running_loop()
        fetch = aio.create_task(self._puller.pull(hand_off.seq.request, hint, deadline_s))
        closed = aio.create_task(hand_off.closed.wait())
        try:
            await asyncio.wait({fetch, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not fetch.done() or (fetch.exception() is None and fetch.result()):
                hand_off.pulled_from = hint.pod, time.monotonic()
        finally:
            fetch.cancel()
            closed.cancel()
        if hand_off.closed.is_set():
            hand_off.on_engine_released()
        else:
            self._pod.engine_loop.add(hand_off.seq, hand_off.on_refused)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_target(self, request: ValidRequest, target: KvTarget) -> None:
        layout = self._pod.engine.layout
        if target.fingerprint != layout.fingerprint:
            raise LayoutMismatch("the target's KV layout differs from this pod's", field="fingerprint")
        if target.first_block + len(target.blocks) != layout.blocks_for(request.context_len):
            raise InvalidRequest("the target does not cover the prompt's blocks", field="target")

    async def _remove_when_drained(
        self, request_id: str, hand_off: PrefillHandOff, asked_by: TraceContext | None
    ) -> None:
        await hand_off.drained()
        self._requests.remove(request_id, hand_off)
        if asked_by is not None and self._pod.tracer is not None:
            record_spans(self._pod.tracer, asked_by, hand_off)

    # -- what the pod asks of its service -----------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Engine thread, after each step and before the leases of ended sequences are finished."""
        for output in result.outputs:
            hand_off = self._requests.get(output.seq.request_id)
            if hand_off is None or hand_off.seq.request is not output.seq.request:
                continue
            try:
                hand_off.on_output(output, result.seconds)
            except Exception as error:  # the step's other sequences go on
                _log.exception("a chunk could not be handed on", extra={"request_id": output.seq.request_id})
                hand_off.on_step_failed(output, InternalError(f"{type(error).__name__}: {error}"))

    @property
    def num_active(self) -> int:
        """Requests that still hold something."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """One per request: a prompt is computed once, whatever comes of it."""
        return len(self._requests)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for compute."""
        return sum(h.queued_tokens for h in self._requests.values())

    async def wait_idle(self) -> None:
        """Returns once no request holds anything."""
        await self._requests.wait_idle()

    def abort_all(self, error: BatonError) -> None:
        """Ends every request (the pod stops)."""
        for hand_off in self._requests.values():
            hand_off.fail(error)
            hand_off.close()
