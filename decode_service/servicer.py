"""The Decode service: reserves room, keeps one token stream per gateway, and routes each engine step's tokens to them.

The registry of requests and the streams belong to the event loop; the engine thread and the transfer thread reach them
through call_soon_threadsafe only (the engine thread also reads the registry, whose entries never change identity).
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
from decode_service.hand_off import DecodeHandOff, HandOffState
from decode_service.spans import record_spans
from decode_service.token_stream import MAX_UNACKED_BATCHES, PAUSE_LIMIT_S, TokenStream
from engine.engine import SequenceOutput, StepResult
from pod.requests import RequestRegistry, retry_until
from pod.runtime import PodRuntime

_log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 600.0  # for callers without a gRPC timeout
HELLO_TIMEOUT_S = 10.0
RETRY_MIN_S, RETRY_MAX_S = 0.5, 10.0


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves Decode on one pod; all methods but on_step run on the event loop."""

    full_name = "baton.v1.Decode"

    def __init__(
        self, pod: PodRuntime, *, window: int = MAX_UNACKED_BATCHES, pause_limit_s: float = PAUSE_LIMIT_S
    ) -> None:
        """window: unacknowledged batches after which a gateway is paused, for pause_limit_s seconds at most."""
        self._pod = pod
        self._window = window
        self._pause_limit_s = pause_limit_s
        self._aio = asyncio.get_running_loop()
        self._admission = Admission(pod)
        self._requests: RequestRegistry[DecodeHandOff] = RequestRegistry()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._streams: dict[str, TokenStream] = {}
        self._residency_s = 1.0  # moving average of how long a request stays

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        """See decode.proto."""
        pod = self._pod
        deadline_s = remaining_s(context, DEFAULT_DEADLINE_S)
        valid = request_from_pb(request.request)
        grammar = await pod.compile_grammar(valid)
        pod.require_ready()
        pod.limits.check(valid, generates=True)
        stream = self._streams.get(request.gateway_id)
        if stream is None or stream.paused:
            what = "reads its token stream too slowly" if stream else "has no token stream here"
            raise Unavailable(f"gateway {request.gateway_id!r} {what}")

        def decide() -> Admitted | Rejected:
            pod.require_ready()
            if stream.closed:
                raise Unavailable(f"the token stream of gateway {request.gateway_id!r} has ended")
            if valid.request_id in self._requests:
                raise InvalidRequest(f"request {valid.request_id} is already here", field="request_id")
            return self._decide(valid, request)

        room = await retry_until(decide, lambda room: isinstance(room, Rejected) and room.temporary)
        if isinstance(room, Rejected):
            return self._rejected(room.reason)
        local = room.decision.local
        if local:
            try:
                pod.require_deadline(self.queued_tokens + valid.context_len - room.cached_tokens, deadline_s)
            except Overloaded as error:
                if room.lease is not None:
                    room.lease.finish("no time")
                return self._rejected(error.message)
        reservation = DecodeHandOff(
            pod,
            valid,
            stream,
            room.lease,
            hashes=room.hashes,
            grammar=grammar,
            caller_span=pod.caller_span(context),
            tell=self._send_delta,
            gone=self._on_drained,
        )
        self._requests.add(valid.request_id, reservation)
        self._timers[valid.request_id] = self._aio.call_later(
            deadline_s, reservation.end, DeadlineExceeded("the request's deadline passed")
        )
        pod.metrics.count_decision(local=local, reason=room.decision.reason)
        try:
            if not local:
                target = kv_target_to_pb(reservation.start_remote(deadline_s))
                reservation.reserved_at = time.monotonic()
                return decode_pb2.ReserveResponse(target=target, cached_tokens=room.cached_tokens)
            reservation.reserved_at = time.monotonic()
            reservation.start_local()
            return decode_pb2.ReserveResponse(local=decode_pb2.LocalPrefill(), cached_tokens=room.cached_tokens)
        except Exception:
            reservation.end(None)
            raise

    def _decide(self, valid: ValidRequest, request: decode_pb2.ReserveRequest) -> Admitted | Rejected:
        remote = request.remote
        elsewhere = RemotePrefillCost(remote.queue_s, remote.compute_s, remote.hand_off_s, remote.tokens_per_s)
        return self._admission.decide(
            valid,
            held=self.num_sequences,
            queued_tokens=self.queued_tokens,
            there=elsewhere if request.HasField("remote") else None,
            remote_only=request.remote_only,
        )

    async def Abort(
        self, request: decode_pb2.DecodeAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeAbortResponse:
        """See decode.proto."""
        if reservation := self._requests.get(request.request_id):
            if request.HasField("child"):
                reservation.close_child(request.child)
            else:
                reservation.end(None)
        return decode_pb2.DecodeAbortResponse()

    async def Tokens(
        self,
        request_iterator: AsyncIterator[decode_pb2.TokensRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        """See decode.proto. The response headers go out once the hello was taken: from then on Reserve works."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await anext(request_iterator, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if hello is None or not hello.gateway_id:
            raise InvalidRequest("the first message has to name the gateway", field="gateway_id")
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
            stream.close()  # the gateway half-closed or went away

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
        for reservation in self._requests_of(stream):
            reservation.end(None)

    def _requests_of(self, stream: TokenStream) -> list[DecodeHandOff]:
        return [r for r in self._requests.values() if r.stream is stream]

    def _on_pause(self, stream: TokenStream, paused: bool) -> None:
        for reservation in self._requests_of(stream):
            reservation.set_paused(paused)

    def _on_overrun(self, stream: TokenStream) -> None:
        for reservation in self._requests_of(stream):
            reservation.end(Overloaded("the gateway reads its token stream too slowly"))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _rejected(self, reason: str) -> decode_pb2.ReserveResponse:
        self._pod.metrics.reserved.labels("rejected").inc()
        retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, self._residency_s / max(1, len(self._requests))))
        return decode_pb2.ReserveResponse(rejected=decode_pb2.Rejected(reason=reason, retry_after_s=retry_s))

    def _send_delta(self, reservation: DecodeHandOff, delta: decode_pb2.SequenceDelta) -> None:
        self._aio.call_soon_threadsafe(reservation.stream.put_batch, [delta])

    def _on_drained(self, reservation: DecodeHandOff) -> None:
        self._aio.call_soon_threadsafe(self._remove, reservation)

    def _remove(self, reservation: DecodeHandOff) -> None:
        request_id = reservation.request.request_id
        if self._requests.remove(request_id, reservation):
            self._timers.pop(request_id).cancel()
            self._residency_s += 0.1 * (time.monotonic() - reservation.arrived_at - self._residency_s)
            if reservation.caller_span is not None and self._pod.tracer is not None:
                record_spans(self._pod.tracer, reservation.caller_span, reservation)

    def on_step(self, result: StepResult) -> None:
        """Engine thread, after each step: one call to the event loop for all of the step's news."""
        news = [
            (reservation, output)
            for output in result.outputs
            if (reservation := self._requests.get(output.seq.request_id)) and reservation.request is output.seq.request
        ]
        if news:
            self._aio.call_soon_threadsafe(self._on_outputs, news)

    def _on_outputs(self, news: list[tuple[DecodeHandOff, SequenceOutput]]) -> None:
        deltas: dict[TokenStream, list[decode_pb2.SequenceDelta]] = defaultdict(list)
        for reservation, output in news:  # one that fails must not take the others' news along
            try:
                delta = reservation.on_output(output)
            except Exception:
                _log.exception("a token could not be told", extra={"request_id": reservation.request.request_id})
                reservation.end(InternalError("a token could not be told"))
            else:
                if delta is not None:
                    deltas[reservation.stream].append(delta)
            if output.finish_reason is not None and reservation.on_engine_released(output.seq):
                self._remove(reservation)
        for stream, batch in deltas.items():
            try:
                stream.put_batch(batch)
            except Exception:
                _log.exception("the stream of gateway %s broke", stream.gateway_id)
                self._close(stream)

    # -- what the pod asks of its service -----------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that still hold something."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Sequences of requests that still hold something."""
        return sum(reservation.num_sequences for reservation in self._requests.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for compute on this pod."""
        return sum(
            r.request.context_len - seq.computed
            for r in self._requests.values()
            if r.state is HandOffState.RUNNING
            for seq in r.seqs
            if seq.finish_reason is None and seq.computed < r.request.context_len
        )

    async def wait_idle(self) -> None:
        """Returns once no request holds anything."""
        await self._requests.wait_idle()

    def abort_all(self, error: BatonError) -> None:
        """Ends every request and every stream (the pod stops)."""
        for reservation in self._requests.values():
            reservation.end(error)
        for stream in list(self._streams.values()):
            self._aio.call_soon_threadsafe(stream.close)  # after the errors above, which are queued the same way
