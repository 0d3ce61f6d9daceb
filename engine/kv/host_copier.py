"""The thread that makes the copies of the host tier.

    start -> copying -> stop or a failed copy -> the host tier is closed, the host memory is unlocked

After that the pool works without a host tier.
"""

from __future__ import annotations

import logging
import threading
import zlib

from common.errors import BlockDamaged, InternalError
from engine.device import make_current
from engine.kv.host_pool import HostKVPool
from engine.kv.host_tier import HostCopy, HostTier

log = logging.getLogger(__name__)

#: Longest wait of `stop` for the copy under way.
STOP_S = 10.0


class HostCopier:
    """Takes copies from the host tier and makes them, on a thread of its own."""

    def __init__(self, host_tier: HostTier, memory: HostKVPool, *, checksums: bool = False) -> None:
        """Starts the thread. With `checksums` it compares a CRC-32 of each block before and after its time there."""
        self._host_tier = host_tier
        self._memory = memory
        #: CRC-32 of each host block in use; None without checksums.
        self._checksums: dict[int, int] | None = {} if checksums else None
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._host_tier.stop()
        if self._thread is not threading.current_thread():  # a garbage collection on that thread may call this
            self._thread.join(STOP_S)

    def _run(self) -> None:
        reason = "the host tier has ended"
        try:
            make_current(self._memory.pool.data.device)
            while (copy := self._host_tier.next_copy()) is not None:
                self._host_tier.finish_copy(copy, self._copy(copy))
        except Exception as error:
            log.exception("the host tier failed; the pool continues without it")
            reason = f"the host tier failed: {error}"
        self._host_tier.close(InternalError(reason))
        self._memory.close()

    def _copy(self, copy: HostCopy) -> BlockDamaged | None:
        """Makes the copy; returns an error if blocks from the host have a wrong checksum."""
        memory, sums = self._memory, self._checksums
        if copy.host_load is None:
            if sums is not None:
                sums.update(
                    {host: self._checksum(block) for block, host in zip(copy.blocks, copy.host_blocks, strict=True)}
                )
            memory.save(copy.blocks, copy.host_blocks)
            memory.wait()
            return None
        memory.load(copy.host_blocks, copy.blocks)
        memory.wait()
        if sums is None:
            return None
        pairs = zip(copy.blocks, copy.host_blocks, strict=True)
        damaged = [host for block, host in pairs if self._checksum(block) != sums[host]]
        if not damaged:
            return None
        return BlockDamaged(f"{len(damaged)} of {len(copy.host_blocks)} KV blocks came back damaged from host memory")

    def _checksum(self, block: int) -> int:
        return zlib.crc32(self._memory.pool.read_block(block))
