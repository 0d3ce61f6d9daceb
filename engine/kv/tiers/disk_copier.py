"""The two threads of the disk tier: one writes host blocks to the files, one reads blocks of prompts into the host.

After `stop` or an error of a thread the tier is closed, and the pool works without it. A disk that is full, or does not
take a block for another reason, stops the writes for PAUSE_S; blocks are still read.
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
from engine.kv.tiers.cold_codec import codec_of
from engine.kv.tiers.disk_tier import MIN_HOST_BLOCKS, DiskTier, HostWrite
from engine.kv.tiers.host_copier import HostCopier
from engine.kv.tiers.segment_store import SegmentStore, StoredBlock

log = logging.getLogger(__name__)

PAUSE_S = 30.0
FLUSH_S = 5.0  # Longest time in which `stop` writes what is not on the disk yet
STOP_S = 10.0  # Longest wait of `stop` for a thread beyond that
MAX_SLOTS = 64  # Pods that share one directory
LOCK_FILE = "lock"


class DiskCopier:
    """Writes and reads for the disk tier, on threads of its own."""

    def __init__(self, disk_tier: DiskTier, host: HostCopier, lock_file: int) -> None:
        """Starts the threads. `lock_file` is the descriptor of the directory's lock, closed at the end."""
        self._tier, self._host, self._lock_file = disk_tier, host, lock_file
        self._store = disk_tier.store
        self._rows = host.memory.data.numpy()
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (("disk-write", self._write_all), ("disk-read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Writes idle blocks for at most FLUSH_S, and ends the threads. Idempotent."""
        self._host.tier.save_all()
        self._tier.stop(FLUSH_S)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection on that thread may call this
                thread.join(FLUSH_S + STOP_S)
        self._tier.close()
        if self._lock_file >= 0:
            if not any(thread.is_alive() for thread in self._threads):  # else the files are still being written
                self._store.close()
                os.close(self._lock_file)
            self._lock_file = -1

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("the disk tier failed; the pool continues without it")
            self._tier.close(failed=True)

    def _write_all(self) -> None:
        began = time.monotonic()
        restored = self._store.scan(lambda: self._tier.stopping)
        if self._tier.stopping:
            return
        self._tier.on_restored(restored)
        if restored:
            size = self._store.size / (1 << 30)
            log.info("%d KV blocks (%.1f GiB) on the disk, found in %.1f s", restored, size, time.monotonic() - began)
        while (writes := self._tier.next_writes()) is not None:
            self._write(writes)

    def _write(self, writes: Sequence[HostWrite]) -> None:
        written, pause_s = 0, 0.0
        try:
            blocks = [
                StoredBlock(write.key, write.parent, memoryview(self._rows[write.host_block])) for write in writes
            ]
            written = self._store.append(blocks, self._tier.write_epoch)
        except OSError as error:
            log.warning("%s takes no KV blocks for %g s: %s", self._store.directory, PAUSE_S, describe(error))
            pause_s = PAUSE_S
        finally:
            self._tier.finish_writes(writes, written, pause_s=pause_s)

    def _read_all(self) -> None:
        while (load := self._tier.next_load()) is not None:
            began, intact = time.monotonic(), 0
            try:
                intact = self._store.read(load.keys, [memoryview(self._rows[block]) for block in load.host_blocks])
                self._host.record_checksums(load.host_blocks[:intact])
            finally:
                self._tier.finish_load(load, intact, time.monotonic() - began)


def start_disk_tier(
    directory: Path, max_bytes: int, layout: KVLayout, pool: BlockPool, host: HostCopier, callbacks: CacheCallbacks
) -> DiskCopier | None:
    """Gives the pool a disk tier in a part of `directory` that is this pod's own.

    Returns None, with an error in the log, if the directory cannot be used: the pod serves without a disk tier. Raises
    ConfigError for sizes that are too small.
    """
    assert pool.host_tier is not None
    codec = codec_of(layout)
    content_bytes = layout.block_bytes if codec is None else codec.encoded_bytes
    check_sizes(pool.host_tier.num_host_blocks, layout.block_bytes, max_bytes, content_bytes)
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
    return DiskCopier(pool.attach_disk_tier(store), host, lock_file)


def check_sizes(host_blocks: int, block_bytes: int, max_bytes: int, content_bytes: int) -> None:
    """Raises ConfigError if the host tier or the disk tier is too small. content_bytes: of a block in a file."""
    if host_blocks < MIN_HOST_BLOCKS:
        text = f"has room for {host_blocks} KV blocks of {block_bytes} bytes; disk_cache needs {MIN_HOST_BLOCKS}"
        raise ConfigError(f"host_cache {text}", field="host_cache")
    if max_bytes < (least := SegmentStore.min_bytes(content_bytes)):
        text = f"{max_bytes} bytes are too few for KV blocks of {content_bytes} bytes; expected at least {least}"
        raise ConfigError(f"disk_cache_size: {text}", field="disk_cache_size")


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
