"""The order of eviction: leaves first whatever the policy, lower retentions first, and plain LRU as before."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from common.types import SamplingParams, ValidRequest
from engine.kv.blocks import BlockPool
from engine.kv.eviction import LeafOrder, Priority, Retention
from engine.kv.lease import Lease
from engine.kv.prefix_cache import PrefixCache
from tests.unit.test_block_pool import PoolMachine

SIZE = 4  # Tokens of a block
POLICIES: list[str] = ["lru", "gdsf", "s3fifo"]


def chain(*names: int) -> list[bytes]:
    """Block hashes of a prompt: equal beginnings have equal hashes."""
    return [repr(names[: i + 1]).encode() for i in range(len(names))]


def serve(pool: BlockPool, hashes: list[bytes], retention: Retention | None = None) -> int:
    """Computes one prompt, and returns its matched blocks."""
    lease = pool.lease(hashes, len(hashes), retention=retention)
    assert lease is not None
    matched = lease.cached_blocks
    lease.publish(hashes)
    lease.finish("done")
    return matched


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
RETENTIONS = st.one_of(
    st.none(), st.builds(Retention, st.sampled_from(Priority), st.one_of(st.none(), st.floats(0.5, 5.0)))
)


@given(
    policy=st.sampled_from(POLICIES),
    num_blocks=st.integers(5, 12),
    max_pinned=st.integers(0, 4),
    served=st.lists(st.tuples(PROMPTS, RETENTIONS), max_size=40),
    host=st.booleans(),
)
def test_the_pool_stays_consistent_and_prefix_closed(
    policy: str, num_blocks: int, max_pinned: int, served: list[tuple[tuple[int, ...], Retention | None]], host: bool
) -> None:
    evicted: list[bytes] = []
    pool = BlockPool(num_blocks, SIZE, policy=policy, max_pinned=max_pinned, on_evicted=evicted.extend)
    held = None
    for number, (names, retention) in enumerate(served):
        hashes = chain(*names)
        if host and number % 7 == 3 and held is None and num_blocks > 10:
            held = pool.lease(hashes[:1], 1, retention=retention)  # A user in the middle of the order
        matched = serve(pool, hashes, retention)
        assert matched <= len(hashes)
        pool.check_integrity()
        cached = set(pool.cached_hashes())
        assert set(hashes) <= cached
        order = pool._cache.evictable
        if isinstance(order, LeafOrder):
            assert order._pinned.total() <= max_pinned
    if held is not None:
        held.finish("done")
    # Everything can be evicted, children first.
    before = len(evicted)
    parents = {block_hash: pool._cache.parent_hash(block) for block_hash, block in pool._cache.block_by_hash.items()}
    pool.reset_prefix_cache()
    gone = evicted[before:]
    assert len(gone) == len(parents)
    for index, block_hash in enumerate(gone):
        assert parents[block_hash] not in gone[:index]
    pool.check_integrity()


OVER = 1e-9  # Seconds: a time to live that has ended at the next call
TURNS = [
    None,
    Retention(Priority.PINNED),
    Retention(Priority.LOW),
    Retention(Priority.HIGH, OVER),
    None,
    Retention(Priority.PINNED, OVER),
    Retention(Priority.HIGH),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_any_use_with_retentions_agrees_with_the_model_of_the_pool(policy: str) -> None:
    """The random use of the pool's own test, by requests that ask for retentions in turn."""

    class RetainingPool(BlockPool):
        wanted = itertools.cycle(TURNS)

        def lease(self, *args: Any, **more: Any) -> Lease | None:
            return super().lease(*args, retention=next(self.wanted), **more)

    class Machine(PoolMachine):
        def __init__(self) -> None:
            super().__init__()
            callbacks: Any = {"on_stored": self.stored, "on_evicted": self.evicted}
            self.pool = RetainingPool(self.SIZE, 4, policy=policy, max_pinned=3, **callbacks)
            self.pool.wanted = itertools.cycle(TURNS)

    run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


@given(st.lists(PROMPTS, max_size=30), st.integers(5, 10))
def test_plain_lru_evicts_as_a_dict_does(served: list[tuple[int, ...]], num_blocks: int) -> None:
    seen: list[list[bytes]] = []
    for ordered in (False, True):
        evicted: list[bytes] = []
        pool = BlockPool(num_blocks, SIZE, on_evicted=evicted.extend)
        if ordered:
            pool._cache.evictable = LeafOrder("lru", num_blocks, 0)
        for names in served:
            serve(pool, chain(*names))
        assert isinstance(pool._cache.evictable, LeafOrder if ordered else OrderedDict)
        pool.reset_prefix_cache()
        seen.append(evicted)
    assert seen[0] == seen[1]


@given(st.lists(PROMPTS, min_size=1, max_size=20), st.integers(5, 10))
def test_the_first_retention_keeps_the_order_of_the_others(served: list[tuple[int, ...]], num_blocks: int) -> None:
    seen: list[list[bytes]] = []
    for retained in (False, True):
        evicted: list[bytes] = []
        pool = BlockPool(num_blocks, SIZE, on_evicted=evicted.extend)
        for names in served:
            serve(pool, chain(*names))
        serve(pool, chain(9), Retention(Priority.HIGH) if retained else None)
        before = len(evicted)
        pool.reset_prefix_cache()
        seen.append([block_hash for block_hash in evicted[before:] if block_hash != chain(9)[0]])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.PINNED])
def test_a_retained_prompt_survives_a_crawl(priority: Priority) -> None:
    pool = BlockPool(8, SIZE, max_pinned=4)
    system = chain(1, 2, 3)
    serve(pool, system, Retention(priority))
    for page in range(100, 150):
        serve(pool, chain(page, page, page))
    assert pool.match_prefix(system) == 3
    pool.check_integrity()


def test_without_a_retention_a_crawl_empties_the_cache() -> None:
    pool = BlockPool(8, SIZE)
    serve(pool, chain(1, 2, 3))
    for page in range(100, 150):
        serve(pool, chain(page, page, page))
    assert pool.match_prefix(chain(1, 2, 3)) == 0


def test_low_goes_before_normal() -> None:
    pool = BlockPool(6, SIZE)
    serve(pool, chain(1, 2))
    serve(pool, chain(3, 4), Retention(Priority.LOW))
    serve(pool, chain(5, 6, 7))
    assert (pool.match_prefix(chain(1, 2)), pool.match_prefix(chain(3, 4))) == (2, 1)


def test_a_normal_request_raises_a_low_block() -> None:
    pool = BlockPool(6, SIZE)
    serve(pool, chain(1, 2), Retention(Priority.LOW))
    serve(pool, chain(1, 2))
    serve(pool, chain(3, 4))
    serve(pool, chain(5, 6, 7))
    assert pool.match_prefix(chain(3, 4)) == 2
    assert pool.match_prefix(chain(1, 2)) == 1


def test_a_time_to_live_ends_and_begins_again_with_each_use() -> None:
    clock, cache = Clock(), PrefixCache(8)
    cache.evictable = order = LeafOrder("lru", 8, 8, now=clock)
    for block in range(3):
        cache.register(block, bytes([block]), -1)
    cache.retain([0], Retention(Priority.HIGH, ttl_s=10))
    cache.retain([1, 2], None)
    cache.mark_idle([0, 1, 2], None)
    clock.now = 8
    cache.retain([0], None)  # A use
    clock.now = 15
    assert cache.evict()[0] == 1
    clock.now = 19
    assert cache.evict()[0] == 0  # Over since 18, and older than block 2
    assert not order.inconsistencies()


def test_pins_are_bounded_and_never_refuse_a_request() -> None:
    pool = BlockPool(6, SIZE, max_pinned=2)
    serve(pool, chain(1, 2, 3), Retention(Priority.PINNED))
    serve(pool, chain(5, 6, 7), Retention(Priority.HIGH))
    serve(pool, chain(8, 9))
    assert pool.match_prefix(chain(1, 2, 3)) == 2  # The third block is not pinned, only high, and older
    serve(pool, chain(10, 11, 12, 13, 14, 15))
    assert pool.match_prefix(chain(10, 11, 12, 13, 14, 15)) == 6


@pytest.mark.parametrize("policy", ["gdsf", "s3fifo"])
def test_a_frequency_aware_policy_keeps_what_is_used_again(policy: str) -> None:
    pool = BlockPool(10, SIZE, policy=policy)
    for _ in range(4):
        serve(pool, chain(1, 2, 3))
    for page in range(100, 108):
        serve(pool, chain(page, page))
    assert pool.match_prefix(chain(1, 2, 3)) == 3


def test_s3fifo_keeps_the_newest_turn_of_a_conversation_through_a_crawl() -> None:
    pool = BlockPool(20, SIZE, policy="s3fifo")
    serve(pool, chain(1, 2, 3))
    serve(pool, chain(1, 2, 3, 4, 5, 6))
    for page in range(100, 130):
        serve(pool, chain(page, page))
    assert pool.match_prefix(chain(1, 2, 3, 4, 5, 6)) == 6


def test_without_a_prefix_cache_nothing_is_found_again() -> None:
    stored: list[bytes] = []
    pool = BlockPool(8, SIZE, keeps_prefixes=False, on_stored=stored.extend)
    assert [serve(pool, chain(1, 2, 3)) for _ in range(2)] == [0, 0]
    assert (stored, pool.counts().free) == ([], 8)
    pool.check_integrity()


def test_what_a_request_asks_for() -> None:
    request = ValidRequest("r", "m", (1,), SamplingParams())
    assert Retention.of(request) is None
    assert Retention.of(replace(request, cache_priority=-1)) == Retention(Priority.LOW)
    assert Retention.of(replace(request, cache_priority=2, cache_ttl_s=60)) == Retention(Priority.PINNED, 60.0)


def test_pins_whose_time_is_over_leave_room_for_others() -> None:
    clock, cache = Clock(), PrefixCache(8)
    cache.evictable = order = LeafOrder("lru", 8, 2, now=clock)
    for block in range(5):
        cache.register(block, bytes([block]), -1)
    cache.retain([0, 1], Retention(Priority.PINNED, ttl_s=10))
    clock.now = 11
    cache.retain([2, 3], Retention(Priority.PINNED))
    cache.retain([4], Retention(Priority.HIGH))
    cache.mark_idle([2, 3, 4, 0, 1], None)
    assert [cache.evict()[0] for _ in range(5)] == [0, 1, 4, 2, 3]
    assert not order.inconsistencies()


@pytest.mark.parametrize("rematched", [False, True])
def test_a_retention_holds_for_blocks_that_another_request_has_computed_meanwhile(rematched: bool) -> None:
    pool, prompt = BlockPool(8, SIZE, max_pinned=8), chain(1, 2)
    first, second = pool.lease(prompt, 2), pool.lease(prompt, 2, retention=Retention(Priority.HIGH))
    assert first is not None
    assert second is not None
    first.publish(prompt)
    if rematched:
        assert second.rematch(prompt) == 2
    second.publish(prompt)
    first.finish("done")
    second.finish("done")
    for page in range(100, 120):
        serve(pool, chain(page, page, page))
    assert pool.match_prefix(prompt) == 2
    pool.check_integrity()


def pinned(tenant: str) -> Retention:
    return Retention(Priority.PINNED, tenant=tenant)


def test_one_tenant_cannot_pin_the_part_of_another() -> None:
    pool = BlockPool(12, SIZE, max_pinned=4, max_pinned_by_tenant=2)
    serve(pool, chain(1, 2, 3), pinned("a"))  # the third block is only high
    serve(pool, chain(11, 12), pinned("b"))
    serve(pool, chain(21), pinned("c"))  # the pool's bound is reached
    order = pool._cache.evictable
    assert isinstance(order, LeafOrder)
    assert order._pinned == {"a": 2, "b": 2}
    for number in range(30, 60):  # strangers of high retention empty all that is not pinned
        serve(pool, chain(number, number + 1000), Retention(Priority.HIGH))
    assert [pool.lease(chain(*names), 4).cached_blocks for names in ((1, 2, 3), (11, 12), (21,))] == [2, 2, 0]  # type: ignore[union-attr]


def test_a_pin_that_ends_makes_room_for_its_tenant_alone() -> None:
    clock = Clock()
    order = LeafOrder("lru", 8, 8, 2, clock)
    for block in range(6):
        order.on_registered(block, bytes([block]), -1)
    order.retain([0], Retention(Priority.PINNED, 10.0, "a"))
    order.retain([1], pinned("a"))
    order.retain([2], pinned("a"))
    assert order._priority[2] == Priority.HIGH
    clock.now = 11.0
    order.retain([3], pinned("a"))
    assert [order._priority[b] for b in (0, 1, 3)] == [Priority.NORMAL, Priority.PINNED, Priority.PINNED]
    assert order._pinned == {"a": 2}


@pytest.mark.parametrize(
    ("salt", "tenant"),
    [("tenant:team-a:x:y", "team-a"), ("tenant:team-a:", "team-a"), ("salt:tenant:b:", ""), ("", "")],
)
def test_the_tenant_of_a_pin_comes_from_the_salt_of_the_gateway(salt: str, tenant: str) -> None:
    request = ValidRequest("r", "m", (1,), SamplingParams(), salt, cache_priority=2)
    retention = Retention.of(request)
    assert retention is not None
    assert retention.tenant == tenant
