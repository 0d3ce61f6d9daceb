"""Sizes of writes, and the time in which one must end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kv_transfer.memory import MemoryKind
from kv_transfer.peers.connection import PeerConnection

#: A transfer fails if no write of its connection ends for this time plus the time of the largest write at SLOWEST_LINK.
WRITE_SILENCE_S = 15.0
SLOWEST_LINK = 12.5e6  #: Bytes/s of the slowest network for KV, 100 Mbit/s.
#: After a pause of this length between two looks this process stood still itself, and the ends of writes are late.
STOOD_STILL_S = 1.0


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Sizes of writes."""

    first_bytes: int  #: Max bytes of a push's first write.
    max_bytes: int  #: Max bytes of one write.
    max_in_flight: int  #: Max posted writes per connection.


# Host memory: posting a write may copy all of its bytes inline. GPU: posting a write takes a tenth of a millisecond of
# this thread, which must be little beside the copy. A write cannot be recalled; 128 MiB take two milliseconds at most.
DEFAULT_WRITE_LIMITS: dict[MemoryKind, WriteLimits] = {
    "DRAM": WriteLimits(8 << 20, 8 << 20, 4),
    "VRAM": WriteLimits(32 << 20, 128 << 20, 4),
}


class WriteSilence:
    """Detects connections on which no write ends, although the peer answers calls. The transfer thread owns it."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: bytes of the largest write."""
        self.limit_s = WRITE_SILENCE_S + max_bytes / SLOWEST_LINK
        self._looked_at = self._awake_since = -math.inf

    def look(self, now: float) -> None:
        """Called at each tick."""
        if now - self._looked_at > STOOD_STILL_S:
            self._awake_since = now
        self._looked_at = now

    def trouble(self, connection: PeerConnection, posted_at: float, now: float) -> str:
        """Returns why a posted write will not end; "" while it may. `posted_at`: when the newest was posted."""
        silent_s = now - max(connection.block_at, posted_at, self._awake_since)
        return f"no write to {connection.pod} has ended for {silent_s:.3g} s" if silent_s >= self.limit_s else ""
