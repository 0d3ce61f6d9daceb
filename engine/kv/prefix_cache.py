"""The hash index over the blocks of the pool, and the order in which cached blocks are evicted.

A registered block is *in use* (a lease or a reader has it) or *idle*. It is *evictable* if it and all registered blocks
that continue it are idle. Two invariants hold. The prefix index relies on the first one.

- The registered hashes are prefix-closed: a block is registered after its parent and evicted before it.
- The oldest evictable block is a leaf. A block becomes evictable after all its children, so it comes after them in the
  order. A child that is used again takes its ancestors out of the order. Eviction of the oldest is thus leaf-first LRU.

Other policies and retentions (eviction.py) replace the order. They take leaves only, so the first invariant holds.

With a host tier (host_tier.py) a block must also be *saved* before it is evictable: the host has, or had, a copy of it.
Idle blocks without a copy wait in a list of their own, oldest first, and keep their ancestors from eviction.

The lock of the block pool guards all data of this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.kv.eviction import LeafOrder, Retention

HashesCallback = Callable[[list[bytes]], None]  # Gets hashes that became available or ceased to be


class PrefixCache:
    """Maps hashes to blocks and blocks to their parents, and keeps the evictable blocks, oldest first."""

    def __init__(
        self,
        num_blocks: int,
        *,
        has_host_tier: bool = False,
        policy: str = "lru",
        max_pinned: int = 0,
        max_pinned_by_tenant: int = 0,
    ) -> None:
        self.block_by_hash: dict[bytes, int] = {}  # The registered blocks, parents before children
        self.hash_by_block: list[bytes | None] = [None] * num_blocks
        self._parent = [-1] * num_blocks
        self._num_kept_children = [0] * num_blocks  # Registered children of each block that are not evictable
        self.idle = bytearray(num_blocks)  # 1 for registered blocks without a user
        self.num_idle = 0
        self._pin_limits = max_pinned, max_pinned_by_tenant
        #: The evictable blocks, the next to evict first. A plain dict, oldest first, until a policy or a retention asks
        #: for another order.
        self.evictable: OrderedDict[int, None] | LeafOrder = OrderedDict()
        if policy != "lru":
            self.evictable = LeafOrder(policy, num_blocks, *self._pin_limits)
        self._has_host_tier = has_host_tier
        self._saved = bytearray(num_blocks)  # 1 for blocks that need no copy to the host before eviction
        self.saving: set[int] = set()  # Blocks that are being copied to the host now
        self.unsaved: OrderedDict[int, None] = OrderedDict()  # Idle, neither saved nor being copied, oldest first

    def parent(self, block: int) -> int:
        """Returns the block before a registered block; -1 for the first block of a prompt."""
        return self._parent[block]

    def parent_hash(self, block: int) -> bytes | None:
        """Returns the hash of the block before a registered block; None for the first block of a prompt."""
        parent = self._parent[block]
        return None if parent < 0 else self.hash_by_block[parent]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest registered prefix of `hashes`."""
        matched: list[int] = []
        get = self.block_by_hash.get
        for h in hashes:
            block = get(h)
            if block is None:
                break
            matched.append(block)
        return matched

    def count_evictable(self, blocks: Sequence[int]) -> int:
        """Returns how many of `blocks` are evictable."""
        evictable = self.evictable
        return sum(block in evictable for block in blocks)

    def register(self, block: int, block_hash: bytes, parent: int) -> None:
        """Registers a block in use under its hash; `parent` is the registered block before it, -1 for none."""
        assert self.hash_by_block[block] is None
        assert block_hash not in self.block_by_hash
        self.block_by_hash[block_hash] = block
        self.hash_by_block[block] = block_hash
        self._saved[block] = not self._has_host_tier
        self._parent[block] = parent
        self._num_kept_children[block] = 0
        if parent >= 0:
            assert self.hash_by_block[parent] is not None
            assert not self.idle[parent]
            self._num_kept_children[parent] += 1
        if isinstance(self.evictable, LeafOrder):
            self.evictable.on_registered(block, block_hash, parent)

    def retain(self, blocks: Sequence[int], retention: Retention | None) -> None:
        """A request uses registered blocks of its prompt, first to last; None: it asks for no retention."""
        order = self.evictable
        if isinstance(order, LeafOrder):
            order.retain(blocks, retention or Retention())
        elif retention is not None and retention != Retention():
            self.evictable = leafs = LeafOrder("lru", len(self.hash_by_block), *self._pin_limits)
            for block_hash, block in self.block_by_hash.items():
                leafs.on_registered(block, block_hash, self._parent[block])
            leafs.retain(list(self.block_by_hash.values()), Retention())
            for block in order:
                leafs[block] = None
            leafs.retain(blocks, retention)

    def mark_in_use(self, blocks: Sequence[int]) -> None:
        """Marks blocks as in use; the idle blocks among them, and their ancestors, are not evictable any more."""
        idle, evictable, parent, kept = self.idle, self.evictable, self._parent, self._num_kept_children
        unsaved = self.unsaved
        for block in blocks:
            if not idle[block]:
                continue
            idle[block] = 0
            self.num_idle -= 1
            if unsaved:
                unsaved.pop(block, None)
            ancestor = block
            while ancestor in evictable:
                del evictable[ancestor]
                ancestor = parent[ancestor]
                if ancestor < 0:
                    break
                kept[ancestor] += 1

    def mark_idle(self, blocks: Sequence[int], is_saved: Callable[[bytes], bool] | None) -> list[int]:
        """Marks blocks, children before parents, as idle. Returns the unregistered ones, which the cache does not keep.

        `is_saved` says whether a hash needs no copy to the host; None without a host tier.
        """
        unregistered: list[int] = []
        hashes, idle, saved, saving = self.hash_by_block, self.idle, self._saved, self.saving
        update = self._update_evictable
        for block in blocks:
            if (block_hash := hashes[block]) is None:
                unregistered.append(block)
                continue
            idle[block] = 1
            if is_saved is not None and block not in saving:
                saved[block] = is_saved(block_hash)
                if not saved[block]:
                    self.unsaved[block] = None
            update(block)
        self.num_idle += len(blocks) - len(unregistered)
        return unregistered

    def evict(self) -> tuple[int, bytes]:
        """Unregisters the next evictable block, a leaf; returns it and its hash."""
        block, _ = self.evictable.popitem(last=False)
        return block, self._unregister(block)

    def _unregister(self, block: int) -> bytes:
        """Unregisters an idle block that is not evictable any more; returns its hash."""
        block_hash = self.hash_by_block[block]
        assert block_hash is not None
        del self.block_by_hash[block_hash]
        self.hash_by_block[block] = None
        self.idle[block] = 0
        self.num_idle -= 1
        return block_hash

    def start_saving(self, count: int) -> list[int]:
        """Takes at most `count` of the oldest unsaved blocks; their copies to the host start now."""
        taken = [self.unsaved.popitem(last=False)[0] for _ in range(min(count, len(self.unsaved)))]
        self.saving.update(taken)
        return taken

    def mark_saved(self, blocks: Sequence[int]) -> None:
        """Marks blocks as saved: no copy to the host is needed before their eviction."""
        for block in blocks:
            assert not self._saved[block]
            self.saving.discard(block)
            self.unsaved.pop(block, None)
            self._saved[block] = 1
            self._update_evictable(block)

    def skip_unsaved(self) -> None:
        """Marks all unsaved blocks as saved, so that they are evicted without a copy."""
        self.mark_saved(tuple(self.unsaved))

    def _update_evictable(self, block: int) -> None:
        """Makes the block evictable if nothing prevents it, then its ancestors likewise."""
        evictable, parent, kept = self.evictable, self._parent, self._num_kept_children
        idle, saved = self.idle, self._saved
        while idle[block] and saved[block] and not kept[block]:
            evictable[block] = None
            block = parent[block]
            if block < 0:
                break
            kept[block] -= 1

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each; walks over all blocks."""
        defects: list[str] = []
        registered = [b for b, h in enumerate(self.hash_by_block) if h is not None]
        if sorted(self.block_by_hash.values()) != registered or any(
            self.hash_by_block[b] != h for h, b in self.block_by_hash.items()
        ):
            defects.append("index and block hashes differ")
        kept = [0] * len(self.hash_by_block)
        order = {b: i for i, b in enumerate(self.evictable)}
        for b in registered:
            parent = self._parent[b]
            if parent < 0:
                continue
            if self.hash_by_block[parent] is None:
                defects.append(f"block {b} outlived its parent {parent}")
            elif b not in order:
                kept[parent] += 1
            elif isinstance(self.evictable, OrderedDict) and parent in order and order[parent] < order[b]:
                defects.append(f"block {parent} would be evicted before its child {b}")
        defects += self.evictable.inconsistencies() if isinstance(self.evictable, LeafOrder) else []
        for b in registered:
            if kept[b] != self._num_kept_children[b]:
                defects.append(f"block {b} has {kept[b]} kept children, not {self._num_kept_children[b]}")
            if (b in order) != (bool(self.idle[b]) and bool(self._saved[b]) and not kept[b]):
                defects.append(f"block {b} is wrongly {'' if b in order else 'not '}evictable")
            if (b in self.unsaved) != (bool(self.idle[b]) and not self._saved[b] and b not in self.saving):
                defects.append(f"block {b} is wrongly {'' if b in self.unsaved else 'not '}waiting to be saved")
        if self.num_idle != sum(self.idle) or any(
            self.hash_by_block[b] is None for b in (*order, *self.unsaved, *self.saving)
        ):
            defects.append("idle, evictable or unsaved blocks are not all registered")
        return defects
