"""Empties the prefix caches of all pods, and what this gateway remembers of them.

All or nothing is not possible; what is promised is that an answer without an error means that every pod has done it.
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
    """One pod's part: blocks that it forgot, blocks in use that it keeps, and whether the prefix index knows."""

    pod: str
    cleared: int
    kept: int
    indexed: bool


async def reset_prefix_caches(pods: Iterable[Pod]) -> list[CacheResetResult]:
    """Every pod that was heard of. Raises Unavailable with the names of those that did not confirm, if any."""
    known = [pod for pod in pods if pod.info is not None]
    if not known:
        raise Unavailable("there are no pods whose prefix cache could be reset", retry_after_s=1.0)
    answers = await asyncio.gather(*map(_reset, known))
    missing = [pod.name for pod, answer in zip(known, answers, strict=True) if answer is None]
    if missing:
        raise Unavailable(f"these pods did not confirm the reset: {', '.join(sorted(missing))}", retry_after_s=1.0)
    return sorted((answer for answer in answers if answer is not None), key=lambda reset: reset.pod)


async def _reset(pod: Pod) -> CacheResetResult | None:
    try:
        said = await pod.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest(), timeout=RESET_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        pod.recheck()
        return None
    return CacheResetResult(pod.name, said.cleared, said.kept, said.indexed)
