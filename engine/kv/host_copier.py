"""The thread that copies blocks between the pool and the host, as the host tier asks for it.

start -> copying -> stop: the copy under way ends, the tier closes, the memory is unlocked. A copy that fails ends it
the same way, and the pool goes on without a host.
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

STOP_S = 10.0


class HostCopier:
    """checksums: a CRC-32 of every block is taken before it goes to the host, and compared when it comes back."""

    def __init__(self, tier: HostTier, memory: HostKVPool, *, checksums: bool = False) -> None:
        self._tier = tier
        self._memory = memory
        self._checksums: dict[int, int] | None = {} if checksums else None  # by slot
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._tier.stop()
        if self._thread is not threading.current_thread():  # a garbage collection may come to pass there
            self._thread.join(STOP_S)

    def _run(self) -> None:
        why = "the host tier has ended"
        try:
            make_current(self._memory.kv.data.device)
            while (copy := self._tier.next_copy()) is not None:
                self._tier.finish_copy(copy, self._copy(copy))
        except Exception as error:
            log.exception("the host tier ends")
            why = f"the host tier failed: {error}"
        self._tier.close(InternalError(why))
        self._memory.close()

    def _copy(self, copy: HostCopy) -> BlockDamaged | None:
        memory, sums = self._memory, self._checksums
        if copy.host_load is None:
            if sums is not None:
                sums.update({slot: self._sum(block) for block, slot in zip(copy.blocks, copy.host_blocks, strict=True)})
            memory.save(copy.blocks, copy.host_blocks)
            memory.wait()
            return None
        memory.load(copy.host_blocks, copy.blocks)
        memory.wait()
        if sums is None:
            return None
        pairs = zip(copy.blocks, copy.host_blocks, strict=True)
        damaged = [slot for block, slot in pairs if self._sum(block) != sums[slot]]
        if not damaged:
            return None
        return BlockDamaged(f"{len(damaged)} of {len(copy.host_blocks)} KV blocks came back damaged from host memory")

    def _sum(self, block: int) -> int:
        return zlib.crc32(self._memory.kv.read_block(block))
