"""Prefill service of one pod: starts a PrefillHandOff per request and streams its events over gRPC.

The service knows a request until neither the engine nor a posted write holds a block for it. The request's stream may
end earlier (cancel, deadline, failure).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import BatonError, Cancelled, InternalError, InvalidRequest, Unavailable
from common.grammar import CompiledGrammar
from common.pb import prefill_pb2, prefill_pb2_grpc
from common.rpc import remaining_s
from common.tracing.context import TraceContext
from common.types import KvTarget, ValidRequest
from common.wire import kv_target_from_pb, request_from_pb
from engine.schedule.outputs import StepResult
from pod.requests import RequestRegistry, retry_until
from pod.runtime import PodRuntime
from prefill_service.hand_off import PrefillHandOff, require_fitting_target
from prefill_service.prefix_pull import PrefixPuller
from prefill_service.spans import record_spans

_log = logging.getLogger(__name__)

#: Deadline of callers without a gRPC timeout.
DEFAULT_DEADLINE_S = 600.0


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill on one pod. Every method but on_step runs on the event loop."""

    full_name = "baton.v1.Prefill"

    def __init__(self, pod: PodRuntime) -> None:
        self._pod = pod
        self._requests: RequestRegistry[PrefillHandOff] = RequestRegistry()
        self._puller = PrefixPuller(pod)
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Implements Prefill of prefill.proto."""
        valid = request_from_pb(request.request)
        grammar = await self._pod.compile_grammar(valid)
        hint = request.pull if request.HasField("pull") else None
        deadline_s, caller_span = remaining_s(context, DEFAULT_DEADLINE_S), self._pod.caller_span(context)
        target = kv_target_from_pb(request.target) if request.HasField("target") else None
        hand_off = self._start(valid, target, deadline_s, grammar, hint, caller_span)
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
        """Implements SetTarget of prefill.proto. Waits for the Prefill that it belongs to, which it may overtake."""
        target = kv_target_from_pb(request.target)
        hand_off = await retry_until(lambda: self._requests.get(request.request_id), lambda found: found is None)
        if hand_off is None:
            raise Unavailable(f"request {request.request_id} is not known to this pod, or has ended")
        hand_off.set_target(target)
        return prefill_pb2.SetTargetResponse()

    async def Abort(
        self, request: prefill_pb2.PrefillAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillAbortResponse:
        """Implements Abort of prefill.proto."""
        if hand_off := self._requests.get(request.request_id):
            hand_off.fail(Cancelled("the request was aborted"))
        return prefill_pb2.PrefillAbortResponse()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _start(
        self,
        request: ValidRequest,
        target: KvTarget | None,
        deadline_s: float,
        grammar: CompiledGrammar | None,
        hint: prefill_pb2.PullHint | None,
        caller_span: TraceContext | None,
    ) -> PrefillHandOff:
        """Checks the request and starts its hand-off.

        Raises Unavailable, InvalidRequest, ModelNotFound, LayoutMismatch or Overloaded.
        """
        pod = self._pod
        pod.require_ready()
        pod.limits.check(request, generates=False)
        if target is not None:
            require_fitting_target(pod.engine.layout, request, target)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id} is already running on this pod", field="request_id")
        pod.require_deadline(self.queued_tokens + request.context_len, deadline_s)
        seq = pod.engine.new_sequence(
            request, hand_off=True, grammar=grammar, output=request.output_ids, child=request.child
        )
        hand_off = PrefillHandOff(pod, seq, deadline_s, puller=self._puller, caller_span=caller_span)
        # Added first, because the engine may run a step as soon as it has the prompt.
        self._requests.add(request.request_id, hand_off)
        try:
            hand_off.start(target, hint)
        except BaseException:
            self._requests.remove(request.request_id, hand_off)
            raise
        task = asyncio.get_running_loop().create_task(self._remove_when_drained(request.request_id, hand_off))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return hand_off

    async def _remove_when_drained(self, request_id: str, hand_off: PrefillHandOff) -> None:
        await hand_off.drained()
        self._requests.remove(request_id, hand_off)
        if hand_off.caller_span is not None and self._pod.tracer is not None:
            record_spans(self._pod.tracer, hand_off.caller_span, hand_off)

    # -- PodService ---------------------------------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Handles the outputs of a step. Engine thread, before the leases of ended sequences are finished."""
        for output in result.outputs:
            hand_off = self._requests.get(output.seq.request_id)
            if hand_off is None or hand_off.seq.request is not output.seq.request:
                continue
            try:
                hand_off.on_output(output, result.seconds)
            except Exception as error:  # must not end the step's other sequences
                _log.exception("the output of a step could not be handled", extra={"request_id": output.seq.request_id})
                hand_off.on_step_failed(output, InternalError(f"{type(error).__name__}: {error}"))

    @property
    def num_active(self) -> int:
        """Requests that hold blocks or a place in the engine."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """One per request: a prompt is computed once for all n samples."""
        return len(self._requests)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(hand_off.queued_tokens for hand_off in self._requests.values())

    async def wait_idle(self) -> None:
        """Returns once no request is active."""
        await self._requests.wait_idle()

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, because the pod stops."""
        for hand_off in self._requests.values():
            hand_off.fail(error)
