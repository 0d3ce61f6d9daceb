"""Stores of API key records, a TOML or JSON file or a hash in Redis, and the ring of valid keys that a gateway reads.

No store holds a key itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import BatonError, ConfigError, Unavailable, describe
from common.process.atomic_file import write_file_atomically
from common.redis.client import REDIS_FAILURES, RedisClient, connect_redis
from gateway.admission.api_keys import ApiKey, KeySet

KEYS_KEY = "kv:api-keys"  #: HASH id -> JSON. Named like the index's keys, so that one Redis user may use all.
REDIS_TIMEOUT_S = 2.0
FILE_PERIOD_S, REDIS_PERIOD_S = 0.5, 1.0
REDIS_SOURCE = "redis"  #: Key source: a hash in the Redis of the prefix index.

_log = logging.getLogger(__name__)


class KeyFile:
    """A file of key records: JSON if its name ends in .json, else TOML.

    It is replaced atomically, under a lock, so a reader never sees a part of a change. In TOML the keys are tables of
    the array `keys`; comments between them stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._json = path.suffix == ".json"

    def read(self) -> list[ApiKey]:
        """Returns all records. Raises ConfigError if the file is missing or any part of it is invalid."""
        return self._parse(self._text())

    def version(self) -> tuple[int, ...]:
        """Returns a value that changes with the file; () while there is no file."""
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def add(self, record: ApiKey) -> None:
        """Appends a record. A new file is readable only by its owner. Raises ConfigError."""
        with self._locked(make=True):
            text = self._text() if self.path.exists() else ""
            records = [*self._parse(text), record]
            longer = f"{text.rstrip()}\n\n{_toml_table(record)}".lstrip()
            self._replace(_json_text(records) if self._json else longer)

    def remove(self, key_id: str) -> bool:
        """Removes a record. Returns False if there is none. Raises ConfigError, also if there is no file."""
        with self._locked():
            records = self._parse(text := self._text())
            kept = [record for record in records if record.id != key_id]
            if len(kept) == len(records):
                return False
            shorter = _json_text(kept) if self._json else _without(text, key_id)
            if self._parse(shorter) != kept:  # not our layout: rewrites the file, without its comments
                shorter = "\n".join(map(_toml_table, kept))
            self._replace(shorter)
            return True

    def _text(self) -> str:
        try:
            return self.path.read_text("utf-8")
        except OSError as e:
            raise ConfigError(f"api_keys: cannot read {self.path}: {e.strerror}", field="api_keys") from e
        except UnicodeDecodeError as e:
            raise ConfigError(f"api_keys: {self.path} is not UTF-8 text: {e}", field="api_keys") from e

    def _parse(self, text: str) -> list[ApiKey]:
        try:
            raw: Any = (json.loads(text) if text.strip() else {}) if self._json else tomllib.loads(text)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"api_keys: {self.path}: {e}", field="api_keys") from e
        if not isinstance(raw, dict) or not raw.keys() <= {"keys"} or not isinstance(raw.get("keys", []), list):
            raise ConfigError(f"api_keys: {self.path} must hold an array `keys` and nothing else", field="api_keys")
        return [ApiKey.parse(values, f"{self.path}, key {i + 1}") for i, values in enumerate(raw.get("keys", []))]

    @contextlib.contextmanager
    def _locked(self, *, make: bool = False) -> Iterator[None]:
        """Holds the lock, a separate file, since the key file itself is replaced. `make` creates the folder."""
        try:
            if make:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_name(f".{self.path.name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as e:
            raise ConfigError(f"api_keys: cannot write {self.path}: {e.strerror}", field="api_keys") from e

    def _replace(self, text: str) -> None:
        mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o600
        write_file_atomically(self.path, text.encode(), mode)


class RedisKeyStore:
    """Key records in the Redis of the prefix index."""

    def __init__(self, url: str) -> None:
        self._client: RedisClient = connect_redis(url, timeout_s=REDIS_TIMEOUT_S)

    async def read(self) -> list[ApiKey]:
        """Returns all records. Raises Unavailable if Redis does not answer, ConfigError if a record is invalid."""
        with _redis():
            raw: dict[Any, Any] = await self._client.hgetall(KEYS_KEY)
        return [ApiKey.parse(_loads(value), f"Redis, key {_text(key)}") for key, value in sorted(raw.items())]

    async def add(self, record: ApiKey) -> None:
        """Writes a record. Raises Unavailable."""
        with _redis():
            await self._client.hset(KEYS_KEY, record.id, record.model_dump_json(exclude_defaults=True))

    async def remove(self, key_id: str) -> bool:
        """Removes a record. Returns False if there is none. Raises Unavailable."""
        with _redis():
            return bool(await self._client.hdel(KEYS_KEY, key_id))

    async def close(self) -> None:
        """Closes the Redis connections."""
        await self._client.aclose()


@contextlib.contextmanager
def _redis() -> Iterator[None]:
    try:
        yield
    except REDIS_FAILURES as e:
        raise Unavailable(f"Redis does not answer: {describe(e, limit_s=REDIS_TIMEOUT_S)}") from e


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _loads(value: Any) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _json_text(records: list[ApiKey]) -> str:
    keys = [record.model_dump(mode="json", exclude_defaults=True) for record in records]
    return json.dumps({"keys": keys}, indent=2) + "\n"


def _toml_table(record: ApiKey) -> str:
    # JSON of strings, numbers, booleans and flat arrays is valid TOML, except DEL, which JSON does not escape.
    fields = record.model_dump(mode="json", exclude_defaults=True)
    lines = [f"{name} = {json.dumps(value)}".replace("\x7f", "\\u007f") for name, value in fields.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def _without(text: str, key_id: str) -> str:
    """Returns the TOML text without the table of this key."""
    tables = re.split(r"(?m)^(?=[ \t]*\[\[)", text)
    own = re.compile(rf"(?m)^\s*id\s*=\s*[\"']{key_id}[\"']")
    return "".join(table for table in tables if not own.search(table))


class KeyRing:
    """The valid keys of all sources, read again while the gateway runs. Without sources no key is needed.

    A revoked key stays valid for up to FILE_PERIOD_S or REDIS_PERIOD_S. If a source cannot be read or is invalid, the
    keys that were read from it last stay valid.
    """

    def __init__(self, sources: Sequence[str] = (), redis: str | None = None, plain: Sequence[str] = ()) -> None:
        """Reads the files of `sources`, which may hold REDIS_SOURCE too. Raises ConfigError if one is invalid.

        `plain` are further keys as clients send them, without a record.
        """
        self._plain = tuple(plain)
        self._files = [KeyFile(Path(source)) for source in sources if source != REDIS_SOURCE]
        self._versions = [file.version() for file in self._files]
        self._file_keys = [file.read() for file in self._files]
        self._redis_store: RedisKeyStore | None = None
        self._redis_keys: list[ApiKey] | None = None  # None until Redis has answered
        if REDIS_SOURCE in sources:
            if redis is None:
                raise ConfigError("api_keys: the source 'redis' needs --redis URL", field="api_keys")
            self._redis_store = RedisKeyStore(redis)
        self.current = KeySet()  #: The valid keys; replaced when a source has changed.
        self._tasks: list[asyncio.Task[None]] = []
        self._errors: dict[str, str] = {}  # last logged error of each source that cannot be read
        self._rebuild()

    async def start(self) -> None:
        """Reads the keys in Redis, and starts to look for changes."""
        loop = asyncio.get_running_loop()
        if self._files:
            self._tasks.append(loop.create_task(self._watch_files()))
        if self._redis_store is not None:
            await self._read_redis(self._redis_store)
            self._tasks.append(loop.create_task(self._watch_redis(self._redis_store)))

    async def stop(self) -> None:
        """Stops looking for changes."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._redis_store is not None:
            await self._redis_store.close()

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILE_PERIOD_S)
            for i, file in enumerate(self._files):
                version = file.version()
                if version == self._versions[i]:
                    continue
                try:
                    self._file_keys[i] = file.read()
                    self._versions[i] = version
                    self._on_read(str(file.path), self._file_keys[i])
                except ConfigError as e:
                    self._log_failure(str(file.path), e)
                except Exception:  # the keys that are known stay valid, and the next look may succeed
                    _log.exception("API keys of %s cannot be read", file.path)

    async def _watch_redis(self, source: RedisKeyStore) -> None:
        while True:
            await asyncio.sleep(REDIS_PERIOD_S)
            try:
                await self._read_redis(source)
            except Exception:
                _log.exception("API keys of %s cannot be read", REDIS_SOURCE)

    async def _read_redis(self, source: RedisKeyStore) -> None:
        try:
            records = await source.read()
        except BatonError as e:
            self._log_failure(REDIS_SOURCE, e)
            return
        changed, self._redis_keys = records != self._redis_keys, records
        if changed or REDIS_SOURCE in self._errors:
            self._on_read(REDIS_SOURCE, records)

    def _log_failure(self, source: str, error: BatonError) -> None:
        """Logs an error once, until the source can be read again or has another error."""
        if self._errors.get(source) != error.message:
            self._errors[source] = error.message
            _log.error("API keys of %s cannot be read, the known ones stay valid: %s", source, error.message)

    def _on_read(self, source: str, records: Sequence[ApiKey]) -> None:
        self._errors.pop(source, None)
        _log.info("%d API keys in %s", len(records), source)
        self._rebuild()

    def _rebuild(self) -> None:
        self.current = KeySet(
            itertools.chain(*self._file_keys, self._redis_keys or ()),
            plain=self._plain,
            anonymous=not self._files and self._redis_store is None and not self._plain,
            complete=self._redis_store is None or self._redis_keys is not None,
        )
