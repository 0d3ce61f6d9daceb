"""Stores of API key records: a TOML or JSON file, or a hash in Redis. No store holds a key itself.

A file is replaced atomically, under a lock, so a reader never sees a part of a change. In TOML the keys are tables of
the array `keys`; comments between them stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Unavailable
from common.process.atomic_file import write_file_atomically
from common.redis.client import REDIS_FAILURES, RedisClient, connect_redis
from gateway.admission.api_keys import ApiKey

#: HASH id -> JSON. The name begins like those of the index, so that the same Redis user may use it.
KEYS_KEY = "kv:api-keys"
REDIS_TIMEOUT_S = 2.0


class KeyFile:
    """A file of key records: JSON if its name ends in .json, else TOML."""

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
            self._replace(self._with(text, record))

    def remove(self, key_id: str) -> bool:
        """Removes a record. Returns False if there is none. Raises ConfigError, also if there is no file."""
        with self._locked():
            text = self._text()
            kept = [record for record in self._parse(text) if record.id != key_id]
            if len(kept) == len(self._parse(text)):
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

    def _with(self, text: str, record: ApiKey) -> str:
        known = self._parse(text)
        if self._json:
            return _json_text([*known, record])
        return f"{text.rstrip()}\n\n{_toml_table(record)}".lstrip()

    def _parse(self, text: str) -> list[ApiKey]:
        try:
            raw: Any = (json.loads(text) if text.strip() else {}) if self._json else tomllib.loads(text)
        except (ValueError, tomllib.TOMLDecodeError) as e:
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
        raise Unavailable(f"Redis does not answer: {type(e).__name__}: {e}") from e


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _loads(value: Any) -> Any:
    try:
        return json.loads(value)
    except ValueError:
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
