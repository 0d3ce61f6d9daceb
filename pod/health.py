"""Looks after a running pod: what it finds, only a new process can mend, or nobody.

A thread that ended takes the pod with it, and so does a rank. A pool that contradicts itself while nothing runs keeps
the pod from more work, but what peers still read stays. A quarantined block waits for proof that its writer will not
write: when proof fails to come for a tenth of the pool, a new process is the only fence that this side owns, so the pod
drains and exits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from common.errors import InternalError
from common.types import PoolCounts
from engine.kv.blocks import BlockPool
from engine.loop import EngineLoop
from kv_transfer.node import TransferNode

_log = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
QUARANTINE_SHARE = 0.1
QUARANTINE_LIMIT_S = 60.0
EXIT_QUARANTINED, EXIT_BROKEN = 3, 4


class QuarantineWatch:
    """Says when more than `share` of the pool has been quarantined for `limit_s` seconds on end."""

    def __init__(self, share: float = QUARANTINE_SHARE, limit_s: float = QUARANTINE_LIMIT_S) -> None:
        self._share = share
        self._limit_s = limit_s
        self._since: float | None = None

    def overdue(self, counts: PoolCounts, now: float) -> bool:
        """Call about once a second; now is monotonic seconds."""
        if counts.quarantined <= self._share * counts.total:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._limit_s


class PodHealth:
    """One task from start to stop, on the event loop.

    idle: nothing of the role's runs. leave(exit code, reason): the pod drains and ends; called again as long as it is
    still there. damaged: the pool is not intact (any more), told once.
    """

    def __init__(
        self,
        pool: BlockPool,
        loop: EngineLoop,
        node: TransferNode,
        *,
        idle: Callable[[], bool],
        damaged: Callable[[], None],
        leave: Callable[[int, str], None],
    ) -> None:
        self.intact = True
        self._pool, self._loop, self._node = pool, loop, node
        self._idle, self._damaged, self._leave = idle, damaged, leave
        self._quarantine = QuarantineWatch()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Idempotent; nothing happens when it was never started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            for check in (self._check_threads, self._check_pool, self._check_quarantine):
                try:
                    check()
                except Exception:
                    _log.exception("a check of the pod failed")

    def _check_threads(self) -> None:
        if not (self._loop.alive and self._node.alive):
            self._leave(EXIT_BROKEN, f"the {'transfer' if self._loop.alive else 'engine'} thread has ended")
        elif self._loop.failure is not None:
            self._leave(EXIT_BROKEN, self._loop.failure)

    def _check_quarantine(self) -> None:
        counts = self._pool.counts()
        if self._quarantine.overdue(counts, time.monotonic()):
            self._leave(EXIT_QUARANTINED, f"{counts.quarantined} of {counts.total} blocks stay quarantined")

    def _check_pool(self) -> None:
        if not (self.intact and self._idle()):
            return
        try:
            self._pool.check_integrity()
        except InternalError:
            _log.exception("the KV pool is inconsistent: taking no more work")
            self.intact = False
            self._damaged()
