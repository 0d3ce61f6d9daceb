"""One pod as the gateway sees it: who it is, whether it lives, its calls, and its token stream.

Lifecycle: start -> (asks Info every half second; on a pod that decodes, keeps one Tokens stream open) -> stop. Info is
authoritative: whatever the index or the configuration says, a pod is used only as what it says it is, and not at all if
that is another model or protocol. When the token stream ends, every request that waits for tokens of this pod is told,
and the stream is opened anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc

from common import rpc
from common.errors import BatonError, LayoutMismatch, ModelNotFound, Unavailable
from common.pb import (
    control_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    embedding_pb2_grpc,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from common.types import PodLoad, Role
from common.wire import PROTOCOL_VERSION, load_from_pb
from gateway.pods.info import PodActivity, PodInfo
from gateway.pods.view import PodView

INFO_PERIOD_S = 0.5
INFO_TIMEOUT_S = 1.0
SILENCE_S = 3.0  # a pod is busy, not gone, that refuses nothing and answered this short a time ago
HELLO_S = 0.3  # the pod's first answer to hello; older pods answer with the first batch only
ACK_BATCHES = 32  # acknowledged together: the pod waits for an acknowledgement after 256 only
ABORT_TIMEOUT_S = 5.0
REPEAT_ABORT_S = 2.0  # a sequence that still sends tokens this long after its abort is aborted again
_BACKOFF_S = (0.05, 1.0)

_log = logging.getLogger(__name__)


class TokenSink(Protocol):
    """Where a request takes what its decode pod says."""

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        """News of the sequence; never blocks."""

    def on_stream_lost(self, error: BatonError) -> None:
        """Nothing will follow."""


class Pod:
    """One address. model: the served name that its requests will have; alone: the gateway serves no other.

    view: what routing knows of this process, one per generation, from the first Info on. activity: what it did, as of
    its last Info. index_draining: the index says that it leaves; leaving: Kubernetes does. on_change: it came, went or
    changed. objection: why it cannot be used although it answers.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        *,
        model: str,
        static: bool,
        on_change: Callable[[], None],
        only_model: bool = True,
    ) -> None:
        self.address = address
        self.static = static
        self.info: PodInfo | None = None
        self.activity: PodActivity | None = None
        self.alive = False
        self.token_stream_up = False
        self.last_answer_at = time.monotonic()
        self.view: PodView | None = None
        self.index_draining = False
        self.terminating = False
        self._reports_load = False
        self._gateway_id = gateway_id
        self._model = model
        self._alone = only_model
        self.refusal = ""
        self._on_change = on_change
        self._channel = rpc.open_channel(address)
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeStub(self._channel)
        self.control = control_pb2_grpc.ControlStub(self._channel)
        self.embedding = embedding_pb2_grpc.EmbeddingStub(self._channel)
        self._transfer = transfer_pb2_grpc.TransferStub(self._channel)
        self._sinks: dict[str, TokenSink] = {}
        self._streams_ended = 0
        self._recheck_event = asyncio.Event()
        self._can_stream = asyncio.Event()
        self._aborted: dict[tuple[str, int | None], float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def name(self) -> str:
        """Its own name, its address before it has told one."""
        return self.info.name if self.info else self.address

    @property
    def serving(self) -> bool:
        """Takes new requests, as far as is known."""
        info = self.info
        stays = info is not None and info.ready and not (info.draining or self.index_draining or self.terminating)
        return self.alive and stays

    @property
    def state(self) -> str:
        """In one word, for people: ready, starting, connecting (no token stream yet), draining, gone or refused."""
        info = self.info
        if not self.alive or info is None:
            return "refused" if self.refusal else "gone"
        if info.draining or self.index_draining or self.terminating:
            return "draining"
        if not info.ready:
            return "starting"
        return "ready" if self.token_stream_up or info.role is Role.PREFILL else "connecting"

    @property
    def can_decode(self) -> bool:
        """May be asked to reserve."""
        return self.serving and self.token_stream_up

    @property
    def can_prefill(self) -> bool:
        """May be asked to prefill for others."""
        return self.serving and self.info is not None and self.info.role is Role.PREFILL

    @property
    def can_compute_prompts(self) -> bool:
        """Prompts may be computed here."""
        return self.serving and self.info is not None and self.info.role is not Role.DECODE

    def start(self) -> None:
        """Starts watching."""
        self._spawn(self._watch())
        self._spawn(self._keep_token_stream())

    async def stop(self) -> None:
        """Ends the stream and the channel; what waits for tokens is told."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(Unavailable("the gateway is leaving"))
        await self._channel.close(None)

    def recheck(self) -> None:
        """A call failed: look again now."""
        self._recheck_event.set()

    def subscribe(self, request_id: str, sink: TokenSink) -> None:
        """Routes the request's tokens to a sink from now on."""
        self._sinks[request_id] = sink

    def unsubscribe(self, request_id: str) -> None:
        """Tokens of this request are dropped from now on."""
        self._sinks.pop(request_id, None)

    def abort(self, request_id: str, until: float = 0.0, *, child: int | None = None) -> None:
        """Ends a request, or one of its sequences, on the decode pod, in the background.

        It is repeated until the pod acknowledges it or has ended the request by itself: at `until` (time.monotonic())
        or with the token stream.
        """
        now = time.monotonic()
        if len(self._aborted) > 1024:
            self._aborted = {k: at for k, at in self._aborted.items() if now - at < REPEAT_ABORT_S}
        self._aborted[request_id, child] = now
        self._spawn(self._abort(request_id, until, child))

    async def _abort(self, request_id: str, until: float, child: int | None) -> None:
        message = decode_pb2.DecodeAbortRequest(request_id=request_id, child=child)
        stream, backoff = self._streams_ended, _BACKOFF_S[0]
        while True:
            try:
                await self.decode.Abort(message, timeout=ABORT_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as e:
                _log.info("abort of %s on %s failed: %s", request_id, self.name, e.details())
                self.recheck()
            await asyncio.sleep(backoff)
            backoff = min(_BACKOFF_S[1], 2 * backoff)
            if time.monotonic() >= until or not self.token_stream_up or self._streams_ended != stream:
                return

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- who is there

    async def _watch(self) -> None:
        while True:
            self._recheck_event.clear()
            await self._ask()
            with suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it can swallow the cancellation that stop waits for.
                async with asyncio.timeout(INFO_PERIOD_S):
                    await self._recheck_event.wait()
                await asyncio.sleep(0.02)  # many requests may suspect a pod at the same time

    async def _ask(self) -> None:
        before = (self.alive, self.info)
        try:
            pb = await self._transfer.Info(transfer_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
            self._require_compatible(pb)
            self._apply_info(pb)
            self.alive, self.last_answer_at, self.refusal = True, time.monotonic(), ""
        except grpc.aio.AioRpcError as e:
            late = e.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not (late and self.alive and time.monotonic() - self.last_answer_at < SILENCE_S):
                self._mark_lost(f"does not answer: {e.details()}")
        except BatonError as e:
            self._refuse(str(e))
        if self.alive and self.info is not None and self.info.role is not Role.PREFILL:
            self._can_stream.set()
        else:
            self._can_stream.clear()
        if before != (self.alive, self.info):
            if self.alive and self.info is not None and (before[1] is None or not before[0]):
                _log.info("pod %s at %s: %s, up", self.name, self.address, self.info.role)
            self._on_change()

    def _apply_info(self, pb: transfer_pb2.InfoResponse) -> None:
        known, info = self.info, PodInfo.from_pb(pb, self.address)
        if self.view is None or known is None or (known.name, known.generation) != (info.name, info.generation):
            self.view = PodView(
                info.name,
                address=self.address,
                role=info.role,
                block_size=info.block_size,
                max_request_tokens=info.max_request_tokens,
                num_blocks=info.num_blocks,
            )
        self.info, self.activity = info, PodActivity.from_pb(pb)
        self._reports_load = pb.HasField("load")
        self.view.pulls, self.view.late_targets = pb.pulls, pb.late_targets
        self.view.pair_rates = {pair.pod: pair.gb_s * 1e9 for pair in pb.pairs if pair.gb_s > 0}
        if self._reports_load:
            self.view.apply_report(load_from_pb(pb.load, draining=pb.draining), time.monotonic())

    def on_index_load(self, load: PodLoad) -> None:
        """What the index says of its load, which is older than what it says itself."""
        if self.view is not None and not self._reports_load:
            self.view.apply_report(load, time.monotonic())

    def _require_compatible(self, pb: transfer_pb2.InfoResponse) -> None:
        """Raises LayoutMismatch or ModelNotFound for a pod that cannot serve this gateway's requests."""
        if pb.protocol_version != PROTOCOL_VERSION:
            raise LayoutMismatch(
                f"its protocol version is {pb.protocol_version}, not {PROTOCOL_VERSION}", field="protocol_version"
            )
        if pb.served_name != self._model and not (self._alone and not pb.served_name):
            raise ModelNotFound(f"it serves {pb.served_name!r}, not {self._model!r}", field="served_name")

    def _refuse(self, objection: str) -> None:
        """It answers, but with what we cannot use: said once, not with every answer."""
        self.alive = False
        if objection != self.refusal:
            self.refusal = objection
            _log.warning("pod at %s is left out: %s", self.address, objection)

    def _mark_lost(self, why: str) -> None:
        if self.alive:
            _log.warning("pod %s at %s %s", self.name, self.address, why)
        self.alive = False

    # -- the token stream

    async def _keep_token_stream(self) -> None:
        backoff = _BACKOFF_S[0]
        while True:
            await self._can_stream.wait()
            try:
                await self._run_stream()
                why = "ended"
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
                why = (e.details() if isinstance(e, grpc.aio.AioRpcError) else None) or "broke"
            was_up, self.token_stream_up = self.token_stream_up, False
            self._streams_ended += 1
            self._fail_all(Unavailable(f"the token stream of decode pod {self.name} ended"))
            if was_up:
                _log.warning("token stream of %s: %s", self.name, why)
                self._on_change()
                backoff = _BACKOFF_S[0]
            self.recheck()
            await asyncio.sleep(backoff)
            backoff = min(_BACKOFF_S[1], 2 * backoff)

    async def _run_stream(self) -> None:
        open_stream: Any = self.decode.Tokens
        call = open_stream()
        consumed = _AckCounter()
        helpers: list[asyncio.Task[Any]] = []
        try:
            await call.write(decode_pb2.TokensRequest(gateway_id=self._gateway_id))
            loop = asyncio.get_running_loop()
            helpers += [loop.create_task(self._wait_for_hello(call)), loop.create_task(_acknowledge(call, consumed))]
            async for batch in call:
                self._deliver_batch(batch)
                consumed.up_to(batch.number)
        finally:
            call.cancel()
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _wait_for_hello(self, call: Any) -> None:
        """The pod knows us once its first answer is here; one that only answers with tokens gets HELLO_S."""
        hello = asyncio.ensure_future(call.initial_metadata())
        try:
            await asyncio.wait({hello}, timeout=HELLO_S)
        finally:
            hello.cancel()
        self.token_stream_up = True
        self._on_change()

    def _deliver_batch(self, batch: decode_pb2.TokenBatch) -> None:
        for delta in batch.deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None:
                sink.on_delta(delta)
            elif not delta.finish_reason:
                self.abort_orphan(delta.request_id)

    def abort_orphan(self, request_id: str, child: int | None = None) -> None:
        """A request or one child runs for which nobody waits: its abort was lost, or is on its way."""
        if time.monotonic() - self._aborted.get((request_id, child), 0.0) > REPEAT_ABORT_S:
            self.abort(request_id, child=child)

    def _fail_all(self, error: BatonError) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_stream_lost(error)


class _AckCounter:
    """The highest batch number taken from a stream, and a wake-up for whoever acknowledges it."""

    def __init__(self) -> None:
        self.number = self.acked = 0
        self.wakeup = asyncio.Event()

    def up_to(self, number: int) -> None:
        self.number = number
        if number - self.acked >= ACK_BATCHES:
            self.wakeup.set()


async def _acknowledge(call: Any, consumed: _AckCounter) -> None:
    """Acknowledges what was consumed, ACK_BATCHES or more at a time, until the stream ends."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await consumed.wakeup.wait()
            consumed.wakeup.clear()
            consumed.acked = consumed.number
            await call.write(decode_pb2.TokensRequest(acked=consumed.acked))
