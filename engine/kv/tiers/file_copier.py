"""The two threads of a file tier: one writes host blocks to files, one reads blocks of prompts into the host.

After `stop` or an unexpected error of a thread the tier is closed, and the pool works without it. A disk that is full,
or does not take a block for another reason, stops the writes for PAUSE_S; blocks are still read. A store that does not
answer in time is not used for RETRY_S, and after one more such failure for PAUSE_S each time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from common.errors import ConfigError, describe
from common.kv_layout import KVLayout
from engine.kv.blocks import BlockPool
from engine.kv.ledger import CacheCallbacks
from engine.kv.tiers.block_store import StoredBlock
from engine.kv.tiers.cold_codec import codec_of
from engine.kv.tiers.file_load import FileLoad
from engine.kv.tiers.file_tier import MIN_HOST_BLOCKS, FileTier, HostWrite, Pause
from engine.kv.tiers.host_copier import HostCopier
from engine.kv.tiers.segment_store import SegmentStore
from engine.kv.tiers.shared_store import SharedStore

log = logging.getLogger(__name__)

PAUSE_S, RETRY_S = 30.0, 1.0
FLUSH_S = 5.0  # Longest time in which `stop` writes what is not in files yet
STOP_S = 10.0  # Longest wait of `stop` for both threads beyond that
MAX_SLOTS = 64  # Pods that share one directory
LOCK_FILE = "lock"


class FileCopier:
    """Writes and reads for one file tier, on threads of its own."""

    def __init__(self, tier: FileTier, host: HostCopier, name: str, lock_file: int = -1) -> None:
        """Starts the threads. `lock_file` is the descriptor of the directory's lock, closed at the end; -1: none."""
        self._tier, self._host, self._name, self._lock_file = tier, host, name, lock_file
        self._store = tier.store
        self._rows = host.memory.data.numpy()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"{name}-{verb}", daemon=True)
            for verb, work in (("write", self._write_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Writes idle blocks for at most FLUSH_S, and ends the threads. Idempotent."""
        self._host.tier.save_all()
        self._tier.stop(FLUSH_S)
        until = time.monotonic() + FLUSH_S + STOP_S
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection on that thread may call this
                thread.join(max(0.0, until - time.monotonic()))
        self._tier.close()
        if not self._stopped:
            self._stopped = True
            if not any(thread.is_alive() for thread in self._threads):  # else the files are still being written
                self._store.close()
                if self._lock_file >= 0:
                    os.close(self._lock_file)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("the %s tier failed; the pool continues without it", self._name)
            self._tier.close(failed=True)

    def _write_all(self) -> None:
        began, restored = time.monotonic(), 0
        try:
            restored = self._store.scan(lambda: self._tier.stopping)
        except OSError as error:
            unreachable, pause_s = self._pause(error, self._tier.writes, "%s cannot be used for %g s: %s")
            self._tier.finish_writes([], 0, pause_s=pause_s, unreachable=unreachable)
        if self._tier.stopping:
            return
        self._tier.on_restored(restored)
        if restored:
            size = self._store.size / (1 << 30)
            log.info("%d KV blocks (%.1f GiB) on the disk, found in %.1f s", restored, size, time.monotonic() - began)
        while (writes := self._tier.next_writes()) is not None:
            self._write(writes)

    def _write(self, writes: Sequence[HostWrite]) -> None:
        written, pause_s, unreachable = 0, 0.0, False
        try:
            blocks = [
                StoredBlock(write.key, write.parent, memoryview(self._rows[write.host_block])) for write in writes
            ]
            written = self._store.append(blocks, self._tier.write_epoch)
        except OSError as error:
            unreachable, pause_s = self._pause(error, self._tier.writes, "%s takes no KV blocks for %g s: %s")
        finally:
            self._tier.finish_writes(writes, written, pause_s=pause_s, unreachable=unreachable)

    def _read_all(self) -> None:
        while (load := self._tier.next_load()) is not None:
            self._read(load)

    def _read(self, load: FileLoad) -> None:
        began, intact, pause_s = time.monotonic(), 0, 0.0
        try:
            if not self._store.searches or self._find(load):
                intact = self._store.read(load.keys, [memoryview(self._rows[block]) for block in load.host_blocks])
                self._host.record_checksums(load.host_blocks[:intact])
        except OSError as error:
            _, pause_s = self._pause(error, self._tier.reads, "%s gives no KV blocks for %g s: %s")
        finally:
            self._tier.finish_load(load, intact, time.monotonic() - began, pause_s=pause_s)

    def _find(self, load: FileLoad) -> bool:
        """Looks for the blocks of a load. Returns whether some of them are to be read. Raises OSError."""
        began = time.monotonic()
        found = self._store.find(load.keys)
        return self._tier.narrow(load, found, time.monotonic() - began)

    def _pause(self, error: OSError, pause: Pause, text: str) -> tuple[bool, float]:
        """Returns whether the store gave no answer in time, and the seconds to leave it alone.

        `text` logs a long pause.
        """
        unreachable = isinstance(error, TimeoutError)
        if unreachable and not pause.failing:
            return True, RETRY_S
        if unreachable and (self._tier.reads.active or self._tier.writes.active):  # the other thread has told it
            return True, PAUSE_S
        log.warning(text, self._store.directory, PAUSE_S, describe(error))
        return unreachable, PAUSE_S


def start_disk_tier(
    directory: Path, max_bytes: int, layout: KVLayout, pool: BlockPool, host: HostCopier, callbacks: CacheCallbacks
) -> FileCopier | None:
    """Gives the pool a disk tier in a part of `directory` that is this pod's own.

    Returns None, with an error in the log, if the directory cannot be used: the pod serves without a disk tier. Raises
    ConfigError for sizes that are too small.
    """
    codec = codec_of(layout)
    _check_host(pool, layout.block_bytes, "disk_cache")
    check_size(max_bytes, layout, SegmentStore.min_bytes, "disk_cache_size")
    try:
        own, lock_file = take_slot(directory / layout.scope)
    except OSError as error:
        log.error("disk_cache: %s cannot be used, so this pod has no disk tier: %s", directory, describe(error))
        return None
    _tell_others(directory, layout.scope)
    store = SegmentStore(
        own,
        layout.fingerprint,
        layout.block_bytes,
        max_bytes,
        codec=codec,
        on_stored=callbacks.get("on_disk_stored", lambda _: None),
        on_evicted=callbacks.get("on_disk_evicted", lambda _: None),
    )
    return FileCopier(pool.attach_disk_tier(store), host, "disk", lock_file)


def start_shared_tier(
    directory: Path, max_bytes: int, layout: KVLayout, pool: BlockPool, host: HostCopier
) -> FileCopier:
    """Gives the pool a tier in a directory of many pods. Touches no file: the tier's threads do.

    Idle blocks are copied to the host, and written, at once, because other pods need them now. Raises ConfigError for
    sizes that are too small.
    """
    codec = codec_of(layout)
    _check_host(pool, layout.block_bytes, "shared_cache")
    check_size(max_bytes, layout, SharedStore.min_bytes, "shared_cache_size")
    if (host_blocks := host.tier.num_host_blocks) < pool.num_blocks:
        text = "host_cache has room for %d KV blocks, the pool for %d; with shared_cache make host_cache the larger one"
        log.warning(text, host_blocks, pool.num_blocks)
    store = SharedStore(directory, layout.fingerprint, layout.block_bytes, max_bytes, codec=codec)
    tier = pool.attach_shared_tier(store)
    host.tier.save_all()
    return FileCopier(tier, host, "shared")


def _check_host(pool: BlockPool, block_bytes: int, setting: str) -> None:
    """Raises ConfigError if the host tier is too small for `setting`."""
    assert pool.host_tier is not None
    host_blocks = pool.host_tier.num_host_blocks
    if host_blocks < MIN_HOST_BLOCKS:
        text = f"has room for {host_blocks} KV blocks of {block_bytes} bytes; {setting} needs {MIN_HOST_BLOCKS}"
        raise ConfigError(f"host_cache {text}", field="host_cache")


def check_size(max_bytes: int, layout: KVLayout, min_bytes: Callable[[int], int], setting: str) -> None:
    """Raises ConfigError if `max_bytes`, the value of `setting`, is too small for blocks of the layout."""
    codec = codec_of(layout)
    content_bytes = layout.block_bytes if codec is None else codec.encoded_bytes
    if max_bytes < (least := min_bytes(content_bytes)):
        text = f"{max_bytes} bytes are too few for KV blocks of {content_bytes} bytes; expected at least {least}"
        raise ConfigError(f"{setting}: {text}", field=setting)


def take_slot(directory: Path) -> tuple[Path, int]:
    """Returns the first folder of `directory` that no live process has locked, and the descriptor of its lock.

    Raises OSError if the directory cannot be used, or if all folders are locked.
    """
    for number in range(MAX_SLOTS):
        slot = directory / str(number)
        slot.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(slot / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        except OSError:
            os.close(file)
            raise
        return slot, file
    raise OSError(f"{MAX_SLOTS} processes use {directory} already")


def _tell_others(directory: Path, scope: str) -> None:
    """Logs what other models or settings keep in the directory: the size of this tier does not bound it."""
    with suppress(OSError):
        others = [path for path in directory.iterdir() if path.is_dir() and path.name != scope]
        sizes = {path.name: sum(file.stat().st_size for file in path.glob("*/*")) for path in others}
        if size := sum(sizes.values()):
            text = "%s has %.1f GiB of other models or KV settings (%s); remove them if no pod uses them"
            log.info(text, directory, size / (1 << 30), ", ".join(sorted(sizes)))
