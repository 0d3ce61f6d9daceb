"""A host tier's copier that a test drives by hand, over KV in a dict keyed by (block, position in the block).

The bytes of a copy to the host are read at its end, those of a copy from the host are written at its end: as late as
possible, so a block that is reused, or used, too early gives wrong KV. While a copy is under way its targets hold
rubbish.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from common.errors import BlockDamaged
from engine.kv.blocks import BlockPool
from engine.kv.host_tier import HostCopy

RUBBISH = -1


class FakeCopier:
    """size: tokens of a block. damage: slots whose next load comes back damaged."""

    def __init__(self, pool: BlockPool, kv: MutableMapping[tuple[int, int], int], size: int) -> None:
        assert pool.host_tier is not None
        self.damage: set[int] = set()
        self.host: dict[tuple[int, int], int] = {}
        self._pool, self._tier, self._kv, self._size = pool, pool.host_tier, kv, size
        self._copy: HostCopy | None = None

    def begin(self) -> bool:
        """Takes the next copy; False when there is none or one is under way."""
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
        """Ends the copy under way; False when there is none."""
        copy, self._copy = self._copy, None
        if copy is None:
            return False
        for block, slot in zip(copy.blocks, copy.host_blocks, strict=True):
            for i in range(self._size):
                if copy.host_load is None:
                    self.host[slot, i] = self._kv.get((block, i), 0)
                else:
                    self._kv[block, i] = self.host[slot, i]
        damaged = copy.host_load is not None and bool(self.damage.intersection(copy.host_blocks))
        self._tier.finish_copy(copy, BlockDamaged("damaged") if damaged else None)
        return True

    def run(self) -> int:
        """Makes all copies that are asked for; how many that was."""
        count = int(self.end())
        while self.begin():
            count += self.end()
        return count
