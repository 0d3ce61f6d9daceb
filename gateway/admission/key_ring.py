"""The valid API keys, read again from files and Redis while the gateway runs.

A revoked key stays valid for up to FILE_PERIOD_S or REDIS_PERIOD_S. If a source cannot be read or is invalid, the keys
that were read from it last stay valid.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.errors import BatonError, ConfigError
from gateway.admission.api_keys import ApiKey, KeySet
from gateway.admission.key_store import KeyFile, RedisKeyStore

FILE_PERIOD_S, REDIS_PERIOD_S = 0.5, 1.0

#: Key source: a hash in the Redis of the prefix index.
REDIS_SOURCE = "redis"

_log = logging.getLogger(__name__)


class KeyRing:
    """The keys of all sources. Without sources no key is needed."""

    def __init__(self, sources: Sequence[str] = (), redis: str | None = None) -> None:
        """Reads the files. Raises ConfigError if one is invalid.

        Args:
            sources: Paths of files, and REDIS_SOURCE.
            redis: URL of the Redis of the index.
        """
        self._files = [KeyFile(Path(source)) for source in sources if source != REDIS_SOURCE]
        self._versions = [file.version() for file in self._files]
        self._of_files = [file.read() for file in self._files]
        self._hash: RedisKeyStore | None = None
        self._of_hash: list[ApiKey] | None = None  # None until Redis has answered
        if REDIS_SOURCE in sources:
            if redis is None:
                raise ConfigError("api_keys: the source 'redis' needs --redis URL", field="api_keys")
            self._hash = RedisKeyStore(redis)
        #: The valid keys; replaced when a source has changed.
        self.current = KeySet()
        self._tasks: list[asyncio.Task[None]] = []
        self._errors: dict[str, str] = {}  # last logged error of each source that cannot be read
        self._rebuild()

    async def start(self) -> None:
        """Reads the keys in Redis, and starts to look for changes."""
        loop = asyncio.get_running_loop()
        if self._files:
            self._tasks.append(loop.create_task(self._watch_files()))
        if self._hash is not None:
            await self._read_redis(self._hash)
            self._tasks.append(loop.create_task(self._watch_hash(self._hash)))

    async def stop(self) -> None:
        """Stops looking for changes."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._hash is not None:
            await self._hash.close()

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILE_PERIOD_S)
            for i, file in enumerate(self._files):
                version = file.version()
                if version == self._versions[i]:
                    continue
                try:
                    self._of_files[i] = file.read()
                except ConfigError as e:
                    self._log_failure(str(file.path), e)
                    continue
                self._versions[i] = version
                self._on_read(str(file.path), self._of_files[i])

    async def _watch_hash(self, source: RedisKeyStore) -> None:
        while True:
            await asyncio.sleep(REDIS_PERIOD_S)
            await self._read_redis(source)

    async def _read_redis(self, source: RedisKeyStore) -> None:
        try:
            records = await source.read()
        except BatonError as e:
            self._log_failure(REDIS_SOURCE, e)
            return
        changed, self._of_hash = records != self._of_hash, records
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
            itertools.chain(*self._of_files, self._of_hash or ()),
            anonymous=not self._files and self._hash is None,
            complete=self._hash is None or self._of_hash is not None,
        )
