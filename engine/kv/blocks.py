"""The pool of KV blocks: leases, prefix matches, and the calls to the host tier and the disk tier.

ledger.py has the states of a block, lease.py the blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.types import PoolCounts
from engine.kv.eviction import Retention
from engine.kv.lease import Lease
from engine.kv.ledger import BlockLedger, BlockPin, StepFence
from engine.kv.tiers.block_store import BlockStore
from engine.kv.tiers.file_load import NO_LOAD, FileLoad
from engine.kv.tiers.file_tier import FileTier
from engine.kv.tiers.host_tier import HostTierStats, SavedPartialBlock
from engine.kv.tiers.segment_store import SegmentStore
from engine.kv.tiers.shared_store import SharedStore


class BlockPool(BlockLedger):
    """The blocks, a prefix cache and, on request, a host tier. Thread-safe; private methods need the lock."""

    def attach_disk_tier(self, store: SegmentStore) -> FileTier:
        """Puts a disk tier behind the host tier. Call it once, before the first lease and a shared tier."""
        assert self.shared_tier is None
        self.disk_tier = self._attach(store)
        return self.disk_tier

    def attach_shared_tier(self, store: SharedStore) -> FileTier:
        """Puts a shared tier behind the host tier, and behind the disk tier. Call it once, before the first lease."""
        self.shared_tier = self._attach(store)
        if self.disk_tier is not None:
            self.disk_tier.next_tier = self.shared_tier
        return self.shared_tier

    def _attach(self, store: BlockStore) -> FileTier:
        host_tier = self.host_tier
        assert host_tier is not None
        tier = FileTier(self.lock, self._cache, host_tier, store, self.block_size)
        tier.on_load_ended = self._tell_progress
        host_tier.next_tiers.append(tier)
        host_tier.pin_for_read = lambda blocks: BlockPin(self, blocks, is_writer=False).release_locked
        return tier

    def load_from_files(self, hashes: Sequence[bytes], compute_s: Callable[[int], float] | None = None) -> FileLoad:
        """Starts to read what follows the cached prefix of `hashes`, see FileTier.load; done without a file tier."""
        tier = self.disk_tier or self.shared_tier
        return NO_LOAD if tier is None else tier.load(hashes, compute_s)

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that a sequence of `num_tokens` tokens needs."""
        return -(-num_tokens // self.block_size)

    def blocks_that_fit(self, num_pages: int) -> int:
        """Returns the number of blocks of the longest sequence that fits in `num_pages` pages: fewer with KV groups."""
        return num_pages

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits."""
        return self.blocks_that_fit(self.num_blocks) * self.block_size

    def lease(
        self,
        hashes: Sequence[bytes],  # Hashes of the blocks that a cache may supply, in order
        total_blocks: int,
        *,
        keep_free: int = 0,  # Blocks that must stay available
        host: bool = False,
        saved_partial: SavedPartialBlock | None = None,  # Restored if exactly the blocks before it are cached
        retention: Retention | None = None,  # Of the blocks that match, and of those that the lease publishes
    ) -> Lease | None:
        """Leases total_blocks blocks: the longest cached prefix of `hashes`, then empty blocks.

        With `host` the prefix may go on in the host tier; `Lease.host_load` must then be done before the lease is used.
        Returns None, and changes nothing, if too few blocks are available.
        """
        host_tier = self.host_tier if host else None
        with self.lock:
            cached = self._cache.match(hashes[:total_blocks])
            need = total_blocks - len(cached)
            if not self._can_allocate(keep_free + need + self._cache.count_evictable(cached)):
                return None
            self._acquire(cached, self._holds)
            self._cache.retain(cached, retention)
            if host_tier is None:
                return Lease(self, cached + self._allocate(need), len(cached), retention=retention)
            keys = list(hashes[len(cached) : len(cached) + host_tier.match(hashes[len(cached) :])])
            lease = Lease(self, cached + self._allocate(need), len(cached), host_blocks=len(keys), retention=retention)
            if (
                saved_partial is not None
                and lease.cached_blocks < total_blocks
                and lease.cached_blocks == saved_partial.computed // self.block_size
                and host_tier.match([saved_partial.key])
            ):
                lease.restored_partial = True
                keys.append(saved_partial.key)
            if keys:
                targets = lease.blocks[len(cached) : len(cached) + len(keys)]
                lease.host_load = host_tier.load(keys, targets, BlockPin(self, targets, is_writer=True).release_locked)
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Returns the length of the longest cached prefix of `hashes` in blocks, in the pool and then the host tier."""
        with self.lock:
            count = len(self._cache.match(hashes))
            return count if self.host_tier is None else count + self.host_tier.match(hashes[count:])

    def prefix_pages(self, num_blocks: int) -> int:
        """Returns the number of pages that another pod reads for a prefix of blocks: more with KV groups."""
        return num_blocks

    def lendable_blocks(self, hashes: Sequence[bytes]) -> int:
        """Returns the length of the longest prefix of `hashes` that another pod can get from the pool, in blocks."""
        with self.lock:
            return len(self._cache.match(hashes))

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Pins the longest prefix of `hashes` in the pool for a reader, from block `first` on. None if it is empty."""
        with self.lock:
            matched = self._cache.match(hashes)[first:]
            return BlockPin(self, matched, is_writer=False) if matched else None

    def save_partial_block(self, lease: Lease, computed: int) -> SavedPartialBlock | None:
        """Starts to copy the last, partial block of `computed` tokens to the host, before the lease is given up.

        Returns None if the block is full, if blocks before it are not published, or without a host tier.
        """
        host_tier, (index, tokens) = self.host_tier, divmod(computed, self.block_size)
        with self.lock:
            if host_tier is None or host_tier.closed or not tokens or lease.num_published < index:
                return None
            block = lease.blocks[index]
            parent = self._cache.hash_by_block[lease.blocks[index - 1]] if index else None
            pin = BlockPin(self, [block], is_writer=False)
            return SavedPartialBlock(host_tier.save_partial_block(parent, block, pin.release_locked), computed)

    def drop_partial_block(self, saved: SavedPartialBlock) -> None:
        """Forgets a saved partial block. Idempotent."""
        with self.lock:
            if self.host_tier is not None:
                self.host_tier.drop_partial_block(saved.key)

    def begin_step(self) -> StepFence:
        """Makes the fence of a step; call before the launch, and `end` the fence when the step has ended."""
        with self.lock:
            return StepFence(self)

    def num_available(self) -> int:
        """Returns the number of blocks that a lease can get, now or after the pending copies to the host."""
        with self.lock:
            return self._num_allocatable() + len(self._cache.unsaved) + len(self._cache.saving)

    def shortage(self) -> str:
        """Returns why `lease` has returned None, as one sentence for a person."""
        return "the KV pool is full"

    def num_deferred(self) -> int:
        """Returns the number of block references that are released when the steps in flight end."""
        with self.lock:
            return sum(len(fence.blocks) for fence in self._fences)

    def copies_pending(self) -> bool:
        """Returns whether copies to the host will make blocks available, without any other event."""
        with self.lock:
            return self.host_tier is not None and self.host_tier.busy

    def counts(self) -> PoolCounts:
        """Returns the number of blocks in each state."""
        with self.lock:
            return self._counts()

    def state_counts(self) -> PoolCounts | None:
        """Returns the number of slots for recurrent states in each state; None for a pool without."""
        return None

    def quarantined_share(self) -> float:
        """Returns the share of the blocks that is quarantined, or that of the slots for states if it is larger."""
        return max(counts.quarantined / counts.total for counts in (self.counts(), self.state_counts()) if counts)

    def cached_hashes(self) -> list[bytes]:
        """Returns all hashes that a match can find in the pool, parents before children."""
        with self.lock:
            return list(self._cache.block_by_hash)

    def host_hashes(self) -> list[bytes]:
        """Returns all hashes of full blocks in the host tier."""
        with self.lock:
            return [] if self.host_tier is None else self.host_tier.hashes()

    def disk_hashes(self) -> list[bytes]:
        """Returns all hashes in the disk tier."""
        return [] if self.disk_tier is None else self.disk_tier.store.hashes()

    def tokens_per_s_of(self, tier: FileTier | None) -> float:
        """Returns the prompt tokens per second that loads from a file tier reach; 0 before the first one."""
        return 0.0 if tier is None else tier.read_rate / tier.store.block_bytes * self.block_size

    def host_stats(self) -> HostTierStats | None:
        """Returns the counts of the host tier; None without one."""
        with self.lock:
            return None if self.host_tier is None else self.host_tier.stats()

    def reset_prefix_cache(self) -> int:
        """Evicts all evictable blocks and empties the other tiers; returns the number of evicted blocks."""
        with self.lock:
            if self.host_tier is not None:
                self.host_tier.clear()  # releases the lock for a while, so the file tiers forget their blocks last
            for tier in (self.disk_tier, self.shared_tier):
                if tier is not None:
                    tier.clear()
            evicted = self._evict(len(self._cache.evictable))
            self._free += evicted
            return len(evicted)
