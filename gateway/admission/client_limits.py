"""Bounds on what one client holds open while it sends: connections, and heads and bodies that arrive slowly.

A request gets its permit when its body has arrived, so a slow client holds no permit, but a connection and memory.
Both are bounded here for each client address and each API key. So a client with a thousand unfinished requests takes
nothing from other clients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gateway.telemetry.metrics import GatewayMetrics

SLOW_S = 1.0  #: Seconds after which the unfinished head or body of a request counts as slow.
MAX_ALL_SLOW = 1024  #: Slow inputs of all clients together; each holds up to one body in memory.
SHARE_OF_CLIENT = 0.75  #: Largest share of all connections for one client, so that others can always connect.
_log = logging.getLogger(__name__)


@dataclass(eq=False, frozen=True, slots=True)
class SlowInput:
    """A head or body that takes longer than SLOW_S."""

    owners: tuple[str, ...]  #: The client address, and the API key if it is known.
    end: Callable[[], None]  #: Ends the input with an error for the client; called at most once.


class ClientLimits:
    """Counts the connections and the slow inputs of each client. A bound of 0 is no bound."""

    def __init__(
        self, metrics: GatewayMetrics, *, connections: int, slow: int, all_connections: int, all_slow: int
    ) -> None:
        """`connections` and `slow` bound one client, `all_connections` and `all_slow` all clients together."""
        self._rejections = metrics.rejections.labels("client")
        most = max(1, int(all_connections * SHARE_OF_CLIENT))
        self.max_connections = min(connections or most, most)  #: Of one client.
        self._max_slow = slow
        self._all_connections = all_connections
        self._all_slow = all_slow
        self._connections: Counter[str] = Counter()
        self._num_connections = 0
        self._inputs: set[SlowInput] = set()
        self._by_owner: dict[str, dict[SlowInput, None]] = {}  #: Slow inputs, oldest first.
        self._full = False  #: A warning about `all_connections` was logged; it is not repeated for each connection.

    def connect(self, client: str) -> bool:
        """Counts a new connection; returns False, and does not count it, if a bound is reached."""
        if self._num_connections >= self._all_connections:
            if not self._full:
                _log.warning("%d connections are open, which the limit of open files allows", self._num_connections)
            self._full = True
        elif self._connections[client] < self.max_connections:
            self._connections[client] += 1
            self._num_connections += 1
            return True
        self._rejections.inc()
        return False

    def disconnect(self, client: str) -> None:
        """A counted connection has ended."""
        self._num_connections -= 1
        self._full = self._full and self._num_connections > 0.9 * self._all_connections
        self._connections[client] -= 1
        if not self._connections[client]:
            del self._connections[client]

    def add_slow(self, slow: SlowInput) -> None:
        """Counts a slow input. Ends the oldest one of an owner beyond its bound.

        Beyond the bound of all clients, it ends the oldest one of the owner that has the most.
        """
        self._inputs.add(slow)
        for owner in slow.owners:
            own = self._by_owner.setdefault(owner, {})
            own[slow] = None
            if self._max_slow and len(own) > self._max_slow:
                self._end(next(iter(own)))
        if len(self._inputs) > self._all_slow:
            most = max(self._by_owner, key=lambda owner: len(self._by_owner[owner]))
            self._end(next(iter(self._by_owner[most])))

    def remove_slow(self, slow: SlowInput) -> None:
        """The input is complete or was given up. Idempotent."""
        if slow not in self._inputs:
            return
        self._inputs.discard(slow)
        for owner in slow.owners:
            own = self._by_owner.get(owner, {})
            own.pop(slow, None)
            if not own:
                self._by_owner.pop(owner, None)

    def _end(self, slow: SlowInput) -> None:
        self.remove_slow(slow)
        self._rejections.inc()
        slow.end()
