"""The policy of the file tiers with a store that is searched: loads that find less than they asked for, and pauses.

The caches are those of test_disk_tier.py, with the files of several pods.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.tiers import file_tier, shared_store
from engine.kv.tiers.block_store import BlockStore
from engine.kv.tiers.file_tier import FileTier
from engine.kv.tiers.shared_store import SharedStore
from tests.rigs.engine.fake_copier import RUBBISH
from tests.unit.test_disk_tier import BLOCK_BYTES, DiskCaches
from tests.unit.test_host_tier import Path as TokenPath
from tests.unit.test_host_tier import chain


class SharedCaches(DiskCaches):
    """Pool, host tier and shared tier of one pod."""

    def attach(self, directory: Path) -> tuple[BlockStore, FileTier]:
        store = SharedStore(directory, "ab" * 16, BLOCK_BYTES, SharedStore.min_bytes(BLOCK_BYTES))
        return store, self.pool.attach_shared_tier(store)

    def begin_load(self) -> None:
        """Begins the next load and looks for its blocks."""
        if self.load is None and self.tier._loads:
            self.load = self.tier.next_load()
            assert self.load is not None
            if self.tier.narrow(self.load, self.store.find(self.load.keys)):
                self.copier.host.update({(block, 0): RUBBISH for block in self.load.host_blocks})
            else:
                self.tier.finish_load(self.load, 0, 0.01)
                self.load = None


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def pods(directory: Path) -> Iterator[list[SharedCaches]]:
    """Two pods; the first one has written four prompts."""
    both = [SharedCaches(directory, 6, 16) for _ in range(2)]
    assert both[0].pool.host_tier is not None
    both[0].pool.host_tier.save_all()
    for number in range(4):
        both[0].prompt(number, 1, 2, 3, waits=True)
        both[0].settle()
    yield both
    for pod in both:
        pod.check()
        pod.store.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no load late."""
    monkeypatch.setattr(file_tier, "MIN_WAIT_S", 20.0)
    for name in ("FIND_TIMEOUT_S", "READ_TIMEOUT_S", "WRITE_TIMEOUT_S"):
        monkeypatch.setattr(shared_store, name, 20.0)


def test_a_prompt_that_another_pod_has_computed_is_read(pods: list[SharedCaches]) -> None:
    assert pods[1].prompt(2, 1, 2, 3, waits=True) == 4
    stats = pods[1].tier.stats()
    assert (stats.loaded, stats.searches, stats.absent) == (4, 1, 0)


def test_only_what_is_there_is_read(pods: list[SharedCaches]) -> None:
    assert pods[1].prompt(2, 1, 7, 7, 7, waits=True) == 2
    assert pods[1].prompt(9, 9, 9, waits=True) == 0
    assert pods[1].tier.stats().absent == 1


def test_a_block_that_goes_after_the_search_is_a_miss(pods: list[SharedCaches]) -> None:
    load = pods[1].pool.load_from_files(chain(2, 1, 2, 3))
    pods[1].begin_load()
    assert not load.done
    assert isinstance(pods[1].store, SharedStore)
    pods[1].store.path_of(chain(2, 1, 2)[2]).unlink()
    pods[1].end_load()
    assert load.done
    assert pods[1].use(2, 1, 2, 3) == 2


def test_reading_less_than_was_asked_for_may_not_be_worth_it(pods: list[SharedCaches]) -> None:
    tier = pods[1].tier
    tier.rate.observe(BLOCK_BYTES, 1.0)  # a second for each block
    tier.compute_s = lambda tokens: 1.0 if tokens <= 2 * tier.block_size else 9.0
    assert pods[1].prompt(3, 1, 7, 7, waits=True) == 0
    assert tier.stats().computed == 1


def test_two_prompts_with_the_same_start_wait_for_one_load(pods: list[SharedCaches]) -> None:
    loads = [pods[1].pool.load_from_files(chain(2, 1, 2, last)) for last in (3, 4)]
    pods[1].begin_load()
    assert not any(load.done for load in loads)
    pods[1].end_load()
    assert all(load.done for load in loads)
    assert pods[1].tier.stats().searches == 1


def test_a_prompt_waits_no_longer_than_computing_takes(pods: list[SharedCaches]) -> None:
    tier = pods[1].tier
    tier.compute_s = lambda tokens: 0.01
    load = pods[1].pool.load_from_files(chain(2, 1, 2, 3))
    assert load.expires_at <= time.monotonic() + 0.01
    while not load.done:
        time.sleep(0.001)
    tier.compute_s = lambda tokens: 30.0
    assert pods[1].prompt(0, 1, 2, 3, waits=True) == 4
    assert tier.stats().late == 1, "the thread has left out the first load"


def test_a_search_that_takes_longer_than_computing_is_not_made(pods: list[SharedCaches]) -> None:
    tier = pods[1].tier
    tier.search_rate.observe(1, 9.0)
    tier.compute_s = lambda tokens: 8.0
    assert pods[1].pool.load_from_files(chain(2, 1, 2, 3)).done
    assert tier.stats().computed == 1
    tier.compute_s = lambda tokens: 10.0
    assert pods[1].prompt(2, 1, 2, 3, waits=True) == 4


def test_no_prompt_waits_behind_a_load_that_hangs(pods: list[SharedCaches]) -> None:
    first = pods[1].pool.load_from_files(chain(2, 1, 2, 3))
    assert pods[1].tier.next_load() is first
    second = pods[1].pool.load_from_files(chain(0, 1, 2, 3))
    assert not second.done
    first.expires_at = time.monotonic() - 2 * file_tier.MIN_WAIT_S
    assert pods[1].pool.load_from_files(chain(1, 1, 2, 3)).done
    pods[1].tier.finish_load(first, 0, 40.0)
    assert not pods[1].pool.load_from_files(chain(3, 1, 2, 3)).done, "the files answer again"


def test_the_end_of_each_load_and_copy_is_told(pods: list[SharedCaches]) -> None:
    told: list[int] = []
    pods[1].pool.on_progress = lambda: told.append(1)
    assert pods[1].prompt(9, 9, 9, waits=True) == 0
    assert len(told) == 1
    assert pods[1].prompt(2, 1, 2, 3, waits=True) == 4
    pods[1].copier.run()
    assert len(told) >= 3


def test_a_batch_of_writes_has_a_bounded_number_of_blocks(
    pods: list[SharedCaches], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "WRITE_BATCH", 2)
    pods[1].prompt(8, 1, 2, 3, waits=False)
    pods[1].prompt(9, 1, 2, 3, waits=False)
    pods[1].copier.run()
    pods[1].begin_write()
    assert len(pods[1].writes) == 2
    pods[1].end_write()


def test_writes_begin_after_a_delay_and_at_a_stop_at_once(
    pods: list[SharedCaches], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = pods[1].tier
    monkeypatch.setattr(file_tier, "WRITE_DELAY_S", 0.02)
    assert pods[1].pool.host_tier is not None
    pods[1].pool.host_tier.save_all()
    pods[1].prompt(8, 1, 2, 3, waits=False)
    pods[1].copier.run()
    assert tier._write_at > 0.0
    writes = tier.next_writes()
    assert writes
    assert time.monotonic() >= tier._write_at
    tier.finish_writes(writes, 0)
    monkeypatch.setattr(file_tier, "WRITE_DELAY_S", 3_600.0)
    pods[1].prompt(9, 1, 2, 3, waits=False)
    pods[1].copier.run()
    tier.stop(20.0)
    writes = tier.next_writes()
    assert writes, "the process ends"
    tier.finish_writes(writes, 0)


def test_no_prompt_waits_for_a_store_that_has_failed(pods: list[SharedCaches]) -> None:
    pod = pods[1]
    first, second = (pod.pool.load_from_files(chain(number, 1, 2, 3)) for number in (0, 1))
    under_way = pod.tier.next_load()
    assert under_way is first
    pod.tier.finish_load(first, 0, 1.0, pause_s=30.0)
    assert not pod.tier.working
    assert pod.pool.load_from_files(chain(2, 1, 2, 3)).done
    pod.tier.stop(0.0)
    assert pod.tier.next_load() is None
    pod.tier.close()
    assert second.done


def test_a_tier_works_again_once_the_first_work_after_the_pause_succeeds(pods: list[SharedCaches]) -> None:
    pod = pods[1]
    pod.pool.load_from_files(chain(0, 1, 2, 3))
    load = pod.tier.next_load()
    assert load is not None
    pod.tier.finish_load(load, 0, 1.0, pause_s=1e-9)
    time.sleep(0.001)
    assert pod.prompt(1, 1, 2, 3, waits=True) == 4
    assert pod.tier.working
    assert not pod.tier.reads.failing


def test_a_reset_during_a_load_and_a_write_leaves_nothing(pods: list[SharedCaches]) -> None:
    load = pods[1].pool.load_from_files(chain(0, 1, 2, 3))
    pods[1].begin_load()
    pods[1].prompt(9, 9, 9, waits=False)
    pods[1].copier.run()
    pods[1].begin_write()
    pods[1].pool.reset_prefix_cache()
    pods[1].end_load()
    pods[1].end_write()
    pods[1].copier.run()
    assert load.done
    assert pods[1].pool.match_prefix(chain(0, 1, 2, 3)) == 0
    assert pods[1].pool.load_from_files(chain(0, 1, 2, 3)).done, "the files are not removed yet"
    pods[1].store.append([])
    assert pods[1].prompt(0, 1, 2, 3, waits=True) == 0


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
steps = st.one_of(
    st.tuples(st.just("prompt"), paths, st.booleans()),
    st.tuples(
        st.sampled_from(
            ["begin_write", "end_write", "begin_load", "end_load", "begin_copy", "end_copy", "reset", "settle", "lose"]
        )
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), steps), min_size=10, max_size=60),
    st.integers(5, 8),
    st.sampled_from([8, 16]),
)
def test_no_order_of_events_of_two_pods_gives_wrong_kv(
    events: list[tuple[int, tuple[str, TokenPath, bool] | tuple[str]]], blocks: int, host: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        pods = [SharedCaches(Path(name), blocks, host) for _ in range(2)]
        for which, event in events:
            caches = pods[which]
            match event:
                case ("prompt", path, waits):
                    caches.prompt(*path, waits=waits)  # checks the KV of every cached block
                case ("begin_copy",):
                    caches.copier.begin()
                case ("end_copy",):
                    caches.copier.end()
                case ("reset",):
                    caches.copier.run()
                    caches.pool.reset_prefix_cache()
                case ("lose",):
                    for file in list(Path(name).glob("*/*/*.kv"))[:2]:
                        file.unlink()
                case (kind,):
                    getattr(caches, kind)()
            caches.check()
        for path in {event[1] for _, event in events if len(event) == 3}:
            for caches in pods:
                caches.prompt(*path, waits=True)
        for caches in pods:
            caches.check()
            caches.store.close()
