"""Which blocks hold which hashed KV, and in which order they are evicted. The pool's lock guards it.

A registered block is *held* (a request or a reader uses it) or *idle*. It is *evictable* when it and all blocks that
continue it are idle. Two invariants follow, and the prefix index relies on the first:

- the set of registered hashes is prefix-closed: a block is registered after its parent and evicted before it;
- the oldest evictable block is a leaf: a block enters `evictable` only while all its children are in it, hence behind
  them, and a child that leaves pins its parent, which then leaves too. So popping the oldest is leaf-first LRU.

With a host tier (host_tier.py) a block is evictable only once it is *saved* too: the host got a copy, or had one. Idle
blocks that are not saved wait in `unsaved`, oldest first, and pin their ancestors until they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

HashesCallback = Callable[[list[bytes]], None]


class PrefixCache:
    """Hash -> block, block -> parent block, and the evictable blocks, oldest first.

    Per block, `_pins` counts the registered children that are not evictable. tiered: a host tier keeps what is evicted.
    saving: blocks whose copy is under way.
    """

    __slots__ = (
        "_has_host_tier",
        "_num_pinned_children",
        "_parent",
        "block_by_hash",
        "evictable",
        "hash_by_block",
        "idle",
        "num_idle",
        "saved",
        "saving",
        "unsaved",
    )

    def __init__(self, num_blocks: int, *, has_host_tier: bool = False) -> None:
        self.block_by_hash: dict[bytes, int] = {}
        self.hash_by_block: list[bytes | None] = [None] * num_blocks
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.idle = bytearray(num_blocks)
        self.num_idle = 0
        self.saved = bytearray(num_blocks)
        self.saving: set[int] = set()
        self.unsaved: OrderedDict[int, None] = OrderedDict()
        self._has_host_tier = has_host_tier
        self._parent = [-1] * num_blocks
        self._num_pinned_children = [0] * num_blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest registered prefix of `hashes`."""
        found: list[int] = []
        get = self.block_by_hash.get
        for h in hashes:
            block = get(h)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block: int, block_hash: bytes, parent: int) -> None:
        """Name a held block; parent is the registered block before it, -1 for the first of a chain."""
        assert self.hash_by_block[block] is None
        assert block_hash not in self.block_by_hash
        self.block_by_hash[block_hash] = block
        self.hash_by_block[block] = block_hash
        self.saved[block] = not self._has_host_tier
        self._parent[block] = parent
        self._num_pinned_children[block] = 0
        if parent >= 0:
            assert self.hash_by_block[parent] is not None
            assert not self.idle[parent]
            self._num_pinned_children[parent] += 1

    def pin(self, block: int) -> None:
        """An idle block is used again: it and its ancestors cannot be evicted."""
        self.idle[block] = 0
        self.num_idle -= 1
        self.unsaved.pop(block, None)
        evictable, parent, pins = self.evictable, self._parent, self._num_pinned_children
        while block in evictable:
            del evictable[block]
            block = parent[block]
            if block < 0:
                break
            pins[block] += 1

    def unpin(self, block: int) -> None:
        """Nobody uses the block any more: it is evictable once it is saved and its children are evictable, and so may
        be its ancestors.
        """
        self.idle[block] = 1
        self.num_idle += 1
        if not self.saved[block] and block not in self.saving:
            self.unsaved[block] = None
        self._update_evictable(block)

    def start_saving(self, count: int) -> list[int]:
        """The oldest blocks, `count` at most, that are idle and not saved; their copies are under way from now on."""
        taken = [self.unsaved.popitem(last=False)[0] for _ in range(min(count, len(self.unsaved)))]
        self.saving.update(taken)
        return taken

    def mark_saved(self, block: int) -> None:
        """The block need not be copied any more before it is evicted."""
        assert not self.saved[block]
        self.saving.discard(block)
        self.unsaved.pop(block, None)
        self.saved[block] = 1
        self._update_evictable(block)

    def parent_hash(self, block: int) -> bytes | None:
        """Hash of the registered block before a registered one; None for the first of a chain."""
        parent = self._parent[block]
        return None if parent < 0 else self.hash_by_block[parent]

    def _update_evictable(self, block: int) -> None:
        evictable, parent, pins, idle, saved = (
            self.evictable,
            self._parent,
            self._num_pinned_children,
            self.idle,
            self.saved,
        )
        while idle[block] and saved[block] and not pins[block]:
            evictable[block] = None
            block = parent[block]
            if block < 0:
                break
            pins[block] -= 1

    def evict(self) -> tuple[int, bytes]:
        """Forget the oldest evictable block, a leaf; returns it with its hash."""
        block, _ = self.evictable.popitem(last=False)
        block_hash = self.hash_by_block[block]
        assert block_hash is not None
        del self.block_by_hash[block_hash]
        self.hash_by_block[block] = None
        self.idle[block] = 0
        self.num_idle -= 1
        return block, block_hash

    def inconsistencies(self) -> list[str]:
        """Violations of the invariants above, for the integrity check; costs a walk over all blocks."""
        found: list[str] = []
        registered = [b for b, h in enumerate(self.hash_by_block) if h is not None]
        if sorted(self.block_by_hash.values()) != registered or any(
            self.hash_by_block[b] != h for h, b in self.block_by_hash.items()
        ):
            found.append("index and block hashes differ")
        pins = [0] * len(self.hash_by_block)
        order = {b: i for i, b in enumerate(self.evictable)}
        for b in registered:
            parent = self._parent[b]
            if parent < 0:
                continue
            if self.hash_by_block[parent] is None:
                found.append(f"block {b} outlived its parent {parent}")
            elif b not in order:
                pins[parent] += 1
            elif parent in order and order[parent] < order[b]:
                found.append(f"block {parent} would be evicted before its child {b}")
        for b in registered:
            if pins[b] != self._num_pinned_children[b]:
                found.append(f"block {b} has {pins[b]} pins, not {self._num_pinned_children[b]}")
            if (b in order) != (bool(self.idle[b]) and bool(self.saved[b]) and not pins[b]):
                found.append(f"block {b} is wrongly {'' if b in order else 'not '}evictable")
            if (b in self.unsaved) != (bool(self.idle[b]) and not self.saved[b] and b not in self.saving):
                found.append(f"block {b} is wrongly {'' if b in self.unsaved else 'not '}waiting to be saved")
        if self.num_idle != sum(self.idle) or any(
            self.hash_by_block[b] is None for b in (*order, *self.unsaved, *self.saving)
        ):
            found.append("idle, evictable or unsaved blocks are not all registered")
        return found
