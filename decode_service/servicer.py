"""Decode service of one pod: admits requests, keeps one token stream per gateway and sends each step's tokens to it.

The event loop owns the registry of requests and the streams. The engine thread and the transfer thread reach them
through call_soon_threadsafe. The engine thread also looks requests up, which is safe because no entry is replaced.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc

from common.auth import current_caller
from common.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded, Unauthenticated, Unavailable
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc import remaining_s
from common.tracing.tracer import Attributes, TraceContext, Tracer
from common.types import RemotePrefillCost, Role
from common.wire import kv_target_to_pb, request_from_pb
from decode_service.admission import Admission, Admitted, Rejected
from decode_service.hand_off import DecodeHandOff
from decode_service.token_stream import MAX_UNACKED_BATCHES, PAUSE_LIMIT_S, TokenStream
from engine.schedule.outputs import SequenceOutput, StepResult
from pod.requests import DEFAULT_DEADLINE_S, RequestRegistry, retry_while
from pod.runtime import PodRuntime

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
FILE_WAIT_S = 3.0  # Longest wait of Reserve for blocks from files; a gateway waits 5 s for the answer
RETRY_MIN_S, RETRY_MAX_S = 0.5, 10.0  # Bounds of the time after which a rejected client should retry.


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves Decode on one pod. Every method but on_step runs on the event loop."""

    full_name = "baton.v1.Decode"
    roles = frozenset((Role.DECODE, Role.BOTH))

    def __init__(
        self, pod: PodRuntime, *, window: int = MAX_UNACKED_BATCHES, pause_limit_s: float = PAUSE_LIMIT_S
    ) -> None:
        self._pod = pod
        self._window = window  # Unacknowledged token batches of a gateway at which its sequences are paused
        self._pause_limit_s = pause_limit_s  # A gateway that is paused for this many seconds loses its sequences
        self._aio = asyncio.get_running_loop()
        self.requests: RequestRegistry[DecodeHandOff] = pod.requests
        self._admission = Admission(pod)
        self._streams: dict[str, TokenStream] = {}
        self._residency_s = 1.0  # Moving average of the seconds that a request stays on this pod

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
        grammar = await pod.grammars.compile(valid)
        pod.require_ready(*self.roles)
        pod.limits.check(valid, generates=True)
        _require_own_id(request.gateway_id)
        stream = self._streams.get(request.gateway_id)
        if stream is None or stream.paused:
            problem = "reads its token stream too slowly" if stream else "has no token stream to this pod"
            raise Unavailable(f"gateway {request.gateway_id!r} {problem}")
        remote = request.remote if request.HasField("remote") else None
        cost = remote and RemotePrefillCost(
            remote.queue_s, remote.compute_s, remote.hand_off_s, remote.tokens_per_s, remote.same_processor
        )

        def decide() -> Admitted | Rejected:
            pod.require_ready(*self.roles)
            if stream.closed:
                raise Unavailable(f"the token stream of gateway {request.gateway_id!r} has ended")
            if valid.request_id in self.requests:
                raise InvalidRequest(f"request {valid.request_id} is already running on this pod", field="request_id")
            return self._admission.decide(valid, hash_prompt, cost, remote_only=request.remote_only)

        hash_prompt = functools.cache(lambda: pod.prompt_hashes(valid))  # the decision may be tried again
        load = self._admission.load_from_files(valid, hash_prompt, cost)
        await retry_while(lambda: load.done, lambda done: not done, FILE_WAIT_S)
        result = await retry_while(decide, lambda found: isinstance(found, Rejected) and found.temporary)
        if isinstance(result, Rejected):
            return self._rejected(result.reason)
        decision, cached_tokens = result.decision, result.cached_tokens
        with ExitStack() as reservation:  # frees the blocks if the request ends here
            if result.lease is not None:
                reservation.callback(result.lease.finish, "ended before it ran")
            if decision.local:
                try:
                    pod.require_deadline(self.requests.queued_tokens + valid.context_len - cached_tokens, deadline_s)
                except Overloaded as error:
                    return self._rejected(error.message)
            span = pod.caller_span(context)
            hand_off = DecodeHandOff(
                pod, valid, stream, result, reservation, deadline_s, grammar=grammar, caller_span=span
            )
            reservation.callback(hand_off.close)
            self.requests.add(valid.request_id, hand_off)
            outcome = "local" if decision.local else "remote"
            pod.metrics.reserved.labels(outcome).inc()
            pod.metrics.decided.labels(outcome, decision.reason).inc()
            target = hand_off.start()
            reservation.pop_all()
        if target is None:
            return decode_pb2.ReserveResponse(local=decode_pb2.LocalPrefill(), cached_tokens=cached_tokens)
        return decode_pb2.ReserveResponse(target=kv_target_to_pb(target), cached_tokens=cached_tokens)

    async def Abort(
        self, request: decode_pb2.DecodeAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeAbortResponse:
        """Implements Abort of decode.proto."""
        if hand_off := self.requests.get(request.request_id):
            if request.HasField("child"):
                hand_off.close_child(request.child)
            else:
                hand_off.close()
        return decode_pb2.DecodeAbortResponse()

    async def Tokens(
        self, request_iterator: AsyncIterator[decode_pb2.TokensRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        """Implements Tokens of decode.proto. Reserve works after the response headers, which confirm the hello."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await anext(request_iterator, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if hello is None or not hello.gateway_id:
            raise InvalidRequest("the first message must have a gateway_id", field="gateway_id")
        _require_own_id(hello.gateway_id)
        self._pod.role.require(*self.roles)
        stream = self._open(hello.gateway_id)
        reader = self._aio.create_task(self._read_acks(stream, request_iterator))
        try:
            await context.send_initial_metadata(())
            async for batch in stream.batches():
                yield batch
            if reader.done() and not reader.cancelled():
                reader.result()  # the gateway hears why its stream has ended
        finally:
            reader.cancel()
            self._close(stream)
            await asyncio.gather(reader, return_exceptions=True)

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
        stream = self._streams[gateway_id] = TokenStream(
            gateway_id,
            window=self._window,
            pause_limit_s=self._pause_limit_s,
            on_pause=self._on_pause,
            on_overrun=self._on_overrun,
        )
        return stream

    def _close(self, stream: TokenStream) -> None:
        stream.close()
        if self._streams.get(stream.gateway_id) is stream:
            del self._streams[stream.gateway_id]
        for hand_off in self._requests_of(stream):
            hand_off.close()

    def _requests_of(self, stream: TokenStream) -> list[DecodeHandOff]:
        return [hand_off for hand_off in self.requests if hand_off.stream is stream]

    def _on_pause(self, stream: TokenStream, paused: bool) -> None:
        for hand_off in self._requests_of(stream):
            hand_off.set_paused(paused)

    def _on_overrun(self, stream: TokenStream) -> None:
        for hand_off in self._requests_of(stream):
            hand_off.fail(Overloaded("the gateway reads its token stream too slowly"))

    # -- requests -----------------------------------------------------------------------------------------------------
    def _rejected(self, reason: str) -> decode_pb2.ReserveResponse:
        self._pod.metrics.reserved.labels("rejected").inc()
        retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, self._residency_s / max(1, len(self.requests))))
        return decode_pb2.ReserveResponse(rejected=decode_pb2.Rejected(reason=reason, retry_after_s=retry_s))

    def on_drained(self, hand_off: DecodeHandOff) -> None:
        self._residency_s += 0.1 * (time.monotonic() - hand_off.arrived_at - self._residency_s)
        if hand_off.caller_span is not None and self._pod.tracer is not None:
            record_spans(self._pod.tracer, hand_off.caller_span, hand_off)

    def _on_outputs(self, outputs: list[tuple[DecodeHandOff, SequenceOutput]]) -> None:
        """Sends the outputs of one step, as one batch per gateway."""
        deltas: dict[TokenStream, list[decode_pb2.SequenceDelta]] = defaultdict(list)
        for hand_off, output in outputs:
            if (delta := hand_off.on_output(output)) is not None:
                deltas[hand_off.stream].append(delta)
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
            if (hand_off := self.requests.get(output.seq.request_id)) and hand_off.request is output.seq.request
        ]
        if outputs:
            self._aio.call_soon_threadsafe(self._on_outputs, outputs)

    def move_away(self, error: BatonError) -> list[DecodeHandOff]:
        """Ends every request with `error`: the gateways continue the answers on other pods."""
        moved = list(self.requests)
        self.requests.fail_all(error)
        return moved

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, and every stream, because the pod stops or has another role now."""
        self.requests.fail_all(error)
        for stream in list(self._streams.values()):
            self._aio.call_soon_threadsafe(stream.close)  # queued behind the errors above


def _require_own_id(gateway_id: str) -> None:
    """Raises Unauthenticated unless the caller's signature names this gateway: no gateway takes another's stream."""
    if (signed := current_caller().name) != gateway_id:
        raise Unauthenticated(f"gateway_id is {gateway_id!r}, but the call is signed by {signed!r}")


def record_spans(tracer: Tracer, parent: TraceContext, hand_off: DecodeHandOff) -> None:
    """Records the spans of a drained request below `parent`, the gateway's attempt.

    decode.reserve lasts until the answer to Reserve, decode.receive (remote prefill only) until every block and the
    commit arrived, decode.run until the end in the engine.
    """
    now = time.monotonic()
    request, running = hand_off.request, hand_off.running_since
    named: Attributes = {"baton.request_id": request.request_id, "baton.local": hand_off.local}
    reserved = hand_off.reserved_at or now
    tracer.record_span(
        "decode.reserve", parent.new_child(), parent, hand_off.arrived_at, reserved, named, kind="server"
    )
    if not hand_off.local:
        tracer.record_span("decode.receive", parent.new_child(), parent, reserved, running or now)
    if running is not None and hand_off.seqs:
        finishes = ",".join(str(seq.finish_reason) for seq in hand_off.seqs if seq.finish_reason is not None)
        counted: Attributes = {
            "baton.prompt_tokens": request.prompt_len,
            "baton.output_tokens": sum(seq.num_output for seq in hand_off.seqs),
            "baton.preemptions": sum(seq.preemptions for seq in hand_off.seqs),
            "baton.finish": finishes or None,
        }
        tracer.record_span("decode.run", parent.new_child(), parent, running, now, counted)
