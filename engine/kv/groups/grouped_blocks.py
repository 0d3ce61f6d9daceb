"""The block pool of a model with KV groups: a block of tokens is one page of the full group and one per window group.

    Lease.blocks      | p0 | p1 | p2 | p3 | p4 | p5 |      the pages of the full group, as in a pool without groups
    window_tables[0]  |  - |  - |  - | p6 | p7 |    |      first_live[0] = 3; the next `cover` adds a page for block 5
    window_tables[1]  |  - |  - |  - | p8 | p9 |    |

common/kv_groups.py has the rules. Full pages follow the rules of engine/kv/ledger.py. A window page of a block is
registered in the prefix cache under the block's hash and the number of its group, without a parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from common.block_hash import HASH_BYTES
from common.errors import InternalError
from common.kv_groups import PageOrder, blocks_that_fit, first_live_block, tail_blocks
from common.kv_layout import KVLayout
from engine.kv.blocks import BlockPool
from engine.kv.eviction import Retention
from engine.kv.groups.usable_prefixes import UsablePrefixes
from engine.kv.lease import BlockCopy, Lease
from engine.kv.ledger import BlockPin
from engine.kv.prefix_cache import PrefixCache
from engine.kv.tiers.host_tier import SavedPartialBlock

NO_PAGE = -1
HOST_COPY_BYTES = 32 << 20  # Bytes of one copy to the host. It takes 0.6 ms over PCIe, and a load may wait that long.


class GroupedPrefixCache(PrefixCache):
    """A prefix cache with window pages beside the full ones."""

    def __init__(self, num_blocks: int, tails: Sequence[int]) -> None:
        """`tails` as in `num_usable`."""
        super().__init__(num_blocks)
        self.announced = UsablePrefixes(self.hash_by_block, tails)
        self._suffixes = [bytes([group]) for group in range(len(tails))]
        self._left_window = bytearray(num_blocks)  # 1 for pages that left a window and were never matched

    def key(self, block_hash: bytes, group: int) -> bytes:
        """Returns the key of a block's page of a window group."""
        return block_hash + self._suffixes[group]

    def num_usable(self, hashes: Sequence[bytes], tails: Sequence[int]) -> int:
        """Returns the largest usable number of first blocks. The full pages of all `hashes` are registered.

        `tails` has for each window group the blocks before a boundary that must be registered.
        """
        count = len(hashes)
        group = 0
        while count and group < len(tails):
            suffix, group = self._suffixes[group], group + 1
            for i in range(count - 1, max(0, count - tails[group - 1]) - 1, -1):
                if hashes[i] + suffix not in self.block_by_hash:
                    count, group = i, 0  # each longer prefix would need this page too
                    break
        return count

    def demote(self, page: int) -> None:
        """Makes a page in use the first to be evicted once it is idle."""
        self._left_window[page] = 1

    def promote(self, page: int) -> None:
        """Takes back `demote`."""
        self._left_window[page] = 0

    def register(self, block: int, block_hash: bytes, parent: int) -> None:
        self._left_window[block] = 0
        super().register(block, block_hash, parent)
        if len(block_hash) > HASH_BYTES:
            self.announced.set_page(self.block_by_hash[block_hash[:HASH_BYTES]], block_hash[HASH_BYTES], True)
        else:
            self.announced.add(block, parent)

    def mark_idle(self, blocks: Sequence[int], is_saved: Callable[[bytes], bool] | None) -> list[int]:
        unregistered, order = super().mark_idle(blocks, is_saved), self.evictable
        assert isinstance(order, OrderedDict), "a pool with groups has one order of eviction"
        for block in blocks:
            if self._left_window[block] and block in order:
                order.move_to_end(block, last=False)
        return unregistered

    def evict_pages(self) -> list[int]:
        """Unregisters the first evictable page; with a full page also the window pages of its hash.

        Returns the idle ones of these pages.
        """
        page = next(iter(self.evictable))
        key = self.hash_by_block[page]
        assert key is not None
        if len(key) > HASH_BYTES:
            self.announced.set_page(self.block_by_hash[key[:HASH_BYTES]], key[HASH_BYTES], False)
            self.evict()
            return [page]
        self.announced.remove(page)
        self.evict()
        pages = [page]
        for group in range(len(self._suffixes)):
            other = self.block_by_hash.pop(self.key(key, group), None)
            if other is None:
                continue
            self.hash_by_block[other] = None
            if self.idle[other]:  # else a reader has it; it becomes free when the reader ends
                del self.evictable[other]
                self.idle[other] = 0
                self.num_idle -= 1
                pages.append(other)
        return pages

    def inconsistencies(self) -> list[str]:
        orphans = sum(
            len(key) > HASH_BYTES and key[:HASH_BYTES] not in self.block_by_hash for key in self.block_by_hash
        )
        defects = [f"{orphans} window pages are cached without the full page of their hash"] if orphans else []
        return super().inconsistencies() + defects


class GroupedBlockPool(BlockPool):
    """A block pool for groups; `num_blocks` counts pages. It has no host tier."""

    _cache: GroupedPrefixCache

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int], **callbacks: Any) -> None:
        """`windows` has the window of each window group."""
        assert windows
        super().__init__(num_blocks, block_size, **callbacks)
        self.windows = tuple(windows)
        self.pages_per_block = 1 + len(windows)
        self.tails = [tail_blocks(window, block_size) for window in windows]
        self._cache = GroupedPrefixCache(num_blocks, self.tails)
        # The callbacks of the base class get all full pages; the prefix index gets those before usable boundaries.
        self._on_announced, self._on_withdrawn = self._on_stored, self._on_evicted
        self._on_stored = self._on_evicted = lambda hashes: None

    def pages_for(self, num_tokens: int) -> int:
        blocks = super().pages_for(num_tokens)
        return blocks + sum(self._window_pages_for(blocks, tail) for tail in self.tails)

    def _window_pages_for(self, num_blocks: int, tail: int) -> int:
        """Returns the most pages of a window group that a sequence of so many blocks needs at once."""
        return min(num_blocks, tail + 2)  # before the newest boundary, the block being filled and the next one

    def blocks_that_fit(self, num_pages: int) -> int:
        return blocks_that_fit(num_pages, self.tails)

    def lease(
        self,
        hashes: Sequence[bytes],
        total_blocks: int,
        *,
        keep_free: int = 0,
        host: bool = False,
        saved_partial: SavedPartialBlock | None = None,
        retention: Retention | None = None,
    ) -> GroupedLease | None:
        """Leases the full pages of total_blocks blocks: the longest usable prefix of `hashes`, then empty ones.

        The lease gets the window pages of the prefix's end. `Lease.cover` allocates the others. A retention has no
        effect.
        """
        assert saved_partial is None, "a pool with groups has no host tier"
        with self.lock:
            full = self._cache.match(hashes[:total_blocks])
            cached = full[: self._cache.num_usable(hashes[: len(full)], self.tails)]
            count = len(cached)
            tables = self._tail_tables(hashes, count)
            tail_pages = [page for table in tables for page in table if page != NO_PAGE]
            need = total_blocks - count
            room = keep_free * self.pages_per_block + need + self._cache.count_evictable(cached)
            for tail, table in zip(self.tails, tables, strict=True):
                # Window pages to come, and idle matched ones, which are released as the window moves on: both together
                # never more than a sequence without a prefix needs. Else a prompt that fits would wait forever.
                taken = min(need, tail + 2) + self._cache.count_evictable(table)
                room += min(taken, self._window_pages_for(total_blocks, tail))
            if not self._can_allocate(room):
                return None
            self._acquire(cached, self._holds)
            self._acquire(tail_pages, self._holds)
            lease = GroupedLease(self, cached + self._allocate(need), count)
            lease.set_matched(tables)
            lease.kept_boundaries = (len(full), len(hashes))
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        with self.lock:
            return self._cache.num_usable(hashes[: len(self._cache.match(hashes))], self.tails)

    def lendable_blocks(self, hashes: Sequence[bytes]) -> int:
        return self.match_prefix(hashes)

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Pins for a reader the pages of the prefix from page number `first` on (PageOrder), or none of them."""
        count = len(hashes)
        block = self._prefix_order(count).block_at(first)
        with self.lock:
            full = self._cache.match(hashes)
            if block is None or len(full) < count or self._cache.num_usable(hashes, self.tails) < count:
                return None
            tables = [full, *self._tail_tables(hashes, count)]
            pages = [table[i] for i in range(block, count) for table in tables if table[i] != NO_PAGE]
            return BlockPin(self, pages, is_writer=False) if pages else None

    def prefix_pages(self, num_blocks: int) -> int:
        return self._prefix_order(num_blocks).num_pages

    def _prefix_order(self, num_blocks: int) -> PageOrder:
        """Returns PageOrder.of_prefix of the pool's layout."""
        return PageOrder(num_blocks, tuple(max(0, num_blocks - tail) for tail in self.tails))

    def cached_hashes(self) -> list[bytes]:
        """Returns the hashes that the prefix index has to know, parents before children."""
        announced = self._cache.announced.is_announced
        with self.lock:
            return [
                key for key, page in self._cache.block_by_hash.items() if len(key) == HASH_BYTES and announced(page)
            ]

    def announce(self) -> None:
        """Reports what the prefix index has to know since the last call; the lock is held."""
        self._cache.announced.report_changes(self._on_announced, self._on_withdrawn)

    def _tail_tables(self, hashes: Sequence[bytes], count: int) -> list[list[int]]:
        """Returns the block table of each window group for a usable prefix of `count` blocks."""
        tables: list[list[int]] = []
        for group, tail in enumerate(self.tails):
            first = max(0, count - tail)
            pages = [self._cache.block_by_hash[self._cache.key(h, group)] for h in hashes[first:count]]
            tables.append([NO_PAGE] * first + pages)
        return tables

    def _evict(self, count: int) -> list[int]:
        """Evicts at least `count` pages; returns this many, the others are free."""
        evicted: list[int] = []
        while len(evicted) < count:
            evicted += self._cache.evict_pages()
        self.announce()
        self._free += evicted[count:]
        return evicted[:count]


class GroupedLease(Lease):
    """The pages of one sequence. `blocks` are those of the full group."""

    _pool: GroupedBlockPool

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
        #: For each window group, the page of each block up to the last covered one; NO_PAGE before `first_live`.
        self.window_tables: list[list[int]] = [[] for _ in self._pool.windows]
        self.first_live = [0] * len(self.window_tables)  # The first block with a page, for each window group
        #: Block boundaries that prompts will probably match: the end of this one, and the end of the full pages that it
        #: has matched, where window pages were missing. The window pages before them are evicted in the usual order.
        self.kept_boundaries: tuple[int, ...] = ()

    def set_matched(self, tables: list[list[int]]) -> None:
        """Sets the tables of a matched prefix, whose pages are held; the lock is held."""
        self.window_tables = tables
        for group, table in enumerate(tables):
            self.first_live[group] = table.count(NO_PAGE)
            for page in table[self.first_live[group] :]:
                self._pool._cache.promote(page)

    def cover(self, start: int, end: int) -> bool:
        """Gives the window groups pages for a step that computes the tokens start..end, and releases older pages.

        A page is released if no later query sees it and its block is published. Returns False, without new pages, if
        too few are available. No token before `start` may be computed again in this lease.
        """
        pool, size = self._pool, self._pool.block_size
        with pool.lock:
            self._require_live()
            released: list[int] = []
            missing: list[int] = []
            last = -(-end // size)
            for group, (table, window) in enumerate(zip(self.window_tables, pool.windows, strict=True)):
                first = min(first_live_block(start, window, size), self.num_published)
                for i in range(self.first_live[group], min(first, len(table))):
                    kept = any(b - pool.tails[group] <= i < b for b in self.kept_boundaries)
                    if kept:
                        pool._cache.promote(table[i])  # another sequence with the same block may not keep it
                    elif i >= self.cached_blocks:
                        pool._cache.demote(table[i])
                    released.append(table[i])
                    table[i] = NO_PAGE
                self.first_live[group] = max(first, self.first_live[group])
                assert self.first_live[group] <= len(table), "window pages are allocated without gaps"
                missing.append(max(0, last - len(table)))
            pool._release_after_steps(released)
            total = sum(missing)
            if not total:
                return True
            if not pool._can_allocate(total):
                return False
            pages = pool._allocate(total)
            for table, count in zip(self.window_tables, missing, strict=True):
                table.extend(pages[:count])
                del pages[:count]
            return True

    def cover_transfer(self, order: PageOrder) -> bool:
        """Gives the window groups the pages that another pod writes, and releases older ones.

        Returns False, without new pages, if too few are available. Nothing may have been computed in the lease yet.
        """
        pool = self._pool
        with pool.lock:
            self._require_live()
            missing: list[int] = []
            for group, (table, start) in enumerate(zip(self.window_tables, order.window_starts, strict=True)):
                dead = range(self.first_live[group], min(start, len(table)))
                pool._release([table[i] for i in dead], pool._holds)  # no step has used them for this lease
                table[dead.start : dead.stop] = [NO_PAGE] * len(dead)
                table.extend([NO_PAGE] * (start - len(table)))
                self.first_live[group] = max(start, self.first_live[group])
                missing.append(order.num_blocks - len(table))
            if not pool._can_allocate(sum(missing)):
                return False
            pages = pool._allocate(sum(missing))
            for table, count in zip(self.window_tables, missing, strict=True):
                table.extend(pages[:count])
                del pages[:count]
            return True

    def _pages(self, first: int, count: int, order: PageOrder | None) -> list[int]:
        pages: list[int] = []
        window_starts = () if order is None else order.window_starts
        for i, page in enumerate(self._range(first, count), first):
            pages.append(page)
            for table, first_live, start in zip(self.window_tables, self.first_live, window_starts, strict=True):
                if i >= start:
                    if not first_live <= i < len(table):
                        raise InternalError(f"block {i} has no page of a window group, but a transfer needs it")
                    pages.append(table[i])
        return pages

    def pages_of(self, index: int) -> list[int]:
        tables = [table for table in self.window_tables if index < len(table) and table[index] != NO_PAGE]
        return [self.blocks[index], *(table[index] for table in tables)]

    def all_pages(self) -> list[int]:
        # `finish` releases them from last to first: of an idle sequence, the end of the full group is evicted first.
        return [*self._window_pages(0), *self.blocks]

    def trim(self, count: int) -> None:
        super().trim(count)
        with self._pool.lock:
            surplus = self._window_pages(count)
            for group, table in enumerate(self.window_tables):
                del table[count:]
                self.first_live[group] = min(self.first_live[group], count)
            self._pool._release_after_steps(surplus)

    def fork(self, shared: int, *, spare: int = 0) -> Lease:
        other = super().fork(shared, spare=spare)
        assert isinstance(other, GroupedLease)
        with self._pool.lock:
            other.window_tables = [table[:shared] for table in self.window_tables]
            other.first_live = [min(first, shared) for first in self.first_live]
            other.kept_boundaries = self.kept_boundaries
            self._pool._acquire(other._window_pages(0), self._pool._holds)
        return other

    def copy_on_write(self) -> tuple[BlockCopy, ...] | None:
        pool = self._pool
        with pool.lock:
            self._require_live()
            index = self.cow_index
            shared = [page for page in self.pages_of(index) if pool._is_shared(page)]
            spare = bool(shared) and shared[0] == self.blocks[index] and index < len(self.blocks) - 1
            count = len(shared) - spare
            if not pool._can_allocate(count):
                return None
            targets = pool._allocate(count)
            if spare:
                targets.insert(0, self.blocks.pop())
            target_of = dict(zip(shared, targets, strict=True))
            copies = tuple(BlockCopy(page, target_of.get(page, page)) for page in self.pages_of(index))
            for table in (self.blocks, *self.window_tables):
                if index < len(table):
                    table[index] = target_of.get(table[index], table[index])
            self.cow_index = -1
            self.num_replaced += bool(shared)
            pool._copy_sources += shared
            return copies

    def publish(self, hashes: Sequence[bytes]) -> None:
        first = self.num_published
        super().publish(hashes)
        pool, cache = self._pool, self._pool._cache
        with pool.lock:
            duplicates: list[int] = []
            for group, table in enumerate(self.window_tables):
                for i in range(max(first, self.first_live[group]), min(self.num_published, len(table))):
                    page, key = table[i], cache.key(hashes[i], group)
                    if pool._writers[page]:
                        continue
                    canonical = cache.block_by_hash.get(key)
                    if canonical is None:
                        cache.register(page, key, -1)
                    elif canonical != page:
                        pool._acquire((canonical,), pool._holds)
                        table[i] = canonical
                        self.num_replaced += 1
                        duplicates.append(page)
            pool.announce()
            pool._release_after_steps(duplicates)

    def rematch(self, hashes: Sequence[bytes]) -> int:
        pool, cache = self._pool, self._pool._cache
        with pool.lock:
            self._require_live()
            full = cache.match(hashes[: len(self.blocks)])
            count = cache.num_usable(hashes[: len(full)], pool.tails) if len(full) > self.cached_blocks else 0
            fresh = self.blocks[self.num_published : count]
            if count <= self.cached_blocks or any(pool._writers[block] for block in fresh):
                return self.cached_blocks
            replaced = [self._replace(i, full[i]) for i in range(self.num_published, count)]
            self.num_published = self.cached_blocks = count
            replaced += self._window_pages(0)
            tables = pool._tail_tables(hashes, count)
            self.window_tables = tables
            self.set_matched(tables)
            pool._acquire(self._window_pages(0), pool._holds)
            pool._release_after_steps(replaced)
            return count

    def _clear(self) -> None:
        super()._clear()
        self.window_tables = [[] for _ in self._pool.windows]
        self.first_live = [0] * len(self.window_tables)

    def _window_pages(self, first_block: int) -> list[int]:
        """Returns the window pages of the blocks from `first_block` on."""
        pages: list[int] = []
        for table, first_live in zip(self.window_tables, self.first_live, strict=True):
            pages += table[max(first_block, first_live) :]
        return pages


def make_block_pool(
    layout: KVLayout,
    num_blocks: int,
    *,
    host_cache: int = 0,
    policy: str = "lru",
    pinned_bytes: int = 0,
    tenant_pinned_bytes: int = 0,
    keeps_prefixes: bool = True,
    **callbacks: Any,
) -> BlockPool:
    """Returns the block pool of a layout; `num_blocks` are pages, `host_cache` are bytes of the host tier.

    A pool with groups has no host tier and evicts by "lru".
    """
    if layout.groups:
        assert not host_cache
        assert policy == "lru"
        assert keeps_prefixes
        windows = [group.window for group in layout.groups[1:]]
        return GroupedBlockPool(num_blocks, layout.block_size, windows, **callbacks)
    size = layout.block_bytes
    return BlockPool(
        num_blocks,
        layout.block_size,
        host_blocks=host_cache // size,
        host_batch=max(1, HOST_COPY_BYTES // size),
        policy=policy,
        max_pinned=pinned_bytes // size,
        max_pinned_by_tenant=max(1, tenant_pinned_bytes // size) if tenant_pinned_bytes else 0,
        keeps_prefixes=keeps_prefixes,
        **callbacks,
    )


def require_window_groups(lease: Lease) -> GroupedLease:
    """Returns the lease of a pool with groups, as such."""
    if not isinstance(lease, GroupedLease):
        raise InternalError("the lease is of a pool without KV groups")
    return lease
