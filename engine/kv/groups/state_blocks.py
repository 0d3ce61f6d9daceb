"""The block pool of a hybrid model: blocks as in any pool, and slots for recurrent states beside them.

    blocks      | b0 | b1 | b2 | b3 | b4 | b5 | b6 |        the keys and values of the attention layers
    snapshots             s1        s4             s7       the states after 2, 4 and 6 blocks, in slots 1, 4 and 7
    live state                                      L       the state after the newest computed token

A state is a function of all tokens before it, so a prefix of n blocks is *usable* only if there is a snapshot of the
state after n blocks. The longest usable prefix is a hit. The prefix index gets the blocks before snapshots
(usable_prefixes.py): it is a hint, and the pod's own match decides.

- A lease has one slot, the *live* state, from its first to its last step. It begins as a copy of the hit's snapshot, or
  of the zero state. If only the slot of this snapshot is left, the lease takes it, and needs no copy. A fork gets a
  copy; without a free slot it has none, and the scheduler computes it again.
- Snapshots are taken every `spacing` blocks, at the last boundary that the same prompt can match, where this prompt
  missed a longer hit, and from the end of the prompt on at each boundary. The last kind is for the next turn of a
  conversation; each of them makes the one before it the first to be evicted.
- A snapshot is registered under the hash of the block before it, when this block is published. It is evicted with this
  block, or alone when a slot is needed: the least recently used first. Live states are never evicted.

Steps and their copies use slots in the order in which they are planned, on one stream, so they need no fence. Other
pods do not wait for this stream. They write to a slot that no planned or launched step uses (`cover_transfer`), and a
pin keeps the slot until no byte can land any more. A pin also keeps the state of a prompt until it is read. The last
pin of a slot frees it if its lease has finished by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from common.errors import InternalError
from common.kv_groups import PageOrder
from common.types import PoolCounts
from engine.kv.blocks import BlockPool
from engine.kv.eviction import Retention
from engine.kv.groups.state_slots import NO_SLOT, Snapshot, StateSlots
from engine.kv.groups.usable_prefixes import UsablePrefixes
from engine.kv.lease import BlockCopy, Lease
from engine.kv.ledger import BlockPin, PageHolder, StepFence
from engine.kv.prefix_cache import PrefixCache
from engine.kv.tiers.host_tier import SavedPartialBlock

CACHE_OPTIONS = "policy", "max_pinned", "max_pinned_by_tenant"  # Options of a block pool that its prefix cache gets


class StatePrefixCache(PrefixCache):
    """A prefix cache that knows the blocks with a snapshot at their end."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        """`options` are those of PrefixCache."""
        super().__init__(num_blocks, **options)
        #: A snapshot counts as the only page of one window group with a tail of one block.
        self.announced = UsablePrefixes(self.hash_by_block, [1])

    def register(self, block: int, block_hash: bytes, parent: int) -> None:
        super().register(block, block_hash, parent)
        self.announced.add(block, parent)

    def on_snapshot(self, block_hash: bytes, present: bool) -> None:
        """Records that there is a snapshot of the state after a block, or that there is none any more."""
        self.announced.set_page(self.block_by_hash[block_hash], 0, present)

    def _unregister(self, block: int) -> bytes:
        self.announced.remove(block)
        return super()._unregister(block)


class StateBlockPool(BlockPool):
    """A block pool with slots for states. It has no host tier."""

    _cache: StatePrefixCache

    def __init__(
        self, num_blocks: int, block_size: int, *, num_states: int, spacing: int, state_pages: int = 1, **options: Any
    ) -> None:
        """Makes a pool with `num_states` slots for states; `options` are those of BlockPool.

        `spacing` is the number of blocks from one regular snapshot to the next, `state_pages` that of KVLayout.
        """
        assert num_states > 0
        assert spacing > 0
        super().__init__(num_blocks, block_size, **options)
        assert self.host_tier is None
        self.spacing = spacing
        self._cache = StatePrefixCache(num_blocks, **{key: options[key] for key in CACHE_OPTIONS if key in options})
        self.slots = StateSlots(num_states, self._cache.on_snapshot)
        self.zero_slot = num_states
        #: Copies of states that the next step makes before it computes, in order.
        self._copies: list[BlockCopy] = []
        self._state_pages = state_pages
        self._step = 0  # Number of the step that is being planned
        self._step_of: dict[StepFence, int] = {}  # Numbers of launched steps
        self._last_use = [-1] * (num_states + 1)  # Number of the newest step that uses each slot
        # The callbacks of the base class get all blocks; the prefix index gets those before snapshots.
        self._on_announced, self._on_withdrawn = self._on_stored, self._on_evicted
        self._on_stored, self._on_evicted = (lambda hashes: None), self._forget_snapshots

    def lease(
        self,
        hashes: Sequence[bytes],
        total_blocks: int,
        *,
        keep_free: int = 0,
        host: bool = False,
        saved_partial: SavedPartialBlock | None = None,
        retention: Retention | None = None,
    ) -> StateLease | None:
        """Leases total_blocks blocks and a live state: the longest usable prefix of `hashes`, then empty blocks."""
        assert saved_partial is None, "a pool with states has no host tier"
        with self.lock:
            known = self._cache.match(hashes[:total_blocks])
            count = self.slots.num_usable(hashes[: len(known)])
            cached, need = known[:count], total_blocks - count
            if not self._can_allocate(keep_free + need + self._cache.count_evictable(cached)):
                return None
            slot = self._take_slot(keep=hashes[count - 1] if count else None)
            if slot == NO_SLOT:
                return None
            self._acquire(cached, self._holds)
            self._cache.retain(cached, retention)
            lease = StateLease(self, cached + self._allocate(need), count, retention=retention)
            lease.slot, lease.hashes = slot, hashes
            lease.start_from(hashes, count, len(known))
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        with self.lock:
            return self.slots.num_usable(hashes[: len(self._cache.match(hashes))])

    def prefix_pages(self, num_blocks: int) -> int:
        return num_blocks + self._state_pages

    def lendable_blocks(self, hashes: Sequence[bytes]) -> int:
        return self.match_prefix(hashes)

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Pins for a reader the blocks of the prefix from block `first` on and its snapshot, or none of them."""
        with self.lock:
            known = self._cache.match(hashes)
            if not 0 <= first <= len(known) or not known or self.slots.num_usable(hashes[: len(known)]) < len(hashes):
                return None
            return StatePin(self, known[first:], self.slots.use(hashes[-1]), is_writer=False)

    def num_available(self) -> int:
        """Returns the number of blocks that a lease could get: none if no slot is left for its state."""
        with self.lock:
            has_slot = self.slots.has_available
        return super().num_available() if has_slot else 0

    def shortage(self) -> str:
        with self.lock:
            has_slot = self.slots.has_available
        return super().shortage() if has_slot else "all slots for recurrent states are in use (see num_states)"

    def state_counts(self) -> PoolCounts:
        """Returns the slots by state: `cached` have a snapshot, and only a writer's pin keeps `quarantined` ones."""
        slots = self.slots
        with self.lock:
            writers = {
                pin.slot for pin in self._pins if isinstance(pin, StatePin) and pin.is_writer and pin.holds_state
            }
            free, cached, quarantined = len(slots.free), len(slots.snapshots), len(writers & slots.pinned_only)
        leased = slots.num_slots - free - cached - quarantined
        return PoolCounts(free=free, cached=cached, leased=leased, quarantined=quarantined)

    def cached_hashes(self) -> list[bytes]:
        """Returns the hashes that the prefix index has to know, parents before children."""
        announced = self._cache.announced.is_announced
        with self.lock:
            return [key for key, block in self._cache.block_by_hash.items() if announced(block)]

    def announce(self) -> None:
        """Reports what the prefix index has to know since the last call; the lock is held."""
        self._cache.announced.report_changes(self._on_announced, self._on_withdrawn)

    def _forget_snapshots(self, evicted: list[bytes]) -> None:
        self.slots.forget(evicted)
        self.announce()

    def _take_slot(self, keep: bytes | None = None, *, idle: bool = False) -> int:
        """Returns a slot, see StateSlots.allocate; with `idle` one that no step uses. The lock is held."""
        slot = self.slots.allocate(keep, self.is_idle if idle else None)
        self.announce()  # its snapshot may be gone
        return slot

    def take_copies(self, leases: Sequence[StateLease]) -> tuple[BlockCopy, ...]:
        """Returns, once, the copies of states that the step being planned has to make first, in this order.

        `leases` are those of the step's sequences.
        """
        with self.lock:
            copies, self._copies = tuple(self._copies), []
            for slot in (*(slot for copy in copies for slot in copy), *(lease.slot for lease in leases)):
                self._last_use[slot] = self._step
            return copies

    def begin_step(self) -> StepFence:
        with self.lock:
            fence = StepFence(self)
            self._step_of = {step: number for step, number in self._step_of.items() if step in self._fences}
            self._step_of[fence] = self._step
            self._step += 1
            return fence

    def pages_of_state(self, slot: int) -> range:
        """Returns the numbers of a slot's rows in the KV pool, which follow all blocks (kv_pool.py)."""
        first = self.num_blocks + 2 + slot * self._state_pages
        return range(first, first + self._state_pages)

    def is_idle(self, slot: int) -> bool:
        """Returns whether no step that is planned or launched, and no copy of the next one, uses a slot."""
        oldest = min((self._step_of[fence] for fence in self._fences), default=self._step)
        return self._last_use[slot] < oldest and not any(slot in copy for copy in self._copies)

    def drop_copies_to(self, slot: int) -> None:
        """Forgets the copies to a slot that no step has used since. So none of the other copies begins there."""
        self._copies = [copy for copy in self._copies if copy.target != slot]

    def _inconsistencies(self) -> list[str]:
        slots = self.slots
        owned = [slot for lease in self._leases for slot in require_states(lease).all_slots()]
        used = sorted([*slots.free, *slots.snapshots.values(), *slots.pinned_only, *owned])
        defects = [] if used == list(range(slots.num_slots)) else [f"{used} are the {slots.num_slots} slots of states"]
        orphans = sum(block_hash not in self._cache.block_by_hash for block_hash in slots.snapshots)
        defects += [f"{orphans} snapshots have no cached block"] if orphans else []
        pins = Counter(pin.slot for pin in self._pins if isinstance(pin, StatePin) and pin.holds_state)
        defects += [] if slots.pins == pins else [f"the slots of states have the pins {slots.pins}, not {pins}"]
        return super()._inconsistencies() + defects


class StateLease(Lease):
    """The blocks and the live state of one sequence."""

    _pool: StateBlockPool

    def __init__(
        self,
        pool: BlockPool,
        blocks: list[int],
        num_registered: int,
        *,
        host_blocks: int = 0,
        retention: Retention | None = None,
    ) -> None:
        super().__init__(pool, blocks, num_registered, host_blocks=host_blocks, retention=retention)
        self.slot = NO_SLOT  # The live state; NO_SLOT for a fork that found no free slot
        self.hashes: Sequence[bytes] = ()  # Hashes of the blocks that a cache may supply
        self._missed = 0  # Number of first blocks that were cached, but had no snapshot; 0 for none
        self._planned: list[tuple[int, int, bool]] = []  # Snapshots to register: blocks, slot, whether it is a tail
        self._tail: bytes | None = None  # Hash of the newest snapshot after the prompt

    @property
    def is_complete(self) -> bool:
        return self.slot != NO_SLOT

    def start_from(self, hashes: Sequence[bytes], count: int, known: int) -> None:
        """Makes the live state that after the first `count` blocks; `known` blocks are cached. The lock is held."""
        pool = self._pool
        if not count:
            pool._copies.append(BlockCopy(pool.zero_slot, self.slot))
        elif hashes[count - 1] in pool.slots.snapshots:  # else the lease has taken the slot of this snapshot
            pool._copies.append(BlockCopy(pool.slots.use(hashes[count - 1]), self.slot))
        self._missed = known if known > count else 0

    def plan_snapshots(self, start: int, end: int, prefill_len: int) -> tuple[Snapshot, ...]:
        """Returns the snapshots of a step that computes the tokens start..end, ascending; fewer if slots are short.

        `prefill_len`: tokens that are computed before the sequence decodes.
        """
        pool, size = self._pool, self._pool.block_size
        first, last = start // size + 1, end // size
        if first > last or not pool._keeps_prefixes:
            return ()
        boundaries = {(prefill_len - 1) // size, self._missed}
        boundaries |= set(range(-(-first // pool.spacing) * pool.spacing, last + 1, pool.spacing))
        tail = last if end >= prefill_len else 0
        kept = {blocks for blocks in boundaries if first <= blocks <= last}
        snapshots: list[Snapshot] = []
        with pool.lock:
            for blocks in sorted(kept | {tail} - {0}):
                slot = pool._take_slot()
                if slot != NO_SLOT:
                    pool._last_use[slot] = pool._step
                    self._planned.append((blocks, slot, blocks == tail and blocks not in kept))
                    snapshots.append(Snapshot(blocks * size, slot))
        return tuple(snapshots)

    def publish(self, hashes: Sequence[bytes]) -> None:
        super().publish(hashes)
        slots = self._pool.slots
        with self._pool.lock:
            while self._planned and self._planned[0][0] <= self.num_published:
                blocks, slot, is_tail = self._planned.pop(0)
                block_hash = hashes[blocks - 1]
                slots.register(block_hash, slot)
                if self._tail is not None:
                    slots.demote(self._tail)
                self._tail = block_hash if is_tail else None
            self._pool.announce()

    def publish_pulled(self, hashes: Sequence[bytes], order: PageOrder, num_pages: int) -> int:
        """Also makes a state that has arrived a snapshot. The lease may only be finished after that."""
        count, pool = super().publish_pulled(hashes, order, num_pages), self._pool
        with pool.lock:
            if count == order.num_blocks and num_pages == order.num_pages and not pool.slots.pins[self.slot]:
                pool.slots.register(hashes[-1], self.slot)
                self.slot = NO_SLOT
                pool.announce()
        return count

    def rematch(self, hashes: Sequence[bytes]) -> int:
        pool = self._pool
        with pool.lock:
            self._require_live()
            known = pool._cache.match(hashes[: len(self.blocks)])
            count = pool.slots.num_usable(hashes[: len(known)])
            if count <= self.cached_blocks or any(pool._writers[b] for b in self.blocks[self.num_published : count]):
                return self.cached_blocks
            replaced = [self._replace(i, known[i]) for i in range(self.num_published, count)]
            pool._cache.retain(known[self.num_published : count], self.retention)
            self.num_published = self.cached_blocks = count
            self.start_from(hashes, count, len(known))
            pool._release_after_steps(replaced)
            return count

    def fork(self, shared: int, *, spare: int = 0) -> Lease:
        other = require_states(super().fork(shared, spare=spare))
        with self._pool.lock:
            other.slot = self._pool._take_slot()
            if other.is_complete:
                self._pool._copies.append(BlockCopy(self.slot, other.slot))
        return other

    def cover_transfer(self, order: PageOrder) -> bool:
        """Gives the lease a slot that no step uses, for the state that another pod writes.

        Also takes the cached blocks that have no snapshot: the state comes from the other pod, so it needs none.
        Returns False if there is no such slot; the lease is of no use then. Nothing may have been computed in it yet.
        """
        pool = self._pool
        with pool.lock:
            self._require_live()
            pool.drop_copies_to(self.slot)
            if not pool.is_idle(self.slot):
                slot = pool._take_slot(idle=True)
                if slot == NO_SLOT:
                    return False
                pool.slots.release([self.slot])
                self.slot = slot
            known = pool._cache.match(self.hashes[: len(self.blocks)])
            if not any(pool._writers[block] for block in self.blocks[self.num_published : len(known)]):
                replaced = [self._replace(i, known[i]) for i in range(self.num_published, len(known))]
                pool._cache.retain(known[self.num_published :], self.retention)
                self.num_published = self.cached_blocks = max(len(known), self.num_published)
                pool._release_after_steps(replaced)
            return True

    def _pin(self, blocks: list[int], end: int, order: PageOrder | None, *, is_writer: bool) -> BlockPin:
        if order is None or not order.state_pages or end < order.num_blocks:
            return super()._pin(blocks, end, order, is_writer=is_writer)
        return StatePin(self._pool, blocks, self.slot, is_writer=is_writer)

    def all_slots(self) -> list[int]:
        """Returns all slots of the lease."""
        return [slot for slot in (self.slot, *(slot for _, slot, _ in self._planned)) if slot != NO_SLOT]

    def _clear(self) -> None:
        super()._clear()
        self._pool.drop_copies_to(self.slot)
        self._pool.slots.release(self.all_slots())
        self.slot, self._planned = NO_SLOT, []


class StatePin(BlockPin):
    """A pin on blocks and on the recurrent state behind them, which counts as the last of its `blocks`."""

    __slots__ = ("slot",)

    def __init__(self, pool: StateBlockPool, blocks: Sequence[int], slot: int, *, is_writer: bool) -> None:
        super().__init__(pool, blocks, is_writer=is_writer)
        self.slot = slot
        self.blocks = (*self.blocks, *pool.pages_of_state(slot))
        self.pinned = set(self.blocks)
        pool.slots.pins[slot] += 1

    @property
    def holds_state(self) -> bool:
        """Whether a page of the state is not released yet."""
        return max(self.pinned, default=NO_SLOT) >= self._ledger.num_blocks

    def release_locked(self, released: Collection[int] | None = None) -> None:
        released = self.pinned if released is None else released
        pages = {page for page in released if page >= self._ledger.num_blocks}
        held = self.holds_state
        self.pinned = self.pinned.difference(pages)
        if held and not self.holds_state:
            assert isinstance(self._ledger, StateBlockPool)
            self._ledger.slots.unpin(self.slot)
        super().release_locked([block for block in released if block not in pages])
        if not self.pinned:
            self._ledger._pins.discard(self)


def require_states(lease: PageHolder | None) -> StateLease:
    """Returns the lease of a pool with states, as such."""
    if not isinstance(lease, StateLease):
        raise InternalError("the lease is of a pool without recurrent states")
    return lease
