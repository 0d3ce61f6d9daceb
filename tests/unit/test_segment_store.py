"""The files of the disk tier: a reopened store has what was written; damage costs blocks, never truth."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.tiers.block_store import StoredBlock
from engine.kv.tiers.segment_format import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from engine.kv.tiers.segment_store import SegmentStore

BLOCK = 32
FINGERPRINT = "ab" * 16
RECORD = RECORD_HEADER_BYTES + BLOCK
ROOMY = 1 << 20


def key(path: Sequence[int]) -> bytes:
    return bytes([len(path), *path]).ljust(16, b"\1")


def content(path: Sequence[int]) -> bytes:
    return (key(path) * BLOCK)[:BLOCK]


def stored(path: Sequence[int]) -> StoredBlock:
    return StoredBlock(key(path), key(path[:-1]) if len(path) > 1 else b"", memoryview(content(path)))


def chain(*path: int) -> list[bytes]:
    return [key(path[: i + 1]) for i in range(len(path))]


def write(store: SegmentStore, *path: int) -> int:
    return store.append([stored(path[: i + 1]) for i in range(len(path))])


def read(store: SegmentStore, *path: int) -> int:
    """Reads what the store has of a chain, checks the content, and returns the number of blocks."""
    keys = chain(*path)
    keys = keys[: store.match(keys)]
    targets = [bytearray(BLOCK) for _ in keys]
    count = store.read(keys, [memoryview(target) for target in targets])
    for number, target in enumerate(targets[:count]):
        assert bytes(target) == content(path[: number + 1])
    return count


def open_store(
    directory: Path, max_bytes: int = ROOMY, fingerprint: str = FINGERPRINT, block: int = BLOCK
) -> SegmentStore:
    store = SegmentStore(directory, fingerprint, block, max_bytes)
    store.scan()
    return store


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*.kv")
    return path


def test_a_reopened_store_has_all_blocks(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    assert write(first, 1, 2, 3) == 3
    assert write(first, 1, 2, 4) == 1, "the shared start is there already"
    first.close()
    announced: list[bytes] = []
    second = SegmentStore(tmp_path, FINGERPRINT, BLOCK, ROOMY, on_stored=announced.extend)
    assert second.scan() == 4
    assert set(announced) == {*chain(1, 2, 3), *chain(1, 2, 4)}
    assert announced.index(key([1])) < announced.index(key([1, 2])) < announced.index(key([1, 2, 4]))
    assert read(second, 1, 2, 3) == read(second, 1, 2, 4) == 3
    assert not second.inconsistencies()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, SEGMENT_HEADER_BYTES + 3 * RECORD - 1))
def test_a_crash_at_any_byte_loses_only_what_was_not_written(cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        store = open_store(directory)
        write(store, 1, 2, 3)
        store.close()
        os.truncate(only_file(directory), cut)
        again = open_store(directory)
        whole = max(0, (cut - SEGMENT_HEADER_BYTES) // RECORD)
        assert read(again, 1, 2, 3) == len(again) == whole
        assert write(again, 1, 2, 3) == 3 - whole
        again.close()
        assert read(open_store(directory), 1, 2, 3) == 3


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, SEGMENT_HEADER_BYTES + 3 * RECORD - 1), flip=st.integers(1, 255), reopened=st.booleans())
def test_a_damaged_byte_never_gives_a_wrong_block(at: int, flip: int, reopened: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        store = open_store(directory)
        write(store, 1, 2, 3)
        path = only_file(directory)
        raw = bytearray(path.read_bytes())
        raw[at] ^= flip
        path.write_bytes(raw)
        if reopened:
            store.close()
            store = open_store(directory)
        count = read(store, 1, 2, 3)  # checks the content
        damaged = max(0, (at - SEGMENT_HEADER_BYTES) // RECORD)
        assert count in (damaged, 3), "the blocks before the damaged one are intact; padding may be damaged"
        assert store.match(chain(1, 2, 3)) == count
        assert not store.inconsistencies()


def test_the_bytes_are_bounded_and_the_start_of_a_used_prompt_stays(tmp_path: Path) -> None:
    announced: set[bytes] = set()
    limit = SegmentStore.min_bytes(BLOCK)
    store = SegmentStore(
        *(tmp_path, FINGERPRINT, BLOCK, limit), on_stored=announced.update, on_evicted=announced.difference_update
    )
    write(store, 9, 8)
    for number in range(20):
        write(store, number % 7, number)
        assert read(store, 9, 8) == 2, "each use makes the segments of the whole chain recent"
        assert store.size <= limit
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= limit
        assert not store.inconsistencies()
        assert announced == set(store.hashes())
    store.close()
    smaller = open_store(tmp_path, limit // 2)
    assert smaller.size <= limit // 2


def test_files_of_another_model_are_not_used_and_go_first(tmp_path: Path) -> None:
    other = open_store(tmp_path, fingerprint="cd" * 16)
    write(other, 1, 2)
    other.close()
    limit = SegmentStore.min_bytes(BLOCK)
    store = open_store(tmp_path, limit)
    assert read(store, 1, 2) == 0
    for number in range(9):
        write(store, number)
    assert store.size <= limit
    assert open_store(tmp_path, fingerprint="cd" * 16, max_bytes=ROOMY).match(chain(1)) == 0


def test_cleared_blocks_do_not_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    store.clear()
    assert len(store) == store.match(chain(1, 2)) == 0
    assert write(store, 3) == 1
    store.close()
    assert set(open_store(tmp_path).hashes()) == set(chain(3))


def test_a_full_disk_raises_and_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    real = os.pwritev

    def part(file: int, parts: Sequence[bytes], offset: int) -> int:
        return real(file, [bytes(parts[0])[:7]], offset)

    monkeypatch.setattr("os.pwritev", part)
    with pytest.raises(OSError, match="in part") as failed:
        write(store, 1, 2, 3)
    assert failed.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="in part"):
        write(store, 5)
    monkeypatch.undo()
    assert read(store, 1, 2) == 2
    assert write(store, 1, 2, 3) == 1
    store.close()
    again = open_store(tmp_path)
    assert read(again, 1, 2, 3) == 3
    assert again.damaged == 0


def test_a_file_that_vanishes_costs_its_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    only_file(tmp_path).unlink()
    assert store.read(chain(1, 2), [memoryview(bytearray(BLOCK)) for _ in range(2)]) == 0
    assert store.match(chain(1)) == 0
    assert not store.inconsistencies()


def test_a_file_that_cannot_be_removed_stops_the_writes_and_keeps_the_bytes_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = SegmentStore.min_bytes(BLOCK)
    store = open_store(tmp_path, limit)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    failed = 0
    for number in range(20):
        try:
            write(store, number)
        except PermissionError:
            failed += 1
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= limit
    assert failed
    assert store.has_chores
    store.clear()
    store.close()
    assert "cannot be removed" in caplog.text
    assert open_store(tmp_path, limit // 2).size <= limit // 2, "a start does not fail either"
    monkeypatch.undo()
    again = open_store(tmp_path, limit)
    assert write(again, 50, 51) == 2
    assert read(again, 50, 51) == 2


def test_strange_names_in_the_directory_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "000000000000.kv").mkdir()
    (tmp_path / "000000000001.kv").symlink_to("/dev/zero")
    for name in ("2.kv", "-00000000003.kv", "x.kv"):
        (tmp_path / name).touch()
    store = open_store(tmp_path)
    assert write(store, 1, 2) == 2
    assert read(store, 1, 2) == 2
    store.close()
    assert read(open_store(tmp_path), 1, 2) == 2


def test_an_error_of_the_disk_in_a_scan_costs_the_rest_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2, 3)
    store.close()
    real = os.pread

    def broken(file: int, size: int, offset: int) -> bytes:
        if offset >= SEGMENT_HEADER_BYTES + 2 * RECORD:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, size, offset)

    monkeypatch.setattr("os.pread", broken)
    again = open_store(tmp_path)
    assert read(again, 1, 2, 3) == again.match(chain(1, 2, 3)) == 2
    assert again.damaged == 1
    assert write(again, 1, 2, 3) == 1, "the unreadable file keeps its number"
    assert read(again, 1, 2, 3) == 3


def test_a_clear_during_the_scan_holds_for_all_files(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    store.close()
    again = SegmentStore(tmp_path, FINGERPRINT, BLOCK, ROOMY)

    def clear() -> bool:
        again.clear()
        return False

    assert again.scan(clear) == 0
    assert again.match(chain(1)) == 0
    assert not list(tmp_path.glob("*.kv"))
    assert not again.inconsistencies()


def test_forgotten_blocks_come_back_with_the_next_start(tmp_path: Path) -> None:
    announced: set[bytes] = set()
    store = SegmentStore(
        *(tmp_path, FINGERPRINT, BLOCK, ROOMY), on_stored=announced.update, on_evicted=announced.difference_update
    )
    write(store, 1, 2)
    store.forget()
    assert not announced
    assert len(store) == store.match(chain(1, 2)) == 0
    assert not store.inconsistencies()
    store.close()
    assert read(open_store(tmp_path), 1, 2) == 2


def test_no_call_touches_a_file_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, touched = open_store(tmp_path), []
    write(store, 1, 2)

    def utime(path: Path) -> None:
        assert not store._lock.locked(), "a slow disk would stop the threads that ask the index"
        touched.append(path)

    monkeypatch.setattr("os.utime", utime)
    monkeypatch.setattr("engine.kv.tiers.segment_index.TOUCH_S", -1.0)
    assert read(store, 1, 2) == 2
    assert write(store, 1, 3) == 1
    assert len(touched) == 2


class StoreMachine(RuleBasedStateMachine):
    """Writes, reads, evictions, damage and restarts in any order."""

    paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.announced: set[bytes] = set()
        self.harmed = False
        self.open()

    def open(self) -> None:
        self.announced.clear()
        self.store = SegmentStore(
            Path(self.folder.name),
            FINGERPRINT,
            BLOCK,
            12 * (RECORD + SEGMENT_HEADER_BYTES),
            on_stored=self.announced.update,
            on_evicted=self.announced.difference_update,
        )
        self.store.scan()

    @rule(path=paths)
    def write(self, path: list[int]) -> None:
        write(self.store, *path)
        assert self.store.match(chain(*path)) == len(path)

    @rule(path=paths)
    def read(self, path: list[int]) -> None:
        assert read(self.store, *path) <= len(path)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert not self.announced

    @rule()
    def restart(self) -> None:
        before = set(self.store.hashes())
        self.store.close()
        self.open()
        assert self.harmed or before <= set(self.store.hashes()), (
            "also blocks come back whose parents were gone for a while"
        )

    @rule(cut=st.integers(0, 3 * RECORD), data=st.data())
    def crash(self, cut: int, data: st.DataObject) -> None:
        self.store.close()
        self.harmed, files = True, sorted(Path(self.folder.name).glob("*.kv"))
        if files:
            path = data.draw(st.sampled_from(files))
            os.truncate(path, max(0, path.stat().st_size - cut))
        self.open()

    @precondition(lambda self: len(self.store) > 0)
    @rule(at=st.integers(0, 1 << 16), data=st.data())
    def damage(self, at: int, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(Path(self.folder.name).glob("*.kv"))))
        self.harmed, raw = True, bytearray(path.read_bytes())
        if raw:
            raw[at % len(raw)] ^= 0x55
            with path.open("r+b") as file:
                file.write(raw)

    @invariant()
    def consistent(self) -> None:
        assert not self.store.inconsistencies()
        assert self.announced == set(self.store.hashes())

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
