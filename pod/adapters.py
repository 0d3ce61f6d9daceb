"""The LoRA adapters of one pod: their names, and the copies in host memory.

    folder --load--> held, without a name --named--> listed --another version, or unloaded--> retired --> forgotten
                                                      |  ^
                                 no room on the host  v  |  read again on demand
                                                     evicted

A name has one meaning at a time, an `AdapterEntry`. Requests name an adapter by its digest, so those that are under way
elsewhere still need a version that has lost its name: the last KEEP versions stay for KEEP_S seconds. Running sequences
hold their adapter themselves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import (
    AdapterNotLoaded,
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    describe,
)
from common.pb import transfer_pb2
from common.settings.pod import AdapterSettings
from common.types import MAX_WARM_ADAPTERS, AdapterEntry
from engine.adapters.packed import Adapter
from engine.adapters.peft import CONFIG, WEIGHTS
from engine.engine import Engine

#: Retired adapters that stay in memory, and the seconds for which they do: as long as a request may run.
KEEP, KEEP_S = 16, 600.0
#: Longest time of a load: its wait for the loads before it, and its own reading.
LOAD_S = 30.0
#: Loads that read or wait. A further one is refused at once.
MAX_LOADS = 64
#: An adapter stays on the host for this time after its use: a request that loads it must find it on the next call.
PIN_S = 10.0
#: Names of one pod, removed ones included. Gateways read the whole list after each change.
MAX_NAMES = 1024
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

_log = logging.getLogger(__name__)


class PodAdapters:
    """The adapters of one pod. Changes on the event loop; `find`, `entries` and `state` run on any thread."""

    def __init__(self, engine: Engine, settings: AdapterSettings, served_name: str) -> None:
        """Without the setting adapter_dir the pod serves no adapters.

        Raises ConfigError if adapter_dir or adapter_names cannot be read.
        """
        self._engine, self._served_name = engine, served_name
        directory, names = settings.adapter_dir, settings.adapter_names
        self._root = None if directory is None else Path(directory).resolve()
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(f"adapter_dir: {directory} is not a directory", field="adapter_dir")
        self._names = None if names is None else _read_names(Path(names))
        self._lock = threading.Lock()
        self._listed: dict[str, AdapterEntry] = {}
        #: The adapters of listed names by digest, those used longest ago first, as far as they have room on the host.
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._used: dict[str, float] = {}  # By digest: the last use by a request. time.monotonic()
        self._memory = settings.adapter_memory  # Bytes for them; 0: no bound
        self._kept: OrderedDict[str, tuple[Adapter, float]] = OrderedDict()  # By digest, with the end of its time
        self._version = 1  # Of the list
        self._load_s = 0.0
        self._open_loads = 0  # That read or wait
        self._reading: tuple[str, float] | None = None  # Path and start of the read that runs. On the reader's thread
        #: Touches the files. One adapter is read at a time, which bounds the memory, also if callers leave. A directory
        #: that does not answer holds this thread and no other.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self.loads = {"loaded": 0, "refused": 0}  #: Reads of files since the start, by outcome

    # -- at the start

    def find_all(self) -> None:
        """Loads the adapters of the settings. A sub-folder that is refused is logged and left out.

        Raises ConfigError if an adapter of the file of names is refused, or if adapter_dir cannot be read.
        """
        if self._root is None:
            return
        for name, path in (_folders(self._root) if self._names is None else self._names).items():
            try:
                self._check_name(name)
                folder = self._folder(path)
                adapter, changed_ms = self._read(folder), _changed_ms(folder)
                entry = AdapterEntry(name, adapter.digest, adapter.rank, self._relative(path), changed_ms)
                self._set(entry, adapter)
            except (BatonError, OSError) as error:
                if self._names is not None:
                    raise ConfigError(f"adapter_names: {name}: {describe(error)}", field="adapter_names") from error
                _log.error("adapter %s is left out: %s", name, describe(error))

    # -- changes

    async def load(self, asked: AdapterEntry) -> AdapterEntry:
        """Loads an adapter to the host, and gives it its name if `asked` has a version. See LoadAdapter.

        Raises InvalidRequest for a bad name or path, ConfigError if the adapter is refused, AdapterNotLoaded if its
        digest is another one or a rank of the pod cannot hold its part, DeadlineExceeded if that takes over LOAD_S,
        Overloaded if too many loads wait. Nothing is changed then; a read that goes on keeps its adapter for later.
        """
        self._check_name(asked.name)
        held = self._held(asked.digest)
        if held is not None and not os.path.isabs(asked.path):
            adapter, path = held, asked.path
        else:
            adapter, path = await self._queue_read(asked)
        entry = AdapterEntry(asked.name, adapter.digest, adapter.rank, path, asked.version)
        if asked.version:
            self._set(entry, adapter)
        with self._lock:
            if not asked.version:
                self._hold(adapter)
            if asked.digest:  # of a request, whose next call needs the adapter
                self._pin(asked.digest)
        return entry

    async def _queue_read(self, asked: AdapterEntry) -> tuple[Adapter, str]:
        """Returns the adapter and its path, once the reads before it are done. Raises as `load` does."""
        reading = self._reading
        if reading is not None and (running_s := time.monotonic() - reading[1]) > LOAD_S:
            text = f"the adapter at {reading[0]!r} has been read for {running_s:.0f} s: is the adapter directory slow?"
            raise DeadlineExceeded(text, field="adapter")
        if self._open_loads >= MAX_LOADS:
            raise Overloaded(f"{self._open_loads} adapters wait to be read already", retry_after_s=self._load_s or 1.0)
        self._open_loads += 1
        try:
            async with asyncio.timeout(LOAD_S):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._reader, self._read_asked, asked)
        except TimeoutError as error:
            text = f"the adapter at {asked.path!r} was not read within {LOAD_S:g} s, {self._open_loads - 1} others wait"
            raise DeadlineExceeded(text, field="adapter") from error
        finally:
            self._open_loads -= 1

    def unload(self, name: str, version: int) -> None:
        """Takes a name from its adapter, unless it has a newer version. A pod without the name remembers it too."""
        with self._lock:
            known = self._listed.get(name)
            if known is None or known.version < version:
                self._replace(AdapterEntry(name, "", version=version), None)
        _log.info("adapter %s was unloaded", name)

    def _set(self, entry: AdapterEntry, adapter: Adapter) -> None:
        with self._lock:
            known = self._listed.get(entry.name)
            if known is not None and (known.version, known.digest) >= (entry.version, entry.digest):  # as gateways do
                self._hold(adapter)
                return
            self._replace(entry, adapter)
        _log.info("adapter %s: %s, digest %s", entry.name, entry.path, entry.digest)

    def _replace(self, entry: AdapterEntry, adapter: Adapter | None) -> None:
        """Gives a name its new meaning. Under the lock. Raises InvalidRequest if there are too many names."""
        if entry.name not in self._listed and len(self._listed) >= MAX_NAMES:
            removed = [known for known in self._listed.values() if not known.digest]
            if not removed and not entry.digest:
                return  # no room to remember the removal of a name that the pod lacks
            if not removed:
                raise InvalidRequest(f"the pod has {MAX_NAMES} names of adapters already", field="lora_name")
            del self._listed[min(removed, key=lambda known: known.version).name]
        known = self._listed.get(entry.name)
        self._listed[entry.name] = entry
        self._version += 1
        if known is not None and not self._is_listed(known.digest) and known.digest in self._adapters:
            self._keep(self._remove(known.digest))
        if adapter is not None:
            self._hold(adapter)

    def _is_listed(self, digest: str) -> bool:
        return any(entry.digest == digest for entry in self._listed.values())

    def _hold(self, adapter: Adapter) -> None:
        """Keeps an adapter as long as it has a name and room, else for a while. Under the lock."""
        if not self._is_listed(adapter.digest):
            self._keep(adapter)
            return
        if adapter.digest not in self._adapters:
            self._version += 1  # for the list of the evicted
        self._adapters[adapter.digest] = adapter
        self._adapters.move_to_end(adapter.digest)
        self._kept.pop(adapter.digest, None)
        if self._memory:
            self._evict()

    def _pin(self, digest: str) -> None:
        """Notes that a request needs an adapter: it stays for PIN_S. Under the lock."""
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
            self._used[digest] = time.monotonic()

    def _evict(self) -> None:
        """Forgets the adapters that were used longest ago, until the others have room. Under the lock."""
        held, pinned = sum(adapter.numbers.nbytes for adapter in self._adapters.values()), time.monotonic() - PIN_S
        for digest in list(self._adapters)[:-1]:
            if held <= self._memory:
                return
            if self._used.get(digest, pinned) > pinned:
                continue
            held -= self._remove(digest).numbers.nbytes
            self._version += 1
            _log.info("adapter %s has left the host memory: --adapter-memory is full", digest)

    def _remove(self, digest: str) -> Adapter:
        self._used.pop(digest, None)
        return self._adapters.pop(digest)

    def _keep(self, adapter: Adapter) -> None:
        """Keeps an adapter without a name for a while. Under the lock."""
        self._kept[adapter.digest] = adapter, time.monotonic() + KEEP_S
        self._kept.move_to_end(adapter.digest)
        self._forget_retired()

    def _forget_retired(self) -> None:
        """Forgets adapters without a name that are too many or too old. Under the lock."""
        now = time.monotonic()
        while self._kept and (len(self._kept) > KEEP or next(iter(self._kept.values()))[1] <= now):
            self._kept.popitem(last=False)

    # -- look-up

    def find(self, digest: str) -> Adapter:
        """Returns the adapter with this digest. Raises AdapterNotLoaded if the pod lacks it."""
        if self._root is None:
            raise AdapterNotLoaded("the pod serves no adapters: set --adapter-dir", field="adapter")
        with self._lock:
            self._pin(digest)
        return self._engine.find_adapter(digest)

    def entries(self) -> tuple[list[AdapterEntry], int]:
        """Returns the meanings of all names, removed ones too, and the number of the list."""
        with self._lock:
            return list(self._listed.values()), self._version

    def evicted(self) -> list[bytes]:
        """Returns the digests of listed adapters that had no room on the host, as 16 bytes."""
        with self._lock:
            listed = {entry.digest for entry in self._listed.values() if entry.digest}
            return [bytes.fromhex(digest) for digest in sorted(listed - self._adapters.keys() - self._kept.keys())]

    def state(self) -> transfer_pb2.Adapters | None:
        """Returns the part of Info that gateways need; None if the pod serves no adapters.

        Forgets adapters whose time has ended since the last load.
        """
        if self._root is None:
            return None
        with self._lock:
            self._forget_retired()
            if self._memory:
                self._evict()
        adapters, copies = self._engine.warm_adapters()
        warm = [bytes.fromhex(adapter.digest) for adapter in adapters]
        return transfer_pb2.Adapters(version=self._version, warm=warm, load_s=self._load_s, copies=copies)

    def warm(self) -> dict[str, Any]:
        """Returns the fields of PodLoad for the adapters on the device."""
        adapters, copies = self._engine.warm_adapters()
        digests = tuple(adapter.digest for adapter in adapters[:MAX_WARM_ADAPTERS])
        return {"warm_adapters": digests, "adapter_copies": copies}

    def counts(self) -> Mapping[str, int]:
        """Returns the numbers of adapters: with a name, retired, and on the device."""
        on_device = len(self._engine.warm_adapters()[0])
        with self._lock:
            retired = self._kept.keys() - self._adapters.keys()
            return {"named": len(self._adapters), "retired": len(retired), "device": on_device}

    # -- files

    def _held(self, digest: str) -> Adapter | None:
        try:
            return self.find(digest) if digest else None
        except AdapterNotLoaded:
            return None

    def _read_asked(self, asked: AdapterEntry) -> tuple[Adapter, str]:
        """Returns the adapter at the path of `asked`, and the path below the directory. Raises as `load` does."""
        adapter = self._held(asked.digest)  # another call may have read it meanwhile
        if adapter is None:
            began = time.monotonic()
            self._reading = asked.path, began
            try:
                adapter = self._read(self._folder(asked.path))
            finally:
                self._reading = None
            self._load_s = time.monotonic() - began
            if asked.digest not in ("", adapter.digest):
                text = f"the files of {asked.path!r} have changed: their digest is {adapter.digest}"
                raise AdapterNotLoaded(f"{text}, expected {asked.digest}", field="adapter")
            with self._lock:
                self._hold(adapter)  # the caller may have left; its next call finds the adapter
                if asked.digest:
                    self._pin(asked.digest)  # before the next read takes its room
        return adapter, self._relative(asked.path)

    def _folder(self, path: str) -> Path:
        """Returns the real path of a folder below the adapter directory. Raises InvalidRequest."""
        if self._root is None:
            raise AdapterNotLoaded("the pod serves no adapters: set --adapter-dir", field="adapter")
        try:
            folder = (self._root / path).resolve()
            real = [folder, *((folder / file).resolve() for file in (CONFIG, WEIGHTS))]
            exists = folder.is_dir()
        except (OSError, ValueError, RuntimeError) as error:  # too long, no permission, a zero byte, a loop of links
            text = f"lora_path {path[:200]!r} is not a path that the pod can read: {describe(error)}"
            raise InvalidRequest(text, field="lora_path") from error
        if folder == self._root or not all(found.is_relative_to(self._root) for found in real):
            text = f"lora_path {path[:200]!r}: the folder or a file of it is not below the adapter directory"
            raise InvalidRequest(text, field="lora_path")
        if not exists:
            text = f"lora_path {path[:200]!r}: the adapter directory has no such folder"
            raise InvalidRequest(text, field="lora_path")
        return folder

    def _read(self, folder: Path) -> Adapter:
        try:
            adapter = self._engine.adapters.read(folder)
        except BatonError:
            self.loads["refused"] += 1
            raise
        self.loads["loaded"] += 1
        return adapter

    def _relative(self, path: str) -> str:
        """Returns an absolute path relative to the adapter directory, so that it means the same on other pods."""
        found = Path(path).resolve() if Path(path).is_absolute() else None
        below = found is not None and self._root is not None and found.is_relative_to(self._root)
        return str(found.relative_to(self._root)) if found is not None and self._root is not None and below else path

    def _check_name(self, name: str) -> None:
        if not ADAPTER_NAME.fullmatch(name):
            expected = "expected up to 128 letters, digits and . _ - /, a letter or digit first"
            raise InvalidRequest(f"lora_name is {name[:200]!r}: {expected}", field="lora_name")
        if name == self._served_name:
            raise InvalidRequest(f"lora_name is {name!r}, the name of the base model", field="lora_name")


def _folders(root: Path) -> dict[str, str]:
    """Returns the sub-folders that look like adapters, by their names. Raises ConfigError."""
    try:
        return {path.name: path.name for path in sorted(root.iterdir()) if os.path.isfile(path / CONFIG)}
    except OSError as error:
        raise ConfigError(f"adapter_dir: {root} cannot be read: {describe(error)}", field="adapter_dir") from error


def _changed_ms(folder: Path) -> int:
    """Returns the time of the last change of an adapter's files, in milliseconds since the epoch, at least 1."""
    return max(1, *((folder / file).stat().st_mtime_ns // 1_000_000 for file in (CONFIG, WEIGHTS)))


def _read_names(file: Path) -> dict[str, str]:
    """Reads a file of names. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        found: Any = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"adapter_names: {file} cannot be read: {describe(error)}", field="adapter_names") from error
    if not isinstance(found, dict) or not all(isinstance(path, str) for path in found.values()):
        raise ConfigError(f"adapter_names: {file}: expected NAME = 'FOLDER' only", field="adapter_names")
    return found
