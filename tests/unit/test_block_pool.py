"""BlockPool: leases, pins, step fences, prefix cache and eviction; also random use against a simple model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InternalError
from common.types import PoolCounts
from engine.kv.blocks import BlockPool
from engine.kv.lease import Lease
from engine.kv.ledger import BlockPin, StepFence

Path = tuple[int, ...]


def name(path: Path) -> bytes:
    """Hash of the block at the end of a path, distinct for each path."""
    return bytes([len(path), *path]).ljust(16, b"\0")


def chain(*path: int) -> list[bytes]:
    return [name(path[: i + 1]) for i in range(len(path))]


def leased(pool: BlockPool, hashes: list[bytes], total: int) -> Lease:
    lease = pool.lease(hashes, total)
    assert lease is not None
    return lease


def cache(pool: BlockPool, *path: int) -> list[int]:
    """Puts the blocks of a path into the cache and returns them."""
    lease = leased(pool, chain(*path), len(path))
    lease.publish(chain(*path))
    blocks = list(lease.blocks)
    lease.finish("done")
    return blocks


def test_blocks_are_free_after_finish_which_is_idempotent() -> None:
    pool = BlockPool(8, 4)
    lease = leased(pool, [], 5)
    assert pool.counts() == PoolCounts(free=3, cached=0, leased=5, quarantined=0)
    assert lease.grow(3)
    assert not lease.grow()
    assert pool.lease([], 1) is None
    lease.finish("first")
    lease.finish("second")
    assert (lease.finished, lease.reason, lease.blocks) == (True, "first", [])
    assert pool.counts() == PoolCounts(free=8, cached=0, leased=0, quarantined=0)
    pool.check_integrity()
    for use in (lease.grow, lambda: lease.pin_for_read(0, 0), lambda: lease.publish([])):
        with pytest.raises(InternalError):
            use()


def test_a_cached_prefix_is_shared_and_outlives_its_leases() -> None:
    stored: list[bytes] = []
    pool = BlockPool(8, 4, on_stored=stored.extend)
    blocks = cache(pool, 1, 2, 3)
    assert stored == chain(1, 2, 3) == pool.cached_hashes()
    assert pool.counts() == PoolCounts(free=5, cached=3, leased=0, quarantined=0)
    assert pool.match_prefix(chain(1, 2, 9)) == 2
    a, b = leased(pool, chain(1, 2, 9), 4), leased(pool, chain(1, 2, 3), 3)
    assert a.blocks[:2] == b.blocks[:2] == blocks[:2]
    assert (a.cached_blocks, b.cached_blocks) == (2, 3)
    a.finish("done")
    assert pool.counts() == PoolCounts(free=5, cached=0, leased=3, quarantined=0)
    b.finish("done")
    assert pool.reset_prefix_cache() == 3
    assert pool.counts().free == 8
    assert pool.match_prefix(chain(1)) == 0


def test_keep_free_counts_matched_blocks_that_were_evictable() -> None:
    pool = BlockPool(6, 4)
    cache(pool, 1, 2, 3)
    assert pool.lease(chain(1, 2), 4, keep_free=3) is None
    assert pool.counts().cached == 3
    lease = pool.lease(chain(1, 2), 4, keep_free=2)
    assert lease is not None
    assert pool.num_available() == 2


def test_eviction_takes_the_least_recent_leaf_first() -> None:
    evicted: list[bytes] = []
    pool = BlockPool(6, 4, on_evicted=evicted.extend)
    cache(pool, 1, 2, 3)
    cache(pool, 7, 8)
    leased(pool, chain(1), 1).finish("used again")
    big = leased(pool, [], 4)
    assert evicted == [name((1, 2, 3)), name((1, 2)), name((7, 8))]
    assert pool.match_prefix(chain(7)) == pool.match_prefix(chain(1)) == 1
    big.finish("done")
    pool.check_integrity()


def test_a_pinned_leaf_keeps_its_parents_in_the_cache() -> None:
    pool = BlockPool(4, 4)
    lease = leased(pool, [], 3)
    lease.publish(chain(1, 2, 3))
    reader = lease.pin_for_read(2, 1)
    lease.finish("done")
    assert pool.counts() == PoolCounts(free=1, cached=2, leased=1, quarantined=0)
    assert pool.num_available() == 1
    assert pool.reset_prefix_cache() == 0
    reader.release()
    assert pool.num_available() == 4
    pool.check_integrity()


def test_quarantine_ends_block_by_block_as_the_writer_releases() -> None:
    pool = BlockPool(3, 4)
    lease = leased(pool, [], 3)
    pin = lease.pin_for_write(1, 2)
    first, second = pin.blocks
    lease.finish("abort")
    assert pool.counts() == PoolCounts(free=1, cached=0, leased=0, quarantined=2)
    assert pool.lease([], 2) is None
    pin.release([second])
    pin.release([second])
    assert pool.counts().quarantined == 1
    assert leased(pool, [], 2).blocks.count(first) == 0
    pin.release()
    pin.release()
    assert pin.blocks == (first, second)
    assert pool.counts() == PoolCounts(free=1, cached=0, leased=2, quarantined=0)
    with pytest.raises(InternalError):
        pin.release([99])


def test_quarantine_lasts_until_the_last_of_several_writers() -> None:
    pool = BlockPool(1, 4)
    lease = leased(pool, [], 1)
    writers = [lease.pin_for_write(0, 1), lease.pin_for_write(0, 1)]
    lease.finish("abort")
    for writer in writers:
        assert pool.counts() == PoolCounts(free=0, cached=0, leased=0, quarantined=1)
        writer.release()
    assert pool.counts() == PoolCounts(free=1, cached=0, leased=0, quarantined=0)


def test_a_block_with_a_writer_is_not_published_and_a_published_block_gets_no_writer() -> None:
    pool = BlockPool(4, 4)
    lease = leased(pool, [], 3)
    pin = lease.pin_for_write(1, 1)
    lease.publish(chain(1, 2, 3))
    assert pool.match_prefix(chain(1, 2, 3)) == lease.num_published == 1
    pin.release()
    lease.publish(chain(1, 2, 3))
    assert pool.match_prefix(chain(1, 2, 3)) == 3
    with pytest.raises(InternalError):
        lease.pin_for_write(2, 1)
    with pytest.raises(InternalError):
        lease.publish(chain(1, 2, 3, 4))


def test_a_duplicate_block_is_replaced_and_is_free_when_its_reader_ends() -> None:
    stored: list[bytes] = []
    pool = BlockPool(8, 4, on_stored=stored.extend)
    a, b = leased(pool, [], 2), leased(pool, [], 2)
    a.publish(chain(1, 2))
    duplicates = list(b.blocks)
    reader = b.pin_for_read(0, 1)
    b.publish(chain(1, 2))
    assert b.blocks == a.blocks
    assert stored == chain(1, 2)
    assert pool.counts() == PoolCounts(free=5, cached=0, leased=3, quarantined=0)
    reader.release()
    assert pool.counts().free == 6
    assert set(leased(pool, [], 6).blocks) >= set(duplicates)


def test_rematch_takes_blocks_that_were_published_after_the_lease() -> None:
    pool = BlockPool(8, 4)
    a, b = leased(pool, [], 3), leased(pool, [], 3)
    a.publish(chain(1, 2))
    assert b.rematch(chain(1, 2, 3)) == b.cached_blocks == b.num_published == 2
    assert b.blocks[:2] == a.blocks[:2]
    assert pool.counts().leased == 4
    pool.check_integrity()


def test_blocks_released_during_steps_are_free_after_these_steps() -> None:
    pool = BlockPool(4, 4)
    lease = leased(pool, [], 3)
    first, second = pool.begin_step(), pool.begin_step()
    lease.publish(chain(1))
    lease.finish("abort")
    assert (pool.counts().leased, pool.num_deferred(), pool.num_available()) == (3, 3, 1)
    second.end()
    assert pool.num_available() == 1
    third = pool.begin_step()
    first.end()
    first.end()
    assert pool.counts() == PoolCounts(free=3, cached=1, leased=0, quarantined=0)
    third.end()
    pool.check_integrity()


def test_threads_lease_publish_and_release_at_the_same_time() -> None:
    pool = BlockPool(64, 4)

    def work(seed: int) -> None:
        for i in range(200):
            path = (seed % 2, i % 3, i % 5)
            lease = pool.lease(chain(*path)[:2], 4)
            if lease is None:
                continue
            pin = lease.pin_for_write(3, 1)
            end = threading.Thread(target=pin.release)
            end.start()
            lease.publish(chain(*path))
            lease.finish("done")
            end.join()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.check_integrity()
    assert pool.counts().leased == pool.counts().quarantined == 0


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool of ten blocks, compared with a model that knows for each block who may touch its bytes."""

    SIZE = 10

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE, 4, on_stored=self.stored, on_evicted=self.evicted)
        self.paths: dict[Lease, Path] = {}
        self.pins: list[tuple[BlockPin, set[int], bool]] = []
        self.steps: list[StepFence] = []
        self.deferred: list[tuple[int, set[StepFence]]] = []
        self.registered: dict[bytes, int] = {}

    def stored(self, hashes: list[bytes]) -> None:
        for h in hashes:
            assert h not in self.registered
            assert h[0] == 1 or self.parent(h) in self.registered
            self.registered[h] = -1

    def evicted(self, hashes: list[bytes]) -> None:
        for h in hashes:
            block = self.registered.pop(h)
            assert not any(self.parent(child) == h for child in self.registered if child[0] > 1)
            assert block not in self.used()

    @staticmethod
    def parent(h: bytes) -> bytes:
        return name(tuple(h[1 : h[0]]))

    def used(self) -> set[int]:
        blocks = {b for lease in self.paths for b in lease.blocks} | {b for b, _ in self.deferred}
        return blocks.union(*(pinned for _, pinned, _ in self.pins))

    def fresh(self, blocks: list[int], before: set[int]) -> None:
        assert not before.intersection(blocks)
        assert not set(self.registered.values()).intersection(blocks)
        assert len(set(blocks)) == len(blocks)

    def on_released(self, blocks: list[int]) -> None:
        if self.steps:
            self.deferred += [(b, set(self.steps)) for b in blocks]

    def evictable(self) -> int:
        used = self.used()
        kept = {h for h, b in self.registered.items() if b in used}
        for h in list(kept):
            while h[0] > 1:
                h = self.parent(h)
                kept.add(h)
        return len(self.registered) - len(kept)

    def num_free(self) -> int:
        return self.SIZE - len(self.used() | set(self.registered.values()))

    @rule(
        path=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        more=st.integers(0, 3),
        cut=st.integers(0, 2),
        keep=st.sampled_from([0, 0, 1, 4]),
    )
    def lease(self, path: list[int], more: int, cut: int, keep: int) -> None:
        full = (*path, *[0] * more)
        hashes = chain(*full)[: max(0, len(full) - cut)]
        hits = next((i for i, h in enumerate(hashes) if h not in self.registered), len(hashes))
        before, room = self.used(), self.num_free() + self.evictable()
        cached = [self.registered[h] for h in hashes[:hits]]
        pinned: set[bytes] = set(hashes[:hits])
        taken = sum(
            self.registered[h] not in before
            and not any(
                self.registered[c] in before
                for c in self.registered
                if c[1 : h[0] + 1] == h[1 : h[0] + 1] and c[0] >= h[0]
            )
            for h in pinned
        )
        lease = self.pool.lease(hashes, len(full), keep_free=keep)
        assert (lease is not None) == (room - taken - (len(full) - hits) >= keep)
        if lease is not None:
            assert lease.blocks[:hits] == cached
            assert lease.cached_blocks == hits
            assert len(lease.blocks) == len(full)
            self.fresh(lease.blocks[hits:], before | set(cached))
            self.paths[lease] = full

    def pick(self, data: Any) -> Lease:
        return data.draw(st.sampled_from(list(self.paths)))

    @precondition(lambda self: self.paths)
    @rule(data=st.data(), n=st.integers(1, 2), bit=st.integers(0, 1))
    def grow(self, data: Any, n: int, bit: int) -> None:
        lease, before = self.pick(data), self.used()
        room, old = self.num_free() + self.evictable(), list(lease.blocks)
        grown = lease.grow(n)
        assert grown == (room >= n)
        if grown:
            self.paths[lease] += (bit,) * n
            assert lease.blocks[: len(old)] == old
            self.fresh(lease.blocks[len(old) :], before)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def publish(self, data: Any) -> None:
        lease = self.pick(data)
        hashes = chain(*self.paths[lease])[: data.draw(st.integers(0, len(lease.blocks)))]
        old = list(lease.blocks)
        writing: set[int] = set().union(*(pinned for _, pinned, writes in self.pins if writes))
        done = next((i for i, b in enumerate(old) if b in writing), len(old))
        lease.publish(hashes)
        for i, h in enumerate(hashes[:done]):
            if self.registered[h] == -1:
                self.registered[h] = old[i]
            assert lease.blocks[i] == self.registered[h]
        assert lease.blocks[done:] == old[done:]
        self.on_released([b for b, now in zip(old, lease.blocks, strict=True) if b != now])

    @precondition(lambda self: self.paths)
    @rule(data=st.data(), writes=st.booleans())
    def pin(self, data: Any, writes: bool) -> None:
        lease = self.pick(data)
        first = data.draw(st.integers(lease.num_published if writes else 0, len(lease.blocks)))
        count = data.draw(st.integers(0, len(lease.blocks) - first))
        pin = lease.pin_for_write(first, count) if writes else lease.pin_for_read(first, count)
        assert list(pin.blocks) == lease.blocks[first : first + count]
        self.pins.append((pin, set(pin.blocks), writes))

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), whole=st.booleans())
    def release(self, data: Any, whole: bool) -> None:
        pin, pinned, _ = data.draw(st.sampled_from(self.pins))
        some = None if whole or not pin.blocks else data.draw(st.lists(st.sampled_from(pin.blocks)))
        pin.release(some)
        pinned.difference_update(pin.blocks if some is None else some)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        lease = self.pick(data)
        blocks = list(lease.blocks)
        lease.finish("done")
        lease.finish("again")
        del self.paths[lease]
        self.on_released(blocks)

    @precondition(lambda self: len(self.steps) < 3)
    @rule()
    def begin_step(self) -> None:
        self.steps.append(self.pool.begin_step())

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def end_step(self, data: Any) -> None:
        step = data.draw(st.sampled_from(self.steps))
        step.end()
        self.steps.remove(step)
        for _, waits in self.deferred:
            waits.discard(step)
        self.deferred = [(b, waits) for b, waits in self.deferred if waits]

    @rule()
    def clear_cache(self) -> None:
        expected = self.evictable()
        assert self.pool.reset_prefix_cache() == expected

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        used = self.used()
        cached = {b for b in self.registered.values() if b not in used}
        writing: set[int] = set().union(*(pinned for _, pinned, writes in self.pins if writes))
        others = {b for lease in self.paths for b in lease.blocks} | {b for b, _ in self.deferred}
        others = others.union(*(pinned for _, pinned, writes in self.pins if not writes))
        quarantined = len(writing - others)
        assert self.pool.counts() == PoolCounts(
            free=self.num_free(), cached=len(cached), leased=len(used) - quarantined, quarantined=quarantined
        )
        assert set(self.pool.cached_hashes()) == set(self.registered)
        assert self.pool.num_available() == self.num_free() + self.evictable()
        shared = [b for lease in self.paths for b in lease.blocks]
        assert all(shared.count(b) == 1 or b in self.registered.values() for b in shared)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
