"""The Control service: what an operator asks of a pod, whatever its role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from common.pb import control_pb2, control_pb2_grpc
from common.prefix_index import PodIndex
from engine.block_pool import BlockPool

INDEX_POLLS, POLL_S = 100, 0.01  # how long an answer waits for the index


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Serves Control of one pod on its event loop. index: the pod's entry in the prefix index, once it has one."""

    def __init__(self, pool: BlockPool, index: Callable[[], PodIndex | None]) -> None:
        self._pool = pool
        self._index = index

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.ResetPrefixCacheResponse:
        """See control.proto."""
        cleared = await asyncio.to_thread(self._pool.reset_prefix_cache)  # it may wait for a copy to the host
        kept = len(self._pool.cached_hashes())
        index = self._index()
        for _ in range(INDEX_POLLS):
            if index is None or index.up_to_date:
                break
            await asyncio.sleep(POLL_S)
        indexed = index is None or index.up_to_date
        return control_pb2.ResetPrefixCacheResponse(cleared=cleared, kept=kept, indexed=indexed)
