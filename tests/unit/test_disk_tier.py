"""Pool, host tier and disk tier together, with writes and loads that take their time: no block gets wrong KV.

A write reads the host memory, and a load fills it, when it ends, which is as late as possible. Meanwhile prompts come,
blocks are copied and evicted, and the cache is reset.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InternalError
from engine.kv.tiers.block_store import BlockStore, StoredBlock
from engine.kv.tiers.file_load import FileLoad, saves_time
from engine.kv.tiers.file_tier import FileTier, HostWrite
from engine.kv.tiers.segment_store import SegmentStore
from tests.rigs.engine.fake_copier import RUBBISH
from tests.unit.test_host_tier import Caches, chain
from tests.unit.test_host_tier import Path as TokenPath

BLOCK_BYTES = 8
DISK_BLOCKS = 40


class DiskCaches(Caches):
    """The caches of test_host_tier.py with a disk tier, whose two threads are methods."""

    def __init__(self, directory: Path, blocks: int, host: int, *, batch: int = 4) -> None:
        super().__init__(blocks, host, batch=batch)
        self.store, self.tier = self.attach(directory)
        self.store.scan(lambda: False)
        self.writes: list[HostWrite] = []
        self.load: FileLoad | None = None
        self.loaded_prompts = 0

    def attach(self, directory: Path) -> tuple[BlockStore, FileTier]:
        size = DISK_BLOCKS * (SegmentStore.min_bytes(BLOCK_BYTES) // 8)
        store = SegmentStore(directory, "ab" * 16, BLOCK_BYTES, size)
        return store, self.pool.attach_disk_tier(store)

    def begin_write(self) -> None:
        if not self.writes:
            with self.pool.lock:
                self.writes = self.tier._choose_writes()

    def end_write(self) -> None:
        contents = [self.copier.host[write.host_block, 0] for write in self.writes]
        assert RUBBISH not in contents
        blocks = [
            StoredBlock(write.key, write.parent, memoryview(value.to_bytes(BLOCK_BYTES, "little", signed=True)))
            for write, value in zip(self.writes, contents, strict=True)
        ]
        if blocks:
            self.tier.finish_writes(self.writes, self.store.append(blocks, self.tier.write_epoch))
        self.writes = []

    def begin_load(self) -> None:
        if self.load is None and self.tier._loads:
            self.load = self.tier.next_load()
            assert self.load is not None
            self.copier.host.update({(block, 0): RUBBISH for block in self.load.host_blocks})

    def end_load(self) -> None:
        load, self.load = self.load, None
        if load is not None:
            targets = [bytearray(BLOCK_BYTES) for _ in load.keys]
            intact = self.store.read(load.keys, [memoryview(target) for target in targets])
            for block, target in zip(load.host_blocks[:intact], targets, strict=False):
                self.copier.host[block, 0] = int.from_bytes(target, "little", signed=True)
            self.tier.finish_load(load, intact, 0.01)

    def prompt(self, *path: int, waits: bool) -> int:
        """Runs a prompt that looks at the disk first; returns the blocks that came from host memory."""
        load = self.pool.load_from_files(chain(*path))
        while waits and not load.done:
            self.begin_load()
            self.end_load()
        return self.use(*path)

    def settle(self) -> None:
        """Writes all that can be written."""
        self.copier.run()
        self.begin_write()
        while self.writes:
            self.end_write()
            self.begin_write()

    def check(self) -> None:
        super().check()
        assert set(self.store.hashes()) <= {h for h in self.store.hashes() if self.store.match([h]) == 1}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_prompt_that_left_pool_and_host_comes_back_from_the_disk(directory: Path) -> None:
    caches = DiskCaches(directory, 6, 16)
    for number in range(8):
        caches.prompt(number, 1, 2, 3, waits=True)
        caches.settle()
    assert caches.pool.match_prefix(chain(0, 1, 2, 3)) == 0, "pool and host have forgotten it"
    assert caches.prompt(0, 1, 2, 3, waits=True) == 4
    assert caches.tier.stats().loaded == 4
    caches.check()


def test_the_start_of_a_prompt_that_stays_in_use_is_written_before_its_continuations(directory: Path) -> None:
    caches = DiskCaches(directory, 8, 16)
    first = caches.lease(7, 7, total=2)
    assert first is not None
    caches.compute(first, 7, 7)
    for number in range(8):  # the lease of 7, 7 keeps these blocks in the pool all the time
        caches.prompt(7, 7, number, waits=True)
        caches.settle()
    assert caches.store.match(chain(7, 7, 0)) == 3
    first.finish("done")
    caches.check()


def test_a_reset_during_a_load_and_a_write_leaves_nothing(directory: Path) -> None:
    caches = DiskCaches(directory, 6, 16)
    for number in range(8):
        caches.prompt(number, 1, 2, 3, waits=True)
        caches.settle()
    assert not caches.pool.load_from_files(chain(0, 1, 2, 3)).done
    caches.begin_load()
    caches.prompt(9, 9, 9, waits=False)
    caches.copier.run()
    caches.begin_write()
    caches.pool.reset_prefix_cache()
    caches.end_load()
    caches.end_write()
    caches.copier.run()
    assert len(caches.store) == 0
    assert caches.pool.match_prefix(chain(0, 1, 2, 3)) == 0
    caches.check()


def test_blocks_that_leave_the_pool_during_a_reset_do_not_reach_the_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = DiskCaches(directory, 4, 16)
    host_tier, on_saved = caches.pool.host_tier, caches.tier.on_saved
    assert host_tier is not None
    host_tier.save_all()
    caches.prompt(1, 2, waits=False)
    assert caches.copier.begin(), "a copy to the host is under way"

    def save_and_choose(keys: list[bytes]) -> None:
        on_saved(keys)
        caches.writes = caches.tier._choose_writes()  # the thread that writes is quick

    monkeypatch.setattr(caches.tier, "on_saved", save_and_choose)
    reset = threading.Thread(target=caches.pool.reset_prefix_cache)
    reset.start()
    time.sleep(0.05)
    caches.copier.end()
    reset.join()
    assert caches.writes
    caches.end_write()
    assert len(caches.store) == 0
    caches.check()


def test_blocks_that_an_error_kept_from_the_disk_are_written_later(directory: Path) -> None:
    caches = DiskCaches(directory, 6, 16)
    for number in range(3):
        caches.prompt(number, 1, 2, 3, waits=False)
    caches.copier.run()
    caches.begin_write()
    failed = [write.key for write in caches.writes]
    assert failed
    caches.tier.finish_writes(caches.writes, 0, pause_s=1e-9)
    caches.writes = []
    assert caches.tier.stats().written == 0
    caches.settle()
    assert set(failed) <= set(caches.store.hashes())
    assert not caches.tier.busy
    caches.check()


def test_a_block_is_written_again_if_its_file_went_and_the_host_has_it(directory: Path) -> None:
    caches = DiskCaches(directory, 6, 16)
    assert caches.pool.host_tier is not None
    caches.pool.host_tier.save_all()
    for number in range(3):
        caches.prompt(7, 7, number, waits=False)
        caches.settle()
    assert caches.store.match(chain(7, 7)) == 2
    store = caches.store
    assert isinstance(store, SegmentStore)
    with store._lock:
        store._drop(chain(7))  # as if room had been made for other blocks
    assert len(caches.store) == 0
    for number in range(3, 6):
        caches.prompt(7, 7, number, waits=False)
        caches.settle()
    assert caches.store.match(chain(7, 7)) == 2
    assert not caches.tier.busy
    with store._lock:
        store._drop(chain(7))
    for number in range(6, 9):
        caches.prompt(7, 7, number, waits=False)
        caches.settle()
    assert not caches.tier.busy, "a disk that is too small for a chain is not written forever"
    caches.check()


def test_a_load_that_is_late_before_it_begins_is_not_read(directory: Path) -> None:
    caches = DiskCaches(directory, 6, 16)
    for number in range(8):
        caches.prompt(number, 1, 2, 3, waits=True)
        caches.settle()
    late, other = (caches.pool.load_from_files(chain(number, 1, 2, 3)) for number in (0, 1))
    late.expires_at = 0.0
    caches.begin_load()
    assert caches.load is other
    caches.end_load()
    assert caches.tier.stats().late == 1
    caches.check()


@pytest.mark.parametrize("which", ["disk", "host"])
def test_a_tier_that_has_failed_offers_no_block_on_the_disk(directory: Path, which: str) -> None:
    caches = DiskCaches(directory, 6, 16)
    for number in range(8):
        caches.prompt(number, 1, 2, 3, waits=True)
        caches.settle()
    stored = len(caches.pool.disk_hashes())
    assert not caches.pool.load_from_files(chain(0, 1, 2, 3)).done
    if which == "disk":
        caches.tier.close(failed=True)
    else:
        assert caches.pool.host_tier is not None
        caches.pool.host_tier.close(InternalError("failed"))
    assert caches.pool.disk_hashes() == []
    assert not caches.tier.working
    caches.check()
    assert caches.prompt(0, 1, 2, 3, waits=True) == 0
    caches.store.close()
    again = SegmentStore(directory, "ab" * 16, BLOCK_BYTES, 1 << 20)
    assert again.scan() == stored


def test_reading_is_chosen_by_both_times_and_tried_while_one_is_unknown() -> None:
    assert saves_time(0.1, 0.2)
    assert not saves_time(0.2, 0.1)
    assert saves_time(0.0, 0.1)
    assert saves_time(5.0, 0.0)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
steps = st.one_of(
    st.tuples(st.just("prompt"), paths, st.booleans()),
    st.tuples(st.sampled_from(["begin_write", "end_write", "begin_load", "end_load", "begin_copy", "end_copy"])),
    st.tuples(st.sampled_from(["reset", "settle"])),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, min_size=10, max_size=60), st.integers(5, 8), st.sampled_from([8, 16, 24]))
def test_no_order_of_events_gives_wrong_kv(
    events: list[tuple[str, TokenPath, bool] | tuple[str]], blocks: int, host: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        caches = DiskCaches(Path(name), blocks, host)
        for event in events:
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
                case (kind,):
                    getattr(caches, kind)()
            caches.check()
        for path in {event[1] for event in events if len(event) == 3}:
            caches.prompt(*path, waits=True)
        caches.check()
