"""The host tier: evicted blocks come back unchanged, eviction is leaf-first, preempted sequences resume.

A fake copier makes the copies, as late as possible (tests/rigs/engine/fake_copier.py).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InternalError
from common.types import FinishReason, SamplingParams
from engine.kv.blocks import BlockPool
from engine.kv.lease import Lease
from engine.schedule.outputs import StepResult
from tests.rigs.engine.fake_copier import FakeCopier
from tests.rigs.engine.late_device import World, answer

Path = tuple[int, ...]


def name(path: Path) -> bytes:
    return bytes([len(path), *path]).ljust(16, b"\0")


def chain(*path: int) -> list[bytes]:
    return [name(path[: i + 1]) for i in range(len(path))]


class Caches:
    """A pool of one-token blocks with a host tier, and the hashes announced for both. KV is the hash of the prefix."""

    def __init__(self, blocks: int, host: int, *, batch: int = 4) -> None:
        self.device: set[bytes] = set()
        self.host: set[bytes] = set()
        self.pool = BlockPool(
            blocks,
            1,
            on_stored=self.device.update,
            on_evicted=self.device.difference_update,
            host_blocks=host,
            host_batch=batch,
            on_host_stored=self.host.update,
            on_host_evicted=self.host.difference_update,
        )
        self.kv: dict[tuple[int, int], int] = {}
        self.copier = FakeCopier(self.pool, self.kv, 1)

    def lease(self, *path: int, total: int = 0) -> Lease | None:
        return self.pool.lease(chain(*path), total or len(path), host=True)

    def compute(self, lease: Lease, *path: int) -> None:
        """Checks the KV of the cached blocks, then writes and publishes the others, as a request does."""
        assert not lease.host_loading
        hashes = [hash(h) for h in chain(*path)]
        for i, block in enumerate(lease.blocks[: len(path)]):
            if i < lease.cached_blocks:
                assert self.kv[block, 0] == hashes[i]
            self.kv[block, 0] = hashes[i]
        lease.publish(chain(*path))

    def use(self, *path: int) -> int:
        """Runs one request with all copies; returns the number of blocks that it got from the host."""
        for _ in range(100):
            if (lease := self.lease(*path)) is not None:
                break
            assert self.pool.copies_pending(), "no copy will make room"
            self.copier.run()
        else:
            raise AssertionError("no room")
        self.copier.run()
        self.compute(lease, *path)
        lease.finish("done")
        return lease.host_blocks

    def check(self) -> None:
        self.pool.check_integrity()
        assert self.device == set(self.pool.cached_hashes())
        assert self.host == set(self.pool.host_hashes())
        known = self.device | self.host
        for h in known:
            path = tuple(h[1 : 1 + h[0]])
            assert len(path) == 1 or name(path[:-1]) in known, "pool and host together are not prefix-closed"


def test_evicted_blocks_come_back_from_the_host() -> None:
    caches = Caches(8, 16)
    assert caches.use(1, 2, 3, 4, 5) == 0
    assert caches.use(6, 7, 8, 9, 10) == 0
    caches.check()
    assert caches.pool.match_prefix(chain(1, 2, 3, 4, 5)) == 5
    assert caches.use(1, 2, 3, 4, 5) >= 2
    stats = caches.pool.host_stats()
    assert stats is not None
    assert stats.loaded >= 2
    assert stats.saved >= stats.used > 0
    caches.check()


def test_a_match_in_the_host_is_usable_after_its_copy() -> None:
    caches = Caches(6, 16)
    caches.use(1, 2, 3, 4)
    caches.use(5, 6, 7)
    lease = caches.lease(1, 2, 3, 4, total=5)
    while lease is None:
        assert caches.copier.run()
        lease = caches.lease(1, 2, 3, 4, total=5)
    assert lease.cached_blocks == 4
    assert 0 < lease.host_blocks < 4 or lease.num_published == 0
    assert lease.host_loading
    assert caches.pool.counts().leased == 5
    assert caches.copier.begin()
    assert lease.host_loading, "its blocks are still being written"
    assert caches.copier.end()
    assert not lease.host_loading
    caches.compute(lease, 1, 2, 3, 4)
    lease.finish("done")
    caches.check()


def test_blocks_of_a_lease_that_ends_during_its_load_are_quarantined() -> None:
    caches = Caches(4, 16)
    caches.use(1, 2, 3)
    caches.use(4, 5, 6, 7)
    lease = caches.lease(1, 2, 3)
    while lease is None:
        caches.copier.run()
        lease = caches.lease(1, 2, 3)
    assert caches.copier.begin()
    lease.finish("abort")
    loading = lease.host_blocks
    assert caches.pool.counts().quarantined == loading > 0
    caches.copier.end()
    assert caches.pool.counts().quarantined == 0
    assert caches.pool.counts().leased == 0
    caches.check()


def test_blocks_are_evicted_only_after_their_copy() -> None:
    caches = Caches(4, 8)
    lease = caches.lease(1, 2, 3, 4)
    assert lease is not None
    caches.compute(lease, 1, 2, 3, 4)
    lease.finish("done")
    assert caches.lease(5, 6) is None
    assert caches.pool.copies_pending()
    assert caches.copier.begin()
    assert caches.lease(5, 6) is None
    while caches.lease(5, 6) is None:
        assert caches.copier.end() or caches.copier.begin()
    assert caches.pool.match_prefix(chain(1, 2, 3, 4)) == 4
    caches.pool.check_integrity()


def test_the_host_drops_the_least_recently_used_leaf_first() -> None:
    caches = Caches(4, 6)
    caches.use(1, 2, 3)
    for path in ((4, 5, 6), (7, 8, 9), (10, 11, 12)):
        caches.use(*path)
        caches.check()
    stats = caches.pool.host_stats()
    assert stats is not None
    assert stats.dropped > 0
    assert caches.pool.match_prefix(chain(1, 2, 3)) < 3
    assert caches.pool.match_prefix(chain(7, 8, 9)) == 3


def test_reset_empties_both_tiers() -> None:
    caches = Caches(4, 8)
    caches.use(1, 2, 3)
    caches.use(4, 5, 6)
    assert caches.host
    caches.pool.reset_prefix_cache()
    caches.check()
    assert not caches.device | caches.host
    assert caches.pool.counts().free == 4


def test_after_close_the_pool_works_without_a_host() -> None:
    caches = Caches(4, 8)
    caches.use(1, 2, 3)
    caches.use(4, 5, 6)
    loading = caches.lease(1, 2, 3)
    while loading is None:
        caches.copier.run()
        loading = caches.lease(1, 2, 3)
    assert caches.pool.host_tier is not None
    caches.pool.host_tier.close(InternalError("the host is gone"))
    assert loading.host_load is not None
    assert loading.host_load.done
    assert isinstance(loading.host_load.error, InternalError)
    loading.publish(chain(1, 2, 3))
    assert loading.num_published < 3, "blocks of a failed load are not published"
    loading.finish("failed")
    for path in ((1, 2), (6, 7, 8, 9), (3, 4)):
        lease = caches.lease(*path)
        assert lease is not None
        assert not lease.host_loading
        caches.compute(lease, *path)
        lease.finish("done")
    assert not caches.host
    caches.check()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(4, 10),
    st.integers(1, 14),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 1), min_size=1, max_size=4)), max_size=60),
)
def test_random_use_of_both_tiers(blocks: int, host: int, batch: int, actions: list[tuple[int, list[int]]]) -> None:
    """Leases begin, wait for their blocks, compute and end at any time; copies begin and end in between."""
    caches = Caches(blocks, host, batch=batch)
    live: list[tuple[Lease, Path]] = []
    for action, raw in actions:
        path = tuple(raw)
        if action <= 3 and (lease := caches.lease(*path)) is not None:
            live.append((lease, path))
        elif action <= 5 and live:
            lease, leased_path = live.pop(len(path) % len(live))
            if not lease.host_loading and action == 5:
                caches.compute(lease, *leased_path)
            lease.finish("done")
        elif action <= 7:
            caches.copier.begin()
        elif action == 8:
            caches.copier.end()
        else:
            caches.copier.run()
            if len(path) == 4:
                caches.pool.reset_prefix_cache()
        caches.check()
    caches.copier.run()
    for lease, path in live:
        caches.compute(lease, *path)
        lease.finish("done")
    caches.copier.run()
    caches.check()
    counts = caches.pool.counts()
    assert (counts.leased, counts.quarantined) == (0, 0)


class HostedWorld(World):
    """A stepper over a pool with a host tier; the fake copier makes some copies between steps."""

    def __init__(
        self,
        *,
        overlap: bool,
        blocks: int,
        host: int,
        size: int = 4,
        drafts: int = 0,
        seed: int = 0,
        policy: str = "lru",
    ) -> None:
        pool = BlockPool(blocks, size, host_blocks=host, host_batch=3, policy=policy)
        super().__init__(overlap=overlap, size=size, drafts=drafts, pool=pool)
        self.copier = FakeCopier(self.pool, self.device.kv, size)
        self._rng = random.Random(seed)

    def step(self) -> StepResult:
        result = super().step()
        for _ in range(self._rng.randrange(4) if result.outputs else 4):
            if self._rng.random() < 0.5:
                self.copier.begin()
            else:
                self.copier.end()
        self.pool.check_integrity()
        return result

    def drain(self) -> None:
        for _ in range(2000):
            if not self.stepper.has_work:
                break
            self.step()
        self.copier.run()
        super().drain()


LONG = SamplingParams(max_tokens=25)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_resumes_without_recomputing(overlap: bool) -> None:
    world = HostedWorld(overlap=overlap, blocks=16, host=64)
    prompts = {str(i): [i, 1, 2, 3, 4, 5] for i in range(3)}
    for request_id, prompt in prompts.items():
        world.add(request_id, prompt, LONG)
    world.drain()
    assert world.tokens == {request_id: answer(prompt, LONG) for request_id, prompt in prompts.items()}
    stats = world.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.fully_restored, stats.partly_recomputed, stats.recomputed_tokens) == (stats.preemptions, 0, 0)


def test_blocks_that_a_small_host_dropped_are_recomputed_and_counted() -> None:
    world = HostedWorld(overlap=False, blocks=16, host=2)
    prompts = {str(i): [i, 1, 2, 3, 4, 5] for i in range(3)}
    for request_id, prompt in prompts.items():
        world.add(request_id, prompt, LONG)
    world.drain()
    assert world.tokens == {request_id: answer(prompt, LONG) for request_id, prompt in prompts.items()}
    stats = world.scheduler.stats()
    assert stats.partly_recomputed > 0
    assert stats.recomputed_tokens > 0


def test_a_damaged_host_block_fails_only_its_request() -> None:
    world = HostedWorld(overlap=False, blocks=12, host=64)
    shared = list(range(1, 9))
    world.add("first", shared, SamplingParams(max_tokens=3))
    world.drain()
    world.add("other", [9] * 30, SamplingParams(max_tokens=12))
    world.drain()
    while world.copier.run():
        continue
    world.copier.damage.update(range(64))
    world.add("again", [*shared, 3], SamplingParams(max_tokens=3))
    world.add("neighbour", [7, 7, 7, 7, 7], SamplingParams(max_tokens=3))
    world.drain()
    assert world.ends["again"].finish_reason is FinishReason.ERROR
    assert world.ends["again"].error is not None
    assert world.ends["again"].error.kind == "BlockDamaged"
    assert world.tokens["neighbour"] == answer([7, 7, 7, 7, 7], SamplingParams(max_tokens=3))
    world.copier.damage.clear()
    world.add("once more", [*shared, 3], SamplingParams(max_tokens=3))
    world.drain()
    assert world.tokens["once more"] == answer([*shared, 3], SamplingParams(max_tokens=3))


@settings(max_examples=40, deadline=None)
@given(
    st.booleans(),
    st.integers(9, 24),
    st.integers(1, 30),
    st.sampled_from([0, 0, 3]),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 14), st.integers(1, 18), st.sampled_from("aaaaasx-")), max_size=14
    ),
    st.integers(0, 1000),
    st.sampled_from(["lru", "gdsf", "s3fifo"]),
)
def test_random_loads_with_a_host_tier(
    overlap: bool, blocks: int, host: int, drafts: int, plan: list[tuple[int, int, int, str]], seed: int, policy: str
) -> None:
    """Requests with shared prefixes arrive, are aborted and preempted; each gets the tokens that it would get alone."""
    world = HostedWorld(overlap=overlap, blocks=blocks, host=host, drafts=drafts, seed=seed, policy=policy)
    expected: dict[str, list[int]] = {}
    for number, (group, length, output, kind) in enumerate(plan):
        request_id = str(number)
        prompt = [group % 3, 1, 2, 3, 4, *range(length)]
        params = SamplingParams(max_tokens=output)
        if kind == "-":
            for _ in range(group):
                world.step()
            continue
        if kind == "x" and number:
            world.abort(str(number - 1))
            expected.pop(str(number - 1), None)
            continue
        if -(-(len(prompt) + output) // 4) > blocks:
            continue
        if kind == "s":
            seq = world.receive(request_id, prompt, params) if output > 1 else None
            if seq is None:
                continue
        else:
            world.add(request_id, prompt, params)
        expected[request_id] = answer(prompt, params)
        world.step()
    world.drain()
    for request_id, tokens in expected.items():
        assert world.tokens[request_id] == tokens
    stats = world.scheduler.stats()
    assert stats.fully_restored + stats.partly_recomputed <= stats.preemptions


def test_paused_sequences_give_up_their_slots_although_idle_blocks_have_no_copy() -> None:
    """Idle blocks without a copy are no reason to wait, because the pool has free blocks."""
    world = HostedWorld(overlap=False, blocks=100, host=64)
    world.add("idle", [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=2))
    world.drain()
    paused = [world.add(f"p{i}", [i, 2, 3], LONG) for i in range(4)]
    for _ in range(3):
        world.step()
    for seq in paused:
        seq.paused = True
    world.add("other", [9, 9, 9], SamplingParams(max_tokens=3))
    for _ in range(20):
        if "other" in world.ends:
            break
        world.step()
    assert world.tokens["other"] == answer([9, 9, 9], SamplingParams(max_tokens=3))
    for seq in paused:
        seq.paused = False
    world.drain()
