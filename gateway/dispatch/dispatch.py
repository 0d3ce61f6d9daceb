"""One request through the pods: attempts until one ends, inside the request's deadline.

An attempt that fails for a reason that another may not share is followed by one from a fresh reservation. Whatever of
the answer is here already stays: the next attempt goes on behind it, as if the same pod had gone on, because what is
sampled depends on the request and the tokens before alone. So no token is given twice, none is lost, and none is ever
taken back. An answer goes on only where its weights and layout are. Of n sequences each that has not ended goes on by
itself. Prompt log-probabilities and the count of cached tokens are those of the first attempt that gave a token, which
computed the client's own prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from common.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    UnknownTransfer,
)
from common.types import PromptLogprobs, ValidRequest
from gateway.dispatch.attempt import DEADLINE_MESSAGE, Attempt
from gateway.dispatch.token_queue import OnTokenId, OnTokens, TokenDelta
from gateway.routing.router import Router, RoutingPlan
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 0.05
FULL_PAUSE_S = 1.0  # at most, before an answer that was begun asks again for room

_log = logging.getLogger(__name__)

# Failures of pods among themselves: another pair may do better, and the client has no part in them.
_POD_ERRORS = (LayoutMismatch, ModelNotFound, Unauthenticated, ConfigError, UnknownTransfer)


class Dispatch:
    """One request on its way; close it to end it. cached_tokens: the prompt's real hit, known with the first token.

    proposed, accepted: drafts of all attempts that gave a part of the answer, and those of them that were right. parts:
    empty, until the request's n sequences go on each for itself, by their numbers; this run gives nothing more then.
    """

    def __init__(
        self, pipeline: Dispatcher, request: ValidRequest, *, deadline: float, timeline: Timeline, affinity: str
    ) -> None:
        self.resumed_samples: dict[int, Dispatch] = {}
        self._pipeline = pipeline
        self._request = request
        self._deadline = deadline
        self._timeline = timeline
        self._affinity = affinity
        self._layout_fingerprint: str | None = (
            None  # of the pods that the answer was begun on: what they say is of these weights
        )
        self._plan: RoutingPlan | None = None
        self._attempt: Attempt | None = None
        self._answering_attempts: list[Attempt] = []  # attempts that gave a part of the answer
        self._attempt_number = 0
        self._avoided_pods: frozenset[str] = frozenset()
        self._lost_error: BatonError | None = (
            None  # what ended the attempt that gave the last token; None once one follows
        )
        self._stopped: set[int] = set()

    async def next(self) -> TokenDelta:
        """All tokens of a sequence that are next in order, the last ones with its finish reason; none when there are
        `parts`. Raises BatonError.
        """
        while not self.resumed_samples:
            try:
                leg = self._attempt or await self._open()
                delta = await leg.token_queue.next()
            except BatonError as e:
                await asyncio.sleep(self._prepare_retry(e))
                continue
            self._on_delta(leg)
            return delta
        return TokenDelta()

    async def relay(self, take: OnTokens, take_id: OnTokenId | None = None) -> None:
        """After a delta: hands over what follows as it comes, see Outlet.relay; `next` goes on where this ends."""
        if self._attempt is not None and self._attempt in self._answering_attempts:
            await self._attempt.token_queue.relay(take, take_id)

    @property
    def cached_tokens(self) -> int:
        return self._answering_attempts[0].cached_tokens if self._answering_attempts else 0

    @property
    def drafts_proposed(self) -> int:
        told = sum(leg.drafts_proposed for leg in self._answering_attempts)
        return told + sum(part.drafts_proposed for part in self.resumed_samples.values())

    @property
    def drafts_accepted(self) -> int:
        told = sum(leg.drafts_accepted for leg in self._answering_attempts)
        return told + sum(part.drafts_accepted for part in self.resumed_samples.values())

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        return tuple(self._answering_attempts[0].prompt_logprobs) if self._answering_attempts else ()

    def stop_sample(self, child: int) -> None:
        """Nothing more is wanted of one of the request's n sequences."""
        self._stopped.add(child)
        if child in self.resumed_samples:
            self.resumed_samples[child].close()
        if self._attempt is not None:
            self._attempt.stop_sample(child)

    def close(self) -> None:
        """Gives everything back, which aborts on the pods what is not complete; idempotent."""
        leg, self._attempt = self._attempt, None
        if leg is not None:
            leg.close()
        for part in self.resumed_samples.values():
            part.close()

    async def _open(self) -> Attempt:
        pipeline = self._pipeline
        if self._plan is None:
            with pipeline.metrics.routing.labels("plan").time():
                self._plan = await pipeline.router.plan(self._request, self._affinity, self._layout_fingerprint)
        self._attempt_number += 1
        leg = pipeline.new_attempt(self._plan, self._attempt_number, self._avoided_pods, self._deadline, self._timeline)
        self._attempt = leg
        await leg.start()
        for child in self._stopped:  # of an attempt before this one
            leg.stop_sample(child)
        return leg

    def _on_delta(self, leg: Attempt) -> None:
        """A part of the answer came from this attempt."""
        if leg not in self._answering_attempts:
            self._answering_attempts.append(leg)
        if self._lost_error is not None:
            self._lost_error = None
            self._pipeline.metrics.resumptions.labels("resumed").inc()

    def _prepare_retry(self, e: BatonError) -> float:
        """Ends the attempt that failed, and prepares the next: seconds until that may begin. Raises where none may."""
        leg = self._attempt
        if leg is None:
            raise e  # no attempt was made
        self.close()
        left, sampling, pause_s = leg.token_queue.unfinished(), self._request.sampling, RETRY_PAUSE_S
        retry = e.retryable or isinstance(e, _POD_ERRORS)
        if isinstance(e, Overloaded) and not leg.blamed_pods:
            retry = self._lost_error is not None  # the client has a part of the answer: that is worth a wait
            pause_s = min(max(e.retry_after_s or 0.0, pause_s), FULL_PAUSE_S)
        # Where all tokens are there, the end was lost, which no pod can tell again.
        more = bool(left) and all(len(output) < sampling.max_tokens for output in left.values())
        in_time = time.monotonic() + pause_s < self._deadline
        if not (retry and more and in_time and self._attempt_number < MAX_ATTEMPTS):
            if self._lost_error is not None or (retry and leg.token_queue.has_tokens):
                self._pipeline.metrics.resumptions.labels("failed").inc(len(left))
            raise _for_client(e if isinstance(e, DeadlineExceeded) else self._lost_error or e) from e
        self._avoided_pods |= leg.blamed_pods
        self._pipeline.metrics.retries.labels(e.kind).inc()
        if not leg.token_queue.has_tokens:
            _log.info("attempt %d failed, trying again: %s", self._attempt_number, e)
            self._timeline.mark("retry", error=str(e))
            return pause_s
        tokens = sum(map(len, left.values()))
        _log.info("attempt %d failed, %d tokens are kept and it goes on elsewhere: %s", self._attempt_number, tokens, e)
        self._timeline.mark("resume", error=str(e), sequences=len(left), output_tokens=tokens)
        if sampling.n == 1:
            self._resume_after(self._request.child, left[0], leg, e)
        else:
            self.resumed_samples = {child: self._resume_sample(child, output, leg, e) for child, output in left.items()}
        return pause_s

    def _resume_after(self, child: int, output: Sequence[int], leg: Attempt, lost: BatonError) -> None:
        """The next attempt goes on behind these tokens of one sequence, where `leg` was lost."""
        self._request, self._plan = self._request.resumed(child, output), None
        self._layout_fingerprint, self._lost_error = (
            leg.layout_fingerprint or self._layout_fingerprint,
            self._lost_error or lost,
        )

    def _resume_sample(self, child: int, output: Sequence[int], leg: Attempt, lost: BatonError) -> Dispatch:
        """A run for the rest of one sequence; attempts count on."""
        part = self._pipeline.dispatch(
            replace(self._request, request_id=f"{self._request.request_id}.{child}"),
            deadline=self._deadline,
            timeline=self._timeline,
            affinity=self._affinity,
        )
        part._attempt_number, part._avoided_pods = self._attempt_number, self._avoided_pods
        part._resume_after(child, output, leg, lost)
        return part


class Dispatcher:
    """Owns the background work of all requests."""

    def __init__(self, router: Router, metrics: GatewayMetrics, *, gateway_id: str) -> None:
        self.router = router
        self.metrics = metrics
        self._gateway_id = gateway_id
        self._tasks: set[asyncio.Task[None]] = set()

    def dispatch(self, request: ValidRequest, *, deadline: float, timeline: Timeline, affinity: str = "") -> Dispatch:
        """A request that runs once its deltas are read; deadline is a time.monotonic(), affinity a hint for routing."""
        return Dispatch(self, request, deadline=deadline, timeline=timeline, affinity=affinity)

    def new_attempt(
        self, plan: RoutingPlan, attempt: int, avoid: frozenset[str], deadline: float, timeline: Timeline
    ) -> Attempt:
        """One attempt of a planned request."""
        return Attempt(
            plan,
            attempt=attempt,
            avoid=avoid,
            deadline=deadline,
            gateway_id=self._gateway_id,
            metrics=self.metrics,
            timeline=timeline,
            spawn=self._spawn,
        )

    async def stop(self) -> None:
        """Ends what is left of hand-offs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.router.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work failed", exc_info=error)


def _for_client(error: BatonError) -> BatonError:
    """What the client may know: quarrels among pods are our failure, not its; its time ends the same everywhere."""
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(DEADLINE_MESSAGE)
    if isinstance(error, _POD_ERRORS):
        _log.error("pods cannot work together: %s: %s", error.kind, error)
        return InternalError("the pods that serve this model cannot work together")
    return error
