"""Prefill service of one pod: starts a PrefillHandOff per request and streams its events over gRPC.

The service knows a request until neither the engine nor a posted write holds a block for it. The request's stream may
end earlier (cancel, deadline, failure).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import BatonError, Cancelled, InvalidRequest, Unavailable
from common.pb import prefill_pb2, prefill_pb2_grpc
from common.rpc import remaining_s
from common.tracing.tracer import Attributes, TraceContext, Tracer
from common.types import Role
from common.wire import kv_target_from_pb, request_from_pb
from engine.schedule.outputs import StepResult
from kv_transfer.messages import TransferReport
from pod.requests import DEFAULT_DEADLINE_S, RequestRegistry, retry_while
from pod.runtime import PodRuntime
from prefill_service.hand_off import PrefillHandOff
from prefill_service.prefix_pull import PrefixPuller

_log = logging.getLogger(__name__)


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill on one pod. Every method but on_step runs on the event loop."""

    full_name = "baton.v1.Prefill"
    roles = frozenset((Role.PREFILL,))

    def __init__(self, pod: PodRuntime) -> None:
        self._pod = pod
        self.requests: RequestRegistry[PrefillHandOff] = pod.requests
        self._preparing: set[str] = set()  # Ids of requests whose grammar is being compiled, which may take seconds
        self._puller = PrefixPuller(pod)

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    # -- calls --------------------------------------------------------------------------------------------------------
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Implements Prefill of prefill.proto."""
        valid, pod = request_from_pb(request.request), self._pod
        self._preparing.add(valid.request_id)
        try:
            grammar = await pod.grammars.compile(valid)
        finally:
            self._preparing.discard(valid.request_id)
        hint = request.pull if request.HasField("pull") else None
        deadline_s = remaining_s(context, DEFAULT_DEADLINE_S)
        target = kv_target_from_pb(request.target) if request.HasField("target") else None
        pod.require_ready(*self.roles)
        pod.limits.check(valid, generates=False)
        if valid.request_id in self.requests:
            raise InvalidRequest(f"request {valid.request_id} is already running on this pod", field="request_id")
        pod.require_deadline(self.requests.queued_tokens + valid.context_len, deadline_s)
        seq = pod.engine.new_sequence(valid, hand_off=True, grammar=grammar, output=valid.output_ids, child=valid.child)
        span = pod.caller_span(context)
        hand_off = PrefillHandOff(pod, seq, deadline_s, puller=self._puller, caller_span=span)
        # Added first, because the engine may run a step as soon as it has the prompt.
        self.requests.add(valid.request_id, hand_off)
        hand_off.start(target, hint)
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
        request_id, find = request.request_id, self.requests.get
        await retry_while(lambda: request_id in self._preparing or request_id in self.requests, lambda known: not known)
        hand_off = await retry_while(
            lambda: find(request_id),
            lambda found: found is None and request_id in self._preparing,
            remaining_s(context, DEFAULT_DEADLINE_S),
        )
        if hand_off is None:
            raise Unavailable(f"request {request_id} is not known to this pod, or has ended")
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
    def on_drained(self, hand_off: PrefillHandOff) -> None:
        if hand_off.caller_span is not None and self._pod.tracer is not None:
            record_spans(self._pod.tracer, hand_off.caller_span, hand_off)

    # -- PodService ---------------------------------------------------------------------------------------------------
    def on_step(self, result: StepResult) -> None:
        """Handles the outputs of a step. Engine thread, before the leases of ended sequences are finished."""
        for output in result.outputs:
            hand_off = self.requests.get(output.seq.request_id)
            if hand_off is not None and hand_off.seq.request is output.seq.request:
                hand_off.on_output(output, result.seconds)

    def move_away(self, error: BatonError) -> list[PrefillHandOff]:
        """Ends the prompts that wait for their first chunk. Prompts that are being computed end here."""
        waiting = [hand_off for hand_off in self.requests if hand_off.queued]
        for hand_off in waiting:
            hand_off.fail(error)
        return waiting

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, because the pod stops or has another role now."""
        self.requests.fail_all(error)


def record_spans(tracer: Tracer, parent: TraceContext, hand_off: PrefillHandOff) -> None:
    """Records the spans of a drained request below `parent`, the gateway's attempt.

    prefill.request
        prefill.pull                    pull of a prefix from another pod
        prefill.queue
        prefill.chunk                   one per step
        transfer.hand_off               from the first push or the last chunk to the commit
            transfer.push               one per chunk's blocks
    """
    request_span, seq, outcome = parent.new_child(), hand_off.seq, hand_off.outcome
    end_at = next((entry.at for entry in hand_off.history if entry.kind == "end"), time.monotonic())
    chunks = [entry for entry in hand_off.history if entry.kind == "chunk"]

    def record(name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
        tracer.record_span(name, request_span.new_child(), request_span, start, end, attributes)

    queued = hand_off.arrived_at
    if hand_off.pulled_from is not None:
        pod, queued = hand_off.pulled_from
        record("prefill.pull", hand_off.arrived_at, queued, {"baton.pod": pod})
    if chunks:
        record("prefill.queue", queued, chunks[0].start)
    done = seq.cached_tokens
    for chunk in chunks:
        counted: Attributes = {"baton.tokens": chunk.value - done, "baton.computed_tokens": chunk.value}
        record("prefill.chunk", chunk.start, chunk.at, counted)
        done = chunk.value
    if hand_off.pushes or isinstance(outcome, TransferReport):
        _record_transfer(tracer, request_span, hand_off, end_at)
    named: Attributes = {
        "baton.request_id": seq.request_id,
        "baton.prompt_tokens": seq.prompt_len,
        "baton.cached_tokens": seq.cached_tokens,
        "baton.preemptions": seq.preemptions,
    }
    error = outcome.message if isinstance(outcome, BatonError) else None
    tracer.record_span(
        "prefill.request", request_span, parent, hand_off.arrived_at, end_at, named, kind="server", error=error
    )


def _record_transfer(tracer: Tracer, parent: TraceContext, hand_off: PrefillHandOff, end_at: float) -> None:
    span, outcome = parent.new_child(), hand_off.outcome
    pushes = sorted(hand_off.pushes.items())
    computed = max((entry.at for entry in hand_off.history if entry.kind in ("chunk", "first_token")), default=end_at)
    start = min([computed, *(push.start for _, push in pushes)])
    for first, push in pushes:
        blocks: Attributes = {"baton.first_block": first, "baton.blocks": push.blocks}
        tracer.record_span("transfer.push", span.new_child(), span, push.start, push.end or end_at, blocks)
    pod = "" if hand_off.target is None else hand_off.target.pod
    attributes: dict[str, str | int | float] = {"baton.decode_pod": pod}
    if isinstance(outcome, TransferReport):
        attributes |= {
            "baton.blocks": outcome.blocks,
            "baton.bytes": outcome.bytes,
            "baton.transport": outcome.transport,
            "baton.exposed_s": outcome.exposed_s,
            "baton.blocks_early": outcome.delivered_before_finish,
        }
    error = outcome.message if isinstance(outcome, BatonError) else None
    tracer.record_span("transfer.hand_off", span, parent, start, end_at, attributes, kind="client", error=error)
