"""The block pool with KV groups against a model that knows what each page holds."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv_groups import PageOrder, tail_blocks
from engine.kv.blocks import BlockPool
from engine.kv.groups.grouped_blocks import NO_PAGE, GroupedBlockPool, GroupedLease, require_window_groups
from engine.kv.lease import Lease
from engine.kv.ledger import BlockPin, StepFence

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


@dataclass(eq=False)
class Incoming:
    """A prompt whose KV another pod writes."""

    lease: GroupedLease
    tokens: Tokens
    order: PageOrder
    first: int  # First block that is written
    pin: BlockPin


def order_of(tokens: Tokens, boundary: int) -> PageOrder:
    return PageOrder(-(-len(tokens) // SIZE), tuple(max(0, boundary - tail) for tail in TAILS))


def places(order: PageOrder, first: int) -> list[tuple[int, int]]:
    """Returns block and group of each page of a transfer that begins with block `first`."""
    return [
        (block, group)
        for block in range(first, order.num_blocks)
        for group in range(1 + len(WINDOWS))
        if group == 0 or block >= order.window_starts[group - 1]
    ]


class GroupedMachine(RuleBasedStateMachine):
    """Sequences compute chunks as the scheduler plans them, while others start, fork and end, arrive and are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: set[bytes] = set()
        self.pool = GroupedBlockPool(PAGES, SIZE, WINDOWS, on_stored=self.stored, on_evicted=self.evicted)
        self.content: dict[int, tuple[int, Tokens]] = {}  # Group and tokens up to the last one in the page
        self.running: list[Running] = []
        self.steps: list[StepFence] = []
        self.incoming: list[Incoming] = []
        self.pins: list[BlockPin] = []  # Of readers, and of writers whose request has ended

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
            assert available < self.pool.pages_for(len(tokens))
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

    @rule(bits=st.lists(st.integers(0, 1), min_size=1, max_size=8), odd=st.booleans())
    def expect(self, bits: list[int], odd: bool) -> None:
        """Reserves the pages of a prompt that another pod computes, as a decode pod does."""
        tokens = tuple(bit for bit in bits for _ in range(SIZE)) + (9,) * odd
        order = order_of(tokens, (len(tokens) - 1) // SIZE)
        lease = self.pool.lease(hashes_of(tokens[:-1]), order.num_blocks + 1)
        if lease is None:
            return
        lease, first = require_window_groups(lease), lease.cached_blocks
        assert lease.cover_transfer(order), "lease() leaves room for these pages"
        pin = lease.pin_for_write(first, order.num_blocks - first, order)
        assert len(pin.blocks) == len(set(pin.blocks)) == order.num_pages - order.first_page(first)
        assert order.block_at(order.first_page(first)) == first
        self.incoming.append(Incoming(lease, tokens, order, first, pin))

    @precondition(lambda self: self.incoming)
    @rule(data=st.data(), whole=st.booleans())
    def end_transfer(self, data: Any, whole: bool) -> None:
        """The KV has arrived, and the sequence continues; or the request ends while the writer may still write."""
        entry = data.draw(st.sampled_from(self.incoming))
        self.incoming.remove(entry)
        if not whole:
            entry.lease.finish("aborted")
            self.pins.append(entry.pin)
            return
        for page, (block, group) in zip(entry.pin.blocks, places(entry.order, entry.first), strict=True):
            self.content[page] = group, entry.tokens[: (block + 1) * SIZE]
        entry.pin.release()
        entry.lease.publish(hashes_of(entry.tokens))
        self.check_visible(Running(entry.lease, entry.tokens, 0), len(entry.tokens))
        for boundary in {len(entry.tokens) // SIZE, (len(entry.tokens) - 1) // SIZE}:
            assert self.pool.match_prefix(hashes_of(entry.tokens[: boundary * SIZE])) == boundary
        self.running.append(Running(entry.lease, entry.tokens, len(entry.tokens)))

    @precondition(lambda self: any(seq.computed == len(seq.tokens) for seq in self.running))
    @rule(data=st.data())
    def send(self, data: Any) -> None:
        """Pins a computed prompt, as a prefill pod does at its last chunk."""
        seq = data.draw(st.sampled_from([seq for seq in self.running if seq.computed == len(seq.tokens)]))
        order = order_of(seq.tokens, (len(seq.tokens) - 1) // SIZE)
        pin = seq.lease.pin_for_read(0, order.num_blocks, order)
        for page, (block, group) in zip(pin.blocks, places(order, 0), strict=True):
            self.check_page(page, group, seq.tokens, block, len(seq.tokens))
        self.pins.append(pin)

    @rule(bits=st.lists(st.integers(0, 1), min_size=1, max_size=8), data=st.data())
    def lend(self, bits: list[int], data: Any) -> None:
        """Pins a cached prefix for a pod that has its first blocks."""
        tokens = tuple(bit for bit in bits for _ in range(SIZE))
        hashes, order = hashes_of(tokens), order_of(tokens, len(bits))
        first = data.draw(st.integers(0, len(bits) - 1))
        pin = self.pool.pin_prefix(hashes, order.first_page(first))
        assert (pin is not None) == (self.pool.match_prefix(hashes) == len(hashes))
        assert self.pool.prefix_pages(len(hashes)) == order.num_pages
        if pin is not None:
            for page, (block, group) in zip(pin.blocks, places(order, first), strict=True):
                self.check_page(page, group, tokens, block, len(tokens))
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), part=st.booleans())
    def release_pin(self, data: Any, part: bool) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        pin.release(list(pin.pinned)[:1] if part else None)
        self.pins = [other for other in self.pins if other.pinned]

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
        assert self.announced == self.expected_announced()
        written = [page for pin in (*self.pins, *(entry.pin for entry in self.incoming)) for page in pin.pinned]
        others = {page for seq in self.running for page in seq.lease.all_pages()}
        assert not others.intersection(page for page in written if self.pool._writers[page])
        idle = not self.running and not self.steps and not self.incoming and not self.pins
        if idle and not self.pool._copy_sources:
            assert self.pool.num_available() == PAGES

    def expected_announced(self) -> set[bytes]:
        """Returns the hashes of the full pages before usable boundaries."""
        announced: set[bytes] = set()
        for key, page in self.pool._cache.block_by_hash.items():
            chain = hashes_of(self.content[page][1]) if len(key) == len(hashes_of((0,) * SIZE)[0]) else []
            if chain and self.pool.match_prefix(chain) == len(chain):
                announced.update(chain)
        return announced

    def teardown(self) -> None:
        for seq in (*self.running, *self.incoming):
            seq.lease.finish("end")
        for pin in (*self.pins, *(entry.pin for entry in self.incoming)):
            pin.release()
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


def test_samples_keep_the_end_of_their_prompt() -> None:
    pool = GroupedBlockPool(60, 4, (8,))
    first = run(pool, 40)
    samples = [first, require_window_groups(first.fork(10))]
    for lease, seed in zip(samples, (1, 2), strict=True):  # 40 more tokens each, so that the prompt leaves the window
        hashes = [*_hashes(40), *(bytes([seed, i]).ljust(16, b"\0") for i in range(10))]
        for start in range(40, 80, 4):
            assert lease.grow()
            assert lease.cover(start, start + 4)
            lease.publish(hashes[: start // 4 + 1])
    for lease in samples:
        lease.finish("done")
    assert pool.lease([], pool.counts().free + 12) is not None  # evicts window pages in the middle of both answers
    assert pool.match_prefix(_hashes(40)) == 10


def test_a_hit_ends_where_the_window_pages_are() -> None:
    pool = GroupedBlockPool(60, 4, (8,))
    run(pool, 40).finish("done")
    assert pool.match_prefix(_hashes(40)) == 10
    pool._cache.evictable.move_to_end(pool._cache.block_by_hash[pool._cache.key(_hashes(40)[9], 0)], last=False)
    pool._free += pool._evict(1)
    assert pool.match_prefix(_hashes(40)) == 9, "the block before needs other pages"
    pool.check_integrity()


@pytest.mark.parametrize("by_transfer", [False, True])
def test_a_cached_prefix_never_prevents_a_prompt_that_fits(by_transfer: bool) -> None:
    """A conversation grows until it needs the whole pool, of which its own prefix is the cached part."""
    pool = GroupedBlockPool(30, 4, (17,))
    assert pool.pages_for(96) == pool.num_blocks
    run(pool, 40).finish("done")
    if by_transfer:
        step = pool.begin_step()  # of another sequence
        lease, order = pool.lease(_hashes(92), 24), PageOrder(24, (19,))
        assert lease is not None
        assert (lease.cached_blocks, lease.cover_transfer(order)) == (10, True)
        step.end()
    else:
        lease = run(pool, 96, chunk=4)
    lease.finish("done")
    pool.check_integrity()
    assert pool.num_available() == pool.num_blocks


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


def test_the_prefix_index_sees_the_usable_hit() -> None:
    announced: set[bytes] = set()
    pool = GroupedBlockPool(60, 4, (8,), on_stored=announced.update, on_evicted=announced.difference_update)

    def estimate(length: int) -> int:
        """Returns the hit that a search in the index finds."""
        return next((i for i, h in enumerate(_hashes(length)) if h not in announced), length // 4)

    run(pool, 80).finish("done")
    assert estimate(80) == pool.match_prefix(_hashes(80)) == 20
    first = pool.lease([], 30)  # evicts window pages in the middle only
    assert first is not None
    assert estimate(80) == pool.match_prefix(_hashes(80)) == 20
    assert estimate(40) > pool.match_prefix(_hashes(40)), "too high for a prompt that leaves the cached one"
    second = pool.lease([], 12)  # evicts the last four blocks; two window pages before them are left
    assert second is not None
    assert estimate(80) == pool.match_prefix(_hashes(80)) == 16
    third = pool.lease([], 4)  # evicts two more blocks: no boundary is usable, although full pages are cached
    assert third is not None
    assert estimate(80) == pool.match_prefix(_hashes(80)) == 0
    assert pool.counts().cached == 14
