"""The block pool with KV groups against a model that knows what each page holds."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv_groups import tail_blocks
from engine.kv.blocks import BlockPool, Lease, StepFence
from engine.kv.grouped_blocks import NO_PAGE, GroupedBlockPool, GroupedLease, require_window_groups

SIZE, WINDOWS, PAGES = 2, (3, 6), 40
TAILS = [tail_blocks(window, SIZE) for window in WINDOWS]
Tokens = tuple[int, ...]


def hashes_of(tokens: Tokens) -> list[bytes]:
    """Returns the hash of each full block: its tokens and those before it."""
    return [blake2b(bytes(tokens[:end]), digest_size=16).digest() for end in range(SIZE, len(tokens) + 1, SIZE)]


@dataclass(eq=False)
class Running:
    """A sequence: its tokens with KV, and those that it will compute."""

    lease: GroupedLease
    tokens: Tokens  # All that it has
    computed: int


class GroupedMachine(RuleBasedStateMachine):
    """Sequences compute chunks as the scheduler plans them, while others start, fork and end."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: set[bytes] = set()
        self.pool = GroupedBlockPool(PAGES, SIZE, WINDOWS, on_stored=self.stored, on_evicted=self.evicted)
        self.content: dict[int, tuple[int, Tokens]] = {}  # Group and tokens up to the last one in the page
        self.running: list[Running] = []
        self.steps: list[StepFence] = []

    def stored(self, hashes: list[bytes]) -> None:
        assert not self.announced.intersection(hashes)
        self.announced.update(hashes)

    def evicted(self, hashes: list[bytes]) -> None:
        assert self.announced.issuperset(hashes)
        self.announced.difference_update(hashes)

    def check_page(self, page: int, group: int, tokens: Tokens, block: int, upto: int) -> None:
        held_group, held = self.content[page]
        end = min((block + 1) * SIZE, upto)
        assert held_group == group
        assert held[:end] == tokens[:end]

    def check_visible(self, seq: Running, start: int) -> None:
        """Checks every page that a query at `start` sees."""
        for block in range(-(-start // SIZE)):
            self.check_page(seq.lease.blocks[block], 0, seq.tokens, block, start)
        for group, window in enumerate(WINDOWS):
            for block in range(max(0, start - window + 1) // SIZE, -(-start // SIZE)):
                page = seq.lease.window_tables[group][block]
                assert page != NO_PAGE
                self.check_page(page, group + 1, seq.tokens, block, start)

    @rule(bits=st.lists(st.integers(0, 1), min_size=1, max_size=8), odd=st.booleans())
    def start(self, bits: list[int], odd: bool) -> None:
        tokens = tuple(bit for bit in bits for _ in range(SIZE)) + (9,) * odd
        hashes = hashes_of(tokens[:-1])
        before, available = self.pool.match_prefix(hashes), self.pool.num_available()
        lease = self.pool.lease(hashes, -(-len(tokens) // SIZE))
        if lease is None:
            assert available < self.pool.pages_for(len(tokens)) + before * self.pool.pages_per_block
            return
        assert lease.cached_blocks == before
        seq = Running(lease, tokens, lease.cached_blocks * SIZE)
        self.check_visible(seq, seq.computed)
        self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 6), drafts=st.integers(0, 3), publish=st.booleans())
    def compute(self, data: Any, count: int, drafts: int, publish: bool) -> None:
        """Computes a chunk, or a token behind the last one with drafts, which are wrong."""
        seq = data.draw(st.sampled_from(self.running))
        lease, start = seq.lease, seq.computed
        end = min(start + count, len(seq.tokens))
        if end == start:
            end, seq.tokens = start + 1, (*seq.tokens, data.draw(st.integers(0, 1)))
        last = end + drafts if end == len(seq.tokens) else end
        if lease.cow_index == start // SIZE:
            copies = lease.copy_on_write()
            if copies is None:
                return
            for source, target in copies:
                self.content[target] = self.content[source]
        missing = -(-last // SIZE) - len(lease.blocks)
        if (missing > 0 and not lease.grow(missing)) or not lease.cover(start, last):
            lease.trim(max(-(-len(seq.tokens) // SIZE), lease.num_published))
            return
        self.check_visible(seq, start)
        written = (*seq.tokens[:end], *(7,) * (last - end))
        shared = [page for other in self.running if other is not seq for page in other.lease.all_pages()]
        for block in range(start // SIZE, -(-last // SIZE)):
            pages = lease.pages_of(block)
            assert len(pages) == 1 + len(WINDOWS)
            for group, page in enumerate(pages):
                assert page not in shared, "two sequences write one page"
                self.content[page] = group, written[: (block + 1) * SIZE]
        seq.computed = end
        if len(self.steps) < 3:
            self.steps.append(self.pool.begin_step())
        if last > end:
            lease.trim(-(-len(seq.tokens) // SIZE))
        if publish:
            lease.publish(hashes_of(seq.tokens[: seq.computed]))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rematch(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if seq.computed == seq.lease.cached_blocks * SIZE:
            seq.computed = seq.lease.rematch(hashes_of(seq.tokens[:-1])) * SIZE
            self.check_visible(seq, seq.computed)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(self.running))
        shared = -(-seq.computed // SIZE)
        if seq.computed < len(seq.tokens) or not shared or seq.lease.cow_index >= 0:
            return
        seq.lease.publish(hashes_of(seq.tokens))
        seq.lease.trim(shared)
        other = require_window_groups(seq.lease.fork(shared))
        self.running.append(Running(other, seq.tokens, seq.computed))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(self.running))
        seq.lease.finish("done")
        self.running.remove(seq)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def end_step(self, data: Any) -> None:
        step = data.draw(st.sampled_from(self.steps))
        step.end()
        self.steps.remove(step)

    @rule()
    def clear_cache(self) -> None:
        self.pool.reset_prefix_cache()

    @invariant()
    def is_consistent(self) -> None:
        self.pool.check_integrity()
        assert set(self.pool.cached_hashes()) == self.announced
        if not self.running and not self.steps and not self.pool._copy_sources:
            assert self.pool.num_available() == PAGES

    def teardown(self) -> None:
        for seq in self.running:
            seq.lease.finish("end")
        for step in (*self.steps, self.pool.begin_step()):  # the last one copies from the pages that wait for a step
            step.end()
        self.pool.check_integrity()
        assert self.pool.num_available() == PAGES


TestGroupedMachine = GroupedMachine.TestCase
TestGroupedMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def run(pool: BlockPool, length: int, *, chunk: int = 16, seed: int = 0) -> GroupedLease:
    """Computes and publishes a sequence of `length` tokens."""
    hashes = [bytes([seed, *i.to_bytes(4, "little")]).ljust(16, b"\0") for i in range(length // pool.block_size)]
    lease = pool.lease(hashes, -(-length // pool.block_size))
    assert lease is not None
    for start in range(lease.cached_blocks * pool.block_size, length, chunk):
        end = min(start + chunk, length)
        assert lease.cover(start, end)
        lease.publish(hashes[: end // pool.block_size])
    return require_window_groups(lease)


def test_the_end_of_a_prompt_outlives_other_window_pages() -> None:
    pool = GroupedBlockPool(60, 4, (8,))
    run(pool, 80).finish("done")
    assert (pool.counts().cached, pool.match_prefix(_hashes(80))) == (40, 20)
    kept = pool.lease([], 30)  # takes the free pages and evicts ten: those in the middle of the prompt
    assert kept is not None
    assert pool.match_prefix(_hashes(80)) == 20
    assert pool.match_prefix(_hashes(40)) < 10


def test_a_hit_ends_where_the_window_pages_are() -> None:
    pool = GroupedBlockPool(60, 4, (8,))
    run(pool, 40).finish("done")
    assert pool.match_prefix(_hashes(40)) == 10
    pool._cache.evictable.move_to_end(pool._cache.block_by_hash[pool._cache.key(_hashes(40)[9], 0)], last=False)
    pool._free += pool._evict(1)
    assert pool.match_prefix(_hashes(40)) == 9, "the block before needs other pages"
    pool.check_integrity()


@pytest.mark.parametrize("grouped", [False, True])
def test_more_sequences_run_at_once(grouped: bool) -> None:
    """Gemma 3 27B with 8k tokens each, over 20 GiB of KV: 62 layers in a block, or 10 in a page."""
    layer_bytes = 2 * 16 * 128 * 2 * 16  # of 16 tokens
    layers = 10 if grouped else 62
    num_pages = (20 << 30) // (layers * layer_bytes)
    pool = GroupedBlockPool(num_pages, 16, [1024] * 6) if grouped else BlockPool(num_pages, 16)
    leases: list[Lease] = []
    while (lease := pool.lease([], 513)) is not None:
        hashes = [bytes([len(leases), *i.to_bytes(4, "little")]).ljust(16, b"\0") for i in range(512)]
        for start, end in (*((start, start + 2048) for start in range(0, 8192, 2048)), (8192, 8193)):
            if not lease.cover(start, end):
                break
            lease.publish(hashes[: end // 16])
        else:
            leases.append(lease)
            continue
        lease.finish("no pages")
        break
    pool.check_integrity()
    assert len(leases) == (17 if grouped else 5)


def _hashes(length: int) -> list[bytes]:
    return [bytes([0, *i.to_bytes(4, "little")]).ljust(16, b"\0") for i in range(length // 4)]
