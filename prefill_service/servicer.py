"""Prefill service of one pod: starts a PrefillHandOff per request and streams its events over gRPC.

The service knows a request until neither the engine nor a posted write holds a block for it. The request's stream may
end earlier (cancel, deadline, failure).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import BatonError, Cancelled, InvalidRequest, Unavailable
from common.grammar import CompiledGrammar
from common.pb import prefill_pb2, prefill_pb2_grpc
from common.rpc import remaining_s
from common.settings.configs import PodConfig
from common.tracing.context import TraceContext
from common.types import KvTarget, ValidRequest
from common.wire import kv_target_from_pb, request_from_pb
from engine.schedule.outputs import StepResult
from pod.requests import DEFAULT_DEADLINE_S, RequestRegistry, retry_until
from pod.runtime import PodRuntime
from prefill_service.hand_off import PrefillHandOff
from prefill_service.prefix_pull import PrefixPuller
from prefill_service.spans import record_spans

_log = logging.getLogger(__name__)


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill on one pod. Every method but on_step runs on the event loop."""

    full_name = "baton.v1.Prefill"

    def __init__(self, pod: PodRuntime) -> None:
        self._pod = pod
        self.requests: RequestRegistry[PrefillHandOff] = pod.requests
        self.requests.on_drained = self._on_drained
        self._puller = PrefixPuller(pod)

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
        hand_off = await retry_until(lambda: self.requests.get(request.request_id), lambda found: found is None)
        if hand_off is None:
            raise Unavailable(f"request {request.request_id} is not known to this pod, or has ended")
        hand_off.set_target(target)
        return prefill_pb2.SetTargetResponse()

    async def Abort(
        self, request: prefill_pb2.PrefillAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillAbortResponse:
        """Implements Abort of prefill.proto."""
        if hand_off := self.requests.get(request.request_id):
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
        if request.request_id in self.requests:
            raise InvalidRequest(f"request {request.request_id} is already running on this pod", field="request_id")
        pod.require_deadline(self.requests.queued_tokens + request.context_len, deadline_s)
        seq = pod.engine.new_sequence(
            request, hand_off=True, grammar=grammar, output=request.output_ids, child=request.child
        )
        hand_off = PrefillHandOff(pod, seq, deadline_s, puller=self._puller, caller_span=caller_span)
        # Added first, because the engine may run a step as soon as it has the prompt.
        self.requests.add(request.request_id, hand_off)
        hand_off.start(target, hint)
        return hand_off

    def _on_drained(self, hand_off: PrefillHandOff) -> None:
        if hand_off.caller_span is not None and self._pod.tracer is not None:
            record_spans(self._pod.tracer, hand_off.caller_span, hand_off)

    # -- PodService ---------------------------------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Handles the outputs of a step. Engine thread, before the leases of ended sequences are finished."""
        for output in result.outputs:
            hand_off = self.requests.get(output.seq.request_id)
            if hand_off is not None and hand_off.seq.request is output.seq.request:
                hand_off.on_output(output, result.seconds)

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, because the pod stops."""
        self.requests.fail_all(error)


async def serve(config: PodConfig) -> None:
    """Runs a prefill pod until SIGTERM and the drain after it.

    Raises ConfigError, and SystemExit like PodRuntime.run.
    """
    pod = await PodRuntime.create(config)
    await pod.run(PrefillServicer(pod))
