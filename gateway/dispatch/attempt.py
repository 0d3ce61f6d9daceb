"""One attempt of one request: a reservation on a decode pod and, unless that computes the prompt itself, a prefill.

Lifecycle: `open` reserves and starts the prefill, before the answer to Reserve where that can be foreseen: the pod is
told then where the KV goes, and no token leaves here before. `outlet` gives tokens in order until the end; `close`
gives back whatever is still held, on every path: bookings, the route of the tokens, and, unless the sequence ended by
itself, the sequence on both pods. Each reservation has an id of its own, so an abort of one can never hit the next.

The prefill's event stream outlives the answer when the answer was complete: cancelling it before the hand-off is
acknowledged would abort the request on the pods, and their caches would lose it. An answer can be complete with token 1
and its hand-off fail: then the decode pod is freed by whichever comes last, close or the end of the prefill.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from common.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from common.pb import decode_pb2, prefill_pb2, types_pb2
from common.rpc import ERROR_KEY, error_from_rpc, timeout_until, translate_rpc_errors
from common.types import FinishReason, PromptLogprobs, Token, ValidRequest
from common.wire import (
    error_from_pb,
    finish_reason_from_pb,
    prompt_logprobs_from_pb,
    request_to_pb,
    token_from_pb,
    tokens_from_pb,
    tokens_without_logprobs_from_pb,
)
from gateway.dispatch.token_queue import TokenQueue
from gateway.pods.pod import Pod
from gateway.routing.placement import Placement, RemotePrefillCost
from gateway.routing.router import RoutingPlan
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline

RESERVE_TIMEOUT_S = 5.0  # a decode pod answers at once or is not well
HANDOFF_GRACE_S = 2.0  # prefill vanished after token 1: decode may have everything already
DEADLINE_MESSAGE = "the request's time is over"
MAX_PENDING = 8192  # tokens, alternatives counted, that a client may be behind by before its request is ended

_log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Attempt:
    """One attempt. blamed: addresses to avoid in the next one; cached_tokens: the prompt's real cache hit.

    proposed, accepted: drafts that the decode pod verified, and those of them that were right. prompt_logprobs: in the
    order of the prompt, complete with the first token. A request with output goes on behind it, and its sequence has
    the number that it had before. layout: fingerprint of the pods that took it.
    """

    def __init__(
        self,
        plan: RoutingPlan,
        *,
        attempt: int,
        avoid: frozenset[str],
        deadline: float,
        gateway_id: str,
        metrics: GatewayMetrics,
        timeline: Timeline,
        spawn: Spawn,
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._avoid = avoid
        self._deadline = deadline
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._timeline = timeline
        self._spawn = spawn
        self._request: ValidRequest = plan.request
        sampling = plan.request.sampling
        self._first_index = len(plan.request.output_ids)  # tokens before the first that this attempt gives
        self.token_queue = TokenQueue(
            sampling.n, MAX_PENDING // (1 + (sampling.logprobs or 0)), plan.request.output_ids
        )
        # Its tokens have nothing but their ids.
        self._ids_only = sampling.n == 1 and not plan.request.child and sampling.logprobs is None
        self._tokens_from_pb = tokens_without_logprobs_from_pb if self._ids_only else tokens_from_pb
        self._wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self._placement: Placement | None = None
        self._decode: Pod | None = None
        self._decode_responded = False
        self._prefill_task: asyncio.Task[None] | None = None
        self._kv_target: asyncio.Future[types_pb2.KvTarget] | None = (
            None  # where a prefill's KV goes, once Reserve said so
        )
        self._timer: asyncio.TimerHandle | None = None
        self._hand_off_failed = False
        self._computing_since = timeline.start
        self._trace = None if timeline.trace is None else timeline.trace.new_attempt(attempt)
        self._metadata = None if self._trace is None else self._trace.metadata
        self.blamed_pods: set[str] = set()
        self.layout_fingerprint: str | None = None
        self.cached_tokens = 0
        self.drafts_proposed = self.drafts_accepted = 0
        self.prompt_logprobs: list[PromptLogprobs] = []

    # -- reserve

    async def start(self) -> None:
        """Raises Overloaded when every decode pod is full, InvalidRequest for what can never be served, or why not."""
        late = DeadlineExceeded(DEADLINE_MESSAGE)
        self._timer = asyncio.get_running_loop().call_later(timeout_until(self._deadline), self.fail, late)
        tried: set[str] = set()
        rejections: list[decode_pb2.Rejected] = []
        last: BatonError | None = None
        while (placement := await self._place(tried)) is not None:
            pod = placement.decode
            tried.add(pod.address)
            if placement.expects_target:
                self._start_prefill(placement)
            try:
                answer = await self._reserve(pod, placement.remote_prefill_cost())
            except BatonError as e:
                self._cancel_prefill()
                if isinstance(e, InvalidRequest) and not isinstance(e, ModelNotFound):  # this gateway knows its model
                    raise
                _log.info("reserve on %s failed: %s", pod.name, e)
                if self._trace is not None:
                    self._trace.on_reserve_answer(pod.name, "failed", e.message)
                self._release_decode(abort=True)
                self.blamed_pods.add(pod.address)
                pod.recheck()
                last = e
                continue
            if self._trace is not None:
                self._trace.on_reserve_answer(pod.name, answer.WhichOneof("outcome") or "nothing")
            if answer.HasField("rejected"):
                self._cancel_prefill()
                self._release_decode(abort=False)
                self._metrics.rejections.labels("decode").inc()
                self._timeline.mark("rejected", pod=pod.name, reason=answer.rejected.reason)
                rejections.append(answer.rejected)
                continue
            self._on_reserved(placement, answer)
            return
        if rejections:
            wait = min(max(r.retry_after_s, 0.1) for r in rejections)
            raise Overloaded(f"no decode pod has room: {rejections[-1].reason}", retry_after_s=wait)
        raise last or Unavailable("no prefill and decode pods are ready for this request", retry_after_s=1.0)

    async def _place(self, tried: set[str]) -> Placement | None:
        request_id = f"{self._plan.request.request_id}-{self._attempt}.{len(tried) + 1}"
        with self._metrics.routing.labels("place").time():
            self._placement = await self._plan.place(request_id, self._avoid, tried)
        self._request = dataclasses.replace(self._plan.request, request_id=request_id)
        if self._trace is not None and (placed := self._placement) is not None:
            prefill = None if placed.prefill is None else placed.prefill.name
            self._trace.on_placed(placed.decode.name, prefill, placed.predicted_hit_tokens)
        return self._placement

    async def _reserve(self, pod: Pod, elsewhere: RemotePrefillCost | None) -> decode_pb2.ReserveResponse:
        self._decode = pod
        pod.subscribe(self._request.request_id, self)
        message = decode_pb2.ReserveRequest(request=request_to_pb(self._request), gateway_id=self._gateway_id)
        if elsewhere is not None:
            message.remote.queue_s, message.remote.compute_s = elsewhere.queue_s, elsewhere.compute_s
            message.remote.hand_off_s, message.remote.tokens_per_s = elsewhere.hand_off_s, elsewhere.tokens_per_s
        try:
            # The call's own deadline is the request's: the pod plans with it. Its answer is due much earlier.
            async with asyncio.timeout(RESERVE_TIMEOUT_S):
                with translate_rpc_errors():
                    return await pod.decode.Reserve(
                        message, timeout=timeout_until(self._deadline), metadata=self._metadata
                    )
        except TimeoutError as e:
            raise Unavailable(f"decode pod {pod.name} does not answer") from e

    def _on_reserved(self, placement: Placement, answer: decode_pb2.ReserveResponse) -> None:
        kind = answer.WhichOneof("outcome")
        pod = placement.decode
        self.layout_fingerprint = None if pod.info is None else pod.info.fingerprint
        if kind != "target":
            self._cancel_prefill()
        if kind == "local":
            self._timeline.mark("reserved", pod=pod.name, outcome="local", cached_tokens=answer.cached_tokens)
            placement.on_local_prefill()
            self._count_hits(placement, answer.cached_tokens)
            self.cached_tokens = answer.cached_tokens
            return
        if kind != "target":
            raise InternalError(f"decode pod {pod.name} answered Reserve with nothing")
        self._timeline.mark(
            "reserved",
            pod=pod.name,
            outcome="target",
            cached_tokens=answer.cached_tokens,
            first_block=answer.target.first_block,
            blocks=len(answer.target.blocks),
        )
        if placement.prefill is None:
            raise InternalError(f"aggregated pod {pod.name} wants its prompt computed elsewhere")
        home = self._kv_target or self._start_prefill(placement)
        if not home.done():
            home.set_result(answer.target)

    # -- prefill

    def _start_prefill(self, placement: Placement) -> asyncio.Future[types_pb2.KvTarget]:
        assert placement.prefill is not None
        home = self._kv_target = asyncio.get_running_loop().create_future()
        self._prefill_task = self._spawn(self._run_prefill(placement, placement.prefill, placement.decode, home))
        return home

    def _cancel_prefill(self) -> None:
        """Of a prompt that gets no home on the decode pod that was asked."""
        home, self._kv_target = self._kv_target, None
        task, self._prefill_task = self._prefill_task, None
        if home is not None:
            home.cancel()
        if task is not None:
            task.cancel()

    async def _send_kv_target(self, pod: Pod, request_id: str, home: asyncio.Future[types_pb2.KvTarget]) -> None:
        message = prefill_pb2.SetTargetRequest(request_id=request_id, target=await asyncio.shield(home))
        try:
            await pod.prefill.SetTarget(message, timeout=timeout_until(self._deadline), metadata=self._metadata)
        except grpc.aio.AioRpcError as e:
            self._prefill_failed(pod, error_from_rpc(e))
        except DeadlineExceeded as e:  # as it was about to be sent
            self._prefill_failed(pod, e)

    async def _run_prefill(
        self, placement: Placement, pod: Pod, decode: Pod, home: asyncio.Future[types_pb2.KvTarget]
    ) -> None:
        self._timeline.mark("prefill", pod=pod.name, predicted_tokens=placement.predicted_hit_tokens)
        request, early = self._request, not home.done()
        first = handed_off = False
        reason: BatonError | None = None
        message = prefill_pb2.PrefillRequest(request=request_to_pb(request), pull=self._pull_hint(placement))
        if not early:
            message.target.CopyFrom(home.result())
        try:
            timeout_s = timeout_until(self._deadline)
        except DeadlineExceeded:  # the attempt's own timer is about to end it
            return
        call = pod.prefill.Prefill(message, timeout=timeout_s, metadata=self._metadata)
        telling = self._spawn(self._send_kv_target(pod, request.request_id, home)) if early else None
        try:
            async for event in call:
                kind = event.WhichOneof("event")
                if kind == "progress":
                    placement.on_progress(request.context_len - event.progress.computed_tokens)
                    self._on_progress(event.progress)
                elif kind == "first_token":
                    await asyncio.shield(home)  # a prompt without a home has no answer
                    first = True
                    placement.on_first_token()
                    self._count_hits(placement, event.first_token.cached_tokens)
                    self._on_first_token(pod, event.first_token)
                elif kind == "handed_off":
                    handed_off = True
                    self._on_handed_off(event.handed_off)
                elif kind == "failed":
                    reason = error_from_pb(event.failed)
            if reason is None and not handed_off:
                reason = Unavailable(f"prefill pod {pod.name} ended the call early")
        except grpc.aio.AioRpcError as e:
            reason = error_from_rpc(e)
            if ERROR_KEY not in (e.trailing_metadata() or {}):
                pod.recheck()
                if first and not handed_off and not self.token_queue.complete:
                    await asyncio.sleep(HANDOFF_GRACE_S)
        except BatonError as e:
            reason = e
        finally:
            call.cancel()  # no effect on one that has ended
            if telling is not None:
                telling.cancel()
            if home.done() and not home.cancelled():
                self._hand_off_failed = not handed_off and not self._decode_responded
                if self._hand_off_failed and self.token_queue.complete and self._decode is None:
                    decode.abort(placement.request_id, self._deadline)
        if reason is not None and not handed_off:
            await asyncio.shield(home)  # with another outcome of Reserve the failure is nobody's
            self._prefill_failed(pod, reason)

    def _prefill_failed(self, pod: Pod, reason: BatonError) -> None:
        """Once decode speaks, the hand-off happened, whatever became of the call that reports it."""
        if not self._decode_responded and not self.token_queue.complete:
            self._timeline.mark("prefill_failed", pod=pod.name, error=str(reason))
            self._blame_pods(pod, reason)
            self.fail(reason)

    def _pull_hint(self, placement: Placement) -> prefill_pb2.PullHint | None:
        pull = placement.pull_offer
        holder = None if pull is None else self._plan.find_holder(pull.holder)
        if pull is None or holder is None:
            return None
        self._timeline.mark("pull", holder=holder.name, tokens=pull.tokens, predicted_s=round(pull.predicted_s, 6))
        return prefill_pb2.PullHint(
            pod=holder.name,
            generation=holder.generation,
            address=holder.address,
            blocks=pull.tokens // holder.block_size,
            seconds=pull.predicted_s,
        )

    def _count_hits(self, placement: Placement, cached_tokens: int) -> None:
        self._metrics.record_hits(
            placement.predicted_hit_tokens,
            cached_tokens,
            prompt_tokens=self._request.context_len,
            repeated=self._plan.repeated_tokens,
        )

    def _blame_pods(self, prefill: Pod, reason: BatonError) -> None:
        """Either side may be at fault for a broken hand-off; a refusal for load is prefill's alone."""
        self.blamed_pods.add(prefill.address)
        if self._decode is not None and not isinstance(reason, Overloaded) and prefill.serving:
            self.blamed_pods.add(self._decode.address)

    def _on_progress(self, event: prefill_pb2.PrefillProgress) -> None:
        if event.HasField("prompt_logprobs"):
            self._add_prompt_logprobs(event.prompt_logprobs)
        self._timeline.mark(
            "chunk",
            computed_tokens=event.computed_tokens,
            cached_tokens=event.cached_tokens,
            delivered_blocks=event.delivered_blocks,
        )

    def _add_prompt_logprobs(self, pb: types_pb2.PromptLogprobs) -> None:
        """A preemption may repeat what came before."""
        found, parts = prompt_logprobs_from_pb(pb), self.prompt_logprobs
        if not parts or found.first >= parts[-1].first + len(parts[-1].logprobs):
            parts.append(found)

    def _on_first_token(self, pod: Pod, event: prefill_pb2.FirstToken) -> None:
        self._timeline.mark(
            "first_token",
            pod=pod.name,
            queue_s=round(event.queue_s, 6),
            compute_s=round(event.compute_s, 6),
            cached_tokens=event.cached_tokens,
        )
        self.cached_tokens = event.cached_tokens
        if event.child == self._request.child:
            self._computing_since = time.monotonic() - event.compute_s
            self._metrics.prefill_queue.observe(event.queue_s, self._timeline.exemplar)
            if self._trace is not None:
                self._trace.on_first_token()
        self._put_tokens(event.child, [token_from_pb(event.token)], finish_reason_from_pb(event.finish_reason))

    def _put_tokens(self, child: int, tokens: Sequence[Token], finish: FinishReason | None) -> None:
        at = child - self._request.child
        if not 0 <= at < self.token_queue.num_samples:
            self.fail(InternalError(f"a pod tells of sequence {child} of {self.token_queue.num_samples}"))
        elif not self.token_queue.put(at, tokens, finish):
            # Whoever writes to the client is stuck, maybe for long: what holds memory and a pod ends here.
            self.fail(Overloaded("the client reads too slowly"))
            self._release_decode(abort=True)
        elif at in self.token_queue.stopped_samples and tokens and finish is None and self._decode is not None:
            self._decode.abort_orphan(self._request.request_id, child)

    def _on_handed_off(self, event: prefill_pb2.HandedOff) -> None:
        since = self._computing_since - self._timeline.start
        if event.blocks:
            self._metrics.exposed_hand_off.observe(event.exposed_s)
        self._timeline.mark(
            "handed_off",
            blocks=event.blocks,
            bytes=event.bytes,
            exposed_s=round(event.exposed_s, 6),
            blocks_before_last_chunk=event.blocks_before_last_chunk,
            transport=event.transport,
            parts={field.name: round(value, 6) for field, value in event.parts.ListFields()},
            pushes=[
                (p.first_block, p.blocks, round(since + p.start_s, 6), round(since + p.end_s, 6)) for p in event.pushes
            ],
        )

    # -- what the decode pod says (gateway.pods.pod.TokenSink)

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        """News from the token stream. It comes for every token, so what happens once is told by cheap signs."""
        if not self._decode_responded:
            self._decode_responded = True
            self._timeline.mark("decode")
            if self._trace is not None:
                self._trace.on_first_token()
        pbs = delta.tokens
        more = delta.finish_reason or delta.cached_tokens or delta.child or delta.HasField("speculation")
        if self._ids_only and len(pbs) == 1 and not more:
            pb = pbs[0]
            if self.token_queue.relay_token_id(pb.index, pb.id):  # as nearly every token
                return
        tokens = self._tokens_from_pb(pbs)
        if tokens and tokens[0].index == self._first_index and self._placement is not None:
            self._placement.on_first_token()  # the first token of a prompt that the decode pod computed
        if delta.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if self._wants_prompt_logprobs and delta.HasField("prompt_logprobs"):
            self._add_prompt_logprobs(delta.prompt_logprobs)
        if delta.HasField("speculation"):
            self.drafts_proposed += delta.speculation.proposed
            self.drafts_accepted += delta.speculation.accepted
        if not delta.finish_reason:
            self._put_tokens(delta.child, tokens, None)
            return
        finish = finish_reason_from_pb(delta.finish_reason)
        failed = finish in (FinishReason.ERROR, FinishReason.ABORT)
        self._put_tokens(delta.child, tokens, None if failed else finish)
        if finish is FinishReason.ERROR:
            error = error_from_pb(delta.error) if delta.HasField("error") else InternalError("the decode pod failed")
            self._blame_decode()
            self.fail(error)
        elif finish is FinishReason.ABORT:
            self._blame_decode()
            self.fail(Unavailable("the decode pod ended the request"))

    def fail(self, error: BatonError) -> None:
        """Ends this attempt; tokens that are in order already are still given first."""
        self.token_queue.fail(error)

    def on_stream_lost(self, error: BatonError) -> None:
        """The decode pod's token stream ended."""
        self._blame_decode()
        self.fail(error)

    def _blame_decode(self) -> None:
        if self._decode is not None:
            self.blamed_pods.add(self._decode.address)

    # -- the end

    def stop_sample(self, child: int) -> None:
        """Nothing more is wanted of one child; the others go on."""
        if self.token_queue.stop_sample(child) and self._decode is not None:
            self._decode.abort(self._request.request_id, self._deadline, child=child)

    def close(self) -> None:
        """Gives everything back; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._trace is not None:
            drafts = {"baton.drafts_proposed": self.drafts_proposed, "baton.drafts_accepted": self.drafts_accepted}
            error = self.token_queue.error
            self._trace.end(None if error is None else error.message, drafts)
        self._metrics.duplicates.inc(self.token_queue.take_duplicates())
        self._release_decode(abort=not self.token_queue.complete or self._hand_off_failed)
        task, self._prefill_task = self._prefill_task, None
        if not self.token_queue.complete and task is not None:
            task.cancel()

    def _release_decode(self, *, abort: bool) -> None:
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.release()
        pod, self._decode = self._decode, None
        if pod is None:
            return
        pod.unsubscribe(self._request.request_id)
        if abort:
            pod.abort(self._request.request_id, self._deadline)
