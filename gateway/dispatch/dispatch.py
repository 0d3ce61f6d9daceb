"""A request on its way through the pods: attempts until one ends the answer, within the request's deadline.

    attempt 1   prompt                       -> tokens 0 to 6, then the decode pod is lost
    attempt 2   prompt + tokens 0 to 6       -> tokens 7 to 20, finish reason

A failed attempt is followed by another with a new reservation, if other pods may do better. The client keeps the tokens
that it has, and the next attempt continues after them. Sampling depends only on the request and the tokens before, so
the answer is the same as that of one pod: no token is repeated, lost or taken back. An answer continues only on pods
with the same weights and KV layout. A request that lost its only pod waits for that pod's restart.

A request with n > 1 samples shares one attempt. If that fails after tokens came, each unfinished sample continues in a
dispatch of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    RoleChanged,
    Unauthenticated,
    Unavailable,
    UnknownTransfer,
)
from common.types import PromptLogprobs, ValidRequest
from gateway.dispatch.attempt import DEADLINE_MESSAGE, Attempt
from gateway.dispatch.token_queue import OnTokenId, OnTokens, TokenDelta
from gateway.routing.router import Router, RoutingPlan
from gateway.telemetry.timeline import Timeline

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 0.05  #: Pause before the next attempt.
MAX_FULL_PAUSE_S = 1.0  #: Longest pause before a partly answered request asks full pods again.
POD_WAIT_S = 30.0  #: Time that a request waits for pods that it lost, if there are no others.
POD_WAIT_PAUSE_S = 0.1  #: Pause between looks for those pods.

#: Errors between pods. Another pair of pods may do better, and the client did not cause them.
_POD_ERRORS = (LayoutMismatch, ModelNotFound, Unauthenticated, ConfigError, UnknownTransfer)

_log = logging.getLogger(__name__)


class Dispatch:
    """One request on its way. Read it with `next` and `relay`, then `close` it; `close` also ends it early."""

    def __init__(
        self,
        router: Router,
        request: ValidRequest,
        *,
        deadline: float,
        timeline: Timeline,
        affinity: str = "",
        pod_wait_s: float = POD_WAIT_S,
        on_no_room: Callable[[Overloaded], float] | None = None,
    ) -> None:
        """`deadline`: time.monotonic() value. `affinity`: requests with an equal one prefer the same pods.

        `pod_wait_s`: time to wait for lost pods if there are no others. `on_no_room` is called if all decode pods
        refuse the request before its first token. It returns the pause before the gateway asks them again, or raises.
        """
        self.resumed_samples: dict[int, Dispatch] = {}  #: Samples that continue alone; `next` is then empty.
        self._router = router
        self._metrics = router.metrics
        self.request = request
        self._deadline = deadline
        self._timeline = timeline
        self._affinity = affinity
        self._plan: RoutingPlan | None = None
        self._layout_fingerprint: str | None = None  #: Of the pods of the first tokens; all attempts need it.
        self._attempt: Attempt | None = None  #: The current attempt; None between attempts.
        self._attempt_number = 0  #: Number of the last attempt, from 1.
        self._avoided_pods: frozenset[str] = frozenset()  # addresses of pods that earlier attempts blame
        self._pod_wait_s = pod_wait_s
        self._on_no_room = on_no_room
        self._uncounted = 0  # attempts that found no room, or lost their pod to a change of its role
        self._pods_lost_at: float | None = None  #: When an attempt lost its pods; None once the answer goes on.
        self._waiting = False  #: The request waits for lost pods, because there are no others.
        self._answering_attempts: list[Attempt] = []  # attempts that gave a part of the answer
        self._lost_error: BatonError | None = None  #: Error that interrupted the answer; None once it goes on.
        self._stopped_samples: set[int] = set()
        self._closed = False

    # -- reading

    async def reserve(self) -> None:
        """Returns once a decode pod has a place for the request. `next` does the same first. Raises BatonError."""
        while self._attempt is None and not self.resumed_samples:
            try:
                await self._start_attempt()
            except BatonError as e:
                await asyncio.sleep(self._prepare_retry(e))

    async def next(self) -> TokenDelta:
        """Returns the next tokens of one sample; empty if they continue in `resumed_samples`. Raises BatonError."""
        while not self.resumed_samples:
            try:
                attempt = self._attempt or await self._start_attempt()
                delta = await attempt.token_queue.next()
            except BatonError as e:
                await asyncio.sleep(self._prepare_retry(e))
                continue
            self._on_delta(attempt)
            return delta
        return TokenDelta()

    async def relay(self, on_tokens: OnTokens, on_token_id: OnTokenId | None = None) -> None:
        """Calls back for each token, see TokenQueue.relay, once `next` gave the first. Afterwards `next` continues."""
        if self._attempt is not None and self._attempt in self._answering_attempts:
            await self._attempt.token_queue.relay(on_tokens, on_token_id)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first answering attempt found in a cache; later attempts compute another prompt."""
        return self._answering_attempts[0].cached_tokens if self._answering_attempts else 0

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Prompt log-probabilities of the first answering attempt, which computed the client's own prompt."""
        return tuple(self._answering_attempts[0].prompt_logprobs) if self._answering_attempts else ()

    @property
    def drafts(self) -> tuple[int, int]:
        """Numbers of verified and of accepted draft tokens, over all attempts that gave a part of the answer."""
        parts = [(attempt.drafts_proposed, attempt.drafts_accepted) for attempt in self._answering_attempts]
        parts += [resumed.drafts for resumed in self.resumed_samples.values()]
        return sum(proposed for proposed, _ in parts), sum(accepted for _, accepted in parts)

    # -- attempts

    async def _start_attempt(self) -> Attempt:
        """Plans the request if it has changed, and starts the next attempt. Raises BatonError."""
        if self._plan is None:
            with self._metrics.routing.labels("plan").time():
                self._plan = await self._router.plan(self.request, self._affinity, self._layout_fingerprint)
        self._require_open()
        self._attempt_number += 1
        self._attempt = attempt = Attempt(
            self._plan,
            number=self._attempt_number,
            avoided_pods=self._avoided_pods,
            deadline=self._deadline,
            timeline=self._timeline,
        )
        try:
            await attempt.start()
        finally:
            if self._closed:  # meanwhile, by another task; the one that runs this may be cancelled only later
                attempt.close()
        self._require_open()
        for sample in self._stopped_samples:  # stopped in an earlier attempt
            attempt.stop_sample(sample)
        return attempt

    def _on_delta(self, attempt: Attempt) -> None:
        """The attempt gave a part of the answer."""
        if attempt not in self._answering_attempts:
            self._answering_attempts.append(attempt)
        self._pods_lost_at, self._waiting = None, False
        if self._lost_error is not None:
            self._lost_error = None
            self._metrics.resumptions.labels("resumed").inc()

    def _prepare_retry(self, error: BatonError) -> float:
        """Ends the failed attempt and prepares the next. Returns the pause before it in seconds.

        Raises the error for the client if there is no next attempt.
        """
        attempt = self._attempt
        if attempt is None:
            raise error  # planning failed, or the request has ended
        self._close_attempt()
        unfinished, max_tokens = attempt.token_queue.unfinished(), self.request.sampling.max_tokens
        retryable, pause_s = error.retryable or isinstance(error, _POD_ERRORS), RETRY_PAUSE_S
        if isinstance(error, Overloaded) and not attempt.blamed_pods:
            # All pods are full. Only a client that has a part of its answer waits for room.
            retryable = self._lost_error is not None
            pause_s = min(max(error.retry_after_s or 0.0, pause_s), MAX_FULL_PAUSE_S)
            if self._on_no_room is not None and self._lost_error is None and not attempt.token_queue.has_tokens:
                pause_s = self._on_no_room(error)
                if not self._uncounted:
                    self._timeline.mark("no_room", error=str(error))
                self._uncounted += 1
                return pause_s
            if isinstance(self._lost_error, RoleChanged):  # the pod gave the answer up without need, so it waits
                self._uncounted += 1
        if isinstance(error, RoleChanged):
            self._uncounted += 1
        if self._waits_for_pods(attempt, error):
            if not self._waiting:
                self._waiting = True
                _log.info("waiting up to %g s for pods: %s", self._pod_wait_s, error)
                self._timeline.mark("waiting", error=str(error))
            self._attempt_number -= 1  # no pod was asked, so the attempt does not count
            self._plan = None
            return POD_WAIT_PAUSE_S
        # A sample with all its tokens has lost only its finish reason, which no other pod can give.
        continuable = bool(unfinished) and all(len(output) < max_tokens for output in unfinished.values())
        in_time = time.monotonic() + pause_s < self._deadline
        if not (retryable and continuable and in_time and self._attempt_number - self._uncounted < MAX_ATTEMPTS):
            if self._lost_error is not None or (retryable and attempt.token_queue.has_tokens):
                self._metrics.resumptions.labels("failed").inc(len(unfinished))
            client_error = error if isinstance(error, DeadlineExceeded) else self._lost_error or error
            raise _for_client(client_error) from error
        if attempt.blamed_pods and self._pods_lost_at is None:
            self._pods_lost_at = time.monotonic()
        self._avoided_pods |= attempt.blamed_pods
        self._metrics.retries.labels(error.kind).inc()
        if attempt.token_queue.has_tokens:
            self._resume(attempt, unfinished, error)
        else:
            _log.info("attempt %d failed before the first token, retrying: %s", self._attempt_number, error)
            self._timeline.mark("retry", error=str(error))
        return pause_s

    def _waits_for_pods(self, attempt: Attempt, error: BatonError) -> bool:
        """Returns whether the attempt found no pod to ask, and the pods of earlier attempts may come back in time."""
        asked = attempt.blamed_pods or attempt.layout_fingerprint is not None
        if self._pods_lost_at is None or asked or not isinstance(error, Unavailable):
            return False
        return time.monotonic() + POD_WAIT_PAUSE_S < min(self._pods_lost_at + self._pod_wait_s, self._deadline)

    def _resume(self, attempt: Attempt, unfinished: dict[int, Sequence[int]], error: BatonError) -> None:
        """Continues each unfinished sample after the tokens that it has."""
        number, output_tokens = self._attempt_number, sum(map(len, unfinished.values()))
        _log.info("attempt %d failed, resuming after %d output tokens on other pods: %s", number, output_tokens, error)
        self._timeline.mark("resume", error=str(error), sequences=len(unfinished), output_tokens=output_tokens)
        if self.request.sampling.n == 1:
            self._resume_after(self.request.child, unfinished[0], attempt, error)
        else:
            self.resumed_samples = {
                sample: self._resume_sample(sample, output, attempt, error) for sample, output in unfinished.items()
            }

    def _resume_after(self, child: int, output_ids: Sequence[int], attempt: Attempt, error: BatonError) -> None:
        """Makes the next attempt continue sequence `child` after these tokens, on pods of the same layout."""
        self.request, self._plan = self.request.resumed(child, output_ids), None
        self._layout_fingerprint = attempt.layout_fingerprint or self._layout_fingerprint
        self._lost_error = self._lost_error or error

    def _resume_sample(self, sample: int, output_ids: Sequence[int], attempt: Attempt, error: BatonError) -> Dispatch:
        """Returns a dispatch for the rest of one sample. It continues the count of attempts."""
        resumed = Dispatch(
            self._router,
            replace(self.request, request_id=f"{self.request.request_id}.{sample}"),
            deadline=self._deadline,
            timeline=self._timeline,
            affinity=self._affinity,
            pod_wait_s=self._pod_wait_s,
        )
        resumed._attempt_number, resumed._avoided_pods = self._attempt_number, self._avoided_pods
        resumed._uncounted = self._uncounted
        resumed._pods_lost_at = self._pods_lost_at
        resumed._resume_after(sample, output_ids, attempt, error)
        return resumed

    # -- the end

    def stop_sample(self, sample: int) -> None:
        """Ends one of the request's n samples; the others go on."""
        self._stopped_samples.add(sample)
        if sample in self.resumed_samples:
            self.resumed_samples[sample].close()
        if self._attempt is not None:
            self._attempt.stop_sample(sample)

    def close(self) -> None:
        """Releases everything, and aborts attempts that still run on the pods. No attempt starts later. Idempotent."""
        self._closed = True
        self._close_attempt()
        for resumed in self.resumed_samples.values():
            resumed.close()

    def _require_open(self) -> None:
        if self._closed:
            raise Cancelled("the request has ended")

    def _close_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()


def _for_client(error: BatonError) -> BatonError:
    """Returns the error that the client may see: every deadline has one text, and errors between pods are internal."""
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(DEADLINE_MESSAGE)
    if isinstance(error, _POD_ERRORS):
        _log.error("pods cannot work together: %s: %s", error.kind, error)
        return InternalError("the pods that serve this model cannot work together")
    return error
