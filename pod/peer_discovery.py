"""Connects a prefill pod to the decode pods of the prefix index, before the first request needs them.

The probe proves a connection with one real block, so no request pays for the transport's lazy set-up. Pods that join
later are connected when they appear in the index. Broken connections are made again. No pod waits for another pod's
timeout. A pod that the index does not list is connected by its first request.

start() asks the index until it answers, for at most FIRST_ROUND_S: one late answer on a busy machine does not mean that
the index is empty, and a ready pod promises proven connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.errors import BatonError
from common.types import Role
from prefix_index.reader import IndexReader
from prefix_index.records import PodRecord

_log = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 0.1  # Between queries in start(), while the index does not answer
FIRST_ROUND_S = 15.0  # Time limit of start(), for the index and the connections together


@dataclass(eq=False)
class PeerDiscovery:
    """Keeps connections to every decode pod of `scope` in the index."""

    reader: IndexReader
    scope: str
    #: Makes and proves the connection to (address, generation). It is cheap for a pod that is connected.
    connect: Callable[[str, int], Awaitable[object]]

    def __post_init__(self) -> None:
        self._attempts: dict[tuple[str, int], asyncio.Task[None]] = {}  # By pod and generation
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects the listed decode pods, for at most FIRST_ROUND_S, then continues in the background."""
        deadline = time.monotonic() + FIRST_ROUND_S
        answered = await self._round()
        while not answered and time.monotonic() < deadline:
            await asyncio.sleep(RETRY_S)
            answered = await self._round()
        if not answered:
            _log.warning(
                "the prefix index did not answer within %.0f s: this pod starts without a connection to any decode pod "
                "and connects once the index answers",
                FIRST_ROUND_S,
            )
        elif self._attempts:
            _, late = await asyncio.wait(self._attempts.values(), timeout=max(0.0, deadline - time.monotonic()))
            if late:
                _log.warning("%d decode pods could not be connected within %.0f s", len(late), FIRST_ROUND_S)
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def stop(self) -> None:
        """Stops the discovery. Connections stay. Idempotent."""
        tasks = [*self._attempts.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.reader.close()

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._round()

    async def _round(self) -> bool:
        """Connects to new pods. Returns whether the index answered."""
        try:
            pods = await self.reader.pods()
        except BatonError:
            return False  # the index is optional
        except Exception:
            _log.exception("the index could not be read")
            return False
        for record in (pod.record for pod in pods):
            key = (record.pod, record.generation)
            if record.scope == self.scope and record.role is not Role.PREFILL and key not in self._attempts:
                self._attempts[key] = asyncio.get_running_loop().create_task(self._connect_to(record))
        return True

    async def _connect_to(self, record: PodRecord) -> None:
        try:
            await self.connect(record.address, record.generation)
        except BatonError as error:
            _log.info("decode pod %s at %s is not connected yet: %s", record.pod, record.address, error.message)
        except Exception:
            _log.exception("connecting to decode pod %s failed", record.pod)
        finally:
            del self._attempts[record.pod, record.generation]
