"""The lease of a sequence on blocks of a pool, which makes it. ledger.py has the states of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import BatonError, InternalError
from common.kv_groups import PageOrder
from engine.kv.eviction import Retention
from engine.kv.ledger import BlockLedger, BlockPin
from engine.kv.tiers.host_tier import HostLoad


class BlockCopy(NamedTuple):
    """A copy of the bytes of one physical block to another."""

    source: int
    target: int


class Lease:
    """The blocks of one sequence, from allocation to one `finish`.

        0        cached_blocks - host_blocks     cached_blocks                 len(blocks)
        | found in the pool | loaded from the host | (saved partial block) | empty |      when it is made

        0                 num_published                     cow_index          len(blocks)
        | published       | computed or being written | last shared block | not shared |  later

    `blocks` grows and shrinks at the end; `num_replaced` counts the entries that were replaced by another block.
    """

    def __init__(
        self,
        pool: BlockLedger,
        blocks: list[int],
        num_registered: int,
        *,
        host_blocks: int = 0,
        retention: Retention | None = None,
    ) -> None:
        """Made by the pool or by `fork`, under the lock, with one hold on each block; the first ones are registered."""
        self.blocks = blocks  # Physical blocks in logical order; empty once the lease has finished
        self.cached_blocks = num_registered + host_blocks  # First blocks, which came with their KV, from pool or host
        self.host_blocks = host_blocks  # The last blocks of `cached_blocks`, which came from the host
        self.cow_index = -1  # Last block shared by a fork, not to be written before `copy_on_write`; -1 for none
        #: The copy from the host. No block of the lease may be used before it is done; the scheduler removes it then.
        self.host_load: HostLoad | None = None
        self.restored_partial = False  # A saved partial block follows the cached ones
        self.num_published = num_registered  # First blocks, which have a registered hash
        self.finished = False
        self.reason = ""  # Why the lease finished
        self.num_replaced = 0
        self.retention = retention  # Of the blocks that it publishes
        self._pool = pool
        pool._leases.add(self)

    @property
    def is_complete(self) -> bool:
        """Whether it has all that a step needs. A fork may lack its recurrent state (state_blocks.py)."""
        return True

    @property
    def host_loading(self) -> bool:
        """Whether blocks are still being copied from the host."""
        return self.host_load is not None and not self.host_load.done

    @property
    def host_error(self) -> BatonError | None:
        """Why the blocks from the host are useless, if they are."""
        return None if self.host_load is None else self.host_load.error

    def grow(self, n: int = 1) -> bool:
        """Appends n blocks; False, and no change, if the pool has too few."""
        pool = self._pool
        with pool.lock:
            self._require_live()
            if not pool._can_allocate(n):
                return False
            self.blocks += pool._allocate(n)
            return True

    def trim(self, count: int) -> None:
        """Releases the blocks after the first `count`; they must be unpublished, and their KV not needed."""
        with self._pool.lock:
            self._require_live()
            if count < self.num_published:
                raise InternalError(f"cannot trim a lease to {count} blocks: {self.num_published} are published")
            surplus = self.blocks[count:]
            del self.blocks[count:]
            self._pool._release_after_steps(surplus[::-1])

    def fork(self, shared: int, *, spare: int = 0) -> Lease:
        """Returns another lease that shares the first `shared` blocks and takes the last `spare` blocks of this one.

        The KV of the shared blocks is complete, except in the last one. If not all shared blocks are published,
        both leases must `copy_on_write` the last one before they write to it.
        """
        pool = self._pool
        with pool.lock:
            self._require_live()
            if not self.num_published <= shared <= len(self.blocks) - spare:
                raise InternalError(
                    f"cannot fork {shared} blocks with {spare} spare ones from a lease of {len(self.blocks)} blocks, "
                    f"{self.num_published} of them published"
                )
            lead = self.blocks[:shared]
            moved = [self.blocks.pop() for _ in range(spare)]
            pool._acquire(lead, pool._holds)
            other = type(self)(pool, lead + moved, self.num_published, retention=self.retention)
            other.cached_blocks, other.host_blocks = self.cached_blocks, self.host_blocks
            other.host_load = self.host_load
            if shared > self.num_published:
                self.cow_index = other.cow_index = shared - 1
            return other

    def pages_of(self, index: int) -> list[int]:
        """Returns the physical blocks of a logical block: one, or one per KV group."""
        return [self.blocks[index]]

    def all_pages(self) -> list[int]:
        """Returns all physical blocks, of all KV groups."""
        return self.blocks

    def cover(self, start: int, end: int) -> bool:
        """Prepares KV groups with windows for a step that computes the tokens start..end; there are none here."""
        return True

    def cover_transfer(self, order: PageOrder) -> bool:
        """Prepares KV groups with windows for KV that another pod sends in this order; there are none here."""
        return True

    def copy_on_write(self) -> tuple[BlockCopy, ...] | None:
        """Replaces the shared block at `cow_index`, so that the step being planned may write there.

        Returns the copies that the step has to do first, one per KV group; source and target are equal if no other
        lease uses the block any more. Returns None, and changes nothing, if this needs blocks that are not available.
        """
        pool = self._pool
        with pool.lock:
            self._require_live()
            index = self.cow_index
            block = self.blocks[index]
            if not pool._is_shared(block):
                self.cow_index = -1
                return (BlockCopy(block, block),)
            if index < len(self.blocks) - 1:
                target = self.blocks.pop()
            elif pool._can_allocate(1):
                (target,) = pool._allocate(1)
            else:
                return None
            self.blocks[index] = target
            self.cow_index = -1
            self.num_replaced += 1
            pool._copy_sources.append(block)
            return (BlockCopy(block, target),)

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Registers the first len(hashes) blocks; their KV is complete.

        If a hash is registered already, the registered block replaces this one. Publishing stops before a block
        that has a writer, which cannot be complete; a later call goes on. Nothing is published after a failed load.
        """
        pool = self._pool
        with pool.lock:
            self._require_live()
            if self.host_error is not None or not pool._keeps_prefixes:
                return
            if len(hashes) > len(self.blocks):
                raise InternalError(f"{len(hashes)} hashes for a lease of {len(self.blocks)} blocks")
            stored: list[bytes] = []
            duplicates: list[int] = []
            for i in range(self.num_published, len(hashes)):
                block, block_hash = self.blocks[i], hashes[i]
                if pool._writers[block]:
                    break
                canonical = pool._cache.block_by_hash.get(block_hash)
                if canonical is None:
                    pool._cache.register(block, block_hash, self.blocks[i - 1] if i else -1)
                    pool._cache.retain([block], self.retention)
                    stored.append(block_hash)
                elif canonical != block:  # equal if a fork of this lease has registered it
                    duplicates.append(self._replace(i, canonical))
                    pool._cache.retain([canonical], self.retention)
                self.num_published = i + 1
            pool._release_after_steps(duplicates)
            if stored:
                pool._on_stored(stored)

    def publish_pulled(self, hashes: Sequence[bytes], order: PageOrder, num_pages: int) -> int:
        """Registers the blocks of a pulled prefix whose first `num_pages` pages are complete; returns their number.

        `order` is that of the pages, and `hashes` has one hash for each of its blocks.
        """
        count = order.num_blocks if num_pages == order.num_pages else order.block_at(num_pages)
        if count is not None:
            self.publish(hashes[:count])
        return self.num_published

    def rematch(self, hashes: Sequence[bytes]) -> int:
        """Replaces the first blocks by blocks that were registered after the lease was made; returns cached_blocks.

        `hashes` are the hashes of the sequence's matchable blocks. Nothing may have been computed in the lease yet.
        """
        pool = self._pool
        with pool.lock:
            self._require_live()
            duplicates: list[int] = []
            for i in range(self.num_published, min(len(hashes), len(self.blocks))):
                canonical = pool._cache.block_by_hash.get(hashes[i])
                if canonical is None or pool._writers[self.blocks[i]]:
                    break
                duplicates.append(self._replace(i, canonical))
                pool._cache.retain([canonical], self.retention)
                self.num_published = self.cached_blocks = i + 1
            pool._release_after_steps(duplicates)
            return self.cached_blocks

    def pin_for_write(self, first: int, count: int, order: PageOrder | None = None) -> BlockPin:
        """Pins logical blocks first..first+count for a writer of bytes; none of them may be published.

        `order` is that of the transfer. The pin has the pages of these blocks in this order, and behind the last block
        the pages of a recurrent state.
        """
        with self._pool.lock:
            blocks = self._pages(first, count, order)
            if first < self.num_published:
                raise InternalError(f"cannot pin published block {blocks[0]} for a writer")
            return self._pin(blocks, first + count, order, is_writer=True)

    def pin_for_read(self, first: int, count: int, order: PageOrder | None = None) -> BlockPin:
        """Pins logical blocks first..first+count for a reader that may outlive the request, as `pin_for_write`."""
        with self._pool.lock:
            return self._pin(self._pages(first, count, order), first + count, order, is_writer=False)

    def finish(self, reason: str) -> None:
        """Releases all blocks. Idempotent, the first reason stays. Pinned blocks return when their pins end."""
        pool = self._pool
        with pool.lock:
            if self.finished:
                return
            self.finished, self.reason = True, reason
            pool._leases.discard(self)
            pool._release_after_steps(self.all_pages()[::-1])
            self._clear()

    def _clear(self) -> None:
        self.blocks = []

    def _replace(self, i: int, canonical: int) -> int:
        """Replaces the block at index i by the registered block with the same KV; returns the former."""
        block = self.blocks[i]
        assert canonical != block, "a block published twice at one place"
        self._pool._acquire((canonical,), self._pool._holds)
        self.blocks[i] = canonical
        self.num_replaced += 1
        return block

    def _pages(self, first: int, count: int, order: PageOrder | None) -> list[int]:
        """Returns the pages of logical blocks for a transfer: the blocks, because there are no KV groups here."""
        return self._range(first, count)

    def _pin(self, blocks: list[int], end: int, order: PageOrder | None, *, is_writer: bool) -> BlockPin:
        """Pins the pages of logical blocks up to `end` for a transfer; the lock is held."""
        return BlockPin(self._pool, blocks, is_writer=is_writer)

    def _range(self, first: int, count: int) -> list[int]:
        self._require_live()
        if first < 0 or count < 0 or first + count > len(self.blocks):
            raise InternalError(f"blocks {first}..{first + count} are outside a lease of {len(self.blocks)} blocks")
        return self.blocks[first : first + count]

    def _require_live(self) -> None:
        if self.finished:
            raise InternalError(f"the lease was used after its end ({self.reason})")
