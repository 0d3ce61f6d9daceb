"""One request through the pods: attempts until one ends, inside the request's deadline.

An attempt that fails for a reason that another may not share is repeated from a fresh reservation, as long as no token
has reached the consumer, or the consumer can take everything back (`replayable`, an answer that is sent at its end).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
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
from gateway.leg import LATE, Leg
from gateway.metrics import GatewayMetrics
from gateway.outlet import Delta, Take, TakeId
from gateway.routing.plan import Plan
from gateway.routing.router import Router
from gateway.timeline import Timeline

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 0.05

_log = logging.getLogger(__name__)

# Failures of pods among themselves: another pair may do better, and the client has no part in them.
_PODS_OWN = (LayoutMismatch, ModelNotFound, Unauthenticated, ConfigError, UnknownTransfer)


class Run:
    """One request on its way; close it to end it. cached_tokens: the prompt's real hit, known with the first token.

    proposed, accepted: drafts of the attempt that gave the answer's end, and those of them that were right.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        request: ValidRequest,
        *,
        deadline: float,
        replayable: bool,
        timeline: Timeline,
        affinity: str,
    ) -> None:
        self._pipeline = pipeline
        self._request = request
        self._deadline = deadline
        self._replayable = replayable
        self._timeline = timeline
        self._affinity = affinity
        self._plan: Plan | None = None
        self._leg: Leg | None = None
        self._heard: Leg | None = None  # the one that the last delta was of
        self._attempt = 0
        self._avoid: frozenset[str] = frozenset()
        self._sent = False  # tokens of this attempt
        self._stopped: set[int] = set()

    async def next(self) -> Delta:
        """All tokens of a sequence that are next in order; the last ones with its finish reason. Raises BatonError."""
        while True:
            try:
                leg = self._leg or await self._open()
                delta = await leg.outlet.next()
            except BatonError as e:
                self._give_up_or(e)
                await asyncio.sleep(RETRY_PAUSE_S)
                if self._sent:
                    self._sent = False
                    return Delta(restart=True)
                continue
            if delta.tokens:
                self._sent = True
            self._heard = leg
            return delta

    async def relay(self, take: Take, take_id: TakeId | None = None) -> None:
        """After a delta: hands over what follows as it comes, see Outlet.relay; `next` goes on where this ends."""
        if self._leg is not None and self._sent:
            await self._leg.outlet.relay(take, take_id)

    @property
    def cached_tokens(self) -> int:
        return 0 if self._heard is None else self._heard.cached_tokens

    @property
    def proposed(self) -> int:
        return 0 if self._heard is None else self._heard.proposed

    @property
    def accepted(self) -> int:
        return 0 if self._heard is None else self._heard.accepted

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        return () if self._heard is None else tuple(self._heard.prompt_logprobs)

    def stop(self, child: int) -> None:
        """Nothing more is wanted of one of the request's n sequences."""
        self._stopped.add(child)
        if self._leg is not None:
            self._leg.stop(child)

    def close(self) -> None:
        """Gives everything back, which aborts on the pods what is not complete; idempotent."""
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.close()

    async def _open(self) -> Leg:
        pipeline = self._pipeline
        if self._plan is None:
            with pipeline.metrics.routing.labels("plan").time():
                self._plan = await pipeline.router.plan(self._request, self._affinity)
        self._attempt += 1
        leg = pipeline.leg(self._plan, self._attempt, self._avoid, self._deadline, self._timeline)
        self._leg = leg
        await leg.open()
        for child in self._stopped:  # of an attempt before this one
            leg.stop(child)
        return leg

    def _give_up_or(self, e: BatonError) -> None:
        """Ends the attempt that failed, and raises unless another may follow."""
        leg = self._leg
        if leg is None:
            raise e  # no attempt was made
        self.close()
        retry = e.retryable or isinstance(e, _PODS_OWN)
        if self._attempt == MAX_ATTEMPTS or not retry or (self._sent and not self._replayable):
            raise _for_client(e) from e
        if isinstance(e, Overloaded) and not leg.blamed:
            raise e
        if time.monotonic() + RETRY_PAUSE_S >= self._deadline:
            raise _for_client(e) from e
        _log.info("attempt %d failed, trying again: %s", self._attempt, e)
        self._pipeline.metrics.retries.labels(e.kind).inc()
        self._timeline.mark("retry", error=str(e))
        self._avoid |= leg.blamed


class Pipeline:
    """Owns the background work of all requests."""

    def __init__(self, router: Router, metrics: GatewayMetrics, *, gateway_id: str) -> None:
        self.router = router
        self.metrics = metrics
        self._gateway_id = gateway_id
        self._tasks: set[asyncio.Task[None]] = set()

    def run(
        self, request: ValidRequest, *, deadline: float, replayable: bool, timeline: Timeline, affinity: str = ""
    ) -> Run:
        """A request that runs once its deltas are read; deadline is a time.monotonic(), affinity a hint for routing."""
        return Run(self, request, deadline=deadline, replayable=replayable, timeline=timeline, affinity=affinity)

    def leg(self, plan: Plan, attempt: int, avoid: frozenset[str], deadline: float, timeline: Timeline) -> Leg:
        """One attempt of a planned request."""
        return Leg(
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
        return DeadlineExceeded(LATE)
    if isinstance(error, _PODS_OWN):
        _log.error("pods cannot work together: %s: %s", error.kind, error)
        return InternalError("the pods that serve this model cannot work together")
    return error
