"""The Prefill call of one reservation: what it sends to the prefill pod, and the events that come back.

    sent early:  Prefill ----> chunks ...  kv_target set: SetTarget ----> first token ----> HandedOff
    else:        kv_target set: Prefill with the target ----> chunks ----> first token ----> HandedOff

A call is sent early if the attempt expects that Reserve gives a KvTarget. If Reserve gives none, the call is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from common.errors import BatonError, DeadlineExceeded, Unavailable
from common.pb import prefill_pb2, types_pb2
from common.rpc import ERROR_KEY, error_from_rpc, timeout_until, translate_rpc_errors
from common.types import ValidRequest
from common.wire import error_from_pb, request_to_pb
from gateway.dispatch.token_queue import TokenQueue
from gateway.pods.stalls import Suspicion
from gateway.routing.placement import Placement
from gateway.routing.router import RoutingPlan
from gateway.telemetry.timeline import AttemptTrace, Timeline

HAND_OFF_GRACE_S = 2.0  #: Wait when a prefill pod vanishes after the first token: decode may have all KV.
TARGET_GRACE_S = 0.1  #: Wait when SetTarget fails: the Prefill call may have ended with an error that says more.


class PrefillSink(Protocol):
    """The attempt that made a Prefill call."""

    token_queue: TokenQueue

    def on_prompt_logprobs(self, pb: types_pb2.PromptLogprobs) -> None:
        """Called for each part of the prompt's log-probabilities."""

    def on_prefilled(self, prefill: PrefillCall, event: prefill_pb2.FirstToken) -> None:
        """Called for the first token of each sample, once Reserve gave the KvTarget."""

    def on_prefill_failed(self, prefill: PrefillCall, error: BatonError) -> None:
        """Called when a call with a KvTarget failed before the hand-off, or makes no progress."""

    def on_prefill_end(self, prefill: PrefillCall) -> None:
        """Called when a call with a KvTarget has ended in any way."""


class PrefillCall:
    """A Prefill call, in a task of its own, and its stall sink.

    The call may outlive its attempt, so it keeps its own pods and request.
    """

    def __init__(
        self,
        sink: PrefillSink,
        plan: RoutingPlan,
        request: ValidRequest,
        placement: Placement,
        *,
        deadline: float,
        timeline: Timeline,
        trace: AttemptTrace,
    ) -> None:
        """Starts the call. `request`: under the id of the reservation. `deadline`: time.monotonic() value."""
        assert placement.prefill is not None
        self.placement, self.pod = placement, placement.prefill
        self.handed_off = False  #: The prefill pod reported that the decode pod has all KV.
        self._sink, self._plan, self._request = sink, plan, request
        self._deadline, self._timeline, self._trace = deadline, timeline, trace
        self._metrics = plan.router.metrics
        #: Blocks for the KV. Cancelled if Reserve gave none.
        self._kv_target: asyncio.Future[types_pb2.KvTarget] = asyncio.get_running_loop().create_future()
        self._num_events = 0  #: Messages of the call so far.
        self._first_token_received = False
        self._computing_since = timeline.start  #: When the pod began to compute the prompt; time.monotonic().
        self.task = plan.router.spawn(self._run())

    @property
    def has_target(self) -> bool:
        """Reserve gave the KvTarget."""
        return self._kv_target.done() and not self._kv_target.cancelled()

    def set_target(self, target: types_pb2.KvTarget) -> None:
        """Called when Reserve gave the KvTarget."""
        if not self._kv_target.done():
            self._kv_target.set_result(target)

    def cancel(self) -> None:
        """Ends a call that was sent early, because Reserve gave no KvTarget."""
        self._kv_target.cancel()
        self.task.cancel()

    def progress(self, suspicion: Suspicion, *, queued: bool) -> int | None:
        """See StallSink. After the last chunk no step is needed, and a prompt in the pod's queue is not stalled."""
        waits = self._first_token_received or (queued and not self._num_events)
        if self.handed_off or (waits and suspicion is Suspicion.NO_STEP):
            return None
        return self._num_events

    def on_stalled(self, error: BatonError) -> None:
        """See StallSink. If the answer is complete already, only the call ends."""
        if self._sink.token_queue.complete:
            self.task.cancel()
        elif self.has_target:
            self._metrics.stalled.labels("prefill").inc()
            self._sink.on_prefill_failed(self, error)

    async def _run(self) -> None:
        """Makes the call and handles its events until it ends."""
        self._timeline.mark("prefill", pod=self.pod.name, predicted_tokens=self.placement.predicted_hit_tokens)
        early = not self._kv_target.done()
        target = None if early else self._kv_target.result()
        message = prefill_pb2.PrefillRequest(
            request=request_to_pb(self._request), pull=self._pull_hint(), target=target
        )
        try:
            timeout_s = timeout_until(self._deadline)
        except DeadlineExceeded:  # the attempt's own timer is about to end it
            return
        call = self.pod.prefill.Prefill(message, timeout=timeout_s, metadata=self._trace.metadata)
        target_task = self._plan.router.spawn(self._send_kv_target()) if early else None
        self.pod.watch_prefill(self)
        try:
            error = await self._handle_events(call)
        finally:
            self.pod.unwatch_prefill(self)
            if self.placement.prefill_outlives:
                self.placement.on_prefill_end()
            call.cancel()  # without effect on a call that has ended
            if target_task is not None:
                target_task.cancel()
            if self.has_target:
                self._sink.on_prefill_end(self)
        if error is not None and not self.handed_off:
            # The error counts only if Reserve answers with a KvTarget. With another outcome `cancel` cancels the future
            # and this task.
            await asyncio.shield(self._kv_target)
            self._sink.on_prefill_failed(self, error)

    def _pull_hint(self) -> prefill_pb2.PullHint | None:
        """Returns the prefix that the prefill pod should pull first, and the pod that holds it."""
        offer = self.placement.pull_offer
        holder = None if offer is None else self._plan.find_holder(offer.holder)
        if offer is None or holder is None:
            return None
        self._timeline.mark("pull", holder=holder.name, tokens=offer.tokens, predicted_s=round(offer.predicted_s, 6))
        return prefill_pb2.PullHint(
            pod=holder.name,
            generation=holder.generation,
            address=holder.address,
            blocks=offer.tokens // holder.block_size,
            seconds=offer.predicted_s,
        )

    async def _send_kv_target(self) -> None:
        """Sends SetTarget for a call that was sent early, once the KvTarget is known."""
        target = await asyncio.shield(self._kv_target)
        message = prefill_pb2.SetTargetRequest(request_id=self._request.request_id, target=target)
        try:
            timeout_s = timeout_until(self._deadline)
            with translate_rpc_errors():
                await self.pod.prefill.SetTarget(message, timeout=timeout_s, metadata=self._trace.metadata)
        except BatonError as e:  # also if the deadline passed before the call was sent
            # A Prefill call that has ended says why. Its end cancels this task.
            await asyncio.sleep(TARGET_GRACE_S)
            self._sink.on_prefill_failed(self, e)

    # -- events

    async def _handle_events(self, call: Any) -> BatonError | None:
        """Handles the events of the call. Returns the error that it ended with, None after a hand-off."""
        error = None
        try:
            async for event in call:
                self._num_events += 1
                kind = event.WhichOneof("event")
                if kind == "progress":
                    self._on_progress(event.progress)
                elif kind == "first_token":
                    await asyncio.shield(self._kv_target)  # Reserve may still reject or compute locally
                    self._on_first_token(event.first_token)
                elif kind == "handed_off":
                    self.handed_off = True
                    self.placement.record_success(self.pod)
                    self._on_handed_off(event.handed_off)
                elif kind == "failed":
                    error = error_from_pb(event.failed)
            if error is None and not self.handed_off:
                error = Unavailable(f"prefill pod {self.pod.name} ended the call before the hand-off")
        except grpc.aio.AioRpcError as e:
            error = error_from_rpc(e)
            if ERROR_KEY not in (e.trailing_metadata() or {}):  # the call broke; the pod did not send this error
                self.pod.recheck()
                if self._first_token_received and not self.handed_off and not self._sink.token_queue.complete:
                    await asyncio.sleep(HAND_OFF_GRACE_S)
        except BatonError as e:
            error = e
        return error

    def _on_progress(self, event: prefill_pb2.PrefillProgress) -> None:
        """The pod has computed a chunk of the prompt."""
        self.placement.on_progress(self._request.context_len - event.computed_tokens)
        if event.HasField("prompt_logprobs"):
            self._sink.on_prompt_logprobs(event.prompt_logprobs)
        self._timeline.mark("chunk", **_details(event, "computed_tokens", "cached_tokens", "delivered_blocks"))

    def _on_first_token(self, event: prefill_pb2.FirstToken) -> None:
        """The prompt is computed; with n samples, this is called for the first token of each."""
        self._first_token_received = True
        self.placement.on_first_token()
        details = _details(event, "queue_s", "compute_s", "cached_tokens")
        self._timeline.mark("first_token", pod=self.pod.name, **details)
        if event.child == self._request.child:
            self._computing_since = time.monotonic() - event.compute_s
            self._metrics.prefill_queue.observe(event.queue_s, self._timeline.exemplar)
            self._trace.on_first_token()
        self._sink.on_prefilled(self, event)

    def _on_handed_off(self, event: prefill_pb2.HandedOff) -> None:
        """The decode pod has all KV of the prompt."""
        if event.blocks:
            self._metrics.exposed_hand_off.observe(event.exposed_s)
        since = self._computing_since - self._timeline.start
        self._timeline.mark(
            "handed_off",
            **_details(event, "blocks", "bytes", "exposed_s", "blocks_before_last_chunk", "transport"),
            parts={field.name: round(value, 6) for field, value in event.parts.ListFields()},
            pushes=[
                (p.first_block, p.blocks, round(since + p.start_s, 6), round(since + p.end_s, 6)) for p in event.pushes
            ],
        )


def _details(event: Message, *names: str) -> dict[str, Any]:
    """Returns fields of an event for the timeline."""
    values = {name: getattr(event, name) for name in names}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
