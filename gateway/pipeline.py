"""One request through the pods: attempts until one ends, inside the request's deadline.

An attempt that fails for a reason that another may not share is repeated from a fresh reservation, as long as no token
has reached the consumer, or the consumer can take everything back (`replayable`, an answer that is sent at its end).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from common.errors import (
    BatonError,
    ConfigError,
    InternalError,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    UnknownTransfer,
)
from common.types import ValidRequest
from gateway.leg import Delta, Leg
from gateway.metrics import GatewayMetrics
from gateway.routing.plan import Plan
from gateway.routing.router import Router
from gateway.timeline import Timeline

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 0.05

_log = logging.getLogger(__name__)

# Failures of pods among themselves: another pair may do better, and the client has no part in them.
_PODS_OWN = (LayoutMismatch, ModelNotFound, Unauthenticated, ConfigError, UnknownTransfer)


class Run:
    """One request on its way. cached_tokens: the prompt's real cache hit, known with the first token."""

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
        self.cached_tokens = 0

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Tokens in order until the finish reason; close it early to abort. Raises BatonError."""
        pipeline = self._pipeline
        with pipeline.metrics.routing.labels("plan").time():
            plan = await pipeline.router.plan(self._request, self._affinity)
        avoid: frozenset[str] = frozenset()
        sent = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            leg = pipeline.leg(plan, attempt, avoid, self._deadline, self._timeline)
            try:
                await leg.open()
                async with aclosing(leg.deltas()) as deltas:
                    async for delta in deltas:
                        sent = sent or bool(delta.tokens)
                        self.cached_tokens = leg.cached_tokens
                        yield delta
                return
            except BatonError as e:
                retry = e.retryable or isinstance(e, _PODS_OWN)
                if attempt == MAX_ATTEMPTS or not retry or (sent and not self._replayable):
                    raise _for_client(e) from e
                if isinstance(e, Overloaded) and not leg.blamed:
                    raise
                if time.monotonic() + RETRY_PAUSE_S >= self._deadline:
                    raise _for_client(e) from e
                _log.info("attempt %d failed, trying again: %s", attempt, e)
                pipeline.metrics.retries.labels(e.kind).inc()
                self._timeline.mark("retry", error=str(e))
                avoid |= leg.blamed
            finally:
                leg.close()
            if sent:
                sent = False
                yield Delta(restart=True)
            await asyncio.sleep(RETRY_PAUSE_S)


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
    """What the client may know: quarrels among pods are our failure, not its."""
    if isinstance(error, _PODS_OWN):
        _log.error("pods cannot work together: %s: %s", error.kind, error)
        return InternalError("the pods that serve this model cannot work together")
    return error
