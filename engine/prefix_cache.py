"""Which blocks hold which hashed KV, and in which order they are evicted. The pool's lock guards it.

A registered block is *held* (a request or a reader uses it) or *idle*. It is *evictable* when it and all blocks that
continue it are idle. Two invariants follow, and the prefix index relies on the first:

- the set of registered hashes is prefix-closed: a block is registered after its parent and evicted before it;
- the oldest evictable block is a leaf: a block enters `evictable` only while all its children are in it, hence behind
  them, and a child that leaves pins its parent, which then leaves too. So popping the oldest is leaf-first LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Hash -> block, block -> parent block, and the evictable blocks, oldest first.

    Per block, `_pins` counts the registered children that are not evictable.
    """

    __slots__ = ("_parent", "_pins", "evictable", "hashes", "idle", "index", "num_idle")

    def __init__(self, num_blocks: int) -> None:
        self.index: dict[bytes, int] = {}
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.idle = bytearray(num_blocks)
        self.num_idle = 0
        self._parent = [-1] * num_blocks
        self._pins = [0] * num_blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest registered prefix of `hashes`."""
        found: list[int] = []
        get = self.index.get
        for h in hashes:
            block = get(h)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block: int, block_hash: bytes, parent: int) -> None:
        """Name a held block; parent is the registered block before it, -1 for the first of a chain."""
        assert self.hashes[block] is None
        assert block_hash not in self.index
        self.index[block_hash] = block
        self.hashes[block] = block_hash
        self._parent[block] = parent
        self._pins[block] = 0
        if parent >= 0:
            assert self.hashes[parent] is not None
            assert not self.idle[parent]
            self._pins[parent] += 1

    def hold(self, block: int) -> None:
        """An idle block is used again: it and its ancestors cannot be evicted."""
        self.idle[block] = 0
        self.num_idle -= 1
        evictable, parent, pins = self.evictable, self._parent, self._pins
        while block in evictable:
            del evictable[block]
            block = parent[block]
            if block < 0:
                break
            pins[block] += 1

    def rest(self, block: int) -> None:
        """Nobody uses the block any more: it is evictable once its children are, and so may be its ancestors."""
        self.idle[block] = 1
        self.num_idle += 1
        evictable, parent, pins, idle = self.evictable, self._parent, self._pins, self.idle
        while idle[block] and not pins[block]:
            evictable[block] = None
            block = parent[block]
            if block < 0:
                break
            pins[block] -= 1

    def evict(self) -> tuple[int, bytes]:
        """Forget the oldest evictable block, a leaf; returns it with its hash."""
        block, _ = self.evictable.popitem(last=False)
        block_hash = self.hashes[block]
        assert block_hash is not None
        del self.index[block_hash]
        self.hashes[block] = None
        self.idle[block] = 0
        self.num_idle -= 1
        return block, block_hash

    def defects(self) -> list[str]:
        """Violations of the invariants above, for the integrity check; costs a walk over all blocks."""
        found: list[str] = []
        registered = [b for b, h in enumerate(self.hashes) if h is not None]
        if sorted(self.index.values()) != registered or any(self.hashes[b] != h for h, b in self.index.items()):
            found.append("index and block hashes differ")
        pins = [0] * len(self.hashes)
        order = {b: i for i, b in enumerate(self.evictable)}
        for b in registered:
            parent = self._parent[b]
            if parent < 0:
                continue
            if self.hashes[parent] is None:
                found.append(f"block {b} outlived its parent {parent}")
            elif b not in order:
                pins[parent] += 1
            elif parent in order and order[parent] < order[b]:
                found.append(f"block {parent} would be evicted before its child {b}")
        for b in registered:
            if pins[b] != self._pins[b]:
                found.append(f"block {b} has {pins[b]} pins, not {self._pins[b]}")
            if (b in order) != (bool(self.idle[b]) and not pins[b]):
                found.append(f"block {b} is wrongly {'' if b in order else 'not '}evictable")
        if self.num_idle != sum(self.idle) or any(self.hashes[b] is None for b in order):
            found.append("idle or evictable blocks are not all registered")
        return found
