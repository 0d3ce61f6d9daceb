"""Watches the pool for a quarantine that stays.

A quarantined block waits for proof that its writer will not write. When proof fails to come for a tenth of the pool, a
new process is the only fence that this side owns, so the pod drains and exits.
"""

from __future__ import annotations

from common.types import PoolCounts

QUARANTINE_SHARE = 0.1
QUARANTINE_LIMIT_S = 60.0


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
