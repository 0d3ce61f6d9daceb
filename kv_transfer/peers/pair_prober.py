"""Probes idle connections with a test block, and connects pairs in trouble again.

    usable --no block for period_s--> probed --test block confirmed--> usable
                                        |
                                        +--late----> in trouble; usable again once the block arrives
                                        '--failed--> broken, in trouble --new connection--> usable

A firewall or the transport may close an idle connection silently. The probe finds that before a request does. Its
traffic also keeps the connection open. Info shows a pair in trouble, and gateways do not use it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from common.errors import BatonError, DeadlineExceeded, Unavailable
from kv_transfer.peers.connection import PairTrouble, PeerConnection
from kv_transfer.peers.connector import PAIR_RETRY_S, PeerConnector

_log = logging.getLogger(__name__)

PAIR_PROBE_S = 10.0  #: Default of `period_s`.
TICK_S = 1.0  #: Longest pause between two checks of all connections.
LATE_S = 5.0  #: After this time without an answer to its probe, a pair is in trouble.
MAX_PROBES = 4  #: Probes that run at the same time. Late ones do not count.
MAX_RETRY_S = 10.0  #: Longest pause between two attempts to connect a pair in trouble.
CONNECT_S = 30.0  #: Time limit of one attempt to connect.
FORGET_S = 60.0  #: A pair in trouble that is unwanted for so long is forgotten; the next request tries to connect it.


@dataclass(eq=False)
class PairProber:
    """Probes idle connections and connects pairs in trouble again. Owned by the event loop."""

    connector: PeerConnector
    clock: Callable[[], float]  #: In seconds.
    period_s: float  #: A connection without traffic for this long is probed.

    def __post_init__(self) -> None:
        self._loop_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  #: Probes and attempts to connect that run.
        self._probed: set[PeerConnection] = set()  #: Connections with a running probe.
        self._late: set[PeerConnection] = set()  #: The part of `_probed` with a late test block.
        self._retried: set[str] = set()  #: Names of the pods with a running attempt to connect.

    def start(self) -> None:
        """Starts the checks. Call it on the event loop."""
        self._loop_task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ends the checks and the probes. The transfer thread keeps their writes that have not ended. Idempotent."""
        tasks = [*self._tasks, *([self._loop_task] if self._loop_task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self.period_s / 4))
            try:
                self._begin_due(self.clock())
            except Exception:
                _log.exception("the connections to other pods could not be checked")

    def _begin_due(self, now: float) -> None:
        """Starts the probes and the attempts to connect that are due."""
        idle = [connection for connection in self.connector.live() if self._is_due(connection, now)]
        idle.sort(key=lambda connection: connection.block_at)
        for connection in idle[: max(0, MAX_PROBES - len(self._probed - self._late))]:
            self._probed.add(connection)
            self._spawn(self._probe(connection))
        for trouble in list(self.connector.troubles.values()):
            if now - trouble.wanted_at >= FORGET_S:
                del self.connector.troubles[trouble.pod]
                _log.info("%s at %s is not tried any more", trouble.pod, trouble.address)
            elif now >= trouble.retry_at and trouble.pod not in self._retried:
                self._retried.add(trouble.pod)
                self._spawn(self._retry(trouble))

    def _is_due(self, connection: PeerConnection, now: float) -> bool:
        if connection in self._probed or now < connection.probe_at:
            return False
        # The pods of a cluster start together. Random periods spread their probes.
        return bool(connection.trouble) or now - connection.block_at >= self.period_s * random.uniform(0.8, 1.0)

    async def _probe(self, connection: PeerConnection) -> None:
        """Sends a test block over the connection, and sets the connection's trouble by the outcome."""
        sent = asyncio.ensure_future(self.connector.probe(connection, keep_alive=True))
        trouble = ""
        try:
            await asyncio.wait({sent}, timeout=LATE_S)
            if not sent.done():
                self._late.add(connection)
                self._set_trouble(connection, f"a test block has not arrived within {LATE_S:g} s")
            await sent
        except (Unavailable, DeadlineExceeded) as error:
            trouble = error.message
        except BatonError as error:
            if not self._is_replaced(connection):
                self.connector.break_connection(connection, error.message)
            return
        finally:
            sent.cancel()
            self._late.discard(connection)
            self._probed.discard(connection)
        connection.probe_at = self.clock() + (PAIR_RETRY_S if trouble else 0.0)
        self._set_trouble(connection, trouble)

    def _is_replaced(self, connection: PeerConnection) -> bool:
        """Returns whether another connection to the pod is in use: then the probe says nothing about the pair."""
        return any(other.pod == connection.pod and other is not connection for other in self.connector.live())

    def _set_trouble(self, connection: PeerConnection, trouble: str) -> None:
        """Sets why the connection is in trouble ("" if it is usable), and logs a change."""
        if trouble and trouble != connection.trouble:
            _log.warning("no KV can be sent to %s at %s: %s", connection.pod, connection.address, trouble)
        elif connection.trouble and not trouble:
            _log.info("KV can be sent to %s at %s again", connection.pod, connection.address)
        connection.trouble = trouble

    async def _retry(self, trouble: PairTrouble) -> None:
        """Tries to connect to a pod in trouble. The connector records the outcome."""
        try:
            await self.connector.connect(trouble.address, trouble.pod, CONNECT_S, trouble.generation or None)
            if self.connector.troubles.get(trouble.pod) is trouble:  # connect() found a connection
                del self.connector.troubles[trouble.pod]
        except BatonError:
            trouble.tries += 1
            trouble.retry_at = self.clock() + min(PAIR_RETRY_S * 2**trouble.tries, MAX_RETRY_S)
        finally:
            self._retried.discard(trouble.pod)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a check of a connection failed", exc_info=error)
