"""Health checks of a running pod. Some faults only a new process can mend: then the pod drains and exits.

- A thread of the pod, or a rank, has ended: the pod exits.
- The pool is inconsistent while no request runs: the pod refuses new work; blocks that peers still read stay.
- A tenth of the blocks, or of the slots for recurrent states, stays quarantined for QUARANTINE_LIMIT_S. Nothing proves
  that the writers stopped, and only the end of this process keeps them out: the pod exits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import InternalError
from engine.kv.blocks import BlockPool
from engine.loop import EngineLoop
from kv_transfer.node import TransferNode

_log = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
QUARANTINE_SHARE = 0.1
QUARANTINE_LIMIT_S = 60.0
EXIT_QUARANTINED, EXIT_BROKEN = 3, 4
BROKEN_DRAIN_S = 1.0  # Longest drain of a pod that cannot compute: no request can end by itself.


@dataclass(slots=True)
class QuarantineWatch:
    """Detects that more than `share` of the pool is quarantined for `limit_s` seconds without a break."""

    share: float = QUARANTINE_SHARE
    limit_s: float = QUARANTINE_LIMIT_S
    _since: float | None = None

    def overdue(self, share: float, now: float) -> bool:
        """Returns whether the limit has passed, if `share` of the pool is quarantined at the time `now`.

        Call about once a second; `now` is monotonic seconds.
        """
        if share <= self.share:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self.limit_s


@dataclass(eq=False)
class PodHealth:
    """Runs the checks once per CHECK_PERIOD_S on the event loop."""

    pool: BlockPool
    loop: EngineLoop
    node: TransferNode
    idle: Callable[[], bool]  # No request of the role's service is active
    damaged: Callable[[], None]  # Called once when the pool turns out to be inconsistent
    #: Called with the exit code and the reason, again at each check while the fault lasts.
    leave: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self.intact = True
        self._quarantine = QuarantineWatch()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stops the checks. Idempotent. Has no effect if they were never started."""
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
        if not (self.loop.alive and self.node.alive):
            self.leave(EXIT_BROKEN, f"the {'transfer' if self.loop.alive else 'engine'} thread has ended")
        elif self.loop.failure is not None:
            self.leave(EXIT_BROKEN, self.loop.failure)

    def _check_quarantine(self) -> None:
        share = self.pool.quarantined_share()
        if self._quarantine.overdue(share, time.monotonic()):
            self.leave(EXIT_QUARANTINED, f"{share:.0%} of the blocks, or of the recurrent states, stay quarantined")

    def _check_pool(self) -> None:
        if not (self.intact and self.idle()):
            return
        try:
            self.pool.check_integrity()
        except InternalError:
            _log.exception("the KV pool is inconsistent: taking no more work")
            self.intact = False
            self.damaged()
