"""A copier of the host tier that a test drives step by step. KV is a dict keyed by (block, position in the block).

Sources are read and targets are written when a copy ends, as late as possible. A block that is used or reused too early
thus gives wrong KV. The targets of a copy under way hold RUBBISH.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from common.errors import BlockDamaged
from engine.kv.blocks import BlockPool
from engine.kv.tiers.host_tier import HostCopy

RUBBISH = -1


class FakeCopier:
    """Makes the copies of a pool's host tier; blocks have `size` tokens."""

    def __init__(self, pool: BlockPool, kv: MutableMapping[tuple[int, int], int], size: int) -> None:
        assert pool.host_tier is not None
        #: Host blocks whose loads come back damaged.
        self.damage: set[int] = set()
        self.host: dict[tuple[int, int], int] = {}
        self._pool, self._tier, self._kv, self._size = pool, pool.host_tier, kv, size
        self._copy: HostCopy | None = None

    def begin(self) -> bool:
        """Begins the next copy; False if there is none or one is under way."""
        if self._copy is not None:
            return False
        with self._pool.lock:
            self._copy = self._tier.start_next_copy()
        if self._copy is None:
            return False
        rubbish, targets = (
            (self.host, self._copy.host_blocks) if self._copy.host_load is None else (self._kv, self._copy.blocks)
        )
        for target in targets:
            rubbish.update({(target, i): RUBBISH for i in range(self._size)})
        return True

    def end(self) -> bool:
        """Ends the copy under way; False if there is none."""
        copy, self._copy = self._copy, None
        if copy is None:
            return False
        for block, host_block in zip(copy.blocks, copy.host_blocks, strict=True):
            for i in range(self._size):
                if copy.host_load is None:
                    self.host[host_block, i] = self._kv.get((block, i), 0)
                else:
                    self._kv[block, i] = self.host[host_block, i]
        damaged = copy.host_load is not None and bool(self.damage.intersection(copy.host_blocks))
        self._tier.finish_copy(copy, BlockDamaged("damaged") if damaged else None)
        return True

    def run(self) -> int:
        """Makes all queued copies and returns their number."""
        count = int(self.end())
        while self.begin():
            count += self.end()
        return count
