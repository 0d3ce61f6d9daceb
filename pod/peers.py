"""Connects a prefill pod to the decode pods it finds in the index, before the first request needs them.

A connection is proven by one real block (the probe), so no request pays for the transport's lazy set-up.
Pods that the index does not know are connected by their first request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from common.errors import BatonError
from common.prefix_index import IndexReader
from common.types import Role

_log = logging.getLogger(__name__)

POLL_S = 1.0
FIRST_ROUND_S = 15.0


class PeerWatch:
    """Keeps connections to every decode pod of `scope` that the index lists.

    connect(address) makes and proves one connection; repeating it for a living connection is cheap.
    """

    def __init__(self, reader: IndexReader, scope: str, connect: Callable[[str], Awaitable[object]]) -> None:
        self._reader = reader
        self._scope = scope
        self._connect = connect
        self._known: set[tuple[str, int]] = set()  # (pod, generation) that answered
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects what is there now, for at most FIRST_ROUND_S, and goes on in the background."""
        try:
            await asyncio.wait_for(self._round(), FIRST_ROUND_S)
        except TimeoutError:
            _log.warning("not every decode pod could be connected within %.0f s", FIRST_ROUND_S)
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def stop(self) -> None:
        """Stops looking; connections stay. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._reader.close()

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._round()

    async def _round(self) -> None:
        try:
            pods = await self._reader.pods()
        except BatonError:
            return  # the index is a hint; it may be away
        fresh = [
            p.record
            for p in pods
            if p.record.scope == self._scope
            and p.record.role is not Role.PREFILL
            and (p.record.pod, p.record.generation) not in self._known
        ]
        await asyncio.gather(*(self._prove(r.pod, r.generation, r.address) for r in fresh))

    async def _prove(self, pod: str, generation: int, address: str) -> None:
        try:
            await self._connect(address)
        except BatonError as error:
            _log.info("decode pod %s at %s is not connected yet: %s", pod, address, error.message)
            return
        self._known.add((pod, generation))
