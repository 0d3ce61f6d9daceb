"""One pod as the gateway sees it: its facts, its health, its RPC stubs and its token stream.

Lifecycle: start -> (calls Info every 0.5 s and after each change of its health; keeps a Tokens stream open if the pod
decodes) -> stop.

The pod's answer to Info decides how it is used, not the index or the configuration. When the token stream ends, every
request that waits for tokens of the pod fails, and the stream is opened again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import rpc
from common.auth import Signer, sign_calls
from common.errors import BatonError, InternalError, LayoutMismatch, ModelNotFound, Unavailable, describe
from common.pb import (
    control_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    embedding_pb2_grpc,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from common.tls import TlsFiles
from common.types import AdapterEntry, PodLoad, Role
from common.wire import PROTOCOL_VERSION, load_from_pb
from gateway.pods.adapters import AdapterLoader
from gateway.pods.info import PodActivity, PodInfo
from gateway.pods.stalls import StallFinder, StallSink, stall_bound_s
from gateway.pods.view import PodView

INFO_PERIOD_S = 0.5
INFO_TIMEOUT_S = 1.0
HEALTH_RETRY_S = 2.0  #: Pause before the pod's health is watched again.
SILENCE_S = 3.0  #: A pod that does not answer Info counts as busy, not gone, for this long after its last answer.
HELLO_TIMEOUT_S = 0.3  #: Longest wait for a pod's first answer on a token stream; older pods send none.
ACK_BATCHES = 32  #: Batches that are acknowledged together. The pod pauses after 256 unacknowledged batches.
ABORT_TIMEOUT_S = 5.0
REPEAT_ABORT_S = 2.0  #: A sequence that still sends tokens this long after its abort is aborted again.
MAX_REMEMBERED_ABORTS = 1024  #: Aborts that are remembered before old ones are dropped.
RECHECK_DELAY_S = 0.02  #: A recheck waits this long, since many requests may ask for one at the same time.
_BACKOFF_S = (0.05, 1.0)  # first and longest pause

_log = logging.getLogger(__name__)


class TokenSink(StallSink, Protocol):
    """Receives the messages of a decode pod for one request. The methods must not block."""

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        """Tokens of one sequence arrived."""

    def on_stream_lost(self, error: BatonError) -> None:
        """The token stream has ended; no message will follow."""


class Pod:
    """The pod at one address, through restarts."""

    def __init__(
        self,
        address: str,
        signer: Signer,
        *,
        model: str,
        static: bool,
        on_change: Callable[[], None],
        only_model: bool = True,
        tls: TlsFiles | None = None,
        stuck_s: float = 0.0,
        on_adapters: Callable[[list[AdapterEntry]], None] = lambda _entries: None,
    ) -> None:
        """`stuck_s`: least bound of a request without a message, after which it is stalled; 0 for never.

        `on_adapters` gets the pod's list of adapters when it has changed.
        """
        self.address = address
        self.static = static  #: The address is configured, so the pod is never forgotten.
        self.info: PodInfo | None = None  #: Facts from the last answer to Info; None before the first.
        self.activity: PodActivity | None = None  #: Counters from the same answer.
        self.view: PodView | None = None  #: The current process as routing sees it; one per generation and role.
        self.alive = False  #: The pod answers Info, and can be used.
        self.refusal = ""  #: Why a pod that answers cannot be used; "" if it can.
        self.stalled = ""  #: Why the pod makes no progress, although requests wait for it; "" if it makes progress.
        self.last_answer_at = time.monotonic()  #: When the pod last answered Info; time.monotonic().
        self._called_at = self.last_answer_at  #: When the last call of Info ended; time.monotonic().
        self._silence_s = 0.0  #: Silence since the last answer, without the time in which this gateway was frozen.
        self.token_stream_up = False
        self.index_draining = False  #: The index says that the pod leaves.
        self.terminating = False  #: Kubernetes says that the pod leaves.
        self._reports_load = False  #: Info carries the load, so reports of the index are not needed.
        self.gateway_id = signer.name
        self._model = model  #: The served name that the pod must have.
        self._only_model = only_model  #: The gateway serves no other model, so a pod without a served name is used.
        self._on_change = on_change  #: Called when the pod comes, goes or changes.
        self._channel = sign_calls(rpc.open_channel(address, tls), signer, lambda: self.name)
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeStub(self._channel)
        self.control = control_pb2_grpc.ControlStub(self._channel)
        self.adapters = AdapterLoader(self.control, lambda: self.name, on_adapters)
        self.embedding = embedding_pb2_grpc.EmbeddingStub(self._channel)
        self._transfer = transfer_pb2_grpc.TransferStub(self._channel)
        self._sinks: dict[str, TokenSink] = {}  # by request id
        self._prefills: set[StallSink] = set()  #: Prefill calls in progress.
        self._stuck_s = stuck_s
        self._stalls = StallFinder(INFO_PERIOD_S + INFO_TIMEOUT_S)
        self._streams_ended = 0
        self._recheck_event = asyncio.Event()  #: Set to call Info now.
        self._can_stream = asyncio.Event()  #: Set while the pod is alive and its role decodes.
        self._aborted: dict[tuple[str, int | None], float] = {}  #: Time by request id and child (None: all).
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def name(self) -> str:
        """The pod's own name; its address before the first answer to Info."""
        return self.info.name if self.info else self.address

    @property
    def serving(self) -> bool:
        """The pod takes new requests, as far as is known."""
        info = self.info
        return self.alive and info is not None and info.ready and not self.leaves and not self.stalled

    @property
    def leaves(self) -> bool:
        """The pod is about to end."""
        return self.index_draining or self.terminating or (self.info is not None and self.info.draining)

    @property
    def trouble(self) -> str:
        """Why the pod is not used although it runs, for clients; "" if there is no reason."""
        return self.refusal or (self.info.stuck if self.info is not None else "") or self.stalled

    @property
    def state(self) -> str:
        """ready, starting, connecting (no token stream yet), stuck, draining, gone or refused; for humans."""
        info = self.info
        if not self.alive or info is None:
            return "refused" if self.refusal else "gone"
        if self.leaves:
            return "draining"
        if info.stuck or self.stalled:
            return "stuck"
        if not info.ready:
            return "starting"
        return "ready" if self.token_stream_up or info.role is Role.PREFILL else "connecting"

    @property
    def _pair_troubles(self) -> Mapping[str, tuple[int, str]]:
        return {} if self.view is None else self.view.pair_troubles

    def trouble_to(self, receiver: Pod) -> str:
        """Returns why this pod cannot send KV to `receiver`; "" if it can, as far as is known."""
        info = receiver.info
        generation, why = self._pair_troubles.get(receiver.name, (0, ""))
        return why if info is None or generation in (0, info.generation) else ""

    @property
    def can_decode(self) -> bool:
        """Reserve may be called."""
        return self.serving and self.token_stream_up

    @property
    def can_prefill(self) -> bool:
        """Prefill may be called, for a decode pod of the same layout."""
        return self.serving and self.info is not None and self.info.role is Role.PREFILL

    @property
    def can_compute_prompts(self) -> bool:
        """The pod may compute prompts: its role is prefill or both."""
        return self.serving and self.info is not None and self.info.role is not Role.DECODE

    def start(self) -> None:
        """Starts to call Info and to keep the token stream, in the background."""
        self._spawn(self._watch())
        self._spawn(self._watch_health())
        self._spawn(self._keep_token_stream())

    async def stop(self) -> None:
        """Closes the token stream and the channel. Requests that wait for tokens fail."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(Unavailable("the gateway is stopping"))
        await self._channel.close(None)

    def recheck(self) -> None:
        """Calls Info now, because another call to the pod failed."""
        self._recheck_event.set()

    def subscribe(self, request_id: str, sink: TokenSink) -> None:
        """Gives the request's tokens to `sink` from now on."""
        self._sinks[request_id] = sink

    def unsubscribe(self, request_id: str) -> None:
        """Drops the request's tokens from now on."""
        self._sinks.pop(request_id, None)

    def watch_prefill(self, prefill: StallSink) -> None:
        """Calls `prefill.on_stalled` if the pod makes no progress, until `unwatch_prefill`."""
        self._prefills.add(prefill)

    def unwatch_prefill(self, prefill: StallSink) -> None:
        """The call has ended."""
        self._prefills.discard(prefill)

    def abort(self, request_id: str, until: float = 0.0, *, child: int | None = None) -> None:
        """Aborts a request on the decode pod, or only its sequence `child`, in the background.

        Repeats the call until the pod acknowledges it. Stops when the pod has ended the request by itself: at its
        deadline `until` (time.monotonic()), or with the token stream.
        """
        now = time.monotonic()
        if len(self._aborted) > MAX_REMEMBERED_ABORTS:
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
                _log.info("abort of %s on %s failed: %s", request_id, self.name, describe(e, limit_s=ABORT_TIMEOUT_S))
                self.recheck()
            await asyncio.sleep(backoff)
            backoff = min(_BACKOFF_S[1], 2 * backoff)
            if time.monotonic() >= until or not self.token_stream_up or self._streams_ended != stream:
                return

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- health

    async def _watch(self) -> None:
        while True:
            self._recheck_event.clear()
            try:
                self._find_stalls(answered=await self._call_info())
            except Exception:
                _log.exception("pod %s could not be watched, trying again", self.name)
            with suppress(TimeoutError):
                # asyncio.wait_for can swallow a cancellation before Python 3.12, and then `stop` would wait forever.
                async with asyncio.timeout(INFO_PERIOD_S):
                    await self._recheck_event.wait()
                await asyncio.sleep(RECHECK_DELAY_S)

    async def _watch_health(self) -> None:
        """Calls Info as soon as the pod takes work or stops to take it, for example while it changes its role."""
        watch = health_pb2_grpc.HealthStub(self._channel).Watch
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async for _status in watch(health_pb2.HealthCheckRequest()):
                    self.recheck()
            await asyncio.sleep(HEALTH_RETRY_S)

    def _find_stalls(self, *, answered: bool) -> None:
        """Fails the requests for which the pod makes no progress, so that they continue on other pods."""
        load = None if self.view is None else self.view.load
        bound_s = stall_bound_s(self._stuck_s, self.view, self.activity)
        suspicion = self._stalls.suspect(self.info, self.activity, load, answered=answered)
        found = self._stalls.tick(
            time.monotonic(),
            suspicion,
            bound_s,
            lambda: (*self._sinks.values(), *self._prefills),
            queued=load is not None and load.waiting > 0,
        )
        before = self.stalled
        if suspicion is None:
            self.stalled = ""
        elif found:
            self.stalled = suspicion.value
            _log.warning("pod %s makes no progress (%s): %d requests move", self.name, suspicion.value, len(found))
        if before != self.stalled:
            self._on_change()
        for sink in found:
            sink.on_stalled(Unavailable(f"pod {self.name} made no progress for {bound_s:.0f} s: {self.stalled}"))

    async def _call_info(self) -> bool:
        """Calls Info once. Returns whether the pod answered."""
        before, answered = (self.alive, self.info, self._pair_troubles), True
        try:
            pb = await self._transfer.Info(transfer_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
            self._require_compatible(pb)
            await self.adapters.refresh(pb, self._apply_info(pb))
            self.alive, self.last_answer_at, self.refusal = True, time.monotonic(), ""
            self._called_at, self._silence_s = self.last_answer_at, 0.0
        except grpc.aio.AioRpcError as e:
            # If more time has passed, this gateway was frozen: the call timed out because nothing read its answer.
            now, longest_s = time.monotonic(), INFO_PERIOD_S + INFO_TIMEOUT_S
            self._silence_s += min(now - self._called_at, longest_s)
            self._called_at = now
            answered, timed_out = False, e.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not (timed_out and self.alive and self._silence_s < SILENCE_S):
                if self.alive:
                    cause = describe(e, limit_s=INFO_TIMEOUT_S)
                    _log.warning("pod %s at %s does not answer: %s", self.name, self.address, cause)
                if (hint := rpc.connection_hint(e.details() or "")) and self.refusal != hint:
                    _log.warning("pod at %s is not used: %s", self.address, hint)
                self.alive, self.refusal = False, hint or self.refusal
        except BatonError as e:  # the pod answers but cannot be used; the reason is logged once, not with every answer
            if self.refusal != str(e):
                _log.warning("pod at %s is not used: %s", self.address, e)
            self.alive, self.refusal = False, str(e)
        streams = self.alive and self.info is not None and self.info.role is not Role.PREFILL
        (self._can_stream.set if streams else self._can_stream.clear)()
        if before != (self.alive, self.info, self._pair_troubles):
            if self.alive and self.info is not None and (before[1] is None or not before[0]):
                _log.info("pod %s at %s: %s, up", self.name, self.address, self.info.role)
            self._on_change()
        return answered

    def _apply_info(self, pb: transfer_pb2.InfoResponse) -> PodView:
        """Takes over the facts and the load. Returns the view; a new generation or role gets a new one."""
        known, info = self.info, PodInfo.from_pb(pb, self.address)
        identity = (info.name, info.generation, info.role)
        if self.view is None or known is None or (known.name, known.generation, known.role) != identity:
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
        self.view.pulls, self.view.late_targets, self.view.processor = pb.pulls, pb.late_targets, pb.processor
        self.view.card = pb.card
        self.view.pair_rates = {pair.pod: pair.gb_s * 1e9 for pair in pb.pairs if pair.gb_s > 0}
        self.view.pair_troubles = {pair.pod: (pair.generation, pair.trouble) for pair in pb.pairs if pair.trouble}
        if self._reports_load:
            self.view.apply_report(load_from_pb(pb.load, draining=pb.draining), time.monotonic())
        return self.view

    def on_index_load(self, load: PodLoad) -> None:
        """Takes a load report from the index. A pod that reports by Info may be newer there, but for its adapters."""
        view = self.view
        if view is not None and load.adapter_copies > view.adapter_copies:
            view.warm_adapters, view.adapter_copies = set(load.warm_adapters), load.adapter_copies
        if view is not None and not self._reports_load:
            view.apply_report(load, time.monotonic())

    def _require_compatible(self, pb: transfer_pb2.InfoResponse) -> None:
        """Raises LayoutMismatch or ModelNotFound for a pod that cannot serve this gateway's requests."""
        if pb.protocol_version != PROTOCOL_VERSION:
            problem = f"its protocol version is {pb.protocol_version}; expected {PROTOCOL_VERSION}"
            raise LayoutMismatch(problem, field="protocol_version")
        if pb.served_name != self._model and not (self._only_model and not pb.served_name):
            raise ModelNotFound(f"it serves {pb.served_name!r}; expected {self._model!r}", field="served_name")

    # -- the token stream

    async def _keep_token_stream(self) -> None:
        backoff, logged = _BACKOFF_S[0], ""
        while True:
            await self._can_stream.wait()
            try:
                await self._run_stream()
                why = "ended"
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
                why = describe(e)
            except Exception as e:
                _log.exception("the token stream of %s failed inside the gateway", self.name)
                why = describe(e)
            was_up, self.token_stream_up = self.token_stream_up, False
            self._streams_ended += 1
            self._fail_all(Unavailable(f"the token stream of decode pod {self.name} ended"))
            if was_up:
                _log.warning("token stream of %s: %s", self.name, why)
                self._on_change()
                backoff = _BACKOFF_S[0]
            elif why != logged:
                _log.warning("token stream of %s cannot be opened: %s", self.name, why)
            logged = why
            self.recheck()
            await asyncio.sleep(backoff)
            backoff = min(_BACKOFF_S[1], 2 * backoff)

    async def _run_stream(self) -> None:
        open_stream: Any = self.decode.Tokens
        call = open_stream()
        acked, due = 0, asyncio.Queue[int]()
        helpers: list[asyncio.Task[Any]] = []
        try:
            await call.write(decode_pb2.TokensRequest(gateway_id=self.gateway_id))
            loop = asyncio.get_running_loop()
            helpers += [loop.create_task(self._wait_for_hello(call)), loop.create_task(_acknowledge(call, due))]
            async for batch in call:
                self._deliver_batch(batch)
                if batch.number - acked >= ACK_BATCHES:
                    acked = batch.number
                    due.put_nowait(acked)
        finally:
            call.cancel()
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _wait_for_hello(self, call: Any) -> None:
        """The stream is up with the pod's first answer, or after HELLO_TIMEOUT_S for an older pod, which sends none."""
        hello = asyncio.ensure_future(call.initial_metadata())
        try:
            await asyncio.wait({hello}, timeout=HELLO_TIMEOUT_S)
        finally:
            hello.cancel()
        if call.done():  # the pod refused the stream
            return
        self.token_stream_up = True
        self._on_change()

    def _deliver_batch(self, batch: decode_pb2.TokenBatch) -> None:
        """Gives each delta to its sink. A running sequence without a sink is aborted."""
        for delta in batch.deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None:
                try:
                    sink.on_delta(delta)
                except Exception:  # it concerns one request, and the stream is of all requests
                    _log.exception("tokens of %s from %s could not be delivered", delta.request_id, self.name)
                    self.unsubscribe(delta.request_id)
                    self._fail(sink, InternalError("internal error"))
            elif not delta.finish_reason:
                self.abort_orphan(delta.request_id)

    def abort_orphan(self, request_id: str, child: int | None = None) -> None:
        """Aborts a sequence that runs although this gateway does not want it, unless an abort was sent just now."""
        if time.monotonic() - self._aborted.get((request_id, child), 0.0) > REPEAT_ABORT_S:
            self.abort(request_id, child=child)

    def _fail_all(self, error: BatonError) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            self._fail(sink, error)

    def _fail(self, sink: TokenSink, error: BatonError) -> None:
        try:
            sink.on_stream_lost(error)
        except Exception:
            _log.exception("a request on %s could not be failed", self.name)


async def _acknowledge(call: Any, due: asyncio.Queue[int]) -> None:
    """Acknowledges the batches up to each number in `due`, until the stream ends."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(decode_pb2.TokensRequest(acked=await due.get()))
