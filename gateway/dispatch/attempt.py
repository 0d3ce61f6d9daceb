"""One attempt of a request: a reservation on a decode pod and, unless that pod computes the prompt, a prefill.

    gateway               decode pod            prefill pod
       |------ Reserve ------->|                     |
       |------ Prefill ----------------------------->|  sent before the answer if a KvTarget is expected,
       |<----- KvTarget -------|                     |  and cancelled if Reserve has another outcome
       |------ SetTarget --------------------------->|
       |<----- first token --------------------------|
       |                       |<===== KV ===========|  hand-off
       |<----- HandedOff ----------------------------|
       |<----- tokens ---------|                     |

Reserve has two other outcomes: Local, the decode pod computes the prompt itself, and Rejected, it has no room.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence

from common.errors import (
    AdapterNotLoaded,
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RoleChanged,
    Unavailable,
)
from common.pb import decode_pb2, prefill_pb2, types_pb2
from common.rpc import timeout_until, translate_rpc_errors
from common.types import FinishReason, PromptLogprobs, Token, ValidRequest
from common.wire import (
    error_from_pb,
    finish_reason_from_pb,
    prompt_logprobs_from_pb,
    request_to_pb,
    tokens_from_pb,
    tokens_without_logprobs_from_pb,
)
from gateway.dispatch.prefill_call import PrefillCall
from gateway.dispatch.token_queue import TokenQueue
from gateway.pods.adapters import LOAD_TIMEOUT_S
from gateway.pods.pod import Pod
from gateway.pods.stalls import Suspicion
from gateway.routing.placement import Placement
from gateway.routing.router import RoutingPlan
from gateway.telemetry.timeline import AttemptTrace, Timeline

RESERVE_TIMEOUT_S = 5.0  #: A decode pod answers Reserve at once. One that takes longer is skipped.
GRAMMAR_TIMEOUT_S = 9.0  #: Added for a request with a grammar: the pod proves it (8 s at most) and compiles it first.
MAX_PENDING_TOKENS = 8192  #: Tokens and alternatives that may wait for a client before its request is ended.
DEADLINE_MESSAGE = "the request's time is over"  #: Error text after the deadline of a request.

_log = logging.getLogger(__name__)


class Attempt:
    """Reserves, starts the prefill, and gives the tokens of both pods in order through `token_queue`.

    Lifecycle: `start`, read `token_queue`, `close`. `close` releases everything on every path: the bookings, the
    subscription to the decode pod's tokens and, unless it ended there by itself, the sequence on both pods. Each
    reservation has a request id of its own, so an abort of one reservation never ends the next.

    The Prefill call outlives `close` if the answer is complete: a cancel before the hand-off is acknowledged would
    abort the request on both pods, and the caches would lose the prompt. If that hand-off then fails, an abort frees
    the blocks on the decode pod. `close` or the end of the Prefill call sends it, whichever is later.
    """

    def __init__(
        self,
        plan: RoutingPlan,
        *,
        number: int = 1,
        avoided_pods: frozenset[str] = frozenset(),
        deadline: float,
        timeline: Timeline,
    ) -> None:
        """`avoided_pods`: addresses that are used only if there are no others. `deadline`: time.monotonic() value."""
        request, sampling = plan.request, plan.request.sampling
        max_pending = MAX_PENDING_TOKENS // (1 + (sampling.logprobs or 0))
        self.token_queue = TokenQueue(sampling.n, max_pending, request.output_ids)  # those are from earlier attempts
        self.blamed_pods: set[str] = set()  # addresses that the next attempt should avoid
        self.layout_fingerprint: str | None = None  #: KV layout of the pods that took the attempt; None before.
        self.cached_tokens = 0  # prompt tokens that were in a cache; known with the first token
        self.drafts_proposed = self.drafts_accepted = 0  #: Draft tokens verified, and those that were right.
        self.prompt_logprobs: list[PromptLogprobs] = []  # in the order of the prompt; complete with the first token
        self._plan = plan
        self._number = number
        self._avoided_pods = avoided_pods
        self._deadline = deadline
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._metrics = plan.router.metrics
        self._timeline = timeline
        self._trace = AttemptTrace(timeline.trace, number)
        self._request: ValidRequest = request  # under the id of the current reservation
        self._placement: Placement | None = None  #: The pods and bookings of the reservation; None if released.
        self._decode: Pod | None = None  #: The decode pod that was asked; None if released.
        self._prefill: PrefillCall | None = None
        self._local_prefill = False  #: The decode pod computes the prompt.
        self._hand_off_failed = False  #: Prefill ended without a confirmed hand-off, and decode sent nothing.
        self._decode_responded = False  # the decode pod has sent something for this request, so it has the KV
        #: Each token has nothing but its id, and there is one sequence, number 0.
        self._ids_only = sampling.n == 1 and not request.child and sampling.logprobs is None
        self._tokens_from_pb = tokens_without_logprobs_from_pb if self._ids_only else tokens_from_pb
        self._wants_prompt_logprobs = sampling.prompt_logprobs is not None

    # -- reserve

    async def start(self) -> None:
        """Reserves on a decode pod and starts the prefill. Tries the next decode pod if one rejects or fails.

        Raises:
            Overloaded: No decode pod has room.
            InvalidRequest: The request can never be served.
            BatonError: The error of the last decode pod, or Unavailable if there is no pod to ask.
        """
        self._deadline_timer = asyncio.get_running_loop().call_later(
            timeout_until(self._deadline), self.token_queue.fail, DeadlineExceeded(DEADLINE_MESSAGE)
        )
        tried: set[str] = set()
        rejections: list[decode_pb2.Rejected] = []
        last_error: BatonError | None = None
        while (placement := await self._place(tried)) is not None:
            pod = placement.decode
            tried.add(pod.address)
            if self._request.adapter:
                await self._load_adapter(placement)
            if placement.expects_target:
                self._start_prefill(placement)
            try:
                answer = await self._reserve(placement)
            except BatonError as e:
                self._cancel_prefill()
                # ModelNotFound is the pod's failure: the gateway has checked the model's name.
                if isinstance(e, AdapterNotLoaded):
                    raise self._adapter_lost(pod) from e
                if isinstance(e, InvalidRequest) and not isinstance(e, ModelNotFound):
                    raise
                _log.info("reserve on %s failed: %s", pod.name, e)
                self._trace.on_reserve_answer(pod.name, "failed", e.message)
                placement.record_failure(pod, e)
                self._release_decode(abort=True)  # the pod may have reserved all the same
                self.blamed_pods.add(pod.address)
                pod.recheck()
                last_error = e
                continue
            outcome = answer.WhichOneof("outcome") or "nothing"
            self._trace.on_reserve_answer(pod.name, outcome)
            if outcome != "target":
                self._cancel_prefill()
            if outcome == "rejected":
                self._release_decode(abort=False)
                self._metrics.rejections.labels("decode").inc()
                self._timeline.mark("rejected", pod=pod.name, reason=answer.rejected.reason)
                rejections.append(answer.rejected)
                continue
            self._on_reserved(placement, answer, outcome)
            return
        if rejections:
            wait_s = min(max(r.retry_after_s, 0.1) for r in rejections)
            raise Overloaded(f"no decode pod has room: {rejections[-1].reason}", retry_after_s=wait_s)
        if last_error is not None:
            raise last_error
        why = self._plan.table.why_unready()
        text = "no prefill and decode pods are ready for this request" + (f" ({why})" if why else "")
        raise Unavailable(text, retry_after_s=1.0)

    async def _place(self, tried: set[str]) -> Placement | None:
        """Chooses and books the pods of the next reservation. Returns None if all decode pods were tried."""
        request_id = f"{self._plan.request.request_id}-{self._number}.{len(tried) + 1}"
        avoided = self._avoided_pods
        if digest := self._plan.request.adapter:
            avoided |= {pod.address for pod in self._plan.table.pods.values() if pod.adapters.refuses(digest)}
        with self._metrics.routing.labels("place").time():
            self._placement = placement = await self._plan.place(request_id, avoided, tried)
        self._request = dataclasses.replace(self._plan.request, request_id=request_id)
        if placement is not None:
            prefill = None if placement.prefill is None else placement.prefill.name
            self._trace.on_placed(placement.decode.name, prefill, placement.predicted_hit_tokens)
        return placement

    async def _load_adapter(self, placement: Placement) -> None:
        """Returns once all pods of a placement have the request's adapter, before any of them computes.

        Raises AdapterNotLoaded at once if one cannot load it, Unavailable if one does not answer.
        """
        digest = self._request.adapter
        pods = [placement.decode] if placement.prefill is None else [placement.decode, placement.prefill]
        missing = [pod for pod in pods if digest not in pod.adapters.held]
        if missing:
            entry = self._plan.table.adapters.with_digest(digest)
            if entry is None:
                raise AdapterNotLoaded(f"pod {missing[0].name} lacks the adapter, and no name has it", field="model")
            began, limit_s = time.monotonic(), min(LOAD_TIMEOUT_S, timeout_until(self._deadline))
            results = await asyncio.gather(
                *(pod.adapters.load(entry, limit_s) for pod in missing), return_exceptions=True
            )
            for pod, result in zip(missing, results, strict=True):
                if isinstance(result, BaseException):
                    self.blamed_pods.add(pod.address)
                    raise result
            seconds = round(time.monotonic() - began, 6)
            self._timeline.mark("adapter", pods=[pod.name for pod in missing], load_s=seconds)
        for pod in pods:
            if pod.view is not None:  # the next requests of the adapter go there too
                pod.view.warm_adapters.add(digest)

    def _adapter_lost(self, pod: Pod) -> Unavailable:
        """Returns the error for a pod that has restarted, or has dropped a former version: the next attempt loads."""
        pod.adapters.forget(self._request.adapter)
        return Unavailable(f"pod {pod.name} has lost the adapter")

    async def _reserve(self, placement: Placement) -> decode_pb2.ReserveResponse:
        """Asks the decode pod for a reservation. Raises BatonError."""
        cost = placement.remote_prefill_cost()
        self._decode = pod = placement.decode
        pod.subscribe(self._request.request_id, self)
        remote = None if cost is None else decode_pb2.RemotePrefill(**dataclasses.asdict(cost))
        request = request_to_pb(self._request)
        message = decode_pb2.ReserveRequest(request=request, gateway_id=pod.gateway_id, remote=remote)
        limit_s = RESERVE_TIMEOUT_S + (0.0 if self._request.grammar is None else GRAMMAR_TIMEOUT_S)
        try:
            # The RPC carries the request's deadline, because the pod plans with it. The answer is due much earlier.
            async with asyncio.timeout(limit_s):
                timeout_s = timeout_until(self._deadline)
                with translate_rpc_errors():
                    return await pod.decode.Reserve(message, timeout=timeout_s, metadata=self._trace.metadata)
        except TimeoutError as e:
            raise Unavailable(f"decode pod {pod.name} did not answer Reserve within {limit_s:g} s") from e
        finally:
            if self._decode is not pod:  # closed meanwhile, by another task: that abort may have come before the lease
                pod.abort(self._request.request_id, self._deadline)

    def _on_reserved(self, placement: Placement, answer: decode_pb2.ReserveResponse, outcome: str) -> None:
        """The decode pod computes the prompt itself (local), or gave the blocks for its KV (target)."""
        pod = placement.decode
        self.layout_fingerprint = None if pod.info is None else pod.info.fingerprint
        reserved = {"pod": pod.name, "outcome": outcome, "cached_tokens": answer.cached_tokens}
        if outcome == "local":
            self._timeline.mark("reserved", **reserved)
            self._local_prefill = True
            placement.on_local_prefill()
            self._on_cached_tokens(placement, answer.cached_tokens)
        elif outcome != "target":
            raise InternalError(f"decode pod {pod.name} answered Reserve without an outcome")
        elif placement.prefill is None:
            self.blamed_pods.add(pod.address)
            pod.recheck()
            raise RoleChanged(f"pod {pod.name} asked for a remote prefill; it was an aggregated pod before")
        else:
            target, prefill = answer.target, self._prefill or self._start_prefill(placement)
            self._timeline.mark("reserved", **reserved, first_block=target.first_block, blocks=len(target.blocks))
            prefill.set_target(target)

    # -- prefill (gateway.dispatch.prefill_call.PrefillSink)

    def _start_prefill(self, placement: Placement) -> PrefillCall:
        """Starts the Prefill call in the background."""
        self._prefill = PrefillCall(
            *(self, self._plan, self._request, placement),
            deadline=self._deadline,
            timeline=self._timeline,
            trace=self._trace,
        )
        return self._prefill

    def _cancel_prefill(self) -> None:
        """Ends a Prefill call that was sent early, because Reserve gave no KvTarget."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill.cancel()

    def on_prefilled(self, prefill: PrefillCall, event: prefill_pb2.FirstToken) -> None:
        """Takes a first token. The prompt is computed."""
        self._on_cached_tokens(prefill.placement, event.cached_tokens)
        self._put_tokens(event.child, tokens_from_pb([event.token]), finish_reason_from_pb(event.finish_reason))

    def on_prefill_failed(self, prefill: PrefillCall, error: BatonError) -> None:
        """Fails the attempt, unless the decode pod sends the rest: it has all KV, and the first tokens are here."""
        if self.token_queue.complete or (self._decode_responded and self.token_queue.has_first_tokens):
            return
        pod = prefill.pod
        self._timeline.mark("prefill_failed", pod=pod.name, error=str(error))
        if isinstance(error, AdapterNotLoaded):
            self.token_queue.fail(self._adapter_lost(pod))
            return
        self.blamed_pods.add(pod.address)
        # Either side may have broken the hand-off, unless the prefill pod has no room or is gone.
        if isinstance(error, RoleChanged):
            pod.recheck()
        elif not isinstance(error, Overloaded):
            sure = not pod.serving or self._decode_responded
            prefill.placement.record_failure(pod, error, sure=sure)
            if not sure:
                self._blame_decode(error, sure=False)
        self.token_queue.fail(error)

    def on_prefill_end(self, prefill: PrefillCall) -> None:
        """Called when a Prefill call has ended that had a KvTarget. Aborts the request on the decode pod if needed."""
        self._hand_off_failed = not prefill.handed_off and not self._decode_responded
        if self._hand_off_failed and self.token_queue.complete and self._decode is None:  # closed
            prefill.placement.decode.abort(prefill.placement.request_id, self._deadline)

    # -- the decode pod's token stream (gateway.pods.pod.TokenSink)

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        """Takes tokens of one sequence. Called for every token, so the checks before `relay_token_id` are cheap."""
        if not self._decode_responded:
            self._decode_responded = True
            self._timeline.mark("decode")
            self._trace.on_first_token()
        token_pbs = delta.tokens
        has_more = delta.finish_reason or delta.cached_tokens or delta.child or delta.HasField("speculation")
        if self._ids_only and len(token_pbs) == 1 and not has_more:
            token_pb = token_pbs[0]
            if self.token_queue.relay_token_id(token_pb.index, token_pb.id):  # true for nearly every token
                return
        tokens = self._tokens_from_pb(token_pbs)
        if tokens and tokens[0].index == len(self._request.output_ids) and self._placement is not None:
            if self._prefill is None or not self._prefill.has_target:
                # The decode pod computed the prompt itself. Its answer to Reserve may come after the token.
                self._placement.on_local_prefill()
            self._placement.on_first_token()  # has no effect after a remote prefill, which was first
        if delta.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if self._wants_prompt_logprobs and delta.HasField("prompt_logprobs"):
            self.on_prompt_logprobs(delta.prompt_logprobs)
        if delta.HasField("speculation"):
            self.drafts_proposed += delta.speculation.proposed
            self.drafts_accepted += delta.speculation.accepted
        finish = finish_reason_from_pb(delta.finish_reason) if delta.finish_reason else None
        failed = finish in (FinishReason.ERROR, FinishReason.ABORT)
        self._put_tokens(delta.child, tokens, None if failed else finish)
        if finish is FinishReason.ABORT:
            self.on_stream_lost(Unavailable("the decode pod ended the request"))
        elif failed:
            known = delta.HasField("error")
            self.on_stream_lost(error_from_pb(delta.error) if known else InternalError("the decode pod failed"))

    def on_stream_lost(self, error: BatonError) -> None:
        """Fails the attempt: the decode pod will send no more tokens."""
        self._blame_decode(error)
        if isinstance(error, RoleChanged) and self._decode is not None:
            self._decode.recheck()
        self.token_queue.fail(error)

    def progress(self, suspicion: Suspicion, *, queued: bool) -> int | None:
        """See StallSink. No step of the decode pod computes a request that has no KV there, or waits in its queue."""
        runs = self._decode_responded or (self._prefill is not None and self._prefill.handed_off)
        runs = runs or (self._local_prefill and not queued)
        if self.token_queue.finish_known or (suspicion is Suspicion.NO_STEP and not runs):
            return None
        return self.token_queue.num_received

    def on_stalled(self, error: BatonError) -> None:
        """Fails the attempt: the decode pod makes no progress."""
        self._metrics.stalled.labels("decode").inc()
        self.on_stream_lost(error)

    # -- both pods

    def _put_tokens(self, child: int, tokens: Sequence[Token], finish: FinishReason | None) -> None:
        """Puts tokens of a sequence, `child` on the wire, into the token queue."""
        first = self._request.child
        sample, last = child - first, first + self.token_queue.num_samples - 1
        if not first <= child <= last:
            self.token_queue.fail(InternalError(f"a pod sent tokens of sequence {child}; expected {first} to {last}"))
        elif not self.token_queue.put(sample, tokens, finish):
            # The reader is stuck in a write to the client, maybe for long. So the pod and its memory are freed now.
            self.token_queue.fail(Overloaded("the client reads too slowly"))
            self._release_decode(abort=True)
        elif sample in self.token_queue.stopped_samples and tokens and finish is None and self._decode is not None:
            self._decode.abort_orphan(self._request.request_id, child)

    def on_prompt_logprobs(self, pb: types_pb2.PromptLogprobs) -> None:
        """Adds the next part. A part that was there is dropped: after a preemption the pod sends it again."""
        part, parts = prompt_logprobs_from_pb(pb), self.prompt_logprobs
        if not parts or part.first >= parts[-1].first + len(parts[-1].logprobs):
            parts.append(part)

    def _on_cached_tokens(self, placement: Placement, cached_tokens: int) -> None:
        """Records how many tokens of the prompt a pod found in its cache, beside the number that routing expected."""
        self.cached_tokens = cached_tokens
        metrics, predicted = self._metrics, placement.predicted_hit_tokens
        metrics.lookup_tokens.inc(self._request.context_len)
        metrics.repeated.inc(self._plan.repeated_tokens)
        metrics.predicted_hits.inc(predicted)
        metrics.actual_hits.inc(cached_tokens)
        metrics.hit_error.observe(abs(predicted - cached_tokens))

    def _blame_decode(self, error: BatonError, *, sure: bool = True) -> None:
        if self._decode is not None:
            self.blamed_pods.add(self._decode.address)
            if self._placement is not None:
                self._placement.record_failure(self._decode, error, sure=sure)

    # -- the end

    def stop_sample(self, sample: int) -> None:
        """Ends one sample of the request; the others go on."""
        if self.token_queue.stop_sample(sample) and self._decode is not None:
            self._decode.abort(self._request.request_id, self._deadline, child=sample)

    def close(self) -> None:
        """Releases everything that the attempt holds. Idempotent."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        error = self.token_queue.error
        drafts = {"baton.drafts_proposed": self.drafts_proposed, "baton.drafts_accepted": self.drafts_accepted}
        self._trace.end(None if error is None else error.message, drafts)
        self._metrics.duplicates.inc(self.token_queue.take_duplicates())
        if self.token_queue.complete and self._placement is not None:
            self._placement.record_success(self._placement.decode)
            # Its hand-off tells whether the prefill pod works. The answer can be complete first, if it is short.
            self._placement.prefill_outlives = self._prefill is not None and not self._prefill.task.done()
        self._release_decode(abort=not self.token_queue.complete or self._hand_off_failed)
        if not self.token_queue.complete and self._prefill is not None:
            self._prefill.task.cancel()

    def _release_decode(self, *, abort: bool) -> None:
        """Ends the bookings and unsubscribes from the decode pod; `abort` also ends the request there."""
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.release()
        pod, self._decode = self._decode, None
        if pod is not None:
            pod.unsubscribe(self._request.request_id)
            if abort:
                pod.abort(self._request.request_id, self._deadline)
