"""The files of the shared tier: several pods in one directory, bounds, damage, and a file system that hangs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.tiers import shared_folders, shared_store
from engine.kv.tiers.block_store import StoredBlock
from engine.kv.tiers.deadline_workers import DeadlineWorkers
from engine.kv.tiers.shared_folders import COUNTER, NUM_FOLDERS
from engine.kv.tiers.shared_store import SharedStore

BLOCK_BYTES = 64
FINGERPRINT = "ab" * 16
FILE_BYTES = SharedStore.min_bytes(BLOCK_BYTES) // (NUM_FOLDERS * 4)
MIN_BYTES = SharedStore.min_bytes(BLOCK_BYTES)


def key_of(number: int, folder: int | None = None) -> bytes:
    digest = blake2b(number.to_bytes(8, "little"), digest_size=16).digest()
    return digest if folder is None else bytes([folder]) + digest[1:]


def content_of(key: bytes) -> bytes:
    return blake2b(key, digest_size=BLOCK_BYTES).digest()


def block(key: bytes, parent: bytes = b"") -> StoredBlock:
    return StoredBlock(key, parent, memoryview(content_of(key)))


def read(store: SharedStore, keys: list[bytes]) -> int:
    """Reads what is there, and checks the content."""
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    intact = store.read(keys, [memoryview(target) for target in targets])
    assert all(bytes(target) == content_of(key) for key, target in zip(keys[:intact], targets, strict=False))
    return intact


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def open_store(directory: Path) -> Iterator[Callable[..., SharedStore]]:
    stores: list[SharedStore] = []

    def make(max_bytes: int = 4 * MIN_BYTES, fingerprint: str = FINGERPRINT) -> SharedStore:
        stores.append(SharedStore(directory, fingerprint, BLOCK_BYTES, max_bytes))
        stores[-1].scan()
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine lets no call time out."""
    for name in ("FIND_TIMEOUT_S", "READ_TIMEOUT_S", "WRITE_TIMEOUT_S"):
        monkeypatch.setattr(shared_store, name, 30.0)


def files_of(store: SharedStore) -> list[Path]:
    return sorted(store.directory.glob("*/*.kv"))


KEYS = [key_of(number) for number in range(30)]


def test_another_pod_reads_what_one_has_written(open_store: Callable[..., SharedStore]) -> None:
    writer, reader = open_store(), open_store()
    assert writer.append([block(key) for key in KEYS[:20]]) == 20
    assert KEYS[0] not in reader
    assert reader.match(KEYS) == len(KEYS), "only the files know"
    assert reader.find(KEYS) == 20
    assert read(reader, KEYS) == 20
    assert reader.append([block(key) for key in KEYS]) == 10, "those that are there are not written again"
    assert writer.find(KEYS) == 30
    assert open_store().size == 30 * FILE_BYTES


def test_pods_of_another_layout_find_nothing(open_store: Callable[..., SharedStore]) -> None:
    assert open_store().append([block(key) for key in KEYS]) == 30
    other = open_store(fingerprint="cd" * 16)
    assert other.find(KEYS) == 0
    assert read(other, KEYS) == 0


def cut(path: Path) -> None:
    os.truncate(path, FILE_BYTES - 9)


def corrupt(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def replace_by_another_block(path: Path) -> None:
    other = next(file for file in sorted(path.parent.parent.glob("*/*.kv")) if file != path)
    path.write_bytes(other.read_bytes())


def make_foreign(path: Path) -> None:
    path.write_bytes(b"x" * FILE_BYTES)


@pytest.mark.parametrize("harm", [cut, corrupt, replace_by_another_block, make_foreign, Path.unlink])
def test_a_harmed_file_is_a_miss_and_is_written_again(
    open_store: Callable[..., SharedStore], harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    store.append([block(key) for key in KEYS])
    harm(store.path_of(KEYS[7]))
    assert read(store, KEYS) == 7
    assert store.damaged == (harm is not Path.unlink)
    assert ("computed again" in caplog.text) == (harm is not Path.unlink)
    assert KEYS[7] not in store
    assert store.find(KEYS) == 7
    assert store.append([block(key) for key in KEYS]) == 1
    assert read(store, KEYS) == 30


def test_the_block_that_was_unused_for_the_longest_time_goes_whoever_wrote_it(
    open_store: Callable[..., SharedStore],
) -> None:
    one, two = open_store(MIN_BYTES), open_store(MIN_BYTES)  # four blocks in each folder
    keys = [key_of(number, folder=5) for number in range(6)]
    for number, key in enumerate(keys[:4]):
        assert (one, two)[number % 2].append([block(key)]) == 1
        os.utime(one.path_of(key), (1_000 + number, 1_000 + number))
    assert read(two, [keys[0]]) == 1, "a use makes it young"
    assert two.append([block(keys[4])]) == 1
    assert [one.find([key]) for key in keys] == [1, 0, 1, 1, 1, 0]
    assert one.append([block(keys[5])]) == 1
    assert [two.find([key]) for key in keys] == [1, 0, 0, 1, 1, 1]
    assert (one.directory / "05" / COUNTER).read_text().split() == [str(4 * FILE_BYTES)]


def test_a_lost_counter_is_made_again(open_store: Callable[..., SharedStore]) -> None:
    store = open_store(MIN_BYTES)
    keys = [key_of(number, folder=5) for number in range(9)]
    store.append([block(key) for key in keys[:4]])
    (store.directory / "05" / COUNTER).write_text("what?")
    store.append([block(key) for key in keys[4:]])
    assert len(files_of(store)) == 4


def test_what_a_pod_that_ended_has_not_finished_is_removed(open_store: Callable[..., SharedStore]) -> None:
    store = open_store(MIN_BYTES)
    keys = [key_of(number, folder=5) for number in range(9)]
    store.append([block(keys[0])])
    abandoned = store.directory / "05" / ".abc.tmp"
    abandoned.write_bytes(b"x" * FILE_BYTES)
    os.utime(abandoned, (1_000, 1_000))
    store.append([block(key) for key in keys[1:]])
    assert not abandoned.exists()
    assert len(files_of(store)) == 4


def test_a_folder_that_another_pod_locks_takes_no_block(
    open_store: Callable[..., SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folders, "LOCK_WAIT_S", 0.02)
    store, key = open_store(), key_of(1, folder=5)
    with store._folders.opened(5, create=True) as folder, store._folders.locked(folder, 5) as counter:
        assert counter is not None
        assert store.append([block(key), block(KEYS[0])]) == 1
    assert key not in store
    assert store.append([block(key)]) == 1


def test_without_locks_blocks_are_written(
    open_store: Callable[..., SharedStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(shared_folders.fcntl, "flock", refuse)
    store = open_store()
    assert store.append([block(key) for key in KEYS]) == 30
    assert caplog.text.count("no file locks") == 1


def test_a_reset_removes_the_files_and_hides_them_before(open_store: Callable[..., SharedStore]) -> None:
    store = open_store()
    epoch = store.epoch
    store.append([block(key) for key in KEYS[:20]])
    store.clear()
    assert store.match(KEYS) == 0
    assert store.has_chores
    assert store.append([block(key) for key in KEYS[20:]], epoch) == 0, "chosen before the reset"
    assert not store.has_chores
    assert files_of(store) == []
    assert store.size == 0
    assert store.append([block(key) for key in KEYS]) == 30


def link_to_folder(shared: Path, outside: Path) -> None:
    (shared / "05").symlink_to(outside)


def link_to_counter(shared: Path, outside: Path) -> None:
    (shared / "05").mkdir()
    (shared / "05" / COUNTER).symlink_to(outside / "notes.txt")


def second_name_of_counter(shared: Path, outside: Path) -> None:
    (shared / "05").mkdir()
    (shared / "05" / COUNTER).hardlink_to(outside / "notes.txt")


def file_for_folder(shared: Path, outside: Path) -> None:
    (shared / "05").touch()


def pipe_for_counter(shared: Path, outside: Path) -> None:
    (shared / "05").mkdir()
    os.mkfifo(shared / "05" / COUNTER)


def folder_for_counter(shared: Path, outside: Path) -> None:
    (shared / "05" / COUNTER).mkdir(parents=True)


@pytest.mark.parametrize(
    "plant",
    [
        link_to_folder,
        link_to_counter,
        second_name_of_counter,
        file_for_folder,
        pipe_for_counter,
        folder_for_counter,
    ],
)
def test_what_no_pod_has_made_costs_one_folder_and_leads_nowhere(
    directory: Path,
    tmp_path: Path,
    open_store: Callable[..., SharedStore],
    plant: Callable[[Path, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = [key_of(number, folder=5) for number in range(9)]
    outside = {
        "notes.txt": b"5",
        "old.tmp": b"6",
        f"{keys[0].hex()}.kv": b"7",
        f"{keys[1].hex()}.kv": b"8" * FILE_BYTES,
    }
    for name, content in outside.items():
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (1_000, 1_000))
    shared = directory / FINGERPRINT
    shared.mkdir()
    plant(shared, tmp_path)
    store = open_store(MIN_BYTES)
    for _ in range(2):
        assert store.append([block(key) for key in [*keys, key_of(1, folder=6)]]) <= 1
        assert read(store, keys) == read(store, keys[1:]) == 0
    assert read(store, [key_of(1, folder=6)]) == 1, "the other folders work"
    assert caplog.text.count("was not made by a pod") == 1
    store.clear()
    store.append([])
    assert not store.has_chores
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == outside
    assert all(path.stat().st_mtime == 1_000 for path in tmp_path.iterdir())


def test_entries_with_odd_names_sizes_and_kinds_stay_or_go_and_stop_nothing(
    open_store: Callable[..., SharedStore],
) -> None:
    store, keys = open_store(MIN_BYTES), [key_of(number, folder=5) for number in range(12)]
    store.append([block(keys[0])])
    folder = store.directory / "05"
    (folder / COUNTER).write_bytes(b"-9")  # else the folder would never be full
    huge = [folder / f"{keys[1].hex()}.kv", folder / "notes", folder / ".abc.tmp"]
    for path in huge:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    (folder / f"{keys[2].hex()}.kv").mkdir()
    (folder / f"{keys[3].hex()}.kv").symlink_to("/etc/passwd")
    os.mkfifo(folder / f"{keys[4].hex()}.kv")
    os.mkfifo(folder / ".old.tmp")
    os.utime(folder / ".old.tmp", (1_000, 1_000))
    assert store.find([keys[1]]) == store.find([keys[2]]) == store.find([keys[3]]) == store.find([keys[4]]) == 0
    assert [read(store, [key]) for key in keys[2:5]] == [0, 0, 0]
    assert store.append([block(key) for key in keys[1:2] + keys[5:]]) >= 3
    assert not huge[0].exists() or huge[0].stat().st_size == FILE_BYTES, "it has the name of a block, so it is removed"
    assert huge[1].exists(), "it is not ours"
    assert store.append([block(key) for key in keys[2:5]]) == 2, "the directory keeps its name; links and pipes do not"
    assert read(store, [keys[4]]) == 1
    whole = [path for path in files_of(store) if path.is_file() and path.stat().st_size == FILE_BYTES]
    assert len(whole) <= 4


def test_a_huge_counter_is_not_read_into_memory(directory: Path, open_store: Callable[..., SharedStore]) -> None:
    counter = directory / FINGERPRINT / "05" / COUNTER
    counter.parent.mkdir(parents=True)
    with counter.open("wb") as file:
        file.truncate(1 << 40)
    store = open_store()
    assert store.size == 0
    assert store.append([block(key_of(1, folder=5))]) == 1


def test_a_reset_of_many_files_goes_on_with_the_next_chores(
    open_store: Callable[..., SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.append([block(key) for key in KEYS])
    store.clear()
    monkeypatch.setattr(shared_store, "MAX_REMOVE_S", -1.0)
    assert store.append([block(KEYS[0])]) == 0
    assert store.has_chores, "the time was over before the first file"
    assert store.match(KEYS) == 0
    monkeypatch.undo()
    assert store.append([]) == 0
    assert not store.has_chores
    assert files_of(store) == []


def test_a_long_search_ends_with_what_it_has_found(
    open_store: Callable[..., SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.append([block(key) for key in KEYS])
    monkeypatch.setattr(shared_store, "MAX_FIND_S", 0.0)
    assert store.find(KEYS) == 1
    assert KEYS[0] in store


class Hang:
    """Makes calls of the file system wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = threading.Event()
        real = os.open

        def hang(*args: object, **kwargs: object) -> int:
            assert self.over.wait(20.0)
            return real(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(shared_store.os, "open", hang)


def test_a_file_system_that_hangs_is_left_at_the_deadline_and_writes_no_memory_later(
    open_store: Callable[..., SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_TIMEOUT_S", "WRITE_TIMEOUT_S"):
        monkeypatch.setattr(shared_store, name, 0.05)
    store = open_store()
    store.append([block(key) for key in KEYS[:10]])
    hang = Hang(monkeypatch)
    target, content = bytearray(BLOCK_BYTES), bytearray(content_of(KEYS[10]))
    with pytest.raises(TimeoutError):
        store.read(KEYS[:1], [memoryview(target)])
    with pytest.raises(TimeoutError):
        store.append([StoredBlock(KEYS[10], b"", memoryview(content))])
    content[:] = bytes(BLOCK_BYTES)  # the host block is used again
    hang.over.set()
    until = time.monotonic() + 10
    while not store.path_of(KEYS[10]).exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    assert target == bytes(BLOCK_BYTES)
    assert read(store, KEYS) == 11


def test_workers_that_all_hang_begin_no_call_that_its_caller_has_left() -> None:
    workers, over, begun = DeadlineWorkers(2, "test"), threading.Event(), list[int]()

    def call(number: int) -> int:
        begun.append(number)
        assert over.wait(20.0)
        return number

    with pytest.raises(TimeoutError, match="0 of 6 calls"):
        workers.map(call, range(6), 0.05)
    with pytest.raises(TimeoutError):
        workers.map(call, range(10, 12), 0.05)
    over.set()
    assert workers.map(lambda number: -number, [1, 2, 3], 20.0) == [-1, -2, -3]
    assert sorted(begun) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        workers.map(lambda number: 1 // number, [1, 0], 20.0)
    workers.close()


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["append", "read", "find", "harm"]), st.integers(0, 1), st.integers(0, 40)),
        st.tuples(st.just("clear"), st.integers(0, 1), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_two_pods_never_read_wrong_blocks_nor_pass_the_bound(events: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        stores = [SharedStore(Path(name), FINGERPRINT, BLOCK_BYTES, MIN_BYTES) for _ in range(2)]
        keys = [key_of(number, folder=number % 2) for number in range(48)]
        for kind, which, first in events:
            store, part = stores[which], keys[first : first + 8]
            match kind:
                case "append":
                    store.append([block(key) for key in part])
                case "read":
                    read(store, part)  # checks the content
                case "find":
                    store.find(part)
                case "clear":
                    store.clear()
                case _ if (path := store.path_of(keys[first])).exists():
                    corrupt(path)
            for folder in store.directory.glob("*"):
                assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= MIN_BYTES // NUM_FOLDERS
            assert store.inconsistencies() == []
        for store in stores:
            store.close()
