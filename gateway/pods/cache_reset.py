"""Empties the prefix caches of all pods.

The reset is not atomic: after an error some pods may have done it. A result without an error means that all have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from common.errors import Unavailable
from common.pb import control_pb2
from gateway.pods.pod import Pod

RESET_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CacheResetResult:
    """The reset of one pod."""

    pod: str
    cleared: int  #: Blocks that the pod removed from its cache, and blocks that it keeps because they are in use.
    kept: int
    indexed: bool  #: The prefix index has the change.


async def reset_prefix_caches(pods: Iterable[Pod]) -> list[CacheResetResult]:
    """Resets every pod that has answered Info once. Raises Unavailable with the names of pods that do not confirm."""
    known = [pod for pod in pods if pod.info is not None]
    if not known:
        raise Unavailable("no prefix cache was reset: no pod has answered yet", retry_after_s=1.0)
    answers = await asyncio.gather(*map(_reset, known))
    missing = [pod.name for pod, answer in zip(known, answers, strict=True) if answer is None]
    if missing:
        raise Unavailable(f"these pods did not confirm the reset: {', '.join(sorted(missing))}", retry_after_s=1.0)
    return sorted((answer for answer in answers if answer is not None), key=lambda reset: reset.pod)


async def _reset(pod: Pod) -> CacheResetResult | None:
    try:
        answer = await pod.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest(), timeout=RESET_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        pod.recheck()
        return None
    return CacheResetResult(pod.name, answer.cleared, answer.kept, answer.indexed)
