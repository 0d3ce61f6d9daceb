"""Decode service of one pod: admits requests, keeps one token stream per gateway and sends each step's tokens to it.

The event loop owns the registry of requests and the streams. The engine thread and the transfer thread reach them
through call_soon_threadsafe. The engine thread also looks requests up, which is safe because an entry never changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import BatonError, DeadlineExceeded, InternalError, InvalidRequest, Overloaded, Unavailable
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc import remaining_s
from common.types import RemotePrefillCost, ValidRequest
from common.wire import kv_target_to_pb, request_from_pb
from decode_service.admission import Admission, Admitted, Rejected
from decode_service.hand_off import DecodeHandOff
from decode_service.spans import record_spans
from decode_service.token_stream import MAX_UNACKED_BATCHES, PAUSE_LIMIT_S, TokenStream
from engine.schedule.outputs import SequenceOutput, StepResult
from pod.requests import RequestRegistry, retry_until
from pod.runtime import PodRuntime

_log = logging.getLogger(__name__)

#: Deadline of callers without a gRPC timeout.
DEFAULT_DEADLINE_S = 600.0
HELLO_TIMEOUT_S = 10.0
#: Bounds of the time after which a rejected client should retry.
RETRY_MIN_S, RETRY_MAX_S = 0.5, 10.0


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves Decode on one pod. Every method but on_step runs on the event loop."""

    full_name = "baton.v1.Decode"

    def __init__(
        self, pod: PodRuntime, *, window: int = MAX_UNACKED_BATCHES, pause_limit_s: float = PAUSE_LIMIT_S
    ) -> None:
        """
        Args:
            window: unacknowledged token batches of a gateway at which its sequences are paused.
            pause_limit_s: a gateway that is paused for this many seconds loses its sequences.
        """
        self._pod = pod
        self._window = window
        self._pause_limit_s = pause_limit_s
        self._aio = asyncio.get_running_loop()
        self._admission = Admission(pod)
        self._requests: RequestRegistry[DecodeHandOff] = RequestRegistry()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[str, TokenStream] = {}
        #: Moving average of the seconds that a request stays on this pod.
        self._residency_s = 1.0

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        """Implements Reserve of decode.proto."""
        pod = self._pod
        deadline_s = remaining_s(context, DEFAULT_DEADLINE_S)
        valid = request_from_pb(request.request)
        grammar = await pod.compile_grammar(valid)
        pod.require_ready()
        pod.limits.check(valid, generates=True)
        stream = self._streams.get(request.gateway_id)
        if stream is None or stream.paused:
            problem = "reads its token stream too slowly" if stream else "has no token stream to this pod"
            raise Unavailable(f"gateway {request.gateway_id!r} {problem}")

        def decide() -> Admitted | Rejected:
            pod.require_ready()
            if stream.closed:
                raise Unavailable(f"the token stream of gateway {request.gateway_id!r} has ended")
            if valid.request_id in self._requests:
                raise InvalidRequest(f"request {valid.request_id} is already running on this pod", field="request_id")
            return self._decide(valid, request)

        admitted = await retry_until(decide, lambda found: isinstance(found, Rejected) and found.temporary)
        if isinstance(admitted, Rejected):
            return self._rejected(admitted.reason)
        local = admitted.decision.local
        if local:
            try:
                pod.require_deadline(self.queued_tokens + valid.context_len - admitted.cached_tokens, deadline_s)
            except Overloaded as error:
                if admitted.lease is not None:
                    admitted.lease.finish("no time")
                return self._rejected(error.message)
        hand_off = DecodeHandOff(
            pod,
            valid,
            stream,
            admitted.lease,
            deadline_s,
            hashes=admitted.hashes,
            grammar=grammar,
            caller_span=pod.caller_span(context),
        )
        self._requests.add(valid.request_id, hand_off)
        task = self._aio.create_task(self._remove_when_drained(valid.request_id, hand_off))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        pod.metrics.count_decision(local=local, reason=admitted.decision.reason)
        try:
            if local:
                hand_off.start_local()
                return decode_pb2.ReserveResponse(local=decode_pb2.LocalPrefill(), cached_tokens=admitted.cached_tokens)
            target = kv_target_to_pb(hand_off.start_remote())
            return decode_pb2.ReserveResponse(target=target, cached_tokens=admitted.cached_tokens)
        except Exception:
            hand_off.close()
            raise

    def _decide(self, valid: ValidRequest, request: decode_pb2.ReserveRequest) -> Admitted | Rejected:
        remote = request.remote
        cost = RemotePrefillCost(remote.queue_s, remote.compute_s, remote.hand_off_s, remote.tokens_per_s)
        return self._admission.decide(
            valid,
            num_sequences=self.num_sequences,
            queued_tokens=self.queued_tokens,
            remote_cost=cost if request.HasField("remote") else None,
            remote_only=request.remote_only,
        )

    async def Abort(
        self, request: decode_pb2.DecodeAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeAbortResponse:
        """Implements Abort of decode.proto."""
        if hand_off := self._requests.get(request.request_id):
            if request.HasField("child"):
                hand_off.close_child(request.child)
            else:
                hand_off.close()
        return decode_pb2.DecodeAbortResponse()

    async def Tokens(
        self,
        request_iterator: AsyncIterator[decode_pb2.TokensRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        """Implements Tokens of decode.proto. Reserve works after the response headers, which confirm the hello."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await anext(request_iterator, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if hello is None or not hello.gateway_id:
            raise InvalidRequest("the first message must have a gateway_id", field="gateway_id")
        stream = self._open(hello.gateway_id)
        reader = self._aio.create_task(self._read_acks(stream, request_iterator))
        try:
            await context.send_initial_metadata(())
            async for batch in stream.batches():
                yield batch
        finally:
            reader.cancel()
            self._close(stream)

    async def _read_acks(self, stream: TokenStream, requests: AsyncIterator[decode_pb2.TokensRequest]) -> None:
        try:
            async for message in requests:
                stream.ack(message.acked)
        finally:
            stream.close()  # the gateway half-closed or disconnected

    # -- streams ------------------------------------------------------------------------------------------------------

    def _open(self, gateway_id: str) -> TokenStream:
        if old := self._streams.pop(gateway_id, None):
            self._close(old)
        stream = TokenStream(
            gateway_id,
            window=self._window,
            pause_limit_s=self._pause_limit_s,
            on_pause=self._on_pause,
            on_overrun=self._on_overrun,
        )
        self._streams[gateway_id] = stream
        return stream

    def _close(self, stream: TokenStream) -> None:
        stream.close()
        if self._streams.get(stream.gateway_id) is stream:
            del self._streams[stream.gateway_id]
        for hand_off in self._requests_of(stream):
            hand_off.close()

    def _requests_of(self, stream: TokenStream) -> list[DecodeHandOff]:
        return [hand_off for hand_off in self._requests.values() if hand_off.stream is stream]

    def _on_pause(self, stream: TokenStream, paused: bool) -> None:
        for hand_off in self._requests_of(stream):
            hand_off.set_paused(paused)

    def _on_overrun(self, stream: TokenStream) -> None:
        for hand_off in self._requests_of(stream):
            hand_off.fail(Overloaded("the gateway reads its token stream too slowly"))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _rejected(self, reason: str) -> decode_pb2.ReserveResponse:
        self._pod.metrics.reserved.labels("rejected").inc()
        retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, self._residency_s / max(1, len(self._requests))))
        return decode_pb2.ReserveResponse(rejected=decode_pb2.Rejected(reason=reason, retry_after_s=retry_s))

    async def _remove_when_drained(self, request_id: str, hand_off: DecodeHandOff) -> None:
        await hand_off.drained()
        self._requests.remove(request_id, hand_off)
        self._residency_s += 0.1 * (time.monotonic() - hand_off.arrived_at - self._residency_s)
        if hand_off.caller_span is not None and self._pod.tracer is not None:
            record_spans(self._pod.tracer, hand_off.caller_span, hand_off)

    def _on_outputs(self, outputs: list[tuple[DecodeHandOff, SequenceOutput]]) -> None:
        """Sends the outputs of one step, as one batch per gateway."""
        deltas: dict[TokenStream, list[decode_pb2.SequenceDelta]] = defaultdict(list)
        for hand_off, output in outputs:
            try:
                delta = hand_off.on_output(output)
            except Exception:  # must not end the step's other sequences
                _log.exception("an output could not be sent", extra={"request_id": hand_off.request.request_id})
                hand_off.fail(InternalError("the pod could not encode a token"))
            else:
                if delta is not None:
                    deltas[hand_off.stream].append(delta)
            if output.finish_reason is not None:
                hand_off.on_engine_released(output.seq)
        for stream, batch in deltas.items():
            try:
                stream.put_batch(batch)
            except Exception:
                _log.exception("the token stream of gateway %s failed", stream.gateway_id)
                self._close(stream)

    # -- PodService ---------------------------------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Calls the event loop once for all outputs of a step. Engine thread, after each step."""
        outputs = [
            (hand_off, output)
            for output in result.outputs
            if (hand_off := self._requests.get(output.seq.request_id)) and hand_off.request is output.seq.request
        ]
        if outputs:
            self._aio.call_soon_threadsafe(self._on_outputs, outputs)

    @property
    def num_active(self) -> int:
        """Requests that hold blocks or a place in the engine."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Sequences of active requests that have not ended."""
        return sum(hand_off.num_sequences for hand_off in self._requests.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this pod still computes."""
        return sum(hand_off.queued_tokens for hand_off in self._requests.values())

    async def wait_idle(self) -> None:
        """Returns once no request is active."""
        await self._requests.wait_idle()

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, and every stream, because the pod stops."""
        for hand_off in self._requests.values():
            hand_off.fail(error)
        for stream in list(self._streams.values()):
            self._aio.call_soon_threadsafe(stream.close)  # queued behind the errors above
