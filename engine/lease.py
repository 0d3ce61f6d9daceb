"""A request's blocks, from `BlockPool.lease` until the one `finish` that counts.

The lease is used by one owner at a time (of a running sequence: the engine's thread); every change is made under the
pool's lock, so holds may be released by other threads meanwhile. blocks[:published] are shared, complete and never
written again; the rest belong to this lease alone, except for the one that a fork left `borrowed`: it is shared as
well, with as much as was written before the fork, and `own` replaces it before anything else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import InternalError
from engine.block_ledger import BlockLedger
from engine.hold import Hold
from engine.host_tier import Load


class BlockCopy(NamedTuple):
    """The bytes of one physical block go to another."""

    source: int
    target: int


class Lease:
    """blocks: physical blocks in logical order, empty once finished.

    cached_blocks: how many of them came from the cache with their KV, host_blocks of them from the host. published: how
    many lead blocks have their hash registered. swaps: how often one of `blocks` was replaced; otherwise they only grow
    and shrink at the end. borrowed: place of the block that may not be written before `own`, -1 for none. load: blocks
    on their way from the host; none of the lease is to be used before it is done. resumed: a parked block follows the
    cached ones.
    """

    __slots__ = (
        "_ledger",
        "blocks",
        "cached_blocks",
        "cow_index",
        "finished",
        "host_blocks",
        "host_load",
        "num_published",
        "num_replaced",
        "reason",
        "restored_partial",
    )

    def __init__(self, ledger: BlockLedger, blocks: list[int], matched: int, *, host_blocks: int = 0) -> None:
        """Called under the ledger's lock, by the pool, with one request counted on each block. matched: blocks that are
        registered already.
        """
        self.blocks = blocks
        self.cached_blocks = matched + host_blocks
        self.host_blocks = host_blocks
        self.cow_index = -1
        self.host_load: Load | None = None
        self.restored_partial = False
        self.num_published = matched
        self.finished = False
        self.reason = ""
        self.num_replaced = 0
        self._ledger = ledger
        ledger.leases.add(self)

    @property
    def host_loading(self) -> bool:
        """Blocks are still on their way from the host."""
        return self.host_load is not None and not self.host_load.done

    def grow(self, n: int = 1) -> bool:
        """Add n blocks at the end; False, and no change, when the pool has not that many."""
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if not ledger.can_allocate(n):
                return False
            self.blocks.extend(ledger.allocate(n))
            return True

    def trim(self, count: int) -> None:
        """Give up all but the first `count` blocks; none of the others is published or has KV that counts."""
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if count < self.num_published:
                raise InternalError(f"{self.num_published} published blocks do not fit in {count}")
            surplus = self.blocks[count:]
            del self.blocks[count:]
            surplus.reverse()
            ledger.release_after_steps(surplus)

    def fork(self, shared: int, *, spare: int = 0) -> Lease:
        """Another lease on the first `shared` blocks, whose KV is complete up to the last one; the last `spare` blocks
        of this lease go with it. Where not all that is shared is published, both borrow the last of it from now on.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if not self.num_published <= shared <= len(self.blocks) - spare:
                raise InternalError(f"a fork of {shared} blocks, and {spare} more, from a lease of {len(self.blocks)}")
            lead = self.blocks[:shared]
            moved = [self.blocks.pop() for _ in range(spare)]
            ledger.acquire(lead, ledger.requests)
            other = Lease(ledger, lead + moved, self.num_published)
            other.cached_blocks, other.host_blocks, other.host_load = (
                self.cached_blocks,
                self.host_blocks,
                self.host_load,
            )
            if shared > self.num_published:
                self.cow_index = other.cow_index = shared - 1
            return other

    def copy_on_write(self) -> BlockCopy | None:
        """Replaces the borrowed block, so that the step that is being planned may write there.

        That step has to copy first. Source and target are one block when nobody else uses it any more. None, and no
        change, when it takes a block and the pool has none.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            place = self.cow_index
            block = self.blocks[place]
            if not ledger.is_shared(block):
                self.cow_index = -1
                return BlockCopy(block, block)
            if place < len(self.blocks) - 1:
                target = self.blocks.pop()
            elif ledger.can_allocate(1):
                (target,) = ledger.allocate(1)
            else:
                return None
            self.blocks[place] = target
            self.cow_index = -1
            self.num_replaced += 1
            ledger.copy_sources.append(block)
            return BlockCopy(block, target)

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Register the first len(hashes) blocks, whose KV is complete; a duplicate is swapped for the canonical block.

        Stops before a block that has a writer: it is not complete, whatever the caller believes; a later call goes on.
        Publishes nothing after a load that failed.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if self.host_load is not None and self.host_load.error is not None:
                return
            if len(hashes) > len(self.blocks):
                raise InternalError(f"{len(hashes)} hashes for a lease of {len(self.blocks)} blocks")
            stored: list[bytes] = []
            duplicates: list[int] = []
            for i in range(self.num_published, len(hashes)):
                block, block_hash = self.blocks[i], hashes[i]
                if ledger.writers[block]:
                    break
                canonical = ledger.cache.block_by_hash.get(block_hash)
                if canonical is None:
                    ledger.cache.register(block, block_hash, self.blocks[i - 1] if i else -1)
                    stored.append(block_hash)
                elif canonical != block:  # else a fork of this lease has registered it
                    self._swap(i, canonical, duplicates)
                self.num_published = i + 1
            ledger.release_after_steps(duplicates)
            if stored:
                ledger.on_stored(stored)

    def rematch(self, hashes: Sequence[bytes]) -> int:
        """Swap lead blocks, not computed yet, for blocks cached since the lease was taken; returns cached_blocks.

        hashes: of the sequence's matchable blocks. Only for a lease in which nothing has been computed.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            duplicates: list[int] = []
            for i in range(self.num_published, min(len(hashes), len(self.blocks))):
                canonical = ledger.cache.block_by_hash.get(hashes[i])
                if canonical is None or ledger.writers[self.blocks[i]]:
                    break
                self._swap(i, canonical, duplicates)
                self.num_published = self.cached_blocks = i + 1
            ledger.release_after_steps(duplicates)
            return self.cached_blocks

    def pin_for_write(self, first: int, count: int) -> Hold:
        """Claim logical blocks first..first+count for a writer of bytes; none of them may be published."""
        with self._ledger.lock:
            blocks = self._range(first, count)
            if first < self.num_published:
                raise InternalError(f"a writer on published block {blocks[0]}")
            return Hold(self._ledger, blocks, is_writer=True)

    def pin_for_read(self, first: int, count: int) -> Hold:
        """Claim logical blocks first..first+count for a reader that may outlive the request."""
        with self._ledger.lock:
            return Hold(self._ledger, self._range(first, count), is_writer=False)

    def finish(self, reason: str) -> None:
        """Give up all blocks; idempotent, the first reason stays. Blocks with holds come back when those end."""
        ledger = self._ledger
        with ledger.lock:
            if self.finished:
                return
            self.finished = True
            self.reason = reason
            ledger.leases.discard(self)
            blocks, self.blocks = self.blocks, []
            blocks.reverse()
            ledger.release_after_steps(blocks)

    def _swap(self, i: int, canonical: int, duplicates: list[int]) -> None:
        block = self.blocks[i]
        assert canonical != block, "a block published twice at one place"
        self._ledger.acquire((canonical,), self._ledger.requests)
        self.blocks[i] = canonical
        self.num_replaced += 1
        duplicates.append(block)

    def _range(self, first: int, count: int) -> list[int]:
        self._require_live()
        if first < 0 or count < 0 or first + count > len(self.blocks):
            raise InternalError(f"blocks {first}..{first + count} of a lease of {len(self.blocks)}")
        return self.blocks[first : first + count]

    def _require_live(self) -> None:
        if self.finished:
            raise InternalError(f"lease used after its end ({self.reason})")
